"""Make the report of a recording: from all its stages or, if the program ran too few steps for them, from its latest
labelled steps.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.compiled.graphs import CompiledGraphs
from rooftop.analysis.formats import time_text
from rooftop.analysis.instruments import Labelled, LabelledInstrument, Plain
from rooftop.analysis.machine_ceilings import completed_ceilings
from rooftop.analysis.profiling import assembled
from rooftop.analysis.report import Report
from rooftop.analysis.reporting import report_of
from rooftop.analysis.stages import UNDISTURBED, Laps, Watched
from rooftop.errors import InputError
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.sequences import StepTime
from rooftop.words import counted

FIRST_STEPS = 3  # number of first steps whose durations a note lists


@dataclass(frozen=True)
class StartUp:
    """What happened before a program's first step: elapsed time of the host in ms, and number of labelled operators."""

    ms: float
    operators: int


def recorded_report(
    recorded: Sequence[Laps],
    device: torch.device,
    ceilings: Ceilings,
    graphs: CompiledGraphs,
    *,
    measures: bool,
    name: str,
    start_up: StartUp | None,
    needed: int,
    traced: bool,
    profiled: bool,
    least: int,
    notes: Sequence[str],
) -> Report:
    """The report of a recording.

    Args:
        recorded: for each marker (event that ends steps) that was the leading marker at some time (see `step_finding`),
            the steps that it ended; the coarsest marker first.
        measures: whether the ceilings are those of this machine. If so, missing ceilings are measured, and operators
            above their roof raise the ceilings.
        start_up: the time before the first step, if known.
        needed: number of steps of a complete recording.
        traced: whether the caller requested a trace file.
        profiled: whether the program used PyTorch's profiler itself.
        least: smallest number of steps for which a report is possible, if some steps are timed before the profiler
            begins; 0 if the profiler begins at once.
        notes: notes at the beginning of the report.

    Raises:
        InputError: no operator was recorded.
    """
    laps = _chosen(recorded, profiled, least)
    label_ms = _label_ms()
    if laps.is_complete:
        labelled, plain = laps.labelled, laps.plain or _plain_of(laps.labelled[-1].labelled)
        wall, which = _of_enough(laps)
        mode = f"{laps.steps} recorded steps"
    else:
        labelled, wall, which = _of_few(laps, label_ms, device, needed)
        plain = laps.plain if laps.plain is not None and laps.labelled else _plain_of(labelled[-1].labelled)
        if wall.ms < plain.busy_ms:
            wall = StepTime.of_loop([plain.busy_ms])
        mode = "recorded"
    said = [*notes, *_beginning(laps, start_up, label_ms), *which]
    if profiled and laps.plain is None:
        said.append(
            "The program uses PyTorch's profiler itself, so Rooftop's could not run: memory, waits and the loading "
            f"of data were not watched{', and no trace was written' if traced else ''}. Steps that both profilers "
            "watched took longer, even in the program's own profile."
        )
    elif traced and laps.plain is None:
        said.append(
            "No trace was written: a trace needs one step after the warm-up, recorded without labels, and the "
            f"program ran only {counted(laps.steps, 'step')}."
        )
    profile = assembled(device, [each.labelled for each in labelled], wall, plain, labelled[-1].seen, graphs)
    profile = replace(profile, faults=laps.faults)
    if measures:
        ceilings, about_ceilings = completed_ceilings(ceilings, profile)
        said += about_ceilings
    return report_of(profile, ceilings, target=name, mode=mode, inputs=[], root_type="step", notes=said)


def _chosen(recorded: Sequence[Laps], profiled: bool, least: int) -> Laps:
    """The `Laps` of the coarsest marker whose recording is complete or which ended two steps or more, including a
    labelled step. If there is no such marker, the `Laps` of the coarsest marker that ended a labelled step.
    """
    for laps in recorded:
        if laps.is_complete or (laps.steps > 1 and _watched(laps)):
            return laps
    for laps in recorded:
        if _watched(laps):
            return laps
    if profiled and any(laps.steps for laps in recorded):
        raise InputError(
            "nothing to report: the program uses PyTorch's profiler itself, so Rooftop's profiler could not run, and "
            "without it Rooftop sees no work on a GPU or in compiled code: run the program without its own profiler"
        )
    if least:
        steps = counted(max(laps.steps for laps in recorded), "step")
        raise InputError(
            f"nothing to report: the program ended after {steps}. With NCCL, a profiler slows down all later steps, so "
            f"the first steps are timed before Rooftop's profiler starts: run {least} steps or more"
        )
    raise InputError(
        "nothing to report: no operator of PyTorch ran in the thread of the recorded block or script. To analyze a "
        "function of a file, name it: FILE.py:NAME"
    )


