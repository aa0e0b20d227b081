"""Random numbers by counter: each is a function of a key, a step and its place in a whole tensor, and of nothing else.

So a part of a tensor has the numbers that the whole tensor has there, however it is cut, on whichever device, bit for
bit; and a dropout mask need not be kept, since backward makes it again. How the numbers are made stands in
`words.py`.

Bound by integer arithmetic: ten rounds of two 64-bit products for four elements where places and sizes are multiples of
four, and else for each.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_dtype, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import grid_of, tile_of
from rooftop.kernels.operands.references import without_kernels
from rooftop.kernels.randoms.boxes import Box
from rooftop.kernels.randoms.tables import DROPOUT, FILL
from rooftop.kernels.randoms.words import (
    WORD,
    normal_quantiles_reference,
    quantile_table,
    uniforms_reference,
    words_reference,
)
from rooftop.launch.operators import differentiable, no_tangents, operator
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

# ---- reference -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """What random numbers become: shift + scale * u within low and high, u uniform in [0, 1) or normal.

    A normal comes from the words `lower_word` to `lower_word + last_word`. In float32, computed in float64, where the
    product of two float32 numbers is exact and the sum rounds once, then rounded to float32 and to the dtype.
    """

    normal: bool
    scale: float
    shift: float
    low: float
    high: float
    lower_word: int = 0
    last_word: int = WORD


def values_reference(
    values: Values, place: Tensor, key: int, step: int, dtype: torch.dtype, grouped: bool = False
) -> Tensor:
    """Random numbers at places in the whole tensor, int64; `grouped` as above."""
    words = words_reference(place, key, step, grouped=grouped)
    if values.normal:
        words = values.lower_word + (words * values.last_word + words >> 32 & WORD)
        plain = normal_quantiles_reference(words).double()
    else:
        more = words_reference(place, key, step, True, grouped) if dtype == torch.float64 else None
        plain = uniforms_reference(words, more)
    exact = plain * values.scale + values.shift
    if values.normal or dtype != torch.float64:
        exact = exact.float()
    return exact.clamp(values.low, values.high).to(dtype)


def dropout_reference(x: Tensor, words: Tensor, p: float) -> Tensor:
    """x / (1 - p), or 0 where the element's word is below p * 2^32; words of x's shape."""
    inside = accumulator_dtype(x.dtype)
    return torch.where(words < _dropped_words(p), 0.0, x.to(inside) * _kept_scale(p, inside)).to(x.dtype)


def _dropped_words(p: float) -> int:
    """How many of the 2^32 words mean that an element is dropped."""
    return 1 << 32 if p == 1 else min(round(p * 2**32), WORD)


@cache
def _kept_scale(p: float, inside: torch.dtype) -> float:
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return scale if inside == torch.float64 else _rounded(scale, torch.float32)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest number that the dtype has."""
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))


def _below(value: float, dtype: torch.dtype) -> float:
    """The largest number below `value` that the dtype has, subnormal ones aside."""
    rounded = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    if float(rounded) < value:
        return float(rounded)
    if float(rounded) == 0:
        return -torch.finfo(dtype).tiny  # with subnormal numbers some processors count as zeros
    bits = rounded.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    return float((bits - 1 if float(rounded) > 0 else bits + 1).view(dtype))


# ---- limits -----------------------------------------------------------------------------------------------------


REFERENCE_CHUNK = 1 << 18  # elements that the reference makes at once: it has several integers of 8 bytes for each


def _grouped(sizes: Sequence[int], strides: Sequence[int], offset: int) -> bool:
    """Whether elements come in whole groups of four, which share a block of the generator."""
    return strides[-1] == 1 and sizes[-1] % 4 == 0 and offset % 4 == 0 and all(s % 4 == 0 for s in strides[:-1])


# ---- implementations -------------------------------------------------------------------------------------------


