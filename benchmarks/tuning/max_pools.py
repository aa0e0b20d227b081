"""Tune max pooling after the stems of DETR and ResNet (3 x 3, stride 2, 64 channels): table MAX_POOL of
`convolutions/tables.py`.

python benchmarks/tuning/max_pools.py [--out max_pools.json] [--seconds 15] [--quick]
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import QUICK, Call, Settings, Task, copies_past_cache, main, randn
from torch import Tensor
from torch.nn import functional

from rooftop.kernels.convolutions import max_pools, tables
from rooftop.kernels.convolutions.tables import PoolConfig, choose_pool

WINDOW = (3, 2, 1)  # kernel size, stride and padding
SIZES = ((1, 8, 9),) if QUICK else ((1, 400, 608), (8, 400, 608), (1, 112, 112), (256, 112, 112))  # B, H, W
CONFIGS = (
    *(PoolConfig(2, 16, 64, 4), PoolConfig(1, 16, 64, 4), PoolConfig(1, 32, 64, 4), PoolConfig(2, 8, 64, 4)),
    *(PoolConfig(4, 8, 64, 4), PoolConfig(4, 16, 64, 8), PoolConfig(2, 16, 64, 8), PoolConfig(8, 8, 64, 8)),
    *(PoolConfig(1, 8, 64, 2), PoolConfig(4, 4, 64, 2)),
)
CANDIDATES: dict[str, Settings] = {
    f"{c.lines} x {c.pixels}, {c.warps} warps": {(tables, "MAX_POOL"): c} for c in CONFIGS
}


def images(batch: int, height: int, width: int) -> Tensor:
    return randn(batch, 64, height, width).to(memory_format=torch.channels_last)


def ours(size: tuple[int, int, int], copies: int) -> Call:
    sets = [images(*size) for _ in range(copies)]
    return lambda: [max_pools.max_pool2d(x, *WINDOW) for x in sets]


def by_torch(size: tuple[int, int, int], copies: int) -> Call:
    sets = [images(*size) for _ in range(copies)]
    return lambda: [functional.max_pool2d(x, *WINDOW) for x in sets]


def check() -> None:
    x = images(2, 19, 45)
    assert torch.equal(max_pools.max_pool2d(x, *WINDOW), functional.max_pool2d(x, *WINDOW))


def task(size: tuple[int, int, int]) -> Task:
    batch, height, width = size
    moved_bytes = 2 * batch * 64 * (height * width + -(-height // 2) * -(-width // 2))
    copies = copies_past_cache(moved_bytes)
    peers = {"torch": partial(by_torch, size, copies)}
    name = f"{batch} of {height} x {width}"
    timed, changed = partial(ours, size, copies), choose_pool.cache_clear
    return Task(name, moved_bytes, CANDIDATES, timed, check, peers, "copy", copies, changed=changed)


TASKS = tuple(map(task, SIZES))

if __name__ == "__main__":
    main(TASKS, __doc__)
