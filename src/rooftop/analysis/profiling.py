"""What a step costs in time: wall, device busy, each operator, and memory over time.

Three kinds of runs, because each disturbs something (see `instruments`):

1. plain runs give the wall time;
2. a run under the profiler alone gives the time the device is busy, and memory over time;
3. labelled runs give each operator's own time. A compiled program cannot be labelled (PyTorch does not run compiled
   code under a mode): its operators are taken from what the profiler saw and the compiler said (see `compiled`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.compiled.graphs import CompiledGraphs
from rooftop.analysis.instruments import (
    CompiledInstrument,
    Labelled,
    LabelledInstrument,
    MeasuredOperator,
    Plain,
    PlainInstrument,
    medians,
    require_folder_of,
)
from rooftop.analysis.program import Program
from rooftop.analysis.report import Compilation
from rooftop.cost import distinct_bytes
from rooftop.cost.accounting import tensors_in
from rooftop.hardware.timing import Timing, measure

Progress = Callable[[str, float], None]
"""Called with (what is being done, fraction done from 0 to 1)."""

WARM_UP_STEPS = 2
COMPILED_WARM_UP_STEPS = 5  # compile, warm up and capture CUDA graphs, forward and backward
LAUNCHING_RUNS = 6
QUEUE_LENGTH = 1000  # a GPU takes about this many launches before the host must wait
LABELLED_SECONDS = 8.0  # bounds the labelled runs of slow programs ...
LABELLED_RUNS = (3, 9)  # ... to at least and at most this many


@dataclass(frozen=True)
class Profile:
    """One step, measured.

    Attributes:
        device: where it ran.
        operators: in order of execution.
        wall: of a plain step.
        host_ms: how long the host needs to launch a step, None if it is not known (a CPU, or a step of so many kernels
            that the host must wait for a place in the queue).
        busy_ms: time during which the device works: union of its kernels (GPU), sum of the operators (CPU).
        kernel_launches: kernels, copies and fills on the device in one step (GPU), operators (CPU).
        unattributed_ms: device time of kernels that no operator launched, already part of `busy_ms`.
        plain: the run under the profiler alone.
        tracker: what the modules and optimizers took in and gave out.
        runs: labelled runs.
        compilation: what `torch.compile` did, None if nothing is compiled.
        notes: what a reader should know about this measurement.
    """

    device: torch.device
    operators: list[MeasuredOperator]
    wall: Timing
    host_ms: float | None
    busy_ms: float
    kernel_launches: int
    unattributed_ms: float
    plain: Plain
    tracker: ModuleTracker
    runs: int
    compilation: Compilation | None
    notes: list[str]


def profile_program(
    program: Program,
    progress: Progress = lambda what, fraction: None,
    trace: str | os.PathLike[str] | None = None,
) -> Profile:
    """Measure one step of a program. Its state is preserved (see `Program.preserved`).

    Args:
        program: what is measured.
        progress: see `Progress`.
        trace: a file for the profiler's trace of one plain step.

    Raises:
        ModelRunError: the program raised.
        ValueError: the trace cannot be written.
    """
    require_folder_of(trace)
    device = program.device
    graphs = CompiledGraphs() if program.compiled else None
    with program.preserved(), graphs or nullcontext():
        progress("compiling" if graphs else "warming up", 0.0)
        for _ in range(COMPILED_WARM_UP_STEPS if graphs else WARM_UP_STEPS):
            program.step()
        progress("timing the step", 0.1)
        wall = measure(program.step, device=device)
        launching_ms = _launching_ms(program)
        progress("profiling", 0.4)
        with PlainInstrument(device, _allocated_bytes(program), trace) as plain:
            program.step()
        launching_ms += _launching_ms(program)
        progress("profiling each operator", 0.5)
        least, most = LABELLED_RUNS
        runs = max(least, min(most, int(1e3 * LABELLED_SECONDS / max(wall.median_ms, 1e-3))))
        with ModuleTracker(program.module, inside=graphs is None) as tracker:
            labelled = []
            for run in range(runs):
                tracker.restart()
                labelled.append(_labelled(program, tracker, graphs))
                progress("profiling each operator", 0.5 + 0.5 * (run + 1) / runs)
        launching_ms += _launching_ms(program)
    return assembled(device, labelled, wall, plain.result, tracker, graphs, min(launching_ms, default=None))


def _launching_ms(program: Program) -> list[float]:
    """From the call of a step until it returns, the device being idle at first; nothing without a GPU.

    What else the host does only adds to it, at times for seconds: the least of several runs, some seconds apart, is
    what the program itself needs.
    """
    taken = []
    for _ in range(LAUNCHING_RUNS if program.device.type == "cuda" else 0):
        torch.cuda.synchronize(program.device)
        began = time.perf_counter()
        program.step()
        taken.append(1e3 * (time.perf_counter() - began))
    if taken:
        torch.cuda.synchronize(program.device)
    return taken


def _labelled(program: Program, tracker: ModuleTracker, graphs: CompiledGraphs | None) -> Labelled:
    if graphs is None:
        with LabelledInstrument(program.device, tracker) as instrument:
            program.step()
        return instrument.result
    with CompiledInstrument(program.device, graphs.graphs) as compiled:
        program.step(lambda output: tracker.observe(program.module, [program.args, program.kwargs], output))
    return compiled.result


def assembled(
    device: torch.device,
    labelled: list[Labelled],
    wall: Timing,
    plain: Plain,
    tracker: ModuleTracker,
    graphs: CompiledGraphs | None,
    launching_ms: float | None = None,
) -> Profile:
    """What several runs of a step say together."""
    notes: list[str] = []
    operators, unattributed_ms = medians(labelled, notes)
    if device.type == "cuda":
        busy, launches = plain.busy_ms, len(plain.kernels)
    else:
        busy, launches = sum(op.measured_ms for op in operators), len(operators)
    if wall.spread > 0.10:
        notes.append(f"The wall time varied by {wall.spread:.0%} between runs: something else was using the machine.")
    if tracker.elsewhere:
        notes.append(
            "Modules ran in other threads than the step's own, where operators are not seen: they are missing."
        )
    return Profile(
        device=device,
        operators=operators,
        wall=wall,
        host_ms=launching_ms if launches < QUEUE_LENGTH else None,
        busy_ms=busy,
        kernel_launches=launches,
        unattributed_ms=unattributed_ms,
        plain=plain,
        tracker=tracker,
        runs=len(labelled),
        compilation=graphs.compilation() if graphs is not None and graphs.graphs else None,
        notes=notes,
    )


def _allocated_bytes(program: Program) -> int:
    """What is allocated before the step: on a CPU what the program holds, parameters, buffers and inputs."""
    if program.device.type == "cuda":
        return torch.cuda.memory_allocated(program.device)
    module = program.module
    held = [*module.parameters(), *module.buffers()] if module is not None else []
    return distinct_bytes([*held, *tensors_in([program.args, program.kwargs])])
