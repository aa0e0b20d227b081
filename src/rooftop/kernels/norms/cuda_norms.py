"""Layer norm of a sum in CUDA C++: y = layer_norm(x + input_bias + residual). One pass computes the sum and the norm.

The kernel fuses the last operations of a transformer's sublayer, which are the bias of the last linear layer, the
residual connection and the norm (Ba, Kiros and Hinton 2016). Inference libraries for half precision fuse the same
operations. The operator is bound by memory: the kernel reads x and residual once, and writes y and the sum (the
residual of the next sublayer) once. The kernel rounds the sum once and keeps it in registers until it is normalized.
The kernel reads and writes half precision 16 bytes at a time and converts in pairs. Row sums use shuffles within a warp
and shared memory between warps (cuda_norms.cu).

`add_layer_norm`, whose forward kernel is in Triton, computes the same statistics and results as this operator, and
shares its backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rooftop.kernels.norms.norms import check_norm, contiguous, shaped
from rooftop.kernels.norms.sum_norms import AddLayerNorm, adds, flat_arguments
from rooftop.kernels.norms.tables import CUDA, CUDA_LONG_WARPS
from rooftop.kernels.operands.autocasting import result_dtype
from rooftop.kernels.operands.checks import finite_number
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.dtypes import CPP_TYPES
from rooftop.kernels.operands.strided_rows import unit_columns
from rooftop.launch import cuda
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

CUDA_FILES = ("norms/pieces.cu", "norms/cuda_norms.cu")

# ---- implementations -------------------------------------------------------------------------------------------


def _forward(
    x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor | None], eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the kernel. x and residual (M, N) have unit column stride. `parameters`: input_bias, weight and bias, each
    contiguous or None.
    """
    rows, columns = x.shape
    y = torch.empty((rows, columns), dtype=dtype, device=x.device)
    written = torch.empty((rows, columns), dtype=x.dtype, device=x.device) if adds(residual, parameters[0]) else None
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    parameters = alike(parameters, x.dtype)
    name, grid, block = kernel_for(x, residual, parameters, dtype)
    kernel = cuda.compile(cuda_text(*CUDA_FILES), name, device=x.device)
    tensors = (x, residual, *parameters, y, written, mean, rstd)
    strides = (x.stride(0), residual.stride(0) if residual is not None else 0)
    kernel.launch(grid, block, *tensors, rows, columns, *strides, eps)
    return y, written if written is not None else x.new_empty(0), mean, rstd


def alike(parameters: Sequence[Tensor | None], dtype: torch.dtype) -> list[Tensor | None]:
    """The parameters in one dtype: if all parameters have the dtype of the rows, in that dtype, else in float32."""
    if any(t is not None and t.dtype != dtype for t in parameters):
        return [t.float() if t is not None else None for t in parameters]
    return list(parameters)


def kernel_for(
    x: Tensor, residual: Tensor | None, parameters: Sequence[Tensor | None], dtype: torch.dtype | None = None
) -> tuple[str, int, tuple[int, int]]:
    """The kernel's name, grid and block. `dtype`: the dtype of y, if it is not the dtype of x."""
    rows, columns = x.shape
    given = [t for t in (x, residual, *parameters) if t is not None]
    width = width_of(columns, given)
    parameter_type = CPP_TYPES[next((t.dtype for t in parameters if t is not None), x.dtype)]
    types = f"{CPP_TYPES[x.dtype]}, {parameter_type}, {width}"
    other = "" if dtype in (None, x.dtype) else f", {CPP_TYPES[dtype]}"
    config = next((config for config in CUDA if columns <= config.columns), None)
    if config is None:
        return f"add_layer_norm_long<{types}, {CUDA_LONG_WARPS}{other}>", rows, (32 * CUDA_LONG_WARPS, 1)
    name = f"add_layer_norm<{types}, {config.elements // width}, {config.warps}{other}>"
    return name, -(-rows // config.rows), (32 * config.warps, config.rows)


def width_of(columns: int, tensors: Sequence[Tensor]) -> int:
    """The number of neighbouring elements, up to 16 bytes, that one load can read from the rows of all tensors."""
    width = 16 // tensors[0].element_size()
    for tensor in tensors:
        rows_apart = tensor.stride(0) if tensor.dim() == 2 and tensor.shape[0] > 1 else 0
        width = math.gcd(width, columns, rows_apart)
        while tensor.data_ptr() % min(16, width * tensor.element_size()):
            width //= 2
    return width


# ---- operator --------------------------------------------------------------------------------------------------


class AddLayerNormCuda(AddLayerNorm):
    """`AddLayerNorm`, computed by the kernel in CUDA C++."""

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, residual, input_bias, weight, bias, eps, dtype = self
        if x.dtype == torch.float64 or x.shape[1] == 0 or not cuda.runs_on(x):
            return self.in_pytorch()
        parameters = [contiguous(t) for t in (input_bias, weight, bias)]
        residual = unit_columns(residual) if residual is not None else None
        return _forward(unit_columns(x), residual, parameters, eps, dtype)


_add_layer_norm = declare("add_layer_norm_cuda", AddLayerNormCuda, slopes=2, known=True)


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def add_layer_norm_cuda(
    input: Tensor,
    residual: Tensor | None,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    input_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`add_layer_norm`, computed by the kernel in CUDA C++, with the same arguments, results and errors.

    Raises:
        MissingExtraError: the tensors are on a GPU, and NVRTC or `cuda.core` is not installed.
    """
    name, parameters = "add_layer_norm_cuda", {"weight": weight, "bias": bias, "input_bias": input_bias}
    shape = check_norm(name, normalized_shape, input, residual, **parameters)
    eps = finite_number(name, "eps", eps)
    flat, (added, of_input, scale, shift) = flat_arguments(shape, input, residual, input_bias, weight, bias)
    dtype = result_dtype("layer_norm", input)
    y, total, _, _ = _add_layer_norm(flat, added, of_input, scale, shift, eps, dtype)
    return shaped(y, input), shaped(total, input) if adds(residual, input_bias) else input
