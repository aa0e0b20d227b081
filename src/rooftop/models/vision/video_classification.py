"""Classify a video: find the most probable classes of its frames with an image model, at regular intervals.

    model, preprocessing = load_classifier("resnet50")
    frames = SampledVideo("walk.mp4", preprocessing, every=0.5)
    for frame in classify_video(model, frames):
        print(frame.time, frame.guesses[0].name, frame.guesses[0].probability)

Frames are prepared like photographs: resized by the shorter side, cropped at the centre, normalized. If a GPU's NVDEC
decodes the video, that GPU does all the work, and only the logits are copied to the host. A photograph of the same
frame has slightly different results, because Pillow rounds to 8-bit pixels after the resize.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import isfinite

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.media import DamagedVideoError, VideoReader
from rooftop.media.reading import CLOCK_SLACK_S
from rooftop.models.images import IMAGENET, Preprocessing
from rooftop.models.vision.classification import Guess, check_counts, guessed

SLACK_S = float(CLOCK_SLACK_S)  # the time 2 / 30 s selects frame 2, even if that frame's time is 0.067 s
# torch's names for Pillow's filters
MODES = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}


@dataclass(frozen=True)
class ClassifiedFrame:
    """A frame's index in the video, its time in seconds, and its classes, most probable first."""

    position: int
    time: float
    guesses: tuple[Guess, ...]


class SampledVideo:
    """Frames of a video at regular intervals, prepared as a model's input.

    A frame that is shown at several of these times is selected only once.

    Args:
        path_or_bytes: path or content of a file.
        preprocessing: as for photographs.
        every: interval in seconds. The selected frames are those shown at multiples of the interval, counted from the
            first frame.
        device: where frames are decoded and prepared, as in `VideoReader`: "cpu", "cuda", "cuda:1" or "auto".

    Attributes:
        device, fallback_reason: as in `VideoReader`.
        positions, times: indices of the frames in the video, and their times in seconds.

    Raises:
        InputError: the source is not a video, or `every` is not a number above 0.
        DamagedVideoError, NoVideoDecoderError, MissingExtraError: as in `VideoReader`.
    """

    def __init__(
        self,
        path_or_bytes: str | os.PathLike[str] | bytes,
        preprocessing: Preprocessing = IMAGENET,
        *,
        every: float = 1.0,
        device: str | torch.device = "cpu",
    ) -> None:
        if not (isfinite(every) and every > 0):
            raise InputError(f"a frame every {every} s: expected a number of seconds above 0")
        if preprocessing.interpolation not in MODES:
            raise InputError(
                f"{preprocessing.interpolation!r} is not supported for frames: expected BILINEAR or BICUBIC"
            )
        self.preprocessing = preprocessing
        with VideoReader(path_or_bytes) as first:
            short = min(first.height, first.width)
            size = (preprocessing.resize * first.height // short, preprocessing.resize * first.width // short)
        self._size = size
        # the reader resizes bilinear frames while it converts colours
        at_once = preprocessing.interpolation == Image.Resampling.BILINEAR
        self._reader = VideoReader(
            path_or_bytes,
            device,
            dtype=torch.float32,
            resize=size if at_once else None,
            normalize=(preprocessing.mean, preprocessing.std) if at_once else None,
        )
        self.device, self.fallback_reason = self._reader.device, self._reader.fallback_reason
        shown = self._reader.times
        self.positions = _sampled(shown, self._reader.durations, every)
        self.times: list[float] = shown[self.positions].tolist()

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        path_or_bytes: str | os.PathLike[str] | bytes,
        preprocessing: Preprocessing = IMAGENET,
        *,
        every: float = 1.0,
    ) -> SampledVideo:
        """Decode with NVDEC on the model's GPU if NVDEC is available and faster than the CPU; if not, on the CPU."""
        where = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        on_gpu = where.type == "cuda"
        with torch.cuda.device(where) if on_gpu else nullcontext():
            return cls(path_or_bytes, preprocessing, every=every, device="auto" if on_gpu else "cpu")

    def __len__(self) -> int:
        return len(self.positions)

    def batches(self, batch_size: int) -> Iterator[Tensor]:
        """Yield batches of frames, (B, 3, crop, crop) float32 on `device`, with B of at most `batch_size`.

        Raises:
            DamagedVideoError: a frame cannot be decoded, or the file ends too early. All earlier frames are yielded
                first.
        """
        held: list[Tensor] = []
        try:
            for position in self.positions:
                held.append(self._prepared(self._reader[position]))
                if len(held) == batch_size:
                    yield torch.stack(held)
                    held = []
            self._check_end()
        except DamagedVideoError:
            if held:
                yield torch.stack(held)
            raise
        finally:
            self._reader.close()
        if held:
            yield torch.stack(held)

    def _check_end(self) -> None:
        damage = self._reader.index.damage
        if damage is None:
            return
        last = float(self._reader.times[-1]) if len(self._reader) else None
        until = "" if last is None else f"; its last frame is at {last:.3f} s"
        raise DamagedVideoError(f"{self._reader.source.name} is damaged: {damage}{until}", last)

    def _prepared(self, frame: Tensor) -> Tensor:
        """Prepare a frame: (3, H, W) from the reader -> (3, crop, crop)."""
        how = self.preprocessing
        if self._reader.resize is None:
            mode = MODES[how.interpolation]
            frame = F.interpolate(frame[None], self._size, mode=mode, antialias=True)[0].clamp(0, 1)
            mean, std = (torch.tensor(each, device=frame.device)[:, None, None] for each in (how.mean, how.std))
            frame = (frame - mean) / std
        height, width = frame.shape[1:]
        top, left = round((height - how.crop) / 2), round((width - how.crop) / 2)
        inside = frame[:, max(0, top) : max(0, top + how.crop), max(0, left) : max(0, left + how.crop)]
        if tuple(inside.shape[1:]) == (how.crop, how.crop):
            return inside
        black = torch.tensor([-mean / std for mean, std in zip(how.mean, how.std, strict=True)], device=frame.device)
        cropped = black[:, None, None].repeat(1, how.crop, how.crop)
        down, across = max(0, -top), max(0, -left)
        cropped[:, down : down + inside.shape[1], across : across + inside.shape[2]] = inside
        return cropped


