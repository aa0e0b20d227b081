"""Sparse convolution: out[m] = bias + sum over the taps t of the window of weight[:, t] features[neighbours[m, t]].

Graham et al. 2018, "3D Semantic Segmentation with Submanifold Sparse Convolutional Networks". The operator is an
implicit matrix product (Tang et al. 2023, "TorchSparse++"): the kernel gathers rows while it multiplies them, and
stores no gathered matrix. The rulebook, `neighbours`, contains the site at each tap. The convolution is bound by memory
for few channels, and by the tensor cores above about 128 channels.

On a surface a site has about 9 of 27 possible neighbours, and the slope of the surface determines which ones. A tile
of results multiplies only the taps that at least one of its rows has. So rows are sorted by their taps
(`rows_by_mask`): similar rows share tiles, and tiles skip more taps.

The gradient of the features is the same product, with the reverse table and the transposed weight. The gradient of the
features needs no scatter and no atomics. The gradient of the weight is a sum over the pairs of each tap. The pairs of
each tap are cut into pieces. All pieces of all taps have the same length, except that the last piece of a tap may be
shorter. The float32 sums of the pieces are added in a fixed order, so results are deterministic.

`tables.py` has the launch parameters, `launches.py` launches the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Cost, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.operands.autocasting import cast_by_autocast
from rooftop.kernels.operands.checks import check_same_dtype, check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.sites.launches import (
    convolved,
    has_table,
    row_count,
    sorted_table,
    unsorted_table,
    weight_gradient,
)
from rooftop.kernels.sites.neighbour_tables import check_neighbours, check_reverse
from rooftop.kernels.sites.tables import BLOCK_ROWS
from rooftop.launch.lessons import FIRST, LAST, NONE
from rooftop.launch.operators import declare, no_second_derivative, no_tangents, without_autocast
from rooftop.launch.repeated_calls import repeated_rows
from rooftop.launch.row_counts import Count
from rooftop.launch.symbolic import recorded_whole

TABLE = (torch.int32,)  # dtypes of tables
ORDER = (torch.int32, torch.int64)  # dtypes of an order that contains no sorted table
MAX_ROWS = (1 << 31) - 1  # row indices are int32
PLAIN = "torch.nn.functional.conv3d on the dense grid"

# ---- reference -------------------------------------------------------------------------------------------------


@without_autocast
def sparse_conv_reference(features: Tensor, weight: Tensor, bias: Tensor | None, neighbours: Tensor) -> Tensor:
    """Compute the convolution (M, O) from features (N, C), weight (O, T, C), bias (O,) and neighbours (M, T) in plain
    PyTorch. The function gathers, multiplies and adds the features of one tap after the other.

    The matrix product of a tap, including its sum over the channels, is float32 (float64 for float64). The products of
    all taps are added in float64. On a GPU, the host synchronizes at each tap to read the number of pairs.
    """
    values, matrices = features.to(accumulator_dtype(features.dtype)), weight.to(accumulator_dtype(features.dtype))
    out = torch.zeros(neighbours.shape[0], weight.shape[0], dtype=torch.float64, device=features.device)
    for tap, (sites, rows) in enumerate(_pairs_by_tap(neighbours)):
        out.index_add_(0, rows, (values.index_select(0, sites) @ matrices[:, tap].t()).double())
    return (out if bias is None else out + bias).to(features.dtype)


@without_autocast
def features_gradient_reference(dy: Tensor, weight: Tensor, neighbours: Tensor, sites: int) -> Tensor:
    """The gradient (N, C) of the features of N sites, from dy (M, O)."""
    gradients, matrices = dy.to(accumulator_dtype(dy.dtype)), weight.to(accumulator_dtype(dy.dtype))
    found = torch.zeros(sites, weight.shape[2], dtype=torch.float64, device=dy.device)
    for tap, (at, rows) in enumerate(_pairs_by_tap(neighbours)):
        found.index_add_(0, at, (gradients.index_select(0, rows) @ matrices[:, tap]).double())
    return found.to(dy.dtype)


@without_autocast
def weight_gradient_reference(dy: Tensor, features: Tensor, neighbours: Tensor) -> Tensor:
    """The gradient (O, T, C) of the weight, from dy (M, O). The sum is float64, since there may be any number
    of pairs.
    """
    gradients, values = dy.double(), features.double()
    by_tap = [
        gradients.index_select(0, rows).t() @ values.index_select(0, at) for at, rows in _pairs_by_tap(neighbours)
    ]
    return torch.stack(by_tap, 1).to(dy.dtype)


def _pairs_by_tap(neighbours: Tensor) -> list[tuple[Tensor, Tensor]]:
    """For each tap, the pairs of an input site and an output row that it connects, as two tensors (sites, rows), in
    ascending order of rows.
    """
    found = []
    for column in neighbours.unbind(1):
        rows = (column >= 0).nonzero().squeeze(1)
        found.append((column.index_select(0, rows).long(), rows))
    return found


# ---- values of tables ----------------------------------------------------------------------------------------


def _check_values(features: Tensor, neighbours: Tensor | None, order: Tensor | None, taps: int) -> None:
    """On a CPU, check the values of the tables. (On a GPU, the kernels treat out-of-range sites as -1.)"""
    if not features.is_cpu:
        return
    neighbours = _plain(neighbours, order, taps)
    check_neighbours("sparse_conv", features, neighbours)
    _check_order("order", order, neighbours)


def _check_order(name: str, order: Tensor | None, table: Tensor) -> None:
    """Check that the order lists each row of `table` (M, T) once. If the order contains a sorted table, check that
    this table was made from `table`.
    """
    if order is None:
        return
    listed = order[0] if has_table(order) else order
    _check_rows(name, listed)
    if has_table(order) and not torch.equal(order, sorted_table(table, listed)):
        raise ValueError(
            f"sparse_conv: {name} contains a sorted table that was made from another neighbour table, or was changed: "
            f"compute {name} with row_order from the matching table of this call (neighbours or reverse)"
        )


def _check_rows(name: str, listed: Tensor) -> None:
    if not torch.equal(listed.long().sort().values, torch.arange(len(listed), device="cpu")):
        raise ValueError(f"sparse_conv: {name} must contain each row from 0 to {len(listed) - 1} once: use row_order")


def _by_taps(weight: Tensor) -> Tensor:
    """The weight (O, *kernel, C) as (O, T, C), contiguous. The operator reshapes the weight, so that autograd records
    no view.
    """
    return weight.reshape(weight.shape[0], _taps(weight), weight.shape[-1]).contiguous()


def _taps(weight: Tensor) -> int:
    return math.prod(weight.shape[1:-1])


def _plain(neighbours: Tensor | None, order: Tensor | None, taps: int, name: str = "order") -> Tensor:
    """The neighbour table (M, T) in its original row order: `neighbours` itself, or recovered from the sorted table in
    `order`.
    """
    if neighbours is not None:
        return neighbours
    row_count(neighbours, order)  # raises without a table
    assert order is not None
    if order.is_cpu:
        _check_rows(name, order[0])
    return unsorted_table(order, taps)


# ---- operators -------------------------------------------------------------------------------------------------


class SparseConv(NamedTuple):
    """Sparse convolution of features (N, C) with a weight (O, *kernel, C). The result is (M, O). Only the gradients
    read `reverse` and `reverse_order`.
    """

    features: Tensor
    weight: Tensor
    bias: Tensor | None
    neighbours: Tensor | None
    reverse: Tensor | None
    order: Tensor | None
    reverse_order: Tensor | None
    pairs: Tensor | None
    pair_counts: Tensor | None
    pair_count: int

    def run(self) -> Tensor:
        features, weight, bias, neighbours, order = *self[:4], self.order
        _check_values(features, neighbours, order, _taps(weight))
        matrices = _by_taps(weight)
        if by_reference(features):
            return sparse_conv_reference(features, matrices, bias, _plain(neighbours, order, _taps(weight)))
        return convolved(features, matrices, bias, neighbours, order, mirrored=False)

    def fake(self) -> Tensor:
        return self.features.new_empty(row_count(self.neighbours, self.order), self.weight.shape[0])

    def in_pytorch(self) -> Tensor:
        """Multiply all M rows at each tap, and discard the products of rows without a site at that tap. A traced
        program cannot select these rows, because their number is unknown.
        """
        features, weight, bias, neighbours, order = *self[:4], self.order
        matrices = _by_taps(weight).to(accumulator_dtype(features.dtype))
        if neighbours is None:
            assert order is not None
            neighbours = unsorted_table(order, _taps(weight))
        values = functional.pad(features.to(matrices.dtype), (0, 0, 0, 1))  # a zero row, for taps without a site
        out = torch.zeros(neighbours.shape[0], weight.shape[0], dtype=torch.float64, device=features.device)
        for tap, column in enumerate(neighbours.unbind(1)):
            known = column >= 0
            products = values.index_select(0, column.where(known, features.shape[0])) @ matrices[:, tap].t()
            out = out + products.double().where(known[:, None], 0.0)
        return (out if bias is None else out + bias).to(features.dtype)

    def keep(self, made: Tensor) -> tuple[Any, ...]:
        """All arguments except the bias."""
        return self[:2] + self[3:]

    @staticmethod
    def gradients(kept: tuple[Any, ...], wanted: Sequence[bool], dy: Tensor) -> list[Tensor | None]:
        mask = list(wanted[:3])
        arguments: list[Any] = [dy, *kept, mask]
        return [t if each else None for t, each in zip(_sparse_conv_backward(*arguments), mask, strict=True)]

    def cost(self, made: Tensor) -> Cost:
        """Flops: for each pair, the product of a vector (C,) and a matrix (C, O); a bias adds a sum for each element of
        the result. Bytes: features, weight, bias and table are each read once. An order is optional, so the bytes of an
        order do not count.
        """
        features, weight, bias, neighbours, order = *self[:4], self.order
        flops = _product_flops(self, features, 1)
        if bias is not None:
            _add(flops, precision_of(features.dtype), made.numel())
        read = distinct_bytes([features, weight, bias, _table_of(neighbours, order, weight)])
        return Cost(read, distinct_bytes([made]), flops)


class SparseConvBackward(NamedTuple):
    """Gradients of features, weight and bias; a gradient that `mask` does not request is empty."""

    dy: Tensor
    features: Tensor
    weight: Tensor
    neighbours: Tensor | None
    reverse: Tensor | None
    order: Tensor | None
    reverse_order: Tensor | None
    pairs: Tensor | None
    pair_counts: Tensor | None
    pair_count: int
    mask: list[bool]

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        of_features, of_weight, of_bias = self.mask
        return (
            self._of_features() if of_features else self.features.new_empty(0),
            self._of_weight() if of_weight else self.features.new_empty(0),
            self._of_bias() if of_bias else self.features.new_empty(0),
        )

    def _of_features(self) -> Tensor:
        dy, features, weight, neighbours, reverse, order, reverse_order, *_ = self
        taps, mirrored = _taps(weight), reverse is None and not has_table(reverse_order)
        if features.is_cpu:
            table = _plain(neighbours, order, taps)
            other = None if mirrored else _plain(reverse, reverse_order, taps, "reverse_order")
            check_reverse("sparse_conv", table, other)
            _check_order("reverse_order", reverse_order, table if other is None else other)
        matrices = _by_taps(weight)
        if by_reference(features):
            return features_gradient_reference(dy, matrices, _plain(neighbours, order, taps), features.shape[0])
        tables = (neighbours, order) if mirrored else (reverse, reverse_order)
        return convolved(dy, matrices.permute(2, 1, 0), None, *tables, mirrored=mirrored)  # (C, T, O)

    def _of_weight(self) -> Tensor:
        dy, features, weight, neighbours, order, pairs, counts = *self[:4], self.order, self.pairs, self.pair_counts
        if by_reference(features):
            table = _plain(neighbours, order, _taps(weight))
            return weight_gradient_reference(dy, features, table).view(weight.shape)
        lists = None if pairs is None or counts is None else (pairs, counts)
        return weight_gradient(dy, features, _taps(weight), neighbours, order, lists).view(weight.shape)

    def _of_bias(self) -> Tensor:
        """The gradient of the bias, in the dtype of dy. The reference sums in float64."""
        dy = self.dy
        return dy.sum(0, dtype=torch.float64).to(dy.dtype) if by_reference(self.features) else dy.sum(0)

    def fake(self) -> tuple[Tensor, Tensor, Tensor]:
        of_features, of_weight, of_bias = self.mask
        return (
            self.features.new_empty(self.features.shape if of_features else 0),
            self.weight.new_empty(self.weight.shape if of_weight else 0),
            self.dy.new_empty(self.dy.shape[1] if of_bias else 0),
        )

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops of the gradients that are needed: for the features and for the weight, 2 C O flops for each pair; for
        the bias, a sum for each element of dy.
        """
        dy, features, weight, neighbours, reverse, order, reverse_order, *_, mask = self
        for_features, for_weight, for_bias = mask
        needed, table = [dy], _table_of(neighbours, order, weight)
        if for_features and reverse is not None:
            needed += [weight, reverse]
        elif for_features:
            needed += [weight, _table_of(None, reverse_order, weight) if has_table(reverse_order) else table]
        if for_weight:
            needed += [features, table]
        flops = _product_flops(self, dy, for_features + for_weight)
        if for_bias:
            _add(flops, precision_of(dy.dtype), dy.numel())
        return Cost(distinct_bytes(needed), distinct_bytes(made), flops)


