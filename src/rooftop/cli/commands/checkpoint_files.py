"""`rooftop checkpoint inspect`, `convert` and `export-hf`: what a training has saved."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option

folder_argument = click.argument("folder", type=click.Path(path_type=Path))
out_option = click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    metavar="OUT",
    help="The folder to write: not there yet, or empty. It appears when all is written.",
)

INSPECT_EXAMPLES = """\b
Examples:
  rooftop checkpoint inspect run/                    the last step, a line for each weight
  rooftop checkpoint inspect run/step-00000500/      another one
  rooftop checkpoint inspect run/ --verify           reads all of it: exit status 2 if a byte has changed
  rooftop checkpoint inspect run/ --json             all tensors, with files and pieces, for a program
"""
CONVERT_EXAMPLES = """\b
Examples:
  rooftop checkpoint convert run/ -o whole/          one file, in which each tensor is whole
  rooftop checkpoint convert run/ -o eight/ --tensor-parallel-size 8
  rooftop checkpoint convert old-run/ -o run/        of the format with tensor-0.pt: also to have checksums

\b
What is written is a training that --load goes on with. In Python the safetensors library reads a whole one:
  safetensors.torch.load_file("whole/step-00000500/rank-00000.safetensors")["layers.0.mlp.up.weight"]
"""
EXPORT_EXAMPLES = """\b
Examples:
  rooftop checkpoint export-hf run/ -o model/
  rooftop checkpoint export-hf run/ -o model/ --dtype bfloat16
  rooftop generate --weights model/ --bytes --prompt "Once upon"
"""


@click.command("inspect", epilog=INSPECT_EXAMPLES)
@folder_argument
@click.option("--verify", is_flag=True, help="Read every byte, and compare it with its checksum.")
@json_option("what is there")
@done_by("rooftop.cli.checkpoint_files:run_inspect")
def inspect_command() -> None:
    """Show what is in a checkpoint: step, layout, model, data, tensors; and whether it is whole.

    The optimizer's bytes of a weight are its two moments and the count of its steps. That all files are there, and are
    as long as they should be, is always looked at; --verify compares the 4 MiB blocks of all tensors with the checksums
    that were taken when they were written, and names the first tensor that differs.
    """


@click.command("convert", epilog=CONVERT_EXAMPLES)
@folder_argument
@out_option
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="A file for each of so many tensor parallel ranks, with what it holds; 1: all tensors whole, in one file.",
)
@done_by("rooftop.cli.checkpoint_files:run_convert")
def convert_command() -> None:
    """Write a checkpoint anew: whole, for other ranks, or of an older format.

    Weights, moments, step, seed and data stay what they are, bit for bit. To go on in another layout needs no
    conversion. All that is read is compared with its checksums.
    """


@click.command("export-hf", epilog=EXPORT_EXAMPLES)
@folder_argument
@out_option
@click.option(
    "--dtype",
    type=click.Choice(names.TRAINED_DTYPES),
    default="float32",
    show_default=True,
    help="Of what is written. Training keeps float32 also where it computes in bfloat16.",
)
@done_by("rooftop.cli.checkpoint_files:run_export")
def export_command() -> None:
    """Write the model of a checkpoint as Hugging Face does: config.json and safetensors.

    Those of GPT-2 or Llama, which transformers' from_pretrained reads, rooftop generate --weights, and rooftop train
    --init-from. A tokenizer is not part of a training: put its tokenizer.json there.
    """
