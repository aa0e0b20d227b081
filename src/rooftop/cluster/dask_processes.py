"""A worker process that runs beside a Dask worker on a GPU, and has its own decoding processes.

    beside = ProcessBeside(job, division_beside(job, "cuda", threads=16))
    beside.do(chunk)                        # callable from any thread; the next chunk is decoded meanwhile
    beside.close()

Decoding threads of the Dask worker would share one GIL. The process is a worker of `LocalWorkers`, so it works as on a
single machine. If an item ends the process, the Dask worker survives.
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

LOOK_S = 0.02  # seconds between checks for new chunks

Done = Outcome | tuple[int, int] | str
"""The result of a chunk: the chunk's outcome, or (first, count) of the items that took too long, or the reason why the
process ended.
"""


def division_beside(job: Job, device: str, threads: int) -> Division | None:
    """The cores and GPU of the process beside a Dask worker. None if the Dask worker does the work itself: on a CPU,
    with a single thread, or for items that need no decoding.

    Args:
        threads: number of threads of the Dask worker, which is the number of cores that the user gave the worker.
    """
    if device != "cuda" or threads < 2 or job.decoding.kind not in DECODED:
        return None
    return divide(device, 1, decodes=True, decoders=threads)


@dataclass
class _Asked:
    """A chunk of items that was sent to the process, and the future of its result, for which a thread waits."""

    chunk: Chunk
    done: Future[Done]


class ProcessBeside:
    """The worker process beside this Dask worker.

    Args:
        division: the cores and GPU of the process (`division_beside`).
    """

    def __init__(self, job: Job, division: Division) -> None:
        threads = division.decoders or division.decode_threads
        self._job, self._division = replace(job, threads=threads, processes=division.decoders > 0), division
        self._inbox: queue.SimpleQueue[_Asked] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="rooftop-beside")
        self._thread.start()
        # runs when the Dask worker exits, before multiprocessing joins the helper process
        self._at_exit = Finalize(None, self._end, exitpriority=1)

    def do(self, chunk: Chunk) -> Done:
        """Compute a chunk in the process, and wait for the result.

        Raises:
            ModelRunError, MissingExtraError, InputError: the process reported this error.
            ModelRunError: `close` has ended the process.
        """
        asked = _Asked(chunk, Future())
        self._inbox.put(asked)
        while not wait([asked.done], timeout=1.0).done:  # not `result(1.0)`: a chunk may raise TimeoutError, too
            if not self._thread.is_alive() and not asked.done.done():
                raise self._error or ModelRunError("the run has ended")
        return asked.done.result()

    def close(self) -> None:
        """End the process. Threads that wait in `do` for a result get an error."""
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
                    if isinstance(event, Lost) and event.why is None:  # not the cause: another chunk ended the process
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
