"""Hogwild: processes train one network in shared memory, without locks; the first process only waits for them."""

from __future__ import annotations

import argparse

import torch
import torch.multiprocessing as mp
from loop_clock import LoopClock
from torch import nn


def train(rank: int, model: nn.Module, steps: int) -> None:
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    clock = LoopClock()
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(64, 256)).square().mean()
        loss.backward()
        optimizer.step()
        clock.step()
    if rank == 0:
        clock.finish()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")  # on a GPU, processes would have to share one device
    parser.add_argument("--start", default="spawn", choices=("spawn", "fork"))
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    mp.set_start_method(options.start)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
    model.share_memory()
    with torch.no_grad():
        print(f"before: {model(torch.ones(8, 256)).square().mean().item():.4f}")
    processes = [mp.Process(target=train, args=(rank, model, options.steps)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        if process.exitcode:
            raise SystemExit(process.exitcode)
    with torch.no_grad():
        print("after:", bool(model(torch.ones(8, 256)).isfinite().all()))


if __name__ == "__main__":
    main()
