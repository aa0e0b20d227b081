"""Pooling over all sites of each batch element: the maximum or the mean.

These operators replace spconv's SparseGlobalMaxPool and SparseGlobalAvgPool. The operators are bound by memory, and
read features once. Each program reduces a range of rows to one partial result for each batch element in that range. If
rows are sorted by batch element, as in a rulebook, a program usually writes one or two partial results. PyTorch then
combines the partial results. No call synchronizes with the GPU, except calls with float64 features, which the reference
computes. The kernels use no atomics, so results are deterministic.

All sites that equal a maximum share its gradient equally, as in `torch.amax`, so the gradient does not depend on the
order of rows. (spconv loops over the batch elements in Python, and the mean of spconv returns only one channel.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_tensors, is_integer
from rooftop.kernels.operands.dtypes import INDICES, accumulator_dtype
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.sites import pool_launches
from rooftop.kernels.sites.sparse_pools import check_features
from rooftop.launch.known_calls import depends
from rooftop.launch.operators import declare, no_second_derivative, no_tangents
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

INSTEAD = "torch.amax or torch.mean of each batch element"

# ---- reference -------------------------------------------------------------------------------------------------


def sparse_global_pool_reference(
    features: Tensor, batch: Tensor, batch_size: int, average: bool
) -> tuple[Tensor, Tensor]:
    """Compute the result (B, C), and the number of sites of each batch element, (B,) int32, in plain PyTorch. Batch
    elements are reduced one at a time. For a mean, the features are summed in float64.

    On a GPU, the host synchronizes to read the numbers of sites.
    """
    element = _elements(batch, batch_size)
    counts = _counts(element, batch_size)
    depends("the reference reads how many sites each batch element has")
    lengths = counts.tolist()
    ordered = features.index_select(0, element.sort(stable=True).indices)
    *parts, _ = ordered.split([*lengths, len(batch) - sum(lengths)])  # rows that are no sites are last
    out = features.new_zeros(batch_size, features.shape[1])
    for row, part in zip(out, parts, strict=True):
        if len(part):
            row.copy_(part.sum(0, dtype=torch.float64) / len(part) if average else part.amax(0))
    return out, counts


def _elements(batch: Tensor, batch_size: int) -> Tensor:
    """The batch element of each row as int64; rows that are not sites get the value `batch_size`."""
    return torch.where((batch >= 0) & (batch < batch_size), batch.long(), batch_size)


def _counts(element: Tensor, batch_size: int) -> Tensor:
    """The number of sites of each batch element, (B,) int32."""
    return (element[:, None] == torch.arange(batch_size, device=element.device)).sum(0, dtype=torch.int32)


# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs. y and features are None for a mean."""

    y: Tensor | None
    features: Tensor | None
    counts: Tensor
    batch: Tensor
    batch_size: int


