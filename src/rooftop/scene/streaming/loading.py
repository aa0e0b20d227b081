"""Read pages from files in threads, check them, and upload them into slots.

For a GPU, a thread reads into pinned memory: access through the memory-mapped file would block on page faults, and an
upload from pageable memory blocks the host. Uploads run on a separate stream, and a page counts as arrived when its
upload has ended. `pool.py` makes the page visible to kernels later. Until the page is visible, no kernel reads its
slot. A page with a wrong checksum is not uploaded.

The threads are C++ threads of `page_reader.cpp`, which never take the GIL. Until `page_reader.cpp` is compiled, and
where it cannot be compiled, Python threads do the work.
"""

from __future__ import annotations

import heapq
import os
import threading
import weakref
import zlib
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rooftop.errors import GeometryFileError
from rooftop.hardware.streams import ensure_context
from rooftop.scene import layouts
from rooftop.scene.geometry import Geometry, identity_of
from rooftop.scene.streaming import page_reader
from rooftop.scene.streaming.page_graph import PageGraph

Ints = npt.NDArray[np.int64]

SLOT_WORDS = layouts.PAGE_BYTES // 4
THREADS = 8  # reading threads; a thread reads 128 KB from the system's cache in about 0.1 ms
BUFFERS = 64  # page buffers in host memory: threads fill some of them while others are uploaded
MOST_MERGED = 4  # maximum number of pages that one system call reads

# Outcomes of a request, as in `page_reader.cpp`.
READ, UNREADABLE, CUT_OFF, CHANGED, NOT_COPIED = range(5)
RESULT_COLUMNS = 4  # columns of a result: page, number of bytes read, outcome, error code


@dataclass(frozen=True)
class Arrivals:
    """Requested pages that have been read, successfully or not.

    Attributes:
        pages: (n,) page numbers.
        size_bytes: (n,) number of bytes that were read of each page.
        errors: the error of each page that is not in its slot, by page number.
    """

    pages: Ints
    size_bytes: Ints
    errors: dict[int, Exception] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.pages)

    def chosen(self, which: Any) -> Arrivals:
        """Select the arrived pages at the indices (or in the mask) `which`. `errors` stays that of all arrived
        pages."""
        return Arrivals(self.pages[which], self.size_bytes[which], self.errors)


NONE = Arrivals(np.zeros(0, np.int64), np.zeros(0, np.int64))


