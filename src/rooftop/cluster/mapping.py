"""`map_items`: map a target over many items, and write the results as Parquet while the run goes on.

    from rooftop.cluster import map_items

    report = map_items("my.py:caption", ["photographs/"], "captions.parquet", timeout_s=60)
    print(report)

One loop sends chunks of items to workers that have room, receives the results, and writes the results. While the loop
writes, workers get no new chunks, so memory is bounded even if the disk is slow. Lost chunks are repeated. If two
workers have died with a chunk, the chunk is repeated item by item. If one more worker then dies with an item of the
chunk, this item becomes a row with an error.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice
from numbers import Real
from pathlib import Path
from typing import Any

from rooftop.cluster.arrow import load_arrow
from rooftop.cluster.events import Event, Finished, Lost, Workers
from rooftop.cluster.items import DECODED, Damage, Decoding, Item, check_count, find_inputs, list_items
from rooftop.cluster.local_workers import CHUNKS_OF_A_WORKER, LocalWorkers, divide
from rooftop.cluster.parts import Parts
from rooftop.cluster.tables import Failure, is_settled, to_batch
from rooftop.cluster.targets import Target, callable_target
from rooftop.cluster.working import Chunk, Job, Outcome
from rooftop.errors import InputError
from rooftop.user_paths import user_path
from rooftop.words import counted

CHUNK_S = 0.5  # target seconds of work per chunk: much longer than sending a message, but cheap to repeat
MOST_ITEMS = 4096  # maximum number of items in a chunk
MOST_BYTES = 16 << 20  # approximate limit on the bytes of a chunk's rows
# Until each column has a type, chunks run one at a time, with at most this many items (the first has one batch). After
# this many items, the types that are known become final.
LEARNED_FROM = 256
DISTURBED_PERCENT = 110  # a higher `percent_of_ceiling` shows that other work disturbed the run
DEATHS = 3  # an item becomes an error row after it or its chunk has ended this many workers
# for each kind of items: the unit in which messages state an item's position
PLACES = {"text": "line", "row": "row", "clip": "frame"}
LOOK_S = 0.2  # seconds between two checks of the workers

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class MapReport:
    """The report of a run.

    Attributes:
        items, errors: number of rows that this run has written, and how many of them have an error.
        before, errors_before: number of rows from earlier runs, and how many of them have an error.
        columns: type of each result column, by name; empty if no item had a result.
        seconds: time of the whole run. `working_s` is the time from the first item given to a worker to the last
            finished item.
        start: seconds of each phase before the first results, by name. The phases of workers are those of the worker
            that was slowest to start.
        items_per_s: items per second from the end of the first chunk to the end of the last chunk; with a single chunk,
            items per second of `working_s`.
        decode_ceiling: items per second that decoding would reach if all its threads or processes were always busy.
            None: decoding took no time. This ceiling and the next one are computed from the times of this run, without
            each worker's first chunk, which may import or compile (with it if no worker got a second chunk).
        call_ceiling: items per second that the target would reach if each worker were always calling it. None: the
            target took no time.
        percent_of_ceiling: `items_per_s` in percent of the lower ceiling.
        workers: number of workers that finished a chunk. `decoding` names the decoders of each worker, such as "16
            processes".
        lost: number of chunks that had to be repeated.
        first_error: file, place and error of the first row of this run with an error, as text, or None.
        unread: the files that could not be read to their end, so that later lines or rows are missing in the results.
    """

    out: Path
    items: int
    errors: int
    before: int
    errors_before: int
    columns: dict[str, str]
    seconds: float
    working_s: float
    start: dict[str, float]
    items_per_s: float | None
    decode_ceiling: float | None
    call_ceiling: float | None
    percent_of_ceiling: float | None
    workers: int
    decoding: str
    lost: int
    first_error: str | None
    unread: list[str]

    def to_dict(self) -> dict[str, Any]:
        """The report as a dict for JSON."""
        return {**asdict(self), "out": str(self.out)}

    def __str__(self) -> str:
        there = f"{counted(self.before, 'row')} from before" if self.before else ""
        unread = []
        if self.unread:
            others = f", as are those of {counted(len(self.unread) - 1, 'other file')}" if self.unread[1:] else ""
            unread.append(f"{self.unread[0]} could not be read to its end: its later lines or rows are missing{others}")
        if not self.items:
            return "\n".join([f"{self.out}: nothing to do, {there or 'no items'}", *unread])
        errors = f", {self.errors:,} of them with an error (column error)" if self.errors else ""
        lines = [f"{self.out}: {counted(self.items, 'row')}{errors}{'; ' + there if there else ''}"]
        if self.items_per_s is not None:
            by = f" by {counted(self.workers, 'worker')}" if self.workers else ""
            decode = "decodes" if self.workers == 1 else "decode"
            decoding = f" that {decode} by {self.decoding}" if self.decoding and self.workers else ""
            speed = f"{self.items_per_s:,.1f} items/s{by}{decoding}"
            lines.append(f"{speed}, {self.seconds:.1f} s in all")
            parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.start.items() if seconds >= 0.05)
            if parts:
                lines.append(f"{sum(self.start.values()):.1f} s until the first results: {parts}")
        if self.percent_of_ceiling is not None and self.decode_ceiling and self.call_ceiling:
            disturbed = " (disturbed by other work)" if self.percent_of_ceiling > DISTURBED_PERCENT else ""
            percent = f"{self.percent_of_ceiling:.0f}%" if self.percent_of_ceiling >= 1 else "less than 1%"
            lines.append(
                f"{percent} of the possible rate: decoding alone reaches {self.decode_ceiling:,.1f} "
                f"items/s, the target alone {self.call_ceiling:,.1f}{disturbed}"
            )
        if self.first_error is not None:
            lines.append(f"the first error: {self.first_error}")
        if self.lost:
            lines.append(f"{counted(self.lost, 'group')} of items computed again, because a process ended or hung")
        return "\n".join([*lines, *unread])


def map_items(
    target: str | Callable[..., Any] | Target,
    inputs: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    kind: str | None = None,
    batch: int | None = None,
    frames: int = 16,
    step: int = 1,
    stride: int | None = None,
    point_columns: int = 4,
    workers: int | None = None,
    device: str = "auto",
    decoders: int | None = None,
    scheduler: str | None = None,
    timeout_s: float | None = None,
    retry_errors: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] | None = None,
) -> MapReport:
    """Call a target for each item of the inputs and write the results as a folder of Parquet parts.

    A row has `input` (the file, as given), `place` (the line, row or first frame in the file, from 0; null for a whole
    file), `error` (one line, or null), and the result's columns. The result's columns are the keys of the dict that the
    target returned, or `result` for any other value. The first good result, in the order of the items, sets the columns
    and their types. Each item has one row, and rows can be in any order. Items that have a row in `out` are not
    computed again.

    Args:
        target: "my.py:fn" or "package.module:fn", a function, a class that each worker instantiates once, or a target
            of `model_target`. A worker calls the target with one item (with `batch`, with a list of items), in the form
            that `rooftop.cluster.items` describes.
        inputs: files, or folders to search recursively.
        out: the folder for the results, which is created.
        kind: "image", "clip", "cloud", "text", "row" or "path". None: found from the files' suffixes.
        batch: if given, the target gets a list of at most this many items, and returns a list with a result for each.
            A target of `model_target` has a batch of its own.
        frames, step, stride: for clips, the frames per clip, the distance between these frames, and the distance
            between the first frames of consecutive clips (None: clips share no frames), in frames of the video.
        point_columns: numbers per point in a .bin file.
        workers: number of processes on this machine. None: one per GPU, or one per four cores on the CPU, and at least
            two if there are two cores.
        device: "cpu", "cuda" or "auto". Each worker sees one GPU.
        decoders: processes per worker that decode photographs, clips and clouds. None: on a GPU one per core,
            divided among the workers, at most 32 per worker; none on the CPU. 0: threads of the worker decode.
        scheduler: the address of a Dask scheduler, such as "tcp://10.0.0.1:8786". The scheduler's workers replace the
            processes on this machine.
        timeout_s: time limit in seconds for one call of the target, including the decoding of its items. If a batch
            takes longer, its items are retried one by one. An item that takes longer becomes a row with an error. None:
            no limit.
        retry_errors: whether to recompute the items whose rows have an error.
        progress: called repeatedly with (the current activity, the finished fraction or 0 if unknown).
        say: called with a line of text about each problem that does not end the run.

    Raises:
        TargetError: the target does not exist.
        InputError: inputs are missing or their kind is unclear; a number is out of range; `out` has results of another
            target or of other arguments, or another run writes to it; or the first good result does not fit into a
            table.
        ModelRunError: workers cannot load the target, or end during their start.
        SchedulerError: no scheduler answers, or the scheduler went away and did not come back. `out` keeps the results
            so far.
        OutputError: the results cannot be written, for example because the disk is full. `out` keeps the results so
            far.
        MissingExtraError: pyarrow, or a package for the kind or the scheduler, is not installed.
    """
    begun = time.monotonic()
    load_arrow()
    if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s > 0):
        raise InputError(f"timeout_s is {timeout_s!r}, expected seconds above 0")
    if workers is not None:
        check_count("workers", workers, 1)
    if decoders is not None:
        check_count("decoders", decoders, 0)
    if scheduler is not None and not isinstance(scheduler, str):
        raise InputError(
            f"scheduler is a {type(scheduler).__name__}, expected the scheduler's address as text, such as "
            "cluster.scheduler_address"
        )
    if scheduler is not None and (workers is not None or decoders is not None):
        given = "workers" if workers is not None else "decoders"
        raise InputError(f"got {given} and a scheduler, which has its own workers: give only one of them")
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(f"device {device!r} is not known: expected auto, cpu or cuda")
    if isinstance(target, Target):
        if batch not in (None, target.batch):
            its = "no batch" if target.batch is None else f"a batch of {target.batch}"
            raise InputError(
                f"got batch={batch!r}, but the target {target.name} was made with {its}: give the batch to the "
                "function that makes the target (model_target)"
            )
        made = target
    else:
        made = callable_target(target, batch)
    if made.prepare is not None:
        if kind not in (None, "image"):
            raise InputError(f"{made.name} accepts photographs, not items of kind {kind}")
        kind = "image"
    kind, files = find_inputs(inputs, kind)
    folder = user_path(out)
    if folder.is_dir() and (own := _inside(files, folder)) is not None:
        raise InputError(f"the input {own} is in {out}, the folder of the results: give another folder")
    decoding = Decoding(kind, frames, step, stride, point_columns)
    arguments = {**decoding.arguments(), **made.arguments}
    with Parts(folder, made.name, arguments, retry_errors) as parts:
        if parts.columns is None and made.columns is not None:
            parts.settle(made.columns)
        unread: list[str] = []
        items = (item for item in _noted(list_items(files, decoding), unread) if item not in parts.done)
        first = next(items, None)
        whole, done = kind in ("image", "cloud", "path"), 0
        if whole and parts.done.rows:  # `out` may also have rows of other inputs
            done = sum(item in parts.done for item in list_items(files, decoding))
        run = _Run(parts, progress, len(files) if whole else None, done)
        if first is not None:
            run.show("workers start")
            run.start["inputs"] = time.monotonic() - begun
            pool, job = _workers(made, decoding, device, workers, decoders, scheduler, timeout_s, say)
            at_once = True
            try:
                run.all(pool, job, chain([first], items))
                run.start = {"inputs": run.start["inputs"], **pool.start, **run.start}  # in chronological order
                at_once = False
            except KeyboardInterrupt:
                if say is not None:
                    say(
                        f"{counted(parts.done.rows + run.in_parts(), 'row')} in {parts.folder}; the same call "
                        "continues the run"
                    )
                raise
            finally:
                pool.close(at_once)
        parts.flush()
        return run.report(time.monotonic() - begun, unread)


def _noted(items: Iterator[Item], unread: list[str]) -> Iterator[Item]:
    """Pass on items, and note the files that cannot be read to their end."""
    for item in items:
        if isinstance(item.content, Damage) and item.content.rest:
            unread.append(item.input)
        yield item


def _inside(files: Sequence[Path], folder: Path) -> Path | None:
    """Return the first of these files that is inside the folder, or None if all files are outside."""
    return next((path for path in files if path.resolve().is_relative_to(folder.resolve())), None)


def _workers(
    target: Target,
    decoding: Decoding,
    device: str,
    workers: int | None,
    decoders: int | None,
    scheduler: str | None,
    timeout_s: float | None,
    say: Callable[[str], None] | None,
) -> tuple[Workers, Job]:
    if scheduler is not None:
        from rooftop.cluster.dask_workers import DaskWorkers

        job = Job(target, decoding, 0, timeout_s)
        return DaskWorkers(scheduler, job, device, say or (lambda line: None)), job
    division = divide(device, workers, decoding.kind in DECODED, decoders)
    if device == "cuda" and division.device != "cuda":
        raise InputError("device is cuda, but torch finds no GPU here: use cpu or auto")
    job = Job(target, decoding, division.decoders or division.decode_threads, timeout_s, division.decoders > 0)
    return LocalWorkers(job, division), job


def size_near_end(size: int, left: int, workers: int, batch: int) -> int:
    """The size of a chunk when this many items are left, in whole batches and at most `size`.

    The remaining items make about two more chunks per worker, so that all workers end at about the same time. A single
    worker gets chunks of full size.
    """
    if workers == 1:
        return size
    share = left // (CHUNKS_OF_A_WORKER * max(1, workers))
    return max(batch, min(size, share // batch * batch))


@dataclass
class _Work:
    """Sums over all finished chunks: how many items were decoded, how many were passed to the target, and the seconds
    of both."""

    decoded: int = 0
    called: int = 0
    decode_s: float = 0.0
    call_s: float = 0.0

    def add(self, outcome: Outcome) -> None:
        self.decoded += outcome.decoded
        self.called += outcome.called
        self.decode_s += outcome.decode_s
        self.call_s += outcome.call_s


class _Run:
    """The loop of a run, and its counters.

    Args:
        files: number of input files if each is one item, otherwise None.
        done: number of these files that earlier runs have done.
    """

    def __init__(self, parts: Parts, progress: Progress | None, files: int | None, done: int = 0) -> None:
        self.parts, self.progress, self.files, self.done = parts, progress, files, done
        self.items = self.errors = self.lost = 0
        self.first_work, self.later_work = _Work(), _Work()  # of each worker's first chunk, and of its later chunks
        self.workers: dict[str, int] = {}  # worker's name -> number of its decoding threads or processes
        self.first_at = self.last_at = 0.0
        self.first_done_at, self.first_done = 0.0, 0  # time of the first finished chunk, and its number of items
        self.start: dict[str, float] = {}
        self.decoding = ""
        self.first_error: str | None = None
        self._number = 0
        self._given = 0
        self._size = 1
        self._again: deque[Chunk] = deque()
        self._unsettled: list[Any] = []  # finished chunks that wait until each column has a type
        self._learned = 0
        self._kind, self._decodes = "", False
        self._final = is_settled(parts.columns)
        self._columns = parts.columns

    def in_parts(self) -> int:
        """The number of rows that this run has given to the Parquet parts. Its other rows wait until the type of each
        column is known."""
        return self.items - sum(rows.num_rows for rows in self._unsettled)

    def show(self, what: str) -> None:
        """Show the activity `what` and the finished fraction of the files (0 if unknown) on the progress bar."""
        if self.progress is not None:
            self.progress(what, (self.done + self.items) / self.files if self.files else 0.0)

    def all(self, workers: Workers, job: Job, items: Iterator[Item]) -> None:
        """Compute all items on the workers. If this method raises, the Parquet parts still contain all finished
        results."""
        flying = 0
        batch, self._timeout_s = job.batch, job.timeout_s or 0.0
        self._kind, self._decodes = job.decoding.kind, job.decoding.kind in DECODED
        exhausted = False
        self._size = batch  # a target may compile or capture for each batch size
        try:
            while True:
                while (self._final or flying == 0) and not (exhausted and not self._again):
                    if self._again:
                        if not workers.has_room(self._again[0].careful):
                            break
                        chunk = self._again.popleft()
                    else:
                        if not workers.has_room():
                            break
                        some = list(islice(items, self._size_now(batch)))
                        if not some:
                            exhausted = True
                            break
                        chunk = self._chunk(some)
                        self._given += len(some)
                    chunk.columns, chunk.learn = self._columns, not self._final
                    self.first_at = self.first_at or time.monotonic()
                    workers.give(chunk)
                    flying += 1
                if flying == 0 and exhausted and not self._again:
                    return
                for event in workers.take(LOOK_S):
                    flying -= 1
                    self._handle(event, batch)
                self.parts.write_if_due()
        finally:
            self._settle()  # whether interrupted or finished, the results so far determine the types

    def _chunk(self, items: list[Item], deaths: int = 0, careful: bool = False) -> Chunk:
        self._number += 1
        return Chunk(self._number, items, deaths=deaths, careful=careful)

    def _handle(self, event: Event, batch: int) -> None:
        if isinstance(event, Finished):
            self._finished(event.chunk, event.outcome, batch)
        elif isinstance(event, Lost):
            self._lost(event.chunk, event.why, event.deaths)
        else:
            self._hung(event.chunk, event.first, event.count)

    # ---- finished items ----------------------------------------------------------------------------------------------

    def _finished(self, chunk: Chunk, outcome: Outcome, batch: int) -> None:
        self.last_at = time.monotonic()
        if not self.first_done_at:
            self.first_done_at, self.first_done = self.last_at, len(chunk.items)
            self.start["first results"] = self.first_done_at - self.first_at
        if self._decodes:
            one, several = ("process", "processes") if outcome.processes else ("thread", "threads")
            self.decoding = f"{outcome.threads} {several if outcome.threads > 1 else one}"
        (self.later_work if outcome.worker in self.workers else self.first_work).add(outcome)
        self.workers[outcome.worker] = outcome.threads
        self._add(outcome.batch, len(chunk.items), outcome.errors)
        if not self._final:
            self._columns = outcome.columns
            self._learned += len(chunk.items)
            if is_settled(self._columns) or (self._learned >= LEARNED_FROM and self._columns is not None):
                self._settle()
        self._size = self._next_size(chunk, outcome, batch)

    def _next_size(self, chunk: Chunk, outcome: Outcome, batch: int) -> int:
        """The number of items in each later chunk, from the times of a finished chunk: about CHUNK_S of work, at most
        MOST_ITEMS items, MOST_BYTES of results, and twice the items of the finished chunk or of a batch. The number is
        rounded down to whole batches, but is at least one batch.

        Until the types of the columns are final, it is twice the items of the finished chunk, at most LEARNED_FROM.
        """
        if not self._final:
            return min(2 * len(chunk.items), LEARNED_FROM)
        size = outcome.batch.nbytes / len(chunk.items)
        took = max(outcome.call_s, outcome.decode_s / max(1, outcome.threads)) / len(chunk.items)
        wanted = MOST_ITEMS if took * MOST_ITEMS <= CHUNK_S else int(CHUNK_S / took)
        wanted = min(wanted, int(MOST_BYTES / size))
        wanted = min(wanted, 2 * max(len(chunk.items), batch), MOST_ITEMS)  # a small chunk is timed imprecisely
        return max(batch, wanted // batch * batch)

    def _size_now(self, batch: int) -> int:
        """The number of items in the next chunk. Near the end of the run, chunks get fewer items if the total is
        known."""
        if self.files is None or not self._final:
            return self._size
        return size_near_end(self._size, self.files - self.done - self._given, len(self.workers), batch)

    def _add(self, rows: Any, count: int, errors: int) -> None:
        if self._final:
            self.parts.add(rows)
        else:
            self._unsettled.append(rows)
        self.items += count
        self.errors += errors
        if errors and self.first_error is None:
            row = next(row for row in rows.select(["input", "place", "error"]).to_pylist() if row["error"] is not None)
            what = PLACES.get(self._kind, "place")
            place = "" if row["place"] is None else f", {what} {row['place']} (the first is 0)"
            self.first_error = f"{row['input']}{place}: {row['error']}"
        if self.files:
            what = f"{self.done + self.items:,} of {self.files:,} done"
        else:
            what = f"{self.parts.done.rows + self.items:,} done"
        if self.errors:
            what += f", {self.errors:,} with an error"
        self.show(what)

    def _settle(self) -> None:
        """Fix the columns and types of the results seen so far as final, then add the waiting results to the Parquet
        parts."""
        if self._final:
            return
        if self._unsettled:
            self.parts.settle(self._columns)
        self._final = self._columns is not None
        for rows in self._unsettled:
            self.parts.add(rows)
        self._unsettled.clear()

    # ---- failed items ------------------------------------------------------------------------------------------------

    def _lost(self, chunk: Chunk, why: str | None, more_deaths: int) -> None:
        """Give the items of a lost chunk to workers again, one by one if the chunk has ended two workers. Give up an
        item that has ended three workers."""
        self.lost += 1
        if why is None:
            self._again.appendleft(chunk)
            return
        deaths = chunk.deaths + more_deaths
        if deaths >= DEATHS and len(chunk.items) == 1:
            self._give_up(chunk.items[0], f"{why} during this item, {deaths} times")
        elif deaths >= DEATHS - 1:
            self._again.extendleft(self._chunk([item], deaths, careful=True) for item in reversed(chunk.items))
        else:
            self._again.appendleft(self._chunk(chunk.items, deaths))

    def _hung(self, chunk: Chunk, first: int, count: int) -> None:
        self.lost += 1
        late, others = chunk.items[first : first + count], chunk.items[:first] + chunk.items[first + count :]
        if others:
            self._again.appendleft(self._chunk(others, chunk.deaths))
        if count == 1:
            self._give_up(late[0], f"took longer than the timeout of {self._timeout_s:g} s")
        else:
            self._again.extendleft(self._chunk([item], chunk.deaths, careful=True) for item in reversed(late))

    def _give_up(self, item: Item, why: str) -> None:
        self.last_at = time.monotonic()
        rows, errors, _ = to_batch([item], [Failure(why)], self._columns)
        self._add(rows, 1, errors)

    # ---- the end -----------------------------------------------------------------------------------------------------

    def report(self, seconds: float, unread: list[str]) -> MapReport:
        """The report of the run. Call this method after `all`."""
        working_s = max(0.0, self.last_at - self.first_at)
        steady_s = self.last_at - self.first_done_at
        if self.first_done_at and self.items > self.first_done and steady_s > 0:
            rate: float | None = (self.items - self.first_done) / steady_s
        else:
            rate = self.items / working_s if self.items and working_s else None
        threads = sum(self.workers.values())
        work = self.later_work if self.later_work.decoded else self.first_work
        decode = work.decoded * threads / work.decode_s if work.decode_s else None
        call = work.called * len(self.workers) / work.call_s if work.call_s else None
        ceiling = min((each for each in (decode, call) if each), default=None)
        columns = {} if self.parts.columns is None else {each.name: str(each.type) for each in self.parts.columns}
        return MapReport(
            out=self.parts.folder,
            items=self.items,
            errors=self.errors,
            before=self.parts.done.rows,
            errors_before=self.parts.done.errors,
            columns=columns,
            seconds=seconds,
            working_s=working_s,
            start=self.start,
            items_per_s=rate,
            decode_ceiling=decode,
            call_ceiling=call,
            percent_of_ceiling=100 * rate / ceiling if rate and ceiling else None,
            workers=len(self.workers),
            decoding=self.decoding,
            lost=self.lost,
            first_error=self.first_error,
            unread=unread,
        )
