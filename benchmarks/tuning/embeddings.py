"""Tune the gradient of embeddings: table RUNS of `lookups/tables.py`.

    python benchmarks/tuning/embeddings.py [--out embeddings.json] [--seconds 15] [--quick]

Tokens are distributed like words ("zipf"), over the whole table ("uniform"), or all equal ("one"). Candidates are
checked with a small vocabulary, because a large vocabulary's gradient takes gigabytes in each process.
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import DEVICE, QUICK, Call, Settings, Task, main, randn
from torch import Tensor

from rooftop.kernels.lookups import embeddings, launches, tables
from rooftop.kernels.lookups.tables import RunsConfig

ROWS, WIDTH, COUNT = (7, 5, 40) if QUICK else (128256, 4096, 65536)  # vocabulary, features, tokens
SMALL_ROWS, SMALL_COUNT = (7, 40) if QUICK else (1024, 4096)  # vocabulary and tokens in a check


def inputs(kind: str, rows: int, count: int) -> tuple[Tensor, Tensor]:
    """(gradient, tokens)."""
    tokens = torch.randint(rows, (count,), device=DEVICE)
    if kind == "zipf":
        tokens = (rows ** torch.rand(count, device=DEVICE)).long().clamp(1, rows) - 1
    if kind == "one":
        tokens = torch.zeros_like(tokens)
    return randn(count, WIDTH), tokens


def call(kind: str) -> Call:
    gradient, tokens = inputs(kind, ROWS, COUNT)
    return lambda: launches.add_rows(gradient, tokens, ROWS, -1)


def by_torch(kind: str) -> Call:
    gradient, tokens = inputs(kind, ROWS, COUNT)
    return lambda: torch.ops.aten.embedding_dense_backward(gradient, tokens, ROWS, -1, False)


def check(kind: str) -> None:
    gradient, tokens = inputs(kind, SMALL_ROWS, SMALL_COUNT)
    found = launches.add_rows(gradient, tokens, SMALL_ROWS, -1)
    exact = embeddings.embedding_backward_reference(gradient.double(), tokens, SMALL_ROWS, -1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=2e-2)


def runs(*found: tuple[int, int, int, int]) -> dict[str, Settings]:
    """Candidates: items per chunk, rows loaded at once, columns, warps."""
    return {
        f"chunk {chunk} ahead {ahead} {columns} columns {warps}w": {
            (tables, "RUNS"): RunsConfig(chunk, ahead, columns, warps)
        }
        for chunk, ahead, columns, warps in found
    }


def task(kind: str) -> Task:
    moved = 2 * WIDTH * (COUNT + ROWS)
    candidates = runs((32, 8, 512, 2), (64, 8, 512, 2), (64, 8, 1024, 4), (128, 8, 512, 2), (32, 16, 256, 1))
    timed, checked, peers = partial(call, kind), partial(check, kind), {"torch": partial(by_torch, kind)}
    # PyTorch's call waits for the GPU, so a graph cannot capture it.
    return Task(f"embedding backward {kind}", moved, candidates, timed, checked, peers, "torch", graph=False)


TASKS = [task(kind) for kind in ("zipf", "uniform", "one")]

if __name__ == "__main__":
    main(TASKS, __doc__)
