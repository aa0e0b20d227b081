"""Cost of elementwise operators, activations and their gradients: each distinct input is read once, each output is
written once.

A broadcast operand counts its own elements once, without repetitions.
"""

from __future__ import annotations

from collections.abc import Callable

from rooftop.cost.accounting import Call, tensors_in
from rooftop.cost.formulas.streaming import Flops, cover, each, streaming


def _scaled(flops: int, of_complex: int | None = None) -> Callable[[Call], int]:
    """A function that returns the flops per element of an operator with a factor (`alpha` of add, `value` of addcmul).
    A factor other than 1 adds one multiplication, or two for a complex number times a real factor."""

    def counted(call: Call) -> int:
        factor = call.get("alpha", call.get("value", 1)) != 1
        if of_complex is not None and _is_complex(call):
            return of_complex + 2 * factor
        return flops + factor

    return counted


def _either(flops: int, of_complex: int) -> Callable[[Call], int]:
    """A function that returns one count of flops for real numbers and another count for complex numbers."""
    return lambda call: of_complex if _is_complex(call) else flops


def _is_complex(call: Call) -> bool:
    return any(tensor.is_complex() for tensor in [*call.written_tensors, *tensors_in(call.get("self"))])


def _bounds(call: Call) -> int:
    """Comparisons of `clamp`: one for each bound that is given."""
    return (call["min"] is not None) + (call["max"] is not None)


def _gelu(call: Call) -> int:
    # erf: x/√2, erf, +1, ·x, /2.  tanh: √(2/π)·(x + c·x·x·x), tanh, +1, ·x, /2.
    return 5 if call["approximate"] == "none" else 9


def _gelu_backward(call: Call) -> int:
    # erf: Φ(x) 4, φ(x) 4, x·φ + Φ and ·grad 3.  tanh: u 5, tanh 1, (1 + tanh)/2 2, 1 - tanh² 2, u' 3, the rest 5.
    return 11 if call["approximate"] == "none" else 18


UNARY = each(
    """
    _standard_gamma_grad abs acos acosh angle asin asinh atan atanh bitwise_not ceil cos cosh deg2rad digamma erf
    erfc erfinv exp exp2 expm1 floor frac i0 isinf isnan isneginf isposinf lgamma log log10 log1p log2 logical_not
    nan_to_num neg polygamma rad2deg reciprocal relu round rsqrt sgn sigmoid sign signbit sin sinc sinh
    special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1 special_entr
    special_erfcx special_i0e special_i1 special_i1e special_log_ndtr special_modified_bessel_i0
    special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_ndtri
    special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0 sqrt square tan
    tanh threshold trunc
    """,
    1,
) | {
    "conj_physical": 0,
    "_conj_physical": 0,
    "complex": 0,
    "frexp": 1,
    "logit": 3,
    "polar": 4,
    "abs": _either(1, 4),  # √(a² + b²)
    "exp": _either(1, 5),  # eᵃ, cos b, sin b, two products
    "neg": _either(1, 2),
    "reciprocal": _either(1, 6),  # a - bi over a² + b²
    "sgn": _either(1, 6),
    "square": _either(1, 5),  # a² - b², 2ab
}

BINARY = each(
    """
    __ilshift__ __irshift__ __lshift__ __rshift__ atan2 bitwise_and bitwise_left_shift bitwise_or
    bitwise_right_shift bitwise_xor copysign eq floor_divide fmax fmin fmod gcd ge gt heaviside hypot igamma igammac
    lcm le logical_and logical_or logical_xor lt maximum minimum ne nextafter pow remainder
    special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
    special_chebyshev_polynomial_w special_hermite_polynomial_h special_hermite_polynomial_he
    special_laguerre_polynomial_l special_legendre_polynomial_p special_shifted_chebyshev_polynomial_t
    special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
    special_shifted_chebyshev_polynomial_w special_zeta
    """,
    1,
) | {
    "add": _scaled(1, of_complex=2),
    "sub": _scaled(1, of_complex=2),
    "rsub": _scaled(1, of_complex=2),
    "_add_relu": _scaled(2),
    "_dirichlet_grad": 1,
    "mul": _either(1, 6),  # four products and two sums
    "div": _either(1, 11),  # six products, three sums, two divisions
    "ldexp": 2,
    "logaddexp": 6,  # max(a, b) + log1p(exp(-|a - b|))
    "logaddexp2": 6,
    "special_xlog1py": 2,
    "xlogy": 2,
}

TERNARY: dict[str, Flops] = {
    "addcdiv": _scaled(2),
    "addcmul": _scaled(2),
    "clamp": _bounds,
    "clamp_max": 1,
    "clamp_min": 1,
    "lerp": 3,
    "where": 0,
}

ACTIVATIONS: dict[str, Flops] = {
    "_prelu_kernel": 2,
    "celu": 3,
    "elu": 3,
    "gelu": _gelu,
    "glu": 2,
    "hardshrink": 2,
    "hardsigmoid": 4,
    "hardswish": 5,
    "hardtanh": 2,
    "leaky_relu": 2,
    "log_sigmoid_forward": 6,
    "mish": 4,
    "silu": 2,
    "softplus": 3,
    "softshrink": 3,
}

GRADIENTS: dict[str, Flops] = {
    "_prelu_kernel_backward": 3,
    "elu_backward": 3,
    "gelu_backward": _gelu_backward,
    "hardshrink_backward": 2,
    "hardsigmoid_backward": 3,
    "hardswish_backward": 5,
    "hardtanh_backward": 2,
    "leaky_relu_backward": 2,
    "logit_backward": 3,
    "mish_backward": 10,
    "rrelu_with_noise_backward": 1,
    "sigmoid_backward": 3,
    "silu_backward": 6,
    "softplus_backward": 3,
    "softshrink_backward": 2,
    "tanh_backward": 3,
    "threshold_backward": 1,
}

FLOPS_PER_ELEMENT: dict[str, Flops] = UNARY | BINARY | TERNARY | ACTIVATIONS | GRADIENTS

cover(FLOPS_PER_ELEMENT)
# Both halves of the gradient follow from one element of the output's gradient: σ, grad·σ, 1 - σ, and two products.
cover({"glu_backward": 5}, lambda flops: streaming(flops, per="grad_output"))
# The CPU's kernel reads exp(-|x|) from `buffer`. The buffer is not counted, because the gradient follows from x.
cover({"log_sigmoid_backward": 3}, lambda flops: streaming(flops, unread=["buffer"]))
# Windows of a Fourier transform: for each element a scaled position, its cosines, and the weighted sum of the cosines.
WINDOWS: dict[str, Flops] = {
    "bartlett_window": 3,
    "blackman_window": 7,
    "hamming_window": 4,
    "hann_window": 4,
    "kaiser_window": 6,
}
cover(WINDOWS)
# In training mode the operator writes the drawn slopes to `noise` and does not read them.
cover({"rrelu_with_noise": 2}, lambda flops: streaming(flops, unread=["noise"]))
