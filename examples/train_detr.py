"""Train a DETR from random initial values to find circles, squares and triangles.

    python examples/train_detr.py [--device cuda] [--steps N] [--pictures N] [--seed 0] [--out detr] [--quick]

On the CPU the network overfits to eight pictures, which soon shows that network, losses and boxes fit together: a
detector that cannot do that will not learn anything else. On a GPU each step gets new pictures, drawn on the GPU, and
the network is tested on pictures that it has never seen. `--pictures` sets the number of pictures to overfit, on either
device; 0 means new pictures at every step. The script prints COCO's mean average precision ("mAP"), and writes to --out

    pictures/        the test pictures: PNG files and instances.json in COCO's format (examples/shapes.py)
    found.png        eight of the test pictures: true boxes above, predicted boxes below
    loss.png         the loss of each step, on a logarithmic scale

The docstring of `rooftop.models.detr.small` explains why this network learns fast. This script adds a higher learning
rate. A warm-up, a cosine schedule and clipped gradients make that rate safe. On a GPU the script uses bf16 autocast and
matches boxes on the GPU, and no step waits for the GPU. `rooftop train detr` trains the same network with checkpoints,
curves and a page.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from rooftop.models import CocoDataset, FoundObject, as_lists, average_precision, detr_small, draw_objects
from rooftop.models.detr import Detections, Detr, Matcher, SetCriterion, Target, corners, to_detections
from rooftop.models.images import MEAN, STD
from rooftop.train.tasks.generated import shapes

Batch = tuple[Tensor, Sequence[Target]]
"""Normalized images (B, 3, side, side), and their targets."""

SHOWN_SIDE = 256  # pixels of each picture in found.png


@dataclass(frozen=True)
class Recipe:
    """The network and its training.

    Attributes:
        pictures: number of pictures to overfit; 0: new ones at every step.
        judged: number of test pictures if `pictures` is 0.
        side: side of a picture, in pixels.
        channels: channels of the backbone's stages, each of which halves the map.
        width, heads, layers: sizes of the transformer; encoder and decoder have `layers` layers each.
        learning_rate: the highest learning rate, reached after `warm_up` steps; then a cosine reduces it to 0.
    """

    pictures: int = 8
    judged: int = 256
    batch: int = 16
    steps: int = 500
    side: int = 64
    channels: tuple[int, ...] = (16, 32, 64)
    width: int = 64
    heads: int = 4
    layers: int = 2
    learning_rate: float = 1e-3
    warm_up: int = 50


RECIPES = {
    "cpu": Recipe(),
    "cuda": Recipe(pictures=0, batch=128, steps=6000, warm_up=200),
}
QUICK = {"steps": 80, "warm_up": 20, "judged": 8, "side": 48}  # a short run, to see that the loss falls


def network(recipe: Recipe) -> Detr:
    return detr_small(
        num_classes=len(shapes.NAMES),
        channels=recipe.channels,
        width=recipe.width,
        heads=recipe.heads,
        layers=recipe.layers,
    )


def new_pictures(recipe: Recipe, seed: int, device: torch.device) -> Batch:
    """A new batch, drawn on the device."""
    drawn = shapes.draw(recipe.batch, recipe.side, seed, device)
    mean, std = (torch.tensor(each)[:, None, None].to(device, non_blocking=True) for each in (MEAN, STD))
    return (drawn.images - mean) / std, drawn.targets()


def of_dataset(dataset: CocoDataset, indices: Sequence[int], device: torch.device) -> Batch:
    """Pictures of a dataset, which must all have one size."""
    images, targets = as_lists([dataset[index] for index in indices])
    moved = [{key: value.to(device) for key, value in target.items()} for target in targets]
    return torch.stack(images).to(device), moved


class Training:
    """A network with its optimizer and loss; `step` never waits for the GPU."""

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.device = device
        self.model = network(recipe).to(device)
        # Three of four queries have no object here. With COCO, nearly all of 100 queries have no object, so 0.1 is used
        # there.
        matcher = Matcher(batched=device.type == "cuda")
        self.criterion = SetCriterion(self.model.num_classes, matcher, no_object=0.3).to(device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), recipe.learning_rate, betas=(0.9, 0.98), weight_decay=1e-4, fused=True
        )

        def factor(step: int) -> float:
            return min(1.0, (step + 1) / recipe.warm_up) * (1 + math.cos(math.pi * step / recipe.steps)) / 2

        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, factor)

    def step(self, batch: Batch) -> Tensor:
        """Make one step of the optimizer, and return the loss before it, a scalar on the device."""
        images, targets = batch
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            predictions = self.model(images)
        loss = self.criterion.total(self.criterion(predictions, targets))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        return loss.detach()


def train(
    recipe: Recipe, seed: int, device: torch.device, batch_of: Callable[[int], Batch]
) -> tuple[Detr, list[float]]:
    """The trained network, and the loss of each step."""
    torch.manual_seed(seed)
    training = Training(recipe, device)
    losses = []
    for step in range(recipe.steps):
        losses.append(training.step(batch_of(step)))
        if (step + 1) % max(1, recipe.steps // 10) == 0:
            print(f"step {step + 1:,} of {recipe.steps:,}: loss {losses[-1].item():.3f}", flush=True)
    return training.model.eval(), torch.stack(losses).tolist()


@torch.inference_mode()
def find(model: Detr, dataset: CocoDataset, batch: int, device: torch.device) -> list[Detections]:
    """The boxes that the network finds in each picture, in the picture's pixels, on the CPU."""
    found = []
    for start in range(0, len(dataset), batch):
        indices = range(start, min(start + batch, len(dataset)))
        images, _ = of_dataset(dataset, indices, device)
        sizes = [(images.shape[-2], images.shape[-1])] * len(indices)
        found += [Detections(*(part.cpu() for part in each)) for each in to_detections(model(images), sizes)]
    return found


