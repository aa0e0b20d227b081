"""Operators that ran on the CPU during a step on a GPU, such as data augmentation, or a model that was never moved.

The GPU's roof does not apply to operators on the CPU. The time of these operators is host time, so it is part of the
launch gap.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rooftop.analysis.formats import quantity_text
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.cost import FREE

# bytes plus flops per step; with less work on the CPU there is no note: a program that counts its steps does less
LEAST_WORK = 1_000_000
MOST_NAMES = 3


def host_work(operators: Sequence[MeasuredOperator]) -> tuple[list[MeasuredOperator], Counter[str]]:
    """Separate the work of the CPU from that of the GPU.

    Returns:
        All operators, with a cost of zero for operators that ran on the CPU; and the bytes plus flops of the operators
        that ran on the CPU, by name.
    """
    work = Counter[str]()
    for op in filter(_on_host, operators):
        if op.record.cost != FREE:
            cost = op.record.cost or FREE
            work[op.record.shown_name] += cost.bytes + cost.total_flops
    return [_without_cost(op) if _on_host(op) else op for op in operators], work


def said_of_host(work: Counter[str], gpu_works: bool) -> str:
    """A note on the CPU's work; "" if the CPU did no work, or less than `LEAST_WORK` while the GPU also worked."""
    names = [name for name, _ in work.most_common()]
    named = ", ".join(names[:MOST_NAMES]) + (", ..." if len(names) > MOST_NAMES else "")
    if names and not gpu_works:
        return (
            f"Nothing ran on the GPU: the operators ({named}) ran on the CPU. Move the model and its inputs to "
            'the GPU (.to("cuda")), or analyze the CPU (--device cpu).'
        )
    if work.total() < LEAST_WORK:
        return ""
    return (
        f"Some operators ran on the CPU: {named}, {quantity_text(work.total())}bytes and flops a step. They have no "
        "roof here. The GPU may wait while the host works on them; this wait is part of the launch gap."
    )


def _on_host(op: MeasuredOperator) -> bool:
    """Whether an operator ran on the CPU. A copy to the GPU also reads a CPU tensor, but the profiler shows the copy as
    a kernel."""
    return op.record.device == "cpu" and not op.kernels


def _without_cost(op: MeasuredOperator) -> MeasuredOperator:
    return replace(op, record=replace(op.record, cost=FREE, uncovered=""))
