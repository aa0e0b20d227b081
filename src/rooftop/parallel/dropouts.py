"""Dropout whose masks depend on the seed, a name, the step and the place in the whole batch, and not on the layout.

    dropouts = CounterDropouts(seed=1, batch=(dp_rank, dp))
    model = Gpt(config, dropouts=dropouts)
    model(tokens, targets, step=7)

No mask is kept: backward makes it again, and so does forward where it is recomputed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from rooftop.kernels import Box
from rooftop.parallel.randomness import Stream

Part = tuple[int, int]
"""(index, count): which of how many equal parts."""


class CounterDropouts:
    """Makes the dropouts of a model on this rank, by probability and name.

    Args:
        seed: of the masks, from 0 to 2^64 - 1.
        batch: which part of the whole batch is here, along dimension 0.
        split: which part is here along dimension 1: of the sequence, with sequence parallelism.
        heads: the same of attention's weights (B, H, S, T), whose names end in "weights_dropout".

    Attributes:
        step: of the training, from 0: each has other masks; micro-batches count too. May be a tensor, as of
            `rooftop.kernels.counter_dropout`.
        half: which part of the batch that is here is computed.
    """

    def __init__(self, seed: int, batch: Part = (0, 1), split: Part = (0, 1), heads: Part = (0, 1)) -> None:
        self.stream, self.half = Stream(seed), (0, 1)
        self.step: int | Tensor = 0
        self.batch, self.split, self.heads = batch, split, heads

    def __call__(self, probability: float, name: str) -> CounterDropout:
        """The dropout of a place, by its name in the whole model."""
        split = self.heads if name.endswith("weights_dropout") else self.split
        return CounterDropout(probability, name, self, (self.batch, split))

    @contextmanager
    def at(self, step: int | Tensor) -> Iterator[None]:
        """Within: the masks of that step, whatever the step is by then."""
        before, self.step = self.step, step
        try:
            yield
        finally:
            self.step = before

    @contextmanager
    def in_half(self, place: int) -> Iterator[None]:
        """Within: the masks of the first or second half of the batch that is here."""
        before, self.half = self.half, (place, 2)
        try:
            yield
        finally:
            self.half = before


class CounterDropout(nn.Module):
    """Drops with a probability; made by `CounterDropouts`."""

    def __init__(self, probability: float, name: str, made_by: CounterDropouts, parts: tuple[Part, Part]) -> None:
        super().__init__()
        self.probability, self.name, self.made_by, self.parts = probability, name, made_by, parts

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, ...), of which the batch and dimension 1 may be parts; like x."""
        (batch, batches), (split, splits) = self.parts
        half, halves = self.made_by.half
        batch, batches = batch * halves + half, batches * halves
        box = Box.whole((x.shape[0] * batches, x.shape[1] * splits, *x.shape[2:]))
        box = box.cut(0, batch, batches).cut(1, split, splits)
        return self.made_by.stream.dropout(x, self.name, self.probability, self.made_by.step, box, self.training)

    def extra_repr(self) -> str:
        """Its probability and name."""
        return f"p={self.probability}, {self.name}"
