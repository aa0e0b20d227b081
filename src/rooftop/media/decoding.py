"""A video file, decoded by FFmpeg on the CPU or by a GPU's NVDEC: packets, frames, and the index of both.

A file is read as it is decoded, never whole.
"""

from __future__ import annotations

import gc
import os
import sys
from array import array
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from rooftop.errors import InputError
from rooftop.media.frame_index import FrameIndex
from rooftop.media.frame_tensors import display_matrix
from rooftop.media.nvdec import NoNvdecError
from rooftop.media.nvdec_decoders import Kind, given_back, kind_of, says_otherwise, taken
from rooftop.media.opening import Source, open_input, said
from rooftop.media.pyav import load_av

if TYPE_CHECKING:
    from rooftop.media.pyav import av

MAX_PIXELS = 1 << 27  # of one frame: 16K (15360 x 8640) fits. A header of a few bytes may claim any size

KEY_FRAMES_ONLY = frozenset(
    ["mjpeg", "png", "ffv1", "prores", "dnxhd", "huffyuv", "ffvhuff", "utvideo", "rawvideo", "v210", "jpeg2000"]
)
"""Codecs whose frames do not depend on each other: in an AVI file, which has no times, each has its place."""

ONE_WAITS = ("mpeg1video", "mpeg2video", "mpeg4")  # in these at most one frame waits for others to be shown before it
ONE_FRAME_A_PACKET = KEY_FRAMES_ONLY | {"h264", "hevc", "vvc", "vp9", "av1", "gif", "webp", "qtrle"}
"""Codecs whose packets are shown as one frame each. Others (VP8 has frames that are never shown, MPEG-4 two frames in
one packet) are indexed by decoding them once."""

WHOLE_PICTURES = (0, 1, 5)  # AVPictureType: not told, I, SI
NO_TIMESTAMPS = 0x80  # AVFMT_NOTIMESTAMPS, of formats that are nothing but the codec's packets


class Broken(Exception):
    """Inside this package: a place that cannot be decoded; `pts` where it is known.

    `damaged_frame`: it came out of the decoder, after all frames that are shown before it.
    """

    def __init__(self, reason: str, pts: int | None = None, *, damaged_frame: bool = False) -> None:
        super().__init__(reason)
        self.pts = pts
        self.damaged_frame = damaged_frame


class Misled(Broken):
    """Inside this package: a seek that led to a key frame too late."""


class Unclean(Broken):
    """Inside this package: a key frame that is not whole by itself, as where a picture is refreshed bit by bit."""


