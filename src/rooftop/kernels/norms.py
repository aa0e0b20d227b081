"""Layer normalization: y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimensions.

Ba, Kiros and Hinton 2016, "Layer Normalization". Bound by memory at every size: forward reads x and writes y, backward
reads dy and x and writes dx. The backward kernel sums the gradients of weight and bias in the same pass, in float32
registers of persistent programs, and adds the programs' partial sums in a fixed order: no atomics, the same bits each
time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.launch.operators import no_second_derivative, no_tangents, operator
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton, shared_memory_bytes

# ---- reference -------------------------------------------------------------------------------------------------


def layer_norm_reference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, rstd) of rows x (M, N) in plain PyTorch; statistics float32, or float64 for float64 rows."""
    values = x.to(_statistics_dtype(x))
    mean = values.mean(1, keepdim=True)
    centred = values - mean
    rstd = (centred.square().mean(1, keepdim=True) + eps).rsqrt()
    y = centred * rstd
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(x.dtype), mean.squeeze(1), rstd.squeeze(1)


def layer_norm_backward_reference(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), the latter two of (N,) in the statistics' dtype."""
    gradient, normal = dy.to(mean.dtype), (x.to(mean.dtype) - mean[:, None]) * rstd[:, None]
    dweight, dbias = (gradient * normal).sum(0), gradient.sum(0)
    if weight is not None:
        gradient = gradient * weight
    projected = normal * (gradient * normal).mean(1, keepdim=True)
    dx = (gradient - gradient.mean(1, keepdim=True) - projected) * rstd[:, None]
    return dx.to(x.dtype), dweight, dbias


def _statistics_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- launch parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardConfig:
    """How rows of up to `columns` elements are worked on: rows a program, elements of a block, and warps."""

    columns: int
    rows: int
    block: int
    warps: int


@dataclass(frozen=True)
class BackwardConfig:
    """Also: how many programs stay on an SM, and how many tiles of rows are on their way at a time."""

    columns: int
    rows: int
    block: int
    warps: int
    programs_per_sm: int
    stages: int
    hold: bool = False  # the weight in registers
    again: bool = False  # load the rows twice


# Chosen by benchmarks/kernels/norm_variants.py on an H200 (bfloat16, 2^27 elements). What matters: that loads are wide
# (a block gives each thread 16 bytes or more), that little of the last block is masked, and in backward that rows are
# fetched ahead; where the weight stays in registers there is more shared memory for that.
FORWARD = (
    *(ForwardConfig(128, 16, 128, 2), ForwardConfig(256, 8, 128, 2), ForwardConfig(512, 4, 512, 2)),
    *(ForwardConfig(1024, 1, 256, 2), ForwardConfig(2048, 1, 512, 4), ForwardConfig(3072, 1, 1024, 4)),
    *(ForwardConfig(4096, 1, 4096, 4), ForwardConfig(6144, 1, 1024, 8), ForwardConfig(8192, 1, 2048, 8)),
    *(ForwardConfig(16384, 1, 4096, 8), ForwardConfig(32768, 1, 8192, 16)),
)
BACKWARD = (
    *(BackwardConfig(128, 8, 128, 2, 6, 3), BackwardConfig(256, 4, 256, 2, 6, 3), BackwardConfig(512, 4, 512, 4, 3, 3)),
    *(BackwardConfig(768, 2, 256, 4, 3, 4, hold=True), BackwardConfig(1023, 1, 256, 2, 6, 3, hold=True)),
    *(BackwardConfig(1024, 2, 1024, 4, 3, 3), BackwardConfig(1536, 1, 512, 4, 3, 4, hold=True)),
    *(BackwardConfig(2048, 2, 2048, 8, 2, 3), BackwardConfig(2560, 1, 1024, 4, 4, 4, hold=True)),
    *(BackwardConfig(3072, 1, 1024, 8, 2, 4, hold=True), BackwardConfig(4096, 1, 4096, 8, 2, 3)),
    *(BackwardConfig(6144, 1, 2048, 8, 2, 4, hold=True), BackwardConfig(8192, 1, 4096, 16, 1, 4)),
    *(BackwardConfig(12288, 1, 4096, 16, 1, 3), BackwardConfig(16384, 1, 4096, 16, 1, 1, again=True)),
)
LONG_FORWARD = {"COLUMNS": 4096, "num_warps": 8}  # elements of a long row at a time
LONG_FORWARD_UNALIGNED = {"COLUMNS": 1024, "num_warps": 8}  # one element a load
LONG_ROW_SUMS = {"COLUMNS": 2048, "num_warps": 8}
LONG_BACKWARD = BackwardConfig(columns=0, rows=1, block=2048, warps=8, programs_per_sm=2, stages=4)


