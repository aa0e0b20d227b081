"""What others do to the machine while something is measured."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest
import torch

from rooftop.hardware import conditions
from rooftop.hardware.conditions import Watch, busy

CPU = torch.device("cpu")


def _work(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


def test_own_work_is_not_that_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    used, own = iter([100.0, 100.9]), iter([50.0, 50.8])  # of the 0.9 s that the cores worked, 0.8 s were its own
    monkeypatch.setattr(conditions, "_used_s", lambda: next(used))
    monkeypatch.setattr(conditions, "_own_s", lambda: next(own))
    monkeypatch.setattr(conditions, "_cores", lambda: [0, 1])
    clock = iter([0.0, 1.0])
    monkeypatch.setattr(conditions.time, "perf_counter", lambda: next(clock))
    with Watch(CPU) as watch:
        pass
    assert watch.conditions["others_share"] == pytest.approx(0.1 / 2)
    assert not busy({"others_share": 0.05}, "cpu")
    assert busy({"others_share": 0.06}, "cpu")


def test_a_busy_neighbour_is_seen() -> None:
    """Beside other tests, which are neighbours too: more than a tenth of the cores, whatever else runs."""
    neighbour = multiprocessing.get_context("fork").Process(target=_work, args=(1.0,))
    with Watch(CPU) as watch:
        neighbour.start()
        time.sleep(0.6)
    neighbour.kill()
    neighbour.join()
    cores = len(os.sched_getaffinity(0))
    assert watch.conditions["others_share"] > min(0.1, 0.5 / cores)


def test_a_gpu_is_disturbed_by_others_on_it_and_not_by_the_load_of_the_host() -> None:
    assert not busy({"others_share": 0.9}, "cuda")
    assert not busy({"others_share": 0.9, "others_on_gpu_percent": 3.0}, "cuda")
    assert busy({"others_on_gpu_percent": 60.0}, "cuda")
