"""Check the values of neighbour tables, (M, T) int32: each value is the index of a row of features, or -1 for no
neighbour.
"""

from __future__ import annotations

import torch
from torch import Tensor


def check_neighbours(name: str, features: Tensor, neighbours: Tensor) -> None:
    """On a CPU, check that each value of the table is the index of a row of features, or -1. (On a GPU, the kernels
    treat other values as -1.)
    """
    if not features.is_cpu or neighbours.numel() == 0:
        return
    least, most = (int(each) for each in neighbours.aminmax())
    if least < -1 or most >= features.shape[0]:
        raise ValueError(
            f"{name}: neighbours must be from 0 to {features.shape[0] - 1}, the rows of features, or -1 for none, "
            f"got {least} to {most}"
        )


def check_reverse(name: str, neighbours: Tensor, reverse: Tensor | None) -> None:
    """On a CPU, check that the reverse table has exactly the same pairs as the forward table."""
    if not neighbours.is_cpu:
        return
    table = neighbours.flip(1) if reverse is None else reverse
    site, tap = (table >= 0).nonzero(as_tuple=True)
    row = table[site, tap].long()
    as_many = len(row) == int((neighbours >= 0).sum()) and bool((row < neighbours.shape[0]).all())
    if not as_many or not torch.equal(neighbours[row, tap].long(), site):
        which = "reverse" if reverse is not None else "neighbours, mirrored (reverse is None),"
        raise ValueError(
            f"{name}: {which} must have row m at [n, t] exactly where neighbours has n at [m, t]: "
            "take both from one rulebook"
        )
