"""Reductions: sum, mean, amax, amin, argmax, argmin and norm over any dimensions, or all.

Bound by memory at every size: the input is read once; backward (of all but sum and mean, whose gradient is a view)
reads it once or, of extremes, twice, and writes its gradient. One kernel makes results from any view of at most two
kept and two reduced dimensions, merged as far as strides allow. Results too few to fill a GPU, of which the sum of
everything is the extreme, are split over programs, whose partial results are combined by the last program to arrive (as
threadFenceReduction of the CUDA samples) or by a second kernel. Sums are float32, of integers int64. Deterministic: the
order of additions depends on nothing but sizes, strides and the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.tiles import merged, unit
from rooftop.launch.counters import counters
from rooftop.launch.operators import differentiable, no_second_derivative, no_tangents, operator
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

KINDS = ("ties", "absolute_ties", "sum", "mean", "norm1", "norm2", "amax", "amin", "norm_inf", "argmax", "argmin")
"""What is computed, in the order in which `reduction_kernels.py` numbers it; ties are what backward counts."""

ORDERS = {"norm1": 1.0, "norm2": 2.0, "norm_inf": math.inf}
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# ---- reference -------------------------------------------------------------------------------------------------


def reduce_reference(x: Tensor, kind: str, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    """The reduction of x over `dims` in PyTorch; `argmax` and `argmin` over one dimension or all."""
    if kind in ORDERS:
        return torch.linalg.vector_norm(x, ORDERS[kind], _or_all(x, dims), keepdim, dtype=dtype)
    function: Callable[..., Tensor] = getattr(torch, kind)
    if kind in ("sum", "mean"):
        return function(x, _or_all(x, dims), keepdim, dtype=dtype)
    if kind in ("amax", "amin"):
        y = function(x, dims, keepdim)
        return y.clone() if x.dim() == 0 else y  # PyTorch's may be x itself
    x = x.to(torch.uint8) if x.dtype == torch.bool else x  # of which PyTorch finds no places
    return function(x, dims[0] if len(dims) == 1 else None, keepdim)


def reduce_backward_reference(dy: Tensor, x: Tensor, y: Tensor, kind: str, dims: Sequence[int]) -> Tensor:
    """dx of the extremes, whose ties share the gradient equally, and of norms; y and dy as `reduce` gave them."""
    inside = torch.float64 if x.dtype == torch.float64 else torch.float32
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    value, result, gradient = x.to(inside), y.reshape(shape).to(inside), dy.reshape(shape).to(inside)
    if kind == "norm1":
        dx = value.sign() * gradient
    elif kind == "norm2":
        dx = (gradient * (value / result)).masked_fill(result == 0, 0.0)
    else:
        equal = (value.abs() if kind == "norm_inf" else value) == result
        share = gradient / equal.sum(_or_all(x, dims), keepdim=True)
        dx = torch.where(equal, value.sign() * share, 0.0) if kind == "norm_inf" else equal * share
    return torch.empty_like(x).copy_(dx)


def _or_all(x: Tensor, dims: Sequence[int]) -> list[int] | None:
    return list(dims) if x.dim() else None


# ---- launch parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowConfig:
    """Where what is reduced is contiguous, in runs of up to `run_bytes`: results of a tile, bytes of each.
    `stages`: tiles that are fetched ahead through shared memory; 1 is none."""

    run_bytes: int
    rows: int
    block_bytes: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class ColumnConfig:
    """Where what is kept is contiguous: bytes of it in a tile (more where little is reduced), bytes of the tile."""

    width_bytes: int
    tile_bytes: int
    warps: int
    stages: int = 1


@dataclass(frozen=True)
class SplitConfig:
    """How many programs an SM the blocks of a result are spread over, and whether the last one to arrive combines."""

    programs_per_sm: int
    last_combines: bool


@dataclass(frozen=True)
class AllConfig:
    """One result of up to `total_bytes` in contiguous memory."""

    total_bytes: int
    block_bytes: int
    warps: int
    split: SplitConfig
    stages: int = 1


ANY_BYTES = 1 << 62
# The fastest of those measured on an H200: ROWS in half precision of 32, 128, 2048 and 16384 bytes, PLACES (where an
# extreme is: two numbers an element) of 256512 bytes, COLUMNS of sums over the first and a middle dimension (twice the
# width is slower in the middle), ALL of 256 KiB, 4 MiB, 64 MiB and 1 GiB in float32.
ROWS = (
    *(RowConfig(64, 128, 64, 4), RowConfig(128, 32, 128, 2), RowConfig(256, 32, 256, 4), RowConfig(1024, 8, 1024, 4)),
    *(RowConfig(4096, 2, 4096, 4), RowConfig(ANY_BYTES, 1, 16384, 8)),
)
PLACES = (*ROWS[:-1], RowConfig(ANY_BYTES, 1, 8192, 8))
COLUMNS = ColumnConfig(width_bytes=256, tile_bytes=16384, warps=8)
SPLIT = SplitConfig(programs_per_sm=4, last_combines=True)
ALL = (
    AllConfig(1 << 15, 32768, 16, SplitConfig(1, True)),
    AllConfig(1 << 23, 8192, 8, SplitConfig(4, True)),
    AllConfig(1 << 27, 16384, 8, SplitConfig(8, True)),
    AllConfig(ANY_BYTES, 16384, 8, SplitConfig(4, True), stages=3),
)
GRADIENT_BLOCK_BYTES, GRADIENT_WARPS = 8192, 4  # of a tile of x

LANE_ELEMENTS = 32  # of a thread, at most: of small integers a tile would have more than registers can add up
COMBINED = 4096  # partial results that a program of four warps and more holds at once

Constants = dict[str, Any]


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


@lru_cache(maxsize=4096)
def view_of(shape: tuple[int, ...], strides: tuple[int, ...], dims: tuple[int, ...], ordered: bool) -> View | None:
    """The view that reduces `dims`; None where strides need more dimensions than it has.

    `ordered`: elements must be met in their order, as for the place of an extreme.
    """
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    order = list(dims) if ordered else sorted(dims, key=lambda dim: -strides[dim] if strides[dim] else -math.inf)
    keep = merged([shape[dim] for dim in kept], [strides[dim] for dim in kept])
    reduce = merged([shape[dim] for dim in order], [strides[dim] for dim in order])
    if len(keep) > 2 or len(reduce) > (1 if ordered else 2):
        return None
    results = [(*each, math.prod(size for size, _ in keep[i + 1 :])) for i, each in enumerate(keep)]
    results.sort(key=lambda each: -each[1] if each[1] else -math.inf)  # memory runs along the near one
    results = [(1, 0, 0)] * (2 - len(results)) + results
    reduce = [(1, 0)] * (2 - len(reduce)) + reduce
    (a, b), (c, d), (e, f) = zip(*results, strict=True)
    (g, h), (i, j) = zip(*reduce, strict=True)
    return View((a, b), (c, d), (e, f), (g, h), (i, j))


def _power_above(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def _tile(view: View, kind: str, element_bytes: int) -> tuple[int, int, SplitConfig, Constants]:
    """(kept, reduced, split, launch parameters) of a tile of the forward kernel."""
    kept, reduced = (_power_above(sizes[1]) for sizes in (view.kept, view.reduced))
    total = math.prod(view.reduced) * element_bytes
    config: RowConfig | ColumnConfig | AllConfig
    split = SPLIT
    if view.along == 1:
        config = COLUMNS
        elements = config.tile_bytes // element_bytes
        height = min(reduced, elements // min(kept, config.width_bytes // element_bytes))
        width = min(kept, elements // height)
    elif math.prod(view.kept) == 1 and view.reduced[0] == 1:
        config = next(config for config in ALL if total <= config.total_bytes)
        width, height, split = 1, min(reduced, config.block_bytes // element_bytes), config.split
    else:
        table = PLACES if kind in ("argmax", "argmin") else ROWS
        config = next(config for config in table if view.reduced[1] * element_bytes <= config.run_bytes)
        width, height = min(kept, config.rows), min(reduced, config.block_bytes // element_bytes)
    height = min(height, max(1, LANE_ELEMENTS * 32 * config.warps // width))
    return width, height, split, {"STAGES": config.stages, "num_warps": config.warps}


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


# ---- implementations -------------------------------------------------------------------------------------------


def _is_reference(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether PyTorch does it: on the CPU, in float64, and of nothing."""
    return torch.float64 in (x.dtype, dtype) or x.numel() == 0 or (x.device.type == "cpu" and not INTERPRETED)


