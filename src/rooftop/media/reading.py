"""`VideoReader`: the frames of a video as tensors, in order or at any position.

Access is exact: the frame at a position or a time has the same bits as the frame that decoding from the beginning
returns. An index of all frames locates the frame. The index is built when it is first needed, in one pass over the
packets of the file. If packets do not suffice, as for the few codecs without exactly one frame per packet, all frames
are decoded. Reading a video from its beginning needs no index, and keeps only a few frames in memory.
"""

from __future__ import annotations

import math
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from fractions import Fraction
from itertools import chain, islice
from operator import index as as_integer
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.media.colours import Colours
from rooftop.media.decoding import Broken, Decoder, Misled, Unclean, usual_duration
from rooftop.media.errors import DamagedVideoError, NoVideoDecoderError
from rooftop.media.forms import Normalization, form_of
from rooftop.media.frame_index import FrameIndex
from rooftop.media.frame_tensors import colours_of, displayed_size, orientation, to_tensor, to_tensors
from rooftop.media.indexing import build_index
from rooftop.media.nvdec import NoNvdecError, gpu_of, missing, odd, too_small
from rooftop.media.nvdec_decoders import release_decoders
from rooftop.media.opening import Source
from rooftop.media.surfaces import MOST_AT_ONCE
from rooftop.words import counted

if TYPE_CHECKING:
    from rooftop.media.pyav import av

MOST_BYTES_AT_ONCE = 1 << 27  # maximum bytes of the tensors of frames that are converted together, ahead of the caller
SEEKS = 3  # after this many seeks for one frame that land too late, the file is read from its beginning
CLOCK_SLACK_S = Fraction(1, 2000)  # a time up to this much before a frame's start selects the frame


class TimedFrame(NamedTuple):
    """A frame: pixels (3, H, W); its start and duration in seconds."""

    pixels: Tensor
    time: float
    duration: float


VIDEO_SUFFIXES = {
    ".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts", ".m2ts", ".mts", ".wmv", ".flv", ".ogv",
    ".3gp", ".mxf", ".y4m", ".ivf", ".h264", ".hevc",
}  # fmt: skip
"""Suffixes of files that count as videos."""


