"""The loop: steps, what there is to say of them, and what is saved on the way.

Loss and norm are read once in `interval` steps, all together: a GPU need not wait for Python in between.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from rooftop.errors import ModelRunError
from rooftop.parallel import report
from rooftop.train.gpt_trainer import GptTrainer
from rooftop.train.savers import Saver
from rooftop.train.speeds import StepRoof, peak_bytes
from rooftop.train.stopping import Stop


@dataclass(frozen=True)
class StepReport:
    """What was seen of one step.

    Attributes:
        step: from 1.
        loss: of its batch, before it.
        grad_norm: before it was clipped.
        learning_rate: of it.
        tokens_per_s: of all ranks, on average over the steps that were read together.
        mfu, percent_of_roof: of this rank; None where the roof is not known.
        peak_bytes: the most memory of this rank so far.
    """

    step: int
    loss: float
    grad_norm: float
    learning_rate: float
    tokens_per_s: float
    mfu: float | None
    percent_of_roof: float | None
    peak_bytes: int


def run_steps(
    trainer: GptTrainer,
    until: int,
    *,
    interval: int = 10,
    roof: StepRoof | None = None,
    save: str | Path | None = None,
    save_interval: int | None = None,
    keep_last: int | None = None,
    async_save: bool = True,
    stop: Stop | None = None,
) -> Iterator[list[StepReport]]:
    """Train until so many steps have been made since the beginning. All ranks must iterate, together.

    Args:
        interval: steps that are read and told together. The first is told by itself: it takes longer.
        roof: of a step.
        save: the folder for checkpoints; one is made after the last step. Who leaves the loop before its end gives up
            one that is being written.
        save_interval: and after each so many.
        keep_last: how many of these are left in the folder; None: all.
        async_save: write beside the steps that follow (`Saver`); the last one is waited for.
        stop: when a rank is asked to, all save after the same step, one or two later, and stop. Only with `save`.

    Yields:
        Reports of the steps since the last ones.

    Raises:
        ModelRunError: a loss or a norm is not finite: the same at all ranks.
        OSError: a checkpoint cannot be written: the same at all ranks.
        ValueError: how checkpoints are saved, and not where.
    """
    if save is None and (save_interval is not None or keep_last is not None or not async_save):
        raise ValueError(
            "run_steps: save_interval, keep_last and async_save=False say how checkpoints are saved: give save, the "
            "folder for them, or leave these out"
        )
    if save is None:
        yield from _steps(trainer, until, interval, roof, None, None, Stop())
        return
    saver = Saver(save, trainer, asynchronous=async_save, keep_last=keep_last)
    try:
        try:
            yield from _steps(trainer, until, interval, roof, saver, save_interval, stop or Stop())
        except ModelRunError:  # of all ranks; what is being saved was finite
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
    saver: Saver | None,
    save_interval: int | None,
    stop: Stop,
) -> Iterator[list[StepReport]]:
    first, waiting = trainer.step + 1, list[tuple[Tensor, Tensor]]()
    began = time.perf_counter()
    stopping = False
    while trainer.step < until and not stopping:
        report(f"step {trainer.step + 1}")
        waiting.append(trainer.advance())
        step = trainer.step
        stopping = saver is not None and saver.after_step(stop.requested)
        due = stopping or step == until or (save_interval is not None and step % save_interval == 0)
        saving = saver is not None and due
        if step in (first, until) or step % interval == 0 or saving:
            numbers = torch.stack([torch.stack(pair) for pair in waiting]).tolist()  # waits for the device
            seconds = (time.perf_counter() - began) / len(waiting)
            yield _told(trainer, numbers, seconds, roof)
            waiting.clear()
            if saver is not None and saving:
                saver.begin()
            elif saver is not None and step == first:  # before it there is no state of the optimizer
                saver.prepare()
            began = time.perf_counter()


def _told(trainer: GptTrainer, numbers: list[list[float]], seconds: float, roof: StepRoof | None) -> list[StepReport]:
    reports = []
    for step, (loss, norm) in enumerate(numbers, trainer.step - len(numbers) + 1):
        if not torch.tensor([loss, norm]).isfinite().all():
            raise ModelRunError(
                f"the loss of step {step} is {loss}, its gradient's norm {norm}: training cannot go on; a smaller "
                "learning rate may help"
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
