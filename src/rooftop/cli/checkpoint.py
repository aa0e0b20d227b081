"""`rooftop checkpoint`: what a training has saved."""

from __future__ import annotations

import click

from rooftop.cli.lazy_groups import LazyGroup, Verb

VERBS = {
    "inspect": Verb(
        "rooftop.cli.commands.checkpoint_files:inspect_command",
        "Show what is in a checkpoint: step, layout, model, data, tensors; and whether it is whole.",
    ),
    "convert": Verb(
        "rooftop.cli.commands.checkpoint_files:convert_command",
        "Write a checkpoint anew: whole, for other ranks, or of an older format.",
    ),
    "export-hf": Verb(
        "rooftop.cli.commands.checkpoint_files:export_command",
        "Write the model of a checkpoint as Hugging Face does: config.json and safetensors.",
    ),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def command() -> None:
    """Look into what a training has saved, convert it, and export its model.

    A checkpoint is a folder that rooftop train gpt --save was given, whose last step is taken, or that of one step. Any
    layout of ranks goes on with any checkpoint as it is: nothing must be converted for that.
    """
