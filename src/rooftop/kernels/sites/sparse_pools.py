"""Pooling over sites: out[m] = the maximum, or the mean, of features[neighbours[m, t]] over the taps t with a
neighbour.

From a rulebook's table of neighbours, the operators compute the same as spconv's SparseMaxPool and SparseAvgPool, apart
from two errors of spconv (see below). The operators are bound by memory. A program computes some rows and columns of
the result in a loop over the taps, and loads several rows of features at the same time. The mean divides by the number
of a result's neighbours instead of the size of the window.

Backward reads the reverse table: each site adds up the gradients of its results, in the order of the taps. Backward
uses no scatter and no atomics, so results are deterministic. Each site that equals a maximum gets the whole gradient of
the maximum, as in spconv, so the gradient does not depend on the order of rows. (In PyTorch, only the first maximum
gets the gradient.)

spconv 2.3 has two errors that these operators do not have. In spconv, a maximum is never below 0, and the gradient of a
mean is multiplied by the number of neighbours instead of divided by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.sites import pool_launches
from rooftop.kernels.sites.neighbour_tables import check_neighbours, check_reverse
from rooftop.launch.operators import declare, no_second_derivative, no_tangents
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

MAX_ROWS = (1 << 31) - 1  # row indices are int32
INSTEAD = "torch.nn.functional.max_pool3d or avg_pool3d on the dense grid"

# ---- reference -------------------------------------------------------------------------------------------------


def sparse_max_pool_reference(features: Tensor, neighbours: Tensor) -> Tensor:
    """The maximum (M, C) of the features (N, C) at each result's neighbours (M, T), tap by tap; 0 for results without
    neighbours.
    """
    rows, channels = neighbours.shape[0], features.shape[1]
    best = features.new_full((rows, channels), -torch.inf)
    for values, _ in _by_tap([features], neighbours, -torch.inf):
        best = torch.maximum(best, values[0])
    return torch.where(_counts(neighbours, features.shape[0])[:, None] > 0, best, 0.0)


def sparse_avg_pool_reference(features: Tensor, neighbours: Tensor) -> Tensor:
    """The mean (M, C) of the features (N, C) at each result's neighbours (M, T), added up tap by tap in float32
    (float64 for float64).
    """
    inside = accumulator_dtype(features.dtype)
    total = torch.zeros(neighbours.shape[0], features.shape[1], dtype=inside, device=features.device)
    for values, _ in _by_tap([features], neighbours, 0.0):
        total = total + values[0]
    counts = _counts(neighbours, features.shape[0]).clamp(min=1).to(inside)
    return (total / counts[:, None]).to(features.dtype)


def max_pool_gradient_reference(dy: Tensor, y: Tensor, features: Tensor, reverse: Tensor) -> Tensor:
    """The gradient (N, C) from dy and y (M, C), features (N, C) and the reverse table (N, T)."""
    total = torch.zeros(features.shape, dtype=accumulator_dtype(dy.dtype), device=dy.device)
    for (slopes, best), known in _by_tap([dy, y], reverse, 0.0):
        taken = known & ((features == best) | (features.isnan() & best.isnan()))
        total += torch.where(taken, slopes, 0.0)
    return total.to(dy.dtype)


def avg_pool_gradient_reference(dy: Tensor, counts: Tensor, reverse: Tensor) -> Tensor:
    """The gradient (N, C) from dy (M, C), the number of neighbours of each result (M,), and the reverse table (N,
    T).
    """
    inside = accumulator_dtype(dy.dtype)
    total = torch.zeros(reverse.shape[0], dy.shape[1], dtype=inside, device=dy.device)
    shares = dy.to(inside) / counts.clamp(min=1).to(inside)[:, None]
    for values, _ in _by_tap([shares], reverse, 0.0):
        total += values[0]
    return total.to(dy.dtype)


def _by_tap(tensors: list[Tensor], table: Tensor, otherwise: float) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Yield for each tap the rows of the tensors that the table selects (`otherwise` where the table has -1), and a
    mask of the entries that are not -1.
    """
    count = tensors[0].shape[0]
    if count == 0:
        return
    for column in table.unbind(1):
        known = ((column >= 0) & (column < count))[:, None]
        row = column.clamp(0, count - 1)
        yield [torch.where(known, t.index_select(0, row), otherwise) for t in tensors], known


