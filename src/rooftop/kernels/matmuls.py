"""Matrix products with what follows them: y = activation(x @ weight.T + bias) + residual.

Bound by the tensor cores from a few hundred rows on, below by reading the weight. A library's product alone reaches the
roof, and a pass of its own for the activation then costs two more trips through memory: here bias, activation and
residual are applied to the float32 sums before they are written. Tiles in bands that share operands in L2, and
persistent programs with tensor descriptors: Tillet, Kung and Cox 2019, "Triton", and its tutorial on persistent
products. Deterministic: no atomics.

Which kernel with which parameters, or the library (cuBLAS, and one pass for the rest), is looked up in a table by the
shape: `linear_act_plan` says what is taken and why. Nothing is timed when a program starts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.tiles import unit
from rooftop.launch.operators import no_second_derivative, no_tangents, operator
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor

ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu", "sigmoid")  # numbered so in matmul_kernels.py
OF_OUTPUT = ("relu", "sigmoid")  # the result says the derivative
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
HALVES = (torch.bfloat16, torch.float16)

# ---- reference -------------------------------------------------------------------------------------------------


def linear_act_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(y, what was activated) of x (M, K) and weight (N, K) in plain PyTorch; what follows the product is float32, or
    float64 for float64."""
    before = functional.linear(x, weight, bias)
    values = before.to(_wide(x.dtype))
    if activation == "relu":
        values = values.relu()
    elif activation == "gelu":
        values = functional.gelu(values)
    elif activation == "gelu_tanh":
        values = functional.gelu(values, approximate="tanh")
    elif activation == "silu":
        values = functional.silu(values)
    elif activation == "sigmoid":
        values = values.sigmoid()
    if residual is not None:
        values = values + residual
    return values.to(x.dtype), before


def linear_act_backward_reference(dy: Tensor, saved: Tensor, activation: str, of_output: bool) -> Tensor:
    """dy * activation' in float32 (float64 for float64); `saved`: the result where `of_output`, else what was
    activated."""
    gradient, value = dy.to(_wide(dy.dtype)), saved.to(_wide(dy.dtype))
    if activation == "none":
        return gradient
    if activation == "relu":
        return gradient.masked_fill(value <= 0, 0.0)
    if activation == "gelu":
        return torch.ops.aten.gelu_backward(gradient, value)
    if activation == "gelu_tanh":
        return torch.ops.aten.gelu_backward(gradient, value, approximate="tanh")
    share = value if activation == "sigmoid" and of_output else value.sigmoid()
    if activation == "sigmoid":
        return gradient * share * (1 - share)
    return gradient * share * (1 + value * (1 - share))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


# ---- launch parameters -----------------------------------------------------------------------------------------

Kernel = Literal["descriptors", "single", "pointers"]
Backend = Literal["descriptors", "single", "pointers", "library", "reference"]


