"""Tables of softmax and cross entropy by clusters of blocks: CLUSTER_* of `cuda_softmaxes.py`, beside Triton's kernels.

    python benchmarks/tuning/clusters.py [--out clusters.json] [--seconds 45] [--quick]

A candidate is named by blocks of a cluster, threads of a block, groups that a thread holds in registers, and rows on
their way at a time. An entry of a table holds for the sizes between those measured where it won: `above_bytes` and
`row_bytes` are to be set by hand. With --quick there is no cluster: Triton's kernels are run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import losses as loss_tuning
import softmaxes as softmax_tuning
from candidates import QUICK, Call, Settings, Task, main

from rooftop.kernels import cuda_softmaxes
from rooftop.kernels.cuda_softmaxes import ClusterConfig
from rooftop.kernels.softmaxes import ANY_BYTES
from rooftop.launch import count_launches

Shape = tuple[int, int, int, int]  # blocks, threads, held, stages


def by_cluster(table: str, check: Callable[[int], None], columns: int) -> None:
    """The check, and (where the table has an entry) that clusters ran in it."""
    with count_launches() as launches:
        check(columns)
    assert QUICK or bool(getattr(cuda_softmaxes, table)) == any("_cluster<" in name for name in launches), launches


def candidates(table: str, columns: int, shapes: tuple[Shape, ...]) -> dict[str, Settings]:
    odd = columns % 8 != 0
    found: dict[str, Settings] = {"Triton": {(cuda_softmaxes, table): ()}}
    for shape in shapes:
        blocks, threads, held, stages = shape
        config = ClusterConfig(0, ANY_BYTES, blocks, threads, held, stages, odd)
        found[f"{blocks}b {threads}t {held}h {stages}s"] = {(cuda_softmaxes, table): (config,)}
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
    return Task(f"{table} {columns}", moved, found, partial(call, columns), proof, peers, goal)


LONG: tuple[Shape, ...] = ((8, 256, 8, 2), (8, 256, 8, 3), (16, 128, 8, 2), (16, 128, 8, 3), (4, 512, 8, 2))
LONG_PAIRS: tuple[Shape, ...] = ((8, 256, 8, 2), (16, 256, 4, 2), (8, 512, 4, 2), (4, 512, 8, 1), (16, 128, 8, 1))
MIDDLE: tuple[Shape, ...] = ((2, 256, 8, 2), (1, 512, 8, 2), (4, 128, 8, 2), (4, 128, 8, 3), (8, 64, 8, 2))
HALVED: tuple[Shape, ...] = ((2, 512, 8, 2), (8, 128, 8, 2), (4, 256, 8, 2), (4, 256, 8, 3))
LONGEST: tuple[Shape, ...] = ((8, 512, 8, 2), (16, 256, 8, 2), (16, 256, 8, 3))
SHORT: tuple[Shape, ...] = ((1, 256, 8, 2), (1, 256, 8, 3), (2, 128, 8, 2), (2, 128, 8, 3))
ODD_BACKWARD = {5001: (1, 2), 20815: (1, 2), 36385: (2, 4), 50257: (4, 8), 65598: (4, 8), 126706: (8, 16)}
ODD_ROWS = {  # blocks of a cluster, by the length of a row that does not begin at a multiple of 16 bytes
    2601: (1,),
    3114: (1,),
    5001: (1, 2),
    7326: (1, 2),
    10007: (1, 2, 4),
    20815: (1, 2, 4),
    36385: (2, 4, 8),
    50257: (2, 4, 8),
    65598: (4, 8, 16),
    100003: (4, 8, 16),
    126706: (8, 16),
    189881: (8, 16),
}


def fitting(columns: int, blocks: Sequence[int], stages: int = 2) -> tuple[Shape, ...]:
    """The two shapes for each number of blocks whose threads have the fewest groups that are none; half precision."""
    found: list[Shape] = []
    for count in blocks:
        part_groups = -(-(columns + 7) // (8 * count))
        shapes = [(count, 32 * -(-part_groups // (32 * held)), held, stages) for held in range(3, 9)]
        possible = [shape for shape in shapes if 64 <= shape[1] <= 512]
        found += sorted(possible, key=lambda shape: shape[1] * shape[2])[:2]
    return tuple(found)


TASKS = (
    *(task("CLUSTER_FORWARD", columns, "copy", *fitting(columns, blocks)) for columns, blocks in ODD_ROWS.items()),
    *(task("CLUSTER_FUSED", columns, "copy", *fitting(columns, blocks)) for columns, blocks in ODD_ROWS.items()),
    *(task("CLUSTER_BACKWARD", columns, "copy", *fitting(columns, blocks)) for columns, blocks in ODD_BACKWARD.items()),
    task("CLUSTER_BACKWARD", 189881, "copy", (16, 256, 6, 1), (16, 512, 3, 1)),
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
