"""Run a Python script unchanged and record it: `rooftop analyze train.py -- --epochs 1`.

The recording must not change the script's output, random numbers, exit status or way of ending. A script that ends by
`os._exit` gets a report, too. A script that fails or is interrupted (Ctrl-C) gets a report only if at least three of
its steps were timed.
"""

from __future__ import annotations

import builtins
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, NoneType, TracebackType
from typing import Any, NoReturn
from unittest.mock import patch

import torch

from rooftop.analysis.other_processes import OtherProcesses
from rooftop.analysis.ranks.lockstep import process_groups_kept
from rooftop.analysis.ranks.recorded import gathered_rows, with_ranks
from rooftop.analysis.recordings import Recording, recording
from rooftop.analysis.report import Report
from rooftop.analysis.script_surroundings import Surroundings, end_of_child, room_below
from rooftop.errors import InputError
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.traces import let_profiler_say_its_word
from rooftop.user_paths import user_path
from rooftop.words import in_a_line


@dataclass(frozen=True)
class ScriptRun:
    """The end of a script, and its recording.

    Attributes:
        report: the report. None if the script ran too little for a report; always None on ranks other than the first.
        status: exit status of the script.
        problem: why the script failed or has no report; "" if neither applies.
        error: the exception that the script raised; KeyboardInterrupt means Ctrl-C.
        traceback: Python's output for the error; "" if the script's own `sys.excepthook` has printed it.
        resume: restores the script's final environment (`sys.argv`, `sys.path`, `sys.stdout`, the current folder,
            `__main__`) for threads and functions that run when the process exits.
    """

    report: Report | None
    status: int
    problem: str = ""
    error: BaseException | None = None
    traceback: str = ""
    resume: Callable[[], None] = field(default=lambda: None, compare=False)


def run_script(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    device: torch.device | str | None = None,
    ceilings: Ceilings | None = None,
    trace: str | os.PathLike[str] | None = None,
    before_exit: Callable[[ScriptRun], None] = lambda run: None,
) -> ScriptRun:
    """Run a script as `python SCRIPT ARGUMENTS` would, and report on it. An exception of the script becomes part of the
    result.

    Rooftop finds the script's steps by its optimizer, its backward passes or the calls of its outermost module (see
    `step_finding`). A script without optimizer, backward pass and module calls is recorded as one step.

    Args:
        path: the script.
        arguments: its `sys.argv[1:]`.
        device, ceilings, trace: as for `rooftop.recording`.
        before_exit: called with the result if the script ends the process by `os._exit`.

    Raises:
        InputError: there is no such file.
        TypeError, ValueError, CeilingsFileError: as for `rooftop.recording`.
    """
    script = user_path(path)
    if not script.is_file():
        raise InputError(f"{os.fspath(path)}: no such script")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ
    recorded = recording(
        device=_device_of_rank(device) if several else device,
        ceilings=ceilings,
        name=script.name,
        trace=trace,
        find_steps=True,
        one_of_ranks=several,
    )
    others = OtherProcesses()
    process = os.getpid()
    end_process = os._exit

    def exit_now(status: int) -> NoReturn:
        """Replace `os._exit` for the script: end the recording and pass its result to `run_script`'s `before_exit`. The
        real `os._exit` then ends the process, and runs neither `finally` blocks nor `atexit` functions.
        """
        if os.getpid() == process and recorded.is_open:
            try:
                recorded.close()
                others.__exit__(None, None, None)
                surroundings.__exit__(None, None, None)
                before_exit(_reported(recorded, others, several, status))
                sys.stdout.flush()
            except Exception:
                traceback.print_exc()
        end_process(status)

    status, problem, told = 0, "", False
    hook = sys.excepthook
    surroundings = Surroundings(script, arguments)
    let_profiler_say_its_word()
    error: BaseException | None = None
    with recorded, others, surroundings, process_groups_kept(), patch.object(os, "_exit", exit_now):
        try:
            _run(script, several)
        except SystemExit as end:
            (status, problem), error, told = _status(end, script), end, True
        except KeyboardInterrupt as interrupted:
            status, problem, error = 130, "interrupted", interrupted
        except BaseException as raised:  # also asyncio.CancelledError and others that do not derive from Exception
            status, error = 1, raised
            problem = f"{script} raised {in_a_line(raised)}{_line(raised, script)}"
        if error is not None and not told and sys.excepthook is not hook:
            after_hook, told = _hooked(sys.excepthook, error, _from_script_on(error, script)), True
            status = status if isinstance(error, KeyboardInterrupt) else after_hook
    sys.excepthook = hook
    run = replace(_reported(recorded, others, several, status, problem, error), resume=surroundings.again)
    return run if told or error is None else replace(run, traceback=_traceback(error, script))


