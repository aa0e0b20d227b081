"""Train a next-frame network on moving digits, and show what it has learned, in numbers and as a picture.

    python examples/train_conv_lstm.py [--device cuda] [--steps 200] [--seed 0] [--out DIR] [--clip FILE] [--quick]

The digits come from scikit-learn and bounce around in a frame; no file is downloaded. On a CPU a small network learns
from one digit in 32 x 32 frames. With `--device cuda` the full network of Keras's example learns from two digits in 64
x 64 frames. With `--clip` the colour variant learns from the first four fifths of a video (any that `rooftop.media`
reads).

The figures are for sequences of digits that were not used in training. The baseline is to copy: frame t + 1 equals
frame t. Copied frames are clamped to 0.01..0.99, because otherwise their cross entropy would be unbounded.

DIR gets two files. `frames.png` has three rows per sequence: the real frames, each next frame predicted from all real
frames before it, and a roll-out, in which the network sees its own predictions after the first frames. `rooftop
predict-video --weights` accepts `next_frame.pth`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor

from rooftop.errors import InputError
from rooftop.models import NextFrameNetwork, colour_next_frame_network, next_frame_network, predict_frames
from rooftop.train.tasks.conv_lstm import SETTLED_BY, settle_norms
from rooftop.train.tasks.generated.digits import TRAINED_ON, digits, moving_digits


@dataclass(frozen=True)
class Setup:
    """The network and its data.

    Attributes:
        network: predicts every frame (binary cross entropy) or one frame (mean absolute error).
        videos: function of a seed that returns training videos (N, T, H, W, C) in 0..1.
        held_out: videos (N, T, H, W, C) that are not used in training.
        steps: steps of Adam.
        learning_rate: learning rate of Adam.
    """

    network: NextFrameNetwork
    videos: Callable[[int], Tensor]
    held_out: Tensor
    steps: int
    learning_rate: float


# ---- training data ---------------------------------------------------------------------------------------------


def of_digits(device: torch.device, quick: bool) -> Setup:
    images = digits()[0].to(device)
    if device.type == "cuda":
        sizes, network, steps, batch, rate = (20, 64, 2), next_frame_network(), 4000, 8, 1e-3
    else:
        sizes, network, steps, batch, rate = (12, 32, 1), next_frame_network(filters=8), 200, 8, 1e-2
    if quick:
        sizes, network, steps, batch, rate = (6, 16, 1), next_frame_network(filters=4), 60, 4, 2e-2
    frames, side, together = sizes
    train, test = images[:TRAINED_ON], images[TRAINED_ON:]

    def videos(seed: int) -> Tensor:
        return moving_digits(train, batch, frames, side, together, seed)

    held_out = moving_digits(test, 4 * batch, frames, side, together, seed=0)
    return Setup(network, videos, held_out, steps, rate)


def of_clip(path: Path, device: torch.device, quick: bool) -> Setup:
    from rooftop.media import VideoReader

    frames, side = (6, 16) if quick else (12, 64 if device.type == "cuda" else 32)
    whole = VideoReader(path)
    shrink = side / min(whole.height, whole.width)
    size = (max(1, round(whole.height * shrink)), max(1, round(whole.width * shrink)))
    clip = VideoReader(path, dtype=torch.float32, resize=size)[:].permute(0, 2, 3, 1).to(device)  # (T, H, W, 3)
    first = 4 * len(clip) // 5
    if len(clip) - first < frames:
        raise InputError(f"{path} has {len(clip)} frames: expected at least {5 * frames}")

    def windows(part: Tensor, count: int, seed: int) -> Tensor:
        starts = torch.randint(len(part) - frames + 1, (count,), generator=torch.Generator().manual_seed(seed))
        return torch.stack([part[start : start + frames] for start in starts.tolist()])

    filters, steps, batch = (64, 2000, 8) if device.type == "cuda" else (8, 300, 4)
    if quick:
        filters, steps = 4, 20
    network = colour_next_frame_network(filters=filters)
    return Setup(network, partial(windows, clip[:first], batch), windows(clip[first:], 4 * batch, 0), steps, 3e-3)


# ---- training --------------------------------------------------------------------------------------------------


def parted(network: NextFrameNetwork, videos: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(frames that the network sees, frames to predict, the copies that serve as baseline)."""
    seen = videos[:, :-1]
    return (seen, videos[:, 1:], seen) if network.every_frame else (seen, videos[:, -1], seen[:, -1])


