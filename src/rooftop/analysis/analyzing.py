"""`rooftop.analyze`: measure a step, put its floors beside it, say what would close the gaps."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch
from torch import Tensor

import rooftop
from rooftop.analysis.advice import Findings, advise
from rooftop.analysis.floors import module_tree, operator_rows
from rooftop.analysis.profiling import Profile, Progress, profile_program
from rooftop.analysis.program import Program, describe_tensor
from rooftop.analysis.report import Gaps, ModuleNode, OperatorRow, Report, Summary
from rooftop.cost.accounting import tensors_in
from rooftop.hardware import devices, measure_ceilings
from rooftop.hardware.ceilings import Ceilings

MEMORY_POINTS = 2000
"""Most points of the memory curve that a report keeps."""


def analyze(
    target: Callable[..., Any],
    *args: Any,
    train: bool = False,
    optimizer: torch.optim.Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    compile: bool | str = False,
    ceilings: Ceilings | None = None,
    name: str | None = None,
    progress: Progress = lambda what, fraction: None,
    **kwargs: Any,
) -> Report:
    """How far one step of a model is from what this machine can do, and why.

    The model runs where its parameters are, on the arguments as they are; its weights, buffers, gradients, train flags
    and the random state are the same afterwards (with `optimizer`, its steps do change the weights).

    Args:
        target: an `nn.Module`, run in eval mode without gradients, or with `train=True` in training mode, forward and
            backward; or any other callable, run as it is.
        *args, **kwargs: its arguments.
        train: also run the backward pass.
        optimizer: also step this optimizer.
        loss: makes the loss from the output. Without it a one-element output is the loss; others are sent back with
            fixed random gradients.
        compile: compile the target with `torch.compile` first: True, or one of its modes ("reduce-overhead").
        ceilings: what to compare with; None measures this machine (cached, under 30 s the first time).
        name: what the report calls the target.
        progress: called with (what is being done, fraction done).

    Raises:
        TypeError, ValueError: wrong arguments.
        ModelRunError: the model raised or ran out of memory.

    Example:
        >>> report = rooftop.analyze(model, x)
        >>> print(report.table())
        >>> report.to_html("report.html")
    """
    program = Program(target, args, kwargs, train=train, optimizer=optimizer, loss=loss, compile=compile)
    if ceilings is None:
        ceilings = measure_ceilings(program.device, progress=lambda what, done: progress(what, 0.4 * done))
    versions = program.input_versions()
    profile = profile_program(program, progress=lambda what, done: progress(what, 0.4 + 0.6 * done))
    rows = operator_rows(profile.operators, ceilings)
    root_type = type(target).__name__ if program.module is not None else "step"
    modules = module_tree(profile.operators, profile.tracker, ceilings, root_type)
    summary, gaps, notes = _balance(profile, modules, program)
    if versions != program.input_versions():
        notes.append("The step writes to its inputs: each of its runs began with what the one before had left there.")
    findings = Findings(profile.operators, rows, summary, gaps, ceilings)
    return Report(
        target=name or program.name,
        mode="training" if train else "inference" if program.module is not None else "callable",
        inputs=tuple(describe_tensor(t).replace(":", " ") for t in tensors_in([args, kwargs])),
        created=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        device=_device(program.device),
        versions=_versions(ceilings),
        ceilings=ceilings.to_dict(),
        summary=summary,
        gaps=gaps,
        coverage=_coverage(rows, profile),
        ops=tuple(rows),
        modules=modules,
        advice=tuple(advise(findings)),
        memory=tuple(_thinned(profile.memory, MEMORY_POINTS)),
        peak_bytes=profile.peak_bytes,
        compilation=profile.compilation,
        notes=(*profile.notes, *notes, *_disturbances(ceilings)),
    )


def _balance(profile: Profile, modules: ModuleNode, program: Program) -> tuple[Summary, Gaps, list[str]]:
    """wall = fused roof + fusion headroom + kernel gap + launch gap."""
    notes = []
    wall_ms, busy_ms = profile.wall.median_ms, profile.busy_ms
    if busy_ms > wall_ms:
        notes.append(
            f"The operators alone took {busy_ms:.3g} ms in their labelled runs, more than the {wall_ms:.3g} ms of a "
            "plain step (operators of microseconds, or a machine that was disturbed): the launch gap is shown as 0."
        )
        busy_ms = wall_ms
    first = next(iter(tensors_in([program.args, program.kwargs])), None)
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
        samples=first.shape[0] if first is not None and first.dim() > 0 else None,
        repeats=profile.runs,
    )
    gaps = Gaps(
        kernel_gap_ms=busy_ms - modules.op_roof_ms,
        fusion_headroom_ms=modules.op_roof_ms - modules.fused_roof_ms,
        launch_gap_ms=wall_ms - busy_ms,
    )
    return summary, gaps, notes


def _coverage(rows: Sequence[OperatorRow], profile: Profile) -> float:
    """Fraction of the operators' time that has a cost formula; time of kernels outside any operator has none."""
    total_ms = sum(row.measured_ms for row in rows) + profile.unattributed_ms
    covered_ms = sum(row.measured_ms for row in rows if row.bound != "uncovered")
    return covered_ms / total_ms if total_ms > 0 else 1.0


def _thinned(curve: list[tuple[float, int]], points: int) -> list[tuple[float, int]]:
    """At most about this many points of a step curve; of each stretch the lowest and the highest are kept."""
    if len(curve) <= points:
        return curve
    stretch = -(-2 * len(curve) // points)
    kept = []
    for start in range(0, len(curve), stretch):
        part = curve[start : start + stretch]
        kept += sorted({min(part, key=lambda p: p[1]), max(part, key=lambda p: p[1])})
    return kept


def _device(device: torch.device) -> dict[str, Any]:
    """The device that ran, as `rooftop device` describes it."""
    kinds = [d for d in devices() if d.kind == device.type]
    return kinds[device.index or 0 if device.type == "cuda" else 0].to_dict()


def _versions(ceilings: Ceilings) -> dict[str, str]:
    now = {"rooftop": rooftop.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**ceilings.versions, **now}


def _disturbances(ceilings: Ceilings) -> list[str]:
    if not ceilings.disturbed:
        return []
    return [f"Ceilings that varied by more than 10% while measured: {', '.join(ceilings.disturbed)}."]
