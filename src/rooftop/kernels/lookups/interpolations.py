"""Trilinear interpolation between the eight corners of a cell, in Triton: the twin of `cuda_interpolations.py`.

It has the formula, the reference, the checks and the cost; here are the same operator in Triton and its launches. Bound
by memory: forward reads eight corners and writes one; backward writes eight and, for the points' gradient, reads eight.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.lookups.cuda_interpolations import (
    check_arguments,
    save_inputs,
    trilinear_backward_reference,
    trilinear_reference,
)
from rooftop.kernels.lookups.tables import CORNERS_BACKWARD, CORNERS_FORWARD, CornersConfig
from rooftop.kernels.operands.launch_data import Constants, power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.operands.strided_rows import unit
from rooftop.launch.operators import differentiable, in_pytorch, no_second_derivative, no_tangents, operator
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

# ---- launches --------------------------------------------------------------------------------------------------


def block_of(table: tuple[CornersConfig, ...], channels: int, element_bytes: int) -> Constants:
    """Launch parameters for C channels."""
    config = next(config for config in table if channels * element_bytes <= config.row_bytes)
    width = min(config.channel_bytes // element_bytes, power_of_two(channels))
    points = max(1, config.block_bytes // element_bytes // width)
    even = channels % width == 0
    return {"POINTS": points, "CHANNELS": width, "EVEN": even, "UNIT": unit(channels), "num_warps": config.warps}


# ---- registration ----------------------------------------------------------------------------------------------


@operator("trilinear_interpolate")
def _trilinear(features: Tensor, points: Tensor) -> Tensor:
    if by_reference(features):
        return trilinear_reference(features, points)
    require_triton()
    from rooftop.kernels.lookups.triton_kernels.interpolations import trilinear_forward

    features, points = features.contiguous(), points.contiguous()
    count, _, channels = features.shape
    out = features.new_empty(count, channels)
    if out.numel():
        block = block_of(CORNERS_FORWARD, channels, features.element_size())
        grid = (-(-count // block["POINTS"]) * -(-channels // block["CHANNELS"]),)
        arguments = (features, points, out, count, channels // block["UNIT"])
        launch(trilinear_forward, grid, features.device, *arguments, **block)
    return out


@torch.library.register_fake("rooftop::trilinear_interpolate")
def _(features: Tensor, points: Tensor) -> Tensor:
    return features.new_empty(features.shape[0], features.shape[2])


in_pytorch("trilinear_interpolate", trilinear_reference)


@operator("trilinear_interpolate_backward")
def _trilinear_backward(gradient: Tensor, features: Tensor, points: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor]:
    if by_reference(features):
        return trilinear_backward_reference(gradient, features, points, mask)
    require_triton()
    from rooftop.kernels.lookups.triton_kernels.interpolations import trilinear_backward

    gradient, features, points = gradient.contiguous(), features.contiguous(), points.contiguous()
    count, _, channels = features.shape
    dfeatures = features.new_empty(features.shape if mask[0] else 0)
    dpoints = points.new_empty(points.shape if mask[1] else 0)
    if features.numel():
        block = block_of(CORNERS_BACKWARD, channels, features.element_size())
        grid = (-(-count // block["POINTS"]),)
        arguments = (gradient, features, points, dfeatures, dpoints, count, channels // block["UNIT"])
        launch(
            trilinear_backward, grid, features.device, *arguments, FEATURES=mask[0], COORDINATES=mask[1], **block
        )  # fmt: skip
    else:
        dpoints.zero_()  # there are no channels
    return dfeatures, dpoints


@torch.library.register_fake("rooftop::trilinear_interpolate_backward")
def _(gradient: Tensor, features: Tensor, points: Tensor, mask: list[bool]) -> tuple[Tensor, Tensor]:
    return features.new_empty(features.shape if mask[0] else 0), points.new_empty(points.shape if mask[1] else 0)


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    mask = list(ctx.needs_input_grad)
    dfeatures, dpoints = _trilinear_backward(gradient, *ctx.saved_tensors, mask)
    return dfeatures if mask[0] else None, dpoints if mask[1] else None


differentiable("trilinear_interpolate", _differentiate, save_inputs)
differentiable("trilinear_interpolate_backward", no_second_derivative("trilinear_interpolate", "trilinear_reference"))

# The cost is that of the same operator in CUDA C++, and is registered there.

# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def trilinear_interpolate(features: Tensor, points: Tensor) -> Tensor:
    """Features at points within cells, from the features at the cells' corners.

    Args:
        features: (B, 8, C), bfloat16, float16, float32 or float64; corner 4 i + 2 j + k is at (i, j, k) of its cell.
        points: (B, 3) on the same device, of these dtypes; a coordinate of -1 is at corners 0, 1 at corners 1. Outside
            of [-1, 1] it goes on linearly.

    Returns:
        (B, C), the dtype of features, also under autocast; added up in float32 (float64, by the reference, for
        float64).

    Raises:
        TypeError: no dense tensors, or dtypes that are not floating point.
        ValueError: shapes or devices that do not fit.
        MissingExtraError: on a GPU, without Triton.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    check_arguments("trilinear_interpolate", features, points)
    try:
        no_tangents("trilinear_interpolate", features, points)
    except NotImplementedError:
        raise NotImplementedError(
            "trilinear_interpolate has no forward-mode derivative: differentiate trilinear_reference under jvp"
        ) from None
    return _trilinear(features, points)  # type: ignore[no-any-return]
