"""Reductions: sum, mean, amax, amin, argmax, argmin and norm over any dimensions, or all.

Reductions are bound by memory at every size: forward reads the input once. Backward of sum and mean is a view. Backward
of the other reductions reads the input once (twice for extremes, unless a tile holds all elements of a result), and
writes the input's gradient. One kernel reduces any view of at most two kept and two reduced dimensions, after
dimensions are merged where strides allow a merge. If there are too few results to fill a GPU, as for the sum of all
elements, several programs share each result. The program that finishes last combines the partial results, as in the
CUDA sample threadFenceReduction, or a second kernel combines them. Sums accumulate in float32 (float64 for float64,
int64 for integers). Results are deterministic: the order of additions depends only on sizes, strides and the GPU.

`plans.py` chooses the kernels for a result or a gradient, and `reduction_plan` returns the choice and its reason;
`launches.py` launches the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import check_choice, check_dtype, check_tensors, is_integer
from rooftop.kernels.operands.dtypes import FLOATS, HALVES, accumulator_dtype
from rooftop.kernels.reductions import launches
from rooftop.kernels.reductions.plans import PLACES, ReductionPlan
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

ORDERS = {"norm1": 1.0, "norm2": 2.0, "norm_inf": math.inf}
FUNCTIONS = ("sum", "mean", "amax", "amin", "argmax", "argmin", "norm")
INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)

# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs: the shape and dtype of x, and for extremes and norms also the tensors x and y."""

    x: Tensor | None
    y: Tensor | None
    kind: str
    dims: list[int]
    shape: torch.Size
    dtype: torch.dtype


class Reduce(NamedTuple):
    """The reduction of x over `dims`. `argmax` and `argmin` reduce one dimension or all dimensions."""

    x: Tensor
    kind: str
    dims: list[int]
    keepdim: bool
    dtype: torch.dtype

    def run(self) -> Tensor:
        x, kind, dims, _, dtype = self
        plan = launches.plan_of(x, kind, dims, dtype)
        if plan.backend == "reference":
            return self.in_pytorch()
        y = self.fake()
        launches.forward(plan, y, x, kind, dims)
        return y

    def fake(self) -> Tensor:
        shape = _kept_shape(self.x.shape, self.dims)
        if not self.keepdim:
            shape = [size for dim, size in enumerate(shape) if dim not in self.dims]
        return self.x.new_empty(shape, dtype=self.dtype)

    def in_pytorch(self) -> Tensor:
        x, kind, dims, keepdim, dtype = self
        if kind in ORDERS:
            return torch.linalg.vector_norm(x, ORDERS[kind], _or_all(x, dims), keepdim, dtype=dtype)
        function: Callable[..., Tensor] = getattr(torch, kind)
        if kind in ("sum", "mean"):
            return function(x, _or_all(x, dims), keepdim, dtype=dtype)
        if kind in ("amax", "amin"):
            y = function(x, dims, keepdim)
            return y.clone() if x.dim() == 0 else y  # PyTorch may return x itself
        x = x.to(torch.uint8) if x.dtype == torch.bool else x  # PyTorch has no argmax of bool
        return function(x, dims[0] if len(dims) == 1 else None, keepdim)

    def formula(self) -> Tensor:
        return self.in_pytorch()

    def keep(self, made: Tensor) -> Kept:
        x, y = (None, None) if self.kind in ("sum", "mean") else (self.x, made)
        return Kept(x, y, self.kind, self.dims, self.x.shape, self.x.dtype)

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor]:
        x, y, kind, dims, shape, dtype = kept
        if x is not None and y is not None:
            return (_reduce_backward(dy, x, y, kind, dims),)
        if kind == "mean":
            dy = dy / math.prod(shape[dim] for dim in dims)
        return (dy.to(dtype).reshape(_kept_shape(shape, dims)).expand(shape),)

    def cost(self, made: Tensor) -> Cost:
        """Flops: an addition or a comparison for each element; norms add a product or an absolute value for each
        element. A mean adds a division for each result, and a 2-norm adds a root for each result.
        """
        flops = (2 if self.kind in ORDERS else 1) * self.x.numel() + (self.kind in ("mean", "norm2")) * made.numel()
        return Cost(distinct_bytes([self.x]), distinct_bytes([made]), {precision_of(self.x.dtype): flops})


