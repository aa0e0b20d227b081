"""The weight layouts of spconv's versions: the order of dimensions in the weight of a sparse convolution.

The table in `checkpoints.py` says which version saved which layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

LAYOUTS = ("KRSC", "RSKC", "RSCK")
OWN_VERSION = 2
"""The version number that `state_dict` records for a convolution of this library; spconv records 1."""


def fitting(weight: Tensor, shape: tuple[int, ...]) -> list[str]:
    """Return the layouts in which a weight fits a layer whose weight has `shape` (out, *kernel, in). If KRSC fits, a
    layout with the same element order in memory for this shape is omitted."""
    if weight.dim() != len(shape):
        return []
    found = [layout for layout in LAYOUTS if tuple(as_krsc(weight, layout).shape) == shape]
    if "KRSC" not in found:
        return found
    whole = torch.empty(shape, device="meta")  # a permuted view is still contiguous if only dimensions of size 1 move
    return [layout for layout in found if layout == "KRSC" or not as_krsc(whole, layout).is_contiguous()]


def as_krsc(weight: Tensor, layout: str) -> Tensor:
    """Return a view (out, *kernel, in) of a weight that is in `layout`."""
    if layout == "RSKC":
        return weight.movedim(-2, 0)
    return weight.movedim(-1, 0) if layout == "RSCK" else weight
