"""Softmax and fused cross entropy of long rows in CUDA C++: a cluster of blocks holds a row, which is read once.

The formulas are those of softmaxes.py and losses/losses.py, which call this where a table says so. Bound by memory:
their Triton kernels read a row that no registers hold twice, and L2 serves the second time more slowly than memory is
read. Here each block of a cluster has a part of the row in shared memory, blocks tell each other what they found in
theirs, and rows may begin at any address, 16 bytes being loaded at a time all the same (clusters.cu).

It needs sm_90 and `cuda.core`. Masks and class weights stay with Triton, and so do results of another dtype than rows.
Deterministic: no atomics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product

import torch
from torch import Tensor

from rooftop.errors import MissingExtraError
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.dtypes import CPP_TYPES
from rooftop.kernels.softmaxes.tables import ClusterConfig, OddRows, Table
from rooftop.launch import cuda, nvrtc
from rooftop.launch.triton_launch import shared_memory_bytes

CUDA_FILES = ("operands/cluster_pieces.cu", "softmaxes/clusters.cu")

GROUP_BYTES = 16

# ---- limits -----------------------------------------------------------------------------------------------------


RESIDENT_THREADS = 512  # on an SM, of 128 registers each: RESIDENT in clusters.cu
BLOCKS, HELD, THREADS = (1, 2, 4, 8, 16), range(3, 9), range(64, 513)  # of the clusters that odd rows may get


def fullest(groups: int, tensors: int, stages: int, shared_bytes: int) -> list[ClusterConfig]:
    """Clusters for rows of so many 16-byte groups, first the one that leaves the fewest lanes of an SM without a group.

    What a thread does for each row beside its groups counts as 1.5 of them, and 1/16 more for each block of the cluster
    and each warp of the block, which tell each other what they found: with that, the lanes at work find the fastest of
    the shapes measured, or one within 4% of it (tune_clusters.json).

    Args:
        groups: at most, wherever a row begins.
        tensors: that a row is read of.
        shared_bytes: that a block may have.
    """
    found = []
    for blocks, held in product(BLOCKS, HELD):
        part_groups = -(-groups // blocks)
        threads = 32 * -(-part_groups // (32 * held))
        needed = _shared_bytes(blocks, stages, tensors, part_groups)
        if threads not in THREADS or needed > shared_bytes:
            continue
        resident = min(RESIDENT_THREADS // threads, (shared_bytes + 1024) // (needed + 1024))  # 1 KiB is the system's
        at_work = groups * resident / (blocks * (held + 1.5 + blocks / 16 + threads / 512))
        config = ClusterConfig(0, 0, blocks, threads, held, stages, odd=True)
        found.append((at_work, -abs(math.log2(threads / 128)), config))
    return [config for _, _, config in sorted(found, key=lambda each: each[:2], reverse=True)]


@lru_cache(maxsize=4096)
def _first(groups: int, tensors: int, stages: int, shared_bytes: int) -> ClusterConfig | None:
    return next(iter(fullest(groups, tensors, stages, shared_bytes)), None)


ARRIVAL_BYTES = 800  # at the beginning of shared memory, before shares of 16 bytes


@dataclass(frozen=True)
class Plan:
    """A launch: of clusters of `config`, each block with `part_groups` groups of 16 bytes of each of the tensors."""

    config: ClusterConfig
    part_groups: int
    shared_bytes: int


def plan(table: Table, sources: Sequence[Tensor], result: Tensor) -> Plan | None:
    """How to work on rows `sources` and `result`, (M, N) with unit column stride; None: elsewhere.

    All are of one dtype, and their rows begin at the same distance from a multiple of 16 bytes.
    """
    first, columns = sources[0], result.shape[-1]
    if not table or first.dtype not in CPP_TYPES or result.dtype != first.dtype or not cuda.runs_on(first):
        return None
    size = first.element_size()
    starts = {(t.data_ptr() % GROUP_BYTES, t.stride(0) * size % GROUP_BYTES) for t in sources}
    if starts != {(result.data_ptr() % GROUP_BYTES, result.stride(0) * size % GROUP_BYTES)}:
        return None
    odd = starts != {(0, 0)} or columns * size % GROUP_BYTES != 0
    for entry in table:
        if isinstance(entry, OddRows):
            served = odd and (entry.unless == GROUP_BYTES or any(p % entry.unless for start in starts for p in start))
        else:
            served = entry.odd == odd
        if served and entry.above_bytes < columns * size <= entry.row_bytes:
            found = _planned(entry, columns, size, len(sources), shared_memory_bytes(first))
            return found if found is not None and has_clusters(first.device) else None
    return None


def _planned(
    entry: ClusterConfig | OddRows, columns: int, element_bytes: int, tensors: int, shared_bytes: int
) -> Plan | None:
    """None where a block has not so many bytes of shared memory, or its threads hold less than their part."""
    width = GROUP_BYTES // element_bytes
    of_odd = isinstance(entry, OddRows) or entry.odd
    groups = -(-(columns + (width - 1 if of_odd else 0)) // width)
    config = _first(groups, tensors, entry.stages, shared_bytes) if isinstance(entry, OddRows) else entry
    if config is None:
        return None
    part_groups = -(-groups // config.blocks)
    needed = _shared_bytes(config.blocks, config.stages, tensors, part_groups)
    if needed > shared_bytes or part_groups > config.threads * config.held:
        return None
    return Plan(config, part_groups, needed)


def _shared_bytes(blocks: int, stages: int, tensors: int, part_groups: int) -> int:
    """Of a block: arrivals, shares, and the parts of the rows on their way."""
    return ARRIVAL_BYTES + GROUP_BYTES * (2 * blocks + stages * tensors * part_groups)


@cache
def has_clusters(device: torch.device) -> bool:
    """Whether the device runs clusters, and what compiles and launches them is installed."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return False
    try:
        nvrtc.require_cuda_core()
        nvrtc.version()
    except MissingExtraError:
        return False
    return True


