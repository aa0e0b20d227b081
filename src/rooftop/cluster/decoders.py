"""Processes that decode items for a worker on a GPU, so that decoding does not share one GIL.

    decoders = Decoders(16, decode, least_ahead=128)
    decoders.begin(more)          # more() returns the next items, or None if there are none yet
    decoders.notify()             # more() may have items now
    decoders.take(64)             # the next items, in order

The worker forks the decoding processes before it uses its GPU. A forked process need not import anything, so it starts
at once. Each process has at most two tasks of a few items each. A decoding process writes decoded tensors into a slot
of memory that it shares with the worker, and sends all other values through a pipe. A thread of the worker reads the
results and hands out new tasks.

The worker's tensors are views of this memory, without a copy, and a GPU reads pinned slots directly. A slot is used
again once all of its tensors are freed. If no slot is free, a task uses one of two other slots of the process, from
which the thread copies tensors at once.

A function of the user may use the GPU itself. Once it has done so, slots are pinned for this function, too. Its copies
to the GPU may then still run when it frees a tensor, so such a slot is used again only after a synchronization. Slots
are pinned, and the GPU is synchronized, between calls of the function, since both would break a CUDA graph that it
captures.

If a process dies, a new process replaces it, and the items of the task that it was working on are retried one by one.
An item that kills three processes becomes a failure. If the worker ends, its decoding processes end within a second.
"""

from __future__ import annotations

import io
import multiprocessing
import os
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

import torch

from rooftop.cluster.items import Item
from rooftop.cluster.slots import COPIED_SLOTS, END, LENT_BYTES, Arena, Copying, Lending, Reader, Writer
from rooftop.cluster.tables import Failure
from rooftop.cluster.working import Decoded, decoded
from rooftop.errors import MissingExtraError, ModelRunError
from rooftop.hardware.page_faults import keep_memory

TASK_S = 0.04  # maximum seconds of work in a task; less costs time, since each task makes the worker wait for the GIL
TASK_BYTES = 24 << 20  # approximate maximum bytes of a task's tensors
TASK_ITEMS = 16
CLIPS_OF_A_TASK = 4
# A process gets up to this many successive clips of a video, so that it seeks only once for all of them. A seek decodes
# up to 250 frames before the wanted frame.
CLIPS_OF_A_RUN = 16
TASKS_OF_A_PROCESS = 2
# maximum items decoded ahead, as a multiple of the items that all processes' tasks hold; more would touch more memory
AHEAD = 2
MOST_BYTES = 2 << 30  # approximate limit on the bytes that a worker's processes decode ahead
DEATHS = 3  # an item fails after it has killed this many processes
PARENT_S = 0.5  # seconds between two checks that the worker still runs
NICE = 19  # lower priority than the worker, which shares the cores and must react at once to results and the GPU
MOST_FILES = 65536  # a new decoding process closes the worker's open files with numbers below this


@dataclass
class _Waiting:
    """An item that waits to be decoded: its number, and how many decoding processes have died while they decoded it."""

    number: int
    item: Item
    deaths: int = 0


@dataclass
class _Process:
    """The worker's record of a decoding process. Each of its unfinished tasks uses one slot of the arena."""

    number: int
    arena: Arena
    process: Any = None
    connection: Any = None
    tasks: deque[tuple[int, list[_Waiting]]] = field(default_factory=deque)  # (slot, items), oldest first
    run: deque[_Waiting] = field(default_factory=deque)  # clips of one video that only this process will get