def side_by_side(dataset: CocoDataset, found: Sequence[Detections], threshold: float = 0.5) -> Image.Image:
    """The first eight pictures twice: above with true boxes, below with boxes found with at least this score."""
    count = min(8, len(dataset))
    sheet = Image.new("RGB", (count * SHOWN_SIDE, 2 * SHOWN_SIDE))
    for number in range(count):
        described = dataset.images[number]
        photo = Image.open(dataset.folder / described["file_name"])
        scale = SHOWN_SIDE / photo.width
        target = dataset[number][1]
        true = Detections(torch.ones(len(target["labels"])), target["labels"], corners(target["boxes"]) * photo.width)
        for row, each in enumerate((true, found[number])):
            objects = [
                FoundObject(label, shapes.NAMES[label], score, (box[0], box[1], box[2], box[3]))
                for score, label, box in zip(
                    each.scores.tolist(), each.labels.tolist(), (each.boxes * scale).tolist(), strict=True
                )
                if score >= threshold
            ]
            drawn = draw_objects(photo.resize((SHOWN_SIDE, SHOWN_SIDE), Image.Resampling.NEAREST), objects)
            sheet.paste(drawn, (number * SHOWN_SIDE, row * SHOWN_SIDE))
    return sheet


def curve(losses: Sequence[float], width: int = 800, height: int = 400) -> Image.Image:
    """Losses, all above 0, on a logarithmic scale: the highest at the top, the lowest at the bottom."""
    chart = Image.new("RGB", (width, height), "white")
    logs = [math.log(loss) for loss in losses]
    low, high = min(logs), max(logs)
    x = [round(i * (width - 1) / max(1, len(logs) - 1)) for i in range(len(logs))]
    y = [round((high - log) / max(high - low, 1e-9) * (height - 1)) for log in logs]
    draw = ImageDraw.Draw(chart)
    draw.line(list(zip(x, y, strict=True)), fill="steelblue", width=2)
    draw.text((width - 8, 8), f"{math.exp(high):.3g} to {math.exp(low):.3g}", fill="black", anchor="ra")
    return chart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(RECIPES), default="cpu")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pictures", type=int, help="number of pictures to overfit; 0: new ones at every step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("detr"))
    parser.add_argument("--quick", action="store_true", help="a few steps on small pictures, to test the script")
    options = parser.parse_args()
    if (options.steps is not None and options.steps < 1) or (options.pictures is not None and options.pictures < 0):
        parser.error("expected --steps of at least 1, and --pictures of at least 0")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU, and PyTorch finds none here")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is not a folder")
    chosen = {name: getattr(options, name) for name in ("steps", "pictures") if getattr(options, name) is not None}
    recipe = replace(RECIPES[options.device], **(QUICK if options.quick else {}) | chosen)
    device = torch.device(options.device)

    # Seeds of new training pictures count from 1; test pictures have a lower seed.
    drawn = shapes.draw(recipe.pictures or recipe.judged, recipe.side, seed=0)
    folder, side = options.out / "pictures", recipe.side
    judged = CocoDataset(folder, shapes.write(drawn, folder), shorter=side, longer=side)
    if recipe.pictures:
        by_heart = of_dataset(judged, range(recipe.pictures), device)
        model, losses = train(recipe, options.seed, device, lambda step: by_heart)
    else:
        first = 1 + options.seed * 10**9
        model, losses = train(recipe, options.seed, device, lambda step: new_pictures(recipe, first + step, device))
    found = find(model, judged, recipe.batch, device)
    figures = average_precision(judged, found)
    side_by_side(judged, found).save(options.out / "found.png")
    curve(losses).save(options.out / "loss.png")
    seen = "learned by heart" if recipe.pictures else "never seen before"
    print(f"mAP {figures['AP']:.3f} on {len(judged)} pictures {seen} (AP50 {figures['AP50']:.3f})")
    print(f"{options.out / 'found.png'}: true boxes above, found ones below")


if __name__ == "__main__":
    main()
