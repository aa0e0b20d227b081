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
from torch import Tensor, nn

from rooftop.analysis.report import write_text
from rooftop.analysis.text import WIDTH
from rooftop.cli.analyze import check_writable
from rooftop.cli.progress import progress_bar
from rooftop.cli.trained_models import (
    batch_size_option,
    device_option,
    dtype_option,
    engine_of,
    json_option,
    photographs_argument,
    seed_option,
    seeded,
)
from rooftop.inference import Engine
from rooftop.models import Classified, builtin_models, classify, find_images, load_classifier, model_entry
from rooftop.models.images import IMAGENET, check_images

EXAMPLES = """\b
Examples:
  rooftop classify cat.jpg
  rooftop classify holiday/ --top 1
  rooftop classify holiday/ --model resnet18 --weights my_resnet18.pth --json classes.json
  rooftop classify holiday/ --batch-size 64 --json -
  rooftop classify cat.jpg --random-weights 0

Weights are downloaded once, to where torchvision keeps its own; ROOFTOP_WEIGHTS_URL names a mirror.
"""


@click.command(epilog=EXAMPLES)
@photographs_argument
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
    metavar="NAME|FILE",
    help="Published weights (DEFAULT is the newest, or IMAGENET1K_V1, ...), or your own .pth or .safetensors file.  "
    "[default: DEFAULT]",
)
@seed_option
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Classes for each photograph.")
@device_option
@dtype_option
@batch_size_option(16)
@json_option("classes")
def command(
    paths: tuple[str, ...],
    model: str,
    weights: str | None,
    seed: int | None,
    top: int,
    where: torch.device,
    dtype: torch.dtype | None,
    batch_size: int,
    json_path: Path | None,
) -> None:
    """Show what is on photographs: the most probable classes of each, by an image model.

    PATH is a photograph or a folder of photographs. The classes are the 1000 of ImageNet, or those of your own
    weights, which are shown by number.
    """
    if weights is not None and seed is not None:
        raise click.UsageError("expected one of --weights and --random-weights SEED, an untrained model")
    to_stdout = json_path == Path("-")
    if json_path is not None and not to_stdout:
        check_writable(json_path, [*find_images(paths), *([] if weights is None else [Path(weights)])])
    check_images(find_images(paths))  # before anything is downloaded
    if seed is None:
        weights = weights or "DEFAULT"
        classifier, preprocessing = load_classifier(model, weights)
    else:
        with seeded(seed):
            classifier, preprocessing = model_entry(model).build().eval(), IMAGENET
    by_engine = _ByEngine(engine_of(classifier, model, where, dtype))
    with progress_bar() as progress:
        photographs = classify(
            by_engine, paths, preprocessing=preprocessing, top=top, batch_size=batch_size, progress=progress
        )
    if json_path is not None:
        plain = [_plain(photo) for photo in photographs]
        text = json.dumps({"model": model, "weights": weights, "seed": seed, "photographs": plain}, indent=1) + "\n"
        if to_stdout:
            click.echo(text, nl=False)
            return
        write_text(json_path, text)
    Console(width=None if sys.stdout.isatty() else WIDTH).print(_table(photographs))
    if seed is not None:
        click.echo("random weights: what is found means nothing")
    if json_path is not None:
        click.echo(f"classes: {json_path}")


class _ByEngine(nn.Module):
    """What an engine runs, as a module: (B, 3, crop, crop) -> logits (B, classes)."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.model = engine.model  # its parameters say where images go, and in which dtype
        self._engine = engine

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self._engine(images)
        return logits


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
