"""Advice names its evidence, predicts what can be checked by hand, and is silent where nothing is to gain."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rooftop.analysis.advice import advise
from rooftop.analysis.advice.format_rules import half_precision
from rooftop.analysis.advice.host_rules import launch_gap
from rooftop.analysis.advice.kernel_rules import pointwise_fusion
from rooftop.analysis.findings import Findings
from rooftop.analysis.floors import operator_rows
from rooftop.analysis.instruments import MeasuredOperator, Plain
from rooftop.analysis.report import Gaps, Summary
from rooftop.cost import Cost, CountingMode, Record
from rooftop.hardware.ceilings import Ceilings

MEGABYTE = 1_000_000  # 1 ms at 1 GB/s


def operator(name: str, cost: Cost, measured_ms: float, phase: str = "forward") -> MeasuredOperator:
    record = Record(f"aten::{name}", ((1,),), "float32", "cpu", "", phase, cost)
    return MeasuredOperator(record, measured_ms, ())


def findings(ceilings: Ceilings, *operators: MeasuredOperator, launch_gap_ms: float = 0.0) -> Findings:
    busy_ms = sum(op.measured_ms for op in operators)
    wall_ms = busy_ms + launch_gap_ms
    summary = Summary(wall_ms, 0.0, busy_ms, 0.0, 0.0, 0, 0, 0, 100, None, 1)
    return Findings(operators, operator_rows(operators, ceilings), summary, Gaps(0.0, 0.0, launch_gap_ms), ceilings)


def test_a_graph_saves_the_launch_gap_less_the_dispatch_of_each_kernel(ceilings: Ceilings) -> None:
    gpu = dataclasses.replace(ceilings, kind="cuda")  # 2 us a launch in a graph, 1 us of it the kernel itself
    work = operator("relu", Cost(MEGABYTE, MEGABYTE), 2.0)
    (advice,) = launch_gap(findings(gpu, work, launch_gap_ms=8.0))
    assert advice.gain_ms == pytest.approx(8.0 - 100 * 0.001)
    assert "launch gap 8.00 ms of 10.00 ms" in advice.evidence
    assert launch_gap(findings(ceilings, work, launch_gap_ms=8.0)) == []


def test_half_precision_keeps_each_operators_percent_of_roof(ceilings: Ceilings) -> None:
    """A product bound by arithmetic gains the ratio of the peaks (4), one bound by memory a factor of 2."""
    product = operator("mm", Cost(0, 1000, {"fp32": 4_000_000}), 8.0)
    moved = operator("relu", Cost(MEGABYTE, MEGABYTE), 3.0)
    (advice,) = half_precision(findings(ceilings, product, moved))
    assert advice.gain_ms == pytest.approx(8.0 * 3 / 4 + 3.0 / 2)
    assert "2 operators of 11.00 ms in float32 would take 3.50 ms, at their percent of roof" in advice.evidence


def test_half_precision_is_silent_about_half_precision(ceilings: Ceilings) -> None:
    half = dataclasses.replace(operator("mm", Cost(1, 1, {"bf16": 9}), 1.0).record, dtype="bfloat16")
    assert half_precision(findings(ceilings, MeasuredOperator(half, 1.0, ()))) == []


def test_what_the_host_cannot_launch_faster_is_not_promised(ceilings: Ceilings) -> None:
    product = operator("mm", Cost(0, 1000, {"fp32": 4_000_000}), 8.0)
    waiting = dataclasses.replace(findings(ceilings, product, launch_gap_ms=1.0), host_ms=5.0)
    (advice,) = half_precision(waiting)
    assert advice.gain_ms == pytest.approx(9.0 - 5.0)
    (advice,) = half_precision(dataclasses.replace(waiting, best_ms=8.5))  # the 9 ms are those of a disturbed host
    assert advice.gain_ms == pytest.approx(8.5 - 5.0)


def test_what_comes_after_the_last_launch_takes_its_time(ceilings: Ceilings) -> None:
    """The host launches one in 0.1 ms: a large one after 99 small ones cannot start before 10 ms."""
    small, large = operator("relu", Cost(MEGABYTE, MEGABYTE), 0.05), operator("mm", Cost(1, 1), 10.0)
    at_the_end = dataclasses.replace(findings(ceilings, *[small] * 99, large, launch_gap_ms=5.05), host_ms=10.0)
    after = [0.01] * 99 + [4.0]
    assert at_the_end.saved_by_ms(after) == pytest.approx(20.0 - (10.0 + 4.0))
    plain = Plain(14.95, [], [], 0.0, 0.0, compiled=False, launched=tuple((n / 100) ** 2 for n in range(1, 101)))
    late = dataclasses.replace(at_the_end, plain=plain)  # the host is slow at the end: 10 ms all the same
    assert late.saved_by_ms(after) == pytest.approx(20.0 - (10.0 + 4.0))
    early = [plain.launched[place] * 10.0 for place in (0, 49, 99)]
    assert [10.0 * late._launched(part) for part in (0.01, 0.5, 1.0)] == pytest.approx(early)
    at_first = dataclasses.replace(findings(ceilings, large, *[small] * 99, launch_gap_ms=0.0), host_ms=10.0)
    assert at_first.saved_by_ms([4.0] + [0.01] * 99) == pytest.approx(0.1 + 14.95 - (10.0 + 0.01), rel=0.02)


def chain(ms: float) -> list[MeasuredOperator]:
    """relu and a sum with another tensor, of 1 MB each, after a product; each takes so long for a MB."""
    x, weight, other = torch.randn(500, 500), torch.randn(500, 500), torch.randn(500, 500)
    with CountingMode() as mode:
        (x @ weight).relu().add_(other)
    return [MeasuredOperator(r, ms * r.cost.bytes / MEGABYTE if r.cost else 0.0, ()) for r in mode.records]


def test_fusion_reads_and_writes_once(ceilings: Ceilings) -> None:
    """2 MB and 3 MB become 3 MB, at the rate at which they moved."""
    (advice,) = pointwise_fusion(findings(ceilings, *chain(1.25)))
    assert advice.gain_ms == pytest.approx(1.25 * (5 - 3))
    assert advice.evidence == (
        "2 activations, sums, norms and casts take 6.25 ms; one fused kernel would take 3.75 ms and move only what "
        "others need"
    )


def test_advice_comes_by_falling_gain_and_not_for_trifles(ceilings: Ceilings) -> None:
    everything = findings(
        dataclasses.replace(ceilings, kind="cuda"),
        operator("mm", Cost(0, 1000, {"fp32": 4_000_000}), 8.0),
        operator("relu", Cost(1000, 1000), 0.002),
        launch_gap_ms=2.0,
    )
    gains = [item.gain_ms for item in advise(everything)]
    assert gains == sorted(gains, reverse=True)
    assert len(gains) == 2
    assert min(gains) >= 0.01 * everything.summary.wall_ms


def test_operators_slowed_by_their_labels_gain_in_proportion_to_the_plain_step(ceilings: Ceilings) -> None:
    """Operators of more than 5 ms in a step of 5: what they gain is in proportion, and no more than the step."""
    product = operator("mm", Cost(0, 1000, {"fp32": 4_000_000}), 8.0)
    labelled = findings(ceilings, product, *chain(1.25)[1:])
    busy_ms = sum(op.measured_ms for op in labelled.operators)
    plain = dataclasses.replace(labelled, summary=dataclasses.replace(labelled.summary, wall_ms=5.0, busy_ms=5.0))
    for rule in (half_precision, pointwise_fusion):
        (in_proportion,), (alone,) = rule(plain), rule(labelled)
        assert in_proportion.gain_ms == pytest.approx(alone.gain_ms * 5.0 / busy_ms)