class Decoders:
    """The decoding processes of a worker.

    Args:
        count: number of processes.
        decode: decodes an item for the target.
        least_ahead: minimum number of items to decode ahead.
        in_runs: whether one process should decode consecutive items of a file, such as clips of a video.
        alone: whether each task has only one item, so that an item with a time limit does not wait for other items.
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
        self._least_ahead, self._pinned, self._lends = least_ahead, False, True
        self._uses_gpu: Callable[[], bool] = lambda: False
        self._may_pin = True  # False: the system allows no more pinned memory
        self._to_pin = deque[tuple[Arena, int, int]]()  # arena, slot, bytes
        self._more: Callable[[], Sequence[Item] | None] = lambda: None
        self._waiting: deque[_Waiting] = deque()
        self._found: dict[int, tuple[Decoded, int]] = {}  # number of an item -> its value, and the value's bytes
        self._first = self._last = 0  # number of the next item to take, and of the next item to add to `_waiting`
        self._flying = 0  # number of items that processes have
        self._bytes = 0
        self._seconds, self._size = 0.0, 0.0  # approximate seconds and bytes per item; 0: unknown
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
        self._processes = [_Process(number, Arena()) for number in range(count)]
        for each in self._processes:
            self._start(each)

    @property
    def pids(self) -> list[int]:
        """The process ids of the decoding processes."""
        return [each.process.pid for each in self._processes]

    def begin(
        self,
        more: Callable[[], Sequence[Item] | None],
        pinned: bool = False,
        uses_gpu: Callable[[], bool] | None = None,
    ) -> None:
        """Start to decode the items that `more` returns.

        Args:
            more: returns the next items, or None if there are none yet.
            pinned: whether tensors must be in pinned memory, which needs a GPU in this process. The caller must then
                keep tensors until the GPU has read them.
            uses_gpu: for a caller that does not keep tensors: returns whether the caller has used the GPU by now. From
                then on, tensors are in pinned memory if possible.
        """
        self._more, self._pinned = more, pinned
        self._uses_gpu = uses_gpu or self._uses_gpu
        self._thread = threading.Thread(target=self._run, daemon=True, name="rooftop-decoded")
        self._thread.start()

    def notify(self) -> None:
        """Wake the thread that gives tasks, because `more` may have items."""
        with suppress(BlockingIOError):  # the pipe is full, so the thread wakes anyway
            os.write(self._wake, b"x")

    def take(self, count: int) -> list[Decoded]:
        """Wait for the next `count` items and return them. The caller must not take more items than `more` returned.

        Raises:
            MissingExtraError: a package that decoding needs is not installed. This error does not become a `Failure`,
                because it would affect all items.
            ModelRunError: three times, a decoding process ended while it had no task, and no task was finished in
                between.
        """
        if self._uses_gpu():
            self._pin_and_free()
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

    def _pin_and_free(self) -> None:
        """Pin the slots in `_to_pin`. If an arena has slots in `freed`, but none in `free`, wait for the GPU, then move
        the slots of all arenas from `freed` to `free`."""
        while self._to_pin:
            arena, slot, size = self._to_pin.popleft()
            if self._may_pin and not arena.pinned(slot):
                self._may_pin = arena.pin(slot, size)
        if any(each.arena.freed and not each.arena.free for each in self._processes):
            arenas = [each.arena for each in self._processes]
            freed = [(arena, arena.freed.popleft()) for arena in arenas for _ in range(len(arena.freed))]
            with suppress(RuntimeError):  # the user's function also gets this error, from its next CUDA call
                torch.cuda.synchronize()
            for arena, slot in freed:
                arena.free.append(slot)
            self.notify()

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
            each.arena.close()

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
        """Send decoding tasks to processes while items wait and a process can take another task. Pause if enough items
        are decoded ahead."""
        while items := self._more():
            for item in items:
                self._waiting.append(_Waiting(self._last, item))
                self._last += 1
        while (process := self._freest()) is not None:
            with self._changed:
                ahead = len(self._found) + self._flying
                most = max(self._least_ahead, AHEAD * TASKS_OF_A_PROCESS * self.count * self._usual())
                full = ahead >= most or self._bytes + self._flying * self._size >= MOST_BYTES
                # If no process is at work and the next item to take is not decoded, a pause would never end.
                self._paused = full and (self._flying > 0 or self._first in self._found)
                if self._paused:
                    return
            self._give_to(process, self._task(process))

    def _freest(self) -> _Process | None:
        """The process that gets the next task: of those with the fewest tasks, the one whose next item is needed first.
        None if no process has both room for a task and an item to decode, of its own `run` or of `_waiting`."""
        free = [
            each for each in self._processes if len(each.tasks) < TASKS_OF_A_PROCESS and (each.run or self._waiting)
        ]
        return min(free, key=lambda each: (len(each.tasks), (each.run or self._waiting)[0].number), default=None)

    def _usual(self) -> int:
        """The number of items in a task when many items wait. It is 1 with `alone`, and while the time per item is
        unknown. Otherwise it is limited by TASK_ITEMS, TASK_S and TASK_BYTES (for clips, by CLIPS_OF_A_TASK and
        TASK_BYTES)."""
        if not self._seconds:
            return 1
        most = self._most_of_a_task
        if not self._in_runs:
            most = min(most, int(TASK_S / self._seconds))
        if self._size:
            most = min(most, int(TASK_BYTES / self._size))
        return max(1, most)

    def _task(self, process: _Process) -> list[_Waiting]:
        """Take the items of the process's next task: the usual number, or fewer if few items wait, so that each process
        gets a share. An item that has killed a process is a task of its own."""
        share = -(-len(self._waiting) // self.count)
        if self._in_runs and not process.run:
            process.run.extend(_first_of(self._waiting, min(CLIPS_OF_A_RUN, share), of_one_file=True))
        if self._in_runs:
            return _first_of(process.run, self._usual())
        return _first_of(self._waiting, min(self._usual(), share))

    def _give_to(self, process: _Process, task: list[_Waiting]) -> None:
        slot = self._slot(process, len(task))
        process.tasks.append((slot, task))
        self._flying += len(task)
        with suppress(OSError):  # `_read` notices a process that has ended
            process.connection.send((slot, [each.item for each in task]))

    def _slot(self, process: _Process, items: int) -> int:
        """Choose the slot of shared memory for a task's tensors. If one slot has room for twice their expected bytes,
        return a free slot whose memory the worker's tensors use without a copy. Otherwise, or if no such slot is free,
        or if the bytes are unknown, return a slot from which the worker copies the tensors."""
        if self._lends and 0 < 2 * self._size * items <= LENT_BYTES and process.arena.free:
            return process.arena.free.popleft()
        used = [slot for slot, _ in process.tasks]
        return next(slot for slot in range(COPIED_SLOTS) if slot not in used)

    def _read(self, process: _Process) -> None:
        """Read the result of a task. If the process has ended, start another one."""
        try:
            content = process.connection.recv_bytes()
        except (EOFError, OSError):
            self._replace(process)
            return
        slot, task = process.tasks.popleft()
        (size,) = END.unpack_from(content, len(content) - END.size)
        reader = self._reader(process.arena, slot, content, size)
        found: list[Decoded] = [reader.load() for _ in task]
        if slot >= COPIED_SLOTS and not isinstance(reader, Lending):
            process.arena.free.append(slot)
        del reader  # the reader keeps the slot in use
        self._idle_deaths = 0
        seconds, size = sum(each.seconds for each in found) / len(task), size // len(task)
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

    def _reader(self, arena: Arena, slot: int, content: bytes, size: int) -> Reader:
        """Return a reader for the results of a task, whose tensors occupy `size` bytes of a slot."""
        if slot < COPIED_SLOTS:
            return Copying(content, arena.read(slot, size), self._pinned)
        if self._pinned and size and not arena.pin(slot, size):
            if self._lends:
                warnings.warn(
                    f"the system does not let CUDA pin {size >> 20} MB of decoded tensors, so they are copied: raise "
                    "the limit (ulimit -l, the container's memory)",
                    RuntimeWarning,
                    stacklevel=2,
                )
            self._lends = False
            return Copying(content, arena.read(slot, size), self._pinned)
        if not size:
            return Reader(content)
        if not self._uses_gpu():
            return Lending(content, arena.lend(slot, size, arena.free))
        if not arena.pinned(slot):
            if self._may_pin:
                self._to_pin.append((arena, slot, size))
        elif arena.pinned(slot) < size:  # CUDA refuses to copy memory that is pinned only in part
            return Copying(content, arena.read(slot, size), False)
        return Lending(content, arena.lend(slot, size, arena.freed))

    def _replace(self, process: _Process) -> None:
        """Start another process instead of one that has ended, and retry the items that it had."""
        self._selector.unregister(process.connection)
        process.connection.close()
        process.process.join()
        code = process.process.exitcode
        how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
        tasks = [task for _, task in process.tasks]
        process.arena.free.extend(slot for slot, _ in process.tasks if slot >= COPIED_SLOTS)
        process.tasks.clear()
        self._flying -= sum(map(len, tasks))
        again: list[_Waiting] = []
        for place, task in enumerate(tasks):
            for each in task:
                each.deaths += place == 0  # the process had not started the later tasks
                if each.deaths < DEATHS or len(task) > 1:
                    again.append(each)
                    continue
                why = f"the decoding process ended {how} during this item, {each.deaths} times"
                with self._changed:
                    self._found[each.number] = Decoded(Failure(why), 0.0), 0
                    self._changed.notify_all()
        self._waiting.extendleft(reversed([*again, *process.run]))
        process.run.clear()
        self._idle_deaths += not tasks
        if self._idle_deaths >= DEATHS:
            raise ModelRunError(f"a decoding process ended {how} while it had nothing to do, {DEATHS} times")
        self._start(process)

    def _start(self, process: _Process) -> None:
        context = multiprocessing.get_context("fork")
        process.connection, its = context.Pipe()
        process.process = context.Process(
            target=_work, args=(its, process.arena, self._decode, os.getpid()), name="rooftop-decoder", daemon=True
        )
        with warnings.catch_warnings():  # Python warns about a fork with threads, but the child never takes their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            process.process.start()
        its.close()
        self._selector.register(process.connection, selectors.EVENT_READ, process)


def _first_of(waiting: deque[_Waiting], most: int, of_one_file: bool = False) -> list[_Waiting]:
    """Remove and return the first waiting items: at least one, and at most `most`. With `of_one_file`, all are from the
    same file. An item during which a process died is taken alone."""
    taken = [waiting.popleft()]
    first = taken[0]
    while (
        waiting
        and len(taken) < most
        and not first.deaths
        and not waiting[0].deaths
        and not (of_one_file and waiting[0].item.source != first.item.source)
    ):
        taken.append(waiting.popleft())
    return taken


# ---- in a decoding process -------------------------------------------------------------------------------------------


def _work(connection: Connection, arena: Arena, decode: Callable[[Item], Any], worker: int) -> None:
    """Decode tasks until the worker ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    keep_memory()
    slots = arena.slots()
    # Close the worker's pipes: the worker's parent notices the worker's end only if no other process has them open.
    os.closerange(3, connection.fileno())
    os.closerange(connection.fileno() + 1, MOST_FILES)
    threading.Thread(target=_end_with, args=(worker,), daemon=True).start()
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            slot, items = connection.recv()
            file = io.BytesIO()
            writer = Writer(file, slots[slot])
            for item in items:  # each is written while the processor's cache still has its tensors
                result = _whole(decode, item)
                try:
                    writer.add(result)
                except Exception as error:  # the value cannot be pickled
                    writer.add(Decoded(Failure.of(error), result.seconds))
            file.write(END.pack(writer.end))
            connection.send_bytes(file.getbuffer())
    os._exit(0)


def _whole(decode: Callable[[Item], Any], item: Item) -> Decoded:
    """Decode an item. After a `MissingExtraError` (a package is not installed), the value is the error, which the
    worker process raises later."""
    try:
        return decoded(decode, item)
    except MissingExtraError as error:
        return Decoded(MissingExtraError(str(error)), 0.0)


def _end_with(worker: int) -> None:
    while os.getppid() == worker:
        time.sleep(PARENT_S)
    os._exit(1)
