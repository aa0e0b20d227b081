"""The vector ladder: every rung gives x + y, and wrong launches are caught."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rooftop.ladder import Ladder, build, climb
from rooftop.ladder.rungs import CPU, CUDA
from rooftop.ladder.vector import wrong_launches


@pytest.mark.parametrize("size", [3, 4099])
def test_the_rungs_in_cuda_add_on_the_cpu(
    size: int, cuda_on_cpu: Counter[str], ladder_on_cpu: Callable[[str, int], Ladder]
) -> None:
    outcomes = climb(ladder_on_cpu("vector", size)).rungs
    right = {rung.name for rung in outcomes if rung.tool == CUDA and rung.status == "checked"}
    assert len(right) == 6, outcomes
    assert cuda_on_cpu["one_each"] >= 2


def test_rung_zero_adds() -> None:
    outcomes = climb(build("vector", 1001, "cpu")).rungs
    assert {rung.name: rung.status for rung in outcomes if rung.tool == CPU} == {
        "NumPy": "checked",
        "Numba": "checked",
        "PyTorch": "checked",
    }


def test_without_numba_the_rung_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.ladder.vector.find_spec", lambda name: None)
    (numba,) = (rung for rung in climb(build("vector", 8, "cpu")).rungs if rung.name == "Numba")
    assert (numba.status, numba.note) == ("absent", 'not installed: pip install "rooftop[ladder]"')


def test_wrong_launches_are_caught(cuda_on_cpu: Counter[str]) -> None:
    x = torch.randn(1000)
    refused, unfinished = wrong_launches(x, x, torch.empty(1000))
    assert "500,000 threads, expected at most 1,024" in refused
    assert "232 of 1,000 elements are still the NaN" in unfinished


def test_without_a_gpu_the_wrong_launch_is_refused_too() -> None:
    pytest.importorskip("cuda.core")
    x: Any = torch.randn(10)
    (refused,) = wrong_launches(x, x, x)
    assert "expected at most 1,024" in refused


def test_a_rung_on_the_cpu_that_writes_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rungs on the CPU share a result. The sum of the rung before does not count."""
    monkeypatch.setattr("rooftop.ladder.vector._numba_add", lambda: lambda a, b, c: None)
    outcomes = {rung.name: rung for rung in climb(build("vector", 1001, "cpu")).rungs if rung.tool == CPU}
    assert outcomes["NumPy"].status == "checked"
    assert outcomes["Numba"].status == "wrong"
