"""LBFGS: a small network learns sine waves; each step of the optimizer calls its closure up to 20 times."""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F
from loop_clock import LoopClock
from torch import Tensor, nn


class Predictor(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.cell, self.out = nn.LSTMCell(1, width), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:  # (B, T)
        h = c = torch.zeros(len(x), self.width, dtype=x.dtype, device=x.device)
        outputs = []
        for column in x.split(1, dim=1):
            h, c = self.cell(column, (h, c))
            outputs.append(self.out(h))
        return torch.cat(outputs, dim=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    large = options.device == "cuda"
    torch.manual_seed(0)
    waves, width = (512, 512) if large else (16, 24)
    times = torch.arange(41, dtype=torch.float64)[None] + torch.randint(-40, 40, (waves, 1))
    data = torch.sin(times / 10).to(options.device)
    model = Predictor(width).double().to(options.device)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, tolerance_grad=0, tolerance_change=0)
    clock = LoopClock(options.device)
    for step in range(options.steps):

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(data[:, :-1]), data[:, 1:])
            loss.backward()
            return loss

        loss = optimizer.step(closure)
        print(f"step {step}: loss {loss.item():.8f}")
        clock.step(loss)
    clock.finish()


if __name__ == "__main__":
    main()