@dataclass(frozen=True)
class Tile:
    """How a kernel makes a product.

    Attributes:
        kernel: that with tensor descriptors, that with descriptors and one tile a program, or that with pointers.
        rows, columns, depth: of a tile of the result, and of its steps through K.
        warps, stages: of a program, and how many steps are on their way to shared memory.
        group: rows of tiles in a band that shares operands in L2.
        parts: of a tile's columns, finished one after the other (descriptors).
        split: parts of K that are summed apart.
        programs_per_sm: how many persistent programs an SM holds (descriptors): with two, one computes while the other
            finishes.
        lag: clock cycles for each element of K that the later half of the programs waits at first (descriptors): two
            that begin together would also finish together. About half of what a tile takes.
        early: whether it is launched while the kernel before may still run (single), and waits for it by itself.
        more: columns beside `columns` (single), 0 or `columns // parts`: 128 + 64 make a tile of 192.
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
    """What is taken for results of up to `tiles` tiles of 128 x 128 for each SM.

    `tile`: None for the library. `tile_ms`, `library_ms`: of the best tile and the library at `shape` (M, N, K), as
    measured beside each other; None where nothing was measured yet.
    """

    tiles: float
    tile: Tile | None
    shape: tuple[int, int, int] | None = None
    tile_ms: float | None = None
    library_ms: float | None = None


# Two programs of 128 x 128 an SM hide what one finishes behind the other's product better than one of 128 x 256.
TWO_AN_SM = Tile("descriptors", 128, 128, 64, 4, 3, group=16, parts=2, programs_per_sm=2)
# Measured on an H200 (benchmarks/results/h200/tune_matmuls.json), the best of the candidates. That of gelu was measured
# with an error function for which there is a shorter formula now. relu and silu are taken to be as sigmoid.
_LIKE_SIGMOID = (
    Entry(3.0, None, (512, 4096, 4096), 0.0307, 0.0301),
    Entry(math.inf, TWO_AN_SM, (4096, 4096, 4096), 0.2095, 0.2149),
)
FUSED_ON_HOPPER = {
    "none": (Entry(math.inf, None, (4096, 768, 3072), 0.0416, 0.0340),),
    "relu": _LIKE_SIGMOID,
    "gelu": (
        Entry(3.0, None, (512, 4096, 4096), 0.0323, 0.0315),
        Entry(math.inf, None, (4096, 4096, 4096), 0.2470, 0.2214),
    ),
    "gelu_tanh": (Entry(math.inf, None, (4096, 3072, 768), 0.0415, 0.0381),),
    "silu": _LIKE_SIGMOID,
    "sigmoid": _LIKE_SIGMOID,
}
# Loads of two bytes cannot be fetched ahead, and cost more than copies of the operands to where rows are aligned. Not
# measured yet.
UNALIGNED_ON_HOPPER = (
    Entry(0.1, None),
    Entry(1.0, Tile("pointers", 128, 128, 64, 8, 3)),
    Entry(math.inf, TWO_AN_SM),
)
FUSED_ELSEWHERE = (Entry(0.1, None), Entry(math.inf, Tile("pointers", 128, 128, 32, 8, 3)))

FINISH_ELEMENTS, FINISH_COLUMNS, FINISH_WARPS = 2048, 512, 4
FINISH_BACKWARDS = False  # the last rows first
# A library's product is made and finished so many bytes of whole rows at a time, that L2 still holds them. Not measured
# yet: all at once.
LIBRARY_BYTES = 1 << 62
BACKWARD_ROWS, BACKWARD_COLUMNS, BACKWARD_WARPS, BACKWARD_PROGRAMS_PER_SM = 16, 128, 4, 8
SUM_OF_CHUNKS = {"ROWS": 64, "COLUMNS": 16, "num_warps": 4}


@dataclass(frozen=True)
class LinearPlan:
    """How a call of `linear_act` is computed.

    Attributes:
        backend: "descriptors" or "pointers" (one Triton kernel), "library" (cuBLAS, and one more pass where that has no
            epilogue for it), "reference" (plain PyTorch).
        tile: the kernel's parameters.
        reason: why.
    """

    backend: Backend
    tile: Tile | None
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}{f' ({self.tile})' if self.tile else ''}: {self.reason}"


@dataclass(frozen=True)
class Problem:
    """What the choice depends on. `aligned`: tensor descriptors can say where the operands are; `finish`: there is more
    to do than a bias; `library_finish`: cuBLAS has an epilogue for it."""

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
    if not problem.finish:
        return LinearPlan("library", None, "nothing but a bias follows, which cuBLAS adds")
    if problem.library_finish:
        return LinearPlan("library", None, "cuBLAS has an epilogue for this")
    table: tuple[Entry, ...]
    if problem.capability != 9:
        table = FUSED_ELSEWHERE
    elif problem.aligned:
        table = FUSED_ON_HOPPER[problem.activation]
    else:
        table = UNALIGNED_ON_HOPPER
    tiles = -(-problem.rows // 128) * -(-problem.columns // 128) / problem.sms
    entry = next(entry for entry in table if tiles <= entry.tiles)
    return LinearPlan(entry.tile.kernel if entry.tile else "library", entry.tile, _reason(entry))


def _reason(entry: Entry) -> str:
    if entry.tile_ms is None or entry.library_ms is None or entry.shape is None:
        return "not measured for this class of shapes"
    shape = " x ".join(map(str, entry.shape))
    return f"{entry.tile_ms:.4g} ms at {shape} with tiles, {entry.library_ms:.4g} ms with the library"


def _plan(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, keep: bool
) -> LinearPlan:
    """x (M, K), weight (N, K), residual (M, N) or none; `keep`: what is activated is written, too."""
    if x.dtype == torch.float64:
        return LinearPlan("reference", None, "float64")
    if x.device.type != "cuda" and not INTERPRETED:
        return LinearPlan("reference", None, f"no kernels for {x.device.type}")
    finish = activation != "none" or residual is not None
    library_finish = activation in ("relu", "gelu_tanh") and bias is not None and residual is None and not keep
    operands = [t for t in (x, weight, residual) if t is not None]
    aligned = weight.shape[0] * x.element_size() % 16 == 0 and all(map(_describable, operands))
    aligned = aligned and (residual is None or residual.stride(1) == 1)
    return choose(
        Problem(
            x.shape[0], weight.shape[0], x.shape[1], x.dtype, activation, aligned, finish,
            library_finish and x.is_cuda, processors(x), _capability(x.device),
        )
    )  # fmt: skip


def _describable(t: Tensor) -> bool:
    """Whether a tensor descriptor can say where it is: one stride of 1, the other of whole groups of 16 bytes."""
    slow, fast = t.stride() if t.stride(1) == 1 else t.stride()[::-1]
    width = t.shape[1] if t.stride(1) == 1 else t.shape[0]
    aligned = t.data_ptr() % 16 == 0 and slow * t.element_size() % 16 == 0
    return fast == 1 and slow >= width and aligned


def _described_or_copied(t: Tensor, rows_only: bool = False) -> Tensor:
    """(M, N) as it is where a tensor descriptor can say where, else a copy; `rows_only`: with N the fast dimension."""
    if _describable(t) and not (rows_only and t.stride(1) != 1):
        return t
    return _aligned_rows(t.shape[0], t.shape[1], t).copy_(t)


def _aligned_rows(rows: int, columns: int, like: Tensor) -> Tensor:
    """Memory for (rows, columns) whose rows begin at multiples of 16 bytes."""
    group = 16 // like.element_size()
    return like.new_empty((rows, -(-columns // group) * group))[:, :columns]


@cache
def _capability(device: torch.device) -> int:
    """The major compute capability; interpreted kernels run as on Hopper."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


