"""Worker processes on this machine: one per GPU, or several that share the CPU's cores.

A worker has two chunks: it computes one chunk while it decodes items of the other chunk. If a worker has decoding
processes and its chunks are small, the worker gets more than two chunks, so that every process has work.

On a GPU, a worker has its own decoding processes. A decoding thread would hold the GIL for 0.2 of the 1.7 ms that a
photograph of 500 x 375 pixels takes, so threads would reach only about 4,000 photographs a second. A worker writes to
shared memory which items it works on and since when. So the parent knows these items when a worker process dies, or
when the parent kills the process because an item takes too long. A new process then replaces the worker process.

A thread of the parent sends the job to a worker through its pipe. The job is not passed as a process argument: an
argument larger than a pipe (64 KiB) would make the parent wait until the process has imported torch, before it starts
the next process.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rooftop.cluster.events import Event, Finished, Hung, Lost
from rooftop.cluster.items import Item
from rooftop.cluster.working import Chunk, Job, Workshop
from rooftop.errors import MissingExtraError, ModelRunError, RooftopError
from rooftop.hardware.cpus import usable_cpus
from rooftop.words import whole_message

if TYPE_CHECKING:
    from rooftop.cluster.decoders import Decoders

CHUNKS_OF_A_WORKER = 2
# A worker gets more than CHUNKS_OF_A_WORKER chunks if it has fewer items (or clips) than this for each of its decoding
# processes. The number of clips is larger because a decoding process gets 16 successive clips of a video at once.
ITEMS_OF_A_DECODER, CLIPS_OF_A_DECODER = 16, 48
CORES_OF_A_WORKER = 4  # on the CPU
MOST_STARTS = 3  # the run fails if this many starts in a row fail
MOST_THREADS = 16  # maximum decoding threads of a worker, each of which may hold a whole photograph
MOST_DECODERS = 32  # maximum decoding processes of a worker
CORES_OF_TORCH = 4  # in a worker with decoding processes, torch gets one thread per this many cores
SWITCH_S = 0.0002  # maximum seconds that a worker's thread waits for the GIL, so that decoding threads run often
PATIENCE_S = 5.0  # seconds that a worker gets to exit by itself


@dataclass(frozen=True)
class Division:
    """How workers divide a machine: their number, their threads and processes, the device and the GPUs.

    Attributes:
        decoders: decoding processes per worker; 0: the worker decodes by `decode_threads`.
    """

    workers: int
    decode_threads: int
    torch_threads: int
    device: str
    gpus: tuple[str, ...] = ()
    decoders: int = 0


def divide(device: str, workers: int | None, decodes: bool = False, decoders: int | None = None) -> Division:
    """Divide this machine among workers.

    Args:
        device: "cpu", "cuda", or "auto" (the GPUs, if there are any).
        workers: number of workers. None: one per GPU, or one per four cores on the CPU, and at least two if there are
            two cores.
        decodes: whether items are files that must be decoded.
        decoders: decoding processes per worker. None: on a GPU, one per core of the worker's share, at most 32, or none
            if the share is one core; none on the CPU, where the target itself needs the cores. 0: threads decode.
    """
    cores = usable_cpus()
    gpus = _gpus() if device != "cpu" else 0
    names: list[str] = []
    if gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [each.strip() for each in visible.split(",")] if visible else list(map(str, range(gpus)))
        workers = workers or gpus
    workers = workers or max(1, cores // CORES_OF_A_WORKER, min(2, cores))
    share = max(1, cores // workers)
    if not decodes:
        decoders = 0
    elif decoders is None:
        decoders = min(MOST_DECODERS, share) if gpus and share > 1 else 0
    return Division(
        workers,
        min(MOST_THREADS, share),
        max(1, share // CORES_OF_TORCH) if decoders else share,
        "cuda" if gpus else "cpu",
        tuple(names[number % gpus] for number in range(workers)) if gpus else (),
        decoders,
    )


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


class LocalWorkers:
    """Worker processes on this machine.

    Args:
        job: the work.
        division: how the workers divide the machine.
    """

    def __init__(self, job: Job, division: Division) -> None:
        self.job, self.division = job, division
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self._events: deque[Event] = deque()
        self.start: dict[str, float] = {}  # seconds of each part of the slowest worker's start
        try:
            for number in range(division.workers):
                self._workers.append(_Worker(job, division, number))
        except BaseException:
            self.close(at_once=True)
            raise

    def has_room(self, careful: bool = False) -> bool:
        """Whether a worker can take another chunk.

        A worker can take another chunk if it has fewer than two chunks, or too few items to keep its decoding processes
        busy. It can take a careful chunk (an item that may kill workers) if it has no chunk.
        """
        return self._freest(careful) is not None

    def _freest(self, careful: bool) -> _Worker | None:
        """Of the workers that can take another chunk (see `has_room`), the one with the fewest chunks, or None."""
        most = 0 if careful else CHUNKS_OF_A_WORKER - 1
        clips = self.job.decoding.kind == "clip"
        least = 0 if careful else (CLIPS_OF_A_DECODER if clips else ITEMS_OF_A_DECODER) * self.division.decoders
        free = [
            each
            for each in self._workers
            if each.ready
            and (len(each.chunks) <= most or sum(len(chunk.items) for chunk in each.chunks) < least)
            and not any(chunk.careful for chunk in each.chunks)
        ]
        return min(free, key=lambda each: len(each.chunks), default=None)

    def give(self, chunk: Chunk) -> None:
        """Give a chunk to the worker that has the fewest chunks. `has_room` must be true."""
        worker = self._freest(chunk.careful)
        assert worker is not None
        worker.give(chunk)

    def take(self, patience_s: float) -> list[Event]:
        """Wait for new events and return them. After `patience_s` without any, return an empty list.

        Raises:
            RooftopError: a worker reported this error; an error of another type becomes a ModelRunError.
            ModelRunError: `MOST_STARTS` workers in a row ended while they started.
        """
        by_handle = {worker.connection: worker for worker in self._workers}
        by_sentinel = {worker.process.sentinel: worker for worker in self._workers}
        ready = wait([*by_handle, *by_sentinel], patience_s)
        for worker in list(self._workers):
            if worker.connection in ready or worker.process.sentinel in ready:
                self._read(worker)
        for worker in list(self._workers):
            if (stuck := worker.stuck(self.job.timeout_s)) is not None:
                self._end_stuck(worker, *stuck)
        found = list(self._events)
        self._events.clear()
        return found

    def _read(self, worker: _Worker) -> None:
        """Read all messages of a worker. If the worker has ended, start another one."""
        ended = not worker.process.is_alive()  # checked before the last messages are read
        try:
            while worker.connection.poll():
                what, content = worker.connection.recv()
                if what == "ready":
                    worker.ready, self._failed_starts = True, 0
                    if not self.start or sum(content.values()) > sum(self.start.values()):
                        self.start = content
                elif what == "done":
                    self._events.append(Finished(worker.chunks.popleft(), content))
                else:
                    raise content if isinstance(content, RooftopError) else ModelRunError(str(content))
        except (EOFError, OSError):
            ended = True
        if ended:
            worker.process.join(PATIENCE_S)
            code = worker.process.exitcode
            how = f"by signal {signal.Signals(-code).name}" if code is not None and code < 0 else f"with status {code}"
            self._replace(worker, f"the worker process ended {how}")

    def _replace(self, worker: _Worker, why: str) -> None:
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= MOST_STARTS:
                raise ModelRunError(
                    f"{why} while it started, {MOST_STARTS} times: there may not be enough memory for so many workers"
                )
        for place, chunk in enumerate(worker.chunks):
            self._events.append(Lost(chunk, why if place == 0 else None))
        self._start_instead(worker)

    def _end_stuck(self, worker: _Worker, number: int, first: int, count: int) -> None:
        """Kill and replace a worker in which items `first` to `first + count - 1` of chunk `number` have exceeded the
        time limit."""
        worker.process.kill()
        worker.process.join()
        with suppress(EOFError, OSError):  # keep finished results
            while worker.connection.poll():
                what, content = worker.connection.recv()
                if what == "done":
                    self._events.append(Finished(worker.chunks.popleft(), content))
        for chunk in worker.chunks:
            self._events.append(Hung(chunk, first, count) if chunk.number == number else Lost(chunk, None))
        self._start_instead(worker)

    def _start_instead(self, worker: _Worker) -> None:
        worker.end()
        self._workers[self._workers.index(worker)] = _Worker(self.job, self.division, worker.number)

    def close(self, at_once: bool = False) -> None:
        """End the worker processes: kill them at once, or let them exit by themselves, and kill those that still run
        after 5 s."""
        for worker in self._workers:
            if not at_once:
                worker.say_end()
        until = time.monotonic() + (0 if at_once else PATIENCE_S)
        for worker in self._workers:
            worker.process.join(max(0.0, until - time.monotonic()))
            worker.end()


_STARTING = threading.Lock()  # one start at a time, since each changes state of the parent that the child inherits


class _Worker:
    """The parent's view of a worker process."""

    def __init__(self, job: Job, division: Division, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.number, self.ready = number, False
        self.chunks: deque[Chunk] = deque()
        self.status = context.RawArray("d", 4)  # chunk number, first item, number of items, start time: see `_At`
        self.connection, other = context.Pipe()
        packed = bytes(ForkingPickler.dumps(job))
        self.process = context.Process(
            target=_work, args=(other, self.status, division, number, time.monotonic()), name=f"rooftop-map-{number}",
            daemon=False,
        )  # fmt: skip
        with _STARTING, _started_from_nothing(), _of_any_parent(), _environment(division, number):
            self.process.start()
        other.close()
        self._outbox: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send, args=(packed,), daemon=True)
        self._sender.start()

    def give(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        self._outbox.put(chunk)

    def say_end(self) -> None:
        self._outbox.put(None)

    def _send(self, job: bytes) -> None:
        """Send in a thread, because a worker that is starting or stuck does not read its pipe."""
        with suppress(OSError, ValueError):
            self.connection.send_bytes(job)
            while (chunk := self._outbox.get()) is not None:
                self.connection.send(chunk)
            self.connection.send(None)

    def stuck(self, timeout_s: float | None) -> tuple[int, int, int] | None:
        """If the worker's current items have exceeded the time limit, return (chunk number, index of the first such
        item in the chunk, number of such items); otherwise None."""
        number, first, count, since = self.status
        late = timeout_s is not None and since > 0 and time.monotonic() - since > timeout_s
        return (int(number), int(first), int(count)) if late and self.status[3] == since else None

    def end(self) -> None:
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        # The sending thread must not use this file descriptor any more, because the next worker's pipe may get the same
        # number. A process that the target has forked may hold the other end open, so only a shutdown is sure to end a
        # send.
        with socket.socket(fileno=os.dup(self.connection.fileno())) as pipe, suppress(OSError):
            pipe.shutdown(socket.SHUT_RDWR)
        self._outbox.put(None)
        self._sender.join()
        self.connection.close()


@contextmanager
def _started_from_nothing() -> Iterator[None]:
    """Processes that are started in this block ignore Ctrl-C and do not import the program's main module again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN) if in_main_thread else None
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def _of_any_parent() -> Iterator[None]:
    """Allow a daemonic process, such as a Dask worker, to start processes in this block.

    multiprocessing refuses such starts, since the children could outlive their parent. This file's processes end when
    their pipe closes.
    """
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    daemon = config.pop("daemon", None)
    try:
        yield
    finally:
        if daemon is not None:
            config["daemon"] = daemon


@contextmanager
def _environment(division: Division, number: int) -> Iterator[None]:
    """Set environment variables for a worker's GPU and threads, which libraries read when they are imported."""
    own = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(division.torch_threads))}
    if division.gpus:
        own["CUDA_VISIBLE_DEVICES"] = division.gpus[number]
    before = {name: os.environ.get(name) for name in own}
    os.environ.update(own)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


