"""Counter-based random numbers. Each number depends only on a key, on a step (a number that a program counts up), and
on the position of its element in the whole tensor.

So an element gets the same number bit for bit, on any device and however the tensor is sharded. A dropout mask need not
be kept, because backward recomputes the mask. `words.py` explains the computation of the numbers.

The operators are bound by integer arithmetic: ten rounds, each with two products of 32-bit integers, of which all 64
bits are used. If the elements of a part are whole groups of four consecutive positions in the whole tensor, ten rounds
compute the numbers of the four elements of a group at once; otherwise, ten rounds compute the number of only one
element.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_dtype, check_finite, check_number, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.references import without_kernels
from rooftop.kernels.randoms import launches
from rooftop.kernels.randoms.boxes import Box
from rooftop.kernels.randoms.words import WORD, Values, normal_quantiles_reference, values_reference, words_reference
from rooftop.launch.operators import declare, no_tangents
from rooftop.launch.symbolic import recorded_whole

# ---- operators -------------------------------------------------------------------------------------------------


class RandomUniform(NamedTuple):
    """Uniform random numbers in [low, high) for a part of a whole tensor; the result is flat, of shape (prod(sizes),).

    `sizes` and `strides` are the sizes and strides (in elements) of the part, and `offset` is the position of the
    part's first element in the whole tensor.
    """

    sizes: list[int]
    strides: list[int]
    offset: int
    key: int
    step: int
    low: float
    high: float
    dtype: torch.dtype
    device: torch.device

    def run(self) -> Tensor:
        inside = accumulator_dtype(self.dtype)
        low = _rounded(self.low, inside)
        values = Values(False, _rounded(self.high - low, inside), low, low, _below(self.high, self.dtype))
        return _filled(self, values)

    def fake(self) -> Tensor:
        return _empty(self)

    def cost(self, made: Tensor) -> Cost:
        return _cost(made)


class RandomNormal(NamedTuple):
    """Random numbers of a normal distribution, from `low` to `high`, for a part of a whole tensor. The result is flat,
    of shape (prod(sizes),). For `sizes`, `strides` and `offset` see `RandomUniform`.
    """

    sizes: list[int]
    strides: list[int]
    offset: int
    key: int
    step: int
    mean: float
    std: float
    low: float
    high: float
    dtype: torch.dtype
    device: torch.device

    def run(self) -> Tensor:
        numbers = (self.mean, self.std, self.low, self.high)
        first, last = _words_between(*numbers)
        mean, std, low, high = (_rounded(each, torch.float32) for each in numbers)
        return _filled(self, Values(True, std, mean, low, high, first, last - first))

    def fake(self) -> Tensor:
        return _empty(self)

    def cost(self, made: Tensor) -> Cost:
        return _cost(made)


class CounterDropout(NamedTuple):
    """Dropout of a part of a whole tensor. For `sizes`, `strides` and `offset` see `RandomUniform`; `sizes` and
    `strides` are empty if x is the whole tensor. `there` is the step if the step is a tensor on the device; `step` is
    then not used.
    """

    x: Tensor
    p: float
    key: int
    step: int
    sizes: list[int]
    strides: list[int]
    offset: int
    there: Tensor | None

    def run(self) -> Tensor:
        x, p, key, number, sizes, strides, offset, there = self
        if p == 1:
            return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        x = x.contiguous()
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel() == 0:
            return y
        part = (sizes, strides, offset) if sizes else ([x.numel()], [1], offset)
        dropped, scale = _dropped_words(p), _kept_scale(p, accumulator_dtype(x.dtype))
        step = number if there is None else there
        if not _by_reference(x.dtype, x.device):
            launches.drop(x, y, dropped, scale, key, step, *part)
            return y
        values, results = x.view(-1), y.view(-1)
        for piece, place in _pieces(*part, x.device):
            words = words_reference(place, key, step, grouped=launches.grouped(*part))
            kept = values[piece].to(accumulator_dtype(x.dtype)) * scale
            results[piece] = torch.where(words < dropped, 0.0, kept).to(x.dtype)
        return y

    def fake(self) -> Tensor:
        return self.x.new_empty(self.x.shape)

    def keep(self, made: Tensor) -> tuple[Any, ...]:
        return self[1:]  # autograd raises if `there` was changed before backward

    @staticmethod
    def gradients(kept: tuple[Any, ...], wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor]:
        """Drop the elements of the gradient that forward dropped in x, by computing the same random numbers again."""
        return (_counter_dropout(dy, *kept),)

    def cost(self, made: Tensor) -> Cost:
        """Bytes and flops of the operator. An element takes one flop, a product."""
        return Cost(distinct_bytes([self.x]), distinct_bytes([made]), {precision_of(self.x.dtype): self.x.numel()})


_random_uniform = declare("random_uniform", RandomUniform)
_random_normal = declare("random_normal", RandomNormal)
_counter_dropout = declare("counter_dropout", CounterDropout)

# number of elements that the reference computes at a time, because each element needs several integers of 8 bytes
REFERENCE_CHUNK = 1 << 18


def _empty(part: RandomUniform | RandomNormal) -> Tensor:
    return torch.empty(math.prod(part.sizes), dtype=part.dtype, device=part.device)


def _filled(part: RandomUniform | RandomNormal, values: Values) -> Tensor:
    """The random numbers of a part of a whole tensor as a flat tensor, computed by a kernel or by the PyTorch
    reference. `values` describes the distribution of the numbers."""
    sizes, strides, offset, key, step = part[:5]
    out = _empty(part)
    if out.numel() == 0 or out.is_meta:
        return out
    if not _by_reference(out.dtype, out.device):
        launches.fill(out, values, sizes, strides, offset, key, step)
        return out
    grouped = launches.grouped(sizes, strides, offset)
    for piece, place in _pieces(sizes, strides, offset, out.device):
        out[piece] = values_reference(values, place, key, step, out.dtype, grouped)
    return out


def _by_reference(dtype: torch.dtype, device: torch.device) -> bool:
    return dtype == torch.float64 or without_kernels(device)


def _pieces(sizes: list[int], strides: list[int], offset: int, device: torch.device) -> Iterator[tuple[slice, Tensor]]:
    """Divide a part of a whole tensor into slices of at most `REFERENCE_CHUNK` elements. Yield each slice of the
    flattened part, with the positions of its elements in the whole tensor."""
    count = math.prod(sizes)
    for begin in range(0, count, REFERENCE_CHUNK):
        end = min(begin + REFERENCE_CHUNK, count)
        rest = torch.arange(begin, end, device=device)
        place = torch.full_like(rest, offset)
        for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
            place += rest % size * stride
            rest //= size
        yield slice(begin, end), place


def _cost(made: Tensor) -> Cost:
    """Bytes and flops of an operator that makes random numbers. A number takes two flops, a product and a sum; the
    generator's integer operations do not count."""
    return Cost(0, distinct_bytes([made]), {precision_of(made.dtype): 2 * made.numel()})


