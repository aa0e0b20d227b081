"""Plans of reductions match the kernels that run, in each regime and at its edges, and name the deciding fact.

The GPU is a simulated H200: kernels are recorded, not launched.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.kernels import reduction_plan
from rooftop.kernels import sum as total
from rooftop.kernels.reductions import launches, plans, tables
from rooftop.kernels.reductions.plans import KernelLaunch, ReductionPlan, choose
from rooftop.kernels.reductions.reductions import Reduce, ReduceBackward
from rooftop.launch import INTERPRETED

pytest.importorskip("triton")
SINGLE, HALF = torch.float32, torch.bfloat16
SMS = 132
Dims = tuple[int, ...]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelLaunch]]:
    """The launches on a GPU of compute capability 9.0; results are uninitialized."""
    found: list[KernelLaunch] = []

    def record(kernel: Any, grid: Dims, device: torch.device, *arguments: Any, **constants: Any) -> None:
        constants.pop("ACCUMULATOR", None)
        numbers = tuple(each for each in arguments if not isinstance(each, Tensor))
        found.append(KernelLaunch(kernel.fn.__name__, grid, numbers, constants))

    monkeypatch.setattr(launches, "launch", record)
    monkeypatch.setattr(launches, "without_kernels", lambda device: False)
    monkeypatch.setattr(launches, "processors", lambda x: SMS)
    monkeypatch.setattr(launches, "launches_early", lambda device: True)
    choose.cache_clear()
    yield found
    choose.cache_clear()


def strides_of(shape: Dims) -> Dims:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def planned(kind: str, shape: Dims, dims: Dims, dtype: torch.dtype = SINGLE, **given: Any) -> ReductionPlan:
    """The plan for a contiguous tensor that need not exist."""
    facts: dict[str, Any] = {"direction": "forward", "result": dtype, "processors": SMS, "early": True} | given
    return choose(kind, shape=shape, strides=strides_of(shape), dims=dims, dtype=dtype, **facts)


def launches_of(plan: ReductionPlan) -> list[KernelLaunch]:
    return [*(plan.ties.launches if plan.ties else ()), *plan.launches]


ALL_EDGES = [config.total_bytes // 4 for config in tables.ALL[:-1]]
FORWARD: list[tuple[str, Dims, Dims, torch.dtype, str, str]] = [
    ("sum", (64, 16), (1,), SINGLE, "whole", "one block holds the 16 elements"),
    ("sum", (1 << 13, 1 << 10), (1,), HALF, "whole", r"\(1024\) are more than half of the programs \(528\).* 132"),
    ("amax", (264, 20_000), (1,), SINGLE, "last_combines", r"\(264\) are at most half .*\(528\).* 132 .*: 2 programs"),
    ("amax", (265, 20_000), (1,), SINGLE, "whole", r"\(265\) are more than half .*\(528\)"),
    ("norm2", (2, 100_000), (1,), SINGLE, "last_combines", r"\(2\) are at most half .*: 25 programs share a tile"),
    ("norm_inf", (5000, 48), (0,), HALF, "last_combines", r"\(1\) are at most half .*\(1056\)"),
    ("mean", (30, 770, 129), (1,), SINGLE, "last_combines", r"\(150\) are at most half .*\(1056\)"),
    ("mean", (4, 40, 7, 90), (0, 2, 3), HALF, "last_combines", r"\(20\) are at most half"),
    *(("sum", (n,), (0,), SINGLE, "last_combines", "share a tile") for edge in ALL_EDGES[1:] for n in (edge, edge + 1)),
    ("sum", (8192,), (0,), SINGLE, "whole", "one block holds the 8192 elements"),
    ("sum", (8193,), (0,), SINGLE, "last_combines", r"\(1\) are at most half"),
    ("argmax", (50, 50_257), (1,), HALF, "last_combines", r"\(50\) are at most half"),
    ("argmin", (3, 4, 5), (1,), torch.int64, "whole", "one block holds the 4 elements"),
    ("sum", (2, 3, 4, 5, 6), (1, 3), SINGLE, "whole", "holds the 15 elements.* more than two kept or two reduced"),
    ("amax", (9, 40), (1,), torch.bool, "whole", "one block holds the 40 elements"),
    ("sum", (40, 9), (0,), torch.float64, "reference", "float64"),
    ("sum", (40, 0), (0,), SINGLE, "reference", "empty"),
]


@pytest.mark.parametrize(("kind", "shape", "dims", "dtype", "backend", "reason"), FORWARD)
def test_a_reduction_is_launched_as_its_plan_says(
    recorded: list[KernelLaunch], kind: str, shape: Dims, dims: Dims, dtype: torch.dtype, backend: str, reason: str
) -> None:
    result = torch.int64 if kind.startswith("arg") else dtype
    plan = planned(kind, shape, dims, dtype, result=result)
    Reduce(torch.empty(shape, dtype=dtype), kind, list(dims), False, result).run()
    assert recorded == launches_of(plan)
    assert plan.backend == backend
    assert plan.kernels == (() if backend == "reference" else ("reduce_tiles",))
    assert bool(plan.launches and plan.launches[0].grid[1] > 1) == (backend == "last_combines")
    assert_reason(plan, reason)


def assert_reason(plan: ReductionPlan, reason: str) -> None:
    assert re.search(reason, plan.reason), plan.reason
    assert str(plan).startswith(plan.backend)
    assert plan.reason in str(plan)


BACKWARD: list[tuple[str, Dims, Dims, torch.dtype, tuple[str, ...], str]] = [
    ("norm1", (64, 300), (1,), SINGLE, ("spread_gradient",), "a norm has no ties"),
    ("norm2", (3, 40_000), (1,), HALF, ("spread_gradient",), "a norm has no ties"),
    ("amax", (8, 32_768), (1,), SINGLE, ("share_gradient",), "all 32768 elements"),
    ("amax", (8, 32_769), (1,), SINGLE, ("reduce_tiles", "spread_gradient"), "no tile holds all 32769 elements"),
    ("amin", (64, 512, 1024), (1,), HALF, ("share_gradient",), "all 512 elements"),
    ("amin", (64, 513, 1024), (1,), HALF, ("reduce_tiles", "spread_gradient"), "no tile holds all 513 elements"),
    ("norm_inf", (3, 4, 5), (0, 2), SINGLE, ("reduce_tiles", "spread_gradient"), "two dimensions in memory"),
    ("amax", (2, 3, 4, 5, 6), (1, 3), SINGLE, ("share_gradient",), "more than two kept or two reduced"),
    ("amax", (4, 5), (1,), torch.float64, (), "float64"),
]


@pytest.mark.parametrize(("kind", "shape", "dims", "dtype", "kernels", "reason"), BACKWARD)
def test_a_gradient_is_launched_as_its_plan_says(
    recorded: list[KernelLaunch], kind: str, shape: Dims, dims: Dims, dtype: torch.dtype, kernels: Dims, reason: str
) -> None:
    plan = planned(kind, shape, dims, dtype, direction="backward")
    x = torch.empty(shape, dtype=dtype)
    y = torch.empty([size for dim, size in enumerate(shape) if dim not in dims], dtype=dtype)
    ReduceBackward(y, x, y, kind, list(dims)).run()
    assert recorded == launches_of(plan)
    assert plan.kernels == kernels
    assert_reason(plan, reason)


@pytest.mark.parametrize("counted", [True, False])
def test_without_counters_a_second_kernel_combines(
    recorded: list[KernelLaunch], counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No counters are left when the captured graphs of the process have used them all."""
    if not counted:
        monkeypatch.setattr(launches, "counters", lambda device, count: None)
    kernels = ("reduce_tiles",) if counted else ("reduce_tiles", "combine_partials")
    facts = ("mean", (2, 100_000), (1,))
    plan = planned(*facts, counted=counted)
    Reduce(torch.empty(facts[1]), "mean", [1], False, SINGLE).run()
    assert recorded == launches_of(plan)
    assert plan.kernels == kernels
    assert ("no counters are left" in plan.reason) != counted
    recorded.clear()
    x, y = torch.empty(facts[1]), torch.empty(2)
    ReduceBackward(y, x, y, "amax", [1]).run()
    assert recorded == launches_of(planned("amax", *facts[1:], direction="backward", counted=counted))
    assert [each.kernel for each in recorded] == [*kernels, "spread_gradient"]


