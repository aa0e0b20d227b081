"""Processes that decode items for a worker on a GPU, without Python's lock between them.

    decoders = Decoders(16, decode, least_ahead=128)
    decoders.begin(more)          # more() returns the next items, if there are any yet
    decoders.notify()             # there may be more now
    decoders.take(64)             # the next items, in order

The processes are forked from the worker before it uses its GPU, so they start at once. Each has at most two tasks: a
few items each. It writes tensors into memory that it shares with the worker, and sends the rest by a pipe. A thread of
the worker copies them out and gives new tasks.

If a process ends, another takes its place, and its items are tried one by one. An item that ends three processes is a
failure. If the worker ends, its decoding processes end within a second.
"""

from __future__ import annotations

import io
import mmap
import multiprocessing
import os
import pickle
import selectors
import signal
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.cluster.items import Item
from rooftop.cluster.tables import Failure
from rooftop.cluster.working import Decoded, decoded
from rooftop.errors import MissingExtraError, ModelRunError
from rooftop.hardware.page_faults import keep_memory

HALF_BYTES = 256 << 20  # bytes shared with a process for one task; only written pages take memory
TASK_S = 0.02  # work in a task; sending it takes only 0.1 ms
TASK_BYTES = 48 << 20  # approximate bytes of a task's tensors
TASK_ITEMS = 16
CLIPS_OF_A_TASK = 8  # clips of one video, which a process reads without seeking
TASKS_OF_A_PROCESS = 2
AHEAD = 2  # times the items of all tasks are decoded ahead: more would be new memory, whose pages are not there yet
MOST_BYTES = 2 << 30  # decoded ahead by all processes of a worker, approximately
DEATHS = 3  # that an item may cause
PARENT_S = 0.5  # between two looks at whether the worker is there
ALIGNMENT = 64
NICE = 5  # lower priority than the worker, which shares its cores and must not wait when results or the GPU are ready
MOST_FILES = 65536  # that a worker may have open when it forks


@dataclass
class _Waiting:
    """An item that is not yet given to a process: its number, and the processes that ended at it."""

    number: int
    item: Item
    deaths: int = 0


@dataclass
class _Process:
    """A decoding process as the worker sees it; its tasks, the oldest first, and the halves of the arena in use."""

    number: int
    arena: mmap.mmap
    process: Any = None
    connection: Any = None
    tasks: deque[tuple[int, list[_Waiting]]] = field(default_factory=deque)  # half of the arena, items
    source: str = ""  # the file of the last item


