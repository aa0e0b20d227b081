"""The training loop: steps, reports and checkpoints.

The host reads losses and norms from the device once every `interval` steps, after the first and the last step, and
before each validation and checkpoint. Between these reads, Python launches steps without waiting for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rooftop.debugging import memory_error_as
from rooftop.errors import DivergedError, ModelRunError
from rooftop.parallel import report
from rooftop.train.checkpoints.savers import Saver
from rooftop.train.gpt.speeds import StepRoof, peak_bytes
from rooftop.train.gpt.trainer import GptTrainer
from rooftop.train.gpt.validating import Validation
from rooftop.train.stopping import Stop

MEMORY_ADVICE = (
    "use a smaller --micro-batch-size or --seq-length, --recompute-granularity, or --use-torch-fsdp2 on several ranks"
)


@dataclass(frozen=True)
class StepReport:
    """The report of one step.

    Attributes:
        step: number of the step, from 1.
        loss: mean loss of the batch, before the step.
        grad_norm: norm of the gradient before clipping.
        learning_rate: learning rate of the step.
        tokens_per_s: tokens per second of all ranks, averaged over the steps of one list that `run_steps` yields.
        mfu, percent_of_roof: model flops utilization and percent of roof of this rank, averaged in the same way; None
            if the roof is unknown.
        peak_bytes: peak memory of this rank so far.
        valid_loss: mean loss on the validation data after this step; None without a validation after this step.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    mfu: float | None
    percent_of_roof: float | None
    peak_bytes: int
    valid_loss: float | None = None


def run_steps(
    trainer: GptTrainer,
    until: int,
    *,
    interval: int = 10,
    roof: StepRoof | None = None,
    validation: Validation | None = None,
    save: str | Path | None = None,
    save_interval: int | None = None,
    keep_last: int | None = None,
    async_save: bool = True,
    stop: Stop | None = None,
) -> Iterator[list[StepReport]]:
    """Train until `trainer.step` reaches `until`. All ranks must iterate together.

    Args:
        interval: maximum number of steps per list of reports. The host waits for the device once per list, to read the
            losses and norms of these steps. The first step is reported alone, because it takes longer than the others.
        roof: roof of a step of this rank; None: the reports have no `mfu` and no `percent_of_roof`.
        validation: the data and the interval of validations. The time of validations is not part of the steps' time. A
            training that was asked to stop runs no validation.
        save: folder of checkpoints; a checkpoint is saved after the last step. If the caller leaves the loop early, a
            checkpoint in progress is aborted.
        save_interval: steps between checkpoints. None: save only after the last step.
        keep_last: number of checkpoints to keep in the folder; None: all.
        async_save: write checkpoints in the background (`Saver`). After the last step, the loop waits until the last
            checkpoint is on the disk.
        stop: if any rank is asked to stop, all ranks save after the same step, one or two steps later, and end the
            training.
            Without `save`, `stop` has no effect.

    Yields: The reports of the steps since the previous reports.

    Raises:
        DivergedError: a loss or a norm is not finite; all ranks raise this.
        ModelRunError: memory ran out.
        OSError: a checkpoint cannot be written; all ranks raise this.
        ValueError: `interval` or `save_interval` is below 1, or `save_interval`, `keep_last` or async_save=False is
            passed without `save`.
    """
    for name, steps in (("interval", interval), ("save_interval", save_interval)):
        if steps is not None and steps < 1:
            raise ValueError(f"run_steps: {name} is {steps}: expected 1 or more steps")
    if save is None and (save_interval is not None or keep_last is not None or not async_save):
        raise ValueError(
            "run_steps: save_interval, keep_last and async_save=False need save, the folder of the checkpoints: give "
            "save, or leave these out"
        )
    if save is None:
        yield from _steps(trainer, until, interval, roof, validation, None, None, Stop())
        return
    saver = Saver(save, trainer, asynchronous=async_save, keep_last=keep_last)
    try:
        try:
            yield from _steps(trainer, until, interval, roof, validation, saver, save_interval, stop or Stop())
        # all ranks raise this error; finish the save in progress, because its state is older than the error and finite
        except ModelRunError:
            saver.wait()
            raise
        saver.wait()
    finally:
        saver.close()


def _steps(
    trainer: GptTrainer,
    until: int,
    interval: int,
    roof: StepRoof | None,
    validation: Validation | None,
    saver: Saver | None,
    save_interval: int | None,
    stop: Stop,
) -> Iterator[list[StepReport]]:
    first, waiting = trainer.step + 1, list[tuple[Tensor, Tensor]]()
    began = time.perf_counter()
    stopping = False
    while trainer.step < until and not stopping:
        report(f"step {trainer.step + 1}")
        with _memory_explained(trainer.step + 1):
            waiting.append(trainer.advance())
        step = trainer.step
        stopping = saver is not None and saver.after_step(stop.requested)
        due = stopping or step == until or (save_interval is not None and step % save_interval == 0)
        saving = saver is not None and due
        validating = validation is not None and validation.due(step, until) and not stopping
        if step in (first, until) or step % interval == 0 or saving or validating:
            numbers = torch.stack([torch.stack(pair) for pair in waiting]).tolist()  # waits for the device
            seconds = (time.perf_counter() - began) / len(waiting)
            reports = _told(trainer, numbers, seconds, roof)
            if validation is not None and validating:
                report(f"validating after step {step}")
                with _memory_explained(step):
                    loss = trainer.validation_loss(validation.batches, validation.sequences)
                reports[-1] = replace(reports[-1], valid_loss=loss)
            yield reports
            waiting.clear()
            if saver is not None and saving:
                saver.begin()
            elif saver is not None and step == first:  # the optimizer has a state only after the first step
                saver.prepare()
            began = time.perf_counter()


@contextmanager
def _memory_explained(step: int) -> Iterator[None]:
    """Turn an out-of-memory error of a step into one line."""
    with memory_error_as(lambda words: ModelRunError(f"out of memory in step {step} ({words}): {MEMORY_ADVICE}")):
        yield


def _told(trainer: GptTrainer, numbers: list[list[float]], seconds: float, roof: StepRoof | None) -> list[StepReport]:
    reports = []
    for step, (loss, norm) in enumerate(numbers, trainer.step - len(numbers) + 1):
        if not torch.tensor([loss, norm]).isfinite().all():
            raise DivergedError(
                f"the loss of step {step} is {loss} and its gradient's norm is {norm}: training cannot continue; a "
                "smaller learning rate may help"
            )
        reports.append(
            StepReport(
                step=step,
                loss=loss,
                grad_norm=norm,
                learning_rate=trainer.training.rate_at(step),
                tokens_per_s=trainer.training.tokens_per_step / seconds,
                mfu=roof.mfu(1e3 * seconds) if roof is not None else None,
                percent_of_roof=roof.percent(1e3 * seconds) if roof is not None else None,
                peak_bytes=peak_bytes(trainer.device),
            )
        )
    return reports
