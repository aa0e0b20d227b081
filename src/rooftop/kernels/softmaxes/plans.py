"""Choose the kernel that computes a softmax or its gradient. A plan and its reason depend only on the tables and on the
properties of a call.

`launches.py` launches exactly the kernel that a plan lists, so a plan shows which kernel runs. Plans are cached, since
choosing a plan takes the host longer than launching it. Call `forget` after a change of the tables.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rooftop.kernels.operands.launch_data import Device, WordConstants, device_facts
from rooftop.kernels.operands.references import why_reference
from rooftop.kernels.operands.row_tiles import group_of, long_tile, tile, tile_config
from rooftop.kernels.operands.strided_rows import unit
from rooftop.kernels.softmaxes import clusters, tables
from rooftop.kernels.softmaxes.tables import ClusterConfig, OddRows
from rooftop.launch import known_calls

Backend = Literal["tiles", "long", "clusters", "reference"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class SoftmaxPlan:
    """How a softmax, a log softmax, or the gradient of one of them is computed.

    Attributes:
        backend: "tiles" (a program keeps whole rows in registers), "long" (a program reads a row twice, block by
            block), "clusters" (CUDA C++: a row is in the shared memory of a cluster of blocks), "reference" (plain
            PyTorch).
        kernel: name of the kernel; empty if nothing is launched.
        grid: number of programs of a Triton kernel.
        sizes: the Triton kernel's arguments after its tensors: number of rows; then, in groups of UNIT elements, number
            of columns and stride between rows.
        constants: the Triton kernel's constants, and its number of warps.
        clusters: the launch of a cluster kernel; None for other kernels.
        reason: why this plan was chosen.
        refused: if the table lists a cluster kernel that cannot compute these rows, the reason.
    """

    backend: Backend
    kernel: str
    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    constants: WordConstants
    clusters: clusters.Plan | None
    reason: str
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.backend}{f' ({self.kernel})' if self.kernel else ''}: {self.reason}"


class Problem(NamedTuple):
    """The properties of a call on which the choice of a kernel depends.

    Attributes:
        rows, columns: number of rows, and number of columns in each row.
        read, made: dtypes of x (in backward: of dy and y), and the dtype of the result.
        stride: row stride of x (in backward: of dy), in elements.
        starts: `clusters.Rows.starts` of the tensors that are read.
        mask: 0 without a mask, 1 for a numeric mask, 2 for a boolean mask.
        normal: whether the scale is a normal float32. Cluster kernels need a normal scale, because they fill elements
            past a row's end with -inf and multiply these elements by the scale.
        log: whether the result is the logarithm.
    """

    direction: Direction
    rows: int
    columns: int
    read: tuple[torch.dtype, ...]
    made: torch.dtype
    stride: int
    starts: tuple[tuple[int, int], ...]
    mask: int
    normal: bool
    log: bool
    device: Device


def forward_problem(x: Tensor, mask: Tensor | None, scale: float, log: bool, made: torch.dtype) -> Problem:
    """The `Problem` of a softmax of rows x (M, N) with unit column stride."""
    rows, columns = x.shape
    normal = 2.0**-126 <= abs(scale) <= 2.0**126
    return Problem(
        "forward", rows, columns, (x.dtype,), made, x.stride(0), (clusters.start_of(x),), _kind(mask), normal, log,
        device_facts(x.device),
    )  # fmt: skip


def backward_problem(dy: Tensor, y: Tensor, mask: Tensor | None, log: bool, made: torch.dtype) -> Problem:
    """The `Problem` of a softmax's gradient, from rows dy (M, N) with unit column stride and contiguous y."""
    rows, columns = y.shape
    starts = (clusters.start_of(dy), clusters.start_of(y))
    return Problem(
        "backward", rows, columns, (dy.dtype, y.dtype), made, dy.stride(0), starts, _kind(mask), True, log,
        device_facts(y.device),
    )  # fmt: skip


def gradient_of(problem: Problem) -> Problem:
    """The `Problem` of the gradient of a forward call, if the result and the result's gradient are contiguous."""
    made, columns = problem.made, problem.columns
    start = (0, columns * made.itemsize % clusters.GROUP_BYTES)
    mask = 2 if problem.mask == 2 else 0
    return Problem(
        "backward", problem.rows, columns, (made, made), problem.read[0], columns, (start, start), mask, True,
        problem.log, problem.device,
    )  # fmt: skip