def train(setup: Setup, seed: int) -> None:
    network = setup.network.train()
    optimizer = torch.optim.Adam(network.parameters(), setup.learning_rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, setup.learning_rate, total_steps=setup.steps)
    for step in range(setup.steps):
        seen, expected, _ = parted(network, setup.videos(1 + seed * setup.steps + step))
        logits = network.logits(seen, ahead=False)
        if network.every_frame:
            loss = F.binary_cross_entropy_with_logits(logits, expected)
        else:
            loss = F.l1_loss(logits.sigmoid(), expected)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, setup.steps // 10) == 0 or step == setup.steps - 1:
            print(f"step {step:5}: loss {loss.item():.4f}", flush=True)
    settled_by = torch.cat([setup.videos(-1 - seed) for seed in range(SETTLED_BY)])
    settle_norms(settled_by, len(settled_by) // SETTLED_BY, network)
    network.eval()


# ---- results ---------------------------------------------------------------------------------------------------


def errors(predicted: Tensor, expected: Tensor) -> str:
    entropy = F.binary_cross_entropy(predicted, expected)
    return f"BCE {entropy:.4f}, MAE {F.l1_loss(predicted, expected):.4f}, MSE {F.mse_loss(predicted, expected):.4f}"


@torch.no_grad()
def report(setup: Setup, out: Path) -> None:
    network, videos = setup.network, setup.held_out
    seen, expected, copied = parted(network, videos)
    print(f"held out, network: {errors(network.logits(seen, ahead=False).sigmoid(), expected)}")
    print(f"held out, copying: {errors(copied.clamp(0.01, 0.99), expected)}")
    context = videos.shape[1] // 2
    come = videos[:, context:]
    rolled = predict_frames(network, videos[:, :context], come.shape[1])
    still = videos[:, context - 1 : context].expand_as(come).clamp(0.01, 0.99)
    print(f"rolled out over {come.shape[1]} frames, network: {errors(rolled, come)}")
    print(f"rolled out over {come.shape[1]} frames, standing still: {errors(still, come)}")
    following = torch.stack(
        [predict_frames(network, videos[:2, :t], 1)[:, 0] for t in range(context, videos.shape[1])], 1
    )
    draw([(come[i], following[i], rolled[i]) for i in range(2)], out / "frames.png")
    torch.save(network.state_dict(), out / "next_frame.pth")
    print(f"written: {out / 'frames.png'}, {out / 'next_frame.pth'}")


def draw(sequences: list[tuple[Tensor, Tensor, Tensor]], path: Path) -> None:
    """Draw three rows of frames (T, H, W, C) for each sequence."""
    names, margin, gap = ("what came", "next frame", "rolled out"), 80, 2
    count, height, width = sequences[0][0].shape[:3]
    scale = max(1, 96 // height)
    high, wide = height * scale + gap, width * scale + gap
    picture = Image.new("RGB", (margin + count * wide, len(sequences) * (3 * high + 4 * gap)), "white")
    pen = ImageDraw.Draw(picture)
    for block, rows in enumerate(sequences):
        for number, (name, row) in enumerate(zip(names, rows, strict=True)):
            top = block * (3 * high + 4 * gap) + number * high
            pen.text((4, top + high // 2 - 6), name, "black")
            for place, frame in enumerate(row.mul(255).round().byte().cpu().expand(-1, -1, -1, 3)):
                image = Image.fromarray(frame.numpy()).resize((width * scale, height * scale), Image.Resampling.NEAREST)
                picture.paste(image, (margin + place * wide, top))
    picture.save(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="the CPU trains a small network")
    parser.add_argument("--steps", type=int, help="number of training steps; the default depends on the network")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("trained"), metavar="DIR")
    parser.add_argument("--clip", type=Path, metavar="FILE", help="a video to learn from, in place of digits")
    parser.add_argument("--quick", action="store_true", help="a tiny run, to test the script")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 1:
        parser.error("expected --steps of at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU, and PyTorch finds none here")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is not a folder")
    torch.manual_seed(options.seed)
    device = torch.device(options.device)
    try:
        found = of_clip(options.clip, device, options.quick) if options.clip else of_digits(device, options.quick)
    except InputError as error:  # an error in the clip
        raise SystemExit(f"error: {error}") from error
    steps = options.steps or found.steps
    setup = Setup(found.network.to(device), found.videos, found.held_out, steps, found.learning_rate)
    options.out.mkdir(parents=True, exist_ok=True)
    parameters = sum(p.numel() for p in setup.network.parameters())
    print(f"{parameters:,} parameters, videos of {' x '.join(map(str, setup.held_out.shape[1:]))}, {options.device}")
    began = time.perf_counter()
    train(setup, options.seed)
    print(f"trained for {steps} steps in {time.perf_counter() - began:.0f} s")
    report(setup, options.out)


if __name__ == "__main__":
    main()