def _result_shape(x: Tensor, dims: Sequence[int], keepdim: bool) -> list[int]:
    sizes = enumerate(x.shape)
    if keepdim:
        return [1 if dim in dims else size for dim, size in sizes]
    return [size for dim, size in sizes if dim not in dims]


def _viewed(x: Tensor, dims: Sequence[int], ordered: bool) -> tuple[Tensor, View]:
    """x and its view, copied into a matrix where its strides allow none."""
    view = view_of(tuple(x.shape), x.stride(), tuple(dims), ordered)
    if view is None:
        x = _as_matrix(x, dims)
        view = view_of(tuple(x.shape), x.stride(), (1,), ordered)
        assert view is not None
    return x, view


def _as_matrix(x: Tensor, dims: Sequence[int]) -> Tensor:
    """A copy (kept, reduced)."""
    order = _matrix_order(x, dims)
    columns = math.prod(x.shape[dim] for dim in dims)
    return x.permute(order).contiguous().reshape(-1, columns)


def _matrix_order(x: Tensor, dims: Sequence[int]) -> list[int]:
    return [dim for dim in range(x.dim()) if dim not in dims] + list(dims)


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
def _plan(view: View, kind: str, dtype: torch.dtype, result: torch.dtype, processors: int) -> Plan:
    """Of elements of `dtype`. Kept, since it takes the host longer than the launch: clear it to change the tables."""
    from rooftop.kernels import reduction_kernels as kernels

    kept, reduced, split, parameters = _tile(view, kind, dtype.itemsize)
    tiles, blocks, sizes, constants = _arguments(view, kept, reduced)
    splits = max(1, min(blocks, split.programs_per_sm * processors // tiles))
    accumulator = _accumulator(dtype, kind, result)
    constants |= {"KIND": KINDS.index(kind), "ACCUMULATOR": kernels.ACCUMULATORS[str(accumulator)]}
    constants |= {"IDENTITY": _identity(kind, dtype), "SPLITS": min(_power_above(splits), max(1, COMBINED // kept))}
    count = float(math.prod(view.reduced))
    return Plan(tiles, splits, sizes, count, constants | parameters, accumulator, split.last_combines)


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else x


def _reduce_into(
    out: Tensor, x: Tensor, kind: str, view: View, dtype: torch.dtype, reference: Tensor | None = None
) -> None:
    """The reduction of a view of x, into a contiguous tensor; `reference`: what ties are counted of."""
    from rooftop.kernels import reduction_kernels as kernels

    x, out = _bytes_of(x), _bytes_of(out)
    plan = _plan(view, kind, x.dtype, dtype, processors(x))
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
        kept = min(_power_above(results), 128)
        constants = {name: plan.constants[name] for name in ("KIND", "ACCUMULATOR", "IDENTITY")}
        constants |= {"KEPT": kept, "SPLITS": min(_power_above(splits), COMBINED // kept), "num_warps": 4}
        arguments = (partials, places, out, splits, results, plan.count)
        launch(kernels.combine_partials, (-(-results // kept),), x.device, *arguments, **constants)


def _forward(x: Tensor, kind: str, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    if _is_reference(x, dtype):
        return reduce_reference(x, kind, dims, keepdim, dtype)
    require_triton()
    out = torch.empty(_result_shape(x, dims, keepdim), dtype=dtype, device=x.device)
    table, view = _viewed(x, dims, ordered=kind in ("argmax", "argmin"))
    _reduce_into(out, table, kind, view, dtype)
    return out


def _backward(dy: Tensor, x: Tensor, y: Tensor, kind: str, dims: list[int]) -> Tensor:
    if _is_reference(x, y.dtype):
        return reduce_backward_reference(dy, x, y, kind, dims)
    require_triton()
    dx = torch.empty_like(x)
    source = x if x.stride() == dx.stride() else torch.empty_like(x).copy_(x)
    view = view_of(tuple(x.shape), source.stride(), tuple(dims), False)
    if view is not None:
        _spread(dx, dy.contiguous(), source, y.contiguous(), kind, view)
        return dx
    source, view = _viewed(x, dims, ordered=False)
    matrix = torch.empty_like(source)
    _spread(matrix, dy.contiguous(), source, y.contiguous(), kind, view)
    order = _matrix_order(x, dims)
    dx.permute(order).copy_(matrix.view([x.shape[dim] for dim in order]))
    return dx


def _spread(dx: Tensor, dy: Tensor, x: Tensor, y: Tensor, kind: str, view: View) -> None:
    """dx in the memory layout of x."""
    from rooftop.kernels import reduction_kernels as kernels

    ties = y
    if not kind.startswith("norm") or kind == "norm_inf":
        ties = torch.empty(y.shape, dtype=torch.float32, device=x.device)
        _reduce_into(ties, x, "absolute_ties" if kind == "norm_inf" else "ties", view, torch.float32, reference=y)
    kept, reduced, _, _ = _tile(view, kind, x.element_size())
    elements = GRADIENT_BLOCK_BYTES // x.element_size()
    reduced = min(reduced, max(1, elements // kept) if view.along == 1 else elements)
    kept = min(kept, max(1, elements // reduced))
    tiles, blocks, sizes, constants = _arguments(view, kept, reduced)
    constants |= {"KIND": KINDS.index(kind), "num_warps": GRADIENT_WARPS}
    launch(kernels.spread_gradient, (tiles * blocks,), x.device, x, y, dy, ties, dx, *sizes, **constants)


# ---- registration ----------------------------------------------------------------------------------------------


@operator("reduce")
def _reduce(x: Tensor, kind: str, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return _forward(x, kind, dims, keepdim, dtype)


@torch.library.register_fake("rooftop::reduce")
def _(x: Tensor, kind: str, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(_result_shape(x, dims, keepdim), dtype=dtype)


@operator("reduce_backward")
def _reduce_backward(dy: Tensor, x: Tensor, y: Tensor, kind: str, dims: list[int]) -> Tensor:
    return _backward(dy, x, y, kind, dims)


@torch.library.register_fake("rooftop::reduce_backward")
def _(dy: Tensor, x: Tensor, y: Tensor, kind: str, dims: list[int]) -> Tensor:
    return torch.empty_like(x)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    x, kind, dims, _, _ = inputs
    ctx.kind, ctx.dims, ctx.shape, ctx.x_dtype = kind, dims, x.shape, x.dtype  # type: ignore[attr-defined]
    if kind not in ("sum", "mean"):
        ctx.save_for_backward(x, output)


def _differentiate(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor | None, ...]:
    kind, dims, shape = ctx.kind, ctx.dims, ctx.shape  # type: ignore[attr-defined]
    if kind not in ("sum", "mean"):
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        return _reduce_backward(dy, x, y, kind, dims), None, None, None, None
    if kind == "mean":
        dy = dy / math.prod(shape[dim] for dim in dims)
    kept = [1 if dim in dims else size for dim, size in enumerate(shape)]
    dx = dy.to(ctx.x_dtype).reshape(kept).expand(shape)  # type: ignore[attr-defined]
    return dx, None, None, None, None


differentiable("reduce", _differentiate, _save)
differentiable(
    "reduce_backward",
    no_second_derivative("this reduction", "torch.amax, torch.amin or torch.linalg.vector_norm"),
)


@cost_of("rooftop::reduce")
def _forward_cost(call: Call) -> Cost:
    """An addition or comparison of each element, of norms a product or absolute value too; the mean's division and the
    root of each result."""
    x, kind = call["x"], call["kind"]
    flops = (2 if kind in ORDERS else 1) * x.numel() + (kind in ("mean", "norm2")) * call.out.numel()
    return Cost(distinct_bytes([x]), distinct_bytes([call.out]), {precision_of(x.dtype): flops})


@cost_of("rooftop::reduce_backward")
def _backward_cost(call: Call) -> Cost:
    """Of extremes comparison and count, comparison and choice; of the 2-norm division and product, of the 1-norm sign
    and product."""
    dy, x, y = call["dy"], call["x"], call["y"]
    flops = (2 if call["kind"] in ("norm1", "norm2") else 4) * x.numel()
    return Cost(distinct_bytes([dy, x, y]), distinct_bytes([call.out]), {precision_of(x.dtype): flops})


# ---- public ----------------------------------------------------------------------------------------------------

Dims = int | Sequence[int] | None


def sum(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over some dimensions or all, as `torch.sum`.

    Args:
        input: any shape and strides; bfloat16, float16, float32, float64, booleans or integers of up to 64 bits.
        dim: one dimension or several; None or () is all. A tensor whose strides need more than two kept or two reduced
            dimensions is copied first.
        keepdim: reduced dimensions stay, of size 1.
        dtype: to which elements are cast before they are added.

    Returns:
        Of the input's dtype, of booleans and integers int64; 0 of nothing. Added up in float32 (float64 for float64),
        the same bits each time. Under autocast on a GPU float32, as PyTorch's.

    Raises:
        TypeError: no dense tensor, or dtypes that do not fit.
        ValueError: dimensions that do not fit.
        NotImplementedError: forward-mode differentiation.
    """
    _check("sum", input, (*FLOATS, *INTEGERS), dtype, (*FLOATS, *INTEGERS[1:]))
    dims = _dims("sum", input, dim)
    dtype = dtype or _autocast_dtype(input)
    result = dtype or (input.dtype if input.dtype.is_floating_point else torch.int64)
    return _apply("sum", "torch.sum", _cast(input, result), "sum", dims, keepdim, result)


def mean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean over some dimensions or all, as `torch.mean`; NaN of nothing.

    Arguments, results and errors as of `sum`; an input of integers needs a `dtype`.
    """
    _check("mean", input, FLOATS if dtype is None else (*FLOATS, *INTEGERS), dtype, FLOATS)
    result = dtype or input.dtype
    return _apply("mean", "torch.mean", _cast(input, result), "mean", _dims("mean", input, dim), keepdim, result)


def amax(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The maximum over some dimensions or all, as `torch.amax`: NaN where there is one.

    Elements that tie share the gradient equally. Arguments as of `sum`; of the input's dtype.

    Raises:
        TypeError, ValueError: as `sum`; the maximum of nothing.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    return _extreme("amax", input, _dims("amax", input, dim), keepdim)


def amin(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The minimum over some dimensions or all, as `torch.amin`; see `amax`."""
    return _extreme("amin", input, _dims("amin", input, dim), keepdim)


def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the maximum is along a dimension, or (None) in the flattened tensor, as `torch.argmax`.

    Args:
        input: as of `sum`.
        dim: one dimension or all. All of a tensor that is not contiguous costs a copy.
        keepdim: reduced dimensions stay, of size 1.

    Returns:
        int64. Of several the first, and NaN before any number.

    Raises:
        TypeError, ValueError: as `sum`; the maximum of nothing.
    """
    return _extreme("argmax", input, _one_dim("argmax", input, dim), keepdim)


def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the minimum is, as `torch.argmin`; see `argmax`."""
    return _extreme("argmin", input, _one_dim("argmin", input, dim), keepdim)


def norm(
    input: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The vector norm over some dimensions or all, as `torch.linalg.vector_norm`.

    Args:
        input: bfloat16, float16, float32 or float64, any shape and strides.
        ord: 1 (sum of absolute values), 2 (root of the sum of squares, which is not scaled: in float32 it overflows
            past 3.4e38) or infinity (the largest absolute value).
        dim, keepdim: as of `sum`.
        dtype: to which elements are cast first; not narrower than the input's.

    Returns:
        As `sum`. Of elements that tie for the largest each has an equal share of the gradient.

    Raises:
        TypeError, ValueError: as `sum`; another order; the largest of nothing.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    _check("norm", input, FLOATS, dtype, FLOATS)
    kind = next((kind for kind, order in ORDERS.items() if ord == order), None)
    if kind is None:
        raise ValueError(f"norm: ord must be 1, 2 or infinity, got {ord!r}: use torch.linalg.vector_norm")
    if dtype is not None and torch.promote_types(dtype, input.dtype) != dtype:
        raise TypeError(f"norm: dtype {dtype} is narrower than {input.dtype} of input")
    dims = _dims("norm", input, dim)
    if kind == "norm_inf":
        _refuse_nothing("norm", input, dims)
    result = dtype or _autocast_dtype(input) or input.dtype
    return _apply("norm", "torch.linalg.vector_norm", _cast(input, result), kind, dims, keepdim, result)


def _extreme(name: str, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    _refuse_nothing(name, x, dims)
    if name in ("argmax", "argmin"):
        return _reduce(x.detach(), name, dims, bool(keepdim), torch.int64)
    return _apply(name, f"torch.{name}", x, name, dims, keepdim, x.dtype)


def _apply(name: str, instead: str, x: Tensor, kind: str, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    no_tangents(name, x, instead=instead)
    y: Tensor = _reduce(x, kind, dims, bool(keepdim), dtype)
    return y


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype, unless the kernel widens what it loads."""
    halves = dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    integers = dtype == torch.int64 and x.dtype in INTEGERS
    return x if halves or integers else x.to(dtype)


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """float32 where PyTorch's autocast sums in it: half precision on a GPU."""
    if x.device.type != "cuda" or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    return torch.float32 if torch.is_autocast_enabled("cuda") else None


def _check(
    name: str,
    x: Tensor,
    dtypes: tuple[torch.dtype, ...] = (*FLOATS, *INTEGERS),
    dtype: torch.dtype | None = None,
    results: tuple[torch.dtype, ...] = (),
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: input must be a tensor, got {type(x).__name__}")
    if x.layout != torch.strided:
        raise TypeError(f"{name}: input must be dense, got layout {x.layout}: use .to_dense()")
    for argument, given, allowed in (("input", x.dtype, dtypes), ("dtype", dtype, results)):
        if given is not None and given not in allowed:
            names = ", ".join(str(each).removeprefix("torch.") for each in allowed)
            more = "; or give dtype" if name == "mean" and argument == "input" else ""
            raise TypeError(f"{name}: {argument} must be one of {names}, got {given}{more}")


def _dims(name: str, x: Tensor, dim: Dims) -> list[int]:
    """Dimensions to reduce, not negative, in order; of a tensor without dimensions none."""
    _check(name, x)
    if dim is not None and not isinstance(dim, int | Sequence):
        raise TypeError(f"{name}: dim must be an int, several or None, got {dim!r}")
    given = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    count = max(1, x.dim())
    for each in given:
        if not isinstance(each, int) or isinstance(each, bool):
            raise TypeError(f"{name}: dim must be an int, several or None, got {dim!r}")
        if not -count <= each < count:
            raise ValueError(f"{name}: dim {each} is out of range for an input of shape {tuple(x.shape)}")
    dims = sorted({each % count for each in given})
    if len(dims) != len(given):
        raise ValueError(f"{name}: dim {dim!r} names a dimension twice")
    return (dims or list(range(x.dim()))) if x.dim() else []


def _one_dim(name: str, x: Tensor, dim: int | None) -> list[int]:
    if dim is not None and (not isinstance(dim, int) or isinstance(dim, bool)):
        raise TypeError(f"{name}: dim must be an int or None, got {dim!r}")
    return _dims(name, x, dim)


def _refuse_nothing(name: str, x: Tensor, dims: list[int]) -> None:
    empty = [dim for dim in dims if x.shape[dim] == 0]
    if empty:
        raise ValueError(f"{name}: there is none of nothing: dimension {empty[0]} of shape {tuple(x.shape)} is empty")
