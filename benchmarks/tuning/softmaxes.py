"""Tune softmax: tables FORWARD, FORWARD_LONG, BACKWARD and BACKWARD_LONG of `softmaxes/tables.py`.

python benchmarks/tuning/softmaxes.py [--out softmaxes.json] [--seconds 45] [--quick]
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, main, randn
from torch import Tensor

from rooftop.kernels.operands.launch_data import ANY_BYTES
from rooftop.kernels.operands.row_tiles import LongConfig, TileConfig
from rooftop.kernels.softmaxes import launches, plans, tables
from rooftop.kernels.softmaxes.softmaxes import SoftmaxBackward

HALF = torch.bfloat16


def rows_of(columns: int) -> int:
    return 3 if QUICK else min(8192 if columns > 20000 else 1 << 30, (1 << 28) // columns // 16 * 16)


SMALL = 3 if QUICK else 512  # number of rows in a check


def gradients(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(dy, y)."""
    return randn(rows, columns), torch.softmax(randn(rows, columns), -1)


def forward(columns: int) -> Call:
    x = randn(rows_of(columns), columns)
    return lambda: launches.forward(x, None, 1.0, False, HALF)


def log_forward(columns: int) -> Call:
    x = randn(rows_of(columns), columns)
    return lambda: launches.forward(x, None, 1.0, True, HALF)


def check_log_forward(columns: int) -> None:
    x = randn(SMALL, columns)
    y = launches.forward(x, None, 1.0, True, HALF)
    torch.testing.assert_close(y.float(), torch.log_softmax(x.float(), -1), rtol=1e-2, atol=1e-2)


def torch_log_forward(columns: int) -> Call:
    x = randn(rows_of(columns), columns)
    return lambda: torch.log_softmax(x, -1)


def backward(columns: int) -> Call:
    dy, y = gradients(rows_of(columns), columns)
    return lambda: launches.backward(dy, y, None, 1.0, False, HALF)


def log_backward(columns: int) -> Call:
    dy, y = log_gradients(rows_of(columns), columns)
    return lambda: launches.backward(dy, y, None, 1.0, True, HALF)


