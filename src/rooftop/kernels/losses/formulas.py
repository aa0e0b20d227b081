"""Cross entropy in PyTorch's own operators: for the kernels' reference, for higher derivatives, and for exported
programs. `losses.py` explains the formula and its terms.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.kernels.losses.launches import Terms
from rooftop.kernels.operands.dtypes import accumulator_dtype
from rooftop.launch.operators import without_autocast


def cross_entropy_reference(x: Tensor, target: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Compute (losses (N,), statistics (2, N)) of logits x (N, V) in plain PyTorch, in float64 (float32 for half
    precision).
    """
    values = x.to(reference_dtype(x.dtype))
    counted = target != terms.ignore_index
    label = target.where(counted, 0)
    maximum, total = _statistics(values)
    apart, logarithm = values - maximum[:, None], total.log()
    weights = _class_weights(values, terms)
    row_weight = weights[label]
    losses = row_weight * (1 - terms.label_smoothing) * (logarithm - apart.gather(1, label[:, None])[:, 0])
    if terms.label_smoothing:
        every = weights * (logarithm[:, None] - apart)
        losses = losses + terms.label_smoothing / x.shape[1] * every.sum(1)
    if terms.z_loss:
        losses = losses + row_weight * terms.z_loss * (maximum + logarithm).square()
    return losses.where(counted, 0.0), torch.stack([maximum, total])


def cross_entropy_gradient_reference(factor: Tensor, x: Tensor, target: Tensor, terms: Terms) -> Tensor:
    """Compute dx (N, V) in plain PyTorch. `factor`: (N,) or (), by which the gradient of each row's loss is multiplied.
    The statistics are recomputed, because the saved statistics are float32, which would make the probabilities less
    exact.
    """
    values = x.to(reference_dtype(x.dtype))
    counted = target != terms.ignore_index
    label = target.where(counted, 0)
    maximum, total = _statistics(values)
    weights = _class_weights(values, terms)
    kept, spread = weights[label] * (1 - terms.label_smoothing), terms.label_smoothing / x.shape[1]
    power = (values - maximum[:, None]).exp() / total[:, None]
    # Each term is computed separately, so that subtracting 1 from a probability near 1 is exact.
    dx = power.scatter_add(1, label[:, None], power.new_full((len(label), 1), -1.0)) * kept[:, None]
    if spread:
        dx = dx + spread * (power * weights.sum() - weights)
    if terms.z_loss:
        dx = dx + power * (2 * terms.z_loss * weights[label] * (maximum + total.log()))[:, None]
    dx = dx * factor.to(values.dtype).reshape(-1, 1)
    return dx.where(counted[:, None], 0.0).to(x.dtype)


BLOCK = 1 << 20  # number of logits in a block, which fits in the CPU's cache in float64


def _blocks(x: Tensor) -> Iterator[slice]:
    """Split x into blocks of rows, with as many rows as fit in a block."""
    step = max(1, BLOCK // x.shape[1])
    return (slice(start, start + step) for start in range(0, x.shape[0], step))


def losses_by_reference(
    x: Tensor, target: Tensor, terms: Terms, inverse: Tensor | None, dx: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Compute the results of `losses_of_rows` in plain PyTorch."""
    losses = x.new_empty(x.shape[0], dtype=reference_dtype(x.dtype))
    kept = x.new_empty((2, x.shape[0]), dtype=accumulator_dtype(x.dtype)) if dx is None else None
    factor = inverse if inverse is not None else losses.new_ones(())
    for rows in _blocks(x):
        losses[rows], statistics = cross_entropy_reference(x[rows], target[rows], terms)
        if dx is not None:
            dx[rows] = cross_entropy_gradient_reference(factor, x[rows], target[rows], terms)
        elif kept is not None:
            kept[:, rows] = statistics
    return losses, kept


def gradient_by_reference(
    dloss: Tensor, x: Tensor, target: Tensor, statistics: Tensor, terms: Terms, inverse: Tensor | None
) -> Tensor:
    """Compute dx (N, V) from dloss (N,) or (), in plain PyTorch."""
    factor = dloss.to(reference_dtype(x.dtype)) * (inverse if inverse is not None else 1.0)
    factor, dx = factor.expand(x.shape[0]), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    for rows in _blocks(x):
        dx[rows] = cross_entropy_gradient_reference(factor[rows], x[rows], target[rows], terms)
    return dx


def _statistics(values: Tensor) -> tuple[Tensor, Tensor]:
    """The maximum of each row, and the sum of exp(x - maximum) over the row."""
    maximum = values.amax(1)
    return maximum, (values - maximum[:, None]).exp().sum(1)


def reference_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the reference computes losses of logits of this dtype. The dtype is so wide that the
    reference's error is only the rounding of the result.
    """
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


def _class_weights(values: Tensor, terms: Terms) -> Tensor:
    """The class weights (V,) in the dtype of the values; ones if there are none."""
    if terms.weight is None:
        return values.new_ones(values.shape[1])
    return terms.weight.to(values.dtype)


def loss_formula(x: Tensor, target: Tensor, terms: Terms, reduction: str) -> Tensor:
    """Compute the loss with PyTorch's functions, reduced according to `reduction`."""
    values = x.to(accumulator_dtype(x.dtype))
    weight = None if terms.weight is None else terms.weight.to(values.dtype)
    losses = functional.cross_entropy(
        values, target, weight, ignore_index=terms.ignore_index, label_smoothing=terms.label_smoothing, reduction="none"
    )
    counted = target != terms.ignore_index
    row_weight = _class_weights(values, terms)[target.where(counted, 0)].where(counted, 0.0)
    losses = losses + row_weight * terms.z_loss * values.logsumexp(1).square()
    if reduction == "none":
        return losses
    return losses.sum() * inverse_of_count(row_weight.sum(), losses.dtype) if reduction == "mean" else losses.sum()


@without_autocast
def reduced_gradient_formula(dloss: Tensor, x: Tensor, target: Tensor, terms: Terms, mean: bool) -> Tensor:
    """The gradient of a reduced loss with respect to the logits x (N, V), in PyTorch's operators, so that it is
    differentiable.
    """
    if mean:
        dloss = dloss * inverse_by_formula(target, x, terms)
    return cross_entropy_gradient_reference(dloss, x, target, terms)


def inverse_by_formula(target: Tensor, x: Tensor, terms: Terms) -> Tensor:
    """1 / sum of the weights of the valid targets (0 if the sum is 0), in PyTorch's operators, without a GPU
    synchronization.
    """
    counted = target != terms.ignore_index
    weights = _class_weights(x.detach().to(reference_dtype(x.dtype)), terms)
    total = weights[target.where(counted, 0)].where(counted, 0.0).sum()
    return inverse_of_count(total, total.dtype)


def inverse_of_count(count: Tensor, dtype: torch.dtype) -> Tensor:
    """The factor that turns a sum into a mean: 1 / count. If count is 0, the factor is 0, so that the mean and its
    gradient are 0.
    """
    wide = count.to(dtype)
    return torch.where(wide == 0, 0.0, wide.masked_fill(wide == 0, 1.0).reciprocal())
