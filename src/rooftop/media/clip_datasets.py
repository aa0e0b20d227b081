"""Clips of many videos for training, decoded ahead of the step that needs them.

    ClipDataset    all clips of some files, by number
    ClipLoader     batches of clips, in an order drawn from a seed; each decoding thread has its own stream

A thread of the loader has its own decoder and CUDA stream. Each clip comes with an event. The stream that receives a
batch waits on the GPU for the events of the batch's clips. The host waits only for the decoding itself.
"""

from __future__ import annotations

import copy
import os
import threading
import warnings
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from rooftop.errors import InputError
from rooftop.media.errors import DamagedVideoError
from rooftop.media.forms import Normalization
from rooftop.media.reading import VideoReader
from rooftop.thread_pools import ThreadPool
from rooftop.words import counted

OPEN_FILES = 2  # maximum open readers per thread; on a GPU, each open reader occupies an NVDEC session


class Clip(NamedTuple):
    """A clip: pixels (T, 3, H, W), the index of its file in `ClipDataset.readers`, and the position of its first frame
    in the file."""

    pixels: Tensor
    file: int
    first: int


class ClipBatch(NamedTuple):
    """Clips: pixels (N, T, 3, H, W); each clip's file (its index in `ClipDataset.readers`) and position of the first
    frame, (N,) int64 on the CPU."""

    pixels: Tensor
    files: Tensor
    firsts: Tensor


