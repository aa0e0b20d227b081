"""Summing a vector: threads that must work together.

    python examples/ladder/reduction.py [--size 268435456]

The sum needs one addition for each 4 bytes, so it is bound by memory, like the vectors, unless the threads wait for
each other. In the first rungs the threads do wait, and the bookkeeping makes these rungs compute-bound. Read
`src/rooftop/ladder/reduction.cu` beside this.
"""

from __future__ import annotations

from lesson import tell

UNROLLED = "each thread adds several elements before the first barrier: fewer blocks, fewer barriers per element, and "
WHY = {
    "NumPy": "rung zero, one core of the CPU.",
    "PyTorch": "the library on all cores of the CPU.",
    "interleaved pairs, divergent": "thread 2 s i adds the value s further on. In every step all warps run, although "
    "most of their threads do nothing.",
    "interleaved pairs, neighbouring threads": "the same pairs, added by threads 0, 1, 2, ...: whole warps are done "
    "early. But thread i reads at 2 s i. Such addresses share few banks of shared memory, which serve them in turn.",
    "halves": "the upper half is added to the lower: neighbouring threads, neighbouring banks.",
    "2 elements a thread": UNROLLED + "two loads in flight.",
    "4 elements a thread": UNROLLED + "four loads in flight.",
    "8 elements a thread": UNROLLED + "eight loads in flight.",
    "loops unrolled by templates": "the compiler knows the size of the block: no loop is left, and the last warp "
    "needs no barrier of the block.",
    "warp shuffles": "threads of a warp read each other's registers: shared memory holds one value per warp.",
    "16-byte loads, one pass": "wide loads and as many blocks as the GPU holds. The last block to finish adds the "
    "sums of all: one launch.",
    "torch.sum": "PyTorch's own kernel.",
}

if __name__ == "__main__":
    tell("reduction", __doc__, WHY)
