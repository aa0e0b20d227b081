"""Trilinear interpolation between the eight corners of a cell, in CUDA C++: the example of docs/cuda.md.

    out[b] = sum over corners (i, j, k) of e_i(u) e_j(v) e_k(w) features[b, 4 i + 2 j + k]
    e_1(u) = (1 + u) / 2,  e_0(u) = (1 - u) / 2

with the point (u, v, w) in [-1, 1]: what the well-known tutorials of PyTorch's CUDA extensions compute, and what volume
rendering needs of a grid of features. Outside of [-1, 1] it goes on linearly.

Bound by memory: forward reads eight corners and writes one; backward writes eight and, for the points' gradient, reads
eight. No atomics: each corner belongs to one point. Points that share corners gather their features first, and the
gradient of that gather adds what they share. `interpolations.py` has the same in Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.dtypes import CPP_TYPES, accumulator_dtype
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.launch import cuda
from rooftop.launch.operators import (
    differentiable,
    in_pytorch,
    no_second_derivative,
    no_tangents,
    operator,
    without_autocast,
)
from rooftop.launch.symbolic import recorded_whole

CUDA_FILES = ("lookups/cuda_interpolations.cu",)

# ---- reference -------------------------------------------------------------------------------------------------


@without_autocast
def trilinear_reference(features: Tensor, points: Tensor) -> Tensor:
    """(B, C) of features (B, 8, C) and points (B, 3) in plain PyTorch, added up in float32 or wider."""
    wide = accumulator_dtype(features.dtype)
    return torch.einsum("bk,bkc->bc", _weights(points.to(wide)), features.to(wide)).to(features.dtype)


@without_autocast
def trilinear_backward_reference(
    gradient: Tensor, features: Tensor, points: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of features and points; empty where `mask` does not ask for one."""
    wide = accumulator_dtype(features.dtype)
    dfeatures, dpoints = features.new_empty(0), points.new_empty(0)
    dout, exact = gradient.to(wide), points.to(wide)
    if mask[0]:
        dfeatures = (_weights(exact)[:, :, None] * dout[:, None, :]).to(features.dtype)
    if mask[1]:
        products = torch.einsum("bc,bkc->bk", dout, features.to(wide)).view(-1, 2, 2, 2)
        u, v, w = _ends(exact).unbind(1)  # (B, 2) each
        slope = exact.new_tensor([-0.5, 0.5])
        sums = [
            torch.einsum("bijk,i,bj,bk->b", products, slope, v, w),
            torch.einsum("bijk,bi,j,bk->b", products, u, slope, w),
            torch.einsum("bijk,bi,bj,k->b", products, u, v, slope),
        ]
        dpoints = torch.stack(sums, 1).to(points.dtype)
    return dfeatures, dpoints


def _ends(points: Tensor) -> Tensor:
    """(B, 3, 2): the weights of both ends in each dimension."""
    upper = (points + 1) * 0.5
    return torch.stack((1 - upper, upper), 2)


def _weights(points: Tensor) -> Tensor:
    """(B, 8): of corner 4 i + 2 j + k."""
    u, v, w = _ends(points).unbind(1)
    return (u[:, :, None, None] * v[:, None, :, None] * w[:, None, None, :]).flatten(1)


# ---- launch ----------------------------------------------------------------------------------------------------

THREADS = 256  # of a block, in rows of lanes that work on one point each; not yet tuned by measurement
TYPES = CPP_TYPES | {torch.float64: "double"}