# ---- launches --------------------------------------------------------------------------------------------------


def kernel_name(kernel: str, dtype: torch.dtype, variant: bool, config: ClusterConfig) -> str:
    """`variant`: the logarithm of softmax, label smoothing of cross entropy."""
    types = f"{CPP_TYPES[dtype]}, {str(variant).lower()}"
    shape = f"{config.threads}, {config.held}, {config.blocks}, {config.stages}"
    return f"{kernel}_cluster<{types}, {shape}, {str(config.odd).lower()}>"


def softmax_forward(plan: Plan, x: Tensor, y: Tensor, scale: float, log: bool) -> None:
    """y = softmax(x * scale) of rows x (M, N), or its logarithm."""
    _launch(plan, "softmax", log, x, (x, y), (x.stride(0),), (scale,))


def softmax_backward(plan: Plan, dy: Tensor, y: Tensor, dx: Tensor, scale: float, log: bool) -> None:
    """dx from rows dy and y (M, N)."""
    _launch(plan, "softmax_backward", log, y, (dy, y, dx), (dy.stride(0),), (scale,))


def cross_entropy(
    plan: Plan, x: Tensor, target: Tensor, inverse: Tensor | None, losses: Tensor, dx: Tensor,
    numbers: Sequence[int | float],
) -> None:  # fmt: skip
    """Losses (M,) of logits x (M, V), and dx, which may be x; the rows of either may be apart.

    Args:
        target: (M,), int64.
        inverse: what gradients are multiplied with, (), float32.
        losses: float32, to be written.
        numbers: ignore_index, 1 - label smoothing, label smoothing / V, z-loss.
    """
    tensors = (x, target, inverse, losses, dx)
    _launch(plan, "cross_entropy", numbers[2] > 0, x, tensors, (x.stride(0), dx.stride(0)), numbers)


def _launch(
    plan: Plan, kernel: str, variant: bool, x: Tensor, tensors: Sequence[Tensor | None], strides: Sequence[int],
    numbers: Sequence[int | float],
) -> None:  # fmt: skip
    rows, columns = x.shape
    if rows == 0:
        return
    config = plan.config
    compiled = cuda.compile(cuda_text(*CUDA_FILES), kernel_name(kernel, x.dtype, variant, config), device=x.device)
    clusters = min(rows, max(1, compiled.active_clusters(config.threads, config.blocks, plan.shared_bytes, x.device)))
    # Each begins with `stages` + 1 rows; what is left goes to those that are free. A new counter each time: launches on
    # several streams, and graphs, do not meet.
    left = rows > clusters * (config.stages + 1)
    counter = torch.zeros(1, dtype=torch.int32, device=x.device) if left else None
    compiled.launch(
        clusters * config.blocks, config.threads, *tensors, rows, columns, *strides, plan.part_groups, counter,
        *numbers, shared_bytes=plan.shared_bytes, cluster=config.blocks,
    )  # fmt: skip
