"""Trilinear interpolation between the eight corners of a cell, in Triton. `cuda_interpolations.py` has the same
operator in CUDA C++.

The formula, the reference, the checks and the cost are in `cuda_interpolations.py`. The operator is bound by memory:
forward reads eight corners and writes one result; backward writes eight corners and, for the points' gradient, reads
eight.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from rooftop.kernels.lookups import launches
from rooftop.kernels.lookups.cuda_interpolations import (
    TrilinearCuda,
    TrilinearCudaBackward,
    check_arguments,
    only,
    trilinear_backward_reference,
)
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import declare, no_second_derivative, no_tangents
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

# ---- operators -------------------------------------------------------------------------------------------------


class Trilinear(TrilinearCuda):
    """`TrilinearCuda` with the Triton kernel."""

    def run(self) -> Tensor:
        if by_reference(self.features):
            return self.in_pytorch()
        return launches.interpolate(self.features.contiguous(), self.points.contiguous())

    @staticmethod
    def gradients(kept: TrilinearCuda, wanted: Sequence[bool], dout: Tensor) -> tuple[Tensor | None, ...]:
        return only(wanted, _trilinear_backward(dout, *kept, list(wanted)))


class TrilinearBackward(TrilinearCudaBackward):
    """`TrilinearCudaBackward` with the Triton kernel."""

    def run(self) -> tuple[Tensor, Tensor]:
        if by_reference(self.features):
            return trilinear_backward_reference(*self)
        dout, features, points = (t.contiguous() for t in self[:3])
        dfeatures, dpoints = self.fake()
        if features.numel() == 0:  # C is 0
            return dfeatures, dpoints.zero_()
        launches.interpolate_backward(dout, features, points, dfeatures, dpoints, self.mask)
        return dfeatures, dpoints


_trilinear = declare("trilinear_interpolate", Trilinear, known=True)
_trilinear_backward = declare(
    "trilinear_interpolate_backward",
    TrilinearBackward,
    derivative=no_second_derivative("trilinear_interpolate", "trilinear_reference"),
    known=True,
)


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def trilinear_interpolate(features: Tensor, points: Tensor) -> Tensor:
    """Interpolate features at points within cells, from the features at the cells' corners.

    Args:
        features: (B, 8, C), bfloat16, float16, float32 or float64; corner 4 i + 2 j + k is at (i, j, k) of its cell.
        points: (B, 3) on the device of features, of any dtype that features may have; coordinate -1 is at corner index
            0, and coordinate 1 at corner index 1. Outside of [-1, 1] the operator extrapolates linearly.

    Returns:
        (B, C), the dtype of features, even under autocast; added up in float32. For float64, the reference computes the
        result in float64.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is not floating point.
        ValueError: shapes or devices do not match.
        MissingExtraError: the tensors are on a GPU, and Triton is not installed.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    check_arguments("trilinear_interpolate", features, points)
    no_tangents("trilinear_interpolate", features, points, instead="trilinear_reference")
    return _trilinear(features, points)
