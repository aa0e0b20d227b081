"""SIGTERM as a request to save and stop, which is how schedulers announce that a job's time is over.

with stop_on_sigterm() as stop:
    while not stop.requested:
        ...

A second SIGTERM changes nothing: torchrun hands on what a scheduler may have sent to each process already. What must
not wait is ended by SIGKILL, and the last checkpoint is whole even then.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

STOPPED_STATUS = 128 + signal.SIGTERM
"""The exit status of a process that SIGTERM has ended, as shells, Kubernetes and SLURM show it."""


@dataclass
class Stop:
    """Whether this process was asked to stop."""

    requested: bool = False


@contextmanager
def stop_on_sigterm() -> Iterator[Stop]:
    """Within: SIGTERM sets `requested`, and does nothing else. Outside the main thread, which alone hears signals,
    nothing is changed."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def request(number: int, frame: object) -> None:
        stop.requested = True

    before = signal.signal(signal.SIGTERM, request)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)
