"""Assemble a tensor parallel rank's part of a parameter from the parts that ranks of a different layout saved.

    tp=2 held            tp=4 holds
    +----------+         +-----+
    | rank 0   |   ->    |  0  |   each new piece copies from each old piece
    |          |         |  1  |   the elements that both contain;
    +----------+         +-----+   boxes are positions in the whole tensor;
    | rank 1   |         |  2  |   padding stays 0
    |          |         |  3  |
    +----------+         +-----+

In format 1, each rank's file lists the pieces of the whole tensors that the rank holds. The rows of gate and up of a
gated MLP are separate pieces. A key head that several ranks share is in the file of each of these ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

from rooftop.kernels import Box
from rooftop.parallel import Piece, Shard

Record = tuple[list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]], int]
"""A shard as plain values: (pieces, number of padding rows). A piece is (shape of the whole tensor, start, size,
whether this rank is the first of the ranks that hold the piece).
"""


def shards_from(found: Mapping[str, Record]) -> dict[str, Shard]:
    """Read the shards in a file, by parameter. The file does not say how many ranks hold a piece.

    Raises:
        ValueError, TypeError: the records are invalid.
    """
    return {
        name: Shard(tuple(Piece(Box(*box), first=first) for *box, first in pieces), padding)
        for name, (pieces, padding) in found.items()
    }


def put_together(here: Shard | None, shape: Sequence[int], parts: Sequence[tuple[Shard | None, Tensor]]) -> Tensor:
    """Assemble a rank's part of a parameter or optimizer state from the parts of all ranks of a different layout.

    Args:
        here: the part to assemble; None: the whole tensor.
        shape: shape of the part that the rank holds, with padding.
        parts: for each rank of the other layout, in order, its shard and its tensor. A shard of None means that the
            rank held the whole tensor.

    Returns:
        A new tensor of that shape on the CPU; padding is 0.

    Raises:
        ValueError: the parts do not cover the rank's part, or belong to another whole tensor.
    """
    theirs = [_checked(shard, tensor) for shard, tensor in (parts[:1] if parts[0][0] is None else parts)]
    found = torch.zeros(tuple(shape), dtype=parts[0][1].dtype)
    for piece, place in _checked(here, found)[0].parts(found):
        copied = 0
        for shard, tensor in theirs:
            for other, source in shard.parts(tensor):
                if other.first and (common := common_part(piece.box, other.box)):
                    to, of = common
                    copied += place[to].copy_(source[of]).numel()
        if copied != prod(piece.box.size):
            raise ValueError(f"the parts have {copied} of {prod(piece.box.size)} elements of {piece.box}")
    return found


def _checked(shard: Shard | None, tensor: Tensor) -> tuple[Shard, Tensor]:
    """Check that a tensor has as many rows as its pieces and padding together, and the other sizes of its pieces.

    Returns the shard, which is one piece if `shard` is None, and the tensor.
    """
    held = shard or Shard((Piece(Box.whole(tensor.shape)),))
    rows = sum(piece.box.size[0] for piece in held.pieces) + held.padding
    if tensor.dim() == 0 or rows != len(tensor) or any(piece.box.size[1:] != tensor.shape[1:] for piece in held.pieces):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} does not fit the pieces of {held}")
    return held, tensor


def common_part(one: Box, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the slices of the common elements in each of two parts; None if the parts have no common element.

    Raises:
        ValueError: the parts belong to whole tensors of different shapes.
    """
    if one.shape != other.shape:
        raise ValueError(f"the parts belong to whole tensors of different shapes, {one.shape} and {other.shape}")
    ends = zip(one.start, one.size, other.start, other.size, strict=True)
    ranges = [(max(a, b), min(a + n, b + m)) for a, n, b, m in ends]
    if any(first >= end for first, end in ranges):
        return None
    in_one, in_other = (
        tuple(slice(first - start, end - start) for (first, end), start in zip(ranges, box.start, strict=True))
        for box in (one, other)
    )
    return in_one, in_other
