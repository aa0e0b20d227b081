"""The matmul ladder: C = A B for n x n matrices in half precision, with float32 sums. The product takes 2 n^3 flops for
6 n^2 bytes, so arithmetic bounds the product.

The roof is that of the tensor cores. The first rungs convert to float32 and multiply on the ordinary cores. A line
below the table states the limit of the rungs without tensor cores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rooftop.cost import Cost
from rooftop.hardware import Ceilings
from rooftop.ladder.rungs import CUDA, TRITON, Ladder, Rung, interleave, kernel, triton_rungs
from rooftop.launch.triton_launch import launch, processors

FILE = "matmul.cu"
EACH, TILED, REGISTERS = "one thread per element", "tiles in shared memory", "register blocking"
TENSOR, AHEAD, PERSISTENT = "tensor cores", "tensor cores, tiles fetched ahead", "persistent, descriptors"
CUBLAS = "cuBLAS"
TILE = 32  # rows and columns of a tile in the rung TILED; matmul.cu defines the tiles of the other rungs
GROUP = 8  # rows of tiles in a group; the rung PERSISTENT computes one group after another
TILES = {  # tiles of the Triton rungs: rows, columns, depth, warps, stages
    TILED: (32, 32, 32, 4, 1),
    REGISTERS: (128, 64, 16, 8, 2),
    TENSOR: (128, 128, 32, 8, 1),
    AHEAD: (128, 128, 64, 8, 3),
    PERSISTENT: (128, 256, 64, 8, 3),
}
"""The tiles are not tuned. TILED and TENSOR have the same tiles as in matmul.cu. The last entry is from Triton's own
tutorial."""


def make(size: int, device: torch.device) -> Ladder:
    """The matmul ladder for matrices of `size` rows and columns."""
    a, b = (torch.randn(size, size, device=device).half() for _ in range(2))
    c = torch.empty(size, size, dtype=torch.float16, device=device)
    without = (Rung(EACH, TRITON, None, note="Triton's programs compute tiles"),)
    only = (Rung(PERSISTENT, CUDA, None, note="see CUTLASS for one in CUDA C++"),)
    triton = triton_rungs(device, lambda: in_triton(a, b, c), tuple(TILES))
    library = CUBLAS if c.is_cuda else "PyTorch"
    return Ladder(
        name="matmul",
        work=f"C = A B of {size:,} x {size:,} float16, float32 sums",
        unit="FLOP/s",
        source=FILE,
        cost=Cost(4 * size * size, 2 * size * size, {"fp16": 2 * size**3}),
        exact=a.double() @ b.double(),
        rungs=(
            *interleave((*in_cuda(a, b, c), *only), (*without, *triton)),
            Rung("torch.mm", library, lambda: torch.mm(a, b, out=c)),
        ),
        rtol=2.0**-10,  # rounding to half precision has a relative error of 2^-11
        atol=1e-3 * size**0.5,  # the sums have a standard deviation of size^0.5
        poisoned=(c,),
        remarks=lambda ceilings: _ordinary_roof(size, ceilings),
    )


def _ordinary_roof(size: int, ceilings: Ceilings | None) -> Sequence[str]:
    """A remark on the limit of the rungs without tensor cores."""
    if ceilings is None:
        return ()
    most = 100 * ceilings.peak("fp32") / ceilings.peak("fp16")
    ms = 1e3 * 2 * size**3 / ceilings.peak("fp32")
    return (f"Rungs on the float32 cores take at least {ms:.3g} ms: {most:.3g}% of the roof.",)


def in_cuda(a: Tensor, b: Tensor, c: Tensor) -> tuple[Rung, ...]:
    """The rungs in CUDA C++."""
    n = c.shape[0]

    def rung(name: str, instance: str, tile: tuple[int, int], block: int | tuple[int, int], note: str = "") -> Rung:
        def run() -> Tensor:
            grid = (-(-n // tile[0]), -(-n // tile[1]))
            kernel(FILE, instance, c.device).launch(grid, block, a, b, c, n)
            return c

        return Rung(name, CUDA, run, kernels=(instance,), note=note)

    ordinary = "float32 cores"
    return (
        rung(EACH, "one_each", (32, 8), (32, 8), ordinary),
        rung(TILED, f"tiled<{TILE}>", (TILE, TILE), (TILE, TILE), ordinary),
        rung(REGISTERS, "register_blocked", (128, 128), 256, ordinary),
        rung(TENSOR, "tensor_cores<1>", (128, 128), 256),
        rung(AHEAD, "tensor_cores<2>", (128, 128), 256),
    )


def in_triton(a: Tensor, b: Tensor, c: Tensor) -> tuple[Rung, ...]:
    """The counterparts of `in_cuda`'s rungs in Triton."""
    from rooftop.ladder import matmul_kernels as kernels

    n = c.shape[0]

    def tiles(name: str, note: str = "") -> Rung:
        rows, columns, depth, warps, stages = TILES[name]

        def run() -> Tensor:
            constants = {"WIDE": bool(note), "ROWS": rows, "COLUMNS": columns, "DEPTH": depth}
            grid = (-(-n // columns), -(-n // rows))
            launch(kernels.product, grid, c.device, a, b, c, n, **constants, num_warps=warps, num_stages=stages)
            return c

        return Rung(name, TRITON, run, note=note)

    return (
        tiles(TILED, "float32 cores"),
        tiles(REGISTERS, "float32 cores"),
        tiles(TENSOR),
        tiles(AHEAD),
        Rung(PERSISTENT, TRITON, _persistent(a, b, c)),
    )


def _persistent(a: Tensor, b: Tensor, c: Tensor) -> Callable[[], Tensor]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from rooftop.ladder import matmul_kernels as kernels

    n = c.shape[0]
    rows, columns, depth, warps, stages = TILES[PERSISTENT]
    shapes: Sequence[tuple[Tensor, list[int]]] = ((a, [rows, depth]), (b, [depth, columns]), (c, [rows, columns]))
    descriptors = [TensorDescriptor.from_tensor(tensor, shape) for tensor, shape in shapes]

    def run() -> Tensor:
        tiles = -(-n // rows) * -(-n // columns)
        constants = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "GROUP": GROUP}
        grid = (min(tiles, processors(c)),)
        launch(
            kernels.product_persistent, grid, c.device, *descriptors, n, **constants, num_warps=warps, num_stages=stages
        )
        return c

    return run
