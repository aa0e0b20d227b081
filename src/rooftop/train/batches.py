"""Which sequences a step is trained on: a function of the seed, the step and the place in the batch alone.

So each layout of ranks, and each size of micro-batches, sees the same sequences, and a training that goes on sees those
that would have come. The tokens are cut into sequences of one length; a pass takes each once, in an order of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor

from rooftop.errors import InputError
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
        sequences: that there are; a pass has each once.

    Raises:
        InputError: the tokens are fewer than one sequence takes.
    """

    def __init__(self, tokens: Tokens, length: int, batch: int, seed: int) -> None:
        self.tokens, self.length, self.batch, self.seed = tokens, length, batch, seed
        self.sequences = (len(tokens) - 1) // length
        if self.sequences < 1:
            raise InputError(
                f"{tokens.source} has {len(tokens)} tokens, a sequence of {length} takes {length + 1}: give more, or "
                "shorten the sequence"
            )

    def read(self, step: int, places: Iterable[int]) -> Tensor:
        """The sequences at some places of a step's batch, (places, length + 1), int64."""
        return torch.stack([self._sequence(step * self.batch + place) for place in places])

    def _sequence(self, number: int) -> Tensor:
        turn, place = divmod(number, self.sequences)
        start = self.length * shuffled(place, self.sequences, f"{self.seed} {turn}")
        return self.tokens.read(start, start + self.length + 1)


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
