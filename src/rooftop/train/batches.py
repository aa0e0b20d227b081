"""Which sequences a step is trained on: a function of the seed, the step and the place in the batch alone.

So each layout of ranks, and each size of micro-batches, sees the same sequences, and a training that goes on sees those
that would have come. The tokens are cut into sequences of one length; a pass takes each once, in an order of its own.
Of a mixture each row is gone through like that, as often as its share needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from hashlib import blake2b

import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.train.mixtures import Mixture
from rooftop.train.proportions import Proportions
from rooftop.train.tokens import Tokens

ROUNDS = 6  # of the shuffling network; four make it look random


class Batches:
    """The sequences of each step.

    Args:
        tokens: all of them.
        length: of a sequence; one token more is read, as the last one's target.
        batch: sequences of a step, of all ranks.
        seed: of the order.

    Attributes:
        sequences: that there are; a pass over tokens that are no mixture has each once.
        parts: of each row of a mixture the sequences that it has, and its share of those that are read.

    Raises:
        InputError: the tokens, or those of a row, are fewer than one sequence takes.
    """

    def __init__(self, tokens: Tokens | Mixture, length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self._rows = tokens.rows if isinstance(tokens, Mixture) else [tokens]
        counts = [(len(row) - 1) // length for row in self._rows]
        for row, count in zip(self._rows, counts, strict=True):
            if count < 1:
                raise InputError(
                    f"{row.source} has {len(row)} tokens, a sequence of {length} takes {length + 1}: give more, or "
                    "shorten the sequence"
                )
        self.sequences = sum(counts)
        shares = tokens.shares(counts) if isinstance(tokens, Mixture) else [Fraction(1)]
        self.parts = list(zip(counts, shares, strict=True))
        self._proportions = Proportions(shares)

    def read(self, step: int, places: Iterable[int]) -> Tensor:
        """The sequences at some places of a step's batch, (places, length + 1), int64."""
        rows, numbers = self._proportions.between(step * self.batch, (step + 1) * self.batch)
        return torch.stack([self._sequence(int(rows[place]), int(numbers[place])) for place in places])

    def _sequence(self, row: int, number: int) -> Tensor:
        count = self.parts[row][0]
        turn, place = divmod(number, count)
        key = f"{self.seed} {turn}" if len(self._rows) == 1 else f"{self.seed} row {row} {turn}"
        start = self.length * shuffled(place, count, key)
        return self._rows[row].read(start, start + self.length + 1)


def shuffled(place: int, count: int, key: str) -> int:
    """What stands at a place of the numbers 0 to count - 1 in an order that follows from the key.

    No list is made: a Feistel network permutes the smallest power of four that has room, and is gone through until the
    number is one of them. Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains".
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
