"""Pooling over sites: out[m] = the maximum, or the mean, of features[neighbours[m, t]] over the taps t that there are.

What spconv's SparseMaxPool and SparseAvgPool compute, by the table of neighbours that a rulebook has. Bound by memory.
A program has some rows and columns of the result and goes through the taps, with several rows of features on their way
at once. The mean divides by how many neighbours a result has, not by the size of the window.

The gradient goes the other way through the reverse table: each site adds up what its results give it, in the order of
the taps. Nothing is scattered, no atomics: the same bits each time. All sites that equal a maximum get its gradient, as
in spconv; PyTorch gives it to the first. So it does not depend on the order of rows.

Two things are not as in spconv 2.3, which is wrong there: its maximum is never below 0, and the gradient of its mean is
multiplied by the number of neighbours where it should be divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.operands.checks import check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import Constants, is_wide, power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.kernels.sites.neighbour_tables import check_neighbours, check_reverse
from rooftop.kernels.sites.tables import POOL_BACKWARD, POOL_FORWARD, PoolConfig
from rooftop.launch.operators import differentiable, in_pytorch, no_second_derivative, no_tangents, operator
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

MAX_ROWS = (1 << 31) - 1  # rows are numbered by int32

# ---- reference -------------------------------------------------------------------------------------------------


def sparse_max_pool_reference(features: Tensor, neighbours: Tensor) -> Tensor:
    """(M, C) from features (N, C) and neighbours (M, T), tap by tap; 0 where there are none."""
    rows, channels = neighbours.shape[0], features.shape[1]
    best = features.new_full((rows, channels), -torch.inf)
    for values, _ in _by_tap([features], neighbours, -torch.inf):
        best = torch.maximum(best, values[0])
    return torch.where(_counts(neighbours, features.shape[0])[:, None] > 0, best, 0.0)


def sparse_avg_pool_reference(features: Tensor, neighbours: Tensor) -> Tensor:
    """The mean in the same way; added up in float32, or float64 for float64."""
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
    """The gradient (N, C) from dy (M, C), how many neighbours the results have, (M,), and the reverse table (N, T)."""
    inside = accumulator_dtype(dy.dtype)
    total = torch.zeros(reverse.shape[0], dy.shape[1], dtype=inside, device=dy.device)
    shares = dy.to(inside) / counts.clamp(min=1).to(inside)[:, None]
    for values, _ in _by_tap([shares], reverse, 0.0):
        total += values[0]
    return total.to(dy.dtype)


def _by_tap(tensors: list[Tensor], table: Tensor, otherwise: float) -> Iterator[tuple[list[Tensor], Tensor]]:
    """For each tap the rows of the tensors that the table names, `otherwise` for none, and whether there is one."""
    count = tensors[0].shape[0]
    if count == 0:
        return
    for column in table.unbind(1):
        known = ((column >= 0) & (column < count))[:, None]
        row = column.clamp(0, count - 1)
        yield [torch.where(known, t.index_select(0, row), otherwise) for t in tensors], known


def _counts(neighbours: Tensor, sites: int) -> Tensor:
    """How many neighbours each result has, (M,) int32."""
    return ((neighbours >= 0) & (neighbours < sites)).sum(1, dtype=torch.int32)


# ---- launches --------------------------------------------------------------------------------------------------


def _tile(config: PoolConfig, rows: int, x: Tensor, taps: int) -> tuple[tuple[int], Constants]:
    """The grid and the constants of a kernel whose tiles are of so many rows and of the columns of x."""
    channels = x.shape[1]
    columns = min(config.columns, power_of_two(channels))
    height = max(1, config.tile_bytes // x.element_size() // columns)
    grid = (-(-rows // height) * -(-channels // columns),)
    constants: Constants = {
        "TAPS": taps,
        "CHANNELS": channels,
        "ROWS": height,
        "COLUMNS": columns,
        "AHEAD": min(config.ahead, taps),
        "num_warps": config.warps,
    }
    return grid, constants


# ---- implementations -------------------------------------------------------------------------------------------


def _forward(features: Tensor, neighbours: Tensor, average: bool) -> tuple[Tensor, Tensor]:
    """The result, and of the mean the number of neighbours."""
    (rows, taps), (sites, channels) = neighbours.shape, features.shape
    if by_reference(features):
        if average:
            return sparse_avg_pool_reference(features, neighbours), _counts(neighbours, sites)
        return sparse_max_pool_reference(features, neighbours), _no_counts(features)
    out = features.new_empty(rows, channels)
    counts = torch.empty(rows, dtype=torch.int32, device=features.device) if average else _no_counts(features)
    if features.numel() == 0:
        return out.zero_(), counts.zero_()
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_pools import sparse_pool_rows

    features, neighbours = features.contiguous(), neighbours.contiguous()
    grid, tile = _tile(POOL_FORWARD, rows, features, taps)
    tensors = (features, neighbours, out, counts)
    wide = is_wide(features, neighbours, out)
    launch(sparse_pool_rows, grid, features.device, *tensors, sites, rows, AVERAGE=average, WIDE=wide, **tile)
    return out, counts


def _backward(
    dy: Tensor, y: Tensor | None, features: Tensor | None, counts: Tensor, neighbours: Tensor, reverse: Tensor | None,
    sites: int,
) -> Tensor:  # fmt: skip
    """The gradient (N, C); y and features are those of a maximum, None of a mean."""
    if by_reference(dy):
        table = neighbours.flip(1) if reverse is None else reverse
        if y is None or features is None:
            return avg_pool_gradient_reference(dy, counts, table)
        return max_pool_gradient_reference(dy, y, features, table)
    dfeatures = dy.new_empty(sites, dy.shape[1])
    if dy.numel() == 0 or sites == 0:
        return dfeatures.zero_()
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_pools import sparse_pool_gradient

    table = (neighbours if reverse is None else reverse).contiguous()
    dy, features = dy.contiguous(), None if features is None else features.contiguous()
    grid, tile = _tile(POOL_BACKWARD, sites, dy, table.shape[1])
    launch(
        sparse_pool_gradient, grid, dy.device, dy, y, features, counts, table, dfeatures, sites, dy.shape[0],
        AVERAGE=y is None, MIRRORED=reverse is None, WIDE=is_wide(dy, table, dfeatures), **tile,
    )  # fmt: skip
    return dfeatures


def _no_counts(x: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.int32, device=x.device)


# ---- registration ----------------------------------------------------------------------------------------------


@operator("sparse_pool")
def _sparse_pool(features: Tensor, neighbours: Tensor, reverse: Tensor | None, average: bool) -> tuple[Tensor, Tensor]:
    """The result (M, C), and of a mean how many neighbours there are, (M,) int32. `reverse` is for the gradient."""
    check_neighbours(_name(average), features, neighbours)
    return _forward(features, neighbours, average)


@torch.library.register_fake("rooftop::sparse_pool")
def _(features: Tensor, neighbours: Tensor, reverse: Tensor | None, average: bool) -> tuple[Tensor, Tensor]:
    rows = neighbours.shape[0]
    return features.new_empty(rows, features.shape[1]), neighbours.new_empty(rows if average else 0)


def _decomposed(
    features: Tensor, neighbours: Tensor, reverse: Tensor | None, average: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    counts = _counts(neighbours, features.shape[0])
    if average:
        return sparse_avg_pool_reference(features, neighbours), counts
    return sparse_max_pool_reference(features, neighbours), counts[:0]


in_pytorch("sparse_pool", _decomposed)


@operator("sparse_pool_backward")
def _sparse_pool_backward(
    dy: Tensor, y: Tensor | None, features: Tensor | None, counts: Tensor, neighbours: Tensor, reverse: Tensor | None,
    sites: int,
) -> Tensor:  # fmt: skip
    check_reverse(_name(y is None), neighbours, reverse)
    return _backward(dy, y, features, counts, neighbours, reverse, sites)


@torch.library.register_fake("rooftop::sparse_pool_backward")
def _(
    dy: Tensor, y: Tensor | None, features: Tensor | None, counts: Tensor, neighbours: Tensor, reverse: Tensor | None,
    sites: int,
) -> Tensor:  # fmt: skip
    return dy.new_empty(sites, dy.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    features, neighbours, reverse, average = inputs
    y, counts = output
    ctx.set_materialize_grads(False)  # no zeros for the counts
    ctx.save_for_backward(*((None, None) if average else (y, features)), counts, neighbours, reverse)
    ctx.sites = features.shape[0]


def _differentiate(ctx: Any, dy: Tensor | None, dcounts: None) -> tuple[Tensor | None, None, None, None]:
    if dy is None:
        return None, None, None, None
    return _sparse_pool_backward(dy, *ctx.saved_tensors, ctx.sites), None, None, None


INSTEAD = "torch.nn.functional.max_pool3d or avg_pool3d on the dense grid"
differentiable("sparse_pool", _differentiate, _save)
differentiable("sparse_pool_backward", no_second_derivative("pooling over sites", INSTEAD))


@cost_of("rooftop::sparse_pool")
def _forward_cost(call: Call) -> Cost:
    """One operation for each result, the fewest that there can be, and the division of a mean; features, table once."""
    out, counts = call.out
    flops = (1 + bool(call["average"])) * out.numel()
    read = distinct_bytes([call["features"], call["neighbours"]])
    return Cost(read, distinct_bytes([out, counts]), {precision_of(out.dtype): flops} if flops else {})


@cost_of("rooftop::sparse_pool_backward")
def _backward_cost(call: Call) -> Cost:
    """A comparison or a division, and a sum, for each result; the tensors that are needed, and one table."""
    dy, flops = call["dy"], 2 * call["dy"].numel()
    table = call["neighbours"] if call["reverse"] is None else call["reverse"]
    read = distinct_bytes([dy, call["y"], call["features"], call["counts"], table])
    return Cost(read, distinct_bytes([call.out]), {precision_of(dy.dtype): flops} if flops else {})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def sparse_max_pool(features: Tensor, neighbours: Tensor, reverse: Tensor | None = None) -> Tensor:
    """The maximum of each result's neighbours, channel by channel.

    Args:
        features: (N, C), bfloat16, float16, float32 or float64.
        neighbours: (M, T) int32, the row of features that a result meets at a tap, -1 for none. Rows that there are not
            raise on the CPU, and on a GPU are read as none.
        reverse: (N, T) int32, the result that a row of features meets at a tap, -1 for none; for the gradient. None:
            that of a submanifold table, neighbours with the taps in the other order.

    Returns:
        (M, C), contiguous, of the features' dtype, also under autocast; 0 where a result has no neighbour, NaN where
        one is. All that equal the maximum get its gradient.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes, devices or, on a CPU, tables that do not fit.
        MissingExtraError: on a GPU, without Triton.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    return _pooled(features, neighbours, reverse, average=False)


