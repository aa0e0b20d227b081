"""Triton kernels of y = activation(conv2d(x, weight) + bias + residual), channels last.

`launches.py` launches these kernels.

A convolution is a product of two matrices. The first matrix is never stored: its rows are the pixels of the result, and
its columns are the dimension K. K runs over the taps of the window and, within a tap, over the channels, which are
contiguous in memory. The weights, (O, KH, KW, C) in memory, are the second matrix without any change. Sums are float32.
The kernel applies the operations after the convolution to the sums, and stores the results once.

- `conv_act_persistent` and `conv_act_single` copy boxes of BATCH images, HEIGHT lines and WIDTH pixels with the tensor
  memory accelerator (TMA) of Hopper and later GPUs. Each tap reads a box of the same size at another position, and TMA
  copies zeros for positions outside the image. So no element needs index arithmetic or a mask. The image is described
  in five dimensions, (N, H / SH, SH, W / SW, SW * C): the pixels that one tap reads are then contiguous in every
  dimension, for any stride. Sums are (channels, pixels), with the box of pixels as the second operand of the product:
  Triton reads a reshaped box directly from shared memory only as the second operand. A program of `conv_act_persistent`
  computes many tiles of the result. The program stores one tile in PARTS parts while the copies for the next tile are
  in flight. A program of `conv_act_single` computes one tile.
- `conv_act_gathered` loads by pointers, and supports any number of channels, any stride, groups and any GPU. With
  groups, each step covers up to DEPTH channels of one tap of one group; zeros replace missing channels.

With SPLIT > 1, SPLIT programs share the steps through K of each tile. Each program writes its float32 sums, and the
program that finishes last adds the sums of all programs in the order of their parts of K. No sum uses atomics, so
results are deterministic.

After a convolution that cuDNN computes, `conv_act_finish` computes the operations that follow it. `conv_act_pack`
copies images of few channels so that a line of a window is contiguous in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from rooftop.kernels.operands.triton_kernels.activations import activated
from rooftop.kernels.operands.triton_kernels.products import in_parts, plus_product, tile_place


@triton.jit
def conv_act_persistent(
    image, weight, y, residual,  # descriptors: (N, H / SH, SH, W / SW, SW * C), (O, taps * C), (N, OH, OW, O) twice
    bias,  # (O,)
    images, lines, pixels, columns,  # N, OH, OW, O
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WIDEN: tl.constexpr,
    TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, BLOCKS: tl.constexpr,  # BLOCKS: C / DEPTH, rounded up
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BATCH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute every P-th tile of the convolution, where P is the number of programs."""
    high, wide = tl.cdiv(lines, HEIGHT), tl.cdiv(pixels, WIDTH)
    row_tiles, column_tiles = tl.cdiv(images, BATCH) * high * wide, tl.cdiv(columns, COLUMNS)
    start, programs = tl.program_id(0), tl.num_programs(0)
    # The position of a finished tile is computed again, so that the loops over tiles and over K become one loop. In
    # that loop, the copies for the next tile begin before this tile is finished.
    finished = start - programs
    for tile in tl.range(start, row_tiles * column_tiles, programs, flatten=True):
        row_tile, column_tile = tile_place(tile, row_tiles, column_tiles, GROUP)
        first, line, pixel = _corner(row_tile, high, wide, BATCH, HEIGHT, WIDTH)
        total = tl.zeros((COLUMNS, BATCH * HEIGHT * WIDTH), tl.float32)
        for step in range(TAPS * BLOCKS):
            total = _add_step(
                total, image, weight, step, first, line, pixel, column_tile * COLUMNS, WIDEN, KERNEL_WIDTH, BLOCKS,
                STRIDE_H, STRIDE_W, PADDING_H, PADDING_W, DILATION_H, DILATION_W, BATCH, HEIGHT, WIDTH, DEPTH,
            )  # fmt: skip
        finished += programs
        row_tile, column_tile = tile_place(finished, row_tiles, column_tiles, GROUP)
        first, line, pixel = _corner(row_tile, high, wide, BATCH, HEIGHT, WIDTH)
        _finish_box(
            total, y, residual, bias, columns, first, line, pixel, column_tile * COLUMNS, ACTIVATION, HAS_BIAS,
            HAS_RESIDUAL, BATCH, HEIGHT, WIDTH, COLUMNS, PARTS,
        )  # fmt: skip


