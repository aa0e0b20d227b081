"""Pooling over the batch elements of a batch of sites: the maximum, or the mean, of all sites of each.

What spconv's SparseGlobalMaxPool and SparseGlobalAvgPool are for. Bound by memory: features are read once. Each program
reduces a share of the rows to one row for each batch element that it meets; where rows are sorted by batch element, as
those of a rulebook are, that is one or two. A reduction over programs follows. Nothing waits for the GPU, no atomics:
the same bits each time.

The gradient of a maximum is shared equally by all sites that it is taken from, as that of `torch.amax`, so that it does
not depend on the order of rows. (spconv goes through the batch elements in Python, and its mean gives one channel.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_tensors
from rooftop.kernels.operands.dtypes import INDICES, accumulator_dtype
from rooftop.kernels.operands.launch_data import power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.sites.sparse_pools import check_features
from rooftop.kernels.sites.tables import GLOBAL
from rooftop.launch.operators import differentiable, in_pytorch, no_second_derivative, no_tangents, operator
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, processors, require_triton

# ---- reference -------------------------------------------------------------------------------------------------


def sparse_global_pool_reference(
    features: Tensor, batch: Tensor, batch_size: int, average: bool
) -> tuple[Tensor, Tensor]:
    """(B, C) and how many sites each batch element has, (B,) int32: each by itself; means are added up in float64.

    On a GPU it waits for the GPU, to know how many there are.
    """
    element = _elements(batch, batch_size)
    counts = _counts(element, batch_size)
    lengths = counts.tolist()
    ordered = features.index_select(0, element.sort(stable=True).indices)
    *parts, _ = ordered.split([*lengths, len(batch) - sum(lengths)])  # the last are no sites
    out = features.new_zeros(batch_size, features.shape[1])
    for row, part in zip(out, parts, strict=True):
        if len(part):
            row.copy_(part.sum(0, dtype=torch.float64) / len(part) if average else part.amax(0))
    return out, counts


def _elements(batch: Tensor, batch_size: int) -> Tensor:
    """int64, and batch_size for rows that are no sites."""
    return torch.where((batch >= 0) & (batch < batch_size), batch.long(), batch_size)


def _counts(element: Tensor, batch_size: int) -> Tensor:
    """How many sites each batch element has, (B,) int32."""
    return (element[:, None] == torch.arange(batch_size, device=element.device)).sum(0, dtype=torch.int32)


# ---- implementation --------------------------------------------------------------------------------------------


def _forward(features: Tensor, batch: Tensor, batch_size: int, average: bool) -> tuple[Tensor, Tensor]:
    sites, channels = features.shape
    if features.numel() == 0:
        return features.new_zeros(batch_size, channels), _counts(_elements(batch, batch_size), batch_size)
    if by_reference(features):
        return sparse_global_pool_reference(features, batch, batch_size, average)
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_pools import sparse_global_pool_parts

    features, batch = features.contiguous(), batch.contiguous()
    columns = min(GLOBAL.columns, power_of_two(channels))
    column_tiles = -(-channels // columns)
    programs = -(-GLOBAL.programs_per_sm * processors(features) // column_tiles)
    share = max(GLOBAL.share, -(-sites // programs))
    grid = (-(-sites // share), column_tiles)
    nothing = 0.0 if average else -torch.inf
    parts = torch.full((grid[0], batch_size, channels), nothing, dtype=torch.float32, device=features.device)
    counts = torch.zeros(grid[0], batch_size, dtype=torch.int32, device=features.device)
    launch(
        sparse_global_pool_parts, grid, features.device, features, batch, parts, counts, sites, batch_size, share,
        AVERAGE=average, WIDE=features.numel() + (1 << 20) >= 1 << 31, CHANNELS=channels,
        ROWS=max(1, GLOBAL.tile_bytes // features.element_size() // columns), COLUMNS=columns, num_warps=GLOBAL.warps,
    )  # fmt: skip
    totals = counts.sum(0, dtype=torch.int32)
    many = totals[:, None]
    if average:
        return (parts.sum(0) / many.clamp(min=1)).to(features.dtype), totals
    return torch.where(many > 0, parts.amax(0), 0.0).to(features.dtype), totals


def _backward(
    dy: Tensor, y: Tensor | None, features: Tensor | None, counts: Tensor, batch: Tensor, batch_size: int
) -> Tensor:
    """The gradient (N, C); y and features are those of a maximum, None of a mean."""
    inside = accumulator_dtype(dy.dtype)
    element = _elements(batch, batch_size)
    many = counts[:, None].clamp(min=1).to(inside)
    if y is None or features is None:
        return _of_rows(dy.to(inside) / many, element).to(dy.dtype)
    best = _of_rows(y, element)
    taken = (features == best) | (features.isnan() & best.isnan())
    ties = (_forward(taken.to(inside), batch, batch_size, average=True)[0] * many).round()  # how many, from their mean
    shares = _of_rows(dy.to(inside) / ties.clamp(min=1), element)
    return torch.where(taken, shares, 0.0).to(dy.dtype)


def _of_rows(values: Tensor, element: Tensor) -> Tensor:
    """For each row what its batch element has, (B, C) to (N, C); 0 for rows that are no sites."""
    return torch.cat([values, values.new_zeros(1, values.shape[1])]).index_select(0, element)


# ---- registration ----------------------------------------------------------------------------------------------


@operator("sparse_global_pool")
def _sparse_global_pool(features: Tensor, batch: Tensor, batch_size: int, average: bool) -> tuple[Tensor, Tensor]:
    """The result (B, C), and how many sites each batch element has, (B,) int32."""
    _check_values(_name(average), batch, batch_size)
    return _forward(features, batch, batch_size, average)


@torch.library.register_fake("rooftop::sparse_global_pool")
def _(features: Tensor, batch: Tensor, batch_size: int, average: bool) -> tuple[Tensor, Tensor]:
    return features.new_empty(batch_size, features.shape[1]), batch.new_empty(batch_size, dtype=torch.int32)


def _decomposed(features: Tensor, batch: Tensor, batch_size: int, average: bool) -> tuple[Tensor, Tensor]:
    """Without the number of sites of each element, for which the reference waits."""
    element = _elements(batch, batch_size)
    counts, channels = _counts(element, batch_size), features.shape[1]
    if average:
        total = features.new_zeros((batch_size + 1, channels), dtype=torch.float64)
        total = total.index_add(0, element, features.double())[:batch_size]
        return (total / counts[:, None].clamp(min=1)).to(features.dtype), counts
    places = element[:, None].expand(features.shape)
    best = features.new_zeros(batch_size + 1, channels)  # of an element without sites
    return best.scatter_reduce(0, places, features, "amax", include_self=False)[:batch_size], counts


in_pytorch("sparse_global_pool", _decomposed)


@operator("sparse_global_pool_backward")
def _sparse_global_pool_backward(
    dy: Tensor, y: Tensor | None, features: Tensor | None, counts: Tensor, batch: Tensor, batch_size: int
) -> Tensor:
    return _backward(dy, y, features, counts, batch, batch_size)


@torch.library.register_fake("rooftop::sparse_global_pool_backward")
def _(dy: Tensor, y: Tensor | None, features: Tensor | None, counts: Tensor, batch: Tensor, batch_size: int) -> Tensor:
    return dy.new_empty(batch.shape[0], dy.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    features, batch, batch_size, average = inputs
    y, counts = output
    ctx.set_materialize_grads(False)  # no zeros for the counts
    ctx.save_for_backward(*((None, None) if average else (y, features)), counts, batch)
    ctx.batch_size = batch_size


def _differentiate(ctx: Any, dy: Tensor | None, dcounts: None) -> tuple[Tensor | None, None, None, None]:
    if dy is None:
        return None, None, None, None
    return _sparse_global_pool_backward(dy, *ctx.saved_tensors, ctx.batch_size), None, None, None


INSTEAD = "torch.amax or torch.mean of each batch element"
differentiable("sparse_global_pool", _differentiate, _save)
differentiable("sparse_global_pool_backward", no_second_derivative("pooling over batch elements", INSTEAD))


@cost_of("rooftop::sparse_global_pool")
def _forward_cost(call: Call) -> Cost:
    """A comparison or a sum for each feature, and a division of a mean."""
    features, (out, counts) = call["features"], call.out
    flops = features.numel() + bool(call["average"]) * out.numel()
    read = distinct_bytes([features, call["batch"]])
    return Cost(read, distinct_bytes([out, counts]), {precision_of(out.dtype): flops} if flops else {})


@cost_of("rooftop::sparse_global_pool_backward")
def _backward_cost(call: Call) -> Cost:
    """A division for each result; of a maximum also a comparison for each feature, and a sum of ties."""
    dy, features = call["dy"], call["features"]
    flops = dy.numel() + (0 if features is None else 2 * features.numel())
    read = distinct_bytes([dy, call["y"], features, call["counts"], call["batch"]])
    return Cost(read, distinct_bytes([call.out]), {precision_of(dy.dtype): flops} if flops else {})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def sparse_global_max_pool(features: Tensor, batch: Tensor, batch_size: int) -> Tensor:
    """The maximum of each batch element's sites, channel by channel.

    Args:
        features: (N, C), bfloat16, float16, float32 or float64.
        batch: (N,) int32 or int64, the batch element of each row, in any order; -1 for rows that are no sites. Batch
            elements that there are not raise on the CPU, and on a GPU are passed over.
        batch_size: batch elements; some may have no sites.

    Returns:
        (batch_size, C), of the features' dtype, also under autocast; 0 for a batch element without sites, NaN where one
        is. All that equal a maximum share its gradient equally.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes, devices, or, on a CPU, batch elements that do not fit.
        MissingExtraError: on a GPU, without Triton.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    return _pooled(features, batch, batch_size, average=False)


