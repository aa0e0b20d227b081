"""Functions that kernels of elementwise expressions call; `elementwise/expression_sources.py` writes the kernels.

With PRECISE, results are as accurate as PyTorch's float32 results. Without PRECISE, functions take fewer instructions,
and results are accurate enough for half precision. The functions call only operations that Triton's interpreter
supports (no libdevice).
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2_HIGH = tl.constexpr(0.693145751953125)  # 15 bits, so that products with small integers are exact
LN_2_LOW = tl.constexpr(1.42860682030941723212e-6)
# Coefficients of a polynomial in x^2 for (tanh(x) - x) / x^3, for |x| up to 0.62. With this polynomial, the error of
# tanh(x) in float32 is below 0.86 units in the last place.
TANH_1 = tl.constexpr(-0.333333283662796)
TANH_2 = tl.constexpr(0.1333281397819519)
TANH_3 = tl.constexpr(-0.05385734140872955)
TANH_4 = tl.constexpr(0.02102694660425186)
TANH_5 = tl.constexpr(-0.006139297969639301)
FLOAT_MIDDLE = tl.constexpr(1.5 * 2.0**23)
FLOAT_MIDDLE_BITS = tl.constexpr(0x4B400000)
DOUBLE_MIDDLE = tl.constexpr(1.5 * 2.0**52)
DOUBLE_BEYOND = tl.constexpr(2.0**52 + 2.0**31)
DOUBLE_BEYOND_BITS = tl.constexpr(0x4330000080000000)  # XOR with the 32 bits of x gives the bits of 2^52 + 2^31 + x


@triton.jit
def exponential(x, PRECISE: tl.constexpr):
    """exp(x). The hardware computes 2^(x log2 e), whose error comes from the rounding of the product. With PRECISE, the
    method of Cody and Waite 1980 corrects the error of the product.
    """
    if PRECISE:
        n = tl.minimum(tl.maximum(tl.floor(x * LOG2_E + 0.5), -126.0), 127.0)
        rest = (x - n * LN_2_HIGH) - n * LN_2_LOW
        return tl.exp2(rest * LOG2_E) * tl.exp2(n)
    else:
        return tl.exp(x)


@triton.jit
def exponential_minus_1(x, PRECISE: tl.constexpr):
    """exp(x) - 1. Near 0, subtracting 1 from exp(x) would cancel, so the function computes 2 t / (1 - t) with t =
    tanh(x / 2).
    """
    t = _tanh_near_0(0.5 * tl.where(tl.abs(x) < 1.0, x, 0.0))
    return tl.where(tl.abs(x) < 1.0, tl.div_rn(2.0 * t, 1.0 - t), exponential(x, PRECISE) - 1.0)


@triton.jit
def reciprocal(x):
    """1 / x for float32 x from 2^-125 to 2^125, as accurate as an exact division (`tl.div_rn`) but for a millionth of a
    unit in the last place. ptxas compiles an exact division to a call, around which it schedules nothing.
    """
    rough = 1.0 / x
    return tl.fma(rough, tl.fma(-x, rough, 1.0), rough)


@triton.jit
def logarithm_of_1_plus(x):
    """log(1 + x) as log(u) x / (u - 1), where u is 1 + x rounded: Goldberg 1991, "What every computer scientist should
    know", theorem 4.
    """
    u = 1.0 + x
    apart = u - 1.0
    near = tl.div_rn(tl.log(u) * x, tl.where(apart == 0.0, 1.0, apart))
    return tl.where(apart == 0.0, x, tl.where(u == float("inf"), u, near))


@triton.jit
def logistic(x, PRECISE: tl.constexpr):
    """1 / (1 + exp(-x))."""
    return quotient(1.0, 1.0 + exponential(-x, PRECISE), PRECISE)


@triton.jit
def hyperbolic_tangent(x, PRECISE: tl.constexpr):
    """tanh(x): 1 - 2 / (exp(2 |x|) + 1) with the sign of x, or a polynomial near 0."""
    size = tl.abs(x)
    far = 1.0 - quotient(2.0, exponential(2.0 * size, PRECISE) + 1.0, PRECISE)
    return tl.where(size < 0.6, _tanh_near_0(x), tl.where(x < 0, -far, far))


@triton.jit
def normal_distribution(x, PRECISE: tl.constexpr):
    """Phi(x), the normal distribution function. The result for NaN may be 1."""
    if PRECISE:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        below = normal_below(tl.minimum(tl.abs(x), 14.0))
        return tl.where(x < 0.0, below, 1.0 - below)


@triton.jit
def normal_below(size):
    """Phi(-size) of the normal distribution for `size` in [0, 14], as 2^P(size) with a polynomial P of degree 8.

    The relative error is at most 4.2e-5 for sizes up to 5.8, and 7e-4 for sizes up to 13.2. (From 5.8 on, gelu's
    product size * Phi(-size) rounds to 0 in float16.) Beyond 13.2, the absolute error is at most 1e-38.
    """
    power = size * 3.958181338248323e-08 - 2.3413381313730497e-06
    power = power * size + 5.956412132945843e-05
    power = power * size - 0.000864746340084821
    power = power * size + 0.008082262240350246
    power = power * size - 0.052745018154382706
    power = power * size - 0.46003416180610657
    power = power * size - 1.150498628616333
    return tl.exp2(power * size - 1.0000571012496948)


@triton.jit
def _tanh_near_0(x):
    """tanh(x) for |x| < 0.6, as x + x^3 P(x^2)."""
    s = x * x
    p = TANH_5
    p = p * s + TANH_4
    p = p * s + TANH_3
    p = p * s + TANH_2
    p = p * s + TANH_1
    return x + x * (s * p)


@triton.jit
def quotient(a, b, PRECISE: tl.constexpr):
    """a / b; correctly rounded if PRECISE."""
    if PRECISE:
        return tl.div_rn(a, b)
    else:
        return a / b


@triton.jit
def square_root(x, PRECISE: tl.constexpr):
    """The square root of x; correctly rounded if PRECISE."""
    if PRECISE:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def power(a, b, PRECISE: tl.constexpr):
    """Compute a^b from |a|^b = exp(b log |a|). With PRECISE, |a|^b is computed in float64, because b magnifies the
    logarithm's error.
    """
    a, b = tl.broadcast(a, b)
    size = tl.abs(a)
    if PRECISE:
        found = tl.exp(b.to(tl.float64) * tl.log(size.to(tl.float64))).to(tl.float32)
    else:
        found = tl.exp2(b * tl.log2(size))
    whole = tl.floor(b) == b
    odd = whole & (b - 2.0 * tl.floor(b * 0.5) == 1.0)
    found = tl.where((size == 1.0) & ((b == float("inf")) | (b == float("-inf"))), 1.0, found)
    negative = (a < 0) | ((a == 0.0) & (1.0 / a < 0))  # also for -0.0
    found = tl.where((a < 0) & (a != float("-inf")) & ~whole, float("nan"), found)
    found = tl.where(negative & odd, -found, found)
    return tl.where((b == 0.0) | (a == 1.0), 1.0, found)


@triton.jit
def round_half_even(x):
    """The nearest integer, with ties to even, as in torch.round."""
    low = tl.floor(x)
    part = x - low
    even = tl.floor(low * 0.5) * 2.0 == low
    return tl.where((part < 0.5) | ((part == 0.5) & even), low, low + 1.0)


@triton.jit
def nearest_integer(x):
    """The nearest integer, with ties to even, for float32 x with |x| up to 2^22. For float64 x with |x| up to 2^51, the
    result is the lower 32 bits of that integer. The function adds 1.5 * 2^23 or 1.5 * 2^52: the sum has no fraction,
    and the last bits of the sum are the integer. GPUs add doubles four times as fast as they convert doubles.
    """
    if x.dtype == tl.float64:
        return (x + DOUBLE_MIDDLE).to(tl.int64, bitcast=True).to(tl.int32)
    else:
        return (x + FLOAT_MIDDLE).to(tl.int32, bitcast=True) - FLOAT_MIDDLE_BITS


@triton.jit
def double_of(x):
    """Convert an integer of at most 32 bits to float64. The function assembles the bits of 2^52 + 2^31 + x, and then
    subtracts 2^52 + 2^31. The result is exact, and the function is four times as fast as the hardware's conversion.
    """
    bits = (x.to(tl.int32).to(tl.int64) & 0xFFFFFFFF) ^ DOUBLE_BEYOND_BITS
    return bits.to(tl.float64, bitcast=True) - DOUBLE_BEYOND


@triton.jit
def truncated(x):
    """x without its fraction, as in torch.trunc."""
    return tl.where(x < 0, tl.ceil(x), tl.floor(x))


@triton.jit
def sign(x):
    """1, -1 or 0, as in torch.sign; 0 for NaN."""
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def largest(a, b):
    """max(a, b); NaN if a or b is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def smallest(a, b):
    """min(a, b); NaN if a or b is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def rectified(x):
    """max(x, 0); NaN if x is NaN."""
    return tl.where(x < 0, tl.full((), 0, x.dtype), x)
