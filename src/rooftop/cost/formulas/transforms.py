"""Cost of Fourier transforms: the data are read once and written once, with the operations of the split-radix
algorithm.

A complex transform of n elements takes 4 n log₂ n - 6 n + 8 real operations (Yavne 1968). A real transform takes half
as many operations. Several dimensions are transformed one after another. The scale that `norm` requests is folded into
the last factors.
"""

from __future__ import annotations

from math import log2

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes
from rooftop.cost.formulas.streaming import arithmetic
from rooftop.cost.registry import cost_of


@cost_of("aten::_fft_c2c")
def complex_transform(call: Call) -> Cost:
    """Cost of a complex-to-complex transform."""
    return _cost(call, call["self"], 1.0)


@cost_of("aten::_fft_r2c", "aten::_fft_c2r")
def real_transform(call: Call) -> Cost:
    """Cost of a transform from real to complex, or back: half the work of a complex transform of the real side's
    size."""
    signal = call.out if call["self"].is_complex() else call["self"]
    return _cost(call, signal, 0.5)


def _cost(call: Call, signal: Tensor, share: float) -> Cost:
    flops = sum(
        signal.numel() // length * (4 * length * log2(length) - 6 * length + 8)
        for length in (signal.shape[dim] for dim in call["dim"])
        if length > 1
    )
    read = distinct_bytes([call["self"]])
    return Cost(read, distinct_bytes([call.out]), arithmetic(round(share * flops), [call["self"]]))
