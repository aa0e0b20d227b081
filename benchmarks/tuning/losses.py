"""Tune cross entropy: tables LOSS(_LONG), FUSED(_LONG) and GRADIENT_* of `losses/tables.py`.

    python benchmarks/tuning/losses.py [--out losses.json] [--seconds 45] [--quick]

"fused" computes loss and gradient in one kernel. "loss" and "gradient" are two separate kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from candidates import DEVICE, QUICK, Call, Settings, Task, main, randn
from torch import Tensor
from torch.nn import functional

from rooftop.kernels.losses import launches, losses, tables
from rooftop.kernels.losses.launches import Terms
from rooftop.kernels.operands.launch_data import ANY_BYTES
from rooftop.kernels.operands.row_tiles import LongConfig, TileConfig

TERMS = Terms(None, -100, 0.0, 0.0)
ROWS, SMALL = (4, 3) if QUICK else (8192, 512)  # rows in a timing, and in a check
MANY = 33_000 if QUICK else 128256  # classes


def inputs(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(logits, targets). One target is `ignore_index`."""
    target = torch.randint(columns, (rows,), device=DEVICE)
    target[1] = TERMS.ignore_index
    return randn(rows, columns), target


def plain(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(losses, gradient of their mean), computed in float32 by PyTorch."""
    wide = x.float().requires_grad_()
    (gradient,) = torch.autograd.grad(functional.cross_entropy(wide, target), wide)
    return functional.cross_entropy(wide.detach(), target, reduction="none"), gradient


def fused(x: Tensor, target: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """A call that returns (losses, gradient)."""
    dx, inverse = torch.empty_like(x), losses.inverse_of_targets(target, x.shape[1], TERMS, torch.float32)
    return lambda: (losses.losses_of_rows(x, target, TERMS, inverse, dx)[0], dx)


def gradient(x: Tensor, target: Tensor) -> Callable[[], Tensor]:
    statistics = losses.losses_of_rows(x, target, TERMS, None, None)[1]
    assert statistics is not None
    inverse, one = losses.inverse_of_targets(target, x.shape[1], TERMS, torch.float32), torch.ones((), device=DEVICE)
    return lambda: launches.gradient(one, x, target, statistics, TERMS, inverse)


def check_fused(columns: int) -> None:
    x, target = inputs(SMALL, columns)
    found, dx = fused(x, target)()
    expected, dwide = plain(x, target)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx.float(), dwide, rtol=1e-2, atol=1e-11)


def check_loss(columns: int) -> None:
    x, target = inputs(SMALL, columns)
    found, statistics = losses.losses_of_rows(x, target, TERMS, None, None)
    assert statistics is not None
    torch.testing.assert_close(found, plain(x, target)[0], rtol=1e-4, atol=1e-4)
    counted = target != TERMS.ignore_index
    log_sum_exp = statistics[0] + statistics[1].log()
    torch.testing.assert_close(log_sum_exp[counted], x.float().logsumexp(1)[counted])


def check_gradient(columns: int) -> None:
    x, target = inputs(SMALL, columns)
    torch.testing.assert_close(gradient(x, target)().float(), plain(x, target)[1], rtol=1e-2, atol=1e-11)


def call_fused(columns: int) -> Call:
    return fused(*inputs(ROWS, columns))


def call_loss(columns: int) -> Call:
    x, target = inputs(ROWS, columns)
    return lambda: losses.losses_of_rows(x, target, TERMS, None, None)


def call_gradient(columns: int) -> Call:
    return gradient(*inputs(ROWS, columns))


def torch_step(columns: int) -> Call:
    x, target = inputs(ROWS, columns)
    x.requires_grad_()
    return lambda: torch.autograd.grad(functional.cross_entropy(x, target), x)


def torch_loss(columns: int) -> Call:
    x, target = inputs(ROWS, columns)
    return lambda: functional.cross_entropy(x, target)


def long(table: str, *found: tuple[int, int, int, int] | tuple[int, int, int, int, str]) -> dict[str, Settings]:
    """Candidates for rows longer than a tile: block bytes, warps, programs per SM, stages."""
    configs = [LongConfig(ANY_BYTES, *each) for each in found]
    return {
        f"long {c.block_bytes // 1024}K {c.warps}w {c.programs_per_sm}p {c.stages}s{'' if c.again else ' plain'}": {
            (tables, table): (),
            (tables, f"{table}_LONG"): (c,),
        }
        for c in configs
    }


def tiles(table: str, *found: tuple[int, int, int]) -> dict[str, Settings]:
    """Candidates: rows, block bytes, warps."""
    configs = [TileConfig(ANY_BYTES, *each) for each in found]
    return {f"tile {c.rows}r {c.block_bytes}B {c.warps}w": {(tables, table): (c,)} for c in configs}


def blocks(*found: tuple[int, int]) -> dict[str, Settings]:
    return {f"{b}B {w}w": {(tables, "GRADIENT_BYTES"): b, (tables, "GRADIENT_WARPS"): w} for b, w in found}


def fused_task(columns: int, candidates: dict[str, Settings], goal: str) -> Task:
    columns = min(columns, 2048) if QUICK and columns < 100_000 else min(columns, MANY)
    moved, call, peers = 4 * ROWS * columns, partial(call_fused, columns), {"torch step": partial(torch_step, columns)}
    return Task(f"fused {columns}", moved, candidates, call, partial(check_fused, columns), peers, goal)


TASKS = (
    fused_task(
        50257,
        long("FUSED", (16384, 16, 2, 1), (8192, 8, 4, 4), (8192, 16, 2, 5), (16384, 16, 2, 4), (32768, 32, 1, 1)),
        "torch",
    ),
    fused_task(50304, long("FUSED", (32768, 32, 1, 1), (8192, 8, 4, 4), (16384, 16, 2, 1)), "roof"),
    fused_task(
        128256,
        long("FUSED", (32768, 32, 1, 1), (32768, 32, 1, 3), (8192, 16, 2, 5, ""), (8192, 8, 2, 5), (65536, 32, 1, 1)),
        "1.15 ms",
    ),
    Task(
        f"loss {MANY}",
        2 * ROWS * MANY,
        long("LOSS", (8192, 8, 5, 1, ""), (4096, 4, 8, 3, ""), (8192, 8, 8, 1, ""), (4096, 4, 10, 1, "")),
        partial(call_loss, MANY),
        partial(check_loss, MANY),
        {"torch loss": partial(torch_loss, MANY)},
        "1.65 ms with the gradient",
    ),
    Task(
        f"gradient {MANY}",
        4 * ROWS * MANY,
        blocks((4096, 2), (8192, 4), (2048, 1), (16384, 8)),
        partial(call_gradient, MANY),
        partial(check_gradient, MANY),
        goal="1.65 ms with the loss",
    ),
    fused_task(
        32768, long("FUSED", (8192, 8, 4, 4), (8192, 8, 4, 1)) | tiles("FUSED", (1, 16384, 32), (1, 16384, 16)), "roof"
    ),
    fused_task(16384, tiles("FUSED", (1, 8192, 8), (1, 8192, 16)) | long("FUSED", (8192, 8, 4, 1)), "roof"),
    fused_task(8192, tiles("FUSED", (1, 4096, 4), (1, 16384, 8), (1, 4096, 8)), "roof"),
    fused_task(1024, tiles("FUSED", (1, 1024, 2), (2, 2048, 4), (1, 2048, 4)), "roof"),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
