"""Tune rotary position embeddings: table ROTARY of `attentions/tables.py`.

python benchmarks/tuning/rotary.py [--out rotary.json] [--seconds 20] [--quick]
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import DEVICE, QUICK, Call, Settings, Task, main, randn
from torch import Tensor

from rooftop.kernels.attentions import rotary
from rooftop.kernels.attentions.tables import RotaryConfig

Shape = tuple[int, int, int, int]  # B, H, S, D


def measured(width: int) -> Shape:
    return (1, 2, 3, width) if QUICK else (16, 32, 4096 * 128 // width, width)


def small(width: int) -> Shape:
    """Sizes for a check. They have the divisibility of the timed sizes, so that check and timing share compiled
    kernels."""
    return (1, 2, 3, width) if QUICK else (1, 32, 112, width)


def inputs(shape: Shape, layout: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(queries, keys with a quarter of the heads, cos, sin). With "bshd", queries and keys are views of (B, S, H,
    D)."""
    batch, heads, positions, width = shape

    def one(count: int) -> Tensor:
        if layout == "bshd":
            return randn(batch, positions, count, width).transpose(1, 2)
        return randn(batch, count, positions, width)

    places, frequencies = torch.arange(positions, device=DEVICE), torch.linspace(1, 0.01, width // 2, device=DEVICE)
    angles = torch.outer(places.float(), frequencies)
    return one(heads), one(max(1, heads // 4)), angles.cos()[None], angles.sin()[None]


def call(shape: Shape, layout: str, interleaved: bool) -> Call:
    query, key, cos, sin = inputs(shape, layout)
    return lambda: rotary._rope(query, key, cos, sin, None, 0, interleaved, False)


def check(shape: Shape, layout: str, interleaved: bool) -> None:
    query, key, cos, sin = inputs(shape, layout)
    found = rotary._rope(query, key, cos, sin, None, 0, interleaved, False)
    for mine, x in zip(found, (query, key), strict=True):
        expected = rotary.rope_reference(x.double(), cos, sin, None, 0, interleaved, False)
        torch.testing.assert_close(mine.float(), expected.float(), rtol=1e-2, atol=1e-2)


def by_torch(shape: Shape, layout: str) -> Call:
    """The rotation, written as models write it in PyTorch."""
    query, key, cos, sin = inputs(shape, layout)
    wide_cos, wide_sin = (torch.cat((t, t), -1).to(query.dtype) for t in (cos, sin))

    def rotate(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * wide_cos + torch.cat((-b, a), -1) * wide_sin

    return lambda: (rotate(query), rotate(key))


def configs(*found: tuple[int, int, int]) -> dict[str, Settings]:
    """Candidates: positions, heads, warps."""
    return {
        f"{p} positions {h} heads {w}w": {(rotary, "ROTARY"): (RotaryConfig(rotary.MOST_PAIRS, p, h, w),)}
        for p, h, w in found
    }


def task(width: int, layout: str, interleaved: bool, candidates: dict[str, Settings]) -> Task:
    width = 16 if QUICK else width
    batch, heads, positions, _ = measured(width)
    name = f"rope {width} {layout}{' interleaved' if interleaved else ''}"
    moved = 4 * batch * (heads + max(1, heads // 4)) * positions * width
    timed, checked = partial(call, measured(width), layout), partial(check, small(width), layout)
    peers = {} if interleaved else {"torch": partial(by_torch, measured(width), layout)}
    return Task(name, moved, candidates, partial(timed, interleaved), partial(checked, interleaved), peers, goal="copy")


WIDE = ((16, 4, 4), (8, 4, 4), (4, 8, 4), (16, 2, 4), (8, 8, 4), (8, 2, 2), (4, 4, 2), (32, 1, 4))
NARROW = ((32, 4, 4), (16, 4, 4), (16, 4, 2), (8, 8, 4))
TASKS = (
    task(128, "bshd", False, configs(*WIDE)),
    task(128, "bhsd", False, configs(*WIDE)),
    task(64, "bshd", False, configs(*NARROW)),
    task(128, "bhsd", True, configs((16, 4, 4), (8, 4, 4), (4, 4, 2))),
    task(256, "bhsd", False, configs((8, 4, 4), (4, 4, 4), (8, 2, 4))),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
