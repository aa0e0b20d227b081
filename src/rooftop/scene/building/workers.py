"""Run functions on all cores, in forked processes.

Most of a build is NumPy on arrays of medium size. NumPy holds the GIL for such arrays, so threads would wait for each
other. A forked process sees all data of its parent without a copy, and sends back its results. Processes take items
from a pipe, one after another. Results are in the order of the items, so they do not depend on the number of workers.

Forking a process takes milliseconds for each gigabyte of its parent. So a team keeps its processes for several runs.
The parent sends them the data that it has computed since they were forked.

Processes are forked only on Linux. On other systems, where forks are not safe, the calling process does the work.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import pickle
import signal
import struct
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.errors import BuildError
from rooftop.hardware.cpus import usable_cpus

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V", bound=np.generic)
Stage = tuple[Callable[[Any], Any], Sequence[Any]]  # a function, and the items with which it is called, one by one
Call = Callable[[Any, Any], Any]  # a function that is called with a state and an item

TOKEN = struct.Struct("<I")
NO_MORE = (1 << 32) - 1  # a worker that reads this token has no more items in this stage
# numbers of the call, the stage and the mail (data for all workers); the mail's start and size in shared memory, in
# bytes
COMMAND = struct.Struct("<IIQQQ")
LENGTH = struct.Struct("<Q")
MOST_TOKENS = 8192  # maximum number of tokens of a stage; a pipe holds 16,384 tokens of four bytes
PIPE_BYTES = 1 << 20  # size of a pipe for results; with the default of 64 KB, workers wait for the parent to read
ALIGNMENT = 64  # bytes to which sent arrays are aligned
CHUNK = 1 << 18  # rows of an array that are processed together
SHORT = 1 << 15  # rows per thread: few, because the C library keeps the memory that each thread allocated
_DONE, _RESULT, _ERROR = range(3)


@dataclass(frozen=True)
class Workers:
    """The maximum number of processes that work in parallel; see `run`."""

    count: int

    @classmethod
    def of(cls, count: int | None) -> Workers:
        """`count` workers, or one per CPU of this process.

        Raises:
            ValueError: `count` is not an integer, or is below 1.
        """
        if count is None:
            return cls(usable_cpus())
        if not isinstance(count, int | np.integer) or count < 1:
            raise ValueError(f"workers={count}: expected 1 or more, or None for one on each CPU ({usable_cpus()} here)")
        return cls(int(count))

    def run(
        self, work: Callable[[T], R], items: Sequence[T], what: str = "working",
        done: Callable[[int], None] | None = None, before: Sequence[Stage] = (),
    ) -> list[R]:  # fmt: skip
        """Call `work` for all items in parallel, and return the results in order.

        Args:
            work: called in a forked process, so its changes to data are lost, except in `shared` arrays.
            items: arguments of `work`, in order.
            what: the current activity, for messages.
            done: called with the index of each item whose result has arrived.
            before: stages that run before `work`. Each stage ends in all workers before the next begins. Results of
                these stages are dropped.

        Raises:
            Exception: any exception that `work` raises, with the worker's traceback as a note.
            BuildError: a worker was killed.
        """
        with self.team([]) as team:
            return team.run_items(work, items, what, done, before)

    def threads(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """Like `run`, but with threads, for short work in which NumPy releases the GIL."""
        if self.count < 2 or len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(self.count, len(items))) as pool:
            return list(pool.map(work, items))

    def team(self, calls: Sequence[Call]) -> Team:
        """Make a team of workers that stays for several runs; use it in a `with` block. `calls` are functions that
        later runs will call."""
        return Team(self.count, calls)


@dataclass(frozen=True)
class _WithoutState:
    """Wrap a function of an item so that it also accepts a state, which it ignores."""

    work: Callable[[Any], Any]

    def __call__(self, _: Any, item: Any) -> Any:
        return self.work(item)


ALONE = Workers(1)  # all work runs in the calling process


def shared(shape: int | tuple[int, ...], dtype: type[V]) -> npt.NDArray[V]:
    """A zeroed array in memory that is shared with processes forked later."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype, int(np.prod(shape))).reshape(shape)


