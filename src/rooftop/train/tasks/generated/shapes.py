"""Pictures of coloured shapes with their boxes, in COCO's format: a small data set for training a detector.

A picture has one to four circles, squares and triangles on a noisy background. `draw` generates a batch on any device
and never waits for the device. The host generates the random number of shapes in each picture; the device generates all
other random numbers. The same seed gives the same pictures on every device of one type. `write` writes a batch to a
folder, as PNG files and instances.json, for `rooftop.models.CocoDataset`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

NAMES = ("circle", "square", "triangle")
MOST = 4  # maximum number of shapes in a picture
RADII = (0.08, 0.2)  # smallest and largest radius, as fractions of a picture's side
TRIES = 64  # number of candidate positions of a shape; the candidate that overlaps other shapes least is chosen
NOISE = 0.1  # standard deviation of a pixel, where black is 0 and white is 1


class Shapes(NamedTuple):
    """A batch of B pictures of shapes.

    Attributes:
        images: float32 (B, 3, side, side), 0..1.
        labels: int64 (B, MOST), indices into `NAMES`.
        boxes: float32 (B, MOST, 4) as (center x, center y, width, height), as fractions of the picture.
        counts: number of valid labels and boxes of each picture.
    """

    images: Tensor
    labels: Tensor
    boxes: Tensor
    counts: list[int]

    def targets(self) -> list[dict[str, Tensor]]:
        """The targets for `rooftop.models.detr.SetCriterion`: labels (n,) and boxes (n, 4) of each picture."""
        rows = zip(self.labels, self.boxes, self.counts, strict=True)
        return [{"labels": labels[:n], "boxes": boxes[:n]} for labels, boxes, n in rows]


def draw(count: int, side: int, seed: int, device: torch.device | str = "cpu") -> Shapes:
    """Draw a number of pictures of side x side pixels."""
    counts = torch.randint(1, MOST + 1, (count,), generator=torch.Generator().manual_seed(seed))
    chance = torch.Generator(device).manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=chance, device=device)

    labels = torch.randint(len(NAMES), (count, MOST), generator=chance, device=device)
    radii = RADII[0] + (RADII[1] - RADII[0]) * uniform(count, MOST)
    radii = radii.sort(descending=True).values  # places the largest shapes first, while there is room
    centers = _places(radii, uniform(count, MOST, TRIES, 2))  # (B, MOST, 2)
    background = uniform(count, 3, 1, 1)
    images = background.expand(-1, -1, side, side)
    there = counts.to(device, non_blocking=True)[:, None] > torch.arange(MOST, device=device)  # (B, MOST)
    cover = _cover(labels, centers * side, radii * side, side) * there[..., None, None]  # (B, MOST, side, side)
    for number in range(MOST):
        # The colour differs from the background by about half of the range (modulo the range), so the shape is visible.
        colour = (background + 0.35 + 0.3 * uniform(count, 3, 1, 1)) % 1
        images = torch.lerp(images, colour, cover[:, number, None])
    images = images + NOISE * torch.randn(images.shape, generator=chance, device=device)
    boxes = torch.cat((centers, 2 * radii[..., None].expand(-1, -1, 2)), dim=-1)
    return Shapes(images.clamp(0, 1), labels, boxes, counts.tolist())


def _places(radii: Tensor, tries: Tensor) -> Tensor:
    """Choose centers (B, MOST, 2) for radii (B, MOST) from candidates (B, MOST, TRIES, 2) in 0..1.

    Each shape takes the candidate at which its box overlaps the boxes of earlier shapes least. The candidates are
    scaled so that all shapes lie inside the picture.
    """
    tries = radii[..., None, None] + (1 - 2 * radii[..., None, None]) * tries
    chosen = tries[:, :1, 0]  # (B, 1, 2)
    for number in range(1, radii.shape[1]):
        apart = (tries[:, number, :, None] - chosen[:, None]).abs()  # (B, TRIES, number, 2)
        reach = (radii[:, number, None] + radii[:, :number])[:, None, :, None]  # (B, 1, number, 1)
        hidden = (reach - apart).clamp(min=0).prod(-1).sum(-1)  # (B, TRIES)
        best = hidden.argmin(1)[:, None, None].expand(-1, 1, 2)
        chosen = torch.cat((chosen, tries[:, number].gather(1, best)), dim=1)
    return chosen


def _cover(labels: Tensor, centers: Tensor, radii: Tensor, side: int) -> Tensor:
    """The fraction of each pixel (side, side) that each shape covers, 0..1; centers and radii are in pixels."""
    pixels = torch.arange(side, device=labels.device) + 0.5
    x = (pixels - centers[..., 0, None])[..., None, :]  # (B, MOST, 1, side)
    y = (pixels - centers[..., 1, None])[..., None]  # (B, MOST, side, 1)
    r = radii[..., None, None]
    # Distance from the outline in pixels, positive inside.
    circle = r - torch.hypot(x, y)
    square = r - torch.maximum(x.abs(), y.abs())
    triangle = torch.minimum(r - y, (y + r) / 2 - x.abs())  # the triangle's tip is at the top
    kind = labels[..., None, None]
    within = torch.where(kind == 0, circle, torch.where(kind == 1, square, triangle))
    return (within + 0.5).clamp(0, 1)


def write(shapes: Shapes, folder: Path) -> Path:
    """Write pictures as PNG files, and instances.json in COCO's format; returns the path of instances.json."""
    folder.mkdir(parents=True, exist_ok=True)
    content = coco_annotations(shapes)
    for image, described in zip(shapes.images, content["images"], strict=True):
        picture(image).save(folder / described["file_name"])
    path = folder / "instances.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def coco_annotations(shapes: Shapes) -> dict[str, list[dict[str, Any]]]:
    """Describe the boxes of all pictures in COCO's format."""
    side = shapes.images.shape[-1]
    images: list[dict[str, Any]] = []
    boxes: list[dict[str, Any]] = []
    for number, target in enumerate(shapes.targets()):
        images.append({"id": number, "file_name": f"{number:04}.png", "height": side, "width": side})
        for label, box in zip(target["labels"].tolist(), (target["boxes"] * side).tolist(), strict=True):
            x, y, width, height = box
            place = {"bbox": [x - width / 2, y - height / 2, width, height], "area": width * height, "iscrowd": 0}
            boxes.append({"id": len(boxes) + 1, "image_id": number, "category_id": label, **place})
    categories = [{"id": label, "name": name} for label, name in enumerate(NAMES)]
    return {"images": images, "annotations": boxes, "categories": categories}


def picture(image: Tensor) -> Image.Image:
    """Convert (3, H, W) in 0..1 to a Pillow image."""
    return Image.fromarray((image * 255).round().byte().permute(1, 2, 0).cpu().numpy())
