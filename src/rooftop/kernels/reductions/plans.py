"""Choose the kernels and launches that compute a reduction or its gradient. `choose` returns a plan and its reason,
from sizes and strides.

One kernel reduces any view of at most two kept and two reduced dimensions. A tensor whose strides allow no such view is
copied into a matrix first. `launches.py` launches what a plan lists.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch

from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.strided_rows import unit
from rooftop.kernels.reductions import tables
from rooftop.kernels.reductions.tables import AllConfig, ColumnConfig, RowConfig, SplitConfig
from rooftop.launch.strides import merged

KINDS = ("ties", "absolute_ties", "sum", "mean", "norm1", "norm2", "amax", "amin", "norm_inf", "argmax", "argmin")
"""The reductions, in the order in which `triton_kernels.py` numbers them. Only backward counts ties."""
PLACES = ("argmax", "argmin")

Direction = Literal["forward", "backward"]
Backend = Literal["reference", "whole", "partial", "last_combines", "spread", "share", "count"]
FINISHES: tuple[Backend, ...] = ("whole", "partial", "last_combines")  # a backend's index is the constant FINISH
Constants = dict[str, Any]

# ---- plans ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KernelLaunch:
    """One launch of a kernel from `triton_kernels.py`. `numbers`: the arguments that follow the tensors. `constants`:
    the launch parameters, and all constants of the kernel except ACCUMULATOR.
    """

    kernel: str
    grid: tuple[int, ...]
    numbers: tuple[float, ...]
    constants: Constants


@dataclass(frozen=True)
class ReductionPlan:
    """How a reduction or its gradient is computed.

    Attributes:
        backend: "reference" (plain PyTorch). For a reduction: "whole" (one program computes each result),
            "last_combines" (several programs share a result, and the last to finish combines their parts) or "partial"
            (a second kernel combines the parts). For a gradient: "spread" (one kernel, for 1-norm and 2-norm), "share"
            (one kernel, which also counts the ties of an extreme) or "count" (a reduction counts the ties first).
        reason: why this plan was chosen.
        launches: the launches in order, without the launches that count ties, which `ties` contains.
        accumulator: the dtype of partial results.
        copied: whether x is copied into a matrix first.
        ties: the plan of the reduction that counts ties.
    """

    backend: Backend
    reason: str
    launches: tuple[KernelLaunch, ...] = ()
    accumulator: torch.dtype = torch.float32
    copied: bool = False
    ties: ReductionPlan | None = None

    @property
    def kernels(self) -> tuple[str, ...]:
        """The names of all launched kernels, in order."""
        first = self.ties.kernels if self.ties else ()
        return first + tuple(each.kernel for each in self.launches)

    def __str__(self) -> str:
        kernels = f" ({', '.join(self.kernels)})" if self.launches else ""
        return f"{self.backend}{kernels}: {self.reason}"


# ---- views -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class View:
    """The sizes and strides of the tensor to reduce, with its dimensions merged to two kept and two reduced ones, and
    the result's strides along the two kept ones.
    """

    kept: tuple[int, int]
    kept_strides: tuple[int, int]
    out_strides: tuple[int, int]
    reduced: tuple[int, int]
    reduced_strides: tuple[int, int]

    @property
    def along(self) -> int:
        """The kind of the dimension along which the tensor is contiguous. 0: a reduced dimension; 1: a kept dimension;
        2: neither.
        """
        if self.reduced_strides[1] == 1:
            return 0
        return 1 if self.kept_strides[1] == 1 else 2

    @property
    def is_one(self) -> bool:
        """Whether the reduction has a single result, and a single stride steps through all elements."""
        return math.prod(self.kept) == 1 and self.reduced[0] == 1


def view_of(shape: Sequence[int], strides: Sequence[int], dims: Sequence[int], ordered: bool) -> View | None:
    """The `View` for reducing `dims`; None if the strides need more dimensions than a view has.

    `ordered`: the elements must be visited in ascending order of their index, as argmax and argmin require.
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
    results.sort(key=lambda each: -each[1] if each[1] else -math.inf)  # the smallest stride comes last
    results = [(1, 0, 0)] * (2 - len(results)) + results
    reduce = [(1, 0)] * (2 - len(reduce)) + reduce
    (a, b), (c, d), (e, f) = zip(*results, strict=True)
    (g, h), (i, j) = zip(*reduce, strict=True)
    return View((a, b), (c, d), (e, f), (g, h), (i, j))