class SparseGlobalPool(NamedTuple):
    """Maximum or mean of the features (N, C) over all sites of each batch element. Return the result (B, C), and the
    number of sites of each batch element, (B,) int32.
    """

    features: Tensor
    batch: Tensor
    batch_size: int
    average: bool

    def run(self) -> tuple[Tensor, Tensor]:
        _check_values(_name(self.average), self.batch, self.batch_size)
        return self.computed()

    def computed(self) -> tuple[Tensor, Tensor]:
        """Compute the results without checking the values of `batch`."""
        features, batch, batch_size, average = self
        if features.numel() == 0:
            return features.new_zeros(batch_size, features.shape[1]), _counts(_elements(batch, batch_size), batch_size)
        if by_reference(features):
            return sparse_global_pool_reference(*self)
        parts, counts = pool_launches.pooled_parts(*self)
        totals = counts.sum(0, dtype=torch.int32)
        many = totals[:, None]
        if average:
            return (parts.sum(0) / many.clamp(min=1)).to(features.dtype), totals
        return torch.where(many > 0, parts.amax(0), 0.0).to(features.dtype), totals

    def fake(self) -> tuple[Tensor, Tensor]:
        size, features = self.batch_size, self.features
        return features.new_empty(size, features.shape[1]), self.batch.new_empty(size, dtype=torch.int32)

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        """Compute the results without a GPU synchronization. (The reference reads the numbers of sites on the host,
        which synchronizes.)
        """
        features, batch, batch_size, average = self
        element = _elements(batch, batch_size)
        counts, channels = _counts(element, batch_size), features.shape[1]
        if average:
            total = features.new_zeros((batch_size + 1, channels), dtype=torch.float64)
            total = total.index_add(0, element, features.double())[:batch_size]
            return (total / counts[:, None].clamp(min=1)).to(features.dtype), counts
        places = element[:, None].expand(features.shape)
        best = features.new_zeros(batch_size + 1, channels)  # a batch element without sites stays 0
        return best.scatter_reduce(0, places, features, "amax", include_self=False)[:batch_size], counts

    def keep(self, made: tuple[Tensor, Tensor]) -> Kept:
        y, values = (None if self.average else t for t in (made[0], self.features))
        return Kept(y, values, made[1], self.batch, self.batch_size)

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor]:
        return (_sparse_global_pool_backward(dy, *kept),)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops: a comparison or a sum for each element of features. A mean adds a division for each element of the
        result.
        """
        flops = self.features.numel() + self.average * made[0].numel()
        read = distinct_bytes([self.features, self.batch])
        return Cost(read, distinct_bytes(made), {precision_of(made[0].dtype): flops} if flops else {})


class SparseGlobalPoolBackward(NamedTuple):
    """The gradient (N, C) of the features. y and features are None for a mean."""

    dy: Tensor
    y: Tensor | None
    features: Tensor | None
    counts: Tensor
    batch: Tensor
    batch_size: int

    def run(self) -> Tensor:
        dy, y, features, counts, batch, batch_size = self
        inside = accumulator_dtype(dy.dtype)
        element = _elements(batch, batch_size)
        many = counts[:, None].clamp(min=1).to(inside)
        if y is None or features is None:
            return _of_rows(dy.to(inside) / many, element).to(dy.dtype)
        best = _of_rows(y, element)
        taken = (features == best) | (features.isnan() & best.isnan())
        means, _ = SparseGlobalPool(taken.to(inside), batch, batch_size, average=True).computed()
        ties = (means * many).round()  # number of sites
        shares = _of_rows(dy.to(inside) / ties.clamp(min=1), element)
        return torch.where(taken, shares, 0.0).to(dy.dtype)

    def fake(self) -> Tensor:
        return self.dy.new_empty(self.batch.shape[0], self.dy.shape[1])

    def cost(self, made: Tensor) -> Cost:
        """Flops: a division for each element of dy. A maximum adds a comparison and a count of ties for each element of
        features.
        """
        flops = self.dy.numel() + (0 if self.features is None else 2 * self.features.numel())
        read = distinct_bytes(self[:5])
        return Cost(read, distinct_bytes([made]), {precision_of(self.dy.dtype): flops} if flops else {})


_sparse_global_pool = declare("sparse_global_pool", SparseGlobalPool, slopes=1, known=True)
_sparse_global_pool_backward = declare(
    "sparse_global_pool_backward",
    SparseGlobalPoolBackward,
    derivative=no_second_derivative("pooling over batch elements", INSTEAD),
    known=True,
)


def _of_rows(values: Tensor, element: Tensor) -> Tensor:
    """Copy the values (B, C) of batch elements to the rows (N, C) of these batch elements; 0 for rows that are not
    sites.
    """
    return torch.cat([values, values.new_zeros(1, values.shape[1])]).index_select(0, element)


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def sparse_global_max_pool(features: Tensor, batch: Tensor, batch_size: int) -> Tensor:
    """The maximum of each batch element's sites, channel by channel.

    Args:
        features: (N, C), bfloat16, float16, float32 or float64.
        batch: (N,) int32 or int64, the batch element of each row, in any order; -1 for rows that are not sites.
            Out-of-range batch elements raise an error on the CPU; on a GPU their rows are skipped.
        batch_size: number of batch elements; some may have no sites.

    Returns:
        (batch_size, C), of the features' dtype, even under autocast; 0 for a batch element without sites, NaN if a
        feature of the batch element is NaN. All features that equal a maximum share the gradient of the maximum
        equally.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match or, on a CPU, a batch element is out of range.
        MissingExtraError: the tensors are on a GPU, and Triton is not installed.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    return _pooled(features, batch, batch_size, average=False)


@repeated
@recorded_whole
def sparse_global_avg_pool(features: Tensor, batch: Tensor, batch_size: int) -> Tensor:
    """The mean of each batch element's sites, channel by channel.

    Arguments, result and errors are as in `sparse_global_max_pool`. Sums are float32 on a GPU (float64 for float64),
    and float64 on a CPU.
    """
    return _pooled(features, batch, batch_size, average=True)


def _pooled(features: Tensor, batch: Tensor, batch_size: int, average: bool) -> Tensor:
    name = _name(average)
    check_features(name, features)
    check_tensors(name, INDICES, (), ("features", features), batch=batch)
    if batch.dim() != 1 or batch.shape[0] != features.shape[0]:
        raise ValueError(f"{name}: expected batch ({features.shape[0]},), the batch element of each row of "
                         f"features, got {tuple(batch.shape)}")  # fmt: skip
    if not is_integer(batch_size) or batch_size < 1:
        raise ValueError(f"{name}: batch_size must be a number of batch elements, 1 or more, got {batch_size!r}")
    no_tangents(name, features, instead=INSTEAD)
    return _sparse_global_pool(features, batch, batch_size, average)[0]


def _check_values(name: str, batch: Tensor, batch_size: int) -> None:
    if batch.device.type != "cpu" or batch.numel() == 0:
        return
    least, most = (int(each) for each in batch.aminmax())
    if least < -1 or most >= batch_size:
        raise ValueError(
            f"{name}: batch must be from 0 to {batch_size - 1}, or -1 for rows that are not sites, got "
            f"{least} to {most}"
        )


def _name(average: bool) -> str:
    return "sparse_global_avg_pool" if average else "sparse_global_max_pool"
