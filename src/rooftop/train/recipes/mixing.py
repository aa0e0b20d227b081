"""Mixup and CutMix of pairs of samples.

    alter = mixer(recipe.mix, classes=10)        # for Task.alter; None if both are off
    images, targets = alter((images, labels), places, generator_of)

Mixup (Zhang et al. 2018, arXiv:1710.09412) averages two images and their targets with weights lam and 1 - lam, where
lam is drawn from Beta(alpha, alpha). CutMix (Yun et al. 2019, arXiv:1905.04899) pastes a box of the second image into
the first; lam is the remaining share of the first image. If both are on, each pair uses mixup or CutMix with equal
probability.

The pairs are the samples at positions 2k and 2k + 1 of the whole batch. Each pair has its own generator, so the result
does not depend on the number of ranks. The two samples of a pair are mixed with each other, with the same lam and box.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.errors import InputError
from rooftop.train.recipes.recipe import Mix

GeneratorOf = Callable[[int], np.random.Generator]
Alter = Callable[[Any, Tensor, GeneratorOf], tuple[Tensor, Tensor]]


def mixer(mix: Mix, classes: int) -> Alter | None:
    """Return a function that mixes a batch of images and labels; None if mixup and CutMix are off.

    The function accepts floating-point images (N, C, H, W) and int64 labels (N,).

    The function returns images of the same shape and dtype, and float32 targets (N, classes). A sample whose partner is
    not among the N samples of the call stays unmixed.

    Raises:
        InputError: there are fewer than two classes. The returned function raises InputError if the images are not
            floating point, or if CutMix is on and the samples have no height and width.
    """
    if not mix.mixup and not mix.cutmix:
        return None
    if classes < 2:
        raise InputError(
            f"mix.mixup and mix.cutmix mix the targets of two classes, but the number of classes is {max(classes, 0)}: "
            "set both to 0"
        )

    def alter(batch: Any, places: Tensor, generator_of: GeneratorOf) -> tuple[Tensor, Tensor]:
        images, labels = batch
        _check(images, mix)
        partners = _partners(places.tolist())
        size = (images.shape[-2], images.shape[-1]) if images.dim() > 2 else (1, 1)
        own, boxes = _draws(mix, places.tolist(), partners, size, generator_of)
        device = images.device
        index = torch.tensor(partners, dtype=torch.int64).to(device, non_blocking=True)
        other = images[index]
        if mix.mixup:
            # A CutMix pair gets the weight 1 in the mixup below. This weight leaves the images bit-identical.
            pixels = [weight if box is None else 1.0 for weight, box in zip(own, boxes, strict=True)]
            mixed = torch.lerp(other, images, _column(pixels, images))
        else:
            mixed = images
        if mix.cutmix:
            mixed = torch.where(_inside(boxes, size, device), other, mixed)
        whole = F.one_hot(labels, classes).float()  # (N, classes)
        return mixed, torch.lerp(whole[index], whole, _column(own, whole))

    return alter


def _check(images: Tensor, mix: Mix) -> None:
    if not images.is_floating_point():
        raise InputError(f"images are {images.dtype}, but mixing needs floating point: convert them in the transform")
    if mix.cutmix and images.dim() < 3:
        raise InputError(f"samples are {tuple(images.shape[1:])}, without height and width: set mix.cutmix=0")


def _partners(places: list[int]) -> list[int]:
    """Return the index in this batch of each sample's mixing partner. A sample without a partner in this batch gets its
    own index. `places` are the samples' positions in the whole batch."""
    rows = {place: row for row, place in enumerate(places)}
    return [rows.get(place ^ 1, row) for row, place in enumerate(places)]


def _draws(
    mix: Mix, places: list[int], partners: list[int], size: tuple[int, int], generator_of: GeneratorOf
) -> tuple[list[float], list[tuple[int, int, int, int] | None]]:
    """Draw how much weight each sample keeps when its partner is mixed in, and its CutMix box; None instead of a box
    means mixup."""
    own: list[float] = [1.0] * len(places)
    boxes: list[tuple[int, int, int, int] | None] = [None] * len(places)
    for row, (place, partner) in enumerate(zip(places, partners, strict=True)):
        if partner == row or place % 2:
            continue
        generator = generator_of(place)
        cut = mix.cutmix > 0 and (mix.mixup == 0 or generator.random() < 0.5)
        alpha = mix.cutmix if cut else mix.mixup
        weight = float(generator.beta(alpha, alpha))
        box = _box(weight, size, generator) if cut else None
        if box is not None:
            top, bottom, left, right = box
            weight = 1 - (bottom - top) * (right - left) / (size[0] * size[1])
        for each in (row, partner):
            own[each], boxes[each] = weight, box
    return own, boxes


def _box(weight: float, size: tuple[int, int], generator: np.random.Generator) -> tuple[int, int, int, int]:
    """Draw a box (top, bottom, left, right) that covers a fraction 1 - weight of the image, clipped to the image."""
    edges = []
    for length in size:
        half = math.sqrt(1 - weight) * length / 2
        center = generator.random() * length
        edges += [max(0, round(center - half)), min(length, round(center + half))]
    top, bottom, left, right = edges
    return top, bottom, left, right


def _inside(boxes: list[tuple[int, int, int, int] | None], size: tuple[int, int], device: torch.device) -> Tensor:
    """Return a mask, (N, 1, H, W), of the pixels inside each sample's box."""
    edges = torch.tensor([box or (0, 0, 0, 0) for box in boxes], dtype=torch.int64).view(-1, 4)
    edges = edges.to(device, non_blocking=True)
    top, bottom, left, right = (edge[:, None] for edge in edges.unbind(1))  # (N, 1)
    rows, columns = (torch.arange(length, device=device)[None] for length in size)
    down = (rows >= top) & (rows < bottom)  # (N, H)
    across = (columns >= left) & (columns < right)  # (N, W)
    return (down[:, :, None] & across[:, None, :])[:, None]


def _column(values: list[float], like: Tensor) -> Tensor:
    """Reshape one weight per sample, (N,), to (N, 1, ...), to multiply samples shaped as `like`."""
    column = torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)
    return column.view(-1, *[1] * (like.dim() - 1))
