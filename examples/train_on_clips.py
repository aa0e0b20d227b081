"""Train a small network to recognize the direction of motion in clips, on generated videos.

    python examples/train_on_clips.py [--steps 60] [--device cpu|cuda]

Each video pans over a pattern, to the left or to the right; a clip takes its label from its file. While the network
learns from one batch, `ClipLoader` decodes the next ones, by NVDEC if the GPU has it.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.media import ClipDataset, ClipLoader, VideoWriter

SIDE, FRAMES = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        paths = [pan(Path(folder) / f"{number}.mp4", number) for number in range(6)]
        how: dict[str, Any] = {
            "frames": FRAMES,
            "stride": 2,
            "resize": (SIDE, SIDE),
            "dtype": torch.float32,
            "device": "auto",
        }
        seen, unseen = ClipDataset(paths[:4], **how), ClipDataset(paths[4:], **how)
        network = nn.Sequential(
            nn.Conv3d(3, 16, 5, padding=2), nn.ReLU(), nn.AvgPool3d((1, 4, 4)),
            nn.Conv3d(16, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(16, 2),
        ).to(options.device)  # fmt: skip
        learn(network, seen, options.steps, options.device)
        print(f"accuracy on clips of other videos: {right(network, unseen, options.device):.0%}")


def learn(network: nn.Module, clips: ClipDataset, steps: int, device: str) -> None:
    optimizer = torch.optim.Adam(network.parameters(), 3e-3)
    loader = ClipLoader(clips, batch=8, shuffle=True, seed=1, to=None if device == "cpu" else device)
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    for number, (pixels, files, _) in enumerate(itertools.islice(endless, steps)):
        loss = nn.functional.cross_entropy(network(ready(pixels, device)), (files % 2).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if number % 20 == 0:
            print(f"step {number}: loss {loss.item():.3f}")


@torch.no_grad()
def right(network: nn.Module, clips: ClipDataset, device: str) -> float:
    """The share of clips with the right direction."""
    count = 0
    for pixels, files, _ in ClipLoader(clips, batch=8):
        count += int((network(ready(pixels, device)).argmax(1).cpu() == files % 2).sum())
    return count / len(clips)


def ready(pixels: Tensor, device: str) -> Tensor:
    """Convert pixels (N, T, 3, H, W) in 0..1 to (N, 3, T, H, W) in -2..2."""
    return (pixels.to(device).transpose(1, 2) - 0.5) * 4


def pan(path: Path, number: int) -> Path:
    """A video of 40 frames that pans over its own pattern; even videos pan to the left, odd ones to the right."""
    generator = torch.Generator().manual_seed(number)
    coarse = torch.rand(1, 3, 8, 40, generator=generator)
    pattern = nn.functional.interpolate(coarse, (64, 320), mode="bilinear")[0]
    with VideoWriter(path, fps=25) as writer:
        for frame in range(40):
            left = 4 * (frame if number % 2 else 39 - frame)
            writer.write(pattern[:, :, left : left + 64])
    return path


if __name__ == "__main__":
    main()
