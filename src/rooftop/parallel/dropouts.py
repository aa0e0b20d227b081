"""Dropout whose masks depend on the seed, a name, the step and the place in the whole batch, and not on the layout.

    dropouts = CounterDropouts(seed=1, batch=(dp_rank, dp))
    model = Gpt(config, dropouts=dropouts)
    model(tokens, targets, step=7)

Masks are not stored. Backward and recomputation generate them again. With several micro-batches in flight, each one
is recomputed at its own place:

    place = dropouts.place
    with dropouts.at(place):
        ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from rooftop.kernels import Box
from rooftop.parallel.chunks import Chunks
from rooftop.parallel.randomness import Stream

Part = tuple[int, int]
"""(index, count): which of how many equal parts."""


@dataclass(frozen=True)
class Place:
    """Where in the whole training a forward pass is.

    Attributes:
        step: of the training, from 0: each has other masks. May be a tensor, as of `rooftop.kernels.counter_dropout`.
        batch: which part of the step's whole batch is computed, along dimension 0.
        chunks: which positions of its sequences are here; None: all.
    """

    step: int | Tensor = 0
    batch: Part = (0, 1)
    chunks: Chunks | None = None


class CounterDropouts:
    """Makes the dropouts of a model on this rank, by probability and name.

    Args:
        seed: of the masks, from 0 to 2^64 - 1.
        batch: which part of the whole batch is here, along dimension 0.
        split: which part of the positions that are here is on this rank, along dimension 1, with sequence parallelism.
        heads: which part of the heads is on this rank; for attention's weights (B, H, S, T), whose names end in
            "weights_dropout".

    Attributes:
        place: where in the training the next forward pass is.
        half: which part of the batch that is here is computed.
    """

    def __init__(self, seed: int, batch: Part = (0, 1), split: Part = (0, 1), heads: Part = (0, 1)) -> None:
        self.stream, self.half = Stream(seed), (0, 1)
        self.place = Place(batch=batch)
        self.split, self.heads = split, heads

    def __call__(self, probability: float, name: str) -> CounterDropout:
        """The dropout at a place of the model, by its name in the whole model."""
        return CounterDropout(probability, name, self, of_weights=name.endswith("weights_dropout"))

    @property
    def step(self) -> int | Tensor:
        """That of `place`."""
        return self.place.step

    @step.setter
    def step(self, step: int | Tensor) -> None:
        self.place = replace(self.place, step=step)

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Within: the masks of that place, wherever the training is by then."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    @contextmanager
    def in_half(self, place: int) -> Iterator[None]:
        """Within: the masks of the first or second half of the batch that is here."""
        before, self.half = self.half, (place, 2)
        try:
            yield
        finally:
            self.half = before

    def boxes(self, shape: tuple[int, ...], of_weights: bool) -> list[Box]:
        """The parts of the whole mask that a tensor of this shape has here. They follow each other along dimension 1,
        those of attention's weights along dimension 2."""
        (batch, batches), (half, halves) = self.place.batch, self.half
        part, parts = self.heads if of_weights else self.split
        chunks, along = self.place.chunks, 2 if of_weights else 1
        if chunks is None:
            chunks = Chunks.whole(shape[along] * (1 if of_weights else parts))
        whole = [shape[0] * batches * halves, *shape[1:]]
        whole[along] = chunks.length
        whole[1] *= parts if of_weights else 1
        box = Box.whole(whole).cut(0, batch * halves + half, batches * halves)
        if of_weights:
            return chunks.boxes(box.cut(1, part, parts), along)
        return chunks.part(part, parts).boxes(box, along)


class CounterDropout(nn.Module):
    """Drops with a probability; made by `CounterDropouts`."""

    def __init__(self, probability: float, name: str, made_by: CounterDropouts, of_weights: bool) -> None:
        super().__init__()
        self.probability, self.name, self.made_by, self.of_weights = probability, name, made_by, of_weights

    def forward(self, x: Tensor) -> Tensor:
        """x (B, S, ...), or attention's weights (B, H, S, T), of which the batch, the heads and S may be parts; like
        x."""
        if not self.training or not x.numel():
            return x
        along = 2 if self.of_weights else 1
        boxes = self.made_by.boxes(tuple(x.shape), self.of_weights)
        lengths = [box.size[along] * box.size[along + 1] for box in boxes]
        drop, step = self.made_by.stream.dropout, self.made_by.place.step
        parts = [
            drop(part, self.name, self.probability, step, box)
            for part, box in zip(x.split(lengths, along), boxes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, along)

    def extra_repr(self) -> str:
        """Its probability and name."""
        return f"p={self.probability}, {self.name}"