def _kind(mask: Tensor | None) -> int:
    return 0 if mask is None else 2 if mask.dtype == torch.bool else 1


@lru_cache(maxsize=4096)
def choose(problem: Problem) -> SoftmaxPlan:
    """The plan for a call with the properties `problem`."""
    why = why_reference(problem.read[-1], problem.device.triton)
    if why is not None:
        return SoftmaxPlan("reference", "", (), (), {}, None, why)
    if problem.rows == 0 or problem.columns == 0:
        return SoftmaxPlan("tiles", "", (), (), {}, None, "the result has no elements")
    forward, columns = problem.direction == "forward", problem.columns
    result_start = (0, columns * problem.made.itemsize % clusters.GROUP_BYTES)  # new memory is aligned
    rows = clusters.Rows(columns, (*problem.read, problem.made), (*problem.starts, result_start))
    entry = clusters.entry_for(tables.CLUSTER_FORWARD if forward else tables.CLUSTER_BACKWARD, rows)
    found = _by_clusters(problem, entry, rows) if entry is not None else None
    kernel = "softmax" if forward else "softmax_backward"
    if isinstance(found, clusters.Plan):
        assert entry is not None
        return SoftmaxPlan("clusters", f"{kernel}_cluster", (), (), {}, found, _why_clusters(entry, found))
    refused = {} if found is None else {"clusters": found}
    return _by_triton(problem, "softmax_forward" if forward else kernel, refused)


def _by_clusters(problem: Problem, entry: ClusterConfig | OddRows, rows: clusters.Rows) -> clusters.Plan | str:
    """The cluster launch, or the reason why clusters cannot compute the call."""
    if problem.mask:
        return "there is a mask"
    if not problem.normal:
        return "the scale is not a normal float32"
    return clusters.planned(entry, rows, problem.device)


def _why_clusters(entry: ClusterConfig | OddRows, found: clusters.Plan) -> str:
    odd = isinstance(entry, OddRows) or entry.odd
    kind = "that are not whole groups of 16 bytes" if odd else "of whole groups of 16 bytes"
    sizes = f"rows of {entry.above_bytes} to {entry.row_bytes} bytes {kind}"
    return f"{sizes} are faster read once, by {found.config.blocks} blocks, as measured"


def _by_triton(problem: Problem, kernel: str, refused: dict[str, str]) -> SoftmaxPlan:
    """The plan of the Triton kernel for the length of a row."""
    forward = problem.direction == "forward"
    columns, element_bytes = problem.columns, sum(dtype.itemsize for dtype in problem.read)
    row_bytes, group = columns * element_bytes, unit(columns, problem.stride)
    sizes = (problem.rows, columns // group, problem.stride // group)
    wide = problem.made == torch.float32 and (forward or problem.read[1] == torch.float32)
    constants: WordConstants = {"MASK": problem.mask, "LOG": problem.log, "WIDE": wide, "UNIT": group}
    config = tile_config(tables.FORWARD if forward else tables.BACKWARD, row_bytes)
    if config is not None:
        constants |= tile(config, columns, element_bytes)
        if forward:
            constants["HOLD"] = config.hold
        reason = f"a program holds rows of up to {config.row_bytes} bytes"
        grid = (-(-problem.rows // config.rows),)
        return SoftmaxPlan("tiles", kernel, grid, sizes, constants, None, reason, refused)
    per_sm, block = long_tile(tables.FORWARD_LONG if forward else tables.BACKWARD_LONG, row_bytes, element_bytes)
    constants |= block
    if forward:
        constants["GROUP"] = group_of(group, element_bytes)
    grid = (min(problem.rows, per_sm * problem.device.processors),)
    reason = f"no program holds a row of {row_bytes} bytes: each row is read twice"
    return SoftmaxPlan("long", f"{kernel}_long", grid, sizes, constants, None, reason, refused)


def forget() -> None:
    """Drop all cached plans. Call this function after a change of the tables."""
    choose.cache_clear()
    clusters.choose_fused.cache_clear()
    known_calls.forget()
