"""Climb a ladder: check each rung against the reference, then time the rungs that are right, taking turns, and compare
them with the roof.

Without a GPU no times are shown. The rungs on the CPU, and Triton's rungs (through its interpreter), are checked. The
rungs in CUDA C++ are compiled for sm_90 but do not run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import roof
from rooftop.errors import CompilationError, MissingExtraError
from rooftop.hardware import Ceilings, Timing, compare
from rooftop.hardware.ceilings import Progress
from rooftop.ladder.rungs import CUDA, Ladder, Rung, source
from rooftop.launch import cuda

ARCH_WITHOUT_GPU = "sm_90"
MEASURED, CHECKED, COMPILED, ABSENT, WRONG, FAILED = "measured", "checked", "compiled", "absent", "wrong", "failed"


@dataclass(frozen=True)
class Outcome:
    """The result of a rung.

    Attributes:
        status: "measured": the result is right, and the rung was timed. "checked": the result is right, but the rung
            was not timed. "compiled": the rung was compiled but not run. "absent": the tool has no such rung, or
            a package or device that the rung needs is missing. "wrong": the result is wrong. "failed": there is no
            result. `note` has the details.
        ms, spread: time of one call and its spread; None unless measured.
        rate: bytes/s or flop/s that the rung reached, in the ladder's `unit`; None unless measured.
        percent_of_roof: 100 * roof_ms / ms; None unless measured.
    """

    name: str
    tool: str
    status: str
    note: str = ""
    ms: float | None = None
    spread: float | None = None
    rate: float | None = None
    percent_of_roof: float | None = None


@dataclass(frozen=True)
class Climb:
    """The results of all rungs of a ladder on one device. `roof_ms` and `bound` are None if `climb` received no
    ceilings, as without a GPU.
    """

    ladder: str
    work: str
    unit: str
    device: str
    roof_ms: float | None
    bound: str | None
    rungs: tuple[Outcome, ...]
    remarks: tuple[str, ...]

    @property
    def failures(self) -> tuple[Outcome, ...]:
        """The rungs that computed a wrong result or raised an error."""
        return tuple(rung for rung in self.rungs if rung.status in (WRONG, FAILED))

    def to_dict(self) -> dict[str, Any]:
        """The JSON form."""
        return asdict(self)


def climb(
    ladder: Ladder,
    ceilings: Ceilings | None = None,
    *,
    seconds: float = 0.1,
    progress: Progress = lambda what, fraction: None,
) -> Climb:
    """Check each rung, and time the rungs that are right.

    Args:
        ladder: made by `build`.
        ceilings: ceilings of the GPU that holds the tensors. If None, the rungs are checked but not timed.
        seconds: about how long to time each rung.
        progress: called with (the current activity, fraction done).
    """
    outcomes = []
    for done, rung in enumerate(ladder.rungs):
        progress(f"{ladder.name}: {rung.name}, {rung.tool}", 0.8 * done / len(ladder.rungs))
        outcomes.append(_checked(ladder, rung))
    found = roof(ladder.cost, ceilings) if ceilings is not None else None
    if found is not None:
        progress(f"{ladder.name}: timing", 0.8)
        outcomes = _timed(ladder, outcomes, found.ms, seconds)
    progress(f"{ladder.name}: remarks", 0.95)
    return Climb(
        ladder=ladder.name,
        work=ladder.work,
        unit=ladder.unit,
        device=ceilings.device if ceilings is not None else "no GPU",
        roof_ms=found.ms if found is not None else None,
        bound=found.bound if found is not None else None,
        rungs=tuple(outcomes),
        remarks=tuple(ladder.remarks(ceilings)),
    )


def _checked(ladder: Ladder, rung: Rung) -> Outcome:
    """Check a rung's result once against the reference."""
    outcome = Outcome(rung.name, rung.tool, CHECKED, rung.note)
    if rung.run is None:
        return replace(outcome, status=ABSENT)
    if rung.tool == CUDA and not cuda.runs_on(ladder.exact):
        return _compiled(ladder, rung, outcome)
    for tensor in ladder.poisoned:
        tensor.fill_(torch.nan)
    try:
        wrong = difference(ladder, rung.run())
    except Exception as error:  # any tool may raise: show the error, and continue with the other rungs
        return replace(outcome, status=FAILED, note=f"{type(error).__name__}: {error}")
    return replace(outcome, status=WRONG, note=wrong) if wrong else outcome


def _compiled(ladder: Ladder, rung: Rung, outcome: Outcome) -> Outcome:
    try:
        for name in rung.kernels:
            cuda.compile(source(ladder.source), name, arch=ARCH_WITHOUT_GPU)
    except MissingExtraError as error:
        return replace(outcome, status=ABSENT, note=str(error))
    except CompilationError as error:
        return replace(outcome, status=FAILED, note=str(error))
    return replace(outcome, status=COMPILED, note=rung.note)


def difference(ladder: Ladder, result: Tensor) -> str:
    """A sentence that says how a result differs from the exact result; empty if all elements are within the ladder's
    tolerance.
    """
    exact = ladder.exact
    if result.shape != exact.shape:
        return f"a result of shape {tuple(result.shape)}, expected {tuple(exact.shape)}"
    result = result.to(exact.device)
    off = (result.to(exact.dtype) - exact).abs()
    far = ~(off <= ladder.atol + ladder.rtol * exact.abs())  # written so that NaN counts as far off
    count = int(far.sum())
    if not count:
        return ""
    place = int(far.flatten().to(torch.uint8).argmax())
    got, expected = float(result.flatten()[place]), float(exact.flatten()[place])
    return f"{count:,} of {exact.numel():,} elements are wrong: element {place:,} is {got:.6g}, expected {expected:.6g}"


def _timed(ladder: Ladder, outcomes: list[Outcome], roof_ms: float, seconds: float) -> list[Outcome]:
    """Time all rungs with a correct result, and return the outcomes. Rungs that are timed in the same way
    (`Rung.clock`) are interleaved.
    """
    timings: dict[int, Timing] = {}
    for clock in ("graph", "device", "host"):
        calls: dict[str, Callable[[], object]] = {
            str(place): rung.run
            for place, (rung, outcome) in enumerate(zip(ladder.rungs, outcomes, strict=True))
            if rung.clock == clock and outcome.status == CHECKED and rung.run is not None
        }
        if calls:
            device = "cpu" if clock == "host" else ladder.exact.device
            found = compare(calls, device=device, seconds=seconds, warm_up_seconds=seconds / 4, graph=clock == "graph")
            timings |= {int(place): timing for place, timing in found.items()}
    amount = ladder.cost.total_flops if ladder.unit == "FLOP/s" else ladder.cost.bytes
    return [
        outcome if place not in timings else _with_time(outcome, timings[place], amount, roof_ms)
        for place, outcome in enumerate(outcomes)
    ]


def _with_time(outcome: Outcome, timing: Timing, amount: int, roof_ms: float) -> Outcome:
    ms = timing.median_ms
    measured = {"ms": ms, "spread": timing.spread, "rate": 1e3 * amount / ms, "percent_of_roof": 100 * roof_ms / ms}
    return replace(outcome, status=MEASURED, **measured)  # type: ignore[arg-type]
