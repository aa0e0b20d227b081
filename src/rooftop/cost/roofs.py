"""The roof of a piece of work: the shortest time in which this machine could do it.

    roof = max(bytes / rate, flops / peak, kernel_floor)

`rate` is the fastest rate measured for a working set of this size (on a GPU: L2 or DRAM), `peak` the fastest matrix
rate measured for the precision, `kernel_floor` the duration of an empty kernel inside a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.cost.accounting import Cost
from rooftop.hardware.ceilings import Ceilings


@dataclass(frozen=True, slots=True)
class Roof:
    """The shortest possible time and what sets it.

    Attributes:
        ms: milliseconds.
        bound: "memory", "compute", "launch" (the kernel floor) or "none" (metadata only).
    """

    ms: float
    bound: str


def roof(cost: Cost, ceilings: Ceilings) -> Roof:
    """The roof of one kernel, or of work fused into one kernel.

    Precisions may run on different units side by side, so the slowest of them counts, not their sum.

    Raises:
        ValueError: flops in a precision that the ceilings do not have.
    """
    if cost.bytes == 0 and cost.total_flops == 0:
        return Roof(0.0, "none")
    memory_ms = 1e3 * cost.bytes / ceilings.rate(cost.working_set_bytes)
    compute_ms = max((1e3 * flops / ceilings.peak(precision) for precision, flops in cost.flops.items()), default=0.0)
    return max(
        Roof(memory_ms, "memory"),
        Roof(compute_ms, "compute"),
        Roof(ceilings.kernel_floor_ms, "launch"),
        key=lambda candidate: candidate.ms,
    )