# ---- implementations -------------------------------------------------------------------------------------------


def forward(
    plan: LinearPlan, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y (M, N), what was activated (M, N) or nothing) as `plan` says; any strides."""
    rows, columns = x.shape[0], weight.shape[0]
    nothing = x.new_empty(0)
    if rows == 0 or columns == 0:
        return x.new_empty(rows, columns), x.new_empty(rows, columns) if keep else nothing
    if plan.backend == "reference":
        y, before = linear_act_reference(x, weight, bias, activation, residual)
        return y, (before.clone() if before is y else before) if keep else nothing
    if plan.backend == "library":
        return _by_library(x, weight, bias, activation, residual, keep)
    require_triton()
    assert plan.tile is not None
    tile = plan.tile
    if tile.kernel != "pointers":
        x, weight = _described_or_copied(x), _described_or_copied(weight)
        residual = _described_or_copied(residual, rows_only=True) if residual is not None else None
        y = _aligned_rows(rows, columns, x)
        before = _aligned_rows(rows, columns, x) if keep else nothing
    else:
        residual = _unit_columns(residual) if residual is not None else None
        y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
        before = torch.empty_like(y) if keep else nothing
    steps = -(-x.shape[1] // tile.depth)
    split = -(-steps // -(-steps // tile.split))  # no part is empty
    run = _RUN[tile.kernel]
    bias = bias.contiguous() if bias is not None else None
    if split == 1:
        run(tile, 1, x, weight, bias, activation, residual, y, before, rows)
    else:
        padded = -(-rows // tile.rows) * tile.rows if tile.kernel == "descriptors" else rows
        sums = torch.empty((split * padded, y.stride(0)), dtype=torch.float32, device=x.device)[:, :columns]
        run(tile, split, x, weight, None, "none", None, sums, nothing, padded)
        _finish(sums, split, padded, bias, activation, residual, y, before)
    return y.contiguous(), before.contiguous()


def _by_library(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    nothing = x.new_empty(0)
    if activation in ("relu", "gelu_tanh") and bias is not None and residual is None and not keep and x.is_cuda:
        return torch._addmm_activation(bias, x, weight.t(), use_gelu=activation == "gelu_tanh"), nothing
    if activation == "none" and residual is None:
        before = functional.linear(x, weight, bias)
        return before, before.clone() if keep else nothing
    require_triton()
    residual = _unit_columns(residual) if residual is not None else None
    rows, columns = x.shape[0], weight.shape[0]
    chunk = _rows_at_a_time(rows, columns * x.element_size())
    before = functional.linear(x, weight, bias) if chunk >= rows else x.new_empty(rows, columns)
    y = torch.empty_like(before) if keep else before  # in place: each element is read, then written, by one thread
    for start in range(0, rows, chunk):
        part = slice(start, start + chunk)
        if chunk < rows:
            _multiply_into(before[part], x[part], weight, bias)
        added = residual[part] if residual is not None else None
        _finish(before[part], 1, before[part].shape[0], None, activation, added, y[part], nothing)
    return y, before if keep else nothing


def _rows_at_a_time(rows: int, row_bytes: int) -> int:
    """How many rows a library's product makes before they are finished: equal parts, in multiples of 256 rows."""
    parts = -(-rows * row_bytes // LIBRARY_BYTES)
    return -(-rows // (parts * 256)) * 256 if parts > 1 else rows


def _multiply_into(target: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=target)
    else:
        torch.addmm(bias, x, weight.t(), out=target)


def _with_descriptors(
    tile: Tile, split: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    y: Tensor, before: Tensor, padded_rows: int,
) -> None:  # fmt: skip
    from rooftop.kernels.matmul_kernels import linear_act_descriptors

    rows, depth = x.shape
    columns = weight.shape[0]
    part = tile.columns // tile.parts
    keep = before.numel() > 0
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns) * split
    launch(
        linear_act_descriptors,
        (min(tiles, tile.programs_per_sm * processors(x)),),
        x.device,
        _described(x, tile.rows, tile.depth),
        _described(weight, tile.columns, tile.depth),
        _described(y, tile.rows, part),
        _described(before, tile.rows, part) if keep else None,
        _described(residual, tile.rows, part) if residual is not None else None,
        *(bias, rows, columns, depth, padded_rows, tile.lag * depth),
        X_ACROSS=x.stride(1) != 1, W_ACROSS=weight.stride(1) != 1, PARTS=tile.parts,
        OUT_OF_STEP=tile.lag > 0 and not INTERPRETED,
        **_constants(tile, split, x, bias, activation, residual, keep),
    )  # fmt: skip


def _with_single_tiles(
    tile: Tile, split: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    y: Tensor, before: Tensor, _: int,
) -> None:  # fmt: skip
    from rooftop.kernels.matmul_kernels import linear_act_single

    assert split == 1
    rows, depth = x.shape
    columns = weight.shape[0]
    part = tile.columns // tile.parts
    keep = before.numel() > 0
    launch(
        linear_act_single,
        (-(-rows // tile.rows) * -(-columns // (tile.columns + tile.more)),),
        x.device,
        _described(x, tile.rows, tile.depth),
        _described(weight, tile.columns, tile.depth),
        _described(weight, tile.more, tile.depth) if tile.more else None,
        _described(y, tile.rows, part),
        _described(before, tile.rows, part) if keep else None,
        *(residual, bias, rows, columns, depth, residual.stride(0) if residual is not None else 0),
        X_ACROSS=x.stride(1) != 1, W_ACROSS=weight.stride(1) != 1, PARTS=tile.parts, MORE=tile.more,
        **({"EARLY": True, "launch_pdl": True} if tile.early and not INTERPRETED else {"EARLY": False}),
        **_constants(tile, split, x, bias, activation, residual, keep),
    )  # fmt: skip


def _described(t: Tensor, height: int, width: int) -> TensorDescriptor:
    """(height, width) of a matrix at a time; of one whose rows are its fast dimension, the transpose is described."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if t.stride(1) != 1:
        t, height, width = t.t(), width, height
    return TensorDescriptor(t, list(t.shape), list(t.stride()), [height, width])


def _with_pointers(
    tile: Tile, split: int, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None,
    y: Tensor, before: Tensor, _: int,
) -> None:  # fmt: skip
    from rooftop.kernels.matmul_kernels import linear_act_pointers

    rows, depth = x.shape
    columns = weight.shape[0]
    tiles = -(-rows // tile.rows) * -(-columns // tile.columns) * split
    keep = before.numel() > 0
    launch(
        linear_act_pointers, (tiles,), x.device, x, weight, y, before if keep else None, residual, bias,
        rows, columns, depth, *x.stride(), *weight.stride(), residual.stride(0) if residual is not None else 0,
        WIDE=any(_reach(t, tile.depth) >= 1 << 31 for t in (x, weight)),
        **_constants(tile, split, x, bias, activation, residual, keep),
    )  # fmt: skip


_RUN = {"descriptors": _with_descriptors, "single": _with_single_tiles, "pointers": _with_pointers}


def _reach(t: Tensor, beyond: int) -> int:
    """The largest offset that a kernel computes within a matrix, up to `beyond` columns past its end."""
    return (t.shape[0] - 1) * t.stride(0) + (t.shape[1] + beyond) * t.stride(1)


def _constants(
    tile: Tile, split: int, x: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, keep: bool
) -> dict[str, int | bool | str]:
    return {
        "ACTIVATION": ACTIVATIONS.index(activation),
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "KEEP": keep,
        "PRECISION": "tf32" if matrix_precision(x) == "tf32" else "ieee",
        "WIDEN": INTERPRETED,
        "HALF": x.dtype in HALVES,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "GROUP": tile.group,
        "SPLIT": split,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _finish(
    sums: Tensor, split: int, padded_rows: int, bias: Tensor | None, activation: str, residual: Tensor | None,
    y: Tensor, before: Tensor,
) -> None:  # fmt: skip
    """y = activation(sum of sums + bias) + residual."""
    from rooftop.kernels.matmul_kernels import linear_act_finish

    rows, columns = y.shape
    residual_row = residual.stride(0) if residual is not None else 0
    group = unit(columns, residual_row, sums.stride(0), y.stride(0))
    block = min(FINISH_COLUMNS, 1 << (columns - 1).bit_length())
    height = FINISH_ELEMENTS // block
    keep = before.numel() > 0
    launch(
        linear_act_finish, (-(-rows // height), -(-columns // block)), y.device,
        sums, bias, residual, y, before if keep else None, rows, columns // group, padded_rows,
        sums.stride(0) // group, y.stride(0) // group, residual_row // group,
        ACTIVATION=ACTIVATIONS.index(activation), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        KEEP=keep, SPLIT=split, UNIT=group, ROWS=height, COLUMNS=block, HALF=y.dtype in HALVES,
        BACKWARDS=FINISH_BACKWARDS, num_warps=FINISH_WARPS,
    )  # fmt: skip


def _backward(dy: Tensor, saved: Tensor, activation: str, of_output: bool, sums: bool) -> tuple[Tensor, Tensor]:
    """(dz, the sums of its columns), each empty where there is no activation or no sums are wanted."""
    dz = dy.new_empty(dy.shape if activation != "none" else 0)
    total = dy.new_empty(dy.shape[1] if sums else 0)
    if dy.numel() == 0:
        return dz, total.zero_()
    if dy.dtype == torch.float64 or (dy.device.type != "cuda" and not INTERPRETED):
        gradient = linear_act_backward_reference(dy, saved, activation, of_output)
        return gradient.to(dy.dtype) if activation != "none" else dz, gradient.sum(0).to(dy.dtype) if sums else total
    require_triton()
    from rooftop.kernels.matmul_kernels import add_column_sums, linear_act_backward

    dy, saved = _unit_columns(dy), saved.contiguous()
    rows, columns = dy.shape
    group = unit(columns, dy.stride(0))
    block = min(BACKWARD_COLUMNS, 1 << (columns - 1).bit_length())
    blocks = -(-columns // block)
    wanted = max(1, BACKWARD_PROGRAMS_PER_SM * processors(dy) // blocks)
    rows_of_chunk = -(-rows // (wanted * BACKWARD_ROWS)) * BACKWARD_ROWS
    chunks = -(-rows // rows_of_chunk)
    partial = torch.empty((chunks if sums else 0, columns), dtype=torch.float32, device=dy.device)
    launch(
        linear_act_backward, (blocks, chunks), dy.device,
        dy, saved, dz, partial, rows, columns // group, dy.stride(0) // group, rows_of_chunk,
        ACTIVATION=ACTIVATIONS.index(activation), OF_OUTPUT=of_output, SUM=sums, UNIT=group,
        ROWS=BACKWARD_ROWS, COLUMNS=block, HALF=dy.dtype in HALVES, num_warps=BACKWARD_WARPS,
    )  # fmt: skip
    if sums:
        grid = (-(-columns // SUM_OF_CHUNKS["COLUMNS"]),)
        launch(add_column_sums, grid, dy.device, partial, total, chunks, columns, **SUM_OF_CHUNKS)
    return dz, total


def _unit_columns(t: Tensor) -> Tensor:
    """Rows may lie apart, elements of a row may not."""
    return t if t.stride(1) == 1 else t.contiguous()


# ---- registration ----------------------------------------------------------------------------------------------


@operator("linear_act")
def _linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    plan = _plan(x, weight, bias, activation, residual, keep)
    return forward(plan, x, weight, bias, activation, residual, keep)


@torch.library.register_fake("rooftop::linear_act")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor]:
    shape = (x.shape[0], weight.shape[0])
    return x.new_empty(shape), x.new_empty(shape if keep else 0)


@operator("linear_act_backward")
def _linear_act_backward(
    dy: Tensor, saved: Tensor, activation: str, of_output: bool, sums: bool
) -> tuple[Tensor, Tensor]:
    return _backward(dy, saved, activation, of_output, sums)


@torch.library.register_fake("rooftop::linear_act_backward")
def _(dy: Tensor, saved: Tensor, activation: str, of_output: bool, sums: bool) -> tuple[Tensor, Tensor]:
    return dy.new_empty(dy.shape if activation != "none" else 0), dy.new_empty(dy.shape[1] if sums else 0)


def _keeps(activation: str, residual: Tensor | None) -> bool:
    """Whether backward needs what was activated, and not only the result."""
    return activation != "none" and (activation not in OF_OUTPUT or residual is not None)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, weight, bias, activation, residual, keep = inputs
    y, before = output
    if _keeps(activation, residual) and not keep:
        raise ValueError("rooftop::linear_act: its gradient needs what was activated: call it with keep=True")
    ctx.activation, ctx.of_output = activation, not keep  # type: ignore[attr-defined]
    ctx.save_for_backward(x, weight, bias, *([] if activation == "none" else [before if keep else y]))
    ctx.mark_non_differentiable(before)


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, dy: Tensor, _before: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, bias, *saved = ctx.saved_tensors  # type: ignore[attr-defined]
    for_x, for_weight, for_bias, _, for_residual, _ = ctx.needs_input_grad  # type: ignore[attr-defined]
    activation, of_output = ctx.activation, ctx.of_output  # type: ignore[attr-defined]
    dz, dbias = dy, None
    if torch.is_grad_enabled():  # create_graph: what was saved does not know how it depends on x
        if saved:
            before = functional.linear(x, weight, bias)
            dz = linear_act_backward_reference(dy, before, activation, of_output=False).to(dy.dtype)
        dbias = dz.sum(0) if for_bias else None
    elif for_bias or (saved and (for_x or for_weight)):
        value = saved[0] if saved else dy
        made, dbias = _linear_act_backward(dy, value, activation, of_output, for_bias)
        dz = made if saved else dy
    dx = dz @ weight if for_x else None  # (M, N) (N, K)
    dweight = dz.t() @ x if for_weight else None  # (N, M) (M, K)
    return dx, dweight, dbias if for_bias else None, None, dy if for_residual else None, None


torch.library.register_autograd("rooftop::linear_act", _differentiate, setup_context=_save)
torch.library.register_autograd("rooftop::linear_act_backward", no_second_derivative("linear"))

# Of one element: an exponential, a division, an error function and a product count 1 each.
_FORWARD_FLOPS = {"none": 0, "relu": 1, "gelu": 5, "gelu_tanh": 8, "silu": 4, "sigmoid": 3}
_BACKWARD_FLOPS = {"none": 0, "relu": 1, "gelu": 10, "gelu_tanh": 15, "silu": 8, "sigmoid": 3}


@cost_of("rooftop::linear_act")
def _forward_cost(call: Call) -> Cost:
    """The product, and for each result bias, activation and residual."""
    x, weight, bias, residual = call["x"], call["weight"], call["bias"], call["residual"]
    results = x.shape[0] * weight.shape[0]
    each = _FORWARD_FLOPS[call["activation"]] + (bias is not None) + (residual is not None)
    flops: dict[str, int] = {matrix_precision(x): 2 * results * x.shape[1]}
    precision = precision_of(x.dtype)
    flops[precision] = flops.get(precision, 0) + each * results
    return Cost(distinct_bytes([x, weight, bias, residual]), distinct_bytes(call.out), flops)


@cost_of("rooftop::linear_act_backward")
def _backward_cost(call: Call) -> Cost:
    dy, saved, activation = call["dy"], call["saved"], call["activation"]
    each = _BACKWARD_FLOPS[activation] + call["sums"]
    read = [dy] if activation == "none" else [dy, saved]
    return Cost(distinct_bytes(read), distinct_bytes(call.out), {precision_of(dy.dtype): each * dy.numel()})


# ---- public ----------------------------------------------------------------------------------------------------


def linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> Tensor:
    """activation(input @ weight.T + bias) + residual; the first arguments as of `torch.nn.functional.linear`.

    Args:
        input: (..., K), bfloat16, float16, float32 or float64; any strides.
        weight: (N, K), same dtype.
        bias: (N,), same dtype.
        activation: "none", "relu", "gelu", "gelu_tanh" (as `gelu(approximate="tanh")`), "silu" or "sigmoid".
        residual: (..., N), same dtype; under autocast of any of these dtypes.

    Returns:
        (..., N). Sums, bias, activation and residual are float32 (float64 for float64) and rounded once; TF32 is used
        for float32 only where torch is allowed to. Under autocast the operands are cast as `linear`'s.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit, or an activation that there is not.
        NotImplementedError: forward-mode differentiation.
    """
    x, weight, bias, residual, later = _prepared("linear_act", input, weight, bias, activation, residual)
    no_tangents("linear", x, weight, bias, residual)
    columns = weight.shape[0]
    tensors = (x, weight, bias, residual)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    added = residual.reshape(rows.shape[0], columns) if residual is not None else None
    y = _linear_act(rows, weight, bias, activation, added, _keeps(activation, residual) and _differentiated(tensors))[0]
    y = y.reshape(*x.shape[:-1], columns)
    return y if later is None else y + later


def matmul(input: Tensor, other: Tensor) -> Tensor:
    """input @ other; shapes, broadcasting and results as of `torch.matmul`.

    Args:
        input: (K,), (M, K) or (..., M, K), bfloat16, float16, float32 or float64.
        other: (K,), (K, N) or (..., K, N), same dtype. Where it has more than two dimensions the products are
            `torch.matmul`'s, which batches them.

    Returns:
        As `torch.matmul`, with float32 sums (float64 for float64).

    Raises:
        TypeError, ValueError, NotImplementedError: as `linear_act`.
    """
    for name, tensor in (("input", input), ("other", other)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"matmul: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor.layout != torch.strided:
            raise TypeError(f"matmul: {name} must be dense, got layout {tensor.layout}: use .to_dense()")
        if tensor.dtype not in FLOATS:
            raise TypeError(f"matmul: {name} must be bfloat16, float16, float32 or float64, got {tensor.dtype}")
    if other.device != input.device:
        raise ValueError(f"matmul: input is on {input.device}, other on {other.device}: move one to the other")
    if other.dtype != input.dtype and not _autocasts(input):
        raise TypeError(f"matmul: input is {input.dtype}, other {other.dtype}: cast one, or use autocast")
    if input.dim() == 0 or other.dim() == 0:
        raise ValueError(f"matmul: a number is no matrix: input {tuple(input.shape)}, other {tuple(other.shape)}")
    if other.dim() > 2:
        if input.shape[-1] != other.shape[-2] or not _broadcast(input.shape[:-2], other.shape[:-2]):
            shapes = f"{tuple(input.shape)} and {tuple(other.shape)}"
            raise ValueError(f"matmul: input and other, {shapes} do not fit: expected (..., M, K), (..., K, N)")
        return torch.matmul(input, other)
    weight = other[None] if other.dim() == 1 else other.t()
    if input.shape[-1] != weight.shape[1]:
        shapes = f"{tuple(input.shape)} and {tuple(other.shape)}"
        raise ValueError(f"matmul: input and other, {shapes} do not fit: expected (..., K), (K, N)")
    x, weight, *_ = _prepared("matmul", input, weight, None, "none", None)
    no_tangents("matmul", x, weight)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    y = _linear_act(rows, weight, None, "none", None, False)[0]
    return y.reshape(x.shape[:-1]) if other.dim() == 1 else y.reshape(*x.shape[:-1], weight.shape[0])


def linear_act_plan(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
) -> LinearPlan:
    """How `linear_act` with these arguments is computed, and why; arguments and errors are the same.

    Nothing is computed. As in the call, it matters whether a gradient will be needed.
    """
    x, weight, bias, residual, _ = _prepared("linear_act_plan", input, weight, bias, activation, residual)
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    added = residual.reshape(rows.shape[0], weight.shape[0]) if residual is not None else None
    keep = _keeps(activation, residual) and _differentiated((x, weight, bias, residual))
    return _plan(rows, weight, bias, activation, added, keep)


def _broadcast(a: torch.Size, b: torch.Size) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


def _autocasts(x: Tensor) -> bool:
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64


def _differentiated(tensors: Sequence[Tensor | None]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


Prepared = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


def _prepared(
    name: str, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None
) -> Prepared:
    """The arguments, checked and cast as autocast says, and a residual that is to be added later: under autocast one
    of another dtype makes the sum wider, as in PyTorch."""
    for argument, tensor in (("input", x), ("weight", weight), ("bias", bias), ("residual", residual)):
        if not isinstance(tensor, Tensor) and (tensor is not None or argument in ("input", "weight")):
            raise TypeError(f"{name}: {argument} must be a tensor, got {type(tensor).__name__}")
        if tensor is not None and tensor.layout != torch.strided:
            raise TypeError(f"{name}: {argument} must be dense, got layout {tensor.layout}: use .to_dense()")
        if tensor is not None and tensor.dtype not in FLOATS:
            raise TypeError(f"{name}: {argument} must be bfloat16, float16, float32 or float64, got {tensor.dtype}")
        if tensor is not None and tensor.device != x.device:
            raise ValueError(f"{name}: input is on {x.device}, {argument} on {tensor.device}: move one to the other")
    if activation not in ACTIVATIONS:
        raise ValueError(f"{name}: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: expected input (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"{name}: expected bias of shape ({weight.shape[0]},), got {tuple(bias.shape)}")
    shape = (*x.shape[:-1], weight.shape[0])
    if residual is not None and tuple(residual.shape) != shape:
        raise ValueError(f"{name}: expected residual of shape {shape}, got {tuple(residual.shape)}: use .expand()")
    later = None
    if _autocasts(x):
        narrow = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = (t.to(narrow) if t is not None else None for t in (x, weight, bias))  # type: ignore[assignment]
        if residual is not None and residual.dtype != narrow:
            residual, later = None, residual
    for argument, tensor in (("weight", weight), ("bias", bias), ("residual", residual)):
        if tensor is not None and tensor.dtype != x.dtype:
            raise TypeError(f"{name}: input is {x.dtype}, {argument} {tensor.dtype}: cast one, or use autocast")
    return x, weight, bias, residual, later