class Loader:
    """Read pages in the order of their urgency.

    Attributes:
        in_flight: number of requested pages that neither `arrived` nor `wait` has returned yet.
        host_bytes: size of the threads' buffers in host memory.
    """

    def __init__(self, graph: PageGraph, words: Tensor, threads: int = THREADS) -> None:
        if threads < 1:
            raise ValueError(f"expected at least one thread that reads pages, got {threads}")
        self.in_flight = 0
        self.host_bytes = BUFFERS * layouts.PAGE_BYTES
        self._graph = graph
        files = np.array(_opened(graph.meshes), np.int64)
        on_gpu = words.device.type == "cuda"
        staged = torch.empty(BUFFERS, SLOT_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        table = np.stack([files[graph.mesh_of], graph.offsets, graph.lengths, graph.checksums], axis=1)
        self._memory = table, staged, words, threads
        self._process = os.getpid()
        try:
            self._reader = _reader(*self._memory)
        except BaseException:
            for file in set(files.tolist()):
                os.close(file)
            raise
        self._held = [self._reader]  # the reader that `close` ends, in a list so that it can be replaced
        self.close = weakref.finalize(self, _end, self._held, files.tolist(), self._memory)

    def load(self, pages: Ints, slots: Ints, urgency: float, orders: npt.NDArray[np.float64]) -> None:
        """Request pages to be read into slots. Over all requests, pages are read in ascending order of (urgency, order,
        page number)."""
        if not len(pages):
            return
        self._check_process()
        if not self.in_flight and isinstance(self._reader, PythonReader) and page_reader.compiled() is not None:
            self._reader.close()
            self._held[0] = self._reader = _reader(*self._memory)
        self.in_flight += len(pages)
        self._reader.load(pages, slots, urgency, orders)

    def arrived(self) -> Arrivals:
        """Return the pages that arrived since the last call, without waiting."""
        if not self.in_flight:
            return NONE
        self._check_process()
        return self._taken(self._reader.arrived())

    def wait(self) -> Arrivals:
        """Wait for all pages in flight, and return them. If the wait is interrupted, no page is lost."""
        self._check_process()
        return self._taken(self._reader.take(self.in_flight))

    def _check_process(self) -> None:
        """Raise RuntimeError in a forked process, which has none of the threads and would wait for them forever."""
        if self._process != os.getpid():
            raise RuntimeError(
                "a forked process cannot read the pages of a renderer that it did not make: make the renderer there, "
                'or start the process with multiprocessing\'s "spawn"'
            )

    def _taken(self, results: Ints) -> Arrivals:
        errors: dict[int, Exception] = {}
        if results[:, 2].any():  # not all are READ, which is 0
            errors = {row[0]: self._error(*row) for row in results.tolist() if row[2] != READ}
        self.in_flight -= len(results)
        return Arrivals(results[:, 0], results[:, 1], errors)

    def _error(self, page: int, held: int, outcome: int, code: int) -> Exception:
        mesh, number = self._graph.place(page)
        geometry = self._graph.meshes[mesh]
        start, length = int(geometry.page_offsets[number]), int(geometry.page_lengths[number])
        if outcome == UNREADABLE:
            what = f"page {number} cannot be read ({os.strerror(code)})"
            return GeometryFileError(geometry.path, what, start + held)
        if outcome == CUT_OFF:
            what = f"page {number} is cut off after {held:,} of {length:,} bytes"
            return GeometryFileError(geometry.path, what, start + held)
        if outcome == CHANGED:
            return GeometryFileError(geometry.path, f"the checksum of page {number} does not match", start)
        what = f"page {number} of {geometry.path} was not copied to the device"
        return getattr(self._reader, "errors", {}).pop(page, None) or RuntimeError(f"{what}: CUDA error {code}")


def _reader(table: Ints, staged: Tensor, words: Tensor, threads: int) -> Any:
    module = page_reader.compiled()
    if module is None:
        return PythonReader(table, staged, words, threads)
    on_gpu = words.device.type == "cuda"
    # the reader's uploads use the CUDA context that is current here
    with torch.cuda.device(words.device) if on_gpu else nullcontext():
        if on_gpu:
            ensure_context()
        return module.Reader(
            table, threads, len(staged), staged.data_ptr(), words.data_ptr(), layouts.PAGE_BYTES, on_gpu, MOST_MERGED
        )


class PythonReader:
    """Read pages in Python threads; equivalent to `Reader` in `page_reader.cpp`.

    Args:
        table: (pages, 4), for each page its file descriptor, offset and length in bytes, and checksum.

    Attributes:
        errors: the error of each page that was not copied into its slot, by page number.
    """

    def __init__(self, table: Ints, staged: Tensor, words: Tensor, threads: int) -> None:
        self.errors: dict[int, Exception] = {}
        self._table = table
        self._tasks: list[tuple[Any, ...]] = []  # a heap
        self._done: list[tuple[int, ...]] = []
        self._changed = threading.Condition()  # guards `_tasks` and `_done`
        self._leaving, self._process = False, os.getpid()
        self._workers: list[threading.Thread] = []
        try:
            for memory in staged[:threads]:
                upload = _Upload(words, memory)
                worker = threading.Thread(target=self._work, args=(upload,), name="rooftop-pages", daemon=True)
                worker.start()
                self._workers.append(worker)
        except BaseException:
            self.close()  # ends the threads that have started
            raise

    def load(self, pages: Ints, slots: Ints, urgency: float, orders: npt.NDArray[np.float64]) -> None:
        """Request pages to be read into slots, as in `Loader.load`."""
        with self._changed:
            for order, page, slot in zip(orders.tolist(), pages.tolist(), slots.tolist(), strict=True):
                heapq.heappush(self._tasks, (urgency, order, page, slot))
            self._changed.notify_all()

    def arrived(self) -> Ints:
        """Return the available results without waiting: for each page whose read has ended, a row of RESULT_COLUMNS
        numbers."""
        return self.take(0)

    def take(self, least: int) -> Ints:
        """Wait until the reads of at least `least` pages have ended. Return a row for each page whose read has ended,
        as `arrived`."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._done) >= least)
            found, self._done = self._done, []
        return np.array(found, np.int64).reshape(-1, RESULT_COLUMNS)

    def close(self) -> None:
        """End the threads after their current page. Do nothing in a forked process, which has none of the threads."""
        if self._process != os.getpid():
            return
        with self._changed:
            self._leaving = True
            self._changed.notify_all()
        for worker in self._workers:
            if worker is not threading.current_thread():  # garbage collection may call `close` in a worker
                worker.join()

    def _work(self, upload: _Upload) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._tasks or self._leaving)
                if self._leaving:
                    return
                _, _, page, slot = heapq.heappop(self._tasks)
            try:
                held, outcome, code = _read(upload.staged.numpy(), *self._table[page].tolist())
                if outcome == READ:
                    upload.put(held // 4, slot)
            except Exception as error:  # pass any error to the frame that waits for the page
                held, outcome, code = 0, NOT_COPIED, 0
                self.errors[page] = error
            with self._changed:
                self._done.append((page, held, outcome, code))
                self._changed.notify_all()


class _Upload:
    """The buffer in host memory into which one thread reads pages, and the upload from it to the device."""

    def __init__(self, words: Tensor, staged: Tensor) -> None:
        self.words, self.device, self.staged = words, words.device, staged
        self.stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def put(self, count: int, slot: int) -> None:
        """Copy the first `count` words of the buffer into a slot; return when the copy has ended."""
        target = self.words[slot * SLOT_WORDS : slot * SLOT_WORDS + count]
        if self.stream is None:
            target.copy_(self.staged[:count])
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            target.copy_(self.staged[:count], non_blocking=True)
            ended = torch.cuda.Event(blocking=True)  # with this event, the thread sleeps instead of spinning
            ended.record(self.stream)
        ended.synchronize()


def _read(words: npt.NDArray[np.int32], file: int, start: int, length: int, checksum: int) -> tuple[int, int, int]:
    """Read a page into memory and check its checksum; return the number of bytes read, the outcome, and the system's
    error code."""
    into, held = words.data.cast("B")[:length], 0
    while held < length:
        try:
            count = os.preadv(file, [into[held:]], start + held)
        except OSError as error:
            return held, UNREADABLE, error.errno or 0
        if not count:
            return held, CUT_OFF, 0
        held += count
    return held, READ if zlib.crc32(into) == checksum else CHANGED, 0


def _opened(meshes: Iterable[Geometry]) -> list[int]:
    """Open the file of each mesh, and return the file descriptors. Meshes of one file share a descriptor."""
    found: list[int] = []
    by_file: dict[tuple[int, ...], int] = {}
    try:
        for mesh in meshes:
            if mesh.identity not in by_file:
                by_file[mesh.identity] = _open(mesh)
            found.append(by_file[mesh.identity])
    except BaseException:
        for file in by_file.values():
            os.close(file)
        raise
    return found


def _open(mesh: Geometry) -> int:
    def error_of(what: str) -> GeometryFileError:
        return GeometryFileError(mesh.path, what, int(mesh.page_offsets[0]))

    try:
        file = os.open(mesh.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise error_of("it no longer exists, but its pages are read on demand") from error
    except OSError as error:
        why = f"{error.strerror}; each file of a scene stays open: see ulimit -n"
        raise error_of(f"it cannot be opened to read its pages ({why})") from error
    if identity_of(file) != mesh.identity:
        os.close(file)
        raise error_of("it has been changed or replaced since it was opened")
    return file


def _end(held: list[Any], files: list[int], memory: Any) -> None:
    """End the threads after their current page, then close the files. The argument `memory` keeps the threads' buffers
    alive until then."""
    held[0].close()
    for file in set(files):
        os.close(file)
