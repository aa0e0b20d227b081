"""Data parallelism by hand: the four steps of `DataParallel`, their results, and a check that training stays the same.

    python examples/data_parallel.py [--devices cuda:0 cuda:1] [--batch 10] [--steps 20]

`scatter` splits a batch, `replicate` copies the network to every device, `parallel_apply` runs each copy on its share
in its own thread, and `gather` joins the results. All four steps are differentiable: one backward pass adds the
gradients of all copies to the network's own parameters. `DataParallel` does the four steps in one call.

The devices are all GPUs. With fewer than two GPUs, the CPU counts as two devices.
"""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn

from rooftop.parallel import DataParallel, gather, parallel_apply, replicate, scatter


def network() -> nn.Sequential:
    """(N, 8) -> (N, 2), in float64: sums of gradients then agree to the last few bits."""
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).double()


def four_steps(model: nn.Module, x: Tensor, devices: list[str]) -> Tensor:
    shares = scatter(x, devices)
    print(f"scatter: {len(x)} samples -> {', '.join(f'{len(share)} on {share.device}' for share in shares)}")
    replicas = replicate(model, devices[: len(shares)])  # the first replica is the model itself
    sizes = [sum(parameter.numel() for parameter in replica.parameters()) for replica in replicas]
    print(
        f"replicate: {len(replicas)} networks of {sizes[0]} parameters; gradients of the copies flow back to the first"
    )
    outputs = parallel_apply(replicas, shares, devices=devices[: len(shares)])
    print(f"parallel_apply: {', '.join(str(tuple(output.shape)) for output in outputs)}")
    out: Tensor = gather(outputs, devices[0])
    print(f"gather: {tuple(out.shape)} on {out.device}")
    return out


def train(model: nn.Module, x: Tensor, target: Tensor, steps: int) -> float:
    """Train and return the last loss. The loss is the mean over all samples of the gathered output, however they were
    split."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = torch.zeros(())
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
    return loss.item()


def difference(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    parser.add_argument("--devices", nargs="+", default=gpus if len(gpus) > 1 else ["cpu", "cpu"])
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if min(options.batch, options.steps) < 1:
        parser.error("--batch and --steps are at least 1")
    torch.manual_seed(0)
    alone = network().to(options.devices[0])
    x = torch.randn(options.batch, 8, dtype=torch.float64, device=options.devices[0])
    target = torch.randn(options.batch, 2, dtype=torch.float64, device=options.devices[0])

    split = copy.deepcopy(alone)
    outs = [four_steps(split, x, options.devices), alone(x)]
    for out in outs:
        nn.functional.mse_loss(out, target).backward()
    gradients = [[p.grad for p in model.parameters() if p.grad is not None] for model in (split, alone)]
    print(f"gradients of the split batch and of the whole one differ by {difference(*gradients):.1e}")

    parallel = DataParallel(split, options.devices)
    losses = [train(model, x, target, options.steps) for model in (parallel, alone)]
    apart = difference(list(parallel.parameters()), list(alone.parameters()))
    print(f"{options.steps} steps of training: loss {losses[0]:.4f}, alone {losses[1]:.4f}")
    print(f"the trained parameters differ by {apart:.1e}")


if __name__ == "__main__":
    main()
