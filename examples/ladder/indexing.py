"""Which thread takes which element: grids of one, two and three dimensions over a matrix.

    python examples/ladder/indexing.py [--size 8192]

All rungs add two matrices, element by element. Predict the times before you look at them. Memory moves in sectors
of 32 bytes. A warp of 32 threads that reads 32 neighbouring floats needs 4 sectors; a warp that reads down a column
needs 32. A multiprocessor also has only as many warps as the grid gives it.
"""

from __future__ import annotations

from lesson import tell

WHY = {
    "1-D, a thread per column": "coalesced, but there are only as many threads as columns: most of the GPU is idle.",
    "1-D, a thread per row": "as few threads, and the 32 threads of a warp read 32 different rows: strided, too.",
    "1-D, a thread per element": "coalesced and full: the matrix as one long vector.",
    "2-D, 32 x 8, x down the rows": "full, but strided: each access fetches 32 sectors to use 4 bytes of each. Other "
    "warps use the rest, if a cache still holds it.",
    "2-D, blocks of 4 x 64": "a warp covers 8 rows of 4 floats: half of each sector is for another block.",
    "2-D, blocks of 32 x 8": "a warp takes 32 neighbours in a row: as fast as one dimension, with clear indices.",
    "3-D, blocks of 32 x 8": "slabs of rows as a third dimension: more arithmetic for the index, the same addresses.",
    "torch.add": "PyTorch's own kernel.",
}

if __name__ == "__main__":
    tell("indexing", __doc__, WHY)