def _by_reference(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float64 or without_kernels(device)


def _pieces(sizes: list[int], strides: list[int], offset: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Slices of a flat part, and the places of their elements in the whole tensor."""
    count = math.prod(sizes)
    for begin in range(0, count, REFERENCE_CHUNK):
        end = min(begin + REFERENCE_CHUNK, count)
        rest = torch.arange(begin, end, device=device)
        place = torch.full_like(rest, offset)
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            place += rest % size * stride
            rest //= size
        yield slice(begin, end), place


def _fill(
    values: Values,
    sizes: list[int],
    strides: list[int],
    offset: int,
    key: int,
    step: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """(prod(sizes),)."""
    out = torch.empty(math.prod(sizes), dtype=dtype, device=device)
    if out.numel() == 0 or out.is_meta:
        return out
    grouped = _grouped(sizes, strides, offset)
    if _by_reference(dtype, out.device):
        for piece, place in _pieces(sizes, strides, offset, out.device):
            out[piece] = values_reference(values, place, key, step, dtype, grouped)
        return out
    require_triton()
    from rooftop.kernels.randoms.triton_kernels import random_fill

    tile = tile_of(FILL.elements, sizes[-1], FILL.warps) | {"GROUPED": grouped}
    numbers = (values.scale, values.shift, values.low, values.high)
    words = (_signed(values.lower_word), _signed(values.last_word))
    grid = grid_of(math.prod(sizes[:-1]), sizes[-1], tile)
    launch(
        random_fill, grid, out.device, out, quantile_table(out.device), *_halves(key), *_halves(step),
        *_layout(sizes, strides, offset, grouped), *numbers, *words, NORMAL=values.normal, **tile,
    )  # fmt: skip
    return out


def _drop(
    x: Tensor, p: float, key: int, step: int | Tensor, sizes: list[int], strides: list[int], offset: int
) -> Tensor:
    if p == 1:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    x = x.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel() == 0:
        return y
    if not sizes:
        sizes, strides = [x.numel()], [1]
    grouped = _grouped(sizes, strides, offset)
    if _by_reference(x.dtype, x.device):
        values, results = x.view(-1), y.view(-1)
        for piece, place in _pieces(sizes, strides, offset, x.device):
            results[piece] = dropout_reference(values[piece], words_reference(place, key, step, grouped=grouped), p)
        return y
    require_triton()
    from rooftop.kernels.randoms.triton_kernels import dropout_tile

    tile = tile_of(DROPOUT.elements, sizes[-1], DROPOUT.warps) | {"GROUPED": grouped}
    numbers = (_signed(_dropped_words(p)), _kept_scale(p, torch.float32))
    there = isinstance(step, Tensor)
    grid = grid_of(math.prod(sizes[:-1]), sizes[-1], tile)
    launch(
        dropout_tile, grid, x.device, x, y, step if there else y, *_halves(key),
        *_halves(0 if isinstance(step, Tensor) else step), *_layout(sizes, strides, offset, grouped), *numbers,
        STEP_THERE=there, **tile,
    )  # fmt: skip
    return y


def _halves(value: int) -> tuple[int, int]:
    """Lower and upper 32 bits."""
    return _signed(value & WORD), _signed(value >> 32 & WORD)


def _signed(word: int) -> int:
    """The int32 of the same bits."""
    return word - (1 << 32) if word >> 31 else word


def _layout(sizes: list[int], strides: list[int], offset: int, grouped: bool) -> tuple[int, ...]:
    """(rows, columns, sizes of the two inner outer dimensions, four strides, offset); in groups of four if grouped."""
    outer = [1] * (MOST_DIMENSIONS - len(sizes)) + sizes[:-1]
    paces = [0] * (MOST_DIMENSIONS - len(sizes)) + strides
    if grouped:
        paces = [pace // 4 for pace in paces[:-1]] + [1]
        return math.prod(outer), sizes[-1] // 4, *outer[1:], *paces, offset // 4
    return math.prod(outer), sizes[-1], *outer[1:], *paces, offset


MOST_DIMENSIONS = 4  # of a part, after dimensions that can be are merged

# ---- registration ----------------------------------------------------------------------------------------------


@operator("random_uniform")
def _random_uniform(
    sizes: list[int],
    strides: list[int],
    offset: int,
    key: int,
    step: int,
    low: float,
    high: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    inside = accumulator_dtype(dtype)
    low = _rounded(low, inside)
    values = Values(False, _rounded(high - low, inside), low, low, _below(high, dtype))
    return _fill(values, sizes, strides, offset, key, step, dtype, device)


@torch.library.register_fake("rooftop::random_uniform")
def _(
    sizes: list[int],
    strides: list[int],
    offset: int,
    key: int,
    step: int,
    low: float,
    high: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(math.prod(sizes), dtype=dtype, device=device)


@operator("random_normal")
def _random_normal(
    sizes: list[int],
    strides: list[int],
    offset: int,
    key: int,
    step: int,
    mean: float,
    std: float,
    low: float,
    high: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    first, last = _words_between(mean, std, low, high)
    mean, std, low, high = (_rounded(each, torch.float32) for each in (mean, std, low, high))
    values = Values(True, std, mean, low, high, first, last - first)
    return _fill(values, sizes, strides, offset, key, step, dtype, device)


@torch.library.register_fake("rooftop::random_normal")
def _(
    sizes: list[int],
    strides: list[int],
    offset: int,
    key: int,
    step: int,
    mean: float,
    std: float,
    low: float,
    high: float,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    return torch.empty(math.prod(sizes), dtype=dtype, device=device)


@cache
def _words_between(mean: float, std: float, low: float, high: float) -> tuple[int, int]:
    """The first and the last word whose numbers are between bounds.

    Searched: libraries' error functions, which would say it at once, differ in their last bits.
    """
    if low == -math.inf and high == math.inf:
        return 0, WORD

    def number(word: int) -> float:
        return float(normal_quantiles_reference(torch.tensor([word], device="cpu"))) * std + mean

    words = range(1 << 32)
    return bisect_left(words, low, key=number), bisect_right(words, high, key=number) - 1


@operator("counter_dropout")
def _counter_dropout(
    x: Tensor, p: float, key: int, step: int, sizes: list[int], strides: list[int], offset: int, there: Tensor | None
) -> Tensor:
    """`sizes` and `strides`: none of the whole tensor."""
    return _drop(x, p, key, step if there is None else there, sizes, strides, offset)


@torch.library.register_fake("rooftop::counter_dropout")
def _(
    x: Tensor, p: float, key: int, step: int, sizes: list[int], strides: list[int], offset: int, there: Tensor | None
) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *_, there = inputs
    ctx.arguments = inputs[1:-1]
    ctx.save_for_backward(*[] if there is None else [there])  # autograd says so if it is another step by then


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """The same elements of the gradient are dropped, by the same numbers made again."""
    (there,) = ctx.saved_tensors or (None,)
    return _counter_dropout(dy, *ctx.arguments, there), None, None, None, None, None, None, None


differentiable("counter_dropout", _differentiate, _save)


@cost_of("rooftop::random_uniform", "rooftop::random_normal")
def _random_cost(call: Call) -> Cost:
    """A product and a sum; the generator's integers are no flops."""
    out = call.out
    return Cost(0, distinct_bytes([out]), {precision_of(out.dtype): 2 * out.numel()})


@cost_of("rooftop::counter_dropout")
def _dropout_cost(call: Call) -> Cost:
    """A product."""
    x = call["x"]
    return Cost(distinct_bytes([x]), distinct_bytes([call.out]), {precision_of(x.dtype): x.numel()})


# ---- public ----------------------------------------------------------------------------------------------------


def random_uniform(
    box: Box | Sequence[int],
    key: int,
    *,
    step: int = 0,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Numbers that are uniform in [low, high): those that a whole tensor has in the part `box`.

    Args:
        box: the part, or the shape of a whole tensor.
        key: from -2^63 to 2^63 - 1, as `random_key` makes it of a seed and a name.
        step: from 0 to 2^63 - 1; another step gives other numbers.
        low, high: rounded to float32 (but for float64), finite.
        dtype: float32: low + (high - low) * u with 24 bits of u; bfloat16, float16: the same rounded; where that is
            `high`, the number before it. float64: with 53 bits, of which the first 24 are the same.
        device: the numbers are the same bits on any.

    Returns:
        Of the box's size, contiguous.

    Raises:
        TypeError: an argument of another type, or another dtype.
        ValueError: a key or step out of range, low that is not below high, or a box that cannot be seen in four
            dimensions.
    """
    sizes, strides, offset, shape = _checked("random_uniform", box, key, step, dtype)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"random_uniform: low must be below high and both finite, got {low} and {high}")
    device = torch.device(device)
    result: Tensor = _random_uniform(sizes, strides, offset, key, step, float(low), float(high), dtype, device)
    return result.view(shape)


def random_normal(
    box: Box | Sequence[int],
    key: int,
    *,
    step: int = 0,
    mean: float = 0.0,
    std: float = 1.0,
    low: float = -math.inf,
    high: float = math.inf,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """Normal numbers, truncated where bounds are given: those that a whole tensor has in the part `box`.

    Args:
        box: the part, or the shape of a whole tensor.
        key, step, device: as of `random_uniform`.
        mean, std: of the distribution before it is truncated, rounded to float32, finite.
        low, high: all numbers are between these, as of `torch.nn.init.trunc_normal_`; rounded to float32.
        dtype: numbers are float32, up to 6.3 standard deviations from the mean; bfloat16 and float16 are those rounded,
            bounds too, and float64 is those.

    Returns:
        Of the box's size, contiguous.

    Raises:
        TypeError: an argument of another type, or another dtype.
        ValueError: a key or step out of range, a negative std, bounds with less than 2^-16 of the distribution between
            them, or a box that cannot be seen in four dimensions.
    """
    sizes, strides, offset, shape = _checked("random_normal", box, key, step, dtype)
    if not (math.isfinite(mean) and math.isfinite(std) and std >= 0):
        raise ValueError(f"random_normal: mean and std must be finite and std not negative, got {mean} and {std}")
    if (low != -math.inf or high != math.inf) and not _share_between(mean, std, low, high) > 2**-16:
        raise ValueError(f"random_normal: almost nothing of mean {mean} and std {std} is between {low} and {high}")
    arguments = (key, step, float(mean), float(std), float(low), float(high), dtype, torch.device(device))
    result: Tensor = _random_normal(sizes, strides, offset, *arguments)
    return result.view(shape)


def _share_between(mean: float, std: float, low: float, high: float) -> float:
    """Which share of a normal distribution is between bounds."""
    if std == 0:
        return 0.0
    width = std * math.sqrt(2)
    return (math.erf((high - mean) / width) - math.erf((low - mean) / width)) / 2


@recorded_whole
def counter_dropout(x: Tensor, p: float, key: int, *, step: int | Tensor = 0, box: Box | None = None) -> Tensor:
    """x / (1 - p), with 0 in place of elements that are dropped with probability p, by key, step and place.

    Backward makes the mask again: nothing is kept for it, and forward that is computed again drops the same. An
    element that is dropped is 0 whatever it was, NaN too.

    Args:
        x: any shape, bfloat16, float16, float32 or float64.
        p: from 0 to 1; of the 2^32 words of the generator round(p * 2^32) drop their element.
        key: as of `random_uniform`.
        step: of the training, from 0 to 2^63 - 1: each has another mask. A tensor, () int64 on x's device, is read
            there: so each replay of a CUDA graph can have a mask of its own. It must not change before backward, and
            nobody looks whether it is negative.
        box: which part of a whole tensor x is, as many elements in the same order; None: x is the whole.

    Returns:
        Like x, contiguous.

    Raises:
        TypeError: x is no dense tensor or of another dtype, or another argument of another type or dtype.
        ValueError: p, key or step out of range, or a box of another size or one that cannot be seen in four dimensions.
        NotImplementedError: forward-mode differentiation.
    """
    check_tensors("counter_dropout", FLOATS, x=x)
    if box is not None and not isinstance(box, Box):
        raise TypeError(f"counter_dropout: box must be a Box or None, got {type(box).__name__}")
    if not 0 <= p <= 1:
        raise ValueError(f"counter_dropout: p must be from 0 to 1, got {p}")
    there = step if isinstance(step, Tensor) else None
    number = 0 if isinstance(step, Tensor) else step
    if there is not None and (there.dtype, there.shape, there.device) != (torch.int64, (), x.device):
        raise TypeError(
            f"counter_dropout: a step that is a tensor must be int64, of shape () and on {x.device} as x is, got "
            f"{there.dtype}, {tuple(there.shape)} and {there.device}"
        )
    sizes, strides, offset, shape = _checked(
        "counter_dropout", (x.numel(),) if box is None else box, key, number, x.dtype
    )
    if math.prod(shape) != x.numel():
        raise ValueError(
            f"counter_dropout: x has shape {tuple(x.shape)}, the box has size {shape}: not as many elements"
        )
    no_tangents("counter_dropout", x, instead="x * counter_dropout(torch.ones_like(x), ...)")
    if box is None:  # as large as x is, where a traced program runs
        sizes, strides = [], []
    result: Tensor = _counter_dropout(x, float(p), key, number, sizes, strides, offset, there)
    return result


def _checked(
    name: str, box: Box | Sequence[int], key: int, step: int, dtype: torch.dtype
) -> tuple[list[int], list[int], int, tuple[int, ...]]:
    """(sizes, strides, offset) of a part, and its shape."""
    if isinstance(box, Box):
        (sizes, strides, offset), shape = box.index_map(), box.size
    elif isinstance(box, Sequence) and not isinstance(box, str):
        sizes, strides, offset, shape = [math.prod(box)], [1], 0, tuple(box)
    else:
        raise TypeError(f"{name}: box must be a Box or a shape, got {type(box).__name__}")
    for what, number, least in (("key", key, -(1 << 63)), ("step", step, 0)):
        if not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name}: {what} must be an int, got {type(number).__name__}")
        if not least <= number < 1 << 63:
            raise ValueError(f"{name}: {what} must be from {least} to 2^63 - 1, got {number}")
    check_dtype(name, "dtype", dtype, FLOATS)
    if len(sizes) > MOST_DIMENSIONS:
        raise ValueError(
            f"{name}: {box} has {len(sizes)} dimensions after merging, at most {MOST_DIMENSIONS}: cut it in several"
        )
    return sizes, strides, offset, shape
