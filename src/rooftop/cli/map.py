"""`rooftop map`: call a model or a user's function for many files."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.outputs import check_json, write_json
from rooftop.cli.progress import progress_bar
from rooftop.cluster.arrow import load_arrow
from rooftop.cluster.items import find_inputs
from rooftop.cluster.mapping import map_items
from rooftop.cluster.targets import Target, callable_target


def run(
    target: str,
    inputs: tuple[str, ...],
    out: Path,
    kind: str | None,
    batch: int | None,
    weights: str | None,
    seed: int | None,
    top: int,
    threshold: float,
    dtype: str | None,
    frames: int,
    step: int,
    stride: int | None,
    point_columns: int,
    workers: int | None,
    device: str,
    decoders: int | None,
    scheduler: str | None,
    timeout_s: float | None,
    retry_errors: bool,
    json_path: Path | None,
) -> int:
    """Run the command that `rooftop.cli.commands.map:command` describes. Returns the exit status."""
    load_arrow()
    for option, given in (("--workers", workers), ("--decoders", decoders)):
        if scheduler is not None and given is not None:
            raise click.UsageError(
                f"{option} and --scheduler exclude each other, because a scheduler has its own workers: give only one"
            )
    check_json(json_path, [Path(each) for each in inputs])
    find_inputs(inputs, kind)  # check the inputs before weights are loaded
    with progress_bar() as progress:
        report = map_items(
            _target(target, batch, weights, seed, top, threshold, dtype),
            inputs,
            out,
            kind=kind,
            frames=frames,
            step=step,
            stride=stride,
            point_columns=point_columns,
            workers=workers,
            device=device,
            decoders=decoders,
            scheduler=scheduler,
            timeout_s=timeout_s,
            retry_errors=retry_errors,
            progress=progress,
            say=lambda line: click.echo(line, err=True),
        )
    if not write_json(json_path, report.to_dict()):
        click.echo(str(report))
        if seed is not None:
            click.echo("random weights: the results mean nothing")
    rows, errors = report.before + report.items, report.errors_before + report.errors
    return 1 if report.unread or (rows and errors == rows) else 0


def _target(
    text: str,
    batch: int | None,
    weights: str | None,
    seed: int | None,
    top: int,
    threshold: float,
    dtype: str | None,
) -> Target:
    if ":" in text:
        for option, given in (("--weights", weights), ("--random-weights", seed), ("--dtype", dtype)):
            if given is not None:
                raise click.UsageError(
                    f"{option} is for Rooftop's own models, and {text} is your own target: leave {option} out"
                )
        return callable_target(text, batch)
    from rooftop.cli.targets import DTYPES
    from rooftop.cluster.model_targets import model_target

    return model_target(
        text,
        weights,
        seed,
        top=top,
        threshold=threshold,
        dtype=None if dtype is None else DTYPES[dtype],
        batch=batch,
    )