@recorded_whole
def sparse_global_avg_pool(features: Tensor, batch: Tensor, batch_size: int) -> Tensor:
    """The mean of each batch element's sites.

    Arguments, result and errors are those of `sparse_global_max_pool`. Added up in float32 on a GPU, else in float64.
    """
    return _pooled(features, batch, batch_size, average=True)


def _pooled(features: Tensor, batch: Tensor, batch_size: int, average: bool) -> Tensor:
    name = _name(average)
    check_features(name, features)
    check_tensors(name, INDICES, (), ("features", features), batch=batch)
    if batch.dim() != 1 or batch.shape[0] != features.shape[0]:
        raise ValueError(f"{name}: expected batch ({features.shape[0]},), a batch element of each row of features, "
                         f"got {tuple(batch.shape)}")  # fmt: skip
    if not isinstance(batch_size, (int, torch.SymInt)) or batch_size < 1:
        raise ValueError(f"{name}: batch_size must be a number of batch elements from 1 on, got {batch_size!r}")
    no_tangents(name, features, instead=INSTEAD)
    return _sparse_global_pool(features, batch, batch_size, average)[0]  # type: ignore[no-any-return]


def _check_values(name: str, batch: Tensor, batch_size: int) -> None:
    if batch.device.type != "cpu" or batch.numel() == 0:
        return
    least, most = (int(each) for each in batch.aminmax())
    if least < -1 or most >= batch_size:
        raise ValueError(
            f"{name}: batch must be from 0 to {batch_size - 1}, or -1 for rows that are no sites, got {least} to {most}"
        )


def _name(average: bool) -> str:
    return "sparse_global_avg_pool" if average else "sparse_global_max_pool"
