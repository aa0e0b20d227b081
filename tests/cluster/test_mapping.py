"""`map_items` with processes on this machine: each item is mapped once, whatever dies, hangs, raises or is damaged."""

from __future__ import annotations

import multiprocessing
import os
import queue
import re
import signal
import sys
import threading
import time
from collections import Counter, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
from PIL import Image

from rooftop.cluster import callable_target, local_workers, map_items
from rooftop.cluster import parts as parts_module
from rooftop.cluster.local_workers import divide
from rooftop.cluster.mapping import size_near_end
from rooftop.errors import InputError, ModelRunError, TargetError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

TARGETS = '''
import asyncio
import os
import signal
import time
from pathlib import Path


def number(text):
    return {"n": int(text), "pid": os.getpid()}


def slow(text):
    time.sleep(0.02)
    return {"n": int(text), "pid": os.getpid()}


def troubled(text):
    """Raises, hangs, returns other columns, ends its process; else the number."""
    n = int(text)
    if n == 3:
        raise ValueError("three\\nis bad")
    if n == 5:
        time.sleep(600)
    if n == 7:
        return {"m": n}
    if n == 9:
        os.kill(os.getpid(), signal.SIGKILL)
    if n == 11:
        raise SystemExit(3)
    if n == 12:
        raise KeyboardInterrupt("\\udce9")
    return {"n": n}


class SlowAtFirst:
    called = False

    def __call__(self, text):
        if not self.called:
            time.sleep(1.0)
        self.called = True
        return int(text)


class Counted:
    """Says how often it was made in its process."""

    made = 0

    def __init__(self):
        Counted.made += 1

    def __call__(self, texts):
        if "13" in texts and len(texts) > 1:
            raise ValueError("not together with 13")
        return [{"n": int(text), "made": Counted.made, "together": len(texts)} for text in texts]


def together(text):
    """The first item tells the columns before others are given out; these are done when two workers have begun."""
    until = time.monotonic() + 120
    if text != "0":
        Path(f"began-{os.getpid()}").touch()
        while len(list(Path().glob("began-*"))) < 2:
            if time.monotonic() > until:
                os._exit(1)
            time.sleep(0.01)
    return {"n": int(text), "pid": os.getpid()}


def large(text):
    Path(f"begun-{text}").touch()
    return {"bytes": bytes(1 << 20)}


def size(image):
    return {"height": image.shape[1], "width": image.shape[2]}


class Broken:
    def __init__(self):
        raise OSError("no weights here")

    __call__ = len


class Cancelled:
    def __init__(self):
        raise asyncio.CancelledError

    __call__ = len


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class Unsaid:
    def __init__(self):
        raise Unprintable

    __call__ = len


def wrong(texts):
    return texts[1:]


def named(text):
    return {"error": text}


def loud(text):
    print("noise")
    return int(text)
'''


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate folder with my.py; parts are written at once."""
    monkeypatch.chdir(tmp_path)
    Path("my.py").write_text(TARGETS)
    return tmp_path


def lines(count: int) -> str:
    Path("lines.txt").write_text("".join(f"{number}\n" for number in range(count)))
    return "lines.txt"


def rows_of(what: str) -> int:
    """The number of finished items according to the progress."""
    found = re.match(r"[\d,]+", what)
    return int(found[0].replace(",", "")) if found else 0


def mapped(target: Any, inputs: list[str], **options: Any) -> tuple[Any, list[dict[str, Any]]]:
    """The report, and the rows of out.parquet in order, computed by two workers."""
    report = map_items(target, inputs, "out.parquet", device="cpu", **{"workers": 2, **options})
    rows = pq.read_table("out.parquet").to_pylist()
    return report, sorted(rows, key=lambda row: (row["input"], -1 if row["place"] is None else row["place"]))


def test_each_line_has_one_row_and_a_second_run_does_nothing() -> None:
    report, rows = mapped("my.py:number", [lines(500)])
    assert [(row["input"], row["place"], row["error"], row["n"]) for row in rows] == [
        ("lines.txt", n, None, n) for n in range(500)
    ]
    assert (report.items, report.errors, report.before) == (500, 0, 0)
    assert report.columns == {"n": "int64", "pid": "int64"}
    parts = {path: path.stat().st_mtime_ns for path in Path("out.parquet").iterdir() if path.suffix == ".parquet"}
    again, _ = mapped("my.py:number", ["lines.txt"])
    assert (again.items, again.before, again.workers) == (0, 500, 0)
    assert "nothing to do, 500 rows from before" in str(again)
    assert parts == {path: path.stat().st_mtime_ns for path in parts}


def test_new_inputs_are_done_and_old_ones_not() -> None:
    _, before = mapped("my.py:number", [lines(20)])
    report, rows = mapped("my.py:number", [lines(30)])
    assert (report.items, report.before) == (10, 20)
    assert [row["n"] for row in rows] == list(range(30))
    assert [row["pid"] for row in rows[:20]] == [row["pid"] for row in before]


Workers = Callable[[], list[psutil.Process]]


@pytest.fixture
def workers(children: Callable[..., list[psutil.Process]]) -> Workers:
    """Gives the live workers, without processes that were there before."""
    before = children("spawn_main")
    return lambda: [each for each in children("spawn_main") if each not in before]


def test_two_thousand_photographs_ten_damaged_one_worker_killed(workers: Workers) -> None:
    """Each photograph has one row; a second run does nothing."""
    Path("photos").mkdir()
    for width in range(20):
        Image.new("RGB", (10 + width, 8)).save(f"{width}.png")
    whole = [Path(f"{width}.png").read_bytes() for width in range(20)]
    damaged = set(range(0, 2000, 200))  # the first item is damaged, too, so it cannot determine the columns
    for number in range(2000):
        content = whole[number % 20]
        Path(f"photos/{number:04}.png").write_bytes(content[: len(content) // 2] if number in damaged else content)
    killed = []

    def kill(what: str, _: float) -> None:
        if len(alive := workers()) == 2 and not killed and rows_of(what) >= 1000:
            killed.append(alive[0].pid)
            os.kill(alive[0].pid, signal.SIGKILL)

    report, rows = mapped("my.py:size", ["photos"], progress=kill)
    assert killed
    assert (report.items, report.errors) == (2000, 10)
    assert 0 < report.percent_of_ceiling <= 100
    for number, row in enumerate(rows):
        assert row["input"] == f"photos/{number:04}.png"
        if number in damaged:
            assert "photos" in row["error"]
            assert row["width"] is None
        else:
            assert (row["error"], row["width"], row["height"]) == (None, 10 + number % 20, 8)
    again, _ = mapped("my.py:size", ["photos"])
    assert (again.items, again.before, again.errors_before) == (0, 2000, 10)


def test_rows_of_other_inputs_do_not_count_as_done() -> None:
    for name in "abcde":
        Path(name).touch()
    mapped("os.path:basename", ["a", "b", "c"], kind="path", workers=1)
    shown: list[tuple[str, float]] = []
    mapped("os.path:basename", ["c", "d", "e"], kind="path", workers=1, progress=lambda *each: shown.append(each))
    assert shown[0] == ("workers start", pytest.approx(1 / 3))
    assert shown[-1] == ("3 of 3 done", 1.0)


def test_a_slow_first_call_does_not_lower_the_ceiling() -> None:
    report, _ = mapped("my.py:SlowAtFirst", [lines(300)], workers=1)
    assert report.call_ceiling > 300 / 1.0
    assert report.percent_of_ceiling <= 100


def test_what_raises_hangs_differs_or_ends_its_process_is_an_error_of_its_item() -> None:
    report, rows = mapped("my.py:troubled", [lines(14)], timeout_s=3.0)
    errors = {row["place"]: row["error"] for row in rows if row["error"] is not None}
    assert [row["n"] for row in rows if row["error"] is None] == [0, 1, 2, 4, 6, 8, 10, 13]
    assert errors[3] == "ValueError: three is bad"
    assert errors[5] == "took longer than the timeout of 3 s"
    assert errors[7] == "its columns differ from those of the first result: without n and with m (expected n)"
    assert errors[9] == "the worker process ended by signal SIGKILL during this item, 3 times"
    assert errors[11] == "SystemExit: 3"
    assert errors[12] == "KeyboardInterrupt: \\udce9"  # raised by the function, so not a real Ctrl-C
    assert (report.items, report.errors) == (14, 6)
    assert report.first_error == "lines.txt, line 3 (the first is 0): ValueError: three is bad"


def test_a_file_that_hangs_while_it_is_read_is_an_error_of_its_item(monkeypatch: pytest.MonkeyPatch) -> None:
    end, ended = local_workers._Worker.end, []

    def checked(worker: Any) -> None:
        end(worker)
        ended.append(worker._sender.is_alive())  # it could send to the next worker, whose pipe has the same number

    monkeypatch.setattr(local_workers._Worker, "end", checked)
    for number in range(4):
        numpy.save(f"{number}.npy", numpy.zeros((number, 3)))
    Path("2.npy").unlink()
    os.mkfifo("2.npy")  # nobody writes
    Path("my.py").write_text("def count(points):\n    return {'points': len(points)}\n")
    report, rows = mapped("my.py:count", [f"{number}.npy" for number in range(4)], workers=1, timeout_s=3.0)
    assert [row["points"] for row in rows] == [0, 1, None, 3]
    assert rows[2]["error"] == "took longer than the timeout of 3 s"
    assert report.errors == 1
    assert len(ended) >= 2
    assert not any(ended)


def test_a_worker_ends_while_its_pipe_is_full_and_held_by_another_process() -> None:
    """The target may have forked a process that holds the worker's end of the pipe, and reads nothing."""
    worker = local_workers._Worker.__new__(local_workers._Worker)
    worker.connection, held = multiprocessing.Pipe()
    worker._outbox = queue.SimpleQueue()
    worker.process = multiprocessing.get_context("spawn").Process()  # has not started: it is not alive
    worker._sender = threading.Thread(target=worker._send, args=(bytes(1 << 24),), daemon=True)
    worker._sender.start()
    worker._sender.join(0.5)
    assert worker._sender.is_alive()  # the pipe is full
    ending = threading.Thread(target=worker.end, daemon=True)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
    assert not worker._sender.is_alive()
    assert worker.connection.closed
    held.close()


