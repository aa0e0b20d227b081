"""Launch the kernels of `triton_kernels/sparse_pools.py`: pooling in windows, and over whole batch elements."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels.operands.launch_data import Constants, is_wide, power_of_two
from rooftop.kernels.sites import tables
from rooftop.kernels.sites.tables import PoolConfig
from rooftop.launch.triton_launch import launch, processors, require_triton


def pooled(features: Tensor, neighbours: Tensor, out: Tensor, counts: Tensor, average: bool) -> None:
    """Compute `out` (M, C) from features (N, C) and neighbours (M, T). For a mean, also compute `counts` (M,)."""
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_pools import sparse_pool_rows

    features, neighbours = features.contiguous(), neighbours.contiguous()
    rows, taps = neighbours.shape
    grid, tile = _tile(tables.POOL_FORWARD, rows, features, taps)
    tensors = (features, neighbours, out, counts)
    wide = is_wide(features, neighbours, out)
    launch(
        sparse_pool_rows, grid, features.device, *tensors, features.shape[0], rows, AVERAGE=average, WIDE=wide, **tile
    )  # fmt: skip


def pooled_backward(
    dy: Tensor, y: Tensor | None, features: Tensor | None, counts: Tensor, table: Tensor, dfeatures: Tensor,
    mirrored: bool,
) -> None:  # fmt: skip
    """Compute dfeatures (N, C) from the reverse table (N, T). `mirrored`: `table` is the forward table, and the reverse
    table is the forward table with its taps in reverse order.
    """
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_pools import sparse_pool_gradient

    table, dy = table.contiguous(), dy.contiguous()
    features = None if features is None else features.contiguous()
    sites = dfeatures.shape[0]
    grid, tile = _tile(tables.POOL_BACKWARD, sites, dy, table.shape[1])
    launch(
        sparse_pool_gradient, grid, dy.device, dy, y, features, counts, table, dfeatures, sites, dy.shape[0],
        AVERAGE=y is None, MIRRORED=mirrored, WIDE=is_wide(dy, table, dfeatures), **tile,
    )  # fmt: skip


def pooled_parts(features: Tensor, batch: Tensor, batch_size: int, average: bool) -> tuple[Tensor, Tensor]:
    """Compute maxima or sums over the sites of each batch element, (parts, B, C) float32, separately for each part of
    the rows. Also compute the number of sites of each batch element in each part, (parts, B).
    """
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_pools import sparse_global_pool_parts

    features, batch = features.contiguous(), batch.contiguous()
    (sites, channels), config = features.shape, tables.GLOBAL
    columns = min(config.columns, power_of_two(channels))
    column_tiles = -(-channels // columns)
    programs = -(-config.programs_per_sm * processors(features) // column_tiles)
    share = max(config.share, -(-sites // programs))
    grid = (-(-sites // share), column_tiles)
    nothing = 0.0 if average else -torch.inf
    parts = torch.full((grid[0], batch_size, channels), nothing, dtype=torch.float32, device=features.device)
    counts = torch.zeros(grid[0], batch_size, dtype=torch.int32, device=features.device)
    launch(
        sparse_global_pool_parts, grid, features.device, features, batch, parts, counts, sites, batch_size, share,
        AVERAGE=average, WIDE=is_wide(features), CHANNELS=channels,
        ROWS=max(1, config.tile_bytes // features.element_size() // columns), COLUMNS=columns, num_warps=config.warps,
    )  # fmt: skip
    return parts, counts


def _tile(config: PoolConfig, rows: int, x: Tensor, taps: int) -> tuple[tuple[int], Constants]:
    """Return the grid and the constants of a kernel whose tiles cover `rows` rows and all columns of x."""
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