class Decoder:
    """One pass over the first video of a source. Its frames are FFmpeg's; `to_tensor` makes tensors of them.

    Args:
        source: what is read.
        device: the GPU whose NVDEC decodes; None: the CPU.
        threads: whether the CPU decodes several frames at once.

    Raises:
        InputError: FFmpeg cannot read the source, or there is no video in it.
        NoNvdecError: NVDEC has no such codec, or FFmpeg cannot reach the GPU.
        MissingExtraError: PyAV is not installed.
    """

    def __init__(self, source: Source, device: torch.device | None = None, threads: bool = True) -> None:
        self.source, self.device, self.threads = source, device, threads and device is None
        self.av = load_av()
        self.kind: Kind | None = None  # of NVDEC's decoder
        self.context: av.VideoCodecContext | None = None
        self._sound = True  # whether others can have that decoder
        self._process = os.getpid()
        self._file = source.open()
        try:
            with nullcontext() if device is None else torch.cuda.device(device):
                self._open()
        except BaseException:
            self._file.close()
            raise

    def _open(self) -> None:
        try:
            self.container = open_input(self._file)
        except (self.av.FFmpegError, OSError, ValueError, RuntimeError) as error:  # UnicodeError is a ValueError
            why = "not the format of a video file" if isinstance(error, self.av.ArgumentError) else said(error)
            raise InputError(
                f"{self.source.name} is no video that FFmpeg can read ({why}): expected a whole file of MP4, "
                "Matroska, AVI or another of its formats. An MP4 that was cut off has lost its index, which is its end"
            ) from error
        pictures = self.av.stream.Disposition.attached_pic
        videos = [each for each in self.container.streams.video if not each.disposition & pictures]
        if not videos:
            others = ", ".join(f"{each.type}" for each in self.container.streams) or "nothing"
            self.container.close()
            raise InputError(f"{self.source.name} has no video, only {others}: expected a file with a video stream")
        self.stream: av.video.stream.VideoStream = videos[0]
        context = self.stream.codec_context
        if context is None:
            self.container.close()
            raise InputError(f"{self.source.name} holds video of a codec that this FFmpeg cannot decode: convert it")
        options = {"max_pixels": str(MAX_PIXELS)}
        if self.device is None:
            self.context = context
            context.options = options
            if self.threads:
                context.thread_type = "AUTO"
            else:
                context.thread_type, context.thread_count = "NONE", 1
        else:
            self.kind = kind_of(context, self.device)
            try:
                self.context = taken(self.kind, options)
            except NoNvdecError:
                self.container.close()
                raise
        self.time_base: Fraction = self.stream.time_base or Fraction(1, 90000)
        # FFmpeg guesses it from memory that is freed with the container, and PyAV does not look whether it is.
        rate = self.stream.average_rate or self.stream.guessed_rate or self.stream.base_rate
        self._rate: Fraction | None = rate if rate and rate > 0 else None
        start = self.container.start_time
        # PyAV gives it in microseconds.
        self.start_ticks = round(Fraction(start, 1_000_000) / self.time_base) if start is not None else 0
        form = self.container.format
        raw = bool(int(form.flags) & NO_TIMESTAMPS)
        self.clocked = not raw and not ("avi" in form.name and context.name not in KEY_FRAMES_ONLY)
        # What the file says of its length, to know whether it is all there.
        self._entries = len(self.stream.index_entries) if "mp4" in form.name else 0
        self._entries = self.stream.frames if "avi" in form.name else self._entries
        self._whole = True  # no seek yet: packets can be counted
        self._keys: list[int] = []  # ticks of key frames that went into the decoder
        self._missing = False  # whether packets, at the end, have given no frame

    def close(self) -> None:
        self._let_go()
        self.container.close()
        self._file.close()

    def __del__(self) -> None:
        """A reader that is dropped lets go of its file, and of the GPU."""
        if hasattr(self, "_file") and not sys.is_finalizing():
            self._let_go()
            self._file.close()

    def _let_go(self) -> None:
        context, self.context = self.context, None
        if context is not None and self.kind is not None and self._sound:
            given_back(self.kind, context, self._process)

    def rate(self) -> Fraction | None:
        """Frames a second, of the whole file as its header says it; None if unknown. Also when it is closed."""
        return self._rate

    def seconds(self, ticks: int) -> float:
        """On the clock of the file, which starts with the first of its streams."""
        return float((ticks - self.start_ticks) * self.time_base)

    def packets(self) -> Iterator[av.Packet[av.VideoStream]]:
        """Packets of the video from here on, in the order of the file; then `Broken` if the file ends too early."""
        count, end, places = 0, None, 0
        is_avi, usual = "avi" in self.container.format.name, usual_duration(self)
        demuxed = self.container.demux(self.stream)
        while True:
            if self._file.closed:
                raise Broken("the file is closed")
            try:
                packet = next(demuxed, None)
            except self.av.FFmpegError as error:
                raise Broken(f"the file cannot be read on: {said(error)}") from error
            if packet is None or (packet.size == 0 and packet.dts is None):  # the last one only drains the decoder
                break
            count += 1
            if is_avi and packet.dts is not None:
                # The place of its chunk. Chunks without bytes repeat a frame, and are no packets.
                places = max(places, packet.dts // usual + 1)
            if packet.pts is not None:
                end = max(end or packet.pts, packet.pts + (packet.duration or 0))
            yield packet
        count = max(count, places)
        self._check_end(count if self._whole else None, end)

    def _check_end(self, count: int | None, end: int | None) -> None:
        """Whether all is there that the header of an MP4, an AVI or a Matroska file names."""
        if count is not None and count < self._entries:
            raise Broken(f"the file ends after {count} of {self._entries} frames")
        said = self.stream.metadata.get("DURATION") if "matroska" in self.container.format.name else None
        if said and end is not None:
            try:
                hours, minutes, seconds = said.split(":")
                whole = int(hours) * 3600 + int(minutes) * 60 + float(seconds)
            except ValueError:
                return
            there = float(end * self.time_base)
            if there + max(0.1, 2 / float(self.rate() or 10)) < whole:
                raise Broken(f"the file ends after {there:.3f} of {whole:.3f} s")

    def seek(self, pts: int) -> None:
        """Go to a packet that comes no later than the key frame at `pts`, if the format can; decoding begins anew.

        Raises:
            Broken: the format cannot.
        """
        try:
            self.container.seek(pts, stream=self.stream)
        except self.av.FFmpegError as error:
            raise Broken(f"no seeking in this file: {said(error)}") from error
        if self.context is not None:
            self.context.flush_buffers()
        self._whole = False

    def frames(self, start: int | None = None) -> Iterator[tuple[int, av.VideoFrame]]:
        """Frames in the order in which they are shown, from the next key frame on, each with its tick.

        Where packets have no times (raw streams, AVI with frames out of order) frames get those of the frame rate.

        Args:
            start: after a seek, the tick of the key frame sought. Frames shown before the key frame to which the seek
                led are left out: they are made from others before it.

        Raises:
            Misled: the seek led to a later key frame.
            Unclean: it led to a frame that is not whole by itself.
            Broken: a packet or a frame is damaged, or the file ends early. All frames before it were given.
        """
        last: int | None = None
        try:
            for pts, frame in self._timed(start):
                last = pts
                yield pts, frame
        except (Misled, Unclean):
            raise
        except Broken:
            if self.threads and self.clocked:
                with suppress(Broken):  # the same once more
                    yield from self._once_more(start, last)
            raise
        if self.threads and self.clocked and self._missing:
            yield from self._once_more(start, last)

    def _once_more(self, start: int | None, last: int | None) -> Iterator[tuple[int, av.VideoFrame]]:
        """Before damage: frames after tick `last` that several threads had begun and let go of, at the end of a file
        without a word. One thread, which goes through them again from a key frame on, loses none.

        Raises:
            Broken: as of `frames`.
        """
        before = [key for key in self._keys[1:] if last is not None and key <= last]
        for key in dict.fromkeys((max(before, default=start), start)):
            slow = Decoder(self.source, threads=False)
            try:
                if key is not None:
                    slow.seek(key)
                for pts, frame in slow._timed(key):
                    if last is None or pts > last:
                        yield pts, frame
                        last = pts
                return
            except (Misled, Unclean):  # then from where it was begun before
                continue
            finally:
                slow.close()

    def _timed(self, start: int | None) -> Iterator[tuple[int, av.VideoFrame]]:
        step = usual_duration(self)
        last: int | None = None
        for frame in self._decoded(start):
            pts = frame.pts
            if start is not None and last is None and frame.pict_type not in WHOLE_PICTURES:
                raise Unclean("decoding cannot start here", pts)
            if not self.clocked or pts is None or (last is not None and pts <= last):
                pts = self.start_ticks if last is None else last + step
            last = pts
            yield pts, frame

    def _decoded(self, start: int | None) -> Iterator[av.VideoFrame]:
        first: int | None = None
        started, sought = False, start is not None
        pending: set[int] = set()  # ticks of packets whose frames have not come out: decoding runs in several threads
        try:
            for packet in self.packets():
                if not started:
                    if not packet.is_keyframe:
                        continue
                    if start is not None and (packet.pts is None or packet.pts > start):
                        raise Misled("the seek led to a later key frame", packet.pts)
                    started, first = True, packet.pts
                if packet.pts is not None:
                    pending.add(packet.pts)
                    if packet.is_keyframe:
                        self._keys.append(packet.pts)
                if packet.is_corrupt:
                    raise Broken("a packet is damaged or incomplete", packet.pts)
                if self.kind is not None and self._sound:
                    self._sound = not (packet.has_sidedata("new_extradata") or says_otherwise(bytes(packet), self.kind))
                try:
                    frames = self._decode(packet)
                except (self.av.FFmpegError, ValueError) as error:
                    raise Broken(f"a frame cannot be decoded ({said(error)})", packet.pts) from error
                for frame in _good(frames, first, sought):
                    if frame.pts is not None:
                        pending = {tick for tick in pending if tick > frame.pts}
                    yield frame
            if not started:
                raise Broken("there is no key frame from which decoding could start")
        except Broken as broken:
            if started and not broken.damaged_frame:
                with suppress(Broken):
                    yield from self._before_damage(pending, first, sought)
            raise
        for frame in self._rest(first, sought):
            pending.discard(frame.pts or 0)
            yield frame
        self._missing = any(first is None or tick >= first for tick in pending)

    def _decode(self, packet: av.Packet[av.VideoStream] | None) -> list[av.VideoFrame]:
        if self.context is None:
            raise Broken("its decoder is closed")
        try:
            frames = self.context.decode(packet)
        except BaseException:
            self._sound = False
            raise
        # What stands in the pictures' own data of how to turn them stays in the decoder.
        if self.kind is not None and any(display_matrix(frame) is not None for frame in frames):
            self._sound = False
        return frames

    def _rest(self, first: int | None, sought: bool) -> Iterator[av.VideoFrame]:
        """The frames that the decoder still holds."""
        try:
            rest = self._decode(None)
        except (self.av.FFmpegError, ValueError) as error:
            raise Broken(f"the last frames cannot be decoded ({said(error)})") from error
        yield from _good(rest, first, sought)

    def _before_damage(self, pending: set[int], first: int | None, sought: bool) -> Iterator[av.VideoFrame]:
        """Of these, those shown before the first one that is missing: the error comes some packets after its cause.

        Where packets have no times, frames are counted: one that waits for others, which are gone, would get the time
        of one of these.
        """
        held: list[av.VideoFrame] = []
        with suppress(Broken):
            held.extend(self._rest(first, sought))
        if not self.clocked:
            held = held[:-1] if self.stream.codec_context.codec.canonical_name in ONE_WAITS else []
        missing = min(pending - {frame.pts for frame in held}, default=None)
        for frame in held:
            if missing is not None and (frame.pts is None or frame.pts >= missing):
                return
            yield frame


# FFmpeg's decoders and encoders run threads, which a forked process has not: to free one there would wait for them for
# ever. PyAV's objects are cycles, which only the garbage collector frees: it leaves alone what was there at the fork.
os.register_at_fork(after_in_child=gc.freeze)


def _good(frames: list[av.VideoFrame], first: int | None, sought: bool) -> Iterator[av.VideoFrame]:
    """Without those shown before the first key frame that lack the frames from which they are made."""
    for frame in frames:
        early = first is not None and frame.pts is not None and frame.pts < first
        if early and (sought or frame.is_corrupt):
            continue
        if frame.is_corrupt:
            raise Broken("a frame is damaged", frame.pts, damaged_frame=True)
        yield frame


def build_index(source: Source) -> FrameIndex:
    """The index of a source: from its packets, without decoding, where these tell all; else decoded once."""
    decoder = Decoder(source)
    try:
        index = _index_by_packets(decoder)
    finally:
        decoder.close()
    if index is not None:
        return index
    decoder = Decoder(source)
    try:
        return _index_by_frames(decoder)
    finally:
        decoder.close()


def _index_by_packets(decoder: Decoder) -> FrameIndex | None:
    """None where packets do not tell: codecs of which a packet may be no frame, or two fields of one."""
    context = decoder.stream.codec_context
    interlaced = int(context.field_order) > 1  # 0 is unknown, 1 progressive
    if not decoder.clocked or context.codec.canonical_name not in ONE_FRAME_A_PACKET or interlaced:
        return None
    shown, starts, last, last_duration = array("q"), array("q"), None, 0
    damage = None
    try:
        for packet in decoder.packets():
            if packet.pts is None:
                return None
            if not starts and not packet.is_keyframe:
                continue
            if packet.is_corrupt:
                damage = damage or "a packet is damaged or incomplete"
                continue
            if packet.is_keyframe:
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
    if pts and pts[0] < starts[0]:  # shown before the first key frame: some need frames that are not there
        there = _shown_before(decoder.source, starts[0])
        pts = array("q", [tick for tick in pts if tick >= starts[0] or tick in there])
    return _index(decoder, pts, last_duration, starts, True, damage)


def _shown_before(source: Source, first: int) -> set[int]:
    """The ticks of the frames that can be decoded and are shown before the first key frame."""
    decoder, there = Decoder(source), set[int]()
    try:
        for pts, _ in decoder.frames():
            if pts >= first:
                break
            there.add(pts)
    except Broken:
        pass
    finally:
        decoder.close()
    return there


def _index_by_frames(decoder: Decoder) -> FrameIndex:
    ticks, starts, damage, last_duration = array("q"), array("q"), None, 0
    seekable = decoder.clocked
    try:
        for pts, frame in decoder.frames():
            seekable = seekable and pts == frame.pts
            ticks.append(pts)
            last_duration = frame.duration or 0
            if frame.key_frame:
                starts.append(pts)
    except Broken as broken:
        damage = str(broken)
    return _index(decoder, ticks, last_duration, starts, seekable, damage)


def _index(
    decoder: Decoder, pts: array[int], last_duration: int, starts: array[int], seekable: bool, damage: str | None
) -> FrameIndex:
    if last_duration <= 0:
        last_duration = usual_duration(decoder)
    starts = array("q", sorted(set(starts)))
    at = set(starts)
    keys = array("q", [position for position, tick in enumerate(pts) if tick in at])
    return FrameIndex(pts, last_duration, starts, keys, seekable, damage)


def usual_duration(decoder: Decoder) -> int:
    """Ticks of one frame by the frame rate, at least 1."""
    return max(1, round(1 / (decoder.rate() or Fraction(25)) / decoder.time_base))
