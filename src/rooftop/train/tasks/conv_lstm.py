"""The task `conv_lstm`: a ConvLSTM predicts the next frame of a video from all earlier frames.

--data is one of

    digits       scikit-learn's digits, which bounce around in a frame; new videos in each epoch
    a video, or a folder of videos
                 training clips from the first four fifths of each video; the last fifth is held out

On digits, the network predicts every frame and is trained with binary cross entropy. On videos, the colour network
predicts the last frame and is trained with mean absolute error. Metrics are computed on held-out sequences; digits of
held-out sequences are not in the training set. The baseline is "copying": the error of a prediction that repeats frame
t as frame t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from rooftop.data.samples import Samples
from rooftop.doctor.extras import Extra
from rooftop.errors import InputError
from rooftop.media import ClipDataset, VideoReader
from rooftop.media.reading import VIDEO_SUFFIXES
from rooftop.models import NextFrameNetwork, predict_frames
from rooftop.train.recipes import Recipe
from rooftop.train.tasks.finding import Values, count_of, over
from rooftop.train.tasks.generated.digits import SCIKIT_LEARN, TRAINED_ON, digits, moving_digits
from rooftop.train.tasks.task import Task
from rooftop.user_paths import user_path
from rooftop.words import counted

DIGITS = "digits"
PYAV = Extra("media", "av", "av", "videos")
FRAMES, SIDE = 12, 32  # number of frames of a sequence, and pixels of its shorter side
LARGE_FRAMES, LARGE_SIDE, LARGE_TOGETHER = 20, 64, 2  # as in Keras's example
PASS, JUDGED = 1600, 32  # numbers of sequences of moving digits: per epoch, and held out
HIGHEST_SEED = 1 << 40  # highest seed of a training sequence; held-out sequences have higher seeds
SETTLED_BY = 8  # number of batches from which the norms' statistics are recomputed at the end
LEAST, MOST = 0.01, 0.99  # frames of the copying baseline are clamped to this range, so that its entropy is bounded
TRAINED_PART = 0.8  # this fraction of each video, from its start, is for training
# number of examples; small frames are enlarged by a whole factor, to at most this height in pixels
SHOWN, SHOWN_SIDE = 2, 96

OF_DIGITS: Values = {
    "run": {"epochs": 1, "batch": 8},
    "model": {"options": {"filters": 8}},
    "optimizer": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.0},
    "schedule": {"name": "cosine", "warmup": 0.3},
    "loading": {"how": "here"},
}
OF_DIGITS_ON_GPU: Values = {
    "run": {"epochs": 20, "precision": "bf16"},
    "model": {"options": {"filters": 64, "frames": LARGE_FRAMES, "together": LARGE_TOGETHER}},
    "optimizer": {"lr": 1e-3},
    "augment": {"size": LARGE_SIDE},
    "loading": {"how": "auto"},
}
"""Recipe values for the full network of Keras's example."""
OF_VIDEOS: Values = {
    "run": {"steps": 300, "batch": 4},
    "model": {"options": {"filters": 8}},
    "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 0.0},
    "schedule": {"name": "cosine", "warmup": 0.3},
}
OF_VIDEOS_ON_GPU: Values = {
    "run": {"steps": 2000, "batch": 8, "precision": "bf16"},
    "model": {"options": {"filters": 64}},
    "augment": {"size": LARGE_SIDE},
}


def defaults(data: str | None, cuda: bool) -> Values:
    """Return the recipe values that this task uses by default."""
    if data in (None, DIGITS):
        return over(OF_DIGITS, OF_DIGITS_ON_GPU if cuda else {})
    return over(OF_VIDEOS, OF_VIDEOS_ON_GPU if cuda else {})


def needs(data: str | None) -> list[Extra]:
    """The optional packages that the task needs."""
    return [SCIKIT_LEARN] if data in (None, DIGITS) else [PYAV]


