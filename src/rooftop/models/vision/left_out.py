"""Check whether a file's ignored tensors equal those of the model, which computes these tensors itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rooftop.models.vision.swin import Size, SwinBlock, relative_positions


def differing_keys(model: nn.Module, left_out: Mapping[str, tuple[str, Tensor]]) -> list[str]:
    """The ignored keys of a file whose tensors differ from the model's own.

    Args:
        model: the model; it may be on the meta device.
        left_out: maps each ignored key of the file to (the model's name of the tensor, the tensor).
    """
    return [key for key, (ours, tensor) in left_out.items() if not _follows(model, ours, tensor)]


def _follows(model: nn.Module, ours: str, given: Tensor) -> bool:
    owner, _, name = ours.rpartition(".")
    if name == "num_batches_tracked":  # this counter does not affect the results
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
    """Whether a mask (windows, N, N) is the attention mask of a square map shifted by half a window.

    The mask is 0 for a visible pair and negative for a hidden pair. The mask may be for any image size, because
    Rooftop's model computes a mask for each size.
    """
    high, wide = window
    rows = math.isqrt(len(mask)) if mask.dim() == 3 else 0
    if mask.shape != (rows * rows, high * wide, high * wide):
        return False
    regions = [_regions(rows * size, size) for size in window]
    labels = 3 * regions[0][:, None] + regions[1][None, :]  # (rows * high, rows * wide)
    windows = labels.view(rows, high, rows, wide).transpose(1, 2).reshape(rows * rows, high * wide)
    return torch.equal(mask < 0, windows[:, :, None] != windows[:, None, :])


def _regions(length: int, window: int) -> Tensor:
    """The region of each position on an axis shifted by half a window.

    Region 0 is before the last window. Region 1 is the first half of the last window. Region 2 is its second half: the
    positions that wrapped around.
    """
    place = torch.arange(length)
    return (place >= length - window).long() + (place >= length - window // 2).long()
