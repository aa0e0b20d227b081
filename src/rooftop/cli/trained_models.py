"""Code that the verbs for trained models share: messages about skipped photographs, the random weights of untrained
models, and the engine."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import torch
from torch import nn

from rooftop.debugging import memory_error_as
from rooftop.errors import ModelRunError
from rooftop.inference import Engine


@contextmanager
def skipped_ones_named() -> Iterator[None]:
    """After the `with` block, print one line on stderr for each photograph that the block skipped."""
    said: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            yield
    finally:
        for each in said:
            text = str(each.message)
            if text.startswith("skipped: "):
                click.echo(text, err=True)
            else:
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Give models that are made in the `with` block the weights of this seed. Afterwards restore the CPU's random
    state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def engine_of(model: nn.Module, name: str, where: torch.device, dtype: torch.dtype | None, **options: Any) -> Engine:
    """Make an engine of the model on a device.

    Args:
        model: moved to the device, without a copy.
        name: shown in errors.
        dtype: compute dtype; None: the default of the engine.
        options: options of `Engine`.

    Raises:
        ModelRunError: the model does not fit into the memory of the device.
    """
    remedy = "use a smaller model" if where.type == "cpu" else "try --device cpu"
    message = f"{name} does not fit into the memory of {where}"
    with memory_error_as(lambda words: ModelRunError(f"{message} ({words}); {remedy}")):
        return Engine(model.to(where), dtype=dtype, **options)
