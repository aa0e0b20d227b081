"""Work of other programs is detected, and our own work is not mistaken for it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from rooftop.hardware.load import OtherLoad, other_load


def busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's busy seconds replace the machine's count, so no work is left for other programs."""
    process = psutil.Process()
    monkeypatch.setattr("rooftop.hardware.load._busy_s", lambda: process.cpu_times().user + process.cpu_times().system)
    with other_load() as seen:
        busy(0.3)
    assert seen.cores < 0.1
    assert seen.seconds >= 0.3


def test_a_process_that_this_one_began_takes_its_cores_too() -> None:
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        with other_load() as seen:
            time.sleep(1.0)
    finally:
        child.kill()
        child.wait()
    assert seen.cores > 0.4


def test_work_of_others_counts_in_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others' work of 1.5 s in a block of at least 0.5 s occupies at most three cores."""
    counts = iter([100.0, 101.5])
    monkeypatch.setattr("rooftop.hardware.load._busy_s", lambda: next(counts))
    monkeypatch.setattr("rooftop.hardware.load._own_s", lambda: 0.0)
    with other_load() as seen:
        time.sleep(0.5)
    assert seen.seconds >= 0.5
    assert seen.cores == pytest.approx(1.5 / seen.seconds)


@pytest.mark.parametrize(
    ("cores", "threads", "disturbs"),
    [(0.05, 2, False), (0.5, 2, True), (0.5, 1, False), (1.0, 1, False), (1.2, 1, True)],
)
def test_others_disturb_where_they_take_cores_that_are_wanted(
    cores: float, threads: int, disturbs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert OtherLoad(cores, 1.0).disturbs(threads) is disturbs
    assert not OtherLoad(cores, 0.01).disturbs(threads)
