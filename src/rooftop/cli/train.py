"""`rooftop train`: train a GPT in one process, or as one rank of many under torchrun."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from rooftop.cli.commands.train import HEADS, INTERVAL, ITERS, LAYERS, LENGTH, VALID_DATA, WIDTH
from rooftop.cli.outputs import check_writable
from rooftop.cli.progress import progress_bar
from rooftop.cli.train_texts import advice, heading, planned, tell
from rooftop.errors import InputError, RooftopError
from rooftop.hardware import measure_ceilings
from rooftop.models.gpt.configs import gpt_config
from rooftop.models.gpt.switches import GptConfig
from rooftop.models.gpt.weights import read_gpt_config
from rooftop.parallel import Layout, join, launched, others_wait, report
from rooftop.train import (
    GptTrainer,
    GptTraining,
    Mixture,
    StepRoof,
    Tokens,
    Validation,
    find_training,
    load_training,
    nothing_saved,
    open_mixture,
    other_data,
    run_steps,
    split_tokens,
    step_cost,
    step_roof,
)
from rooftop.train.checkpoints.locks import locked
from rooftop.train.gpt.initial_weights import check_no_training
from rooftop.train.gpt.metrics import kept_lines, metrics_file
from rooftop.train.gpt.training import DTYPES
from rooftop.train.reports.gpt_tensorboard import GptTensorBoard
from rooftop.train.reports.tensorboard import summary_writer
from rooftop.train.stopping import INTERRUPTED_STATUS, STOPPED_STATUS, stop_on_signals
from rooftop.train.tokens.mixtures import paths_of
from rooftop.train.tokens.tokens import BYTES

GRAPH_SHARE = 0.7
"""A CUDA graph is the default only if it needs less than this share of the GPU's memory."""


