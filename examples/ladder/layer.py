"""A layer, y = sigmoid(x W^T + b), on the CPU and on the GPU, and a network trained with it.

    python examples/ladder/layer.py [--size 2048]

The script applies the lessons of the matrix product, and shows the cost of a bias and a sigmoid after it. At the end it
trains two layers on handwritten digits (scikit-learn) with these kernels alone; see `src/rooftop/ladder/digits.py`.
"""

from __future__ import annotations

from lesson import tell

WHY = {
    "NumPy": "rung zero: the product by the CPU's library, then bias and sigmoid, each in a pass over memory.",
    "PyTorch": "the same, with the passes on all cores.",
    "one thread per output": "each thread reads its own row of W, so neighbouring threads read far apart.",
    "tiles; bias and sigmoid apart": "tiles in shared memory and 4 x 4 outputs per thread. y is written, then "
    "read and written again by a second kernel.",
    "tiles; bias and sigmoid fused": "bias and sigmoid follow while the sum is in a register: y is written once.",
    "linear, then sigmoid": "PyTorch on the GPU: the product and its bias from the library, then one more kernel.",
}

if __name__ == "__main__":
    tell("layer", __doc__, WHY)