@cache
def _words_between(mean: float, std: float, low: float, high: float) -> tuple[int, int]:
    """The smallest and the largest 32-bit word that gives a number from `low` to `high`.

    The generator converts each 32-bit word to a number of the normal distribution with this mean and standard
    deviation; a larger word never gives a smaller number. The two words are found by binary search. An error function
    would compute the words directly, but libraries' error functions differ in their last bits.
    """
    if low == -math.inf and high == math.inf:
        return 0, WORD

    def number(word: int) -> float:
        return float(normal_quantiles_reference(torch.tensor([word], device="cpu"))) * std + mean

    words = range(1 << 32)
    return bisect_left(words, low, key=number), bisect_right(words, high, key=number) - 1


def _dropped_words(p: float) -> int:
    """How many of the 2^32 possible words of the generator drop an element, for a dropout probability p below 1. An
    element is dropped if its word is below this number."""
    return min(round(p * 2**32), WORD)


@cache
def _kept_scale(p: float, inside: torch.dtype) -> float:
    """1 / (1 - p), by which the elements that are not dropped are multiplied, for p below 1. The factor is rounded to
    the dtype `inside`, in which the kernel computes."""
    return _rounded(1 / (1 - p), inside)


def _rounded(value: float, dtype: torch.dtype) -> float:
    """Round a number to the nearest number of the dtype."""
    return float(torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype))


