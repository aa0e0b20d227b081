"""Worker processes that compute parts of the python ladder's work, with each of Python's ways to pass data.

`pickled_bytes` counts the copied bytes. For a Pool, a Queue or a Pipe, one process pickles an object and writes it to a
pipe; the other process reads and unpickles it. Tensors after `share_memory_` are in memory that both processes map.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import BaseContext
from multiprocessing.pool import Pool
from multiprocessing.reduction import ForkingPickler
from queue import Empty
from typing import Any, cast

from rooftop.ladder.nearest import Array

MOST = 16  # largest number of processes: more would show nothing new
JOIN_S = 10.0
ANSWER_S = 120.0  # maximum seconds to wait for a result in a queue, since a dead worker never sends one
LOOK_S = 0.5  # seconds between two looks whether all processes of the pool live
SERVER = "forkserver"


def context() -> BaseContext:
    """The start method of the processes. The start method is never fork, which copies locks that other threads hold.

    A fork server, if the system has one, imports the modules that all workers need, once.
    """
    if SERVER not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    found = multiprocessing.get_context(SERVER)
    found.set_forkserver_preload(["rooftop.ladder.worker_processes", "rooftop.ladder.nearest_loops", "torch"])
    return found


def bounds(count: int, parts: int) -> list[tuple[int, int]]:
    """Divide range(count) into consecutive parts, each as (first, end)."""
    return [(count * n // parts, count * (n + 1) // parts) for n in range(parts)]


def pickled_bytes(objects: Iterable[object]) -> int:
    """The number of bytes that a pipe would carry for these objects in pickled form."""
    return sum(len(ForkingPickler.dumps(each)) for each in objects)


def by_queue(tasks: Any, results: Any) -> None:
    """The loop of a worker process: take (number, points, centres) from the queue `tasks`, and put (number, distances)
    into the queue `results`. The loop ends at None.
    """
    from rooftop.ladder.nearest_loops import of_part

    for number, points, centres in iter(tasks.get, None):
        results.put((number, of_part(points, centres)))


def by_pipe(connection: Connection) -> None:
    """A worker that takes (points, centres) from a pipe and sends distances back, until it gets None."""
    from rooftop.ladder.nearest_loops import of_part

    for points, centres in iter(connection.recv, None):
        connection.send(of_part(points, centres))


def by_shared_memory(connection: Connection, points: Any, centres: Any, nearest: Any) -> None:
    """A worker that shares the tensors with its parent. It takes (first, end) from a pipe, computes the distances of
    the points first to end - 1, and sends True back, until it gets None.
    """
    from rooftop.ladder.nearest_loops import for_vectors

    arrays = points.numpy(), centres.numpy(), nearest.numpy()
    for first, last in iter(connection.recv, None):
        for_vectors(*arrays, first, last)
        connection.send(True)


@dataclass
class Workers:
    """Running worker processes, `count` for each way to pass data.

    Attributes:
        count: number of workers for each way.
        pool: the pool of `in_pool`.
        tasks, results: queues of the workers of `by_queue`.
        pipes: pipes to the workers of `by_pipe`.
        shared: pipes to the workers of `by_shared_memory`.
        distances: results that the workers share, (n,) float32.
    """

    count: int
    pool: Pool
    tasks: Any
    results: Any
    pipes: Sequence[Connection]
    shared: Sequence[Connection]
    distances: Array
    _stack: ExitStack

    @classmethod
    def start(cls, count: int, points: Array, centres: Array) -> Workers:
        """Start all workers. `start` copies points and centres once into shared memory."""
        import torch
        import torch.multiprocessing  # with this import, pickle sends handles of shared tensors instead of their data

        started, stack = context(), ExitStack()
        try:
            pool = stack.enter_context(started.Pool(count))
            tasks, results = (_queue(stack, started) for _ in range(2))
            takers: list[Any] = []
            stack.callback(_end, takers, tasks.put)
            takers.extend(_begin(started, by_queue, tasks, results) for _ in range(count))
            pipes = [_with_pipe(stack, started, by_pipe) for _ in range(count)]
            tensors = [
                torch.from_numpy(points).clone(),
                torch.from_numpy(centres).clone(),
                torch.empty(points.shape[1]),
            ]
            for tensor in tensors:
                tensor.share_memory_()
            shared = [_with_pipe(stack, started, by_shared_memory, *tensors) for _ in range(count)]
        except BaseException:
            stack.close()
            raise
        return cls(count, pool, tasks, results, pipes, shared, tensors[2].numpy(), stack)

    def close(self) -> None:
        """End all workers, and wait until they have ended."""
        self._stack.close()

    def in_pool(self, function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call a function for each tuple of arguments in the pool. Return the results in that order.

        Raises:
            RuntimeError: a process of the pool has ended. The pool replaces it, but its result never comes.
        """
        processes = list(cast(Any, self.pool)._pool)
        results = self.pool.starmap_async(function, arguments)
        while not results.ready():
            results.wait(LOOK_S)
            ended = [process.exitcode for process in processes if process.exitcode is not None]
            if ended and not results.ready():
                raise RuntimeError(f"a process of the pool has ended with exit code {ended[0]}")
        return results.get()

    def through_queue(self, parts: Sequence[Array], centres: Array) -> list[Array]:
        """Send each part to a free worker through a queue. Return the distances in the order of the parts."""
        for number, part in enumerate(parts):
            self.tasks.put((number, part, centres))
        try:
            found = dict(self.results.get(timeout=ANSWER_S) for _ in parts)
        except Empty:
            raise RuntimeError(
                f"the queue has had no result for {ANSWER_S:.0f} s: a worker process has ended"
            ) from None
        return [found[number] for number in range(len(parts))]

    def through_pipes(self, parts: Sequence[Array], centres: Array) -> list[Array]:
        """Send part n to worker n through a pipe. Return the distances in the order of the parts."""
        for pipe, part in zip(self.pipes, parts, strict=True):
            pipe.send((part, centres))
        return [_received(pipe) for pipe in self.pipes]

    def through_shared_memory(self, parts: Sequence[tuple[int, int]]) -> Array:
        """Let worker n compute the distances of part n of the points in shared memory, and return all distances. Only
        the bounds (first, end) of the parts pass through the pipes.
        """
        for pipe, part in zip(self.shared, parts, strict=True):
            pipe.send(part)
        for pipe in self.shared:
            _received(pipe)
        return self.distances


