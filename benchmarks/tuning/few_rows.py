"""Tune linear_act's tiles for few rows, as in Swin-T and DETR at batch 1: entries for the tables of
`matmuls/tables.py`.

    python benchmarks/tuning/few_rows.py [--out few_rows.json] [--seconds 45] [--quick]

cuBLAS is a candidate, too. It needs two kernels if it lacks the epilogue (gelu). In the output, "tables" has each
task's fastest plan, whose tile belongs into an `Entry`. For products with relu or no activation, `choose` uses no
table. Their tasks show what this costs. Weights come from memory, as in a network whose weights do not fit into L2.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, copies_past_cache, main, randn
from torch import Tensor
from torch.nn import functional

from rooftop.kernels.matmuls.launches import forward
from rooftop.kernels.matmuls.matmuls import linear_act_reference
from rooftop.kernels.matmuls.tables import LinearPlan, Tile

Shape = tuple[int, int, int]  # M, N, K
SHAPES: dict[str, tuple[Shape, ...]] = {
    "gelu": ((196, 1536, 384), (49, 3072, 768), (784, 768, 192), (3136, 384, 96)),  # the first layers of Swin-T's MLPs
    "none": ((196, 384, 1536), (49, 768, 3072), (950, 256, 256), (100, 256, 2048)),
    "relu": ((950, 2048, 256), (100, 2048, 256)),  # DETR's layers
}
TINY: dict[str, tuple[Shape, ...]] = {"gelu": ((20, 64, 32),), "none": ((20, 64, 32),)}
TILES = (
    Tile("single", 64, 64, 64, 4, 6, early=True),
    Tile("single", 64, 64, 64, 4, 6),
    Tile("single", 64, 32, 128, 4, 4, early=True),
    Tile("single", 64, 64, 128, 4, 4, early=True),
    Tile("single", 64, 128, 64, 4, 4, early=True),
    Tile("single", 128, 64, 64, 4, 5, early=True),
    Tile("pointers", 64, 32, 64, 4, 5),
    Tile("pointers", 16, 64, 128, 4, 4),
)
PLAN = LIBRARY = LinearPlan("library", None, "to compare")
HERE = sys.modules[__name__]


def named(tile: Tile) -> str:
    return f"{tile.kernel}, {tile}{', early' * tile.early}"


CANDIDATES: dict[str, Settings] = {"library": {(HERE, "PLAN"): LIBRARY}} | {
    named(tile): {(HERE, "PLAN"): LinearPlan(tile.kernel, tile, "to be measured")} for tile in TILES
}


def operands(shape: Shape) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns, depth = shape
    return randn(rows, depth), randn(columns, depth) / depth**0.5, randn(columns)


def call(shape: Shape, activation: str, copies: int) -> Call:
    sets = [operands(shape) for _ in range(copies)]
    return lambda: [forward(PLAN, *each, activation, None, False) for each in sets]


def by_torch(shape: Shape, copies: int) -> Call:
    """The product without activation."""
    sets = [operands(shape) for _ in range(copies)]
    return lambda: [functional.linear(*each) for each in sets]


def check(shape: Shape, activation: str) -> None:
    """Check at the timed size, since the compiler specializes kernels on divisibility."""
    x, weight, bias = operands(shape)
    found, _ = forward(PLAN, x, weight, bias, activation, None, False)
    exact, _ = linear_act_reference(x.double(), weight.double(), bias.double(), activation, None)
    torch.testing.assert_close(found.double(), exact, rtol=2e-2, atol=2e-2)


def task(activation: str, shape: Shape) -> Task:
    rows, columns, depth = shape
    moved_bytes = 2 * (rows * depth + columns * depth + columns + rows * columns)
    copies = min(256, copies_past_cache(moved_bytes))
    tiles = {name: each for name, each in CANDIDATES.items() if not (QUICK and name == "library")}
    peers = {} if QUICK else {"linear": partial(by_torch, shape, copies)}
    return Task(
        f"{activation} {rows} x {columns} x {depth}",
        moved_bytes,
        tiles,
        partial(call, shape, activation, copies),
        partial(check, shape, activation),
        peers,
        "linear",
        copies,
    )


TASKS = tuple(task(activation, s) for activation, shapes in (TINY if QUICK else SHAPES).items() for s in shapes)

if __name__ == "__main__":
    main(TASKS, __doc__)
