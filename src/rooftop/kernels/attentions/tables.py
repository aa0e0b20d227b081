"""Launch parameters of attention kernels: merging, windows, pages and rotary embeddings."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooftop.kernels.operands.launch_data import ElementsConfig, power_of_two

# ---- merging partial results ---------------------------------------------------------------------------------------


# The fastest of the parameters measured on an H200, with 128 features in half precision. A thread processes 32 elements
# of each tensor in forward and 8 in backward; its registers contain the elements as loaded and as float32.
MERGE_FORWARD = ElementsConfig(elements=1024, warps=1)
MERGE_BACKWARD = ElementsConfig(elements=1024, warps=4)

# ---- attention in windows ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WindowConfig:
    """Launch parameters for windows of up to `positions` positions and heads of up to `features` features: query
    positions per program, warps, and pipeline stages. Only backward has stages: its programs compute one window after
    another.
    """

    positions: int
    features: int
    queries: int
    warps: int
    stages: int = 1
    measured: bool = field(default=True, compare=False)  # False: predicted


# These parameters were chosen by the compiler's report of spilled registers for sm_90, and are not measured yet.
# Forward does not spill in half precision; for windows of more than 64 positions, a program has 16 query positions.
# Backward does not spill in half precision without cosine attention. With cosine attention or with float32, backward
# spills a few hundred bytes per thread, with 4, 8 and 16 warps.
WINDOW_FORWARD = (
    WindowConfig(positions=64, features=64, queries=64, warps=4, measured=False),
    WindowConfig(positions=64, features=128, queries=64, warps=8, measured=False),
    WindowConfig(positions=256, features=64, queries=16, warps=4, measured=False),
)
WINDOW_BACKWARD = (WindowConfig(positions=64, features=64, queries=64, warps=8, measured=False),)
# in backward; a program sums the gradients of bias, padding and cosine scale over several windows, and stores them once
WINDOW_PROGRAMS_PER_SM = 4

# ---- rotary embeddings ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RotaryConfig:
    """Launch parameters for heads with up to `pairs` rotated pairs of features: positions and heads per program, and
    warps.
    """

    pairs: int
    positions: int
    heads: int
    warps: int
    measured: bool = field(default=True, compare=False)  # False: predicted


# The parameters in ROTARY are not measured yet. In half precision, each thread loads 16 bytes of each half of a head,
# for each of the program's heads. Programs for longer heads compute fewer positions, because a longer head needs more
# registers.
ROTARY = (
    RotaryConfig(pairs=16, positions=64, heads=2, warps=4, measured=False),
    RotaryConfig(pairs=32, positions=32, heads=4, warps=4, measured=False),
    RotaryConfig(pairs=64, positions=16, heads=4, warps=4, measured=False),
    RotaryConfig(pairs=128, positions=8, heads=4, warps=4, measured=False),
    RotaryConfig(pairs=512, positions=2, heads=4, warps=4, measured=False),
    RotaryConfig(pairs=4096, positions=1, heads=1, warps=8, measured=False),
)

# ---- attention over pages ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PagedConfig:
    """Launch parameters of paged attention: query heads per program, positions per tile, warps, and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int
    measured: bool = field(default=True, compare=False)  # False: predicted


TILE_BYTES = 16384  # maximum bytes of a tile's keys, and of its values: 64 positions of 128 features in half precision
MOST_KEYS = 64
MOST_SUMS = 8192  # largest product of query heads and features in a program, limited by registers


def paged_config(group: int, width: int, element_bytes: int) -> PagedConfig:
    """Launch parameters for `group` query heads per key head and heads of `width` features. The kernels compile for
    sm_90 without spills, and are not measured yet.

    With one query head per key head, the kernel adds up products in registers. With several query heads, the kernel
    uses matrix products of 16 rows or more. Float32 matrix products do not use the tensor cores, so with several query
    heads, float32 uses the smallest possible tiles: 16 query heads and 16 positions.
    """
    block = max(16, power_of_two(width))
    keys = max(16, min(MOST_KEYS, TILE_BYTES // (block * element_bytes)))
    if group == 1:
        return PagedConfig(rows=1, keys=keys, warps=4, stages=2, measured=False)
    if element_bytes > 2:
        return PagedConfig(rows=16, keys=16, warps=4, stages=2, measured=False)
    return PagedConfig(
        rows=max(16, min(power_of_two(group), MOST_SUMS // block)), keys=keys, warps=4, stages=3, measured=False
    )


PROGRAMS_PER_PROCESSOR = 4
"""Programs per multiprocessor that suffice to keep the GPU's memory busy. The positions of a sequence are split until
there are this many programs, if there are enough tiles.
"""
MOST_SPLITS = 128
