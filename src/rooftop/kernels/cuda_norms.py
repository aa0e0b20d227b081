"""Layer norm of a sum in CUDA C++: y = layer_norm(x + input_bias + residual), the sum in one pass with the norm.

What the end of a transformer's sublayer does: the bias of its last linear layer, the residual connection and the norm
(Ba, Kiros and Hinton 2016), fused as inference libraries do in half precision. Bound by memory: x and residual are read
once, y and the sum (the residual of the next sublayer) written once. The sum stays in float32 registers until it is
normalized; half precision is read and written 16 bytes at a time and converted in pairs; sums go over a row by shuffles
within warps and shared memory between them (norm_kernels.cu).

It is the twin of `layer_norm`, whose forward is Triton's: the same statistics and results. The backward is the twin's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels import norms
from rooftop.launch import cuda
from rooftop.launch.operators import no_tangents, operator

# ---- reference -------------------------------------------------------------------------------------------------


def add_layer_norm_reference(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y, total, mean, rstd) of rows x (M, N) in plain PyTorch; sums and statistics float32, or float64 for float64."""
    total = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    for term in (input_bias, residual):
        total = total if term is None else total + term
    y, mean, rstd = norms.layer_norm_reference(total, weight, bias, eps)
    return y.to(x.dtype), total.to(x.dtype), mean, rstd


# ---- launch parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Config:
    """How rows of up to `columns` elements are worked on.

    Attributes:
        elements: of a row that one thread holds.
        warps: of a row. Rows of one warp need no shared memory.
        rows: of a block; more than one only where a row has one warp.
    """

    columns: int
    elements: int
    warps: int
    rows: int


# A thread has 16 bytes of half precision or a few times that in flight; up to 1024 columns a row stays within a warp.
# Not yet tuned by measurement.
CONFIGS = (
    *(Config(256, 8, 1, 4), Config(512, 16, 1, 4), Config(1024, 32, 1, 4), Config(2048, 16, 4, 1)),
    *(Config(4096, 16, 8, 1), Config(8192, 32, 8, 1), Config(16384, 32, 16, 1)),
)
LONG_WARPS = 32  # of a row that does not fit in registers

CPP_TYPES = {torch.float16: "__half", torch.bfloat16: "__nv_bfloat16", torch.float32: "float"}


# ---- implementations -------------------------------------------------------------------------------------------


@cache
def _source() -> str:
    return Path(__file__).with_name("norm_kernels.cu").read_text(encoding="utf-8")


