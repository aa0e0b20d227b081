"""Tune reductions: tables ALL, ROWS, FAR_ROWS, PLACES, COLUMNS, SPLIT and SHARE_* of `reductions/tables.py`.

    python benchmarks/tuning/reductions.py [--out reductions.json] [--seconds 40] [--quick]

Kernels read small inputs from many copies in turn, so that they do not come from L2. Figures are for one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, copies_past_cache, main, randn
from torch import Tensor

from rooftop.kernels.operands.launch_data import ANY_BYTES
from rooftop.kernels.reductions import reductions, tables
from rooftop.kernels.reductions.plans import choose
from rooftop.kernels.reductions.tables import AllConfig, ColumnConfig, RowConfig, SplitConfig

SINGLE, HALF = torch.float32, torch.bfloat16
Shape = tuple[int, ...]
Dims = int | tuple[int, ...] | None


def everything(*found: tuple[int, int, int, bool, int], early: bool = False) -> dict[str, Settings]:
    """Candidates: block bytes, warps, programs per SM, whether the last program combines partial results, stages."""
    return {
        f"{b}B {w}w {p}p{' last' if last else ''} {s}s{' early' if early else ''}": {
            (tables, "ALL"): (AllConfig(ANY_BYTES, b, w, SplitConfig(p, last), s, early),)
        }
        for b, w, p, last, s in found
    }


def rows(table: str, *found: tuple[int, int, int] | tuple[int, int, int, int]) -> dict[str, Settings]:
    """Candidates: rows, block bytes per row, warps, stages."""
    configs = [RowConfig(ANY_BYTES, *each) for each in found]
    return {
        f"{c.rows}r {c.block_bytes}B {c.warps}w{f' {c.stages}s' if c.stages > 1 else ''}": {(tables, table): (c,)}
        for c in configs
    }


def columns(*found: tuple[int, int, int, int, int]) -> dict[str, Settings]:
    """Candidates: bytes per row of a tile, bytes per tile, warps, programs per SM, stages."""
    return {
        f"{width}B of {tile}B {w}w {p}p {s}s": {
            (tables, "COLUMNS"): ColumnConfig(width, tile, w, s, SplitConfig(p, True))
        }
        for width, tile, w, p, s in found
    }


def far_rows(*found: tuple[int, int, int, int, int]) -> dict[str, Settings]:
    """Candidates: rows, block bytes per row, warps, programs per SM, stages."""
    return {
        f"{r}r {b}B {w}w {p}p {s}s": {
            (tables, "FAR_ROWS"): (RowConfig(ANY_BYTES, r, b, w, s),),
            (tables, "SPLIT"): SplitConfig(p, True),
        }
        for r, b, w, p, s in found
    }


def gradients(*found: tuple[int, int]) -> dict[str, Settings]:
    """Candidates: bytes per tile, warps. One more candidate counts ties in a separate kernel."""
    candidates: dict[str, Settings] = {
        f"{b}B {w}w": {(tables, "SHARE_BLOCK_BYTES"): b, (tables, "SHARE_WARPS"): w} for b, w in found
    }
    return candidates | {"two kernels": {(tables, "SHARE_ELEMENTS"): 0}}


def reduced(kind: str, x: Tensor, dim: Dims) -> Tensor:
    function: Callable[[Tensor, Dims], Tensor] = getattr(reductions, kind)
    return function(x, dim)


def by_torch(kind: str, x: Tensor, dim: Dims) -> Tensor:
    function: Callable[[Tensor, Dims], Tensor] = getattr(torch, kind)
    return function(x, dim)


def copies(shape: Shape, dtype: torch.dtype) -> int:
    return copies_past_cache(math.prod(shape) * dtype.itemsize)


def call(of: Callable[..., Tensor], kind: str, shape: Shape, dtype: torch.dtype, dim: Dims) -> Call:
    tensors = [randn(*shape, dtype=dtype) for _ in range(copies(shape, dtype))]
    return lambda: [of(kind, x, dim) for x in tensors]


def check(kind: str, shape: Shape, dtype: torch.dtype, dim: Dims) -> None:
    x = randn(*shape, dtype=dtype)
    found = reduced(kind, x, dim)
    if kind in ("argmax", "amax"):
        assert torch.equal(found, by_torch(kind, x, dim))
        return
    size = (x.numel() / max(1, found.numel())) ** 0.5  # a sum's error grows with the root of its number of terms
    tolerance = 1e-4 if dtype == SINGLE else 1e-2
    torch.testing.assert_close(found.double(), x.double().sum(dim), rtol=tolerance, atol=tolerance * size)


def backward(shape: Shape) -> Call:
    x = randn(*shape)
    y = torch.amax(x, 1)
    return lambda: reductions.ReduceBackward(y, x, y, "amax", [1]).run()


def torch_backward(shape: Shape) -> Call:
    x = randn(*shape)
    y = torch.amax(x, 1)
    equal = x == y[:, None]
    return lambda: equal * (y / equal.sum(1))[:, None]


def check_backward(shape: Shape) -> None:
    x = randn(*shape)
    y = torch.amax(x, 1)
    found = reductions.ReduceBackward(y, x, y, "amax", [1]).run()
    expected = reductions.ReduceBackward(y.double(), x.double(), y.double(), "amax", [1]).formula()
    torch.testing.assert_close(found.double(), expected, rtol=1e-2, atol=1e-2)


def small(shape: Shape) -> Shape:
    """The shape for a check. It has fewer rows, with the same divisibility, and the same columns."""
    if QUICK:
        return tuple(min(size, 600 if len(shape) == 1 else 40) for size in shape)
    return (min(shape[0], 1 << 24 if len(shape) == 1 else 1024), *shape[1:])


def task(
    name: str, shape: Shape, dim: Dims, dtype: torch.dtype, candidates: dict[str, Settings], kind: str = "sum"
) -> Task:
    shape = small(shape) if QUICK else shape
    return Task(
        f"{name} {kind} {'x'.join(map(str, shape))}",
        math.prod(shape) * dtype.itemsize,
        candidates,
        partial(call, reduced, kind, shape, dtype, dim),
        partial(check, kind, small(shape) if dim in (1, None) else shape, dtype, dim),
        {"torch": partial(call, by_torch, kind, shape, dtype, dim)},
        "torch",
        repeats=copies(shape, dtype),
        changed=choose.cache_clear,
    )


def backward_task(shape: Shape, candidates: dict[str, Settings]) -> Task:
    shape = small(shape) if QUICK else shape
    checked, peers = partial(check_backward, small(shape)), {"torch": partial(torch_backward, shape)}
    moved, changed = 4 * math.prod(shape), choose.cache_clear
    timed = partial(backward, shape)
    return Task(f"backward amax {shape}", moved, candidates, timed, checked, peers, "torch", changed=changed)


FEW_SHAPES: tuple[tuple[int, int, int, bool, int], ...] = (
    *((8192, 8, 4, True, 1), (16384, 16, 2, True, 1), (8192, 4, 4, True, 1), (4096, 4, 8, True, 1)),
    *((32768, 32, 1, True, 1), (32768, 16, 1, True, 1), (16384, 8, 2, True, 1), (16384, 4, 2, True, 1)),
)
FEW = everything(*FEW_SHAPES, (8192, 8, 4, False, 1), (32768, 16, 1, False, 1)) | everything(*FEW_SHAPES, early=True)
ODD_SHAPES: tuple[tuple[int, int, int, bool, int], ...] = (
    *((8192, 8, 8, True, 1), (16384, 8, 4, True, 1), (16384, 8, 8, True, 1), (8192, 8, 4, True, 1)),
    *((4096, 4, 16, True, 1), (8192, 4, 8, True, 1), (16384, 16, 4, True, 1), (32768, 16, 2, True, 1)),
    *((16384, 8, 4, True, 3), (8192, 8, 4, True, 3), (16384, 16, 2, True, 3)),
)
ODD = everything(*ODD_SHAPES, (8192, 8, 8, False, 1)) | everything(*ODD_SHAPES[:8], early=True)
MANY_SHAPES: tuple[tuple[int, int, int, bool, int], ...] = (
    *((16384, 8, 8, True, 1), (16384, 8, 4, True, 3), (8192, 8, 8, True, 1), (32768, 16, 2, True, 3)),
    *((16384, 16, 4, True, 1), (8192, 4, 8, True, 3)),
)
MANY = everything(*MANY_SHAPES, (8192, 8, 8, False, 1)) | everything(*MANY_SHAPES, early=True)
WIDE = columns(
    *((256, 8192, 8, 4, 3), (256, 8192, 8, 2, 5), (128, 8192, 8, 4, 4), (256, 16384, 8, 2, 3)),
    *((128, 8192, 4, 4, 4), (128, 8192, 8, 4, 5), (128, 8192, 8, 3, 6), (128, 4096, 4, 8, 4), (128, 16384, 8, 2, 4)),
    *((64, 8192, 8, 4, 4), (128, 8192, 8, 8, 3), (128, 4096, 4, 4, 8), (128, 16384, 16, 2, 4), (256, 32768, 16, 1, 4)),
    *((128, 8192, 4, 16, 4), (128, 4096, 4, 16, 4), (128, 4096, 2, 8, 4), (128, 4096, 2, 16, 4), (128, 8192, 4, 4, 5)),
    *((256, 8192, 4, 16, 3), (256, 8192, 4, 32, 3), (128, 8192, 4, 32, 4), (256, 8192, 4, 4, 4), (256, 4096, 4, 8, 4)),
)
SHORT_ROWS: tuple[tuple[int, int, int] | tuple[int, int, int, int], ...] = (
    *((2, 2048, 4), (2, 2048, 2), (4, 2048, 4), (4, 2048, 8), (8, 2048, 8), (8, 512, 4), (8, 512, 4, 3)),
    *((4, 512, 4), (4, 512, 4, 3), (16, 512, 4, 3), (16, 512, 8), (4, 1024, 4), (4, 1024, 4, 2), (8, 1024, 8)),
)
FAR = far_rows(
    *((1, 16384, 8, 4, 4), (1, 16384, 8, 4, 3), (1, 16384, 8, 4, 5), (1, 16384, 4, 8, 1)),
    *((1, 4096, 8, 4, 4), (2, 8192, 8, 2, 3), (1, 16384, 8, 4, 1)),
)
GRADIENTS = gradients((8192, 4), (4096, 2), (4096, 4), (16384, 8), (2048, 1), (8192, 8))
TASKS = (
    backward_task((1 << 17, 1024), GRADIENTS),
    task("columns", (1 << 17, 1024), 0, HALF, WIDE),
    task("middle", (64, 2048, 1024), 1, HALF, WIDE),
    task("channels", (64, 256, 56, 56), (0, 2, 3), HALF, FAR),
    task("all", (2750949,), None, SINGLE, ODD),
    task("all", (5945623,), None, SINGLE, ODD),
    task("all", (1 << 20,), None, SINGLE, FEW),
    task("all", (1 << 24,), None, SINGLE, MANY),
    task("all", (1 << 28,), None, SINGLE, MANY),
    task("all", (1 << 16,), None, SINGLE, FEW),
    task("rows", (1 << 17, 1024), 1, HALF, rows("ROWS", *SHORT_ROWS)),
    task("rows", (1 << 17, 1024), 1, HALF, rows("ROWS", *SHORT_ROWS), "amax"),
    task("rows", (1 << 16, 2048), 1, HALF, rows("ROWS", *SHORT_ROWS)),
    task("rows", (1 << 15, 4096), 1, HALF, rows("ROWS", (1, 16384, 8), (1, 8192, 4), *SHORT_ROWS[5:])),
    task("rows", (1 << 21, 64), 1, HALF, rows("ROWS", (32, 128, 2), (16, 128, 1), (32, 128, 4), (64, 128, 4))),
    task("rows", (1 << 19, 256), 1, HALF, rows("ROWS", (8, 512, 4), (8, 512, 2), (4, 512, 2), (16, 512, 4))),
    task("rows", (1 << 23, 16), 1, HALF, rows("ROWS", (128, 32, 4), (64, 32, 2), (128, 32, 2))),
    task("rows", (1 << 14, 8192), 1, HALF, rows("ROWS", (1, 16384, 8), (1, 8192, 8), (1, 16384, 4))),
    task("rows", (1024, 128256), 1, HALF, rows("ROWS", (1, 16384, 8), (1, 8192, 8), (1, 8192, 4))),
    task("places", (1024, 128256), 1, HALF, rows("PLACES", (1, 8192, 8), (1, 4096, 8), (1, 8192, 4)), "argmax"),
    task("places", (1 << 14, 8192), 1, HALF, rows("PLACES", (1, 8192, 8), (1, 16384, 8), (1, 4096, 4)), "argmax"),
    backward_task((1 << 14, 8192), gradients((8192, 8), (8192, 16))),
    backward_task((1 << 12, 32768), gradients((8192, 4))),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
