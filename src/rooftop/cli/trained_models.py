"""What the verbs that run a trained model share: untrained models to try them, and the engine that runs it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
import torch
from torch import nn

from rooftop.errors import ModelRunError
from rooftop.inference import Engine


@contextmanager
def skipped_ones_named() -> Iterator[None]:
    """What the `with` block says of photographs that it left out follows it, a line each, on stderr."""
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
    """In the `with` block models get the weights of this seed; random numbers go on afterwards as if nothing was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def engine_of(model: nn.Module, name: str, where: torch.device, dtype: torch.dtype | None, **options: Any) -> Engine:
    """The model as an engine on a device.

    Args:
        model: is moved there itself.
        name: as the error shows it.
        dtype: None: that of the engine.
        options: of `Engine`.

    Raises:
        ModelRunError: the device's memory is too small.
    """
    try:
        return Engine(model.to(where), dtype=dtype, **options)
    except torch.cuda.OutOfMemoryError as error:
        raise ModelRunError(f"{name} does not fit into the memory of {where}; try --device cpu") from error