def test_a_worker_that_is_killed_loses_and_doubles_nothing(workers: Workers) -> None:
    killed = []

    def kill(what: str, _: float) -> None:
        if len(alive := workers()) == 2 and not killed and rows_of(what) >= 60:
            killed.append(alive[0].pid)
            os.kill(alive[0].pid, signal.SIGKILL)

    report, rows = mapped("my.py:slow", [lines(200)], progress=kill)
    assert killed
    assert [row["n"] for row in rows] == list(range(200))
    assert report.errors == 0
    assert len(pq.read_table("out.parquet")) == 200


def test_an_interrupted_run_keeps_what_is_done_and_ends_its_workers(workers: Workers) -> None:
    def interrupt(what: str, _: float) -> None:
        if rows_of(what) >= 30:
            raise KeyboardInterrupt

    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        map_items(
            "my.py:slow", [lines(100)], "out.parquet", workers=2, device="cpu", progress=interrupt, say=said.append
        )
    assert not workers()
    there = len(pq.read_table("out.parquet"))
    assert said[-1] == f"{there} rows in out.parquet; the same call continues the run"
    assert 30 <= there < 100
    report, rows = mapped("my.py:slow", ["lines.txt"])
    assert (report.before, report.items) == (there, 100 - there)
    assert [row["n"] for row in rows] == list(range(100))


