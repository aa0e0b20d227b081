"""Make a finished report from the measurements: rows, tree, gaps, coverage and advice."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import rooftop
from rooftop.analysis.advice import advise
from rooftop.analysis.findings import Findings
from rooftop.analysis.floors import comparable, module_tree, operator_rows
from rooftop.analysis.formats import time_text
from rooftop.analysis.profiling import UNEXPLAINED, Profile
from rooftop.analysis.program import describe_tensor
from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import Gaps, ModuleNode, OperatorRow, Summary
from rooftop.hardware import devices
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.page_faults import KEEP_MEMORY
from rooftop.words import counted, utc_now

MEMORY_POINTS = 2000
"""Largest number of points of the memory curve in a report."""
NOISY = 0.05
"""A note is added if the interval of the wall time, divided by the wall time, is wider than this."""
HOST_THREADS = 2
"""CPU threads that a step on a GPU needs: one for the program and one for its backward pass."""


def report_of(
    profile: Profile,
    ceilings: Ceilings,
    *,
    target: str,
    mode: str,
    inputs: Sequence[Tensor] = (),
    samples: int | None = None,
    batched: bool = True,
    root_type: str = "step",
    notes: Sequence[str] = (),
) -> Report:
    """The report of a profile.

    Args:
        profile: the measurements.
        ceilings: ceilings to compare with.
        target, mode, inputs: descriptions for the report.
        samples: number of samples of a step, if known.
        batched: whether more samples need no additional launches (see `Findings`).
        root_type: the class of the outermost module.
        notes: notes for the report, in addition to the profile's notes.
    """
    operators = [replace(op, record=comparable(op.record, ceilings)) for op in profile.operators]
    rows = operator_rows(operators, ceilings)
    modules = module_tree(operators, profile.tracker, ceilings, root_type)
    summary, gaps, balance_notes = _balance(profile, modules, ceilings, samples)
    findings = Findings(
        operators=operators,
        rows=rows,
        summary=summary,
        gaps=gaps,
        ceilings=ceilings,
        plain=profile.plain,
        host_ms=profile.host_ms,
        best_ms=profile.wall.low_ms,
        optimizers=profile.tracker.optimizers,
        refuses_capture=profile.tracker.optimizer_traffic().refuses_capture,
        traced_more_ms=profile.traced_more_ms,
        batched=batched,
        host_work=profile.host_work,
        faults=profile.faults,
        device=profile.device,
    )
    return Report(
        target=target,
        mode=mode,
        inputs=tuple(describe_tensor(t).replace(":", " ") for t in inputs),
        created=utc_now(),
        device=_device(profile.device),
        versions=_versions(ceilings),
        ceilings=ceilings.to_dict(),
        summary=summary,
        gaps=gaps,
        coverage=_coverage(rows, profile),
        ops=tuple(rows),
        modules=modules,
        advice=tuple(advise(findings)),
        memory=tuple(_thinned(profile.plain.memory, MEMORY_POINTS)),
        peak_bytes=max((size for _, size in profile.plain.memory), default=0),
        compilation=profile.compilation,
        notes=(
            *_noise(profile, ceilings),
            *profile.notes,
            *balance_notes,
            *_nothing_seen(profile),
            *notes,
            *_two_states(profile),
            *_disturbances(ceilings, profile),
        ),
    )


def _balance(
    profile: Profile, modules: ModuleNode, ceilings: Ceilings, samples: int | None
) -> tuple[Summary, Gaps, list[str]]:
    """Split the wall time: wall = fused roof + fusion headroom + kernel gap + launch gap."""
    notes = []
    wall_ms, busy_ms = profile.wall.ms, profile.busy_ms
    on_gpu = profile.device.type == "cuda"
    if busy_ms > (1 + (UNEXPLAINED if on_gpu else NOISY)) * wall_ms:
        what = "kernels of a step under the profiler" if on_gpu else "operators of a labelled step"
        notes.append(
            f"Unexplained: the {what} took {time_text(busy_ms)}, more than the {time_text(wall_ms)} of a plain step "
            "(other work on the machine, or operators that take microseconds). The launch gap is shown as 0, and "
            "gains are scaled to the plain step."
        )
    busy_ms = min(busy_ms, wall_ms)
    summary = Summary(
        wall_ms=wall_ms,
        wall_spread=profile.wall.spread,
        busy_ms=busy_ms,
        op_roof_ms=modules.op_roof_ms,
        fused_roof_ms=modules.fused_roof_ms,
        flops=modules.flops,
        bytes=modules.bytes,
        parameters=modules.parameters,
        kernels=profile.kernel_launches,
        samples=samples,
        repeats=profile.runs,
        wall_low_ms=profile.wall.low_ms,
        wall_high_ms=profile.wall.high_ms,
        latency_ms=profile.latency.ms if profile.latency is not None else None,
        latency_low_ms=profile.latency.low_ms if profile.latency is not None else None,
        latency_high_ms=profile.latency.high_ms if profile.latency is not None else None,
        disturbed=bool(_noise(profile, ceilings)),
    )
    gaps = Gaps(
        kernel_gap_ms=busy_ms - modules.op_roof_ms,
        fusion_headroom_ms=modules.op_roof_ms - modules.fused_roof_ms,
        launch_gap_ms=wall_ms - busy_ms,
    )
    return summary, gaps, notes


def _nothing_seen(profile: Profile) -> list[str]:
    """A note if the step ran no operator of PyTorch, so that its whole time counts as launch gap."""
    if profile.operators or profile.kernel_launches:
        return []
    return [
        "No operator of PyTorch ran in the thread that called the target, so there is no roof, and all of the time "
        "counts as launch gap. Work in NumPy, in other threads or in other processes is not watched."
    ]


def _crowded(profile: Profile) -> bool:
    """Whether other programs used cores that the step needed."""
    return profile.load.disturbs(torch.get_num_threads() if profile.device.type == "cpu" else HOST_THREADS)


def _slowed(profile: Profile, ceilings: Ceilings) -> tuple[str, float] | None:
    """(name, share) of one rate of the CPU's pulse ("product" or "read"): the rate that is furthest below its best
    earlier value on this CPU, and this rate divided by that value (see `Pulse.share_of`).

    None if no rate is more than `NOISY` below its best, or if the rates cannot be compared.
    """
    if profile.pulse is None or torch.get_num_threads() != ceilings.threads:
        return None
    found = profile.pulse.share_of(ceilings.pulse)
    return found if found is not None and found[1] < 1 - NOISY else None


def _drifted(profile: Profile) -> list[str]:
    """Sentences about how much the CPU's speed varied during the measurement. If the speed varies within seconds,
    another run of the program would measure another time.
    """
    if profile.pulse is None:
        return []
    seen, varied = list[str](), profile.pulse.varied
    if varied is not None and varied[1] > NOISY:
        what = {"product": "a fixed matrix product", "read": "reading memory"}[varied[0]]
        seen.append(f"the rate of {what} differed by {100 * varied[1]:.0f}% from moment to moment")
    if profile.wall.drift_ms > NOISY * profile.wall.ms:
        seen.append(f"the median of a step differed by {time_text(profile.wall.drift_ms)} from moment to moment")
    return seen


def _noise(profile: Profile, ceilings: Ceilings) -> list[str]:
    """A note on the uncertainty of the report, if the machine was disturbed or repeated timings of a step disagreed."""
    wall, slowed, drifted = profile.wall, _slowed(profile, ceilings), _drifted(profile)
    faults_ms = profile.faults.step_ms(torch.get_num_threads())
    if not (_crowded(profile) or slowed or drifted or faults_ms > NOISY * wall.ms) and wall.spread <= NOISY:
        return []
    seen, unsure_ms = list[str](), max(wall.high_ms - wall.low_ms, wall.drift_ms, NOISY * wall.ms, faults_ms)
    if _crowded(profile):
        seen.append(f"other processes used {profile.load.cores:.1f} of {os.cpu_count()} cores")
    if slowed is not None:
        what = {"product": "a fixed matrix product ran", "read": "memory was read"}[slowed[0]]
        seen.append(f"{what} at {100 * slowed[1]:.0f}% of the rate that this CPU has reached")
        unsure_ms = max(unsure_ms, (1 - slowed[1]) * wall.ms)
    seen += drifted
    if faults_ms > NOISY * wall.ms:
        seen.append(
            f"a step took {_pages(profile.faults.count)} of memory from the system in about "
            f"{time_text(faults_ms)}; the number differs from process to process"
        )
    fastest, half = time_text(wall.low_ms), time_text(wall.high_ms)
    if wall.mean:
        seen.append(f"most of {wall.steps} steps took {fastest} to {half}, {time_text(wall.ms)} on average")
    else:
        moments = f"{wall.blocks} moments" if wall.blocks > 1 else "one moment"
        timed = f"{wall.steps} steps were timed at {moments}"
        seen.append(f"{timed}: half of them took more than {half}, the fastest {fastest}")
    return [
        f"Disturbed: {'; '.join(seen)}. Ignore differences and gains below {time_text(unsure_ms)}; on a quiet "
        "machine the step may be faster."
    ]


def _pages(count: float) -> str:
    """The mean number of memory pages that a step takes from the system, in words."""
    return f"{count:,.0f} pages" if count >= 1.5 else "one page" if count >= 0.5 else f"{count:.1g} pages"


def _two_states(profile: Profile) -> list[str]:
    """A note if later plain steps had more or fewer page faults than the first plain steps, or if labelled steps had
    fewer than the first plain steps. In those steps the heap was in another state (see `page_faults`).
    """
    faults, labelled, later = profile.faults, profile.labelled_faults, profile.otherwise
    if later is None and (labelled.count >= faults.count or faults.is_like(labelled)):
        return []
    others = later.faults if later is not None else labelled
    if later is not None:
        part_ms, lasted = profile.wall.ms - later.wall.ms, f" (it then lasted {time_text(later.wall.ms)})"
    else:
        threads = torch.get_num_threads()
        part_ms, lasted = faults.step_ms(threads) - labelled.step_ms(threads), ""
    part_ms = min(part_ms, profile.wall.ms - profile.busy_ms)
    gap = f"; operators were timed later: this adds about {time_text(part_ms)} to the launch gap" if part_ms > 0 else ""
    return [
        f"A step took {_pages(faults.count)} of memory from the system at first, and {_pages(others.count)} later"
        f"{lasted}. The records of this analysis changed the heap, and malloc keeps or returns freed memory depending "
        f"on what else the heap holds. The wall time is from the first steps{gap}. To make a program always keep its "
        f"memory, start it with: {KEEP_MEMORY}"
    ]


def _coverage(rows: Sequence[OperatorRow], profile: Profile) -> float:
    """Fraction of the measured time whose operators have a cost formula. Kernels outside any operator are
    not covered."""
    total_ms = sum(row.measured_ms for row in rows) + profile.unattributed_ms
    covered_ms = sum(row.measured_ms for row in rows if row.bound != "uncovered")
    return covered_ms / total_ms if total_ms > 0 else 1.0


def _thinned(curve: list[tuple[float, int]], points: int) -> list[tuple[float, int]]:
    """Reduce the memory curve to about `points` points. The curve is divided into parts with equal numbers of points,
    and each part keeps its lowest and its highest point."""
    if len(curve) <= points:
        return curve
    stretch = -(-2 * len(curve) // points)
    kept = []
    for start in range(0, len(curve), stretch):
        part = curve[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _device(device: torch.device) -> dict[str, Any]:
    """The device of the step, as `rooftop device` describes it."""
    kinds = [d for d in devices() if d.kind == device.type]
    return kinds[device.index or 0 if device.type == "cuda" else 0].to_dict()


def _versions(ceilings: Ceilings) -> dict[str, str]:
    now = {"rooftop": rooftop.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**ceilings.versions, **now}


def _disturbances(ceilings: Ceilings, profile: Profile) -> list[str]:
    """A note that names the ceilings whose measurement was disturbed, of those that the step uses; [] if none was."""
    used = {"memory", "launches"}.union(
        *(op.record.cost.flops for op in profile.operators if op.record.cost is not None),
        {"transfers"} if profile.plain.has_transfers else (),
    )
    disturbed = ceilings.disturbed_of(used)
    if not disturbed:
        return []
    first = f"{', '.join(disturbed[:3])}{', ...' if len(disturbed) > 3 else ''}"
    was = "was" if len(disturbed) == 1 else "were"
    return [
        f"{counted(len(disturbed), 'ceiling')} {was} disturbed during measurement and may be too low ({first}). "
        "Measure again on a quiet machine: rooftop ceilings --refresh"
    ]