def _sampled(times: Tensor, durations: Tensor, every: float) -> list[int]:
    """Find the indices of the frames that are shown at intervals of `every` seconds from the first frame on."""
    if not len(times):
        return []
    every = max(every, SLACK_S)  # an interval of SLACK_S already selects all frames, so a smaller one is not needed
    since = times - times[0] - SLACK_S  # (N,) float64: when each frame begins to be shown, less the slack
    asked = (since / every).ceil() * every  # the first requested time at or after `since`
    chosen: list[int] = (asked < since + durations).nonzero().flatten().tolist()
    return chosen


def classify_video(
    model: nn.Module,
    video: SampledVideo | str | os.PathLike[str] | bytes,
    *,
    classes: Sequence[str] | None = None,
    top: int = 5,
    batch_size: int = 16,
    progress: Callable[[str, float], None] | None = None,
) -> Iterator[ClassifiedFrame]:
    """Classify the frames of a video; yields them in order.

    Args:
        model, classes, top: as in `rooftop.models.classify`.
        video: a path or bytes, from which one frame per second is prepared for ImageNet on the model's device; or a
            `SampledVideo` for other frames or preprocessing.
        batch_size: maximum number of frames at once.
        progress: called after each batch with (text that names the current activity, fraction of the video's selected
            frames that are done).

    Raises:
        TypeError, ValueError: `top` or `batch_size` is not an int of 1 or more.
        InputError: the source is not a video, or the number of names differs from the number of logits.
        DamagedVideoError: the video is damaged. The frames before the damage are yielded first.
        ModelRunError: as in `classify`.
    """
    check_counts(top, batch_size)
    frames = video if isinstance(video, SampledVideo) else SampledVideo.for_model(model, video)
    return _classified(model, frames, classes, top, batch_size, progress)


def _classified(
    model: nn.Module,
    frames: SampledVideo,
    classes: Sequence[str] | None,
    top: int,
    batch_size: int,
    progress: Callable[[str, float], None] | None,
) -> Iterator[ClassifiedFrame]:
    done = 0
    for images in frames.batches(batch_size):
        positions = frames.positions[done : done + len(images)]
        times = frames.times[done : done + len(images)]
        called = [f"the frame at {time:.3f} s" for time in times]
        yield from map(ClassifiedFrame, positions, times, guessed(model, images, called, classes, top, "frames"))
        done += len(images)
        if progress is not None:
            progress(f"classified {done} of {len(frames)} frames", done / len(frames))