class Decoders:
    """The decoding processes of a worker.

    Args:
        count: number of processes.
        decode: decodes an item for the target.
        least_ahead: number of items that are decoded ahead at least.
        in_runs: whether items that follow each other in one file should go to one process, as clips of a video.
        alone: whether an item must not wait for others of its task, because each has a time limit.
    """

    def __init__(
        self,
        count: int,
        decode: Callable[[Item], Any],
        least_ahead: int,
        in_runs: bool = False,
        alone: bool = False,
    ) -> None:
        self.count, self._decode, self._in_runs = count, decode, in_runs
        self._most_of_a_task = 1 if alone else CLIPS_OF_A_TASK if in_runs else TASK_ITEMS
        self._least_ahead, self._pinned = least_ahead, False
        self._more: Callable[[], Sequence[Item] | None] = lambda: None
        self._waiting: deque[_Waiting] = deque()
        self._found: dict[int, tuple[Decoded, int]] = {}  # number of an item -> its value, and the bytes of that
        self._first = self._last = 0  # number of the next item to be taken, and of the next one to wait
        self._flying = 0  # items given to processes
        self._bytes = 0
        self._seconds, self._size = 0.0, 0.0  # approximate seconds and bytes of an item; 0: not known
        self._paused = False
        self._idle_deaths = 0
        self._closed = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._processes = [_Process(number, mmap.mmap(-1, 2 * HALF_BYTES)) for number in range(count)]
        for each in self._processes:
            self._start(each)

    @property
    def pids(self) -> list[int]:
        """Their process ids."""
        return [each.process.pid for each in self._processes]

    def begin(self, more: Callable[[], Sequence[Item] | None], pinned: bool = False) -> None:
        """Decode the items of `more`, from now on.

        Args:
            pinned: whether their tensors are in pinned memory; only if this process uses a GPU.
        """
        self._more, self._pinned = more, pinned
        self._thread = threading.Thread(target=self._run, daemon=True, name="rooftop-decoded")
        self._thread.start()

    def notify(self) -> None:
        """Wake the thread, because `more` may have items."""
        with suppress(BlockingIOError):  # the pipe is full, so the thread wakes anyway
            os.write(self._wake, b"x")

    def take(self, count: int) -> list[Decoded]:
        """Return the next items, which must exist.

        Raises:
            MissingExtraError: a package for all items is not installed.
            ModelRunError: the processes end before they do anything.
        """
        taken = []
        for _ in range(count):
            with self._changed:
                while self._first not in self._found and self._error is None:
                    self._changed.wait()
                if self._error is not None:
                    raise self._error
                found, size = self._found.pop(self._first)
                self._first += 1
                self._bytes -= size
                resumed, self._paused = self._paused, False
            if resumed:
                self.notify()
            taken.append(found)
        return taken

    def close(self) -> None:
        """End the processes."""
        self._closed = True
        self.notify()
        if self._thread is not None:
            self._thread.join()
        for each in self._processes:
            each.process.kill()
            each.process.join()
            each.connection.close()

    # ---- in a thread of the worker -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closed:
                self._give()
                for key, _ in self._selector.select():
                    if key.data is None:
                        os.read(self._woken, 4096)
                    else:
                        self._read(key.data)
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _give(self) -> None:
        """Give tasks to processes, as long as there are items and room."""
        while items := self._more():
            for item in items:
                self._waiting.append(_Waiting(self._last, item))
                self._last += 1
        while self._waiting:
            with self._changed:
                ahead = len(self._found) + self._flying
                most = max(self._least_ahead, AHEAD * TASKS_OF_A_PROCESS * self.count * self._usual())
                full = ahead >= most or self._bytes + self._flying * self._size >= MOST_BYTES
                self._paused = full and (self._flying > 0 or self._first in self._found)
                if self._paused:  # if not, the next item to be taken must be given
                    return
            process = self._freest()
            if process is None:
                return
            self._give_to(process, self._task())

    def _freest(self) -> _Process | None:
        free = [each for each in self._processes if len(each.tasks) < TASKS_OF_A_PROCESS]
        if self._in_runs and (known := [each for each in free if each.source == self._waiting[0].item.source]):
            return known[0]
        return min(free, key=lambda each: len(each.tasks), default=None)

    def _usual(self) -> int:
        """Number of items in a task if many wait: some milliseconds of work. One if it is not known how long an item
        takes."""
        if not self._seconds:
            return 1
        most = self._most_of_a_task
        if not self._in_runs:
            most = min(most, int(TASK_S / self._seconds))
        if self._size:
            most = min(most, int(TASK_BYTES / self._size))
        return max(1, most)

    def _task(self) -> list[_Waiting]:
        """The next items: a fair share if there are few, and a single one if a process ended at it."""
        most = self._usual()
        if not self._in_runs:
            most = min(most, -(-len(self._waiting) // self.count))
        task = [self._waiting.popleft()]
        while (
            self._waiting
            and len(task) < most
            and not task[0].deaths
            and not self._waiting[0].deaths
            and not (self._in_runs and self._waiting[0].item.source != task[0].item.source)
        ):
            task.append(self._waiting.popleft())
        return task

    def _give_to(self, process: _Process, task: list[_Waiting]) -> None:
        half = 1 - process.tasks[0][0] if process.tasks else 0
        process.tasks.append((half, task))
        process.source = task[-1].item.source
        self._flying += len(task)
        with suppress(OSError):  # a process that has ended is noticed when it is read
            process.connection.send((half, [each.item for each in task]))

    def _read(self, process: _Process) -> None:
        """Read the result of a task. If the process has ended, start another one."""
        try:
            content = process.connection.recv_bytes()
        except (EOFError, OSError):
            self._replace(process)
            return
        half, task = process.tasks.popleft()
        arena = np.frombuffer(process.arena, np.uint8, HALF_BYTES, half * HALF_BYTES)
        reader = _Reader(io.BytesIO(content), arena, self._pinned)
        found: list[Decoded] = reader.load()
        self._idle_deaths = 0
        seconds, size = sum(each.seconds for each in found) / len(task), reader.copied // len(task)
        self._seconds = max(1e-6, 0.8 * self._seconds + 0.2 * seconds if self._seconds else seconds)
        self._size = max(size, 0.8 * self._size + 0.2 * size)
        missing = next((each.value for each in found if isinstance(each.value, MissingExtraError)), None)
        with self._changed:
            self._error = self._error or missing
            for each, result in zip(task, found, strict=True):
                self._found[each.number] = result, size
                self._bytes += size
            self._flying -= len(task)
            self._changed.notify_all()

    def _replace(self, process: _Process) -> None:
        self._selector.unregister(process.connection)
        process.connection.close()
        process.process.join()
        code = process.process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        tasks = [task for _, task in process.tasks]
        process.tasks.clear()
        self._flying -= sum(map(len, tasks))
        again: list[_Waiting] = []
        for place, task in enumerate(tasks):
            for each in task:
                each.deaths += place == 0  # the later tasks were not begun
                if each.deaths < DEATHS or len(task) > 1:
                    again.append(each)
                    continue
                why = f"the decoding process ended {how} during this item, {each.deaths} times"
                with self._changed:
                    self._found[each.number] = Decoded(Failure(why), 0.0), 0
                    self._changed.notify_all()
        self._waiting.extendleft(reversed(again))
        self._idle_deaths += not tasks
        if self._idle_deaths >= DEATHS:
            raise ModelRunError(f"a decoding process ended {how} while it had nothing to do, {DEATHS} times")
        self._start(process)

    def _start(self, process: _Process) -> None:
        context = multiprocessing.get_context("fork")
        process.connection, its = context.Pipe()
        process.source = ""
        process.process = context.Process(
            target=_work, args=(its, process.arena, self._decode, os.getpid()), name="rooftop-decoder", daemon=True
        )
        with warnings.catch_warnings():  # about forking with threads, whose locks it never takes
            warnings.simplefilter("ignore", DeprecationWarning)
            process.process.start()
        its.close()
        self._selector.register(process.connection, selectors.EVENT_READ, process)


# ---- in a decoding process -------------------------------------------------------------------------------------------


def _work(connection: Connection, arena: mmap.mmap, decode: Callable[[Item], Any], worker: int) -> None:
    """Decode until the worker ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    keep_memory()
    # The worker's pipes: its parent sees that it has ended only if no other process has them.
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, MOST_FILES)
    threading.Thread(target=_end_with, args=(worker,), daemon=True).start()
    torch.set_num_threads(1)
    halves = [np.frombuffer(arena, np.uint8, HALF_BYTES, half * HALF_BYTES) for half in range(2)]
    with suppress(EOFError, OSError):
        while True:
            half, items = connection.recv()
            file = io.BytesIO()
            _Writer(file, halves[half]).dump([_whole(decode, item) for item in items])
            connection.send_bytes(file.getbuffer())
    os._exit(0)


def _whole(decode: Callable[[Item], Any], item: Item) -> Decoded:
    try:
        return decoded(decode, item)
    except MissingExtraError as error:
        return Decoded(MissingExtraError(str(error)), 0.0)


def _end_with(worker: int) -> None:
    while os.getppid() == worker:
        time.sleep(PARENT_S)
    os._exit(1)


class _Writer(pickle.Pickler):
    """Writes values; their tensors go to the arena, if they fit there."""

    def __init__(self, file: io.BytesIO, arena: Any) -> None:
        super().__init__(file, protocol=5)
        self._arena, self._end = arena, 0

    def persistent_id(self, value: Any) -> Any:
        if type(value) is not Tensor or value.device.type != "cpu" or value.layout is not torch.strided:
            return None
        if value.is_quantized or value.requires_grad or not value.numel():
            return None
        content = value.contiguous().reshape(-1).view(torch.uint8).numpy()
        first = self._end
        if first + len(content) > len(self._arena):
            return None
        np.copyto(self._arena[first : first + len(content)], content)
        self._end += -(-len(content) // ALIGNMENT) * ALIGNMENT
        return first, len(content), value.dtype, tuple(value.shape)


class _Reader(pickle.Unpickler):
    """Reads values; copies their tensors from the arena."""

    def __init__(self, file: io.BytesIO, arena: Any, pinned: bool) -> None:
        super().__init__(file)
        self._arena, self._pinned, self.copied = arena, pinned, 0

    def persistent_load(self, place: Any) -> Tensor:
        first, size, dtype, shape = place
        own = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        np.copyto(own.numpy(), self._arena[first : first + size])
        self.copied += size
        return own.view(dtype).reshape(shape)
