"""The Triton kernel of AdamW; `adamw.py` has the optimizer and says how it works."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_step(
    weight, gradient, average, square, narrow,  # (elements,) each, contiguous; narrow: another weight, or none
    numbers,  # (7,) float64: the rate by the first bias correction, the root of the second, 1 - rate * decay, beta1,
    # 1 - beta1, beta2, 1 - beta2
    scale,  # () what gradients are multiplied with, or none
    elements,
    eps: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK elements: all that is kept of each is read once and written once."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    rate = tl.load(numbers).to(WIDE)
    root = tl.load(numbers + 1).to(WIDE)
    decay = tl.load(numbers + 2).to(WIDE)
    beta1 = tl.load(numbers + 3).to(WIDE)
    rest1 = tl.load(numbers + 4).to(WIDE)
    beta2 = tl.load(numbers + 5).to(WIDE)
    rest2 = tl.load(numbers + 6).to(WIDE)
    factor = tl.load(scale).to(WIDE) if SCALED else 1.0
    if start + BLOCK <= elements:  # no mask: the widest loads, whatever divides the number of elements
        step_of_block(
            weight + start, gradient + start, average + start, square + start, narrow + start,
            elements - start, rate, root, decay, factor, beta1, rest1, beta2, rest2,
            eps, WIDE, NARROW, SCALED, BLOCK, True,
        )  # fmt: skip
    else:
        step_of_block(
            weight + start, gradient + start, average + start, square + start, narrow + start,
            elements - start, rate, root, decay, factor, beta1, rest1, beta2, rest2,
            eps, WIDE, NARROW, SCALED, BLOCK, False,
        )  # fmt: skip


@triton.jit
def step_of_block(
    weight, gradient, average, square, narrow, left, rate, root, decay, factor, beta1, rest1, beta2, rest2,
    eps: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The step of the elements from the pointers on."""
    lane = tl.arange(0, BLOCK)
    inside = lane >= 0 if FULL else lane < left
    w = tl.load(weight + lane, mask=inside).to(WIDE)
    g = tl.load(gradient + lane, mask=inside).to(WIDE)
    m = tl.load(average + lane, mask=inside).to(WIDE)
    v = tl.load(square + lane, mask=inside).to(WIDE)
    if SCALED:
        g *= factor
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    if tl.float64 == WIDE:
        size = tl.sqrt(v) / root + eps
        w = w * decay - rate * m / size
    else:  # rounded correctly: what is approximate by default is not for weights that are kept
        size = tl.div_rn(tl.sqrt_rn(v), root + tl.zeros_like(v)) + eps
        w = w * decay - tl.div_rn(rate * m, size)
    tl.store(weight + lane, w.to(weight.dtype.element_ty), mask=inside)
    tl.store(average + lane, m.to(average.dtype.element_ty), mask=inside)
    tl.store(square + lane, v.to(square.dtype.element_ty), mask=inside)
    if NARROW:
        tl.store(narrow + lane, w.to(narrow.dtype.element_ty), mask=inside)
