"""Voxelization agrees with a plain loop over the points, on the CPU and on a GPU."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.sparse import SparseConvTensor
from rooftop.sparse.utils import PointToVoxel, gather_features_by_pc_voxel_id
from rooftop.sparse.voxels import REDUCTIONS, voxel_grid, voxelize

SIZE, RANGE = [0.5, 0.25, 1.0], [-1.0, 0.0, -2.0, 1.0, 1.5, 1.0]  # 4 x 6 x 3 cells of x, y, z
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
Made = tuple[Tensor, Tensor, Tensor, Tensor]


def cell_of(point: Tensor, size: list[float], ends: list[float]) -> tuple[int, ...] | None:
    """(z, y, x), one number after the other, in NumPy's arithmetic of the points' dtype."""
    wide = np.float64 if point.dtype == torch.float64 else np.float32
    found = []
    for dim, each in enumerate(size):
        low, high, width = wide(ends[dim]), wide(ends[dim + len(size)]), wide(each)
        at = (wide(float(point[dim])) - low) / width
        cells = round(float((np.float32(high) - np.float32(low)) / np.float32(width)))
        if not math.isfinite(at) or not 0 <= math.floor(at) < cells:
            return None
        found.append(math.floor(at))
    return tuple(reversed(found))


def one_by_one(points: Tensor, voxels: int, slots: int) -> tuple[list[list[int]], list[tuple[int, ...]], list[int]]:
    """The points and the cell of each voxel, and the voxel of each point, computed point by point."""
    numbers: dict[tuple[int, ...], int] = {}
    held: list[list[int]] = []
    ids = []
    for number, point in enumerate(points):
        cell = cell_of(point, SIZE, RANGE)
        if cell is not None and cell not in numbers and len(numbers) < voxels:
            numbers[cell] = len(numbers)
            held.append([])
        voxel = -1 if cell is None else numbers.get(cell, -1)
        ids.append(voxel)
        if voxel >= 0 and len(held[voxel]) < slots:
            held[voxel].append(number)
    return held, list(numbers), ids


def assert_slots(points: Tensor, voxels: int, slots: int, empty_mean: bool = False, device: str = "cpu") -> Made:
    make = PointToVoxel(SIZE, RANGE, points.shape[1], voxels, slots, device=torch.device(device))
    made = tuple(t.cpu() for t in make.generate_voxel_with_id(points.to(device), empty_mean=empty_mean))
    held, cells, ids = one_by_one(points, voxels, slots)
    expected = points.new_zeros(len(held), slots, points.shape[1])
    for voxel, mine in enumerate(held):
        if empty_mean:
            expected[voxel] = points[mine].to(torch.promote_types(points.dtype, torch.float32)).mean(0)
        expected[voxel, : len(mine)] = points[mine]
    found, indices, counts, voxel_ids = made
    exact = {} if empty_mean else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found, expected, equal_nan=True, **exact)
    assert indices.tolist() == [list(cell) for cell in cells]
    assert counts.tolist() == [len(mine) for mine in held]
    assert voxel_ids.tolist() == ids
    assert (indices.dtype, counts.dtype, voxel_ids.dtype) == (torch.int32, torch.int32, torch.int64)
    return found, indices, counts, voxel_ids


coordinate = st.one_of(
    st.sampled_from([-1.0, -0.5, 0.0, 0.25, 0.5, 1.0, 1.5, -2.0, math.nan, math.inf, -math.inf, 1e30, -1e-7]),
    st.floats(-3, 3, width=16),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(coordinate, coordinate, coordinate, st.floats(-4, 4, width=16)), max_size=40),
    st.integers(1, 30),
    st.integers(1, 4),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_slots_as_one_by_one(
    points: list[tuple[float, ...]], voxels: int, slots: int, dtype: torch.dtype, empty_mean: bool
) -> None:
    cloud = torch.tensor(points, dtype=torch.float64).view(-1, 4).to(dtype)
    assert_slots(cloud, voxels, slots, empty_mean)


def a_cloud(count: int = 400, dtype: torch.dtype = torch.float32, features: int = 5) -> Tensor:
    """Many points a voxel, some outside, some at the edges of cells."""
    torch.manual_seed(0)
    points = torch.rand(count, features) * 4 - 2
    points[::7] = (points[::7] * 4).round() / 4
    points[::50, 1] = torch.nan
    return points.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slots_of_a_crowd(dtype: torch.dtype) -> None:
    """More voxels than the limit, and more points in a voxel than its limit."""
    _, _, counts, ids = assert_slots(a_cloud(dtype=dtype), 30, 2)
    assert (len(counts), int(counts.max())) == (30, 2)
    assert ids[ids >= 0].bincount().max() > 2


def test_a_call_gives_the_first_three_anew() -> None:
    points = a_cloud(50)
    make = PointToVoxel(vsize_xyz=SIZE, coors_range_xyz=RANGE, num_point_features=5, max_num_voxels=9,
                        max_num_points_per_voxel=2)  # fmt: skip
    first = make(points)
    kept = [t.clone() for t in first]
    make(points.flip(0), clear_voxels=False)
    assert len(first) == 3
    assert all(map(torch.equal, first, kept))
    assert (make.grid_size, make.ndim) == ([3, 6, 4], 3)
    assert (make.vsize, make.coors_range) == ([1.0, 0.25, 0.5], [-2.0, 0.0, -1.0, 1.0, 1.5, 1.0])


def test_gradients_reach_points_that_have_a_slot() -> None:
    points = torch.tensor([[0.0, 0, 0], [0.1, 0, 0], [0.2, 0, 0], [9, 9, 9]], requires_grad=True)
    voxels = PointToVoxel(SIZE, RANGE, 3, 2, 2)(points)[0]
    voxels.square().sum().backward()
    assert points.grad is not None
    torch.testing.assert_close(points.grad, 2 * points.detach() * torch.tensor([1.0, 1, 0, 0])[:, None])


def test_no_points_have_no_voxels() -> None:
    for points in (torch.zeros(0, 4), torch.full((3, 4), 99.0)):
        voxels, indices, counts, ids = PointToVoxel(SIZE, RANGE, 4, 5, 2).generate_voxel_with_id(points)
        assert (voxels.shape, indices.shape, counts.shape) == ((0, 2, 4), (0, 3), (0,))
        assert ids.tolist() == [-1] * len(points)
        for reduce in REDUCTIONS:
            features, sites = voxelize(points, SIZE, RANGE, reduce)
            assert (features.shape, sites.shape) == ((0, 4), (0, 4))


@pytest.mark.parametrize("dims", [1, 2, 4])
def test_other_dimensions(dims: int) -> None:
    points = torch.rand(30, 5) * 3 - 1
    size, ends = [0.5] * dims, [0.0] * dims + [1.0] * dims
    indices = PointToVoxel(size, ends, 5, 99, 2)(points)[1]
    inside = points[((points >= 0) & (points < 1))[:, :dims].all(1), :dims]
    assert {tuple(i) for i in indices.tolist()} == {tuple(i) for i in (inside * 2).floor().int().flip(1).tolist()}
    assert voxel_grid(size, ends) == [2] * dims


def test_a_point_is_in_the_cell_of_ieee_divisions() -> None:
    """Points for which a product with the reciprocal (GPUs compute a division by a constant this way) would give
    another cell."""
    low, size = -40.0, 0.1
    points = (torch.arange(800) * np.float32(size) + np.float32(low)).float().view(-1, 1)
    numbers = np.floor((points.numpy() - np.float32(low)) / np.float32(size)).astype(int)
    wrong = np.floor((points.numpy() - np.float32(low)) * (np.float32(1) / np.float32(size))).astype(int)
    assert (numbers != wrong).any()
    found = PointToVoxel([size], [low, 40.0], 1, 800, 800).generate_voxel_with_id(points)
    assert found[1][found[3]].flatten().tolist() == numbers.flatten().tolist()


def test_features_of_voxels_go_back_to_points() -> None:
    ids, features = torch.tensor([1, -1, 0, 1]), torch.tensor([[1.0, 2], [3, 4]], requires_grad=True)
    found = gather_features_by_pc_voxel_id(features, ids)
    assert found.tolist() == [[3, 4], [0, 0], [1, 2], [3, 4]]
    assert torch.autograd.grad(found.sum(), features)[0].tolist() == [[1, 1], [2, 2]]
    assert gather_features_by_pc_voxel_id(features[:, 0], ids, -7)[1] == -7
    assert gather_features_by_pc_voxel_id(features[:0], ids[1:2], 2).tolist() == [[2, 2]]


def test_the_names_under_which_users_import_them() -> None:
    import rooftop.sparse as spconv
    from rooftop.sparse.pytorch.utils import PointToVoxel as OfPytorch

    assert spconv.PointToVoxel is PointToVoxel is OfPytorch


# ---- reduced ---------------------------------------------------------------------------------------------------


def reduced(points: Tensor, batch: Tensor, reduce: str) -> tuple[Tensor, list[list[int]]]:
    """Rows of the same voxel, reduced in float64, sorted by site."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for number, (point, element) in enumerate(zip(points, batch.tolist(), strict=True)):
        cell = cell_of(point, SIZE, RANGE)
        if cell is not None and element >= 0:
            rows.setdefault((element, *cell), []).append(number)
    functions = {"mean": lambda x: x.mean(0), "max": lambda x: x.amax(0), "sum": lambda x: x.sum(0)}
    function = functions.get(reduce, lambda x: x[0])
    sites = sorted(rows)
    return torch.stack([function(points[rows[site]].double()) for site in sites]), [list(site) for site in sites]


