"""Tune random numbers: tables FILL and DROPOUT of `randoms/tables.py`.

python benchmarks/tuning/randoms.py [--out randoms.json] [--seconds 15] [--quick]
"""

from __future__ import annotations

from functools import partial

import torch
from candidates import DEVICE, QUICK, Call, Settings, Task, main, randn

from rooftop.kernels import Box, counter_dropout, random_normal
from rooftop.kernels.operands.launch_data import ElementsConfig
from rooftop.kernels.randoms import randoms, tables

SHAPES = {"aligned": (3, 64) if QUICK else (32768, 4096), "odd": (3, 33) if QUICK else (32768, 4095)}
KEY = 1234567


def part_of(shape: tuple[int, int]) -> Box:
    """Half of the columns, so that rows are not contiguous. If the number of columns is odd, rows cut groups of
    four."""
    return Box((shape[0], 2 * shape[1]), (0, shape[1]), shape)


def dropout(name: str) -> Call:
    x = randn(*SHAPES[name])
    box = part_of(SHAPES[name])
    return lambda: counter_dropout(x, 0.1, KEY, box=box)


def dropout_by_torch(name: str) -> Call:
    x = randn(*SHAPES[name])
    return lambda: torch.nn.functional.dropout(x, 0.1)


def normal(name: str) -> Call:
    box = part_of(SHAPES[name])
    return lambda: random_normal(box, KEY, dtype=torch.bfloat16, device=DEVICE)


def normal_by_torch(name: str) -> Call:
    out = randn(*SHAPES[name])
    return lambda: out.normal_()


def small(name: str) -> tuple[int, int]:
    return 67, SHAPES[name][1]


def check_dropout(name: str) -> None:
    shape = small(name)
    box = part_of(shape)
    x = torch.ones(shape)
    assert torch.equal(counter_dropout(x.to(DEVICE), 0.1, KEY, box=box).cpu(), box.of(whole_mask(shape)))


def whole_mask(shape: tuple[int, int]) -> torch.Tensor:
    """The dropout mask, computed by the float64 implementation."""
    scale = randoms._kept_scale(0.1, torch.float32)
    whole = counter_dropout(torch.ones(shape[0], 2 * shape[1], dtype=torch.float64), 0.1, KEY)
    return torch.where(whole > 0, scale, 0.0).float()


def check_normal(name: str) -> None:
    box = part_of(small(name))
    expected = random_normal(box, KEY, dtype=torch.float64)
    assert torch.equal(random_normal(box, KEY, device=DEVICE).cpu().double(), expected)


def configs(table: str) -> dict[str, Settings]:
    found = ((1024, 4), (2048, 8), (1024, 8), (512, 4), (2048, 4), (256, 2))
    return {f"{n} {w}w": {(tables, table): ElementsConfig(n, w)} for n, w in found}


def tasks(name: str) -> tuple[Task, Task]:
    rows, columns = SHAPES[name]
    elements = rows * columns
    return (
        Task(
            f"dropout {name}",
            4 * elements,
            configs("DROPOUT"),
            partial(dropout, name),
            partial(check_dropout, name),
            {"torch": partial(dropout_by_torch, name)},
            "copy",
        ),
        Task(
            f"normal {name}",
            2 * elements,
            configs("FILL"),
            partial(normal, name),
            partial(check_normal, name),
            {"torch": partial(normal_by_torch, name)},
            "fill",
        ),
    )


TASKS = (*tasks("aligned"), *tasks("odd"))

if __name__ == "__main__":
    main(TASKS, __doc__)
