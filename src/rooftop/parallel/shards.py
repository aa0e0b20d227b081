"""Describe a tensor parallel rank's part of a parameter, for initial values and for sums and norms of gradients.

A split layer describes each of its split parameters in its attribute `shards`. Parameters without a description are
whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rooftop.kernels import Box


@dataclass(frozen=True)
class Piece:
    """A part of a whole parameter, which one rank holds: a range of its rows, or of its columns.

    Attributes:
        box: the part of the whole parameter.
        holders: the number of ranks that hold the same rows; these ranks are adjacent in the group.
        first: whether this rank is the first holder of the piece.
    """

    box: Box
    holders: int = 1
    first: bool = True

    def rows(self, start: int, count: int) -> Piece:
        """The piece with `count` rows of this piece, from row `start` on."""
        box = self.box
        begin = (box.start[0] + start * box.strides[0], *box.start[1:])
        return Piece(Box(box.shape, begin, (count, *box.size[1:]), box.stride), self.holders, self.first)


@dataclass(frozen=True)
class Shard:
    """A rank's part of a parameter: consecutive pieces along the first dimension, followed by padding.

    Attributes:
        pieces: the pieces; empty if the part is only padding.
        padding: the number of rows after the pieces, which the whole parameter does not have. These rows are 0 and get
            no gradient.
    """

    pieces: tuple[Piece, ...]
    padding: int = 0

    def parts(self, tensor: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """Yield each piece with a view of its rows in the parameter, or in the gradient."""
        row = 0
        for piece in self.pieces:
            yield piece, tensor[row : row + piece.box.size[0]]
            row += piece.box.size[0]

    def rows(self, start: int, count: int) -> Shard:
        """The shard of a data rank that has `count` rows of this shard (pieces and padding), from row `start` on."""
        pieces, row, end = [], 0, start + count
        for piece in self.pieces:
            first, last = max(start, row), min(end, row + piece.box.size[0])
            if first < last:
                pieces.append(piece.rows(first - row, last - first))
            row += piece.box.size[0]
        return Shard(tuple(pieces), count - sum(piece.box.size[0] for piece in pieces))

    def of(self, whole: Tensor) -> Tensor:
        """Copy the rank's part of a whole parameter to a new tensor."""
        held = [piece.box.of(whole) for piece in self.pieces]
        row = held[0].shape[1:] if held else whole.shape[1:]
        return torch.cat((*held, whole.new_zeros(self.padding, *row)))


def shards_of(model: nn.Module) -> dict[str, Shard]:
    """The shards of a model's split parameters, by name. A parameter that two modules share is listed under both
    names.
    """
    found: dict[str, Shard] = {}
    for name, module in model.named_modules():
        records: Mapping[str, Shard] = getattr(module, "shards", {})
        found |= {f"{name}.{key}" if name else key: shard for key, shard in records.items()}
    return found


def rows_of(name: str, whole: tuple[int, ...], start: int, rows: int, blocks: int, index: int, count: int) -> Piece:
    """This rank's piece of `rows` rows of a parameter, from row `start` on. These rows consist of indivisible blocks.

    If there are more ranks than blocks, several ranks hold the same block.

    Args:
        name: name of these rows for error messages.
        whole: shape of the whole parameter.
        index, count: index of the rank, and number of ranks.

    Raises:
        ValueError: the number of blocks is neither a multiple nor a divisor of the number of ranks, or several ranks
            would hold the same block of one row.
    """
    if blocks % count == 0:
        holders, size, place = 1, rows // count, index
    elif count % blocks == 0 and blocks < rows:
        holders, size = count // blocks, rows // blocks
        place = index // holders
    else:
        fitting = [n for n in range(1, blocks + 1) if blocks % n == 0]
        raise ValueError(
            f"{name} cannot be split among {count} ranks: its number of indivisible blocks, {blocks}, is not divisible "
            f"by {count}; use {', '.join(map(str, fitting[-4:]))} ranks, or change the number of blocks"
        )
    at = (start + place * size, *(0,) * (len(whole) - 1))
    return Piece(Box(whole, at, (size, *whole[1:])), holders, index % holders == 0)


def padded_rows_of(whole: tuple[int, ...], index: int, count: int) -> Shard:
    """This rank's shard of a parameter, with the same number of rows on each rank. If the rows cannot be divided
    evenly, the last rows are padding.
    """
    rows = -(-whole[0] // count)
    start = min(index * rows, whole[0])
    held = min(rows, whole[0] - start)
    piece = Piece(Box(whole, (start, *(0,) * (len(whole) - 1)), (held, *whole[1:])))
    return Shard((piece,) if held else (), rows - held)
