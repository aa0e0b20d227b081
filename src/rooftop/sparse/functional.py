"""Sparse convolution of 1 to 4 dimensions as functions of plain tensors.

    features, indices, shape = strided_conv(features, indices, weight, spatial_shape=[64, 64], batch_size=2, stride=2)

`subm_conv`, `strided_conv` and `transposed_conv` build a rulebook and compute with it. `convolve` takes an existing
rulebook. Like spconv's functions, `indice_conv`, `indice_subm_conv` and `indice_inverse_conv` take pairs from
`get_indice_pairs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.kernels import sparse_conv
from rooftop.kernels.operands.autocasting import cast_by_autocast
from rooftop.kernels.sites.launches import has_table
from rooftop.kernels.sites.sparse_convs import conv_of_rulebook
from rooftop.sparse.geometries import PerDimension, geometry
from rooftop.sparse.rulebook import Rulebook, build_rulebook, get_indice_pairs
from rooftop.sparse.table_orders import by_kernels
from rooftop.sparse.tensor import SparseConvTensor

__all__ = [
    "convolve",
    "get_indice_pairs",
    "indice_conv",
    "indice_inverse_conv",
    "indice_subm_conv",
    "sparse_add",
    "strided_conv",
    "subm_conv",
    "transposed_conv",
]


# ---- with a rulebook -------------------------------------------------------------------------------------------


def convolve(features: Tensor, weight: Tensor, bias: Tensor | None, rulebook: Rulebook, groups: int = 1) -> Tensor:
    """Compute the convolution that a rulebook describes: outputs (O, out) from features (N, in).

    If gradients are needed, the tables for gradients are computed once for all layers that share the rulebook.

    Args:
        features: (N, in), bfloat16, float16, float32 or float64.
        weight: (out, *kernel, in / groups), in the dtype of features.
        bias: (out,), in the dtype of features.
        rulebook: rulebook of N inputs. An inverse convolution needs the `swapped()` rulebook of the convolution that it
            inverts.
        groups: number of channel groups, each with its own part of the weight.

    Raises:
        TypeError, ValueError, MissingExtraError, NotImplementedError: as `rooftop.kernels.sparse_conv`.
        ValueError: groups do not divide the channels, or the number of rows of features is wrong.
    """
    if features.shape[0] != rulebook.in_indices.shape[0]:
        raise ValueError(
            f"expected features with one row for each of the rulebook's {rulebook.in_indices.shape[0]} inputs, got "
            f"{tuple(features.shape)}"
        )
    features, weight, bias = cast_by_autocast(features, weight, bias)
    records = torch.is_grad_enabled()
    kernels = by_kernels(features) and features.dtype != torch.float64
    of_features, of_weight = records and features.requires_grad, records and weight.requires_grad
    table, reached = rulebook.table, rulebook.reached if of_features else None
    order = table.order if kernels else None
    reverse_order = reached.order if kernels and reached is not None else None
    pairs = table.pairs if kernels and of_weight else None
    neighbours = None if has_table(order) else table.rows()
    reverse = None if reached is None or has_table(reverse_order) else reached.rows()
    listed, counts = (None, None) if pairs is None else pairs
    found = [
        conv_of_rulebook(each, matrices, some, neighbours, reverse, order, reverse_order, listed, counts)
        for each, matrices, some in by_group(features, weight, bias, groups)
    ]
    return found[0] if groups == 1 else torch.cat(found, 1)


def by_group(
    features: Tensor, weight: Tensor, bias: Tensor | None, groups: int
) -> list[tuple[Tensor, Tensor, Tensor | None]]:
    """Return the features, weight and bias of each group of channels."""
    if groups == 1:
        return [(features, weight, bias)]
    channels, out_channels = features.shape[1], weight.shape[0]
    if groups < 1 or channels % groups or out_channels % groups:
        raise ValueError(f"groups must divide {channels} and {out_channels} channels, got {groups}")
    biases = [None] * groups if bias is None else bias.chunk(groups)
    return list(zip(features.chunk(groups, 1), weight.chunk(groups), biases, strict=True))


def linear(features: Tensor, weight: Tensor, bias: Tensor | None, groups: int = 1) -> Tensor:
    """Compute `convolve` for kernel size 1 and unchanged sites, as a matrix product without a rulebook.

    Raises:
        TypeError: the dtypes differ and autocast is off.
    """
    if features.dtype != weight.dtype and not torch.is_autocast_enabled(features.device.type):
        raise TypeError(f"features is {features.dtype}, weight {weight.dtype}: cast one, or use autocast")
    found = [
        F.linear(each, matrices.flatten(1), some) for each, matrices, some in by_group(features, weight, bias, groups)
    ]
    return found[0] if groups == 1 else torch.cat(found, 1)


# ---- from sites ------------------------------------------------------------------------------------------------


def subm_conv(
    features: Tensor,
    indices: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    spatial_shape: Sequence[int],
    batch_size: int,
    dilation: PerDimension = 1,
    groups: int = 1,
) -> Tensor:
    """Compute a submanifold convolution. Returns features (N, out) on the same sites.

    Args:
        features, weight, bias, groups: as in `convolve`. The kernel must be odd in each dimension.
        indices: (N, 1 + dims) int32 or int64, batch first. Rows of -1 are not sites.
        spatial_shape, batch_size: size of the grid, and number of batch elements.
        dilation: one value for all dimensions or one per dimension.

    Raises:
        MissingExtraError, TypeError, ValueError: as `build_rulebook` and `convolve`.
    """
    kernel = tuple(weight.shape[1:-1])
    shape = geometry(batch_size, spatial_shape, kernel, dilation=dilation, subm=True)
    return convolve(features, weight, bias, build_rulebook(indices, shape), groups)


def strided_conv(
    features: Tensor,
    indices: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    spatial_shape: Sequence[int],
    batch_size: int,
    stride: PerDimension = 1,
    padding: PerDimension = 0,
    dilation: PerDimension = 1,
    groups: int = 1,
    num_out_act_bound: int | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Compute a regular convolution, whose outputs are all sites that an input reaches. Returns features (O, out),
    indices (O, 1 + dims) and the output grid.

    Args:
        features, indices, weight, bias, spatial_shape, batch_size, dilation, groups: as in `subm_conv`, with any
            kernel.
        stride, padding: as in `torch.nn.functional.conv3d`.
        num_out_act_bound: O, the fixed number of output rows; see `build_rulebook`. None: O is the number of output
            sites, for which the host waits.

    Raises:
        MissingExtraError, TypeError, ValueError: as `build_rulebook` and `convolve`.
    """
    shape = geometry(batch_size, spatial_shape, tuple(weight.shape[1:-1]), stride, padding, dilation)
    rulebook = build_rulebook(indices, shape, num_out_act_bound)
    return convolve(features, weight, bias, rulebook, groups), rulebook.out_indices, rulebook.out_shape


