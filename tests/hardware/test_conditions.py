"""The effect of other programs on the machine during a measurement."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch

from rooftop.hardware.conditions import Watch, busy, missing_cores


def _work(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


@pytest.mark.parametrize(
    ("others", "threads", "cores", "disturbed"),
    [(0.0, 2, 2, False), (0.05, 2, 2, False), (0.2, 2, 2, True), (1.0, 1, 2, False), (30.0, 16, 64, False)],
)
def test_others_disturb_where_they_take_cores_that_the_measurement_wants(
    others: float, threads: float, cores: float, disturbed: bool
) -> None:
    assert busy({"others_cores": others, "threads": threads, "cores": cores}, "cpu") is disturbed


def test_what_is_not_known_disturbs_nothing() -> None:
    assert missing_cores({}) == 0
    assert not busy({}, "cpu")
    assert not busy({}, "cuda")


def test_a_busy_neighbour_is_seen() -> None:
    """Processes that this process has started count as its own work, so the neighbour is a grandchild that has lost its
    parent."""
    context = multiprocessing.get_context("fork")
    with Watch(torch.device("cpu")) as watch:
        parent = context.Process(target=_start_neighbour)
        parent.start()
        parent.join()
        time.sleep(0.7)
    assert watch.conditions["others_cores"] > 0.3
    assert watch.conditions["seconds"] >= 0.7


def _start_neighbour() -> None:
    import os

    if os.fork() == 0:
        _work(1.0)
        os._exit(0)
    os._exit(0)


def test_a_gpu_is_disturbed_by_others_on_it_and_not_by_the_load_of_the_host() -> None:
    host = {"others_cores": 2.0, "threads": 2.0, "cores": 2.0}
    assert not busy(host, "cuda")
    assert not busy({**host, "others_on_gpu_percent": 3.0}, "cuda")
    assert busy({"others_on_gpu_percent": 60.0}, "cuda")