def log_gradients(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """(dy, y)."""
    return randn(rows, columns), torch.log_softmax(randn(rows, columns), -1)


def check_log_backward(columns: int) -> None:
    dy, y = log_gradients(SMALL, columns)
    dx = launches.backward(dy, y, None, 1.0, True, HALF)
    expected = dy.float() - y.float().exp() * dy.float().sum(-1, keepdim=True)
    torch.testing.assert_close(dx.float(), expected, rtol=2e-2, atol=2e-2)


def torch_log_backward(columns: int) -> Call:
    dy, y = log_gradients(rows_of(columns), columns)
    return lambda: torch._log_softmax_backward_data(dy, y, -1, HALF)


def check_forward(columns: int) -> None:
    x = randn(SMALL, columns)
    y = launches.forward(x, None, 1.0, False, HALF)
    torch.testing.assert_close(y.float(), torch.softmax(x.float(), -1), rtol=1e-2, atol=1e-8)


def check_backward(columns: int) -> None:
    dy, y = gradients(SMALL, columns)
    dx = launches.backward(dy, y, None, 1.0, False, HALF)
    exact = SoftmaxBackward(dy.double(), y.double(), None, 1.0, False, torch.float64).formula()
    torch.testing.assert_close(dx.double(), exact, rtol=2e-2, atol=1e-7)


def torch_forward(columns: int) -> Call:
    x = randn(rows_of(columns), columns)
    return lambda: torch.softmax(x, -1)


def torch_backward(columns: int) -> Call:
    dy, y = gradients(rows_of(columns), columns)
    return lambda: torch._softmax_backward_data(dy, y, -1, HALF)


def long(direction: str, *found: tuple[int, int, int, int] | tuple[int, int, int, int, str]) -> dict[str, Settings]:
    """Candidates for rows longer than a tile: block bytes, warps, programs per SM, stages."""
    configs = [LongConfig(ANY_BYTES, *each) for each in found]
    return {
        f"long {c.block_bytes // 1024}K {c.warps}w {c.programs_per_sm}p {c.stages}s{'' if c.again else ' plain'}": {
            (tables, direction): (),
            (tables, f"{direction}_LONG"): (c,),
        }
        for c in configs
    }


def tiles(direction: str, *found: tuple[int, int, int] | tuple[int, int, int, bool]) -> dict[str, Settings]:
    """Candidates: rows, block bytes, warps, whether registers keep exponentials."""
    configs = [TileConfig(ANY_BYTES, *each) for each in found]
    return {
        f"tile {c.rows}r {c.block_bytes}B {c.warps}w{' hold' if c.hold else ''}": {(tables, direction): (c,)}
        for c in configs
    }


def task(direction: str, columns: int, candidates: dict[str, Settings], goal: str) -> Task:
    columns = min(columns, 20_000 if columns > 20_000 else 2048) if QUICK else columns
    of: dict[str, tuple[Callable[[int], Call], Callable[[int], None], Callable[[int], Call]]] = {
        "FORWARD": (forward, check_forward, torch_forward),
        "BACKWARD": (backward, check_backward, torch_backward),
        "LOG_FORWARD": (log_forward, check_log_forward, torch_log_forward),
        "LOG_BACKWARD": (log_backward, check_log_backward, torch_log_backward),
    }
    call, check, peer = (partial(each, columns) for each in of[direction])
    moved = 2 * columns * rows_of(columns) * (3 if direction.endswith("BACKWARD") else 2)
    return Task(
        f"{direction} {columns}",
        moved,
        candidates,
        call,
        check,
        {"torch": peer},
        goal,
        changed=plans.forget,
    )


F, B, LOG, LOG_BACK = "FORWARD", "BACKWARD", "LOG_FORWARD", "LOG_BACKWARD"
TASKS = (
    *(
        task(direction, columns, tiles(direction, *found), "copy")
        for columns in (621, 1003)
        for direction, found in (
            (F, ((4, 1024, 2, True), (4, 2048, 4, True), (1, 2048, 1, True), (1, 2048, 2, True), (2, 2048, 2, True))),
            (B, ((4, 1024, 2), (2, 2048, 2), (1, 2048, 1), (1, 2048, 2), (4, 2048, 4), (1, 4096, 1), (1, 1024, 1))),
        )
    ),
    *(
        task(LOG, columns, {"table": {}} | tiles(F, *pairs), "copy")
        for columns, pairs in (
            *((odd, ((1, 512, 2, True), (1, 512, 2), (1, 1024, 2, True), (1, 512, 1, True))) for odd in (621, 1003)),
            *((each, ((1, 8192, 8, True), (1, 8192, 8))) for each in (3114, 4096)),
            *((each, ((1, 8192, 16, True), (1, 8192, 16))) for each in (12001, 16384)),
        )
    ),
    *(
        task(LOG_BACK, odd, {"table": {}} | tiles(B, *pairs), "copy")
        for odd, pairs in (
            (621, ((1, 2048, 2), (1, 2048, 1), (2, 2048, 2), (1, 1024, 2), (1, 512, 2), (2, 1024, 2), (4, 1024, 4))),
            (1003, ((1, 2048, 2), (1, 2048, 4), (2, 2048, 4), (1, 1024, 2), (1, 1024, 4), (2, 1024, 4))),
        )
    ),
    task(F, 4096, tiles(F, (1, 8192, 8, True), (1, 2048, 4, True), (1, 4096, 4, True), (2, 4096, 8, True)), "copy"),
    task(F, 16384, tiles(F, (1, 8192, 16, True), (1, 4096, 8, True), (1, 16384, 16, True), (1, 8192, 8)), "copy"),
    task(
        B,
        16384,
        tiles(B, (1, 16384, 16), (1, 32768, 8), (1, 4096, 16), (1, 8192, 16))
        | long(
            B, (4096, 8, 4, 1), (8192, 8, 4, 1), (8192, 16, 2, 1), (8192, 16, 4, 1), (16384, 16, 2, 1), (4096, 8, 8, 1)
        ),
        "copy",
    ),
    task(B, 32768, tiles(B, (1, 32768, 16), (1, 16384, 16), (1, 65536, 16)), "copy"),
    task(
        F,
        32768,
        tiles(F, (1, 16384, 32), (1, 16384, 16), (1, 32768, 32)) | long(F, (8192, 8, 4, 4), (8192, 16, 2, 5)),
        "copy",
    ),
    task(
        F,
        128256,
        long(F, (8192, 8, 2, 5), (8192, 16, 2, 5, ""), (8192, 16, 2, 5), (32768, 32, 1, 3), (32768, 32, 1, 1)),
        "3.9 TB/s",
    ),
    task(B, 128256, long(B, (32768, 32, 1, 3), (32768, 32, 1, 1), (65536, 32, 1, 1), (16384, 16, 2, 4)), "3.9 TB/s"),
    task(F, 8192, tiles(F, (1, 4096, 8), (1, 4096, 8, True), (1, 4096, 4), (1, 8192, 8)), "copy"),
    task(B, 8192, tiles(B, (1, 8192, 8), (1, 8192, 4), (1, 16384, 8)), "copy"),
    task(B, 4096, tiles(B, (1, 4096, 4), (1, 8192, 4), (1, 8192, 8)), "copy"),
    task(F, 1024, tiles(F, (1, 512, 2, True), (1, 2048, 1, True), (2, 2048, 4, True), (4, 2048, 4, True)), "copy"),
    task(B, 1024, tiles(B, (1, 4096, 4), (1, 2048, 1), (2, 4096, 4), (1, 2048, 2)), "copy"),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
