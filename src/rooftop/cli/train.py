"""`rooftop train`: a model from its first step on, alone or one rank of many under torchrun."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import click
import torch
import torch.distributed as dist

from rooftop.analysis.formats import percent_text
from rooftop.cli.analyze import check_writable
from rooftop.cli.progress import progress_bar
from rooftop.errors import InputError, RooftopError
from rooftop.hardware import measure_ceilings
from rooftop.models.gpt_configs import PRESETS, gpt_config
from rooftop.models.gpt_switches import GptConfig
from rooftop.models.gpt_weights import read_gpt_config
from rooftop.parallel import Layout, World, join, launched
from rooftop.train import (
    GptTrainer,
    GptTraining,
    Mixture,
    StepReport,
    StepRoof,
    Tokens,
    find_training,
    load_training,
    open_mixture,
    other_data,
    run_steps,
    step_roof,
)
from rooftop.train.gpt_training import DECAYS, DTYPES
from rooftop.train.metrics import add_lines, kept_lines, metrics_file
from rooftop.train.mixtures import WEIGHT, paths_of
from rooftop.train.number_widths import KINDS
from rooftop.train.tokens import BYTES

LAUNCHED_PERCENT = 15  # of roof; Llamas of 135 M to 7 B have 4 where Python is too slow for them, and else 34 to 73
DATA = "--data-path"
LAYERS, WIDTH, HEADS, LENGTH = 4, 256, 4, 256  # of a model that a laptop trains in minutes

EXAMPLES = """\b
Examples:
  python -m rooftop.train gpt --data-path book.txt
  torchrun --nproc-per-node 4 -m rooftop.train gpt --data-path texts/ --tensor-parallel-size 2 --sequence-parallel
  torchrun --nproc-per-node 8 -m rooftop.train gpt --preset llama-1b --data-path tokens.bin --save run/ \\
    --train-iters 10000 --lr 4e-4 --lr-warmup-iters 500 --lr-decay-style cosine --min-lr 4e-5
  python -m rooftop.train gpt --data-path book.txt --train-iters 200 --save run/ --load run/
  python -m rooftop.train gpt --data-path tokens.bin --init-from gpt2/ --seq-length 512 --lr 1e-5 --save tuned/
  torchrun --nproc-per-node 2 -m rooftop.train gpt --preset llama-1b --data-path tokens.bin --micro-batch-size 4 \\
    --tensor-parallel-size 2 --sequence-parallel --tp-comm-overlap --enable-cuda-graph