def _hooked(hook: Callable[..., Any], failure: BaseException, trace: TracebackType | None) -> int:
    """Call the script's own `sys.excepthook` and return the exit status. If the hook raises, print both tracebacks, as
    Python does."""
    try:
        hook(type(failure), failure, trace)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        print("Error in sys.excepthook:", file=sys.stderr)
        traceback.print_exception(type(error), error, error.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        traceback.print_exception(type(failure), failure, trace)
    return 1


def _status(end: SystemExit, script: Path) -> tuple[int, str]:
    """(exit status, problem) of `sys.exit(code)`. If `code` is a text, Python prints it, and the status is 1."""
    if end.code is None or isinstance(end.code, int):
        status = end.code or 0
        return status, f"{script} ended with exit status {status}" if status else ""
    try:
        said = str(end.code)
    except Exception as error:  # `str` of the exit value raises; Python then prints nothing
        said = f"its exit value cannot be printed ({type(error).__name__})"
    return 1, f"{script} ended with exit status 1: {said}"


def _reported(
    recorded: Recording,
    others: OtherProcesses,
    several: bool,
    status: int,
    problem: str = "",
    error: BaseException | None = None,
) -> ScriptRun:
    """The report of a script that has ended. The report's notes mention the processes that the script started. With
    several ranks, the first rank's report covers all ranks, and the other ranks have none.
    """
    recorded.notes += [said for said in (others.said, recorded.said_of_threads) if said]
    ranks, missing = None, list[str]()
    if several:
        why_none = problem or f"its script {recorded.why_no_row}"
        ranks, missing = gathered_rows(recorded.rank_row, why_none)
        recorded.notes += missing
        if os.environ["RANK"] != "0":
            return ScriptRun(None, status, problem, error)
    try:
        report = recorded.report if status == 0 else recorded.report_so_far
    except InputError as nothing:
        what = f"{nothing}. {others.said}" if others.said else str(nothing)
        return ScriptRun(None, status, problem or what, error)
    if report is None:
        return ScriptRun(None, status, " ".join([f"{problem}." if missing else problem, *missing]), error)
    return ScriptRun(with_ranks(report, ranks) if ranks is not None else report, status, problem, error)


def _device_of_rank(device: torch.device | str | None) -> torch.device | str | None:
    """The GPU of this rank: the one with the number `LOCAL_RANK`, as in programs under `torchrun`. A GPU that the
    caller chose by its number is kept."""
    if str(device) == "cpu" or not torch.cuda.is_available() or torch.device(device or "cuda").index is not None:
        return device
    local = int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", local if local < torch.cuda.device_count() else 0)


def _run(script: Path, one_of_ranks: bool) -> None:
    """Run the script. A process that the script forked ends here, because only the first process reports.

    Args:
        one_of_ranks: whether the script is one of several ranks. If so, the script's variables are deleted when the
            script ends, because objects that use a process group must be deleted before the group (see
            `process_groups_kept`).
    """
    process = os.getpid()
    status = 1
    path = os.path.abspath(script)  # `__file__` and the script's name in tracebacks are as under Python
    main = ModuleType("__main__")
    loader = SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __builtins__=builtins, __cached__=None, __loader__=loader, __annotations__={})
    sys.modules["__main__"] = main
    try:
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        with room_below():
            exec(code, main.__dict__)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if os.getpid() != process and not isinstance(end.code, (int, NoneType)):
            print(end.code, file=sys.stderr)
        raise
    except BaseException as error:
        if os.getpid() != process:
            traceback.print_exception(type(error), error, _from_script_on(error, script))
        raise
    finally:
        if os.getpid() != process:
            end_of_child(main, status)
        if one_of_ranks:
            main.__dict__.clear()


def _line(error: BaseException, script: Path) -> str:
    """ " (script:line)" of the innermost call in the script that led to an error; "" if there is none."""
    line, trace = None, error.__traceback__
    while trace is not None:
        frame: Any = trace.tb_frame
        if os.path.basename(frame.f_code.co_filename) == script.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" ({script}:{line})" if line is not None else ""


def _traceback(error: BaseException, script: Path) -> str:
    return "".join(traceback.format_exception(type(error), error, _from_script_on(error, script)))


def _from_script_on(error: BaseException, script: Path) -> TracebackType | None:
    """The traceback without the frames above the script's first frame."""
    trace = error.__traceback__
    while trace is not None and os.path.basename(trace.tb_frame.f_code.co_filename) != script.name:
        trace = trace.tb_next
    return trace