def build(data: str | None, recipe: Recipe) -> Task:
    """Build the task. In model.options, `frames` is the number of frames of a sequence, and `together` the number of
    digits in a sequence; all other options are options of the network.

    Raises:
        InputError: a video or folder does not exist, or has too few frames; or an option has a wrong value.
        MissingExtraError: scikit-learn or PyAV is not installed.
    """
    options = {"frames": FRAMES, "together": 1, **recipe.model.options}
    frames, together = count_of(options, "frames", 2), count_of(options, "together")
    del options["frames"], options["together"]
    side = recipe.augment.size or SIDE
    if data in (None, DIGITS):
        found = _Sequences(
            MovingDigits(slice(TRAINED_ON), PASS, frames, side, together, 0, drawn=True),
            MovingDigits(slice(TRAINED_ON, None), JUDGED, frames, side, together, HIGHEST_SEED),
        )
        options = {"channels": 1, "every_frame": True, **options}
    else:
        found = _videos(user_path(str(data)), frames, side)
        options = {"channels": 3, "every_frame": False, **options}
    network, told = _network(recipe, options)
    return Task(
        model=network,
        train=found.train,
        valid=found.valid,
        loss=next_frame_loss,
        metrics=errors,
        best="BCE" if network.every_frame else "MAE",
        settle=partial(settle_norms, found.train, recipe.run.batch),
        examples=partial(_examples, found.valid),
        metadata=told,
        unit="sequences",
    )


