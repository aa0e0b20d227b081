"""Tune window attention: tables WINDOW_* of `attentions/tables.py`.

    python benchmarks/tuning/window_attentions.py [--out window_attentions.json] [--seconds 110] [--quick]

The tasks are the four stages of swin_t in bfloat16, with 7 x 7 windows shifted by 3 and heads of 32 features, for 256
images and for one image. Candidates are checked on one image (two in the last stage), where kernels have the same
constants as in the timing.
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, copies_past_cache, main, randn
from torch import Tensor

from rooftop.kernels.attentions import window_attentions
from rooftop.kernels.attentions.tables import WindowConfig
from rooftop.kernels.attentions.window_attentions import Sizes

WINDOW, FEATURES = ((2, 2), 16) if QUICK else ((7, 7), 32)
SHIFT = (WINDOW[0] // 2, WINDOW[1] // 2)
POSITIONS = WINDOW[0] * WINDOW[1]
BYTES = 2  # bytes of bfloat16
STAGES = {1: (56, 3), 2: (28, 6), 3: (14, 12), 4: (7, 24)}  # side, heads
if QUICK:
    STAGES = {3: (4, 1), 4: (2, 2)}
Shape = tuple[int, int, int]  # images, side, heads


def sizes_of(shape: Shape) -> Sizes:
    """The sizes of attention. If one window covers the whole map, it is not shifted."""
    _, side, heads = shape
    return Sizes(heads, WINDOW, SHIFT if side > WINDOW[0] else (0, 0), FEATURES**-0.5)


def inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """(query_key_value, bias, gradient)."""
    images, side, heads = shape
    packed = randn(images, side, side, 3 * heads * FEATURES)
    return packed, randn(heads, POSITIONS, POSITIONS, dtype=torch.float32), randn(images, side, side, heads * FEATURES)


def repeats(shape: Shape) -> int:
    images, side, heads = shape
    return copies_past_cache(7 * BYTES * images * side * side * heads * FEATURES)


def forward(shape: Shape) -> Call:
    problems, sizes = [inputs(shape) for _ in range(repeats(shape))], sizes_of(shape)
    return lambda: [window_attentions._forward(x, bias, None, None, sizes) for x, bias, _ in problems]


def backward(shape: Shape) -> Call:
    problems, sizes = [inputs(shape) for _ in range(repeats(shape))], sizes_of(shape)
    return lambda: [window_attentions._backward(dout, x, bias, None, None, sizes) for x, bias, dout in problems]


def in_torch(shape: Shape) -> Call:
    """Eager torch attention in windows: shift the map, cut it into windows, attend, join the windows, shift back."""
    problems, sizes = [inputs(shape) for _ in range(repeats(shape))], sizes_of(shape)
    masks = [window_attentions._shift_mask(x, sizes.window, sizes.shift) for x, _, _ in problems]

    def attend(x: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        windows = window_attentions._cut(x, None, sizes.window, sizes.shift)  # (B, windows, N, 3 C)
        query, key, value = windows.unflatten(-1, (3, sizes.heads, FEATURES)).permute(3, 0, 1, 4, 2, 5)
        added = bias.to(x.dtype) if mask is None else (bias + mask).to(x.dtype)
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, added)
        return window_attentions._joined(out.transpose(2, 3).flatten(3), x, sizes.window, sizes.shift)

    return lambda: [attend(x, bias, mask) for (x, bias, _), mask in zip(problems, masks, strict=True)]


def check_forward(shape: Shape) -> None:
    x, bias, _ = inputs(shape)
    found = window_attentions._forward(x, bias, None, None, sizes_of(shape))
    exact = window_attentions.window_attention_reference(x.double(), bias.double(), None, None, *sizes_of(shape).all)
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def check_backward(shape: Shape) -> None:
    x, bias, dout = inputs(shape)
    found = window_attentions._backward(dout, x, bias, None, None, sizes_of(shape))
    wide = (dout.double(), x.double(), bias.double(), None, None)
    exact = window_attentions.window_attention_backward_reference(*wide, *sizes_of(shape).all)
    for mine, truth in zip(found[:2], exact[:2], strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=0, atol=0.02 * float(truth.abs().max()))


def forwards() -> dict[str, Settings]:
    """Candidates: queries per program, warps. With fewer queries per program, several programs read the same keys and
    values."""
    found = ((64, 4), (64, 2), (64, 8), (32, 4), (32, 2), (16, 2), (16, 1), (32, 1))
    return {
        f"{q} queries {w}w": {(window_attentions, "WINDOW_FORWARD"): (WindowConfig(POSITIONS, FEATURES, q, w),)}
        for q, w in found
    }


def backwards() -> dict[str, Settings]:
    """Candidates: warps, stages, programs per SM."""
    found = ((8, 1, 4), (4, 1, 4), (4, 1, 8), (4, 2, 4), (4, 2, 8), (8, 2, 2), (8, 1, 2), (4, 1, 16), (8, 2, 4))
    return {
        f"{w}w {s} stages {p} programs": {
            (window_attentions, "WINDOW_BACKWARD"): (WindowConfig(POSITIONS, FEATURES, 64, w, s),),
            (window_attentions, "WINDOW_PROGRAMS_PER_SM"): p,
        }
        for w, s, p in found
    }


def tasks(stage: int, images: int) -> tuple[Task, Task]:
    side, heads = STAGES[stage]
    shape, small = (images, side, heads), (2 if side == WINDOW[0] else 1, side, heads)
    elements, count = images * side * side * heads * FEATURES, repeats(shape)
    table = 4 * heads * POSITIONS * POSITIONS  # bytes of the bias
    name = f"stage {stage}, {images} images"
    return (
        Task(
            f"{name}, forward",
            4 * BYTES * elements + table,
            forwards(),
            partial(forward, shape),
            partial(check_forward, small),
            {"torch": partial(in_torch, shape)},
            goal="copy",
            repeats=count,
        ),
        Task(
            f"{name}, backward",
            7 * BYTES * elements + 2 * table,
            backwards(),
            partial(backward, shape),
            partial(check_backward, small),
            goal="copy",
            repeats=count,
        ),
    )


MANY = 2 if QUICK else 256
TASKS = tuple(task for stage in STAGES for images in (MANY, 1) for task in tasks(stage, images))

if __name__ == "__main__":
    main(TASKS, __doc__)