def kernel_for(name: str, points: Tensor, tensors: Sequence[Tensor]) -> tuple[str, int, tuple[int, int]]:
    """The kernel's name, its grid and its block for `tensors` (..., C) that it reads and writes in packs."""
    channels = tensors[0].shape[-1]
    width = math.gcd(16 // tensors[0].element_size(), channels)
    while any(t.data_ptr() % (width * t.element_size()) for t in tensors):
        width //= 2
    lanes = min(32, power_of_two(channels // width))  # a power of two: their sums go through shuffles
    block = (lanes, THREADS // lanes)
    types = f"{TYPES[tensors[0].dtype]}, {TYPES[points.dtype]}, {width}"
    return f"{name}<{types}>", -(-points.shape[0] // block[1]), block


# ---- registration ----------------------------------------------------------------------------------------------


@operator("trilinear_interpolate_cuda")
def _trilinear(features: Tensor, points: Tensor) -> Tensor:
    if not cuda.runs_on(features):
        return trilinear_reference(features, points)
    features, points = features.contiguous(), points.contiguous()
    count, _, channels = features.shape
    out = features.new_empty(count, channels)
    if out.numel():
        name, grid, block = kernel_for("trilinear_forward", points, (features, out))
        cuda.compile(cuda_text(*CUDA_FILES), name, device=features.device).launch(
            grid, block, features, points, out, count, channels
        )
    return out


@torch.library.register_fake("rooftop::trilinear_interpolate_cuda")
def _(features: Tensor, points: Tensor) -> Tensor:
    return features.new_empty(features.shape[0], features.shape[2])


in_pytorch("trilinear_interpolate_cuda", trilinear_reference)


@operator("trilinear_interpolate_cuda_backward")
def _trilinear_backward(gradient: Tensor, features: Tensor, points: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor]:
    if not cuda.runs_on(features):
        return trilinear_backward_reference(gradient, features, points, mask)
    gradient, features, points = gradient.contiguous(), features.contiguous(), points.contiguous()
    count, _, channels = features.shape
    dfeatures = torch.empty_like(features) if mask[0] else None
    dpoints = torch.empty_like(points) if mask[1] else None
    if features.numel():
        written = (dfeatures,) if dfeatures is not None else ()
        name, grid, block = kernel_for("trilinear_backward", points, (features, gradient, *written))
        cuda.compile(cuda_text(*CUDA_FILES), name, device=features.device).launch(
            grid, block, gradient, features, points, dfeatures, dpoints, count, channels
        )
    elif dpoints is not None:
        dpoints.zero_()  # there are no channels
    return (
        dfeatures if dfeatures is not None else features.new_empty(0),
        dpoints if dpoints is not None else points.new_empty(0),
    )


@torch.library.register_fake("rooftop::trilinear_interpolate_cuda_backward")
def _(gradient: Tensor, features: Tensor, points: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor]:
    shapes = (features.shape if mask[0] else 0), (points.shape if mask[1] else 0)
    return features.new_empty(shapes[0]), points.new_empty(shapes[1])


def save_inputs(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """All that backward needs."""
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    mask = list(ctx.needs_input_grad)
    dfeatures, dpoints = _trilinear_backward(gradient, *ctx.saved_tensors, mask)
    return dfeatures if mask[0] else None, dpoints if mask[1] else None


differentiable("trilinear_interpolate_cuda", _differentiate, save_inputs)
differentiable(
    "trilinear_interpolate_cuda_backward", no_second_derivative("trilinear_interpolate_cuda", "trilinear_reference")
)


@cost_of("rooftop::trilinear_interpolate_cuda", "rooftop::trilinear_interpolate")
def _forward_cost(call: Call) -> Cost:
    """A multiplication and an addition for each corner and channel; the weights are few beside them."""
    features = call["features"]
    flops = {precision_of(features.dtype): 2 * features.numel()}
    return Cost(distinct_bytes([features, call["points"]]), distinct_bytes([call.out]), flops)


@cost_of("rooftop::trilinear_interpolate_cuda_backward", "rooftop::trilinear_interpolate_backward")
def _backward_cost(call: Call) -> Cost:
    """The features are read only for the points' gradient."""
    features, mask = call["features"], call["mask"]
    read = [call["gradient"], call["points"], *([features] if mask[1] else [])]
    flops = {precision_of(features.dtype): (mask[0] + 2 * mask[1]) * features.numel()}
    return Cost(distinct_bytes(read), distinct_bytes(call.out), flops)


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def trilinear_interpolate_cuda(features: Tensor, points: Tensor) -> Tensor:
    """Features at points within cells, from the features at the cells' corners.

    Args:
        features: (B, 8, C), bfloat16, float16, float32 or float64; corner 4 i + 2 j + k is at (i, j, k) of its cell.
        points: (B, 3) on the same device, of these dtypes; a coordinate of -1 is at corners 0, 1 at corners 1.

    Returns:
        (B, C), the dtype of features; added up in float32 (float64 for float64).

    Raises:
        TypeError: no dense tensors, or dtypes that are not floating point.
        ValueError: shapes or devices that do not fit.
        MissingExtraError: on a GPU, without NVRTC or `cuda.core`.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    check_arguments("trilinear_interpolate_cuda", features, points)
    no_tangents("trilinear_interpolate_cuda", features, points, instead="trilinear_reference")
    return _trilinear(features, points)  # type: ignore[no-any-return]


def check_arguments(function: str, features: Tensor, points: Tensor) -> None:
    """Refuse wrong arguments of that function before anything is launched.

    Raises:
        TypeError, ValueError: as `trilinear_interpolate_cuda`.
    """
    for name, tensor, shape in (("features", features, "(B, 8, C)"), ("points", points, "(B, 3)")):
        if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
            raise TypeError(f"{function}: {name} must be a dense tensor, got {type(tensor).__name__}")
        if tensor.dtype not in TYPES:
            raise TypeError(f"{function}: {name} must be floating point, got {tensor.dtype}")
        fits = tensor.dim() == 3 and tensor.shape[1] == 8 if name == "features" else tensor.shape[1:] == (3,)
        if not fits:
            raise ValueError(f"{function}: expected {name} of shape {shape}, got {tuple(tensor.shape)}")
    if features.shape[0] != points.shape[0]:
        counts = f"{features.shape[0]} cells, {points.shape[0]} points"
        raise ValueError(f"{function}: each point needs its cell, got {counts}")
    if features.device != points.device:
        where = f"features are on {features.device}, points on {points.device}"
        raise ValueError(f"{function}: {where}: move one to the other")
