"""Layer normalization: y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimensions.

Ba, Kiros and Hinton 2016, "Layer Normalization". Bound by memory at every size: forward reads x and writes y, backward
reads dy and x and writes dx. The backward kernel sums the gradients of weight and bias in the same pass, in float32
registers of persistent programs, and adds the programs' partial sums in a fixed order: no atomics, the same bits each
time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

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

LARGEST_TILE = 16384  # longest row held in registers; 32768 float32 values spill
LONG_BLOCK = 4096  # elements of a longer row at a time
# In dy * weight - mean(dy * weight) both products must be rounded alike, or what should cancel does not.
UNFUSED = {"enable_fp_fusion": False}


@dataclass(frozen=True)
class TileConfig:
    """How rows of up to `columns` elements are worked on: rows a program, warps, and (backward) programs an SM."""

    columns: int
    rows: int
    warps: int
    programs_per_sm: int = 1


FORWARD = (
    *(TileConfig(256, 16, 4), TileConfig(512, 8, 4), TileConfig(1024, 4, 4), TileConfig(2048, 2, 4)),
    *(TileConfig(4096, 1, 4), TileConfig(8192, 1, 8), TileConfig(LARGEST_TILE, 1, 16)),
)
BACKWARD = (
    *(TileConfig(256, 16, 4, 8), TileConfig(512, 8, 4, 6), TileConfig(1024, 4, 4, 4), TileConfig(2048, 2, 4, 3)),
    *(TileConfig(4096, 1, 8, 2), TileConfig(8192, 1, 16, 1), TileConfig(LARGEST_TILE, 1, 32, 1)),
)


def _config(table: Sequence[TileConfig], columns: int) -> TileConfig:
    return next(config for config in table if columns <= config.columns)


def _power_of_two(n: int) -> int:
    return 1 << (n - 1).bit_length()


# ---- implementations -------------------------------------------------------------------------------------------


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, N) with unit column stride."""
    if x.dtype == torch.float64 or (x.device.type == "cpu" and not INTERPRETED):
        return layer_norm_reference(x, weight, bias, eps)
    require_triton()
    from rooftop.kernels import norm_kernels as kernels

    rows, columns = x.shape
    y = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    tensors = (x, weight, bias, y, mean, rstd, rows, columns, x.stride(0), eps)
    has = {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None}
    if columns > LARGEST_TILE:
        shape = {"COLUMNS": LONG_BLOCK, "num_warps": 8}
        launch(kernels.layer_norm_forward_long, (rows,), x.device, *tensors, **has, **shape)
    else:
        config = _config(FORWARD, columns)
        shape = {"ROWS": config.rows, "COLUMNS": _power_of_two(columns), "num_warps": config.warps}
        grid = (-(-rows // config.rows),)
        launch(kernels.layer_norm_forward, grid, x.device, *tensors, **has, **shape)
    return y, mean, rstd


def _backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """dy, x (M, N) with unit column stride; `mask`: which of weight and bias need a gradient."""
    rows, columns = x.shape
    if x.dtype == torch.float64 or (x.device.type == "cpu" and not INTERPRETED):
        return layer_norm_backward_reference(dy, x, weight, mean, rstd)
    require_triton()
    from rooftop.kernels import norm_kernels as kernels

    dx = torch.empty(rows, columns, dtype=x.dtype, device=x.device)
    sums = {"SUM_WEIGHT": mask[0], "SUM_BIAS": mask[1]}
    sizes = (rows, columns, dy.stride(0), x.stride(0))
    if columns > LARGEST_TILE:
        chunks = max(1, min(rows, 32))
        partial = torch.zeros(2, chunks, columns, dtype=torch.float32, device=x.device)
        shape = {"HAS_WEIGHT": weight is not None, "COLUMNS": LONG_BLOCK, "num_warps": 8, **UNFUSED}
        launch(kernels.layer_norm_backward_long, (rows,), x.device, dy, x, weight, mean, rstd, dx, *sizes, **shape)
        if any(mask):
            grid, tile = (-(-columns // 256), chunks), {"ROWS": 8, "COLUMNS": 256, "num_warps": 4}
            tensors = (dy, x, mean, rstd, partial[0], partial[1], *sizes, -(-rows // chunks))
            launch(kernels.layer_norm_column_sums, grid if rows else (0,), x.device, *tensors, **sums, **tile)
    else:
        config = _config(BACKWARD, columns)
        programs = max(1, min(-(-rows // config.rows), processors(x) * config.programs_per_sm))
        partial = torch.empty(2, programs, columns, dtype=torch.float32, device=x.device)
        shape = {"ROWS": config.rows, "COLUMNS": _power_of_two(columns), "num_warps": config.warps}
        shape |= {"HAS_WEIGHT": weight is not None, **UNFUSED}
        arguments = (dy, x, weight, mean, rstd, dx, partial[0], partial[1], *sizes)
        launch(kernels.layer_norm_backward, (programs,), x.device, *arguments, **sums, **shape)
    zero = torch.zeros(columns, dtype=torch.float32, device=x.device)
    return dx, partial[0].sum(0) if mask[0] else zero, partial[1].sum(0) if mask[1] else zero.clone()


# ---- registration ----------------------------------------------------------------------------------------------


@torch.library.custom_op("rooftop::layer_norm", mutates_args=())
def _layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _forward(_unit_columns(x), weight, bias, eps)


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[0], dtype=_statistics_dtype(x))
    return x.new_empty(x.shape), statistics, torch.empty_like(statistics)


@torch.library.custom_op("rooftop::layer_norm_backward", mutates_args=())
def _layer_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    return _backward(_unit_columns(dy), _unit_columns(x), weight, mean, rstd, mask)


@_layer_norm_backward.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, mask: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    columns = x.new_empty(x.shape[1], dtype=mean.dtype)
    return x.new_empty(x.shape), columns, torch.empty_like(columns)


def _unit_columns(x: Tensor) -> Tensor:
    """Rows may lie apart, elements of a row may not."""
    return x if x.stride(1) == 1 else x.contiguous()


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    x, weight, bias, _ = inputs
    _, mean, rstd = output
    ctx.save_for_backward(x, weight, mean, rstd)
    ctx.dtypes = (weight.dtype if weight is not None else None, bias.dtype if bias is not None else None)  # type: ignore[attr-defined]
    ctx.mark_non_differentiable(mean, rstd)


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, dy: Tensor, _mean: Tensor | None, _rstd: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors  # type: ignore[attr-defined]
    weight_dtype, bias_dtype = ctx.dtypes  # type: ignore[attr-defined]
    mask = list(ctx.needs_input_grad[1:3])  # type: ignore[attr-defined]
    dx, dweight, dbias = torch.ops.rooftop.layer_norm_backward(dy, x, weight, mean, rstd, mask)
    return dx, dweight.to(weight_dtype) if mask[0] else None, dbias.to(bias_dtype) if mask[1] else None, None


_layer_norm.register_autograd(_differentiate, setup_context=_save)


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
        TypeError: dtypes that are not floating point.
        ValueError: shapes or devices that do not fit.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    _check(x, shape, weight, bias)
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.float()
    columns = prod(shape)
    flat = (
        x.reshape(-1, columns) if columns and x.numel() else x.reshape(prod(x.shape[: x.dim() - len(shape)]), columns)
    )
    weight, bias = (t.reshape(columns) if t is not None else None for t in (weight, bias))
    y, _, _ = torch.ops.rooftop.layer_norm(flat, weight, bias, eps)
    return y.reshape(x.shape)


FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _check(x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None) -> None:
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
