"""Plans of convolutions and max pools match the kernels that run, and name the deciding fact.

The GPU is a simulated H200: kernels and libraries are recorded, not called.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.kernels import conv_act_plan, max_pool2d, max_pool2d_plan
from rooftop.kernels.convolutions import launches
from rooftop.kernels.convolutions.conv_acts import ConvAct
from rooftop.kernels.convolutions.tables import (
    MOST_TAPS,
    ConvPlan,
    ConvTile,
    Geometry,
    Problem,
    choose,
    choose_pool,
    fitted,
    packing,
)
from rooftop.launch import INTERPRETED

pytest.importorskip("triton")
SINGLE, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float64
LAST = torch.channels_last
Recorded = list[tuple[str, tuple[int, ...], dict[str, Any]]]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorded]:
    """(name, grid, constants) of launches, and the libraries that are called; results are uninitialized."""
    found: Recorded = []

    def record(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **constants: Any) -> None:
        found.append((kernel.fn.__name__, grid, constants))

    def called(name: str) -> Callable[..., Tensor]:
        def call(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
            found.append((name, (), {}))
            (geometry,) = [each for each in others if isinstance(each, Geometry)]
            return x.new_empty(x.shape[0], weight.shape[0], *geometry.out).to(memory_format=LAST)

        return call

    def library(*given: Any) -> tuple[Tensor, Tensor]:
        y = called("library")(*given)
        return y, y

    monkeypatch.setattr(launches, "launch", record)
    monkeypatch.setattr(launches, "INTERPRETED", True)
    monkeypatch.setattr(launches, "without_kernels", lambda device: False)
    monkeypatch.setattr(launches, "processors", lambda x: 132)
    monkeypatch.setattr(launches, "has_cudnn", lambda x: True)
    monkeypatch.setattr(launches, "_as_product", called("product"))
    monkeypatch.setattr(launches, "_by_cudnn", called("cudnn"))
    monkeypatch.setattr(launches, "_by_library", library)
    for cached in (choose, choose_pool):
        cached.cache_clear()
    yield found
    for cached in (choose, choose_pool):
        cached.cache_clear()


def problem(geometry: Geometry, residual: bool = False, **other: Any) -> Problem:
    """A case with relu on an H200, channels last in bfloat16, except for `other`."""
    found: dict[str, Any] = {"keep": False, "dtype": HALF, "device": "cpu", "kernels": True, "channels_last": True}
    return Problem(geometry, residual, **{**found, "copied": True, "cudnn": True, "sms": 132, "capability": 9, **other})


def geometry_of(batch: int, channels: int, size: int, out: int, kernel: int, stride: int, groups: int = 1) -> Geometry:
    sides = (kernel, kernel), (stride, stride), (kernel // 2, kernel // 2), (1, 1)
    return Geometry(batch, channels, size, size, out, *sides, groups)


# Batch, channels, size, out channels, kernel, stride; whether there is a residual; facts; backend; reason
RUNS: list[tuple[tuple[int, ...], bool, dict[str, Any], str, str]] = [
    ((64, 3, 224, 64, 7, 2), False, {}, "persistent", "ms at 3211264 x 3 to 64 of 49 taps, stride 2"),
    ((64, 64, 56, 64, 1, 1), False, {}, "single", "ms at 802816 x 64 to 64 of 1 taps"),
    ((64, 64, 56, 64, 3, 1), False, {}, "cudnn", "ms at 802816 x 64 to 64 of 9 taps"),
    ((64, 64, 56, 64, 3, 1), False, {"cudnn": False}, "library", "ms at 802816 x 64 to 64 of 9 taps"),
    ((64, 64, 56, 256, 1, 1), True, {}, "persistent", "ms at 802816 x 64 to 256 of 1 taps"),
    ((1, 512, 7, 512, 3, 1), False, {}, "single", "not measured near this shape"),
    ((1, 144, 7, 64, 3, 1), True, {}, "single", "not measured near this shape"),
    ((1, 3, 32, 16, 3, 1), False, {}, "single", "not measured near this shape"),
    ((1, 5, 32, 16, 1, 1), True, {}, "single", "not measured near this shape"),
    ((8, 256, 64, 256, 5, 1), False, {}, "persistent", "not measured near this shape"),
    ((1, 512, 7, 512, 1, 1), False, {}, "product", "1 x 1: a product of matrices"),
    ((1, 20, 7, 24, 3, 1), False, {"copied": False}, "cudnn", "x cannot be copied in boxes"),
    ((128, 68, 56, 64, 1, 1), False, {"copied": False}, "gathered", "ms at 802816 x 64 to 64 of 1 taps"),
    ((1, 64, 8, 64, 3, 1, 2), False, {"copied": False}, "cudnn", "2 groups of 32 channels"),
    ((1, 64, 8, 64, 3, 1, 64), False, {"copied": False}, "depthwise", "each channel is a group"),
    ((128, 72, 28, 72, 5, 2, 72), True, {"copied": False}, "depthwise", "each channel is a group"),
    ((1, 64, 8, 64, 9, 1, 64), False, {"copied": False}, "library", "64 groups of 1 channels"),
    ((1, 64, 8, 128, 3, 1, 64), False, {"copied": False}, "library", "64 groups of 1 channels"),
    ((1, 112, 8, 112, 3, 1, 2), False, {"copied": False}, "gathered", "2 groups of 56 channels"),
    ((128, 224, 56, 224, 3, 2, 4), True, {"copied": False}, "gathered", "4 groups of 56 channels"),
    ((128, 224, 56, 224, 3, 1, 4), False, {"copied": False}, "library", "4 groups of 56 channels and many pixels"),
    ((128, 48, 56, 48, 3, 1, 2), False, {"copied": False}, "library", "2 groups of 24 channels and many pixels"),
    ((1, 64, 8, 64, 3, 1, 2), False, {"copied": False, "cudnn": False}, "gathered", "2 groups of 32 channels"),
    ((1, 16, 8, 32, 3, 1, 2), False, {"copied": False}, "library", "2 groups of 8 channels"),
    ((0, 64, 8, 64, 3, 1), False, {}, "library", "there are no images"),
    ((1, 64, 8, 64, 3, 1), False, {"keep": True, "copied": False}, "library", "the gradient needs"),
    ((1, 64, 8, 64, 3, 1), False, {"dtype": SINGLE}, "library", "float32"),
    ((1, 64, 8, 64, 3, 1), False, {"channels_last": False}, "library", "x is not channels last"),
]


@pytest.mark.parametrize(("sizes", "residual", "facts", "backend", "reason"), RUNS, ids=str)
def test_a_convolution_runs_as_its_plan_says(
    recorded: Recorded, sizes: tuple[int, ...], residual: bool, facts: dict[str, Any], backend: str, reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    g = geometry_of(*sizes)
    plan = choose(problem(g, residual, **facts))
    monkeypatch.setattr(launches, "has_cudnn", lambda x: facts.get("cudnn", True))
    memory_format = LAST if facts.get("channels_last", True) else torch.contiguous_format
    dtype, keep = facts.get("dtype", HALF), facts.get("keep", False)
    x, weight, added = (
        torch.empty(size, dtype=dtype, memory_format=memory_format)
        for size in (
            (g.batch, g.channels, g.height, g.width),
            (g.out_channels, g.channels // g.groups, *g.kernel),
            (g.batch, g.out_channels, *g.out),
        )
    )
    bias = torch.empty(g.out_channels, dtype=dtype)
    call = ConvAct(
        x, weight, bias, added if residual else None, g.stride, g.padding, g.dilation, g.groups, "relu", keep
    )
    call.run()
    packs = "conv_act_pack"
    (name, grid, constants), *more = [each for each in recorded if each[0] != packs]
    assert not more
    assert plan.backend == backend
    assert reason in plan.reason
    assert str(plan).startswith(backend)
    assert name == (f"conv_act_{backend}" if plan.tile else backend)
    if plan.tile is not None:
        assert_tile(plan, constants, grid)
    assert len(recorded) == (3 if plan.tile and backend != "gathered" and g.channels < 8 else 1)


def test_groups_have_a_kernel_on_the_gpu_where_it_was_measured() -> None:
    geometry = geometry_of(1, 112, 8, 112, 3, 1, 2)
    assert choose(problem(geometry, copied=False)).backend == "gathered"
    assert choose(problem(geometry, copied=False, capability=8)).backend == "library"
    depthwise = geometry._replace(groups=112)
    assert choose(problem(depthwise, copied=False)).backend == "depthwise"
    for other in ({"capability": 8}, {"dtype": SINGLE}, {"channels_last": False}, {"keep": True}):
        assert choose(problem(depthwise, **{"copied": False, **other})).backend == "library"
    assert choose(problem(depthwise._replace(dilation=(2, 2)), copied=False)).backend == "library"


def assert_tile(plan: ConvPlan, constants: dict[str, Any], grid: tuple[int, ...]) -> None:
    """The launched tile is the tile of the plan."""
    tile = plan.tile
    assert tile is not None
    if tile.kernel == "depthwise":
        launched = tuple(constants[name] for name in ("ROWS", "COLUMNS", "RUN", "num_warps"))
        assert launched == (tile.rows, tile.columns, tile.depth, tile.warps)
        return
    rows = (
        constants["ROWS"]
        if tile.kernel == "gathered"
        else math.prod(constants[n] for n in ("BATCH", "HEIGHT", "WIDTH"))
    )
    launched = (rows, constants["COLUMNS"], constants["DEPTH"], constants["num_warps"], constants["num_stages"])
    assert launched == (tile.rows, tile.columns, tile.depth, tile.warps, tile.stages)
    assert constants["GROUP"] == tile.group
    if tile.kernel == "persistent":
        assert grid[0] <= tile.programs_per_sm * 132
        assert tile.split == 1
    else:
        assert constants["SPLIT"] == tile.split
        assert grid[0] % tile.split == 0
        assert ("K in" in str(plan)) == (tile.split > 1)


@pytest.mark.parametrize(
    ("sizes", "tile", "depth", "split"),
    [
        ((1, 64, 8, 64, 3, 1), ConvTile("single", 64, 64, 64, 4, 4, split=4), 64, 3),  # 9 steps: three of three
        ((1, 64, 8, 64, 3, 1), ConvTile("persistent", 64, 64, 64, 4, 4, split=4), 64, 1),
        ((1, 48, 8, 64, 1, 1), ConvTile("single", 64, 64, 64, 4, 4, split=8), 16, 3),
        ((1, 3, 8, 64, 7, 2), ConvTile("single", 64, 64, 64, 4, 4, split=4), 32, 4),  # 7 steps of 32
        ((1, 20, 8, 64, 3, 1), ConvTile("gathered", 64, 64, 64, 4, 4, split=2), 64, 2),  # 3 steps
        ((1, 112, 8, 112, 3, 1, 2), ConvTile("gathered", 64, 64, 64, 4, 4, split=4), 64, 3),  # 9 steps
        ((1, 48, 8, 48, 1, 1, 2), ConvTile("gathered", 64, 64, 64, 4, 4, split=4), 32, 1),
    ],
)
def test_a_tile_has_no_empty_parts(sizes: tuple[int, ...], tile: ConvTile, depth: int, split: int) -> None:
    found = fitted(tile, problem(geometry_of(*sizes), copied=tile.kernel != "gathered"))
    assert (found.depth, found.split) == (depth, split)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (((1, 3, 8, 8, 8), (7, 7), (2, 2), (3, 3), (1, 1)), (4, 32, 7)),
        (((1, 3, 8, 8, 8), (3, 3), (1, 1), (1, 1), (1, 1)), (8, 32, 3)),
        (((1, 5, 8, 8, 8), (3, 3), (2, 2), (1, 1), (2, 2)), (16, 16, 9)),
        (((1, 5, 8, 8, 8), (1, 1), (1, 1), (0, 0), (2, 2)), (8, 16, 1)),
    ],
)
def test_few_channels_are_packed_into_groups_of_16_bytes(given: Any, expected: tuple[int, int, int]) -> None:
    sizes, *sides = given
    assert packing(Geometry(*sizes, *sides), 2) == expected


# ---- max pools -----------------------------------------------------------------------------------------------------

POOLS: list[tuple[tuple[int, ...], int, torch.dtype, bool, str, str]] = [
    ((2, 64, 9, 11), 3, HALF, True, "kernel", "channels last, and a window has 9 elements, at most 25"),
    ((3, 100, 8, 8), 5, SINGLE, True, "kernel", "a window has 25 elements"),
    ((3, 100, 8, 8), 6, SINGLE, True, "reference", "a window has 36 elements, more than 25"),
    ((2, 64, 9, 11), 3, HALF, False, "reference", "x is not channels last"),
    ((2, 64, 9, 11), 3, DOUBLE, True, "reference", "float64"),
    ((0, 64, 9, 11), 3, HALF, True, "reference", "there are no images"),
]


@pytest.mark.parametrize(("shape", "kernel", "dtype", "last", "backend", "reason"), POOLS, ids=str)
def test_a_max_pool_runs_as_its_plan_says(
    recorded: Recorded, shape: tuple[int, ...], kernel: int, dtype: torch.dtype, last: bool, backend: str, reason: str
) -> None:
    batch, channels, height, width = shape
    x = torch.zeros(shape, dtype=dtype)
    x = x.contiguous(memory_format=LAST) if last else x
    geometry = Geometry(batch, channels, height, width, channels, (kernel, kernel), (2, 2), (1, 1), (1, 1))
    plan = choose_pool(geometry, dtype, "cpu", kernels=True, channels_last=last)
    max_pool2d(x, kernel, 2, 1)
    assert recorded == ([("max_pool", plan.grid, plan.constants)] if backend == "kernel" else [])
    assert plan.backend == backend
    assert reason in plan.reason
    assert str(plan) == f"{backend}: {plan.reason}"
    assert max_pool2d_plan(x, kernel, 2, 1) == plan
    assert (kernel**2 > MOST_TAPS) == ("more than" in plan.reason)


@pytest.mark.skipif(INTERPRETED, reason="kernels run interpreted")
def test_kernels_do_not_run_on_a_cpu() -> None:
    x, weight = torch.ones(1, 16, 4, 4), torch.ones(16, 16, 1, 1)
    assert str(max_pool2d_plan(x, 2)) == str(conv_act_plan(x, weight)) == "reference: no kernels for cpu"


def test_wrong_arguments_of_a_plan() -> None:
    with pytest.raises(ValueError, match=r"^max_pool2d_plan: the window does not fit"):
        max_pool2d_plan(torch.ones(1, 1, 4, 4), 5)
