"""A Python script, run as it is and recorded: `rooftop analyze train.py -- --epochs 1`."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from rooftop.analysis.ranks.lockstep import process_groups_kept
from rooftop.analysis.recordings import recording
from rooftop.analysis.report import Report
from rooftop.errors import InputError, ModelRunError
from rooftop.hardware.ceilings import Ceilings


def analyze_script(
    path: str | os.PathLike[str],
    arguments: Sequence[str] = (),
    *,
    device: torch.device | str | None = None,
    ceilings: Ceilings | None = None,
    trace: str | os.PathLike[str] | None = None,
) -> Report:
    """Run a script as `python SCRIPT ARGUMENTS` would and report on it.

    A script with an optimizer is recorded step by step (each step of its first optimizer ends one); any other is one
    step, recorded as a whole.

    Args:
        path: the script. arguments: what it finds in `sys.argv[1:]`.
        device, ceilings, trace: as for `rooftop.recording`.

    Raises:
        InputError: no such file, or no operator of PyTorch ran in it.
        ModelRunError: the script raised, or ended with an exit status other than 0.
    """
    script = Path(path)
    if not script.is_file():
        raise InputError(f"{os.fspath(path)}: there is no such script")
    recorded = recording(device=device, ceilings=ceilings, name=script.name, trace=trace, every_optimizer_step=True)
    with recorded, _as_main(script, arguments), process_groups_kept():
        try:
            _run(script)
        except SystemExit as end:
            if isinstance(end.code, str):  # Python prints it and ends with status 1
                raise ModelRunError(f"{script} ended with exit status 1: {end.code}") from end
            if end.code not in (None, 0):
                raise ModelRunError(f"{script} ended with exit status {end.code}") from end
        except Exception as error:
            raise ModelRunError(f"{script} raised {type(error).__name__}: {error}{_line(error, script)}") from error
    return recorded.report


def _run(script: Path) -> None:
    """Run it. A process that it forked and that comes to its end ends here: there is one report, the first one's."""
    process = os.getpid()
    status = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        raise
    except Exception:
        if os.getpid() != process:
            traceback.print_exc()
        raise
    finally:
        if os.getpid() != process:
            sys.stdout.flush()
            os._exit(status)


@contextmanager
def _as_main(script: Path, arguments: Sequence[str]) -> Iterator[None]:
    """`sys.argv`, `sys.path` and `sys.modules["__main__"]` as the script expects them; the folder put back, too."""
    folder = os.getcwd()
    argv, path, main = sys.argv, list(sys.path), sys.modules.get("__main__")
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = argv, path
        if main is not None:
            sys.modules["__main__"] = main
        with suppress(FileNotFoundError):  # the script may have deleted it
            os.chdir(folder)


def _line(error: BaseException, script: Path) -> str:
    """The innermost line of the script that led to an error."""
    line, trace = None, error.__traceback__
    while trace is not None:
        frame: Any = trace.tb_frame
        if os.path.basename(frame.f_code.co_filename) == script.name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" ({script}:{line})" if line is not None else ""
