"""Mark moving objects in a video: array expressions compare each frame with a mean of earlier frames.

    python examples/moving_things.py [walk.mp4] [--out moving.mp4] [--device cpu|cuda|auto]

Without a video the script creates one: a ball moves across noise. Frames are Mats that share the memory of the reader's
tensors, so on a GPU nothing is copied to the host before the video is written.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from rooftop import mat
from rooftop.errors import RooftopError
from rooftop.mat import CV_8U, CV_32F, Mat
from rooftop.media import VideoReader, VideoWriter

KEPT = 0.9  # weight of a new frame in the mean
LEVELS = 40  # a pixel counts as moving if its difference (0 to 255) is larger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("video", nargs="?", type=Path)
    parser.add_argument("--out", type=Path, default=Path("moving.mp4"))
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            share = mark(options.video or ball(Path(folder) / "ball.mp4"), options.out, options.device)
        except RooftopError as error:
            raise SystemExit(f"error: {error}") from error
    print(f"{share:.1%} of the pixels moved; {options.out} shows them in red")


def mark(video: Path, out: Path, device: str) -> float:
    """The share of pixels that moved, over all frames except the first."""
    reader = VideoReader(video, device)
    if reader.fallback_reason:
        print(f"decoded on the CPU: {reader.fallback_reason}")
    moved = frames = 0.0
    with VideoWriter(out, reader.fps, pad=True) as writer:
        mean: Mat | None = None
        for frame in reader:
            picture = Mat(frame.permute(1, 2, 0).contiguous())  # (H, W, 3); no further copy from here on
            if mean is None:
                mean = picture.convertTo(CV_32F)
            apart = mat.absdiff(picture, mean.convertTo(CV_8U))
            red, green, blue = mat.split(apart)
            moving = Mat(mat.maximum(mat.maximum(red, green), blue) > LEVELS)  # 255 where something moves
            moved += moving.tensor().count_nonzero().item() / moving.total()
            frames += 1
            shown = picture.clone()
            shown.setTo((255, 0, 0), moving)
            writer.write(shown.tensor("chw"))
            mean.assign(mean * KEPT + picture.convertTo(CV_32F) * (1 - KEPT))
    return moved / max(1.0, frames - 1)


def ball(path: Path) -> Path:
    """A video of 40 frames, 96 x 128, in which a bright ball of radius 10 goes from left to right."""
    generator = torch.Generator().manual_seed(0)
    ground = torch.rand(3, 96, 128, generator=generator) * 0.3
    down, across = torch.meshgrid(torch.arange(96), torch.arange(128), indexing="ij")
    with VideoWriter(path, fps=25) as writer:
        for number in range(40):
            near: Tensor = (down - 48) ** 2 + (across - 3 * number) ** 2 < 100
            writer.write(torch.where(near, 0.95, ground))
    return path


if __name__ == "__main__":
    main()
