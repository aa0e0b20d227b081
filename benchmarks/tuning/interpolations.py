"""Tune trilinear interpolation (CORNERS_* of `lookups/tables.py`), and compare with the CUDA C++ kernel.

python benchmarks/tuning/interpolations.py [--out interpolations.json] [--seconds 15] [--quick]
"""

from __future__ import annotations

from functools import partial
from types import ModuleType

import torch
from candidates import DEVICE, QUICK, Call, Settings, Task, main, randn
from torch import Tensor

from rooftop.kernels.lookups import cuda_interpolations, interpolations, tables
from rooftop.kernels.lookups.tables import CornersConfig
from rooftop.kernels.operands.launch_data import ANY_BYTES

HALF = torch.float16


def points_of(channels: int) -> int:
    return 50 if QUICK else (1 << 26) // (8 * channels) // 16 * 16


SMALL = 50 if QUICK else 4096  # number of points in a check


def inputs(count: int, channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """(features, points, gradient)."""
    points = 2 * torch.rand(count, 3, device=DEVICE) - 1
    return randn(count, 8, channels, dtype=HALF), points, randn(count, channels, dtype=HALF)


def forward(channels: int, module: ModuleType = interpolations) -> Call:
    features, points, _ = inputs(points_of(channels), channels)
    return lambda: module._trilinear(features, points)


def backward(channels: int, module: ModuleType = interpolations) -> Call:
    features, points, gradient = inputs(points_of(channels), channels)
    return lambda: module._trilinear_backward(gradient, features, points, [True, True])


def check_forward(channels: int) -> None:
    features, points, _ = inputs(SMALL, channels)
    expected = cuda_interpolations.trilinear_reference(features, points)
    torch.testing.assert_close(interpolations._trilinear(features, points), expected, rtol=2e-3, atol=1e-3)


def check_backward(channels: int) -> None:
    features, points, gradient = inputs(SMALL, channels)
    found = interpolations._trilinear_backward(gradient, features, points, [True, True])
    expected = cuda_interpolations.trilinear_backward_reference(gradient, features, points, [True, True])
    torch.testing.assert_close(found[0], expected[0], rtol=2e-3, atol=1e-3)
    torch.testing.assert_close(found[1], expected[1], rtol=1e-3, atol=1e-3 * channels**0.5)


def blocks(direction: str, *found: tuple[int, int, int]) -> dict[str, Settings]:
    """Candidates: bytes that a program loads per corner for all its points, bytes per corner of one point, warps."""
    return {f"{b}B {c}B {w}w": {(tables, direction): (CornersConfig(ANY_BYTES, b, c, w),)} for b, c, w in found}


def tasks(channels: int) -> tuple[Task, Task]:
    size = 2 * 8 * channels * points_of(channels)
    found = ((1024, 512, 4), (1024, 512, 2), (512, 512, 2), (2048, 512, 8), (512, 512, 4))
    return (
        Task(
            f"CORNERS_FORWARD C={channels}",
            size + size // 8,
            blocks("CORNERS_FORWARD", *found),
            partial(forward, channels),
            partial(check_forward, channels),
            {"cuda c++": partial(forward, channels, cuda_interpolations)},
            "CUDA C++",
        ),
        Task(
            f"CORNERS_BACKWARD C={channels}",
            2 * size + size // 8,
            blocks("CORNERS_BACKWARD", *found),
            partial(backward, channels),
            partial(check_backward, channels),
            {"cuda c++": partial(backward, channels, cuda_interpolations)},
            "CUDA C++",
        ),
    )


TASKS = [task for channels in (32, 128, 8) for task in tasks(channels)]

if __name__ == "__main__":
    main(TASKS, __doc__)
