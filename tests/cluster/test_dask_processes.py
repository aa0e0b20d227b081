"""The process beside a Dask worker processes the chunks of several threads, and reports what ends or delays it."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from PIL import Image

from rooftop.cluster import dask_processes, map_items
from rooftop.cluster.dask_processes import ProcessBeside, division_beside
from rooftop.cluster.events import Event
from rooftop.cluster.items import Decoding, Item
from rooftop.cluster.local_workers import Division
from rooftop.cluster.targets import callable_target
from rooftop.cluster.working import Chunk, Job, Outcome
from rooftop.errors import ModelRunError

pytest.importorskip("pyarrow")

TARGETS = """
import os
import signal
import time


def level(image):
    value = int(image[0, 0, 0])
    if value == 200:
        time.sleep(600)
    if value == 250:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"level": value, "pid": os.getpid()}


class Broken:
    def __init__(self):
        raise OSError("no weights here")

    __call__ = len
"""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    (tmp_path / "my.py").write_text(TARGETS)
    return Job(callable_target(f"{tmp_path / 'my.py'}:level"), Decoding("image"), 1)


@pytest.fixture
def beside(job: Job) -> Iterator[ProcessBeside]:
    found = ProcessBeside(job, Division(1, 1, 1, "cpu", decoders=2))
    yield found
    found.close()


def chunk(folder: Path, number: int, levels: range) -> Chunk:
    items = []
    for level in levels:
        path = folder / f"{level}.png"
        Image.new("RGB", (3, 2), (level, 0, 0)).save(path)
        items.append(Item(path.name, None, str(path)))
    return Chunk(number, items, learn=True)


def test_chunks_of_several_threads_are_done_once_each_in_one_process(beside: ProcessBeside, tmp_path: Path) -> None:
    chunks = [chunk(tmp_path, number, range(5 * number, 5 * number + 5)) for number in range(12)]
    with ThreadPoolExecutor(4) as threads:
        outcomes = list(threads.map(beside.do, chunks))
    pids = set()
    for number, outcome in enumerate(outcomes):
        assert isinstance(outcome, Outcome)
        assert outcome.batch.column("level").to_pylist() == list(range(5 * number, 5 * number + 5))
        pids |= set(outcome.batch.column("pid").to_pylist())
        assert (outcome.errors, outcome.threads) == (0, 2)
    assert len(pids) == 1
    assert os.getpid() not in pids


def test_after_an_item_that_ends_the_process_another_one_goes_on(beside: ProcessBeside, tmp_path: Path) -> None:
    chunks = [chunk(tmp_path, 0, range(3)), chunk(tmp_path, 1, range(249, 252)), chunk(tmp_path, 2, range(3, 6))]
    why = "the worker process ended by signal SIGKILL"
    with ThreadPoolExecutor(3) as threads:
        first, ended, last = threads.map(beside.do, chunks)
    assert ended == why
    for found, number, levels in ((first, 0, [0, 1, 2]), (last, 2, [3, 4, 5])):
        outcome = beside.do(chunks[number]) if found == why else found  # a result may be lost on its way
        assert isinstance(outcome, Outcome)
        assert outcome.batch.column("level").to_pylist() == levels


def test_an_item_that_takes_too_long_is_named_by_its_place(job: Job, tmp_path: Path) -> None:
    limited = Job(job.target, job.decoding, 1, timeout_s=3.0)  # an item takes longer on a busy machine
    beside = ProcessBeside(limited, Division(1, 1, 1, "cpu", decoders=2))
    try:
        assert beside.do(chunk(tmp_path, 0, range(198, 202))) == (2, 1)
        assert isinstance(beside.do(chunk(tmp_path, 1, range(3))), Outcome)
    finally:
        beside.close()


def test_a_target_that_cannot_be_made_is_an_error_of_each_chunk(tmp_path: Path) -> None:
    (tmp_path / "my.py").write_text(TARGETS)
    job = Job(callable_target(f"{tmp_path / 'my.py'}:Broken"), Decoding("image"), 1)
    beside = ProcessBeside(job, Division(1, 1, 1, "cpu"))
    for number in range(2):
        with pytest.raises(ModelRunError, match=r"creating .*my\.py:Broken raised OSError: no weights here"):
            beside.do(chunk(tmp_path, number, range(1)))
    beside.close()


def test_who_waits_at_the_end_of_the_run_gets_an_error(
    beside: ProcessBeside, tmp_path: Path, children: Callable[..., list[psutil.Process]]
) -> None:
    errors: list[Exception] = []

    def wait() -> None:
        try:
            beside.do(chunk(tmp_path, 0, range(200, 201)))
        except ModelRunError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    while not (found := children("spawn_main")):
        time.sleep(0.01)
    beside.close()
    thread.join()
    assert [str(error) for error in errors] == ["the run has ended"]
    _, alive = psutil.wait_procs(found, timeout=60)
    assert not alive


# A spawned process imports its function by name, and cannot import the tests' modules.
AS_A_DASK_WORKER = """
from rooftop.cluster.dask_processes import ProcessBeside
from rooftop.cluster.local_workers import Division
from rooftop.cluster.working import Outcome


