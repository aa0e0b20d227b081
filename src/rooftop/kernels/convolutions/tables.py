"""Choose a kernel and its parameters, or a library, by the shape of a convolution and the operations after it.

`MEASURED_ON_HOPPER` contains measurements on an H200 (`benchmarks/tuning/conv_acts.py` prints its lines). A call uses
the fastest choice for the nearest measured shape with the same taps and stride, both with or both without a residual
(`_nearest`). If no measured shape is near, `_predicted` returns the choice that is expected to be the fastest. Nothing
is measured at run time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Literal, NamedTuple

import torch

from rooftop.kernels.operands.dtypes import HALVES
from rooftop.kernels.operands.launch_data import Constants, power_of_two

# ---- possible choices ------------------------------------------------------------------------------------------

Kernel = Literal["persistent", "single", "gathered", "depthwise"]
Backend = Literal["persistent", "single", "gathered", "depthwise", "product", "cudnn", "library", "reference"]


@dataclass(frozen=True)
class ConvTile:
    """How a kernel computes a convolution.

    Attributes:
        kernel: "persistent": programs load by TMA, and each computes many tiles of the result. "single": programs load
            by TMA, and each computes one tile. "gathered": programs load by pointers. "depthwise": programs load by
            pointers and compute no matrix product; each channel is a group.
        rows, columns, depth: pixels of a tile of the result, channels of that tile, and channels of a tap per step;
            powers of 2. For "depthwise", `rows` counts lines of the result, and `depth` is the number of neighbouring
            pixels computed in each line, which need not be a power of 2.
        warps, stages: warps of a program, and stages of its pipeline of loads to shared memory.
        group: height of a band of tiles, in tiles. Programs compute tiles band by band, so that the operands of a band
            stay in the L2 cache.
        parts: number of parts in which the epilogue stores a tile's pixels (not for "gathered").
        split: number of parts of K, each summed by a separate program (not for "persistent"); no part is empty.
        programs_per_sm: number of persistent programs on an SM. With two programs on an SM, one program computes while
            the other stores.
        early: whether the kernel may start while the previous kernel still runs, and then waits on the device for the
            previous kernel (not for "persistent").
    """

    kernel: Kernel
    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    group: int = 8
    parts: int = 1
    split: int = 1
    programs_per_sm: int = 1
    early: bool = False

    def __str__(self) -> str:
        split = f", K in {self.split} parts" if self.split > 1 else ""
        return f"{self.rows} x {self.columns} x {self.depth}, {self.warps} warps, {self.stages} stages{split}"


class Geometry(NamedTuple):
    """The shapes of a convolution: x (batch, channels, height, width) and weight (out_channels, channels / groups,
    *kernel). `kernel`, `stride`, `padding` and `dilation` are pairs (vertical, horizontal). The class is a tuple,
    because each call creates and hashes a geometry, and both are fast for tuples.

    Attributes:
        ceil: whether the size of the result is rounded up, as `ceil_mode` of a pool does (pools only).
    """

    batch: int
    channels: int
    height: int
    width: int
    out_channels: int
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    groups: int = 1
    ceil: bool = False

    @property
    def out(self) -> tuple[int, int]:
        """(number of lines of the result, number of pixels per line); 0 or negative if the window does not fit."""
        sides = zip((self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        height, width = (_windows(*side, self.ceil) for side in sides)
        return height, width

    @property
    def rows(self) -> int:
        """Pixels of the result."""
        return self.batch * self.out[0] * self.out[1]

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def depthwise(self) -> bool:
        """Whether there are several groups, each with one input channel and one output channel."""
        return 1 < self.groups == self.channels == self.out_channels

    @property
    def of_group(self) -> tuple[int, int]:
        """The numbers of input channels and of output channels of a group."""
        return self.channels // self.groups, self.out_channels // self.groups

    @property
    def pointwise(self) -> bool:
        """Whether the convolution is a matrix product: its window is a single pixel, its stride is 1, and it has no
        padding.
        """
        return self.taps == 1 and self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1


def _windows(size: int, kernel: int, stride: int, padding: int, dilation: int, ceil: bool) -> int:
    """The number of windows along the height or the width of the image. With `ceil`, the last window may end beyond the
    padded image, but it must start before the padding at the image's end.
    """
    after_first = size + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil:
        return after_first // stride + 1
    count = -(-after_first // stride) + 1
    return count - 1 if (count - 1) * stride >= size + padding else count


@dataclass(frozen=True)
class Entry:
    """The fastest choice for convolutions near `shape`: (pixels of all images of the result, output channels, input
    channels, taps, stride, whether there is a residual). `ms`: time of this choice in milliseconds. `library_ms`: time
    of cuDNN with a separate pass for the operations after it, measured in the same run.
    """

    shape: tuple[int, int, int, int, int, bool]
    backend: Backend
    tile: ConvTile | None
    ms: float
    library_ms: float


@dataclass(frozen=True)
class ConvPlan:
    """How a call of `conv_act` is computed.

    Attributes:
        backend: "persistent", "single", "gathered" or "depthwise" (one Triton kernel), "product" (as `linear_act`),
            "cudnn" (one call of cuDNN), "library" (cuDNN, and one pass for the operations after it), "reference" (plain
            PyTorch).
        tile: the kernel's parameters.
        reason: why this plan was chosen.
    """

    backend: Backend
    tile: ConvTile | None
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}{f' ({self.tile})' if self.tile else ''}: {self.reason}"


# ---- tables ----------------------------------------------------------------------------------------------------

SQUARE_IN_TWO = ConvTile("persistent", 128, 128, 64, 4, 3, group=16, parts=2, programs_per_sm=2)
SQUARE_IN_FOUR = replace(SQUARE_IN_TWO, parts=4)

# The first 16 different convolutions of ResNet-50 at a batch of 256, on an H200
# (benchmarks/results/h200/tune_conv_acts.json).
MEASURED_ON_HOPPER: tuple[Entry, ...] = (
    Entry(
        (3211264, 64, 3, 49, 2, False),
        "persistent",
        ConvTile("persistent", 256, 64, 32, 4, 4, group=16, parts=2, programs_per_sm=2),
        0.4445,
        1.951,
    ),
    Entry((802816, 64, 64, 1, 1, False), "single", ConvTile("single", 128, 64, 64, 4, 2, early=True), 0.05395, 0.1056),
    Entry((802816, 64, 64, 9, 1, False), "cudnn", None, 0.1351, 0.1805),
    Entry(
        (802816, 256, 64, 1, 1, True),
        "persistent",
        ConvTile("persistent", 128, 128, 64, 4, 2, group=16, parts=2, programs_per_sm=2),
        0.2853,
        0.466,
    ),
    Entry((802816, 256, 64, 1, 1, False), "persistent", SQUARE_IN_FOUR, 0.1458, 0.3762),
    Entry((802816, 64, 256, 1, 1, False), "single", ConvTile("single", 128, 64, 64, 4, 3, early=True), 0.1226, 0.1789),
    Entry((802816, 128, 256, 1, 1, False), "persistent", SQUARE_IN_FOUR, 0.1586, 0.2763),
    Entry((200704, 128, 128, 9, 2, False), "cudnn", None, 0.1027, 0.1305),
    Entry((200704, 128, 128, 9, 1, False), "cudnn", None, 0.0973, 0.1235),
    Entry((200704, 512, 128, 1, 1, True), "cudnn", None, 0.1223, 0.2206),
    Entry((200704, 512, 256, 1, 2, False), "persistent", SQUARE_IN_TWO, 0.117, 0.2118),
    Entry((200704, 128, 512, 1, 1, False), "persistent", SQUARE_IN_FOUR, 0.06764, 0.09587),
    Entry((200704, 256, 512, 1, 1, False), "persistent", SQUARE_IN_FOUR, 0.1066, 0.1498),
    Entry((50176, 256, 256, 9, 2, False), "cudnn", None, 0.0924, 0.1054),
    Entry((50176, 256, 256, 9, 1, False), "cudnn", None, 0.08549, 0.09615),
    Entry((50176, 1024, 256, 1, 1, True), "cudnn", None, 0.08275, 0.1266),
)
NEAR = 2.0  # maximum `_distance` at which the entry of a measured shape is used
# Convolutions with few output pixels were not measured yet. With tiles of 128 x 128, two programs run on each SM, as in
# linear_act: one program computes while the other stores.
MANY = SQUARE_IN_TWO
MANY_ADDED = SQUARE_IN_FOUR  # with a residual, which also occupies shared memory
FEW = ConvTile("single", 64, 64, 64, 4, 4, early=True)
# Numbers of channels per group for which cuDNN's fused call takes about as long as its convolution alone. For other
# numbers, the fused call takes up to 21 times as long as the convolution followed by a separate pass
# (benchmarks/results/h200/tune_grouped_convs.json).
GROUPS_OF_CUDNN = (4, 8, 16, 32, 64, 128)
LEAST_OF_GROUP = 16  # minimum size of an operand of a tensor-core instruction
# For numbers of channels per group that are not in GROUPS_OF_CUDNN (also in tune_grouped_convs.json), the kernel takes
# 0.15 to 1.18 times as long as cuDNN with a separate pass at batch 1. At batch 128 the kernel takes 0.62 to 0.84 times
# as long as cuDNN with a separate pass, but 1.3 to 1.7 times as long for the groups of `_library_is_faster`.
FEW_OF_GROUPS = ConvTile("gathered", 64, 64, 64, 4, 4)
MANY_OF_GROUPS = ConvTile("gathered", 128, 64, 64, 8, 3)
FEW_TILES = 8  # tiles per SM at the border between few and many; only batches of 1 and 128 were measured
# Depthwise convolutions (tune_depthwise.json). The kernel takes 0.53 to 0.85 times as long as cuDNN with a separate
# pass at batch 128, and 0.59 to 0.68 times as long at batch 1. A program computes a run of pixels in each of several
# adjacent lines.
RUNS_OF_CHANNELS = 512  # runs of pixels in a program; each run belongs to one channel
MOST_COLUMNS_OF_RUNS = 64
LONG_RUN, SHORT_RUN = 7, 4  # most feature maps of image networks have widths that are multiples of 7 pixels
LONGEST_WINDOW = 7  # maximum height and width of the window; the kernel is unrolled over a line of the window
MOST_PARTS, LEAST_STEPS = 8, 4  # maximum number of parts of K, and minimum number of steps of each part

# ---- choice ----------------------------------------------------------------------------------------------------


class Problem(NamedTuple):
    """The properties of a call on which the choice of a plan depends.

    Attributes:
        residual: whether a residual is added.
        keep: whether the kernel also writes the input of the activation.
        device, kernels: the device type, and whether Triton's kernels run on the device.
        channels_last: whether x is channels last.
        copied: whether a kernel can copy all operands by TMA (`launches.copied`).
        cudnn: whether one call of cuDNN can compute the whole operator: on a GPU, if the activation is relu.
    """

    geometry: Geometry
    residual: bool
    keep: bool
    dtype: torch.dtype
    device: str
    kernels: bool
    channels_last: bool
    copied: bool
    cudnn: bool
    sms: int
    capability: int


@cache
def choose(problem: Problem) -> ConvPlan:
    """The plan for a convolution."""
    geometry = problem.geometry
    if problem.dtype == torch.float64:
        return ConvPlan("reference", None, "float64")
    if not problem.kernels:
        return ConvPlan("reference", None, f"no kernels for {problem.device}")
    if geometry.rows == 0:
        return ConvPlan("library", None, "there are no images")
    if problem.keep:
        return ConvPlan("library", None, "the gradient needs the value before the activation")
    if problem.dtype not in HALVES:
        return ConvPlan("library", None, "float32")
    if not problem.channels_last:
        return ConvPlan("library", None, "x is not channels last")
    library: Backend = "cudnn" if problem.cudnn else "library"
    if geometry.groups > 1:
        return _of_groups(problem, library)
    if geometry.rows >= 1 << 31:
        return ConvPlan(library, None, "2^31 pixels or more")
    if problem.capability != 9:
        return ConvPlan(library, None, "not measured on this GPU")
    entry = _nearest(problem)
    if entry is None:
        return _predicted(problem, library)
    if entry.backend == "cudnn":
        return ConvPlan(library, None, _reason(entry))
    tile = fitted(entry.tile, problem) if entry.tile else None
    return ConvPlan(tile.kernel if tile else entry.backend, tile, _reason(entry))


def _of_groups(problem: Problem, library: Backend) -> ConvPlan:
    """The plan for a convolution with groups, whose operands TMA cannot copy."""
    geometry, (channels, out_channels) = problem.geometry, problem.geometry.of_group
    reason = f"{geometry.groups} groups of {channels} channels"
    if library == "cudnn" and channels == out_channels and channels in GROUPS_OF_CUDNN:
        return ConvPlan(library, None, reason)
    if problem.capability != 9 or geometry.rows >= 1 << 31:
        return ConvPlan("library", None, reason)
    if geometry.depthwise and max(geometry.kernel) <= LONGEST_WINDOW and geometry.dilation == (1, 1):
        return ConvPlan("depthwise", depthwise_tile(geometry, problem.sms), "each channel is a group")
    if min(channels, out_channels) < LEAST_OF_GROUP:
        return ConvPlan("library", None, reason)
    tile = FEW_OF_GROUPS
    tiles = -(-geometry.rows // tile.rows) * -(-out_channels // tile.columns) * geometry.groups
    if tiles > FEW_TILES * problem.sms:
        if _library_is_faster(geometry):
            return ConvPlan("library", None, f"{reason} and many pixels")
        tile = MANY_OF_GROUPS
    return ConvPlan("gathered", fitted(tile, problem), reason)


def _library_is_faster(geometry: Geometry) -> bool:
    """Whether, at many pixels, cuDNN followed by a separate pass should be faster than the kernel "gathered".
    Measurements at batch 128 showed this for two groups of 24 channels each, and for 4 to 16 groups of 56 channels
    each, all with a stride of 1. The bounds in the code are wider: fewer than 4 groups of up to 32 channels each at any
    stride, and any number of groups of 33 to 64 channels each at a stride of 1.
    """
    channels, _ = geometry.of_group
    return geometry.groups < 4 if channels <= 32 else channels <= 64 and geometry.stride == (1, 1)


def depthwise_tile(geometry: Geometry, sms: int) -> ConvTile:
    """The tile of a depthwise convolution. A thread computes `SHORT_RUN` pixels of a line if longer runs would give
    fewer than `FEW_TILES` programs per SM, or if the horizontal stride is above 1. Otherwise it computes `LONG_RUN`
    pixels.
    """
    channels = geometry.channels
    columns = min(MOST_COLUMNS_OF_RUNS, max(8, power_of_two(channels)))
    if columns == MOST_COLUMNS_OF_RUNS and -channels % columns > -channels % (columns // 2):
        columns //= 2  # narrower tiles have fewer columns past the last channel
    rows = RUNS_OF_CHANNELS // columns
    blocks = -(-geometry.batch * geometry.out[0] // rows) * -(-geometry.out[1] // LONG_RUN)
    few = blocks * -(-channels // columns) < FEW_TILES * sms
    run = SHORT_RUN if few or geometry.stride[1] > 1 else LONG_RUN
    return ConvTile("depthwise", rows, columns, run, 4, 1)


def _nearest(problem: Problem) -> Entry | None:
    """The entry of the nearest measured shape of the same kind, or None if its distance exceeds `NEAR`. Two shapes are
    of the same kind if they have the same number of taps and the same stride, and if both or neither have a residual.
    """
    found = [(_distance(entry, problem), entry) for entry in MEASURED_ON_HOPPER if _same_kind(entry, problem)]
    distance, entry = min(found, key=lambda pair: pair[0], default=(math.inf, None))
    return entry if distance <= NEAR else None


def _same_kind(entry: Entry, problem: Problem) -> bool:
    geometry = problem.geometry
    *_, taps, stride, residual = entry.shape
    same = (taps, (stride, stride), residual) == (geometry.taps, geometry.stride, problem.residual)
    return same and (entry.backend != "product" or geometry.pointwise)  # "product" computes only pointwise convolutions


def _distance(entry: Entry, problem: Problem) -> float:
    geometry = problem.geometry
    sizes = (geometry.rows, geometry.out_channels, geometry.channels)
    return sum(abs(math.log2(max(a, 1) / b)) for a, b in zip(sizes, entry.shape[:3], strict=True))


def _predicted(problem: Problem, library: Backend) -> ConvPlan:
    """The plan for a shape that is far from all measured shapes."""
    geometry, reason = problem.geometry, "not measured near this shape"
    if geometry.pointwise and not problem.residual:
        return ConvPlan("product", None, "1 x 1: a product of matrices")
    if not problem.copied:
        return ConvPlan(library, None, f"{reason}, and x cannot be copied in boxes")
    if -(-geometry.rows // 128) * -(-geometry.out_channels // 128) >= problem.sms:
        return ConvPlan("persistent", fitted(MANY_ADDED if problem.residual else MANY, problem), reason)
    tiles = -(-geometry.rows // FEW.rows) * -(-geometry.out_channels // FEW.columns)
    steps = geometry.taps * -(-geometry.channels // FEW.depth)
    most = max(1, min(MOST_PARTS, steps // LEAST_STEPS, problem.sms // tiles))
    tile = replace(FEW, split=1 << (most.bit_length() - 1))
    return ConvPlan("single", fitted(tile, problem), reason)


def fitted(tile: ConvTile, problem: Problem) -> ConvTile:
    """Adapt a tile from the tables to a convolution. The adapted tile has no more columns or channels per step than the
    convolution needs, and no empty part of K. Its kernel is "gathered" if TMA cannot copy the operands.
    """
    geometry = problem.geometry
    kernel: Kernel = tile.kernel if problem.copied else "gathered"
    channels, out_channels = geometry.of_group
    least = 16 if kernel == "gathered" else 64  # smallest operand of the kernel's tensor-core instructions
    columns = min(tile.columns, max(least, power_of_two(out_channels)))
    if geometry.groups > 1:
        depth = min(tile.depth, max(16, power_of_two(channels)))
        steps = geometry.taps * -(-channels // depth)
    elif kernel == "gathered":
        depth, steps = tile.depth, -(-geometry.taps * geometry.channels // tile.depth)
    else:
        packed = geometry.channels < LEAST_CHANNELS
        (_, channels, taps) = (
            packing(geometry, problem.dtype.itemsize) if packed else (0, geometry.channels, geometry.taps)
        )
        depth = math.gcd(channels, tile.depth)
        steps = taps * channels // depth
    split = 1 if kernel == "persistent" else -(-steps // -(-steps // tile.split))
    return replace(tile, kernel=kernel, columns=columns, split=split, depth=depth)


def _reason(entry: Entry) -> str:
    rows, out_channels, channels, taps, stride, _ = entry.shape
    shape = f"{rows} x {channels} to {out_channels} of {taps} taps, stride {stride}"
    return f"{entry.ms:.4g} ms at {shape}, {entry.library_ms:.4g} ms with cuDNN and another pass"


LEAST_CHANNELS = 8  # `launches.packed` packs images of fewer channels into groups
GROUP_BYTES = 16  # strides and addresses of tensor descriptors must be multiples of 16 bytes


def packing(geometry: Geometry, element_bytes: int) -> tuple[int, int, int]:
    """Describe how an image of few channels is padded for TMA. Return the number of channels of a padded pixel, the
    number of channels that a tap reads (the pixels of a whole line of the window, if they are contiguous), and the
    number of such taps.
    """
    group = GROUP_BYTES // element_bytes
    if geometry.dilation[1] > 1 and geometry.kernel[1] > 1:
        # The taps of a line are not contiguous, so each tap is read separately, and each pixel is padded to whole
        # groups.
        return 2 * group, 2 * group, geometry.taps
    pixel = group // math.gcd(group, geometry.stride[1])
    while pixel < geometry.channels:
        pixel *= 2
    return pixel, max(2 * group, power_of_two(geometry.kernel[1] * pixel)), geometry.kernel[0]


# ---- max pools -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolConfig:
    """A program's block of the result (lines, pixels and channels), and the program's warps."""

    lines: int
    pixels: int
    channels: int
    warps: int


# Measured on an H200 (benchmarks/results/h200/tune_max_pools.json): within 3% of the fastest at the three sizes timed.
MAX_POOL = PoolConfig(lines=2, pixels=8, channels=64, warps=4)
MOST_TAPS = 25  # maximum number of elements of a window, over which the kernel is unrolled


@dataclass(frozen=True)
class PoolPlan:
    """How a call of `max_pool2d` is computed.

    Attributes:
        backend: "kernel", or "reference" (plain PyTorch).
        reason: why this plan was chosen.
        sizes: (number of lines of the result, number of pixels per line).
        grid, constants: grid and constants of the kernel.
    """

    backend: Literal["kernel", "reference"]
    reason: str
    sizes: tuple[int, int] = (0, 0)
    grid: tuple[int, ...] = ()
    constants: Constants = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


@cache
def choose_pool(geometry: Geometry, dtype: torch.dtype, device: str, kernels: bool, channels_last: bool) -> PoolPlan:
    """The plan for a max pool with this geometry; `kernels`: whether Triton's kernels run on the device."""
    if dtype == torch.float64:
        return PoolPlan("reference", "float64")
    if not kernels:
        return PoolPlan("reference", f"no kernels for {device}")
    if not channels_last:
        return PoolPlan("reference", "x is not channels last")
    if geometry.taps > MOST_TAPS:
        return PoolPlan("reference", f"a window has {geometry.taps} elements, more than {MOST_TAPS}")
    if geometry.batch == 0:
        return PoolPlan("reference", "there are no images")
    config, (lines, pixels) = MAX_POOL, geometry.out
    block = min(config.channels, power_of_two(geometry.channels))
    boxes = geometry.batch * -(-lines // config.lines) * -(-pixels // config.pixels)
    constants: Constants = {
        f"{name.upper()}_{side}": size
        for name in ("kernel", "stride", "padding", "dilation")
        for side, size in zip("HW", getattr(geometry, name), strict=True)
    }
    constants |= {"HEIGHT": config.lines, "WIDTH": config.pixels, "CHANNELS": block, "num_warps": config.warps}
    why = f"x is channels last, and a window has {geometry.taps} elements, at most {MOST_TAPS}"
    return PoolPlan("kernel", why, geometry.out, (boxes, -(-geometry.channels // block)), constants)


# ---- passes after a library's convolution, and packing ---------------------------------------------------------------
FINISH_ELEMENTS, FINISH_COLUMNS, FINISH_WARPS = 2048, 512, 4
PACK_ELEMENTS, PACK_WARPS = 4096, 4
