"""`rooftop.recording`: make the report of a program as it runs, such as a training loop or a whole script.

    with rooftop.recording() as r:
        for batch in loader:
            ...
            r.step()
    r.report.to_html("report.html")

The program marks its steps with `step()`, or Rooftop finds them (`step_finding`). Each step belongs to a stage
(`stages`). The first steps warm up, one step runs under the profiler alone, a few steps are labelled, the next steps
are timed undisturbed, and the remaining steps run unwatched. A block without steps counts as one step, which is
labelled as a whole. Labels slow the host down, so their cost is measured and subtracted from the block's wall time. The
first of several steps is labelled too, in case too few steps follow. If the program compiles code, steps are labelled
only after the compilation, because PyTorch would never compile code that first ran under labels.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.compiled.graphs import CompiledGraphs
from rooftop.analysis.instruments import (
    CompiledInstrument,
    LabelledInstrument,
    PlainInstrument,
    collect_garbage,
    require_folder_of,
)
from rooftop.analysis.machine_ceilings import likely_ceilings
from rooftop.analysis.program_labels import ProgramLabels
from rooftop.analysis.program_profilers import ProgramProfilers
from rooftop.analysis.ranks.merging import RankRow
from rooftop.analysis.ranks.recorded import RankInstrument
from rooftop.analysis.recorded_report import StartUp, recorded_report
from rooftop.analysis.report import Report
from rooftop.analysis.settled_modes import modes_settled
from rooftop.analysis.stages import (
    BEFORE_SECONDS,
    BEFORE_STEPS,
    COMPILED_WARM_UP,
    LEAST_TIMED,
    LONG_LABELLED_MS,
    LONG_STAGE_LAPS,
    LONG_STAGE_S,
    MOST_MODULE_CALLS,
    MOST_REPEATS,
    NEEDED,
    NO_STEP,
    TIMED_SECONDS,
    TIMED_STEPS,
    Calls,
    Lap,
    Laps,
    Stage,
    StepClock,
    Watched,
    stages,
    steps_needed,
)
from rooftop.analysis.step_finding import MOST_INNER_STEPS, Level, StepFinder
from rooftop.hardware import cupti
from rooftop.hardware.ceilings import Ceilings, require_ceilings
from rooftop.hardware.sequences import synchronize
from rooftop.words import counted

__all__ = ["NEEDED", "Recording", "recording"]

MOST_OPERATORS = 200_000  # largest number of operators recorded while no step has ended: about 1 GB of records
MOST_EARLIER = 4  # number of former step markers (see step_finding.py) whose recorded steps are kept
MOST_LAPS = 64  # number of steps, from the first on, whose host time is kept


class _GivenUp(Exception):
    """The exception that tells instruments to discard their stage's data."""


_open_recordings: list[Recording] = []
"""The open recordings, the innermost last. The recordings' instruments must be undone in reverse order, so only the
innermost recording may act.
"""


