"""benchmarks/trust.py reports real misses, and does not report a host whose speed varied."""

from __future__ import annotations

import copy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooftop.analysis.report_contents import Advice

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("trust", "trust_models"):
        sys.modules.pop(name, None)
    import trust

    return trust


RUN: dict[str, Any] = {
    "plain": [
        {"steady_ms": 10.0, "latency_ms": 12.0, "busy_ms": 8.0, "median_ms": 10.1},
        {"steady_ms": 10.1, "latency_ms": 12.1, "busy_ms": 8.0, "median_ms": 10.2},
    ],
    "steady_ms": [10.0, 10.05, 10.0, 10.1],
    "wall_ms": 10.0,
    "latency_ms": 12.0,
    "busy_ms": 8.0,
    "launch_gap_ms": 2.0,
    "percent_of_roof": 30.0,
    "disturbed": False,
    "above": [],
    "analysis_s": 4.0,
}


def misses(trust: Any, **changes: Any) -> list[str]:
    """The misses of five runs, the last of which is changed."""
    changed = {**copy.deepcopy(RUN), **changes}
    return list(trust.problems(trust.merged("a model", [*[RUN] * 4, changed])))


def test_what_agrees_misses_nothing(trust: Any) -> None:
    assert misses(trust) == []
    assert "a model" in trust.table([trust.merged("a model", [RUN] * 5)])


@pytest.mark.parametrize(
    ("changes", "miss"),
    [
        ({"wall_ms": 10.4}, "wall is +4.0% off"),
        ({"latency_ms": 11.0}, "latency is -8.3% off"),
        ({"launch_gap_ms": 2.5}, "launch gap is +0.50 ms off"),
        ({"percent_of_roof": 31.0}, "percent of roof differs by 3.3% between processes"),
        ({"above": [{"percent": 103.0}]}, "a row has 103% of its roof"),
    ],
)
def test_what_is_off_is_named(changes: dict[str, Any], miss: str, trust: Any) -> None:
    assert misses(trust, **changes) == [f"a model: {miss}"]


def test_a_host_that_varied_judges_no_time_but_must_be_said(trust: Any) -> None:
    plain = [{**RUN["plain"][0]}, {**RUN["plain"][1], "steady_ms": 14.0, "latency_ms": 16.0}]
    varied = {"plain": plain, "steady_ms": [10.0, 12.0, 14.0], "percent_of_roof": 22.0}
    assert misses(trust, **varied, wall_ms=13.0) == []
    assert misses(trust, **varied, wall_ms=18.0, disturbed=True) == []
    (miss,) = misses(trust, **varied, wall_ms=18.0)
    assert "the host's times varied from 10.00 to 14.00 ms, and the report of 18.00 ms is not marked" in miss


def test_between_the_phases_of_an_analysis_a_host_can_vary_as_well(trust: Any) -> None:
    assert misses(trust, steady_ms=[10.0, 11.0, 10.0], wall_ms=10.8) == []


def test_latencies_are_judged_by_latencies(trust: Any) -> None:
    plain = [{**RUN["plain"][0]}, {**RUN["plain"][1], "latency_ms": 15.0}]
    assert misses(trust, plain=plain, latency_ms=14.5) == []
    assert misses(trust, plain=plain, latency_ms=14.5, wall_ms=10.4) == ["a model: wall is +4.0% off"]


def test_an_error_in_one_process_is_a_miss(trust: Any) -> None:
    row = trust.merged("a model", [RUN, {"error": "ValueError: no"}])
    assert list(trust.problems(row)) == ["a model: ValueError: no"]


def test_advice_that_a_program_can_follow_has_a_way(trust: Any) -> None:
    titles = ["Replay the step from a CUDA graph", "Double the batch to 32", "Lay images out channels last"]
    titles += [
        "Run in bfloat16",
        "Fuse pointwise operators into their neighbours",
        "Step the optimizer in fused kernels",
    ]
    items = [Advice(title, "", 1.0, "torch.compile(model)") for title in titles]
    assert None not in [trust.way_of(item) for item in items]
    assert trust.way_of(Advice("Speed up convolution (backward)", "", 1.0)) is None
    replayed = replace(items[4], command='torch.compile(model, mode="reduce-overhead")')
    assert trust.way_of(items[4]) is trust.compiled
    assert trust.way_of(replayed) is trust.compiled_and_replayed
