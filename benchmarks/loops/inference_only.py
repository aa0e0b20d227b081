"""Inference over a few batches. A function of the script reads each batch, and the host adds up accuracies."""

from __future__ import annotations

import argparse

import torch
from loop_clock import LoopClock
from torch import nn

CALLS = 15


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    device, large = options.device, options.device == "cuda"
    torch.manual_seed(2)
    width, batch, size = (64, 64, 224) if large else (16, 8, 64)
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [nn.Conv2d(3 if index == 0 else width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)).to(device).eval()
    images = torch.rand(CALLS * batch, 3, size, size)
    clock = LoopClock(device)
    with torch.inference_mode():
        for index in range(CALLS):
            x = images[index * batch : (index + 1) * batch].to(device)
            scores = net((x - 0.5) / 0.25).softmax(1)
            clock.step(scores.max(1).values.mean())
    clock.finish()


if __name__ == "__main__":
    main()