@pytest.mark.parametrize("reduce", REDUCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_voxelize_reduces_the_points_of_a_voxel(dtype: torch.dtype, reduce: str) -> None:
    points, batch = a_cloud(dtype=dtype), torch.arange(400) % 4 - 1
    features, indices = voxelize(points, SIZE, RANGE, reduce, batch.int())
    exact, sites = reduced(points, batch, reduce)
    assert indices.tolist() == sites
    assert (features.dtype, indices.dtype) == (dtype, torch.int32)
    torch.testing.assert_close(features, exact.to(dtype), equal_nan=True)
    x = SparseConvTensor(features, indices, voxel_grid(SIZE, RANGE), 3)
    assert x.dense().shape == (3, 5, 3, 6, 4)


# A cell size, a range, and the number of cells that cover it: thirds, decimals that float64 rounds up or down, and a
# part of one cell.
COVERED = [
    (0.3, 0.0, 1.0, 4), (0.16, 0.0, 40.0, 250), (0.1, 0.0, 70.4, 704), (0.16, -39.68, 39.68, 496),
    (0.05, -1.0, 3.0, 80), (0.16, 0.05, 40.0, 250), (0.7, 0.1, 0.2, 1), (0.1, 0.0, 0.30000001, 3),
    (1.0, -0.5, 2.75, 4), (1e-3, 0.0, 2e3, 2_000_000),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "low", "high", "count"), COVERED)
