"""Tensors that files hold although a model computes them: compared with these before they are left out."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rooftop.models.vision.swin import Size, SwinBlock, relative_positions


def differing_keys(model: nn.Module, left_out: Mapping[str, tuple[str, Tensor]]) -> list[str]:
    """The keys of a file that are left out although their tensors are not what the model computes.

    Args:
        model: also on the meta device.
        left_out: the keys of a file -> the model's names for them, and the tensors.
    """
    return [key for key, (ours, tensor) in left_out.items() if not _follows(model, ours, tensor)]


def _follows(model: nn.Module, ours: str, given: Tensor) -> bool:
    owner, _, name = ours.rpartition(".")
    if name == "num_batches_tracked":  # has no part in the results
        return True
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return False
    with torch.device("cpu"):
        if name == "relative_position_index":
            return torch.equal(given.flatten().long(), relative_positions(module.window))  # type: ignore[arg-type]
        if name == "attn_mask" and isinstance(module, SwinBlock):
            return _hides_across_edges(given, module.attn.window)
    return False


def _hides_across_edges(mask: Tensor, window: Size) -> bool:
    """Whether a mask (windows, N, N) is that of a square map shifted by half a window: 0 where a pair is seen, else
    less. Which size of photographs it is of does not matter: ours is made for each."""
    high, wide = window
    rows = math.isqrt(len(mask)) if mask.dim() == 3 else 0
    if mask.shape != (rows * rows, high * wide, high * wide):
        return False
    regions = [_regions(rows * size, size) for size in window]
    labels = 3 * regions[0][:, None] + regions[1][None, :]  # (rows * high, rows * wide)
    windows = labels.view(rows, high, rows, wide).transpose(1, 2).reshape(rows * rows, high * wide)
    return torch.equal(mask < 0, windows[:, :, None] != windows[:, None, :])


def _regions(length: int, window: int) -> Tensor:
    """Of each position on an axis that was shifted by half a window: 0 before the last window, 1 in it, and 2 for those
    that came from the other end."""
    place = torch.arange(length)
    return (place >= length - window).long() + (place >= length - window // 2).long()
