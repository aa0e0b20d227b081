"""The python ladder: every rung gives the result of plain Python, copies are counted, and times become percents of
roofs."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import active_children
from typing import Any

import numpy as np
import pytest
import torch

from rooftop.cost import Cost, roof
from rooftop.hardware import Timing, ceilings_of
from rooftop.ladder import nearest, python_climbing, python_ladder, worker_processes
from rooftop.ladder.nearest import made_points
from rooftop.ladder.python_climbing import SpeedClimb, as_array, climb_python
from rooftop.ladder.python_ladder import ALL, DASK, GPU, NUMBA, ONE, PROCESSES, PYTHON, SpeedLadder, SpeedRung
from rooftop.ladder.python_shown import disturbed, heading, page, stops, table
from rooftop.ladder.rungs import source
from rooftop.ladder.worker_processes import Workers, bounds, pickled_bytes

CPU = torch.device("cpu")
COUNT = 1009  # points, a multiple neither of a block nor of the number of processes


@pytest.fixture(autouse=True)
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use ceilings from a file, so that nothing is measured."""
    monkeypatch.setattr(python_climbing, "measure_ceilings", lambda *names, **parts: ceilings_of("h200"))


# shares the fork server of the other tests, which has preloaded the modules
starts_processes = pytest.mark.usefixtures("fork")


@pytest.fixture(scope="module")
def climbed(fork: object) -> Iterator[SpeedClimb]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(python_climbing, "measure_ceilings", lambda *names, **parts: ceilings_of("h200"))
        with python_ladder.python_ladder(COUNT, "cpu") as ladder:
            yield climb_python(ladder, CPU, seconds=0.01)


def by_name(climb: SpeedClimb) -> dict[tuple[str, str], python_climbing.SpeedOutcome]:
    return {(rung.tool, rung.name): rung for rung in climb.rungs}


def test_every_rung_gives_what_plain_python_gives(climbed: SpeedClimb) -> None:
    assert climbed.failures == ()
    absent = {rung.tool for rung in climbed.rungs if rung.status == "absent"}
    assert absent <= {"PyTorch", "CUDA C++", DASK}
    measured = [rung for rung in climbed.rungs if rung.status == "measured"]
    assert len(measured) >= 14
    for rung in measured:
        assert rung.ms is not None
        assert rung.percent_of_roof == pytest.approx(100 * climbed.roofs_ms[rung.roof] / rung.ms)
        assert rung.speed_up == pytest.approx((climbed.rungs[0].ms or 0.0) / rung.ms)
    assert json.loads(json.dumps(climbed.to_dict()))["rungs"][0]["speed_up"] == 1.0


def test_the_lessons_of_the_ladder(climbed: SpeedClimb) -> None:
    """The differences are far larger than those that other work on the machine can cause."""
    rungs = by_name(climbed)
    assert (rungs[NUMBA, "the same loops, compiled"].speed_up or 0) > 20
    assert (rungs[PYTHON, "loops in threads"].speed_up or 9) < 1.9


def test_copies_are_counted(climbed: SpeedClimb) -> None:
    """Arrays copy 12 bytes for each point, 4 for its distance, the centres for each process, and little more."""
    rungs = by_name(climbed)
    data = 16 * COUNT + climbed.processes * 12 * nearest.CENTRES
    for way in ("Pool", "Queue", "Pipe"):
        assert data < (rungs[PROCESSES, f"{way}, compiled"].copied_bytes or 0) < data + 1000 * climbed.processes
    assert (rungs[PROCESSES, "share_memory_, compiled"].copied_bytes or 0) < 100 * climbed.processes
    assert (rungs[PROCESSES, "loops in a Pool"].copied_bytes or 0) > 2 * data
    assert rungs[PYTHON, "loops"].copied_bytes is None
    assert any(remark.startswith("The cost of copies:") for remark in climbed.remarks)


@starts_processes
def test_dask_gives_the_same() -> None:
    pytest.importorskip("dask")
    points, centres = made_points(300)
    with ExitStack() as stack:
        rungs = [rung for rung in python_ladder.in_processes(points, centres, 2, stack) if rung.tool == DASK]
        assert [rung.name for rung in rungs] == ["bag", "array", "delayed"]
        for rung in rungs:
            assert rung.run is not None
            np.testing.assert_array_equal(as_array(rung.run()), expected(points, centres))


