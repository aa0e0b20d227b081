"""Launch the Triton kernels of embeddings and of trilinear interpolation."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels.lookups import tables
from rooftop.kernels.lookups.tables import CornersConfig
from rooftop.kernels.operands.launch_data import Constants, power_of_two
from rooftop.kernels.operands.strided_rows import unit
from rooftop.launch.triton_launch import launch, require_triton

# ---- embeddings ----------------------------------------------------------------------------------------------------


def gather(input: Tensor, weight: Tensor) -> Tensor:
    """Gather the rows of weight (V, D) whose numbers are in `input`. The size of a row must be a multiple of
    16 bytes.
    """
    require_triton()
    from rooftop.kernels.lookups.triton_kernels.embeddings import gather_rows

    rows, width = weight.shape
    result = torch.empty((*input.shape, width), dtype=weight.dtype, device=weight.device)
    whole_lines = weight.stride(0) * weight.element_size() % 128 == 0
    config = tables.OF_LINES if whole_lines else tables.OF_ANY
    columns = min(config.columns, power_of_two(width))
    grid = (-(-input.numel() // config.rows), -(-width // columns))
    sizes = (input.numel(), width, rows, weight.stride(0))
    tile = {"ROWS": config.rows, "COLUMNS": columns, "num_warps": config.warps}
    tokens = input.reshape(-1).contiguous()  # reshape alone can return a strided view
    launch(gather_rows, grid, weight.device, weight, tokens, result, *sizes, debug=True, **tile)
    return result


def add_rows(dy: Tensor, tokens: Tensor, rows: int, padding: int) -> Tensor:
    """For each token, sum the rows of dy (N, D) at the token's positions in tokens (N,). Returns (rows, D)."""
    table = torch.zeros(rows, dy.shape[1], dtype=dy.dtype, device=dy.device)
    if dy.numel() == 0 or rows == 0:
        return table
    require_triton()
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    add = _add_few if tokens.numel() <= tables.FEW.most else _add_sorted
    add(table, dy, tokens, padding)
    return table


def _add_few(table: Tensor, dy: Tensor, tokens: Tensor, padding: int) -> None:
    """Sum each token's rows of dy, for few tokens: each program finds and adds the rows of one token."""
    from rooftop.kernels.lookups.triton_kernels.embeddings import add_equal

    (rows, width), items, config = table.shape, tokens.numel(), tables.FEW
    columns = min(config.columns, power_of_two(width))
    sizes, tile = (items, width, rows, padding, dy.stride(0)), {"ITEMS": config.items, "COLUMNS": columns}
    grid = (items, -(-width // columns))
    launch(add_equal, grid, dy.device, dy, tokens.contiguous(), table, *sizes, **tile, num_warps=config.warps)


def _add_sorted(table: Tensor, dy: Tensor, tokens: Tensor, padding: int) -> None:
    """Sum each token's rows of dy, for many tokens: sort the tokens, then add the rows in each run of equal tokens."""
    from rooftop.kernels.lookups.triton_kernels.embeddings import add_runs

    (rows, width), runs = table.shape, tables.RUNS
    if rows < 1 << 31:
        tokens = tokens.to(torch.int32)  # half the bytes to sort
    ordered, order = torch.sort(tokens, stable=True)
    values, stride, places = dy, dy.stride(0), order
    columns = min(runs.columns, power_of_two(width))
    tile = {"CHUNK": runs.chunk, "AHEAD": runs.ahead, "COLUMNS": columns, "num_warps": runs.warps}
    while True:
        items = ordered.numel()
        chunks = -(-items // runs.chunk)
        sums = torch.empty(2 * chunks, width, dtype=torch.float32, device=dy.device)
        sum_tokens = torch.empty(2 * chunks, dtype=ordered.dtype, device=dy.device)
        tensors, sizes = (values, places, ordered, table, sums, sum_tokens), (items, width, rows, padding, stride)
        grid, indirect = (chunks, -(-width // columns)), values is dy
        launch(add_runs, grid, dy.device, *tensors, *sizes, INDIRECT=indirect, **tile)
        if chunks == 1:
            return
        values, stride, places, ordered = sums, width, order, sum_tokens


# ---- trilinear interpolation ---------------------------------------------------------------------------------------


def interpolate(features: Tensor, points: Tensor) -> Tensor:
    """Interpolate features (B, 8, C) at points (B, 3), both contiguous. Returns (B, C)."""
    require_triton()
    from rooftop.kernels.lookups.triton_kernels.interpolations import trilinear_forward

    count, _, channels = features.shape
    out = features.new_empty(count, channels)
    if out.numel():
        block = block_of(tables.CORNERS_FORWARD, channels, features.element_size())
        grid = (-(-count // block["POINTS"]) * -(-channels // block["CHANNELS"]),)
        arguments = (features, points, out, count, channels // block["UNIT"])
        launch(trilinear_forward, grid, features.device, *arguments, **block)
    return out


def interpolate_backward(
    gradient: Tensor, features: Tensor, points: Tensor, dfeatures: Tensor, dpoints: Tensor, mask: list[bool]
) -> None:
    """Write the gradients that `mask` requests. All tensors must be contiguous, and none may be empty."""
    require_triton()
    from rooftop.kernels.lookups.triton_kernels.interpolations import trilinear_backward

    count, _, channels = features.shape
    block = block_of(tables.CORNERS_BACKWARD, channels, features.element_size())
    grid = (-(-count // block["POINTS"]),)
    arguments = (gradient, features, points, dfeatures, dpoints, count, channels // block["UNIT"])
    launch(trilinear_backward, grid, features.device, *arguments, FEATURES=mask[0], COORDINATES=mask[1], **block)


def block_of(table: tuple[CornersConfig, ...], channels: int, element_bytes: int) -> Constants:
    """Launch parameters of the interpolation for `channels` channels."""
    config = next(config for config in table if channels * element_bytes <= config.row_bytes)
    width = min(config.channel_bytes // element_bytes, power_of_two(channels))
    points = max(1, config.block_bytes // element_bytes // width)
    even = channels % width == 0
    return {"POINTS": points, "CHANNELS": width, "EVEN": even, "UNIT": unit(channels), "num_warps": config.warps}
