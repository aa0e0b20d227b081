"""An operator above its roof raises the ceiling that set the roof, if the operator exceeds the roof again when run
alone. An operator that does not exceed its roof again keeps its flag."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import rooftop
from rooftop.analysis import raising
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.raising import raised
from rooftop.analysis.repeating import Form, Times
from rooftop.cost import CallSpec, CountingMode, Record, roof
from rooftop.hardware.ceilings import Ceilings

CPU = torch.device("cpu")


def records_of(call: object, *args: Tensor) -> list[Record]:
    with CountingMode() as counted:
        call(*args)  # type: ignore[operator]
    return [record for record in counted.records if record.cost is not None and record.cost.bytes]


def alone(monkeypatch: pytest.MonkeyPatch, ms: float | None) -> None:
    """Let every repeated measurement take this long."""

    def fake(
        calls: list[tuple[CallSpec, Form]], device: torch.device, repeats: int | None = None
    ) -> list[Times | None]:
        return [Times(ms, ms) if ms is not None else None for _ in calls]

    monkeypatch.setattr(raising, "times_again", fake)


def product(ceilings: Ceilings, share: float) -> MeasuredOperator:
    """A product that took this fraction of its roof."""
    (record,) = records_of(torch.mm, torch.randn(256, 256), torch.randn(256, 256))
    assert record.cost is not None
    return MeasuredOperator(record, share * roof(record.cost, ceilings).ms, ())


@given(share=st.floats(0.7, 0.99))
def test_what_raised_a_ceiling_stands_at_its_roof_afterwards(share: float, round_ceilings: Ceilings) -> None:
    op = product(round_ceilings, share)
    with pytest.MonkeyPatch.context() as patch:
        alone(patch, op.measured_ms)
        higher, count = raised(round_ceilings, [op], CPU)
    assert count == 1
    assert op.record.cost is not None
    assert roof(op.record.cost, higher).ms == pytest.approx(op.measured_ms)
    assert "aten::mm 256x256, 256x256 float32" in higher.raises[-1].by


def test_what_is_slower_alone_raises_nothing(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    op = product(ceilings, 0.9)
    alone(monkeypatch, 1.01 * roof(op.record.cost, ceilings).ms)  # type: ignore[arg-type]
    assert raised(ceilings, [op], CPU) == (ceilings, 0)


def test_what_cannot_be_made_again_raises_nothing(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    alone(monkeypatch, None)
    assert raised(ceilings, [product(ceilings, 0.9)], CPU) == (ceilings, 0)


def test_a_cost_that_must_be_wrong_raises_nothing(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator ten times above its roof: no ceiling is that far off."""
    op = product(ceilings, 0.1)
    alone(monkeypatch, op.measured_ms)
    assert raised(ceilings, [op], CPU) == (ceilings, 0)


def test_one_raise_serves_all_that_it_explains(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = [product(ceilings, 0.8), product(ceilings, 0.9)]
    alone(monkeypatch, ops[0].measured_ms)
    higher, count = raised(ceilings, ops, CPU)
    assert count == 1
    assert all(roof(op.record.cost, higher).ms <= op.measured_ms * 1.1 for op in ops)  # type: ignore[arg-type]


def test_lookups_are_not_made_again_with_random_places(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    table, places = torch.randn(1000, 64), torch.randint(1000, (512,))
    (record,) = records_of(lambda: nn.functional.embedding(places, table))
    assert record.cost is not None
    op = MeasuredOperator(record, 0.9 * roof(record.cost, ceilings).ms, ())
    alone(monkeypatch, op.measured_ms)
    assert raised(ceilings, [op], CPU) == (ceilings, 0)


def test_given_ceilings_are_never_raised(ceilings: Ceilings) -> None:
    """The ceilings may be those of another machine: 1 GFLOP/s here."""
    slow = dataclasses.replace(ceilings, flops={**ceilings.flops, "fp32": 1e6})
    report = rooftop.analyze(nn.Linear(512, 512), torch.randn(512, 512), ceilings=slow)
    assert any(row.flagged for row in report.ops)
    assert report.ceilings["flops"]["fp32"] == 1e6


@pytest.mark.gpu
def test_nothing_stands_above_its_roof_on_a_gpu() -> None:
    """Products of many shapes, and operators that find their input in L2."""

    def step(x: Tensor, weights: list[Tensor]) -> Tensor:
        for weight in weights:
            x = (x @ weight).relu().float().half()
        return x

    x = torch.randn(8192, 1024, device="cuda", dtype=torch.half)
    sizes = (1024, 4096, 1024, 768, 3072, 1024)
    weights = [torch.randn(k, n, device="cuda", dtype=torch.half) / k**0.5 for k, n in pairwise(sizes)]
    report = rooftop.analyze(step, x, weights)
    assert [row.name for row in report.ops if row.flagged] == []