class Recording:
    """A recording of the `with` block. Afterwards, `report` has the result. Made by `rooftop.recording`.

    Attributes:
        steps: number of completed steps: calls of `step()`, or steps that Rooftop found.
        rank_row: this rank's measurements, if there are several ranks and this rank ran enough steps.
        notes: additional notes for the report.
    """

    def __init__(
        self,
        module: nn.Module | None,
        device: torch.device,
        ceilings: Ceilings | None,
        name: str,
        trace: str | os.PathLike[str] | None,
        find_steps: bool,
        one_of_ranks: bool,
    ) -> None:
        self.notes: list[str] = []
        self.rank_row: RankRow | None = None
        self._device, self._ceilings = device, ceilings
        self._measures = False  # whether this recording gets the ceilings itself, because the caller gave none
        self._name, self._trace = name, trace
        self._finder = StepFinder(self) if find_steps else None
        self._one_of_ranks = one_of_ranks
        self._profilers = ProgramProfilers(self._program_profiles)
        self._graphs = CompiledGraphs()
        self._tracker = ModuleTracker(module, inside=False)
        self._open = False
        self._thread = 0
        self._began = 0.0
        self._around = ExitStack()
        self._now = ExitStack()  # the instruments of the running stage
        self._instrument: Any = None
        self._clock: StepClock | None = None
        self._stage, self._left = Stage("off", 0), 0
        self._stage_began = self._step_began = 0.0
        self._following: list[Stage] = []
        self._compiles = False
        self._laps = Laps()
        self._earlier: list[Laps] = []
        self._start_up_operators = 0
        self._report: Report | None = None
        self._calls_in_stage = 0
        self._given_up = False
        self._served = self._failed = False

    # ---- the block -------------------------------------------------------------------------------------------------

    def __enter__(self) -> Recording:
        if self._open or self._served:
            raise RuntimeError("a recording records only one block: call rooftop.recording() again for another block")
        if self._ceilings is None and not (self._one_of_ranks and os.environ.get("RANK", "0") != "0"):
            self._ceilings, self._measures = likely_ceilings(self._device), True
        self._around.enter_context(modes_settled())
        self._around.enter_context(ProgramLabels())
        self._around.enter_context(self._graphs)
        self._around.enter_context(self._tracker)
        if self._finder is not None:
            self._around.enter_context(self._finder)
        self._around.enter_context(self._profilers)
        synchronize(self._device)
        self._open, self._served, self._thread = True, True, threading.get_ident()
        _open_recordings.append(self)
        self._following = self._planned()
        self._next_stage()
        self._began = self._step_began = time.perf_counter()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._failed = error is not None and not isinstance(error, SystemExit)
        self.close()

    @property
    def is_open(self) -> bool:
        return self._open

    def close(self) -> None:
        """End the running stage, as the end of the block does. Programs that end their process inside the block call
        this method.

        If another thread calls this, it does not wait for the GPU, because the program may be hanging. The call then
        discards the current stage and keeps the steps that have been timed.
        """
        if not self._open:
            return
        self._open = False
        _open_recordings.remove(self)
        try:
            if self._thread == threading.get_ident():
                self._end_stage(keep=self._stage.name in ("whole", "compiling"))
            elif self._clock is not None:
                self._keep_timed(self._clock)
        finally:
            self._around.close()

    def _abandon(self) -> None:
        """Stop recording in a forked process, since only the first process reports. The program itself continues."""
        self._open, self._stage = False, Stage("off", 0)
        for undo in (self._now, self._around):
            try:
                undo.close()
            except Exception:  # errors are ignored: the profiler's threads do not exist in this process
                continue

    # ---- steps -----------------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return self._laps.steps

    def step(self) -> None:
        """Report that one step of the program has ended (call it last in the loop's body).

        Raises:
            RuntimeError: the call is outside the `with` block or in a thread other than the block's, another recording
                is open inside this one, or this recording finds the steps by itself.
        """
        if not self._open:
            raise RuntimeError("step() belongs inside the block: with rooftop.recording() as r: ... r.step()")
        if self._thread != threading.get_ident():
            raise RuntimeError(
                "step() was called in another thread: call it in the thread that opened the recording, the only thread "
                "that is recorded"
            )
        if _open_recordings[-1] is not self:
            raise RuntimeError("step() was called while another recording is open inside it: end the inner one first")
        if self._finder is not None:
            raise RuntimeError(
                "step() was called in a recording with find_steps=True, which finds the steps itself: leave out step() "
                "or find_steps"
            )
        self._step_ended((0, 0))

    def work_begins(self, compiled: bool) -> None:
        """See `step_finding.Watcher`. The time before this call counts as start-up."""
        if compiled:
            self.compiles()
        if self._stage.name == "whole":
            self._start_up_operators = len(self._watched_until_now().labelled.records)
            self._begin()
        elif self._stage.name == "compiling":
            self._now.close()
            self._stage, self._instrument = Stage("unwatched", 1), None

    def work_goes_on(self) -> None:
        """See `step_finding.Watcher`. If an apparent step contains a long evaluation, the recording gives up the stage:
        it stops watching that step."""
        if self._instrument is None or self._stage.name not in ("early", "plain", "labelled", "ranks"):
            return
        self._calls_in_stage += 1
        stage_s = time.perf_counter() - self._stage_began
        is_long = stage_s > LONG_STAGE_S and 1e3 * stage_s > LONG_STAGE_LAPS * self._laps.median_ms
        if is_long or self._calls_in_stage > MOST_MODULE_CALLS:
            self._now.__exit__(_GivenUp, _GivenUp(), None)
            self._instrument, self._given_up = None, True

    def leader_changes(self) -> None:
        """See `step_finding.Watcher`. If the stage is "whole", its instruments continue, because the first step of the
        new leading marker is not over yet."""
        if self._stage.name != "whole":
            self._end_stage(keep=False)
            self._following = self._planned()[1:]
            self._stage, self._left = Stage("unwatched", 1), 1
        self._earlier = [*self._earlier, self._laps][-MOST_EARLIER:]
        self._laps = Laps()

    def step_ends(self, calls: Calls, whole: bool) -> None:
        """See `step_finding.Watcher`."""
        self._step_ended(calls if whole or not self._laps.steps else NO_STEP)

    def compiles(self) -> None:
        """See `step_finding.Watcher`. Code must not be labelled before it is compiled, so nothing is labelled until
        compilation is done.

        If code is compiled before a first step has begun, the program may call only compiled functions, in which no
        steps can be found. So the profiler watches the program until a step begins, or else to the program's end.
        """
        if self._compiles or not self.in_charge:
            return
        self._compiles = True
        if self._stage.name in ("whole", "early", "labelled"):
            watched_all = self._stage.name == "whole" and self._finder is not None and self._finder.began_at is None
            self._now.close()
            self._stage, self._left, self._instrument = Stage("unwatched", 1), 1, None
            self._following = self._planned()[1:]
            if watched_all:
                self._stage = Stage("compiling", 1)
                self._begin()

    def _program_profiles(self) -> None:
        """Stop using the profiler for good, because the program uses PyTorch's profiler itself."""
        if self._profiles(self._stage.name) and self._thread == threading.get_ident():
            self._now.close()
            self._stage, self._left, self._instrument = Stage("unwatched", 1), 1, None

    def _profiles(self, name: str) -> bool:
        """Whether the stage with this name uses PyTorch's profiler."""
        labelled = name in ("whole", "early", "labelled")
        return name in ("plain", "ranks", "compiling") or (
            labelled and (self._device.type == "cuda" or (name != "whole" and self._runs_compiled))
        )

    @property
    def in_charge(self) -> bool:
        """Whether this recording may act now: no other recording is open inside it, and no GPU work is being
        captured."""
        if not self._open or _open_recordings[-1] is not self:
            return False
        return self._device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def _step_ended(self, calls: Calls) -> None:
        now, laps, name = time.perf_counter(), self._laps, self._stage.name
        laps.steps += 1
        if len(laps.laps) < MOST_LAPS:
            laps.laps.append(Lap(laps.steps, name, 1e3 * (now - self._began_step()), calls))
        if name == "whole" and self._is_undecided():
            self._step_began = now
            return
        if self._clock is not None:
            self._clock.mark()
            (laps.before_calls if name == "before" else laps.timed_calls).append(calls)
            if self._has_timed_enough(self._clock):
                self._end_stage(keep=True)
                self._next_stage()
        elif name != "off":
            self._count_step(calls)
        self._step_began = time.perf_counter()

    def _count_step(self, calls: Calls) -> None:
        """Continue the recording's current stage, or begin its next stage. A stage that watches single steps repeats a
        step that is incomplete, or that makes an unusual number of module calls or backward calls. A stage that was
        given up (see `work_goes_on`) is also repeated, unless it is `ranks`."""
        laps, name = self._laps, self._stage.name
        by_step = name in ("early", "plain", "labelled")
        if self._given_up and (name == "ranks" or laps.repeats >= MOST_REPEATS):
            self._next_stage()
            return
        unusual = by_step and laps.repeats < MOST_REPEATS and (calls == NO_STEP or laps.is_unusual(calls))
        unusual |= self._given_up
        laps.repeats += unusual
        self._left -= not unusual
        if name == "warm" and not self._left and self._graphs.graphs:  # the program compiled code in these steps
            self._left = max(0, COMPILED_WARM_UP - laps.steps)
        if name == "ranks" and self._left:
            self._instrument.step_ended()
        if by_step or not self._left:
            self._end_stage(keep=not unusual)
            self._begin() if self._left else self._next_stage()

    def _is_undecided(self) -> bool:
        """Whether a coarser marker may still replace the leading marker, which has ended fewer than two steps."""
        coarsest = self._finder is None or self._finder.level == Level.OPTIMIZER
        return not coarsest and self._laps.steps < 2

    def _began_step(self) -> float:
        # If there were more finer steps than gradient accumulation takes, these steps belonged to another phase of the
        # program.
        finer = sum(laps.steps for laps in self._earlier)
        is_first = self._laps.steps == 1 and finer <= MOST_INNER_STEPS
        began_at = self._finder.began_at if self._finder is not None and is_first else None
        return began_at or self._step_began

    def _has_timed_enough(self, clock: StepClock) -> bool:
        before = self._stage.name == "before"
        steps, seconds = (BEFORE_STEPS, BEFORE_SECONDS) if before else (TIMED_STEPS, TIMED_SECONDS)
        return clock.steps >= LEAST_TIMED and (clock.steps >= steps or clock.elapsed_s >= seconds)

    # ---- stages ----------------------------------------------------------------------------------------------------

    def _planned(self) -> list[Stage]:
        return self._planned_where(self._compiles)

    def _planned_where(self, compiled: bool) -> list[Stage]:
        ranks, found = self._one_of_ranks, self._finder is not None
        return stages(found=found, compiled=compiled, ranks=ranks, stays=self._profiler_stays)

    @property
    def _profiler_stays(self) -> bool:
        """Whether CUPTI probably stays attached once a profiler has begun. CUPTI does so with NCCL, which ranks use on
        GPUs."""
        return self._one_of_ranks and self._device.type == "cuda"

    def _next_stage(self) -> None:
        self._stage = self._following.pop(0) if self._following else Stage("off", 0)
        self._left = self._stage.steps
        if self._stage.name == "labelled" and self._laps.early is not None and self._laps.early.ms > LONG_LABELLED_MS:
            self._left = 1
        self._begin()

    def _begin(self) -> None:
        if self._profilers.used and self._profiles(self._stage.name):
            self._stage, self._left = Stage("unwatched", 1), 1
        name = self._stage.name
        if name == "plain":
            self._watch(PlainInstrument(self._device, self._allocated_bytes(), self._trace))
        elif name == "ranks":
            self._watch(RankInstrument(self._device))
        elif name == "compiling" or (name in ("early", "labelled") and self._runs_compiled):
            self._tracker.restart()
            self._watch(CompiledInstrument(self._device, self._graphs.graphs))
        elif name in ("whole", "early", "labelled"):
            self._tracker.restart()
            self._now.enter_context(self._tracker.following())
            self._watch(LabelledInstrument(self._device, self._tracker, MOST_OPERATORS))
        elif name == "settling":
            collect_garbage()
            if self._device.type == "cuda":
                cupti.detach()
        elif name in ("before", "timed"):
            self._clock = StepClock(self._device)
        self._calls_in_stage, self._given_up = 0, False
        self._stage_began = time.perf_counter()

    @property
    def _runs_compiled(self) -> bool:
        if self._laps.plain is not None:
            return self._laps.plain.compiled
        return self._compiles or bool(self._graphs.graphs)

    def _watch(self, instrument: Any) -> None:
        self._instrument = instrument
        self._now.enter_context(instrument)

    def _end_stage(self, keep: bool) -> None:
        name, laps = self._stage.name, self._laps
        if self._clock is not None:
            synchronize(self._device)
            self._keep_timed(self._clock)
        elif not keep:
            self._now.close()
        elif name == "plain":
            laps.plain = self._ended_instrument().result
        elif name == "ranks":
            self.rank_row = self._ended_instrument().row(int(os.environ.get("RANK", "0")))
        elif name in ("whole", "compiling"):
            laps.whole = self._watched_until_now()
        elif name == "early":
            laps.early = self._watched_until_now()
        elif name == "labelled":
            laps.labelled.append(self._watched_until_now())

    def _keep_timed(self, clock: StepClock) -> None:
        laps, self._clock = self._laps, None
        if self._stage.name == "before":
            laps.before_ms = clock.durations_ms()
            del laps.before_calls[len(laps.before_ms) :]
        else:
            laps.timed_ms, laps.faults = clock.durations_ms(), clock.faults()
            del laps.timed_calls[len(laps.timed_ms) :]

    def _ended_instrument(self) -> Any:
        synchronize(self._device)
        self._now.close()
        return self._instrument

    def _watched_until_now(self) -> Watched:
        synchronize(self._device)
        ms = 1e3 * (time.perf_counter() - self._stage_began)
        self._now.close()
        full_at = getattr(self._instrument, "full_at", None)
        ms = ms if full_at is None else 1e3 * (full_at - self._stage_began)
        return Watched(self._instrument.result, self._tracker.snapshot(), ms, self._laps.steps, full_at is not None)

    def _allocated_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) if self._device.type == "cuda" else 0

    # ---- the report ------------------------------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """The report of the recording (made on first access).

        Raises:
            RuntimeError: the block has not ended, or ended with an exception.
            InputError: no operator was recorded. The message says why.
        """
        if self._failed or self._open or not self._served:
            raise RuntimeError("there is no report: the recorded block has not ended, or ended with an exception")
        return self._made_report()

    @property
    def report_so_far(self) -> Report | None:
        """The report of a block that ended with an exception, if enough steps had been recorded before the
        exception."""
        return self._made_report() if any(laps.is_complete for laps in self._recorded) else None

    @property
    def _recorded(self) -> list[Laps]:
        """The recorded steps of each leading marker, from the current marker to the earliest."""
        return [self._laps, *reversed(self._earlier)]

    def _made_report(self) -> Report:
        if self._report is None:
            assert self._ceilings is not None
            self._report = recorded_report(
                self._recorded,
                self._device,
                self._ceilings,
                self._graphs,
                measures=self._measures,
                name=self._name,
                start_up=self._start_up(),
                needed=self._needed,
                traced=self._trace is not None,
                profiled=self._profilers.used,
                least=self._least,
                notes=self.notes,
            )
        return self._report

    @property
    def _needed(self) -> int:
        """Number of steps that a complete recording needs. If the first stage is `whole` and the marker that ends the
        steps is not an optimizer's step, this stage takes two of the program's steps, so one more is needed.
        """
        planned = self._planned_where(self._runs_compiled)
        undecided = planned[0].name == "whole" and self._finder is not None and self._finder.level != Level.OPTIMIZER
        return steps_needed(planned) + undecided

    @property
    def _least(self) -> int:
        """Minimum number of steps for which a report is possible, if the first steps are timed before the profiler
        begins (`_profiler_stays`); otherwise 0.
        """
        if not self._profiler_stays:
            return 0
        names = [stage.name for stage in self._planned() for _ in range(stage.steps)]
        return 1 + names.index("labelled")

    @property
    def why_no_row(self) -> str:
        """Why `rank_row` is None, as the rest of a sentence that begins with "its script"."""
        if self._profilers.used:
            return "has its own profiler, and only one profiler can run"
        return f"ended after {counted(self.steps, 'step')}, too few to measure communication"

    @property
    def said_of_threads(self) -> str:
        """A sentence about modules that ran in other threads; "" if none did."""
        threads = self._finder.threads if self._finder is not None else {}
        if not threads:
            return ""
        names = ", ".join(list(threads)[:4]) + (", ..." if len(threads) > 4 else "")
        count = f"more than {len(threads) - 1}" if "" in threads else f"{len(threads)}"
        return (
            f"{count} other {'thread' if len(threads) == 1 else 'threads'} ran modules ({names}) for "
            f"{sum(threads.values()):.1f} s of CPU time: their operators are not in the report."
        )

    def _start_up(self) -> StartUp | None:
        """The start-up; None if no step can be separated from the work before it."""
        began_at = self._finder.began_at if self._finder is not None else None
        if began_at is None:
            return None
        return StartUp(1e3 * (began_at - self._began), self._start_up_operators)


def _leave_the_child_alone() -> None:
    for recorded in _open_recordings:
        recorded._abandon()
    _open_recordings.clear()


os.register_at_fork(after_in_child=_leave_the_child_alone)


def recording(
    module: nn.Module | None = None,
    *,
    device: torch.device | str | None = None,
    ceilings: Ceilings | None = None,
    name: str = "recording",
    trace: str | os.PathLike[str] | None = None,
    find_steps: bool = False,
    one_of_ranks: bool = False,
) -> Recording:
    """Record the work inside a `with` block, for a report.

    Args:
        module: the model whose modules are named without a prefix; None: the first module that is called.
        device: the device of the work; None is the GPU if there is one.
        ceilings: ceilings to compare with. If None, this machine is measured before the block begins. After the block
            the recording measures further ceilings that the program needs (cached), and raises any ceiling that an
            operator has surpassed.
        name: the program's name in the report.
        trace: also write the profiler's trace of one step to this file, for Perfetto, if the block runs enough steps.
        find_steps: find the steps (see `step_finding`), for a block that does not call `step()`.
        one_of_ranks: whether the block runs in each of several processes. If so, the communication of some steps is
            measured.

    Raises:
        TypeError: `module` is not a module, or `ceilings` is not Ceilings.
        ValueError: the device is not on this machine, or the trace cannot be written.
        CeilingsFileError: the ceilings are for another kind of device.

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
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"recording(device={device!r}): expected a cpu or cuda device") from error
    if where.type not in ("cpu", "cuda"):
        raise ValueError(f"recording(device={device!r}): expected a cpu or cuda device")
    if where.type == "cuda" and (where.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"recording(device={device!r}): this machine has {counted(torch.cuda.device_count(), 'GPU')}, numbered "
            "from cuda:0"
        )
    if ceilings is not None:
        require_ceilings(ceilings, "recording").require_kind(where.type)
    if module is not None and not isinstance(module, nn.Module):
        raise TypeError(f"recording(module={module!r}): expected a module, or None for the first module that is called")
    require_folder_of(trace)
    return Recording(module, where, ceilings, name, trace, find_steps, one_of_ranks)