def train_gpt(
    *,
    data_path: tuple[str, ...],
    valid_data_path: tuple[str, ...],
    split: str | None,
    eval_interval: int | None,
    eval_iters: int | None,
    token_dtype: str | None,
    tensor_parallel_size: int,
    sequence_parallel: bool,
    use_torch_fsdp2: bool,
    pipeline_parallel_size: int,
    context_parallel_size: int,
    hierarchical_context_parallel_sizes: tuple[int, int] | None,
    device: str | None,
    train_iters: int,
    save: Path | None,
    save_interval: int | None,
    async_save: bool | None,
    keep_last: int | None,
    load: Path | None,
    init_from: Path | None,
    metrics: Path | None,
    tensorboard_dir: Path | None,
    log_interval: int,
    with_roof: bool,
    dry_run: bool,
    distributed_timeout_minutes: float,
    **options: Any,
) -> int:
    """Run the command that `rooftop.cli.commands.train:gpt` describes. Returns the exit status."""
    # Before any rank communicates, check for errors that occur on every rank, with the same message on each.
    if save_interval is not None and save is None:
        raise click.UsageError("--save-interval needs a folder to save to: expected --save DIR")
    if keep_last is not None and save is None:
        raise click.UsageError("--keep-last needs a folder to save to: expected --save DIR")
    if async_save is not None and save is None:
        given = "--async-save" if async_save else "--no-async-save"
        raise click.UsageError(f"{given} needs a folder to save to: expected --save DIR")
    async_save = async_save is not False
    check_validation_options(valid_data_path, split, eval_interval, eval_iters)
    if tensorboard_dir is not None:
        summary_writer()  # raises an error if TensorBoard is not installed
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    with as_input_errors():
        ranks = launched().size
        if dry_run and launched().launcher == "alone":
            ranks = tensor_parallel_size * pipeline_parallel_size * context_parallel_size
        layout = layout_of(
            ranks, tensor_parallel_size, pipeline_parallel_size, context_parallel_size, sequence_parallel
        )
        if hierarchical_context_parallel_sizes is not None:
            options["near"] = neighbours_of(hierarchical_context_parallel_sizes, layout)
        if metrics is not None:
            read = paths_of(data_path) + (paths_of(valid_data_path, VALID_DATA) if valid_data_path else [])
            check_writable(metrics, read, "JSON")
        tokens, held_out = opened(data_path, valid_data_path, split, token_dtype)
        training = training_of(tokens, layout, kind, train_iters, init_from=init_from, **options)
        training.check(layout, ranks, kind, fully_shard=use_torch_fsdp2)
        training.batches(tokens)  # raises an error if there are too few tokens
        validation = None
        if held_out is not None:
            validation = Validation(held_out, training, interval=eval_interval or INTERVAL, iters=eval_iters or ITERS)
        anew = load is not None and save is not None and same_folder(load, save) and nothing_saved(load)
        found, before = find_training(load, training) if load is not None and not anew else (None, 0)
        if metrics is not None and found is not None:
            kept_lines(metrics, before)  # raises an error if the metrics file cannot be continued
        continued = load is not None and save is not None and (same_folder(load, save) or is_step_of(load, save))
        if save is not None and save.is_dir() and not continued and not nothing_saved(save):
            raise InputError(
                f"{save} already holds a training: expected --load {save} to continue it, or another --save"
            )
    if save is not None:
        check_folder(save, make=not dry_run)
    if tensorboard_dir is not None:
        check_folder(tensorboard_dir, "--tensorboard-dir", make=not dry_run)
    if dry_run:
        if launched().rank == 0:
            click.echo(planned(training, layout))
        return 0
    if before >= train_iters:
        raise click.UsageError(f"{load} already has {before} steps: expected a larger --train-iters, got {train_iters}")
    first = launched().rank == 0
    with progress_bar(first) as progress:
        for each in (tokens, held_out):
            if each is not None:
                each.check_vocabulary(training.config.vocabulary, progress)
    settings = {
        "training": training,
        "data": tokens.fingerprint(),
        "valid_data": None if held_out is None else held_out.fingerprint(),
        "eval_interval": eval_interval,
        "eval_iters": eval_iters,
        "train_iters": train_iters,
        "load": str(found),
        "init_from": str(init_from),
        "save": str(save),
        "save_interval": save_interval,
        "async_save": async_save,
        "keep_last": keep_last,
        "log_interval": log_interval,
        "roof": with_roof,
        "fully_shard": use_torch_fsdp2,
    }
    timeout_s = 60 * distributed_timeout_minutes
    with (
        as_input_errors(),
        join(layout, settings=settings, device=device, timeout_s=timeout_s) as world,
        locked(save) if first and save is not None else nullcontext(),
    ):
        report("making the model")
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
            report(f"loading {found}")
            load_training(found, trainer)
        if first:
            click.echo(heading(trainer, world, found, validation))
            if anew:
                click.echo(f"{load} has no checkpoint yet: starting at step 1")
            if found is not None and (note := other_data(found, tokens)):
                click.echo(f"note: {note}", err=True)
        roof = roof_here(trainer) if with_roof else None
        after = None if found is None else before
        with (
            stop_on_signals() if save is not None else nullcontext() as stop,
            metrics_file(metrics, after) if first and metrics is not None else nullcontext() as file,
            event_files(tensorboard_dir, after) if first and tensorboard_dir else nullcontext() as curves,
            progress_bar(first) as progress,
        ):
            advised = not first
            steps = run_steps(
                trainer,
                train_iters,
                interval=log_interval,
                roof=roof,
                validation=validation,
                save=save,
                save_interval=save_interval,
                keep_last=keep_last,
                async_save=async_save,
                stop=stop,
            )
            for reports in steps:
                if first:
                    tell(reports, train_iters, file)
                    if curves is not None:
                        curves.add(reports)
                    if not advised and (words := advice(reports[-1], trainer)):
                        click.echo(f"note: {words}", err=True)
                        advised = True
                    progress(f"step {reports[-1].step}", reports[-1].step / train_iters)
    stopped = trainer.step < train_iters
    by = (stop.by if stop is not None else "") or "a signal to another rank"
    if first and stopped:
        click.echo(f"stopped by {by} after step {trainer.step:,}; --load {save} resumes", err=True)
    if first:
        click.echo(f"saved: {save}" if save is not None else "nothing was saved: --save DIR keeps the weights")
    if stopped:
        return INTERRUPTED_STATUS if by == "Ctrl-C" else STOPPED_STATUS
    return 0