class ClipDataset(Dataset[Clip]):
    """All clips of some videos: `dataset[i]` is a `Clip`, so `torch.utils.data.DataLoader` can use it.

        clips = ClipDataset(paths, frames=16, step=2, resize=(224, 224), dtype=torch.float16)
        for pixels, files, firsts in ClipLoader(clips, batch=8, shuffle=True): ...

    Args:
        paths: video files. Each file is read once, without decoding, to count its frames.
        frames: number of frames of a clip.
        step: distance from one frame of a clip to the next, in frames of the file.
        stride: frames from the start of a clip to the start of the next; by default, clips share no frames.
        resize: (height, width), upright; required if the videos differ in size.
        dtype, normalize, device: as in `VideoReader`.
        on_error: "raise" an error; or "skip" each file that cannot be read and, in a `ClipLoader`, each clip that
            cannot be decoded, with a warning. `dataset[i]` always raises.

    Attributes:
        readers: one reader for each file that was not skipped. The number of a file is its index in this list.
        counts: number of clips of each file in `readers`; 0 if the file is too short. A file that was cut off counts
            only its complete clips.
        skipped: (path, problem) for each skipped file.

    Raises:
        InputError: as in `VideoReader`; or no file is long enough for a clip, or videos differ in size and `resize` is
            None.
        DamagedVideoError: no frame of a file can be decoded.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        frames: int,
        *,
        step: int = 1,
        stride: int | None = None,
        resize: tuple[int, int] | None = None,
        dtype: torch.dtype = torch.uint8,
        normalize: Normalization | None = None,
        device: str | torch.device = "cpu",
        on_error: str = "raise",
    ) -> None:
        if on_error not in ("raise", "skip"):
            raise InputError(f'on_error {on_error!r} is not known: expected "raise" or "skip"')
        self.on_error = on_error
        self.frames, self.step = frames, step
        self.stride = frames * step if stride is None else stride
        if min(frames, step, self.stride) < 1:
            raise InputError(
                f"clips of {frames} frames with step {step} every {self.stride} frames: expected 1 or more for all "
                "three"
            )
        given = [] if isinstance(paths, (str, bytes, os.PathLike)) else list(paths)
        if not given:
            raise InputError(f"paths: expected a list of video files, got {paths!r}")
        self.readers: list[VideoReader] = []
        self.skipped: list[tuple[Path, str]] = []
        for path in given:
            try:
                with VideoReader(path, device, dtype=dtype, resize=resize, normalize=normalize) as reader:
                    if reader.index.damage:
                        warnings.warn(
                            f"{path} is damaged ({reader.index.damage}): clips come only from its {len(reader)} "
                            "readable frames",
                            stacklevel=2,
                        )
                    self.readers.append(reader)
            except (InputError, DamagedVideoError) as error:
                if on_error == "raise":
                    raise
                self.skipped.append((Path(path), str(error)))
                warnings.warn(f"skipped: {error}", stacklevel=2)
        if not self.readers:
            raise InputError(f"none of {counted(len(self.skipped), 'file')} can be read; first: {self.skipped[0][1]}")
        sizes = {(reader.height, reader.width) for reader in self.readers}
        if len(sizes) > 1:
            said = ", ".join(f"{width} x {height}" for height, width in sorted(sizes))
            raise InputError(f"the videos have several sizes ({said}): pass resize=(height, width) to ClipDataset")
        span = (frames - 1) * step + 1
        self.counts = [max(0, (len(reader) - span) // self.stride + 1) for reader in self.readers]
        self._ends: list[int] = []
        for count in self.counts:
            self._ends.append(count + (self._ends[-1] if self._ends else 0))
        if not len(self):
            longest = max(len(reader) for reader in self.readers)
            raise InputError(
                f"no video is long enough for a clip of {counted(span, 'frame')}: the longest has "
                f"{counted(longest, 'frame')}"
            )
        self._of_thread = threading.local()

    def __len__(self) -> int:
        return self._ends[-1]

    def place(self, number: int) -> tuple[int, int]:
        """Return the index of a clip's file in `readers`, and the position of the clip's first frame.

        Raises:
            IndexError: there is no such clip.
        """
        if not -len(self) <= number < len(self):
            raise IndexError(f"clip {number} does not exist: there are {len(self)}, numbered 0 to {len(self) - 1}")
        number %= len(self)
        file = bisect_right(self._ends, number)
        return file, (number - (self._ends[file] - self.counts[file])) * self.stride

    def __getitem__(self, number: int) -> Clip:
        file, first = self.place(number)
        positions = range(first, first + self.frames * self.step, self.step)
        return Clip(self._reader(file).take(positions), file, first)

    def _reader(self, file: int) -> VideoReader:
        """Return this thread's reader of a file, with its own decoder. If a thread has more than `OPEN_FILES` readers,
        the least recently used reader is closed."""
        readers: OrderedDict[int, VideoReader] | None = getattr(self._of_thread, "readers", None)
        if readers is None or self._of_thread.process != os.getpid():
            readers = self._of_thread.readers = OrderedDict()
            self._of_thread.process = os.getpid()
        if file not in readers:
            readers[file] = copy.copy(self.readers[file])  # the copy shares the index, but no open file
        readers.move_to_end(file)
        while len(readers) > OPEN_FILES:
            readers.popitem(last=False)[1].close()
        return readers[file]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_of_thread"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _of_thread=threading.local())


class ClipLoader:
    """Batches of a `ClipDataset`, decoded ahead by threads. A loop over the loader is one pass over the clips.

    The order of clips depends only on the seed and the number of the pass, not on the number of threads.

    Args:
        dataset: the clips.
        batch: number of clips in a batch. The last batch contains the remaining clips.
        shuffle: whether clips come in random order; if False, they come in the order of the files.
        seed: seed of the order; pass number n draws from (seed, n).
        threads: number of decoding threads. On the CPU, few threads suffice, because each decoder uses several threads
            itself. On a GPU, pass the number of its NVDEC engines.
        ahead: batches that are decoded in advance.
        drop_last: whether an incomplete last batch is dropped.
        to: the GPU to which clips decoded on the CPU are copied, from pinned memory. If None or "cpu", clips stay where
            they were decoded.

    The current stream of the thread that requests a batch can use the batch immediately. NVDEC works on the device's
    default stream, so a training step on that stream delays decoding. A training loop on another stream, within
    `torch.cuda.stream(torch.cuda.Stream())`, does not.

    Attributes:
        epoch: the number of the next pass; the caller may set it.

    Raises:
        InputError: `batch`, `threads` or `ahead` is below 1, `to` is not a device, or `to` is a GPU and torch finds
            none.
    """

    def __init__(
        self,
        dataset: ClipDataset,
        batch: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        threads: int = 2,
        ahead: int = 2,
        drop_last: bool = False,
        to: str | torch.device | None = None,
    ) -> None:
        if min(batch, threads, ahead) < 1:
            raise InputError(f"batch={batch}, threads={threads}, ahead={ahead}: expected 1 or more for each")
        self.dataset, self.batch, self.shuffle, self.seed = dataset, batch, shuffle, seed
        self.threads, self.ahead, self.drop_last = threads, ahead, drop_last
        try:
            self.to = None if to is None else torch.device(to)
        except RuntimeError as error:
            raise InputError(f'to={to!r} is not a device: expected None, "cpu", "cuda" or "cuda:1"') from error
        if self.to is not None and self.to.type == "cuda" and not torch.cuda.is_available():
            raise InputError(f'to={str(to)!r}, but there is no GPU here: leave it out, or use to="cpu"')
        self.epoch = 0

    def __len__(self) -> int:
        """Number of batches of a pass over the dataset."""
        count = len(self.dataset)
        return count // self.batch if self.drop_last else -(-count // self.batch)

    def order(self, epoch: int) -> list[int]:
        """The indices of the dataset's clips, in the order of pass number `epoch`."""
        if not self.shuffle:
            return list(range(len(self.dataset)))
        generator = torch.Generator().manual_seed((self.seed << 20 ^ epoch) & (1 << 63) - 1)
        return torch.randperm(len(self.dataset), generator=generator).tolist()

    def __iter__(self) -> Iterator[ClipBatch]:
        """Yield the batches of the pass with the number `epoch`. Before the first batch, `epoch` increases by 1.

        Raises:
            DamagedVideoError: a clip cannot be decoded; raised when the clip's batch is requested. If the dataset skips
                such clips, batches that lack clips are smaller, even with `drop_last`. Empty batches are skipped.
        """
        order, self.epoch = self.order(self.epoch), self.epoch + 1
        groups = [order[start : start + self.batch] for start in range(0, len(order), self.batch)][: len(self)]
        return self._batches(groups)

    def _batches(self, groups: list[list[int]]) -> Iterator[ClipBatch]:
        waiting: deque[list[Future[_Made | None]]] = deque()
        streams = threading.local()
        with ThreadPool(self.threads, "rooftop-clips") as pool:
            try:
                for number in range(len(groups) + self.ahead):
                    if number < len(groups):
                        waiting.append([pool.submit(self._make, clip, streams) for clip in groups[number]])
                    if number >= self.ahead:
                        made = [each for future in waiting.popleft() if (each := future.result()) is not None]
                        if made:
                            yield _together(made)
            finally:
                for futures in waiting:
                    for future in futures:
                        future.cancel()

    def _make(self, number: int, streams: threading.local) -> _Made | None:
        """Decode a clip; return None if it cannot be decoded and the dataset skips such clips."""
        try:
            return self._made(number, streams)
        except (DamagedVideoError, InputError, OSError) as error:
            if self.dataset.on_error == "raise":
                raise
            warnings.warn(f"skipped clip {number}: {error}", stacklevel=2)
            return None

    def _made(self, number: int, streams: threading.local) -> _Made:
        device = self.to or self.dataset.readers[0].device
        if device.type != "cuda":
            return _Made(self.dataset[number], None)
        with torch.cuda.device(device):
            if not hasattr(streams, "own"):
                streams.own = torch.cuda.Stream(device)
            with torch.cuda.stream(streams.own):
                clip = self.dataset[number]
                if not clip.pixels.is_cuda:
                    clip = clip._replace(pixels=clip.pixels.pin_memory().to(device, non_blocking=True))
                return _Made(clip, streams.own.record_event())


class _Made(NamedTuple):
    clip: Clip
    ready: torch.cuda.Event | None  # recorded on the stream that produced the clip


def _together(made: list[_Made]) -> ClipBatch:
    """Stack clips into one batch, on the current stream."""
    clips = [each.clip for each in made]
    device = clips[0].pixels.device
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        for clip, ready in made:
            if ready is not None:
                torch.cuda.current_stream().wait_event(ready)
                clip.pixels.record_stream(torch.cuda.current_stream())
        pixels = torch.stack([clip.pixels for clip in clips])
    files, firsts = (torch.tensor([clip[part] for clip in clips]) for part in (1, 2))
    return ClipBatch(pixels, files, firsts)