def _watched(laps: Laps) -> list[Watched]:
    """The labelled steps of one stage. The stages `whole`, `early` and `labelled` run in this order. The latest stage
    whose last step ran an operator is chosen, because later steps represent the program better."""
    candidates = [laps.labelled, [laps.early] if laps.early else [], [laps.whole] if laps.whole else []]
    return next((found for found in candidates if found and found[-1].labelled.records), [])


def _of_enough(laps: Laps) -> tuple[StepTime, list[str]]:
    """The wall time of steps without profiler and labels, and a note if these steps ran before the profiler began.

    Only few steps run before the profiler. So their time is taken only if it is below the interval of the time of the
    later steps, which run with CUPTI still attached, or if there are no later steps.
    """
    after = StepTime.of_loop(laps.steady_ms) if laps.steady_ms else None
    if not laps.steady_before_ms:
        assert after is not None
        return after, []
    before = StepTime.of_loop(laps.steady_before_ms)
    if after is not None and before.ms >= after.low_ms:
        return after, []
    said = f"The wall time is that of {counted(before.steps, 'step')} before the profiler began."
    if after is not None:
        later = counted(after.steps, "step")
        said += f" With CUPTI still attached, {later} after the profiler took {time_text(after.ms)} each."
    return before, [said]


def _of_few(
    laps: Laps, label_ms: float, device: torch.device, needed: int
) -> tuple[list[Watched], StepTime, list[str]]:
    """The labelled steps, the wall time and notes of a program that ended before enough steps were timed."""
    labelled = _watched(laps)
    last = labelled[-1]
    if laps.undisturbed_ms and last.steps > 1 - (last is laps.whole):
        wall = StepTime.of_loop(laps.undisturbed_ms)
        how = (
            f"The wall time is from {counted(wall.steps, 'step')} that ran undisturbed; the operators' times are from "
        )
        how += f"{counted(len(labelled), 'step')} that ran under labels."
    else:
        ms = max(0.0, last.ms - label_ms * len(last.labelled.records))
        wall = StepTime.of_loop([ms])
        how = "All operators were labelled; the cost of the labels is subtracted from the wall time."
    if not laps.steps:
        what = "the block" if last.cut is False else f"the first {len(last.labelled.records):,} operators of the block"
        how = f"The report covers {what}, run once, including start-up, without torch.compile. {how}"
    elif last is laps.whole and last.steps > 1:
        how = f"The report covers {counted(last.steps, 'step')} together. {how}"
    else:
        how = f"There {'was' if laps.steps == 1 else 'were'} only {counted(laps.steps, 'step')}. {how}"
    return labelled, wall, [f"{how} With {needed} steps or more, steps are timed undisturbed."]


def _beginning(laps: Laps, start_up: StartUp | None, label_ms: float) -> list[str]:
    """A sentence about the time that the wall time excludes: the start-up and the first steps."""
    first = laps.laps[:FIRST_STEPS]
    if not first:
        return []
    said = []
    if start_up is not None:
        ms = max(0.0, start_up.ms - label_ms * start_up.operators)
        said.append(f"Before the first step the program needed {time_text(ms)} (imports, data, weights).")
    durations = ", ".join(
        f"{time_text(lap.ms)}{'' if lap.stage in (*UNDISTURBED, 'unwatched') else ' (watched)'}" for lap in first
    )
    steps = "steps" if len(first) > 1 else "step"
    said.append(f"Its first {steps} took {durations}{', the first including start-up' if start_up is None else ''}.")
    return [f"{' '.join(said)} The wall time is from later steps."] if laps.is_complete else [" ".join(said)]


def _plain_of(labelled: Labelled) -> Plain:
    """A `Plain` made from labelled runs, if there are no other runs. The operators' time counts as busy time."""
    busy_ms = sum(ms for ms, _ in labelled.times) + labelled.unattributed_ms
    return Plain(busy_ms, [], [], 0.0, 0.0, compiled=False)


def _label_ms() -> float:
    """The host time that one label takes, measured on an operator that does nothing."""
    one, samples = torch.zeros(1, device="cpu"), 50
    tracker = ModuleTracker()
    began = time.perf_counter()
    for _ in range(samples):
        one.view(1)
    bare_s = time.perf_counter() - began
    with LabelledInstrument(torch.device("cpu"), tracker):
        began = time.perf_counter()
        for _ in range(samples):
            one.view(1)
        labelled_s = time.perf_counter() - began
    return 1e3 * max(0.0, labelled_s - bare_s) / samples
