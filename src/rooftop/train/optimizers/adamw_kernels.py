"""Triton kernels of AdamW; `adamw.py` describes the optimizer."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def adamw_numbers(
    steps,  # (count,) float32: step counts including this step. With COUNTING: int64 addresses of counts to increment
    constants,  # (8,) float64: rate, 1 - rate * decay, beta1, 1 - beta1, beta2, 1 - beta2, log beta1, log beta2
    # (count, 8) float64: rate / first bias correction, root of second bias correction, constants[1] to constants[5];
    # the last column is not used
    numbers,
    count, COUNTING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute, from the step count of each weight, the scalars of its AdamW step, such as bias corrections."""
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = lane < count
    if COUNTING:
        place = tl.load(steps + lane, mask=inside).to(tl.pointer_type(tl.float32))
        taken = tl.load(place, mask=inside) + 1
        tl.store(place, taken, mask=inside)
    else:
        taken = tl.load(steps + lane, mask=inside)
    taken = taken.to(tl.float64)
    first = 1 - tl.exp(taken * tl.load(constants + 6))
    second = 1 - tl.exp(taken * tl.load(constants + 7))
    row = numbers + lane * 8
    tl.store(row, tl.load(constants) / first, mask=inside)
    tl.store(row + 1, tl.sqrt(second), mask=inside)
    for number in tl.static_range(1, 6):
        tl.store(row + number + 1, tl.load(constants + number) + tl.zeros_like(second), mask=inside)


@triton.jit
def adamw_steps(
    rows,  # (weights, 8) int64. A row: addresses of weight, gradient, average, square and narrow; number of elements;
           # first program; row of `numbers`. All tensors are dense, in one memory layout. Without NARROW, the fifth
           # address is the weight's again
    row_of,  # (programs,) int32: the row of `rows` that each program updates
    numbers,  # (any, 8) float64, from `adamw_numbers`
    scale,  # (): factor of the gradients; None: no scaling
    WEIGHT: tl.constexpr, GRADIENT: tl.constexpr, AVERAGE: tl.constexpr, SQUARE: tl.constexpr,
    MODEL: tl.constexpr,  # these five constants are the dtypes of the tensors at the addresses
    ALIGNED: tl.constexpr,  # whether all addresses are divisible by 16
    eps: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of one of many weights.

    The kernel reads and writes weight, moments and narrow weight (the model's weight) once each. If the user has loaded
    new values into the narrow weight, the step starts from these values.
    """
    program = tl.program_id(0)
    row = rows + tl.load(row_of + program).to(tl.int64) * 8
    start = (program - tl.load(row + 6)) * BLOCK
    step_from(
        pointer_at(tl.load(row), WEIGHT, ALIGNED) + start,
        pointer_at(tl.load(row + 1), GRADIENT, ALIGNED) + start,
        pointer_at(tl.load(row + 2), AVERAGE, ALIGNED) + start,
        pointer_at(tl.load(row + 3), SQUARE, ALIGNED) + start,
        pointer_at(tl.load(row + 4), MODEL, ALIGNED) + start,
        numbers + tl.load(row + 7) * 8, scale, tl.load(row + 5) - start, eps, WIDE, NARROW, SCALED, BLOCK,
    )  # fmt: skip


@triton.jit
def adamw_step(
    weight, gradient, average, square, narrow,  # (elements,) each
    numbers,  # (8,) float64, a row of the result of `adamw_numbers`
    scale, elements,
    eps: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of one weight, whose addresses are arguments of the launch."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    step_from(
        weight + start, gradient + start, average + start, square + start, narrow + start, numbers, scale,
        elements - start, eps, WIDE, NARROW, SCALED, BLOCK,
    )  # fmt: skip


@triton.jit
def pointer_at(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Convert an address to a pointer. If ALIGNED, tell the compiler that the address is a multiple of 16 bytes."""
    pointer = address.to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def step_from(
    weight, gradient, average, square, narrow, numbers, scale, left,
    eps: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the BLOCK elements that start at the pointers. If fewer than BLOCK elements remain, update only these
    `left` elements."""
    rate = tl.load(numbers).to(WIDE)
    root = tl.load(numbers + 1).to(WIDE)
    decay = tl.load(numbers + 2).to(WIDE)
    beta1 = tl.load(numbers + 3).to(WIDE)
    rest1 = tl.load(numbers + 4).to(WIDE)
    beta2 = tl.load(numbers + 5).to(WIDE)
    rest2 = tl.load(numbers + 6).to(WIDE)
    factor = tl.load(scale).to(WIDE) if SCALED else 1.0
    if left >= BLOCK:  # without a mask, the loads have full width for any number of elements
        step_of_block(
            weight, gradient, average, square, narrow, left,
            rate, root, decay, factor, beta1, rest1, beta2, rest2, eps, WIDE, NARROW, SCALED, BLOCK, True,
        )  # fmt: skip
    else:
        step_of_block(
            weight, gradient, average, square, narrow, left,
            rate, root, decay, factor, beta1, rest1, beta2, rest2, eps, WIDE, NARROW, SCALED, BLOCK, False,
        )  # fmt: skip


@triton.jit
def step_of_block(
    weight, gradient, average, square, narrow, left, rate, root, decay, factor, beta1, rest1, beta2, rest2,
    eps: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALED: tl.constexpr,
    BLOCK: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Update BLOCK elements of a weight and its moments. If FULL, all elements exist; otherwise only the first `left`
    elements exist, and a mask protects the others."""
    lane = tl.arange(0, BLOCK)
    inside = lane >= 0 if FULL else lane < left
    w = tl.load(weight + lane, mask=inside).to(WIDE)
    g = tl.load(gradient + lane, mask=inside).to(WIDE)
    m = tl.load(average + lane, mask=inside).to(WIDE)
    v = tl.load(square + lane, mask=inside).to(WIDE)
    if NARROW:  # a narrow weight that differs from the rounded weight was loaded by the user: start from it
        n = tl.load(narrow + lane, mask=inside)
        w = tl.where(w.to(narrow.dtype.element_ty) == n, w, n.to(WIDE))
    if SCALED:
        g *= factor
    m = m * beta1 + g * rest1
    v = v * beta2 + g * g * rest2
    if tl.float64 == WIDE:
        size = tl.sqrt(v) / root + eps
        w = w * decay - rate * m / size
    else:  # correctly rounded: Triton's approximate division and root are too inexact for weights
        size = tl.div_rn(tl.sqrt_rn(v), root + tl.zeros_like(v)) + eps
        w = w * decay - tl.div_rn(rate * m, size)
    tl.store(weight + lane, w.to(weight.dtype.element_ty), mask=inside)
    tl.store(average + lane, m.to(average.dtype.element_ty), mask=inside)
    tl.store(square + lane, v.to(square.dtype.element_ty), mask=inside)
    if NARROW:
        tl.store(narrow + lane, w.to(narrow.dtype.element_ty), mask=inside)
