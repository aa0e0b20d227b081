"""A worker process beside a Dask worker on a GPU, with decoding processes of its own.

    beside = ProcessBeside(job, division_beside(job, "cuda", threads=16))
    beside.do(chunk)                        # by any thread; the next chunk is decoded meanwhile
    beside.close()

Threads of the Dask worker would all decode under one lock of Python. The process is one of `LocalWorkers`, so it works
as on a single machine, and if an item ends it, the Dask worker stays.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize

from rooftop.cluster.events import Event, Finished, Hung, Lost
from rooftop.cluster.items import DECODED
from rooftop.cluster.local_workers import Division, LocalWorkers, divide
from rooftop.cluster.working import Chunk, Job, Outcome
from rooftop.errors import ModelRunError

LOOK_S = 0.02  # between two looks for new chunks

Done = Outcome | tuple[int, int] | str
"""What became of a chunk: its outcome; (first, count) of the items that took too long; why its process ended."""


def division_beside(job: Job, device: str, threads: int) -> Division | None:
    """How the process uses the machine; None if the Dask worker does the work itself.

    Args:
        threads: of the Dask worker, which are the cores that its user gave it.
    """
    if device != "cuda" or threads < 2 or job.decoding.kind not in DECODED:
        return None
    return divide(device, 1, decodes=True, decoders=threads)


@dataclass
class _Asked:
    """A chunk that a thread waits for."""

    chunk: Chunk
    done: Future[Done]


class ProcessBeside:
    """The process.

    Args:
        division: of one worker.
    """

    def __init__(self, job: Job, division: Division) -> None:
        threads = division.decoders or division.decode_threads
        self._job, self._division = replace(job, threads=threads, processes=division.decoders > 0), division
        self._inbox: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rooftop-beside")
        self._thread.start()
        # at the exit of the Dask worker, before multiprocessing waits for the process
        self._at_exit = Finalize(None, self._end, exitpriority=1)

    def do(self, chunk: Chunk) -> Done:
        """Do a chunk.

        Raises:
            ModelRunError, MissingExtraError, InputError: the process reported it, or was closed.
        """
        asked = _Asked(chunk, Future())
        self._inbox.put(asked)
        while not wait([asked.done], timeout=1.0).done:  # `result` cannot tell its timeout from a TimeoutError within
            if not self._thread.is_alive() and not asked.done.done():
                raise self._error or ModelRunError("the run has ended")
        return asked.done.result()

    def close(self) -> None:
        """End the process. Threads that wait for chunks get an error."""
        self._at_exit()

    def _end(self) -> None:
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        begun: list[_Asked] = []
        waiting: deque[_Asked] = deque()
        workers: LocalWorkers | None = None
        try:
            workers = LocalWorkers(self._job, self._division)
            while not self._closed.is_set():
                while not self._inbox.empty():
                    waiting.append(self._inbox.get())
                while waiting and workers.has_room(waiting[0].chunk.careful):
                    begun.append(waiting.popleft())
                    workers.give(begun[-1].chunk)
                for event in workers.take(LOOK_S):
                    place = next(number for number, asked in enumerate(begun) if asked.chunk is event.chunk)
                    asked = begun.pop(place)
                    if isinstance(event, Lost) and event.why is None:  # another chunk ended the process
                        waiting.appendleft(asked)
                    else:
                        asked.done.set_result(_done(event))
        except BaseException as error:
            self._error = error
        finally:
            if workers is not None:
                workers.close(at_once=True)
            for asked in (*begun, *waiting):
                asked.done.set_exception(self._error or ModelRunError("the run has ended"))


def _done(event: Event) -> Done:
    if isinstance(event, Finished):
        return event.outcome
    if isinstance(event, Hung):
        return event.first, event.count
    return str(event.why)
