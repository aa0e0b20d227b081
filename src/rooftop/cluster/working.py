"""The work on chunks of items in a worker: items are decoded ahead, the target gets batches, the result is a table.

If an item fails, only this item becomes a row with an error. If a batch fails, its items are tried one by one.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from rooftop.cluster.items import Decoding, Item, decoder
from rooftop.cluster.tables import Failure, Row, joined, row_of, to_batch
from rooftop.cluster.targets import PipelinedCall, Target
from rooftop.errors import MissingExtraError

ROWS_AT_ONCE = 64  # rows that become a table at a time, which takes 1 to 2 ms


@dataclass(frozen=True)
class Job:
    """The data that a worker needs before its first chunk.

    Attributes:
        threads: decoding threads of a worker, or its decoding processes.
        processes: whether they are processes.
        timeout_s: time limit of an item or a batch; None: no limit.
    """

    target: Target
    decoding: Decoding
    threads: int
    timeout_s: float | None = None
    processes: bool = False

    @property
    def batch(self) -> int:
        """Largest number of items per call."""
        return self.target.batch or 1

    def decoder(self) -> Callable[[Item], Any]:
        """The function that decodes an item for the target."""
        plain = decoder(self.decoding)
        prepare = self.target.prepare
        if prepare is None:
            return plain
        from rooftop.media.images import pillow_image

        return lambda item: prepare(pillow_image(item.source)) if item.content is None else plain(item)


@dataclass
class Chunk:
    """Items that a worker gets in one message.

    Attributes:
        columns: the columns known when the chunk was sent; `learn`: whether its rows may set unknown ones.
        deaths: number of workers that ended while they had the chunk.
        careful: whether the chunk is a single item that may end workers; its worker then has no other chunk.
    """

    number: int
    items: list[Item]
    columns: Any = None
    learn: bool = False
    deaths: int = 0
    careful: bool = False


@dataclass(frozen=True)
class Outcome:
    """A finished chunk: its rows, the columns known afterwards, and its times.

    Attributes:
        batch: a pyarrow.RecordBatch.
        decoded, called: number of items decoded, and passed to the target.
        decode_s, call_s: seconds of the decoding threads, and of the target: those of its GPU for a `PipelinedCall`.
        worker: name of the worker; `threads`: its decoding threads, or processes if `processes`.
    """

    batch: Any
    errors: int
    columns: Any
    decoded: int
    called: int
    decode_s: float
    call_s: float
    worker: str = ""
    threads: int = 1
    processes: bool = False


@dataclass(frozen=True)
class Decoded:
    """The value of an item, or its error, and the thread's seconds for it."""

    value: Any
    seconds: float


def decoded(decode: Callable[[Item], Any], item: Item) -> Decoded:
    """Decode an item. A damaged one is a `Failure`.

    Raises:
        MissingExtraError: a package for all items is not installed.
    """
    begun = time.perf_counter()
    try:
        value = decode(item)
    except MissingExtraError:
        raise
    except (Exception, SystemExit) as error:
        value = Failure.of(error)
    return Decoded(value, time.perf_counter() - begun)


class Ahead(Protocol):
    """Decodes items before they are needed."""

    def take(self, count: int) -> list[Decoded]:
        """Return the next items, in order; they must exist."""


