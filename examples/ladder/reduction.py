"""Summing a vector: threads that must work together.

    python examples/ladder/reduction.py [--size 268435456]

The sum needs one addition for each 4 bytes, so it is bound by memory, like the vectors, unless the threads wait for
each other. In the first rungs the threads do wait, and the bookkeeping makes these rungs compute-bound. Read
`src/rooftop/ladder/reduction.cu` beside this.
"""

from __future__ import annotations

from lesson import tell

UNROLLED = "each thread adds so many elements before it meets the others: fewer blocks, fewer barriers an element, and "
WHY = {
    "NumPy": "rung zero, one core of the CPU.",
    "PyTorch": "the CPU with all cores, then at the end the GPU's kernel of the library.",
    "interleaved pairs, divergent": "thread 2 s i adds its neighbour s further on. In every step all warps run, with "
    "most of their threads switched off.",
    "interleaved pairs, neighbouring threads": "the same pairs, added by threads 0, 1, 2, ...: whole warps are done "
    "early. But thread i reads at 2 s i, and such addresses share few banks of shared memory: they are served in turn.",
    "halves": "the upper half is added to the lower: neighbouring threads, neighbouring banks.",
    "2 elements a thread": UNROLLED + "two loads on their way.",
    "4 elements a thread": UNROLLED + "four loads on their way.",
    "8 elements a thread": UNROLLED + "eight loads on their way.",
    "loops unrolled by templates": "the size of the block is known to the compiler: no loop is left, and the last warp "
    "needs no barrier of the block.",
    "warp shuffles": "threads of a warp read each other's registers: shared memory holds one value a warp.",
    "16-byte loads, one pass": "wide loads, as many blocks as the GPU holds, and the last one to finish adds the "
    "sums of all: one launch, no second reading.",
    "torch.sum": "PyTorch's own kernel.",
}

if __name__ == "__main__":
    tell("reduction", __doc__, WHY)