def test_one_worker_works_alone_and_two_at_the_same_time() -> None:
    """Two processes, neither of which continues before the other has begun."""
    report, rows = mapped("my.py:slow", [lines(50)], workers=1)
    assert len({row["pid"] for row in rows}) == 1
    assert report.working_s >= 50 * 0.02
    report = map_items("my.py:together", [lines(50)], "two.parquet", workers=2, device="cpu")
    pids = Counter(row["pid"] for row in pq.read_table("two.parquet").to_pylist())
    assert (report.errors, len(pids)) == (0, 2)


def test_a_class_is_made_once_in_a_worker_and_a_batch_fails_item_by_item() -> None:
    report, rows = mapped("my.py:Counted", [lines(40)], batch=4)
    assert [row["n"] for row in rows] == list(range(40))
    assert {row["made"] for row in rows} == {1}
    assert rows[13]["together"] == 1
    assert Counter(row["together"] for row in rows)[4] >= 16
    assert report.errors == 0


def test_functions_and_closures_can_be_given() -> None:
    factor = 3
    _, rows = mapped(lambda text: {"n": factor * int(text)}, [lines(5)], workers=1)
    assert [row["n"] for row in rows] == [0, 3, 6, 9, 12]


def test_memory_is_bounded_with_a_slow_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 60 items with results of 1 MiB, only these may have begun: items that are written, those that fit in a part,
    and those in the workers' chunks."""
    monkeypatch.setattr(parts_module, "PART_BYTES", 4 << 20)
    write, begun_ahead = parts_module.Parts._write, []

    def slow_write(self: Any, path: Path, table: Any) -> None:
        time.sleep(0.3)
        begun_ahead.append(len(list(Path().glob("begun-*"))) - self.written_rows)
        self.written_rows += table.num_rows
        write(self, path, table)

    monkeypatch.setattr(parts_module.Parts, "_write", slow_write)
    monkeypatch.setattr(parts_module.Parts, "written_rows", 0, raising=False)
    report, rows = mapped("my.py:large", [lines(150)])
    assert len(rows) == report.items == 150
    assert len(begun_ahead) > 3
    assert max(begun_ahead) < 100  # two workers, two chunks each, of at most 16 MiB; and the part