class AheadByThreads:
    """Items decoded by threads in order, a few of them ahead.

    Args:
        more: returns the next items, if any are available yet.
        ahead: largest number of items decoded ahead.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        decode: Callable[[Item], Any],
        more: Callable[[], Sequence[Item] | None],
        ahead: int,
    ) -> None:
        self._pool, self._decode, self._more, self._most = pool, decode, more, ahead
        self._waiting: deque[Item] = deque()
        self._begun: deque[Future[Decoded]] = deque()

    def take(self, count: int) -> list[Decoded]:
        """Return the next items, which must exist."""
        found = []
        for _ in range(count):
            self._begin()
            found.append(self._begun.popleft().result())
        self._begin()
        return found

    def _begin(self) -> None:
        while len(self._begun) < self._most:
            if not self._waiting and (items := self._more()):
                self._waiting.extend(items)
            if not self._waiting:
                return
            self._begun.append(self._pool.submit(decoded, self._decode, self._waiting.popleft()))


At = Callable[[Chunk, int, int], AbstractContextManager[Any]]
"""Makes a context manager around the work on the items (first, count) of a chunk."""


@dataclass
class _Progress:
    """A chunk on its way through the target."""

    chunk: Chunk
    columns: Any
    outcomes: list[Row | Failure] = field(default_factory=list)  # not yet in a table
    tables: list[Any] = field(default_factory=list)
    done: int = 0
    errors: int = 0
    decode_s: float = 0.0
    call_s: float = 0.0
    called: int = 0

    @property
    def complete(self) -> bool:
        return self.done == len(self.chunk.items)

    def add(self, outcomes: list[Row | Failure]) -> None:
        """Add the outcomes of the next items. They become rows when they are many or the last ones.

        A whole chunk at once would take longer than the GPU works on the batch in progress.
        """
        self.outcomes += outcomes
        first = self.done
        if first + len(self.outcomes) < len(self.chunk.items) and len(self.outcomes) < ROWS_AT_ONCE:
            return
        items = self.chunk.items[first : first + len(self.outcomes)]
        table, errors, self.columns = to_batch(items, self.outcomes, self.columns, self.chunk.learn)
        self.tables.append(table)
        self.errors += errors
        self.done += len(items)
        self.outcomes = []

    def table(self) -> Any:
        """All rows, as a pyarrow.RecordBatch."""
        return self.tables[0] if len(self.tables) == 1 else joined(self.tables, self.columns)


@dataclass(frozen=True)
class _Batch:
    """A batch that is begun: its items, and what `PipelinedCall.begin` returned, or the error that it raised."""

    progress: _Progress
    first: int
    decoded: list[Decoded]
    values: list[Any]
    begun: Any


class Workshop:
    """A job in a worker: the target loaded.

    Args:
        decode: `job.decoder()`, if it exists already.
    """

    def __init__(self, job: Job, device: str, worker: str, decode: Callable[[Item], Any] | None = None) -> None:
        self.job, self.worker = job, worker
        self.decode = decode or job.decoder()
        self.call = job.target.load(device)
        self._pipelined = self.call if isinstance(self.call, PipelinedCall) else None
        self.pins = bool(getattr(self.call, "pins", False))  # whether the call copies from pinned memory
        self.pool = ThreadPoolExecutor(job.threads, "rooftop-decode")  # its threads start when they are needed

    def ahead(self, more: Callable[[], Sequence[Item] | None]) -> AheadByThreads:
        """Decode the items of `more` ahead: two per thread, or a batch, while the target works on the last ones."""
        return AheadByThreads(self.pool, self.decode, more, max(2 * self.job.threads, 2 * self.job.batch))

    def do(self, chunk: Chunk, decoding: Ahead, at: At) -> Outcome:
        """Do all items of a chunk, which come next from `decoding`. Arguments and errors are those of `outcomes`."""
        given = [chunk]
        (outcome,) = self.outcomes(lambda wait: given.pop() if given else None, decoding, at)
        return outcome

    def outcomes(self, chunks: Callable[[bool], Chunk | None], decoding: Ahead, at: At) -> Iterator[Outcome]:
        """Do chunks, in order. With a `PipelinedCall`, a batch is begun before the results of the last one are read.

        Args:
            chunks: returns the next chunk, or None if there is none yet. Called with True, it waits for one, and None
                is the end.
            decoding: its items come in the order of the chunks.

        Raises:
            InputError: the first good result cannot become a row of a table.
        """
        begun: deque[_Batch] = deque()
        most = 0 if self._pipelined is None else 1
        while True:
            chunk = chunks(not begun)
            if chunk is None and not begun:
                return
            if chunk is None:
                yield from self._finished(begun.popleft(), at)
                continue
            progress = _Progress(chunk, chunk.columns)
            for first in range(0, len(chunk.items), self.job.batch):
                begun.append(self._begun(progress, first, decoding, at))
                while len(begun) > most:
                    yield from self._finished(begun.popleft(), at)

    def _begun(self, progress: _Progress, first: int, decoding: Ahead, at: At) -> _Batch:
        count = min(self.job.batch, len(progress.chunk.items) - first)
        with at(progress.chunk, first, count):
            found = decoding.take(count)
            values = [each.value for each in found if not isinstance(each.value, Failure)]
            begun = None
            if values and self._pipelined is not None:
                try:
                    begun = self._pipelined.begin(values)
                except (Exception, SystemExit) as error:
                    begun = error
            elif values:  # here, so that decoding and call have one time limit
                begun = self._called(progress, values, lambda: self.call(values))
        return _Batch(progress, first, found, values, begun)

    def _finished(self, batch: _Batch, at: At) -> Iterator[Outcome]:
        """Read the results of a batch. Yield the outcome of its chunk, if that is complete."""
        progress, chunk, count = batch.progress, batch.progress.chunk, len(batch.decoded)
        results = batch.begun or []
        if batch.values and self._pipelined is not None:
            with at(chunk, batch.first, count):
                results = self._called(progress, batch.values, partial(_read, self._pipelined, batch.begun))
        progress.decode_s += sum(each.seconds for each in batch.decoded)
        progress.called += len(batch.values)
        rows = iter(results)
        progress.add([each.value if isinstance(each.value, Failure) else next(rows) for each in batch.decoded])
        if progress.complete:
            yield Outcome(
                progress.table(), progress.errors, progress.columns, progress.done, progress.called,
                progress.decode_s, progress.call_s, self.worker, self.job.threads, self.job.processes,
            )  # fmt: skip

    def _called(self, progress: _Progress, values: list[Any], call: Callable[[], Sequence[Any]]) -> list[Row | Failure]:
        """The results of a call. If it raises, each value is tried alone."""
        begun, before = time.perf_counter(), self._device_s()
        try:
            return [row_of(result) for result in call()]
        except (Exception, SystemExit) as error:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(error, torch.AcceleratorError):
                raise  # this process cannot use its GPU any more; another process continues
            if len(values) == 1:
                return [Failure.of(error)]
            return [self._alone(value) for value in values]
        finally:
            after = self._device_s()
            progress.call_s += time.perf_counter() - begun if before is None or after is None else after - before

    def _alone(self, value: Any) -> Row | Failure:
        (found,) = self._called(_Progress(Chunk(0, []), None), [value], lambda: self.call([value]))
        return found

    def _device_s(self) -> float | None:
        """Seconds of the device so far; None: the host's clock counts."""
        return None if self._pipelined is None else self._pipelined.device_s


def _read(call: PipelinedCall, begun: Any) -> Sequence[Any]:
    if isinstance(begun, BaseException):
        raise begun
    return call.finish(begun)