def _view_of_matrix(shape: Sequence[int], dims: Sequence[int]) -> View:
    """The `View` of the matrix (kept, reduced) that kernels reduce after a tensor was copied to it."""
    columns = math.prod(shape[dim] for dim in dims)
    view = view_of((math.prod(shape) // columns, columns), (columns, 1), (1,), ordered=True)
    assert view is not None
    return view


# ---- choice ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def choose(
    kind: str, direction: Direction, shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...],
    dtype: torch.dtype, result: torch.dtype, processors: int | None, early: bool, counted: bool = True,
) -> ReductionPlan:  # fmt: skip
    """The plan for a tensor. Plans are cached, since choosing a plan takes the host longer than launching it. Call
    `choose.cache_clear()` after a change of the launch parameters in `tables`.

    Args:
        kind: one of `KINDS`.
        direction: "backward" for the gradient.
        shape, strides: shape and strides of x. The gradient has the memory layout of x if x is dense.
        dims: the reduced dimensions.
        dtype, result: dtypes of x and of the reduction.
        processors: the device's number of multiprocessors; None if the device runs no Triton kernels.
        early: whether the device supports programmatic dependent launch.
        counted: whether a counter is available, with which a program can detect that it finishes last. Captures of CUDA
            graphs may have used up all counters.
    """
    if torch.float64 in (dtype, result):
        return ReductionPlan("reference", "float64")
    if 0 in shape:
        return ReductionPlan("reference", "the input is empty")
    if processors is None:
        return ReductionPlan("reference", "no kernels for cpu")
    dtype = torch.uint8 if dtype == torch.bool else dtype  # the dtype that kernels load
    ordered = direction == "forward" and kind in PLACES
    view = view_of(shape, strides, dims, ordered)
    if view is not None:
        return _of_view(kind, direction, view, dtype, result, processors, early, counted)
    view = _view_of_matrix(shape, dims)
    plan = _of_view(kind, direction, view, dtype, result, processors, early, counted)
    copy = f"x is copied first: its strides need more than two kept or {'one' if ordered else 'two'} reduced dimensions"
    return replace(plan, copied=True, reason=f"{plan.reason}; {copy}")


def _of_view(
    kind: str, direction: Direction, view: View, dtype: torch.dtype, result: torch.dtype, processors: int, early: bool,
    counted: bool,
) -> ReductionPlan:  # fmt: skip
    if direction == "forward":
        return _reduction(kind, view, dtype, result, processors, early, counted)
    if kind in ("norm1", "norm2"):
        return ReductionPlan("spread", "a norm has no ties", (_spread(kind, view, dtype.itemsize),))
    tile = _shared_tile(view, dtype.itemsize)
    if tile is not None:
        why = f"a tile holds all {view.reduced[1]} elements of a result, and so all of its ties"
        return ReductionPlan("share", why, (_share(kind, view, *tile),))
    counting = "absolute_ties" if kind == "norm_inf" else "ties"
    ties = _reduction(counting, view, dtype, torch.float32, processors, early, counted)
    nested = "the reduced elements form two dimensions in memory"
    why = nested if view.reduced[0] > 1 else f"no tile holds all {view.reduced[1]} elements of a result"
    return ReductionPlan("count", f"{why}: ties are counted first", (_spread(kind, view, dtype.itemsize),), ties=ties)


# ---- reductions ------------------------------------------------------------------------------------------------


