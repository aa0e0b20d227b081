"""Compute weight gradients later than the rest of backward, as zero-bubble schedules need.

    deferral = defer_weight_gradients(model)
    with deferral.collecting() as later:
        loss.backward()      # computes the gradients of inputs, norms, biases, embeddings
    later.make()             # computes the gradients of linear layers' weights

In a pipeline, the previous rank waits for the gradient of the input, but no rank waits for the gradient of a weight. So
a linear layer with a deferral computes the input's gradient at once, and postpones the matrix product for the weight's
gradient. A single custom autograd function computes both gradients, so the split of backward does not depend on how
PyTorch builds its graph. Outside `collecting`, backward itself computes all gradients, with the same products and sums
as in `collecting`.

torch.compile treats a layer that may defer as opaque, and compiles the rest of a block around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge


class Later:
    """The weight gradients that backward has deferred, each with the function that computes it."""

    def __init__(self) -> None:
        self._left: list[tuple[GradientEdge, Callable[[], Tensor]]] = []

    def __len__(self) -> int:
        return len(self._left)

    def add(self, weight: GradientEdge, make: Callable[[], Tensor]) -> None:
        """Remember a weight whose gradient backward has deferred. `make` computes this gradient."""
        self._left.append((weight, make))

    def make(self) -> None:
        """Compute all deferred gradients, one after another, and add each to its weight's `.grad`. The weights' hooks
        run as in backward."""
        left, self._left = self._left, []
        for weight, make in left:  # in the order in which backward deferred them
            _accumulate(weight, make)


class Deferral:
    """Collects the deferred weight gradients of a model's linear layers within `collecting`.

    The state is an attribute instead of thread-local, since autograd runs a GPU's backward in a separate thread.
    """

    def __init__(self) -> None:
        self.later: Later | None = None

    def add(self, weight: GradientEdge, make: Callable[[], Tensor]) -> None:
        """Defer a weight's gradient, which `make` computes, if a `collecting` block is active. Otherwise compute the
        gradient at once."""
        if self.later is not None:
            self.later.add(weight, make)
        else:
            _accumulate(weight, make)

    @contextmanager
    def collecting(self) -> Iterator[Later]:
        """Within the block, backward does not compute the gradients of linear layers' weights, but leaves them to
        the returned object, whose `make` computes them.

        Raises:
            RuntimeError: a `collecting` block is already active.
        """
        if self.later is not None:
            raise RuntimeError("Deferral: a `collecting` block is already active; end it before the next one")
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
    """A linear layer that can leave its weight's gradient to a `Deferral`, which computes it after backward. Without a
    deferral, backward computes the gradient."""

    deferral: Deferral | None = None


def defer_weight_gradients(model: nn.Module) -> Deferral:
    """Create a deferral, and set it in all `ColumnParallelLinear` and `RowParallelLinear` layers of a model."""
    deferral = Deferral()
    for module in model.modules():
        if isinstance(module, Deferring):
            module.deferral = deferral
    return deferral
