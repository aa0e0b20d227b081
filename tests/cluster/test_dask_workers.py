"""The workers of a Dask scheduler on this machine process each item once, whatever happens to workers and scheduler."""

from __future__ import annotations

import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from rooftop.cluster import dask_workers, map_items
from rooftop.errors import InputError, ModelRunError, SchedulerError

pq = pytest.importorskip("pyarrow.parquet")
distributed = pytest.importorskip("distributed")

from rooftop.cluster.dask_plugin import Carrier  # noqa: E402  # needs Dask

TARGETS = """
import os
import signal
import time

OFFSET = 100


def number(text):
    time.sleep(0.01)
    return {"n": OFFSET + int(text), "pid": os.getpid()}


def troubled(text):
    n = int(text)
    if n == 3:
        raise ValueError("three is bad")
    if n == 5:
        time.sleep(600)
    if n == 7:
        os.kill(os.getpid(), signal.SIGKILL)
    return {"n": n}


class Broken:
    def __init__(self):
        raise OSError("no weights here")

    __call__ = len
"""


class Scheduler:
    """A scheduler, and workers of one thread each, as `dask scheduler` and `dask worker` start them."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.address = f"tcp://127.0.0.1:{self.port}"
        self._processes: list[subprocess.Popen[bytes]] = []

    def _start(self, what: str, *words: object) -> None:
        command = [sys.executable, "-m", f"distributed.cli.dask_{what}", *map(str, words), "--no-dashboard"]
        # Workers may start late on a busy machine. The scheduler tries to reach a killed worker for this long.
        patience = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__CONNECT": "120s" if what == "worker" else "10s"}
        patience["DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES"] = "1"  # workers that an item may end, besides one
        said = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._processes.append(subprocess.Popen(command, env={**os.environ, **patience}, **said))

    def start(self, workers: int) -> None:
        self._start("scheduler", "--host", "127.0.0.1", "--port", self.port)
        if workers:
            self._start("worker", self.address, "--nthreads", 1, "--nworkers", workers, "--host", "127.0.0.1")

    def end(self) -> None:
        for process in self._processes:
            family = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for each in family:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            process.wait()
        self._processes.clear()


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_port: Callable[[], int]) -> Iterator[Scheduler]:
    """A scheduler that is not started yet, in a separate folder with my.py, which the workers cannot import."""
    (tmp_path / "program").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "program" / "my.py").write_text(TARGETS)
    monkeypatch.setattr(dask_workers, "CONNECT_S", 120.0)
    monkeypatch.chdir(tmp_path / "elsewhere")
    found = Scheduler(free_port())
    monkeypatch.setattr(found, "start", _elsewhere(found.start, tmp_path))
    monkeypatch.chdir(tmp_path / "program")
    yield found
    found.end()


def _elsewhere(start: Any, tmp_path: Path) -> Any:
    def started(workers: int) -> None:
        os.chdir(tmp_path / "elsewhere")
        try:
            start(workers)
        finally:
            os.chdir(tmp_path / "program")

    return started


def lines(count: int) -> str:
    Path("lines.txt").write_text("".join(f"{number}\n" for number in range(count)))
    return "lines.txt"


def rows_of(what: str) -> int:
    """The number of finished items according to the progress."""
    found = re.match(r"[\d,]+", what)
    return int(found[0].replace(",", "")) if found else 0


def mapped(scheduler: Scheduler, target: Any, count: int, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    report = map_items(target, [lines(count)], "out.parquet", scheduler=scheduler.address, **options)
    return report, sorted(pq.read_table("out.parquet").to_pylist(), key=lambda row: row["place"])


def test_workers_of_a_scheduler_do_each_item_once_also_if_one_is_killed(
    scheduler: Scheduler, children: Callable[..., list[psutil.Process]]
) -> None:
    from distributed import Client

    scheduler.start(2)
    with Client(scheduler.address, timeout=120) as client:
        # with one worker, everything might be done before the second worker starts and is killed
        client.wait_for_workers(2, timeout=120)
    killed = []

    def kill(what: str, _: float) -> None:
        rows = rows_of(what)
        if rows >= 100 and not killed:
            worker = children("spawn_main", recursive=True)[0]
            killed.append(worker.pid)
            worker.send_signal(signal.SIGKILL)

    report, rows = mapped(scheduler, "my.py:number", 400, progress=kill)
    assert killed
    assert [row["n"] for row in rows] == [100 + n for n in range(400)]
    assert os.getpid() not in {row["pid"] for row in rows}
    assert len({row["pid"] for row in rows}) >= 2
    assert (report.items, report.errors) == (400, 0)
    again, _ = mapped(scheduler, "my.py:number", 400)
    assert (again.items, again.before) == (0, 400)


def test_what_raises_hangs_or_ends_its_worker_is_an_error_of_its_item(scheduler: Scheduler) -> None:
    scheduler.start(2)
    report, rows = mapped(scheduler, "my.py:troubled", 10, timeout_s=3.0)
    assert [row["n"] for row in rows if row["error"] is None] == [0, 1, 2, 4, 6, 8, 9]
    errors = {row["place"]: row["error"] for row in rows if row["error"] is not None}
    assert errors[3] == "ValueError: three is bad"
    assert errors[5] == "took longer than the timeout of 3 s"
    assert errors[7].startswith("several workers of the scheduler ended during this item")
    assert report.errors == 3


def test_a_scheduler_that_restarts_is_found_again(scheduler: Scheduler) -> None:
    scheduler.start(1)
    said: list[str] = []
    restarted = []

    def restart(what: str, _: float) -> None:
        if rows_of(what) >= 100 and not restarted:
            restarted.append(True)
            scheduler.end()
            scheduler.start(1)

    _, rows = mapped(scheduler, "my.py:number", 300, progress=restart, say=said.append)
    assert restarted
    assert [row["n"] for row in rows] == [100 + n for n in range(300)]
    assert [" is gone" in said[0], " is back" in said[1]] == [True, True]


def test_a_scheduler_that_does_not_come_back_leaves_what_was_done(
    scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.start(1)
    monkeypatch.setattr(dask_workers, "RECONNECT_S", 1.0)
    monkeypatch.setattr(dask_workers, "LOOK_S", 0.0)  # the query after the scheduler's end waits for seconds, too

    def end(what: str, _: float) -> None:
        if rows_of(what) >= 60:
            scheduler.end()
            monkeypatch.setattr(dask_workers, "CONNECT_S", 2.0)  # results that workers still hold do not arrive

    with pytest.raises(SchedulerError, match="did not come back within 1 s: finished results are kept"):
        mapped(scheduler, "my.py:number", 1000, progress=end)
    there = len(pq.read_table("out.parquet"))
    assert 60 <= there < 1000
    report = map_items("my.py:number", ["lines.txt"], "out.parquet", workers=2, device="cpu")
    assert (report.before, report.items) == (there, 1000 - there)


def test_where_there_is_no_scheduler(scheduler: Scheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dask_workers, "CONNECT_S", 0.5)
    with pytest.raises(SchedulerError, match=f"no Dask scheduler answers at {scheduler.address} .*dask scheduler"):
        mapped(scheduler, "my.py:number", 3)


@pytest.mark.parametrize(
    ("address", "said"),
    [("no_port", "missing port number"), ("tcp://127.0.0.1:1:2", "invalid address"), ("tls://127.0.0.1:1", "tls")],
)
def test_an_address_that_is_wrong_is_found_before_a_client_is_made(
    address: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distributed.Client", None)
    (tmp_path / "lines.txt").write_text("1")
    with pytest.raises(SchedulerError, match=f"no Dask scheduler answers at {address} .*{said}"):
        map_items(len, [tmp_path / "lines.txt"], tmp_path / "out", scheduler=address)


def test_workers_that_cannot_do_the_work_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lines.txt").write_text("1")
    with distributed.LocalCluster(1, threads_per_worker=1, processes=False, dashboard_address=":0") as cluster:
        given = {"inputs": [tmp_path / "lines.txt"], "out": tmp_path / "out", "scheduler": cluster.scheduler_address}
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        with pytest.raises(InputError, match=r"device is cuda, but .* no GPU on the worker .*: use cpu or auto"):
            map_items(len, device="cuda", **given)
        monkeypatch.setattr(Carrier, "setup", lambda *_: importlib.import_module("rooftop.missing"))
        with pytest.raises(ModelRunError, match=r"cannot receive the job .*install the same version of rooftop"):
            map_items(len, **given)


def test_a_target_that_cannot_be_made_ends_the_run(scheduler: Scheduler) -> None:
    scheduler.start(1)
    with pytest.raises(ModelRunError, match=r"creating my\.py:Broken raised OSError: no weights here"):
        mapped(scheduler, "my.py:Broken", 3)
