"""Several models on several GPUs from one process: trained at the same time, then evaluated together.

    python examples/ensemble.py [--models 4] [--epochs 150]

Networks with different initial weights and training points make different mistakes. The mean of the models' answers is
usually better than a single answer. Where the models disagree, the answer is less certain. The task is to say whether a
point is inside a ring.

`on_each` is a queue of jobs: each device takes the next one when it is free, so jobs need not take equally long, and
results come in the order of the jobs. `Ensemble` holds one model on each device, sends each the same input, runs them
at the same time and gathers their outputs on the first device. `select_devices` chooses the GPUs with the most free
memory; if there are too few, its error says why each GPU does not qualify.

Without a GPU the models run on the CPU, one thread for each.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from torch import Tensor, nn

from rooftop.hardware import DeviceSelectionError, Ensemble, on_each, select_devices


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points in a square (N, 2), and whether each lies in the ring (N,)."""
    x = 2 * torch.rand(count, 2, generator=torch.Generator().manual_seed(seed)) - 1
    radius = x.norm(dim=1)
    return x, ((radius > 0.4) & (radius < 0.8)).float()


def train(device: torch.device, seed: int, epochs: int) -> nn.Module:
    """Train one model: a job of `on_each`, which passes a free device. Each seed also draws its own training points."""
    x, inside = (each.to(device) for each in points(300, seed))
    start = torch.Generator().manual_seed(seed)
    network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1), nn.Flatten(0))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=start) / max(1, parameter.shape[-1]) ** 0.5)
    network.to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=0.02)
    for _ in range(epochs):
        optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(network(x), inside).backward()
        optimizer.step()
    return network


def right(logits: Tensor, inside: Tensor) -> float:
    """Share of points with the right answer."""
    return float(((logits > 0) == (inside > 0.5)).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=150)
    options = parser.parse_args()
    try:
        devices = select_devices(options.models, min_free_bytes=1 << 28)
    except DeviceSelectionError as reason:
        shared = [f"cuda:{index}" for index in range(torch.cuda.device_count())] or ["cpu"]
        devices = [torch.device(shared[n % len(shared)]) for n in range(options.models)]
        print(f"{reason}\nso the models share {', '.join(shared)}")

    jobs = [partial(train, seed=seed, epochs=options.epochs) for seed in range(options.models)]
    networks = on_each(jobs, devices=devices)
    x, inside = points(2000, seed=options.models)
    ensemble = Ensemble(networks, devices=devices)
    with torch.no_grad():
        logits = ensemble(x).cpu()  # (models, N)
    for number, answers in enumerate(logits):
        print(f"model {number} on {ensemble.devices[number]}: {right(answers, inside):.1%} right")
    probability = logits.sigmoid().mean(0)
    print(f"all together: {right(probability - 0.5, inside):.1%} right")
    agreed = (logits > 0).all(0) | (logits <= 0).all(0)
    share, correct = float(agreed.float().mean()), right(logits[0][agreed], inside[agreed])
    print(f"all agree on {share:.1%} of the points; {correct:.1%} of those answers are right")


if __name__ == "__main__":
    main()