def check_validation_options(data: tuple[str, ...], split: str | None, interval: int | None, iters: int | None) -> None:
    """Refuse validation options that exclude each other, or that need validation data if no such data are given.

    Raises:
        click.UsageError: such options are given.
    """
    if data and split is not None:
        raise click.UsageError("--valid-data-path and --split both say what to validate on: leave out one of them")
    if not data and split is None:
        for option, value in (("--eval-interval", interval), ("--eval-iters", iters)):
            if value is not None:
                raise click.UsageError(f"{option} needs validation data: expected --valid-data-path or --split")


def opened(
    data: tuple[str, ...], valid: tuple[str, ...], split: str | None, kind: str | None
) -> tuple[Tokens | Mixture, Tokens | Mixture | None]:
    """Open the training data and the validation data (None if no validation data are given).

    Raises:
        InputError: data cannot be read, --split is malformed, or of the training data and the validation data only one
            is text.
    """
    tokens = open_mixture(data, kind)
    if split is not None:
        try:
            parts = [Fraction(str(float(part))) for part in split.split(",")]
        except ValueError as error:  # `Fraction` also raises ValueError for infinity
            raise InputError(f"--split {split}: expected numbers with commas between them, e.g. 95,5") from error
        return split_tokens(tokens, parts)
    if not valid:
        return tokens, None
    held_out = open_mixture(valid, kind, VALID_DATA)
    if held_out.text != tokens.text:
        text, other = (tokens, held_out) if tokens.text else (held_out, tokens)
        raise InputError(
            f"{text.source} is text, so its tokens are bytes, but {other.source} has other tokens: training and "
            "validation data must have one vocabulary"
        )
    return tokens, held_out


@contextmanager
def as_input_errors() -> Iterator[None]:
    """Turn a ValueError about sizes or layouts into an `InputError`."""
    try:
        yield
    except RooftopError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


def same_folder(one: Path, other: Path) -> bool:
    """Whether two paths name the same folder, even if it does not exist."""
    return one.resolve() == other.resolve()


def is_step_of(step: Path, folder: Path) -> bool:
    """Whether the path `step` is a folder directly inside `folder`, the folder in which a training saves its steps."""
    return step.resolve().parent == folder.resolve()


def check_folder(path: Path, option: str = "--save", *, make: bool = True) -> None:
    """Check, before the work begins, that a folder can be written to. Create the folder if `make` is set.

    Raises:
        click.BadParameter: the folder cannot be written to.
    """
    if make:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise click.BadParameter(f"{path} cannot be created: {error.strerror}", param_hint=option) from error
    else:
        path = next(each for each in (path, *path.absolute().parents) if each.exists())
        if not path.is_dir():
            raise click.BadParameter(f"{path} is not a folder", param_hint=option)
    if not os.access(path, os.W_OK):
        raise click.BadParameter(f"{path} cannot be written: permission denied", param_hint=option)


def layout_of(ranks: int, tensor: int, pipeline: int, context: int, sequence_parallel: bool) -> Layout:
    """Return the layout of all ranks that the options describe.

    Raises:
        ValueError: the number of ranks does not allow such a layout.
    """
    needed = tensor * pipeline * context
    if ranks == 1 < needed:
        raise ValueError(
            f"tp={tensor} pp={pipeline} cp={context} needs {needed} processes, or a multiple of it, but there is only "
            f"this one: start them by torchrun --nproc-per-node {needed} -m rooftop.train gpt ..."
        )
    return Layout.of_world(ranks, tp=tensor, pp=pipeline, cp=context, sequence_parallel=sequence_parallel)


