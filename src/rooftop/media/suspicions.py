"""Decide whether packets that a demuxer marks as corrupt are really damaged.

A transport stream numbers its packets. A break in the numbers means lost data, or files that were joined without loss.
To tell the two apart, a separate decoder with strict error checks decodes the packets up to the second key frame after
the break. Decoding starts at the last key frame before the break, so the packets since that key frame are kept. An
entirely lost picture leaves no packet to check, only a gap in the decoding times before a picture that is not a key
frame.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rooftop.media.opening import said
from rooftop.media.pyav import load_av

if TYPE_CHECKING:
    from rooftop.media.pyav import av

    Packet = av.Packet[av.VideoStream]

DAMAGED = "a packet is damaged or incomplete"
_MOST_KEPT = 1000  # maximum number of packets kept from a key frame on; with more, all of them are dropped
_MOST_AHEAD = 2000  # maximum number of packets read after a suspicious packet, and including it
_KEY_FRAMES = 2  # number of key frames to read after a suspicious packet


class Suspicions:
    """Checks the packets of a video stream that the demuxer marks as corrupt.

    Args:
        context: FFmpeg's codec context of the stream.
        looked_into: whether to decode marked packets to check them. If False, all marked packets count as damaged.
        step: usual ticks from one picture to the next.
        options: options of the decoder.

    Attributes:
        places: number of packets that the demuxer has marked as corrupt.
    """

    def __init__(self, context: av.VideoCodecContext, looked_into: bool, step: int, options: dict[str, str]) -> None:
        self.places = 0
        self._context, self._looked_into, self._step, self._options = context, looked_into, step, options

    def checked(self, packets: Iterator[Packet]) -> Iterator[tuple[Packet, str | None]]:
        """Yield each packet with the reason why it is damaged, or None. An error of `packets` is raised after all
        earlier packets."""
        kept: list[Packet] = []  # packets from the last key frame on; empty if that key frame is too far back
        for packet in packets:
            if not packet.is_corrupt or not self._looked_into:
                self.places += packet.is_corrupt
                if self._looked_into:
                    _keep(kept, packet)
                yield packet, DAMAGED if packet.is_corrupt else None
                continue
            ahead = [packet]
            failure: Exception | None = None
            try:
                self._read_ahead(ahead, packets)
            except Exception as error:
                failure = error
            self.places += sum(each.is_corrupt for each in ahead)
            wrong = self._wrong(kept, ahead)
            for each in ahead:
                _keep(kept, each)
                yield each, wrong.get(id(each))
            if failure is not None:
                raise failure

    def _read_ahead(self, ahead: list[Packet], packets: Iterator[Packet]) -> None:
        """Append packets to `ahead`, up to and including the second key frame after the last packet that is marked as
        corrupt, or until `ahead` has `_MOST_AHEAD` packets."""
        keys = 0
        while keys < _KEY_FRAMES and len(ahead) < _MOST_AHEAD and (packet := next(packets, None)) is not None:
            ahead.append(packet)
            keys = 0 if packet.is_corrupt else keys + packet.is_keyframe

    def _wrong(self, before: list[Packet], ahead: list[Packet]) -> dict[int, str]:
        """Decode the packets `before` and `ahead` with strict error checks, to find the damaged packets among `ahead`.
        Return a dict from id(packet) to the reason why the packet is damaged."""
        if not before and not ahead[0].is_keyframe:
            return {id(each): DAMAGED for each in ahead if each.is_corrupt}
        av = load_av()
        strict = av.CodecContext.create(self._context.codec.name, "r")
        strict.extradata = self._context.extradata
        strict.options = {**self._options, "err_detect": "explode"}
        strict.thread_type, strict.thread_count = "NONE", 1
        wrong: dict[int, str] = {}
        shown: set[int | None] = set()
        last = None
        for packet in (*before, *ahead, None):
            try:
                shown.update(frame.pts for frame in strict.decode(packet))
            except (av.FFmpegError, ValueError) as error:
                if packet is not None:
                    wrong[id(packet)] = f"{DAMAGED} ({said(error)})"
            if packet is not None and packet.dts is not None:
                gap = 0 if last is None else packet.dts - last
                if not packet.is_keyframe and last is not None and not 0 < gap < 2 * self._step:
                    wrong[id(packet)] = "pictures are missing before it"
                last = packet.dts
        for packet in ahead:
            if packet.pts not in shown and not packet.is_discard:
                wrong.setdefault(id(packet), DAMAGED)
        return {number: why for number, why in wrong.items() if number in {id(each) for each in ahead}}


def _keep(kept: list[Packet], packet: Packet) -> None:
    if packet.is_keyframe:
        kept[:] = [packet]
    elif kept and len(kept) < _MOST_KEPT:
        kept.append(packet)
    else:
        kept.clear()
