"""Run a model in evaluation mode within a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the block, put a model in evaluation mode. After the block, each module has its earlier mode.

    A model in training mode may have modules in evaluation mode, such as frozen norms.
    """
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
