"""The learning rate of each step, as a fraction of the highest rate.

    set_rates(optimizer, rate_factor(recipe.schedule, step, steps))  # before step `step`, from 1 to `steps`

| schedule | after the warm-up |
|---|---|
| constant | 1 |
| cosine | half a cosine wave from 1 down to `least` (Loshchilov and Hutter 2017, "SGDR", arXiv:1608.03983) |
| wsd | 1, then linear from 1 to `least` in the last part (Hu et al. 2024, "MiniCPM", section 4, arXiv:2404.06395) |

The warm-up is linear; its last step has the factor 1 (Goyal et al. 2017, arXiv:1706.02677). As in
torch.optim.lr_scheduler, the decay would reach `least` one step after the last step. So no step has a rate of 0.
"""

from __future__ import annotations

import math

import torch

from rooftop.errors import InputError
from rooftop.train.recipes.recipe import Schedule


def rate_factor(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of a step, as a fraction of the highest rate.

    Args:
        schedule: the section `schedule` of the recipe; its fractions of the run are rounded to whole steps.
        step: a step from 1 to `steps`.
        steps: number of steps of the whole run.

    Raises:
        ValueError: the step is outside the run.
        InputError: warm-up and decay of "wsd" are longer than the run.
    """
    if not 1 <= step <= steps:
        raise ValueError(f"step {step} is not one of the steps 1 to {steps} of the run")
    check_parts(schedule)
    warmup = round(schedule.warmup * steps)
    if step <= warmup:
        return step / warmup
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        done = (step - 1 - warmup) / (steps - warmup)
        return schedule.least + (1 - schedule.least) * (1 + math.cos(math.pi * done)) / 2
    begin = max(warmup, steps - round(schedule.decay * steps))
    if step <= begin:
        return 1.0
    return 1 - (1 - schedule.least) * (step - 1 - begin) / (steps - begin)


def check_parts(schedule: Schedule) -> None:
    """Check that warm-up and decay of the schedule "wsd" fit into the run.

    Raises:
        InputError: the sum of both fractions is above 1.
    """
    if schedule.name == "wsd" and schedule.warmup + schedule.decay > 1:
        raise InputError(
            f"schedule.warmup ({schedule.warmup:g}) and schedule.decay ({schedule.decay:g}) are fractions of one "
            "run: make their sum at most 1"
        )


def set_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each group's learning rate to its highest rate times a factor.

    Rates that are tensors (for CUDA graphs) change in place.
    """
    for group in optimizer.param_groups:
        rate = group["initial_lr"] * factor
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