def _received(pipe: Connection) -> Any:
    """Wait for an object from a worker's pipe.

    Raises:
        RuntimeError: the worker process has ended.
    """
    try:
        return pipe.recv()
    except (EOFError, OSError):
        raise RuntimeError("a worker process has ended before it sent its result") from None


def _queue(stack: ExitStack, started: BaseContext) -> Any:
    found = started.Queue()
    stack.callback(found.join_thread)
    stack.callback(found.close)
    return found


def _begin(started: BaseContext, target: Any, *arguments: Any) -> Any:
    process = cast(Any, started).Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def _with_pipe(stack: ExitStack, started: BaseContext, target: Any, *arguments: Any) -> Connection:
    here, there = started.Pipe()
    process = _begin(started, target, there, *arguments)
    there.close()
    stack.callback(here.close)
    stack.callback(_end, [process], here.send)
    return here


def _end(processes: Sequence[Any], tell: Any) -> None:
    """Ask processes to end, and terminate those that do not end. The processes may share a queue, from which any of
    them takes the next message, so all messages are sent before the first process is awaited."""
    with suppress(OSError):  # a process has just ended, and nobody reads its pipe
        for _ in [process for process in processes if process.is_alive()]:
            tell(None)
    for process in processes:
        process.join(JOIN_S)
        if process.is_alive():
            process.terminate()
            process.join(JOIN_S)