class TrainedNetwork(NextFrameNetwork):
    """A next-frame network for training: forward returns the logits of each next frame, from all frames before it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(x, ahead=False)


def next_frame_loss(model: nn.Module, videos: Tensor) -> Tensor:
    """Loss of videos (N, T, H, W, C), averaged over pixels: binary cross entropy of frames 1 to T - 1 if the network
    predicts every frame, or else absolute error of the last frame."""
    logits = model(videos[:, :-1]).float()
    if logits.dim() == videos.dim():
        return F.binary_cross_entropy_with_logits(logits, videos[:, 1:])
    return F.l1_loss(logits.sigmoid(), videos[:, -1])


def errors(model: nn.Module, videos: Tensor) -> dict[str, Tensor]:
    """Errors of each video: cross entropy, absolute and squared error of the prediction, and the error of copying.

    The error of copying is a cross entropy or an absolute error, like the loss.
    """
    logits = model(videos[:, :-1]).float()
    found = logits.sigmoid()
    every = found.dim() == videos.dim()
    expected, copied = (videos[:, 1:], videos[:, :-1]) if every else (videos[:, -1], videos[:, -2])
    if every:
        entropy = {"BCE": F.binary_cross_entropy_with_logits(logits, expected, reduction="none")}
        # on a GPU, autocast refuses binary cross entropy of probabilities, but not of logits
        squeezed = copied.clamp(LEAST, MOST).logit()
        copying = F.binary_cross_entropy_with_logits(squeezed, expected, reduction="none")
    else:
        copying, entropy = (copied - expected).abs(), {}
    values = {**entropy, "MAE": (found - expected).abs(), "MSE": (found - expected).square()}
    values["BCE of copying" if every else "MAE of copying"] = copying
    return {name: each.flatten(1).mean(1) for name, each in values.items()}


@torch.no_grad()
def settle_norms(samples: Samples, batch: int, model: nn.Module) -> None:
    """Recompute the running statistics of the batch norms over some videos.

    In a short training, running statistics lag behind the weights.
    """
    assert isinstance(model, NextFrameNetwork)
    norms = [norm for norm in model.norms if isinstance(norm, nn.BatchNorm2d)]
    momenta, training = [norm.momentum for norm in norms], model.training
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    model.train()
    device = next(model.parameters()).device
    for number in range(SETTLED_BY):
        videos = [samples[(number * batch + place) % len(samples)] for place in range(batch)]
        model.features(torch.stack(videos)[:, :-1].to(device))
    model.train(training)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


# ---- data ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sequences:
    """Training videos and held-out videos, (T, H, W, C) in 0..1."""

    train: Samples
    valid: Samples


class MovingDigits:
    """Videos of moving digits, (T, side, side, 1) in 0..1.

    Args:
        numbers: indices of the scikit-learn digits that move.
        count, frames, side, together: as for `moving_digits`.
        first_seed: seed of video 0; video i has the seed first_seed + i.
        drawn: whether each epoch of a training has new videos, with random seeds below `HIGHEST_SEED`.
    """

    def __init__(
        self, numbers: slice, count: int, frames: int, side: int, together: int, first_seed: int, drawn: bool = False
    ) -> None:
        self.images = digits()[0][numbers]
        self.count, self.sizes = count, (frames, side, together)
        self.first_seed, self.drawn = first_seed, drawn

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return self._made(self.first_seed + index)

    def draw(self, index: int, generator: np.random.Generator) -> Tensor:
        return self._made(int(generator.integers(HIGHEST_SEED)) if self.drawn else self.first_seed + index)

    def _made(self, seed: int) -> Tensor:
        return moving_digits(self.images, 1, *self.sizes, seed)[0]


class Clips:
    """Clips of videos, (T, H, W, 3) in 0..1."""

    def __init__(self, clips: ClipDataset, numbers: Sequence[int]) -> None:
        self.clips, self.numbers = clips, numbers

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        return self.clips[self.numbers[index]].pixels.permute(0, 2, 3, 1).contiguous()

    def name(self, index: int) -> str:
        """The name of a clip: its file, and the number of its first frame in the file."""
        file, first = self.clips.place(self.numbers[index])
        return f"{self.clips.readers[file].source.name}, frame {first}"


def _videos(path: Path, frames: int, side: int) -> _Sequences:
    if not path.exists():
        raise InputError(f"--data {path} does not exist: expected digits, a video, or a folder of videos")
    within = path.rglob("*") if path.is_dir() else [path]
    files = sorted(each for each in within if each == path or each.suffix.lower() in VIDEO_SUFFIXES)
    if not files:
        raise InputError(f"{path} has no videos ({', '.join(sorted(VIDEO_SUFFIXES))})")
    with VideoReader(files[0]) as whole:
        shrink = side / min(whole.height, whole.width)
        size = (max(1, round(whole.height * shrink)), max(1, round(whole.width * shrink)))
    clips = ClipDataset(files, frames, stride=1, resize=size, dtype=torch.float32)
    train, valid = [], []
    for number in range(len(clips)):
        file, first = clips.place(number)
        border = int(TRAINED_PART * len(clips.readers[file]))
        if first + frames <= border:
            train.append(number)
        elif first >= border and (first - border) % frames == 0:  # held-out clips do not overlap
            valid.append(number)
    if not train or not valid:
        longest = max(len(reader) for reader in clips.readers)
        raise InputError(
            f"{path}: the longest video has {counted(longest, 'frame')}: expected at least {5 * frames}, as the last "
            "fifth is held out"
        )
    return _Sequences(Clips(clips, train), Clips(clips, valid))


# ---- the network -----------------------------------------------------------------------------------------------


def _network(recipe: Recipe, options: dict[str, Any]) -> tuple[TrainedNetwork, dict[str, Any]]:
    """Build the network, and the metadata of its exported weights."""
    name = "next_frame_network" if options["every_frame"] else "colour_next_frame_network"
    if recipe.model.name not in ("", name):
        raise InputError(f"model.name is {recipe.model.name!r}: these data need {name}: leave model.name out")
    try:
        network = TrainedNetwork(**options)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be built with model.options {dict(recipe.model.options)}: {error}") from error
    return network, {"model": name, "options": options}


# ---- pictures --------------------------------------------------------------------------------------------------


@torch.no_grad()
def _examples(videos: Samples, model: nn.Module, device: torch.device) -> list[tuple[str, Image.Image]]:
    """Draw some held-out videos with predictions, in three rows.

    The rows are: the actual frames; each frame predicted from all earlier actual frames; and a roll-out, in which the
    network predicts frames from its own previous predictions.
    """
    assert isinstance(model, NextFrameNetwork)
    shown = []
    for number in range(min(SHOWN, len(videos))):
        video = videos[number][None].to(device)
        context = video.shape[1] // 2
        come = video[:, context:]
        rolled = predict_frames(model, video[:, :context], come.shape[1])
        following = torch.cat([predict_frames(model, video[:, :t], 1) for t in range(context, video.shape[1])], 1)
        shown.append(
            (
                "actual frames, next frame predicted, several frames predicted",
                in_rows((come[0], following[0], rolled[0])),
            )
        )
    return shown


def in_rows(rows: Sequence[Tensor], gap: int = 2) -> Image.Image:
    """Draw rows of frames (T, H, W, C) in 0..1, one row below the other."""
    count, height, width = rows[0].shape[:3]
    scale = max(1, SHOWN_SIDE // height)
    high, wide = height * scale + gap, width * scale + gap
    picture = Image.new("RGB", (count * wide, len(rows) * high), "white")
    for number, row in enumerate(rows):
        for place, frame in enumerate(row.float().mul(255).round().byte().cpu().expand(-1, -1, -1, 3)):
            image = Image.fromarray(frame.numpy()).resize((width * scale, height * scale), Image.Resampling.NEAREST)
            picture.paste(image, (place * wide, number * high))
    return picture
