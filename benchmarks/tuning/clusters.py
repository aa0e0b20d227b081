"""Tables of softmax and cross entropy by clusters of blocks: CLUSTER_* of `cuda_softmaxes.py`, beside Triton's kernels.

    python benchmarks/tuning/clusters.py [--out clusters.json] [--seconds 45] [--quick]

A candidate is named by blocks of a cluster, threads of a block, rows in shared memory at a time, whether clusters stay
(each with rows in turns) or have a row each, and the groups that a thread holds in registers, if it does. An entry of a
table holds for the sizes between those measured where it won: `above_bytes` and `row_bytes` are to be set by hand. With
--quick there is no cluster: Triton's kernels are run.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import losses as loss_tuning
import softmaxes as softmax_tuning
from candidates import QUICK, Call, Settings, Task, main

from rooftop.kernels import cuda_softmaxes
from rooftop.kernels.cuda_softmaxes import ClusterConfig
from rooftop.kernels.softmaxes import ANY_BYTES
from rooftop.launch import count_launches

Shape = tuple[int, int, int, bool, int]  # blocks, threads, stages, resident, held


def by_cluster(table: str, check: Callable[[int], None], columns: int) -> None:
    """The check, and (where the table has an entry) that clusters ran in it."""
    with count_launches() as launches:
        check(columns)
    assert QUICK or bool(getattr(cuda_softmaxes, table)) == any(
        "_cluster<" in name or "_held<" in name for name in launches
    ), launches


def candidates(table: str, columns: int, shapes: tuple[Shape, ...]) -> dict[str, Settings]:
    odd = columns % 8 != 0
    found: dict[str, Settings] = {"Triton": {(cuda_softmaxes, table): ()}}
    for shape in shapes:
        *most, held = shape
        blocks, threads, stages, resident = most
        name = f"{blocks}b {threads}t {stages}s {'turns' if resident else 'each'}" + (f" {held}h" if held else "")
        found[name] = {(cuda_softmaxes, table): (ClusterConfig(0, ANY_BYTES, *most, odd=odd, held=held),)}
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


LONG: tuple[Shape, ...] = (
    *((4, 512, 3, True, 8), (8, 256, 3, True, 8), (4, 1024, 3, True, 4), (8, 256, 1, False, 0)),
    *((8, 256, 2, True, 8), (4, 512, 2, True, 8)),
)
LONG_PAIRS: tuple[Shape, ...] = (
    *((8, 512, 3, True, 4), (8, 512, 2, True, 4), (8, 256, 2, True, 8), (8, 256, 3, True, 8), (4, 512, 1, True, 8)),
)
MIDDLE: tuple[Shape, ...] = (
    *((1, 512, 3, True, 8), (1, 512, 2, True, 8), (2, 256, 3, True, 8), (1, 1024, 3, True, 4), (1, 512, 1, False, 0)),
)
HALVED: tuple[Shape, ...] = (
    *((2, 512, 2, True, 8), (2, 512, 1, True, 8), (4, 256, 2, True, 8), (4, 256, 3, True, 8), (2, 1024, 1, True, 4)),
    *((1, 512, 1, False, 0),),
)
ODD: tuple[Shape, ...] = (
    *((2, 512, 4, True, 7), (2, 512, 2, True, 7), (4, 256, 4, True, 7), (4, 256, 2, True, 7), (2, 1024, 4, True, 4)),
    *((1, 512, 1, False, 0),),
)
ODD_PAIRS: tuple[Shape, ...] = (
    *((2, 512, 2, True, 7), (4, 256, 2, True, 7), (4, 512, 4, True, 4), (8, 256, 2, True, 4), (2, 512, 2, True, 0)),
)
SHORT: tuple[Shape, ...] = ((1, 512, 6, True, 4), (1, 256, 3, True, 8), (1, 512, 3, True, 4), (1, 256, 2, True, 8))

TASKS = (
    task("CLUSTER_FORWARD", 128256, "3.9 TB/s", *LONG),
    task("CLUSTER_FUSED", 128256, "1.15 ms", *LONG),
    task("CLUSTER_BACKWARD", 128256, "3.9 TB/s", *LONG_PAIRS),
    task("CLUSTER_FORWARD", 32768, "4.0 TB/s", *MIDDLE),
    task("CLUSTER_FUSED", 32768, "copy", *MIDDLE),
    task("CLUSTER_FUSED", 50257, "PyTorch", *ODD),
    task("CLUSTER_FORWARD", 50257, "copy", *ODD),
    task("CLUSTER_BACKWARD", 50257, "copy", *ODD_PAIRS),
    task("CLUSTER_BACKWARD", 65536, "copy", *LONG_PAIRS, (4, 256, 2, True, 8)),
    task("CLUSTER_FORWARD", 65536, "copy", *HALVED),
    task("CLUSTER_FUSED", 65536, "copy", *HALVED),
    task("CLUSTER_FORWARD", 16384, "copy", *SHORT),
    task("CLUSTER_FUSED", 16384, "copy", *SHORT),
    task("CLUSTER_FORWARD", 262144, "copy", (8, 512, 3, True, 8), (8, 1024, 3, True, 4), (8, 512, 2, True, 8)),
    task("CLUSTER_FUSED", 262144, "copy", (8, 512, 3, True, 8), (8, 1024, 3, True, 4), (8, 512, 2, True, 8)),
    task("CLUSTER_BACKWARD", 262144, "copy", (8, 512, 1, True, 8), (8, 1024, 1, True, 4)),
    # Rows at odd addresses, with no more groups for each thread than it needs.
    task("CLUSTER_FORWARD", 20815, "copy", (1, 512, 3, True, 6), (2, 256, 3, True, 6), (1, 512, 2, True, 6)),
    task("CLUSTER_FUSED", 20815, "copy", (1, 512, 3, True, 6), (2, 256, 3, True, 6), (1, 512, 2, True, 6)),
    task("CLUSTER_BACKWARD", 20815, "copy", (2, 256, 2, True, 6), (4, 256, 2, True, 3), (1, 512, 2, True, 6)),
    task("CLUSTER_FORWARD", 10007, "copy", (1, 256, 4, True, 5), (1, 256, 2, True, 5), (1, 512, 4, True, 3)),
    task("CLUSTER_FUSED", 10007, "copy", (1, 256, 4, True, 5), (1, 256, 2, True, 5), (1, 512, 4, True, 3)),
    task("CLUSTER_BACKWARD", 10007, "copy", (1, 256, 2, True, 5), (1, 512, 2, True, 3), (2, 128, 2, True, 5)),
    task("CLUSTER_FORWARD", 5001, "copy", (1, 128, 4, True, 5), (1, 128, 2, True, 5), (1, 256, 4, True, 3)),
    task("CLUSTER_FUSED", 5001, "copy", (1, 128, 4, True, 5), (1, 128, 2, True, 5), (1, 256, 4, True, 3)),
    task("CLUSTER_BACKWARD", 5001, "copy", (1, 128, 2, True, 5), (1, 256, 2, True, 3), (1, 128, 4, True, 5)),
    task("CLUSTER_FORWARD", 2601, "copy", (1, 64, 4, True, 6), (1, 128, 3, True, 3), (1, 64, 2, True, 6)),
    task("CLUSTER_BACKWARD", 2601, "copy", (1, 64, 2, True, 6), (1, 128, 2, True, 3), (1, 64, 4, True, 6)),
    task("CLUSTER_FORWARD", 1001, "copy", (1, 32, 4, True, 4), (1, 64, 4, True, 2), (1, 32, 2, True, 4)),
    task("CLUSTER_BACKWARD", 1001, "copy", (1, 32, 2, True, 4), (1, 64, 2, True, 2), (1, 32, 4, True, 4)),
)

if __name__ == "__main__":
    main(TASKS, __doc__)
