"""How a worker computes chunks of items: it decodes items ahead, calls the target with batches, and makes a table of
the results.

If an item fails, only this item becomes a row with an error. If a batch fails, its items are retried one by one.

Every exception of a user's code is such a failure, also KeyboardInterrupt: workers ignore Ctrl-C, so only the code
itself can have raised it. The process that started the run handles Ctrl-C. Only `torch.AcceleratorError` is passed on,
because the process can no longer use its GPU after this error.
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
from rooftop.cluster.tables import Failure, Row, is_table, joined, row_of, to_batch, with_items
from rooftop.cluster.targets import PipelinedCall, Reads, Target
from rooftop.errors import MissingExtraError

ROWS_AT_ONCE = 64  # rows that are converted to a table at a time, in 1 to 2 ms


@dataclass(frozen=True)
class Job:
    """Everything that a worker needs before its first chunk.

    Attributes:
        threads: number of a worker's decoding threads, or of its decoding processes.
        processes: whether processes decode, instead of threads.
        timeout_s: time limit in seconds for a batch (without batches, for an item); None: no limit.
    """

    target: Target
    decoding: Decoding
    threads: int
    timeout_s: float | None = None
    processes: bool = False

    @property
    def batch(self) -> int:
        """Maximum number of items per call."""
        return self.target.batch or 1

    def decoder(self, device: str) -> Callable[[Item], Any]:
        """The function that decodes an item for the target of a worker on "cpu" or "cuda"."""
        plain = decoder(self.decoding)
        prepare = self.target.prepare
        if prepare is None:
            return plain
        read = partial(prepare.read, device=device) if isinstance(prepare, Reads) else partial(_prepared, prepare)
        return lambda item: read(item.source) if item.content is None else plain(item)


def _prepared(prepare: Callable[[Any], Any], path: str) -> Any:
    from rooftop.media.images import pillow_image

    return prepare(pillow_image(path))


@dataclass
class Chunk:
    """Items that a worker gets in one message.

    Attributes:
        columns: the columns that were known when the chunk was sent. `learn` says whether the chunk's rows may set
            unknown columns.
        deaths: number of workers that have ended while they had the chunk.
        careful: whether the chunk is a single item that may kill workers. The worker of such a chunk gets no other
            chunk.
    """

    number: int
    items: list[Item]
    columns: Any = None
    learn: bool = False
    deaths: int = 0
    careful: bool = False


@dataclass(frozen=True)
class Outcome:
    """A finished chunk: its rows, the columns that are known afterwards, and its times.

    Attributes:
        batch: a pyarrow.RecordBatch.
        decoded, called: number of items that were decoded, and number that were passed to the target.
        decode_s: seconds of decoding, the sum over all threads or processes.
        call_s: seconds of the target; for a `PipelinedCall`, of its device.
        worker: name of the worker. `threads` is the worker's number of decoding threads, or of decoding processes if
            `processes`.
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
    """An item's value, or the `Failure` of its decoding, and the seconds that the decoding took."""

    value: Any
    seconds: float


def decoded(decode: Callable[[Item], Any], item: Item) -> Decoded:
    """Decode an item. If decoding raises, the value is a `Failure`.

    Raises:
        MissingExtraError: a package that decoding needs is not installed. This error does not become a `Failure`,
            because it would affect all items.
    """
    begun = time.perf_counter()
    try:
        value = decode(item)
    except MissingExtraError:
        raise
    except BaseException as error:
        value = Failure.of(error)
    return Decoded(value, time.perf_counter() - begun)


class Ahead(Protocol):
    """Decodes items before they are needed."""

    def take(self, count: int) -> list[Decoded]:
        """Wait for the next `count` items and return them in order. They must be in chunks that the worker has."""


