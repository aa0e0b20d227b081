"""`rooftop data bench`: measure the samples per second of each stage between disk and model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional

from rooftop.cli.consoles import output_console
from rooftop.cli.device_option import pick_device
from rooftop.cli.outputs import write_json
from rooftop.cli.progress import progress_bar
from rooftop.cli.targets import resolve_target
from rooftop.data import Headspace, ImageFolder, ImageTransform, TarShards, headspace
from rooftop.data.headspace import STAGES
from rooftop.data.pixels import Normalizer, Pixels
from rooftop.errors import InputError, TargetError
from rooftop.train.recipes.recipe import Recipe
from rooftop.words import counted

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


def run_bench(
    data: str,
    model_name: str | None,
    size: int,
    config: Path | None,
    values: tuple[str, ...],
    device: str | None,
    seconds: float,
    json_path: Path | None,
) -> None:
    """Run the command that `rooftop.cli.commands.data_bench:bench_command` describes."""
    recipe = (Recipe.read(config) if config is not None else Recipe()).with_values(values)
    target = pick_device(device)
    transform = ImageTransform(size, recipe.augment, train=True, normalize=False)
    samples = _samples(data, transform)
    batch = min(recipe.run.batch, len(samples))
    step = None if model_name is None else training_step(model_name, batch, size, recipe, target)
    loading = recipe.loading
    with progress_bar() as show:
        found = headspace(
            samples,
            batch,
            step,
            target,
            how=loading.how,
            workers=loading.workers,
            ahead=loading.ahead,
            seconds=seconds,
            show=show,
        )
    told = {**asdict(found), "data": data, "samples": len(samples), "batch": batch, "size": size, "device": str(target)}
    if write_json(json_path, told):
        return
    console = output_console(highlight=False)
    workers = counted(found.workers, "worker")
    console.print(f"{len(samples):,} samples of {data}, batches of {batch}, {workers}, {target}", markup=False)
    console.print(_table(found))
    console.print(f"The loader makes batches {found.loading}.", soft_wrap=True, markup=False)
    console.print(f"{found.bounds} bounds: {found.why}.", soft_wrap=True, markup=False)


def _samples(data: str, transform: ImageTransform) -> ImageFolder | TarShards:
    path = Path(data)
    shards = data.endswith(".tar") or (path.is_dir() and any(path.glob("*.tar")))
    if not shards and not path.exists():
        raise InputError(f"{data} does not exist: expected a folder with one subfolder per class, or tar files")
    return TarShards(data, transform) if shards else ImageFolder(data, transform)


def training_step(
    name: str, batch: int, size: int, recipe: Recipe, device: torch.device
) -> Callable[[tuple[Pixels, Tensor]], None]:
    """Return a function that makes one training step of an image classifier: normalization, forward, loss, backward and
    SGD.

    Raises:
        TargetError: the model's output is not (N, classes).
        InputError, ModelRunError: as in `resolve_target`.
    """
    target = resolve_target(name, [f"{batch}x3x{size}x{size}"], device, None, recipe.run.channels_last)
    model: Any = target.model
    with torch.no_grad():
        logits = model(*target.args)
    if not isinstance(model, nn.Module) or not isinstance(logits, Tensor) or logits.dim() != 2:
        raise TargetError(f"{name} does not classify images: expected an nn.Module with (N, classes) as output")
    model.train()
    classes = logits.shape[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    dtype = AUTOCAST.get(recipe.run.precision)
    normalize = Normalizer(channels_last=recipe.run.channels_last)

    def step(value: tuple[Pixels, Tensor]) -> None:
        images, labels = normalize(value[0]), value[1]
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = functional.cross_entropy(model(images).float(), labels % classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _table(found: Headspace) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("stage", no_wrap=True)
    table.add_column("samples/s", no_wrap=True, justify="right")
    table.add_column("", overflow="fold")
    for row in found.rows:
        table.add_row(row.stage, f"{row.samples_per_s:,.0f}", STAGES[row.stage])
    return table
