"""Work on all cores, by processes that are forked for it.

Most of a build is NumPy on arrays of middling size, which holds the interpreter's lock: threads would wait for each
other. A forked process sees everything that its parent has, without a copy, and sends back what it has found. Items are
taken from a pipe, one after another; results stand in the order of the items, so they do not depend on how many workers
there are.

Where processes cannot be forked safely (anywhere but on Linux), the work is done in the calling process.
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
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rooftop.errors import BuildError

T = TypeVar("T")
R = TypeVar("R")
V = TypeVar("V", bound=np.generic)
Stage = tuple[Callable[[Any], Any], Sequence[Any]]  # what is called, and with what

TOKEN = struct.Struct("<I")
MOST_TOKENS = 8192  # a pipe holds 16,384 of four bytes
PIPE_BYTES = 1 << 20  # of results: the usual 64 KB make a worker wait for its reader
CHUNK = 1 << 18  # rows of an array that are worked on together
_DONE, _RESULT, _ERROR = range(3)


@dataclass(frozen=True)
class Workers:
    """How many processes work at most; see `run`."""

    count: int

    @classmethod
    def of(cls, count: int | None) -> Workers:
        """So many, or as many as this process has CPUs.

        Raises:
            ValueError: fewer than one.
        """
        if count is None:
            return cls(cpus())
        if count < 1:
            raise ValueError(f"workers is {count}; give 1 or more, or None for one on each CPU ({cpus()} here)")
        return cls(count)

    def run(
        self, work: Callable[[T], R], items: Sequence[T], what: str = "working",
        done: Callable[[int], None] | None = None, before: Sequence[Stage] = (),
    ) -> list[R]:  # fmt: skip
        """The results of all items, in order.

        Args:
            work: is called in a forked process: what it changes is lost, but for `shared` arrays.
            items: that it is called with, in order.
            what: is being done, for messages.
            done: is called with the number of each item whose result has come.
            before: stages that come first, each in all workers before the next: what they return is lost.

        Raises:
            Exception: what `work` raised, with the worker's traceback as a note.
            BuildError: a worker was ended from outside.
        """
        stages = [*before, (work, items)]
        count = min(self.count, max(len(each) for _, each in stages))
        if count < 2 or sys.platform != "linux":
            for earlier, own in before:
                for each in own:
                    earlier(each)
            results = []
            for number, item in enumerate(items):
                results.append(work(item))
                if done is not None:
                    done(number)
            return results
        return _Team(stages, count, what).results(done)


ALONE = Workers(1)  # no process but the calling one


def cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared(shape: int | tuple[int, ...], dtype: type[V]) -> npt.NDArray[V]:
    """An array of zeros in memory that is shared with processes forked later."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, max(size, 1)), dtype, int(np.prod(shape))).reshape(shape)


def chunks(count: int, size: int | None = None) -> list[slice]:
    """Slices of so many rows, by default CHUNK, that cover all."""
    size = size or CHUNK
    return [slice(first, min(first + size, count)) for first in range(0, count, size)]