def neighbours_of(sizes: tuple[int, int], layout: Layout) -> int:
    """Return the number of context parallel ranks that exchange heads: the first of the two sizes.

    Raises:
        InputError: the product of both sizes is not the number of context parallel ranks.
    """
    near, far = sizes
    if near * far != layout.cp:
        raise InputError(
            f"--hierarchical-context-parallel-sizes {near} {far}: expected two sizes whose product is "
            f"--context-parallel-size {layout.cp}"
        )
    return near


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
    recompute_granularity: str | None,
    tp_comm_overlap: bool,
    accumulate_whole_gradients: bool,
    pipeline_schedule: str | None,
    num_layers_per_virtual_pipeline_stage: int | None,
    cp_comm_type: str | None,
    near: int | None = None,
    eod_token: int | None,
    reset_position_ids: bool,
    eod_mask_loss: bool,
    enable_cuda_graph: bool | None,
) -> GptTraining:
    """Return the training that the options describe.

    Raises:
        ValueError: sizes do not fit together, the vocabulary is unknown, a size is given that --preset or --init-from
            sets, or two kinds of recomputation are given.
    """
    if recompute and recompute_granularity == "selective":
        raise InputError(
            "--recompute means --recompute-granularity full, but selective is given: leave out one of them"
        )
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
            raise InputError(f"--init-from {init_from} sets the sizes of the model: leave out {' and '.join(given)}")
        check_no_training(init_from)
        config = replace(read_gpt_config(init_from), dropout=dropout)
        if tokens.text and config.vocabulary != BYTES:
            raise InputError(
                f"{tokens.source} is text, so its tokens would be bytes, but {init_from} has a vocabulary of "
                f"{config.vocabulary} tokens: tokenize the text with its tokenizer into a .bin file"
            )
        length = seq_length or config.positions
    elif preset is not None:
        if hidden_size is not None or num_attention_heads is not None:
            raise InputError(f"--preset {preset} sets --hidden-size and --num-attention-heads: leave these out")
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
            raise InputError(f"the vocabulary size of {tokens.source} is unknown: expected --vocab-size")
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
    training = GptTraining(
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
        recompute=recompute_granularity or ("full" if recompute else False),
        halves=tp_comm_overlap,
        sum_once=accumulate_whole_gradients,
        pipeline_schedule=pipeline_schedule,
        layers_per_virtual_stage=num_layers_per_virtual_pipeline_stage,
        transport=cp_comm_type,
        near=near,
        document_end=eod_token,
        reset_positions=reset_position_ids,
        mask_ends=eod_mask_loss,
        cuda_graph=bool(enable_cuda_graph),
    )
    if enable_cuda_graph is None and training.is_limited_by_launches(layout, kind):
        return replace(training, cuda_graph=training.graph_bytes < GRAPH_SHARE * memory_bytes())
    return training


def memory_bytes() -> float:
    """The total memory of this process's GPU in bytes; infinite without a GPU, as in a dry run on another machine."""
    if not torch.cuda.is_available():
        return math.inf
    return float(torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory)


def event_files(folder: Path, after: int | None) -> AbstractContextManager[GptTensorBoard]:
    """Return a writer of TensorBoard event files, which is closed at the end of the `with` block. `after`: the step of
    the loaded checkpoint, or None."""
    return closing(GptTensorBoard(folder, after, partial(click.echo, err=True)))


def roof_here(trainer: GptTrainer) -> StepRoof | None:
    """Return the roof of a step on rank 0; None on other ranks, and if the device has no measured rate for the dtype.
    The other ranks wait while rank 0 measures its device, so that they do not disturb the measurement."""
    found = None
    if trainer.rank == 0:
        with progress_bar() as progress, others_wait("measuring this machine"):
            needed = step_cost(trainer).flops
            ceilings = measure_ceilings(
                trainer.device, progress=progress, precisions=needed, transfers=False, links=False
            )
        try:
            found = step_roof(trainer, ceilings)
        except ValueError as error:  # the ceilings have no rate for this dtype
            click.echo(f"no roof: {error}")
    if dist.is_initialized():
        dist.barrier()
    return found
