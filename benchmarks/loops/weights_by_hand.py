"""Train two matrices by hand, without an optimizer or a module. The script exits with a particular status."""

from __future__ import annotations

import argparse
import sys

import torch
from loop_clock import LoopClock


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    device, large = options.device, options.device == "cuda"
    torch.manual_seed(6)
    batch, width, hidden = (4096, 4096, 4096) if large else (256, 1024, 512)
    x, y = torch.randn(batch, width, device=device), torch.randn(batch, 10, device=device)
    w1 = (torch.randn(width, hidden, device=device) / width**0.5).requires_grad_()
    w2 = (torch.randn(hidden, 10, device=device) / hidden**0.5).requires_grad_()
    clock = LoopClock(device)
    for step in range(options.steps):
        loss = ((x @ w1).clamp(min=0) @ w2 - y).square().sum()
        loss.backward()
        with torch.no_grad():
            for weight in (w1, w2):
                weight -= 1e-5 * weight.grad
                weight.grad = None
        clock.step(loss)
        if step % 20 == 0:
            print(step, loss.item())
    clock.finish()
    sys.exit(3)


if __name__ == "__main__":
    main()