# ---- in the process --------------------------------------------------------------------------------------------------


def _work(connection: Connection, status: Any, division: Division, number: int, started: float) -> None:
    """Compute chunks until the parent sends None or ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)  # the target's output goes to stderr, so that it does not mix with results on stdout
    sys.setswitchinterval(SWITCH_S)
    starting = _Starting(started)
    starting.did("process")
    try:
        job: Job = connection.recv()  # this imports torch if the target needs torch
        decode = job.decoder(division.device)
        starting.did("imports")
        decoders = _decoders(job, decode, division)  # forks before the GPU is used, since a child could not use it
        starting.did("decoding processes")
        shop = Workshop(job, division.device, f"process {number}", decode)
        starting.did("target")
    except BaseException as error:
        connection.send(("failed", _sendable(error)))
        return
    gc.freeze()  # each full collection would look at the million objects of the imported packages
    chunks: queue.SimpleQueue[Chunk | None] = queue.SimpleQueue()
    to_decode: queue.SimpleQueue[list[Item]] = queue.SimpleQueue()
    more = _taken_from(to_decode)
    if decoders is not None:
        decoders.begin(more, pinned=shop.pins, uses_gpu=None if shop.pins else _uses_gpu)
    notify = (lambda: None) if decoders is None else decoders.notify
    connection.send(("ready", starting.seconds))
    threading.Thread(target=_receive, args=(connection, chunks, to_decode, notify), daemon=True).start()
    outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    sender = threading.Thread(target=_send_all, args=(connection, outbox), daemon=True)
    sender.start()
    try:
        for outcome in shop.outcomes(_Given(chunks), decoders or shop.ahead(more), _At(status)):
            outbox.put(("done", outcome))
    except (RooftopError, MissingExtraError) as error:
        outbox.put(("failed", _sendable(error)))
    finally:
        outbox.put(None)
        sender.join()
        if decoders is not None:
            decoders.close()


def _send_all(connection: Connection, outbox: queue.SimpleQueue[Any]) -> None:
    """Send results in a thread, so that the GPU does not wait while the parent writes a Parquet file."""
    with suppress(OSError):  # the parent has ended
        while (message := outbox.get()) is not None:
            connection.send(message)


def _uses_gpu() -> bool:
    """Whether PyTorch has initialized CUDA in this process."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()


