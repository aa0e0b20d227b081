"""The workers of a Dask scheduler.

Each worker gets the job and its model once, as a Dask plugin; new workers get both when they join. Each chunk is a
task. At most two chunks per worker, on average, are unfinished. If a worker is lost, Dask repeats its tasks on another
worker. If several workers died with a task, Dask reports the task as failed, and `map_items` repeats the task's chunk
item by item. If the scheduler goes away, this process tries to reconnect for `RECONNECT_S`. A new scheduler at the same
address gets the job and the unfinished chunks again.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from types import ModuleType
from typing import Any

from rooftop.cluster.dask_tasks import do_chunk
from rooftop.cluster.events import Event, Finished, Hung, Lost
from rooftop.cluster.working import Chunk, Job, Outcome
from rooftop.errors import MissingExtraError, ModelRunError, RooftopError, SchedulerError
from rooftop.words import whole_message

CHUNKS_OF_A_WORKER = 2
CONNECT_S = 10.0
RECONNECT_S = 120.0
LOOK_S = 1.0  # seconds between two queries of the number of workers
ANSWER_S = 2.0  # timeout of a query in seconds; without this timeout, a query to a lost scheduler takes CONNECT_S
ALONE_S = 10.0  # seconds without a worker before a message reports this
REMEDY = "install the same version of rooftop and its packages on each machine"


def load_distributed() -> ModuleType:
    """Return the module `distributed`.

    Raises:
        MissingExtraError: Dask is not installed.
    """
    try:
        import distributed
    except ImportError as error:
        raise MissingExtraError('using a scheduler needs Dask: pip install "rooftop[cluster]"') from error
    module: ModuleType = distributed
    return module


class DaskWorkers:
    """The workers of the Dask scheduler at an address.

    Args:
        device: "cpu", "cuda" or "auto", as in `Carrier`. A user's callable may use any device.
        say: called with a line of text when the scheduler is gone or has no workers.

    Raises:
        MissingExtraError: Dask is not installed.
        SchedulerError: no scheduler answers at the address.
        ModelRunError: a worker cannot receive the job, because it has another version of rooftop or none.
        TargetError: the target cannot be sent.
    """

    def __init__(self, address: str, job: Job, device: str, say: Callable[[str], None]) -> None:
        self._distributed = load_distributed()
        import cloudpickle

        self._address, self._say = address, say
        self.start: dict[str, float] = {}
        self._token = uuid.uuid4().hex
        self._job = cloudpickle.dumps(replace(job, target=job.target.sent()))
        self._device = device
        self._flying: dict[str, tuple[Chunk, Any]] = {}
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._workers, self._looked = 0, 0.0
        self._alone_since: float | None = None
        try:
            self._client = self._connected(CONNECT_S)
        except (OSError, ValueError) as error:
            raise SchedulerError(
                f"no Dask scheduler answers at {address} ({_line(error)}): expected the address that `dask scheduler` "
                "shows, such as tcp://10.0.0.1:8786"
            ) from error

    def _connected(self, timeout_s: float) -> Any:
        self._check_address()
        client = self._distributed.Client(self._address, timeout=timeout_s, set_as_default=False)
        try:
            client.register_plugin(carrier_class()(self._token, self._job, self._device), name=f"rooftop-{self._token}")
        except BaseException as error:
            with suppress(Exception):
                client.close(timeout=1)
            if not isinstance(error, Exception) or isinstance(error, (OSError, ValueError, RuntimeError)):
                raise
            raise ModelRunError(
                f"a worker of the scheduler cannot receive the job ({_line(error)}): {REMEDY}"
            ) from error
        return client

    def _check_address(self) -> None:
        """Check the address before a client is created, since a client with a wrong address prints a traceback, and
        waits for 20 s when it is deleted.

        Raises:
            OSError, ValueError: no client can be created for the address.
        """
        distributed = self._distributed
        distributed.comm.resolve_address(self._address)
        encrypted = self._address.startswith(("tls://", "wss://"))
        if encrypted and not distributed.Security().get_connection_args("client").get("ssl_context"):
            raise ValueError("encryption needs certificates: give them in Dask's configuration, distributed.comm.tls")

    # ---- chunks ------------------------------------------------------------------------------------------------------

    def has_room(self, careful: bool = False) -> bool:
        """Whether workers have fewer than two chunks on average. While a careful chunk (an item that may kill workers)
        runs, no other chunk may run."""
        if careful or any(chunk.careful for chunk, _ in self._flying.values()):
            return not self._flying and self._count() > 0
        return len(self._flying) < CHUNKS_OF_A_WORKER * self._count()

    def _count(self) -> int:
        now = time.monotonic()
        if self._client.status == "running" and now - self._looked > LOOK_S:
            with suppress(OSError, RuntimeError, ValueError):  # `take` will report the error
                self._workers = len(self._client.nthreads(callback_timeout=ANSWER_S))
            self._looked = now
            if self._workers:
                self._alone_since = None
            elif self._alone_since is None:
                self._alone_since = now
            elif now - self._alone_since > ALONE_S:
                self._say(f"the scheduler at {self._address} has no workers; waiting for some")
                self._alone_since = float("inf")
        return self._workers

    def give(self, chunk: Chunk) -> None:
        """Send a chunk to the scheduler as a task."""
        key = f"rooftop-{self._token}-{chunk.number}-{uuid.uuid4().hex[:8]}"
        try:
            future = self._client.submit(do_chunk, self._token, chunk, key=key, pure=False)
        except (OSError, RuntimeError, ValueError):  # the connection to the scheduler has just been lost
            self._flying[key] = (chunk, None)
            self._done.put(key)
            return
        self._flying[key] = (chunk, future)
        future.add_done_callback(lambda done: self._done.put(done.key))

    def take(self, patience_s: float) -> list[Event]:
        """Wait for new events and return them. After `patience_s` without any, return an empty list.

        Raises:
            SchedulerError: the scheduler went away and did not come back.
            ModelRunError, MissingExtraError, InputError: a worker reported this error.
        """
        if self._client.status != "running":
            return self._after_reconnecting()
        keys: list[str] = []
        with suppress(queue.Empty):
            keys.append(self._done.get(timeout=patience_s))
            while True:
                keys.append(self._done.get_nowait())
        events: list[Event] = []
        for key in keys:
            if key not in self._flying:
                continue
            chunk, future = self._flying.pop(key)
            event = self._event(chunk, future)
            if event is None:  # the scheduler does not know the task
                self._flying[key] = (chunk, future)
                return events + self._after_reconnecting()
            events.append(event)
        return events

    def _event(self, chunk: Chunk, future: Any) -> Event | None:
        """Return how a chunk ended (finished, lost or hung) whose task Dask reports as done. Return None if the
        scheduler does not know the task."""
        if future is None or future.status in ("cancelled", "lost", "pending"):
            return None
        if future.status == "error":
            error = future.exception()
            if isinstance(error, self._distributed.scheduler.KilledWorker):
                return Lost(chunk, "several workers of the scheduler ended", deaths=2)
            if isinstance(error, (RooftopError, MissingExtraError)):
                raise error
            remedy = f" ({REMEDY})" if isinstance(error, ImportError) else ""
            said = f"{type(error).__name__}: {_line(error)}{remedy}"
            raise ModelRunError(f"a worker of the scheduler failed: {said}") from error
        try:
            found = future.result(timeout=CONNECT_S)
        except (OSError, RuntimeError, ValueError) as error:
            if isinstance(error, RooftopError):
                raise
            return None
        except Exception as error:
            if "Cancelled" in type(error).__name__:  # CancelledError, or Dask's FutureCancelledError
                return None
            raise
        if isinstance(found, Outcome):
            return Finished(chunk, found)
        return Lost(chunk, found) if isinstance(found, str) else Hung(chunk, *found)

    def _after_reconnecting(self) -> list[Event]:
        """Reconnect, and report all unfinished chunks as lost. None of these chunks counts as the cause of its loss."""
        self._say(f"the scheduler at {self._address} is gone; trying to reach it for {RECONNECT_S:.0f} s")
        with suppress(Exception):
            self._client.close(timeout=1)
        until = time.monotonic() + RECONNECT_S
        while True:
            try:
                self._client = self._connected(max(1.0, min(CONNECT_S, until - time.monotonic())))
                break
            except (OSError, ValueError, RuntimeError) as error:
                if time.monotonic() > until:
                    raise SchedulerError(
                        f"the scheduler at {self._address} did not come back within {RECONNECT_S:.0f} s: "
                        "finished results are kept, and the same command continues the work"
                    ) from error
                time.sleep(0.5)
        self._say(f"the scheduler at {self._address} is back")
        self._looked = 0.0
        lost: list[Event] = [Lost(chunk, None) for chunk, _ in self._flying.values()]
        self._flying.clear()
        return lost

    def close(self, at_once: bool = False) -> None:
        """Cancel unfinished chunks, remove the job from the workers, and disconnect from the scheduler. `at_once` has
        no effect."""
        with suppress(Exception):
            futures = [future for _, future in self._flying.values() if future is not None]
            if futures:
                self._client.cancel(futures, force=True)
            if self._client.status == "running":
                self._client.unregister_worker_plugin(f"rooftop-{self._token}")
        with suppress(Exception):
            self._client.close(timeout=2)


def carrier_class() -> Any:
    """Return the class of the worker plugin, a subclass of Dask's plugin class. Only this function imports Dask's
    plugin class."""
    from rooftop.cluster.dask_plugin import Carrier

    return Carrier


def _line(error: BaseException | None) -> str:
    return whole_message(error)[:300] or type(error).__name__
