"""The plugin that runs the job in a Dask worker. The plugin loads the job once, at the first chunk, and runs one chunk
at a time.

On a GPU, a process beside the Dask worker computes chunks of photographs, clips and clouds: see `dask_processes`. With
the device "auto", only Rooftop's own models use a GPU in this way.
"""

from __future__ import annotations

import threading
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from distributed.diagnostics.plugin import WorkerPlugin

from rooftop.cluster.dask_processes import Done, ProcessBeside, division_beside
from rooftop.cluster.dask_tasks import CARRIERS
from rooftop.cluster.working import Ahead, Chunk, Job, Outcome, Workshop
from rooftop.errors import InputError

LOOK_S = 0.1


class Carrier(WorkerPlugin):
    """The plugin that carries a job to the workers and runs it there.

    Args:
        token: text that identifies the run.
        job: the pickled job.
        device: "cpu", "cuda" or "auto" (for Rooftop's own models, a GPU if there is one; for a callable, the CPU).
    """

    def __init__(self, token: str, job: bytes, device: str) -> None:
        self.token, self.job, self.device = token, job, device

    def setup(self, worker: Any) -> None:
        """Dask calls this in each worker, including workers that join later."""
        self._lock = threading.Lock()
        self._shop: Workshop | None = None
        self._beside: ProcessBeside | None = None
        self._address, self._threads = worker.address, worker.state.nthreads
        CARRIERS[self.token] = self

    def teardown(self, worker: Any) -> None:
        """Dask calls this when the run or the worker ends."""
        if self._beside is not None:
            self._beside.close()
        if self._shop is not None:
            self._shop.pool.shutdown(wait=False, cancel_futures=True)
        CARRIERS.pop(self.token, None)

    def do(self, chunk: Chunk) -> Done:
        """Compute a chunk and return its outcome. If items took too long, abandon their thread or process, and return
        (first, count) of these items. If the process beside this worker ended, return the reason.

        Raises:
            InputError: the device is "cuda", and this machine has no GPU.
        """
        with self._lock:
            if self._beside is None and self._shop is None:
                self._begin()
            if self._beside is None:
                return self._done_here(chunk)
        done = self._beside.do(chunk)
        # every Dask worker's helper process reports as "process 0", but the run counts workers by their addresses
        return replace(done, worker=self._address) if isinstance(done, Outcome) else done

    def _begin(self) -> None:
        import cloudpickle

        job: Job = cloudpickle.loads(self.job)
        device = self.device
        if device == "auto":
            device = _usual_device() if job.target.prepare is not None else "cpu"
        elif device == "cuda" and _usual_device() != "cuda":
            raise InputError(f"device is cuda, but torch finds no GPU on the worker {self._address}: use cpu or auto")
        division = division_beside(job, device, self._threads)
        if division is not None:
            self._beside = ProcessBeside(job, division)
        else:
            self._shop = Workshop(replace(job, threads=max(1, self._threads)), device, self._address)

    def _done_here(self, chunk: Chunk) -> Outcome | tuple[int, int]:
        shop = self._shop
        assert shop is not None
        given = [chunk.items]
        ahead = shop.ahead(lambda: given.pop() if given else None)
        if shop.job.timeout_s is None:
            return shop.do(chunk, ahead, lambda chunk, first, count: nullcontext())
        late = _Watched(shop, chunk, ahead).run(shop.job.timeout_s)
        if not isinstance(late, Outcome):
            self._shop = None  # recreate the target, because its state is unknown
        return late


def _usual_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


class _Watched(AbstractContextManager[None]):
    """A chunk of items that one thread computes, while the calling thread checks that no batch exceeds the time
    limit."""

    def __init__(self, shop: Workshop, chunk: Chunk, ahead: Ahead) -> None:
        self._shop, self._chunk, self._ahead = shop, chunk, ahead
        self._at: tuple[int, int, float] | None = None
        self._found: Outcome | BaseException | None = None

    def run(self, timeout_s: float) -> Outcome | tuple[int, int]:
        thread = threading.Thread(target=self._do, daemon=True, name="rooftop-call")
        thread.start()
        while thread.is_alive():
            thread.join(LOOK_S)
            at = self._at
            if at is not None and time.monotonic() - at[2] > timeout_s and thread.is_alive():
                return at[:2]
        if isinstance(self._found, BaseException):
            raise self._found
        assert self._found is not None
        return self._found

    def _do(self) -> None:
        try:
            self._found = self._shop.do(self._chunk, self._ahead, self._begin)
        except BaseException as error:
            self._found = error

    def _begin(self, chunk: Chunk, first: int, count: int) -> _Watched:
        self._at = first, count, time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self._at = None
