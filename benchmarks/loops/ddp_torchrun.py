"""DistributedDataParallel under torchrun; one rank has twice the work, so that the others wait for it."""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from loop_clock import LoopClock
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def train(device: str, steps: int, large: bool) -> LoopClock:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    torch.manual_seed(rank)
    width = 4096 if large else 512
    net = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
    model = DistributedDataParallel(net.to(device), device_ids=[device] if large else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = 256 * (1 + (rank == last))
    clock = LoopClock(device, watched=20)  # with several ranks, `rooftop analyze` watches more steps
    for _ in range(steps):
        loss = model(torch.randn(batch, width, device=device)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step(loss)
    return clock


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--steps", type=int, help="number of steps (default: 40 on a CPU; 400 on GPUs, where a step takes some ms)"
    )
    options = parser.parse_args()
    large = options.device == "cuda"
    device = f"cuda:{os.environ['LOCAL_RANK']}" if large else "cpu"
    if large:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if large else "gloo")
    steps = options.steps or (400 if large else 40)
    clock = train(device, steps, large)  # delete the model before the process group, or gloo sometimes aborts
    if dist.get_rank() == 0:
        clock.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
