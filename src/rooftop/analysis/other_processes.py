"""Find the processes that a script starts, and their CPU time. The script's report does not include the work of these
processes.

Rooftop notes each process when the script starts it: `multiprocessing` (hogwild, `mp.spawn`), the workers of a
`DataLoader`, other programs. Rooftop reads the CPU time of these processes from time to time while they live. For
processes that end between two readings, Rooftop uses the operating system's total over all child processes that were
waited for.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import resource
import subprocess
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from functools import wraps
from typing import Any
from unittest.mock import patch

import psutil

from rooftop.words import counted

LOOK_EVERY_S = 0.5
# If a script starts only programs (no workers, no forks), the report omits them if their total CPU time is below this
# share of the script's own CPU time, or below `LEAST_S`.
LEAST_SHARE = 0.02
LEAST_S = 0.5
WORKER, LOADER, PROGRAM, FORK = "multiprocessing", "DataLoader", "program", "fork"


@dataclass
class _Child:
    """A process that the script started: its kind, its name ("fork", "gcc"), and its CPU seconds at the last
    reading."""

    kind: str
    name: str
    cpu_s: float = 0.0


class OtherProcesses:
    """While active (`with`), note the processes that this process starts. `said` and `cpu_s` are available afterwards.

    Attributes:
        children: the started processes, by process id.
        own_s, cpu_s: CPU seconds inside the block, of this process and of all processes that it started.
    """

    def __init__(self) -> None:
        self.children: dict[int, _Child] = {}
        self.own_s = self.cpu_s = 0.0
        self._around = ExitStack()
        self._done = threading.Event()
        self._watch: threading.Thread | None = None
        self._before = (0.0, 0.0)
        self._process = os.getpid()

    def __enter__(self) -> OtherProcesses:
        self._before = (time.process_time(), _waited_for_s())
        started = multiprocessing.process.BaseProcess.start
        self._around.enter_context(patch.object(multiprocessing.process.BaseProcess, "start", self._starting(started)))
        opened = subprocess.Popen.__init__
        self._around.enter_context(patch.object(subprocess.Popen, "__init__", self._opening(opened)))
        self._around.enter_context(patch.object(os, "fork", self._forking(os.fork)))
        return self

    def __exit__(self, *error: object) -> None:
        self._around.close()
        self._done.set()
        if self._watch is not None:
            self._watch.join()
        self._look()
        ended_s = _waited_for_s() - self._before[1]
        living_s = sum(child.cpu_s for pid, child in self.children.items() if psutil.pid_exists(pid))
        self.own_s = time.process_time() - self._before[0]
        self.cpu_s = max(ended_s + living_s, sum(child.cpu_s for child in self.children.values()))

    def _starting(self, original: Any) -> Any:
        @wraps(original)
        def start(process: Any, *args: Any, **kwargs: Any) -> Any:
            target = getattr(process, "_target", None)
            kind = LOADER if getattr(target, "__name__", "") == "_worker_loop" else WORKER
            result = original(process, *args, **kwargs)
            method = type(process).__name__.removesuffix("Process").lower() or multiprocessing.get_start_method()
            self._note(process.pid, _Child(kind, method))
            return result

        return start

    def _opening(self, original: Any) -> Any:
        @wraps(original)
        def __init__(process: Any, *args: Any, **kwargs: Any) -> None:
            original(process, *args, **kwargs)
            self._note(process.pid, _Child(PROGRAM, _program(process.args)))

        return __init__

    def _forking(self, original: Any) -> Any:
        @wraps(original)
        def fork() -> int:
            pid: int = original()
            self._note(pid, _Child(FORK, FORK))  # `multiprocessing` also forks; then `start` replaces this entry
            return pid

        return fork

    def _note(self, pid: int | None, child: _Child) -> None:
        if not pid or self._done.is_set() or os.getpid() != self._process:  # do not watch in a forked process
            return
        self.children[pid] = child
        if self._watch is None:
            self._watch = threading.Thread(target=self._keep_looking, name="rooftop processes", daemon=True)
            self._watch.start()

    def _keep_looking(self) -> None:
        while not self._done.wait(LOOK_EVERY_S):
            self._look()

    def _look(self) -> None:
        for pid, child in list(self.children.items()):
            try:
                process = psutil.Process(pid)
                if process.ppid() == os.getpid():  # a different parent means that the id now belongs to another process
                    child.cpu_s = max(child.cpu_s, sum(_cpu_s(each) for each in (process, *process.children(True))))
            except psutil.Error:
                continue

    @property
    def said(self) -> str:
        """A sentence about the work of other processes; "" if they did little work."""
        only_programs = all(child.kind == PROGRAM for child in self.children.values())
        if only_programs and self.cpu_s < max(LEAST_S, LEAST_SHARE * self.own_s):
            return ""
        groups: defaultdict[tuple[str, str], list[_Child]] = defaultdict(list)
        for child in self.children.values():
            groups[child.kind, child.name].append(child)
        parts = [_named(kind, name, group) for (kind, name), group in groups.items()] or ["other processes"]
        most = any(child.kind in (WORKER, FORK) for child in self.children.values()) and self.cpu_s > self.own_s
        return (
            f"{'Most of the work is in other processes: the' if most else 'The'} script started {'; '.join(parts)}. "
            f"Together they used {self.cpu_s:.1f} s of CPU time, this process {self.own_s:.1f} s. Their work is not "
            "in the report."
        )


def _named(kind: str, name: str, group: list[_Child]) -> str:
    count = len(group)
    seen_s = sum(child.cpu_s for child in group)
    time_said = f" ({seen_s:.1f} s of CPU time)" if seen_s >= 0.05 else ""
    plural = "es" if count > 1 else ""
    if kind == LOADER:
        return f"{counted(count, 'DataLoader worker')}{time_said}"
    if kind == WORKER:
        return f"{count} process{plural} of multiprocessing ({name}){time_said}"
    if kind == FORK:
        return f"{count} process{plural} by os.fork(){time_said}"
    return f"{count} process{plural} of {name}{time_said}"


def _program(arguments: Any) -> str:
    """The name of the program that `Popen` starts: the first word if its arguments are one string, otherwise the first
    argument."""
    if isinstance(arguments, (str, bytes)):
        return os.path.basename(os.fsdecode(arguments).partition(" ")[0])
    first = arguments if isinstance(arguments, os.PathLike) else next(iter(arguments), "")
    return os.path.basename(os.fsdecode(first))


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _waited_for_s() -> float:
    """CPU seconds of all child processes that have ended and were waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
