"""Plan which rank writes which part of a checkpoint. Each part of a tensor is written once, and each rank writes about
the same number of bytes.

    rank 0 holds   layers.0.up[0:64]    norm        rank 0 writes   layers.0.up[0:64]
    rank 1 holds   layers.0.up[64:128]  norm   ->   rank 1 writes   layers.0.up[64:128]  norm
    rank 2 holds   layers.1.up[0:64]    norm        rank 2 writes   layers.1.up[0:64]
    ...

The ranks exchange lists of the parts that they hold (`Held`). The plan depends only on these lists. If several ranks
hold a part, the one of them with the fewest bytes to write so far writes this part. Data and context parallel ranks
hold the same parts, unless they shard the model. Tensor parallel ranks hold the same norms. If there are more of these
ranks than heads of keys and values, several ranks hold the same head. The first and the last pipeline stage hold the
same tied embedding. Large parts that several ranks hold are first cut by rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from torch import Tensor

from rooftop.kernels import Box
from rooftop.parallel import Shard
from rooftop.train.checkpoints.files import BLOCK_BYTES, ITEM_BYTES, FilePiece

EVEN = 8
"""A tensor that several ranks hold is cut into parts of about 1/8 of the bytes that a rank writes on average, or of
`BLOCK_BYTES` if this is more.
"""


@dataclass(frozen=True)
class Held:
    """The part of one of the model's tensors that a rank holds.

    Attributes:
        name: the tensor's name in the whole model.
        dtype: a key of `ITEM_BYTES`.
        shape: shape of the whole tensor.
        pieces: the boxes of the whole tensor that the rank holds, each as (start, size) over all dimensions. The rank
            stores these boxes in one tensor, concatenated along the first dimension.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]

    @classmethod
    def of(cls, name: str, dtype: str, shape: Sequence[int], shard: Shard | None) -> Held:
        """Describe a rank's shard of a tensor; if the shard is None, the rank holds the whole tensor.

        Raises:
            ValueError: the shard is not made of contiguous ranges of rows and columns.
        """
        if shard is None:
            return cls(name, dtype, tuple(shape), (((0,) * len(shape), tuple(shape)),))
        if any(set(piece.box.strides) - {1} for piece in shard.pieces):
            raise ValueError(f"{name}: a checkpoint stores shards of contiguous rows and columns, got {shard}")
        whole = shard.pieces[0].box.shape if shard.pieces else tuple(shape)
        pieces = tuple((piece.box.start, piece.box.size) for piece in shard.pieces if prod(piece.box.size))
        return cls(name, dtype, whole, pieces)


def planned(held: Sequence[Sequence[Held]]) -> list[list[FilePiece]]:
    """Plan the pieces that each rank writes; the result is the same on all ranks.

    Args:
        held: for each rank, in order, the parts that it holds; several ranks may hold the same part.

    Raises:
        ValueError: the different pieces of a tensor do not have as many elements together as the tensor, or the ranks
            disagree on its shape or dtype.
    """
    holders: dict[FilePiece, list[int]] = {}
    wholes: dict[str, tuple[str, tuple[int, ...]]] = {}
    for rank, every in enumerate(held):
        for each in every:
            if not each.pieces:
                continue
            if wholes.setdefault(each.name, (each.dtype, each.shape)) != (each.dtype, each.shape):
                raise ValueError(
                    f"{each.name} is {wholes[each.name]} on one rank, {(each.dtype, each.shape)} on another"
                )
            for start, size in each.pieces:
                ranks = holders.setdefault(FilePiece(each.name, each.dtype, each.shape, start, size), [])
                if rank not in ranks:  # a rank may list a parameter twice, e.g. a tied weight in one stage
                    ranks.append(rank)
    _check_complete(holders, wholes)
    total = sum(piece.bytes for piece in holders)
    most = max(total // len(held) // EVEN, BLOCK_BYTES)
    parts = [(part, ranks) for piece, ranks in holders.items() for part in _cut(piece, len(ranks), most)]
    written: list[list[FilePiece]] = [[] for _ in held]
    loads = [0] * len(held)
    for part, ranks in sorted(parts, key=lambda each: (len(each[1]) > 1, -each[0].bytes)):
        least = min(ranks, key=lambda rank: (loads[rank], rank))
        written[least].append(part)
        loads[least] += part.bytes
    order = {part.key: number for number, (part, _) in enumerate(parts)}
    return [sorted(every, key=lambda part: (-ITEM_BYTES[part.dtype], order[part.key])) for every in written]


def _check_complete(holders: Mapping[FilePiece, object], wholes: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    there = dict.fromkeys(wholes, 0)
    for piece in holders:
        there[piece.name] += prod(piece.size)
    for name, (_, shape) in wholes.items():
        if there[name] != prod(shape):
            raise ValueError(f"the ranks together hold {there[name]} elements of {name}, but it has {prod(shape)}")


def _cut(piece: FilePiece, holders: int, most: int) -> list[FilePiece]:
    """Cut a piece by rows into pieces of about `most` bytes, so that the ranks that hold it share the work. `holders`
    is their number. A piece that only one rank holds stays whole."""
    parts = min(ceil(piece.bytes / most), piece.size[0]) if piece.size and holders > 1 else 1
    rows = ceil(piece.size[0] / parts) if parts > 1 else 0
    if not rows:
        return [piece]
    return [
        replace(
            piece,
            start=(piece.start[0] + first, *piece.start[1:]),
            size=(min(rows, piece.size[0] - first), *piece.size[1:]),
        )
        for first in range(0, piece.size[0], rows)
    ]


def part_of(piece: FilePiece, local: Tensor, held: Held) -> Tensor:
    """Return the elements of a piece that this rank writes, as a view of the rank's own tensor `local`. `held`
    describes which part of the whole tensor `local` is."""
    if not piece.size:
        return local
    row = 0
    for start, size in held.pieces:
        first = piece.start[0] - start[0]
        if start[1:] == piece.start[1:] and size[1:] == piece.size[1:] and 0 <= first <= size[0] - piece.size[0]:
            return local[row + first : row + first + piece.size[0]]
        row += size[0]
    raise ValueError(f"{piece.key}: the piece to write lies in none of the pieces that this rank holds: {held}")


def box_of(piece: FilePiece) -> Box:
    """The box that a piece occupies in the whole tensor."""
    return Box(piece.shape, piece.start, piece.size)
