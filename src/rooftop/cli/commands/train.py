"""`rooftop train`: a model from its first step on, alone or one rank of many under torchrun."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by

DATA = "--data-path"
WEIGHT = re.compile(names.WEIGHT, re.IGNORECASE)
LAYERS, WIDTH, HEADS, LENGTH = 4, 256, 4, 256  # of a model that a laptop trains in minutes

EXAMPLES = """\b
Examples:
  python -m rooftop.train gpt --data-path book.txt
  torchrun --nproc-per-node 4 -m rooftop.train gpt --data-path texts/ --tensor-parallel-size 2 --sequence-parallel
  torchrun --nproc-per-node 8 -m rooftop.train gpt --preset llama-1b --data-path tokens.bin --save run/ \\
    --train-iters 10000 --lr 4e-4 --lr-warmup-iters 500 --lr-decay-style cosine --min-lr 4e-5
  python -m rooftop.train gpt --data-path book.txt --train-iters 200 --save run/ --save-interval 50 --keep-last 3 \
    --load run/
  python -m rooftop.train gpt --data-path tokens.bin --init-from gpt2/ --seq-length 512 --lr 1e-5 --save tuned/
  torchrun --nproc-per-node 2 -m rooftop.train gpt --preset llama-1b --data-path tokens.bin --micro-batch-size 4 \\
    --tensor-parallel-size 2 --sequence-parallel --tp-comm-overlap --enable-cuda-graph
  torchrun --nproc-per-node 2 -m rooftop.train gpt --preset llama-1b --data-path tokens.bin --seq-length 65536 \
    --context-parallel-size 2 --recompute --eod-token 2 --reset-position-ids

Ranks that the tensor, pipeline and context parallel ones leave over are data parallel: 8 processes with
--tensor-parallel-size 2 are 4 x 2, and with --pipeline-parallel-size 2 beside it 2 x 2 x 2.
Each takes --micro-batch-size sequences at a time, and as many times as --global-batch-size needs.

With --context-parallel-size ranks share each sequence: each has a chunk from its front and one from its back, and they
exchange keys and values. With --eod-token they share it so that each has as much to compute.

The same seed gives the same training in every layout: initial values, dropout and data are functions of the seed and
the place in the whole, not of the rank. So two layouts differ by the rounding of sums only, and in speed.

\b
Data, as --data-path:
  FILE.bin      tokens: with Megatron-LM's .idx beside it, llm.c's header, nanoGPT's meta.pkl, or numbers alone
  FILE.npy      tokens, integers of one dimension; memory-mapped
  a data set    of Hugging Face (Parquet, Arrow, save_to_disk), its column input_ids or text; needs datasets
  another file  text: a token for each byte, a vocabulary of 256
  a folder      all text files in it
Several are mixed: --data-path 0.7 A 0.3 B gives each its share of the sequences; A B, or --data-path A --data-path B,
shares by their sizes.

What is said of a step: the loss before it, the norm of its gradient, tokens a second of all ranks; MFU, the model's
flops by the fastest matrix product that was measured on this machine; percent of roof, the time in which it could have
done the step at best, against the time it took; memory of rank 0. Where the machine was not measured before, that is
done first, in under 30 s; --no-roof leaves it out.

With --save, SIGTERM lets all ranks save after the same step and end with status 143: give --save run/ --load run/, and
the same command line goes on wherever the last one was stopped. rooftop checkpoint looks into what was saved.
"""

size = partial(click.option, type=click.IntRange(min=1), metavar="N")
rate = partial(click.option, type=click.FloatRange(min=0), metavar="X", show_default=True)
number = partial(click.option, type=click.IntRange(0, 2**64 - 1), metavar="N", show_default=True)
path = partial(click.option, type=click.Path(path_type=Path))
choice = {
    "tokens": click.Choice(names.TOKENS),
    "presets": click.Choice(names.GPTS),
    "schedules": click.Choice(names.SCHEDULES),
    "decays": click.Choice(names.DECAYS),
    "dtypes": click.Choice(names.TRAINED_DTYPES),
    "transports": click.Choice(names.TRANSPORTS),
    "granularities": click.Choice(names.GRANULARITIES),
    "devices": click.Choice(["cuda", "cpu"]),
}


class DataPaths(click.Command):
    """A command whose data path takes all words up to the next option, as Megatron-LM's does."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        here = False  # among the words of the data path
        for word in args:
            if word.startswith("-") and not WEIGHT.match(word):
                here = word.partition("=")[0] == DATA
            elif here and words[-1] != DATA:
                words.append(DATA)
            words.append(word)
        return super().parse_args(ctx, words)


