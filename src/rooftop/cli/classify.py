"""`rooftop classify`: what is on photographs."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rooftop.analysis.report import write_text
from rooftop.analysis.text import WIDTH
from rooftop.cli.analyze import check_writable, pick_device
from rooftop.cli.progress import progress_bar
from rooftop.cli.targets import DTYPES
from rooftop.errors import ModelRunError
from rooftop.models import Classified, builtin_models, classify, find_images, load_classifier
from rooftop.models.images import check_images

EXAMPLES = """\b
Examples:
  rooftop classify cat.jpg
  rooftop classify holiday/ --top 1
  rooftop classify holiday/ --model resnet18 --weights my_resnet18.pth --json classes.json
  rooftop classify holiday/ --dtype bf16 --batch-size 64 --json -

Weights are downloaded once, to where torchvision keeps its own; ROOFTOP_WEIGHTS_URL names a mirror.
"""

FLOATS = [name for name, dtype in DTYPES.items() if dtype.is_floating_point]


@click.command(epilog=EXAMPLES)
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option(
    "--model",
    type=click.Choice(list(builtin_models())),
    default="resnet50",
    show_default=True,
    metavar="NAME",
    help=f"One of {', '.join(builtin_models())}.",
)
@click.option(
    "--weights",
    default="DEFAULT",
    show_default=True,
    metavar="NAME|FILE",
    help="Published weights (DEFAULT is the newest, or IMAGENET1K_V1, ...), or your own .pth or .safetensors file.",
)
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Classes for each photograph.")
@click.option(
    "--device",
    default="auto",
    metavar="auto|cpu|cuda[:N]",
    help="Where to run.  [default: auto, the GPU if there is one]",
)
@click.option("--dtype", type=click.Choice(FLOATS), metavar="bf16|fp16|fp32|fp64", help="Cast the model to this.")
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=16, show_default=True, help="Photographs at once, at most."
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Also write the classes as JSON; - prints JSON instead of the table.",
)
def command(
    paths: tuple[str, ...],
    model: str,
    weights: str,
    top: int,
    device: str,
    dtype: str | None,
    batch_size: int,
    json_path: Path | None,
) -> None:
    """Show what is on photographs: the most probable classes of each, by an image model.

    PATH is a photograph or a folder of photographs. The classes are the 1000 of ImageNet, or those of your own
    weights, which are shown by number.
    """
    to_stdout = json_path == Path("-")
    if json_path is not None and not to_stdout:
        check_writable(json_path)
    where = pick_device(None if device == "auto" else device)
    check_images(find_images(paths))  # before anything is downloaded
    classifier, preprocessing = load_classifier(model, weights)
    try:
        classifier = classifier.to(device=where, dtype=DTYPES[dtype] if dtype else None)
    except torch.cuda.OutOfMemoryError as error:
        raise ModelRunError(f"{model} does not fit into the memory of {where}; try --device cpu") from error
    with progress_bar() as progress:
        photographs = classify(
            classifier, paths, preprocessing=preprocessing, top=top, batch_size=batch_size, progress=progress
        )
    if json_path is not None:
        found = {"model": model, "weights": weights, "photographs": [_plain(photo) for photo in photographs]}
        text = json.dumps(found, indent=1) + "\n"
        if to_stdout:
            click.echo(text, nl=False)
            return
        write_text(json_path, text)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(_table(photographs))
    if json_path is not None:
        click.echo(f"classes: {json_path}")


def _table(photographs: Sequence[Classified]) -> Table:
    """One line for each class, the photograph's path at its first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("photograph", overflow="fold")
    table.add_column("class", overflow="fold")
    table.add_column("probability", justify="right", no_wrap=True)
    for photo in photographs:
        for rank, guess in enumerate(photo.guesses):
            path = click.format_filename(photo.path) if rank == 0 else ""
            name = guess.name or f"class {guess.index}"
            table.add_row(Text(path), Text(name), f"{guess.probability:.1%}")  # Text: a name may hold [brackets]
    return table


def _plain(photo: Classified) -> dict[str, Any]:
    return {"path": str(photo.path), "classes": [asdict(guess) for guess in photo.guesses]}