def give_back(array: npt.NDArray[Any]) -> None:
    """Free the memory of a `shared` array in all processes; the array then contains zeros. If the system cannot free
    it, the array does not change."""
    base: Any = array
    while not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else base.base
    if hasattr(mmap, "MADV_REMOVE"):
        with contextlib.suppress(OSError):
            base.madvise(mmap.MADV_REMOVE)


def chunks(count: int, size: int | None = None) -> list[slice]:
    """Divide rows into slices of `size` rows, by default CHUNK."""
    size = size or CHUNK
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class Team:
    """Processes that are forked when they are first needed, and stay until the `with` block ends.

    The processes have all data that their parent had when they were forked. After the fork, the processes get only the
    state and the items of each run. So call `forget` when other data that the processes use has changed. Values that
    the parent writes to `shared` arrays are visible to the processes at once.
    """

    def __init__(self, count: int, calls: Sequence[Call]) -> None:
        self.count = count
        self._calls = list(calls)
        self._processes: _Processes | None = None

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget()

    def learn(self, calls: Sequence[Call]) -> None:
        """Add functions that later runs will call. Call `learn` before the first run, because running processes cannot
        learn functions."""
        self._calls += calls

    def forget(self) -> None:
        """End all processes; the next run forks new processes."""
        if self._processes is not None:
            self._processes.end()
            self._processes = None

    def run(
        self, work: Callable[[Any, T], R], items: Sequence[T], state: Any = None, what: str = "working",
        done: Callable[[int], None] | None = None, before: Sequence[tuple[Call, Sequence[Any]]] = (),
    ) -> list[R]:  # fmt: skip
        """Call `work` for all items in parallel, and return the results in order.

        Args:
            work: called with the state and an item.
            state: sent to the processes that are running already; its arrays keep their order in memory (C or Fortran).
                `work` must not modify the state.
            items, what, done, before: as in `Workers.run`.

        Raises:
            Exception, BuildError: as in `Workers.run`. After an exception, all processes of the team are ended.
        """
        stages = [*before, (work, items)]
        count = min(self.count, max(len(each) for _, each in stages))
        if count < 2 or sys.platform != "linux":
            return self._alone(stages, state, done)
        try:
            return self._shared_out(stages, count, state, what, done)
        except BaseException:
            self.forget()
            raise

    def run_items(
        self, work: Callable[[T], R], items: Sequence[T], what: str = "working",
        done: Callable[[int], None] | None = None, before: Sequence[Stage] = (),
    ) -> list[R]:  # fmt: skip
        """Like `Workers.run`, with the team's processes. If they do not know `work`, the team ends them and forks new
        processes, which it keeps."""
        earlier = [(_WithoutState(each), own) for each, own in before]
        return self.run(_WithoutState(work), items, None, what, done, earlier)

    def _alone(
        self, stages: Sequence[tuple[Call, Sequence[Any]]], state: Any, done: Callable[[int], None] | None
    ) -> list[Any]:
        """Process all items in the calling process."""
        for earlier, own in stages[:-1]:
            for each in own:
                earlier(state, each)
        work, items = stages[-1]
        results = []
        for number, item in enumerate(items):
            results.append(work(state, item))
            if done is not None:
                done(number)
        return results

    def _shared_out(
        self, stages: Sequence[tuple[Call, Sequence[Any]]], count: int, state: Any, what: str,
        done: Callable[[int], None] | None,
    ) -> list[Any]:  # fmt: skip
        """Run the stages in parallel. If the team has at least `count` processes that know all functions of the stages,
        use these; if not, fork `count` new processes."""
        new = [work for work, _ in stages if work not in self._calls]
        inherited = None  # data that newly forked processes already have
        if new or self._processes is None or self._processes.count < count:
            self.forget()
            self._calls += new
            inherited = ([items for _, items in stages], state)
            self._processes = _Processes(self._calls, count, inherited)
        else:
            self._processes.post(([items for _, items in stages], state))
        for stage, (work, items) in enumerate(stages[:-1]):
            self._processes.stage(self._calls.index(work), stage, items, what, lambda number, value: None)
        found: list[Any] = [None] * len(stages[-1][1])

        def keep(number: int, value: Any) -> None:
            found[number] = value
            if done is not None:
                done(number)

        work, items = stages[-1]
        self._processes.stage(self._calls.index(work), len(stages) - 1, items, what, keep)
        return found


