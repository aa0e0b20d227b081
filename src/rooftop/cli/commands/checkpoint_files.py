"""`rooftop checkpoint inspect`, `convert` and `export-hf`: arguments, options and help."""

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
    help="Folder to write, new or empty. The folder appears only once all files are written.",
)

INSPECT_EXAMPLES = """\b
Examples:
  rooftop checkpoint inspect run/                    the last step; one line per weight
  rooftop checkpoint inspect run/step-00000500/      another step
  rooftop checkpoint inspect run/ --verify           read everything; exit status 2 if a byte has changed
  rooftop checkpoint inspect run/ --json             all tensors with their files and pieces, for programs
"""
CONVERT_EXAMPLES = """\b
Examples:
  rooftop checkpoint convert run/ -o whole/          one file with whole tensors
  rooftop checkpoint convert run/ -o eight/ --tensor-parallel-size 8
  rooftop checkpoint convert old-run/ -o run/        from the older format (tensor-0.pt); adds checksums

\b
--load resumes from the result. With one file, the safetensors library reads it in Python:
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
@click.option("--verify", is_flag=True, help="Read all tensors and compare their checksums.")
@json_option("the description")
@done_by("rooftop.cli.checkpoint_files:run_inspect")
def inspect_command() -> None:
    """Show the contents of a checkpoint (step, layout, model, data, tensors), and check that it is complete.

    The command always checks that all files exist with the right length. --verify also compares every 4 MiB block of
    all tensors with its stored checksum, and names the first tensor that differs. The column of optimizer bytes counts
    each weight's two moments and step count.
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
    help="Write one file for each of N tensor parallel ranks; 1 writes whole tensors into one file.",
)
@done_by("rooftop.cli.checkpoint_files:run_convert")
def convert_command() -> None:
    """Convert a checkpoint into one file, into files for a different number of ranks, or from an older format.

    Weights, moments, step, seed and data stay the same, bit for bit. Training resumes in a different layout without
    conversion. The command compares all data that it reads with their checksums.
    """


@click.command("export-hf", epilog=EXPORT_EXAMPLES)
@folder_argument
@out_option
@click.option(
    "--dtype",
    type=click.Choice(names.TRAINED_DTYPES),
    default="float32",
    show_default=True,
    help="Dtype of the exported weights. Training in bfloat16 keeps float32 weights.",
)
@done_by("rooftop.cli.checkpoint_files:run_export")
def export_command() -> None:
    """Export the model of a checkpoint in Hugging Face's format: config.json and safetensors.

    The folder has the format of GPT-2, Llama, Mistral or Qwen. from_pretrained of transformers, `rooftop generate
    --weights` and `rooftop train gpt --init-from` read this folder. A checkpoint has no tokenizer: add
    tokenizer.json yourself.
    """
