"""Adding two vectors: the first kernel that everyone writes, and why its last rung is near the roof.

    python examples/ladder/vector.py [--size 67108864]

An addition reads 8 bytes and writes 4. Moving these 12 bytes per element takes all the time; the addition itself is
free. So the kernel has one job: to keep enough loads in flight. Read `src/rooftop/ladder/vector.cu` beside this, and
run it with TRITON_INTERPRET=1 where there is no GPU.
"""

from __future__ import annotations

from lesson import tell

WHY = {
    "NumPy": "rung zero, one core of the CPU: bound by the loads that one core can have in flight.",
    "Numba": "the same loop, compiled, on all cores.",
    "PyTorch": "the same, from a library.",
    "one block": "a kernel with one block: one multiprocessor works, all others are idle.",
    "one thread per element, blocks of 32": "all multiprocessors work. Each holds at most 32 blocks, so blocks of one "
    "warp fill only half of its warps.",
    "one thread per element, blocks of 256": "blocks of eight warps fill the multiprocessors: more loads in flight.",
    "grid-stride loop": "as many blocks as the GPU holds at a time, and each thread takes many elements: no more "
    "blocks to start, but each thread waits for its loads before the next ones.",
    "16-byte accesses": "four elements per load: a quarter of the instructions for the same bytes.",
    "16-byte accesses, 4 in flight": "each thread starts all its loads before it uses one.",
    "torch.add": "PyTorch's own kernel.",
    "with transfers": "the vectors come from the host and the sum goes back: the bus sets the time, not the GPU.",
    "with transfers, pinned": "page-locked memory, which the GPU reads itself, without a copy by the driver.",
}

if __name__ == "__main__":
    tell("vector", __doc__, WHY)
