"""2,000 steps of a small network under autocast, with a GradScaler, clipped gradients and a printed running loss."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from loop_clock import LoopClock
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    device, large = options.device, options.device == "cuda"
    torch.manual_seed(3)
    width, batch = (2048, 512) if large else (64, 32)
    model = nn.Sequential(nn.Linear(128, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scaler = torch.amp.GradScaler(device)
    dtype = torch.float16 if large else torch.bfloat16
    images = torch.randn(8 * batch, 128, device=device)
    targets = (images[:, :10] + 0.1 * torch.randn(8 * batch, 10, device=device)).argmax(1)
    clock = LoopClock(device)
    for step in range(options.steps):
        chosen = slice(batch * (step % 8), batch * (step % 8 + 1))
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device, dtype=dtype):
            loss = F.cross_entropy(model(images[chosen]), targets[chosen])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        clock.step(loss)
        if step % 500 == 0:
            print(f"step {step}: scale {scaler.get_scale():.0f}")
    clock.finish()


if __name__ == "__main__":
    main()
