"""Climbing a ladder: rungs that are wrong, fail or cannot run are reported, and times become percents of the roof."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.cost import Cost, roof
from rooftop.errors import MissingExtraError
from rooftop.hardware import Timing, ceilings_of
from rooftop.ladder import LADDERS, Ladder, Rung, build, climb, climbing
from rooftop.ladder.chart import page
from rooftop.ladder.rungs import CPU, CUDA, PYTORCH, TRITON, source
from rooftop.ladder.table import heading, table
from rooftop.launch import cuda

SMALL = {"vector": 5001, "reduction": 5001, "matmul": 136, "layer": 70, "indexing": 40}


def made_up(*runs: Callable[[], Tensor]) -> Ladder:
    """A ladder whose correct result is 0, 1, ... 9, with a rung for each function."""
    rungs = tuple(Rung(f"rung {number}", PYTORCH, run) for number, run in enumerate(runs))
    cost = Cost(10**9, 10**9, {"fp32": 10})
    return Ladder("vector", "counting to <nine>", "B/s", "vector.cu", cost, torch.arange(10.0), rungs)


def failing() -> Tensor:
    raise RuntimeError("no more memory")


def test_wrong_results_and_failures_are_told_apart() -> None:
    right, off = torch.arange(10.0), torch.arange(10.0)
    off[3] = 4.0
    found = climb(made_up(lambda: right, lambda: off, failing, lambda: right[:5], lambda: off * torch.nan))
    assert [rung.status for rung in found.rungs] == ["checked", "wrong", "failed", "wrong", "wrong"]
    assert found.rungs[1].note == "1 of 10 elements are wrong: element 3 is 4, expected 3"
    assert found.rungs[2].note == "RuntimeError: no more memory"
    assert len(found.failures) == 4


def test_what_a_rung_does_not_write_is_found() -> None:
    result = torch.arange(10.0)
    ladder = made_up(lambda: result)
    assert climb(ladder).failures == ()
    assert climb(replace(ladder, poisoned=(result,))).failures[0].note.startswith("10 of 10 elements are wrong")


def test_times_become_percents_of_the_roof(monkeypatch: pytest.MonkeyPatch) -> None:
    """With made-up times, twice the roof's time counts as 50%, and a time below the roof is flagged."""
    ladder, ceilings = made_up(*[lambda: torch.arange(10.0)] * 2, failing), ceilings_of("h200")
    roof_ms = roof(ladder.cost, ceilings).ms
    times = {"0": Timing(2 * roof_ms, roof_ms, 0.01, 5), "1": Timing(0.5 * roof_ms, roof_ms, 0.01, 5)}

    def compare(calls: dict[str, object], **options: object) -> dict[str, Timing]:
        assert options["graph"]
        return {name: times[name] for name in calls}

    monkeypatch.setattr(climbing, "compare", compare)
    found = climb(ladder, ceilings)
    assert [rung.percent_of_roof for rung in found.rungs] == [pytest.approx(50), pytest.approx(200), None]
    assert found.rungs[0].rate == pytest.approx(2e9 / (2e-3 * roof_ms))
    assert json.loads(json.dumps(found.to_dict()))["rungs"][0]["status"] == "measured"
    cells = [list(column.cells) for column in table(found).columns]
    assert cells[4] == ["50%", "200% (!)", ""]
    assert "failed" in cells[5][2]
    assert "roof" in heading(found)
    drawn = page([found])
    assert "rung 1" in drawn
    assert "counting to &lt;nine&gt;" in drawn


def test_without_a_gpu_nothing_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(climbing, "compare", None)
    found = climb(build("vector", 100, "cpu"))
    assert {rung.ms for rung in found.rungs} == {None}
    assert found.roof_ms is None


def test_without_a_compiler_the_rungs_say_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*words: object, **options: object) -> None:
        raise MissingExtraError('pip install "rooftop[cuda]"')

    monkeypatch.setattr(cuda, "compile", missing)
    for name, size in SMALL.items():
        outcomes = climb(replace(build(name, size, "cpu"), remarks=lambda ceilings: ())).rungs
        assert {rung.status for rung in outcomes if rung.tool == CUDA} == {"absent"}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("name", list(LADDERS))
def test_all_kernels_compile_without_spills(name: str, arch: str) -> None:
    pytest.importorskip("cuda.core")
    ladder = build(name, SMALL[name], "cpu")
    instances = {kernel for rung in ladder.rungs for kernel in rung.kernels}
    assert len(instances) >= 4
    for instance in instances:
        binary = cuda.compile(source(ladder.source), instance, arch=arch).binary
        assert binary.spill_bytes == 0, binary.log


def test_wrong_calls() -> None:
    with pytest.raises(ValueError, match="no ladder 'stairs': expected one of vector, indexing, reduction"):
        build("stairs")
    for size in (0, -1, 1 << 40):
        with pytest.raises(ValueError, match="takes 1 to 536,870,912 elements"):
            build("vector", size, "cpu")
    wrong_size: Any
    for wrong_size in (3.5, "8", True):
        with pytest.raises(ValueError, match="takes an integer number of elements, got"):
            build("vector", wrong_size, "cpu")
    with pytest.raises(ValueError, match="device='meta': expected 'cpu'"):
        build("vector", 8, "meta")


def test_without_a_gpu_the_twins_need_the_interpreter() -> None:
    pytest.importorskip("triton")
    notes = {rung.note for rung in build("matmul", 8, "cpu").rungs if rung.tool == TRITON and rung.run is None}
    assert "Triton needs a GPU, or TRITON_INTERPRET=1" in notes


@pytest.mark.gpu
@pytest.mark.parametrize("name", list(LADDERS))
def test_every_rung_is_right_on_a_gpu(name: str) -> None:
    sizes = {"vector": 1_000_003, "reduction": 1_000_003, "matmul": 1000, "layer": 300, "indexing": 1500}
    found = climb(build(name, sizes[name], "cuda"))
    assert found.failures == ()
    assert {rung.status for rung in found.rungs if rung.tool in (CUDA, PYTORCH, CPU)} <= {"checked", "absent"}


@pytest.mark.gpu
def test_a_ladder_is_measured_on_a_gpu() -> None:
    found = climb(build("vector", 1 << 22, "cuda"), ceilings_of("h200"), seconds=0.02)
    assert found.failures == ()
    assert all(rung.ms for rung in found.rungs if rung.status != "absent")
    assert "500,000 threads" in found.remarks[0]
    assert "still the NaN" in found.remarks[1]
