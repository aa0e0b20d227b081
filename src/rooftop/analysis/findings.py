"""What the rules of advice look at: one step, measured, beside its roofs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooftop.analysis.instruments import MeasuredOperator, Plain
from rooftop.analysis.report import Gaps, OperatorRow, Summary
from rooftop.hardware.ceilings import Ceilings


@dataclass(frozen=True)
class Findings:
    """One step as the rules see it.

    Attributes:
        operators: in order of execution. rows: the same, grouped.
        summary, gaps: the step as a whole. ceilings: what it is compared with.
        plain: the run under the profiler alone, None where nothing was run.
    """

    operators: Sequence[MeasuredOperator]
    rows: Sequence[OperatorRow]
    summary: Summary
    gaps: Gaps
    ceilings: Ceilings
    plain: Plain | None = None

    @property
    def training(self) -> bool:
        return any(row.phase == "backward" for row in self.rows)


LEAST_GAIN = 0.01
"""Advice that would gain less than this fraction of the wall time is left out."""