class ReduceBackward(NamedTuple):
    """The gradient dx of extremes and norms, from the result y of `Reduce` and its gradient dy. y and dy may have or
    lack the reduced dimensions. Elements that equal the extreme share the extreme's gradient equally.

    dx has the memory layout of x.
    """

    dy: Tensor
    x: Tensor
    y: Tensor
    kind: str
    dims: list[int]

    def run(self) -> Tensor:
        dx = self.fake()
        plan = launches.plan_of(dx, self.kind, self.dims, self.y.dtype, "backward")
        if plan.backend == "reference":
            return dx.copy_(self.formula())
        launches.backward(plan, dx, *self)
        return dx

    def fake(self) -> Tensor:
        return torch.empty_like(self.x)

    def formula(self) -> Tensor:
        dy, x, y, kind, dims = self
        inside, shape = accumulator_dtype(x.dtype), _kept_shape(x.shape, dims)
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

    def cost(self, made: Tensor) -> Cost:
        """Flops per element: 4 for extremes (a comparison and a count of ties, then a comparison and a selection), 2
        for the 2-norm (a division and a product) and 2 for the 1-norm (a sign and a product).
        """
        flops = (2 if self.kind in ("norm1", "norm2") else 4) * self.x.numel()
        return Cost(distinct_bytes(self[:3]), distinct_bytes([made]), {precision_of(self.x.dtype): flops})


_reduce = declare("reduce", Reduce, known=True)
_reduce_backward = declare("reduce_backward", ReduceBackward, known=True)


def _kept_shape(shape: torch.Size, dims: Sequence[int]) -> list[int]:
    """The shape in which the sizes of the dimensions `dims` are 1."""
    return [1 if dim in dims else size for dim, size in enumerate(shape)]


def _or_all(x: Tensor, dims: Sequence[int]) -> list[int] | None:
    """The dimensions as PyTorch's functions expect them: None for a tensor without dimensions."""
    return list(dims) if x.dim() else None


# ---- public ----------------------------------------------------------------------------------------------------

Dims = int | Sequence[int] | None


