"""Reductions: sum, mean, amax, amin, argmax, argmin and norm over any dimensions, or all.

Bound by memory at every size: the input is read once; backward (of all but sum and mean, whose gradient is a view)
reads it once or, of extremes of very many elements, twice, and writes its gradient. One kernel makes results from any
view of at most two kept and two reduced dimensions, merged as far as strides allow. Results too few to fill a GPU, of
which the sum of everything is the extreme, are split over programs, whose partial results are combined by the last
program to arrive (as threadFenceReduction of the CUDA samples) or by a second kernel. Sums are float32, of integers
int64. Deterministic: the order of additions depends on nothing but sizes, strides and the GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, HALVES, accumulator_dtype
from rooftop.kernels.operands.references import without_kernels
from rooftop.kernels.reductions.launches import matrix_order, reduce_into, spread, view_of, viewed
from rooftop.launch.operators import (
    by_formula,
    differentiable,
    differentiable_by_formula,
    in_pytorch,
    operator,
)
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import require_triton

ORDERS = {"norm1": 1.0, "norm2": 2.0, "norm_inf": math.inf}
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
    """dx, laid out in memory as x is."""
    return torch.empty_like(x).copy_(_backward_formula(dy, x, y, kind, dims))


def _backward_formula(dy: Tensor, x: Tensor, y: Tensor, kind: str, dims: Sequence[int]) -> Tensor:
    """dx of the extremes, whose ties share the gradient equally, and of norms; y and dy as `reduce` gave them."""
    inside = accumulator_dtype(x.dtype)
    shape = [1 if dim in dims else size for dim, size in enumerate(x.shape)]
    value, result, gradient = x.to(inside), y.reshape(shape).to(inside), dy.reshape(shape).to(inside)
    if kind == "norm1":
        dx = value.sign() * gradient
    elif kind == "norm2":
        dx = (gradient * (value / result.masked_fill(result == 0, 1.0))).masked_fill(result == 0, 0.0)
    else:
        equal = (value.abs() if kind == "norm_inf" else value) == result
        share = gradient / equal.sum(_or_all(x, dims), keepdim=True)
        dx = torch.where(equal, value.sign() * share, 0.0) if kind == "norm_inf" else equal * share
    return dx.to(x.dtype)


def _or_all(x: Tensor, dims: Sequence[int]) -> list[int] | None:
    """The dimensions; None, which PyTorch takes as all, where there are none."""
    return list(dims) if x.dim() else None


# ---- implementations -------------------------------------------------------------------------------------------


def _is_reference(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether PyTorch does it: on the CPU, in float64, and of nothing."""
    return torch.float64 in (x.dtype, dtype) or x.numel() == 0 or without_kernels(x.device)


def _result_shape(x: Tensor, dims: Sequence[int], keepdim: bool) -> list[int]:
    """The shape of x without `dims`, or with 1 in their place."""
    sizes = enumerate(x.shape)
    if keepdim:
        return [1 if dim in dims else size for dim, size in sizes]
    return [size for dim, size in sizes if dim not in dims]


def _forward(x: Tensor, kind: str, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    if _is_reference(x, dtype):
        return reduce_reference(x, kind, dims, keepdim, dtype)
    require_triton()
    out = torch.empty(_result_shape(x, dims, keepdim), dtype=dtype, device=x.device)
    table, view = viewed(x, dims, ordered=kind in ("argmax", "argmin"))
    reduce_into(out, table, kind, view, dtype)
    return out


def _backward(dy: Tensor, x: Tensor, y: Tensor, kind: str, dims: list[int]) -> Tensor:
    if _is_reference(x, y.dtype):
        return reduce_backward_reference(dy, x, y, kind, dims)
    require_triton()
    dx = torch.empty_like(x)
    source = x if x.stride() == dx.stride() else torch.empty_like(x).copy_(x)
    view = view_of(tuple(x.shape), source.stride(), tuple(dims), False)
    if view is not None:
        spread(dx, dy.contiguous(), source, y.contiguous(), kind, view)
        return dx
    source, view = viewed(x, dims, ordered=False)
    matrix = torch.empty_like(source)
    spread(matrix, dy.contiguous(), source, y.contiguous(), kind, view)
    order = matrix_order(x, dims)
    dx.permute(order).copy_(matrix.view([x.shape[dim] for dim in order]))
    return dx


# ---- registration ----------------------------------------------------------------------------------------------


@operator("reduce")
def _reduce(x: Tensor, kind: str, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return _forward(x, kind, dims, keepdim, dtype)


@torch.library.register_fake("rooftop::reduce")
def _(x: Tensor, kind: str, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    return x.new_empty(_result_shape(x, dims, keepdim), dtype=dtype)


in_pytorch("reduce", reduce_reference)


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
by_formula("reduce", reduce_reference)
differentiable_by_formula("reduce_backward", _backward_formula)


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


@recorded_whole
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
    """
    _check("sum", input, (*FLOATS, *INTEGERS), dtype, (*FLOATS, *INTEGERS[1:]))
    dims = _dims("sum", input, dim)
    result = dtype or (result_dtype("sum", input) if input.dtype.is_floating_point else torch.int64)
    return _apply(_cast(input, result), "sum", dims, keepdim, result)


@recorded_whole
def mean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean over some dimensions or all, as `torch.mean`; NaN of nothing.

    Arguments, results and errors as of `sum`; an input of integers needs a `dtype`.
    """
    _check("mean", input, FLOATS if dtype is None else (*FLOATS, *INTEGERS), dtype, FLOATS)
    result = dtype or input.dtype
    return _apply(_cast(input, result), "mean", _dims("mean", input, dim), keepdim, result)


@recorded_whole
def amax(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The maximum over some dimensions or all, as `torch.amax`: NaN where there is one.

    Elements that tie share the gradient equally. Arguments as of `sum`; of the input's dtype.

    Raises:
        TypeError, ValueError: as `sum`; the maximum of nothing.
    """
    return _extreme("amax", input, _dims("amax", input, dim), keepdim)


@recorded_whole
def amin(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The minimum over some dimensions or all, as `torch.amin`; see `amax`."""
    return _extreme("amin", input, _dims("amin", input, dim), keepdim)


@recorded_whole
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


@recorded_whole
def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Where the minimum is, as `torch.argmin`; see `argmax`."""
    return _extreme("argmin", input, _one_dim("argmin", input, dim), keepdim)


@recorded_whole
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
    result = dtype or result_dtype("norm", input)
    return _apply(_cast(input, result), kind, dims, keepdim, result)


def _extreme(name: str, x: Tensor, dims: list[int], keepdim: bool) -> Tensor:
    _refuse_nothing(name, x, dims)
    if name in ("argmax", "argmin"):
        return _reduce(x.detach(), name, dims, bool(keepdim), torch.int64)
    return _apply(x, name, dims, keepdim, x.dtype)


def _apply(x: Tensor, kind: str, dims: list[int], keepdim: bool, dtype: torch.dtype) -> Tensor:
    y: Tensor = _reduce(x, kind, dims, bool(keepdim), dtype)
    return y


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in a dtype, unless the kernel widens what it loads."""
    halves = dtype == torch.float32 and x.dtype in HALVES
    integers = dtype == torch.int64 and x.dtype in INTEGERS
    return x if halves or integers else x.to(dtype)


def _check(
    name: str,
    x: Tensor,
    dtypes: tuple[torch.dtype, ...] = (*FLOATS, *INTEGERS),
    dtype: torch.dtype | None = None,
    results: tuple[torch.dtype, ...] = (),
) -> None:
    check_tensors(name, input=x)
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
