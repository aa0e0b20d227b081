"""Advice names its evidence, predicts gains that can be checked by hand, and is absent if nothing can be gained."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from rooftop.analysis.advice import advise
from rooftop.analysis.advice.format_rules import channels_last, half_precision
from rooftop.analysis.advice.host_rules import launch_gap
from rooftop.analysis.advice.kernel_rules import CALLED_MS, pointwise_fusion
from rooftop.analysis.advice.shape_rules import padded_products
from rooftop.analysis.findings import Findings
from rooftop.analysis.floors import operator_rows
from rooftop.analysis.instruments import MeasuredOperator, Plain
from rooftop.analysis.repeating import Form, Times, tensor_like
from rooftop.analysis.report_contents import Gaps, Summary
from rooftop.cost import CallSpec, Cost, CountingMode, Record, TensorSpec, roof
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


def test_a_graph_saves_the_launch_gap(ceilings: Ceilings) -> None:
    gpu = dataclasses.replace(ceilings, kind="cuda")
    work = operator("relu", Cost(MEGABYTE, MEGABYTE), 2.0)
    (advice,) = launch_gap(findings(gpu, work, launch_gap_ms=8.0))
    assert advice.gain_ms == pytest.approx(8.0)
    assert "launch gap 8.00 ms of 10.00 ms" in advice.evidence
    assert launch_gap(findings(ceilings, work, launch_gap_ms=8.0)) == []


def test_half_precision_keeps_each_operators_percent_of_roof(ceilings: Ceilings) -> None:
    """A product bound by arithmetic gains the ratio of the peaks (4), one bound by memory a factor of 2."""
    product = operator("mm", Cost(0, 1000, {"fp32": 4_000_000}), 8.0)
    moved = operator("relu", Cost(MEGABYTE, MEGABYTE), 3.0)
    (advice,) = half_precision(findings(ceilings, product, moved))
    assert advice.gain_ms == pytest.approx(8.0 * 3 / 4 + 3.0 / 2)
    assert "2 operators of 11.00 ms in float32 would take 3.50 ms at their present percent of roof" in advice.evidence


def test_half_precision_is_advised_on_a_cpu_only_where_it_is_faster_there(
    ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library's kernels may be far below the processor's peaks: in bfloat16, one convolution was 700 times as
    slow."""
    x, weight = torch.randn(64, 512), torch.randn(512, 512)
    with CountingMode() as mode:
        x @ weight
    ran = findings(ceilings, MeasuredOperator(mode.records[0], 8.0, ()))
    ran = dataclasses.replace(ran, plain=Plain(8.0, [], [], 0.0, 0.0, compiled=False))
    asked = []

    def timed(ratio: float | None) -> object:
        def times(calls: list[tuple[CallSpec, Form]], device: torch.device) -> list[Times | None]:
            asked.append(device.type)
            now_and_half = (1.0, ratio) * (len(calls) // 2)
            return [Times(ms, ms) if ms is not None else None for ms in now_and_half]

        return times

    casts_ms = (64 * 512 + 512 * 512) * 6 / MEGABYTE
    for ratio, gain_ms in ((0.5, 4.0 - casts_ms), (700.0, -8.0 * 699 - casts_ms), (None, -casts_ms)):
        monkeypatch.setattr("rooftop.analysis.advice.alternatives.times_again", timed(ratio))
        (advice,) = half_precision(ran)
        assert advice.gain_ms == pytest.approx(gain_ms)
        assert (len(advise(ran)) > 0) == (ratio == 0.5)
    assert set(asked) == {"cpu"}


def test_half_precision_is_silent_about_half_precision(ceilings: Ceilings) -> None:
    half = dataclasses.replace(operator("mm", Cost(1, 1, {"bf16": 9}), 1.0).record, dtype="bfloat16")
    assert half_precision(findings(ceilings, MeasuredOperator(half, 1.0, ()))) == []


def test_what_the_host_cannot_launch_faster_is_not_promised(ceilings: Ceilings) -> None:
    product = operator("mm", Cost(0, 1000, {"fp32": 4_000_000}), 8.0)
    waiting = dataclasses.replace(findings(ceilings, product, launch_gap_ms=1.0), host_ms=5.0)
    (advice,) = half_precision(waiting)
    assert advice.gain_ms == pytest.approx(9.0 - 5.0)
    (advice,) = half_precision(dataclasses.replace(waiting, best_ms=8.5))  # the 9 ms are from a disturbed host
    assert advice.gain_ms == pytest.approx(8.5 - 5.0)


def test_what_comes_after_the_last_launch_takes_its_time(ceilings: Ceilings) -> None:
    """The host launches an operator in 0.1 ms, so a large one after 99 small ones cannot start before 10 ms."""
    small, large = operator("relu", Cost(MEGABYTE, MEGABYTE), 0.05), operator("mm", Cost(1, 1), 10.0)
    at_the_end = dataclasses.replace(findings(ceilings, *[small] * 99, large, launch_gap_ms=5.05), host_ms=10.0)
    after = [0.01] * 99 + [4.0]
    assert at_the_end.saved_by_ms(after) == pytest.approx(20.0 - (10.0 + 4.0))
    plain = Plain(14.95, [], [], 0.0, 0.0, compiled=False, launched=tuple((n / 100) ** 2 for n in range(1, 101)))
    late = dataclasses.replace(at_the_end, plain=plain)  # the host is slow at the end, so it is still 10 ms
    assert late.saved_by_ms(after) == pytest.approx(20.0 - (10.0 + 4.0))
    early = [plain.launched[place] * 10.0 for place in (0, 49, 99)]
    assert [10.0 * late._launched(part) for part in (0.01, 0.5, 1.0)] == pytest.approx(early)
    at_first = dataclasses.replace(findings(ceilings, large, *[small] * 99, launch_gap_ms=0.0), host_ms=10.0)
    assert at_first.saved_by_ms([4.0] + [0.01] * 99) == pytest.approx(0.1 + 14.95 - (10.0 + 0.01), rel=0.02)


def chain(ms: float) -> list[MeasuredOperator]:
    """A product, then relu and a sum with another tensor of 1 MB. Each operator takes `ms` for each MB."""
    x, weight, other = torch.randn(500, 500), torch.randn(500, 500), torch.randn(500, 500)
    with CountingMode() as mode:
        (x @ weight).relu().add_(other)
    return [MeasuredOperator(r, ms * r.cost.bytes / MEGABYTE if r.cost else 0.0, ()) for r in mode.records]


def test_fusion_reads_and_writes_once(ceilings: Ceilings) -> None:
    """One fused kernel moves 3 MB in place of 2 MB and 3 MB, at the same rate."""
    (advice,) = pointwise_fusion(findings(ceilings, *chain(1.25)))
    assert advice.gain_ms == pytest.approx(1.25 * (5 - 3) - CALLED_MS)  # on a CPU
    assert advice.evidence == (
        "2 activations, sums, norms, casts and copies take 6.25 ms; one fused kernel would take 3.75 ms "
        "and move only values that other kernels need"
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
    assert min(gains) >= 0.02 * everything.summary.wall_ms


def test_operators_slowed_by_their_labels_gain_in_proportion_to_the_plain_step(ceilings: Ceilings) -> None:
    """Operators take more than 5 ms in a step of 5 ms. The predicted gain is scaled in proportion, and is at most the
    step's time."""
    product = operator("mm", Cost(0, 1000, {"fp32": 4_000_000}), 8.0)
    labelled = findings(ceilings, product, *chain(1.25)[1:])
    busy_ms = sum(op.measured_ms for op in labelled.operators)
    plain = dataclasses.replace(labelled, summary=dataclasses.replace(labelled.summary, wall_ms=5.0, busy_ms=5.0))
    for rule in (half_precision, pointwise_fusion):
        (in_proportion,), (alone,) = rule(plain), rule(labelled)
        called_ms = CALLED_MS if rule is pointwise_fusion else 0.0
        assert in_proportion.gain_ms + called_ms == pytest.approx((alone.gain_ms + called_ms) * 5.0 / busy_ms)


def on_a_gpu(ceilings: Ceilings, *operators: MeasuredOperator, launch_gap_ms: float = 0.0) -> Findings:
    found = findings(dataclasses.replace(ceilings, kind="cuda"), *operators, launch_gap_ms=launch_gap_ms)
    return dataclasses.replace(found, plain=Plain(found.summary.busy_ms, [], [], 0.0, 0.0, compiled=False))


def test_where_the_host_sets_the_pace_what_is_compiled_is_replayed_from_a_graph(ceilings: Ceilings) -> None:
    """The GPU works for 10 of 16.25 ms, and needs 7.5 ms if everything is read and written once."""
    waiting = on_a_gpu(ceilings, *chain(1.25), launch_gap_ms=6.25)
    waiting = dataclasses.replace(waiting, host_ms=16.25)
    (advice,) = pointwise_fusion(waiting)
    assert advice.gain_ms == pytest.approx(16.25 - 7.5)
    assert advice.command == 'torch.compile(model, mode="reduce-overhead")'
    assert "also removes the launch gap of 6.25 ms" in advice.evidence
    steps = [dataclasses.replace(op, record=dataclasses.replace(op.record, phase="optimizer")) for op in chain(0.0)]
    optimizing = dataclasses.replace(waiting, operators=[*waiting.operators, *steps])
    (advice,) = pointwise_fusion(optimizing)  # the host still makes half of the launches
    assert advice.gain_ms == pytest.approx(16.25 / 2)
    (advice,) = pointwise_fusion(dataclasses.replace(waiting, plain=dataclasses.replace(waiting.plain, waiting_ms=1.0)))
    assert advice.command == "torch.compile(model)"


def test_a_host_that_would_not_keep_ahead_of_fused_kernels_is_replaced_by_a_graph(ceilings: Ceilings) -> None:
    """The GPU works for 10 ms, and needs 7.5 ms if everything is read and written once. Only a graph removes the launch
    gap of 0.1 ms."""
    busy = on_a_gpu(ceilings, *chain(1.25), launch_gap_ms=0.1)
    (advice,) = pointwise_fusion(dataclasses.replace(busy, host_ms=3.0))
    assert (advice.gain_ms, advice.command) == (pytest.approx(2.5), "torch.compile(model)")
    (advice,) = pointwise_fusion(dataclasses.replace(busy, host_ms=4.0))
    assert (advice.gain_ms, advice.command) == (pytest.approx(2.6), 'torch.compile(model, mode="reduce-overhead")')
    assert "without a graph, the host's 4.00 ms for launches might set the pace" in advice.evidence


def image_step() -> list[MeasuredOperator]:
    """A convolution of images in channels first, far from its roof, followed by a sum and a relu at their roofs."""
    image, other = torch.randn(1, 8, 50, 50), torch.randn(1, 128, 50, 50)
    convolution = torch.nn.Conv2d(8, 128, 1, bias=False)
    with CountingMode() as mode, torch.no_grad():
        (convolution(image) + other).relu()
    times = [20.0 if "convolution" in r.name else r.cost.bytes / MEGABYTE if r.cost else 0.0 for r in mode.records]
    return [MeasuredOperator(record, ms, ()) for record, ms in zip(mode.records, times, strict=True)]


def test_a_compiler_also_lays_images_out_channels_last(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def ratios(operators: list[MeasuredOperator], *_: object) -> dict[object, float]:
        timed.append([op.record.name for op in operators])
        return {op.record.spec: 0.25 for op in operators}

    monkeypatch.setattr("rooftop.analysis.advice.format_rules.repeated_ratios", ratios)
    step = image_step()
    of_convolution = next(op.measured_ms for op in step if "convolution" in op.record.name)
    found = on_a_gpu(ceilings, *step)
    (layout,), (fusion,) = channels_last(found), pointwise_fusion(found)
    assert layout.gain_ms == pytest.approx(0.75 * of_convolution)
    assert timed == [["aten::convolution"]]  # timed once for both calls
    without = pointwise_fusion(findings(ceilings, *step))[0]  # on a CPU
    assert fusion.gain_ms == pytest.approx(without.gain_ms + CALLED_MS + layout.gain_ms)
    assert f"lays images out channels last: {layout.gain_ms:.2f} ms of the gain" in fusion.evidence


def test_sequences_and_volumes_are_no_images(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Channels last is a layout of four dimensions. Pooling along a sequence has four dimensions internally."""
    monkeypatch.setattr(
        "rooftop.analysis.advice.format_rules.repeated_ratios", lambda ops, *_: {op.record.spec: 0.25 for op in ops}
    )
    for layers, x in (
        ((torch.nn.Conv1d(8, 64, 5), torch.nn.MaxPool1d(3)), torch.randn(4, 8, 300)),
        ((torch.nn.Conv3d(3, 8, 3), torch.nn.MaxPool3d(2)), torch.randn(1, 3, 9, 9, 9)),
    ):
        with CountingMode() as mode, torch.no_grad():
            torch.nn.Sequential(*layers)(x)
        step = [MeasuredOperator(record, 10.0, ()) for record in mode.records]
        assert channels_last(on_a_gpu(ceilings, *step)) == []


def test_products_with_odd_sides_are_timed_with_whole_ones(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the vocabulary of 1,001 is both odd and slow: 1,000 is slow but even, and 999 is at its roof."""
    asked = []

    def times(calls: list[tuple[CallSpec, Form]], *_: object) -> list[Times]:
        asked.extend(calls)
        return [Times(1.0, 1.0) for _ in calls]

    monkeypatch.setattr("rooftop.analysis.advice.shape_rules.times_again", times)
    x = torch.randn(64, 512, dtype=torch.bfloat16)
    with CountingMode() as mode:
        for side in (1001, 1000, 999):
            x @ torch.randn(512, side, dtype=torch.bfloat16)
    products = [r for r in mode.records if r.name == "aten::mm"]
    roofs = [roof(r.cost, ceilings).ms for r in products if r.cost is not None]
    slow_ms = 2 * max(roofs)
    step = [MeasuredOperator(r, ms, ()) for r, ms in zip(products, (slow_ms, slow_ms, roofs[2]), strict=True)]
    (advice,) = padded_products(on_a_gpu(ceilings, *step))
    assert advice.gain_ms == pytest.approx(slow_ms - 1.0)
    assert "1 matrix product with a side of 1,001 take" in advice.evidence
    assert advice.command is not None
    assert advice.command.startswith("1001 -> 1024 ")
    assert [(spec, form.multiple) for spec, form in asked] == [(products[0].spec, 64)]
    assert padded_products(on_a_gpu(ceilings, *step[1:])) == []


def test_a_padded_call_has_whole_sides_and_as_many_batches() -> None:
    made = [
        tuple(tensor_like(TensorSpec(shape, torch.bfloat16), Form(multiple=64), torch.device("cpu")).shape)
        for shape in ((3, 5, 65), (128, 50257), (50257,), (), (7, 64))
    ]
    assert made == [(3, 64, 128), (128, 50304), (50304,), (), (64, 64)]
