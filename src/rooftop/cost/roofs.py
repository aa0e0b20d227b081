"""The roof of a piece of work: the shortest time in which this machine could do the work.

    roof = max(bytes / rate, flops / peak, kernel_floor)

`rate` is an upper bound of the bandwidth for a working set of this size (see `Ceilings.rate`). Some bandwidth
probes begin right after a kernel wrote the input, so the rate for small tensors is that of the cache that holds them.
Memory that one kernel both reads and writes (in place) has a separate rate. `peak` is the fastest matrix rate measured
for the precision, `kernel_floor` the duration of the shortest kernel. An operator that is faster than its roof raises
the ceilings that the operator exceeded, or lowers the kernel floor.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.cost.accounting import Cost
from rooftop.hardware.ceilings import Ceilings


@dataclass(frozen=True, slots=True)
class Roof:
    """The shortest possible time, and which limit sets it.

    Attributes:
        ms: milliseconds.
        bound: "memory", "compute", "launch" (the kernel floor) or "none" (metadata only).
    """

    ms: float
    bound: str


def roof(cost: Cost, ceilings: Ceilings) -> Roof:
    """The roof of one kernel, or of work fused into one kernel.

    Precisions may run on different units in parallel, so only the slowest precision counts, not the sum.

    Raises:
        ValueError: the cost has flops in a precision that the ceilings lack.
    """
    if cost.bytes == 0 and cost.total_flops == 0:
        return Roof(0.0, "none")
    compute_ms = max((1e3 * flops / ceilings.peak(precision) for precision, flops in cost.flops.items()), default=0.0)
    return max(
        Roof(_memory_ms(cost, ceilings), "memory"),
        Roof(compute_ms, "compute"),
        Roof(ceilings.kernel_floor_ms, "launch"),
        key=lambda candidate: candidate.ms,
    )


def _memory_ms(cost: Cost, ceilings: Ceilings) -> float:
    shared = 2 * cost.shared_bytes  # read and written
    in_place_s = shared / ceilings.rate(cost.working_set_bytes, in_place=True)
    return 1e3 * ((cost.bytes - shared) / ceilings.rate(cost.working_set_bytes) + in_place_s)


MOST_RAISE = 1.5
"""An operator that is faster than its roof by more than this factor has a wrong cost or a wrong time, because no
ceiling is that far off."""


def raise_ceilings(ceilings: Ceilings, cost: Cost, ms: float, by: str) -> Ceilings:
    """Raise ceilings so that work that took `ms` is not faster than its roof.

    Each ceiling that alone would give a roof longer than `ms` is raised to the rate that the work reached. A kernel
    floor longer than `ms` is lowered to `ms`. The other ceilings stay unchanged.

    Args:
        cost: cost of one operator.
        ms: the operator's time: the best of several runs of the operator alone.
        by: text that names the operator in the history ("aten::mm (8192, 4096) x (4096, 1024) bf16").

    Raises:
        ValueError: the roof is more than `MOST_RAISE` times as long as `ms`.
    """
    before = roof(cost, ceilings)
    if before.ms > MOST_RAISE * ms:
        raise ValueError(
            f"{by} took {ms:.4g} ms, but its roof is {before.ms:.4g} ms ({before.bound}). It is more than {MOST_RAISE} "
            "times faster than its roof, so its cost formula or the measurement must be wrong, not the ceilings"
        )
    for precision, flops in cost.flops.items():
        if 1e3 * flops / ceilings.peak(precision) > ms:
            ceilings = ceilings.raised(precision, 1e3 * flops / ms, by)
    factor = _memory_ms(cost, ceilings) / ms
    if factor > 1:
        size, shared = cost.working_set_bytes, 2 * cost.shared_bytes
        rate, rate_in_place = ceilings.rate(size), ceilings.rate(size, in_place=True)
        if cost.bytes > shared:
            ceilings = ceilings.raised_memory(size, factor * rate, by)
        if shared:
            ceilings = ceilings.raised_memory(size, factor * rate_in_place, by, in_place=True)
    if before.ms and ceilings.kernel_floor_ms > ms:
        ceilings = ceilings.lowered_floor(ms, by)
    return ceilings
