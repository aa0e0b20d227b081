"""`rooftop detect`: detect objects on photographs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from rich.text import Text

from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import check_json, write_json
from rooftop.cli.progress import progress_bar
from rooftop.cli.trained_models import engine_of, seeded, skipped_ones_named
from rooftop.cluster.by_engine import DetrByEngine
from rooftop.errors import InputError
from rooftop.models import detr_resnet50, detr_resnet101, detr_small, find_images
from rooftop.models.detr.detection import Detected, detect, draw_objects, load_detector
from rooftop.models.images import check_images, read_image
from rooftop.models.weights.trained_files import trained_file
from rooftop.whole_files import whole_file

BUILDERS = {"detr_resnet50": detr_resnet50, "detr_resnet101": detr_resnet101, "detr_small": detr_small}


def run(
    paths: tuple[str, ...],
    model: str | None,
    weights: str | None,
    seed: int | None,
    threshold: float,
    folder: Path,
    size: int | None,
    where: torch.device,
    dtype: torch.dtype | None,
    batch_size: int,
    skip_unreadable: bool,
    json_path: Path | None,
) -> None:
    """Run the command that `rooftop.cli.commands.detect:command` describes."""
    if (weights is None) == (seed is None):
        raise click.UsageError(
            "expected --weights FILE (trained weights), or --random-weights SEED (an untrained model, to try the "
            "command)"
        )
    found = find_images(paths)
    check_json(json_path, [*found, *([] if weights is None else [Path(weights)])])
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is not a folder: name another with --output")
    if not skip_unreadable:
        check_images(found)
    pictures = _pictures(found, folder)
    inputs = {path.resolve() for path in found}
    over = next((picture for picture in pictures if picture.resolve() in inputs), None)
    if over is not None:
        raise InputError(f"{over} is a photograph to read, and is not overwritten: name another folder with --output")
    trained = None if weights is None else trained_file(weights)
    model = model or (trained.model if trained else "detr_resnet50")
    if weights is not None:
        detector = load_detector(model, weights)
    else:
        with seeded(seed or 0):
            detector = BUILDERS[model]().eval()
    detector.auxiliary = False  # the predictions of earlier layers are only for training
    by_engine = DetrByEngine(engine_of(detector, model, where, dtype))
    try:
        folder.mkdir(parents=True, exist_ok=True)  # now, so that an error appears before the long work
    except OSError as error:
        raise InputError(f"{folder} cannot be created ({error.strerror}): name another with --output") from error
    sides = trained.sides if trained and trained.sides and size is None else None
    shorter, longer = sides or (size or 800, round((size or 800) * 1333 / 800))
    with skipped_ones_named(), progress_bar() as progress:
        photographs = detect(
            by_engine,
            found,
            threshold=threshold,
            classes=trained.classes or None if trained else None,
            shorter=shorter,
            longer=longer,
            batch_size=batch_size,
            on_error="skip" if skip_unreadable else "raise",
            progress=progress,
        )
    places = iter(zip(found, pictures, strict=True))
    pictures = [next(picture for path, picture in places if path == photo.path) for photo in photographs]
    for photo, picture in zip(photographs, pictures, strict=True):
        drawn = draw_objects(read_image(photo.path), photo.objects)
        with whole_file(picture) as partial:
            drawn.save(partial, format="PNG")
    plain = [_plain(photo, picture) for photo, picture in zip(photographs, pictures, strict=True)]
    if write_json(json_path, {"model": model, "weights": weights, "seed": seed, "photographs": plain}):
        return
    output_console().print(_table(photographs))
    if weights is None:
        click.echo("random weights: the results mean nothing")
    click.echo(f"pictures: {folder}")
    if json_path is not None:
        click.echo(f"objects: {json_path}")


def _pictures(found: Sequence[Path], folder: Path) -> list[Path]:
    """The output path of each photograph. Numbers distinguish photographs with equal names."""
    names: dict[str, None] = {}
    for path in found:
        numbered = (f"{path.stem}-{number}" for number in itertools.count(2))
        names[next(name for name in itertools.chain([path.stem], numbered) if name not in names)] = None
    return [folder / f"{name}.png" for name in names]


def _table(photographs: Sequence[Detected]) -> Table:
    """One line per object. The first line of a photograph has the photograph's path."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("photograph", overflow="fold")
    table.add_column("object", overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    table.add_column("left, top, right, bottom", justify="right", no_wrap=True)
    for photo in photographs:
        path = Text(click.format_filename(photo.path))
        if not photo.objects:
            table.add_row(path, "nothing", "", "")
        for rank, each in enumerate(photo.objects):
            box = ", ".join(str(round(edge)) for edge in each.box)
            name = each.name or f"class {each.label}"
            table.add_row(path if rank == 0 else "", Text(name), f"{each.score:.1%}", box)
    return table


def _plain(photo: Detected, picture: Path) -> dict[str, Any]:
    objects = [asdict(each) for each in photo.objects]
    return {"path": str(photo.path), "picture": str(picture), "size": photo.size, "objects": objects}
