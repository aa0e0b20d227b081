"""Train a network under torch.compile."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from loop_clock import LoopClock
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    device, large = options.device, options.device == "cuda"
    torch.manual_seed(4)
    width, batch = (4096, 1024) if large else (768, 256)
    net = nn.Sequential(
        nn.Linear(width, width),
        nn.LayerNorm(width),
        nn.GELU(),
        nn.Linear(width, width),
        nn.GELU(),
        nn.Linear(width, 10),
    ).to(device)
    model = torch.compile(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    clock = LoopClock(device)
    for step in range(options.steps):
        x, y = torch.randn(batch, width, device=device), torch.randint(10, (batch,), device=device)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step(loss)
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.5f}")
    clock.finish()


if __name__ == "__main__":
    main()
