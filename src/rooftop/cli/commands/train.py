"""`rooftop train`: the group, and arguments, options and help of `train gpt`.

`train gpt` trains in one process, or as one of several ranks.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.commands.train_task import GROUP_EXAMPLES, Tasks

DATA, VALID_DATA = "--data-path", "--valid-data-path"
WEIGHT = re.compile(names.WEIGHT, re.IGNORECASE)
LAYERS, WIDTH, HEADS, LENGTH = 4, 256, 4, 256  # a laptop trains this model in minutes
INTERVAL, ITERS = 1000, 100  # the defaults of Megatron-LM

EXAMPLES = """\b
Examples:
  python -m rooftop.train gpt --data-path book.txt
  torchrun --nproc-per-node 4 -m rooftop.train gpt --data-path texts/ --tensor-parallel-size 2 --sequence-parallel
  torchrun --nproc-per-node 8 -m rooftop.train gpt --preset llama-1b --data-path tokens.bin --save run/ \\
    --train-iters 10000 --lr 4e-4 --lr-warmup-iters 500 --lr-decay-style cosine --min-lr 4e-5
  python -m rooftop.train gpt --data-path book.txt --train-iters 200 --save run/ --save-interval 50 --keep-last 3 \\
    --load run/
  python -m rooftop.train gpt --data-path texts/ --split 95,5 --eval-interval 100 --tensorboard-dir runs/texts
  python -m rooftop.train gpt --data-path tokens.bin --init-from gpt2/ --seq-length 512 --lr 1e-5 --save tuned/
  torchrun --nproc-per-node 2 -m rooftop.train gpt --preset llama-1b --data-path tokens.bin --micro-batch-size 4 \\
    --tensor-parallel-size 2 --sequence-parallel --tp-comm-overlap --enable-cuda-graph
  torchrun --nproc-per-node 2 -m rooftop.train gpt --preset llama-1b --data-path tokens.bin --seq-length 65536 \\
    --context-parallel-size 2 --recompute --eod-token 2 --reset-position-ids

Layout: the number of ranks, divided by the tensor, pipeline and context parallel sizes, is the data parallel size. 8
processes with --tensor-parallel-size 2 are 4 x 2 ranks; with --pipeline-parallel-size 2 as well, 2 x 2 x 2. The ranks
that share one copy of the model compute the copy's share of --global-batch-size, in micro-batches of --micro-batch-size
sequences.

Context parallelism: each rank holds one chunk from the front and one from the back of every sequence, and the ranks
exchange keys and values. With --eod-token, each sequence is divided so that all ranks have equal work.

Reproducibility: the same seed gives the same training in every layout. Initial values, dropout and data depend on the
seed and the position in the whole model and batch, not on the rank. Layouts differ only in speed and in how sums round.

\b
Data, as --data-path:
  FILE.bin      tokens: with Megatron-LM's .idx beside it, llm.c's header, nanoGPT's meta.pkl, or numbers alone
  FILE.npy      tokens: a 1-D array of integers, memory-mapped
  a data set    of Hugging Face (Parquet, Arrow, save_to_disk): column input_ids or text; needs datasets
  another file  text: each byte is a token, the vocabulary is 256
  a folder      all text files in it
To mix several: --data-path 0.7 A 0.3 B gives each path its share of the sequences. Without weights (A B, or
--data-path A --data-path B) the shares follow the sizes.

The printed line of a step has the loss before the step, the norm of the gradient, tokens per second of all ranks, MFU,
percent of roof, and the peak memory of rank 0. MFU: the model's flops per second over the fastest matrix product
measured on this machine. Percent of roof: the shortest possible time of the step over the measured time. A machine
without stored ceilings is measured first, in under 30 s; --no-roof skips this measurement.

With --save, SIGTERM or Ctrl-C makes all ranks save after the same step and exit with status 143 or 130. Start with
--save run/ --load run/, and the same command line resumes where the last run stopped. `rooftop checkpoint` shows what
was saved.
"""

size = partial(click.option, type=click.IntRange(min=1), metavar="N")
rate = partial(click.option, type=NumberRange(min=0), metavar="X", show_default=True)
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
    """A command whose --data-path and --valid-data-path accept all words up to the next option, as in Megatron-LM."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words: list[str] = []
        here = ""  # the option whose words follow
        for word in args:
            if word.startswith("-") and not WEIGHT.match(word):
                option = word.partition("=")[0]
                here = option if option in (DATA, VALID_DATA) else ""
            elif here and words[-1] != here:
                words.append(here)
            words.append(word)
        return super().parse_args(ctx, words)


@click.group(cls=Tasks, epilog=GROUP_EXAMPLES)
def command() -> None:
    """Train a model in one process or, under torchrun, in many. Report percent of roof: the shortest time that a step
    could take on this machine, over the measured time."""