@repeated
@recorded_whole
def sum(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The sum over one, several or all dimensions, as `torch.sum` computes it.

    Args:
        input: any shape and strides; bfloat16, float16, float32, float64, booleans or integers of up to 64 bits.
        dim: one dimension or several dimensions; None or () means all. A tensor whose strides need more than two kept
            or two reduced dimensions is copied first.
        keepdim: keep reduced dimensions, with size 1.
        dtype: elements are cast to this dtype before they are added.

    Returns:
        The sum in `dtype`. If `dtype` is None, the sum has the input's dtype, or is int64 for booleans and integers;
        under autocast on a GPU, a floating point sum is then float32, as in PyTorch. The sum of no elements is 0.
        Floating point sums accumulate in float32 (float64 for float64) and are deterministic.

    Raises:
        TypeError: the input's layout is not `torch.strided`, or a dtype is not supported.
        ValueError: a dimension is out of range or occurs twice.
    """
    x, dims, result = _of_sum(input, dim, dtype)
    return _reduce(x, "sum", dims, bool(keepdim), result)


@repeated
@recorded_whole
def mean(input: Tensor, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """The mean over one, several or all dimensions, as `torch.mean` computes it. The mean of no elements is NaN.

    Arguments, results and errors are those of `sum`, except that integer input needs a floating point `dtype`, and that
    autocast does not change the result's dtype.
    """
    x, dims, result = _of_mean(input, dim, dtype)
    return _reduce(x, "mean", dims, bool(keepdim), result)


@repeated
@recorded_whole
def amax(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The maximum over one, several or all dimensions, as `torch.amax` computes it. The maximum is NaN if any element
    is NaN.

    Elements that tie share the gradient equally. Arguments are those of `sum`, without `dtype`; the result has the
    input's dtype.

    Raises:
        TypeError: as in `sum`.
        ValueError: as in `sum`, or a reduced dimension has no elements.
    """
    x, dims, result = _of_extreme("amax", input, dim)
    return _reduce(x, "amax", dims, bool(keepdim), result)


@repeated
@recorded_whole
def amin(input: Tensor, dim: Dims = (), keepdim: bool = False) -> Tensor:
    """The minimum over one, several or all dimensions, as `torch.amin` computes it. Arguments and errors are as in
    `amax`.
    """
    x, dims, result = _of_extreme("amin", input, dim)
    return _reduce(x, "amin", dims, bool(keepdim), result)


@repeated
@recorded_whole
def argmax(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the maximum along a dimension, or in the flattened tensor if `dim` is None, as `torch.argmax`.

    Args:
        input: as in `sum`.
        dim: one dimension, or None for the flattened tensor. With None, a tensor that is not contiguous is copied
            first.
        keepdim: keep reduced dimensions, with size 1.

    Returns:
        int64 indices. If several elements equal the maximum, the index is that of the first. NaN counts as larger than
        any number.

    Raises:
        TypeError: as in `sum`, or `dim` is a sequence.
        ValueError: as in `sum`, or a reduced dimension has no elements.
    """
    x, dims, result = _of_place("argmax", input, dim)
    return _reduce(x, "argmax", dims, bool(keepdim), result)


@repeated
@recorded_whole
def argmin(input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The index of the minimum, as `torch.argmin` computes it. Arguments and errors are as in `argmax`."""
    x, dims, result = _of_place("argmin", input, dim)
    return _reduce(x, "argmin", dims, bool(keepdim), result)


@repeated
@recorded_whole
def norm(
    input: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The vector norm over one, several or all dimensions, as `torch.linalg.vector_norm` computes it.

    Args:
        input: bfloat16, float16, float32 or float64, any shape and strides.
        ord: 1 (sum of absolute values), 2 (root of the sum of squares; a float32 sum of squares overflows past 3.4e38)
            or infinity (the largest absolute value).
        dim, keepdim: as in `sum`.
        dtype: elements are first cast to this dtype, which must not be narrower than the input's.

    Returns:
        As `sum`. Elements that tie for the infinity norm share the gradient equally.

    Raises:
        TypeError, ValueError: as in `sum`, or the order is unknown, or the infinity norm has no elements.
    """
    kind, x, dims, result = _of_norm(input, ord, dim, dtype)
    return _reduce(x, kind, dims, bool(keepdim), result)


def reduction_plan(
    function: str, input: Tensor, dim: Dims = None, *, ord: float = 2, dtype: torch.dtype | None = None
) -> ReductionPlan:
    """Return the plan by which a reduction would be computed, and the reason, without computing the reduction.

    Args:
        function: "sum", "mean", "amax", "amin", "argmax", "argmin" or "norm".
        input, dim, ord, dtype: the arguments of that function; `ord` is for norms, `dtype` for sums, means and norms.

    Raises:
        ValueError: the function is unknown.
        TypeError, ValueError: as in the planned function.
    """
    check_choice("reduction_plan", "function", function, FUNCTIONS)
    kind = function
    if function == "norm":
        kind, x, dims, result = _of_norm(input, ord, dim, dtype)
    elif function in ("sum", "mean"):
        x, dims, result = (_of_sum if function == "sum" else _of_mean)(input, dim, dtype)
    else:
        x, dims, result = (_of_place if function in PLACES else _of_extreme)(function, input, dim)
    return launches.plan_of(x, kind, dims, result)


# ---- arguments of the operator --------------------------------------------------------------------------

Prepared = tuple[Tensor, list[int], torch.dtype]
"""(input, dimensions to reduce, dtype of the result). The input is cast, unless the kernel casts loaded elements."""


def _of_sum(x: Tensor, dim: Dims, dtype: torch.dtype | None) -> Prepared:
    _check("sum", x, (*FLOATS, *INTEGERS), dtype, (*FLOATS, *INTEGERS[1:]))
    dims = _dims("sum", x, dim)
    result = dtype or (result_dtype("sum", x) if x.dtype.is_floating_point else torch.int64)
    return _cast(x, result), dims, result


def _of_mean(x: Tensor, dim: Dims, dtype: torch.dtype | None) -> Prepared:
    _check("mean", x, FLOATS if dtype is None else (*FLOATS, *INTEGERS), dtype, FLOATS)
    result = dtype or x.dtype
    return _cast(x, result), _dims("mean", x, dim), result


def _of_norm(x: Tensor, ord: float, dim: Dims, dtype: torch.dtype | None) -> tuple[str, Tensor, list[int], torch.dtype]:
    """Return the kind of the norm, followed by the items of `Prepared`."""
    _check("norm", x, FLOATS, dtype, FLOATS)
    kind = next((kind for kind, order in ORDERS.items() if ord == order), None)
    if kind is None:
        raise ValueError(f"norm: ord must be 1, 2 or infinity, got {ord!r}: use torch.linalg.vector_norm")
    if dtype is not None and torch.promote_types(dtype, x.dtype) != dtype:
        raise TypeError(f"norm: dtype {dtype} is narrower than the input's {x.dtype}")
    dims = _dims("norm", x, dim)
    if kind == "norm_inf":
        _refuse_nothing("norm", x, dims)
    result = dtype or result_dtype("norm", x)
    return kind, _cast(x, result), dims, result


def _of_extreme(name: str, x: Tensor, dim: Dims) -> Prepared:
    _check(name, x, (*FLOATS, *INTEGERS))
    dims = _dims(name, x, dim)
    _refuse_nothing(name, x, dims)
    return x, dims, x.dtype


def _of_place(name: str, x: Tensor, dim: Dims) -> Prepared:
    if dim is not None and not is_integer(dim):
        raise TypeError(f"{name}: dim must be an int or None, got {dim!r}")
    x, dims, _ = _of_extreme(name, x, dim)
    return x.detach(), dims, torch.int64


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x cast to a dtype, or x itself if the kernel casts the elements that it loads."""
    halves = dtype == torch.float32 and x.dtype in HALVES
    integers = dtype == torch.int64 and x.dtype in INTEGERS
    return x if halves or integers else x.to(dtype)


def _check(
    name: str,
    x: Tensor,
    dtypes: tuple[torch.dtype, ...],
    dtype: torch.dtype | None = None,
    results: tuple[torch.dtype, ...] = (),
) -> None:
    check_tensors(name, input=x)
    check_dtype(name, "input", x.dtype, dtypes, "; or give dtype" if name == "mean" and dtype is None else "")
    if dtype is not None:
        check_dtype(name, "dtype", dtype, results)


def _dims(name: str, x: Tensor, dim: Dims) -> list[int]:
    """The dimensions to reduce, as nonnegative numbers in ascending order. Empty for a tensor without dimensions."""
    if dim is not None and not isinstance(dim, int | Sequence):
        raise TypeError(f"{name}: dim must be an int, several ints or None, got {dim!r}")
    given = () if dim is None else (dim,) if isinstance(dim, int) else tuple(dim)
    count = max(1, x.dim())
    for each in given:
        if not is_integer(each):
            raise TypeError(f"{name}: dim must be an int, several ints or None, got {dim!r}")
        if not -count <= each < count:
            raise ValueError(f"{name}: dim {each} is out of range for an input of shape {tuple(x.shape)}")
    dims = sorted({each % count for each in given})
    if len(dims) != len(given):
        raise ValueError(f"{name}: dim {dim!r} contains a dimension twice")
    return (dims or list(range(x.dim()))) if x.dim() else []


def _refuse_nothing(name: str, x: Tensor, dims: list[int]) -> None:
    empty = [dim for dim in dims if x.shape[dim] == 0]
    if empty:
        raise ValueError(
            f"{name}: needs at least one element, but dimension {empty[0]} of shape {tuple(x.shape)} is empty"
        )