class _Starting:
    """Records how many seconds each step of a worker process's start took."""

    def __init__(self, since: float) -> None:
        self._since, self.seconds = since, dict[str, float]()

    def did(self, part: str) -> None:
        now = time.monotonic()  # this clock is the same in all processes
        self.seconds[part], self._since = now - self._since, now


def _decoders(job: Job, decode: Callable[[Item], Any], division: Division) -> Decoders | None:
    if not division.decoders:
        return None
    from rooftop.cluster.decoders import Decoders
    from rooftop.hardware.page_faults import keep_memory

    keep_memory()  # copying a decoded tensor (2.5 MB) takes 0.3 ms, or 0.45 ms if freed pages return to the system
    in_runs, alone = job.decoding.kind == "clip", job.timeout_s is not None
    return Decoders(division.decoders, decode, 2 * job.batch, in_runs, alone)


class _Given:
    """A function that returns the next chunk from the parent process: None if no chunk has come yet, or after the
    parent has sent None."""

    def __init__(self, chunks: queue.SimpleQueue[Chunk | None]) -> None:
        self._chunks, self._ended = chunks, False

    def __call__(self, wait: bool) -> Chunk | None:
        if self._ended:
            return None
        try:
            chunk = self._chunks.get(wait)
        except queue.Empty:
            return None
        self._ended = chunk is None
        return chunk


