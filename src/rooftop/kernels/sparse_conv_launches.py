"""How the kernels of sparse convolution are launched: tables of parameters, orders of rows, lists of pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.cost import matrix_precision
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

# ---- launch parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowsConfig:
    """The tile of `sparse_conv_rows` for up to `channels` channels of the result: rows, columns, channels of the
    operands at a time, warps, and stages of its pipeline."""

    channels: int
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class WeightConfig:
    """The tile of `sparse_conv_weight_gradient`: channels of the result and of the features, pairs at a time, warps,
    stages, and programs for each multiprocessor that parts of the pairs are made for."""

    outs: int
    ins: int
    depth: int
    warps: int
    stages: int
    programs_per_sm: int


ANY = 1 << 31

# Predicted, not measured: a tile gathers 128 bytes of a row at a time, 16 a thread. By ptxas for sm_90 (Triton 3.7)
# none of these spills, and those of 64 columns leave registers and shared memory for four programs on a
# multiprocessor, whose gathers hide each other's latency.
HALF = (
    RowsConfig(32, 128, 32, 32, 4, 3),
    RowsConfig(64, 128, 64, 64, 4, 3),
    RowsConfig(ANY, 128, 128, 64, 8, 3),
)
SINGLE = (RowsConfig(32, 64, 32, 32, 4, 3), RowsConfig(ANY, 64, 64, 32, 4, 3))
WEIGHT_HALF = WeightConfig(64, 64, 64, 4, 3, 8)
WEIGHT_SINGLE = WeightConfig(64, 64, 32, 4, 3, 8)
# Where tiles are fewer than multiprocessors, they are made shorter, down to these rows.
LEAST_ROWS = 32
# From so many rows on, those whose order is not given are sorted: below, a sort takes longer than what it saves.
SORTED_FROM = 1 << 16
MASK_ROWS, PAIR_ROWS, TABLE_WARPS = 64, 128, 4  # rows of a program that reads a table alone

Constants = dict[str, int | bool | str]


def rows_tile(rows: int, out_channels: int, channels: int, features: Tensor) -> Constants:
    """Launch parameters of `sparse_conv_rows` for M results of O channels, and C channels of the operands."""
    table = SINGLE if features.dtype == torch.float32 else HALF
    config = next(config for config in table if out_channels <= config.channels)
    columns = min(config.columns, _power_of_two(out_channels))
    height = config.rows
    while height > LEAST_ROWS and -(-rows // height) * -(-out_channels // columns) < processors(features):
        height //= 2
    return {
        "ROWS": height,
        "COLUMNS": columns,
        "DEPTH": min(config.depth, _power_of_two(channels)),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def weight_tile(out_channels: int, channels: int, taps: int, pairs: int, features: Tensor) -> tuple[Constants, int]:
    """Launch parameters of `sparse_conv_weight_gradient`, and into how many parts the pairs of a tap, at most `pairs`,
    are cut."""
    config = WEIGHT_SINGLE if features.dtype == torch.float32 else WEIGHT_HALF
    outs, ins = min(config.outs, _power_of_two(out_channels)), min(config.ins, _power_of_two(channels))
    programs = taps * -(-out_channels // outs) * -(-channels // ins)
    parts = min(-(-pairs // config.depth), -(-config.programs_per_sm * processors(features) // programs))
    tile: Constants = {
        "OUTS": outs,
        "INS": ins,
        "DEPTH": config.depth,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    return tile, max(1, parts)


def _power_of_two(channels: int) -> int:
    """At least as many; at least the 16 that a product of tiles takes."""
    return max(16, 1 << (channels - 1).bit_length())


# ---- tables ----------------------------------------------------------------------------------------------------


def neighbour_masks(neighbours: Tensor) -> Tensor:
    """(M, ceil(T / 32)) int32 of a table (M, T) int32: bit t % 32 of word t // 32 is set where row m has tap t."""
    rows, taps = neighbours.shape
    words = -(-taps // 32)
    masks = torch.zeros(rows, words, dtype=torch.int32, device=neighbours.device)
    if neighbours.device.type == "cpu" and not INTERPRETED:
        for tap in range(taps):
            masks[:, tap // 32] |= (neighbours[:, tap] >= 0).int() << tap % 32
        return masks
    require_triton()
    from rooftop.kernels.sparse_conv_kernels import neighbour_bits

    table = neighbours.contiguous()
    tile: Constants = {"ROWS": MASK_ROWS, "num_warps": TABLE_WARPS}
    launch(
        neighbour_bits, (-(-rows // MASK_ROWS),), table.device, table, masks, rows, TAPS=taps, WIDE=_is_wide(table),
        **tile,
    )  # fmt: skip
    return masks


def rows_by_mask(masks: Tensor) -> Tensor:
    """The order (M,) int32 in which rows with the same mask (M, words) stand side by side, and otherwise as before."""
    *others, last = masks.unbind(1)
    order = last.sort(stable=True).indices
    for word in reversed(others):
        order = order[word[order].sort(stable=True).indices]
    return order.to(torch.int32)


def pairs_of(neighbours: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    """The pairs of each tap of a table (M, T) of N sites: (2, T, min(M, N)) int32, first sites, then rows, ascending by
    row; what lies beyond their number, (T,) int32, is not set."""
    require_triton()
    from rooftop.kernels.sparse_conv_kernels import count_pairs, list_pairs

    rows, taps = neighbours.shape
    table, capacity = neighbours.contiguous(), min(rows, sites)
    blocks = -(-rows // PAIR_ROWS)
    width = _width(taps)
    pairs = torch.empty(2, taps, capacity, dtype=torch.int32, device=table.device)
    counts = torch.empty(blocks, taps, dtype=torch.int32, device=table.device)
    tile: Constants = {"ROWS": PAIR_ROWS, "WIDTH": width, "TAPS": taps, "WIDE": _is_wide(table, pairs)}
    launch(count_pairs, (blocks,), table.device, table, counts, sites, rows, **tile, num_warps=TABLE_WARPS)
    ends = counts.cumsum(0, dtype=torch.int32)
    launch(
        list_pairs, (blocks,), table.device, table, ends - counts, pairs, sites, rows, capacity, **tile,
        num_warps=TABLE_WARPS,
    )  # fmt: skip
    return pairs, ends[-1] if blocks else torch.zeros(taps, dtype=torch.int32, device=table.device)


def _width(taps: int) -> int:
    """Taps that are looked at together, one bit for each."""
    return min(32, 1 << (taps - 1).bit_length())


def _is_wide(*tensors: Tensor) -> bool:
    """Whether an offset within one needs 64 bits, also where it lies beyond the end of a tile."""
    return any(t.numel() + (1 << 20) >= 1 << 31 for t in tensors)


# ---- launches ------------------------------------------------------------------------------------------------


def convolved(
    features: Tensor, weight: Tensor, bias: Tensor | None, neighbours: Tensor, order: Tensor | None, mirrored: bool
) -> Tensor:
    """(M, O) by the kernel, from a weight (O, T, C) of any strides."""
    require_triton()
    from rooftop.kernels.sparse_conv_kernels import sparse_conv_rows

    features, neighbours = features.contiguous(), neighbours.contiguous()
    (sites, channels), (rows, taps), out_channels = features.shape, neighbours.shape, weight.shape[0]
    out = features.new_empty(rows, out_channels)
    if features.numel() == 0 or out.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    if order is None and rows >= SORTED_FROM:
        order = rows_by_mask(neighbour_masks(neighbours))
    tile = rows_tile(rows, out_channels, channels, features)
    grid = (-(-rows // int(tile["ROWS"])) * -(-out_channels // int(tile["COLUMNS"])),)
    out_stride, tap_stride, channel_stride = weight.stride()
    bias, order = (None if t is None else t.contiguous() for t in (bias, order))
    tensors = (features, weight, bias, neighbours, order, out)
    launch(
        sparse_conv_rows, grid, features.device, *tensors, sites, rows,
        HAS_BIAS=bias is not None, HAS_ORDER=order is not None, MIRRORED=mirrored,
        WIDE=_is_wide(features, weight, neighbours, out), TAPS=taps, CHANNELS=channels, OUT_CHANNELS=out_channels,
        TAP_STRIDE=tap_stride, CHANNEL_STRIDE=channel_stride, OUT_STRIDE=out_stride, WIDTH=_width(taps),
        **_product(features), **tile,
    )  # fmt: skip
    return out


def weight_gradient(dy: Tensor, features: Tensor, taps: int, pairs: Tensor, counts: Tensor) -> Tensor:
    """(O, T, C) from dy (M, O), features (N, C) and the pairs of each tap, (2, T, capacity)."""
    require_triton()
    from rooftop.kernels.sparse_conv_kernels import sparse_conv_weight_gradient

    dy, features, pairs, counts = (t.contiguous() for t in (dy, features, pairs, counts))
    (rows, out_channels), (sites, channels) = dy.shape, features.shape
    if out_channels * channels == 0:
        return features.new_zeros(out_channels, taps, channels)
    tile, parts = weight_tile(out_channels, channels, taps, pairs.shape[2], features)
    dtype = features.dtype if parts == 1 else torch.float32
    sums = torch.empty(parts, out_channels, taps, channels, dtype=dtype, device=features.device)
    grid = (taps * parts, -(-out_channels // int(tile["OUTS"])) * -(-channels // int(tile["INS"])))
    launch(
        sparse_conv_weight_gradient, grid, features.device, features, dy, pairs, counts, sums,
        sites, rows, pairs.shape[2], parts, TAPS=taps, CHANNELS=channels, OUT_CHANNELS=out_channels,
        WIDE=_is_wide(features, dy, pairs, sums), **_product(features), **tile,
    )  # fmt: skip
    return sums[0] if parts == 1 else sums.sum(0, dtype=torch.float32).to(features.dtype)


def _product(features: Tensor) -> Constants:
    """How tiles are multiplied: float32 as TF32 where PyTorch's switch for convolutions allows it."""
    tf32 = matrix_precision(features, convolution=True) == "tf32"
    return {"PRECISION": "tf32" if tf32 else "ieee", "WIDEN": INTERPRETED}