class AheadByThreads:
    """Decodes items in order by threads, a few items ahead.

    Args:
        more: returns the next items, or None if none are available yet.
        ahead: maximum number of items to decode ahead.
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
        """Wait for the next `count` items and return them in order. `more` must have returned them, or return them
        when it is called next."""
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
"""A function that makes the context manager in which a worker processes the items (first, count) of a chunk."""


@dataclass
class _Progress:
    """The state of a chunk while its items are computed: finished outcomes and tables, and sums of items, errors and
    seconds."""

    chunk: Chunk
    columns: Any
    outcomes: list[Row | Failure] = field(default_factory=list)  # outcomes that are not yet in a table
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
        """Add the outcomes of the next items. Outcomes become rows of a table once ROWS_AT_ONCE of them wait, or
        when the chunk is complete.

        Converting a whole chunk at once would take longer than the GPU needs for the batch in progress.
        """
        self.outcomes += outcomes
        if self.done + len(self.outcomes) == len(self.chunk.items) or len(self.outcomes) >= ROWS_AT_ONCE:
            self._convert()

    def add_table(self, results: Any) -> None:
        """Add the results of the next items, of which none failed: a pyarrow.RecordBatch with the schema `columns`."""
        self._convert()
        items = self.chunk.items[self.done : self.done + results.num_rows]
        self.tables.append(with_items(items, results))
        self.done += len(items)

    def _convert(self) -> None:
        if not self.outcomes:
            return
        items = self.chunk.items[self.done : self.done + len(self.outcomes)]
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
    """A batch of items from number `first` of a chunk on.

    `begun` is the return value or the error of `PipelinedCall.begin`; for any other call, the call's results; None if
    no item could be decoded.
    """

    progress: _Progress
    first: int
    decoded: list[Decoded]
    values: list[Any]
    begun: Any


class Workshop:
    """A job that a worker has loaded, with its target.

    Args:
        decode: the result of `job.decoder(device)`, if the caller has it already.
    """

    def __init__(self, job: Job, device: str, worker: str, decode: Callable[[Item], Any] | None = None) -> None:
        self.job, self.worker = job, worker
        self.decode = decode or job.decoder(device)
        self.call = job.target.load(device)
        self._pipelined = self.call if isinstance(self.call, PipelinedCall) else None
        self.pins = bool(getattr(self.call, "pins", False))  # whether pinned inputs need no copy on the host
        self.pool = ThreadPoolExecutor(job.threads, "rooftop-decode")  # starts its threads when they are needed

    def ahead(self, more: Callable[[], Sequence[Item] | None]) -> AheadByThreads:
        """Decode the items that `more` returns in threads, before they are needed. Two items per thread, or two batches
        if that is more, are decoded ahead."""
        return AheadByThreads(self.pool, self.decode, more, max(2 * self.job.threads, 2 * self.job.batch))

    def do(self, chunk: Chunk, decoding: Ahead, at: At) -> Outcome:
        """Process all items of a chunk, which `decoding` returns next. Arguments and errors are those of `outcomes`."""
        given = [chunk]
        (outcome,) = self.outcomes(lambda wait: given.pop() if given else None, decoding, at)
        return outcome

    def outcomes(self, chunks: Callable[[bool], Chunk | None], decoding: Ahead, at: At) -> Iterator[Outcome]:
        """Process chunks in order. With a `PipelinedCall`, a batch begins before the results of the previous batch are
        read.

        Args:
            chunks: returns the next chunk, or None if there is none yet. `chunks(True)` waits for a chunk, and returns
                None at the end.
            decoding: returns the items in the order of the chunks.

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
        """Decode the items of a batch, and begin to call the job's target (`self.call`) with the decoded values. A call
        that is not pipelined also ends here."""
        count = min(self.job.batch, len(progress.chunk.items) - first)
        with at(progress.chunk, first, count):
            found = decoding.take(count)
            values = [each.value for each in found if not isinstance(each.value, Failure)]
            begun = None
            if values and self._pipelined is not None:
                try:
                    begun = self._pipelined.begin(values)
                except BaseException as error:
                    begun = error
            elif values:  # called here, so that one time limit covers decoding and call
                begun = self._called(progress, values, lambda: self.call(values))
        return _Batch(progress, first, found, values, begun)

    def _finished(self, batch: _Batch, at: At) -> Iterator[Outcome]:
        """Read the results of a batch. If this completes the batch's chunk, yield the chunk's outcome."""
        progress, chunk, count = batch.progress, batch.progress.chunk, len(batch.decoded)
        results: Any = [] if batch.begun is None else batch.begun
        if batch.values and self._pipelined is not None:
            with at(chunk, batch.first, count):
                results = self._called(progress, batch.values, partial(_read, self._pipelined, batch.begun))
        progress.decode_s += sum(each.seconds for each in batch.decoded)
        progress.called += len(batch.values)
        if is_table(results) and len(results) == count and results.schema.equals(progress.columns):
            progress.add_table(results)
        else:
            rows = iter(results.to_pylist() if is_table(results) else results)
            progress.add([each.value if isinstance(each.value, Failure) else next(rows) for each in batch.decoded])
        if progress.complete:
            yield Outcome(
                progress.table(), progress.errors, progress.columns, progress.done, progress.called,
                progress.decode_s, progress.call_s, self.worker, self.job.threads, self.job.processes,
            )  # fmt: skip

    def _called(self, progress: _Progress, values: list[Any], call: Callable[[], Any]) -> Any:
        """Call the target on decoded values. Return its pyarrow.RecordBatch, or else a list with a row or a failure for
        each value. If the call raises, call the target on each value alone."""
        begun, before = time.perf_counter(), self._device_s()
        try:
            results = call()
            return results if is_table(results) else [row_of(result) for result in results]
        except BaseException as error:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(error, torch.AcceleratorError):
                raise  # this process can no longer use its GPU, so another process must continue
            if len(values) == 1:
                return [Failure.of(error)]
            return [self._alone(value) for value in values]
        finally:
            after = self._device_s()
            progress.call_s += time.perf_counter() - begun if before is None or after is None else after - before

    def _alone(self, value: Any) -> Row | Failure:
        (found,) = self._called(_Progress(Chunk(0, []), None), [value], lambda: self.call([value]))
        row: Row | Failure = found
        return row

    def _device_s(self) -> float | None:
        """Seconds that the device has spent on all calls that the target has finished so far. None if the target is not
        pipelined: the host's clock then measures the calls."""
        return None if self._pipelined is None else self._pipelined.device_s


def _read(call: PipelinedCall, begun: Any) -> Any:
    if isinstance(begun, BaseException):
        raise begun
    return call.finish(begun)