class _Worker(NamedTuple):
    """The parent's record of a worker process.

    Attributes:
        number: number of the worker, from 0.
        process: process id of the worker.
        commands: the pipe through which the worker receives its stages.
    """

    number: int
    process: int
    commands: int


class _Processes:
    """The forked worker processes of a team, with the pipes to and from them."""

    def __init__(self, calls: Sequence[Call], count: int, inherited: tuple[list[Sequence[Any]], Any]) -> None:
        self.calls, self.count = calls, count
        self.workers: dict[int, _Worker] = {}  # maps the pipe of each worker's results to the worker
        self.tokens = os.pipe()  # pipe of the items that no worker has taken yet
        self.mail = _Mail(inherited)
        try:
            for number in range(count):
                self._start(number)
        except BaseException:
            self.end()
            raise
        self.mail.forget()

    def post(self, content: Any) -> None:
        """Send the items and the state of a run to all workers."""
        self.mail.post(content)

    def stage(self, call: int, stage: int, items: Sequence[Any], what: str, found: Callable[[int, Any], None]) -> None:
        """Distribute the items of a stage among all processes, and wait until all items are done.

        Args:
            call: index of the function to call.
            stage: index of this stage among the stages of the run.
            items: the items of the stage.
            what: the current activity, for messages.
            found: called with the index of an item and its result.
        """
        run = _run(items)
        tokens = [*range(0, len(items), run), *[NO_MORE] * self.count]
        write_all(self.tokens[1], b"".join(map(TOKEN.pack, tokens)))
        for worker in self.workers.values():
            with contextlib.suppress(BrokenPipeError):  # the process has died; the loop below detects that
                write_all(worker.commands, COMMAND.pack(call, stage, *self.mail.place))
        working = set(self.workers)
        while working:
            for results in wait(list(working)):
                assert isinstance(results, int)
                try:
                    kind, number, value = _received(results)
                except (EOFError, OSError):
                    raise self._died(results, what) from None
                if kind == _DONE:
                    working.discard(results)
                elif kind == _ERROR:
                    raise _error(value)
                else:
                    found(number, value)

    def end(self) -> None:
        """Kill all worker processes, even in the middle of an item, and close the pipes."""
        for worker in self.workers.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker.process, signal.SIGKILL)
        for results, worker in self.workers.items():
            with contextlib.suppress(ChildProcessError):
                os.waitpid(worker.process, 0)
            os.close(results)
            os.close(worker.commands)
        for file in self.tokens if self.mail.open else ():
            os.close(file)
        self.workers = {}
        self.mail.close()

    def _start(self, number: int) -> None:
        read, write = os.pipe()
        commands, tell = os.pipe()
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with warnings.catch_warnings():
            # From 3.12 on, Python warns that other threads may hold locks during the fork. A worker takes none of these
            # locks.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process:
            os.close(write)
            os.close(commands)
            self.workers[read] = _Worker(number, process, tell)
            return
        try:  # in the worker
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets the signal, and ends its workers
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            gc.disable()  # garbage collection would write to memory that is still shared
            for file in (read, tell, self.tokens[1]):
                os.close(file)
            for other, worker in self.workers.items():
                os.close(other)
                os.close(worker.commands)
            self._work(commands, write)
        finally:
            os._exit(0)  # no cleanup, because the parent cleans up its own objects

    def _work(self, commands: int, results: int) -> None:
        """Run the loop of a worker process until the parent process exits or kills the worker."""
        try:
            while command := os.read(commands, COMMAND.size):
                call, stage, *place = COMMAND.unpack(command)
                all_items, state = self.mail.content(place)
                work, items = self.calls[call], all_items[stage]
                last = stage == len(all_items) - 1
                while (token := os.read(self.tokens[0], TOKEN.size)) and (first := TOKEN.unpack(token)[0]) != NO_MORE:
                    for number in range(first, min(first + _run(items), len(items))):
                        result = work(state, items[number])
                        if last:
                            _send(results, _RESULT, number, result)
                _send(results, _DONE, stage, None)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # the exception object cannot be pickled
                error = BuildError(f"{type(error).__name__}: {error}")
            _send(results, _ERROR, 0, (error, text))

    def _died(self, results: int, what: str) -> BuildError:
        worker = self.workers.pop(results)
        os.close(results)
        os.close(worker.commands)
        code = os.waitstatus_to_exitcode(os.waitpid(worker.process, 0)[1])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        why = " The system kills processes when memory runs out: use fewer workers." if code == -signal.SIGKILL else ""
        return BuildError(
            f"worker {worker.number + 1} of {self.count} (process {worker.process}) {how} while {what}; "
            f"nothing was written.{why}"
        )


