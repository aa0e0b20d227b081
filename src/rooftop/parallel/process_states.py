"""Processes as seen by other processes of the same machine: running, stopped or gone."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

ALIVE, STOPPED, GONE = "alive", "stopped", "gone"
OOM_KILLS = Path("/proc/vmstat")
"""The line oom_kill of this file counts processes that the kernel has killed for lack of memory."""


@dataclass(frozen=True)
class Process:
    """A process.

    Attributes:
        machine: machine and process namespace: containers on one machine count separately.
        number: its PID.
        began: start of the process, in ticks since the machine started; needed because PIDs are reused. 0: unknown.
        parent: PID of the process that started it.
    """

    machine: str
    number: int
    began: int
    parent: int = 0

    @classmethod
    def here(cls) -> Process:
        found = _stat(os.getpid())
        if found is None:  # no /proc
            return cls(f"{socket.gethostname()} {os.getpid()}", os.getpid(), 0, os.getppid())
        namespace = os.readlink("/proc/self/ns/pid")
        return cls(f"{socket.gethostname()} {namespace}", os.getpid(), found[1], os.getppid())

    def state(self) -> str:
        """ALIVE, STOPPED (by a signal; not by a debugger) or GONE; only for a process on this machine."""
        found = _stat(self.number)
        if found is None or found[1] != self.began or found[0] in "ZXx":
            return GONE
        return STOPPED if found[0] == "T" else ALIVE


def _stat(number: int) -> tuple[str, int] | None:
    """(state, start); None: there is no such process."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    parts = text.rpartition(")")[2].split()  # the name before may contain any character
    return parts[0], int(parts[19])


def oom_kills() -> int:
    """The number of processes that this machine's kernel has killed for lack of memory; 0 if unknown."""
    try:
        lines = OOM_KILLS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
