"""Query whether another process on this machine is running, stopped by a signal, or gone."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

ALIVE, STOPPED, GONE = "alive", "stopped", "gone"
OOM_KILLS = Path("/proc/vmstat")
"""In this file, the line oom_kill counts processes that the Linux kernel has killed for lack of memory."""


@dataclass(frozen=True)
class Process:
    """Identifies a process, even if its PID is reused.

    Attributes:
        machine: the machine and process namespace. Containers on one machine count as different machines.
        number: the PID.
        began: start time of the process, in ticks since the machine started; it distinguishes reused PIDs. 0: unknown.
        parent: PID of the parent process.
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
        """ALIVE, STOPPED (by a signal, not by a debugger) or GONE. The process must be on this machine."""
        found = _stat(self.number)
        if found is None or found[1] != self.began or found[0] in "ZXx":
            return GONE
        return STOPPED if found[0] == "T" else ALIVE


def _stat(number: int) -> tuple[str, int] | None:
    """Read (state letter, start in ticks since the machine started) of the process with the PID `number`; None if there
    is no such process."""
    try:
        text = Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return None
    parts = text.rpartition(")")[2].split()  # skips the process's name, which may contain any character
    return parts[0], int(parts[19])


def oom_kills() -> int:
    """The number of processes that the Linux kernel has killed for lack of memory since this machine started; 0 if
    unknown."""
    try:
        lines = OOM_KILLS.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
