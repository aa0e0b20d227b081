"""Both readers of pages, in C++ and in Python, on machines short of resources and in forked processes."""

from __future__ import annotations

import os
import resource
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from rooftop.scene import Geometry, layouts
from rooftop.scene.streaming import loading
from rooftop.scene.streaming.loading import Loader
from rooftop.scene.streaming.page_graph import PageGraph

BOTH = pytest.mark.parametrize("reader", ["compiled", "in Python"], indirect=True)
PAGES = 40


def words(pages: int) -> torch.Tensor:
    return torch.zeros(pages * loading.SLOT_WORDS, dtype=torch.int32)


@pytest.fixture
def loader(paged_ball: Geometry) -> Loader:
    return Loader(PageGraph([paged_ball]), words(PAGES))


def load_all(loader: Loader) -> None:
    pages = np.arange(PAGES)
    loader.load(pages, pages, 0.0, pages.astype(np.float64))


def status_of_fork(child: Callable[[], None]) -> int:
    """The exit status of a forked process, which has 10 s."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            child()
            status = 0
        finally:
            os._exit(status)
    for _ in range(200):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    raise AssertionError("the forked process hangs")


@BOTH
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_leaves_the_threads_to_its_parent(loader: Loader, reader: str) -> None:
    for _ in range(5):
        load_all(loader)  # the threads have work at the fork, and may hold locks
        assert status_of_fork(loader.close) == 0
        assert len(loader.wait()) == PAGES


@BOTH
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_process_is_told_instead_of_waiting(loader: Loader, reader: str) -> None:
    def told() -> None:
        for ask in (loader.wait, loader.arrived, lambda: load_all(loader)):
            with pytest.raises(RuntimeError, match="a forked process cannot read the pages"):
                ask()

    load_all(loader)
    assert status_of_fork(told) == 0
    assert len(loader.wait()) == PAGES


@BOTH
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_machine_without_room_for_threads_gets_an_error(reader: str) -> None:
    staged, slots = words(loading.BUFFERS).view(loading.BUFFERS, -1), words(loading.BUFFERS)

    def short_of_room() -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (150 << 20),) * 2)
        readers = []

        def start_all() -> None:
            while len(readers) < 1000:
                readers.append(loading._reader(np.zeros((1, 4), np.int64), staged, slots, 8))

        with pytest.raises(RuntimeError, match="can't start new thread"):
            start_all()
        for each in readers:
            each.close()

    assert status_of_fork(short_of_room) == 0


def test_a_loader_that_cannot_start_leaves_no_file_open(paged_ball: Geometry, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(loading, "_reader", fails)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(RuntimeError, match="new thread"):
        Loader(PageGraph([paged_ball]), words(1))
    assert os.listdir("/proc/self/fd") == before


def test_at_least_one_thread_reads(paged_ball: Geometry) -> None:
    with pytest.raises(ValueError, match="at least one thread that reads pages, got 0"):
        Loader(PageGraph([paged_ball]), words(1), threads=0)


@BOTH
@pytest.mark.parametrize("wrong", ["cut off", "moved", "a folder", "closed"])
def test_errors_are_the_same_by_both_readers(wrong: str, tmp_path: Path, reader: str) -> None:
    count, size = 30, layouts.PAGE_BYTES
    content = np.random.default_rng(0).integers(0, 256, (count, size), np.uint8)
    path = tmp_path / "pages"
    path.write_bytes(content.tobytes()[: 10 * size + 77 if wrong == "cut off" else None])
    file = os.open(tmp_path if wrong == "a folder" else path, os.O_RDONLY)
    if wrong == "closed":
        os.close(file)
    pages = np.arange(count)
    sums = [zlib.crc32(page) for page in content]
    table = np.stack([0 * pages + file, pages * size + 4 * (wrong == "moved"), 0 * pages + size, sums], 1)
    staged = torch.empty(loading.BUFFERS, loading.SLOT_WORDS, dtype=torch.int32)
    into = words(count)
    found = loading._reader(table, staged, into, 3)
    found.load(pages, pages, 0.0, pages.astype(np.float64))
    results = found.take(count)
    found.close()
    if wrong != "closed":
        os.close(file)
    got = results[results[:, 0].argsort()].tolist()
    assert got == {
        "cut off": [[page, *((size, 0, 0) if page < 10 else (77 * (page == 10), 2, 0))] for page in range(count)],
        "moved": [[page, *((size, 3, 0) if page < count - 1 else (size - 4, 2, 0))] for page in range(count)],
        "a folder": [[page, 0, 1, 21] for page in range(count)],
        "closed": [[page, 0, 1, 9] for page in range(count)],
    }[wrong]  # fmt: skip
    good = [row[0] for row in got if row[2] == loading.READ]
    assert (into.view(torch.uint8).numpy().reshape(count, size)[good] == content[good]).all()
