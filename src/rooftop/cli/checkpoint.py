"""`rooftop checkpoint`: the group of commands for saved trainings."""

from __future__ import annotations

import click

from rooftop.cli.lazy_groups import LazyGroup, Verb

VERBS = {
    "inspect": Verb(
        "rooftop.cli.commands.checkpoint_files:inspect_command",
        "Show the contents of a checkpoint (step, layout, model, data, tensors), and check that it is complete.",
    ),
    "convert": Verb(
        "rooftop.cli.commands.checkpoint_files:convert_command",
        "Convert a checkpoint into one file, into files for a different number of ranks, or from an older format.",
    ),
    "export-hf": Verb(
        "rooftop.cli.commands.checkpoint_files:export_command",
        "Export the model of a checkpoint in Hugging Face's format: config.json and safetensors.",
    ),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def command() -> None:
    """Inspect, convert and export the checkpoints of a training.

    FOLDER is the folder of `rooftop train gpt --save` (its last step is used), or the folder of one step. Training
    resumes from any checkpoint in any layout of ranks, without conversion.
    """
