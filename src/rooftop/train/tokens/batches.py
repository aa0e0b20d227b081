"""Choose the sequences of a step. The choice depends only on the seed, the step and the position in the batch.

So trainings with any layout or micro-batch size read the same sequences, and so does a resumed training. The tokens are
cut into sequences of equal length. A pass reads each sequence once, and each pass has a different order. In a mixture,
the share of each row (data set) determines how many passes the training makes over the row.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from hashlib import blake2b

import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.train.tokens.mixtures import Mixture
from rooftop.train.tokens.proportions import Proportions
from rooftop.train.tokens.tokens import Tokens
from rooftop.words import counted

ROUNDS = 6  # rounds of the Feistel network; four are enough to look random


class Batches:
    """The sequences of each step.

    Args:
        tokens: the data.
        length: tokens per sequence; one additional token is read, as the target of the last token.
        batch: sequences per step, summed over all ranks.
        seed: seed of the order.

    Attributes:
        sequences: number of sequences; without a mixture, a pass reads each sequence once.
        parts: for each row (data set), its number of sequences, and its share of all sequences that the training reads.

    Raises:
        InputError: the tokens, or the tokens of a row, are too few for one sequence.
    """

    def __init__(self, tokens: Tokens | Mixture, length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self._rows = tokens.rows if isinstance(tokens, Mixture) else [tokens]
        counts = [(len(row) - 1) // length for row in self._rows]
        for row, count in zip(self._rows, counts, strict=True):
            if count < 1:
                raise InputError(
                    f"{row.source} has {counted(len(row), 'token')}, but a sequence of {length} needs {length + 1}: "
                    "give more tokens, or shorten the sequence"
                )
        self.sequences = sum(counts)
        shares = tokens.shares(counts) if isinstance(tokens, Mixture) else [Fraction(1)]
        self.parts = list(zip(counts, shares, strict=True))
        self._proportions = Proportions(shares)

    def read(self, step: int, places: Iterable[int]) -> Tensor:
        """Read the sequences at given positions of a step's batch: (positions, length + 1) int64."""
        rows, numbers = self._proportions.between(step * self.batch, (step + 1) * self.batch)
        return torch.stack([self._sequence(int(rows[place]), int(numbers[place])) for place in places])

    def _sequence(self, row: int, number: int) -> Tensor:
        count = self.parts[row][0]
        turn, place = divmod(number, count)
        key = f"{self.seed} {turn}" if len(self._rows) == 1 else f"{self.seed} row {row} {turn}"
        start = self.length * shuffled(place, count, key)
        return self._rows[row].read(start, start + self.length + 1)


def shuffled(place: int, count: int, key: str) -> int:
    """Return element `place` of a pseudorandom permutation of 0..count - 1; the key determines the permutation.

    No list is created. A Feistel network permutes the numbers below a power of four, the smallest that is at least
    `count` and at least 4. The network is applied until the result is below `count`. Source: Black and Rogaway 2002,
    "Ciphers with Arbitrary Finite Domains".
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for turn in range(ROUNDS):
            word = blake2b(f"{key} {turn} {right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(word, "little") & mask)
        place = left << half | right
        if place < count:
            return place