@command.command(cls=DataPaths, epilog=EXAMPLES)
@click.option(
    DATA,
    "data_path",
    required=True,
    multiple=True,
    metavar="[WEIGHT] PATH ...",
    help="Tokens or text to train on. Several paths are mixed by the given weights or, without weights, by their "
    "sizes.",
)
@click.option(
    VALID_DATA,
    "valid_data_path",
    multiple=True,
    metavar="[WEIGHT] PATH ...",
    help="Tokens or text to validate on, as --data-path.",
)
@click.option(
    "--split",
    metavar="TRAIN,VALID",
    help="Instead of --valid-data-path: use the front of --data-path for training and the tokens after it for "
    "validation, in these proportions, e.g. 95,5. A third number, as in 969,30,1, leaves tokens at the end unused, for "
    "tests.",
)
@size("--eval-interval", help=f"Steps between validations; the last step is always validated.  [default: {INTERVAL}]")
@size(
    "--eval-iters",
    help="Number of batches (of --global-batch-size sequences) in a validation, the same batches each time. If the "
    f"data have fewer sequences, each sequence is read once.  [default: {ITERS}]",
)
@click.option(
    "--token-dtype",
    type=choice["tokens"],
    help="Integer type of a .bin file that does not state it.  [default: detected from its numbers; an ambiguous file "
    "is refused]",
)
@click.option(
    "--preset", type=choice["presets"], metavar="NAME", help=f"Architecture and sizes: {', '.join(names.GPTS)}."
)
@size("--num-layers", help=f"Number of transformer blocks.  [default: {LAYERS}, or the preset's]")
@size("--hidden-size", help=f"Width of the model.  [default: {WIDTH}, or the preset's]")
@size(
    "--num-attention-heads",
    help=f"Number of attention heads; must divide the hidden size.  [default: {HEADS}, or the preset's]",
)
@size("--seq-length", help=f"Tokens per sequence.  [default: {LENGTH}, or the preset's maximum]")
@size("--vocab-size", help=f"Vocabulary size.  [default: the preset's, or {names.BYTE_TOKENS} for text]")
@click.option(
    "--eod-token",
    type=click.IntRange(min=0),
    metavar="N",
    help="Token that ends a document. With this option, attention stays within each document.",
)
@click.option(
    "--reset-position-ids", is_flag=True, help="Restart positions at the beginning of each document (with --eod-token)."
)
@click.option("--eod-mask-loss", is_flag=True, help="Exclude the token that follows --eod-token from the loss.")
@rate("--dropout", default=0.0, help="Dropout probability, after the embedding and after each sublayer.")
@size("--micro-batch-size", default=1, show_default=True, help="Number of sequences in one forward pass of a rank.")
@size(
    "--global-batch-size",
    help="Number of sequences per step, on all ranks together.  [default: one micro-batch per data parallel rank]",
)
@size(
    "--train-iters",
    default=100,
    show_default=True,
    help="Total number of steps, including the steps before the checkpoint that --load reads.",
)
@rate("--lr", default=3e-4, help="Learning rate of AdamW after warmup.")
@click.option(
    "--lr-warmup-iters",
    type=click.IntRange(min=0),
    metavar="N",
    default=0,
    show_default=True,
    help="Number of steps of linear warmup to --lr.",
)
@click.option(
    "--lr-decay-style",
    type=choice["decays"],
    default="constant",
    show_default=True,
    help="Learning rate schedule after warmup, down to --min-lr.",
)
@size("--lr-decay-iters", help="Step at which the learning rate reaches --min-lr.  [default: --train-iters]")
@rate("--min-lr", default=0.0, help="Final learning rate of the schedule.")
@rate("--weight-decay", default=0.1, help="Weight decay of AdamW. Norms and biases do not decay.")
@rate("--clip-grad", default=1.0, help="Maximum norm of the gradient; 0 turns clipping off.")
@number("--seed", default=0, help="Seed of initial values, dropout and data order.")
@click.option(
    "--dtype",
    type=choice["dtypes"],
    help="Compute dtype. With bfloat16, weights and optimizer state stay float32.  "
    "[default: bfloat16 on GPUs, float32 on CPUs]",
)
@click.option(
    "--recompute-granularity",
    type=choice["granularities"],
    help="Recompute parts of forward during backward, which saves memory but takes time. selective: norms, activations "
    "and rotary embeddings; saves about a third of the activation memory for almost no flops. full: whole blocks; "
    "saves almost all of this memory for a third more flops.  [default: no recomputation]",
)
@click.option("--recompute", is_flag=True, help="Same as --recompute-granularity full.")
@click.option(
    "--enable-cuda-graph/--disable-cuda-graph",
    default=None,
    help="Launch the first three steps, then replay forward and backward of each step from a CUDA graph. This helps if "
    "the GPU computes layers faster than Python launches them; --disable-cuda-graph launches every step.  [default: on "
    "one GPU, if forward and backward of a layer need less than 1.5 teraflop for a micro-batch, and memory suffices: "
    "see docs/training.md]",
)
@size("--tensor-parallel-size", default=1, show_default=True, help="Number of ranks that share each layer.")
@click.option(
    "--sequence-parallel",
    is_flag=True,
    help="Tensor parallel ranks also split the activations between layers, along the sequence.",
)
@click.option(
    "--tp-comm-overlap",
    is_flag=True,
    help="Tensor parallel ranks compute a micro-batch in two halves: one half communicates while the other computes. "
    "The halves double the launches, so a GPU needs --enable-cuda-graph. The option needs an even --micro-batch-size, "
    "and excludes --recompute and --use-torch-fsdp2.",
)
@click.option(
    "--accumulate-whole-gradients",
    is_flag=True,
    help="With --use-torch-fsdp2 and several micro-batches: sum gradients over ranks once per step. One sum is faster, "
    "but each rank keeps the whole model's gradients: 4 more bytes per parameter.",
)
@click.option(
    "--use-torch-fsdp2",
    is_flag=True,
    help="Shard weights, gradients and optimizer state over data and context parallel ranks, to save memory.",
)
@size(
    "--pipeline-parallel-size", default=1, show_default=True, help="Number of ranks that divide the layers among them."
)
@click.option(
    "--pipeline-schedule",
    type=choice["schedules"],
    help="Order in which pipeline ranks compute micro-batches. gpipe: all forwards, then all backwards. 1f1b: "
    "forwards and backwards alternate, which keeps fewer activations in memory. interleaved: several stages per rank, "
    "shorter bubbles. zb-h1, zbv: fill "
    "bubbles with weight gradients.  [default: 1f1b; interleaved with --num-layers-per-virtual-pipeline-stage]",
)
@size(
    "--num-layers-per-virtual-pipeline-stage",
    help="Average number of layers per stage if each rank has several stages (interleaved). Fewer layers mean "
    "shorter bubbles and more communication.",
)
@size("--context-parallel-size", default=1, show_default=True, help="Number of ranks that share each sequence.")
@click.option(
    "--cp-comm-type",
    type=choice["transports"],
    help="How context parallel ranks exchange keys and values. p2p: from rank to rank, while they compute. all_gather: "
    "all at once. a2a: all-to-all, so that each rank has some heads at all positions. a2a+p2p: a2a among neighbours, "
    "p2p between groups.  [default: the fastest of p2p, all_gather and a2a, by a measured table or a formula]",
)
@click.option(
    "--hierarchical-context-parallel-sizes",
    type=(click.IntRange(min=1), click.IntRange(min=1)),
    metavar="A P",
    help="With a2a+p2p: P groups of A neighbours that exchange heads. A times P is --context-parallel-size.",
)
@click.option("--device", type=choice["devices"], help="Device to train on.  [default: cuda if there is a GPU]")
@path(
    "--save",
    metavar="DIR",
    help="Folder of checkpoints. Saves weights and optimizer state after the last step, atomically.",
)
@size("--save-interval", help="Also save after every N steps.")
@click.option(
    "--async-save/--no-async-save",
    default=None,
    help="Write checkpoints in the background from a copy in host memory, or wait for the disk.  "
    "[default: --async-save]",
)
@size(
    "--keep-last",
    help="Keep the last N checkpoints in --save. Older checkpoints are removed once a new one is complete.",
)
@path(
    "--load",
    metavar="DIR",
    help="Resume from the last checkpoint in DIR. The number of ranks and the parallel sizes may differ from those of "
    "the run that saved it. If DIR is also --save and still empty, start from step 1.",
)
@path(
    "--init-from",
    metavar="FOLDER",
    help="Start from the weights of a GPT-2, Llama, Mistral or Qwen of Hugging Face (config.json and .safetensors). "
    "config.json sets the model's sizes. If --load continues from a checkpoint, the checkpoint's weights replace "
    "those of FOLDER, and only FOLDER's config.json is used.",
)
@path(
    "--metrics",
    metavar="FILE",
    help="Write a line of JSON for each step: step, loss, grad_norm, tokens_per_s, percent_of_roof, valid_loss and "
    "more. With --load, lines of steps after the checkpoint are removed and written again.",
)
@path("--tensorboard-dir", metavar="DIR", help="Write event files for TensorBoard, which needs the extra `train`.")
@click.option(
    "--distributed-timeout-minutes",
    type=NumberRange(min=0, min_open=True),
    metavar="X",
    default=10.0,
    show_default=True,
    help="Longest wait for a rank that runs but does not answer. Then all ranks end, and the error names this rank. "
    "If a rank has ended or is suspended, waiting ranks end within 30 s, computing ranks within 60 s.",
)
@size("--log-interval", default=10, show_default=True, help="Number of steps between printed lines.")
@click.option("--roof/--no-roof", "with_roof", default=True, help="Report the percent of roof, or leave it out.")
@click.option(
    "--dry-run",
    is_flag=True,
    help="Check all options, show the pipeline schedule and which positions of a sequence each rank has, then exit. "
    "Without torchrun, the check assumes one model replica: as many ranks as the product of --tensor-parallel-size, "
    "--pipeline-parallel-size and --context-parallel-size.",
)
@done_by("rooftop.cli.train:train_gpt")
def gpt() -> None:
    """Train a GPT on tokens or text, and report its speed.

    The model is a GPT-2 transformer of the given sizes, or a preset. Without torchrun, one process trains; under
    torchrun, each process is a rank. Ranks communicate by NCCL on GPUs and by gloo on CPUs.
    """
