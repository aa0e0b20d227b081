"""Launch the CUDA C++ kernels of norms, for the row lengths at which these kernels are faster than Triton's kernels.

The kernels are for long rows and for unaligned rows; `tables.py` has the lengths. A block, or a cluster of up to eight
blocks, fetches the next rows to shared memory with Hopper's bulk copies, so that no thread spends instructions on loads
(clusters.cu). `plans.py` asks this module which rows the kernels support; Triton computes all other rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from rooftop.kernels.norms.tables import ClusterConfig
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.dtypes import CPP_TYPES
from rooftop.kernels.operands.launch_data import Device
from rooftop.launch import cuda

CUDA_FILES = ("norms/pieces.cu", "operands/cluster_pieces.cu", "norms/clusters.cu")

# ---- limits -----------------------------------------------------------------------------------------------------


GROUP = 8  # two-byte elements in 16 bytes
EXCHANGE_BYTES = 848  # `Exchange` in clusters.cu
MOST_STAGES = 8
SYSTEM_BYTES = 1024  # shared memory that the system reserves per block
MOST_SHARED_BYTES = 232_448  # largest shared memory of a block on Hopper
MOST_CHUNKS = 4  # maximum number of groups per thread; more groups do not fit in registers


class Staged(NamedTuple):
    """A kernel and its launch parameters, for rows of one length.

    Attributes:
        kernel: the kernel's name with its template arguments, as NVRTC needs it.
        fused_multiply_add: whether the compiler may fuse products and sums.
        rows: the number of rows.
        most: the maximum number of clusters; 0 means as many as the device can run at the same time.
        multiple: the number of clusters is a multiple of this number. It is eight if the row length is not a
            multiple of eight. All rows of a cluster then have the same shift: the number of elements between the last
            multiple of 16 bytes and the row's beginning.
        blocks, threads: blocks of a cluster, and threads of a block.
        stages: the number of rows for which a block has a buffer: the row being computed, and rows being loaded.
    """

    kernel: str
    fused_multiply_add: bool
    rows: int
    most: int
    multiple: int
    blocks: int
    threads: int
    stages: int
    shared_bytes: int


def config_for(table: Sequence[ClusterConfig], columns: int) -> ClusterConfig | None:
    """The table's entry for rows of `columns` elements; None if it has no such entry."""
    odd = columns % GROUP != 0
    for config in table:
        if config.least <= columns <= config.most and config.odd in (None, odd):
            return config
    return None


def refused(
    rows: int, columns: int, dtypes: Sequence[torch.dtype], parameters: Sequence[torch.dtype | None],
    strides: Sequence[int], aligned: bool, device: Device,
) -> str | None:  # fmt: skip
    """The reason why the cluster kernels cannot compute these rows; None if they can."""
    given = {dtype for dtype in parameters if dtype is not None}
    if rows == 0:
        return "there are no rows"
    if dtypes[-1].itemsize != 2:
        return "rows are not of half precision"
    if device.cuda != 9:
        return "the kernels need compute capability 9"
    if len(set(dtypes)) > 1:
        return "the gradient and the rows differ in dtype"
    if len(given) > 1:
        return "weight and bias differ in dtype"
    if not given <= CPP_TYPES.keys():
        return "the parameters are float64"
    if not aligned:
        return "rows do not begin at a multiple of 16 bytes"
    if columns % GROUP == 0 and any(stride % GROUP for stride in strides):
        return "the row stride is not a multiple of eight elements"
    if columns % GROUP and any(stride != columns for stride in strides):
        return "rows whose length is not a multiple of eight are not contiguous"
    return None


def staged(
    kernel: str, config: ClusterConfig, dtype: torch.dtype, parameter: torch.dtype, rows: int, columns: int, rms: bool,
    device: Device,
) -> Staged | None:  # fmt: skip
    """The kernel and launch parameters for rows of x (in backward, of x and dy). None if shared memory or registers are
    too small.
    """
    backward = kernel == "norm_backward_staged"
    # bytes per column in each stage (element_bytes), and bytes per column in the shared memory outside the stages
    # (parameter_bytes)
    element_bytes, parameter_bytes = dtype.itemsize * (1 + backward), parameter.itemsize * (2 - backward)
    limit = min(device.shared_bytes, MOST_SHARED_BYTES)
    share, chunks, stages = layout(config, columns, element_bytes, parameter_bytes, limit)
    if chunks > MOST_CHUNKS or stages < 1 + backward:
        return None
    shared_bytes = EXCHANGE_BYTES + share * GROUP * (parameter_bytes + stages * element_bytes)
    name = kernel_name(kernel, config, dtype, parameter, chunks, rms)
    most = config.blocks_per_sm * device.processors if config.blocks == 1 else 0
    multiple = 8 if columns % GROUP else 1
    # In dy * weight - mean(dy * weight), both products dy * weight must be rounded in the same way, so a product may be
    # fused with the subtraction only if it is exact in float32, as the products of half precision numbers are.
    fused = parameter.itemsize == 2
    return Staged(name, fused, rows, most, multiple, config.blocks, 32 * config.warps, stages, shared_bytes)


@lru_cache(maxsize=4096)
def ready(staged: Staged, device: torch.device) -> tuple[cuda.Kernel, int]:
    """The compiled kernel, and the number of clusters to launch. The clusters divide the rows among themselves."""
    text = cuda_text(*CUDA_FILES)
    kernel = cuda.compile(text, staged.kernel, device=device, fused_multiply_add=staged.fused_multiply_add)
    most = staged.most or kernel.active_clusters(staged.threads, staged.blocks, staged.shared_bytes, device)
    return kernel, max(staged.multiple, min(staged.rows, most) // staged.multiple * staged.multiple)


def launch(staged: Staged, device: torch.device, *arguments: object) -> None:
    """Launch the kernel with `arguments`, its tensors and sizes."""
    kernel, clusters = ready(staged, device)
    cluster = staged.blocks if staged.blocks > 1 else None
    grid = clusters * staged.blocks
    kernel.launch(grid, staged.threads, *arguments, shared_bytes=staged.shared_bytes, cluster=cluster)


def layout(
    config: ClusterConfig, columns: int, element_bytes: int, parameter_bytes: int, limit: int
) -> tuple[int, int, int]:
    """How a row is divided, in groups of GROUP elements: the number of its groups per block, the number of its groups
    per thread, and the number of pipeline stages. There are as many stages as in `config`, or fewer if `limit` bytes of
    shared memory have no room for them.
    """
    of_row = -(-(columns + (GROUP - 1 if columns % GROUP else 0)) // GROUP)
    share = -(-of_row // config.blocks)
    room = (limit + SYSTEM_BYTES) // config.blocks_per_sm - SYSTEM_BYTES - EXCHANGE_BYTES
    stages = (room - share * GROUP * parameter_bytes) // (share * GROUP * element_bytes)
    return share, -(-share // (32 * config.warps)), min(config.stages, MOST_STAGES, stages)


def kernel_name(
    name: str, config: ClusterConfig, dtype: torch.dtype, parameter: torch.dtype, chunks: int, rms: bool
) -> str:
    """The kernel's name with its template arguments, as NVRTC needs it."""
    types = f"{CPP_TYPES[dtype]}, {CPP_TYPES[parameter]}"
    return f"{name}<{types}, {chunks}, {config.warps}, {config.blocks}, {str(rms).lower()}>"
