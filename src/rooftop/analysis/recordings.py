"""`rooftop.recording`: the report of a program as it runs, a training loop or a whole script.

    with rooftop.recording() as r:
        for batch in loader:
            ...
            r.step()
    r.report.to_html("report.html")

With `step()` at the end of each iteration, the first steps warm up, one runs under the profiler alone, a few are
labelled, the next are timed undisturbed, and the rest run as if nobody were watching. A block without steps is one
step: it is labelled as a whole, which slows the host down, so what the labels cost is measured and taken off its wall
time. So is the first step of others, in case there are too few of them. Nothing is compiled in it: PyTorch would not
compile later what it had met under labels.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.compiled.graphs import CompiledGraphs
from rooftop.analysis.instruments import (
    CompiledInstrument,
    Labelled,
    LabelledInstrument,
    Plain,
    PlainInstrument,
    require_folder_of,
)
from rooftop.analysis.profiling import COMPILED_WARM_UP_STEPS, assembled
from rooftop.analysis.report import Report
from rooftop.analysis.reporting import report_of
from rooftop.errors import InputError
from rooftop.hardware import measure_ceilings
from rooftop.hardware.ceilings import Ceilings, require_ceilings
from rooftop.hardware.sequences import StepTime, synchronize

WARM_UP = 3  # steps, the first of them watched as a whole: allocators, autotuners
COMPILED_WARM_UP = 1 + COMPILED_WARM_UP_STEPS  # where something is compiled in them
LABELLED = 3
LEAST_TIMED, TIMED_STEPS, TIMED_SECONDS = 3, 200, 3.0  # undisturbed steps: at least, and until either is reached
MOST_OPERATORS = 200_000  # of a block without steps: about 1 GB of records
NEEDED = WARM_UP + 1 + LABELLED + 1 + LEAST_TIMED
"""Steps after which a recording has all that it wants (more where something is compiled)."""


_open_recordings: list[Recording] = []
"""What they put in place must be taken away in the opposite order, so only the last of them may go on a step."""


@dataclass
class _Stage:
    """What the recording does during the step that runs now: "whole", "warm", "plain", "labelled", "settling",
    "timed", "off"."""

    name: str
    steps: int = 0
    began: float = 0.0


class Recording:
    """What runs inside the `with` block; `report` afterwards. Made by `rooftop.recording`.

    Attributes:
        steps: how many times `step()` was called.
    """

    def __init__(
        self,
        module: nn.Module | None,
        device: torch.device,
        ceilings: Ceilings | None,
        name: str,
        trace: str | os.PathLike[str] | None,
        every_optimizer_step: bool,
    ) -> None:
        self.steps = 0
        self._module, self._device, self._ceilings = module, device, ceilings
        self._name, self._trace = name, trace
        self._every_optimizer_step = every_optimizer_step
        self._leading_optimizer: int | None = None
        self._graphs = CompiledGraphs()
        self._tracker = ModuleTracker(module, inside=False)
        self._seen: dict[str, ModuleTracker] = {}  # stage -> its traffic
        self._open = False
        self._thread = 0
        self._around = ExitStack()
        self._now = ExitStack()  # what watches the step that runs now
        self._instrument: Any = None
        self._stage = _Stage("whole")
        self._durations_ms: list[float] = []
        self._plain: Plain | None = None
        self._labelled: list[Labelled] = []
        self._whole: tuple[Labelled, float] | None = None
        self._cut = False  # whether the block went on after what was recorded
        self._report: Report | None = None
        self._failed = False

    def __enter__(self) -> Recording:
        if self._open or self._whole is not None or self._failed:
            raise RuntimeError("a recording serves one block: call rooftop.recording() again for another")
        if self._ceilings is None:
            self._ceilings = measure_ceilings(self._device)
        self._around.enter_context(_inference_mode_settled())
        self._around.enter_context(self._graphs)
        self._around.enter_context(self._tracker)
        if self._every_optimizer_step:
            handle = register_optimizer_step_post_hook(self._optimizer_stepped)
            self._around.callback(handle.remove)
        synchronize(self._device)
        self._open, self._thread = True, threading.get_ident()
        _open_recordings.append(self)
        self._begin("whole")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._failed = error is not None and not isinstance(error, SystemExit)
        self._open = False
        _open_recordings.remove(self)
        try:
            self._end()
        finally:
            self._around.close()

    def step(self) -> None:
        """Say that one step of the program has ended (call it last in the loop's body).

        Raises:
            RuntimeError: outside the `with` block, in another thread than the block's, or inside another recording.
        """
        if not self._open:
            raise RuntimeError("step() belongs inside the block: with rooftop.recording() as r: ... r.step()")
        if self._thread != threading.get_ident():
            raise RuntimeError("step() belongs to the thread that opened the recording: it sees no other")
        if _open_recordings[-1] is not self:
            raise RuntimeError("step() while another recording is open inside this one: end that one first")
        self.steps += 1
        stage = self._stage
        if stage.name == "off":
            return
        stage.steps += 1
        if stage.name == "timed":
            self._durations_ms.append(self._elapsed_ms())
            stage.began = time.perf_counter()
        following = self._following()
        if following != stage.name or stage.name in ("labelled", "plain"):
            self._end()
            self._begin(following)

    def _following(self) -> str:
        """What happens in the next step. The first step was watched as a whole, and warmed up."""
        name, steps = self._stage.name, self._stage.steps
        if name == "whole":
            return "warm"
        if name == "warm":
            return "warm" if steps < (COMPILED_WARM_UP if self._graphs.graphs else WARM_UP) - 1 else "plain"
        if name == "plain":
            return "labelled"
        if name == "labelled":
            return "labelled" if len(self._labelled) + 1 < LABELLED else "settling"
        if name == "settling":
            return "timed"
        enough = steps >= TIMED_STEPS or sum(self._durations_ms) >= 1e3 * TIMED_SECONDS
        return "off" if enough and steps >= LEAST_TIMED else "timed"

    def _begin(self, name: str) -> None:
        if name != self._stage.name:
            self._stage = _Stage(name)
        if name == "plain":
            self._watch(PlainInstrument(self._device, self._allocated_bytes(), self._trace))
        elif name in ("whole", "labelled"):
            self._tracker.restart()
            if self._plain is not None and self._plain.compiled:
                self._watch(CompiledInstrument(self._device, self._graphs.graphs))
            else:
                if name == "whole":
                    self._now.enter_context(torch.compiler.set_stance("force_eager"))
                self._now.enter_context(self._tracker.following())
                self._watch(LabelledInstrument(self._device, self._tracker, MOST_OPERATORS))
        elif name == "timed":
            synchronize(self._device)
        self._stage.began = time.perf_counter()

    def _watch(self, instrument: Any) -> None:
        self._instrument = instrument
        self._now.enter_context(instrument)

    def _end(self) -> None:
        name = self._stage.name
        if name == "timed" and self._durations_ms:
            synchronize(self._device)
            self._durations_ms[-1] += self._elapsed_ms()  # what the device had yet to do belongs to the steps
        if name in ("whole", "labelled", "plain"):
            synchronize(self._device)
            elapsed_ms = self._elapsed_ms()
            self._now.close()
            result = self._instrument.result
            self._seen[name] = self._tracker.snapshot()
            if name == "plain":
                self._plain = result
            elif name == "labelled" and result.records:
                self._labelled.append(result)
            elif name == "whole":
                full_at = self._instrument.full_at
                self._cut = full_at is not None
                self._whole = (result, 1e3 * (full_at - self._stage.began) if full_at is not None else elapsed_ms)
        self._stage = _Stage("off")

    def _elapsed_ms(self) -> float:
        return 1e3 * (time.perf_counter() - self._stage.began)

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    def _optimizer_stepped(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Every step of the first optimizer ends a step, but where `step()` would be refused."""
        if self._thread != threading.get_ident() or _open_recordings[-1] is not self:
            return
        if self._leading_optimizer is None:
            self._leading_optimizer = id(optimizer)
        if id(optimizer) == self._leading_optimizer:
            self.step()

    @property
    def report(self) -> Report:
        """What was recorded (made when it is first asked for).

        Raises:
            RuntimeError: the block has not ended, or ended with an exception.
            InputError: nothing ran in it.
        """
        if self._report is None:
            if self._failed or self._whole is None:
                raise RuntimeError("there is no report: the recorded block has not ended, or ended with an exception")
            self._report = self._assembled()
        return self._report

    def _assembled(self) -> Report:
        assert self._whole is not None
        assert self._ceilings is not None
        notes: list[str] = []
        first, first_ms = self._whole
        seen = self._seen["whole"]
        if self._plain is not None and len(self._durations_ms) >= LEAST_TIMED:
            labelled, plain, wall = self._labelled, self._plain, StepTime.of_loop(self._durations_ms)
            seen = self._seen["labelled"]
            mode = f"{self.steps} recorded steps"
        else:
            if not first.records:
                raise InputError("nothing to report: no operator of PyTorch ran in the recorded block's own thread")
            labelled = [first]
            plain = _plain_of(first)
            taken_off_ms = max(0.0, first_ms - _overhead_ms(first, self._device))
            wall = StepTime.of([[max(taken_off_ms, plain.busy_ms)]])
            mode = "recorded"
            what = f"its first step of {self.steps}" if self.steps else "the block"
            if self._cut:
                what = f"the first {len(first.records):,} operators of {what}"
            more = COMPILED_WARM_UP - WARM_UP if self._graphs.graphs else 0
            notes.append(
                f"The report is of {what}, run once and labelled, start-up included and without torch.compile; what "
                f"the labels cost is taken off the wall time. With {NEEDED + more} steps or more (r.step() after each) "
                "steps are timed undisturbed."
            )
        if self._trace is not None and self._plain is None:
            notes.append(
                "No trace was written: it is of one step after the warm-up, recorded without labels, and there were "
                f"only {self.steps}."
            )
        profile = assembled(self._device, labelled, wall, plain, seen, self._graphs)
        inputs: list[Tensor] = []
        return report_of(
            profile, self._ceilings, target=self._name, mode=mode, inputs=inputs, root_type="step", notes=notes
        )


@contextmanager
def _inference_mode_settled() -> Iterator[None]:
    """Lets `torch.inference_mode` end in another stage than it began in.

    At its end it puts back which dispatch modes PyTorch asks, as that was at its beginning: modes that have ended since
    would be called, and those that have begun would not.
    """
    original = torch.inference_mode.__exit__

    def settled(self: torch.inference_mode, *error: Any) -> None:
        original(self, *error)
        active = torch._C._len_torch_dispatch_stack() > 0
        for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
            torch._C._dispatch_tls_set_dispatch_key_included(key, active)

    with patch.object(torch.inference_mode, "__exit__", settled):
        yield


def _plain_of(labelled: Labelled) -> Plain:
    """What a labelled run alone tells: the operators' time as busy time."""
    busy_ms = sum(ms for ms, _ in labelled.times) + labelled.unattributed_ms
    return Plain(busy_ms, [], [], 0.0, 0.0, compiled=False)


def _overhead_ms(labelled: Labelled, device: torch.device) -> float:
    """What labelling cost the host: measured on an operator that does nothing, times the operators that ran."""
    count = len(labelled.records)
    one, samples = torch.zeros(1), 50
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
    return 1e3 * count * max(0.0, labelled_s - bare_s) / samples


def recording(
    module: nn.Module | None = None,
    *,
    device: torch.device | str | None = None,
    ceilings: Ceilings | None = None,
    name: str = "recording",
    trace: str | os.PathLike[str] | None = None,
    every_optimizer_step: bool = False,
) -> Recording:
    """Record what runs inside a `with` block, for a report.

    Args:
        module: the model whose modules are named without a prefix; None: the first that is called.
        device: where the work is; None is the GPU if there is one.
        ceilings: what to compare with; None measures this machine before the block begins (cached).
        name: what the report calls the program.
        trace: also write the profiler's trace of one step to this file, for Perfetto (if there are enough steps).
        every_optimizer_step: each step of the first optimizer ends a step, without calls of `step()`.

    Raises:
        TypeError: `module` is no module, `ceilings` are none.
        ValueError: no such device here, or no place for the trace.
        CeilingsFileError: the ceilings are those of another kind of device.

    Example:
        >>> with rooftop.recording() as r:
        ...     for x, y in loader:
        ...         loss(model(x), y).backward()
        ...         optimizer.step()
        ...         r.step()
        >>> r.report
    """
    try:
        where = torch.device(device if device is not None else "cuda" if torch.cuda.is_available() else "cpu")
    except RuntimeError as error:
        raise ValueError(f"recording(device={device!r}): expected a cpu or cuda device") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"recording(device={device!r}): expected a cpu or cuda device")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"recording(device={device!r}): there are {torch.cuda.device_count()} GPUs here")
    if ceilings is not None:
        require_ceilings(ceilings, "recording").require_kind(where.type)
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"recording(module={module!r}): expected a module, or None for the first that is called")
    require_folder_of(trace)
    return Recording(module, where, ceilings, name, trace, every_optimizer_step)
