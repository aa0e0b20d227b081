"""Handle SIGTERM as a request to save and stop. Schedulers send SIGTERM when a job's time is over.

with stop_on_sigterm() as stop:
    while not stop.requested:
        ...

A second SIGTERM has no effect: torchrun forwards SIGTERM, and a scheduler may already have sent it to each process.
SIGKILL ends a process immediately; even then the last checkpoint is complete.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STOPPED_STATUS = 128 + signal.SIGTERM
"""The exit status of a process that SIGTERM ended, as shells, Kubernetes and SLURM show it."""
INTERRUPTED_STATUS = 128 + signal.SIGINT
"""The exit status of a process that Ctrl-C ended."""


@dataclass
class Stop:
    """Whether this process was asked to end its training.

    Attributes:
        by: source of the request: "SIGTERM", "Ctrl-C", or "" for the program itself.
    """

    requested: bool = False
    by: str = ""


@contextmanager
def stop_on_sigterm() -> Iterator[Stop]:
    """Within the block, SIGTERM only sets `requested`.

    Outside the main thread the block has no effect, because only the main thread handles signals.
    """
    with _stopping_on({signal.SIGTERM: "SIGTERM"}) as stop:
        yield stop


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Within the block, SIGTERM and the first Ctrl-C only set `requested`. A second Ctrl-C interrupts immediately.

    A rank also gets SIGINT when its launcher dies, because torchrun requests this signal from the kernel. This SIGINT
    also interrupts immediately: the rank fails, and the other ranks report the failure.
    """
    with _stopping_on({signal.SIGTERM: "SIGTERM", signal.SIGINT: "Ctrl-C"}) as stop:
        yield stop


@contextmanager
def _stopping_on(names: dict[signal.Signals, str]) -> Iterator[Stop]:
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    launcher = os.getppid()

    def request(number: int, frame: object) -> None:
        if number == signal.SIGINT and (stop.by == "Ctrl-C" or os.getppid() != launcher):
            raise KeyboardInterrupt
        stop.requested, stop.by = True, stop.by or names[signal.Signals(number)]

    before = {number: signal.signal(number, request) for number in names}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
