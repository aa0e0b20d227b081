"""One kernel for an elementwise function: written as PyTorch, fused with its gradient, and printed for reading.

    python examples/fused_expression.py [--rows 512] [--columns 1024]

Eager PyTorch reads and writes every tensor once for each operator. `fused` traces the function once, writes a Triton
kernel that reads each input once and writes the result once, and does the same with its derivative. The script compares
the bytes that both versions move, by Rooftop's own cost counting. On a GPU the kernel runs; elsewhere PyTorch computes
the same function.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import fused


def gated(x: Tensor, gate: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    return torch.where(x > 0, x * torch.sigmoid(gate + bias), 0.01 * x) * scale


def moved_bytes(mode: CountingMode) -> int:
    return sum(record.cost.bytes for record in mode.records if record.cost is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--columns", type=int, default=1024)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, gate = (torch.randn(options.rows, options.columns, device=device, requires_grad=True) for _ in range(2))
    bias = torch.randn(options.columns, device=device)

    fast = fused(gated)
    print(f"expression: {fast.text}\n")
    print(fast.source(x, gate, bias, 0.5))

    results = {}
    for name, function in (("eager", gated), ("fused", fast)):
        with CountingMode() as counted:
            y = function(x, gate, bias, 0.5)
            gradients = torch.autograd.grad(y, (x, gate), torch.ones_like(y))
        results[name] = (y, *gradients)
        print(f"{name}: {moved_bytes(counted):,} bytes at least, forward and backward")
    torch.testing.assert_close(results["fused"], results["eager"])
    print("the same results and gradients")


if __name__ == "__main__":
    main()
