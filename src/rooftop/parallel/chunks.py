"""The positions of a sequence that a rank holds. A sequence is cut into equal chunks, and each rank holds some of them.

    Chunks.zigzag(16, index=1, count=2)          positions 4 to 7 and 8 to 11 of 16
    Chunks.whole(16).part(index=1, count=4)      positions 4 to 7

Under a causal mask, later positions attend to more keys than earlier positions. A context parallel rank therefore takes
one chunk from the front and one from the back, so that all ranks have the same number of visible pairs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.kernels import Box


@dataclass(frozen=True)
class Chunks:
    """Positions of a sequence, in ascending order.

    Attributes:
        length: number of positions in the whole sequence.
        size: number of positions in a chunk, a divisor of `length`.
        places: ascending indices of the rank's chunks.

    Raises:
        ValueError: the size does not divide the length, or the places are not ascending indices of chunks.
    """

    length: int
    size: int
    places: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.length < 0 or self.size < 1 or self.length % self.size:
            raise ValueError(f"Chunks: got a size of {self.size}, expected a divisor of the length {self.length}")
        ascending = all(a < b for a, b in zip(self.places, self.places[1:], strict=False))
        if not ascending or not all(0 <= place < self.length // self.size for place in self.places):
            raise ValueError(
                f"Chunks: expected increasing places from 0 to {self.length // self.size - 1}, got {self.places}"
            )

    @staticmethod
    def whole(length: int) -> Chunks:
        """A chunk with all positions of a sequence."""
        return Chunks(length, max(1, length), (0,) if length else ())

    @staticmethod
    def zigzag(length: int, index: int, count: int) -> Chunks:
        """Split a sequence into 2 * `count` chunks, and take chunk `index` from the front and chunk `index` from the
        back. A single rank gets all chunks.

        Raises:
            ValueError: the length is not a multiple of twice the number of ranks.
        """
        _check_place(index, count)
        if count == 1:
            return Chunks.whole(length)
        if length % (2 * count):
            raise ValueError(
                f"{length} positions cannot be split among {count} context parallel ranks: the length must be a "
                f"multiple of {2 * count}, two chunks for each rank; pad the sequences"
            )
        return Chunks(length, length // (2 * count), (index, 2 * count - 1 - index))

    def __len__(self) -> int:
        """The number of positions on the rank."""
        return self.size * len(self.places)

    def part(self, index: int, count: int) -> Chunks:
        """Part `index` of `count` equal parts of these positions, such as the part of a sequence parallel rank.

        Raises:
            ValueError: the positions cannot be split into `count` equal parts.
        """
        _check_place(index, count)
        if len(self) % count:
            raise ValueError(f"{len(self)} positions cannot be split among {count} ranks: pad the sequences")
        held = len(self) // count
        size = math.gcd(self.size, held) or 1
        finer = [place * (self.size // size) + step for place in self.places for step in range(self.size // size)]
        return Chunks(self.length, size, tuple(finer[index * held // size : (index + 1) * held // size]))

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield (first, end) of each run of consecutive positions on the rank; `end` is the position after the run."""
        start = end = -1
        for place in self.places:
            if place * self.size != end:
                if end > start:
                    yield start, end
                start = place * self.size
            end = (place + 1) * self.size
        if end > start:
            yield start, end

    def positions(self, device: torch.device | str = "cpu") -> Tensor:
        """The rank's positions in the sequence, (len(self),) int64."""
        runs = [torch.arange(first, end, device=device) for first, end in self.runs()]
        return torch.cat(runs) if runs else torch.zeros(0, dtype=torch.int64, device=device)

    def of(self, whole: Tensor, dim: int) -> Tensor:
        """Take these positions from a tensor that has all positions along a dimension. The result is a view if the
        positions are contiguous.

        Raises:
            ValueError: the tensor does not have `length` positions along the dimension.
        """
        if whole.shape[dim] != self.length:
            raise ValueError(
                f"Chunks: expected a tensor with all {self.length} positions along dimension {dim}, got "
                f"{tuple(whole.shape)}"
            )
        runs = [whole.narrow(dim, first, end - first) for first, end in self.runs()]
        return runs[0] if len(runs) == 1 else torch.cat(runs, dim) if runs else whole.narrow(dim, 0, 0)

    def boxes(self, box: Box, dim: int) -> list[Box]:
        """Return the parts of a box at these positions. The box must cover the whole sequence along the dimension.

        Successive chunks at equal distances share one box, with this distance as its stride. The boxes are in the order
        of the positions. In each box, two dimensions replace `dim`: chunk, and position within the chunk.
        """
        assert box.size[dim] == box.shape[dim] == self.length, (box, dim, self)
        shape = (*box.shape[:dim], self.length // self.size, self.size, *box.shape[dim + 1 :])
        return [
            Box(
                shape,
                (*box.start[:dim], first, 0, *box.start[dim + 1 :]),
                (*box.size[:dim], count, self.size, *box.size[dim + 1 :]),
                (*box.strides[:dim], pace, 1, *box.strides[dim + 1 :]),
            )
            for first, count, pace in self._progressions()
        ]

    def _progressions(self) -> Iterator[tuple[int, int, int]]:
        """Group the chunk indices `places` into runs of equally spaced indices. Yield (first index, number of indices,
        distance between them) for each run."""
        left = self.places
        while left:
            pace, count = left[1] - left[0] if len(left) > 1 else 1, 1
            while count < len(left) and left[count] == left[0] + count * pace:
                count += 1
            yield left[0], count, pace
            left = left[count:]


def _check_place(index: int, count: int) -> None:
    if count < 1 or not 0 <= index < count:
        raise ValueError(
            f"Chunks: expected count of at least 1, and index from 0 to count - 1, got index={index} and count={count}"
        )
