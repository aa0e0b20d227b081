"""Decode a video file with FFmpeg on the CPU or with a GPU's NVDEC: packets, frames and their times.

A file is read incrementally while it is decoded.
"""

from __future__ import annotations

import gc
import os
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import closing, nullcontext, suppress
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING

import torch

from rooftop.errors import InputError
from rooftop.media.file_ends import declared_end, is_webp
from rooftop.media.frame_tensors import display_matrix
from rooftop.media.nvdec import NoNvdecError
from rooftop.media.nvdec_decoders import Kind, given_back, kind_of, says_otherwise, taken
from rooftop.media.opening import Source, open_input, said, seconds_of
from rooftop.media.pyav import load_av
from rooftop.media.suspicions import Suspicions

if TYPE_CHECKING:
    from rooftop.media.pyav import av

# Maximum pixels of one frame: a header of a few bytes may claim any size. 16K (15360 x 8640) fits.
MAX_PIXELS = 1 << 27

DECODING_CLOCKS = ("asf", "mxf", "nsv")
"""Formats that may store only the time at which a packet is decoded. For some codecs (MPEG-4 in ASF, MPEG-2 in MXF),
FFmpeg derives the time at which the frame is shown. For other codecs (H.264), FFmpeg derives a wrong time.
"""
# Number of packets whose times `_only_decoding_clock` checks. This is enough: H.264 reorders within at most 16 frames.
SAMPLED = 100

KEY_FRAMES_ONLY = frozenset(
    ["mjpeg", "png", "ffv1", "prores", "dnxhd", "huffyuv", "ffvhuff", "utvideo", "rawvideo", "v210", "jpeg2000"]
)
"""Codecs whose frames do not depend on each other. So in an AVI file, which has no times, the position
of a packet is the position of its frame.
"""

ONE_FRAME_A_PACKET = KEY_FRAMES_ONLY | {"h264", "hevc", "vvc", "vp9", "av1", "gif", "webp", "qtrle"}
"""Codecs in which each packet contains exactly one displayed frame. For other codecs, the index is built by decoding
the file once: VP8 has frames that are never shown, and MPEG-4 can have two frames in a packet."""
MOST_THREADS = 17  # FFmpeg decodes at most this many frames at the same time

MOST_DOUBTS = 3  # after this many errors, one thread decodes the rest

# Codecs in which at most one decoded frame waits for frames that are shown earlier.
ONE_WAITS = ("mpeg1video", "mpeg2video", "mpeg4")
UNMARKED = ("gif",)  # codecs for which some containers do not mark the first packet as a key frame

WHOLE_PICTURES = (0, 1, 5)  # AVPictureType: unknown, I, SI
_SLACK_S = Fraction(1, 1000)  # a Matroska file may state that its video ends this much later than the whole file

MOST_FPS = 1000  # a stated rate above this number is not the frame rate if it equals the rate of the file's clock

NO_TIMESTAMPS = 0x80  # AVFMT_NOTIMESTAMPS, for formats that contain only the codec's packets


class Broken(Exception):
    """Internal error: a frame of the video cannot be decoded, or the file ends too early. `pts` is the tick of that
    frame, if known.

    `damaged_frame`: whether the decoder returned the damaged frame itself, after all frames that are shown before it.
    """

    def __init__(self, reason: str, pts: int | None = None, *, damaged_frame: bool = False) -> None:
        super().__init__(reason)
        self.pts = pts
        self.damaged_frame = damaged_frame


class Doubted(Broken):
    """Internal error: decoding with several threads met an error that FFmpeg may conceal when it uses one thread. The
    frames have to be decoded again with one thread, whose result counts.
    """


class Misled(Broken):
    """Internal error: after a seek in the file, the first key frame is later than the requested key frame."""


class Unclean(Broken):
    """Internal error: a key frame cannot be decoded completely without earlier frames, as in streams that refresh the
    picture gradually."""