def _below(value: float, dtype: torch.dtype) -> float:
    """The largest number of the dtype below `value`. If `value` is 0, subnormal numbers are skipped."""
    rounded = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)
    if float(rounded) < value:
        return float(rounded)
    if float(rounded) == 0:
        return -torch.finfo(dtype).tiny  # some processors flush subnormal numbers to zero
    bits = rounded.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    return float((bits - 1 if float(rounded) > 0 else bits + 1).view(dtype))


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
    """Uniform numbers in [low, high) for the part `box` of a whole tensor.

    Args:
        box: the part, or the shape of a whole tensor.
        key: from -2^63 to 2^63 - 1; `random_key` computes a key from a seed and a name.
        step: from 0 to 2^63 - 1; each step has different numbers.
        low, high: finite bounds, which are rounded to float32 unless the dtype is float64.
        dtype: float32: low + (high - low) * u, where u has 24 random bits. bfloat16, float16: the float32 number,
            rounded; a number that rounds to `high` becomes the largest number below `high`. float64: u has 53 random
            bits; the first 24 are the bits of the float32 number.
        device: the numbers are identical on all devices.

    Returns:
        A contiguous tensor of the box's size.

    Raises:
        TypeError: an argument has a wrong type, or the dtype is not supported.
        ValueError: key or step is out of range, low is not below high, low or high is not finite, or the box has more
            than four dimensions after merging (`Box.index_map`).
    """
    sizes, strides, offset, shape = _checked("random_uniform", box, key, step, dtype)
    for argument, value in (("low", low), ("high", high)):
        check_finite("random_uniform", argument, value)
    if not low < high:
        raise ValueError(f"random_uniform: low must be below high, got {low} and {high}")
    device = torch.device(device)
    return _random_uniform(sizes, strides, offset, key, step, float(low), float(high), dtype, device).view(shape)


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
    """Normal numbers, truncated if bounds are given, for the part `box` of a whole tensor.

    Args:
        box: the part, or the shape of a whole tensor.
        key, step, device: as in `random_uniform`.
        mean, std: mean and standard deviation of the distribution before truncation; finite, rounded to float32.
        low, high: the smallest and the largest number allowed (not in standard deviations), as in
            `torch.nn.init.trunc_normal_`; rounded to float32.
        dtype: the numbers are computed in float32; none is more than 6.3 standard deviations from the mean. For
            bfloat16 and float16, the numbers and the bounds are rounded. For float64, the numbers are those of float32.

    Returns:
        A contiguous tensor of the box's size.

    Raises:
        TypeError: an argument has a wrong type, or the dtype is not supported.
        ValueError: key or step is out of range, mean or std is not finite, std is negative, low is not below high, at
            most 2^-16 of the distribution is between the bounds, or the box has more than four dimensions after merging
            (`Box.index_map`).
    """
    sizes, strides, offset, shape = _checked("random_normal", box, key, step, dtype)
    for argument, value in (("mean", mean), ("std", std)):
        check_finite("random_normal", argument, value)
    if std < 0:
        raise ValueError(f"random_normal: std must not be negative, got {std}")
    for argument, value in (("low", low), ("high", high)):
        check_number("random_normal", argument, value)
    if not low < high:
        raise ValueError(f"random_normal: low must be below high, got {low} and {high}")
    if (low != -math.inf or high != math.inf) and not _share_between(mean, std, low, high) > 2**-16:
        raise ValueError(
            f"random_normal: a normal distribution with mean {mean} and std {std} has almost no values between {low} "
            f"and {high}"
        )
    arguments = (key, step, float(mean), float(std), float(low), float(high), dtype, torch.device(device))
    return _random_normal(sizes, strides, offset, *arguments).view(shape)


def _share_between(mean: float, std: float, low: float, high: float) -> float:
    """The probability that a number of a normal distribution lies between `low` and `high`; 0 if `std` is 0."""
    if std == 0:
        return 0.0
    width = std * math.sqrt(2)
    return (math.erf((high - mean) / width) - math.erf((low - mean) / width)) / 2