def transposed_conv(
    features: Tensor,
    indices: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    spatial_shape: Sequence[int],
    batch_size: int,
    stride: PerDimension = 1,
    padding: PerDimension = 0,
    output_padding: PerDimension = 0,
    dilation: PerDimension = 1,
    groups: int = 1,
    num_out_act_bound: int | None = None,
) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Compute a transposed convolution, whose outputs are all sites that an input reaches. Returns features (O, out),
    indices (O, 1 + dims) and the output grid.

    Arguments and errors are those of `strided_conv`. `output_padding` is as in `torch.nn.functional.conv_transpose3d`.
    """
    kernel = tuple(weight.shape[1:-1])
    shape = geometry(batch_size, spatial_shape, kernel, stride, padding, dilation, output_padding, transpose=True)
    rulebook = build_rulebook(indices, shape, num_out_act_bound)
    return convolve(features, weight, bias, rulebook, groups), rulebook.out_indices, rulebook.out_shape


# ---- from pairs ------------------------------------------------------------------------------------------------


def indice_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute a convolution from its pairs: outputs (num_activate_out, out) from features (N, in).

    Args:
        features, filters, bias: as features, weight and bias in `convolve`.
        indice_pairs: (2, K, P) int32, from `get_indice_pairs`: input rows and output rows of each offset's pairs.
            -1 fills each list up to the length P.
        indice_pair_num: (K,) int32, the number of pairs at each offset, from `get_indice_pairs`.
        num_activate_out: number of output rows.

    Raises:
        TypeError, ValueError, MissingExtraError, NotImplementedError: as `rooftop.kernels.sparse_conv`.
    """
    inputs, outputs = indice_pairs.unbind(0)
    neighbours = _table(inputs, outputs, num_activate_out)
    reverse = _table(outputs, inputs, len(features)) if features.requires_grad and torch.is_grad_enabled() else None
    return sparse_conv(features, filters, bias, neighbours, reverse, pairs=(indice_pairs, indice_pair_num))


