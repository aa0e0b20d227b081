"""Repeat the allocations and launches of a fused program for arguments with the shapes, strides and dtypes of an
earlier call.

On the host, planning a call takes longer than launching it. A plan depends only on shapes, strides and dtypes, so calls
with equal shapes, strides and dtypes share one plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.kernels.elementwise.launches import Step
from rooftop.kernels.elementwise.programs import Number, Plan, Program, empty, strides_of

MOST_KNOWN = 4096
Facts = tuple[Any, ...]


def facts_of(tensors: Sequence[Tensor], numbers: Sequence[Number], program: str) -> Facts | None:
    """The properties of a call on which plans and launches depend: program, default dtype, device, and the shapes,
    strides and dtypes of the arguments. None if the tensors are on several devices, or if a tensor has no strides.
    """
    facts: list[Any] = [program, torch.get_default_dtype()]
    device = tensors[0].device if tensors else None
    facts.append(device)
    for each in tensors:
        if each.device != device or each.layout != torch.strided:
            return None
        facts += (each.shape, each.stride(), each.dtype)
    facts += map(type, numbers)
    return tuple(facts)


class Known(NamedTuple):
    """The recorded allocations and launches of a call, to repeat for calls with the same properties (`facts_of`).

    Attributes:
        results: shape, strides (None: contiguous) and dtype of each result.
        steps: the launches, with tensors and then numbers as arguments.
    """

    results: tuple[tuple[torch.Size, tuple[int, ...] | None, torch.dtype], ...]
    steps: tuple[Step, ...]

    @staticmethod
    def of(
        program: Program, shapes: Sequence[torch.Size], plan: Plan, arguments: Sequence[Any], steps: Sequence[Step]
    ) -> Known:
        """Make the record of a program's first call, with which later calls repeat its allocations and launches
        (`steps`). The program must not sum any result.
        """
        order = [*program.places("t"), *program.places("n")]
        results = [
            (shape, strides_of(shape, arguments, used), dtype)
            for shape, used, dtype in zip(shapes, plan.used, plan.results, strict=True)
        ]
        moved = [step._replace(used=tuple(order.index(i) for i in step.used)) for step in steps]
        return Known(tuple(results), tuple(moved))

    def run(self, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> list[Tensor]:
        """Allocate and compute the results for arguments with the same properties as in the recorded call."""
        results = [empty(*each, tensors[0]) for each in self.results]
        arguments = (*tensors, *numbers)
        for step in self.steps:
            step.launch(arguments, results)
        return results
