"""Multiplying matrices: from memory to registers to the tensor cores.

    python examples/ladder/matmul.py [--size 4096]

The product needs 2 n^3 flops on 3 n^2 elements, so it uses every element n times. Each rung fetches an element less
often from distant memory. Read `src/rooftop/ladder/matmul.cu` beside this.
"""

from __future__ import annotations

from lesson import tell

WHY = {
    "one thread per element": "two loads for each multiplication. They come from the caches, which are the limit.",
    "tiles in shared memory": "a block loads a tile once, and each element serves 32 threads. The limit is now shared "
    "memory: still two reads of it for each multiplication.",
    "register blocking": "each thread computes 8 x 8 elements from 8 + 8 values in registers: four multiplications "
    "for each value read. The limit is the rate of the float32 cores.",
    "tensor cores": "one instruction multiplies 16 x 16 by 16 x 8. Loading and multiplying take turns.",
    "tensor cores, tiles fetched ahead": "the next tiles are copied to shared memory while these ones are multiplied.",
    "persistent, descriptors": "one program per multiprocessor goes from tile to tile: the end of one overlaps "
    "with the start of the next. A copy engine loads the tiles, and neighbouring tiles share L2.",
    "torch.mm": "the GPU's library, with kernels tuned for each shape.",
}

if __name__ == "__main__":
    tell("matmul", __doc__, WHY)
