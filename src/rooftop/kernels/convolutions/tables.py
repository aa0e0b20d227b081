"""Which kernel makes a convolution with what follows it, with which parameters, or a library: by the shape.

`MEASURED_ON_HOPPER` says what a GPU measured (`benchmarks/tuning/conv_acts.py` prints its lines); a call takes what was
fastest for the nearest shape of its kind. Where none is near, `_predicted` says what should be. Nothing is timed when a
program starts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from rooftop.kernels.operands.launch_data import power_of_two

# ---- what can be chosen ----------------------------------------------------------------------------------------

Kernel = Literal["persistent", "single", "gathered"]
Backend = Literal["persistent", "single", "gathered", "product", "cudnn", "library", "reference"]


@dataclass(frozen=True)
class ConvTile:
    """How a kernel makes a convolution.

    Attributes:
        kernel: persistent programs that copy boxes (TMA), one box a program, or one with pointers.
        rows, columns, depth: pixels and channels of a tile of the result, and channels of a tap at a time; powers of 2.
        warps, stages: of a program, and how many steps are on their way to shared memory.
        group: rows of tiles in a band that shares operands in L2.
        parts: of a tile's pixels, finished one after the other (not gathered).
        split: parts of K that are summed apart (not persistent).
        programs_per_sm: how many persistent programs an SM holds: with two, one computes while the other finishes.
        early: whether it is launched while the kernel before may still run, and waits for it (not persistent).
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


@dataclass(frozen=True)
class Geometry:
    """The shapes of a convolution: x (batch, channels, height, width), weight (out_channels, channels / groups,
    *kernel); the rest for lines and pixels of a line."""

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

    @property
    def out(self) -> tuple[int, int]:
        """Lines of the result and pixels of each; negative where the window does not fit."""
        height, width = (
            (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, padding, dilation in zip(
                (self.height, self.width), self.kernel, self.stride, self.padding, self.dilation, strict=True
            )
        )
        return height, width

    @property
    def rows(self) -> int:
        """Pixels of the result."""
        return self.batch * self.out[0] * self.out[1]

    @property
    def taps(self) -> int:
        return self.kernel[0] * self.kernel[1]

    @property
    def pointwise(self) -> bool:
        """Whether it is a product of matrices: each pixel by itself, all of them."""
        return self.taps == 1 and self.stride == (1, 1) and self.padding == (0, 0) and self.groups == 1


@dataclass(frozen=True)
class Entry:
    """What is taken for convolutions near `shape`: (rows, out channels, channels, taps, stride, whether there is a
    residual). `ms`: of the best; `library_ms`: of cuDNN and one more pass, measured beside it."""

    shape: tuple[int, int, int, int, int, bool]
    backend: Backend
    tile: ConvTile | None
    ms: float
    library_ms: float


@dataclass(frozen=True)
class ConvPlan:
    """How a call of `conv_act` is computed.

    Attributes:
        backend: "persistent", "single" or "gathered" (one Triton kernel), "product" (as `linear_act`), "cudnn" (one
            call of cuDNN's), "library" (cuDNN, and one pass for what follows), "reference" (plain PyTorch).
        tile: the kernel's parameters.
        reason: why.
    """

    backend: Backend
    tile: ConvTile | None
    reason: str

    def __str__(self) -> str:
        return f"{self.backend}{f' ({self.tile})' if self.tile else ''}: {self.reason}"


# ---- tables ----------------------------------------------------------------------------------------------------

# On an H200, ResNet-50 at a batch of 256 (benchmarks/results/h200/tune_conv_acts.json): its first 16 kinds.
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
    Entry(
        (802816, 256, 64, 1, 1, False),
        "persistent",
        ConvTile("persistent", 128, 128, 64, 4, 3, group=16, parts=4, programs_per_sm=2),
        0.1458,
        0.3762,
    ),
    Entry((802816, 64, 256, 1, 1, False), "single", ConvTile("single", 128, 64, 64, 4, 3, early=True), 0.1226, 0.1789),
    Entry(
        (802816, 128, 256, 1, 1, False),
        "persistent",
        ConvTile("persistent", 128, 128, 64, 4, 3, group=16, parts=4, programs_per_sm=2),
        0.1586,
        0.2763,
    ),
    Entry((200704, 128, 128, 9, 2, False), "cudnn", None, 0.1027, 0.1305),
    Entry((200704, 128, 128, 9, 1, False), "cudnn", None, 0.0973, 0.1235),
    Entry((200704, 512, 128, 1, 1, True), "cudnn", None, 0.1223, 0.2206),
    Entry(
        (200704, 512, 256, 1, 2, False),
        "persistent",
        ConvTile("persistent", 128, 128, 64, 4, 3, group=16, parts=2, programs_per_sm=2),
        0.117,
        0.2118,
    ),
    Entry(
        (200704, 128, 512, 1, 1, False),
        "persistent",
        ConvTile("persistent", 128, 128, 64, 4, 3, group=16, parts=4, programs_per_sm=2),
        0.06764,
        0.09587,
    ),
    Entry(
        (200704, 256, 512, 1, 1, False),
        "persistent",
        ConvTile("persistent", 128, 128, 64, 4, 3, group=16, parts=4, programs_per_sm=2),
        0.1066,
        0.1498,
    ),
    Entry((50176, 256, 256, 9, 2, False), "cudnn", None, 0.0924, 0.1054),
    Entry((50176, 256, 256, 9, 1, False), "cudnn", None, 0.08549, 0.09615),
    Entry((50176, 1024, 256, 1, 1, True), "cudnn", None, 0.08275, 0.1266),
)
NEAR = 2.0  # sum of the logarithms (base 2) of three ratios: rows, out channels and channels
# Few pixels were not measured yet. Two programs of 128 x 128 an SM, as linear_act: one computes while the other stores.
MANY = ConvTile("persistent", 128, 128, 64, 4, 3, group=16, parts=2, programs_per_sm=2)
MANY_ADDED = replace(MANY, parts=4)  # what is added is staged in shared memory, too
FEW = ConvTile("single", 64, 64, 64, 4, 4, early=True)
MOST_PARTS, LEAST_STEPS = 8, 4  # of K; of a part

