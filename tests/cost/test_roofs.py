"""Roofs, and ceilings that an operator above its roof raises."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from rooftop.cost.accounting import FREE, Cost
from rooftop.cost.roofs import MOST_RAISE, raise_ceilings, roof
from rooftop.hardware import Ceilings, MemoryLevel, MemoryPoint

MIB = 1 << 20


def ceilings() -> Ceilings:
    """4 GB/s up to 16 MiB (8 in place), 1 GB/s beyond; 1 TFLOP/s in fp32, 4 in bf16; 1 us for each kernel."""
    memory = tuple(
        MemoryPoint(size, rate, rate, rate, rate, rate, update)
        for size, rate, update in ((MIB, 4e9, 8e9), (16 * MIB, 4e9, 8e9), (64 * MIB, 1e9, 1e9), (1024 * MIB, 1e9, 1e9))
    )
    return Ceilings(
        "Test machine", "test", "cpu", 1, {}, "2026-01-01T00:00:00Z", memory, (MemoryLevel("DRAM", None, 1e9),),
        {"fp32": 1e12, "bf16": 4e12}, 0.001, 0.01, 0.002, {}, {}, {}, (),
    )  # fmt: skip


sizes = st.integers(0, 1 << 31)


def made_cost(read: int, write: int, fp32: int, bf16: int, shared: int) -> Cost:
    return Cost(read, write, {"fp32": fp32, "bf16": bf16}, shared % (1 + min(read, write)))


flops = st.integers(0, 1 << 42)
costs = st.builds(made_cost, sizes, sizes, flops, flops, sizes)


def test_what_is_written_in_place_is_judged_by_the_rate_in_place() -> None:
    n = 8 * MIB
    assert roof(Cost(n, n), ceilings()).ms == pytest.approx(1e3 * 2 * n / 4e9)
    assert roof(Cost(n, n, shared_bytes=n), ceilings()).ms == pytest.approx(1e3 * 2 * n / 8e9)
    half = roof(Cost(n, n, shared_bytes=n // 2), ceilings()).ms
    assert half == pytest.approx(1e3 * (n / 4e9 + n / 8e9))


def test_a_few_shared_bytes_do_not_make_all_of_a_call_in_place() -> None:
    """A batch norm updates its statistics in place."""
    n = 8 * MIB
    statistics = Cost(n + 512, n + 512, shared_bytes=512)
    assert roof(statistics, ceilings()).ms == pytest.approx(roof(Cost(n, n), ceilings()).ms, rel=1e-3)


@given(costs, st.floats(1.0001, MOST_RAISE * 0.999))
def test_work_that_raised_its_ceilings_is_not_above_its_roof(cost: Cost, above: float) -> None:
    before = roof(cost, ceilings())
    assume(before.ms > 0)
    ms = before.ms / above
    raised = raise_ceilings(ceilings(), cost, ms, "aten::test")
    assert roof(cost, raised).ms <= ms * (1 + 1e-9)
    assert roof(cost, raised).ms >= ms * (1 - 1e-9)  # no ceiling is raised further than necessary
    assert raised.raises
    assert {each.by for each in raised.raises} == {"aten::test"}


@given(costs, costs, st.floats(1.0001, MOST_RAISE * 0.999))
def test_raising_for_one_raises_no_other_roof(cost: Cost, other: Cost, above: float) -> None:
    ms = roof(cost, ceilings()).ms / above
    assume(ms > 0)
    assert roof(other, raise_ceilings(ceilings(), cost, ms, "aten::test")).ms <= roof(other, ceilings()).ms * (
        1 + 1e-12
    )


@given(costs, st.floats(1.0, 100.0))
def test_work_below_its_roof_changes_nothing(cost: Cost, slower: float) -> None:
    assume(cost.bytes or cost.total_flops)
    assert raise_ceilings(ceilings(), cost, slower * roof(cost, ceilings()).ms * (1 + 1e-9), "aten::test") == ceilings()


@pytest.mark.parametrize(
    ("cost", "figure"),
    [
        (Cost(1000, 1000, {"bf16": 1 << 40}), "flops bf16"),
        (Cost(32 * MIB, 32 * MIB), f"memory {64 * MIB} raised"),
        (Cost(8 * MIB, 8 * MIB, shared_bytes=8 * MIB), f"memory {8 * MIB} raised_in_place"),
        (Cost(4, 4), "kernel_floor_ms"),
    ],
)
def test_the_figure_that_set_the_roof_is_raised_and_no_other(cost: Cost, figure: str) -> None:
    raised = raise_ceilings(ceilings(), cost, roof(cost, ceilings()).ms / 1.2, "aten::test")
    assert [each.figure for each in raised.raises] == [figure]


def test_a_cost_that_cannot_be_right_raises_no_ceiling() -> None:
    cost = Cost(32 * MIB, 32 * MIB)
    ms = roof(cost, ceilings()).ms / 2
    with pytest.raises(ValueError, match=r"aten::copy_ took .* its cost formula or the measurement must be wrong"):
        raise_ceilings(ceilings(), cost, ms, "aten::copy_")


def test_what_costs_nothing_raises_nothing() -> None:
    assert raise_ceilings(ceilings(), FREE, 1e-9, "aten::view") == ceilings()