@pytest.mark.parametrize("table", [tables.ROWS, tables.PLACES, tables.FAR_ROWS], ids=["rows", "places", "far rows"])
def test_rows_take_the_first_parameters_that_are_for_their_bytes(table: tuple[tables.RowConfig, ...]) -> None:
    kind = "argmax" if table is tables.PLACES else "amax"
    for config, longer in itertools.pairwise(table):
        for columns, expected in ((config.run_bytes // 2, config), (config.run_bytes // 2 + 1, longer)):
            shape, dims = ((3, 5000, columns), (0, 2)) if table is tables.FAR_ROWS else ((5000, columns), (1,))
            found = planned(kind, shape, dims, HALF).launches[0].constants
            assert (found["num_warps"], found["STAGES"]) == (expected.warps, expected.stages), (shape, expected)
            assert found["KEPT"] == expected.rows
            assert found["REDUCED"] <= expected.block_bytes // 2


def test_all_take_the_first_parameters_that_are_for_their_bytes() -> None:
    for config, longer in itertools.pairwise(tables.ALL):
        for size, expected in ((config.total_bytes // 4, config), (config.total_bytes // 4 + 1, longer)):
            (found,) = planned("sum", (size,), (0,)).launches
            assert found.constants["num_warps"] == expected.warps
            assert found.constants["REDUCED"] == expected.block_bytes // 4
            assert found.constants["EARLY"] == expected.early
            assert found.grid[1] <= max(1, expected.split.programs_per_sm * SMS)
            (late,) = planned("sum", (size,), (0,), early=False).launches
            assert not late.constants["EARLY"]
            assert "launch_pdl" not in late.constants


def test_a_tile_that_counts_ties_is_wide_where_columns_are() -> None:
    def tile(*shape: int, dim: int) -> tuple[int, int] | None:
        (*_, last) = launches_of(planned("amax", shape, (dim,), HALF, direction="backward"))
        found = last.constants
        return (found["KEPT"], found["REDUCED"]) if last.kernel == "share_gradient" else None

    assert tile(1 << 17, 1024, dim=1) == (2, 1024)
    assert tile(8, 20_000, dim=1) == (1, 32768)
    assert tile(64, 300, 1024, dim=1) == (64, 512)
    assert tile(64, 2048, 1024, dim=1) is None
    assert tile(8, 50_000, dim=1) is None


def test_partial_results_fill_the_steps_of_who_combines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "COLUMNS", tables.ColumnConfig(256, 8192, 8))
    choose.cache_clear()
    (found,) = planned("sum", (1 << 17, 1024), (0,), HALF).launches
    choose.cache_clear()
    assert found.grid[1] > found.constants["SPLITS"]
    assert found.grid[1] % found.constants["SPLITS"] == 0


def test_the_public_plan_is_that_of_the_call(recorded: list[KernelLaunch]) -> None:
    x = torch.empty(5000, 48, dtype=HALF)
    plan = reduction_plan("sum", x, 0, dtype=SINGLE)
    total(x, 0, dtype=SINGLE)
    assert recorded == list(plan.launches)
    assert plan == planned("sum", (5000, 48), (0,), HALF, result=SINGLE)
    for function in ("mean", "amax", "amin", "argmax", "argmin"):
        assert reduction_plan(function, x, 0).backend == "last_combines"
    assert reduction_plan("norm", x, ord=math.inf).launches[0].constants["KIND"] == plans.KINDS.index("norm_inf")
    assert reduction_plan("argmax", x.t()).copied


@pytest.mark.skipif(INTERPRETED, reason="kernels run interpreted")
def test_kernels_do_not_run_on_a_cpu() -> None:
    assert str(reduction_plan("sum", torch.ones(3, 4), 1)) == "reference: no kernels for cpu"


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda x: reduction_plan("amaxx", x),
            ValueError,
            "reduction_plan: function must be one of sum,.*did you mean",
        ),
        (lambda x: reduction_plan("sum", x, 2), ValueError, "sum: dim 2 is out of range"),
        (lambda x: reduction_plan("argmax", x, (0, 1)), TypeError, "argmax: dim must be an int or None"),
        (lambda x: reduction_plan("norm", x, ord=3), ValueError, "norm: ord must be 1, 2 or infinity"),
        (lambda x: reduction_plan("amin", x[:0]), ValueError, "amin: needs at least one element"),
    ],
)
def test_wrong_arguments(call: Callable[[Tensor], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(3, 4))


@pytest.mark.parametrize(("shape", "strides", "dims"), [((1 << 31,), (1,), (0,)), ((2, 64), (1 << 31, 1), (1,))])
def test_kernels_get_sizes_beyond_32_bits_as_a_whole(shape: Dims, strides: Dims, dims: Dims) -> None:
    """A kernel multiplies sizes by UNIT, and the product of two 32-bit integers would overflow."""
    plan = choose("sum", "forward", shape, strides, dims, HALF, HALF, SMS, True)
    tiles = plan.launches[0]
    assert tiles.constants["UNIT"] == 1
    assert 1 << 31 in tiles.numbers
