"""Operators above their roof: measured again alone, and where that confirms it, the ceilings are raised.

A ceiling is an upper bound. An operator above its roof shows that a ceiling was measured too low, or that its cost or
its time is wrong. So it is run again alone, on tensors of its shapes that were just written, as in a program. Faster
than the roof again, it raises the figure that set the roof, for this report and for all later ones. If not, the row
keeps its flag.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from rooftop.analysis.advice.alternatives import tensor_like
from rooftop.analysis.floors import comparable
from rooftop.analysis.formats import shapes_text
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.cost import CallSpec, Cost, TensorSpec, raise_ceilings, roof
from rooftop.errors import MeasurementError
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.figures import in_words
from rooftop.hardware.kernel_times import Variant, kernel_times
from rooftop.hardware.measuring import keep

ABOVE = 1.005  # times its roof: below that the clock's resolution decides
MOST_REPEATED = 24  # operators of one report that are measured again
REPEATS = 8
MOST_BYTES = 0.25  # of the free memory


def raised_and_kept(
    ceilings: Ceilings, operators: Sequence[MeasuredOperator], device: torch.device
) -> tuple[Ceilings, list[str]]:
    """The ceilings of this machine, raised by what `operators` show and kept so; and what a reader should know of it."""
    known = [op for op in operators if comparable(op.record, ceilings).cost is not None]
    higher, count = raised(ceilings, known, device)
    if not count:
        return ceilings, []
    changed = ", ".join(dict.fromkeys(in_words(each.figure) for each in higher.raises[len(ceilings.raises) :]))
    note = (
        f"{count} operators were faster than the ceilings allowed, also when each was measured again alone. They raised "
        f"the ceilings, for later reports too: {changed}."
    )
    return keep(higher, device), [note]


def raised(ceilings: Ceilings, operators: Sequence[MeasuredOperator], device: torch.device) -> tuple[Ceilings, int]:
    """The ceilings after operators above their roof were measured again; and how many of these raised a figure.

    Args:
        operators: of a step, with costs in precisions that the ceilings know. device: where they ran.
    """
    above: dict[CallSpec, list[MeasuredOperator]] = defaultdict(list)
    for op in operators:
        if _is_above(op, ceilings) and op.record.spec is not None and _repeatable(op.record.spec):
            above[op.record.spec].append(op)
    count = 0
    for spec, ops in sorted(above.items(), key=lambda item: -_excess(item[1], ceilings))[:MOST_REPEATED]:
        cost, ms = ops[0].record.cost, median(op.measured_ms for op in ops)
        assert cost is not None
        if roof(cost, ceilings).ms < ABOVE * ms:  # another one has raised it already
            continue
        alone_ms = _alone_ms(spec, device)
        if alone_ms is None or roof(cost, ceilings).ms < alone_ms:
            continue
        try:
            ceilings = raise_ceilings(ceilings, cost, min(ms, alone_ms), _in_words(ops[0]))
        except ValueError:  # so far above its roof that the cost must be wrong: the row is flagged
            continue
        count += 1
    return ceilings, count


def _is_above(op: MeasuredOperator, ceilings: Ceilings) -> bool:
    cost: Cost | None = op.record.cost
    return cost is not None and op.measured_ms > 0 and roof(cost, ceilings).ms > ABOVE * op.measured_ms


def _excess(ops: Sequence[MeasuredOperator], ceilings: Ceilings) -> float:
    cost = ops[0].record.cost
    return roof(cost, ceilings).ms / ops[0].measured_ms if cost is not None else 0.0


def _repeatable(spec: CallSpec) -> bool:
    """Whether random numbers do for its tensors: what integers point at decides how long a lookup takes."""
    tensors = [item for item in _leaves(spec) if isinstance(item, TensorSpec)]
    return bool(tensors) and all(t.dtype.is_floating_point and t.shape for t in tensors)


def _leaves(spec: CallSpec) -> list[object]:
    leaves, waiting = [], [*spec.args, *(value for _, value in spec.kwargs)]
    while waiting:
        item = waiting.pop()
        if isinstance(item, tuple):
            waiting.extend(item)
        else:
            leaves.append(item)
    return leaves


def _alone_ms(spec: CallSpec, device: torch.device) -> float | None:
    """The least time in ms of a call, alone; None where PyTorch refuses it, or there is no room for it."""
    tensors: list[Tensor] = []

    def make(item: TensorSpec) -> Tensor:
        tensors.append(tensor_like(item, device=str(device)))
        return tensors[-1]

    try:
        if device.type == "cuda" and _bytes(spec) > MOST_BYTES * torch.cuda.mem_get_info(device)[0]:
            return None
        with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
            args, kwargs = tree_map_only(TensorSpec, make, (spec.args, dict(spec.kwargs)))
            call = lambda: spec.func(*args, **kwargs)  # noqa: E731
            return _least_on_gpu(call, tensors, device) if device.type == "cuda" else _least_on_cpu(call)
    except torch.AcceleratorError:
        raise
    except (RuntimeError, TypeError, MeasurementError):  # refused: shapes alone do not make a valid call of it
        return None


def _least_on_gpu(call: Callable[[], object], tensors: Sequence[Tensor], device: torch.device) -> float:
    """By the profiler; on tensors as they lie, and just written."""

    def written() -> None:
        for tensor in tensors:
            tensor.mul_(1.0)

    call()
    times = kernel_times(
        [Variant(call, repeats=REPEATS), Variant(call, prepare=written, repeats=REPEATS)], torch.device(device)
    )
    return min(sum(kernels) for variant in times for kernels in variant)


def _least_on_cpu(call: Callable[[], object]) -> float:
    times = []
    for _ in range(2 * REPEATS):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1e6)
    return min(times)


def _bytes(spec: CallSpec) -> int:
    tensors = [item for item in _leaves(spec) if isinstance(item, TensorSpec)]
    return sum(torch.Size(t.shape).numel() * t.dtype.itemsize for t in tensors)


def _in_words(op: MeasuredOperator) -> str:
    """ "aten::mm 8192x4096, 4096x1024 bfloat16" """
    return f"{op.record.name} {shapes_text(op.record.shapes)} {op.record.dtype}"