def do(job, given):
    beside = ProcessBeside(job, Division(1, 1, 1, "cpu", decoders=2))
    assert isinstance(beside.do(given), Outcome)  # not closed: leaving Python ends it
"""


def test_a_daemonic_process_can_have_one_and_ends_with_it(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = chunk(tmp_path, 0, range(5))
    (tmp_path / "as_a_dask_worker.py").write_text(AS_A_DASK_WORKER)
    monkeypatch.syspath_prepend(tmp_path)
    do = importlib.import_module("as_a_dask_worker").do
    process = multiprocessing.get_context("spawn").Process(target=do, args=(job, given), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0


def test_a_run_by_a_scheduler_uses_it(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = pytest.importorskip("distributed")
    pq = pytest.importorskip("pyarrow.parquet")
    monkeypatch.setattr("rooftop.cluster.dask_plugin.division_beside", lambda *_: Division(1, 1, 1, "cpu", decoders=2))
    (tmp_path / "images").mkdir()
    chunk(tmp_path / "images", 0, range(40))
    (tmp_path / "images" / "damaged.png").write_bytes(b"no picture")
    out = tmp_path / "out.parquet"
    with distributed.LocalCluster(1, threads_per_worker=2, processes=False, dashboard_address=":0") as cluster:
        report = map_items(job.target, [tmp_path / "images"], out, kind="image", scheduler=cluster.scheduler_address)
    rows = pq.read_table(out).to_pylist()
    assert (report.items, report.errors, report.decoding) == (41, 1, "2 processes")
    assert sorted(row["level"] for row in rows if row["error"] is None) == list(range(40))
    assert os.getpid() not in {row["pid"] for row in rows}


def test_its_outcomes_have_the_name_of_the_dask_worker(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one name for all workers, a run with many of them would count a single worker."""
    plugin = pytest.importorskip("rooftop.cluster.dask_plugin", reason="needs Dask")
    cloudpickle = pytest.importorskip("cloudpickle")
    monkeypatch.setattr(plugin, "division_beside", lambda *_: Division(1, 1, 1, "cpu", decoders=2))
    carrier = plugin.Carrier("token", cloudpickle.dumps(job), "cpu")
    carrier.setup(SimpleNamespace(address="tcp://node1:40001", state=SimpleNamespace(nthreads=2)))
    try:
        assert carrier.do(chunk(tmp_path, 0, range(3))).worker == "tcp://node1:40001"
    finally:
        carrier.teardown(None)


def test_it_is_used_where_it_pays(job: Job) -> None:
    assert division_beside(job, "cpu", 16) is None
    assert division_beside(job, "cuda", 1) is None
    assert division_beside(Job(job.target, Decoding("text"), 1), "cuda", 16) is None


def test_a_timeout_within_the_process_reaches_the_thread_that_asked(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late:
        def __init__(self, *_: object) -> None:
            pass

        def has_room(self, careful: bool) -> bool:
            return True

        def give(self, chunk: Chunk) -> None:
            raise TimeoutError("the network is gone")

        def take(self, seconds: float) -> list[Event]:
            return []

        def close(self, at_once: bool) -> None:
            pass

    monkeypatch.setattr(dask_processes, "LocalWorkers", Late)
    beside = ProcessBeside(job, Division(1, 1, 1, "cpu"))
    found: list[BaseException] = []

    def ask() -> None:
        try:
            beside.do(chunk(tmp_path, 0, range(1)))
        except TimeoutError as error:
            found.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(10)
    assert not asking.is_alive()
    assert [str(error) for error in found] == ["the network is gone"]


def test_processes_that_several_threads_start_leave_the_parent_as_it_was(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = multiprocessing.get_context("spawn")
    mains, start = [], context.Process.start

    def slowly(process: BaseProcess) -> None:
        mains.append(sys.modules["__main__"])
        time.sleep(0.2)
        start(process)

    monkeypatch.setattr(context.Process, "start", slowly)
    main, threads = sys.modules["__main__"], os.environ.get("OMP_NUM_THREADS")
    besides = []
    for _ in range(3):
        besides.append(ProcessBeside(job, Division(1, 1, 1, "cpu")))
        time.sleep(0.05)
    try:
        until = time.monotonic() + 30
        while len(mains) < 3 and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        for each in besides:
            each.close()
    assert len(set(map(id, mains))) == 3
    assert sys.modules["__main__"] is main
    assert os.environ.get("OMP_NUM_THREADS") == threads