def indice_subm_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute `indice_conv` for a submanifold convolution, whose output sites are the input sites.

    Raises:
        ValueError: num_activate_out is not N; or as in `indice_conv`.
    """
    if num_activate_out != len(features):
        raise ValueError(
            f"a submanifold convolution has as many outputs as inputs: num_activate_out must be {len(features)}, got "
            f"{num_activate_out}"
        )
    return indice_conv(features, filters, indice_pairs, indice_pair_num, num_activate_out, bias)


def indice_inverse_conv(
    features: Tensor,
    filters: Tensor,
    indice_pairs: Tensor,
    indice_pair_num: Tensor,
    num_activate_out: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Compute the inverse of `indice_conv`: each pair leads from its output back to its input. `num_activate_out` is
    the number of inputs of the convolution that is inverted."""
    return indice_conv(features, filters, indice_pairs.flip(0), indice_pair_num, num_activate_out, bias)


def _table(values: Tensor, rows: Tensor, count: int) -> Tensor:
    """Make a table (count, K) int32 from `values` and `rows`, both (K, P): column k has `values[k]` at the row numbers
    `rows[k]`, and -1 elsewhere."""
    offsets = len(rows)
    table = values.new_full((count + 1, offsets), -1)  # an additional row collects the entries that are not pairs
    at = torch.where(rows >= 0, rows, count).long()
    return table.scatter_(0, at.t(), values.t())[:count]


# ---- sums ------------------------------------------------------------------------------------------------------


def sparse_add(*tensors: SparseConvTensor) -> SparseConvTensor:
    """Add sparse tensors. The result contains each site of any of the tensors once, in row-major order of (batch,
    *coordinates), and no rulebooks. The host waits for the device.

    For tensors on the same sites, `x.replace_feature(x.features + y.features)` is faster.

    Raises:
        TypeError: an argument is not a `SparseConvTensor`.
        ValueError: there are no tensors, or their grids, batch sizes or channels differ.
    """
    for each in tensors:
        if not isinstance(each, SparseConvTensor):
            raise TypeError(f"sparse_add takes rooftop.sparse.SparseConvTensors, got {type(each).__name__}")
    if not tensors:
        raise ValueError("sparse_add needs at least one tensor, got none")
    first, *others = tensors
    for other in others:
        if (other.spatial_shape, other.batch_size) != (first.spatial_shape, first.batch_size):
            raise ValueError(f"sparse_add needs tensors with the same grid and batch size, got {first} and {other}")
        if other.features.shape[1] != first.features.shape[1]:
            raise ValueError(f"sparse_add needs tensors with the same number of channels, got {first} and {other}")
    features = torch.cat([each.features for each in tensors])
    indices = torch.cat([each.indices for each in tensors])
    return SparseConvTensor(features, indices, first.spatial_shape, first.batch_size).coalesce("sum")
