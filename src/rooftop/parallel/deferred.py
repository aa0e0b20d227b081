"""Weight gradients that are computed later than the rest of backward, as zero-bubble schedules need.

    deferral = defer_weight_gradients(model)
    with deferral.collecting() as later:
        loss.backward()      # gradients of inputs, norms, biases, embeddings
    later.make()             # weights of linear layers

The previous rank waits for the gradient of the input, but no rank waits for the gradient of a weight. So a linear layer
with a deferral computes the input's gradient at once and postpones the product for the weight's gradient. Both are in
one autograd function of our own, so nothing depends on PyTorch's graph. Outside `collecting`, backward computes
everything at once, with the same products and sums.

A layer that may defer is opaque to torch.compile: a compiled block is compiled around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge


class Later:
    """Weight gradients that are still to be computed."""

    def __init__(self) -> None:
        self._left: list[tuple[GradientEdge, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._left)

    def add(self, weight: GradientEdge, make: Callable[[], Tensor]) -> None:
        """Add the gradient of a weight; `make` computes it."""
        self._left.append((weight, make))

    def make(self) -> None:
        """Compute all gradients, one after another, and add each to its weight's `.grad`. Hooks run as in backward."""
        left, self._left = self._left, []
        for weight, make in left:  # in the order of backward
            _accumulate(weight, make)


class Deferral:
    """A place where the linear layers of a model store the deferred gradients of their weights, during collection.

    The state is an attribute instead of thread-local, since autograd runs the backward of a GPU in its own threads.
    """

    def __init__(self) -> None:
        self.later: Later | None = None

    def add(self, weight: GradientEdge, make: Callable[[], Tensor]) -> None:
        """Defer a weight's gradient to the collector; without a collector, compute it now."""
        if self.later is not None:
            self.later.add(weight, make)
        else:
            _accumulate(weight, make)

    @contextmanager
    def collecting(self) -> Iterator[Later]:
        """Within the block, backward leaves the gradients of linear layers' weights to the returned object.

        Raises:
            RuntimeError: gradients are being collected already.
        """
        if self.later is not None:
            raise RuntimeError("Deferral: weight gradients are already being collected")
        self.later = Later()
        try:
            yield self.later
        finally:
            self.later = None


def _accumulate(weight: GradientEdge, make: Callable[[], Tensor]) -> None:
    with torch.no_grad():
        gradient = make()
    torch.autograd.backward(weight, gradient)


class Deferring:
    """A linear layer that may leave its weight's gradient to a deferral; without one, backward computes it."""

    deferral: Deferral | None = None


def defer_weight_gradients(model: nn.Module) -> Deferral:
    """Set the deferral of all `ColumnParallelLinear` and `RowParallelLinear` of a model."""
    deferral = Deferral()
    for module in model.modules():
        if isinstance(module, Deferring):
            module.deferral = deferral
    return deferral
