"""Launch the kernels of sparse convolution, and prepare the row orders and pair lists that they need.

In half precision, a convolution reads `2 * C` bytes of features for each pair, and `2 * C * O` bytes of weight for each
tap of a tile of rows, all from L2. With taller tiles, the kernel reads the weight less often. If rows that have
neighbours at similar taps share a tile, the tile has fewer taps, and the kernel reads the weight less often. If a table
is stored in the order in which the kernel reads it, each read of the table is contiguous.
`docs/measurements/kernels-sites.md` explains what bounds the kernels.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from rooftop.cost import matrix_precision
from rooftop.kernels.operands.launch_data import WordConstants, is_wide, power_of_two
from rooftop.kernels.operands.references import without_kernels
from rooftop.kernels.sites import tables
from rooftop.kernels.sites.tables import RowsConfig, WeightConfig
from rooftop.launch import known_calls
from rooftop.launch.row_counts import Count, allocate, size
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

# ---- launches --------------------------------------------------------------------------------------------------


def rows_tile(rows: int, out_channels: int, channels: int, features: Tensor) -> WordConstants:
    """Launch parameters of `sparse_conv_rows` for `rows` results of `out_channels` channels, from rows of `channels`
    channels.
    """
    table = tables.SINGLE if features.dtype == torch.float32 else tables.HALF
    find = _rows_tile.__wrapped__ if type(rows) is Count else _rows_tile
    return find(table, rows, out_channels, channels, processors(features))


@lru_cache(maxsize=4096)  # cached, because computing the tile takes as long as a small launch
def _rows_tile(table: tuple[RowsConfig, ...], rows: int, out_channels: int, channels: int, sms: int) -> WordConstants:
    """Launch parameters for `rows` rows. A tile has no more columns than `out_channels`, no more depth than `channels`
    (both rounded up to a power of two), and fewer rows if there are fewer tiles than multiprocessors.
    """
    config = next(config for config in table if out_channels <= config.channels)
    columns = min(config.columns, _power_of_two(out_channels))
    height = config.rows
    while height > tables.LEAST_ROWS and -(-rows // height) * -(-out_channels // columns) < sms:
        height //= 2
    return {
        "ROWS": height,
        "COLUMNS": columns,
        "DEPTH": min(config.depth, _power_of_two(channels)),
        "num_warps": config.warps,
        "num_stages": config.stages,
    }


def weight_tile(
    out_channels: int, channels: int, taps: int, length: int, listed: bool, features: Tensor
) -> tuple[WordConstants, int, int]:
    """Launch parameters of `sparse_conv_weight_gradient` if no tap has more than `length` pairs: (tile, number of
    parts, maximum number of pieces). If `listed`, the pairs of all taps together are divided into this number of parts;
    otherwise the pairs of each tap are. A piece is a range of the pairs of one tap, which one program sums.
    """
    table = tables.WEIGHT_SINGLE if features.dtype == torch.float32 else tables.WEIGHT_HALF
    find = _weight_tile.__wrapped__ if type(length) is Count else _weight_tile
    return find(table, out_channels, channels, taps, length, listed, processors(features))


@lru_cache(maxsize=4096)
def _weight_tile(
    table: tuple[WeightConfig, ...], out_channels: int, channels: int, taps: int, length: int, listed: bool, sms: int
) -> tuple[WordConstants, int, int]:
    config = next(config for config in table if max(out_channels, channels) <= config.channels)
    outs, ins = min(config.outs, _power_of_two(out_channels)), min(config.ins, _power_of_two(channels))
    tiles = -(-out_channels // outs) * -(-channels // ins)
    programs, blocks = -(-config.programs_per_sm * sms // tiles), -(-length // config.depth)
    if listed:  # each tap may end with a shorter piece, so `taps` programs are reserved for these pieces
        parts = max(taps, min(programs - taps, taps * blocks))
        pieces = parts + taps
    else:
        parts = max(1, min(-(-programs // taps), blocks))
        pieces = parts * taps
    tile: WordConstants = {
        "OUTS": outs,
        "INS": ins,
        "DEPTH": config.depth,
        "num_warps": config.warps,
        "num_stages": config.stages,
    }
    return tile, parts, pieces


def _power_of_two(channels: int) -> int:
    """The smallest power of two that is at least max(channels, 16); tiles in a product have sides of at least 16."""
    return max(16, power_of_two(channels))


# ---- orders of rows --------------------------------------------------------------------------------------------


def neighbour_masks(neighbours: Tensor) -> Tensor:
    """The bit masks (M, ceil(T / 32)) int32 of a table (M, T) int32: bit t % 32 of word t // 32 is set if row m has tap
    t.
    """
    rows, taps = size(neighbours, 0), neighbours.shape[1]
    words = -(-taps // 32)
    masks = allocate(neighbours, rows, words, dtype=torch.int32)
    if without_kernels(neighbours.device):
        masks.zero_()
        for tap in range(taps):
            masks[:, tap // 32] |= (neighbours[:, tap] >= 0).int() << tap % 32
        return masks
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_convs import neighbour_bits

    table = neighbours.contiguous()
    tile: WordConstants = {"ROWS": tables.MASK_ROWS, "num_warps": tables.TABLE_WARPS}
    launch(
        neighbour_bits, (-(-rows // tables.MASK_ROWS),), table.device, table, masks, rows, TAPS=taps,
        WIDE=is_wide(table),
        **tile,
    )  # fmt: skip
    return masks


def rows_by_mask(masks: Tensor) -> Tensor:
    """Sort rows by their masks (M, words), and return the order (M,) int64. Rows with equal masks are adjacent and keep
    their order. The order of the masks is a Gray code, so that similar masks are close to each other. The bit that
    changes most rarely in this order is the tap that is rarest in a sample of the rows. If masks have more than 64
    bits, only the 64 rarest bits are compared.
    """
    if masks.numel() == 0:
        return torch.arange(masks.shape[0], device=masks.device)
    return _mask_keys(masks.contiguous()).sort(stable=True).indices


def _mask_keys(masks: Tensor) -> Tensor:
    """The keys (M,) for sorting rows so that rows with similar masks are neighbours. A key is an integer that increases
    with the position of the row's bit mask in the Gray code.
    """
    rows, words = size(masks, 0), masks.shape[1]
    if without_kernels(masks.device):
        sample = torch.arange(tables.SAMPLE, device="cpu") * rows // tables.SAMPLE
        bits = ((masks[:, :, None] >> torch.arange(32, device="cpu")) & 1).flatten(1).long()
        rarest_first = bits[sample].sum(0).sort(stable=True).indices[:64]
        parities = bits[:, rarest_first].cumsum(1) % 2
        parities[:, 0] -= 1  # 0 and 1 become -1 and 0: as the highest of 64 bits, 1 would be a sign, and sort first
        return (parities << torch.arange(len(rarest_first), device="cpu").flip(0)).sum(1)
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_convs import count_bits, mask_keys

    counts = torch.empty(32 * words, dtype=torch.int32, device=masks.device)
    keys = allocate(masks, rows, dtype=torch.int32 if words == 1 else torch.int64)
    launch(
        count_bits, (words,), masks.device, masks, counts, rows, WORDS=words,
        SAMPLE=tables.SAMPLE, ROWS=tables.SAMPLE_ROWS,
        num_warps=tables.SAMPLE_WARPS,
    )  # fmt: skip
    launch(
        mask_keys, (-(-rows // tables.KEY_ROWS),), masks.device, masks, counts, keys, rows, WORDS=words,
        WIDE=is_wide(masks), ROWS=tables.KEY_ROWS, num_warps=tables.TABLE_WARPS,
    )  # fmt: skip
    return keys


def sorted_table(neighbours: Tensor, order: Tensor) -> Tensor:
    """Reorder the rows of a neighbour table (M, T) as `order` (M,) lists them. The result, (1 + ceil(T / 32) + T, M)
    int32, contains the order, the bit masks of the rows, and the sites, one line for each tap. A tile of the
    convolution thus reads contiguous memory.
    """
    rows, taps = size(neighbours, 0), neighbours.shape[1]
    words = -(-taps // 32)
    if without_kernels(neighbours.device):
        at = order.long()
        return torch.cat((order[None].int(), neighbour_masks(neighbours)[at].t(), neighbours[at].t()))
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_convs import sort_table

    given, order = neighbours.contiguous(), order.contiguous()
    table = allocate(given, 1 + words + taps, rows, dtype=torch.int32)
    launch(
        sort_table, (-(-rows // tables.SORT_ROWS),), given.device, given, order, table, rows,
        TAPS=taps, WIDE=is_wide(table),
        WIDTH=_width(taps), ROWS=tables.SORT_ROWS, num_warps=tables.TABLE_WARPS,
    )  # fmt: skip
    return table


def row_order(neighbours: Tensor) -> Tensor:
    """The order of a table (M, T) for `sparse_conv`: the `sorted_table` if TABLES_SORTED is set and the table has at
    most MOST_SORTED rows, else only the order (M,). For a table with fewer than SORTED_FROM rows, this is the original
    order, also in a sorted table. `row_order_shape` computes the result's shape.
    """
    rows = size(neighbours, 0)
    if rows < tables.SORTED_FROM:
        known_calls.depends("the order of few rows is PyTorch's")
        order = torch.arange(int(rows), dtype=torch.int32, device=neighbours.device)
    else:
        order = rows_by_mask(neighbour_masks(neighbours))
    return sorted_table(neighbours, order) if tables.TABLES_SORTED and rows <= tables.MOST_SORTED else order.int()


def row_order_shape(rows: int, taps: int) -> tuple[int, ...]:
    """The shape of the result of `row_order` for a neighbour table of `rows` rows and `taps` taps: that of a
    `sorted_table`, or only an order (rows,).
    """
    return (1 + -(-taps // 32) + taps, rows) if tables.TABLES_SORTED and rows <= tables.MOST_SORTED else (rows,)


def unsorted_table(table: Tensor, taps: int) -> Tensor:
    """The original table (M, T) of a table that `sorted_table` returned."""
    rows = table.shape[1]
    return torch.empty(rows, taps, dtype=torch.int32, device=table.device).index_copy_(
        0, table[0].long(), table[table.shape[0] - taps :].t()
    )


# ---- lists of blocks -------------------------------------------------------------------------------------------


def blocks_of(table: Tensor, taps: int) -> tuple[Tensor, Tensor]:
    """List for each tap the blocks of BLOCK_ROWS rows of a `sorted_table` that have a neighbour at the tap. Returns the
    blocks (T, ceil(M / BLOCK_ROWS)) int32, ascending, and the number of blocks (T,) int32. In each tap's list, values
    past the number of blocks are undefined.
    """
    rows = size(table, 1)
    blocks = -(-rows // tables.BLOCK_ROWS)
    if without_kernels(table.device):
        known = torch.nn.functional.pad(table[table.shape[0] - taps :] >= 0, (0, blocks * tables.BLOCK_ROWS - rows))
        has = known.view(taps, blocks, tables.BLOCK_ROWS).any(2)
        return (~has).sort(dim=1, stable=True).indices.int(), has.sum(1, dtype=torch.int32)
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_convs import block_bits, list_blocks

    table = table.contiguous()
    bits = allocate(table, -(-taps // 32), blocks, dtype=torch.int32)
    lists = allocate(table, taps, blocks, dtype=torch.int32)
    counts = torch.empty(taps, dtype=torch.int32, device=table.device)
    launch(
        block_bits, (blocks,), table.device, table, bits, rows, blocks, TAPS=taps, WIDE=is_wide(table),
        BLOCK=tables.BLOCK_ROWS, num_warps=1,
    )  # fmt: skip
    constants = {"SCANNED": tables.SCANNED, "num_warps": tables.TABLE_WARPS}
    launch(list_blocks, (taps,), table.device, bits, lists, counts, blocks, **constants)
    return lists, counts


# ---- lists of pairs --------------------------------------------------------------------------------------------


def pairs_of(neighbours: Tensor, sites: int) -> tuple[Tensor, Tensor]:
    """List the pairs of each tap of a table (M, T) of N sites. The first result is (2, T, min(M, N)) int32, with sites
    at [0] and rows at [1], ascending by row. The second result, (T,) int32, is the number of pairs of each tap. In each
    tap's lists, values past the number of pairs are undefined.
    """
    rows, taps = size(neighbours, 0), neighbours.shape[1]
    capacity = min(rows, sites)
    if without_kernels(neighbours.device):
        return _pairs_by_torch(neighbours, sites, capacity)
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_convs import count_pairs, list_pairs, start_pairs

    table, blocks = neighbours.contiguous(), -(-rows // tables.PAIR_ROWS)
    pairs = allocate(table, 2, taps, capacity, dtype=torch.int32)
    counts, starts = (allocate(table, taps, blocks, dtype=torch.int32) for _ in range(2))
    totals = torch.empty(taps, dtype=torch.int32, device=table.device)
    tile: WordConstants = {"ROWS": tables.PAIR_ROWS, "WIDTH": _width(taps), "TAPS": taps, "WIDE": is_wide(table, pairs)}
    launch(count_pairs, (blocks,), table.device, table, counts, sites, rows, **tile, num_warps=tables.TABLE_WARPS)
    scan = {"BLOCKS": tables.SCANNED, "num_warps": tables.TABLE_WARPS}
    launch(start_pairs, (taps,), table.device, counts, starts, totals, blocks, **scan)
    launch(
        list_pairs, (blocks,), table.device, table, starts, pairs, sites, rows, capacity, **tile,
        num_warps=tables.TABLE_WARPS,
    )  # fmt: skip
    return pairs, totals


def _pairs_by_torch(neighbours: Tensor, sites: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Compute the results of `pairs_of` in PyTorch, on a CPU."""
    rows, taps = neighbours.shape
    listed = neighbours.t()  # (T, M)
    known = (listed >= 0) & (listed < sites)
    # entries without a site are written to an extra column, which is dropped below
    place = (known.cumsum(1) - 1).masked_fill_(~known, capacity)
    pairs = neighbours.new_full((2, taps, capacity + 1), -1)
    pairs[0].scatter_(1, place, listed)
    pairs[1].scatter_(1, place, torch.arange(rows, dtype=torch.int32, device="cpu").expand(taps, rows))
    return pairs[:, :, :capacity].contiguous(), known.sum(1, dtype=torch.int32)