class _Mail:
    """Data that a parent sends to all of its workers with one copy, in shared memory.

    Attributes:
        place: number of the content, and start and size in bytes of its pickle in the shared memory.
        open: whether the shared memory exists.
    """

    def __init__(self, inherited: Any) -> None:
        """`inherited` is the data of the first run, its items and state, which workers have had since they were
        forked."""
        self.place = (0, 0, 0)
        self.open = True
        self._content = inherited
        self._read = 0
        self._file = os.memfd_create("rooftop scene build")

    def forget(self) -> None:
        """In the parent process, drop the data of the first run, which only workers need."""
        self._content = None

    def post(self, content: Any) -> None:
        """In the parent process, write new data for the workers to the shared memory. Each array is copied once for all
        workers, and not into the pickle."""
        arrays: list[pickle.PickleBuffer] = []
        body = pickle.dumps(content, protocol=5, buffer_callback=arrays.append)
        views = [array.raw() for array in arrays]
        ends = np.cumsum([0, *(-(-view.nbytes // ALIGNMENT) * ALIGNMENT for view in views)]).tolist()
        described = pickle.dumps((body, [(at, view.nbytes) for at, view in zip(ends, views, strict=False)]))
        for at, view in zip(ends, views, strict=False):
            write_all(self._file, view, at)
        write_all(self._file, described, ends[-1])
        self.place = (self.place[0] + 1, ends[-1], len(described))

    def content(self, place: Sequence[int]) -> Any:
        """In a worker process, return the data that the parent wrote to the shared memory at `place`. Its arrays are
        read-only."""
        number, at, size = place
        if number != self._read:
            self._content, self._read = None, number
            memory = memoryview(mmap.mmap(self._file, at + size, access=mmap.ACCESS_READ))
            body, places = pickle.loads(memory[at : at + size])
            self._content = pickle.loads(body, buffers=[memory[first : first + length] for first, length in places])
        return self._content

    def close(self) -> None:
        if self.open:
            os.close(self._file)
            self.open = False


def _run(items: Sequence[Any]) -> int:
    """The number of consecutive items that a worker takes with one token from the pipe. It keeps the tokens for the
    items of a stage within `MOST_TOKENS`.
    """
    return -(-len(items) // MOST_TOKENS) or 1


def _send(results: int, kind: int, number: int, value: Any) -> None:
    """Send a value through the pipe `results`: first the pickled value without its arrays, then the bytes of the
    arrays."""
    arrays: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    views = [array.raw() for array in arrays]
    described = pickle.dumps((kind, number, body, [view.nbytes for view in views]))
    write_all(results, LENGTH.pack(len(described)) + described)
    for view in views:
        write_all(results, view)


def _received(results: int) -> tuple[int, int, Any]:
    """Receive the data of `_send`.

    Raises:
        EOFError: the process has ended.
    """
    described = _read(results, LENGTH.unpack(_read(results, LENGTH.size))[0])
    kind, number, body, sizes = pickle.loads(described)
    return kind, number, pickle.loads(body, buffers=[_read(results, size) for size in sizes])


def _read(file: int, size: int) -> memoryview:
    """Read `size` bytes from a pipe.

    Raises:
        EOFError: the pipe is closed before that.
    """
    found = np.empty(size, np.uint8).data  # np.empty, because bytearray would fill the memory with zeros first
    left = found
    while left:
        got = os.readv(file, [left])
        if not got:
            raise EOFError
        left = left[got:]
    return found


def write_all(file: int, data: bytes | bytearray | memoryview, at: int | None = None) -> None:
    """Write all data, to a pipe, or to a file from byte `at` on."""
    left = memoryview(data)
    while left:
        if at is None:
            left = left[os.write(file, left) :]
        else:
            written = os.pwrite(file, left, at)
            left, at = left[written:], at + written


def _error(value: tuple[BaseException, str]) -> BaseException:
    error, text = value
    error.add_note(f"In a worker process:\n{text}")
    return error
