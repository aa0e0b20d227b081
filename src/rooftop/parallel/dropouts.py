"""Dropout whose masks depend only on the seed, a name, the step and the position in the whole batch. The masks are the
same in every layout of ranks.

    dropouts = CounterDropouts(seed=1, batch=(dp_rank, dp))
    model = Gpt(config, dropouts=dropouts)
    model(tokens, targets, step=7)

Masks are not stored: backward and recomputation generate them again. If several micro-batches are in flight, recompute
each micro-batch with the `Place` (step, part of the batch, positions) of its forward pass:

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
"""(index, count): one of `count` equal parts."""


@dataclass(frozen=True)
class Place:
    """The place of a forward pass within the whole training run.

    Attributes:
        step: training step, from 0. Each step has different masks. The step may be a tensor, as for
            `rooftop.kernels.counter_dropout`.
        batch: which part of the step's whole batch this pass computes, along dimension 0.
        chunks: the positions of the sequences that this pass computes; None: all.
    """

    step: int | Tensor = 0
    batch: Part = (0, 1)
    chunks: Chunks | None = None


class CounterDropouts:
    """Creates the dropouts of a model on this rank, each from its probability and name.

    Args:
        seed: seed of the masks, from 0 to 2^64 - 1.
        batch: this rank's part of the whole batch, along dimension 0.
        split: with sequence parallelism, this rank's part of the tensor group's positions, along dimension 1.
        heads: this rank's part of the heads, for attention weights (B, H, S, T). The names of such dropouts end in
            "weights_dropout".

    Attributes:
        place: the place of the next forward pass in the training run.
        half: (index, count): the part of the local batch that is being computed.
    """

    def __init__(self, seed: int, batch: Part = (0, 1), split: Part = (0, 1), heads: Part = (0, 1)) -> None:
        self.stream, self.half = Stream(seed), (0, 1)
        self.place = Place(batch=batch)
        self.split, self.heads = split, heads

    def __call__(self, probability: float, name: str) -> CounterDropout:
        """Create a dropout module. `name` is the module's name in the whole model."""
        return CounterDropout(probability, name, self, of_weights=name.endswith("weights_dropout"))

    @property
    def step(self) -> int | Tensor:
        """The current training step, as stored in `place`."""
        return self.place.step

    @step.setter
    def step(self, step: int | Tensor) -> None:
        self.place = replace(self.place, step=step)

    @contextmanager
    def at(self, place: Place) -> Iterator[None]:
        """Within the block, use the masks of the forward pass at `place` in the training run, even if training is
        already at a later place."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    @contextmanager
    def in_half(self, place: int) -> Iterator[None]:
        """Within the block, use the masks of the first half (`place` 0) or the second half (`place` 1) of the local
        batch."""
        before, self.half = self.half, (place, 2)
        try:
            yield
        finally:
            self.half = before

    def boxes(self, shape: tuple[int, ...], of_weights: bool) -> list[Box]:
        """The parts of the whole dropout mask (of all ranks) for this rank's tensor of this shape, as boxes, which may
        have strides. In the tensor, they follow each other along dimension 1, or along dimension 2 for attention
        weights."""
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
    """Dropout with a probability, created by `CounterDropouts`."""

    def __init__(self, probability: float, name: str, made_by: CounterDropouts, of_weights: bool) -> None:
        super().__init__()
        self.probability, self.name, self.made_by, self.of_weights = probability, name, made_by, of_weights

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to x (B, S, ...) or to attention weights (B, H, S, T), which may be a rank's part of batch,
        heads or positions."""
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
        """The dropout's probability and name."""
        return f"p={self.probability}, {self.name}"