def has_table(order: Tensor | None) -> bool:
    """Whether `order` is the result of `sorted_table`, which contains the neighbour table, instead of only an order of
    rows.
    """
    return order is not None and order.dim() == 2


def row_count(neighbours: Tensor | None, order: Tensor | None) -> int:
    """The number of rows of a table (`neighbours`), or of a sorted table (`order`).

    Raises:
        ValueError: neither a table nor a sorted table is given.
    """
    if neighbours is not None:
        return size(neighbours, 0)
    if order is None or not has_table(order):
        raise ValueError("sparse_conv: expected neighbours, or an order that contains them: use row_order")
    return size(order, 1)


def _width(taps: int) -> int:
    """The number of taps of a row that a kernel examines at the same time, one for each bit of a 32-bit word: a power
    of two, up to 32.
    """
    return min(32, power_of_two(taps))


# ---- launches ------------------------------------------------------------------------------------------------


def convolved(
    features: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    neighbours: Tensor | None,
    order: Tensor | None,
    mirrored: bool,
) -> Tensor:
    """Compute the convolution (M, O) with the kernel, from a weight (O, T, C) with any strides. `order` is a result of
    `row_order`, or an order (M,). If `order` contains the table, the kernel does not read `neighbours`.
    """
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_convs import sparse_conv_rows

    features = features.contiguous()
    sites, channels, (out_channels, taps) = size(features, 0), features.shape[1], weight.shape[:2]
    rows = row_count(neighbours, order)
    out = allocate(features, rows, out_channels)
    if features.numel() == 0 or out.numel() == 0:
        return out.zero_() if bias is None else out.copy_(bias)
    if order is None and rows >= tables.SORTED_FROM and neighbours is not None:
        order = row_order(neighbours)
    neighbours = order if has_table(order) or neighbours is None else neighbours.contiguous()
    tile = rows_tile(rows, out_channels, channels, features)
    grid = (-(-rows // int(tile["ROWS"])) * -(-out_channels // int(tile["COLUMNS"])),)
    out_stride, tap_stride, channel_stride = weight.stride()
    bias, order = (None if t is None else t.contiguous() for t in (bias, order))
    tensors = (features, weight, bias, neighbours, order, out)
    launch(
        sparse_conv_rows, grid, features.device, *tensors, sites, rows,
        HAS_BIAS=bias is not None, HAS_ORDER=order is not None, SORTED=has_table(order),
        MIRRORED=mirrored, WIDE=is_wide(*(t for t in tensors if t is not None)), TAPS=taps, CHANNELS=channels,
        OUT_CHANNELS=out_channels, TAP_STRIDE=tap_stride, CHANNEL_STRIDE=channel_stride, OUT_STRIDE=out_stride,
        WIDTH=_width(taps), **_product(features), **tile,
    )  # fmt: skip
    return out


def weight_gradient(
    dy: Tensor,
    features: Tensor,
    taps: int,
    neighbours: Tensor | None,
    order: Tensor | None,
    pairs: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """Compute the weight's gradient (O, T, C) from dy (M, O), features (N, C), and a table (M, T) or an `order` that
    contains the table.

    `pairs`: the result of `blocks_of` if `order` contains the table, else the result of `pairs_of`. None: the function
    computes the pairs if the order contains the table or the table has many rows; otherwise the kernel reads the table.
    """
    require_triton()
    from rooftop.kernels.sites.triton_kernels.sparse_convs import sparse_conv_weight_gradient, sum_pieces

    dy, features = dy.contiguous(), features.contiguous()
    rows, out_channels, sites, channels = size(dy, 0), dy.shape[1], size(features, 0), features.shape[1]
    if dy.numel() * features.numel() == 0:
        return features.new_zeros(out_channels, taps, channels)
    if has_table(order) and (pairs is None or pairs[0].dim() == 2):
        assert order is not None
        table, block = order.contiguous(), tables.BLOCK_ROWS
        pairs = blocks_of(table, taps) if pairs is None else pairs
    elif neighbours is not None:
        table, block = neighbours.contiguous(), 0
        pairs = pairs_of(table, sites) if pairs is None and rows >= tables.LISTED_FROM else pairs
    else:  # the kernel needs only the pairs, and no table
        assert pairs is not None
        table, block = pairs[0], 0
    lists, counts = (None, None) if pairs is None else (t.contiguous() for t in pairs)
    listed = lists is not None
    capacity = rows if lists is None else size(lists, lists.dim() - 1)
    tile, parts, pieces = weight_tile(out_channels, channels, taps, capacity * max(1, block), listed, features)
    out = features.new_empty(out_channels, taps, channels)
    whole = parts == 1 and not listed
    sums = out if whole else allocate(out, pieces, out_channels, channels, dtype=torch.float32)
    constants: WordConstants = {
        "LISTED": listed, "BLOCK": block, "TAPS": taps, "LANES": power_of_two(taps), "CHANNELS": channels,
        "OUT_CHANNELS": out_channels, "WIDE": is_wide(features, dy, table, sums, *(() if lists is None else (lists,))),
    }  # fmt: skip
    grid = (pieces, -(-out_channels // int(tile["OUTS"])) * -(-channels // int(tile["INS"])))
    launch(
        sparse_conv_weight_gradient, grid, out.device, features, dy, table, lists, counts, sums, sites, rows, capacity,
        parts, WHOLE=whole, **constants, **_product(features), **tile,
    )  # fmt: skip
    if not whole:
        launch(
            sum_pieces, (taps, -(-out_channels * channels // tables.ELEMENTS)), out.device,
            sums, counts, out, capacity, parts,
            DEPTH=tile["DEPTH"], PIECES=tables.PIECES, ELEMENTS=tables.ELEMENTS, **constants,
            num_warps=tables.TABLE_WARPS,
        )  # fmt: skip
    return out


def _product(features: Tensor) -> WordConstants:
    """The precision of products of tiles. Products of float32 use TF32 if PyTorch allows TF32 for convolutions."""
    if features.dtype != torch.float32:
        return _HALF_PRODUCT
    tf32 = matrix_precision(features, convolution=True) == "tf32"
    return {"PRECISION": "tf32" if tf32 else "ieee", "WIDEN": INTERPRETED, "BY_BLOCK": not tf32}


_HALF_PRODUCT: WordConstants = {"PRECISION": "ieee", "WIDEN": INTERPRETED, "BY_BLOCK": False}