def expected(points: nearest.Array, centres: nearest.Array) -> nearest.Array:
    """The expected result, from all pairs in float64."""
    return ((points.T[:, None, :].astype(np.float64) - centres) ** 2).sum(2).min(1)


@starts_processes
def test_workers_answer_by_every_way_and_end() -> None:
    from rooftop.ladder.nearest_loops import of_part

    points, centres = made_points(101)
    parts = bounds(101, 2)
    before = set(active_children())
    workers = Workers.start(2, points, centres)
    assert len(set(active_children()) - before) == 8
    try:
        pieces = [np.ascontiguousarray(points[:, first:last]) for first, last in parts]
        for found in (
            np.concatenate(workers.through_queue(pieces, centres)),
            np.concatenate(workers.through_pipes(pieces, centres)),
            workers.through_shared_memory(parts),
            np.concatenate(workers.in_pool(of_part, [(piece, centres) for piece in pieces])),
        ):
            np.testing.assert_array_equal(found, expected(points, centres))
        with pytest.raises(RuntimeError, match="a process of the pool has ended with exit code 3"):
            workers.in_pool(os._exit, [(3,)])
        workers.pipes[0].send(None)
        with pytest.raises(RuntimeError, match="a worker process has ended before it sent its result"):
            worker_processes._received(workers.pipes[0])
    finally:
        workers.close()
    assert set(active_children()) <= before


def test_pickled_bytes_are_those_of_the_data() -> None:
    assert pickled_bytes([]) == 0
    small, large = (pickled_bytes([np.zeros(n, np.float32)]) for n in (10, 1010))
    assert large - small == pytest.approx(4000, abs=8)


def made_up(*runs: Callable[[], object] | None) -> SpeedLadder:
    rungs = tuple(SpeedRung(f"rung {n}", PYTHON, run, ALL if n else ONE, "always") for n, run in enumerate(runs))
    return SpeedLadder("counting to <three>", Cost(4, 4, {"fp32": 10**12}), 2, rungs)


def failing() -> list[float]:
    raise RuntimeError("no more memory")


def test_wrong_results_and_failures_are_told_apart() -> None:
    nan = float("nan")
    runs = (lambda: [0.0, 1.0, 2.0], lambda: torch.tensor([0.0, 1.0, 5.0]), failing, lambda: [0.0], lambda: [nan] * 3)
    found = climb_python(made_up(*runs, None), CPU, seconds=0.001)
    assert [rung.status for rung in found.rungs] == ["measured", "wrong", "failed", "wrong", "wrong", "absent"]
    assert found.rungs[1].note == "1 of 3 distances are wrong: point 2 has 5, expected 2"
    assert found.rungs[2].note == "RuntimeError: no more memory"
    assert len(found.failures) == 4