@triton.jit
def conv_act_single(
    image, weight, y, residual,  # descriptors, as above
    bias, sums, arrived,  # (O,), (SPLIT, tiles, COLUMNS, pixels of a tile), (tiles,); arrived: 0 on entry and exit
    images, lines, pixels, columns,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WIDEN: tl.constexpr,
    TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, BLOCKS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr,
    BATCH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, SPLIT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the convolution over one part of K. EARLY selects programmatic dependent launch: this kernel
    may start while the previous kernel still runs, and waits for the previous kernel's results.
    """
    if EARLY:
        gdc_wait()
    high, wide = tl.cdiv(lines, HEIGHT), tl.cdiv(pixels, WIDTH)
    row_tiles, column_tiles = tl.cdiv(images, BATCH) * high * wide, tl.cdiv(columns, COLUMNS)
    tiles = row_tiles * column_tiles
    tile, part = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row_tile, column_tile = tile_place(tile, row_tiles, column_tiles, GROUP)
    first, line, pixel = _corner(row_tile, high, wide, BATCH, HEIGHT, WIDTH)
    STEPS: tl.constexpr = (TAPS * BLOCKS + SPLIT - 1) // SPLIT
    total = tl.zeros((COLUMNS, BATCH * HEIGHT * WIDTH), tl.float32)
    for step in range(part * STEPS, min(part * STEPS + STEPS, TAPS * BLOCKS)):
        total = _add_step(
            total, image, weight, step, first, line, pixel, column_tile * COLUMNS, WIDEN, KERNEL_WIDTH, BLOCKS,
            STRIDE_H, STRIDE_W, PADDING_H, PADDING_W, DILATION_H, DILATION_W, BATCH, HEIGHT, WIDTH, DEPTH,
        )  # fmt: skip
    if EARLY:
        gdc_launch_dependents()
    if SPLIT == 1:
        _finish_box(
            total, y, residual, bias, columns, first, line, pixel, column_tile * COLUMNS, ACTIVATION, HAS_BIAS,
            HAS_RESIDUAL, BATCH, HEIGHT, WIDTH, COLUMNS, PARTS,
        )  # fmt: skip
    elif _is_last(total, sums, arrived, tile, tiles, part, SPLIT):
        _finish_box(
            _sum_of_parts(sums, tile, tiles, COLUMNS, BATCH * HEIGHT * WIDTH, SPLIT),
            y, residual, bias, columns, first, line, pixel, column_tile * COLUMNS, ACTIVATION, HAS_BIAS,
            HAS_RESIDUAL, BATCH, HEIGHT, WIDTH, COLUMNS, PARTS,
        )  # fmt: skip
        tl.store(arrived + tile, 0)


@triton.jit
def conv_act_gathered(
    x, weight, y, residual,  # x (N, H, W, C) strided with C fastest; weight (O, taps * C); y, residual (pixels, O)
    bias, sums, arrived,  # shapes: (O,), (SPLIT, tiles, ROWS, COLUMNS), (tiles,); arrived: 0 on entry and exit
    rows, columns, height, width, lines, pixels, x_image, x_line, x_pixel,  # lines, pixels: OH, OW
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WIDEN: tl.constexpr,
    TAPS: tl.constexpr, KERNEL_WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
    STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr, PADDING_W: tl.constexpr,
    DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the convolution over one part of K. WIDE: offsets within x need 64 bits. CHANNELS: channels
    of a group.
    """
    if EARLY:
        gdc_wait()
    of_group = columns // GROUPS
    row_tiles, column_tiles = tl.cdiv(rows, ROWS), GROUPS * tl.cdiv(of_group, COLUMNS)
    tiles = row_tiles * column_tiles
    tile, part = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    row_tile, column_tile = tile_place(tile, row_tiles, column_tiles, GROUP)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    group = 0
    if GROUPS > 1:
        group = column_tile // tl.cdiv(of_group, COLUMNS)
        column = column_tile % tl.cdiv(of_group, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
        column = tl.where(column < of_group, group * of_group + column, columns)  # the index `columns` is masked
    # Pixel under the window's first tap, for each row of the tile; rows past the end read the last pixel.
    place = tl.minimum(row, rows - 1)
    line = place // pixels % lines * STRIDE_H - PADDING_H
    pixel = place % pixels * STRIDE_W - PADDING_W
    at_image = place // (pixels * lines)
    if WIDE:
        at_image = at_image.to(tl.int64)
    source = at_image * x_image + line * x_line + pixel * x_pixel + group * CHANNELS
    DEPTHS: tl.constexpr = TAPS * CHANNELS
    BLOCKS: tl.constexpr = (CHANNELS + DEPTH - 1) // DEPTH
    # Without groups, only the last step may cover fewer than DEPTH channels.
    EVERY: tl.constexpr = TAPS * BLOCKS if GROUPS > 1 else (DEPTHS + DEPTH - 1) // DEPTH
    STEPS: tl.constexpr = (EVERY + SPLIT - 1) // SPLIT
    weights = weight + tl.minimum(column, columns - 1)[None, :].to(tl.int64) * DEPTHS  # (1, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(part * STEPS, min(part * STEPS + STEPS, EVERY)):
        lane = step * DEPTH + tl.arange(0, DEPTH)
        if GROUPS > 1 and CHANNELS % DEPTH != 0:
            tap, channel = step // BLOCKS, step % BLOCKS * DEPTH + tl.arange(0, DEPTH)
            down, right = tap // KERNEL_WIDTH * DILATION_H, tap % KERNEL_WIDTH * DILATION_W
            inside = (line + down >= 0) & (line + down < height) & (pixel + right >= 0) & (pixel + right < width)
            known = channel < CHANNELS
            moved = source + (down * x_line + right * x_pixel)
            left = tl.load(x + (moved[:, None] + channel[None, :]), mask=inside[:, None] & known[None, :], other=0.0)
            right_block = tl.load(weights + (tap * CHANNELS + channel)[:, None], mask=known[:, None], other=0.0)
        elif CHANNELS % DEPTH == 0:  # each step reads channels of a single tap
            tap = step * DEPTH // CHANNELS
            down, right = tap // KERNEL_WIDTH * DILATION_H, tap % KERNEL_WIDTH * DILATION_W
            inside = (line + down >= 0) & (line + down < height) & (pixel + right >= 0) & (pixel + right < width)
            moved = tl.multiple_of(source + (down * x_line + right * x_pixel + step * DEPTH % CHANNELS), DEPTH)
            left = tl.load(x + (moved[:, None] + tl.arange(0, DEPTH)[None, :]), mask=inside[:, None], other=0.0)
            right_block = tl.load(weights + lane[:, None])
        else:
            tap = lane // CHANNELS
            down, right = (tap // KERNEL_WIDTH * DILATION_H)[None, :], (tap % KERNEL_WIDTH * DILATION_W)[None, :]
            at_line, at_pixel = line[:, None] + down, pixel[:, None] + right
            inside = (at_line >= 0) & (at_line < height) & (at_pixel >= 0) & (at_pixel < width)
            inside &= (lane < DEPTHS)[None, :]
            moved = source[:, None] + (down * x_line + right * x_pixel + (lane % CHANNELS)[None, :])
            left = tl.load(x + moved, mask=inside, other=0.0)
            right_block = tl.load(weights + lane[:, None], mask=(lane < DEPTHS)[:, None], other=0.0)
        total = plus_product(left, right_block, total, "ieee", WIDEN)
    if EARLY:
        gdc_launch_dependents()
    if SPLIT == 1:
        _finish_rows(total, y, residual, bias, row, column, rows, columns, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
    elif _is_last(total, sums, arrived, tile, tiles, part, SPLIT):
        total = _sum_of_parts(sums, tile, tiles, ROWS, COLUMNS, SPLIT)
        _finish_rows(total, y, residual, bias, row, column, rows, columns, ACTIVATION, HAS_BIAS, HAS_RESIDUAL)
        tl.store(arrived + tile, 0)


@triton.jit
def conv_act_finish(
    sums, bias, residual, y, z,  # bias (channels,); all others (M, N)
    rows, units, channels,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, KEEP: tl.constexpr,
    BY_ROW: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """Compute y = activation(sums + bias + residual). If KEEP, also write z, the input of the activation. A row has
    `units` groups of UNIT columns.

    BY_ROW: the images are contiguous (N, C, H, W), so a row is one channel of one image. Without BY_ROW, the images are
    channels last, so a column is a channel.
    """
    columns = units * UNIT
    blocks = tl.cdiv(columns, COLUMNS)
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = (tl.program_id(0) % blocks) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row[:, None] * columns + column[None, :]
    values = tl.load(sums + place, mask=inside, other=0.0).to(tl.float32)
    if HAS_BIAS:
        if BY_ROW:
            values += tl.load(bias + row % channels, mask=row < rows, other=0.0).to(tl.float32)[:, None]
        else:
            values += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        values += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        tl.store(z + place, values.to(z.dtype.element_ty), mask=inside)
    tl.store(y + place, activated(values, ACTIVATION, HALF).to(y.dtype.element_ty), mask=inside)


@triton.jit
def conv_act_pack(
    source, target,  # shapes: (N, C, H, W) strided, (N, TH, TW, PIXEL)
    rows, height, width, channels, target_height, left, source_image, source_channel, source_line, source_pixel,
    PIXEL: tl.constexpr, LINE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,  # LINE: TW * PIXEL
):  # fmt: skip
    """Write images channels last, with PIXEL channels per pixel and `left` pixels of padding before each line. Elements
    outside the source are zero. `rows`: N * TH, the number of lines of all images in `target`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, BLOCK)
    line, pixel, channel = row % target_height, lane // PIXEL - left, lane % PIXEL
    exists = ((row < rows) & (line < height))[:, None]
    exists &= ((pixel >= 0) & (pixel < width) & (channel < channels))[None, :]
    of_row = (row // target_height).to(tl.int64) * source_image + line.to(tl.int64) * source_line
    of_lane = pixel * source_pixel + channel * source_channel
    values = tl.load(source + of_row[:, None] + of_lane[None, :], mask=exists, other=0.0)
    place = row.to(tl.int64)[:, None] * LINE + lane[None, :]
    tl.store(target + place, values, mask=(row < rows)[:, None] & (lane < LINE)[None, :])


# ---- functions that several kernels share --------------------------------------------------------------------------


@triton.jit
def _corner(row_tile, high, wide, BATCH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Compute the position (image, line, pixel) of a box's first pixel in the result."""
    return row_tile // (high * wide) * BATCH, row_tile // wide % high * HEIGHT, row_tile % wide * WIDTH


@triton.jit
def _add_step(
    total, image, weight, step, first, line, pixel, column, WIDEN: tl.constexpr, KERNEL_WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr, STRIDE_H: tl.constexpr, STRIDE_W: tl.constexpr, PADDING_H: tl.constexpr,
    PADDING_W: tl.constexpr, DILATION_H: tl.constexpr, DILATION_W: tl.constexpr, BATCH: tl.constexpr,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Add to `total` the product of weights and image for one tap of the window and DEPTH of its channels. `step`
    numbers the blocks of DEPTH channels of all taps.
    """
    # For line o of the result, a tap reads line o * STRIDE + offset of the image. The code adds a multiple of the
    # stride to keep the offset nonnegative, because Triton's division rounds negative numbers up instead of down.
    AHEAD_H: tl.constexpr = (PADDING_H + STRIDE_H - 1) // STRIDE_H
    AHEAD_W: tl.constexpr = (PADDING_W + STRIDE_W - 1) // STRIDE_W
    tap, block = step // BLOCKS, step % BLOCKS
    down = tap // KERNEL_WIDTH * DILATION_H + (AHEAD_H * STRIDE_H - PADDING_H)
    right = tap % KERNEL_WIDTH * DILATION_W + (AHEAD_W * STRIDE_W - PADDING_W)
    at_line, at_pixel = line + down // STRIDE_H - AHEAD_H, pixel + right // STRIDE_W - AHEAD_W
    channel = (right % STRIDE_W * BLOCKS + block) * DEPTH
    box = image.load([first, at_line, down % STRIDE_H, at_pixel, channel])  # (BATCH, HEIGHT, 1, WIDTH, DEPTH)
    weights = weight.load([column, step * DEPTH])  # (COLUMNS, DEPTH)
    return plus_product(weights, box.reshape(BATCH * HEIGHT * WIDTH, DEPTH).T, total, "ieee", WIDEN)


@triton.jit
def _finish_box(
    total, y, residual, bias, columns, first, line, pixel, column, ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, BATCH: tl.constexpr, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Store activation(total + bias + residual), with total (channels, pixels). The box is stored in PARTS parts, one
    after the other.
    """
    PIXELS: tl.constexpr = BATCH * HEIGHT * WIDTH // PARTS
    if HAS_BIAS:
        lane = column + tl.arange(0, COLUMNS)
        offset = tl.load(bias + lane, mask=lane < columns, other=0.0).to(tl.float32)[:, None]
    parts = in_parts(total, PARTS)
    for part in tl.static_range(PARTS):
        at = [
            first + part * PIXELS // (HEIGHT * WIDTH),
            line + part * PIXELS // WIDTH % HEIGHT,
            pixel + part * PIXELS % WIDTH,
            column,
        ]
        values = parts[part]
        if HAS_BIAS:
            values += offset
        if HAS_RESIDUAL:
            values += residual.load(at).reshape(PIXELS, COLUMNS).T.to(tl.float32)
        values = activated(values, ACTIVATION, True).to(y.dtype)
        y.store(at, values.T.reshape(y.block_shape))


@triton.jit
def _finish_rows(
    total, y, residual, bias, row, column, rows, columns,
    ACTIVATION: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Store activation(total + bias + residual), with total (pixels, channels)."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    if HAS_RESIDUAL:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + place, activated(total, ACTIVATION, True).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _is_last(total, sums, arrived, tile, tiles, part, SPLIT: tl.constexpr):
    """Store a tile's sums over one part of K. Return whether all other parts of K were already stored for this tile."""
    tl.store(_places(sums, tile, tiles, part, total.shape[0], total.shape[1]), total)
    tl.debug_barrier()  # all threads store before the counter is incremented
    return tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1


@triton.jit
def _sum_of_parts(sums, tile, tiles, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr):
    """Add a tile's sums over all parts of K, in order. The loads bypass L1, since programs on other SMs stored the
    sums.
    """
    total = tl.zeros((HEIGHT, WIDTH), tl.float32)
    for part in range(SPLIT):
        total += tl.load(_places(sums, tile, tiles, part, HEIGHT, WIDTH), cache_modifier=".cg")
    return total


@triton.jit
def _places(sums, tile, tiles, part, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """The addresses at which one part of K stores a tile's sums."""
    begin = (part * tiles + tile).to(tl.int64) * (HEIGHT * WIDTH)
    return sums + begin + tl.arange(0, HEIGHT)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
