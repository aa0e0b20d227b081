"""Expressions and conversions on a GPU: one kernel, through `rooftop.kernels`.

Every Mat is read once, wherever it lies, and the result written once; between are registers. The kernel is that of the
expression's form: other Mats of the same layout and other numbers need no other kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from rooftop.kernels.elementwise_stores import store_fused
from rooftop.mat.conversions import Scaling
from rooftop.mat.element_programs import ConversionProgram, ElementProgram, conversion_program, signed
from rooftop.mat.planning import Plan
from rooftop.mat.type_codes import CV_Bool


def run(plan: Plan, tensors: Sequence[Tensor], target: Tensor) -> None:
    """Writes the value into the target.

    Args:
        tensors: of the plan's leaves, (..., channels).
        target: of the plan's depth; overlaps no tensor, or has the very same elements.
    """
    _run(plan.elements_in_registers, tensors, target, plan.depth)


def run_conversion(source: Tensor, target: Tensor, depth: int, new_depth: int, scaling: Scaling | None) -> None:
    """Writes the elements of one depth as those of another."""
    _run(conversion_program(depth, new_depth, scaling, for_kernel=True), [source], target, new_depth)


def _run(program: ElementProgram | ConversionProgram, tensors: Sequence[Tensor], target: Tensor, depth: int) -> None:
    rows = [_row(numbers, program.rows_dtype, target.device) for numbers in program.rows]
    into = target if depth == CV_Bool else signed(target)
    given = [*(signed(each) for each in tensors), *rows]
    periods = {len(tensors) + n: target.shape[-1] for n in range(len(rows))}
    store_fused(program.text, given, program.numbers, into, periods)


@functools.lru_cache(maxsize=256)
def _row(numbers: tuple[int | float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number for each channel, on the device; copied there without waiting."""
    return torch.tensor(numbers, dtype=dtype, device="cpu").to(device, non_blocking=True)
