"""Threads that read pages from files, check them, and upload them into slots.

A thread reads into its own memory, which is pinned for a GPU. Reading through the mapped file would block the first
thread that touches a page, and an upload from ordinary memory blocks the host. Uploads go on a stream of their own, and
a page counts as arrived when its upload has ended. `pool.py` tells the kernels later. Until then nothing reads the
slot, and a wrong page never leaves the thread's memory.
"""

from __future__ import annotations

import os
import queue
import threading
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.errors import GeometryFileError
from rooftop.scene import layouts
from rooftop.scene.geometry import Geometry, identity_of
from rooftop.scene.streaming.page_graph import PageGraph

SLOT_WORDS = layouts.PAGE_BYTES // 4
THREADS = 8  # 128 KB are read from the system's cache in about 0.1 ms, and checked in the same time
LEAVE = (-1,)  # sorts before every request


@dataclass(frozen=True)
class Arrival:
    """A requested page. `size_bytes` bytes of the page are in its slot; if not, `error` has the reason."""

    page: int
    size_bytes: int
    error: Exception | None


class Loader:
    """Reads pages in the order of their urgency.

    Attributes:
        in_flight: pages that were requested and that `arrived` has not returned yet.
        host_bytes: size of the threads' memory.
    """

    def __init__(self, graph: PageGraph, words: Tensor, threads: int = THREADS) -> None:
        self.in_flight = 0
        self.host_bytes = threads * layouts.PAGE_BYTES
        self._tasks: queue.PriorityQueue[tuple[Any, ...]] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        files = _opened(graph.meshes)
        uploads = [_Upload(words) for _ in range(threads)]
        workers = [
            threading.Thread(
                target=_work, args=(self._tasks, self._done, graph, files, upload), name="rooftop-pages", daemon=True
            )
            for upload in uploads
        ]
        self.close = weakref.finalize(self, _end, self._tasks, workers, files)
        for worker in workers:
            worker.start()

    def load(self, page: int, slot: int, order: tuple[float, ...]) -> None:
        """Read a page into a slot; pages with the smallest order are read first."""
        self.in_flight += 1
        self._tasks.put((*order, page, slot))

    def arrived(self) -> list[Arrival]:
        """The pages that arrived since the last call; does not wait."""
        found = []
        while not self._done.empty():
            found.append(self._done.get())
        self.in_flight -= len(found)
        return found

    def wait(self) -> list[Arrival]:
        """Wait for everything that is in flight, and return it."""
        found: list[Arrival] = []
        try:
            while self.in_flight:
                found.append(self._done.get())
                self.in_flight -= 1
        except BaseException:  # such as an interrupt, after which the program may continue
            for each in found:
                self._done.put(each)
            self.in_flight += len(found)
            raise
        return found


class _Upload:
    """The memory of a thread, and its upload to the device."""

    def __init__(self, words: Tensor) -> None:
        self.words, self.device = words, words.device
        on_gpu = self.device.type == "cuda"
        self.staged = torch.empty(SLOT_WORDS, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.stream = torch.cuda.Stream(self.device) if on_gpu else None

    def put(self, count: int, slot: int) -> None:
        """Copy the first words of the memory into a slot; returns when the copy has ended."""
        target = self.words[slot * SLOT_WORDS : slot * SLOT_WORDS + count]
        if self.stream is None:
            target.copy_(self.staged[:count])
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            target.copy_(self.staged[:count], non_blocking=True)
            ended = torch.cuda.Event(blocking=True)  # this thread sleeps instead of spinning
            ended.record(self.stream)
        ended.synchronize()


def _work(
    tasks: queue.PriorityQueue[tuple[Any, ...]],
    done: queue.SimpleQueue[Arrival],
    graph: PageGraph,
    files: list[int],
    upload: _Upload,
) -> None:
    while True:
        task = tasks.get()
        if task == LEAVE:
            return
        page, slot = task[-2:]
        mesh, number = graph.place(page)
        size, error = 0, None
        try:
            size = _read(graph.meshes[mesh], number, files[mesh], upload.staged.numpy())
            upload.put(size // 4, slot)
        except Exception as found:  # a frame must raise any error, or it would wait forever
            error = found
        done.put(Arrival(page, size, error))


def _read(geometry: Geometry, page: int, file: int, words: np.ndarray[Any, Any]) -> int:
    """Read a page into memory and check its checksum; returns its bytes.

    Raises:
        GeometryFileError: the page cannot be read, or was changed.
    """
    start, length = int(geometry.page_offsets[page]), int(geometry.page_lengths[page])
    into, held = words.data.cast("B")[:length], 0
    while held < length:
        try:
            count = os.preadv(file, [into[held:]], start + held)
        except OSError as error:
            what = f"page {page} cannot be read ({error.strerror})"
            raise GeometryFileError(geometry.path, what, start + held) from error
        if not count:
            what = f"page {page} is cut off after {held:,} of {length:,} bytes"
            raise GeometryFileError(geometry.path, what, start + held)
        held += count
    geometry.check_sum(page, words[: length // 4])
    return length


def _opened(meshes: Iterable[Geometry]) -> list[int]:
    """A file descriptor for each mesh; meshes of one file share it."""
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
    try:
        file = os.open(mesh.path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        what = "it no longer exists, but its pages are read on demand"
        raise GeometryFileError(mesh.path, what, int(mesh.page_offsets[0])) from error
    except OSError as error:
        what = f"it cannot be opened to read its pages ({error.strerror}; each file of a scene stays open: ulimit -n)"
        raise GeometryFileError(mesh.path, what, int(mesh.page_offsets[0])) from error
    if identity_of(file) != mesh.identity:
        os.close(file)
        what = "it has been changed or replaced since it was opened"
        raise GeometryFileError(mesh.path, what, int(mesh.page_offsets[0]))
    return file


def _end(tasks: queue.PriorityQueue[tuple[Any, ...]], workers: list[threading.Thread], files: list[int]) -> None:
    """End the threads after their present page, then close the files."""
    for _ in workers:
        tasks.put(LEAVE)
    for worker in workers:
        if worker.is_alive() and worker is not threading.current_thread():
            worker.join()
    for file in set(files):
        os.close(file)
