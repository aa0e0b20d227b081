"""Advice about several ranks: exposed communication, and a rank for which the other ranks wait."""

from __future__ import annotations

from statistics import fmean

from rooftop.analysis.findings import LEAST_GAIN
from rooftop.analysis.ranks.merging import Ranks
from rooftop.analysis.report_contents import Advice


def rank_advice(ranks: Ranks) -> list[Advice]:
    """Advice for the step of all ranks, the largest gain first."""
    rows, late = ranks.rows, ranks.slowest
    advice = [
        Advice(
            "Overlap communication with computation",
            f"collectives take {fmean(row.communication_ms for row in rows):.2f} ms of a step of "
            f"{ranks.wall_ms:.2f} ms; for {ranks.transfer_ms:.2f} ms, not counting waits for other ranks, nothing else "
            "runs on any rank: reduce gradients in buckets while the backward pass runs, or less often over larger "
            "micro-batches",
            # the slowest rank can hide communication only behind its own work
            min(ranks.transfer_ms, max(0.0, late.own_ms)),
            "DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=25)",
        )
    ]
    if ranks.straggler is not None:
        second_ms = max(row.own_ms for row in rows if row is not late)
        advice.append(
            Advice(
                f"Make rank {late.rank} ({late.device}) as fast as the others",
                f"without communication this rank needs {late.own_ms:.2f} ms a step, the next slowest rank "
                f"{second_ms:.2f} ms; the other ranks wait for it, up to {ranks.waited_ms:.2f} ms a step",
                min(late.own_ms - second_ms, ranks.waited_ms),
            )
        )
    worth_it = [item for item in advice if item.gain_ms >= LEAST_GAIN * ranks.wall_ms]
    return sorted(worth_it, key=lambda item: -item.gain_ms)
