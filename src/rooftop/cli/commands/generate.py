"""`rooftop generate`: how a language model goes on, and how fast beside the roof."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
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

A folder is as Hugging Face writes it: config.json, .safetensors files, tokenizer.json; or the one of rooftop train gpt
--save: trained on text its tokens are bytes, else it takes the tokenizer.json that you put there.

Without --temperature the most probable token is taken each time, and the text is always the same. With it, text
follows from --seed.

With --tensor-parallel-size several GPUs share the model: each reads its part of the weights and keeps the keys and
values of its heads. The text is that of one GPU as far as rounding goes; the first rank prints it.

The text goes to standard output, the figures to standard error. Percent of roof: the time in which this machine could
read all weights and the keys and values of all positions once for each token, against the time it took. Of several
ranks each reads its part, and what they exchange takes no time in it. Where the machine was not measured before, that
is done at the end, in under 30 s; --no-roof leaves it out.
"""


@click.command(epilog=EXAMPLES)
@click.option(
    "--model",
    metavar="NAME",
    help=f"One of {', '.join(names.GPTS)}.  [default: what config.json beside the weights says]",
)
@click.option(
    "--weights",
    type=click.Path(path_type=Path, exists=True),
    metavar="DIR|FILE",
    help="A folder as Hugging Face writes it or a training saved it, or one .safetensors file.",
)
@seed_option
@click.option(
    "--prompt", "prompts", multiple=True, required=True, metavar="TEXT", help="What is to be continued; again for more."
)
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=0),
    default=100,
    help="For each prompt, at most.  [default: 100, or as many as the model has positions for]",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    default=0.0,
    metavar="T",
    help="Draw tokens; 1: as often as they are probable; less: the probable ones more often.  "
    "[default: 0, the most probable one]",
)
@click.option("--top-k", type=click.IntRange(min=1), metavar="K", help="Draw from the K most probable tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    metavar="P",
    help="Draw from the fewest tokens that together have probability P.",
)
@click.option(
    "--seed", "draws", type=click.IntRange(0, 2**64 - 1), default=0, show_default=True, help="Of what is drawn."
)
@click.option("--bytes", "by_bytes", is_flag=True, help="A token for each byte, in place of a tokenizer.")
@click.option(
    "--tensor-parallel-size",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Ranks that share the model, as many as torchrun starts.",
)
@device_option
@dtype_option
@json_option("text, tokens and figures")
@click.option("--roof/--no-roof", "with_roof", default=True, help="Whether to say how far from the roof it was.")
@click.pass_context
@done_by("rooftop.cli.generate:run")
def command() -> None:
    """Continue texts by a language model, GPT-2, Llama, Mistral or Qwen, and say how fast.

    Text appears as it comes. Several prompts are continued at once; their texts are printed one after another.
    """
