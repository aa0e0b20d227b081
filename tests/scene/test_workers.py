"""Forked workers: results in order, original errors, no process that outlives a build, bounded memory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import trimesh

from rooftop import scene
from rooftop.errors import BuildError
from rooftop.scene.building import levels
from rooftop.scene.building.workers import Workers, shared

linux = pytest.mark.skipif(sys.platform != "linux", reason="processes are forked only on Linux")


Left = Callable[[], list[psutil.Process]]


@pytest.fixture
def left() -> Left:
    """Gives the processes that this test has begun and that still run, or have not been waited for."""
    before = psutil.Process().children()
    return lambda: [each for each in psutil.Process().children() if each not in before]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_stand_in_the_order_of_the_items(count: int, left: Left) -> None:
    came: list[int] = []
    found = Workers(count).run(lambda item: np.full(item, item), range(50), done=came.append)
    assert [len(each) for each in found] == list(range(50))
    assert all((each == number).all() for number, each in enumerate(found))
    assert sorted(came) == list(range(50))
    assert not left()


def test_more_items_than_a_pipe_has_room_for() -> None:
    assert Workers(2).run(lambda item: -item, range(30_000)) == [-item for item in range(30_000)]


@pytest.mark.parametrize("count", [1, 3])
def test_a_stage_begins_when_the_one_before_is_done_everywhere(count: int) -> None:
    values = shared(40, np.int64)

    def write(item: int) -> None:
        time.sleep(0.002 * (item % 3))
        values[item] = item

    found = Workers(count).run(lambda item: int(values.sum()), range(40), before=[(write, range(40))])
    assert found == [sum(range(40))] * 40


@linux
def test_the_work_is_done_by_other_processes() -> None:
    began = shared(3, np.int64)

    def work(item: int) -> int:
        began[item] = 1
        until = time.monotonic() + 60
        while not began.all() and time.monotonic() < until:  # a single process would take all three items
            time.sleep(0.001)
        return os.getpid()

    found = Workers(3).run(work, range(3))
    assert len({os.getpid(), *found}) == 4


@pytest.mark.parametrize("count", [1, 3])
def test_an_error_is_raised_as_it_was(count: int, left: Left) -> None:
    def work(item: int) -> int:
        if item == 5:
            raise ValueError("five is not wanted")
        return item

    with pytest.raises(ValueError, match="five") as raised:
        Workers(count).run(work, range(9))
    assert str(raised.value) == "five is not wanted"
    assert count == 1 or "in work" in raised.value.__notes__[0]  # the line in the worker
    assert not left()


@linux
def test_an_error_that_cannot_be_sent_keeps_its_words() -> None:
    class Odd(Exception):
        def __init__(self, a: int, b: int) -> None:
            super().__init__(f"{a} and {b}")

    def work(item: int) -> int:
        raise Odd(1, 2)

    with pytest.raises(BuildError, match="Odd: 1 and 2"):
        Workers(2).run(work, range(2))


@linux
@pytest.mark.parametrize("stage", [0, 1])
def test_a_worker_that_is_killed_is_named(stage: int, left: Left) -> None:
    def die(item: int) -> None:
        if item == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)

    def rest(item: int) -> None:
        time.sleep(0.01)

    stages = [(die, range(9)), (rest, range(9))]
    work, items = stages[1 - stage]
    words = r"worker \d of 2 \(process \d+\) was ended by SIGKILL while counting; .*use fewer workers"
    with pytest.raises(BuildError, match=words):
        Workers(2).run(work, items, "counting", before=[stages[stage]])
    assert not left()


@linux
def test_an_interruption_ends_all_workers(left: Left) -> None:
    def stop(number: int) -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        Workers(3).run(lambda item: time.sleep(0 if item == 0 else 60), range(3), done=stop)
    assert time.monotonic() - began < 50
    assert not left()


def test_no_worker_is_refused() -> None:
    with pytest.raises(ValueError, match=r"workers=2\.5: expected 1 or more"):
        Workers.of(2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="workers=0: expected 1 or more"):
        Workers.of(0)
    assert Workers.of(None).count >= 1


@pytest.mark.parametrize("count", [1, 3])
def test_threads_give_results_in_the_order_of_the_items(count: int) -> None:
    seen: set[int] = set()
    met = threading.Barrier(count, timeout=60)  # passes only if `count` workers run at the same time

    def work(item: int) -> int:
        if item < count:
            met.wait()
        seen.add(threading.get_ident())
        return -item

    assert Workers(count).threads(work, range(20)) == [-item for item in range(20)]
    assert len(seen) == count


# ---- teams -----------------------------------------------------------------------------------------------------------


def times(state: np.ndarray, item: int) -> tuple[int, np.ndarray]:
    return os.getpid(), state * item


def write_to(state: np.ndarray, item: int) -> None:
    state[item] = 1


@linux
def test_processes_stay_from_run_to_run_and_get_the_state_of_each(left: Left) -> None:
    processes = set()
    with Workers(2).team([times]) as team:
        for run in range(4):
            size = 10 ** (4 - run) if run < 2 else 10**run  # the second run is smaller, later runs grow
            state = np.arange(size) + run
            found = team.run(times, range(30), state)
            assert all((each == state * number).all() for number, (_, each) in enumerate(found))
            processes |= {process for process, _ in found}
        assert 1 <= len(processes) <= 2
        team.forget()
        assert not left()
        again = {process for process, _ in team.run(times, range(30), np.arange(3))}
        assert not again & processes
    assert not left()


@linux
def test_a_team_that_is_too_small_or_lacks_a_function_is_forked_anew() -> None:
    more = 5

    def plus(state: int, item: int) -> int:  # a local function cannot be pickled, so the workers were forked with it
        return state + item + more

    with Workers(3).team([times]) as team:
        few = {process for process, _ in team.run(times, range(2), np.arange(2))}
        assert team.run(plus, range(9), 2) == [7 + item for item in range(9)]
        several = team.run(times, range(9), np.arange(2))
        assert not few & {process for process, _ in several}


@linux
def test_what_was_sent_cannot_be_written_to(left: Left) -> None:
    with Workers(2).team([times, write_to]) as team:
        team.run(times, range(9), np.arange(9))
        with pytest.raises(ValueError, match="read-only"):
            team.run(write_to, range(9), np.arange(9))
    assert not left()


@linux
def test_stages_of_a_later_run_share_its_state() -> None:
    values = shared(40, np.int64)

    def write(state: int, item: int) -> None:
        time.sleep(0.002 * (item % 3))
        values[item] = item * state

    def total(state: int, item: int) -> int:
        return int(values.sum()) + state

    with Workers(3).team([write, total]) as team:
        for state in range(3):
            found = team.run(total, range(40), state, before=[(write, range(40))])
            assert found == [sum(range(40)) * state + state] * 40


# ---- builds ----------------------------------------------------------------------------------------------------------


@linux
def test_a_build_whose_worker_is_killed_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "PIECE_TRIANGLES", 2000)
    monkeypatch.setattr(levels, "cut", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    ball = trimesh.creation.icosphere(5)
    with pytest.raises(BuildError, match="while cutting triangles; nothing was written"):
        scene.build(ball.vertices, ball.faces, tmp_path / "ball.rtg", workers=2)
    assert not list(tmp_path.iterdir())


@linux
def test_processes_are_forked_once_for_all_levels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "LEAST_TRIANGLES", 500)
    monkeypatch.setattr(levels, "RUN_CLUSTERS", 50)
    monkeypatch.setattr(levels, "PIECE_TRIANGLES", 1000)
    forks = []
    fork = os.fork
    monkeypatch.setattr(os, "fork", lambda: forks.append(0) or fork())
    ball = trimesh.creation.icosphere(6)
    report = scene.build(ball.vertices, ball.faces, tmp_path / "ball.rtg", workers=2)
    assert len(report.levels) > 6
    assert len(forks) <= 4  # two forks find equal vertices and faces, two build levels and write


def test_a_small_mesh_is_built_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("forking takes longer than the build"))
    ball = trimesh.creation.icosphere(3)
    assert scene.build(ball.vertices, ball.faces, tmp_path / "ball.rtg").triangles == len(ball.faces)


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_never_goes_back(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "PIECE_TRIANGLES", 2000)
    told: list[tuple[str, float]] = []
    ball = trimesh.creation.icosphere(5)
    scene.build(
        ball.vertices, ball.faces, tmp_path / "ball.rtg", workers=workers, progress=lambda *each: told.append(each)
    )
    fractions = [fraction for _, fraction in told]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)
    words = [what.split()[0] for what, _ in told]
    assert list(dict.fromkeys(words)) == ["checking", "cutting", "simplifying", "writing"]
    assert len(set(fractions)) > 6


PEAK = """
import sys, numpy as np
from rooftop import scene
for side in (240, 480):
    line = np.linspace(0, 1, side + 1)
    noise = np.random.default_rng(0).random((side + 1, side + 1))
    height = 0.02 * np.sin(90 * line)[:, None] * np.cos(70 * line)[None] + 0.001 * noise
    vertices = np.stack([*np.meshgrid(line, line, indexing="ij"), height], -1).reshape(-1, 3)
    corner = (np.arange(side)[:, None] * (side + 1) + np.arange(side)).ravel()
    faces = np.stack([corner, corner + side + 1, corner + 1, corner + 1, corner + side + 1, corner + side + 2], 1)
    uv = vertices[:, :2].copy()
    scene.build(vertices, faces.reshape(-1, 3), sys.argv[1], "smooth", uv, workers=1)
    print(2 * side * side, next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@linux
def test_a_triangle_takes_less_than_200_bytes_of_memory(tmp_path: Path) -> None:
    """The mesh has normals and uv. All memory is counted, including the arrays that were passed in."""
    command = [sys.executable, "-c", PEAK, str(tmp_path / "mesh.rtg")]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (few, small), (many, large) = (map(int, line.split()) for line in done.stdout.splitlines())
    assert 50 < 1024 * (large - small) / (many - few) < 200
