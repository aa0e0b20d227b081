"""How the kernels of reductions are launched: views of tensors, parameters as tables, plans that are kept.

`reduce_into` and `spread` serve the operators in `reductions.py`. One kernel makes results from any view of at most two
kept and two reduced dimensions; what strides do not allow to be seen so is copied into a matrix first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.strided_rows import unit
from rooftop.kernels.reductions import tables
from rooftop.kernels.reductions.tables import AllConfig, ColumnConfig, RowConfig, SplitConfig
from rooftop.launch.counters import counters
from rooftop.launch.strides import merged
from rooftop.launch.triton_launch import launch, launches_early, processors

KINDS = ("ties", "absolute_ties", "sum", "mean", "norm1", "norm2", "amax", "amin", "norm_inf", "argmax", "argmin")
"""What is computed, in the order in which `triton_kernels.py` numbers it; ties are what backward counts."""

Constants = dict[str, Any]


# ---- views -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """A tensor as (far kept, kept, far reduced, reduced): sizes and strides, and the strides of the results."""

    kept: tuple[int, int]
    kept_strides: tuple[int, int]
    out_strides: tuple[int, int]
    reduced: tuple[int, int]
    reduced_strides: tuple[int, int]

    @property
    def along(self) -> int:
        """The direction in which memory runs: 0 what is reduced, 1 what is kept, 2 neither."""
        if self.reduced_strides[1] == 1:
            return 0
        return 1 if self.kept_strides[1] == 1 else 2

    @property
    def is_one(self) -> bool:
        """Whether it is one result, of elements at one stride."""
        return math.prod(self.kept) == 1 and self.reduced[0] == 1


@lru_cache(maxsize=4096)
def view_of(shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], ordered: bool) -> View | None:
    """The view that reduces `dims`; None where strides need more dimensions than it has.

    `ordered`: elements must be met in their order, as for the place of an extreme.
    """
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    order = list(dims) if ordered else sorted(dims, key=lambda dim: -strides[dim] if strides[dim] else -math.inf)
    keep, reduce = (
        [(size, step) for size, (step,) in merged([shape[dim] for dim in some], [strides[dim] for dim in some])]
        for some in (kept, order)
    )
    if len(keep) > 2 or len(reduce) > (1 if ordered else 2):
        return None
    results = [(*each, math.prod(size for size, _ in keep[i + 1 :])) for i, each in enumerate(keep)]
    results.sort(key=lambda each: -each[1] if each[1] else -math.inf)  # memory runs along the near one
    results = [(1, 0, 0)] * (2 - len(results)) + results
    reduce = [(1, 0)] * (2 - len(reduce)) + reduce
    (a, b), (c, d), (e, f) = zip(*results, strict=True)
    (g, h), (i, j) = zip(*reduce, strict=True)
    return View((a, b), (c, d), (e, f), (g, h), (i, j))


def viewed(x: Tensor, dims: Sequence[int], ordered: bool) -> tuple[Tensor, View]:
    """x and its view, copied into a matrix where its strides allow none."""
    view = view_of(tuple(x.shape), x.stride(), tuple(dims), ordered)
    if view is None:
        x = _as_matrix(x, dims)
        view = view_of(tuple(x.shape), x.stride(), (1,), ordered)
        assert view is not None
    return x, view


def _as_matrix(x: Tensor, dims: Sequence[int]) -> Tensor:
    """A copy (kept, reduced)."""
    order = matrix_order(x, dims)
    columns = math.prod(x.shape[dim] for dim in dims)
    return x.permute(order).contiguous().reshape(-1, columns)


def matrix_order(x: Tensor, dims: Sequence[int]) -> list[int]:
    """All dimensions, those to reduce last."""
    return [dim for dim in range(x.dim()) if dim not in dims] + list(dims)


# ---- plans -----------------------------------------------------------------------------------------------------


def _tile(view: View, kind: str, element_bytes: int) -> tuple[int, int, SplitConfig, Constants]:
    """(kept, reduced, split, launch parameters) of a tile of the forward kernel."""
    kept, reduced = (power_of_two(sizes[1]) for sizes in (view.kept, view.reduced))
    total = math.prod(view.reduced) * element_bytes
    config: RowConfig | ColumnConfig | AllConfig
    split = tables.SPLIT
    if view.along == 1:
        config, split = tables.COLUMNS, tables.COLUMNS.split
        elements = config.tile_bytes // element_bytes
        height = min(reduced, elements // min(kept, config.width_bytes // element_bytes))
        width = min(kept, elements // height)
    elif view.is_one:
        config = next(config for config in tables.ALL if total <= config.total_bytes)
        width, height, split = 1, min(reduced, config.block_bytes // element_bytes), config.split
    else:
        table: tuple[RowConfig, ...] = tables.PLACES if kind in ("argmax", "argmin") else tables.ROWS
        if view.along == 0 and view.reduced[0] > 1:
            table = tables.FAR_ROWS
        config = next(config for config in table if view.reduced[1] * element_bytes <= config.run_bytes)
        width, height = min(kept, config.rows), min(reduced, config.block_bytes // element_bytes)
    height = min(height, max(1, tables.LANE_ELEMENTS * 32 * config.warps // width))
    early = isinstance(config, AllConfig) and config.early
    return width, height, split, {"STAGES": config.stages, "num_warps": config.warps, "EARLY": early}


def _arguments(view: View, tile_kept: int, tile_reduced: int) -> tuple[int, int, tuple[int, ...], Constants]:
    """(tiles of kept elements, blocks of reduced ones, arguments, constants) of a kernel."""
    (far, kept), (far_stride, stride), (far_out, out) = view.kept, view.kept_strides, view.out_strides
    (far_reduced, reduced), (far_reduced_stride, reduced_stride) = view.reduced, view.reduced_strides
    tiles, blocks = far * -(-kept // tile_kept), far_reduced * -(-reduced // tile_reduced)
    group = 1
    if view.along == 0:
        group = unit(reduced, far_reduced_stride, stride, far_stride)
        reduced = reduced // group
    elif view.along == 1:
        group = unit(kept, far_reduced_stride, reduced_stride, far_stride)
        kept, reduced_stride = kept // group, reduced_stride // group
    if view.along != 1:
        stride = stride // group
    sizes = (kept, stride, out, far_stride // group, far_out)
    sizes += (reduced, reduced_stride, far_reduced, far_reduced_stride // group)  # type: ignore[assignment]
    constants = {"ALONG": view.along, "UNIT": group, "NESTED": far_reduced > 1}
    return tiles, blocks, sizes, constants | {"KEPT": tile_kept, "REDUCED": tile_reduced}


def _identity(kind: str, dtype: torch.dtype) -> float:
    """What changes no result."""
    if kind in ("amax", "argmax", "amin", "argmin"):
        least = kind in ("amax", "argmax")
        if dtype.is_floating_point:
            return -math.inf if least else math.inf
        limits = torch.iinfo(dtype)
        return limits.min if least else limits.max
    return 0


def _accumulator(dtype: torch.dtype, kind: str, result: torch.dtype) -> torch.dtype:
    """float32; of integers int64 for sums, and what holds them for extremes."""
    if dtype.is_floating_point or result.is_floating_point:
        return torch.float32
    return torch.int64 if kind == "sum" or dtype == torch.int64 else torch.int32


def _dependent_launch(early: bool) -> Constants:
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@dataclass(frozen=True)
class Plan:
    """How one reduction is launched."""

    tiles: int
    splits: int
    sizes: tuple[int, ...]
    count: float
    constants: Constants
    accumulator: torch.dtype
    last_combines: bool


@lru_cache(maxsize=4096)
def _plan(
    view: View, kind: str, dtype: torch.dtype, result: torch.dtype, processors: int, launches_early: bool
) -> Plan:
    """Of elements of `dtype`. Kept, since it takes the host longer than the launch: clear it to change the tables."""
    from rooftop.kernels.reductions import triton_kernels as kernels

    kept, reduced, split, parameters = _tile(view, kind, dtype.itemsize)
    parameters |= _dependent_launch(parameters["EARLY"] and launches_early)
    tiles, blocks, sizes, constants = _arguments(view, kept, reduced)
    splits = max(1, min(blocks, split.programs_per_sm * processors // tiles))
    accumulator = _accumulator(dtype, kind, result)
    constants |= {"KIND": KINDS.index(kind), "ACCUMULATOR": kernels.ACCUMULATORS[str(accumulator)]}
    constants |= {"IDENTITY": _identity(kind, dtype), "WHOLE_BLOCKS": False}
    if view.is_one and view.along == 0:
        constants["WHOLE_BLOCKS"] = constants["UNIT"] * dtype.itemsize < 16
    constants["SPLITS"] = min(power_of_two(splits), max(1, tables.COMBINED // kept))
    if 0 < 8 * (splits % constants["SPLITS"]) <= splits:  # few are left for one more step of who combines
        splits -= splits % constants["SPLITS"]
    count = float(math.prod(view.reduced))
    return Plan(tiles, splits, sizes, count, constants | parameters, accumulator, split.last_combines)


# ---- launch ------------------------------------------------------------------------------------------------------


def _bytes_of(x: Tensor) -> Tensor:
    """Booleans as the bytes that they are, which kernels load."""
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def reduce_into(
    out: Tensor, x: Tensor, kind: str, view: View, dtype: torch.dtype, reference: Tensor | None = None
) -> None:
    """The reduction of a view of x, into a contiguous tensor; `reference`: what ties are counted of."""
    from rooftop.kernels.reductions import triton_kernels as kernels

    x, out = _bytes_of(x), _bytes_of(out)
    plan = _plan(view, kind, x.dtype, dtype, processors(x), launches_early(x.device))
    results, splits = out.numel(), plan.splits
    partials, places, counter = out, out, None
    if splits > 1:
        partials = torch.empty((splits, results), dtype=plan.accumulator, device=x.device)
        if kind in ("argmax", "argmin"):
            places = torch.empty((splits, results), dtype=torch.int64, device=x.device)
        counter = counters(x.device, plan.tiles) if plan.last_combines else None
    finish = 0 if splits == 1 else 1 if counter is None else 2
    memory = (x, out if reference is None else reference, out, partials, places, out if counter is None else counter)
    arguments = (*memory, *plan.sizes, results, plan.count)
    launch(kernels.reduce_tiles, (plan.tiles, splits), x.device, *arguments, **plan.constants, FINISH=finish)
    if finish == 1:
        kept = min(power_of_two(results), 128)
        constants = {name: plan.constants[name] for name in ("KIND", "ACCUMULATOR", "IDENTITY")}
        constants |= {"KEPT": kept, "SPLITS": min(power_of_two(splits), tables.COMBINED // kept), "num_warps": 4}
        arguments = (partials, places, out, splits, results, plan.count)
        launch(kernels.combine_partials, (-(-results // kept),), x.device, *arguments, **constants)


def spread(dx: Tensor, dy: Tensor, x: Tensor, y: Tensor, kind: str, view: View) -> None:
    """dx in the memory layout of x."""
    from rooftop.kernels.reductions import triton_kernels as kernels

    ties = y
    if kind not in ("norm1", "norm2"):
        tile = _shared_tile(view, x.element_size())
        if tile is not None:
            _share(dx, dy, x, y, kind, view, *tile)
            return
        ties = torch.empty(y.shape, dtype=torch.float32, device=x.device)
        reduce_into(ties, x, "absolute_ties" if kind == "norm_inf" else "ties", view, torch.float32, reference=y)
    kept, reduced, _, _ = _tile(view, kind, x.element_size())
    elements = tables.GRADIENT_BLOCK_BYTES // x.element_size()
    reduced = min(reduced, max(1, elements // kept) if view.along == 1 else elements)
    kept = min(kept, max(1, elements // reduced))
    tiles, blocks, sizes, constants = _arguments(view, kept, reduced)
    constants |= {"KIND": KINDS.index(kind), "num_warps": tables.GRADIENT_WARPS}
    launch(kernels.spread_gradient, (tiles * blocks,), x.device, x, y, dy, ties, dx, *sizes, **constants)


def _shared_tile(view: View, element_bytes: int) -> tuple[int, int] | None:
    """(kept, reduced) of a tile with all that its extremes are of; None where that is too much."""
    reduced = power_of_two(view.reduced[1])
    least = tables.SHARE_WIDTH_BYTES if view.along == 1 else element_bytes
    kept = min(power_of_two(view.kept[1]), max(least, tables.SHARE_BLOCK_BYTES // reduced) // element_bytes)
    return None if view.reduced[0] > 1 or kept * reduced > tables.SHARE_ELEMENTS else (kept, reduced)


def _share(dx: Tensor, dy: Tensor, x: Tensor, y: Tensor, kind: str, view: View, kept: int, reduced: int) -> None:
    """`spread` of extremes, with one kernel."""
    from rooftop.kernels.reductions import triton_kernels as kernels

    tiles, _, sizes, constants = _arguments(view, kept, reduced)
    warps = max(tables.SHARE_WARPS, kept * reduced // (tables.LANE_ELEMENTS * 32))
    constants |= {"KIND": KINDS.index(kind), "num_warps": warps}
    launch(kernels.share_gradient, (tiles,), x.device, x, y, dy, dx, *sizes, **constants)