@click.group(epilog="Start with: rooftop train gpt --data-path book.txt")
def command() -> None:
    """Train a model, on one process or, under torchrun, on many."""


@command.command(cls=DataPaths, epilog=EXAMPLES)
@click.option(
    DATA,
    "data_path",
    required=True,
    multiple=True,
    metavar="[WEIGHT] PATH ...",
    help="Tokens or text; several with weights, or each by its size.",
)
@click.option(
    "--token-dtype",
    type=choice["tokens"],
    help="Of a .bin file that does not say it.  [default: found by looking at its numbers, or refused]",
)
@click.option("--preset", type=choice["presets"], metavar="NAME", help=f"One of {', '.join(names.GPTS)}.")
@size("--num-layers", help=f"Blocks.  [default: {LAYERS}, or the preset's]")
@size("--hidden-size", help=f"Features of a position.  [default: {WIDTH}]")
@size("--num-attention-heads", help=f"They share the features evenly.  [default: {HEADS}]")
@size("--seq-length", help=f"Tokens of a sequence.  [default: {LENGTH}, or the preset's most]")
@size("--vocab-size", help=f"Tokens that there are.  [default: the preset's, or {names.BYTE_TOKENS} of text]")
@click.option(
    "--eod-token",
    type=click.IntRange(min=0),
    metavar="N",
    help="The token that ends a document. Attention then stays within each document.",
)
@click.option(
    "--reset-position-ids", is_flag=True, help="Count positions from the beginning of each document (with --eod-token)."
)
@click.option("--eod-mask-loss", is_flag=True, help="Leave what follows --eod-token out of the loss.")
@rate("--dropout", default=0.0, help="Probability, of the embedding and of the result of each sublayer.")
@size("--micro-batch-size", default=1, show_default=True, help="Sequences of a rank at a time.")
@size("--global-batch-size", help="Sequences of a step.  [default: one micro-batch a data rank]")
@size("--train-iters", default=100, show_default=True, help="Steps, with those before --load.")
@rate("--lr", default=3e-4, help="Learning rate of AdamW.")
@click.option(
    "--lr-warmup-iters",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Steps in which it grows to that.",
)
@click.option(
    "--lr-decay-style",
    type=choice["decays"],
    default="constant",
    show_default=True,
    help="How it falls afterwards, to --min-lr.",
)
@size("--lr-decay-iters", help="The step that has --min-lr.  [default: --train-iters]")
@rate("--min-lr", default=0.0, help="Learning rate in the end.")
@rate("--weight-decay", default=0.1, help="Of matrices.")
@rate("--clip-grad", default=1.0, help="The gradient's largest norm; 0: any.")
@number("--seed", default=0, help="Of initial values, dropout and the order of the data.")
@click.option(
    "--dtype",
    type=choice["dtypes"],
    help="In which is computed; with bfloat16 weights and optimizer are float32.  "
    "[default: bfloat16 on GPUs, float32 without]",
)
@click.option(
    "--recompute-granularity",
    type=choice["granularities"],
    help="Compute in backward again what is not kept for it: less memory, slower. selective: norms, activations and "
    "rotations, for about a third of the memory at next to no flops; full: whole blocks, for nearly all of it at a "
    "third more flops.  [default: nothing is computed again]",
)
@click.option("--recompute", is_flag=True, help="The same as --recompute-granularity full.")
@click.option(
    "--enable-cuda-graph",
    is_flag=True,
    help="Launch forward and backward three times, and replay them from then on: for layers that a GPU computes faster "
    "than Python launches them.",
)
@size("--tensor-parallel-size", default=1, show_default=True, help="Ranks that share each layer.")
@click.option("--sequence-parallel", is_flag=True, help="Let these also split what is between the layers.")
@click.option(
    "--tp-comm-overlap",
    is_flag=True,
    help="Let these compute the halves of a micro-batch in turn, one's exchanges beside the other's products. It has "
    "twice the launches: give --enable-cuda-graph too.",
)
@click.option(
    "--accumulate-whole-gradients",
    is_flag=True,
    help="With --use-torch-fsdp2 and several micro-batches: sum gradients once a step. Each rank then holds those of "
    "the whole model: faster, and 4 bytes a parameter more memory.",
)
@click.option("--use-torch-fsdp2", is_flag=True, help="Let data ranks share weights and optimizer: less memory.")
@size("--pipeline-parallel-size", default=1, show_default=True, help="Ranks among which the layers are divided.")
@click.option(
    "--pipeline-schedule",
    type=choice["schedules"],
    help="In which order these compute micro-batches. gpipe: all forwards, then all backwards; 1f1b holds fewer; "
    "interleaved waits less, with several stages a rank; zb-h1 and zbv fill waits with weight gradients.  "
    "[default: 1f1b, or interleaved with the next option]",
)
@size(
    "--num-layers-per-virtual-pipeline-stage",
    help="Layers of a stage, on average, where a rank has several: for interleaved, whose ranks wait less the fewer "
    "these are, and send more.",
)
@size("--context-parallel-size", default=1, show_default=True, help="Ranks that share each sequence.")
@click.option(
    "--cp-comm-type",
    type=choice["transports"],
    help="How these exchange keys and values: from rank to rank beside the work (p2p), all at once (all_gather), heads "
    "against positions (a2a), or heads among neighbours and the rest from rank to rank (a2a+p2p).  [default: the "
    "fastest of the first three, by a measured table or a formula]",
)
@click.option(
    "--hierarchical-context-parallel-sizes",
    type=(click.IntRange(min=1), click.IntRange(min=1)),
    metavar="A P",
    help="With a2a+p2p: how many neighbours exchange heads, and how many groups of them there are.",
)
@click.option("--device", type=choice["devices"], help="[default: cuda, if there is a GPU]")
@path("--save", metavar="DIR", help="Write weights and optimizer after the last step, whole or not at all.")
@size("--save-interval", help="And after every N steps.")
@click.option(
    "--async-save/--no-async-save",
    default=None,
    help="Write beside the steps that follow, from a copy in the host's memory; or wait for the disk.  "
    "[default: --async-save]",
)
@size("--keep-last", help="Leave the last N steps in --save, and remove older ones once a new one is whole.")
@path(
    "--load",
    metavar="DIR",
    help="Go on with what was saved there last, in any layout. Where nothing was yet, begin anew if it is also --save.",
)
@path(
    "--init-from",
    metavar="FOLDER",
    help="Begin from a GPT-2 or Llama of Hugging Face: its config.json, which has the sizes, and .safetensors files. "
    "With --load only the sizes are its.",
)
@path(
    "--metrics",
    metavar="FILE",
    help="Write a line of JSON for each step: step, loss, grad_norm, tokens_per_s, percent_of_roof and more. With "
    "--load those of steps after it are taken out, and made anew.",
)
@click.option(
    "--distributed-timeout-minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="X",
    default=10.0,
    show_default=True,
    help="For how long ranks may wait for one that is alive: then all end, and say which it is. One that is dead or "
    "stopped ends all in 30 s.",
)
@size("--log-interval", default=10, show_default=True, help="Steps between lines.")
@click.option("--roof/--no-roof", "with_roof", default=True, help="Whether to say how far from the roof it is.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check all that is given, draw the pipeline's schedule and who holds which tokens, and end. Without torchrun, "
    "as many ranks as the sizes ask for are taken to be there.",
)
@done_by("rooftop.cli.train:train_gpt")
def gpt() -> None:
    """Train a GPT on tokens or text, and say how fast.

    It is GPT-2's transformer of the given sizes, or a preset. Alone it trains on one process; under torchrun each
    process is a rank. Ranks use NCCL where there are GPUs, and gloo where there are none.
    """
