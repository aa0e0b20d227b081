"""Ways in which a loader makes batches: in the training loop, in threads, or (`loader_processes.py`) in processes.

`begin` starts the work on a batch, and `take` returns the finished batch. Batches are taken in the order in which they
were begun.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from typing import Protocol

from rooftop.data.pieces import Job, Made, joined
from rooftop.thread_pools import ThreadPool


class Way(Protocol):
    """Makes the batches that a `Job` describes. At most `in_flight` batches may be begun and not yet taken. `begin`
    starts the work on batch `number` of an epoch."""

    in_flight: int

    def begin(self, epoch: int, number: int) -> None: ...

    def take(self, pin: bool) -> Made:
        """Return the oldest batch that was begun and not yet taken. If `pin` is True, its tensors are in pinned
        memory."""

    def interrupt(self) -> None:
        """Make a waiting `take` in another thread raise an exception. Afterwards no batch can be taken."""

    def close(self) -> None:
        """Stop all work, and release the threads or processes. Before this call, every `take` in another thread must
        have ended (see `interrupt`)."""


class Here:
    """Makes each batch in the thread that calls `take`."""

    in_flight = 1

    def __init__(self, job: Job) -> None:
        self._job = job
        self._begun: deque[tuple[int, int]] = deque()

    def begin(self, epoch: int, number: int) -> None:
        self._begun.append((epoch, number))

    def take(self, pin: bool) -> Made:
        epoch, number = self._begun.popleft()
        return joined([self._job.make(epoch, number, piece) for piece in range(self._job.pieces)], pin)

    def interrupt(self) -> None:
        pass

    def close(self) -> None:
        self._begun.clear()


class Threads:
    """Makes batches in a pool of threads. The threads run in parallel while the code that makes samples releases the
    GIL, as Pillow and NumPy do."""

    def __init__(self, job: Job, workers: int, ahead: int) -> None:
        self._job = job
        self.in_flight = batches_in_flight(job, workers, ahead)
        self._pool = ThreadPool(workers, "rooftop-loader")
        self._begun: deque[list[Future[Made]]] = deque()

    def begin(self, epoch: int, number: int) -> None:
        pieces = range(self._job.pieces)
        self._begun.append([self._pool.submit(self._job.make, epoch, number, piece) for piece in pieces])

    def take(self, pin: bool) -> Made:
        return joined([future.result() for future in self._begun.popleft()], pin)

    def interrupt(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def batches_in_flight(job: Job, workers: int, ahead: int) -> int:
    """The number of batches to have in flight (begun and not yet taken). This is `ahead`, or more if `ahead` batches
    have fewer pieces than there are workers."""
    return max(ahead, -(-workers // job.pieces))
