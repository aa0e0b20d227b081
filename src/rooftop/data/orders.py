"""Determine the samples of each batch of an epoch, and each rank's part of a batch."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rooftop.errors import InputError

Numbers = NDArray[np.int64]


@dataclass
class Order:
    """The order in which the samples of a data set form the batches of an epoch.

    Attributes:
        samples: number of samples in the data set.
        batch: number of samples in a batch, summed over all ranks.
        shuffle: whether an epoch's order is a random permutation, seeded by (seed, epoch).
        drop_last: whether to leave out the last samples of an epoch if they do not fill a batch.
        rank, ranks: this rank, and the number of ranks. Each rank gets consecutive samples of each batch, divided as
            evenly as possible.
        repeats: copies of each sample in a batch. A batch has batch / repeats different samples: first one copy of all
            these samples, then the next copy of all, and so on. Repeats do not change the number of batches in an
            epoch.

    Raises:
        InputError: a number is out of range.
    """

    samples: int
    batch: int
    shuffle: bool = False
    seed: int = 0
    drop_last: bool = False
    rank: int = 0
    ranks: int = 1
    repeats: int = 1
    _drawn: tuple[int, Numbers] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise InputError(f"batch is {self.batch}: expected 1 or more")
        if self.seed < 0:
            raise InputError(f"seed is {self.seed}: expected 0 or more")
        if not 0 <= self.rank < self.ranks:
            raise InputError(f"rank {self.rank} of {self.ranks}: expected 0 to {self.ranks - 1}")
        if self.repeats < 1 or self.batch % self.repeats:
            raise InputError(
                f"repeats is {self.repeats}: expected a number that divides the batch of {self.batch} samples"
            )
        if self.repeats > 1 and not self.drop_last:
            raise InputError(f"repeats is {self.repeats}: expected 1, or drop_last=True")

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)

    def part(self, epoch: int, number: int) -> tuple[Numbers, Numbers, Numbers]:
        """Return three arrays for the samples that this rank takes of batch `number`: their positions in the batch,
        their indices in the data set, and the copy number of each sample (0 without repeats)."""
        different = self.batch // self.repeats
        start = number * different
        size = self.batch if self.repeats > 1 else min(self.batch, self.samples - start)
        places = np.arange(self.rank * size // self.ranks, (self.rank + 1) * size // self.ranks, dtype=np.int64)
        numbers = start + places % different
        return places, self._epoch(epoch)[numbers] if self.shuffle else numbers, places // different

    def _epoch(self, epoch: int) -> Numbers:
        drawn = self._drawn  # several threads may set `_drawn` at the same time; each assignment is atomic
        if drawn is None or drawn[0] != epoch:
            # The spawn key separates the order's random numbers from those of the samples, which are seeded by (seed,
            # epoch, index) and, for further copies, (seed, epoch, index, copy).
            generator = np.random.default_rng(np.random.SeedSequence((self.seed, epoch), spawn_key=(1,)))
            drawn = self._drawn = (epoch, generator.permutation(self.samples))
        return drawn[1]