_sparse_conv = declare("sparse_conv", SparseConv, known="itself")
_sparse_conv_backward = declare(
    "sparse_conv_backward",
    SparseConvBackward,
    derivative=no_second_derivative("sparse_conv", PLAIN),
    known="itself",
)


def _table_of(neighbours: Tensor | None, order: Tensor | None, weight: Tensor) -> Tensor:
    """The table of sites: `neighbours` (M, T), or the last T lines (T, M) of a sorted table."""
    if neighbours is not None:
        return neighbours
    assert order is not None
    return order[order.shape[0] - _taps(weight) :]


def _product_flops(call: SparseConv | SparseConvBackward, operand: Tensor, products: int) -> dict[str, int]:
    """Flops if each pair takes part in `products` products, each of O C multiply-adds. If the caller does not pass the
    number of pairs, the function assumes the minimum: one pair for each output site. So the roof time is never
    overestimated. Counting the pairs would synchronize with the GPU.
    """
    out_channels, *_, channels = call.weight.shape
    pairs = call.pair_count if call.pair_count >= 0 else row_count(call.neighbours, call.order)
    found = 2 * pairs * channels * out_channels * products
    return {matrix_precision(operand, convolution=True): found} if found else {}


def _add(flops: dict[str, int], precision: str, more: int) -> None:
    flops[precision] = flops.get(precision, 0) + more


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def sparse_conv(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neighbours: Tensor | None,
    reverse: Tensor | None = None,
    *,
    order: Tensor | None = None,
    reverse_order: Tensor | None = None,
    pairs: tuple[Tensor, Tensor] | None = None,
    pair_count: int | None = None,
) -> Tensor:
    """Sparse convolution from N sites to M results. A table of neighbours (the rulebook) lists the sites at each tap of
    each result.

    Args:
        features: (N, C), bfloat16, float16, float32 or float64. Autocast casts features, weight and bias as it casts
            those of conv3d.
        weight: (O, *kernel, C), as in spconv, with the dtype of features. `kernel` has T taps, in the order of the
            table's columns.
        bias: (O,), with the dtype of features.
        neighbours: (M, T) int32, the row of features at each tap of a result, or -1 for no neighbour. Out-of-range rows
            raise an error on the CPU; on a GPU they count as -1. None: `order` contains the table.
        reverse: (N, T) int32, the result to which a row of features contributes at each tap, or -1 for none. The
            gradient of the features needs the reverse table. None: `reverse_order` contains the reverse table, or the
            convolution is submanifold, so that the reverse table is `neighbours` with the taps in reverse order.
        order, reverse_order: the results of `row_order` for the two tables, by which rows that have neighbours at the
            same taps share a tile. The results of `row_order` may contain the tables. Any order of the rows is allowed:
            (M,) and (N,) int32 or int64. If neither `reverse` nor `reverse_order` is given, `order` is used for both
            directions. None: the function computes the order if the table has many rows.
        pairs: the pairs of each tap, for the gradient of the weight, as `get_indice_pairs` returns them: the sites and
            results of each tap's pairs, (2, T, P) int32, and the number of pairs of each tap, (T,) int32. For an
            `order` that contains the table: the results of `blocks_of`, (T, blocks) and (T,) int32. None: the function
            computes the pairs if they save time.
        pair_count: number of pairs over all taps; only the cost depends on this number. None: M, the minimum.

    Returns:
        (M, O), contiguous, of the inputs' dtype. Products are added up in float32 (float64 for float64). float32
        products use TF32 only if PyTorch allows TF32 for convolutions. Results are deterministic.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match or, on a CPU, a table is wrong.
        MissingExtraError: the tensors are on a GPU, and Triton is not installed.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    _check(features, weight, bias, neighbours, reverse, order, reverse_order, pairs)
    if pair_count is not None and (not isinstance(pair_count, (int, torch.SymInt)) or pair_count < 0):
        raise ValueError(f"sparse_conv: pair_count must be None or a number of pairs, got {pair_count!r}")
    features, weight, bias = cast_by_autocast(features, weight, bias)
    check_same_dtype("sparse_conv", "features", features, "cast one, or use autocast", weight=weight, bias=bias)
    no_tangents("sparse_conv", features, weight, bias, instead=PLAIN)
    listed, counts = (None, None) if pairs is None else pairs
    return _sparse_conv(
        features, weight, bias, neighbours, reverse, order, reverse_order, listed, counts,
        -1 if pair_count is None else pair_count,
    )  # fmt: skip


@repeated_rows(FIRST, NONE, NONE, FIRST, FIRST, LAST, LAST, LAST, NONE)
def conv_of_rulebook(
    features: Tensor, weight: Tensor, bias: Tensor | None, neighbours: Tensor | None, reverse: Tensor | None,
    order: Tensor | None, reverse_order: Tensor | None, listed: Tensor | None, counts: Tensor | None,
) -> Tensor:  # fmt: skip
    """Call `sparse_conv` with the tables of one rulebook; tables of one rulebook have matching sizes. `listed` and
    `counts` are the rulebook's pairs.

    After a few calls that differ only in values and in numbers of rows, C++ repeats such calls without Python
    (`rooftop.launch.repeated_calls`).
    """
    pairs = None if listed is None or counts is None else (listed, counts)
    return sparse_conv(
        features, weight, bias, neighbours, reverse, order=order, reverse_order=reverse_order, pairs=pairs
    )


def _check(
    features: Tensor, weight: Tensor, bias: Tensor | None, neighbours: Tensor | None, reverse: Tensor | None,
    order: Tensor | None, reverse_order: Tensor | None, pairs: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    if pairs is not None and (not isinstance(pairs, (tuple, list)) or len(pairs) != 2):
        raise TypeError("sparse_conv: pairs must be a tuple of two tensors: the lists of all taps, and their lengths")
    listed, counts = (None, None) if pairs is None else pairs
    check_tensors("sparse_conv", FLOATS, ("bias",), features=features, weight=weight, bias=bias)
    beside = ("features", features)
    without = ("neighbours", "reverse") if _is_table(order) else ("reverse",)
    check_tensors("sparse_conv", TABLE, without, beside, neighbours=neighbours, reverse=reverse)
    for argument, each in (("order", order), ("reverse_order", reverse_order)):
        check_tensors("sparse_conv", TABLE if _is_table(each) else ORDER, (argument,), beside, **{argument: each})
    if pairs is not None:
        check_tensors("sparse_conv", TABLE, (), beside, **{"pairs[0]": listed, "pairs[1]": counts})
    _check_shapes(features, weight, bias, neighbours, reverse, order, reverse_order, listed, counts)


def _check_shapes(
    features: Tensor, weight: Tensor, bias: Tensor | None, neighbours: Tensor | None, reverse: Tensor | None,
    order: Tensor | None, reverse_order: Tensor | None, listed: Tensor | None, counts: Tensor | None,
) -> None:  # fmt: skip
    if features.dim() != 2 or weight.dim() < 3 or weight.shape[-1] != features.shape[1]:
        raise ValueError(
            "sparse_conv: expected features (N, C) and weight (O, *kernel, C), "
            f"got {tuple(features.shape)} and {tuple(weight.shape)}"
        )
    sites, taps = features.shape[0], math.prod(weight.shape[1:-1])
    if taps == 0:
        raise ValueError(f"sparse_conv: expected at least one tap, got weight {tuple(weight.shape)}")
    if neighbours is not None and (neighbours.dim() != 2 or neighbours.shape[1] != taps):
        raise ValueError(
            f"sparse_conv: expected neighbours (M, {taps}), a column for each tap of weight {tuple(weight.shape)}, "
            f"got {tuple(neighbours.shape)}"
        )
    rows = neighbours.shape[0] if neighbours is not None else row_count(neighbours, order)
    # The plan need not record the comparisons below as conditions, as it would for a `Count`: C++ uses the plan only in
    # calls in which the same numbers of rows are equal.
    if type(rows) is Count:
        rows = int(rows)
    for count in (rows, sites):  # one after the other, because max() fails for sizes that depend on data
        if count > MAX_ROWS:
            raise ValueError(f"sparse_conv: {count} rows exceed the range of int32: split the batch")
    check_shape("sparse_conv", "bias", bias, (weight.shape[0],))
    check_shape("sparse_conv", "reverse", reverse, (sites, taps))
    if order is not None:
        check_shape("sparse_conv", "order", order, _order_shape(order, rows, taps))
    if reverse_order is not None:
        check_shape("sparse_conv", "reverse_order", reverse_order, _order_shape(reverse_order, sites, taps))
    check_shape("sparse_conv", "pairs[1]", counts, (taps,))
    if listed is not None and listed.dim() == 2 and has_table(order):
        check_shape("sparse_conv", "pairs[0]", listed, (taps, -(-rows // BLOCK_ROWS)))
    elif listed is not None and (listed.dim() != 3 or tuple(listed.shape[:2]) != (2, taps)):
        raise ValueError(f"sparse_conv: expected pairs[0] of shape (2, {taps}, P) for any P, got {tuple(listed.shape)}")
    if (
        reverse is None
        and not has_table(reverse_order)
        and rows != sites
        and features.requires_grad
        and torch.is_grad_enabled()
    ):
        raise ValueError(
            f"sparse_conv: a convolution from {sites} sites to {rows} results is not submanifold: give reverse=, which "
            "the gradient of features needs"
        )


def _is_table(order: Any) -> bool:
    return isinstance(order, Tensor) and has_table(order)


def _order_shape(order: Tensor, rows: int, taps: int) -> tuple[int, ...]:
    """The expected shape of `order`, which is either a sorted table or only an order."""
    return (1 + -(-taps // 32) + taps, rows) if has_table(order) else (rows,)
