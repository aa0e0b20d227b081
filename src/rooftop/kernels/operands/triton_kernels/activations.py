"""Activations and their gradients, for the epilogues of matrix products.

Unless an activation overlaps with the product, the activation adds a tenth to the product's time. Most of that time is
spent in the special function unit, where exponentials and reciprocals are 8 times slower than multiplications. With
HALF, results are rounded to 16 bits, so activations that need an exponential compute only one, and a polynomial
(`normal_below`, `_reciprocal`), with errors far below that rounding. In float32, activations are as accurate as
PyTorch's: exponentials have reduced arguments, divisions round correctly, and no terms cancel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.scalars import exponential, normal_below

# Numbered as in ACTIVATIONS of operands/activations.py.
NONE = tl.constexpr(0)
RELU = tl.constexpr(1)
GELU = tl.constexpr(2)
GELU_TANH = tl.constexpr(3)
SILU = tl.constexpr(4)
SIGMOID = tl.constexpr(5)
RELU6 = tl.constexpr(6)
HARDSWISH = tl.constexpr(7)
HARDSIGMOID = tl.constexpr(8)


@triton.jit
def activated(values, ACTIVATION: tl.constexpr, HALF: tl.constexpr):
    """Compute the activation of float32 values. HALF: the result is only accurate enough for 16 bits. NaN stays NaN."""
    if ACTIVATION == RELU:
        values = tl.where(values < 0.0, 0.0, values)
    elif ACTIVATION == GELU:
        if HALF:
            # v Phi(v) is v - v Phi(-v), so for either sign it is max(v, 0) - |v| Phi(-|v|).
            size = tl.minimum(tl.abs(values), 14.0)
            values = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL) - size * normal_below(size)
        else:
            values = 0.5 * values * (1.0 + tl.erf(values * 0.7071067811865476))
    elif ACTIVATION == GELU_TANH:
        if HALF:
            size = tl.minimum(tl.abs(values), 14.0)
            small = _exponential(_gelu_argument(size))
            above = tl.maximum(values, 0.0, propagate_nan=tl.PropagateNan.ALL)
            values = above - size * small * _reciprocal(small)
        else:
            values = values * _sigmoid(_gelu_argument(values), HALF)
    elif ACTIVATION == SILU:
        values = values * _sigmoid(values, HALF)
    elif ACTIVATION == SIGMOID:
        values = _sigmoid(values, HALF)
    elif ACTIVATION == RELU6:
        values = _up_to_six(values)
    elif ACTIVATION == HARDSWISH:
        values = values * _up_to_six(values + 3.0) * (1.0 / 6.0)
    elif ACTIVATION == HARDSIGMOID:
        values = _up_to_six(values + 3.0) * (1.0 / 6.0)
    return values


@triton.jit
def activation_gradient(gradient, value, ACTIVATION: tl.constexpr, OF_OUTPUT: tl.constexpr, HALF: tl.constexpr):
    """Compute gradient * activation'. `value` is the activation's result if OF_OUTPUT, else the activation's input."""
    if ACTIVATION == RELU:
        result = tl.where(value <= 0.0, 0.0, gradient)
    elif ACTIVATION == GELU:
        if HALF:
            small = normal_below(tl.minimum(tl.abs(value), 14.0))
            below = tl.where(value < 0.0, small, 1.0 - small)
            result = gradient * (below + value * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * value * value))
        else:
            below = 0.5 * (1.0 + tl.erf(value * 0.7071067811865476))
            result = gradient * (below + value * 0.3989422804014327 * exponential(-0.5 * value * value, True))
    elif ACTIVATION == GELU_TANH:
        if HALF:
            share = _sigmoid(_gelu_argument(value), HALF)
            slope = 1.5957691216057308 * (1.0 + 3 * 0.044715 * value * value)
            result = gradient * share * (1.0 + value * slope * (1.0 - share))
        else:
            share, rest = _shares(_gelu_argument(value))
            slope = 1.5957691216057308 * (1.0 + 3 * 0.044715 * value * value)
            result = gradient * (share + value * (share * rest) * slope)
    elif ACTIVATION == SILU:
        if HALF:
            share = _sigmoid(value, HALF)
            result = gradient * share * (1.0 + value * (1.0 - share))
        else:
            share, rest = _shares(value)
            result = gradient * (share + value * (share * rest))
    elif ACTIVATION == RELU6:
        result = tl.where((value <= 0.0) | (value >= 6.0), 0.0, gradient)
    elif ACTIVATION == HARDSWISH:
        slope = tl.where(value < 3.0, value * (1.0 / 3.0) + 0.5, 1.0)
        result = tl.where(value <= -3.0, 0.0, gradient * slope)
    elif ACTIVATION == HARDSIGMOID:
        result = tl.where((value <= -3.0) | (value >= 3.0), 0.0, gradient * (1.0 / 6.0))
    elif OF_OUTPUT or HALF:
        share = value if OF_OUTPUT else _sigmoid(value, HALF)
        result = gradient * share * (1.0 - share)
    else:
        share, rest = _shares(value)
        result = gradient * (share * rest)
    return result


@triton.jit
def _up_to_six(values):
    """Values limited to [0, 6]; NaN stays NaN."""
    return tl.where(values < 0.0, 0.0, tl.where(values > 6.0, 6.0, values))


@triton.jit
def _gelu_argument(values):
    """2 u = 2 sqrt(2 / pi) (v + 0.044715 v^3), the argument for which (1 + tanh(u)) / 2 = sigmoid(2 u)."""
    return 1.5957691216057308 * values * (1.0 + 0.044715 * values * values)


@triton.jit
def _sigmoid(values, HALF: tl.constexpr):
    if HALF:
        small = _exponential(tl.abs(values))
        share = _reciprocal(small)
        return tl.where(values < 0.0, small * share, share)
    else:
        share, _ = _shares(values)
        return share


@triton.jit
def _shares(values):
    """Compute (sigmoid(v), sigmoid(-v)) in float32. Small values of sigmoid(-v) are accurate, because the function does
    not compute sigmoid(-v) as 1 - sigmoid(v).
    """
    small = exponential(-tl.abs(values), True)
    larger = tl.div_rn(1.0, 1.0 + small)
    smaller = small * larger
    return tl.where(values < 0.0, smaller, larger), tl.where(values < 0.0, larger, smaller)


@triton.jit
def _exponential(size):
    """exp(-size). The result is 0 if exp(-size) is below the smallest normal number."""
    return tl.exp2(size * -1.4426950408889634)


@triton.jit
def _reciprocal(small):
    """1 / (1 + small) for `small` in [0, 1], with an error below 1e-5, by a polynomial of degree 6 that is 1 at 0."""
    value = small * 0.07440771907567978 - 0.33152881264686584
    value = value * small + 0.6789292693138123
    value = value * small - 0.9098189473152161
    value = value * small + 0.9873993396759033
    value = value * small - 0.9993836283683777
    return value * small + 1.0