def test_every_point_of_a_range_is_in_a_voxel_and_no_other(
    size: float, low: float, high: float, count: int, dtype: torch.dtype
) -> None:
    assert voxel_grid([size], [low, high]) == [count]
    ends = torch.tensor([low, high], dtype=dtype)
    steps = torch.arange(0, count + 2, 1 + count // 100_000, dtype=torch.float64) * size + low
    borders = torch.cat([ends, steps.to(dtype), torch.linspace(low, high, 1001, dtype=torch.float64).to(dtype)])
    up, down = (torch.nextafter(borders, torch.tensor(to, dtype=dtype)) for to in (math.inf, -math.inf))
    points = torch.cat([borders, up, down, ends + size / 4, ends - size / 4])[:, None]
    inside = (points[:, 0] >= ends[0]) & (points[:, 0] < ends[1])
    sums, indices = voxelize(torch.cat([points, torch.ones_like(points)], 1), [size], [low, high], "sum")
    assert int(sums[:, 1].sum()) == int(inside.sum())
    assert 0 <= int(indices[:, 1].min()) <= int(indices[:, 1].max()) == count - 1
    wide = points[inside, 0].numpy()
    cells = np.floor((wide - ends[0].numpy()) / wide.dtype.type(size)).astype(int)
    assert sorted(set(np.minimum(cells, count - 1).tolist())) == indices[:, 1].tolist()


def test_under_spconvs_name_the_grid_ends_where_spconvs_does() -> None:
    """The range becomes the nearest whole number of cells: for 0 to 1, the last tenth is not covered; for 0 to 0.8, the
    cells reach beyond the end."""
    points = torch.tensor([[0.85], [0.95], [0.89]])
    for high, kept in ((1.0, [0, -1, 0]), (0.8, [0, -1, 0])):
        make = PointToVoxel([0.3], [0.0, high], 1, 9, 9)
        assert make.grid_size == [3]
        assert make.generate_voxel_with_id(points)[3].tolist() == kept
    _, indices = voxelize(points, [0.3], [0.0, 1.0])
    assert indices.tolist() == [[0, 2], [0, 3]]
    _, indices = voxelize(points[:1], [0.3], [0.0, 0.8])
    assert indices.tolist() == []


def assert_sums_are_wide(device: str) -> None:
    """Sums need more bits than half precision, in which 2048 + 1 is 2048."""
    points = torch.zeros(6000, 4, dtype=torch.float16, device=device)
    points[:, 3] = 1
    assert voxelize(points, SIZE, RANGE, "mean")[0].tolist() == [[0, 0, 0, 1]]
    assert voxelize(points, SIZE, RANGE, "sum")[0].tolist() == [[0, 0, 0, 6000]]


def test_sums_are_wide() -> None:
    assert_sums_are_wide("cpu")


def test_one_cloud_is_batch_element_0() -> None:
    points = a_cloud()
    found = voxelize(points, SIZE, RANGE)
    for a, b in zip(found, voxelize(points, SIZE, RANGE, "mean", torch.zeros(400, dtype=torch.int64)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("reduce", REDUCTIONS)
def test_gradients_of_voxelize(reduce: str) -> None:
    """Only features have gradients: a small change of coordinates moves no point to another voxel."""
    points = a_cloud(20).double()
    points = points[~points.isnan().any(1)]
    assert torch.autograd.gradcheck(
        lambda features: voxelize(torch.cat([points[:, :3], features], 1), SIZE, RANGE, reduce)[0][:, 3:],
        [points[:, 3:].clone().requires_grad_()],
    )


# ---- wrong arguments -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"vsize_xyz": [0.5, 0.25]}, "the range as twice as many numbers"),
        ({"vsize_xyz": []}, "in 1 to 4 dimensions"),
        ({"vsize_xyz": [0.5, 0.0, 1.0]}, "must be positive in each dimension"),
        ({"coors_range_xyz": [0, 0, 0, 1, -1, 1]}, "low ends below its high ends"),
        ({"coors_range_xyz": [0, 0, 0, 1, math.inf, 1]}, "must be finite"),
        ({"vsize_xyz": [9.0, 0.25, 1.0]}, "cells in each dimension"),
        ({"vsize_xyz": [1e-10, 1, 1]}, "1 to 2"),
        ({"vsize_xyz": [1e-60, 1, 1]}, "1 to 2"),
        ({"vsize_xyz": [1e-7] * 3}, "fewer than 2"),
        ({"num_point_features": 2}, "num_point_features 2"),
        ({"max_num_voxels": 0}, "max_num_voxels 0"),
        ({"max_num_points_per_voxel": 0}, "max_num_points_per_voxel 0"),
    ],
)
def test_what_cannot_be_voxels(arguments: dict[str, Any], message: str) -> None:
    usual = {"vsize_xyz": SIZE, "coors_range_xyz": RANGE, "num_point_features": 4, "max_num_voxels": 5}
    with pytest.raises(ValueError, match=message):
        PointToVoxel(**{**usual, "max_num_points_per_voxel": 2, **arguments})


@pytest.mark.parametrize(("size", "ends"), [(1e-300, [0, 1e300]), (1.0, [-1.7e308, 1.7e308])])
def test_grids_with_more_cells_than_floats_can_count(size: float, ends: list[float]) -> None:
    with pytest.raises(ValueError, match=r"a grid of \[inf\]: a grid must have 1 to 2"):
        voxelize(torch.zeros(1, 1), [size], ends)


def test_voxels_that_no_memory_can_hold() -> None:
    with pytest.raises(ValueError, match=r"PointToVoxel: a tensor of \(1, 4611686018427387904, 4\) needs .* 2\^63"):
        PointToVoxel(SIZE, RANGE, 4, 5, 2**62)(torch.zeros(3, 4))
    with pytest.raises(MemoryError, match=r"\(1, 72057594037927936, 4\) needs 1,152,.* bytes, but the host has"):
        PointToVoxel(SIZE, RANGE, 4, 5, 2**56)(torch.zeros(3, 4))


def test_numbers_of_voxels_are_integers() -> None:
    with pytest.raises(TypeError, match=r"max_num_voxels must be an integer, got 5\.5"):
        PointToVoxel(SIZE, RANGE, 4, 5.5, 2)  # type: ignore[arg-type]


def test_what_are_no_sizes() -> None:
    for size, ends in ((0.5, RANGE), (SIZE, [[0, 0, 0], [1, 1, 1]]), ("abc", RANGE)):
        with pytest.raises(
            TypeError, match="as one number per dimension, and the range as one flat sequence of twice as"
        ):
            voxelize(torch.zeros(3, 4), size, ends)


@pytest.mark.parametrize(
    ("points", "error", "message"),
    [
        ([[0.0] * 4], TypeError, "points must be a tensor, got list"),
        (torch.zeros(3, 4).int(), TypeError, "points must be float16, bfloat16, float32 or float64, got torch.int32"),
        (torch.zeros(3), ValueError, r"begin with 3 coordinates, got \(3,\)"),
        (torch.zeros(3, 2), ValueError, r"begin with 3 coordinates, got \(3, 2\)"),
        (torch.zeros(3, 5), ValueError, r"expected 4 features, got pc \(3, 5\)"),
        (torch.zeros(3, 4, device="meta"), ValueError, "expected points on cpu, got points on meta"),
    ],
)
def test_what_are_no_points(points: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^PointToVoxel: .*{message}"):
        PointToVoxel(SIZE, RANGE, 4, 5, 2)(points)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"points": None}, TypeError, "points must be a tensor, got NoneType"),
        ({"reduce": "median"}, ValueError, "reduce must be one of mean, max, sum, first, got 'median'"),
        ({"batch": [0, 0, 0]}, TypeError, "batch must be a tensor of int32 or int64, got list"),
        ({"batch": torch.zeros(3)}, TypeError, "batch must be a tensor of int32 or int64, got torch.float32"),
        ({"batch": torch.zeros(2).int()}, ValueError, r"expected batch of shape \(3,\) on cpu, got \(2,\)"),
        (
            {"voxel_size": [1e-6] * 3, "batch": torch.tensor([0, 1, 2])},
            ValueError,
            "3 batch elements with 9000000000000000000 cells each",
        ),
        (
            {"voxel_size": [1e-5] * 3, "batch": torch.tensor([0, 1, 2]).int() * 2000},
            ValueError,
            "4001 batch elements with 9000000000000000 cells each",
        ),
        ({"batch": torch.tensor([0, 2**32, 0])}, ValueError, r"batch has element 4294967296, .* below 2\^31"),
        ({"batch": torch.tensor([2**31, 0, 0])}, ValueError, r"batch has element 2147483648, .* below 2\^31"),
        (
            {"voxel_size": [1e-3] * 3, "batch": torch.tensor([0, 2**34, 0])},
            ValueError,
            r"batch has element 17179869184, .* below 2\^31",
        ),
    ],
)
def test_what_cannot_be_voxelized(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    usual = {"points": torch.zeros(3, 4), "voxel_size": SIZE, "coordinate_range": RANGE}
    with pytest.raises(error, match=f"voxelize: .*{message}"):
        voxelize(**{**usual, **arguments})


# ---- on a GPU --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_makes_the_same_voxels(dtype: torch.dtype) -> None:
    points = a_cloud(3000, dtype)
    for empty_mean in (False, True):
        assert_slots(points, 30, 3, empty_mean, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_finds_the_same_cells_of_a_scan(dtype: torch.dtype) -> None:
    """Half a million points, many at edges of cells that are not exact binary numbers."""
    size, ends = [0.1, 0.05, 0.2], [-51.2, -51.2, -5.0, 51.2, 51.2, 3.0]
    points = (torch.rand(500_000, 4) * 120 - 60).to(dtype)
    points[::3, :3] = (points[::3, :3].double() / 0.1).round().mul(0.1).to(dtype)
    batch = torch.randint(-1, 4, (len(points),))
    for reduce in REDUCTIONS:
        here = voxelize(points, size, ends, reduce, batch)
        there = voxelize(points.cuda(), size, ends, reduce, batch.cuda())
        assert torch.equal(there[1].cpu(), here[1])
        torch.testing.assert_close(there[0].cpu(), here[0])
    made = PointToVoxel(size, ends, 4, 20_000, 5).generate_voxel_with_id(points)
    on_gpu = PointToVoxel(size, ends, 4, 20_000, 5, torch.device("cuda")).generate_voxel_with_id(points.cuda())
    assert all(torch.equal(a.cpu(), b) for a, b in zip(on_gpu, made, strict=True))


@pytest.mark.gpu
def test_sums_are_wide_on_a_gpu() -> None:
    assert_sums_are_wide("cuda")


@pytest.mark.gpu
def test_ten_runs_give_the_same_bits_on_a_gpu() -> None:
    points = a_cloud(100_000)[:, :4].cuda().requires_grad_()
    make = PointToVoxel(SIZE, RANGE, 4, 40, 5, torch.device("cuda"))

    def outcome() -> list[Tensor]:
        made = make.generate_voxel_with_id(points)
        found = [*made]
        for reduce in REDUCTIONS:
            features, indices = voxelize(points, SIZE, RANGE, reduce)
            found += [features, indices, torch.autograd.grad(features[:, 3].square().sum(), points)[0]]
        return [*found, torch.autograd.grad(made[0].square().nansum(), points)[0]]

    first, *others = [outcome() for _ in range(10)]
    for other in others:
        for a, b in zip(first, other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_the_last_batch_element_of_int32() -> None:
    points = torch.zeros(3, 4)
    _, indices = voxelize(points, SIZE, RANGE, batch=torch.tensor([2**31 - 1, -(2**40), 0]))
    assert indices.dtype == torch.int32
    assert indices[:, 0].tolist() == [0, 2**31 - 1]


@pytest.mark.gpu
def test_a_gpu_refuses_batch_elements_beyond_int32() -> None:
    with pytest.raises(ValueError, match="batch has element 4294967296"):
        voxelize(torch.zeros(3, 4).cuda(), SIZE, RANGE, batch=torch.tensor([0, 2**32, 0]).cuda())


@pytest.mark.gpu
def test_it_waits_for_the_gpu_once() -> None:
    points = a_cloud(1000).cuda()
    make = PointToVoxel(SIZE, RANGE, 5, 40, 5, torch.device("cuda"))
    batch = torch.zeros(len(points), dtype=torch.int64, device="cuda")
    for call in (
        lambda: make(points),
        lambda: voxelize(points, SIZE, RANGE),
        lambda: voxelize(points, SIZE, RANGE, batch=batch),
        lambda: voxelize(points, [1e-5] * 3, RANGE, batch=batch.int()),
    ):
        call()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert sum("called a synchronizing CUDA operation" in str(each.message) for each in told) == 1