Config = TypeVar("Config", ForwardConfig, BackwardConfig)


def _config(table: Sequence[Config], columns: int) -> Config | None:
    """The parameters for rows of so many elements; None where they are too long for a tile."""
    return next((config for config in table if columns <= config.columns), None)


def _unit(*sizes: int) -> int:
    """The largest group of up to 8 elements (16 bytes of half precision) that divides all sizes."""
    return math.gcd(8, *sizes)


def _exact_products(*tensors: Tensor | None) -> dict[str, bool]:
    """In dy * weight - mean(dy * weight) both products must be rounded alike, or what should cancel does not.

    Products of half precision are exact in float32; those of float32 must not be fused with the subtraction.
    """
    return {"enable_fp_fusion": all(t is None or t.dtype in (torch.bfloat16, torch.float16) for t in tensors)}


# ---- implementations -------------------------------------------------------------------------------------------


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) with unit column stride."""
    if x.dtype == torch.float64 or (x.device.type == "cpu" and not INTERPRETED):
        return layer_norm_reference(x, weight, bias, eps)
    require_triton()
    from rooftop.kernels import norm_kernels as kernels

    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    unit = _unit(columns, x.stride(0))
    tensors, sizes = (x, weight, bias, y, mean, rstd), (columns // unit, x.stride(0) // unit, eps)
    constants = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None, "UNIT": unit}
    config = _config(FORWARD, columns)
    if config is None:
        block = LONG_FORWARD if unit > 1 else LONG_FORWARD_UNALIGNED
        launch(kernels.layer_norm_forward_long, (rows,), x.device, *tensors, *sizes, **constants, **block)
    else:
        tile = _tile(config, columns)
        grid = (-(-rows // config.rows),)
        launch(kernels.layer_norm_forward, grid, x.device, *tensors, rows, *sizes, **constants, **tile)
    return y, mean, rstd


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x (M, N) with unit column stride; `mask`: which of weight and bias need a gradient."""
    dweight, dbias = _parameter_gradients(x, weight, bias, mask)
    if x.dtype == torch.float64 or (x.device.type == "cpu" and not INTERPRETED):
        dx, weight_sum, bias_sum = layer_norm_backward_reference(dy, x, weight, mean, rstd)
        return dx, weight_sum.to(dweight.dtype) if mask[0] else dweight, bias_sum.to(dbias.dtype) if mask[1] else dbias
    require_triton()
    from rooftop.kernels.norm_kernels import add_partial_sums

    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = x.shape[1]
    unit = _unit(columns, x.stride(0), dy.stride(0))
    tensors = (dy, x, weight, mean, rstd)
    sizes = (x.shape[0], columns // unit, dy.stride(0) // unit, x.stride(0) // unit)
    constants = {"HAS_WEIGHT": weight is not None, "UNIT": unit, **_exact_products(dy, weight)}
    sums: Constants = {"SUM_WEIGHT": mask[0], "SUM_BIAS": mask[1]}
    config = _config(BACKWARD, columns)
    if config is None:
        partial = _backward_of_long_rows(LONG_BACKWARD, tensors, dx, sizes, constants, sums)
    else:
        partial = _backward_of_tiles(config, tensors, dx, sizes, constants | sums)
    if any(mask):
        block = {"ROWS": 128, "COLUMNS": 16, "num_warps": 4}
        grid = (-(-columns // block["COLUMNS"]),)
        programs = partial.shape[1]
        launch(add_partial_sums, grid, x.device, partial, dweight, dbias, programs, columns, **sums, **block)
    return dx, dweight, dbias


Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]  # dy, x, weight, mean, rstd
Constants = dict[str, int | bool]


def _backward_of_tiles(
    config: BackwardConfig, tensors: Tensors, dx: Tensor, sizes: tuple[int, ...], constants: Constants
) -> Tensor:
    """Fills dx; gives the partial sums (2, programs, N)."""
    from rooftop.kernels.norm_kernels import layer_norm_backward

    rows, columns = dx.shape
    programs = max(1, min(-(-rows // config.rows), config.programs_per_sm * processors(dx)))
    partial = torch.empty((2, programs, columns), dtype=torch.float32, device=dx.device)
    tile = _tile(config, columns) | {
        "STAGES": _stages(config, tensors[:2], columns),
        "HOLD": config.hold,
        "AGAIN": config.again,
    }
    launch(layer_norm_backward, (programs,), dx.device, *tensors, dx, partial, *sizes, **constants, **tile)
    return partial


def _stages(config: BackwardConfig, tensors: Sequence[Tensor], columns: int) -> int:
    """As many as the configuration says, or as fit into shared memory beside the scratch space of the sums."""
    elements = config.rows * min(-(-columns // config.block) * config.block, 1 << (columns - 1).bit_length())
    stage_bytes = elements * sum(t.element_size() for t in tensors)
    return max(1, min(config.stages, (shared_memory_bytes(tensors[0]) - stage_bytes // 2 - 2048) // stage_bytes))


def _backward_of_long_rows(
    config: BackwardConfig, tensors: Tensors, dx: Tensor, sizes: tuple[int, ...], constants: Constants, sums: Constants
) -> Tensor:
    """Fills dx; gives the partial sums (2, chunks of rows, N)."""
    from rooftop.kernels.norm_kernels import layer_norm_backward_long, layer_norm_row_sums

    rows, columns = dx.shape
    row_sums = torch.empty((2, rows), dtype=torch.float32, device=dx.device)
    launch(layer_norm_row_sums, (rows,), dx.device, *tensors, row_sums, *sizes, **constants, **LONG_ROW_SUMS)
    blocks = -(-columns // config.block)
    chunks = max(1, min(-(-rows // config.rows), config.programs_per_sm * processors(dx) // blocks))
    partial = torch.empty((2, chunks, columns), dtype=torch.float32, device=dx.device)
    stages = _stages(config, tensors[:2], config.block)
    tile = {"ROWS": config.rows, "COLUMNS": config.block, "STAGES": stages, "num_warps": config.warps}
    arguments, grid = (*tensors, row_sums, dx, partial, *sizes), (blocks, chunks)
    launch(layer_norm_backward_long, grid, dx.device, *arguments, **constants, **sums, **tile)
    return partial


def _tile(config: ForwardConfig | BackwardConfig, columns: int) -> Constants:
    """Launch parameters that both kernels of tiles share."""
    block = min(config.block, 1 << (columns - 1).bit_length())
    blocks = -(-columns // block)
    even = blocks * block == columns
    return {"ROWS": config.rows, "BLOCKS": blocks, "COLUMNS": block, "EVEN": even, "num_warps": config.warps}


def _parameter_gradients(x: Tensor, weight: Tensor | None, bias: Tensor | None, mask: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradients of weight and bias; nothing where none is wanted."""
    wanted = [t if needed else None for t, needed in zip((weight, bias), mask, strict=True)]
    return [x.new_empty(0) if t is None else x.new_empty(t.shape, dtype=t.dtype) for t in wanted]


# ---- registration ----------------------------------------------------------------------------------------------


@operator("layer_norm")
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(_unit_columns(x), _contiguous(weight), _contiguous(bias), eps)


@torch.library.register_fake("rooftop::layer_norm")
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[0], dtype=_statistics_dtype(x))
    return x.new_empty(x.shape), statistics, torch.empty_like(statistics)


@operator("layer_norm_backward")
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(_unit_columns(dy), _unit_columns(x), _contiguous(weight), bias, mean, rstd, mask)


@torch.library.register_fake("rooftop::layer_norm_backward")
def _(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    dweight, dbias = _parameter_gradients(x, weight, bias, mask)
    return x.new_empty(x.shape), dweight, dbias


def _unit_columns(x: Tensor) -> Tensor:
    """Rows may lie apart, elements of a row may not."""
    return x if x.stride(1) == 1 else x.contiguous()


def _contiguous(parameter: Tensor | None) -> Tensor | None:
    return parameter.contiguous() if parameter is not None else None


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, dy: Tensor, _mean: Tensor | None, _rstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, bias, mean, rstd = ctx.saved_tensors  # type: ignore[attr-defined]
    mask = list(ctx.needs_input_grad[1:3])  # type: ignore[attr-defined]
    dx, dweight, dbias = _layer_norm_backward(dy, x, weight, bias, mean, rstd, mask)
    return dx, dweight if mask[0] else None, dbias if mask[1] else None, None


torch.library.register_autograd("rooftop::layer_norm", _differentiate, setup_context=_save)
torch.library.register_autograd("rooftop::layer_norm_backward", no_second_derivative("layer_norm"))


@cost_of("rooftop::layer_norm")
def _forward_cost(call: Call) -> Cost:
    """Statistics 3 an element, centring and scaling 2, weight and bias 1 each."""
    x, weight, bias = call["x"], call["weight"], call["bias"]
    flops = (5 + (weight is not None) + (bias is not None)) * x.numel()
    return Cost(distinct_bytes([x, weight, bias]), distinct_bytes(call.out), {precision_of(x.dtype): flops})


@cost_of("rooftop::layer_norm_backward")
def _backward_cost(call: Call) -> Cost:
    """Normalizing 2 an element, dx 8 with a weight, 2 and 1 for the sums of weight and bias."""
    x, weight, mask = call["x"], call["weight"], call["mask"]
    flops = (2 + 7 + (weight is not None) + 2 * mask[0] + mask[1]) * x.numel()
    read = [call["dy"], x, weight, call["mean"], call["rstd"]]
    written = [call.out[0], *(t for t, wanted in zip(call.out[1:], mask, strict=True) if wanted)]
    return Cost(distinct_bytes(read), distinct_bytes(written), {precision_of(x.dtype): flops})


# ---- public ----------------------------------------------------------------------------------------------------


def layer_norm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer norm over the last dimensions; arguments as of `torch.nn.functional.layer_norm`.

    Args:
        x: (..., *normalized_shape), bfloat16, float16, float32 or float64.
        normalized_shape: the dimensions that are normalized together; one int is one dimension.
        weight, bias: (*normalized_shape) on the same device, of any of these dtypes.
        eps: added to the variance.

    Returns:
        Like x. Statistics are float32 (float64 for float64 x). Under autocast the result is float32, as PyTorch's.

    Raises:
        TypeError: no dense tensors, or dtypes that are not floating point.
        ValueError: shapes or devices that do not fit.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else _sizes(normalized_shape)
    _check(x, shape, weight, bias)
    no_tangents("layer_norm", x, weight, bias)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.float()
    if x.dim() == 2 and len(shape) == 1:
        return _layer_norm(x, weight, bias, eps)[0]
    columns = math.prod(shape)
    rows = math.prod(x.shape[: x.dim() - len(shape)])
    weight, bias = (t.reshape(columns) if t is not None else None for t in (weight, bias))
    y, _, _ = _layer_norm(x.reshape(rows, columns), weight, bias, eps)
    return y.reshape(x.shape)


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _sizes(normalized_shape: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(normalized_shape, Sequence) or isinstance(normalized_shape, str):
        raise TypeError(f"layer_norm: normalized_shape must be an int or a sequence of ints, got {normalized_shape!r}")
    return tuple(normalized_shape)


def _check(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> None:
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(tensor, Tensor) and (tensor is not None or name == "x"):
            raise TypeError(f"layer_norm: {name} must be a tensor, got {type(tensor).__name__}")
        if tensor is not None and tensor.layout != torch.strided:
            raise TypeError(f"layer_norm: {name} must be dense, got layout {tensor.layout}: use {name}.to_dense()")
    if not shape or 0 in shape:
        raise ValueError(f"layer_norm: normalized_shape must name at least one element, got {shape}")
    if tuple(x.shape[-len(shape) :]) != shape or x.dim() < len(shape):
        raise ValueError(f"layer_norm: expected x of shape (..., {', '.join(map(str, shape))}), got {tuple(x.shape)}")
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is None:
            continue
        if tensor.dtype not in FLOATS:
            raise TypeError(f"layer_norm: {name} must be bfloat16, float16, float32 or float64, got {tensor.dtype}")
        if tensor.device != x.device:
            raise ValueError(f"layer_norm: x is on {x.device}, {name} on {tensor.device}: move one to the other")
        if name != "x" and tuple(tensor.shape) != shape:
            raise ValueError(f"layer_norm: expected {name} of shape {shape}, got {tuple(tensor.shape)}")
