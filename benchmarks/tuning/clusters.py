"""Tune softmax and cross entropy by clusters (CLUSTER_* of `softmaxes/tables.py`), and compare with Triton's kernels.

    python benchmarks/tuning/clusters.py [--out clusters.json] [--seconds 45] [--quick]

A candidate's name has the blocks of a cluster, the threads of a block, the groups that a thread holds in registers, and
the rows in flight. A table's entry applies to the sizes at which it was fastest and all sizes between them: set
`above_bytes` and `row_bytes` by hand. For odd rows, the candidates are the shapes that `fullest` prefers. With --quick,
Triton's kernels run, since a CPU has no clusters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import losses as loss_tuning
import softmaxes as softmax_tuning
from candidates import QUICK, Call, Settings, Task, main

from rooftop.kernels.operands.launch_data import ANY_BYTES
from rooftop.kernels.softmaxes import clusters as cuda_softmaxes
from rooftop.kernels.softmaxes import plans, tables
from rooftop.kernels.softmaxes.tables import ClusterConfig
from rooftop.launch import count_launches

Shape = tuple[int, int, int, int]  # blocks, threads, held, stages


def by_cluster(table: str, check: Callable[[int], None], columns: int) -> None:
    """Run the check, and assert that a cluster's kernel ran if the table has an entry."""
    with count_launches() as launches:
        check(columns)
    assert QUICK or bool(getattr(tables, table)) == any("_cluster<" in name for name in launches), launches


def candidates(table: str, columns: int, shapes: tuple[Shape, ...]) -> dict[str, Settings]:
    odd = columns % 8 != 0
    found: dict[str, Settings] = {"Triton": {(tables, table): ()}}
    for shape in shapes:
        blocks, threads, held, stages = shape
        config = ClusterConfig(0, ANY_BYTES, blocks, threads, held, stages, odd)
        found[f"{blocks}b {threads}t {held}h {stages}s"] = {(tables, table): (config,)}
    return found


OF: dict[str, tuple[Callable[[int], Call], Callable[[int], None], Callable[[int], Call], int]] = {
    "CLUSTER_FORWARD": (softmax_tuning.forward, softmax_tuning.check_forward, softmax_tuning.torch_forward, 2),
    "CLUSTER_BACKWARD": (softmax_tuning.backward, softmax_tuning.check_backward, softmax_tuning.torch_backward, 3),
    "CLUSTER_FUSED": (
        lambda columns: loss_tuning.fused(*loss_tuning.inputs(loss_tuning.ROWS, columns)),
        loss_tuning.check_fused,
        loss_tuning.torch_step,
        2,
    ),
}


def task(table: str, columns: int, goal: str, *shapes: Shape) -> Task:
    columns = min(columns, 2048 + columns % 8) if QUICK else columns
    call, check, peer, tensors = OF[table]
    rows = loss_tuning.ROWS if table == "CLUSTER_FUSED" else softmax_tuning.rows_of(columns)
    proof = partial(by_cluster, table, check, columns)
    moved = 2 * tensors * rows * columns
    found = candidates(table, columns, shapes)
    peers = {"torch": partial(peer, columns)}
    return Task(f"{table} {columns}", moved, found, partial(call, columns), proof, peers, goal, changed=plans.forget)


LONG: tuple[Shape, ...] = ((8, 256, 8, 2), (8, 256, 8, 3), (16, 128, 8, 2), (16, 128, 8, 3), (4, 512, 8, 2))
LONG_PAIRS: tuple[Shape, ...] = ((8, 256, 8, 2), (16, 256, 4, 2), (8, 512, 4, 2), (4, 512, 8, 1), (16, 128, 8, 1))
MIDDLE: tuple[Shape, ...] = ((2, 256, 8, 2), (1, 512, 8, 2), (4, 128, 8, 2), (4, 128, 8, 3), (8, 64, 8, 2))
HALVED: tuple[Shape, ...] = ((2, 512, 8, 2), (8, 128, 8, 2), (4, 256, 8, 2), (4, 256, 8, 3))
LONGEST: tuple[Shape, ...] = ((8, 512, 8, 2), (16, 256, 8, 2), (16, 256, 8, 3))
SHORT: tuple[Shape, ...] = ((1, 256, 8, 2), (1, 256, 8, 3), (2, 128, 8, 2), (2, 128, 8, 3))
ODD_ROWS = (
    1101,
    1603,
    2601,
    3114,
    3996,
    5001,
    7326,
    7996,
    10007,
    12004,
    20815,
    36385,
    50257,
    65598,
    100003,
    126706,
    189881,
)
ODD_BACKWARD = (1603, 2601, 3114, 3996, 5001, 7996, 10007, 12004, 20012, 20815, 50257, 65598, 100003, 126706)
SHARED_BYTES = 232_448  # maximum shared memory of a block on an H200


def fullest(columns: int, tensors: int, stages: int = 2) -> tuple[Shape, ...]:
    """The five shapes that `cuda_softmaxes.fullest` prefers for half precision. The first one is in use."""
    found = cuda_softmaxes.fullest(-(-(columns + 7) // 8), tensors, stages, SHARED_BYTES)[:5]
    return tuple((c.blocks, c.threads, c.held, c.stages) for c in found)


TASKS = (
    *(task("CLUSTER_FORWARD", columns, "copy", *fullest(columns, 1)) for columns in ODD_ROWS),
    *(task("CLUSTER_FUSED", columns, "copy", *fullest(columns, 1)) for columns in ODD_ROWS),
    *(task("CLUSTER_BACKWARD", columns, "copy", *fullest(columns, 2)) for columns in ODD_BACKWARD),
    task("CLUSTER_BACKWARD", 189881, "copy", *fullest(189881, 2, 1)),
    task("CLUSTER_FORWARD", 32768, "4.0 TB/s", *MIDDLE),
    task("CLUSTER_FORWARD", 128256, "3.9 TB/s", *LONG),
    task("CLUSTER_FUSED", 128256, "1.15 ms", *LONG),
    task("CLUSTER_BACKWARD", 128256, "3.9 TB/s", *LONG_PAIRS),
    task("CLUSTER_FUSED", 32768, "copy", *MIDDLE),
    task("CLUSTER_BACKWARD", 65536, "copy", (8, 256, 8, 2), (4, 256, 8, 2), (8, 128, 8, 2)),
    task("CLUSTER_BACKWARD", 32768, "copy", (4, 256, 4, 2), (4, 128, 8, 2), (1, 512, 8, 1)),
    task("CLUSTER_FORWARD", 65536, "copy", *HALVED),
    task("CLUSTER_FUSED", 65536, "copy", *HALVED),
    task("CLUSTER_FORWARD", 16384, "copy", *SHORT),
    task("CLUSTER_FUSED", 16384, "copy", *SHORT),
    task("CLUSTER_FORWARD", 262144, "copy", *LONGEST),
    task("CLUSTER_FUSED", 262144, "copy", *LONGEST),
    task("CLUSTER_BACKWARD", 262144, "copy", (8, 512, 8, 1), (16, 512, 4, 1), (16, 256, 8, 1)),
    task("CLUSTER_FUSED", 8192, "copy", (1, 128, 8, 2), (1, 256, 4, 2)),
    task("CLUSTER_BACKWARD", 16384, "copy", (1, 256, 8, 1), (1, 512, 4, 2), (2, 256, 4, 2), (1, 256, 8, 2)),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
