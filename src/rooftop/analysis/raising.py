"""Measure operators above their roof (faster than the ceilings allow) again, each alone. Raise the ceilings if the
second measurement confirms the first.

A ceiling is an upper bound. An operator above its roof shows that a ceiling was measured too low, or that its cost or
its time is wrong. So Rooftop runs the operator again alone, on tensors of its shapes. These are written just before, as
an operator's inputs are in a program.
If the operator is again faster than its roof, the ceiling that set the roof is raised, for this report and all later
reports. If the second measurement does not confirm the first, the operator's row keeps its flag.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

import torch

from rooftop.analysis.floors import comparable
from rooftop.analysis.formats import shapes_text
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.repeating import AS_IT_WAS, on_numbers, times_again
from rooftop.cost import CallSpec, Cost, raise_ceilings, roof
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.figures import in_words
from rooftop.hardware.measuring import keep

ABOVE = 1.005  # smallest ratio of roof to time that counts as above the roof; less is within the clock's resolution
MOST_REPEATED = 24  # largest number of operators of one report that are measured again
REPEATS = 8


def raised_and_kept(
    ceilings: Ceilings, operators: Sequence[MeasuredOperator], device: torch.device
) -> tuple[Ceilings, list[str]]:
    """Raise this machine's ceilings to the rates of operators that are also above their roof in a second measurement.
    Store the raised ceilings, and return them with a note for the report."""
    known = [op for op in operators if comparable(op.record, ceilings).cost is not None]
    higher, count = raised(ceilings, known, device)
    if not count:
        return ceilings, []
    changed = ", ".join(dict.fromkeys(in_words(each.figure) for each in higher.raises[len(ceilings.raises) :]))
    who = "One operator was" if count == 1 else f"{count} operators were"
    note = (
        f"{who} faster than the ceilings allowed, even when measured again alone. So these ceilings were raised, "
        f"also for later reports: {changed}."
    )
    return keep(higher, device), [note]


def raised(ceilings: Ceilings, operators: Sequence[MeasuredOperator], device: torch.device) -> tuple[Ceilings, int]:
    """Measure operators above their roof again. Return the raised ceilings, and how many operators raised one.

    Args:
        operators: operators of a step, with costs in precisions that the ceilings include.
        device: the device on which the operators ran.
    """
    above: dict[CallSpec, list[MeasuredOperator]] = defaultdict(list)
    for op in operators:
        if _excess(op, ceilings) > ABOVE and op.record.spec is not None and on_numbers(op.record.spec):
            above[op.record.spec].append(op)
    worst = sorted(above, key=lambda spec: -_excess(above[spec][0], ceilings))[:MOST_REPEATED]
    count = 0
    for spec, alone in zip(worst, times_again([(s, AS_IT_WAS) for s in worst], device, REPEATS), strict=True):
        cost, ms = above[spec][0].record.cost, median(op.measured_ms for op in above[spec])
        assert cost is not None
        roof_ms = roof(cost, ceilings).ms
        # not confirmed, or another operator has already raised the ceiling
        if alone is None or roof_ms < alone.best_ms or roof_ms < ABOVE * ms:
            continue
        try:
            ceilings = raise_ceilings(ceilings, cost, min(ms, alone.best_ms), _in_words(above[spec][0]))
        except ValueError:  # the operator is so far above its roof that its cost must be wrong: the row is flagged
            continue
        count += 1
    return ceilings, count


def _excess(op: MeasuredOperator, ceilings: Ceilings) -> float:
    """The roof divided by the measured time; 0 if either is 0."""
    cost: Cost | None = op.record.cost
    return roof(cost, ceilings).ms / op.measured_ms if cost is not None and op.measured_ms > 0 else 0.0


def _in_words(op: MeasuredOperator) -> str:
    """ "aten::mm 8192x4096, 4096x1024 bfloat16" """
    return f"{op.record.shown_name} {shapes_text(op.record.shapes)} {op.record.dtype}"
