"""Tune fused elementwise expressions: FLAT, TILES, SQUARE and the tables of sums in `elementwise/tables.py`.

python benchmarks/tuning/elementwise.py [--out elementwise.json] [--seconds 30] [--quick]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from candidates import QUICK, Call, Settings, Task, main, randn
from torch import Tensor
from torch.nn import functional

from rooftop.kernels import fused
from rooftop.kernels.elementwise import tables
from rooftop.kernels.elementwise.tables import FlatConfig, TileConfig

SINGLE, HALF = torch.float32, torch.bfloat16
ELEMENTS, SMALL = (1 << 12, 1 << 11) if QUICK else (1 << 27, 1 << 20)  # number of elements in a timing, and in a check
WIDE, TALL = (64, 64) if QUICK else (4096, 8192)
Function = Callable[..., Any]
Shapes = Callable[[int], list[tuple[int, ...]]]  # takes the number of elements, and returns the shapes of the inputs


def add(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def gelu(x: Tensor) -> Tensor:
    return functional.gelu(x)


def choose(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.where(a > b, c * 2 + 1, d)


def scaled(x: Tensor, s: Tensor) -> Tensor:
    return torch.clamp(x * s, -1.0, 1.0)


def gated(x: Tensor, y: Tensor, b: Tensor) -> Tensor:
    return x * torch.sigmoid(y + b)


def four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    return torch.where(a > b, c * a + b, d)


def alike(count: int) -> Shapes:
    return lambda elements: [(elements,)] * count


def with_row(columns: int) -> Shapes:
    return lambda elements: [(elements // columns, columns), (columns,)]


def with_column(columns: int) -> Shapes:
    return lambda elements: [(elements // columns, columns), (elements // columns, 1)]


def matrices(elements: int) -> list[tuple[int, ...]]:
    return [(elements // TALL, TALL)] * 2


def with_channels(elements: int) -> list[tuple[int, ...]]:
    channels, pixels = (4, 98) if QUICK else (256, 3136)
    return [(max(1, elements // (channels * pixels)), channels, pixels), (channels, 1)]


def inputs(shapes: list[tuple[int, ...]], dtype: torch.dtype, transposed: bool) -> list[Tensor]:
    """The inputs. With `transposed`, the last input is contiguous along its first dimension."""
    tensors = [randn(*shape, dtype=dtype) for shape in shapes]
    if transposed:
        tensors[-1] = tensors[-1].t().contiguous().t()
    return tensors


def call(function: Function, shapes: Shapes, dtype: torch.dtype, transposed: bool) -> Call:
    tensors = inputs(shapes(ELEMENTS), dtype, transposed)
    return lambda: function(*tensors)


def compiled(function: Function, shapes: Shapes, dtype: torch.dtype, transposed: bool) -> Call:
    torch._dynamo.reset()
    return call(torch.compile(function, dynamic=False), shapes, dtype, transposed)


def check(function: Function, shapes: Shapes, dtype: torch.dtype, transposed: bool) -> None:
    tensors = inputs(shapes(SMALL), dtype, transposed)
    tolerance = 2e-2 if dtype == HALF else 1e-5
    torch.testing.assert_close(fused(function)(*tensors), function(*tensors), rtol=tolerance, atol=tolerance)


def task(
    table: str, name: str, function: Function, dtype: torch.dtype, shapes: Shapes, candidates: dict[str, Settings]
) -> Task:
    arguments = (shapes, dtype, name == "transposed")
    sizes = shapes(ELEMENTS)
    elements = [math.prod(size) for size in (*sizes, torch.broadcast_shapes(*sizes))]
    peers: dict[str, Callable[[], Call]] = {"torch": partial(call, function, *arguments)}
    if not QUICK and name in ("gelu", "transposed", "row"):
        peers["compile"] = partial(compiled, function, *arguments)
    label = f"{table} {name} {str(dtype).removeprefix('torch.')}"
    moved = sum(elements) * dtype.itemsize
    timed = partial(call, fused(function), *arguments)
    return Task(label, moved, candidates, timed, partial(check, function, *arguments), peers, "compile")


def gradients(function: Function, tensors: list[Tensor]) -> Call:
    """The gradients of all inputs, from the gradient of the result."""
    tensors = [t.requires_grad_() for t in tensors]
    y = function(*tensors)
    torch.manual_seed(1)
    dy = randn(*y.shape).to(y.dtype)
    return lambda: torch.autograd.grad(y, tensors, dy, retain_graph=True)


def backward(table: str, function: Function, shapes: Shapes, full: int, candidates: dict[str, Settings]) -> Task:
    """A task of backward in bfloat16. `full` is the number of full-shape tensors that backward reads or writes,
    including gradients."""

    def call() -> Call:
        return gradients(fused(function), inputs(shapes(ELEMENTS), HALF, False))

    def compiled() -> Call:
        torch._dynamo.reset()
        return gradients(torch.compile(function, dynamic=False), inputs(shapes(ELEMENTS), HALF, False))

    def check() -> None:
        """Compare the result with the float32 result for the same inputs."""
        tensors = inputs(shapes(SMALL), HALF, False)
        exact = gradients(function, [t.float() for t in tensors])()
        for ours, theirs in zip(gradients(fused(function), tensors)(), exact, strict=True):  # type: ignore[call-overload]
            torch.testing.assert_close(ours.float(), theirs, rtol=2e-2, atol=2e-2)

    moved = full * ELEMENTS * HALF.itemsize
    peers = {} if QUICK or table == "FLAT" else {"compile": compiled}
    label = f"{table} {function.__name__} backward bfloat16"
    return Task(label, moved, candidates, call, check, peers, "compile")


def flat(*found: tuple[int, int]) -> dict[str, Settings]:
    """Candidates: elements per program, warps."""
    return {f"{n} {w}w": {(tables, "FLAT"): (FlatConfig(1 << 30, n, w),)} for n, w in found}


def tiles(table: str, *found: tuple[int, int, int]) -> dict[str, Settings]:
    """Candidates: elements per tile, columns, warps."""
    return {f"{n} of {c} {w}w": {(tables, table): TileConfig(n, c, w)} for n, c, w in found}


def sums(*found: tuple[int, int, int, int]) -> dict[str, Settings]:
    """Candidates: elements per tile, columns, warps, programs per SM."""
    return {
        f"{n} of {c} {w}w {p}p": {
            (tables, "LONG_SUMS"): TileConfig(n, c, w),
            (tables, "PROGRAMS_PER_SM"): p,
        }
        for n, c, w, p in found
    }


TASKS = (
    backward(
        *("SUMS", scaled, with_column(WIDE), 3),
        tiles("SUMS", (4096, 4096, 8), (4096, 4096, 4), (8192, 4096, 8), (4096, 256, 8), (2048, 256, 4)),
    ),
    backward(
        *("LONG_SUMS", gated, lambda n: [(n // WIDE, WIDE), *with_row(WIDE)(n)], 5),
        sums(
            *((2048, 1024, 4, 14), (2048, 1024, 4, 7), (2048, 1024, 4, 28), (1024, 1024, 4, 10), (1024, 1024, 4, 20)),
            *((4096, 1024, 8, 8), (2048, 256, 4, 14), (1024, 256, 4, 20)),
        ),
    ),
    backward("FLAT", four, alike(4), 8, flat((1024, 4), (512, 2), (1024, 2), (2048, 8), (2048, 4))),
    task("TILES", "channels", add, HALF, with_channels, tiles("TILES", (4096, 1024, 8), (4096, 4096, 8))),
    task("TILES", "narrow", add, HALF, with_row(3), tiles("TILES", (4096, 1024, 8), (1024, 1024, 4))),
    task("FLAT", "gelu", gelu, HALF, alike(1), flat((2048, 4), (4096, 4), (8192, 8), (2048, 2), (4096, 8))),
    task("FLAT", "add", add, HALF, alike(2), flat((1024, 4), (2048, 8), (2048, 4), (4096, 8))),
    task("FLAT", "gelu", gelu, SINGLE, alike(1), flat((1024, 4), (2048, 8), (512, 2))),
    task("FLAT", "choose", choose, HALF, alike(4), flat((1024, 4), (2048, 8), (2048, 4))),
    task("FLAT", "add", add, SINGLE, alike(2), flat((1024, 4), (1024, 8), (2048, 4))),
    task(
        *("TILES", "row", add, HALF, with_row(WIDE)),
        tiles("TILES", (4096, 1024, 8), (4096, 256, 8), (4096, 1024, 4), (2048, 1024, 4)),
    ),
    task("TILES", "column", add, HALF, with_column(WIDE), tiles("TILES", (4096, 1024, 8), (2048, 1024, 4))),
    task("TILES", "row", add, SINGLE, with_row(WIDE), tiles("TILES", (4096, 1024, 8), (2048, 1024, 8))),
    task(
        *("SQUARE", "transposed", add, HALF, matrices),
        tiles("SQUARE", (8192, 64, 8), (16384, 128, 8), (4096, 64, 8), (8192, 128, 8)),
    ),
    task("SQUARE", "transposed", add, SINGLE, matrices, tiles("SQUARE", (8192, 64, 8), (4096, 64, 8))),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
