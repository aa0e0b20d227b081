"""Handle SIGTERM at once in a thread, even while the main thread is inside a collective or a kernel launch.

A launcher sends SIGTERM to all ranks as soon as one rank dies. By default, the signal ends a process immediately,
before the process can report which rank has died. Within `heard_by_a_thread`, the process keeps running, and the thread
that reads `Termination` decides what to do.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field


@dataclass
class Termination:
    """Records whether this process has been asked to end by SIGTERM.

    Attributes:
        handler: Rooftop's handler of SIGTERM, which does nothing. None: `heard_by_a_thread` installed none, because the
            program has a handler of its own, or because the block has no effect.
    """

    handler: object = None
    _ears: socket.socket | None = None
    _heard: bool = field(default=False)

    @property
    def asked(self) -> bool:
        """Whether this process has been asked to end: whether SIGTERM has arrived. All calls must be in one thread."""
        if self._ears is not None and not self._heard:
            with suppress(BlockingIOError):
                self._heard = signal.SIGTERM in self._ears.recv(4096)
        return self._heard

    @property
    def ours(self) -> bool:
        """Whether SIGTERM still has Rooftop's handler, and no other part of the program handles it."""
        return self.handler is not None and signal.getsignal(signal.SIGTERM) is self.handler


_active: list[Termination] = []


@contextmanager
def heard_by_a_thread() -> Iterator[Termination]:
    """Within the block, SIGTERM only sets the `Termination`. If the program has installed a handler, Python calls this
    handler as well.

    Outside the main thread, or if the program already has a wakeup file descriptor for signals (as asyncio does), the
    block has no effect.
    """
    termination = Termination()
    if threading.current_thread() is not threading.main_thread():
        yield termination
        return
    ears, mouth = socket.socketpair()
    ears.setblocking(False)
    mouth.setblocking(False)
    before = signal.set_wakeup_fd(mouth.fileno(), warn_on_full_buffer=False)
    if before != -1:
        signal.set_wakeup_fd(before)
        ears.close()
        mouth.close()
        yield termination
        return
    termination._ears = ears
    default = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if default:
        termination.handler = lambda number, frame: None
        signal.signal(signal.SIGTERM, termination.handler)  # type: ignore[arg-type]
    _active.append(termination)
    try:
        yield termination
    finally:
        _active.remove(termination)
        signal.set_wakeup_fd(-1)
        if default and termination.ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ears.close()
        mouth.close()


def _wait_for_the_fork() -> None:
    if _active:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _go_on() -> None:
    if _active:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _as_before() -> None:
    """In a forked process, such as a DataLoader worker, remove Rooftop's handler of SIGTERM. A SIGTERM to the forked
    process then ends it as usual, and does not set the parent's `Termination`."""
    for termination in _active:
        signal.set_wakeup_fd(-1)
        if termination.ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _go_on()
    _active.clear()


os.register_at_fork(before=_wait_for_the_fork, after_in_parent=_go_on, after_in_child=_as_before)