class _Team:
    """The processes of one `Workers.run`."""

    def __init__(self, stages: Sequence[Stage], count: int, what: str) -> None:
        self.stages, self.count, self.what = stages, count, what
        self.processes: dict[Connection, tuple[int, int]] = {}  # its number and its process
        self.tokens: list[int] = []  # of each stage, a pipe with the items that nobody has taken yet
        self.gates: list[tuple[int, int]] = []  # before each stage but the first, a pipe that is closed to open it
        try:
            for _, items in stages:
                read, write = os.pipe()
                self.tokens.append(read)
                with os.fdopen(write, "wb") as file:
                    file.write(b"".join(TOKEN.pack(first) for first in range(0, len(items), _run(items))))
            self.gates = [os.pipe() for _ in stages[1:]]
            for number in range(count):
                self._start(number)
        except BaseException:
            self._end()
            raise

    def _start(self, number: int) -> None:
        read, write = os.pipe()
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        with warnings.catch_warnings():
            # From 3.12 on Python warns of locks that other threads may hold. A worker takes none of theirs.
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process:
            os.close(write)
            self.processes[Connection(read, writable=False)] = (number, process)
            return
        try:  # in the worker
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is asked, and ends its workers
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            gc.disable()  # it would write to memory that is shared until then
            os.close(read)
            for other in self.processes:
                other.close()
            for _, gate in self.gates:
                os.close(gate)
            with Connection(write, readable=False) as results:
                self._work(results)
        finally:
            os._exit(0)  # nothing of the parent is cleaned up twice

    def _work(self, results: Connection) -> None:
        """What a worker does."""
        try:
            for stage, (work, items) in enumerate(self.stages):
                last = stage == len(self.stages) - 1
                if stage:
                    os.read(self.gates[stage - 1][0], 1)  # nothing is there: it comes back when the gate is closed
                while token := os.read(self.tokens[stage], TOKEN.size):
                    first = TOKEN.unpack(token)[0]
                    for number in range(first, min(first + _run(items), len(items))):
                        result = work(items[number])
                        if last:
                            _send(results, _RESULT, number, result)
                _send(results, _DONE, stage, None)
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            try:
                pickle.loads(pickle.dumps(error))
            except Exception:  # it cannot be sent as it is
                error = BuildError(f"{type(error).__name__}: {error}")
            _send(results, _ERROR, 0, (error, text))

    def results(self, done: Callable[[int], None] | None) -> list[Any]:
        found: list[Any] = [None] * len(self.stages[-1][1])
        try:
            for stage in range(len(self.stages)):
                if stage:
                    os.close(self.gates[stage - 1][1])
                    self.gates[stage - 1] = (self.gates[stage - 1][0], -1)
                working = set(self.processes)
                while working:
                    for connection in wait(list(working)):
                        assert isinstance(connection, Connection)
                        kind, number, value = self._received(connection)
                        if kind == _DONE:
                            working.discard(connection)
                        elif kind == _ERROR:
                            raise _error(value)
                        else:
                            found[number] = value
                            if done is not None:
                                done(number)
        finally:
            self._end()
        return found

    def _received(self, connection: Connection) -> tuple[int, int, Any]:
        try:
            kind, number, body, sizes = pickle.loads(connection.recv_bytes())
            buffers = [np.empty(size, np.uint8) for size in sizes]
            for buffer in buffers:
                if buffer.size:
                    connection.recv_bytes_into(buffer)
        except (EOFError, OSError):
            raise self._died(connection) from None
        return kind, number, pickle.loads(body, buffers=buffers)

    def _died(self, connection: Connection) -> BuildError:
        number, process = self.processes.pop(connection)
        connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
        why = " The system ends processes when memory is short: give fewer workers." if code == -signal.SIGKILL else ""
        return BuildError(
            f"worker {number + 1} of {self.count} (process {process}) {how} while {self.what}; "
            f"nothing was written.{why}"
        )

    def _end(self) -> None:
        """No process is left, whatever it is doing."""
        for connection, (_, process) in self.processes.items():
            connection.close()
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process, 0)
        for file in (*self.tokens, *(end for gate in self.gates for end in gate)):
            if file >= 0:
                os.close(file)
        self.processes, self.tokens, self.gates = {}, [], []


def _run(items: Sequence[Any]) -> int:
    """How many items a token stands for."""
    return -(-len(items) // MOST_TOKENS) or 1


def _send(results: Connection, kind: int, number: int, value: Any) -> None:
    """Arrays are sent as they lie in memory, behind the rest."""
    arrays: list[pickle.PickleBuffer] = []
    body = pickle.dumps(value, protocol=5, buffer_callback=arrays.append)
    views = [array.raw() for array in arrays]
    results.send_bytes(pickle.dumps((kind, number, body, [view.nbytes for view in views])))
    for view in views:
        if view.nbytes:
            results.send_bytes(view)


def _error(value: tuple[BaseException, str]) -> BaseException:
    error, text = value
    error.add_note(f"In a worker process:\n{text}")
    return error
