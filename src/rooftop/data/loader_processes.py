"""Make batches in worker processes, with tensors in shared memory.

The parent sends only (epoch, batch, piece, slot) as a task, because each process has the data set and computes the
order itself. The process writes the tensors of the piece into the slot, a shared-memory tensor that later pieces reuse.
The process sends all other values of the piece through a pipe. A slot that is too small is replaced: the process
allocates a larger slot (`share_memory_`) and sends its file descriptor. The shared memory has no name, so the system
frees it even if a process is killed.

Processes are forked if the system supports fork, because then data sets need not be pickled. The parent kills the
processes when they are no longer needed. A process whose parent has ended ends within a second. A process ignores
Ctrl-C and SIGTERM, which the parent handles.
"""

from __future__ import annotations

import atexit
import io
import os
import pickle
import random
import signal
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch import multiprocessing as torch_multiprocessing

from rooftop.data.pieces import Job, Made, flat_bytes, joined
from rooftop.data.ways import batches_in_flight
from rooftop.errors import LoadingError
from rooftop.hardware.page_faults import keep_memory

ALIGNMENT = 64  # alignment of tensors in a slot, in bytes
# Maximum number of batches in flight. A worker has at most one task per batch, and its pipe has room for this many
# tasks, so sending never blocks.
MOST_IN_FLIGHT = 256
PARENT_S = 1.0  # seconds between checks that the parent still runs
NICE = 5  # lower priority than the training loop, which shares the cores and must launch its kernels in time


@dataclass
class _Worker:
    """The parent's record of a worker process.

    Attributes:
        connection: the parent's end of the pipe to the process.
        slots: the mapped memory of each slot, by slot number.
        free: numbers of the slots that no batch uses now.
        used: number of slot numbers that were given out so far.
    """

    process: Any
    connection: Connection
    slots: dict[int, Tensor] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    used: int = 0

    def slot(self) -> int:
        """Take a slot of shared memory that no batch uses now, and return its number."""
        if self.free:
            return self.free.pop()
        self.used += 1
        return self.used - 1


class Processes:
    """Makes batches in worker processes.

    Raises:
        LoadingError: a process was killed or ended; the constructor and `take` raise this.
    """

    def __init__(self, job: Job, workers: int, ahead: int) -> None:
        self._job = job
        self.in_flight = min(MOST_IN_FLIGHT, batches_in_flight(job, workers, ahead))
        self._begun: deque[list[tuple[_Worker, int, int, int]]] = deque()
        self._next = 0
        self._workers: list[_Worker] = []
        self._end = weakref.finalize(self, _end, self._workers, os.getpid())
        # `_end` must run before multiprocessing's own exit handler. That handler sends SIGTERM, which the processes
        # ignore, and would then wait forever for their end.
        atexit.register(self._end)
        try:
            for number in range(workers):
                self._workers.append(_started(job, number))
            for worker in self._workers:
                self._received(worker)  # the process reports that it is ready
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> list[int]:
        """The ids that the operating system gave the worker processes."""
        return [worker.process.pid for worker in self._workers]

    def begin(self, epoch: int, number: int) -> None:
        pieces = []
        for piece in range(self._job.pieces):
            worker = self._workers[self._next]
            self._next = (self._next + 1) % len(self._workers)
            slot = worker.slot()
            with suppress(OSError):  # `take` raises if the process has ended
                worker.connection.send((epoch, number, piece, slot))
            pieces.append((worker, slot, epoch, number))
        self._begun.append(pieces)

    def take(self, pin: bool) -> Made:
        begun = self._begun.popleft()
        alone = len(begun) == 1
        made = [self._piece(worker, slot, (epoch, number), alone, pin) for worker, slot, epoch, number in begun]
        whole = joined(made, pin, copy=not alone)  # a single piece was copied when it was read
        for worker, slot, _, _ in begun:
            worker.free.append(slot)
        return whole

    def _piece(self, worker: _Worker, slot: int, batch: tuple[int, int], copy: bool, pin: bool) -> Made:
        content, grown = self._received(worker, batch)
        if grown:
            worker.slots[slot] = _mapped(self._handle(worker, batch), grown)
        return _Reader(io.BytesIO(content), worker.slots.get(slot), copy, pin).load()

    def _received(self, worker: _Worker, batch: tuple[int, int] | None = None) -> tuple[bytes, int]:
        """Receive a pickled piece from a process, and the bytes of its slot if the process enlarged the slot, else 0.

        Raises:
            LoadingError: the process has ended.
            Exception: the exception that the process sent instead of a piece.
        """
        try:
            ready = wait([worker.connection, worker.process.sentinel])
            if worker.connection not in ready and not worker.connection.poll():
                raise EOFError
            what, *content = worker.connection.recv()
        except (EOFError, OSError) as gone:
            raise _ended(worker, batch) from gone
        if what == "failed":
            failure: Exception = pickle.loads(content[0])
            failure.add_note(f"in a process of the loader:\n{content[1]}")
            raise failure
        return content[0], content[1]

    def _handle(self, worker: _Worker, batch: tuple[int, int]) -> int:
        try:
            return recv_handle(worker.connection)
        except (EOFError, OSError, RuntimeError) as error:
            raise _ended(worker, batch) from error

    def interrupt(self) -> None:
        for worker in self._workers:
            worker.process.kill()

    def close(self) -> None:
        self._end()
        atexit.unregister(self._end)