def _counts(neighbours: Tensor, sites: int) -> Tensor:
    """The number of neighbours of each result, (M,) int32."""
    return ((neighbours >= 0) & (neighbours < sites)).sum(1, dtype=torch.int32)


# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs. y and features are None for a mean."""

    y: Tensor | None
    features: Tensor | None
    counts: Tensor
    neighbours: Tensor
    reverse: Tensor | None
    sites: int


class SparsePool(NamedTuple):
    """Pooling of features (N, C) in windows. Return the result (M, C), and for a mean the number of neighbours of each
    result, (M,) int32. Only the gradient reads `reverse`.
    """

    features: Tensor
    neighbours: Tensor
    reverse: Tensor | None
    average: bool

    def run(self) -> tuple[Tensor, Tensor]:
        check_neighbours(_name(self.average), self.features, self.neighbours)
        return self.computed()

    def computed(self) -> tuple[Tensor, Tensor]:
        """Compute the results without checking the table's values."""
        features, neighbours, _, average = self
        if by_reference(features):
            return self.in_pytorch()
        out, counts = self.fake()
        if features.numel() == 0:
            return out.zero_(), counts.zero_()
        pool_launches.pooled(features, neighbours, out, counts, average)
        return out, counts

    def fake(self) -> tuple[Tensor, Tensor]:
        rows, features = self.neighbours.shape[0], self.features
        return features.new_empty(rows, features.shape[1]), self.neighbours.new_empty(rows if self.average else 0)

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        features, neighbours, _, average = self
        if average:
            return sparse_avg_pool_reference(features, neighbours), _counts(neighbours, features.shape[0])
        return sparse_max_pool_reference(features, neighbours), neighbours.new_empty(0)

    def keep(self, made: tuple[Tensor, Tensor]) -> Kept:
        features, neighbours, reverse, average = self
        y, values = (None if average else t for t in (made[0], features))
        return Kept(y, values, made[1], neighbours, reverse, features.shape[0])

    @staticmethod
    def gradients(kept: Kept, wanted: Sequence[bool], dy: Tensor) -> tuple[Tensor]:
        return (_sparse_pool_backward(dy, *kept),)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops: one operation for each element of the result. (This is the minimum: the number of neighbours is
        unknown.) A mean adds a division for each element of the result.
        """
        flops = (1 + self.average) * made[0].numel()
        read = distinct_bytes([self.features, self.neighbours])
        return Cost(read, distinct_bytes(made), {precision_of(made[0].dtype): flops} if flops else {})


class SparsePoolBackward(NamedTuple):
    """The gradient (N, C) of the features. y and features are None for a mean."""

    dy: Tensor
    y: Tensor | None
    features: Tensor | None
    counts: Tensor
    neighbours: Tensor
    reverse: Tensor | None
    sites: int

    def run(self) -> Tensor:
        check_reverse(_name(self.y is None), self.neighbours, self.reverse)
        return self.computed()

    def computed(self) -> Tensor:
        """Compute the gradient without checking the tables' values."""
        dy, y, features, counts, neighbours, reverse, sites = self
        if by_reference(dy):
            table = neighbours.flip(1) if reverse is None else reverse
            if y is None or features is None:
                return avg_pool_gradient_reference(dy, counts, table)
            return max_pool_gradient_reference(dy, y, features, table)
        dfeatures = self.fake()
        if dy.numel() == 0 or sites == 0:
            return dfeatures.zero_()
        table = neighbours if reverse is None else reverse
        pool_launches.pooled_backward(dy, y, features, counts, table, dfeatures, mirrored=reverse is None)
        return dfeatures

    def fake(self) -> Tensor:
        return self.dy.new_empty(self.sites, self.dy.shape[1])

    def cost(self, made: Tensor) -> Cost:
        """Flops: two operations for each element of dy: a sum, and a comparison (for a maximum) or a division (for a
        mean). Bytes: all tensors once, except that only the table that the kernel reads counts: `reverse` if it is
        given, else `neighbours`.
        """
        dy, y, features, counts, neighbours, reverse, _ = self
        read = distinct_bytes([dy, y, features, counts, neighbours if reverse is None else reverse])
        return Cost(read, distinct_bytes([made]), {precision_of(dy.dtype): 2 * dy.numel()} if dy.numel() else {})


