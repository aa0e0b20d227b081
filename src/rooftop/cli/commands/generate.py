"""`rooftop generate`: options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.commands.trained_model_options import device_option, dtype_option, seed_option
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop generate --weights gpt2/ --prompt "The roof of a house"
  rooftop generate --weights Llama-2-7b-hf/ --prompt "Once" --prompt "Twice" --temperature 0.8 --top-p 0.95
  rooftop generate --model gpt2 --weights model.safetensors --prompt "def add(a, b):" --json text.json
  rooftop generate --weights run/ --prompt "The roof of a house"
  rooftop generate --model llama-7b --random-weights 0 --prompt "How fast?" --max-new-tokens 200
  torchrun --nproc-per-node 2 -m rooftop generate --weights Llama-2-7b-hf/ --prompt "Once" --tensor-parallel-size 2

Weights: a Hugging Face folder (config.json, .safetensors files, tokenizer.json), or the folder of rooftop train gpt
--save. A model trained on text has bytes as tokens. For a model trained on token files, put tokenizer.json into the
folder.

Sampling: without --temperature, each token is the most probable one, and the text is always the same. With
--temperature, --seed determines the text.

Several GPUs: with --tensor-parallel-size, each rank reads its part of the weights and keeps the keys and values of its
heads. The text is the same as on one GPU, up to rounding. The first rank prints the text.

Output: the text goes to standard output, times and rates to standard error. Percent of roof compares the measured time
of a token with the shortest possible time, in which all weights and the keys and values of all positions are read once.
Each rank reads its part; communication counts as free. A machine without stored ceilings is measured at the end, in
under 30 s; --no-roof skips this measurement.
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--model",
    metavar="NAME",
    help=f"Architecture and sizes: {', '.join(names.GPTS)}.  Must agree with config.json beside the weights.  "
    "[default: from this config.json]",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True),
    metavar="DIR|FILE",
    help="A Hugging Face folder, a folder of `rooftop train gpt --save`, or a .safetensors file.",
)
@seed_option
@click.option(
    "--prompt",
    "prompts",
    multiple=True,
    required=True,
    metavar="TEXT",
    help="Text to continue. Repeat for several prompts.",
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=100,
    help="Maximum number of new tokens per prompt.  [default: 100, or fewer if the prompt leaves fewer positions]",
)
@click.option(
    "--temperature",
    type=NumberRange(min=0),
    default=0.0,
    metavar="T",
    help="Sampling temperature. At 1, tokens are drawn from the model's distribution; lower values favour probable "
    "tokens.  [default: 0, always the most probable token]",
)
@click.option(
    "--top-k",
    type=click.IntRange(min=1),
    metavar="K",
    help="Sample from the K most probable tokens; needs --temperature above 0.",
)
@click.option(
    "--top-p",
    type=NumberRange(0, 1, min_open=True),
    default=1.0,
    metavar="P",
    help="Sample from the smallest set of tokens with total probability P (nucleus); needs --temperature above 0.",
)
@click.option(
    "--seed", "draws", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Seed of the sampling."
)
@click.option("--bytes", "by_bytes", is_flag=True, help="Use bytes as tokens, without a tokenizer.")
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Number of ranks that share the model; start the same number with torchrun.",
)
@device_option
@dtype_option
@json_option("text, tokens, times and rates")
@click.option("--roof/--no-roof", "with_roof", default=True, help="Report the percent of roof, or leave it out.")
@click.pass_context
@done_by("rooftop.cli.generate:run")
def command() -> None:
    """Generate text with a language model (GPT-2, Llama, Mistral or Qwen), and report its speed.

    Text is printed as it is generated. The texts of several prompts are generated in one batch. The text of each prompt
    is printed once the texts of all earlier prompts are complete.
    """