def _ended(worker: _Worker, batch: tuple[int, int] | None) -> LoadingError:
    with suppress(ValueError, AssertionError):
        worker.process.join(5.0)
    code = worker.process.exitcode
    killed = code is not None and code < 0
    how = f"was killed by {signal.Signals(-code).name}" if killed else f"ended with status {code}"
    when = "while it started" if batch is None else f"while it made batch {batch[1]} of epoch {batch[0]}"
    return LoadingError(
        f"a process of the loader {how} {when}: if memory is too small, use fewer workers, a smaller ahead, or "
        'how="threads"'
    )


def _started(job: Job, number: int) -> _Worker:
    method = "fork" if "fork" in torch_multiprocessing.get_all_start_methods() else "spawn"
    context: Any = torch_multiprocessing.get_context(method)
    ours, its = context.Pipe(duplex=True)
    process = context.Process(target=_work, args=(its, job, os.getpid()), name=f"rooftop-loader-{number}", daemon=True)
    with warnings.catch_warnings():  # Python warns about a fork while threads run; the child never takes their locks
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    its.close()
    return _Worker(process, ours)


def _end(workers: list[_Worker], parent: int) -> None:
    if os.getpid() != parent:  # this is the copy of the loader in a forked process
        return
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.connection.close()
    workers.clear()


def _mapped(handle: int, size: int) -> Tensor:
    """Map the shared memory of another process's slot into this process: (size,) uint8."""
    storage: Any = torch.UntypedStorage
    try:
        return torch.empty(0, dtype=torch.uint8).set_(storage._new_shared_fd_cpu(handle, size))  # type: ignore[call-overload]
    finally:
        os.close(handle)


class _Reader(pickle.Unpickler):
    """Unpickler of a piece of a batch. Its tensors lie in a slot of shared memory, and are copied from the slot if
    `copy`."""

    def __init__(self, file: io.BytesIO, slot: Tensor | None, copy: bool, pin: bool) -> None:
        super().__init__(file)
        self._slot, self._copy, self._pin = slot, copy, pin

    def persistent_load(self, place: Any) -> Tensor:
        offset, size, dtype, shape = place
        if size == 0:
            return torch.empty(shape, dtype=dtype)
        assert self._slot is not None
        bytes_ = self._slot[offset : offset + size]
        if self._copy:
            own = torch.empty(size, dtype=torch.uint8, pin_memory=self._pin)
            np.copyto(own.numpy(), bytes_.numpy())
            bytes_ = own
        return bytes_.view(dtype).reshape(shape)


# ---- in the process --------------------------------------------------------------------------------------------------


def _work(connection: Connection, job: Job, parent: int) -> None:
    """Main function of a worker process: make pieces of batches until the parent process ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # SLURM and `timeout` send SIGTERM to all processes of a training, but the parent still needs batches until it has
    # saved a checkpoint. Programs that a data set starts would inherit SIG_IGN, but they do not inherit a handler.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.set_wakeup_fd(-1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(NICE)
    torch.set_num_threads(1)
    keep_memory()
    slots: dict[int, Tensor] = {}
    with suppress(EOFError, OSError):
        connection.send(("ready", b"", 0))
        while True:
            epoch, number, piece, slot = connection.recv()
            _seed(job, epoch, number, piece)
            try:
                content, tensors, size = _written(job.make(epoch, number, piece))
                grown = size > (len(slots[slot]) if slot in slots else 0)
                if grown:
                    slots[slot] = torch.empty(size, dtype=torch.uint8).share_memory_()
                for offset, tensor in tensors:
                    _put(slots[slot], offset, tensor)
            except Exception as error:
                connection.send(("failed", _sendable(error), traceback.format_exc()))
                continue
            connection.send(("made", content, size if grown else 0))
            if grown:
                storage: Any = slots[slot].untyped_storage()
                send_handle(connection, storage._share_fd_cpu_()[0], parent)
    sys.stdout.flush()
    os._exit(0)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_S)
    os._exit(1)


def _seed(job: Job, epoch: int, number: int, piece: int) -> None:
    """Seed the global random generators, differently for each piece, for data sets that use them."""
    seed = int(np.random.SeedSequence((job.order.seed, epoch, number, piece)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class _Writer(pickle.Pickler):
    """Pickler of a piece of a batch. It lists the piece's tensors, and assigns each an offset in a slot of shared
    memory."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=5)
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        if value.is_quantized:
            return None
        size = value.numel() * value.element_size()
        offset = self.size
        if size:
            self.tensors.append((offset, value.detach()))
            self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return offset, size, value.dtype, tuple(value.shape)


def _written(made: Made) -> tuple[bytes, list[tuple[int, Tensor]], int]:
    file = io.BytesIO()
    writer = _Writer(file)
    writer.dump(replace(made, finished=time.monotonic()))
    return file.getvalue(), writer.tensors, writer.size


def _put(slot: Tensor, offset: int, tensor: Tensor) -> None:
    content = flat_bytes(tensor).numpy()
    np.copyto(slot[offset : offset + len(content)].numpy(), content)


def _sendable(error: Exception) -> bytes:
    """Pickle an exception. If unpickling it fails or changes its text, pickle a RuntimeError with its text instead."""
    notes = getattr(error, "__notes__", [])
    with suppress(Exception):
        content = pickle.dumps(error)
        if str(pickle.loads(content)) == str(error):
            return content
    other = RuntimeError(f"{type(error).__name__}: {error}")
    for note in notes:
        other.add_note(note)
    return pickle.dumps(other)