Ranks that the tensor parallel ones leave over are data parallel: 8 processes with --tensor-parallel-size 2 are 4 x 2.
Each takes --micro-batch-size sequences at a time, and as many times as --global-batch-size needs.

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
"""

size = partial(click.option, type=click.IntRange(min=1), metavar="N")
rate = partial(click.option, type=click.FloatRange(min=0), metavar="X", show_default=True)
number = partial(click.option, type=click.IntRange(0, 2**64 - 1), metavar="N", show_default=True)
path = partial(click.option, type=click.Path(path_type=Path))
choice = {
    "tokens": click.Choice(list(KINDS)),
    "presets": click.Choice(list(PRESETS)),
    "decays": click.Choice(list(DECAYS)),
    "dtypes": click.Choice(list(DTYPES)),
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
@click.option("--preset", type=choice["presets"], metavar="NAME", help=f"One of {', '.join(PRESETS)}.")
@size("--num-layers", help=f"Blocks.  [default: {LAYERS}, or the preset's]")
@size("--hidden-size", help=f"Features of a position.  [default: {WIDTH}]")
@size("--num-attention-heads", help=f"They share the features evenly.  [default: {HEADS}]")
@size("--seq-length", help=f"Tokens of a sequence.  [default: {LENGTH}, or the preset's most]")
@size("--vocab-size", help=f"Tokens that there are.  [default: the preset's, or {BYTES} of text]")
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
@click.option("--recompute", is_flag=True, help="Keep little for backward and compute it again: less memory, slower.")
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
@click.option("--use-torch-fsdp2", is_flag=True, help="Let data ranks share weights and optimizer: less memory.")
@size("--pipeline-parallel-size", default=1, help="Not yet: 1.")
@size("--context-parallel-size", default=1, help="Not yet: 1.")
@click.option("--device", type=choice["devices"], help="[default: cuda, if there is a GPU]")
@path("--save", metavar="DIR", help="Write weights and optimizer after the last step, whole or not at all.")
@size("--save-interval", help="And after every N steps.")
@path("--load", metavar="DIR", help="Go on with what was saved there last, in any layout.")
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
@size("--log-interval", default=10, show_default=True, help="Steps between lines.")
@click.option("--roof/--no-roof", "with_roof", default=True, help="Whether to say how far from the roof it is.")
def gpt(
    *,
    data_path: tuple[str, ...],
    token_dtype: str | None,
    tensor_parallel_size: int,
    sequence_parallel: bool,
    use_torch_fsdp2: bool,
    pipeline_parallel_size: int,
    context_parallel_size: int,
    device: str | None,
    train_iters: int,
    save: Path | None,
    save_interval: int | None,
    load: Path | None,
    init_from: Path | None,
    metrics: Path | None,
    log_interval: int,
    with_roof: bool,
    **options: Any,
) -> None:
    """Train a GPT on tokens or text, and say how fast.

    It is GPT-2's transformer of the given sizes, or a preset. Alone it trains on one process; under torchrun each
    process is a rank. Ranks use NCCL where there are GPUs, and gloo where there are none.
    """
    # What is wrong at every rank is found before any communicates, and said by each in the same words.
    if save_interval is not None and save is None:
        raise click.UsageError("--save-interval says how often: expected --save DIR, where to")
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with as_input_errors():
        ranks = launched().size
        layout = layout_of(
            ranks, tensor_parallel_size, pipeline_parallel_size, context_parallel_size, sequence_parallel
        )
        if metrics is not None:
            check_writable(metrics, paths_of(data_path))
        tokens = open_mixture(data_path, token_dtype)
        training = training_of(tokens, layout, kind, train_iters, init_from=init_from, **options)
        training.check(layout, ranks, kind, fully_shard=use_torch_fsdp2)
        training.batches(tokens)  # there are enough
        found, before = find_training(load, training) if load is not None else (None, 0)
        if metrics is not None and found is not None:
            kept_lines(metrics, before)  # it is one that can be gone on with
    if before >= train_iters:
        raise click.UsageError(f"{load} has {before} steps already: expected more as --train-iters, got {train_iters}")
    first = launched().rank == 0
    with progress_bar() if first else nullcontext(lambda what, fraction: None) as progress:
        tokens.check_vocabulary(training.config.vocabulary, progress)
    if save is not None:
        check_folder(save)
    settings = {
        "training": training,
        "data": tokens.fingerprint(),
        "train_iters": train_iters,
        "load": str(found),
        "init_from": str(init_from),
        "save": str(save),
        "save_interval": save_interval,
        "log_interval": log_interval,
        "roof": with_roof,
        "fully_shard": use_torch_fsdp2,
    }
    with as_input_errors(), join(layout, settings=settings, device=device) as world:
        trainer = GptTrainer(
            training,
            tokens,
            layout,
            layout.process_groups(),
            world.device,
            fully_shard=use_torch_fsdp2,
            initial=init_from if found is None else None,
        )
        if found is not None:
            load_training(found, trainer)
        if first:
            click.echo(heading(trainer, world, found))
            if found is not None and (note := other_data(found, tokens)):
                click.echo(f"note: {note}", err=True)
        roof = roof_here(trainer) if with_roof else None
        steps = run_steps(
            trainer, train_iters, interval=log_interval, roof=roof, save=save, save_interval=save_interval
        )
        after = None if found is None else before
        with (
            metrics_file(metrics, after) if first and metrics is not None else nullcontext() as file,
            progress_bar() if first else nullcontext(lambda what, fraction: None) as progress,
        ):
            advised = not first
            for reports in steps:
                if first:
                    tell(reports, train_iters, file)
                    if not advised and (words := advice(reports[-1], trainer)):
                        click.echo(f"note: {words}", err=True)
                        advised = True
                    progress(f"step {reports[-1].step}", reports[-1].step / train_iters)
    if first and save is not None:
        click.echo(f"saved: {save}")


@contextmanager
def as_input_errors() -> Iterator[None]:
    """Sizes and layouts that do not fit are a wrong call."""
    try:
        yield
    except RooftopError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


def check_folder(path: Path) -> None:
    """Make the folder, if need be, and see that it can be written to: before the work, not after it.

    Raises:
        click.BadParameter: it cannot.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be made: {error.strerror}", param_hint="--save") from error
    if not os.access(path, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written: permission denied", param_hint="--save")


def layout_of(ranks: int, tensor: int, pipeline: int, context: int, sequence_parallel: bool) -> Layout:
    """The flags' layout of all ranks.

    Raises:
        ValueError: there is none, or it cannot train yet.
    """
    for flag, size in (("pipeline", pipeline), ("context", context)):
        if size > 1:
            raise InputError(
                f"--{flag}-parallel-size {size}: {flag} parallel ranks cannot train yet; leave it out, or use "
                "--tensor-parallel-size and data parallel ranks"
            )
    return Layout.of_world(ranks, tp=tensor, sequence_parallel=sequence_parallel)


def training_of(
    tokens: Tokens | Mixture,
    layout: Layout,
    kind: str,
    steps: int,
    *,
    init_from: Path | None,
    preset: str | None,
    num_layers: int | None,
    hidden_size: int | None,
    num_attention_heads: int | None,
    seq_length: int | None,
    vocab_size: int | None,
    dropout: float,
    micro_batch_size: int,
    global_batch_size: int | None,
    lr: float,
    lr_warmup_iters: int,
    lr_decay_style: str,
    lr_decay_iters: int | None,
    min_lr: float,
    weight_decay: float,
    clip_grad: float,
    seed: int,
    dtype: str | None,
    recompute: bool,
    tp_comm_overlap: bool,
    enable_cuda_graph: bool,
) -> GptTraining:
    """The flags' training.

    Raises:
        ValueError: sizes that do not fit; no vocabulary is known; sizes beside a preset or a folder that has them.
    """
    if init_from is not None:
        sizes = {
            "--preset": preset,
            "--num-layers": num_layers,
            "--hidden-size": hidden_size,
            "--num-attention-heads": num_attention_heads,
            "--vocab-size": vocab_size,
        }
        given = [name for name, value in sizes.items() if value is not None]
        if given:
            raise InputError(f"--init-from {init_from} has its sizes: leave out {' and '.join(given)}")
        config = replace(read_gpt_config(init_from), dropout=dropout)
        if tokens.text and config.vocabulary != BYTES:
            raise InputError(
                f"{tokens.source} is text, of which each byte would be a token, and {init_from} knows "
                f"{config.vocabulary} tokens of its own: make tokens of the text by its tokenizer, as a .bin file"
            )
        length = seq_length or config.positions
    elif preset is not None:
        if hidden_size is not None or num_attention_heads is not None:
            raise InputError(f"--preset {preset} has its --hidden-size and --num-attention-heads: leave these out")
        config = gpt_config(preset)
        config = replace(
            config,
            layers=num_layers or config.layers,
            vocabulary=vocab_size or config.vocabulary,
            dropout=dropout,
        )
        length = seq_length or config.positions
    else:
        vocabulary = vocab_size or tokens.vocabulary
        if vocabulary is None:
            raise InputError(f"{tokens.source} has tokens of a vocabulary that is not known: expected --vocab-size")
        width, length = hidden_size or WIDTH, seq_length or LENGTH
        heads = num_attention_heads or HEADS
        config = GptConfig(
            vocabulary=vocabulary,
            layers=num_layers or LAYERS,
            width=width,
            heads=heads,
            kv_heads=heads,
            hidden=4 * width,
            positions=length,
            dropout=dropout,
        )
    return GptTraining(
        config=config,
        length=length,
        global_batch=global_batch_size or micro_batch_size * layout.dp,
        micro_batch=micro_batch_size,
        learning_rate=lr,
        warmup=lr_warmup_iters,
        decay=lr_decay_style,
        decay_steps=lr_decay_iters or (None if lr_decay_style == "constant" else steps),
        least_rate=min_lr,
        weight_decay=weight_decay,
        clip=clip_grad,
        seed=seed,
        dtype=DTYPES[dtype or ("bfloat16" if kind == "cuda" else "float32")],
        recompute=recompute,
        halves=tp_comm_overlap,
        cuda_graph=enable_cuda_graph,
    )


def roof_here(trainer: GptTrainer) -> StepRoof | None:
    """Of rank 0, which measures its device while the others wait: they would disturb each other."""
    found = None
    if trainer.rank == 0:
        with progress_bar() as progress:
            ceilings = measure_ceilings(trainer.device, progress=progress)
        try:
            found = step_roof(trainer, ceilings)
        except ValueError as error:  # no rate in this dtype
            click.echo(f"no roof: {error}")
    if dist.is_initialized():
        dist.barrier()
    return found


# ---- what is said --------------------------------------------------------------------------------------------------


def heading(trainer: GptTrainer, world: World, found: Path | None) -> str:
    """The model, the ranks, the data."""
    training, dtype = trainer.training, str(trainer.training.dtype).removeprefix("torch.")
    tokens = trainer.batches.tokens
    data = tokens.source if tokens.text else f"{tokens.source} ({tokens.kind})"
    lines = [
        f"{training.config.parameters:,} parameters, {dtype} on {world.size} x {world.device.type}: {trainer.layout}",
        f"{trainer.batches.sequences:,} sequences of {training.length:,} tokens in {data}, "
        f"{training.global_batch:,} a step",
    ]
    if isinstance(tokens, Mixture):
        lines += [
            f"  {percent_text(100 * float(share))} from {row.source}, {count:,} sequences"
            for row, (count, share) in zip(tokens.rows, trainer.batches.parts, strict=True)
        ]
    if found is not None:
        lines.append(f"going on after step {trainer.step:,} of {found}")
    return "\n".join(lines)


def tell(reports: list[StepReport], steps: int, file: TextIO | None) -> None:
    """A line for the last one; for each one a line of JSON."""
    last = reports[-1]
    words = [
        f"step {last.step:>{len(str(steps))}}/{steps}",
        f"loss {last.loss:.6f}",
        f"grad norm {last.grad_norm:.4f}",
        f"lr {last.learning_rate:.2e}",
        f"{last.tokens_per_s:,.0f} tokens/s",
    ]
    if last.mfu is not None and last.percent_of_roof is not None:
        words += [f"MFU {percent_text(100 * last.mfu)}", f"{percent_text(last.percent_of_roof)} of roof"]
    click.echo("  ".join([*words, f"{last.peak_bytes / 2**30:.2f} GiB"]))
    if last.percent_of_roof is not None and last.percent_of_roof > 100:
        click.echo("more than the roof: the ceilings are wrong; measure again with rooftop ceilings --refresh")
    if file is not None:
        add_lines(file, reports)


def advice(report: StepReport, trainer: GptTrainer) -> str | None:
    """What may make steps faster, once they are not the first ones any more; None if nothing is known."""
    may_replay = trainer.device.type == "cuda" and not (trainer.training.cuda_graph or trainer.fully_shard)
    if (
        report.step == 1
        or report.percent_of_roof is None
        or report.percent_of_roof > LAUNCHED_PERCENT
        or not may_replay
    ):
        return None
    return (
        f"{percent_text(report.percent_of_roof)} of roof: layers this small may take Python longer to launch than the "
        "GPU to compute; --enable-cuda-graph replays steps"
    )
