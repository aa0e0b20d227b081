"""What `rooftop train` prints about a GPT's training: the plan, the heading, each step, and advice."""

from __future__ import annotations

from pathlib import Path
from typing import TextIO

import click

from rooftop.analysis.formats import percent_text
from rooftop.models.gpt.stages import layers_of_stages
from rooftop.parallel import Layout, Packing, Schedule, World, simulate
from rooftop.train import GptTrainer, GptTraining, Mixture, StepReport, Validation
from rooftop.train.gpt.metrics import add_lines
from rooftop.train.replays import WARM_UP
from rooftop.words import counted

LAUNCHED_PERCENT = 15
"""A step that reaches at most this percentage of roof is probably limited by launches from Python. Llamas with 135 M to
7 B parameters reached 4% of roof if launches limited the step, otherwise 34% to 73%.
"""


def planned(training: GptTraining, layout: Layout) -> str:
    """Describe in lines of text a training in this layout: the number of parameters and ranks, the pipeline schedule,
    and, under context parallelism, a picture of the token positions on each rank.
    """
    lines = [f"{training.config.parameters:,} parameters on {counted(layout.world_size, 'rank')}: {layout}"]
    schedule = training.schedule_of(layout)
    if schedule is not None:
        lines += [told_schedule(training, schedule), schedule.drawn()]
    if layout.cp > 1:
        whose = "for a sequence of one document" if training.document_end is not None else "of each sequence"
        lines += [f"context parallel by {training.transport_in(layout)}; tokens of each rank, {whose}:"]
        lines += [Packing.of(training.length, layout.cp).drawn()]
    return "\n".join(lines)


def told_schedule(training: GptTraining, schedule: Schedule) -> str:
    """Describe a schedule in one line: stages, micro-batches, bubble."""
    layers = layers_of_stages(training.config, schedule.placement, training.length)
    many = "micro-batch" if schedule.micro_batches == 1 else "micro-batches"
    return (
        f"pipeline {schedule.name}: stages of {', '.join(str(len(each)) for each in layers)} layers, "
        f"{schedule.micro_batches:,} {many}; ranks wait for {percent_text(100 * simulate(schedule).bubble)} "
        "of a step if all stages take the same time"
    )


def heading(trainer: GptTrainer, world: World, found: Path | None, validation: Validation | None) -> str:
    """Describe the model, the ranks and the data."""
    training, dtype = trainer.training, str(trainer.training.dtype).removeprefix("torch.")
    tokens = trainer.batches.tokens
    data = tokens.source if tokens.text else f"{tokens.source} ({tokens.kind})"
    lines = [
        f"{training.config.parameters:,} parameters, {dtype} on {world.size} x {world.device.type}: {trainer.layout}",
        f"{trainer.batches.sequences:,} sequences of {training.length:,} tokens in {data}, "
        f"{training.global_batch:,} a step",
    ]
    if training.cuda_graph:
        lines.append(f"a CUDA graph replays forward and backward from step {WARM_UP + 1} on")
    if trainer.schedule is not None:
        lines.append(told_schedule(training, trainer.schedule))
    if isinstance(tokens, Mixture):
        lines += [
            f"  {percent_text(100 * float(share))} from {row.source}, {count:,} sequences"
            for row, (count, share) in zip(tokens.rows, trainer.batches.parts, strict=True)
        ]
    if validation is not None:
        lines.append(
            f"validation on {validation.sequences:,} of {validation.batches.sequences:,} sequences in "
            f"{validation.batches.tokens.source}, every {counted(validation.interval, 'step')}"
        )
    if found is not None:
        lines.append(f"continuing after step {trainer.step:,} of {found}")
    return "\n".join(lines)


def tell(reports: list[StepReport], steps: int, file: TextIO | None) -> None:
    """Print one line for the last of the reports, and write one line of JSON to `file` for each report."""
    last = reports[-1]
    words = [
        f"step {last.step:>{len(str(steps))}}/{steps}",
        f"loss {last.loss:.6f}",
        *([] if last.valid_loss is None else [f"valid loss {last.valid_loss:.6f}"]),
        f"grad norm {last.grad_norm:.4f}",
        f"lr {last.learning_rate:.2e}",
        f"{last.tokens_per_s:,.0f} tokens/s",
    ]
    if last.mfu is not None and last.percent_of_roof is not None:
        words += [f"MFU {percent_text(100 * last.mfu)}", f"{percent_text(last.percent_of_roof)} of roof"]
    click.echo("  ".join([*words, f"{last.peak_bytes / 2**30:.2f} GiB"]))
    if last.loss == last.grad_norm == 0:
        click.echo(f"note: step {last.step} has no targets: all its tokens are --eod-token", err=True)
    if last.percent_of_roof is not None and last.percent_of_roof > 100:
        click.echo(
            "the step is faster than the roof, so the ceilings are wrong: measure again with rooftop ceilings --refresh"
        )
    if file is not None:
        add_lines(file, reports)


def advice(report: StepReport, trainer: GptTrainer) -> str | None:
    """Return advice on faster steps; None if there is no advice, or only the first step is done."""
    training = trainer.training
    without_graph = training.cuda_graph or trainer.fully_shard or trainer.layout.cp > 1
    may_replay = trainer.device.type == "cuda" and not without_graph and training.document_end is None
    if (
        report.step == 1
        or report.percent_of_roof is None
        or report.percent_of_roof > LAUNCHED_PERCENT
        or not may_replay
    ):
        return None
    return (
        f"{percent_text(report.percent_of_roof)} of roof: for such small layers Python may be slower than the GPU; "
        "try --enable-cuda-graph"
    )