def _forward(
    x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor | None], eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, residual (M, N) with unit column stride; parameters: input_bias, weight, bias, contiguous."""
    adds = _adds(residual, parameters[0])
    if x.dtype == torch.float64 or not cuda.runs_on(x):
        input_bias, weight, bias = parameters
        y, total, mean, rstd = add_layer_norm_reference(x, residual, input_bias, weight, bias, eps)
        return y, total if adds else x.new_empty(0), mean, rstd
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=x.dtype, device=x.device)
    written = torch.empty_like(y) if adds else None
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    parameters = _alike(parameters, x.dtype)
    name, grid, block = kernel_for(x, residual, parameters)
    kernel = cuda.compile(_source(), name, device=x.device)
    tensors = (x, residual, *parameters, y, written, mean, rstd)
    strides = (x.stride(0), residual.stride(0) if residual is not None else 0)
    kernel.launch(grid, block, *tensors, rows, columns, *strides, eps)
    return y, written if written is not None else x.new_empty(0), mean, rstd


def _alike(parameters: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """Parameters in one dtype: that of the rows if all are, else float32."""
    if any(t is not None and t.dtype != dtype for t in parameters):
        return [t.float() if t is not None else None for t in parameters]
    return list(parameters)


def kernel_for(
    x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor | None]
) -> tuple[str, int, tuple[int, int]]:
    """The kernel's name, its grid and its block."""
    rows, columns = x.shape
    given = [t for t in (x, residual, *parameters) if t is not None]
    width = _width(columns, given)
    parameter_type = CPP_TYPES[next((t.dtype for t in parameters if t is not None), x.dtype)]
    types = f"{CPP_TYPES[x.dtype]}, {parameter_type}, {width}"
    config = next((config for config in CONFIGS if columns <= config.columns), None)
    if config is None:
        return f"add_layer_norm_long<{types}, {LONG_WARPS}>", rows, (32 * LONG_WARPS, 1)
    name = f"add_layer_norm<{types}, {config.elements // width}, {config.warps}>"
    return name, -(-rows // config.rows), (32 * config.warps, config.rows)


def _width(columns: int, tensors: Sequence[Tensor]) -> int:
    """The most neighbouring elements, up to 16 bytes of them, that rows of all tensors can be read by."""
    width = 16 // tensors[0].element_size()
    for tensor in tensors:
        rows_apart = tensor.stride(0) if tensor.dim() == 2 and tensor.shape[0] > 1 else 0
        width = math.gcd(width, columns, rows_apart)
        while tensor.data_ptr() % min(16, width * tensor.element_size()):
            width //= 2
    return width


def _adds(residual: Tensor | None, input_bias: Tensor | None) -> bool:
    """Whether the sum is another tensor than x."""
    return residual is not None or input_bias is not None


# ---- registration ----------------------------------------------------------------------------------------------


@operator("add_layer_norm_cuda")
def _add_layer_norm(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parameters = [t.contiguous() if t is not None else None for t in (input_bias, weight, bias)]
    residual = _unit_columns(residual) if residual is not None else None
    return _forward(_unit_columns(x), residual, parameters, eps)


def _unit_columns(x: Tensor) -> Tensor:
    """Rows may lie apart, elements of a row may not."""
    return x if x.stride(1) == 1 else x.contiguous()


@torch.library.register_fake("rooftop::add_layer_norm_cuda")
def _(
    x: Tensor,
    residual: Tensor | None,
    input_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    statistics = x.new_empty(x.shape[0], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
    total = x.new_empty(x.shape if _adds(residual, input_bias) else 0)
    return x.new_empty(x.shape), total, statistics, torch.empty_like(statistics)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, residual, input_bias, weight, bias, _ = inputs
    _, total, mean, rstd = output
    ctx.adds = _adds(residual, input_bias)
    ctx.input_bias_dtype = input_bias.dtype if input_bias is not None else None
    ctx.save_for_backward(total if ctx.adds else x, weight, bias, mean, rstd)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)  # a total that is not used further must not cost a pass over zeros


def _differentiate(
    ctx: Any, dy: Tensor | None, dtotal: Tensor | None, *_statistics: Tensor | None
) -> tuple[Tensor | None, ...]:
    total, weight, bias, mean, rstd = ctx.saved_tensors
    wants = ctx.needs_input_grad  # x, residual, input_bias, weight, bias, eps
    dx, dweight, dbias = dtotal, None, None
    if dy is not None:
        mask = [wants[3], wants[4]]
        dx, *dparameters = norms._layer_norm_backward(dy, total, weight, bias, mean, rstd, mask)
        dweight, dbias = (t if wanted else None for t, wanted in zip(dparameters, mask, strict=True))
        dx = dx + dtotal if dtotal is not None and ctx.adds else dx
    dinput_bias = None
    if wants[2] and dx is not None:
        wide = torch.float64 if dx.dtype == torch.float64 else torch.float32
        dinput_bias = dx.sum(0, dtype=wide).to(ctx.input_bias_dtype)
    return dx if wants[0] else None, dx if wants[1] else None, dinput_bias, dweight, dbias, None


torch.library.register_autograd("rooftop::add_layer_norm_cuda", _differentiate, setup_context=_save)


@cost_of("rooftop::add_layer_norm_cuda")
def _cost(call: Call) -> Cost:
    """1 an element for each term and for weight and bias, 5 for the norm."""
    terms = [call[name] for name in ("residual", "input_bias", "weight", "bias")]
    flops = (5 + sum(t is not None for t in terms)) * call["x"].numel()
    read = distinct_bytes([call["x"], *terms])
    return Cost(read, distinct_bytes(call.out), {precision_of(call["x"].dtype): flops})


# ---- public ----------------------------------------------------------------------------------------------------


def add_layer_norm_cuda(
    x: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Layer norm over the last dimensions of x + input_bias + residual, and that sum.

    Args:
        x: (..., *normalized_shape), bfloat16, float16 or float32 (float64 runs the reference).
        residual: like x; None adds nothing.
        normalized_shape, weight, bias, eps: as of `torch.nn.functional.layer_norm`.
        input_bias: (*normalized_shape), added to each row of x.

    Returns:
        (y, total), both like x. total is x itself where nothing is added; y is computed from the sum before it is
        rounded. Under autocast both are float32, as PyTorch's layer norm.

    Raises:
        TypeError: no dense tensors, or dtypes that are not floating point, or residual of another dtype than x.
        ValueError: shapes or devices that do not fit.
        MissingExtraError: on a GPU, without NVRTC or `cuda.core`.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else norms._sizes(normalized_shape)
    norms._check(x, shape, weight, bias)
    norms._check(x, shape, input_bias, None)
    _check_residual(x, residual)
    no_tangents("layer_norm", x, residual, input_bias, weight, bias)
    if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x, residual = x.float(), residual.float() if residual is not None else None
    columns, rows = math.prod(shape), math.prod(x.shape[: x.dim() - len(shape)])
    flat = x.reshape(rows, columns)
    residual = residual.reshape(rows, columns) if residual is not None else None
    parameters = (t.reshape(columns) if t is not None else None for t in (input_bias, weight, bias))
    y, total, _, _ = _add_layer_norm(flat, residual, *parameters, eps)
    return y.reshape(x.shape), total.reshape(x.shape) if _adds(residual, input_bias) else x


def _check_residual(x: Tensor, residual: Tensor | None) -> None:
    if residual is None:
        return
    if not isinstance(residual, Tensor) or residual.layout != torch.strided:
        raise TypeError(f"add_layer_norm_cuda: residual must be a dense tensor, got {type(residual).__name__}")
    if residual.dtype != x.dtype:
        raise TypeError(f"add_layer_norm_cuda: expected residual of {x.dtype} as x, got {residual.dtype}")
    if residual.shape != x.shape:
        expected, got = tuple(x.shape), tuple(residual.shape)
        raise ValueError(f"add_layer_norm_cuda: expected residual of shape {expected} as x, got {got}")
    if residual.device != x.device:
        raise ValueError(f"add_layer_norm_cuda: x is on {x.device}, residual on {residual.device}")