def test_what_a_target_prints_is_not_in_the_results(capfd: pytest.CaptureFixture[str]) -> None:
    _, rows = mapped("my.py:loud", [lines(3)], workers=1)
    assert [row["result"] for row in rows] == [0, 1, 2]
    out, err = capfd.readouterr()
    assert out == ""
    assert err.count("noise") == 3


def test_targets_that_cannot_work_end_the_run() -> None:
    lines(3)
    for target, error, said in (
        ("my.py:missing", TargetError, "has no 'missing'; it has .*number"),
        ("your.py:number", TargetError, "no such file"),
        ("my_module_that_is_not:number", TargetError, "no module 'my_module_that_is_not'"),
        ("my.py:TARGETS", TargetError, "has no 'TARGETS'"),
        ("number", TargetError, "expected my.py:function or package.module:function"),
        ("my.py:Broken", ModelRunError, "creating my.py:Broken raised OSError: no weights here"),
        ("my.py:Cancelled", ModelRunError, "creating my.py:Cancelled raised CancelledError$"),
        ("my.py:Unsaid", ModelRunError, "creating my.py:Unsaid raised Unprintable: <it cannot be printed>"),
        ("builtins:int", TargetError, "int is a class without the method __call__"),
        (dict, TargetError, "dict is a class without the method __call__"),
        ("my.py:named", InputError, "'error', which every row already has"),
        (threading.Lock().acquire, TargetError, "cannot be sent to other processes"),
    ):
        with pytest.raises(error, match=said):
            mapped(target, ["lines.txt"], workers=1)


def test_a_batch_with_too_few_results_is_an_error_of_each_item() -> None:
    report, rows = mapped("my.py:wrong", [lines(4)], batch=2, workers=1)
    assert report.errors == 4
    assert {row["error"] for row in rows} == {
        "ValueError: the target returned 0 results for a batch of 1, expected a list of 1 results"
    }


@pytest.mark.parametrize("results", [UserDict(a=1, b=2), {1, 2}, pa.table({"a": [1, 2], "b": [3, 4]})])
def test_a_batch_whose_results_are_no_list(results: Any) -> None:
    call = callable_target(lambda values: results, batch=2).load("cpu")
    with pytest.raises(ValueError, match=f"returned a {type(results).__name__} for a batch of 2, expected a list of 2"):
        call([1, 2])


def test_an_object_in_a_file_is_sent_although_its_class_is_of_a_package(tmp_path: Path) -> None:
    (tmp_path / "made.py").write_text(
        "import functools\n\ndef power(n, text):\n    return int(text) ** n\n\nsquare = functools.partial(power, 2)\n"
    )
    sent = callable_target(f"{tmp_path}/made.py:square").sent()
    assert sent.place is None
    del sys.modules["made"]
    assert sent.load("cpu")(["3"]) == [9]


