"""Ways to make batches: in the training loop, by threads, or (`loader_processes.py`) by processes.

A batch is begun, then taken; batches are taken in the order in which they were begun.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from rooftop.data.pieces import Job, Made, joined


class Way(Protocol):
    """Makes the batches of a job. `in_flight` is the number of batches that may be begun but not yet taken."""

    in_flight: int

    def begin(self, epoch: int, number: int) -> None: ...

    def take(self, pin: bool) -> Made:
        """Return the batch that was begun first; `pin` as in `joined`."""

    def interrupt(self) -> None:
        """End a `take` that waits in another thread, with an exception. Nothing can be taken afterwards."""

    def close(self) -> None:
        """Stop and release everything. Call this once no other thread takes a batch."""


class Here:
    """Makes a batch when it is taken."""

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
    """Makes batches by a pool of threads. Threads help if samples release the GIL, as Pillow and NumPy do."""

    def __init__(self, job: Job, workers: int, ahead: int) -> None:
        self._job = job
        self.in_flight = batches_in_flight(job, workers, ahead)
        self._pool = ThreadPoolExecutor(workers, "rooftop-loader")
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
    """At least as many batches as keep all workers busy."""
    return max(ahead, -(-workers // job.pieces))
