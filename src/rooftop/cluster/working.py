"""The work on a chunk of items in a worker: threads decode ahead, the target gets batches, the result is a table.

An item fails alone: it becomes a row with its error. If a batch fails, its items are tried one by one.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from rooftop.cluster.items import Decoding, Item, decoder
from rooftop.cluster.tables import Failure, Row, row_of, to_batch
from rooftop.cluster.targets import Target
from rooftop.errors import MissingExtraError


@dataclass(frozen=True)
class Job:
    """Everything a worker needs to know before its first chunk.

    Attributes:
        threads: decoding threads of a worker.
        timeout_s: time limit of an item or a batch; None: no limit.
    """

    target: Target
    decoding: Decoding
    threads: int
    timeout_s: float | None = None

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
    """Items that a worker gets together.

    Attributes:
        columns: known when it was sent; `learn`: whether its rows may set unknown ones.
        deaths: number of workers that ended while they had it.
        careful: whether it is a single item that may end workers; a worker gets it alone.
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
        decode_s, call_s: seconds of the decoding threads, and of the target.
        worker: name of the worker; `threads`: its decoding threads.
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


@dataclass(frozen=True)
class Decoded:
    """The value of an item, or its error, and the seconds of the thread."""

    value: Any
    seconds: float


class Ahead:
    """Items decoded by threads in order, a few of them ahead.

    Args:
        more: returns the next items, if there are any yet.
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

    def next(self) -> Decoded:
        """Return the next item, which must exist."""
        self._begin()
        found = self._begun.popleft().result()
        self._begin()
        return found

    def _begin(self) -> None:
        while len(self._begun) < self._most:
            if not self._waiting and (items := self._more()):
                self._waiting.extend(items)
            if not self._waiting:
                return
            self._begun.append(self._pool.submit(self._decoded, self._waiting.popleft()))

    def _decoded(self, item: Item) -> Decoded:
        begun = time.perf_counter()
        try:
            value = self._decode(item)
        except MissingExtraError:
            raise  # of all items
        except (Exception, SystemExit) as error:
            value = Failure.of(error)
        return Decoded(value, time.perf_counter() - begun)


class Workshop:
    """A job in a worker: the target loaded, threads started."""

    def __init__(self, job: Job, device: str, worker: str) -> None:
        self.job, self.worker = job, worker
        self.decode = job.decoder()
        self.call = job.target.load(device)
        self.pool = ThreadPoolExecutor(job.threads, "rooftop-decode")

    def ahead(self, more: Callable[[], Sequence[Item] | None]) -> Ahead:
        """Decode the items of `more` ahead: two per thread, or a batch, while the target works on the last ones."""
        return Ahead(self.pool, self.decode, more, max(2 * self.job.threads, 2 * self.job.batch))

    def do(self, chunk: Chunk, decoding: Ahead, at: Callable[[int, int], AbstractContextManager[Any]]) -> Outcome:
        """Do all items of a chunk, which come next from `decoding`.

        Args:
            at: a context manager around the decoding and the call for the items (first, count) of the chunk.

        Raises:
            InputError: the first good result cannot become a row of a table.
        """
        outcomes: list[Row | Failure] = []
        decode_s = call_s = 0.0
        called = 0
        for first in range(0, len(chunk.items), self.job.batch):
            count = min(self.job.batch, len(chunk.items) - first)
            with at(first, count):
                decoded = [decoding.next() for _ in range(count)]
                values = [each.value for each in decoded if not isinstance(each.value, Failure)]
                begun = time.perf_counter()
                results = iter(self._results(values))
                call_s += time.perf_counter() - begun
            decode_s += sum(each.seconds for each in decoded)
            called += len(values)
            outcomes += [each.value if isinstance(each.value, Failure) else next(results) for each in decoded]
        batch, errors, columns = to_batch(chunk.items, outcomes, chunk.columns, chunk.learn)
        return Outcome(batch, errors, columns, len(outcomes), called, decode_s, call_s, self.worker, self.job.threads)

    def _results(self, values: list[Any]) -> list[Row | Failure]:
        if not values:
            return []
        try:
            return [row_of(result) for result in self.call(values)]
        except (Exception, SystemExit) as error:
            torch = sys.modules.get("torch")
            if torch is not None and isinstance(error, torch.AcceleratorError):
                raise  # this process can use its GPU no more: another one goes on
            if len(values) == 1:
                return [Failure.of(error)]
        return [self._results([value])[0] for value in values]
