"""Example pictures of a trained model, which its task draws."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from PIL import Image

LARGEST_SIDE = 480  # pixels of a picture on the page
SMALLEST_SIDE = 96  # pixels; smaller pictures, e.g. digits of 8 x 8, are enlarged


def example_pictures(task: Any, model: Any) -> list[tuple[str, Image.Image]]:
    """Draw the task's examples, each with a caption. PyTorch's generators stay unchanged."""
    if task.examples is None:
        return []
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        found: list[tuple[str, Image.Image]] = task.examples(model, device)
    return found


def embedded(picture: Image.Image) -> str:
    """Encode a picture as a `data:` URL for an HTML page, scaled to a readable size."""
    side = max(picture.size)
    if side > LARGEST_SIDE:
        picture = picture.copy()
        picture.thumbnail((LARGEST_SIDE, LARGEST_SIDE))
    elif side < SMALLEST_SIDE:
        factor = -(-SMALLEST_SIDE // side)
        picture = picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)
    file = io.BytesIO()
    picture.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
