"""Build the index of a video: from its packets alone if possible, otherwise by decoding the video once."""

from __future__ import annotations

from array import array
from contextlib import closing, suppress
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from rooftop.media.decoding import ONE_FRAME_A_PACKET, Broken, Decoder
from rooftop.media.frame_index import FrameIndex
from rooftop.media.opening import Source

if TYPE_CHECKING:
    from rooftop.media.pyav import av


def build_index(source: Source) -> FrameIndex:
    """Build the index of the video in a source."""
    with closing(Decoder(source)) as decoder:
        index = _index_by_packets(decoder)
    if index is not None:
        return index
    with closing(Decoder(source)) as decoder:
        index = _index_by_frames(decoder)
    # A seek needs unique ticks. If the clock goes back, several frames may have the same tick.
    return replace(index, seekable=False) if index.seekable and _goes_back(source) else index


def _goes_back(source: Source) -> bool:
    """Whether the source is a transport stream whose clock goes back anywhere. Packets are read but not decoded, so
    damaged frames do not end the search."""
    with closing(Decoder(source)) as decoder:
        clock = _Clock(decoder.is_stream)
        try:
            return decoder.is_stream and any(clock.goes_back(packet) for packet in decoder.packets())
        except Broken:
            return False


class _Clock:
    """Checks the clock of packets in file order: decoding times must not decrease, and each key frame must be shown
    after all earlier frames. In a transport stream, decoding times must increase: if the clock goes back, FFmpeg
    repeats the last decoding time."""

    def __init__(self, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._decoded: int | None = None
        self._shown: int | None = None

    def goes_back(self, packet: av.Packet[av.VideoStream]) -> bool:
        """Whether the file's clock goes back at this packet, compared with the packets before it."""
        dts, pts = packet.dts, packet.pts
        found = dts is not None and self._decoded is not None and dts < self._decoded + self._is_stream
        found |= packet.is_keyframe and pts is not None and self._shown is not None and pts <= self._shown
        self._decoded = dts if dts is not None else self._decoded
        self._shown = max(pts, self._shown or pts) if pts is not None else self._shown
        return found


def _index_by_packets(decoder: Decoder) -> FrameIndex | None:
    """Build the index from packets alone. None if packets do not suffice: a packet has no time, the clock goes back,
    two packets have the same time, or a packet of this codec can contain no frame, or only one field of a frame."""
    context = decoder.stream.codec_context
    interlaced = int(context.field_order) > 1  # 0 is unknown, 1 progressive
    if not decoder.clocked or context.codec.canonical_name not in ONE_FRAME_A_PACKET or interlaced:
        return None
    shown, starts, last, last_duration = array("q"), array("q"), None, 0
    damage, clock = None, _Clock(decoder.is_stream)
    try:
        for packet, why in decoder.suspicions.checked(decoder.packets()):
            if packet.pts is None or clock.goes_back(packet):
                return None
            if not starts and not decoder.begins(packet):
                continue
            if why is not None:
                damage = damage or why
                continue
            if packet.is_keyframe or not starts:
                starts.append(packet.pts)
            if not packet.is_discard:
                shown.append(packet.pts)
                if last is None or packet.pts > last:
                    last, last_duration = packet.pts, packet.duration or 0
    except Broken as broken:
        damage = damage or str(broken)
    pts = array("q", sorted(shown))
    if any(a == b for a, b in pairwise(pts)):
        return None
    # frames that are shown before the first key frame may depend on missing frames
    if pts and pts[0] < starts[0]:
        there = _shown_before(decoder.source, starts[0])
        pts = array("q", [tick for tick in pts if tick >= starts[0] or tick in there])
    return replace(_index(decoder, pts, last_duration, starts, True, damage), discontinuity=_breaks(decoder))


def _breaks(decoder: Decoder) -> str | None:
    """Describe the breaks in the packet counters of a transport stream; None without breaks."""
    places = decoder.suspicions.places
    if not places:
        return None
    where = "1 place" if places == 1 else f"{places:,} places"
    return f"packets are not consecutive at {where}: some are lost, or files were joined"


def _shown_before(source: Source, first: int) -> set[int]:
    """The ticks of the frames that can be decoded and are shown before the first key frame."""
    there = set[int]()
    with suppress(Broken), closing(Decoder(source)) as decoder:
        for pts, _ in decoder.frames():
            if pts >= first:
                break
            there.add(pts)
    return there


def _index_by_frames(decoder: Decoder) -> FrameIndex:
    """Build the index by decoding all frames."""
    ticks, starts, damage, last_duration = array("q"), array("q"), None, 0
    seekable, goes_back = decoder.clocked, ""
    try:
        for pts, frame in decoder.frames():
            seekable = seekable and pts == frame.pts
            if decoder.clocked and not goes_back and frame.pts is not None and ticks and frame.pts < ticks[-1]:
                by_s = float((ticks[-1] - frame.pts) * decoder.time_base)
                goes_back = (
                    f"the clock goes back by {by_s:.3f} s after frame {len(ticks) - 1}: later times continue from "
                    "there at the frame rate"
                )
            ticks.append(pts)
            last_duration = frame.duration or 0
            if frame.key_frame:
                starts.append(pts)
    except Broken as broken:
        damage = str(broken)
    said = "; ".join(filter(None, [goes_back, _breaks(decoder)]))
    return replace(_index(decoder, ticks, last_duration, starts, seekable, damage), discontinuity=said or None)


def _index(
    decoder: Decoder, pts: array[int], last_duration: int, starts: array[int], seekable: bool, damage: str | None
) -> FrameIndex:
    last_duration = decoder.last_duration(pts[-1] if pts else 0, last_duration, damaged=damage is not None)
    starts = array("q", sorted(set(starts)))
    at = set(starts)
    keys = array("q", [position for position, tick in enumerate(pts) if tick in at])
    return FrameIndex(pts, last_duration, starts, keys, seekable, damage)
