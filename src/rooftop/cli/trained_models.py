"""What the verbs that run a trained model share: options, untrained models to try them, and the engine that runs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
import torch
from torch import nn

from rooftop.cli.analyze import pick_device
from rooftop.cli.targets import DTYPES, FLOATS
from rooftop.errors import ModelRunError
from rooftop.inference import Engine

Verb = TypeVar("Verb", bound=Callable[..., Any])

photographs_argument = click.argument("paths", nargs=-1, required=True, metavar="PATH...")
seed_option = click.option(
    "--random-weights",
    "seed",
    type=click.IntRange(0, 2**64 - 1),  # what torch.manual_seed takes
    metavar="SEED",
    help="In place of --weights: an untrained model, to try things out. What it says means nothing.",
)
device_option = click.option(
    "--device",
    "where",
    default="auto",
    callback=lambda context, option, text: pick_device(None if text == "auto" else text),
    metavar="auto|cpu|cuda[:N]",
    help="Where to run.  [default: auto, the GPU if there is one]",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(FLOATS),
    callback=lambda context, option, name: DTYPES[name] if name else None,
    metavar="bf16|fp16|fp32|fp64",
    help="In which the model computes.  [default: bf16 on a GPU, fp32 on a CPU]",
)

skip_option = click.option(
    "--skip-unreadable", is_flag=True, help="Leave out photographs that cannot be read, and name them at the end."
)


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


def batch_size_option(default: int) -> Callable[[Verb], Verb]:
    """--batch-size, at least 1."""
    return click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Photographs at once, at most.",
    )


def json_option(what: str) -> Callable[[Verb], Verb]:
    """--json FILE, for `what` the verb finds."""
    return click.option(
        "--json",
        "json_path",
        type=click.Path(path_type=Path, allow_dash=True),
        metavar="FILE",
        help=f"Also write the {what} as JSON; - prints JSON instead of the table.",
    )


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
