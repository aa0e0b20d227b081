"""Measure a step: wall time, latency, busy time of the device, time of each operator, memory over time.

There are several kinds of runs, because each kind of run distorts some of the measured values (see `instruments`):

1. steps in sequence give the wall time, single steps the latency (see `rooftop.hardware.sequences`);
2. a run under the profiler alone gives memory over time and the host's waits;
3. on a GPU, steps in sequence under the profiler give the time of each kernel, and for how long the device is busy;
4. labelled runs show which operator launched which kernel, and on a CPU give each operator's time. A compiled program
   cannot be labelled (PyTorch does not run compiled code under a mode): its operators come from the profiler and the
   compiler (see `compiled`).

Steps in sequence are repeated between the other runs, so that all runs see the machine in a similar state. If the
machine's speed changes, the interval of the wall time becomes wider.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.compiled.graphs import CompiledGraphs
from rooftop.analysis.host_operators import host_work, said_of_host
from rooftop.analysis.instruments import (
    CompiledInstrument,
    Labelled,
    LabelledInstrument,
    MeasuredOperator,
    Plain,
    PlainInstrument,
    collect_garbage,
    medians,
    require_folder_of,
)
from rooftop.analysis.kernel_times import KernelTimes, watch_kernels
from rooftop.analysis.program import Program
from rooftop.analysis.report_contents import Compilation
from rooftop.analysis.traced_steps import TracingQuestions
from rooftop.cost import distinct_bytes
from rooftop.cost.accounting import tensors_in
from rooftop.errors import ModelRunError
from rooftop.hardware import cupti
from rooftop.hardware.load import OtherLoad, other_load
from rooftop.hardware.page_faults import NO_FAULTS, PageFaults, page_faults
from rooftop.hardware.pulse import Pulse
from rooftop.hardware.sequences import OtherState, StepClock, StepTime

Progress = Callable[[str, float], None]
"""Called with (the current activity, fraction done from 0 to 1)."""

WARM_UP_STEPS = 2
COMPILED_WARM_UP_STEPS = 5  # steps to compile, warm up and capture CUDA graphs, forward and backward
BLOCK_S = 0.25  # seconds of one block of steps in sequence
BLOCKS_S, LEAST_BLOCKS, MOST_BLOCKS = 3.0, 2, 10
"""All blocks together take about `BLOCKS_S` seconds. `LEAST_BLOCKS` and `MOST_BLOCKS` limit the number of blocks."""
AGREEMENT, QUIET_BLOCKS = 0.03, 4
"""After `QUIET_BLOCKS` blocks, further blocks are skipped if the width of the wall time's interval is at most
`AGREEMENT` times the wall time.
"""
# single steps are timed in two series; limits of each series: total seconds, minimum and maximum number of steps
ALONE_S, LEAST_ALONE, MOST_ALONE = 0.25, 2, 20
QUEUE_LENGTH = 1000  # a GPU's queue holds about this many launches; then the host must wait
LABELLED_S = 1.5  # seconds of all labelled runs of a program together
# Minimum and maximum number of labelled runs. On a GPU one run is enough if it launched the same kernels as the steps
# without labels, because the kernels' times are then known.
LEAST_LABELLED, MOST_LABELLED = 3, 9
LONG_LABELLED_S = 4.0  # if the labelled runs have taken more seconds than this, two runs are enough
_measuring = threading.RLock()
"""This lock lets analyses in several threads run one after another. Two analyses would disturb each other, and a second
simultaneous profiler crashes the process with a segmentation fault (PyTorch 2.13).
"""
UNEXPLAINED = 0.01  # if the kernels take longer than the wall time by more than this share, one of the two is wrong


@dataclass(frozen=True)
class Profile:
    """One step, measured.

    Attributes:
        device: the device of the step.
        operators: the operators, in order of execution.
        wall: wall time of a step in sequence.
        latency: time of one step alone; None on a CPU, where it equals the wall time, and if no single step was run.
        host_ms: host time to launch a step; None if unknown (a CPU, or a step with so many kernels that the host must
            wait for a free slot in the queue).
        busy_ms: time during which the device works: union of its kernels (GPU), sum of the operators (CPU).
        kernel_launches: number of kernels, copies and fills on the device in one step (GPU), or of operators (CPU).
        unattributed_ms: device time of kernels that no operator launched; `busy_ms` includes it.
        traced_more_ms: additional device time of the code path that the program takes for compilation or capture (see
            `traced_steps`); None if that path fails.
        plain: the run under the profiler alone.
        tracker: inputs and outputs of the modules and optimizers.
        runs: number of labelled runs.
        host_work: bytes plus flops that the CPU processed in a step on a GPU.
        compilation: the work of `torch.compile`; None if nothing is compiled.
        load: other programs' use of the CPU during the measurement.
        faults: page faults of a step without profiler and labels.
        labelled_faults: page faults of a labelled step. `faults` and `labelled_faults` are 0 on a GPU.
        pulse: the CPU's speed during the measurement; None on a GPU and for a recorded program.
        otherwise: page faults and wall time of later steps without profiler and labels, if their number of page faults
            differs from `faults`.
        notes: remarks on this measurement that a reader should know.
    """

    device: torch.device
    operators: list[MeasuredOperator]
    wall: StepTime
    latency: StepTime | None
    host_ms: float | None
    busy_ms: float
    kernel_launches: int
    unattributed_ms: float
    traced_more_ms: float | None
    plain: Plain
    tracker: ModuleTracker
    runs: int
    compilation: Compilation | None
    load: OtherLoad
    notes: list[str]
    host_work: int = 0
    faults: PageFaults = NO_FAULTS
    labelled_faults: PageFaults = NO_FAULTS
    otherwise: OtherState | None = None
    pulse: Pulse | None = None


def profile_program(
    program: Program,
    progress: Progress = lambda what, fraction: None,
    trace: str | os.PathLike[str] | None = None,
) -> Profile:
    """Measure one step of a program. The program's state is preserved (see `Program.preserved`).

    Args:
        program: the program to measure.
        progress: see `Progress`.
        trace: a file for the profiler's trace of one plain step.

    Raises:
        ModelRunError: the program raised.
        ValueError: the trace cannot be written.
    """
    require_folder_of(trace)
    device = program.device
    graphs = CompiledGraphs() if program.compiled else None
    with _measuring, program.preserved(), graphs or nullcontext(), other_load() as load:
        progress("compiling" if graphs else "warming up", 0.0)
        for _ in range(COMPILED_WARM_UP_STEPS if graphs else WARM_UP_STEPS):
            program.step()
        progress("timing the step", 0.1)
        pulse = Pulse() if device.type == "cpu" else None
        clock = StepClock(program.step, device, beside=pulse.take if pulse is not None else None)
        began = time.perf_counter()
        step_s = clock.run_block(BLOCK_S).ms / 1e3
        blocks = max(LEAST_BLOCKS, min(MOST_BLOCKS, int(BLOCKS_S / (time.perf_counter() - began))))
        alone = max(LEAST_ALONE, min(MOST_ALONE, int(ALONE_S / max(step_s, 1e-6)))) if device.type == "cuda" else 0
        clock.run_alone(alone)
        progress("profiling", 0.3)
        with PlainInstrument(device, _allocated_bytes(program), trace) as plain:
            program.step()
        # the program has compiled parts, but the step did not run any
        if not plain.result.compiled:
            graphs = None
        if blocks > LEAST_BLOCKS:
            clock.run_block(BLOCK_S)
        times = _kernel_times(program, clock, plain.result) if device.type == "cuda" else None
        progress("profiling each operator", 0.5)
        between = blocks - LEAST_BLOCKS if device.type == "cpu" else 0
        labelled, tracker, labelled_faults = _labelled_runs(program, graphs, clock, between, times, progress)
        progress("timing the step again", 0.9)
        collect_garbage()
        clock.run_alone(alone)
        clock.run_block(BLOCK_S)
        while clock.blocks < blocks and (clock.wall.blocks < QUIET_BLOCKS or clock.wall.spread > AGREEMENT):
            clock.run_block(BLOCK_S)
        if times is not None and times.busy_ms > (1 + UNEXPLAINED) * clock.wall.ms:
            # the kernel times contradict the wall time: measure both again
            times = _kernel_times(program, clock, plain.result)
            clock.run_block(BLOCK_S)
        more_ms: float | None = 0.0
        if times is not None and not (graphs or plain.result.compiled):
            more_ms = _traced_more_ms(program, clock, plain.result, times)
    latency = clock.latency if alone else None
    profile = assembled(
        device, labelled, clock.wall, plain.result, tracker, graphs, clock.launching_ms, latency, times, load, more_ms
    )
    return replace(
        profile, faults=clock.faults, labelled_faults=labelled_faults, otherwise=clock.otherwise, pulse=pulse
    )


def _kernel_times(program: Program, clock: StepClock, plain: Plain) -> KernelTimes | None:
    return watch_kernels(program.step, program.device, clock.wall.ms, len(plain.kernels)) if plain.kernels else None


def _traced_more_ms(program: Program, clock: StepClock, plain: Plain, times: KernelTimes) -> float | None:
    """See `Profile.traced_more_ms`.

    If a step asks PyTorch whether it is being compiled (`torch.compiler.is_compiling`) or captured into a CUDA graph,
    measure steps to which PyTorch answers yes. None if such a step raises.
    """
    questions = TracingQuestions()
    with questions.noticed():
        program.step()
    if not questions.asked:
        return 0.0
    try:
        with questions.affirmed():
            program.step()
            traced = _kernel_times(program, clock, plain)
    except ModelRunError:
        return None
    if traced is None or traced.names == times.names:
        return 0.0
    return max(0.0, traced.busy_ms - times.busy_ms)


def _labelled_runs(
    program: Program,
    graphs: CompiledGraphs | None,
    clock: StepClock,
    blocks: int,
    times: KernelTimes | None,
    progress: Progress,
) -> tuple[list[Labelled], ModuleTracker, PageFaults]:
    """Run labelled steps: `LEAST_LABELLED`, and on a CPU as many more as fit into `LABELLED_S`. Return all labelled
    steps, the last step's tracker, and the last step's page faults.

    A block of plain steps runs after each of the first labelled steps. Plain and labelled steps are compared, so both
    must run under the same conditions.

    Args:
        blocks: largest number of blocks of plain steps.
        times: times of the kernels in steps without labels, if known.
    """
    labelled: list[Labelled] = []
    least, took_s = LEAST_LABELLED, 0.0
    on_cpu = program.device.type == "cpu"
    while len(labelled) < least or (on_cpu and len(labelled) < MOST_LABELLED and took_s < LABELLED_S):
        began, before = time.perf_counter(), page_faults() if on_cpu else NO_FAULTS
        run, tracker = _labelled(program, graphs)
        faults = page_faults().since(before, 1) if on_cpu else NO_FAULTS
        labelled.append(run)
        took_s += time.perf_counter() - began
        if took_s > LONG_LABELLED_S:
            least = min(least, 2)
        if times is not None and run.timed_by(times) is not None:
            break
        progress("profiling each operator", 0.5 + 0.4 * min(1.0, max(len(labelled) / least, took_s / LABELLED_S)))
        if len(labelled) < least and blocks > 0:
            clock.run_block(BLOCK_S)
            blocks -= 1
    return labelled, tracker, faults


def _labelled(program: Program, graphs: CompiledGraphs | None) -> tuple[Labelled, ModuleTracker]:
    with ModuleTracker(program.module, inside=graphs is None) as tracker:
        if graphs is None:
            with LabelledInstrument(program.device, tracker) as instrument:
                program.step()
            return instrument.result, tracker
        with CompiledInstrument(program.device, graphs.graphs) as compiled:
            program.step(lambda output: tracker.observe(program.module, [program.args, program.kwargs], output))
        return compiled.result, tracker


def assembled(
    device: torch.device,
    labelled: list[Labelled],
    wall: StepTime,
    plain: Plain,
    tracker: ModuleTracker,
    graphs: CompiledGraphs | None,
    launching_ms: float | None = None,
    latency: StepTime | None = None,
    times: KernelTimes | None = None,
    load: OtherLoad | None = None,
    traced_more_ms: float | None = 0.0,
) -> Profile:
    """The combined result of several runs of a step.

    Args:
        times: times of the kernels in steps without labels; None if there are no kernels, or each step launches
            different kernels.
        load: other programs' use of the CPU during the runs; None if not measured.
        traced_more_ms: see `Profile`.
    """
    notes: list[str] = []
    operators, unattributed_ms = medians(labelled, notes, times)
    on_host = Counter[str]()
    if device.type == "cuda":
        busy, launches = times.busy_ms if times is not None else plain.busy_ms, len(plain.kernels)
        operators, on_host = host_work(operators)
        notes += filter(None, [said_of_host(on_host, gpu_works=busy > 0)])
    else:
        busy, launches = sum(op.measured_ms for op in operators), len(operators)
    if tracker.elsewhere:
        notes.append(
            "Some modules ran in threads other than the step's. Operators in these threads are not watched, so these "
            "modules are missing."
        )
    if device.type == "cuda" and cupti.stays_for:
        notes.append(
            f"CUPTI, which the profiler uses, stays attached, because {cupti.stays_for} may be in a call of the CUDA "
            "runtime. This makes launches slower: steps bound by the host took up to a quarter longer."
        )
    if tracker.uncounted:
        (name, why), *others = tracker.uncounted.items()
        notes.append(
            f"The inputs and outputs of {name}{f' and of {len(others)} more' if others else ''} could not be "
            f"counted ({why}): their fused roof is the sum over their parts."
        )
    return Profile(
        device=device,
        operators=operators,
        wall=wall,
        latency=latency,
        host_ms=launching_ms if launches < QUEUE_LENGTH else None,
        busy_ms=busy,
        kernel_launches=launches,
        unattributed_ms=unattributed_ms,
        traced_more_ms=traced_more_ms,
        plain=plain,
        tracker=tracker,
        runs=len(labelled),
        compilation=graphs.compilation() if graphs is not None and graphs.graphs else None,
        load=load or OtherLoad(),
        host_work=on_host.total(),
        notes=notes,
    )


def _allocated_bytes(program: Program) -> int:
    """Bytes allocated before the step. On a CPU, the bytes of the program's parameters, buffers and inputs."""
    if program.device.type == "cuda":
        return torch.cuda.memory_allocated(program.device)
    module = program.module
    held = [*module.parameters(), *module.buffers()] if module is not None else []
    return distinct_bytes([*held, *tensors_in([program.args, program.kwargs])])