class VideoReader:
    """The frames of a video file as (3, H, W) tensors: RGB, upright, uint8 or floating in 0..1.

        for frame in reader: ...            # one after another, a few in memory
        for pixels, time, duration in reader.timed(): ...
        reader[7], reader[-1]               # (3, H, W)
        reader[10:50:4]                     # (T, 3, H, W)
        reader.frames_at([0.5, 2.0])        # the frames shown at these times
        for clip in reader.clips(16): ...   # (16, 3, H, W)

    Times are in seconds from the start of the file's clock, as in players. Pixels that are not square are not
    resampled, and interlaced frames are not split into fields.

    Args:
        path_or_bytes: a file, or the content of one.
        device: "cpu"; "cuda" or "cuda:1", a GPU's NVDEC, whose frames stay in GPU memory; or "auto": NVDEC if it is
            available and the frames have an even size of at least 320 x 240 pixels in total.
        output: "rgb"; or "nv12", (3 H / 2, W) uint8, the video's own format.
        dtype: torch.uint8, or float16, bfloat16, float32, float64; floating dtypes keep the precision of 10-bit videos.
        resize: (height, width) of the upright frames; resizing is bilinear, with antialiasing.
        normalize: (mean, std) of red, green and blue in 0..1, for floating dtypes: (value - mean) / std.

    Attributes:
        device: the device on which frames are decoded and stored.
        fallback_reason: why "auto" chose the CPU; None in all other cases.
        height, width: pixels of the returned frames.
        fps: mean frames per second, as the file states them; about 25 if it states none.
        time_base: duration of a tick of the file's clock, in seconds.
        colours: the colour encoding of the file, and which of its properties are assumed.

    Raises:
        InputError: the file does not exist, has no video, or an argument is invalid.
        DamagedVideoError: no frame can be decoded.
        NoVideoDecoderError: for device "cuda", if NVDEC is not available, or does not decode this video, or if the
            height or width of the video is odd.
        MissingExtraError: PyAV is not installed.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        device: str | torch.device = "cpu",
        output: str = "rgb",
        dtype: torch.dtype = torch.uint8,
        resize: tuple[int, int] | None = None,
        normalize: Normalization | None = None,
    ) -> None:
        self.form = form_of(output, dtype, resize, normalize)
        self.dtype, self.resize = self.form.dtype, self.form.resize
        wanted, may_be_cpu = gpu_of(device)
        self.source = Source(path_or_bytes)
        self._lock = threading.RLock()
        self._index: FrameIndex | None = None
        self._cursor: _Cursor | None = None
        # indices in `FrameIndex.starts` of key frames from which decoding does not return complete frames
        self._unclean: set[int] = set()
        self._gpu: torch.device | None = None
        # a pass from the beginning that has not returned a frame yet; None if there is none
        self._begun: _Cursor | None = None
        with closing(Decoder(self.source)) as decoder:
            try:
                _, frame = next(decoder.frames())
            except (Broken, StopIteration) as broken:
                raise DamagedVideoError(
                    f"no frame of {self.source.name} can be decoded: {str(broken) or 'it has none'}. Was it copied "
                    "or downloaded completely?"
                ) from broken
            self._turned = orientation(frame)
            self._size, stored = displayed_size(frame), (frame.height, frame.width)
            self.height, self.width = self.resize or self._size
            self.colours: Colours = colours_of(frame)
        self.time_base, self._start = decoder.time_base, decoder.start_ticks
        self.fps = float(decoder.rate() or 1 / (usual_duration(decoder) * decoder.time_base))
        self.fallback_reason: str | None = None
        if wanted is not None:
            reason = missing(wanted) or (may_be_cpu and too_small(*stored)) or odd(*stored) or self._refused_by(wanted)
            if reason and not may_be_cpu:
                raise NoVideoDecoderError(
                    f'{self.source.name} cannot be decoded on {wanted}: {reason}. Use device="cpu" (or "auto") and '
                    'move what you need: frame.to("cuda")'
                )
            self._gpu, self.fallback_reason = (None, reason) if reason else (wanted, None)
        self.device = self._gpu or torch.device("cpu")

    def _refused_by(self, device: torch.device) -> str | None:
        """Return why NVDEC cannot decode this video, found by decoding a frame; None if NVDEC can. The first pass over
        the video reuses this decoder and its frame."""
        reason = self._tried(device)
        if reason is not None and release_decoders():  # idle decoders may occupy memory that this decoder needs
            reason = self._tried(device)
        return reason

    def _tried(self, device: torch.device) -> str | None:
        try:
            cursor = _Cursor(self.source, None, device)
        except NoNvdecError as error:
            return f"NVDEC is not available for this video ({error})"
        try:
            tick, frame = next(cursor.frames)
            to_tensor(frame, self.form, device, self._turned)
        except (NoNvdecError, Broken, StopIteration) as error:
            codec = cursor.decoder.stream.codec_context.name
            cursor.close()
            return f"NVDEC does not decode this {codec} ({str(error) or 'no frame'})"
        except BaseException:
            cursor.close()
            raise
        cursor.frames = chain([(tick, frame)], cursor.frames)
        self._begun = cursor
        return None

    @property
    def index(self) -> FrameIndex:
        """The index, built when it is first needed: for `len`, positions, times, key frames and the duration."""
        with self._lock:
            if self._index is None:
                self._index = build_index(self.source)
            return self._index

    def __len__(self) -> int:
        """The number of frames in the file. A file that was cut off has fewer frames than the original."""
        return len(self.index)

    @property
    def times(self) -> Tensor:
        """The time at which each frame is shown, in seconds: (N,) float64."""
        return torch.tensor([self._seconds(tick) for tick in self.index.pts], dtype=torch.float64, device="cpu")

    @property
    def durations(self) -> Tensor:
        """The time for which each frame is shown, in seconds: (N,) float64."""
        index = self.index
        ticks = [index.duration(position) for position in range(len(index))]
        return torch.tensor([float(each * self.time_base) for each in ticks], dtype=torch.float64, device="cpu")

    @property
    def duration(self) -> float:
        """Seconds from the start of the first frame to the end of the last frame."""
        index = self.index
        return float((index.end - index.pts[0]) * self.time_base) if len(index) else 0.0

    @property
    def constant_rate(self) -> Fraction | None:
        """The constant frame rate, in frames per second: frame k is shown k / rate seconds after frame 0. None if the
        frame rate is not constant."""
        return self.index.constant_rate(self.time_base, Fraction(self.fps).limit_denominator(1001))

    @property
    def key_frames(self) -> list[int]:
        """Positions of the frames that the file marks as key frames, from which decoding can start."""
        return list(self.index.keys)

    def __iter__(self) -> Iterator[Tensor]:
        """Iterate over frames (3, H, W) from the first to the last. Each loop decodes separately.

        Raises:
            DamagedVideoError: raised at the position that cannot be decoded, after all earlier frames.
        """
        for _, pixels, _ in self._converted(self._stream(0)):
            yield pixels

    def timed(self, start: int = 0) -> Iterator[TimedFrame]:
        """Iterate over frames with their times, from position `start` on; errors are as in a loop over the reader."""
        for tick, pixels, ticks in self._converted(self._stream(self._position(start) if start else 0)):
            yield TimedFrame(pixels, self._seconds(tick), float(ticks * self.time_base))

    def clips(self, frames: int, stride: int | None = None) -> Iterator[Tensor]:
        """Iterate over clips (frames, 3, H, W) of consecutive frames; an incomplete clip at the end is dropped.

        Args:
            frames: number of frames in each clip.
            stride: frames from the start of one clip to the start of the next; by default `frames`, so that clips share
                no frames.

        Raises:
            InputError: `frames` or `stride` is below 1.
            DamagedVideoError: as in a loop over the reader.
        """
        stride = frames if stride is None else stride
        if frames < 1 or stride < 1:
            raise InputError(f"clips of {frames} frames every {stride} frames: expected 1 or more for both")
        return self._clips(frames, stride)

    def _clips(self, frames: int, stride: int) -> Iterator[Tensor]:
        held: deque[Tensor] = deque(maxlen=frames)

        def needed() -> Iterator[tuple[int, av.VideoFrame, int]]:
            for number, (_, frame, ticks) in enumerate(self._stream(0)):
                if number % stride < frames or stride <= frames:  # other frames are between two clips
                    yield number, frame, ticks

        for number, pixels, _ in self._converted(needed()):
            held.append(pixels)
            first = number + 1 - frames
            if first >= 0 and first % stride == 0:
                yield torch.stack(tuple(held))

    def __getitem__(self, position: int | slice) -> Tensor:
        """The frame (3, H, W) at a position, or frames (T, 3, H, W) of a slice; negative positions count from the end.

        Raises:
            IndexError: there is no such frame.
            DamagedVideoError: the frame, or a frame on which it depends, cannot be decoded.
        """
        if isinstance(position, slice):
            return self.take(range(*position.indices(len(self))))
        return self.take([position])[0]

    def take(self, positions: Sequence[int]) -> Tensor:
        """Return frames (T, 3, H, W) in the order of `positions`, which may repeat. Errors are as in `reader[i]`."""
        wanted = [self._position(each) for each in positions]
        shape = self.form.shape(self.height, self.width)
        taken = torch.empty(len(wanted), *shape, dtype=self.dtype, device=self.device)
        places: dict[int, list[int]] = {}
        for place, position in enumerate(wanted):
            places.setdefault(position, []).append(place)
        with self._lock:
            ordered = sorted(places)
            for start in range(0, len(ordered), self._at_once):
                some = ordered[start : start + self._at_once]
                frames = [self._of_one_size(self._frame_at(position)) for position in some]
                to_tensors(frames, self.form, self._gpu, self._turned, [taken[places[each][0]] for each in some])
        for first, *others in places.values():
            for other in others:
                taken[other] = taken[first]
        return taken

    def frames_at(self, times: Sequence[float] | Tensor) -> Tensor:
        """Return the frames (T, 3, H, W) that are shown at these times, in seconds.

        A time that is less than half a tick of the file's clock, and less than 0.5 ms, before a frame's start counts as
        that start. So the time 2 / 30 s selects frame 2 even if the file rounds the frame's start to 0.067 s.

        Raises:
            InputError: a time is before the first frame starts, after the last frame ends, or not finite. The end
                itself selects the last frame.
        """
        if isinstance(times, (int, float)) or (isinstance(times, Tensor) and times.dim() != 1):
            raise InputError(f"times are {times!r}: expected a sequence of seconds, such as frames_at([1.5])")
        slack = min(Fraction(1, 2), CLOCK_SLACK_S / self.time_base)
        index = self.index
        positions = []
        for time in [float(each) for each in times]:
            first, end = (self._seconds(index.pts[0]), self._seconds(index.end)) if len(index) else (0.0, 0.0)
            finite = abs(time) < float("inf")
            tick = Fraction(time) / self.time_base + self._start + slack if finite else Fraction(0)
            position = index.shown_at(tick)
            if not finite or position < 0 or tick > index.end + 2 * slack:
                raise InputError(
                    f"no frame of {self.source.name} is shown at {time} s: expected {first:.6g} to {end:.6g} s"
                )
            positions.append(position)
        return self.take(positions)

    def close(self) -> None:
        """Close the file. The reader opens the file again if more frames are requested."""
        with self._lock:
            for cursor in (self._cursor, self._begun):
                if cursor is not None:
                    cursor.close()
            self._cursor = self._begun = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """State for worker processes: everything except open files and decoders."""
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_cursor", "_begun")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock(), _cursor=None, _begun=None)

    def __repr__(self) -> str:
        return f"VideoReader({self.source.name}: {self.width} x {self.height}, {self.fps:.5g} frames/s, {self.device})"

    def _seconds(self, tick: int) -> float:
        return float((tick - self._start) * self.time_base)

    def _position(self, position: int) -> int:
        count, given = len(self), as_integer(position)
        if not -count <= given < count:
            damage = f", which is damaged ({self.index.damage})" if self.index.damage else ""
            raise IndexError(
                f"frame {given} of {self.source.name}{damage}: it has {counted(count, 'frame')}, 0 to {count - 1}"
            )
        return given % count

    def _of_one_size(self, frame: av.VideoFrame) -> av.VideoFrame:
        if self.resize is None and displayed_size(frame, self._turned) != self._size:
            height, width = displayed_size(frame, self._turned)
            raise InputError(
                f"frames of {self.source.name} change from {self._size[1]} x {self._size[0]} to {width} x {height} "
                "pixels: use VideoReader(..., resize=(height, width)) to get all in one size"
            )
        return frame

    def _converted(self, stream: Iterator[tuple[int, av.VideoFrame, int]]) -> Iterator[tuple[int, Tensor, int]]:
        """Convert frames to tensors. On a GPU, several frames are converted together, which takes less host time. The
        number of frames per conversion starts at 1 and grows, so that the first frame is returned soon. An error is
        raised after all earlier frames."""
        count, failure = 1, None
        while failure is None:
            group: list[tuple[int, av.VideoFrame, int]] = []
            try:
                for tick, frame, ticks in islice(stream, count):
                    group.append((tick, self._of_one_size(frame), ticks))
            except Exception as error:
                failure = error
            try:
                tensors = to_tensors([frame for _, frame, _ in group], self.form, self._gpu, self._turned)
            except Exception:  # convert one by one, to find the frame that fails
                for tick, frame, ticks in group:
                    yield tick, to_tensor(frame, self.form, self._gpu, self._turned), ticks
                raise
            times = [(tick, ticks) for tick, _, ticks in group]
            for (tick, ticks), pixels in zip(times, tensors, strict=True):
                yield tick, pixels, ticks
            if len(group) < count:
                break
            count = min(2 * count, self._at_once)
        if failure is not None:
            raise failure

    @property
    def _at_once(self) -> int:
        """The maximum number of frames that are converted together."""
        if self._gpu is None:
            return 1
        frame_bytes = math.prod(self.form.shape(self.height, self.width)) * self.dtype.itemsize
        return max(1, min(MOST_AT_ONCE, MOST_BYTES_AT_ONCE // frame_bytes))

    def _stream(self, start: int) -> Iterator[tuple[int, av.VideoFrame, int]]:
        """Yield (tick, frame, duration in ticks). A frame is yielded only after the next frame is decoded, because the
        next frame's tick determines the duration."""
        cursor = self._from_the_beginning() if start == 0 else self._cursor_at(start)
        held: tuple[int, av.VideoFrame] | None = None
        try:
            if start:
                held = cursor.last  # the frame at `start`
            for tick, frame in cursor.frames:
                if held is not None:
                    yield (*held, tick - held[0])
                held = tick, frame
        except Broken as broken:
            if held is not None:
                yield (*held, cursor.decoder.last_duration(held[0], held[1].duration, damaged=True))
            raise self._damaged(broken, held and held[0]) from broken
        finally:
            cursor.close()
        if held is not None:
            yield (*held, cursor.decoder.last_duration(held[0], held[1].duration, damaged=False))

    def _from_the_beginning(self) -> _Cursor:
        with self._lock:
            begun, self._begun = self._begun, None
        if begun is not None and begun.process == os.getpid():
            return begun
        return _Cursor(self.source, None, self._gpu)

    def _frame_at(self, position: int) -> av.VideoFrame:
        index, cursor = self.index, self._cursor
        if cursor is not None and cursor.process == os.getpid():
            if cursor.position == position and cursor.last is not None:
                return cursor.last[1]
            here = index.start_before(cursor.position) if cursor.position >= 0 else -1
            if cursor.position < position and (not index.seekable or index.start_before(position) <= here):
                try:
                    return cursor.go_to(position, index)
                except Broken:  # decode the frame again, from a key frame
                    pass
        if cursor is None:
            cursor, self._begun = self._begun, None
        spare = None if cursor is None or cursor.process != os.getpid() else cursor.release()
        self._cursor = None
        self._cursor = self._cursor_at(position, spare)
        assert self._cursor.last is not None
        return self._cursor.last[1]

    def _cursor_at(self, position: int, spare: Decoder | None = None) -> _Cursor:
        """Return a pass over the video that has just decoded the frame at `position`. The pass reuses the decoder
        `spare`, if there is one and the pass does not start at the beginning of the video."""
        index, last_good = self.index, None
        start = index.start_before(position) if index.seekable else -1
        misled = 0
        failure: Broken | None = None
        while True:
            while start in self._unclean:
                start -= 1
            # To start at the first key frame, open the file again: this is more reliable than a seek.
            cursor = _Cursor(self.source, index.starts[start] if start > 0 else None, self._gpu, spare)
            try:
                cursor.go_to(position, index)
                return cursor
            except Unclean:
                self._unclean.add(start)
            except Misled:
                misled += 1
                start = start - 1 if misled < SEEKS else -1
            except Broken as broken:
                last_good = cursor.last[0] if cursor.last is not None else last_good
                if failure is not None or start <= 0:
                    cursor.close()
                    raise self._damaged(failure or broken, last_good, position) from broken
                # retry from an earlier start: the frame may need frames before its key frame
                failure, start = broken, start - 1
            spare = cursor.release()

    def _damaged(self, broken: Broken, last: int | None, position: int | None = None) -> DamagedVideoError:
        time = None if last is None else self._seconds(last)
        until = "no frame before it can be decoded" if time is None else f"the last good frame is at {time:.3f} s"
        what = "" if position is None else f"frame {position} of "
        return DamagedVideoError(
            f"{what}{self.source.name} cannot be decoded: {broken}; {until}. Frames that do not depend on the "
            "damaged ones can still be read by position",
            time,
        )