@recorded_whole
def sparse_avg_pool(features: Tensor, neighbours: Tensor, reverse: Tensor | None = None) -> Tensor:
    """The mean of each result's neighbours: their sum by how many there are, not by the size of the window.

    Arguments, result and errors are those of `sparse_max_pool`. Added up in float32 (float64 for float64) in the order
    of the taps.
    """
    return _pooled(features, neighbours, reverse, average=True)


def _pooled(features: Tensor, neighbours: Tensor, reverse: Tensor | None, average: bool) -> Tensor:
    name = _name(average)
    _check(name, features, neighbours, reverse)
    no_tangents(name, features, instead=INSTEAD)
    return _sparse_pool(features, neighbours, reverse, average)[0]  # type: ignore[no-any-return]


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
        raise ValueError(f"{name}: {max(rows, sites)} rows are more than int32 can number: split the batch")
    check_shape(name, "reverse", reverse, (sites, taps))
    if reverse is None and rows != sites and features.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name}: from {sites} sites to {rows} results is no submanifold table: give reverse, which the gradient "
            "needs"
        )


def check_features(name: str, features: Tensor) -> None:
    """Raises for what is not (N, C) of floating point numbers."""
    check_tensors(name, FLOATS, features=features)
    if features.dim() != 2:
        raise ValueError(f"{name}: expected features (N, C), got {tuple(features.shape)}")
