"""Options that the verbs for trained models share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from rooftop.cli.commands import names

Verb = TypeVar("Verb", bound=Callable[..., Any])


def _device(context: click.Context, option: click.Parameter, text: str) -> Any:
    from rooftop.cli.device_option import pick_device

    return pick_device(None if text == "auto" else text)


def _dtype(context: click.Context, option: click.Parameter, name: str | None) -> Any:
    from rooftop.cli.targets import DTYPES

    return DTYPES[name] if name else None


photographs_argument = click.argument("paths", nargs=-1, required=True, metavar="PATH...")
seed_option = click.option(
    "--random-weights",
    "seed",
    type=click.IntRange(0, 2**64 - 1),  # the range of torch.manual_seed
    metavar="SEED",
    help="Use an untrained model instead of --weights, to try a command. The results then mean nothing.",
)
device_option = click.option(
    "--device",
    "where",
    default="auto",
    callback=_device,
    metavar="auto|cpu|cuda[:N]",
    help="Device to run on.  [default: auto, the GPU if there is one]",
)
dtype_option = click.option(
    "--dtype",
    type=click.Choice(names.FLOATS),
    callback=_dtype,
    metavar="bf16|fp16|fp32|fp64",
    help="Compute dtype of the model.  [default: bf16 on a GPU, fp32 on a CPU]",
)

skip_option = click.option(
    "--skip-unreadable", is_flag=True, help="Skip photographs that cannot be read, and name them on stderr."
)


def batch_size_option(default: int) -> Callable[[Verb], Verb]:
    """Make the option --batch-size, whose value is at least 1."""
    return click.option(
        "--batch-size",
        type=click.IntRange(min=1),
        default=default,
        show_default=True,
        help="Maximum number of photographs per batch.",
    )