def test_arguments_that_are_wrong() -> None:
    lines(3)
    for options, said in (
        ({"workers": 0}, "workers is 0"),
        ({"decoders": -1}, "decoders is -1"),
        ({"timeout_s": 0.0}, "timeout_s is 0.0"),
        ({"timeout_s": float("nan")}, "timeout_s is nan"),
        ({"timeout_s": "3"}, "timeout_s is '3'"),
        ({"batch": 0}, "batch is 0"),
        ({"batch": 1.5}, "batch is 1.5, expected an integer of 1 or more"),
        ({"workers": 1.5}, "workers is 1.5"),
        ({"decoders": True}, "decoders is True"),
        ({"frames": 1.5, "kind": "clip"}, "frames is 1.5"),
        ({"inputs": iter(["lines.txt"])}, "expected a list of files and folders"),
        ({"scheduler": type}, "scheduler is a type, expected the scheduler's address"),
        ({"device": "tpu"}, "expected auto, cpu or cuda"),
        ({"kind": "path", "out": "."}, "is in ., the folder of the results"),
        ({"scheduler": "tcp://127.0.0.1:1", "workers": 2}, "its own workers"),
        ({"scheduler": "tcp://127.0.0.1:1", "decoders": 2}, "its own workers"),
    ):
        with pytest.raises(InputError, match=said):
            map_items("my.py:number", **{"inputs": ["lines.txt"], "out": "out.parquet", **options})
    assert not Path("out.parquet").exists()


def test_a_target_object_can_be_made_beforehand() -> None:
    _, rows = mapped(callable_target("my.py:Counted", batch=2), [lines(4)], workers=1)
    assert [row["n"] for row in rows] == [0, 1, 2, 3]


def test_workers_divide_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    for workers in (1, 2, 100):
        division = divide("cpu", workers)
        assert division.workers == workers
        assert division.decode_threads >= 1
        assert division.torch_threads * min(workers, cores) <= cores


@pytest.mark.parametrize(("cores", "gpus", "decoders"), [(16, 1, 16), (16, 2, 8), (6, 2, 3), (2, 2, 0), (96, 1, 32)])
def test_a_gpu_has_one_worker_with_as_many_decoding_processes_as_cores(
    cores: int, gpus: int, decoders: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_workers, "_gpus", lambda: gpus)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    division = divide("auto", None, decodes=True)
    assert (division.workers, division.decoders) == (gpus, decoders)
    assert division.gpus == tuple(map(str, range(gpus)))
    assert divide("auto", None, decodes=False).decoders == 0
    assert divide("auto", None, decodes=True, decoders=0).decoders == 0
    assert divide("cpu", None, decodes=True).decoders == 0
    three = divide("cuda", 3, decodes=True)
    assert three.workers == len(three.gpus) == 3


def test_chunks_get_smaller_at_the_end_so_that_workers_end_together() -> None:
    assert size_near_end(512, left=100_000, workers=4, batch=64) == 512
    assert size_near_end(512, left=2048, workers=4, batch=64) == 256
    assert size_near_end(512, left=700, workers=4, batch=64) == 64
    assert size_near_end(512, left=0, workers=0, batch=64) == 64
    assert size_near_end(512, left=100, workers=1, batch=64) == 512
    left, given = 4000, []
    while left > 0:
        given.append(min(left, size_near_end(512, left, 4, 64)))
        left -= given[-1]
    assert sum(given) == 4000
    assert given == sorted(given, reverse=True)
    assert given[-4:-1] == [64, 64, 64]


def test_a_column_without_a_type_takes_it_in_a_later_run() -> None:
    Path("my.py").write_text("def maybe(text):\n    return {'n': int(text) if int(text) > 3 else None}\n")
    mapped("my.py:maybe", [lines(3)], workers=1)
    report, rows = mapped("my.py:maybe", [lines(6)], workers=1)
    assert [row["n"] for row in rows] == [None, None, None, None, 4, 5]
    assert (report.columns, report.errors) == ({"n": "int64"}, 0)
