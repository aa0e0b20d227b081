"""How the norms' kernels in CUDA C++ are launched, where a table says that they are the faster ones.

For rows whose sums do not fit in the registers of a block, and rows at odd addresses: a block, or a cluster of up to
eight, keeps the rows to come on their way to shared memory (bulk copies of Hopper), and no thread spends instructions
on them (clusters.cu). `launches.py` asks here first; what is not taken goes to Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from rooftop.kernels.norms.tables import CLUSTER_BACKWARD, CLUSTER_FORWARD, ClusterConfig
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.dtypes import CPP_TYPES
from rooftop.launch import cuda
from rooftop.launch.triton_launch import processors, shared_memory_bytes

CUDA_FILES = ("norms/pieces.cu", "operands/cluster_pieces.cu", "norms/clusters.cu")

# ---- limits -----------------------------------------------------------------------------------------------------


GROUP = 8  # elements of 16 bytes
EXCHANGE_BYTES = 848  # `Exchange` in clusters.cu
MOST_STAGES = 8
SYSTEM_BYTES = 1024  # of shared memory, for each block
MOST_CHUNKS = 4  # groups of a thread: more do not fit in registers


@dataclass(frozen=True)
class Plan:
    """A kernel, and how it is launched on rows of one length."""

    kernel: cuda.Kernel
    clusters: int
    blocks: int
    threads: int
    stages: int
    shared_bytes: int

    def launch(self, *arguments: object) -> None:
        grid = self.clusters * self.blocks
        cluster = self.blocks if self.blocks > 1 else None
        self.kernel.launch(grid, self.threads, *arguments, shared_bytes=self.shared_bytes, cluster=cluster)


def forward_plan(x: Tensor, parameters: Sequence[Tensor | None], rms: bool) -> Plan | None:
    """How to normalize the rows of x (M, N); None where the table does not say so or the kernel cannot."""
    config = _config(CLUSTER_FORWARD, x)
    if config is None or not _fits([x], parameters):
        return None
    parameter = _parameter_dtype(x, parameters)
    sizes = (x.element_size(), 2 * parameter.itemsize)
    return _plan("norm_forward_staged", config, x.dtype, parameter, *x.shape, *sizes, rms, x.device)


def backward_plan(dy: Tensor, x: Tensor, weight: Tensor | None, rms: bool) -> Plan | None:
    """The same for the gradients; there is a partial sum for each of the plan's clusters."""
    config = _config(CLUSTER_BACKWARD, x)
    if config is None or not _fits([dy, x], [weight]):
        return None
    parameter = _parameter_dtype(x, [weight])
    sizes = (2 * x.element_size(), parameter.itemsize)
    return _plan("norm_backward_staged", config, x.dtype, parameter, *x.shape, *sizes, rms, x.device)


def config_for(table: Sequence[ClusterConfig], columns: int) -> ClusterConfig | None:
    """The entry for rows of so many elements."""
    odd = columns % GROUP != 0
    for config in table:
        if config.least <= columns <= config.most and config.odd in (None, odd):
            return config
    return None


def forward_config(columns: int) -> ClusterConfig | None:
    """The entry for rows of so many elements, forward."""
    return config_for(CLUSTER_FORWARD, columns)


def _config(table: Sequence[ClusterConfig], x: Tensor) -> ClusterConfig | None:
    if not table or x.shape[0] == 0 or x.element_size() != 2 or not _is_hopper(x):
        return None
    return config_for(table, x.shape[1])


def _is_hopper(x: Tensor) -> bool:
    if not cuda.runs_on(x):
        return False
    return x.device.type == "cpu" or torch.cuda.get_device_capability(x.device)[0] == 9


def _fits(tensors: Sequence[Tensor], parameters: Sequence[Tensor | None]) -> bool:
    """Whether bulk copies can fetch the groups of eight elements that enclose each row, and parameters are alike."""
    columns = tensors[0].shape[1]
    dtypes = {t.dtype for t in parameters if t is not None}
    if len(dtypes) > 1 or not dtypes <= CPP_TYPES.keys() or len({t.dtype for t in tensors}) > 1:
        return False
    if any(t.data_ptr() % 16 for t in tensors):
        return False
    if columns % GROUP == 0:
        return all(t.stride(0) % GROUP == 0 for t in tensors)
    return all(t.stride(0) == columns for t in tensors)


def _parameter_dtype(x: Tensor, parameters: Sequence[Tensor | None]) -> torch.dtype:
    return next((t.dtype for t in parameters if t is not None), x.dtype)


@cache
def _plan(
    name: str,
    config: ClusterConfig,
    dtype: torch.dtype,
    parameter: torch.dtype,
    rows: int,
    columns: int,
    element_bytes: int,
    parameter_bytes: int,
    rms: bool,
    device: torch.device,
) -> Plan | None:
    """element_bytes: of a stage; parameter_bytes: what stays in shared memory; both for one column."""
    odd = columns % GROUP != 0
    share, chunks, stages = layout(config, columns, element_bytes, parameter_bytes, _shared_bytes(device))
    if chunks > MOST_CHUNKS or stages < 1 + (name == "norm_backward_staged"):
        return None
    shared_bytes = EXCHANGE_BYTES + share * GROUP * (parameter_bytes + stages * element_bytes)
    kernel = cuda.compile(
        cuda_text(*CUDA_FILES),
        kernel_name(name, config, dtype, parameter, chunks, rms),
        device=device,
        # In dy * weight - mean(dy * weight) both products must be rounded alike: those of half precision are exact.
        fused_multiply_add=parameter.itemsize == 2,
    )
    threads = 32 * config.warps
    if config.blocks == 1:
        clusters = config.blocks_per_sm * _processors(device)
    else:
        clusters = kernel.active_clusters(threads, config.blocks, shared_bytes, device)
    clusters = max(8, min(rows, clusters) // 8 * 8) if odd else max(1, min(rows, clusters))
    return Plan(kernel, clusters, config.blocks, threads, stages, shared_bytes)


def layout(
    config: ClusterConfig, columns: int, element_bytes: int, parameter_bytes: int, limit: int
) -> tuple[int, int, int]:
    """Groups of a row that a block has, groups of those that a thread has, and stages that fit in `limit` bytes."""
    of_row = -(-(columns + (GROUP - 1 if columns % GROUP else 0)) // GROUP)
    share = -(-of_row // config.blocks)
    room = (limit + SYSTEM_BYTES) // config.blocks_per_sm - SYSTEM_BYTES - EXCHANGE_BYTES
    stages = (room - share * GROUP * parameter_bytes) // (share * GROUP * element_bytes)
    return share, -(-share // (32 * config.warps)), min(config.stages, MOST_STAGES, stages)


def kernel_name(
    name: str, config: ClusterConfig, dtype: torch.dtype, parameter: torch.dtype, chunks: int, rms: bool
) -> str:
    """The kernel with its template arguments, as NVRTC wants it named."""
    types = f"{CPP_TYPES[dtype]}, {CPP_TYPES[parameter]}"
    return f"{name}<{types}, {chunks}, {config.warps}, {config.blocks}, {str(rms).lower()}>"


def _shared_bytes(device: torch.device) -> int:
    return min(shared_memory_bytes(torch.empty(0, device=device)), 232_448)


def _processors(device: torch.device) -> int:
    return processors(torch.empty(0, device=device))
