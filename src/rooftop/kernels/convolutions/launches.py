"""Launch the convolution and pooling kernels of `triton_kernels/`, or call cuDNN or cuBLAS and apply the operations
after the convolution.

`forward` and `max_pool` follow the plans of `tables.py`; `conv_acts.py` and `max_pools.py` have the operators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.kernels.convolutions.tables import (
    FINISH_COLUMNS,
    FINISH_ELEMENTS,
    FINISH_WARPS,
    GROUP_BYTES,
    LEAST_CHANNELS,
    PACK_ELEMENTS,
    PACK_WARPS,
    ConvPlan,
    ConvTile,
    Geometry,
    PoolPlan,
    Problem,
    choose,
    choose_pool,
    packing,
)
from rooftop.kernels.matmuls import launches as matmul_launches
from rooftop.kernels.matmuls import tables as matmul_tables
from rooftop.kernels.operands.activations import ACTIVATIONS
from rooftop.kernels.operands.dtypes import HALVES
from rooftop.kernels.operands.launch_data import Constants, capability, grid_of, power_of_two
from rooftop.kernels.operands.references import without_kernels
from rooftop.kernels.operands.strided_rows import unit
from rooftop.launch.counters import counters
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

if TYPE_CHECKING:
    from triton.tools.tensor_descriptor import TensorDescriptor


def plan_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Geometry, activation: str,
    keep: bool,
) -> ConvPlan:  # fmt: skip
    """The plan that `choose` returns for a call; `keep`: the kernel also writes the input of the activation."""
    kernels = x.is_cuda or INTERPRETED
    return choose(
        Problem(
            geometry, residual is not None, keep, x.dtype, x.device.type, kernels,
            x.is_contiguous(memory_format=torch.channels_last),
            kernels and not keep and copied(x, weight, residual, geometry),
            has_cudnn(x) and activation == "relu", processors(x), capability(x.device),
        )
    )  # fmt: skip


def has_cudnn(x: Tensor) -> bool:
    """Whether x is on a GPU, and cuDNN is available and enabled."""
    return x.is_cuda and torch.backends.cudnn.is_available() and torch.backends.cudnn.enabled


def copied(x: Tensor, weight: Tensor, residual: Tensor | None, geometry: Geometry) -> bool:
    """Whether TMA tensor descriptors can describe all operands. There must be one group, and addresses and the output
    channels of a pixel must be multiples of 16 bytes.

    The input channels of a pixel must be a multiple of 32 bytes. If windows have several pixels or the image is padded,
    the convolution's strides must divide the image's height and width. Neither of these two conditions applies to
    images of fewer than `LEAST_CHANNELS` channels, which are packed first.
    """
    group = GROUP_BYTES // x.element_size()
    aligned = all(t.data_ptr() % GROUP_BYTES == 0 for t in (x, weight, residual) if t is not None)
    if geometry.groups > 1 or geometry.out_channels % group or not aligned:
        return False
    if geometry.channels < LEAST_CHANNELS:
        return True  # `packed` pads the pixels and lines of such images to the alignment that TMA needs
    if geometry.channels % (2 * group):
        return False
    strided = geometry.taps > 1 or geometry.padding != (0, 0)
    return not strided or (geometry.height % geometry.stride[0] == 0 and geometry.width % geometry.stride[1] == 0)


def forward(
    plan: ConvPlan, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, geometry: Geometry,
    activation: str, keep: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute (y (N, O, OH, OW), input of the activation) as `plan` says. The input of the activation is empty unless
    `keep`. The back end decides the memory layout of y.
    """
    nothing = x.new_empty(0)
    bias = bias.contiguous() if bias is not None else None
    if plan.backend == "library":
        return _by_library(x, weight, bias, residual, geometry, activation, keep)
    assert not keep
    if plan.backend != "depthwise":
        weight = weight.contiguous(memory_format=torch.channels_last)
    if residual is not None:
        residual = residual.contiguous(memory_format=torch.channels_last)
    if plan.backend == "cudnn":
        return _by_cudnn(x, weight, bias, residual, geometry), nothing
    require_triton()
    if plan.backend == "product":
        return _as_product(x, weight, bias, geometry, activation), nothing
    assert plan.tile is not None
    y = torch.empty(
        (geometry.batch, geometry.out_channels, *geometry.out), dtype=x.dtype, device=x.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    run = {"gathered": _gathered, "depthwise": _depthwise}.get(plan.tile.kernel, _copied)
    run(plan.tile, x, weight, bias, residual, y, geometry, activation)
    return y, nothing


# ---- libraries ---------------------------------------------------------------------------------------------------


def _as_product(x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, activation: str) -> Tensor:
    """A 1 x 1 convolution without a residual, computed as `linear_act` computes a product."""
    rows = x.permute(0, 2, 3, 1).reshape(geometry.rows, geometry.channels)
    matrix = weight.reshape(geometry.out_channels, geometry.channels)
    plan = matmul_tables.plan_of(rows, matrix, bias, activation, None, False)
    y, _ = matmul_launches.forward(plan, rows, matrix, bias, activation, None, False)
    return y.reshape(geometry.batch, *geometry.out, geometry.out_channels).permute(0, 3, 1, 2)


def _by_cudnn(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, g: Geometry) -> Tensor:
    """Run cuDNN's fused convolution with relu, or with a sum and relu."""
    if residual is None:
        return torch.cudnn_convolution_relu(x, weight, bias, g.stride, g.padding, g.dilation, g.groups)
    return torch.cudnn_convolution_add_relu(x, weight, residual, 1.0, bias, g.stride, g.padding, g.dilation, g.groups)


def _by_library(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, g: Geometry, activation: str, keep: bool
) -> tuple[Tensor, Tensor]:
    """Run PyTorch's convolution, then one pass for all operations after it. PyTorch itself would add the bias in a
    separate pass."""
    before = functional.conv2d(x, weight, None, g.stride, g.padding, g.dilation, g.groups)
    if bias is None and residual is None and activation == "none":
        return before, before.clone() if keep else x.new_empty(0)
    require_triton()
    before = dense(before)
    y = torch.empty_like(before) if keep else before  # in place: one thread reads and then writes each element
    finish(before, bias, residual, activation, y, before if keep else None)
    return y, before if keep else x.new_empty(0)


def dense(t: Tensor) -> Tensor:
    """The tensor itself if it is contiguous or channels last, else a contiguous copy."""
    return t if t.is_contiguous(memory_format=torch.channels_last) else t.contiguous()


def finish(
    sums: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, y: Tensor, before: Tensor | None
) -> None:
    """Compute y = activation(sums + bias + residual), (N, O, OH, OW). `sums`, y and `before` must all be contiguous, or
    all be channels last.
    """
    from rooftop.kernels.convolutions.triton_kernels.conv_acts import conv_act_finish

    if y.numel() == 0:
        return
    batch, channels, *size = y.shape
    last = y.is_contiguous(memory_format=torch.channels_last)
    memory_format = torch.channels_last if last else torch.contiguous_format
    residual = residual.contiguous(memory_format=memory_format) if residual is not None else None
    pixels = math.prod(size)
    rows, columns = (batch * pixels, channels) if last else (batch * channels, pixels)
    group = unit(columns)
    block = min(FINISH_COLUMNS, power_of_two(columns))
    tile: Constants = {"ROWS": FINISH_ELEMENTS // block, "COLUMNS": block, "num_warps": FINISH_WARPS}
    launch(
        conv_act_finish, grid_of(rows, columns, tile), y.device,
        sums, bias, residual, y, before, rows, columns // group, channels,
        ACTIVATION=ACTIVATIONS.index(activation), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        KEEP=before is not None, BY_ROW=not last, UNIT=group, HALF=y.dtype in HALVES, **tile,
    )  # fmt: skip


# ---- copies of boxes -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boxes:
    """An image in the five dimensions that tensor descriptors need: (N, H / SH, SH, W / SW, SW * C), with any strides.

    Attributes:
        base: the tensor that owns the memory.
        shape, strides: sizes and strides of the five dimensions.
        geometry: geometry of the convolution of this image.
        batch, out: number of images of the result, and its (lines, pixels of a line). For a pointwise convolution, all
            pixels of the result count as one line of one image.
    """

    base: Tensor
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    geometry: Geometry
    batch: int
    out: tuple[int, int]


def boxes_of(x: Tensor, geometry: Geometry) -> Boxes:
    """Describe x, channels last, as `Boxes`. The channels of a pixel must be a multiple of 16 bytes. If windows have
    several pixels or the image is padded, the convolution's strides must divide the height and width of x.
    """
    batch, channels, height, width = x.shape
    (down, right), line = geometry.stride, width * channels
    if geometry.pointwise:  # all pixels form one line
        shape, strides = (1, 1, 1, geometry.rows, channels), (*(geometry.rows * channels,) * 3, channels, 1)
        return Boxes(x, shape, strides, geometry, 1, (1, geometry.rows))
    if geometry.taps == 1 and geometry.padding == (0, 0):  # strides skip the pixels that no window reads
        plain = geometry._replace(stride=(1, 1))
        shape = (batch, geometry.out[0], 1, geometry.out[1], channels)
        strides = (height * line, down * line, down * line, right * channels, 1)
        return Boxes(x, shape, strides, plain, batch, geometry.out)
    shape = (batch, height // down, down, width // right, right * channels)
    strides = (height * line, down * line, line, right * channels, 1)
    return Boxes(x, shape, strides, geometry, batch, geometry.out)


def packed(x: Tensor, weight: Tensor, geometry: Geometry) -> tuple[Boxes, Tensor]:
    """Pack an image of few channels, and the weights, so that one line of a window is contiguous in memory.

    Pixels get additional channels, so that neighbouring windows begin a multiple of 16 bytes apart. Lines are padded on
    the left and right. Then KW pixels of CHANNELS channels act as one wide pixel of KW * CHANNELS channels, a power of
    2, and the window is KH x 1. Neighbouring wide pixels may overlap in memory.

    If the window is dilated horizontally, its line is not contiguous: then the image only gets additional channels, and
    additional lines and pixels for the strides (`_widened`).
    """
    pixel, run, _ = packing(geometry, x.element_size())
    if pixel == run:
        return _widened(x, weight, geometry, pixel)
    group, step = GROUP_BYTES // x.element_size(), geometry.stride[1]
    down = geometry.stride[0]
    lines = -(-geometry.height // down) * down
    pixels = -(-((geometry.out[1] - 1) * step + run // pixel) // group) * group
    image = _pack(x, lines, pixels, pixel, geometry.padding[1])
    weights = _pack(weight, geometry.kernel[0], run // pixel, pixel, 0)
    line = pixels * pixel
    shape = (geometry.batch, lines // down, down, geometry.out[1], run)
    strides = (lines * line, down * line, line, step * pixel, 1)
    seen = geometry._replace(
        channels=run, kernel=(geometry.kernel[0], 1), stride=(down, 1), padding=(geometry.padding[0], 0)
    )
    return Boxes(image, shape, strides, seen, geometry.batch, geometry.out), weights


def _widened(x: Tensor, weight: Tensor, geometry: Geometry, channels: int) -> tuple[Boxes, Tensor]:
    """Pad the image with zeros: to `channels` channels, and to a height and width that are multiples of the strides."""
    down, right = geometry.stride
    height, width = -(-geometry.height // down) * down, -(-geometry.width // right) * right
    image = _pack(x, height, width, channels, 0).permute(0, 3, 1, 2)
    weights = _pack(weight, *geometry.kernel, channels, 0)
    boxes = boxes_of(image, geometry._replace(channels=channels, height=height, width=width))
    return replace(boxes, out=geometry.out), weights


def _pack(source: Tensor, height: int, width: int, pixel: int, left: int) -> Tensor:
    """Copy (N, C, H, W) of any strides to (N, height, width, pixel), shifted `left` pixels to the right, and fill the
    other elements with zeros.
    """
    from rooftop.kernels.convolutions.triton_kernels.conv_acts import conv_act_pack

    batch, channels, source_height, source_width = source.shape
    target = source.new_empty((batch, height, width, pixel))
    block = power_of_two(width * pixel)
    rows = max(1, PACK_ELEMENTS // block)
    launch(
        conv_act_pack, (-(-batch * height // rows),), source.device,
        source, target, batch * height, source_height, source_width, channels, height, left,
        source.stride(0), source.stride(1), source.stride(2), source.stride(3),
        PIXEL=pixel, LINE=width * pixel, ROWS=rows, BLOCK=block, num_warps=PACK_WARPS,
    )  # fmt: skip
    return target


@cache
def box_of(pixels: int, batch: int, lines: int, line: int) -> tuple[int, int, int]:
    """The size of a box (images, lines, pixels of a line) such that the fewest boxes cover a result. The three sizes
    are powers of 2, and their product is `pixels`. Among sizes that need the same number of boxes, the function returns
    the size with the fewest images and the longest lines, so that copies are contiguous.
    """
    powers = [1 << exponent for exponent in range(pixels.bit_length())]
    boxes = [(pixels // (h * w), h, w) for h in powers for w in powers if h * w <= pixels]
    boxes = [box for box in boxes if max(box) <= 256]  # one TMA copy has at most 256 elements in each dimension
    return min(boxes, key=lambda b: (-(-batch // b[0]) * -(-lines // b[1]) * -(-line // b[2]), b[0], -b[2]))


def _copied(
    tile: ConvTile, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, g: Geometry,
    activation: str,
) -> None:  # fmt: skip
    """Launch `conv_act_persistent` or `conv_act_single`, as `tile.kernel` says. Both kernels load boxes of the image by
    TMA.
    """
    from rooftop.kernels.convolutions.triton_kernels.conv_acts import conv_act_persistent, conv_act_single

    boxes, weights = packed(x, weight, g) if g.channels < LEAST_CHANNELS else (boxes_of(x, g), weight)
    g, (lines, pixels) = boxes.geometry, boxes.out
    assert g.channels % tile.depth == 0, f"{tile} leaves channels out of {g.channels}"
    box = box_of(tile.rows, boxes.batch, lines, pixels)
    part = _part_of(box, tile.parts)
    tiles = -(-boxes.batch // box[0]) * -(-lines // box[1]) * -(-pixels // box[2]) * -(-g.out_channels // tile.columns)
    result = (boxes.batch, lines, pixels, g.out_channels)
    arguments = (
        _described(boxes.base, boxes.shape, boxes.strides, (box[0], box[1], 1, box[2], tile.depth)),
        _described(
            weights, (g.out_channels, g.taps * g.channels), (g.taps * g.channels, 1), (tile.columns, tile.depth)
        ),
        _described_result(y, result, (*part, tile.columns)),
        _described_result(residual, result, (*part, tile.columns)) if residual is not None else None,
        bias,
    )
    constants = _constants(tile, g, bias, residual, activation) | {
        "BLOCKS": g.channels // tile.depth, "DEPTH": tile.depth, "BATCH": box[0], "HEIGHT": box[1], "WIDTH": box[2],
        "PARTS": tile.parts,
    }  # fmt: skip
    if tile.kernel == "persistent":
        grid = (min(tiles, tile.programs_per_sm * processors(x)),)
        launch(conv_act_persistent, grid, x.device, *arguments, *result, **constants)
        return
    sums, arrived = _shared_sums(tile, tiles, x.device)
    launch(
        conv_act_single, (tiles * tile.split,), x.device, *arguments, sums, arrived, *result,
        **constants, **_early(tile), SPLIT=tile.split,
    )  # fmt: skip


def _part_of(box: tuple[int, int, int], parts: int) -> tuple[int, int, int]:
    """The size (images, lines, pixels) of each part, if a box of this size is cut into `parts` equal parts (a power of
    two). The box is halved along its images first, then along its lines, then along its pixels.
    """
    images, lines, pixels = box
    while parts > 1:
        if images > 1:
            images //= 2
        elif lines > 1:
            lines //= 2
        else:
            pixels //= 2
        parts //= 2
    return images, lines, pixels


def _described(
    base: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(shape), list(strides), list(block))


def _described_result(t: Tensor, shape: tuple[int, int, int, int], block: tuple[int, ...]) -> TensorDescriptor:
    _, lines, pixels, channels = shape
    return _described(t, shape, (lines * pixels * channels, pixels * channels, channels, 1), block)


# ---- pointers ------------------------------------------------------------------------------------------------------

WIDE = 8  # elements of the widest load of half precision


def _gathered(
    tile: ConvTile, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, g: Geometry,
    activation: str,
) -> None:  # fmt: skip
    """Launch `conv_act_gathered`, which loads the image by pointers instead of TMA."""
    from rooftop.kernels.convolutions.triton_kernels.conv_acts import conv_act_gathered

    channels, out_channels = g.of_group
    tiles = -(-g.rows // tile.rows) * g.groups * -(-out_channels // tile.columns)
    sums, arrived = _shared_sums(tile, tiles, x.device)
    line = g.width * g.channels
    reach = (g.batch * g.height + sum(g.padding) + g.kernel[0] * g.dilation[0]) * line
    launch(
        conv_act_gathered, (tiles * tile.split,), x.device, x, weight, y, residual, bias, sums, arrived,
        g.rows, g.out_channels, g.height, g.width, *g.out, g.height * line, line, g.channels,
        CHANNELS=channels, DEPTH=tile.depth, ROWS=tile.rows, SPLIT=tile.split, WIDE=reach >= 1 << 31, GROUPS=g.groups,
        **_constants(tile, g, bias, residual, activation), **_early(tile),
    )  # fmt: skip


def _depthwise(
    tile: ConvTile, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, y: Tensor, g: Geometry,
    activation: str,
) -> None:  # fmt: skip
    """Launch the kernel for depthwise convolutions."""
    from rooftop.kernels.convolutions.triton_kernels.depthwise import conv_act_depthwise

    rows = g.batch * g.out[0]
    programs = -(-rows // tile.rows) * -(-g.out[1] // tile.depth)
    w_channel, _, *w_window = weight.stride()
    unit = math.gcd(g.channels, WIDE)
    launch(
        conv_act_depthwise, (programs, -(-g.channels // tile.columns)), x.device,
        x, weight, y, residual, bias, rows, g.channels // unit, g.height, g.width, *g.out, w_channel, *w_window,
        ACTIVATION=ACTIVATIONS.index(activation), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None,
        KERNEL_HEIGHT=g.kernel[0], KERNEL_WIDTH=g.kernel[1], STRIDE_H=g.stride[0], STRIDE_W=g.stride[1],
        PADDING_H=g.padding[0], PADDING_W=g.padding[1], DILATION_H=g.dilation[0], DILATION_W=g.dilation[1],
        ROWS=tile.rows, COLUMNS=tile.columns, RUN=tile.depth, UNIT=unit, FASTEST=is_fastest(weight),
        num_warps=tile.warps,
    )  # fmt: skip


def channels_fastest(weight: Tensor) -> Tensor:
    """The weights (C, 1, KH, KW) of a depthwise convolution, stored as (KH, KW, C), which its kernel reads fastest."""
    return weight.permute(2, 3, 1, 0).contiguous().permute(3, 2, 0, 1)


def is_fastest(weight: Tensor) -> bool:
    """Whether weights have the layout of `channels_fastest`."""
    return weight.permute(2, 3, 1, 0).is_contiguous()


# ---- both directions -----------------------------------------------------------------------------------------------


def _constants(
    tile: ConvTile, g: Geometry, bias: Tensor | None, residual: Tensor | None, activation: str
) -> dict[str, int | bool]:
    """The constants that `conv_act_persistent`, `conv_act_single` and `conv_act_gathered` have in common."""
    return {
        "ACTIVATION": ACTIVATIONS.index(activation),
        "HAS_BIAS": bias is not None,
        "HAS_RESIDUAL": residual is not None,
        "WIDEN": INTERPRETED,
        "TAPS": g.taps,
        "KERNEL_WIDTH": g.kernel[1],
        "STRIDE_H": g.stride[0],
        "STRIDE_W": g.stride[1],
        "PADDING_H": g.padding[0],
        "PADDING_W": g.padding[1],
        "DILATION_H": g.dilation[0],
        "DILATION_W": g.dilation[1],
        "COLUMNS": tile.columns,
        "GROUP": tile.group,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }


def _early(tile: ConvTile) -> dict[str, bool]:
    return {"EARLY": True, "launch_pdl": True} if tile.early and not INTERPRETED else {"EARLY": False}


def _shared_sums(tile: ConvTile, tiles: int, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Allocate memory for a convolution whose K is split over several programs: the float32 sums of each tile over each
    part of K, and for each tile a counter of the stored parts, set to 0. Return (None, None) if K has one part.
    """
    if tile.split == 1:
        return None, None
    sums = torch.empty(tile.split * tiles * tile.rows * tile.columns, dtype=torch.float32, device=device)
    arrived = counters(device, tiles)
    return sums, arrived if arrived is not None else torch.zeros(tiles, dtype=torch.int32, device=device)


# ---- max pooling -----------------------------------------------------------------------------------------------


def pool_plan_of(x: Tensor, geometry: Geometry) -> PoolPlan:
    """The plan that `choose_pool` returns for a call."""
    last = x.is_contiguous(memory_format=torch.channels_last)
    return choose_pool(geometry, x.dtype, x.device.type, not without_kernels(x.device), last)


def max_pool(plan: PoolPlan, x: Tensor) -> Tensor:
    """Compute the max pool (N, C, OH, OW) of x, channels last like x."""
    require_triton()
    from rooftop.kernels.convolutions.triton_kernels import max_pools

    batch, channels, height, width = x.shape
    lines, pixels = plan.sizes
    y = x.new_empty((batch, lines, pixels, channels))
    launch(max_pools.max_pool, plan.grid, x.device, x, y, height, width, lines, pixels, channels, **plan.constants)
    return y.permute(0, 3, 1, 2)
