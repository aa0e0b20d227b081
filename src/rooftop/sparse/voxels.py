"""Voxelization: find which points are in which cell of a grid, and compute the features of each cell.

In each dimension, a point p is in the cell floor((p - low) / size), computed in float32 (float64 for points in float64)
with IEEE 754 division. So GPU, CPU and spconv find the same cell. Points are sorted by the int64 key of their cell with
a stable sort, so that results do not depend on the order in which threads run. A point outside the grid, or with NaN,
is in no voxel.

There are two rules for where a grid ends. `voxelize` includes every point in its range, low <= p < high in the points'
dtype. If the cells do not divide the range, the last cell extends beyond the range. `PointToVoxel` follows spconv's
rule: it rounds the range to the nearest number of whole cells. So `PointToVoxel` excludes up to half a cell of the
range, or includes up to half a cell beyond the range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.hardware.large_tensors import allocated
from rooftop.sparse.geometries import INT32_SIZE, MAX_DIMS, NO_KEY, whole_number
from rooftop.words import did_you_mean

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REDUCTIONS = ("mean", "max", "sum", "first")

# ---- the grid --------------------------------------------------------------------------------------------------


class Grid(NamedTuple):
    """A grid of cells. Each field has one value per dimension, in the order of the points' coordinates.

    Attributes:
        low: start of the first cell.
        sizes: size of a cell.
        shape: number of cells.
        high: end of the range (exclusive). None: the range ends with the last cell.
    """

    low: tuple[float, ...]
    sizes: tuple[float, ...]
    shape: tuple[int, ...]
    high: tuple[float, ...] | None = None


_WHOLE = 1e-6  # relative tolerance of the number of cells: 40 / 0.16 and 70.4 / 0.1 are integers, but not in float64


def grid_of(voxel_size: Sequence[float], coordinate_range: Sequence[float], as_spconv: bool = False) -> Grid:
    """Make the grid for a range, which is given as all low ends, then all high ends.

    Args:
        as_spconv: whether to use spconv's rule, which rounds the range to the nearest number of whole cells. If not,
            the number of cells is rounded up, so that the cells cover the range.

    Raises:
        TypeError: an argument is not a sequence of numbers.
        ValueError: the number of dimensions is not 1 to 4, a size is invalid, the range is empty, or the number of
            cells is not 1 to 2^31 in each dimension or is 2^63 or more in all.
    """
    try:
        sizes, ends = tuple(map(float, voxel_size)), tuple(map(float, coordinate_range))
    except (TypeError, ValueError) as error:
        raise TypeError(
            "expected the voxel size as one number per dimension, and the range as one flat sequence of twice as "
            f"many numbers, got {voxel_size!r} and {coordinate_range!r}"
        ) from error
    dims = len(sizes)
    if not 1 <= dims <= MAX_DIMS or len(ends) != 2 * dims:
        raise ValueError(
            f"expected the voxel size in 1 to {MAX_DIMS} dimensions, and the range as twice as many numbers, first "
            f"the low ends, then the high ends; got {list(sizes)} and {list(ends)}"
        )
    low, high = ends[:dims], ends[dims:]
    if not all(0 < size < math.inf for size in sizes):
        raise ValueError(f"the size of a voxel must be positive in each dimension, got {list(sizes)}")
    if not all(-math.inf < a < b < math.inf for a, b in zip(low, high, strict=True)):
        raise ValueError(f"a range must be finite and have its low ends below its high ends, got {list(ends)}")
    if as_spconv:
        first, last, step = (torch.tensor(values, dtype=torch.float32) for values in (low, high, sizes))
        counts = ((last - first) / step + 0.5).floor().tolist()  # half a cell rounds up to one cell
    else:
        counts = [_covering((b - a) / size) for a, b, size in zip(low, high, sizes, strict=True)]
    if not all(1 <= count <= INT32_SIZE for count in counts) or math.prod(counts) >= NO_KEY:
        raise ValueError(
            f"voxels of {list(sizes)} in the range {list(ends)} make a grid of {counts}: a grid must have 1 to 2^31 "
            "cells in each dimension, and fewer than 2^63 in all"
        )
    return Grid(low, sizes, tuple(map(int, counts)), None if as_spconv else high)


def _covering(cells: float) -> float:
    """Round a number of cells up to an integer. A number that is nearly an integer becomes that integer."""
    if not math.isfinite(cells):  # the range or the number of cells is too large for float64
        return cells
    nearest = float(round(cells))
    return nearest if abs(cells - nearest) <= _WHOLE * nearest else float(math.ceil(cells))


@torch.no_grad()
def _cells(points: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Compute the cell (N, dims) int64 of each point, and whether the point is in the grid, (N,)."""
    at = points[:, : len(grid.shape)]
    at = at if at.dtype == torch.float64 else at.float()
    # Divide by a tensor. For a Python number, PyTorch on a GPU would multiply by the number's rounded reciprocal.
    low, sizes = _on_device([grid.low, grid.sizes], at.dtype, at.device)
    cells = at.sub(low).div(sizes).floor().nan_to_num(-1.0).clamp(-1, INT32_SIZE).long()
    shape = _on_device(grid.shape, torch.int64, at.device)
    if grid.high is None:
        return cells, ((cells >= 0) & (cells < shape)).all(1)
    high = _on_device(grid.high, at.dtype, at.device)
    # Rounding may put a point just below the end into the cell beyond the end.
    return torch.minimum(cells.clamp_min(0), shape - 1), ((at >= low) & (at < high)).all(1)


