"""Batch norms with statistics over all ranks, on GPUs and, unlike torch.nn.SyncBatchNorm, on CPUs.

    with batch_norms_over_ranks(model, group):
        ...  # each BatchNorm1d, 2d, 3d of the model uses statistics over the batches of all ranks

Each norm stays the same object with the same parameters and buffers. Within the block, its class is replaced by a
subclass. On a GPU the arithmetic is the same as in torch.nn.SyncBatchNorm.

For each channel of its part of the batch, each rank computes the count, the mean and the sum of squared deviations.
Chan's formula merges the sums of squared deviations of the ranks r: sum = Σ sum_r + Σ n_r (mean_r - mean)². The formula
never subtracts large squares from each other. The gradient, with sums over the whole batch of n values per channel, is

    dx = weight / std * (dy - Σ dy / n - x̂ * Σ (dy x̂) / n)

Source: Ioffe and Szegedy, "Batch Normalization" (arXiv:1502.03167); Chan, Golub and LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances" (1979).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.modules._functions import SyncBatchNorm
from torch.nn.modules.batchnorm import _BatchNorm

from rooftop.parallel.exchanges import Group, start_gather, start_sum

KINDS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def batch_norms_over_ranks(model: nn.Module, group: Group) -> Iterator[list[str]]:
    """Within the `with` block, batch norms in training mode use statistics over the ranks of a group.

    All ranks must call the same norms in the same order, every rank with at least one sample. Norms in evaluation mode,
    including those of frozen modules, use their running statistics as usual. Without a group, or with one rank, nothing
    changes.

    Yields: The names of the changed norms.
    """
    changed: list[tuple[nn.Module, type]] = []
    names = []
    if group is not None and group.size() > 1:
        for name, module in model.named_modules():
            if type(module) in KINDS:
                changed.append((module, type(module)))
                names.append(name)
                module.__class__ = _CLASSES[type(module)]  # type: ignore[assignment]
                vars(module)["_ranks"] = group
    try:
        yield names
    finally:
        for module, before in changed:
            module.__class__ = before  # type: ignore[assignment]
            del vars(module)["_ranks"]


class _OverRanks(_BatchNorm):
    _ranks: ProcessGroup

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        factor = 0.0 if self.momentum is None else self.momentum
        if self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                factor = 1.0 / float(self.num_batches_tracked)
        running = (self.running_mean, self.running_var) if self.track_running_stats else (None, None)
        affine = (self.weight, self.bias)
        if input.is_cuda:
            return SyncBatchNorm.apply(input, *affine, *running, self.eps, factor, self._ranks, self._ranks.size())
        return _Normalized.apply(input, *affine, *running, self.eps, factor, self._ranks)


_CLASSES = {kind: type(kind.__name__, (_OverRanks, kind), {}) for kind in KINDS}


class _Normalized(torch.autograd.Function):
    """Normalize x, (N, C, ...), by the mean and variance of each channel over all ranks' samples. The result has the
    dtype of x; mean and variance are at least float32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        eps: float,
        factor: float,
        group: ProcessGroup,
    ) -> Tensor:
        wide = x if x.dtype == torch.float64 else x.float()
        dims = [0, *range(2, x.dim())]
        channels = x.shape[1]
        own = wide.mean(dims)  # (C,)
        squares = (wide - _column(own, x)).square().sum(dims)
        part = torch.cat([own, squares, own.new_tensor([x.numel() // channels])])
        # means (ranks, C), sums (ranks, C), counts (ranks, 1)
        means, sums, counts = start_gather(part[None], 0, group)().split([channels, channels, 1], 1)
        count = counts.sum()
        mean = (counts * means).sum(0) / count
        deviations = sums.sum(0) + (counts * (means - mean).square()).sum(0)
        if running_mean is not None and running_var is not None:
            running_mean.lerp_(mean.to(running_mean.dtype), factor)
            running_var.lerp_((deviations / (count - 1)).to(running_var.dtype), factor)
        scale = (deviations / count + eps).rsqrt()
        normalized = (wide - _column(mean, x)) * _column(scale, x)
        ctx.save_for_backward(normalized, scale, weight, count)
        ctx.group, ctx.dims, ctx.dtype = group, dims, x.dtype
        found = normalized if weight is None else normalized * _column(weight, x)
        return (found if bias is None else found + _column(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        normalized, scale, weight, count = ctx.saved_tensors
        dy = dy.to(normalized.dtype)
        own = torch.stack([dy.sum(ctx.dims), (dy * normalized).sum(ctx.dims)])  # (2, C), before the sum over ranks
        whole = start_sum(own.clone(), ctx.group)() / count
        dx = (dy - _column(whole[0], dy) - normalized * _column(whole[1], dy)) * _column(scale, dy)
        if weight is not None:
            dx = dx * _column(weight, dy)
        d_weight = own[1].to(weight.dtype) if weight is not None and ctx.needs_input_grad[1] else None
        d_bias = own[0].to(ctx.dtype if weight is None else weight.dtype) if ctx.needs_input_grad[2] else None
        return dx.to(ctx.dtype), d_weight, d_bias, None, None, None, None, None


def _column(of_channels: Tensor, like: Tensor) -> Tensor:
    """Reshape values of channels, (C,), to (1, C, 1, ...) with as many dimensions as `like`."""
    return of_channels.view(1, -1, *[1] * (like.dim() - 2))