@recorded_whole
def counter_dropout(x: Tensor, p: float, key: int, *, step: int | Tensor = 0, box: Box | None = None) -> Tensor:
    """Dropout by key, step and position: an element becomes 0 with probability p, and is divided by 1 - p otherwise.

    Backward recomputes the mask, so forward keeps no mask. A recomputed forward drops the same elements as the first
    forward. A dropped element becomes 0 even if it was NaN.

    Args:
        x: any shape, bfloat16, float16, float32 or float64.
        p: from 0 to 1; rounded to a multiple of 2^-32.
        key: as in `random_uniform`.
        step: training step, from 0 to 2^63 - 1; each step has a different mask. The step may be an int64 tensor of
            shape () on x's device. The kernel reads this tensor, so each replay of a CUDA graph can have its own mask.
            A step tensor must not change before backward, and its value is not checked.
        box: the part of a whole tensor that x contains, with the elements in the same order. None: x is the whole
            tensor.

    Returns:
        Like x, contiguous.

    Raises:
        TypeError: x's layout is not `torch.strided`, its dtype is not supported, or an argument has a wrong type or
            dtype.
        ValueError: p, key or step is out of range, box and x differ in their number of elements, or the box has more
            than four dimensions after merging (`Box.index_map`).
        NotImplementedError: forward-mode differentiation.
    """
    check_tensors("counter_dropout", FLOATS, x=x)
    if box is not None and not isinstance(box, Box):
        raise TypeError(f"counter_dropout: box must be a Box or None, got {type(box).__name__}")
    check_number("counter_dropout", "p", p)
    if not 0 <= p <= 1:
        raise ValueError(f"counter_dropout: p must be from 0 to 1, got {p}")
    there = step if isinstance(step, Tensor) else None
    number = 0 if isinstance(step, Tensor) else step
    if there is not None and (there.dtype, there.shape, there.device) != (torch.int64, (), x.device):
        raise TypeError(
            f"counter_dropout: a tensor as step must be int64, of shape () and on {x.device} like x, got "
            f"{there.dtype}, {tuple(there.shape)} and {there.device}"
        )
    sizes, strides, offset, shape = _checked(
        "counter_dropout", (x.numel(),) if box is None else box, key, number, x.dtype
    )
    if math.prod(shape) != x.numel():
        raise ValueError(
            f"counter_dropout: x has shape {tuple(x.shape)}, but the box has another number of elements: {shape}"
        )
    no_tangents("counter_dropout", x, instead="x * counter_dropout(torch.ones_like(x), ...)")
    if box is None:  # with empty sizes, a traced program reads the size of x when it runs
        sizes, strides = [], []
    return _counter_dropout(x, float(p), key, number, sizes, strides, offset, there)


def _checked(
    name: str, box: Box | Sequence[int], key: int, step: int, dtype: torch.dtype
) -> tuple[list[int], list[int], int, tuple[int, ...]]:
    """Check the arguments, and return (sizes, strides, offset, shape) of the part that `box` describes."""
    if isinstance(box, Box):
        (sizes, strides, offset), shape = box.index_map(), box.size
    elif isinstance(box, Sequence) and not isinstance(box, str):
        if not all(isinstance(size, (int, torch.SymInt, np.integer, Tensor)) for size in box):
            raise TypeError(f"{name}: the sizes of box must be ints, got {tuple(box)}")
        if not all(isinstance(size, (int, torch.SymInt)) for size in box) and not torch._C._is_tracing():
            box = [int(size) for size in box]  # under torch.jit.trace, sizes stay tensors, which are recorded
        if any(size < 0 for size in box):
            raise ValueError(f"{name}: the sizes of box must not be negative, got {tuple(box)}")
        sizes, strides, offset, shape = [math.prod(box)], [1], 0, tuple(box)
    else:
        raise TypeError(f"{name}: box must be a Box or a shape, got {type(box).__name__}")
    for what, number, least in (("key", key, -(1 << 63)), ("step", step, 0)):
        if not isinstance(number, (int, torch.SymInt)):
            raise TypeError(f"{name}: {what} must be an int, got {type(number).__name__}")
        if not least <= number < 1 << 63:
            raise ValueError(f"{name}: {what} must be from {least} to 2^63 - 1, got {number}")
    check_dtype(name, "dtype", dtype, FLOATS)
    most = launches.MOST_DIMENSIONS
    if len(sizes) > most:
        raise ValueError(
            f"{name}: {box} has {len(sizes)} dimensions after merging, expected at most {most}: cut it into several "
            "boxes"
        )
    return sizes, strides, offset, shape
