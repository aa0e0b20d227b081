"""Tune SwiGLU: tables FORWARD and BACKWARD of `gated/tables.py`.

python benchmarks/tuning/gated.py [--out gated.json] [--seconds 10] [--quick]
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, main, randn
from torch import Tensor
from torch.nn import functional

from rooftop.kernels.gated import launches, tables
from rooftop.kernels.gated.gated import SwigluBackward
from rooftop.kernels.gated.tables import GatedConfig

COLUMNS = 33 if QUICK else 14336
ROWS, SMALL = (3, 3) if QUICK else ((1 << 28) // COLUMNS, 68)  # timed and checked rows, with the same divisibility


def inputs(rows: int, packed: bool) -> tuple[Tensor, Tensor]:
    """(gate, up)."""
    gate, up = randn(rows, 2 * COLUMNS).chunk(2, -1)
    return (gate, up) if packed else (gate.contiguous(), up.contiguous())


def forward(packed: bool) -> Call:
    gate, up = inputs(ROWS, packed)
    return lambda: launches.forward(gate, up)


def backward(packed: bool) -> Call:
    gate, up = inputs(ROWS, packed)
    dy, (dgate, dup) = randn(ROWS, COLUMNS), inputs(ROWS, packed)
    return lambda: launches.backward(dy, gate, up, dgate, dup)


def by_torch(packed: bool) -> Call:
    gate, up = inputs(ROWS, packed)
    return lambda: functional.silu(gate) * up


def check_forward(packed: bool) -> None:
    gate, up = inputs(SMALL, packed)
    expected = functional.silu(gate.float()) * up.float()
    torch.testing.assert_close(launches.forward(gate, up).float(), expected, rtol=1e-2, atol=1e-3)


def check_backward(packed: bool) -> None:
    gate, up = inputs(SMALL, packed)
    dy, (dgate, dup) = randn(SMALL, COLUMNS), inputs(SMALL, packed)
    launches.backward(dy, gate, up, dgate, dup)
    expected = SwigluBackward(dy.double(), gate.double(), up.double()).formula()
    for found, exact in zip((dgate, dup), expected, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=1e-2)


def configs(table: str, *found: tuple[int, int]) -> dict[str, Settings]:
    """Candidates: bytes per tile, warps."""
    return {f"{b}B {w}w": {(tables, table): GatedConfig(b, w)} for b, w in found}


def tasks(packed: bool) -> tuple[Task, Task]:
    kind, elements = "packed" if packed else "separate", ROWS * COLUMNS
    forwards = configs("FORWARD", (4096, 4), (4096, 8), (2048, 2), (16384, 8), (8192, 4))
    backwards = configs("BACKWARD", (4096, 8), (2048, 4), (1024, 2), (8192, 8))
    peers = {"torch": partial(by_torch, packed)}
    return (
        Task(
            f"swiglu forward {kind}",
            6 * elements,
            forwards,
            partial(forward, packed),
            partial(check_forward, packed),
            peers,
            "copy",
        ),
        Task(
            f"swiglu backward {kind}",
            10 * elements,
            backwards,
            partial(backward, packed),
            partial(check_backward, packed),
            goal="copy",
        ),
    )


TASKS = (*tasks(True), *tasks(False))

if __name__ == "__main__":
    main(TASKS, __doc__)
