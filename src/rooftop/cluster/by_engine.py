"""Classifiers and detectors whose networks run in an engine, for functions that take a model."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from rooftop.inference import Engine
from rooftop.models.detr.network import Detr, Predictions, pad_images


class ClassifierByEngine(nn.Module):
    """A classifier that an engine runs: (B, 3, crop, crop) -> logits (B, classes)."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.model = engine.model  # callers read the device and dtype of images from its parameters
        self._engine = engine

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self._engine(images)
        return logits


class DetrByEngine(Detr):
    """A DETR that an engine runs. The photographs of a batch are padded to the largest height and width in the
    batch."""

    def __init__(self, engine: Engine) -> None:
        nn.Module.__init__(self)
        head = engine.model.get_submodule("class_embed")
        assert isinstance(head, nn.Linear)
        self.class_embed = head  # callers read from this head the number of classes, and the images' device and dtype
        self._engine = engine

    def forward(self, images: Tensor | Sequence[Tensor], padding: Tensor | None = None) -> Predictions:
        if not isinstance(images, Tensor):
            images, padding = pad_images(images)
        found: Predictions = self._engine(images, padding)
        return found
