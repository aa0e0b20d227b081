"""The indexing ladder: C = A + B of n x n float32, with grids of one, two and three dimensions laid over the matrix.

The work is the same as in the vector ladder. Two values are predicted before anything is measured: how many 32-byte
sectors an access of a warp touches (32 contiguous floats need 4), and how many of the warps that the GPU can hold have
work.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.analysis.formats import percent_text
from rooftop.cost import Cost
from rooftop.hardware import occupancy
from rooftop.ladder.rungs import CUDA, PYTORCH, TRITON, Ladder, Rung, interleave, kernel, source, triton_rungs
from rooftop.launch import cuda
from rooftop.launch.triton_launch import launch, processors

FILE = "indexing.cu"
COLUMN, ROW, ELEMENT = "1-D, a thread per column", "1-D, a thread per row", "1-D, a thread per element"
WIDE, TALL = "2-D, blocks of 32 x 8", "2-D, blocks of 4 x 64"
SWAPPED, SLABS = "2-D, 32 x 8, x down the rows", "3-D, blocks of 32 x 8"
WARP, SECTOR_BYTES = 32, 32
SLAB = 1024  # rows
# compute capability and multiprocessors of an H200, for which predictions are made without a GPU
WITHOUT_GPU = ((9, 0), 132)

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Layout:
    """How the grid and its blocks cover a matrix.

    Attributes:
        instance: the kernel.
        block: number of threads in x, y and z.
        grid: function from (rows, columns) to the number of blocks in x, y and z.
        place: function from a thread (x, y) of the first block to the row and column of its first element.
    """

    instance: str
    block: Sizes
    grid: Callable[[int, int], Sizes]
    place: Callable[[int, int], tuple[int, int]]


def _blocks(count: int, size: int) -> int:
    return -(-count // size)


def _over(x: int, y: int) -> Callable[[int, int], Sizes]:
    return lambda rows, columns: (_blocks(columns, x), _blocks(rows, y), 1)


LAYOUTS = {
    COLUMN: Layout(
        "each_column", (256, 1, 1), lambda rows, columns: (_blocks(columns, 256), 1, 1), lambda x, y: (0, x)
    ),
    ROW: Layout("each_row", (256, 1, 1), lambda rows, columns: (_blocks(rows, 256), 1, 1), lambda x, y: (x, 0)),
    ELEMENT: Layout(
        "each_element", (256, 1, 1), lambda rows, columns: (_blocks(rows * columns, 256), 1, 1), lambda x, y: (0, x)
    ),
    SWAPPED: Layout(
        "grid_2d_swapped",
        (32, 8, 1),
        lambda rows, columns: (_blocks(rows, 32), _blocks(columns, 8), 1),
        lambda x, y: (x, y),
    ),
    TALL: Layout("grid_2d", (4, 64, 1), _over(4, 64), lambda x, y: (y, x)),
    WIDE: Layout("grid_2d", (32, 8, 1), _over(32, 8), lambda x, y: (y, x)),
    SLABS: Layout(
        "grid_3d",
        (32, 8, 1),
        lambda rows, columns: (_blocks(columns, 32), _blocks(min(rows, SLAB), 8), _blocks(rows, SLAB)),
        lambda x, y: (y, x),
    ),
}


def make(size: int, device: torch.device) -> Ladder:
    """The indexing ladder for matrices of `size` rows and columns."""
    a, b = (torch.randn(size, size, device=device) for _ in range(2))
    c = torch.empty(size, size, device=device)
    without = Rung(SWAPPED, TRITON, None, note="Triton orders a tile's threads itself")
    names = tuple(name for name in LAYOUTS if name != SWAPPED)
    return Ladder(
        name="indexing",
        work=f"C = A + B of {size:,} x {size:,} float32",
        unit="B/s",
        source=FILE,
        cost=Cost(8 * size * size, 4 * size * size, {"fp32": size * size}),
        exact=a + b,
        rungs=(
            *interleave(in_cuda(a, b, c), (without, *triton_rungs(device, lambda: in_triton(a, b, c), names))),
            Rung("torch.add", PYTORCH, lambda: torch.add(a, b, out=c)),
        ),
        poisoned=(c,),
    )


# ---- predictions -----------------------------------------------------------------------------------------------


def sectors(layout: Layout, columns: int) -> int:
    """Count the 32-byte sectors of memory that the first warp touches in one access to a float32 matrix with this many
    columns. The matrix begins at the start of a sector.
    """
    width = layout.block[0]
    places = [layout.place(thread % width, thread // width) for thread in range(WARP)]
    return len({4 * (row * columns + column) // SECTOR_BYTES for row, column in places})


def warps_with_work(layout: Layout, rows: int, columns: int, capability: tuple[int, int], units: int) -> float:
    """The number of warps with work that run at the same time, as many as occupancy and grid allow, divided by the
    number of warps that `units` multiprocessors have room for.
    """
    threads = layout.block[0] * layout.block[1] * layout.block[2]
    registers = cuda.compile(source(FILE), layout.instance, arch=f"sm_{capability[0]}{capability[1]}").binary.registers
    allowed = occupancy(threads, registers or 0, 0, capability)
    grid = layout.grid(rows, columns)
    blocks = min(allowed.blocks_per_multiprocessor * units, grid[0] * grid[1] * grid[2])
    return blocks * _blocks(threads, WARP) / (allowed.multiprocessor.max_warps * units)


def predicted(layout: Layout, c: Tensor) -> str:
    """A sentence with the predicted sectors and warps; empty if no compiler is available to count the kernel's
    registers.
    """
    capability, units = (torch.cuda.get_device_capability(c.device), processors(c)) if c.is_cuda else WITHOUT_GPU
    (rows, columns), where = c.shape, "predicted" if c.is_cuda else "predicted for an H200"
    try:
        share = warps_with_work(layout, rows, columns, capability, units)
    except ImportError:
        return ""
    except ValueError:  # `occupancy` does not know this compute capability
        return f"{where}: {sectors(layout, columns)} sectors a warp"
    return f"{where}: {sectors(layout, columns)} sectors a warp, {percent_text(100 * share)} of the warps"


# ---- rungs -----------------------------------------------------------------------------------------------------


def in_cuda(a: Tensor, b: Tensor, c: Tensor) -> tuple[Rung, ...]:
    """The rungs in CUDA C++."""

    def rung(name: str, layout: Layout) -> Rung:
        extra = (SLAB,) if name == SLABS else ()

        def run() -> Tensor:
            grid = layout.grid(*c.shape)
            kernel(FILE, layout.instance, c.device).launch(grid, layout.block, a, b, c, *c.shape, *extra)
            return c

        return Rung(name, CUDA, run, kernels=(layout.instance,), note=predicted(layout, c))

    return tuple(rung(name, layout) for name, layout in LAYOUTS.items())


def in_triton(a: Tensor, b: Tensor, c: Tensor) -> tuple[Rung, ...]:
    """The counterparts of `in_cuda`'s rungs in Triton."""
    from rooftop.ladder import indexing_kernels as kernels
    from rooftop.ladder.vector_kernels import add_block

    rows, columns = c.shape

    def rung(name: str, function: object, grid: tuple[int, ...], *sizes: int, **constants: int) -> Rung:
        def run() -> Tensor:
            launch(function, grid, c.device, a, b, c, rows, columns, *sizes, **constants, num_warps=8)
            return c

        return Rung(name, TRITON, run)

    def tiles(name: str, tall: int, wide: int, slab: int) -> Rung:
        grid = (_blocks(columns, wide), _blocks(min(rows, slab), tall), _blocks(rows, slab))
        return rung(name, kernels.add_tile, grid, slab, ROWS=tall, COLUMNS=wide)

    def flat() -> Tensor:
        count = rows * columns
        launch(add_block, (_blocks(count, 256),), c.device, a, b, c, count, BLOCK=256, num_warps=8)
        return c

    return (
        rung(COLUMN, kernels.add_columns, (_blocks(columns, 256),), BLOCK=256),
        rung(ROW, kernels.add_rows, (_blocks(rows, 256),), BLOCK=256),
        Rung(ELEMENT, TRITON, flat),
        tiles(TALL, 64, 4, rows),
        tiles(WIDE, 8, 32, rows),
        tiles(SLABS, 8, 32, SLAB),
    )
