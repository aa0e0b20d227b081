"""A hand-written loop under accelerate that accumulates gradients over two micro-batches and loads data by workers."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from loop_clock import LoopClock
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    large = options.device == "cuda"
    torch.manual_seed(5)
    accelerator = Accelerator(cpu=not large, gradient_accumulation_steps=2)
    width = 4096 if large else 512
    model = nn.Sequential(nn.Linear(256, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        TensorDataset(torch.randn(4096, 256), torch.randint(16, (4096,))), batch_size=64, num_workers=1, shuffle=True
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    clock = LoopClock(options.device)
    for _ in range(options.epochs):  # a step may include the start of new workers
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                clock.step(loss)
    clock.finish()


if __name__ == "__main__":
    main()
