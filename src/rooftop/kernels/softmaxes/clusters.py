"""Softmax and fused cross entropy of long rows in CUDA C++: a cluster of blocks reads a row once.

softmaxes.py and losses/losses.py have the formulas, and call this module for the rows that a table lists. The operators
are bound by memory. The Triton kernels read a row twice if the row does not fit in registers, and the second read, from
L2, takes longer than the first read, from memory. In the kernels of this module, each block of a cluster keeps a part
of the row in shared memory, and the blocks exchange partial results. Rows may begin at any address; loads are 16 bytes
wide in any case (clusters.cu).

The kernels need sm_90 and `cuda.core`. If there is a mask or class weights, or if the results and the rows differ in
dtype, the Triton kernels are used instead. The kernels use no atomics, so results are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.errors import MissingExtraError
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.dtypes import CPP_TYPES
from rooftop.kernels.operands.launch_data import Device, device_facts
from rooftop.kernels.softmaxes import tables
from rooftop.kernels.softmaxes.tables import ClusterConfig, OddRows, Table
from rooftop.launch import cuda, nvrtc

CUDA_FILES = ("operands/cluster_pieces.cu", "softmaxes/clusters.cu")

GROUP_BYTES = 16

# ---- limits -----------------------------------------------------------------------------------------------------


RESIDENT_THREADS = 512  # threads on an SM with 128 registers each: RESIDENT in clusters.cu
BLOCKS, HELD, THREADS = (1, 2, 4, 8, 16), range(3, 9), range(64, 513)  # values that `fullest` tries for `OddRows`


def fullest(groups: int, tensors: int, stages: int, shared_bytes: int) -> list[ClusterConfig]:
    """Clusters for rows of `groups` 16-byte groups, best first: the first cluster leaves the fewest lanes of an SM
    idle. The estimated time of a row, in units of the time in which a thread processes one group, is the number of
    groups per thread, plus 1.5, plus 1/16 for each block of the cluster and for each warp of a block (the exchange of
    results). In the measurements of tune_clusters.json, the first cluster is the fastest, or takes at most 4% more time
    than the fastest.

    Args:
        groups: the maximum number of 16-byte groups that a row overlaps, over all possible addresses of the row's
            start.
        tensors: the number of tensors that the kernel reads.
        shared_bytes: shared memory available to a block.
    """
    found = []
    for blocks, held in product(BLOCKS, HELD):
        part_groups = -(-groups // blocks)
        threads = 32 * -(-part_groups // (32 * held))
        needed = _shared_bytes(blocks, stages, tensors, part_groups)
        if threads not in THREADS or needed > shared_bytes:
            continue
        resident = min(RESIDENT_THREADS // threads, (shared_bytes + 1024) // (needed + 1024))  # 1 KiB is reserved
        at_work = groups * resident / (blocks * (held + 1.5 + blocks / 16 + threads / 512))
        config = ClusterConfig(0, 0, blocks, threads, held, stages, odd=True)
        found.append((at_work, -abs(math.log2(threads / 128)), config))
    return [config for _, _, config in sorted(found, key=lambda each: each[:2], reverse=True)]


@lru_cache(maxsize=4096)
def _first(groups: int, tensors: int, stages: int, shared_bytes: int) -> ClusterConfig | None:
    return next(iter(fullest(groups, tensors, stages, shared_bytes)), None)


# size of the struct `Arrivals` (arrival barriers, sums of warps, indices of rows) at the beginning of shared memory
ARRIVAL_BYTES = 800


@dataclass(frozen=True)
class Plan:
    """How to launch a cluster kernel: the parameters `config`, the number of 16-byte groups of each row that a block of
    the cluster processes, and the shared memory of a block in bytes.
    """

    config: ClusterConfig
    part_groups: int
    shared_bytes: int


class Rows(NamedTuple):
    """Rows that a kernel reads and writes, each of N columns with unit stride.

    Attributes:
        dtypes: dtypes of the tensors that are read, then the dtype of the result.
        starts: for each tensor, (address of the first row, row stride), both in bytes modulo 16.
    """

    columns: int
    dtypes: tuple[torch.dtype, ...]
    starts: tuple[tuple[int, int], ...]


def start_of(rows: Tensor) -> tuple[int, int]:
    """The alignment of the rows of a tensor (M, N), for `Rows.starts`: the address of the first row and the row stride,
    both in bytes modulo 16.
    """
    return rows.data_ptr() % GROUP_BYTES, rows.stride(0) * rows.element_size() % GROUP_BYTES


def entry_for(table: Table, rows: Rows) -> ClusterConfig | OddRows | None:
    """The table's entry for these rows; None if Triton's kernels are at least as fast for such rows."""
    row_bytes = rows.columns * rows.dtypes[0].itemsize
    odd = row_bytes % GROUP_BYTES != 0 or any(start != (0, 0) for start in rows.starts)
    for entry in table:
        if isinstance(entry, OddRows):
            places = (place for start in rows.starts for place in start)
            served = odd and (entry.unless == GROUP_BYTES or any(place % entry.unless for place in places))
        else:
            served = entry.odd == odd
        if served and entry.above_bytes < row_bytes <= entry.row_bytes:
            return entry
    return None


def planned(entry: ClusterConfig | OddRows, rows: Rows, device: Device) -> Plan | str:
    """The plan of the cluster kernel with the parameters `entry` for these rows, or the reason why the cluster kernels
    cannot compute them.
    """
    if not set(rows.dtypes) <= CPP_TYPES.keys():
        return "rows are not of single or half precision"
    if len(set(rows.dtypes)) > 1:
        return "the result and the rows differ in dtype"
    if len(set(rows.starts)) > 1:
        return "rows and results have different alignments within 16 bytes"
    if device.cuda < 9:
        return "the kernels need compute capability 9 or more"
    sources = len(rows.dtypes) - 1
    found = _planned(entry, rows.columns, rows.dtypes[0].itemsize, sources, device.shared_bytes)
    if found is None:
        return "a block has no room for its part of a row"
    return found if is_installed() else "cuda.core or NVRTC is not installed"


def fused_plan(x: Tensor, dx: Tensor) -> Plan | None:
    """The cluster launch for cross entropy of logits x (M, V) and its gradient dx; None if Triton's kernels compute
    these rows. dx may share x's memory.
    """
    rows = Rows(x.shape[1], (x.dtype, dx.dtype), (start_of(x), start_of(dx)))
    return choose_fused(rows, device_facts(x.device))


@lru_cache(maxsize=4096)
def choose_fused(rows: Rows, device: Device) -> Plan | None:
    """The result of `fused_plan`, from the properties of a call. Plans are cached: call `choose_fused.cache_clear()`
    after a change of `tables.CLUSTER_FUSED`.
    """
    entry = entry_for(tables.CLUSTER_FUSED, rows)
    found = planned(entry, rows, device) if entry is not None else None
    return found if isinstance(found, Plan) else None


def _planned(
    entry: ClusterConfig | OddRows, columns: int, element_bytes: int, tensors: int, shared_bytes: int
) -> Plan | None:
    """The launch for rows of `columns` columns; None if a block's groups do not fit in its shared memory, or in the
    registers of its threads.
    """
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
    """Shared memory of a block in bytes: `Arrivals`, two partial results (16 bytes each) for each block of the cluster,
    and the block's parts of `stages` rows of each tensor.
    """
    return ARRIVAL_BYTES + GROUP_BYTES * (2 * blocks + stages * tensors * part_groups)


@cache
def is_installed() -> bool:
    """Whether the packages that compile and launch CUDA C++ kernels are installed."""
    try:
        nvrtc.require_cuda_core()
        nvrtc.version()
    except MissingExtraError:
        return False
    return True


# ---- launches --------------------------------------------------------------------------------------------------


def kernel_name(kernel: str, dtype: torch.dtype, variant: bool, config: ClusterConfig) -> str:
    """The kernel's name with its template arguments. `variant`: whether a softmax returns its logarithm, or whether a
    cross entropy has label smoothing.
    """
    types = f"{CPP_TYPES[dtype]}, {str(variant).lower()}"
    shape = f"{config.threads}, {config.held}, {config.blocks}, {config.stages}"
    return f"{kernel}_cluster<{types}, {shape}, {str(config.odd).lower()}>"


def softmax_forward(plan: Plan, x: Tensor, y: Tensor, scale: float, log: bool) -> None:
    """Compute y = softmax(x * scale), or its logarithm, of rows x (M, N)."""
    _launch(plan, "softmax", log, x, (x, y), (x.stride(0),), (scale,))


def softmax_backward(plan: Plan, dy: Tensor, y: Tensor, dx: Tensor, scale: float, log: bool) -> None:
    """Compute dx from rows dy and y (M, N)."""
    _launch(plan, "softmax_backward", log, y, (dy, y, dx), (dy.stride(0),), (scale,))


def cross_entropy(
    plan: Plan, x: Tensor, target: Tensor, inverse: Tensor | None, losses: Tensor, dx: Tensor,
    numbers: Sequence[int | float],
) -> None:  # fmt: skip
    """Compute losses (M,) of logits x (M, V), and dx, which may be x. The rows of x and of dx may be strided.

    Args:
        target: (M,), int64: the class of each row.
        inverse: (), float32: 1 / (number of valid targets), by which the gradients of a mean are multiplied; None: 1.
        losses: (M,), float32, overwritten.
        numbers: ignore_index, 1 - label smoothing, label smoothing / V, weight of the z-loss.
    """
    tensors = (x, target, inverse, losses, dx)
    _launch(plan, "cross_entropy", numbers[2] > 0, x, tensors, (x.stride(0), dx.stride(0)), numbers)


def _launch(
    plan: Plan, kernel: str, variant: bool, x: Tensor, tensors: Sequence[Tensor | None], strides: Sequence[int],
    numbers: Sequence[int | float],
) -> None:  # fmt: skip
    """Launch a kernel for the rows of x. The kernel's arguments are `tensors`, sizes, `strides` and `numbers`."""
    rows, columns = x.shape
    if rows == 0:
        return
    config = plan.config
    compiled = cuda.compile(cuda_text(*CUDA_FILES), kernel_name(kernel, x.dtype, variant, config), device=x.device)
    clusters = min(rows, max(1, compiled.active_clusters(config.threads, config.blocks, plan.shared_bytes, x.device)))
    # Each cluster first gets `stages` + 1 rows. Clusters that finish these rows get further rows from a counter. Each
    # launch has its own counter, so that launches on several streams or in graphs do not share a counter.
    left = rows > clusters * (config.stages + 1)
    counter = torch.zeros(1, dtype=torch.int32, device=x.device) if left else None
    compiled.launch(
        clusters * config.blocks, config.threads, *tensors, rows, columns, *strides, plan.part_groups, counter,
        *numbers, shared_bytes=plan.shared_bytes, cluster=config.blocks,
    )  # fmt: skip