def _on_device(values: Sequence[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make a tensor of these values on the device without waiting for the device."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def _keys(cells: Tensor, inside: Tensor, shape: Sequence[int], batch: Tensor | None = None) -> Tensor:
    """Return the points' keys, (N,) int64. Keys sort by batch element, then by the dimensions from last to first.
    Points in no voxel get NO_KEY."""
    keys = torch.zeros_like(cells[:, 0]) if batch is None else batch.long()
    for dim in reversed(range(len(shape))):
        keys = keys * shape[dim] + cells[:, dim]
    return keys.where(inside, NO_KEY)


# ---- points by voxel -------------------------------------------------------------------------------------------


class _ByVoxel(NamedTuple):
    """N points sorted by voxel. Points in no voxel are at the end."""

    order: Tensor  # (N,) the index of the point at each position; points of a voxel keep their order
    starts: Tensor  # (N,) whether the point is the first of its voxel
    first: Tensor  # (N,) the position of the first point of the same voxel
    real: Tensor  # (N,) whether the point is in a voxel


def _by_voxel(keys: Tensor) -> _ByVoxel:
    ordered, order = keys.sort(stable=True)
    real = ordered != NO_KEY
    starts = real.clone()
    starts[1:] &= ordered[1:] != ordered[:-1]
    place = torch.arange(len(keys), device=keys.device)
    first = place.where(starts, 0).cummax(0).values if len(keys) else place
    return _ByVoxel(order, starts, first, real)


# ---- public ----------------------------------------------------------------------------------------------------


class PointToVoxel:
    """Group the points of one cloud by voxel, like spconv's class of this name. The result (V, P, F) has V voxels of P
    slots. A slot holds the F values of one point. P is `max_num_points_per_voxel`.

    The grid follows spconv's rule, and rounds the range to the nearest number of whole cells. (`voxelize` covers the
    whole range.) Voxels are numbered in the order of their first points, up to `max_num_voxels` voxels. The slots of a
    voxel take its first P points. GPU and CPU return the same result. In spconv on a GPU, the result depends on the
    order of threads.

    Attributes:
        grid_size: number of cells, [z, y, x], for the `spatial_shape` of a `SparseConvTensor`.
        vsize, coors_range: the size of a voxel, [z, y, x], and the range: low ends [z, y, x], then high ends.
        num_point_features, max_num_voxels, max_num_points_per_voxel, device: as passed.
    """

    def __init__(
        self,
        vsize_xyz: Sequence[float],
        coors_range_xyz: Sequence[float],
        num_point_features: int,
        max_num_voxels: int,
        max_num_points_per_voxel: int,
        device: torch.device | str = "cpu",
    ) -> None:
        """Prepare a grid of 1 to 4 dimensions.

        Args:
            vsize_xyz: size of a voxel, in the points' units.
            coors_range_xyz: the range: low ends, then high ends.
            num_point_features: F, the number of features of a point, including its coordinates.
            max_num_voxels: maximum number of voxels.
            max_num_points_per_voxel: P, the maximum number of points in a voxel.
            device: the device of the points.

        Raises:
            TypeError: a number of features, voxels or points is not an integer; or as in `grid_of`.
            ValueError: the grid is invalid (see `grid_of`), there are fewer features than coordinates, or a maximum is
                below 1.
        """
        self._grid = grid_of(vsize_xyz, coors_range_xyz, as_spconv=True)
        dims = len(self._grid.shape)
        self.ndim, self.device = dims, torch.device(device)
        self.grid_size = list(self._grid.shape[::-1])
        self.vsize = list(self._grid.sizes[::-1])
        ends = [float(end) for end in coors_range_xyz]
        self.coors_range = ends[:dims][::-1] + ends[dims:][::-1]
        self.num_point_features = whole_number("num_point_features", num_point_features)
        self.max_num_voxels = whole_number("max_num_voxels", max_num_voxels)
        self.max_num_points_per_voxel = whole_number("max_num_points_per_voxel", max_num_points_per_voxel)
        if num_point_features < dims or max_num_voxels < 1 or max_num_points_per_voxel < 1:
            raise ValueError(
                f"expected at least {dims} features, 1 voxel and 1 point, got num_point_features {num_point_features}, "
                f"max_num_voxels {max_num_voxels}, max_num_points_per_voxel {max_num_points_per_voxel}"
            )

    def __call__(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run `generate_voxel_with_id`, without returning the voxel of each point."""
        return self.generate_voxel_with_id(pc, clear_voxels, empty_mean)[:3]

    def generate_voxel_with_id(
        self, pc: Tensor, clear_voxels: bool = True, empty_mean: bool = False
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Voxelize a point cloud. The host waits for the device once, for the number of voxels.

        Args:
            pc: (N, F) float16, bfloat16, float32 or float64, with the coordinates (x, y, z) first. N may be 0.
            clear_voxels: ignored. Results are new tensors, where slots without a point are 0.
            empty_mean: whether slots without a point get the mean of their voxel's points instead of 0.

        Returns:
            Voxels (V, P, F) in the points' dtype, through which gradients flow back to the points. Indices (V, dims)
            int32, (z, y, x). The number of points in each voxel, (V,) int32, at most P. The voxel of each point, (N,)
            int64, -1 for a point in none of these V voxels. As in spconv, a point is assigned to its voxel even if the
            voxel has no free slot.

        Raises:
            TypeError, ValueError: the points are invalid, or on another device; or the voxels have 2^63 bytes or more.
            MemoryError: the host has too little memory.
        """
        _check_points("PointToVoxel", pc, self.ndim)
        if pc.shape[1] != self.num_point_features:
            raise ValueError(f"PointToVoxel: expected {self.num_point_features} features, got pc {tuple(pc.shape)}")
        if pc.device.type != self.device.type:
            raise ValueError(
                f"PointToVoxel: expected points on {self.device}, got points on {pc.device}: create PointToVoxel "
                "with the points' device"
            )
        cells, inside = _cells(pc, self._grid)
        found = _by_voxel(_keys(cells, inside, self._grid.shape))
        # the first point of each voxel, in the order of the points
        opens = torch.zeros_like(found.starts).scatter_(0, found.order, found.starts)
        openers = opens.nonzero().squeeze(1)[: self.max_num_voxels]
        count, slots = len(openers), self.max_num_points_per_voxel
        number = opens.cumsum(0)[found.order[found.first]] - 1  # (N,) the voxel of each sorted point
        number = number.where(found.real & (number < count), -1)
        slot = torch.arange(len(pc), device=pc.device) - found.first
        lies = (number >= 0) & (slot < slots)
        # an additional slot collects the points that get no slot of a voxel
        place = (number * slots + slot).where(lies, count * slots)
        shape = (count, slots, pc.shape[1])
        zeros = allocated("PointToVoxel: a tensor", shape, pc.dtype, lambda: pc.new_zeros(count * slots + 1, shape[2]))
        voxels = zeros.index_copy(0, place, pc.index_select(0, found.order))
        voxels = voxels[:-1].view(shape)
        numbers = torch.zeros(count + 1, dtype=torch.int32, device=pc.device)
        numbers.scatter_add_(0, number.where(lies, count), torch.ones_like(number, dtype=torch.int32))
        numbers = numbers[:-1]
        if empty_mean:
            voxels = _filled(voxels, numbers)
        ids = torch.empty_like(number).scatter_(0, found.order, number)
        return voxels, cells[openers].flip(1).int(), numbers, ids


def voxelize(
    points: Tensor,
    voxel_size: Sequence[float],
    coordinate_range: Sequence[float],
    reduce: str = "mean",
    batch: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute one row of features for each voxel that has a point, for a `SparseConvTensor`.

    The host waits for the device once, for the number of voxels.

    Args:
        points: (N, F) float16, bfloat16, float32 or float64, with the coordinates (x, y, z) first. N may be 0.
        voxel_size: size of a voxel in x, y, z, in the points' units, with 1 to 4 dimensions.
        coordinate_range: low ends, then high ends. All points from the low ends (inclusive) to the high ends
            (exclusive) are in a voxel. The grid is `voxel_grid(voxel_size, coordinate_range)`, whose last cells may
            extend beyond the range.
        reduce: the features of a voxel: the "mean", "max" or "sum" of its points, or its "first" point.
        batch: (N,) int32 or int64, the batch element of each point, below 2^31, or -1 for points to leave out. None:
            all points are one cloud.

    Returns:
        Features (V, F) in the points' dtype, through which gradients flow back to the points. Points that tie for a
        maximum share the gradient. Indices (V, 1 + dims) int32, (batch, z, y, x), sorted. Sums are float32 (float64 for
        float64 points) in the order of the points, so results are the same bit for bit in each run.

    Raises:
        TypeError, ValueError: the points, the grid, the batch or the reduction is invalid.
    """
    if reduce not in REDUCTIONS:
        raise ValueError(
            f"voxelize: reduce must be one of {', '.join(REDUCTIONS)}, got {reduce!r}{did_you_mean(reduce, REDUCTIONS)}"
        )
    grid = grid_of(voxel_size, coordinate_range)
    _check_points("voxelize", points, len(grid.shape))
    _check_batch(points, batch)
    last = _last_element(batch, math.prod(grid.shape))
    cells, inside = _cells(points, grid)
    if batch is not None:
        inside &= batch >= 0
    found = _by_voxel(_keys(cells, inside, grid.shape, batch))
    # The position of the first point of each voxel among the sorted points. The host waits here.
    places = found.starts.nonzero().squeeze(1)
    if last is not None:
        _check_last_element(int(last), math.prod(grid.shape))
    firsts = found.order[places]
    element = torch.zeros_like(firsts) if batch is None else batch[firsts].long()
    indices = torch.cat([element[:, None], cells[firsts].flip(1)], 1).int()
    if reduce == "first" or len(places) == 0:
        return points.index_select(0, firsts), indices
    lengths = torch.diff(places, append=found.real.sum().view(1))
    ordered = points.index_select(0, found.order)
    if reduce != "max":
        ordered = ordered.to(torch.promote_types(points.dtype, torch.float32))
    features = torch.segment_reduce(ordered, reduce, lengths=lengths, axis=0, unsafe=True)
    return features.to(points.dtype), indices


def voxel_grid(voxel_size: Sequence[float], coordinate_range: Sequence[float]) -> list[int]:
    """The number of cells in a range, [z, y, x], for the `spatial_shape` of `voxelize`'s result.

    Raises:
        ValueError: as `voxelize`.
    """
    return list(grid_of(voxel_size, coordinate_range).shape[::-1])


def gather_features_by_pc_voxel_id(seg_res_features: Tensor, pc_voxel_id: Tensor, invalid_value: float = 0) -> Tensor:
    """Gather, for each of N points, the features of its voxel: (N, ...) from voxel features (V, ...).

    Args:
        seg_res_features: features of the voxels, such as a network's output.
        pc_voxel_id: (N,), the voxel of each point, or -1, from `PointToVoxel.generate_voxel_with_id`. It may be
            on another device than the features.
        invalid_value: the value for points in no voxel.
    """
    ids = pc_voxel_id.to(seg_res_features.device)
    shape = (len(ids), *seg_res_features.shape[1:])
    if len(seg_res_features) == 0:
        return seg_res_features.new_full(shape, invalid_value)
    known = (ids >= 0).view(-1, *[1] * (len(shape) - 1))
    return seg_res_features.index_select(0, ids.clamp(min=0)).where(known, invalid_value)


# ---- inner functions -------------------------------------------------------------------------------------------


def _filled(voxels: Tensor, numbers: Tensor) -> Tensor:
    """Fill slots without a point in voxels (V, P, F) with the mean of the voxel's points."""
    wide = torch.promote_types(voxels.dtype, torch.float32)
    mean = voxels.sum(1, keepdim=True, dtype=wide) / numbers.view(-1, 1, 1)
    taken = torch.arange(voxels.shape[1], device=voxels.device) < numbers[:, None]
    return voxels.where(taken[..., None], mean.to(voxels.dtype))


def _check_points(name: str, points: Tensor, dims: int) -> None:
    if not isinstance(points, Tensor):
        raise TypeError(f"{name}: points must be a tensor, got {type(points).__name__}")
    if points.dtype not in FLOATS:
        raise TypeError(f"{name}: points must be float16, bfloat16, float32 or float64, got {points.dtype}")
    if points.dim() != 2 or points.shape[1] < dims:
        raise ValueError(
            f"{name}: expected points (N, F) that begin with {dims} coordinates, got {tuple(points.shape)}"
        )


def _check_batch(points: Tensor, batch: Tensor | None) -> None:
    if batch is None:
        return
    if not isinstance(batch, Tensor) or batch.dtype not in (torch.int32, torch.int64):
        what = batch.dtype if isinstance(batch, Tensor) else type(batch).__name__
        raise TypeError(f"voxelize: batch must be a tensor of int32 or int64, got {what}")
    if batch.shape != points.shape[:1] or batch.device != points.device:
        raise ValueError(
            f"voxelize: expected batch of shape ({len(points)},) on {points.device}, got {tuple(batch.shape)} on "
            f"{batch.device}"
        )


def _most_elements(cells: int) -> int:
    """The maximum number of batch elements, for grids of `cells` cells, that int32 indices and int64 keys can
    represent.
    """
    return min(INT32_SIZE, (NO_KEY - 1) // cells)


def _last_element(batch: Tensor | None, cells: int) -> Tensor | None:
    """Return the maximum of `batch` on the CPU. None: `batch` is None or empty, or it is int32 and no int32 element can
    be too large.

    A GPU copies the maximum to the CPU while the host continues. So the host must wait for the GPU before it reads the
    maximum.
    """
    if batch is None or not batch.numel() or (batch.dtype == torch.int32 and _most_elements(cells) == INT32_SIZE):
        return None
    return batch.amax().to("cpu", non_blocking=True)


def _check_last_element(last: int, cells: int) -> None:
    if last >= INT32_SIZE:
        raise ValueError(
            f"voxelize: batch has element {last}, but int32 indices need elements below 2^31: number the clouds from 0"
        )
    if last >= _most_elements(cells):
        raise ValueError(
            f"voxelize: {last + 1} batch elements with {cells} cells each are too many for int64 keys: use larger "
            "voxels or a smaller range"
        )
