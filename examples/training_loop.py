"""The report of your own training loop, without changes to its data, model, loss and optimizer.

    python examples/training_loop.py [--steps 40] [-o report.html]

`rooftop.analyze` runs a model again and again on the same input. `rooftop.recording` watches the loop that you have:
put it in a `with` block and call `step()` at the end of each iteration. Three steps warm up, one runs under the
profiler, three are labelled, the next ones are timed undisturbed, and the rest run unwatched, so a long training loses
only seconds. The report includes waits for data and work outside of modules. The loop of this example makes its batches
on the host, which a measurement of the model alone would not show.

With fewer steps than `NEEDED`, the report covers only the first step, and says so.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn

import rooftop
from rooftop.analysis.recordings import NEEDED


def batch(size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Images (B, 3, 32, 32) of one colour with noise, and which colour it is (B,)."""
    colour = torch.randint(3, (size,))
    images = 0.5 * torch.rand(size, 3, 32, 32)
    images[torch.arange(size), colour] += 0.3
    return images.to(device), colour.to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("-o", "--output", type=Path, help="also write the report as a page (HTML)")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(16, 3),
    ).to(device)  # fmt: skip
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)

    with rooftop.recording(network, name="training loop") as recorded:
        for _ in range(options.steps):
            images, colour = batch(options.batch, device)
            optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(network(images), colour)
            loss.backward()
            optimizer.step()
            recorded.step()

    print(recorded.report.table())
    print(f"loss {loss.item():.3f} after {options.steps} steps; {NEEDED} are needed for an undisturbed time")
    if options.output is not None:
        recorded.report.to_html(options.output)
        print(f"report: {options.output}")


if __name__ == "__main__":
    main()
