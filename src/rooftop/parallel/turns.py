"""Compute two halves of a batch in turns, so that tensor ranks communicate for one half while they compute the other
half.

A layer that ranks share ends with a sum over the ranks, and the next layer needs the whole result. Without halves, a
rank has nothing to compute while it communicates. With two halves, each half passes through the layers in phases, and
the halves alternate. The sums (S) and gathers (G) of the halves a and b run between their phases:

    computed   a first | b norm | a second | b first | a norm | b second | a first | b norm | ...
    exchanged    S of b         | G of b   |  S of a          |  G of a  |   S of b         | ...

`first` is the linear layer that takes the gathered tensor. `second` is the computation after `first`, up to the linear
layer that ends with a sum. `norm` is the operation after the sum. Backward runs in reverse order, since autograd runs
the latest operations first. In forward, an exchange begins before a phase of the other half, and the wait for it comes
after that phase. In backward, the exchange of the gradient overlaps with the backward of that phase.

Source: Wang et al. 2024, "Domino: Eliminating Communication in LLM Training via Generic Tensor Slicing and Overlapping"
(arXiv:2409.15241).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rooftop.parallel.exchanges import Group, Pending, start_gather, start_scattered_sum, start_sum

Start = Callable[[Tensor], Pending]
Result = TypeVar("Result")
Phases = Generator[None, None, Result]
"""A generator that computes phases. At each `yield`, phases of other halves can run."""


def take_turns(
    halves: Sequence[Phases[Result]], turn_of: Callable[[int], AbstractContextManager[None]]
) -> list[Result]:
    """Compute the halves in turns, each one phase ahead of the next half, and return their results.

    Args:
        halves: the phases of each half. No phase may have started yet.
        turn_of: returns the context manager for a phase, from the index of its half.
    """
    done: dict[int, Result] = {}

    def go_on(place: int) -> None:
        if place not in done:
            with turn_of(place):
                try:
                    next(halves[place])
                except StopIteration as ended:
                    done[place] = ended.value

    for ahead in range(len(halves) - 1):
        go_on(ahead)
    while len(done) < len(halves):
        for place in range(len(halves)):
            go_on(place)
    return [done[place] for place in range(len(halves))]


class OnItsWay:
    """An exchange that overlaps with other computation, in forward and in backward.

    Args:
        x: tensor to exchange.
        there, back: functions that start the exchange of x, and the exchange of the result's gradient.
    """

    def __init__(self, x: Tensor, there: Start, back: Start) -> None:
        self._way = _Way(there, back)
        self._begun: Tensor = _Begin.apply(x, self._way)

    def arrived(self) -> Tensor:
        """Wait for the result and return it. Call this only once."""
        return _End.apply(self._begun, self._way)  # type: ignore[no-any-return]


def begin_gather(x: Tensor, dim: int, group: Group) -> OnItsWay:
    """Start `gather_of_ranks`."""
    return OnItsWay(
        x, lambda given: start_gather(given, dim, group), lambda given: start_scattered_sum(given, dim, group)
    )


def begin_scattered_sum(x: Tensor, dim: int, group: Group) -> OnItsWay:
    """Start `scattered_sum_of_ranks`.

    Raises:
        ValueError: the dimension cannot be split among the ranks.
    """
    return OnItsWay(
        x, lambda given: start_scattered_sum(given, dim, group), lambda given: start_gather(given, dim, group)
    )


def begin_sum(x: Tensor, group: Group) -> OnItsWay:
    """Start `sum_of_ranks`. The sum overwrites x, so nothing else may use x."""
    return OnItsWay(x, lambda given: start_sum(given, group), _already)


def begin_copy(x: Tensor, group: Group) -> OnItsWay:
    """Run `copy_to_ranks`, and sum the gradient over ranks during other computation.

    The sum overwrites the gradient, so only one function may use x.
    """
    return OnItsWay(x, _already, lambda given: start_sum(given, group))


def _already(x: Tensor) -> Pending:
    return x.detach


class _Way:
    """Holds an exchange in progress, between its start and its end in an autograd graph. This object does not keep the
    graph alive."""

    __slots__ = ("back", "pending", "there")

    def __init__(self, there: Start, back: Start) -> None:
        self.there, self.back = there, back
        self.pending: Pending | None = None

    def begin(self, start: Start, x: Tensor) -> Tensor:
        """Start an exchange of x; `end` has completed the previous one. Return an empty tensor, which stands for the
        result in autograd's graph."""
        self.pending = start(x)
        return x.new_empty(0)

    def end(self) -> Tensor:
        pending, self.pending = self.pending, None
        assert pending is not None
        return pending()


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.begin(way.there, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way.end(), None


class _End(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, begun: Tensor, way: _Way) -> Tensor:
        ctx.way = way
        return way.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.way.begin(ctx.way.back, dy), None
