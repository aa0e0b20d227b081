"""Trilinear interpolation between the eight corners of a cell, in CUDA C++: the example of docs/cuda.md.

    out[b] = sum over corners (i, j, k) of e_i(u) e_j(v) e_k(w) features[b, 4 i + 2 j + k]
    e_1(u) = (1 + u) / 2,  e_0(u) = (1 - u) / 2

The point (u, v, w) is in [-1, 1]. Tutorials of PyTorch's CUDA extensions use this interpolation as their example, and
volume rendering applies it to grids of features. Outside of [-1, 1] the operator extrapolates linearly.

The operator is bound by memory: forward reads eight corners and writes one result; backward writes eight corners and,
for the points' gradient, reads eight. Backward needs no atomics, because each row of corners belongs to one point. If
points share corners, the caller first gathers the corners' features for each point; the gradient of that gather adds
the gradients of shared corners. `interpolations.py` has the same operator in Triton.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_tensors
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.kernels.operands.dtypes import CPP_TYPES, FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.launch import cuda
from rooftop.launch.operators import declare, no_second_derivative, no_tangents, without_autocast
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

CUDA_FILES = ("lookups/cuda_interpolations.cu",)

# ---- reference -------------------------------------------------------------------------------------------------


@without_autocast
def trilinear_reference(features: Tensor, points: Tensor) -> Tensor:
    """Interpolate features (B, 8, C) at points (B, 3) in plain PyTorch, in float32 or wider. Returns (B, C)."""
    wide = accumulator_dtype(features.dtype)
    return torch.einsum("bk,bkc->bc", _weights(points.to(wide)), features.to(wide)).to(features.dtype)


@without_autocast
def trilinear_backward_reference(
    gradient: Tensor, features: Tensor, points: Tensor, mask: Sequence[bool]
) -> tuple[Tensor, Tensor]:
    """Gradients of features and points; a gradient that `mask` does not request is empty."""
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
    """The interpolation weights (B, 3, 2) of the lower and the upper end of the cell in each dimension. Points (B, 3)
    range from -1 to 1 in their cell.
    """
    upper = (points + 1) * 0.5
    return torch.stack((1 - upper, upper), 2)


def _weights(points: Tensor) -> Tensor:
    """The weights (B, 8) of the corners 4 i + 2 j + k."""
    u, v, w = _ends(points).unbind(1)
    return (u[:, :, None, None] * v[:, None, :, None] * w[:, None, None, :]).flatten(1)


# ---- launch ----------------------------------------------------------------------------------------------------

THREADS = 256  # threads per block; the threads of one y index compute one point. Not yet tuned by measurement.
TYPES = CPP_TYPES | {torch.float64: "double"}


def kernel_for(name: str, points: Tensor, tensors: Sequence[Tensor]) -> tuple[str, int, tuple[int, int]]:
    """The kernel's name, grid and block, for tensors (..., C) that the kernel reads and writes in packs of elements."""
    channels = tensors[0].shape[-1]
    width = math.gcd(16 // tensors[0].element_size(), channels)
    while any(t.data_ptr() % (width * t.element_size()) for t in tensors):
        width //= 2
    lanes = min(32, power_of_two(channels // width))  # a power of two, because lanes are summed by shuffles
    block = (lanes, THREADS // lanes)
    types = f"{TYPES[tensors[0].dtype]}, {TYPES[points.dtype]}, {width}"
    return f"{name}<{types}>", -(-points.shape[0] // block[1]), block


# ---- operators -------------------------------------------------------------------------------------------------


class TrilinearCuda(NamedTuple):
    """Trilinear interpolation of features (B, 8, C) at points (B, 3). Returns (B, C)."""

    features: Tensor
    points: Tensor

    def run(self) -> Tensor:
        if not cuda.runs_on(self.features):
            return self.in_pytorch()
        features, points = (t.contiguous() for t in self)
        out = self.fake()
        if out.numel():
            name, grid, block = kernel_for("trilinear_forward", points, (features, out))
            kernel = cuda.compile(cuda_text(*CUDA_FILES), name, device=features.device)
            kernel.launch(grid, block, features, points, out, *out.shape)
        return out

    def fake(self) -> Tensor:
        return self.features.new_empty(self.features.shape[0], self.features.shape[2])

    def in_pytorch(self) -> Tensor:
        return trilinear_reference(*self)

    @staticmethod
    def gradients(kept: TrilinearCuda, wanted: Sequence[bool], dout: Tensor) -> tuple[Tensor | None, ...]:
        return only(wanted, _trilinear_backward(dout, *kept, list(wanted)))

    def cost(self, made: Tensor) -> Cost:
        """Flops: a multiplication and an addition for each corner and channel. The flops of the weights
        are negligible.
        """
        flops = {precision_of(self.features.dtype): 2 * self.features.numel()}
        return Cost(distinct_bytes(self), distinct_bytes([made]), flops)


class TrilinearCudaBackward(NamedTuple):
    """Gradients of features and points; a gradient that `mask` does not request is empty."""

    gradient: Tensor
    features: Tensor
    points: Tensor
    mask: list[bool]

    def run(self) -> tuple[Tensor, Tensor]:
        if not cuda.runs_on(self.features):
            return trilinear_backward_reference(*self)
        dout, features, points = (t.contiguous() for t in self[:3])
        dfeatures, dpoints = self.fake()
        if features.numel() == 0:  # C is 0
            return dfeatures, dpoints.zero_()
        written = (dfeatures,) if self.mask[0] else ()
        name, grid, block = kernel_for("trilinear_backward", points, (features, dout, *written))
        kernel = cuda.compile(cuda_text(*CUDA_FILES), name, device=features.device)
        count, _, channels = features.shape
        kernel.launch(grid, block, dout, features, points, *only(self.mask, (dfeatures, dpoints)), count, channels)
        return dfeatures, dpoints

    def fake(self) -> tuple[Tensor, Tensor]:
        _, features, points, mask = self
        return features.new_empty(features.shape if mask[0] else 0), points.new_empty(points.shape if mask[1] else 0)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """The features count as read only if the gradient of the points is requested."""
        dout, features, points, mask = self
        flops = {precision_of(features.dtype): (mask[0] + 2 * mask[1]) * features.numel()}
        return Cost(distinct_bytes([dout, points, features if mask[1] else None]), distinct_bytes(made), flops)


_trilinear = declare("trilinear_interpolate_cuda", TrilinearCuda, known=True)
_trilinear_backward = declare(
    "trilinear_interpolate_cuda_backward",
    TrilinearCudaBackward,
    known=True,
    derivative=no_second_derivative("trilinear_interpolate_cuda", "trilinear_reference"),
)


def only(wanted: Sequence[bool], found: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    """Return the gradients in `found` for which `wanted` is True, and None in place of all other gradients."""
    return tuple(t if each else None for t, each in zip(found, wanted, strict=True))


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def trilinear_interpolate_cuda(features: Tensor, points: Tensor) -> Tensor:
    """Interpolate features at points within cells, from the features at the cells' corners.

    Args:
        features: (B, 8, C), bfloat16, float16, float32 or float64; corner 4 i + 2 j + k is at (i, j, k) of its cell.
        points: (B, 3) on the device of features, of any dtype that features may have; coordinate -1 is at corner index
            0, and coordinate 1 at corner index 1.

    Returns:
        (B, C), the dtype of features. The sums over corners are float32 (float64 for float64).

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is not floating point.
        ValueError: shapes or devices do not match.
        MissingExtraError: the tensors are on a GPU, and NVRTC or `cuda.core` is not installed.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    check_arguments("trilinear_interpolate_cuda", features, points)
    no_tangents("trilinear_interpolate_cuda", features, points, instead="trilinear_reference")
    return _trilinear(features, points)


def check_arguments(function: str, features: Tensor, points: Tensor) -> None:
    """Refuse wrong arguments of `trilinear_interpolate_cuda` before anything is launched.

    Raises:
        TypeError, ValueError: as in `trilinear_interpolate_cuda`.
    """
    check_tensors(function, FLOATS, features=features, points=points)
    if features.dim() != 3 or features.shape[1] != 8:
        raise ValueError(f"{function}: expected features of shape (B, 8, C), got {tuple(features.shape)}")
    if points.shape[1:] != (3,):
        raise ValueError(f"{function}: expected points of shape (B, 3), got {tuple(points.shape)}")
    if features.shape[0] != points.shape[0]:
        counts = f"{features.shape[0]} cells, {points.shape[0]} points"
        raise ValueError(f"{function}: expected one row of features for each point, got {counts}")