def _reduction(
    kind: str, view: View, dtype: torch.dtype, result: torch.dtype, processors: int, early: bool, counted: bool
) -> ReductionPlan:
    """The plan of a forward reduction of `view`. The backward of maxima and minima also uses such a plan, to count for
    each result the elements that equal it (ties).
    """
    kept, reduced, split, parameters = _tile(view, kind, dtype.itemsize)
    parameters |= _dependent_launch(parameters["EARLY"] and early)
    tiles, blocks, sizes, constants = _arguments(view, kept, reduced)
    wanted = split.programs_per_sm * processors
    splits = max(1, min(blocks, wanted // tiles))
    constants |= parameters | {"KIND": KINDS.index(kind), "IDENTITY": _identity(kind, dtype), "WHOLE_BLOCKS": False}
    if view.is_one and view.along == 0:
        constants["WHOLE_BLOCKS"] = constants["UNIT"] * dtype.itemsize < 16
    constants["SPLITS"] = min(power_of_two(splits), max(1, tables.COMBINED // kept))
    # If few splits (up to 1/8 of all) remain after the last whole step of the combination, drop them to save a step.
    if 0 < 8 * (splits % constants["SPLITS"]) <= splits:
        splits -= splits % constants["SPLITS"]
    combined: Backend = "last_combines" if split.last_combines and counted else "partial"
    backend: Backend = "whole" if splits == 1 else combined
    constants["FINISH"] = FINISHES.index(backend)
    results, count = math.prod(view.kept), float(math.prod(view.reduced))
    launches = [KernelLaunch("reduce_tiles", (tiles, splits), (*sizes, results, count), constants)]
    if backend == "partial":
        launches.append(_combination(constants, splits, results, count))
    filling = f"half of the programs ({wanted}) that fill {processors} multiprocessors"
    if blocks == 1:
        why = f"one block holds the {math.prod(view.reduced)} elements of a result"
    elif backend == "whole":
        why = f"the results' tiles ({tiles}) are more than {filling}"
    else:
        who = "the last combines" if backend == "last_combines" else "a second kernel combines"
        why = f"the results' tiles ({tiles}) are at most {filling}: {splits} programs share a tile, and {who}"
        why += "" if counted else ", since no counters are left"
    return ReductionPlan(backend, why, tuple(launches), _accumulator(dtype, kind, result))


def _combination(reduction: Constants, splits: int, results: int, count: float) -> KernelLaunch:
    """The launch that combines the partial results of a reduction. Each of the `results` results has `splits` partial
    results, one for each program that reduced a part of its elements.
    """
    kept = min(power_of_two(results), 128)
    constants = {name: reduction[name] for name in ("KIND", "IDENTITY")}
    constants |= {"KEPT": kept, "SPLITS": min(power_of_two(splits), tables.COMBINED // kept), "num_warps": 4}
    return KernelLaunch("combine_partials", (-(-results // kept),), (splits, results, count), constants)


def _tile(view: View, kind: str, element_bytes: int) -> tuple[int, int, SplitConfig, Constants]:
    """Return for the forward kernel: the number of results of a tile, the number of elements that a tile reduces at
    once for each result, how the elements of a result are split over programs, and the launch parameters.
    """
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
        table: tuple[RowConfig, ...] = tables.PLACES if kind in PLACES else tables.ROWS
        if view.along == 0 and view.reduced[0] > 1:
            table = tables.FAR_ROWS
        config = next(config for config in table if view.reduced[1] * element_bytes <= config.run_bytes)
        width, height = min(kept, config.rows), min(reduced, config.block_bytes // element_bytes)
    height = min(height, max(1, tables.LANE_ELEMENTS * 32 * config.warps // width))
    early = isinstance(config, AllConfig) and config.early
    return width, height, split, {"STAGES": config.stages, "num_warps": config.warps, "EARLY": early}


def _dependent_launch(early: bool) -> Constants:
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


def _identity(kind: str, dtype: torch.dtype) -> float:
    """The neutral element of a reduction, such as 0 for a sum."""
    if kind in ("amax", "argmax", "amin", "argmin"):
        least = kind in ("amax", "argmax")
        if dtype.is_floating_point:
            return -math.inf if least else math.inf
        limits = torch.iinfo(dtype)
        return limits.min if least else limits.max
    return 0


def _accumulator(dtype: torch.dtype, kind: str, result: torch.dtype) -> torch.dtype:
    """The accumulator's dtype: float32 if the input or the result is floating point, and int64 for sums of integers.
    For the maximum or minimum of integers, the accumulator is int64 if the elements are int64, and otherwise int32.
    """
    if dtype.is_floating_point or result.is_floating_point:
        return torch.float32
    return torch.int64 if kind == "sum" or dtype == torch.int64 else torch.int32


# ---- gradients -------------------------------------------------------------------------------------------------


def _spread(kind: str, view: View, element_bytes: int) -> KernelLaunch:
    """The launch that computes the gradient tile by tile from results, their gradients and, for extremes, the ties."""
    kept, reduced, _, _ = _tile(view, kind, element_bytes)
    elements = tables.GRADIENT_BLOCK_BYTES // element_bytes
    reduced = min(reduced, max(1, elements // kept) if view.along == 1 else elements)
    kept = min(kept, max(1, elements // reduced))
    tiles, blocks, sizes, constants = _arguments(view, kept, reduced)
    constants |= {"KIND": KINDS.index(kind), "num_warps": tables.GRADIENT_WARPS}
    return KernelLaunch("spread_gradient", (tiles * blocks,), sizes, constants)


def _shared_tile(view: View, element_bytes: int) -> tuple[int, int] | None:
    """The size (number of results, number of elements for each result) of a tile that holds all elements of x that are
    reduced to its results. None if such a tile is too large.
    """
    reduced = power_of_two(view.reduced[1])
    least = tables.SHARE_WIDTH_BYTES if view.along == 1 else element_bytes
    kept = min(power_of_two(view.kept[1]), max(least, tables.SHARE_BLOCK_BYTES // reduced) // element_bytes)
    return None if view.reduced[0] > 1 or kept * reduced > tables.SHARE_ELEMENTS else (kept, reduced)


def _share(kind: str, view: View, kept: int, reduced: int) -> KernelLaunch:
    """The launch that computes the gradient of a maximum or minimum. Each tile holds all elements of x that are reduced
    to its results, so it can count the ties itself.
    """
    tiles, _, sizes, constants = _arguments(view, kept, reduced)
    warps = max(tables.SHARE_WARPS, kept * reduced // (tables.LANE_ELEMENTS * 32))
    constants |= {"KIND": KINDS.index(kind), "num_warps": warps}
    return KernelLaunch("share_gradient", (tiles,), sizes, constants)


# ---- both ------------------------------------------------------------------------------------------------------


def _arguments(view: View, tile_kept: int, tile_reduced: int) -> tuple[int, int, tuple[int, ...], Constants]:
    """Return the number of tiles along the kept dimensions, the number of blocks along the reduced dimensions, and the
    arguments and constants of a kernel whose tiles have tile_kept x tile_reduced elements.
    """
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
