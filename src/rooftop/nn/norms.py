"""Layer norm and RMS norm as modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rooftop.kernels import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from rooftop.launch.symbolic import proxy_in, recorded_whole
from rooftop.nn.hooks import is_plain


class LayerNorm(torch.nn.LayerNorm):
    """`torch.nn.LayerNorm`, with the same parameters and state dict, computed by `rooftop.kernels.layer_norm`."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Normalize input (..., *normalized_shape). The result has the same shape as input.

        With a residual of input's shape, return (norm of input + residual, input + residual), computed by
        `rooftop.kernels.add_layer_norm`.
        """
        parameters = (self.normalized_shape, self.weight, self.bias, self.eps)
        return layer_norm(input, *parameters) if residual is None else layer_norm_of(input, residual, *parameters)


class RMSNorm(torch.nn.RMSNorm):
    """`torch.nn.RMSNorm`, with the same parameters and state dict, computed by `rooftop.kernels.rms_norm`."""

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Normalize input (..., *normalized_shape). The result has the same shape as input.

        With a residual of input's shape, return (norm of input + residual, input + residual), computed by
        `rooftop.kernels.add_rms_norm`.
        """
        parameters = (self.normalized_shape, self.weight, self.eps)
        return rms_norm(input, *parameters) if residual is None else rms_norm_of(input, residual, *parameters)


@recorded_whole
def layer_norm_of(input: Tensor, residual: Tensor | None, *parameters: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the result of a layer norm module. torch.fx records a call as one node, because a trace of the module
    alone does not show whether a residual will be passed.
    """
    return layer_norm(input, *parameters) if residual is None else add_layer_norm(input, residual, *parameters)


@recorded_whole
def rms_norm_of(input: Tensor, residual: Tensor | None, *parameters: Any) -> Tensor | tuple[Tensor, Tensor]:
    """Compute the result of an RMS norm module, as `layer_norm_of` does for a layer norm."""
    return rms_norm(input, *parameters) if residual is None else add_rms_norm(input, residual, *parameters)


def norm_of_sum(norm: nn.Module, input: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """Return (norm(input + residual), input + residual), for any norm. One kernel computes both results if the norm is
    a `LayerNorm` or `RMSNorm` of this file, has no hooks, and is not being traced. In a trace of torch.fx, sum and norm
    stay separate, because the trace must record the result of each module.

    Args:
        input, residual: tensors of the same shape. The sum has the dtype to which PyTorch promotes both dtypes.
    """
    if proxy_in((input, residual)) is not None or not (is_plain(norm, LayerNorm) or is_plain(norm, RMSNorm)):
        total = input + residual
        return norm(total), total
    if input.dtype != residual.dtype:
        dtype = torch.promote_types(input.dtype, residual.dtype)
        input, residual = input.to(dtype), residual.to(dtype)
    return norm(input, residual)  # type: ignore[no-any-return]
