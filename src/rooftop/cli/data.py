"""`rooftop data`: the group of commands for training data."""

from __future__ import annotations

import click

from rooftop.cli.lazy_groups import LazyGroup, Verb

VERBS = {
    "bench": Verb(
        "rooftop.cli.commands.data_bench:bench_command",
        "Measure each stage between disk and model, and find the slowest one.",
    ),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def command() -> None:
    """Measure how fast training data can be read, and what bounds a training."""