class _Cursor:
    """One pass over a video, from its beginning or from a key frame.

    `last` is the tick and the frame that was decoded last. `position` is this frame's position, or -1 if there is none.
    """

    def __init__(
        self, source: Source, start: int | None, device: torch.device | None, spare: Decoder | None = None
    ) -> None:
        self.process = os.getpid()  # the decoder's threads do not survive a fork
        if spare is not None and start is None:
            spare.close()
        self.decoder = spare if spare is not None and start is not None else Decoder(source, device)
        self.position, self.last = -1, None
        # this iterator must not refer to the cursor: a cycle would keep the decoder alive
        self.frames = _frames(self.decoder, start)

    last: tuple[int, av.VideoFrame] | None
    frames: Iterator[tuple[int, av.VideoFrame]]

    def go_to(self, position: int, index: FrameIndex) -> av.VideoFrame:
        """Decode up to the frame at `position`, and return this frame.

        Raises:
            Broken: decoding does not return this frame.
        """
        for tick, frame in self.frames:
            at = index.position(tick) if index.seekable else self.position + 1
            if at is None:
                continue
            self.position = at
            if at > position:
                raise Broken("the decoder skips it", tick)
            self.last = tick, frame
            if at == position:
                return frame
        raise Broken("the decoder ends before it")

    def release(self) -> Decoder | None:
        """Return the decoder for reuse if it is an NVDEC decoder, which takes long to create. Close any other
        decoder."""
        if self.decoder.device is not None:
            return self.decoder
        self.close()
        return None

    def close(self) -> None:
        self.decoder.close()


def _frames(decoder: Decoder, start: int | None) -> Iterator[tuple[int, av.VideoFrame]]:
    """Decode frames from the beginning, or from the key frame at this tick on."""
    if start is not None:
        try:
            decoder.seek(start)
        except Broken as broken:
            raise Misled(str(broken)) from broken
    yield from decoder.frames(start)
