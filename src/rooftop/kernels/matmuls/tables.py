"""Choose a kernel and its parameters, or cuBLAS, by the shape of a product and the operations after it.

The tables contain measurements on an H200 (`benchmarks/tuning/matmuls.py`), and `plan_of` looks up a call in the
tables. Nothing is measured at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from rooftop.kernels.operands.dtypes import HALVES
from rooftop.kernels.operands.launch_data import capability
from rooftop.launch.triton_launch import INTERPRETED, processors

# ---- possible choices ------------------------------------------------------------------------------------------

Kernel = Literal["descriptors", "single", "pointers"]
Backend = Literal["descriptors", "single", "pointers", "library", "reference"]


@dataclass(frozen=True)
class Tile:
    """How a kernel computes a product.

    Attributes:
        kernel: "descriptors" (persistent programs with tensor descriptors), "single" (tensor descriptors, one tile per
            program), or "pointers".
        rows, columns, depth: rows of a tile of the result, columns of that tile, and length of a step through K.
        warps, stages: warps of a program, and stages of its pipeline of loads to shared memory.
        group: height of a band of tiles, in tiles. Programs compute tiles band by band, so that the operands of a band
            stay in the L2 cache.
        parts: number of parts in which the epilogue stores the `columns` columns of a tile (not for "pointers").
        split: number of parts of K, each summed by a separate program.
        programs_per_sm: number of persistent programs on an SM (only for "descriptors"). With two programs on an SM,
            one program computes while the other stores.
        lag: delay with which the second half of the programs starts (only for "descriptors"), in clock cycles per
            element of K. Without a delay, the two programs of an SM would store at the same time. The delay is about
            half of the time for one tile.
        early: programmatic dependent launch (only for "single"): the kernel may start while the previous kernel still
            runs, and waits for the previous kernel's results.
        more: additional columns of a tile (only for "single"), 0 or `columns // parts`; for example, a tile of 192
            columns has columns=128 and more=64.
    """

    kernel: Kernel
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    parts: int = 1
    split: int = 1
    programs_per_sm: int = 1
    lag: int = 0
    more: int = 0
    early: bool = False

    def __str__(self) -> str:
        split = f", K in {self.split} parts" if self.split > 1 else ""
        return (
            f"{self.rows} x {self.columns + self.more} x {self.depth}, {self.warps} warps, {self.stages} stages{split}"
        )


@dataclass(frozen=True)
class Entry:
    """The choice for results that have up to `tiles` tiles of 128 x 128 per SM.

    `tile`: the kernel's tile; None for cuBLAS. `tile_ms`, `library_ms`: times of the best tile and of cuBLAS at `shape`
    (M, N, K) in the same run; None if not measured yet.
    """

    tiles: float
    tile: Tile | None
    shape: tuple[int, int, int] | None = None
    tile_ms: float | None = None
    library_ms: float | None = None


# ---- tables ----------------------------------------------------------------------------------------------------

# With two programs of 128 x 128 on an SM, one program multiplies while the other stores. Two programs hide more of the
# time for stores than one program of 128 x 256 does.
TWO_AN_SM = Tile("descriptors", 128, 128, 64, 4, 3, group=16, parts=2, programs_per_sm=2)
# With at most one tile per SM, the kernel starts while the previous kernel still runs.
AHEAD = Tile("single", 128, 128, 64, 8, 6, parts=2, early=True)
# The best of the candidates measured on an H200 (benchmarks/results/h200/tune_matmuls.json). relu, relu6, hardswish
# and hardsigmoid use the entries of sigmoid. With less than half a tile per SM, K would have to be split into parts.
# Two kernels that split K were compared with cuBLAS. One kernel was 2% faster than cuBLAS at 64 rows, but 12% slower at
# 16 rows. The other kernel was 9% faster at 16 rows, but 85% slower at 64 rows.
_LIKE_SIGMOID = (
    Entry(0.5, None),
    Entry(1.0, AHEAD, (512, 4096, 4096), 0.02901, 0.03168),
    Entry(3.0, None, (1024, 4096, 4096), 0.05739, 0.05531),
    Entry(math.inf, TWO_AN_SM, (4096, 4096, 4096), 0.2125, 0.2188),
)
FUSED_ON_HOPPER = {
    "none": (Entry(math.inf, None, (4096, 4096, 4096), 0.2062, 0.2054),),
    "relu": _LIKE_SIGMOID,
    "gelu": (
        _LIKE_SIGMOID[0],
        Entry(1.0, AHEAD, (512, 4096, 4096), 0.02935, 0.03195),
        _LIKE_SIGMOID[2],
        Entry(math.inf, TWO_AN_SM, (4096, 4096, 4096), 0.2125, 0.2187),
    ),
    "gelu_tanh": (Entry(math.inf, None, (4096, 3072, 768), 0.04214, 0.03879),),
    "silu": (*_LIKE_SIGMOID[:3], Entry(math.inf, TWO_AN_SM, (2048, 4096, 4096), 0.1056, 0.1087)),
    **dict.fromkeys(("sigmoid", "relu6", "hardswish", "hardsigmoid"), _LIKE_SIGMOID),
}
# If rows are not aligned, loads have two bytes and cannot be prefetched. Loads of two bytes take longer than copying
# the operands to aligned rows. Results with fewer tiles than SMs were not measured.
UNALIGNED_ON_HOPPER = (
    Entry(0.1, None),
    Entry(1.0, Tile("pointers", 128, 128, 64, 8, 3)),
    Entry(math.inf, TWO_AN_SM, (4096, 4096, 4095), 0.2653, 1.050),
)
FUSED_ELSEWHERE = (Entry(0.1, None), Entry(math.inf, Tile("pointers", 128, 128, 32, 8, 3)))


@dataclass(frozen=True)
class FewRows(Entry):
    """The choice of a kernel for a matrix product with few tiles: its result has at most `tiles` tiles of 128 x 128 for
    each SM, and K is at most `depth`.
    """

    depth: int = 0


# Shapes of the layers of Swin-T and DETR at batch 1 (benchmarks/results/h200/tune_few_rows.json). The tiles are small,
# so that each SM has a tile. If cuBLAS can apply bias and activation itself, it was slower than these tiles at K = 256
# (`EPILOGUE_DEPTH`), but at least as fast as all measured tiles at K = 1536 and more.
FEW_ROWS_ON_HOPPER = (
    FewRows(0.6, Tile("single", 64, 128, 64, 4, 4, early=True), (3136, 384, 96), 0.005285, 0.006956, depth=128),
    FewRows(0.6, Tile("single", 64, 64, 64, 4, 6, early=True), (784, 768, 192), 0.003825, 0.006140, depth=256),
    FewRows(0.6, Tile("single", 64, 64, 128, 4, 4, early=True), (196, 1536, 384), 0.003608, 0.005272, depth=512),
    FewRows(0.6, Tile("single", 64, 32, 128, 4, 4, early=True), (49, 3072, 768), 0.004618, 0.006958, depth=1024),
)
EPILOGUE_DEPTH = 256

# ---- choice ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LinearPlan:
    """How a call of `linear_act` is computed.

    Attributes:
        backend: "descriptors", "pointers" or "single" (one Triton kernel), "library" (cuBLAS, followed by a separate
            pass if no epilogue of cuBLAS computes the operations), "reference" (plain PyTorch).
        tile: the kernel's parameters.
        reason: why this plan was chosen.
    """

    backend: Backend
    tile: Tile | None
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}{f' ({self.tile})' if self.tile else ''}: {self.reason}"


@dataclass(frozen=True)
class Problem:
    """The properties of a call on which the choice of a plan depends. `aligned`: whether tensor descriptors can
    describe the operands. `finish`: whether any operation other than a bias follows the product. `library_finish`:
    whether cuBLAS has an epilogue for the operations after the product.
    """

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype
    activation: str
    aligned: bool
    finish: bool
    library_finish: bool
    sms: int
    capability: int


@cache
def choose(problem: Problem) -> LinearPlan:
    """The plan for a product on a GPU."""
    if problem.depth == 0:
        return LinearPlan("library", None, "K is 0: there is no product")
    if problem.dtype not in HALVES:
        return LinearPlan("library", None, "float32")
    tiles = -(-problem.rows // 128) * -(-problem.columns // 128) / problem.sms
    few = _few_rows(problem, tiles)
    if few is not None and few.tile is not None:
        return LinearPlan(few.tile.kernel, few.tile, _reason(few))
    if not problem.finish:
        return LinearPlan("library", None, "only a bias follows, which cuBLAS adds")
    if problem.library_finish:
        return LinearPlan("library", None, "cuBLAS has an epilogue for these operations")
    table: tuple[Entry, ...]
    if problem.capability != 9:
        table = FUSED_ELSEWHERE
    elif problem.aligned:
        table = FUSED_ON_HOPPER[problem.activation]
    else:
        table = UNALIGNED_ON_HOPPER
    entry = next(entry for entry in table if tiles <= entry.tiles)
    return LinearPlan(entry.tile.kernel if entry.tile else "library", entry.tile, _reason(entry))


def _few_rows(problem: Problem, tiles: float) -> FewRows | None:
    """The entry of `FEW_ROWS_ON_HOPPER` for a result of `tiles` tiles per SM; None if no entry applies."""
    if problem.capability != 9 or not problem.aligned or problem.activation == "gelu_tanh":
        return None
    by_library = not problem.finish or problem.library_finish
    if by_library and problem.depth > EPILOGUE_DEPTH:
        return None
    return next((entry for entry in FEW_ROWS_ON_HOPPER if tiles <= entry.tiles and problem.depth <= entry.depth), None)


def _reason(entry: Entry) -> str:
    if entry.tile_ms is None or entry.library_ms is None or entry.shape is None:
        return "not measured for this class of shapes"
    shape = " x ".join(map(str, entry.shape))
    return f"{entry.tile_ms:.4g} ms at {shape} with tiles, {entry.library_ms:.4g} ms with the library"


def plan_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, keep: bool
) -> LinearPlan:
    """The plan for x (M, K), weight (N, K), residual (M, N) or None. `keep`: the kernel also writes the input of the
    activation.
    """
    if x.dtype == torch.float64:
        return LinearPlan("reference", None, "float64")
    if x.device.type != "cuda" and not INTERPRETED:
        return LinearPlan("reference", None, f"no kernels for {x.device.type}")
    finish = activation != "none" or residual is not None
    library_finish = finished_by_library(x, bias, activation, residual, keep)
    operands = [t for t in (x, weight, residual) if t is not None]
    aligned = weight.shape[0] * x.element_size() % 16 == 0 and all(map(describable, operands))
    aligned = aligned and (residual is None or residual.stride(1) == 1)
    return choose(
        Problem(
            x.shape[0], weight.shape[0], x.shape[1], x.dtype, activation, aligned, finish,
            library_finish, processors(x), capability(x.device),
        )
    )  # fmt: skip


def finished_by_library(x: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, keep: bool) -> bool:
    """Whether a cuBLAS epilogue can compute all operations after the product, as accurately as PyTorch's operators.

    In float32, only relu has such an epilogue. For K = 0, cuBLAS would omit the activation.
    """
    has_one = activation == "relu" or (activation == "gelu_tanh" and x.element_size() == 2)
    return has_one and bias is not None and residual is None and not keep and x.is_cuda and x.shape[1] > 0


def describable(t: Tensor) -> bool:
    """Whether a tensor descriptor can describe the matrix: one stride is 1, the other stride is a multiple of 16 bytes,
    the matrix begins at a multiple of 16 bytes, and its elements do not overlap.
    """
    slow, fast = t.stride() if t.stride(1) == 1 else t.stride()[::-1]
    width = t.shape[1] if t.stride(1) == 1 else t.shape[0]
    aligned = t.data_ptr() % 16 == 0 and slow * t.element_size() % 16 == 0
    return fast == 1 and slow >= width and aligned


# ---- passes after a library's product, and gradients ---------------------------------------------------------------
FINISH_ELEMENTS, FINISH_COLUMNS, FINISH_WARPS = 2048, 512, 4
BACKWARD_ROWS, BACKWARD_COLUMNS, BACKWARD_WARPS, BACKWARD_PROGRAMS_PER_SM = 16, 128, 4, 8
SUM_OF_CHUNKS = {"ROWS": 64, "COLUMNS": 16, "num_warps": 4}