class Decoder:
    """Decodes the first video stream of a source to FFmpeg's frames, in one pass that begins at the start or after a
    `seek`. `to_tensor` converts these frames to tensors.

    Args:
        source: the source to read.
        device: the GPU whose NVDEC decodes; None: the CPU.
        threads: whether the CPU decodes several frames in parallel.

    Raises:
        InputError: FFmpeg cannot read the source, or there is no video in it.
        NoNvdecError: NVDEC does not support the codec, or FFmpeg cannot reach the GPU.
        MissingExtraError: PyAV is not installed.
    """

    def __init__(self, source: Source, device: torch.device | None = None, threads: bool = True) -> None:
        self.source, self.device, self.threads = source, device, threads and device is None
        self.av = load_av()
        self.kind: Kind | None = None  # the settings of the NVDEC decoder
        self.context: av.VideoCodecContext | None = None
        self._reusable = True  # whether another pass can reuse the NVDEC decoder
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
            if is_webp(self._file):
                raise InputError(
                    f"{self.source.name} is a WebP picture, which FFmpeg does not decode as a video. Convert it "
                    'with Pillow: Image.open(path).save("frames.png", save_all=True)'
                ) from error
            raise InputError(
                f"{self.source.name} is not a video that FFmpeg can read ({why}): expected a complete file in one "
                "of FFmpeg's formats, such as MP4, Matroska or AVI. An MP4 that was cut off lacks its index, "
                "which is at its end"
            ) from error
        pictures = self.av.stream.Disposition.attached_pic
        videos = [each for each in self.container.streams.video if not each.disposition & pictures]
        if not videos:
            others = ", ".join(f"{each.type}" for each in self.container.streams) or "nothing"
            self.container.close()
            raise InputError(f"{self.source.name} has no video, only {others}: expected a file with a video stream")
        # In an AVIF sequence, the cover is a separate stream.
        sequence = self.container.metadata.get("major_brand") == "avis"
        self.stream: av.video.stream.VideoStream = max(videos, key=lambda each: each.frames) if sequence else videos[0]
        context = self.stream.codec_context
        if context is None:
            self.container.close()
            raise InputError(f"{self.source.name} contains video in a codec that this FFmpeg cannot decode: convert it")
        options = {"max_pixels": str(MAX_PIXELS)}
        if self.device is None:
            self.context = context
            context.options = options
            if self.threads:
                context.thread_type = "AUTO"
                # One thread may return a frame before another thread marks it as damaged. With "explode", FFmpeg raises
                # an error before it returns the frame.
                context.options = {**options, "err_detect": "explode"}
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
        # Read the rate now: FFmpeg guesses the rate from memory that is freed with the container, and PyAV does not
        # check that.
        rates = (self.stream.average_rate, self.stream.guessed_rate, self.stream.base_rate)
        known = [rate for rate in rates if rate and rate > 0]
        # raw DV states one frame per tick of its clock (60,000 a second), which is not its rate
        likely = [rate for rate in known if rate <= MOST_FPS or rate * self.time_base < 1]
        self._rate: Fraction | None = next(iter(likely or known), None)
        form = self.container.format
        self.is_stream = "mpegts" in form.name
        self.suspicions = Suspicions(self.stream.codec_context, self.is_stream, usual_duration(self), options)
        start = self.container.start_time
        # PyAV returns the container's start time in microseconds.
        self.start_ticks = round(Fraction(start, 1_000_000) / self.time_base) if start is not None else 0
        raw = bool(int(form.flags) & NO_TIMESTAMPS)
        self._by_places = context.name not in KEY_FRAMES_ONLY and ("avi" in form.name or self._only_decoding_clock())
        self.clocked = not raw and not self._by_places
        # The number of frames in the header helps to detect a file that was cut off.
        self._entries = len(self.stream.index_entries) if "mp4" in form.name else 0
        self._entries = self.stream.frames if "avi" in form.name else self._entries
        self._end = self._end_of_track()
        self._first_place = self.start_ticks  # tick of the first frame, if packets have positions but no times
        self._whole = True  # no seek yet, so packets can be counted
        self._keys: list[int] = []  # ticks of key frames that were sent to the decoder
        # whether a frame's time was missing or not later than its predecessor's; packets then have other ticks than
        # frames
        self._went_back = False
        self._missing = False  # whether the decoder returned no frame for some of the last packets

    def _end_of_track(self) -> int | None:
        """The tick at which the last frame ends, as an MP4 or Matroska file states it. None if the file does not state
        this tick, or states one later than the end of the container."""
        name, stream = self.container.format.name, self.stream
        if "mp4" in name:  # in MP4, a packet's duration is the time until the next packet is decoded
            return None if not stream.duration or stream.start_time is None else stream.start_time + stream.duration
        if "matroska" not in name or not self.container.duration:
            return None
        end_s = seconds_of(stream.metadata.get("DURATION"))
        if end_s is None or end_s > Fraction(self.container.duration, 1_000_000) + _SLACK_S:
            return None
        return round(end_s / self.time_base)

    def _only_decoding_clock(self) -> bool:
        """Whether this file tells FFmpeg only when packets are decoded, not when frames are shown (see
        `DECODING_CLOCKS`)."""
        if self.container.format.name not in DECODING_CLOCKS:
            return False
        if self.source.only_decoding_clock is None:
            times: list[tuple[int | None, int | None]] = []
            with self.source.open() as file, open_input(file) as container, suppress(self.av.FFmpegError):
                packets = islice(container.demux(container.streams[self.stream.index]), SAMPLED)
                times.extend((packet.dts, packet.pts) for packet in packets if packet.size)
            shown = [pts for _, pts in times if pts is not None]
            shown_as_decoded = all(dts == pts for dts, pts in times) and not self.stream.codec_context.has_b_frames
            self.source.only_decoding_clock = shown == sorted(shown) and not shown_as_decoded
        return self.source.only_decoding_clock

    def close(self) -> None:
        self._let_go()
        self.container.close()
        self._file.close()

    def __del__(self) -> None:
        """Close the file and release the GPU if `close` was not called."""
        if hasattr(self, "_file") and not sys.is_finalizing():
            self._let_go()
            self._file.close()

    def _let_go(self) -> None:
        context, self.context = self.context, None
        if context is not None and self.kind is not None and self._reusable:
            given_back(self.kind, context, self._process)

    def rate(self) -> Fraction | None:
        """The video's frame rate in frames per second, from the file's header; None if unknown. This method also works
        after `close`."""
        return self._rate

    def last_duration(self, pts: int, given: int | None, damaged: bool) -> int:
        """The duration of the video's last frame in ticks: the duration of the frame's packet or, if longer, the time
        until the end that the file states.

        This method also works after `close`.

        Args:
            pts: tick of the last frame.
            given: duration of the frame's packet in ticks; None: unknown.
            damaged: whether the file is damaged, so that the end that it states does not count.
        """
        ticks = given or usual_duration(self)
        return ticks if damaged or self._end is None else max(ticks, self._end - pts)

    def seconds(self, ticks: int) -> float:
        """Convert a tick of the video to seconds. Second 0 is the earliest start of any stream in the file."""
        return float((ticks - self.start_ticks) * self.time_base)

    def packets(self) -> Iterator[av.Packet[av.VideoStream]]:
        """Yield the packets of the video stream from the current position in the file on, in file order. If the file
        ends too early, raise `Broken` after the last packet."""
        count, end, places = 0, None, 0
        is_avi, usual = "avi" in self.container.format.name, usual_duration(self)
        demuxed = self.container.demux(self.stream)
        while True:
            if self._file.closed:
                raise Broken("the file is closed")
            try:
                packet = next(demuxed, None)
            except self.av.FFmpegError as error:
                raise Broken(f"the rest of the file cannot be read: {said(error)}") from error
            if packet is None or (packet.size == 0 and packet.dts is None):  # an empty packet only drains the decoder
                break
            count += 1
            if is_avi and packet.dts is not None:
                # In an AVI file, a tick is the position of the packet's chunk. A chunk without bytes repeats a frame,
                # and the demuxer returns no packet for it.
                places = max(places, packet.dts // usual + 1)
            if packet.pts is not None:
                end = max(end or packet.pts, packet.pts + (packet.duration or 0))
            yield packet
        count = max(count, places)
        self._check_end(count if self._whole else None, end)

    def _check_end(self, count: int | None, end: int | None) -> None:
        """Raise `Broken` if the file is incomplete. AVI, Matroska, ASF and MXF files may state their size in bytes. For
        MP4 files, and AVI files that state no size, the number of frames is compared with the number in the header.

        Args:
            count: number of frames that were read from the file's start on; None: unknown, after a seek.
            end: tick at which the last frame that was read ends; None: unknown.
        """
        size = self.source.size_bytes
        declared = declared_end(self._file, self.container.format.name, size)
        few = count is not None and count < self._entries
        if few and (declared is None or declared > size):
            raise Broken(f"the file ends after {count} of {self._entries} frames")
        if declared is not None and declared > size:
            until = "" if end is None else f", at {self.seconds(end):.3f} s"
            raise Broken(f"the file ends after {size:,} of {declared:,} bytes{until}")

    def seek(self, pts: int) -> None:
        """Move to a position in the file at or before the packet of the key frame at tick `pts`. Decoding starts again
        there. In some files, the seek leads to a later packet (see `Misled`).

        Raises:
            Broken: the format does not support seeks.
        """
        try:
            self.container.seek(pts, stream=self.stream)
        except self.av.FFmpegError as error:
            raise Broken(f"FFmpeg cannot seek in this file: {said(error)}") from error
        if self.context is not None:
            self.context.flush_buffers()
        self._whole = False

    def frames(self, start: int | None = None, doubts: int = 0) -> Iterator[tuple[int, av.VideoFrame]]:
        """Yield (tick, frame) in display order, from the next key frame on.

        If packets lack the times at which frames are shown, raw streams get times from the frame rate. In AVI, ASF and
        MXF files with reordered frames, a frame's time is the decoding time of the packet after which the decoder
        returned it, minus the decoder's constant delay.

        Args:
            start: after a seek, the tick of the requested key frame. Frames shown before that key frame are skipped,
                because they depend on frames before the key frame.
            doubts: number of errors that multithreaded decoding has already met in this pass.

        Raises:
            Misled: the seek led to a later key frame.
            Unclean: the seek led to a key frame that is incomplete by itself.
            Broken: a packet or a frame is damaged, or the file ends early. All frames that are shown before the damaged
                one were returned.
        """
        last: int | None = None
        try:
            for pts, frame in self._timed(start):
                last = pts
                yield pts, frame
        except (Misled, Unclean):
            raise
        except Doubted:
            yield from self._judged(start, last, doubts)
            return
        except Broken:
            if self.threads and self.clocked:
                with suppress(Broken):  # the second decoding fails at the same frame
                    yield from self._once_more(start, last)
            raise
        if self.threads and self._missing:
            yield from self._once_more(start, last)

    def _judged(self, start: int | None, last: int | None, doubts: int) -> Iterator[tuple[int, av.VideoFrame]]:
        """Decode the frames after tick `last`, after an error of the multithreaded decoder. Yield (tick, frame).

        One thread decodes up to the next key frame after the error, because its result does not depend on timing.
        Several threads decode from that key frame on. `start` and `doubts` are as in `frames`, `last` is as in
        `_once_more`.
        """
        resumable = self.clocked and doubts < MOST_DOUBTS
        after = self._keys[-1] if self._keys and resumable else None
        key = None
        for pts, frame in self._once_more(start, last):
            if after is not None and frame.key_frame and pts > after:
                key = pts
                break
            last = pts
            yield pts, frame
        if key is not None:
            with closing(Decoder(self.source)) as another:
                try:
                    another.seek(key)
                    for pts, frame in another.frames(key, doubts + 1):
                        last = pts
                        yield pts, frame
                except (Misled, Unclean):
                    yield from self._once_more(start, last)
        if start is None:  # a pass after a seek cannot count packets
            self._count_packets()

    def _count_packets(self) -> None:
        """Read all packets of the file again, without decoding them. Raise `Broken` if the file cannot be read to its
        end, or is incomplete according to `_check_end`."""
        with closing(Decoder(self.source)) as decoder:
            deque(decoder.packets(), maxlen=0)

    def _once_more(self, start: int | None, last: int | None) -> Iterator[tuple[int, av.VideoFrame]]:
        """Decode again, with one thread, the frames after tick `last`. Yield (tick, frame) until the end of the video.

        At the end of a file, a multithreaded decoder silently drops frames that it has begun. A single-threaded
        decoder, started again at a key frame, loses no frames.

        Args:
            start: as in `frames`.
            last: tick of the last frame that was already returned; None: no frame was returned.

        Raises:
            Broken: as in `frames`.
        """
        # a seek needs unique ticks; if the clock went back, several frames may have the same tick
        searchable = self.clocked and not self._went_back and not self.suspicions.places
        keys = self._keys[1:] if searchable else []
        before = [key for key in keys if last is not None and key <= last]
        for key in dict.fromkeys((max(before, default=start), start)):
            # after these errors, retry from an earlier key frame
            with suppress(Misled, Unclean), closing(Decoder(self.source, threads=False)) as slow:
                if key is not None:
                    slow.seek(key)
                for pts, frame in slow._timed(key):
                    if last is None or pts > last:
                        yield pts, frame
                        last = pts
                return

    def _timed(self, start: int | None) -> Iterator[tuple[int, av.VideoFrame]]:
        step = usual_duration(self)
        last: int | None = None
        waiting: int | None = None  # ticks from a packet's arrival in the decoder to the return of its frame
        for frame in self._decoded(start):
            pts = frame.pts
            if self._by_places and frame.dts is not None:
                # `frame.dts` is the position of the packet after which the decoder returned the frame. After the first
                # frame, a constant number of frames waits in the decoder. So the position of the frame's own packet is
                # earlier by that number.
                waiting = frame.dts - self._first_place if waiting is None else waiting
                place = frame.dts - waiting
                if last is None or place > last:
                    last = place
                    yield place, frame
                    continue
            if start is not None and last is None and frame.pict_type not in WHOLE_PICTURES:
                raise Unclean("decoding cannot start here", pts)
            if not self.clocked or pts is None or (last is not None and pts <= last):
                self._went_back = self.clocked
                pts = self.start_ticks if last is None else last + step
            last = pts
            yield pts, frame

    def _decoded(self, start: int | None) -> Iterator[av.VideoFrame]:
        first: int | None = None
        started, sought = False, start is not None
        # ticks of packets whose frames the decoder has not returned yet, since it runs several threads
        pending: set[int] = set()
        given = returned = 0
        try:
            for packet, damage in self.suspicions.checked(self.packets()):
                if not started:
                    if not self.begins(packet):
                        continue
                    if start is not None and (packet.pts is None or packet.pts > start):
                        raise Misled("the seek led to a later key frame", packet.pts)
                    started, first = True, packet.pts
                    self._first_place = self.start_ticks if packet.dts is None else max(packet.dts, self.start_ticks)
                if packet.pts is not None:
                    pending.add(packet.pts)
                    if packet.is_keyframe:
                        self._keys.append(packet.pts)
                if damage is not None:
                    raise Broken(damage, packet.pts)
                if self.kind is not None and self._reusable:
                    self._reusable = not (
                        packet.has_sidedata("new_extradata") or says_otherwise(bytes(packet), self.kind)
                    )
                given += 1
                try:
                    frames = self._decode(packet)
                except (self.av.FFmpegError, ValueError) as error:
                    broken = Doubted if self.threads else Broken
                    raise broken(f"a frame cannot be decoded ({said(error)})", packet.pts) from error
                for frame in _good(frames, first, sought):
                    returned += 1
                    if frame.pts is not None:
                        pending = {tick for tick in pending if tick > frame.pts}
                    yield frame
            if not started:
                nothing = "there is no key frame at which decoding could start"
                raise Broken(nothing) if start is None else Misled(nothing)
        except Broken as broken:
            if started and not broken.damaged_frame and not isinstance(broken, Doubted):
                with suppress(Broken):
                    yield from self._before_damage(pending, first, sought)
            raise
        for frame in self._rest(first, sought):
            pending.discard(frame.pts or 0)
            returned += 1
            yield frame
        if self.clocked:
            self._missing = any(first is None or tick >= first for tick in pending)
        else:  # the decoder owes one frame per packet; its threads may have dropped some at the end
            counted = self.stream.codec_context.codec.canonical_name in ONE_FRAME_A_PACKET
            self._missing = counted and 0 < given - returned <= MOST_THREADS

    def begins(self, packet: av.Packet[av.VideoStream]) -> bool:
        """Whether decoding can begin with a packet: it contains a key frame, or it is the first packet of the file and
        of a codec for which some containers do not mark the first packet as a key frame (`UNMARKED`).
        """
        return packet.is_keyframe or (self._whole and self.stream.codec_context.name in UNMARKED)

    def _decode(self, packet: av.Packet[av.VideoStream] | None) -> list[av.VideoFrame]:
        if self.context is None:
            raise Broken("its decoder is closed")
        try:
            frames = self.context.decode(packet)
        except BaseException:
            self._reusable = False
            raise
        # A decoder keeps a rotation that it read from the pictures' own data, so this decoder must not be reused.
        if self.kind is not None and any(display_matrix(frame) is not None for frame in frames):
            self._reusable = False
        return frames

    def _rest(self, first: int | None, sought: bool) -> Iterator[av.VideoFrame]:
        """Yield the frames that the decoder still holds after the last packet. For the arguments see `_good`."""
        try:
            rest = self._decode(None)
        except (self.av.FFmpegError, ValueError) as error:
            broken = Doubted if self.threads else Broken
            raise broken(f"the last frames cannot be decoded ({said(error)})") from error
        yield from _good(rest, first, sought)

    def _before_damage(self, pending: set[int], first: int | None, sought: bool) -> Iterator[av.VideoFrame]:
        """Yield the frames that the decoder still holds when it reports an error, and that are shown before the first
        missing frame. The decoder may report an error some packets after its cause.

        `pending` has the ticks of the packets whose frames the decoder has not returned. For the other arguments see
        `_good`.

        If packets have no times, a frame after lost frames would get the time of a lost frame. In this case, all frames
        that are still in the decoder are dropped; for the codecs of `ONE_WAITS`, only the last of them.
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


# FFmpeg's decoders and encoders run threads that do not exist in a forked process, so freeing a decoder there would
# wait for them forever. PyAV's objects are in reference cycles, so only the garbage collector frees them. After
# `gc.freeze`, the garbage collector skips all objects from before the fork.
os.register_at_fork(after_in_child=gc.freeze)


def _good(frames: list[av.VideoFrame], first: int | None, sought: bool) -> Iterator[av.VideoFrame]:
    """Yield the frames, and raise `Broken` at a damaged frame. Frames that are shown before the first decoded key frame
    may depend on frames that were not decoded. All of these are skipped after a seek; otherwise only the damaged ones
    are.

    Args:
        frames: the frames that the decoder returned.
        first: tick of the key frame at which decoding began; None: unknown.
        sought: whether decoding began after a seek.
    """
    for frame in frames:
        early = first is not None and frame.pts is not None and frame.pts < first
        if early and (sought or frame.is_corrupt):
            continue
        if frame.is_corrupt:
            raise Broken("a frame is damaged", frame.pts, damaged_frame=True)
        yield frame


def usual_duration(decoder: Decoder) -> int:
    """Duration of one frame of the video in ticks, computed from its frame rate (25 if unknown); at least 1."""
    return max(1, round(1 / (decoder.rate() or Fraction(25)) / decoder.time_base))