# ---- choice ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """What the choice depends on.

    Attributes:
        half, channels_last: of x.
        copied: whether tensor descriptors can say where x and the result are (`launches.copied`).
        cudnn: whether cuDNN has one call for it: relu alone or after a sum, on a GPU.
    """

    geometry: Geometry
    activation: str
    residual: bool
    half: bool
    channels_last: bool
    copied: bool
    cudnn: bool
    sms: int
    capability: int


@cache
def choose(problem: Problem) -> ConvPlan:
    """The plan for a convolution on a GPU."""
    geometry = problem.geometry
    library: Backend = "cudnn" if problem.cudnn and problem.half and problem.channels_last else "library"
    if not problem.half:
        return ConvPlan("library", None, "float32")
    if not problem.channels_last:
        return ConvPlan("library", None, "x is not channels last")
    if geometry.groups > 1:
        return ConvPlan(library, None, f"{geometry.groups} groups")
    if geometry.rows >= 1 << 31:
        return ConvPlan(library, None, "2^31 pixels or more")
    if problem.capability != 9:
        return ConvPlan(library, None, "not measured on this GPU")
    entry = _nearest(problem)
    if entry is None:
        return _predicted(problem, library)
    if entry.backend == "cudnn":
        return ConvPlan(library, None, _reason(entry))
    tile = _fitted(entry.tile, problem) if entry.tile else None
    return ConvPlan(tile.kernel if tile else entry.backend, tile, _reason(entry))


def _nearest(problem: Problem) -> Entry | None:
    """The nearest measured shape of the same kind, if it is near: as many taps, the same stride, a residual or none."""
    found = [(_distance(entry, problem), entry) for entry in MEASURED_ON_HOPPER if _same_kind(entry, problem)]
    distance, entry = min(found, key=lambda pair: pair[0], default=(math.inf, None))
    return entry if distance <= NEAR else None


def _same_kind(entry: Entry, problem: Problem) -> bool:
    geometry = problem.geometry
    *_, taps, stride, residual = entry.shape
    same = (taps, (stride, stride), residual) == (geometry.taps, geometry.stride, problem.residual)
    return same and (entry.backend != "product" or geometry.pointwise)  # padding makes it none


def _distance(entry: Entry, problem: Problem) -> float:
    geometry = problem.geometry
    sizes = (geometry.rows, geometry.out_channels, geometry.channels)
    return sum(abs(math.log2(max(a, 1) / b)) for a, b in zip(sizes, entry.shape[:3], strict=True))


def _predicted(problem: Problem, library: Backend) -> ConvPlan:
    geometry, reason = problem.geometry, "not measured near this shape"
    if geometry.pointwise and not problem.residual:
        return ConvPlan("product", None, "1 x 1: a product of matrices")
    if not problem.copied:
        return ConvPlan(library, None, f"{reason}, and x cannot be copied in boxes")
    if -(-geometry.rows // 128) * -(-geometry.out_channels // 128) >= problem.sms:
        return ConvPlan("persistent", _fitted(MANY_ADDED if problem.residual else MANY, problem), reason)
    tiles = -(-geometry.rows // FEW.rows) * -(-geometry.out_channels // FEW.columns)
    steps = geometry.taps * -(-geometry.channels // FEW.depth)
    most = max(1, min(MOST_PARTS, steps // LEAST_STEPS, problem.sms // tiles))
    tile = replace(FEW, split=1 << (most.bit_length() - 1))
    return ConvPlan("single", _fitted(tile, problem), reason)


def _fitted(tile: ConvTile, problem: Problem) -> ConvTile:
    """The tile with no more channels of a tap, and of the result, than there are; gathered where nothing is copied."""
    geometry = problem.geometry
    kernel: Kernel = tile.kernel if problem.copied else "gathered"
    least = 16 if kernel == "gathered" else 64  # of an operand of a tensor core's instruction
    columns = min(tile.columns, max(least, power_of_two(geometry.out_channels)))
    split = 1 if kernel == "persistent" else tile.split
    depth = tile.depth
    if kernel != "gathered" and geometry.channels >= LEAST_CHANNELS:
        depth = math.gcd(geometry.channels, depth)
    return replace(tile, kernel=kernel, columns=columns, split=split, depth=depth)


def _reason(entry: Entry) -> str:
    rows, out_channels, channels, taps, stride, _ = entry.shape
    shape = f"{rows} x {channels} to {out_channels} of {taps} taps, stride {stride}"
    return f"{entry.ms:.4g} ms at {shape}, {entry.library_ms:.4g} ms with cuDNN and another pass"


LEAST_CHANNELS = 8  # fewer are packed into groups (`launches.packed`)

# ---- max pools -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PoolConfig:
    """Lines and pixels of a result, channels, and warps of a program."""

    lines: int
    pixels: int
    channels: int
    warps: int


# Measured on an H200 (benchmarks/results/h200/tune_max_pools.json): within 3% of the fastest at the three sizes timed.
MAX_POOL = PoolConfig(lines=2, pixels=8, channels=64, warps=4)

# ---- what follows a library, and packing ---------------------------------------------------------------------------
FINISH_ELEMENTS, FINISH_COLUMNS, FINISH_WARPS = 2048, 512, 4
PACK_ELEMENTS, PACK_WARPS = 4096, 4