def test_slow_and_fast_rungs_become_percents_of_their_roofs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timings are made up. Slow rungs are timed by single calls."""
    ladder = made_up(*[lambda: [0.0, 1.0, 2.0]] * 2)
    ms = roof(ladder.cost, ceilings_of("h200")).ms
    monkeypatch.setattr(python_climbing, "SLOW_S", -1.0)
    monkeypatch.setattr(
        python_climbing,
        "compare_slow",
        lambda calls: {"0": Timing(9 * ms, 4 * ms, 0.0, 2), "1": Timing(ms, ms / 2, 0, 2)},
    )
    found = climb_python(ladder, CPU)
    assert [rung.percent_of_roof for rung in found.rungs] == [pytest.approx(25), pytest.approx(200)]
    assert found.rungs[1].speed_up == pytest.approx(8)
    cells = [list(column.cells) for column in table(found).columns]
    assert cells[4] == ["25%", "200% (!)"]
    assert list(stops(found).columns[2].cells) == ["always", "always"]
    assert "on one core" in heading(found)
    drawn = page(replace(found, other_cores=1.5))
    assert "counting to &lt;three&gt;" in drawn
    assert "rung 1, Python" in drawn
    assert "1.5 cores busy" in drawn
    assert disturbed(replace(found, other_cores=0.1)) == ""


def test_a_part_of_a_long_rung_is_timed_for_the_whole() -> None:
    """One part of 16 takes 2 ms, so the whole rung takes at least 32 ms."""
    asked: list[int] = []

    def part(parts: int) -> None:
        asked.append(parts)
        time.sleep(0.002)

    ladder = made_up(lambda: [0.0])
    found = climb_python(replace(ladder, parts=16, rungs=(replace(ladder.rungs[0], part=part),)), CPU, seconds=0.01)
    assert set(asked) == {16}
    assert (found.rungs[0].ms or 0) >= 32
    points, centres = made_points(320)
    with ExitStack() as stack:
        for rung in python_ladder.in_plain_python(points, centres, 2, stack):
            assert rung.part is not None
            np.testing.assert_array_equal(as_array(rung.part(16)), expected(points, centres)[:20])


def test_what_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_ladder, "find_spec", lambda name: None)
    with python_ladder.python_ladder(64, "cpu") as ladder:
        notes = {(rung.tool, rung.note) for rung in ladder.rungs if rung.run is None}
    assert (NUMBA, 'not installed: pip install "rooftop[ladder]"') in notes
    assert (DASK, 'not installed: pip install "rooftop[cluster]"') in notes
    assert (PROCESSES, 'not installed: pip install "rooftop[ladder]"') in notes
    assert ("CUDA C++", "needs an NVIDIA GPU") in notes


def test_sizes_that_do_not_fit_are_refused() -> None:
    for size in (0, 63, 1 << 30):
        with (
            pytest.raises(ValueError, match="takes 64 to 4,194,304 points"),
            python_ladder.python_ladder(size, "cpu"),
        ):
            raise AssertionError


@pytest.mark.parametrize("count", [1, 511, 1030])
def test_the_rungs_of_a_gpu_on_the_cpu(
    count: int, cuda_on_cpu: Counter[str], compile_for_cpu: Callable[[str, Sequence[str]], None]
) -> None:
    points, centres = made_points(count)
    rungs = python_ladder.on_gpu(points, centres, CPU)
    assert {rung.roof for rung in rungs} == {GPU}
    for rung in rungs:
        assert rung.run is not None
        np.testing.assert_array_equal(as_array(rung.run()), expected(points, centres))
    assert cuda_on_cpu["nearest"] == 2
    assert rungs[2].copied is not None
    assert rungs[2].copied() == 16 * count


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_the_kernel_compiles_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    from rooftop.launch import cuda

    assert cuda.compile(source(python_ladder.FILE), "nearest<4>", arch=arch).binary.spill_bytes == 0


@pytest.mark.gpu
def test_the_rungs_of_a_gpu_are_right_and_measured() -> None:
    points, centres = made_points(100_003)
    rungs = python_ladder.on_gpu(points, centres, torch.device("cuda"))
    first = SpeedRung("expected", PYTHON, lambda: expected(points, centres), ONE, "")
    ladder = SpeedLadder("a test", Cost(4, 4, {"fp32": 10**6}), 2, (first, *rungs))
    found = climb_python(ladder, torch.device("cuda"), seconds=0.02)
    assert [rung.status for rung in found.rungs] == ["measured"] * 4


def test_ctrl_c_waits_for_a_piece_of_each_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths: list[int] = []

    def in_python(points: list[Any], centres: list[Any]) -> list[float]:
        lengths.append(len(points))
        return [0.0] * len(points)

    monkeypatch.setattr(python_ladder.nearest, "in_python", in_python)
    with ExitStack() as stack:
        _, threads = python_ladder.in_plain_python(*made_points(30_000), 2, stack)
        assert threads.run is not None
        assert len(threads.run()) == 30_000
    assert max(lengths) < 2 * python_ladder.PIECE_POINTS


def test_workers_of_one_queue_are_all_asked_before_any_is_awaited() -> None:
    """Any of them may take a message, so a worker that is awaited alone may never get one."""
    told: list[None] = []

    class Process:
        def is_alive(self) -> bool:
            return len(told) < 2

        def join(self, seconds: float) -> None:
            assert len(told) == 2

    worker_processes._end([Process(), Process()], told.append)