_sparse_pool = declare("sparse_pool", SparsePool, slopes=1, known=True)
_sparse_pool_backward = declare(
    "sparse_pool_backward",
    SparsePoolBackward,
    derivative=no_second_derivative("pooling over sites", INSTEAD),
    known=True,
)


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def sparse_max_pool(features: Tensor, neighbours: Tensor, reverse: Tensor | None = None) -> Tensor:
    """The maximum of each result's neighbours, channel by channel.

    Args:
        features: (N, C), bfloat16, float16, float32 or float64.
        neighbours: (M, T) int32, the row of features at each tap of a result, or -1 for no neighbour. Out-of-range rows
            raise an error on the CPU; on a GPU they count as -1.
        reverse: (N, T) int32, the result to which a row of features contributes at each tap, or -1 for none. The
            gradient needs the reverse table. None: the table is submanifold, so that the reverse table is `neighbours`
            with the taps in reverse order.

    Returns:
        (M, C), contiguous, of the features' dtype, even under autocast; 0 for a result without neighbours, NaN if a
        neighbour is NaN. Each feature that equals the maximum gets the maximum's whole gradient.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match or, on a CPU, a table is wrong.
        MissingExtraError: the tensors are on a GPU, and Triton is not installed.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    return _pooled(features, neighbours, reverse, average=False)


@repeated
@recorded_whole
def sparse_avg_pool(features: Tensor, neighbours: Tensor, reverse: Tensor | None = None) -> Tensor:
    """The mean of each result's neighbours: the sum of the neighbours divided by their number.

    Arguments, result and errors are those of `sparse_max_pool`. Sums are float32 (float64 for float64), in the order of
    the taps.
    """
    return _pooled(features, neighbours, reverse, average=True)


def _pooled(features: Tensor, neighbours: Tensor, reverse: Tensor | None, average: bool) -> Tensor:
    name = _name(average)
    _check(name, features, neighbours, reverse)
    no_tangents(name, features, instead=INSTEAD)
    return _sparse_pool(features, neighbours, reverse, average)[0]


def _name(average: bool) -> str:
    return "sparse_avg_pool" if average else "sparse_max_pool"


def _check(name: str, features: Tensor, neighbours: Tensor, reverse: Tensor | None) -> None:
    check_features(name, features)
    beside = ("features", features)
    check_tensors(name, (torch.int32,), ("reverse",), beside, neighbours=neighbours, reverse=reverse)
    sites = features.shape[0]
    if neighbours.dim() != 2 or neighbours.shape[1] == 0:
        raise ValueError(f"{name}: expected neighbours (M, T) of at least one tap, got {tuple(neighbours.shape)}")
    rows, taps = neighbours.shape
    if max(rows, sites) > MAX_ROWS:
        raise ValueError(f"{name}: {max(rows, sites)} rows exceed the range of int32: split the batch")
    check_shape(name, "reverse", reverse, (sites, taps))
    if reverse is None and rows != sites and features.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: a table from {sites} sites to {rows} results is not submanifold: give reverse=, which the "
            "gradient needs"
        )


def check_features(name: str, features: Tensor) -> None:
    """Raise an error unless the features are floating point and (N, C)."""
    check_tensors(name, FLOATS, features=features)
    if features.dim() != 2:
        raise ValueError(f"{name}: expected features (N, C), got {tuple(features.shape)}")