def _receive(
    connection: Connection,
    chunks: queue.SimpleQueue[Chunk | None],
    to_decode: queue.SimpleQueue[list[Item]],
    notify: Callable[[], None],
) -> None:
    try:
        while (chunk := connection.recv()) is not None:
            to_decode.put(chunk.items)
            notify()
            chunks.put(chunk)
        chunks.put(None)
    except (EOFError, OSError):
        os._exit(1)  # the parent process has ended, and the target may be stuck


def _taken_from(to_decode: queue.SimpleQueue[list[Item]]) -> Callable[[], Sequence[Item] | None]:
    def more() -> list[Item] | None:
        try:
            return to_decode.get_nowait()
        except queue.Empty:
            return None

    return more


class _At:
    """Writes to shared memory which items this worker process computes now, and since when. The time is written last
    and cleared first, so that the parent never reads it with other items."""

    def __init__(self, status: Any) -> None:
        self._status = status

    def __call__(self, chunk: Chunk, first: int, count: int) -> _At:
        self._status[3] = 0.0
        self._status[0], self._status[1], self._status[2] = chunk.number, first, count
        self._status[3] = time.monotonic()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        self._status[3] = 0.0


def _sendable(error: BaseException) -> RooftopError | str:
    if isinstance(error, RooftopError):
        with suppress(Exception):
            pickle.dumps(error)
            return type(error)(str(error))
    return f"{type(error).__name__}: {whole_message(error)}"
