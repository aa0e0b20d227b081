"""Models with the state dicts and weights of their origins, and the photographs that go into them."""

from rooftop.models.classification import Classified, Guess, classify, load_classifier
from rooftop.models.images import Preprocessing, find_images, load_images
from rooftop.models.registry import ModelEntry, builtin_models, model_entry
from rooftop.models.resnet import (
    ResNet,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    resnext50_32x4d,
    resnext101_32x8d,
    resnext101_64x4d,
    wide_resnet50_2,
    wide_resnet101_2,
)

__all__ = [
    "Classified",
    "Guess",
    "ModelEntry",
    "Preprocessing",
    "ResNet",
    "builtin_models",
    "classify",
    "find_images",
    "load_classifier",
    "load_images",
    "model_entry",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnext50_32x4d",
    "resnext101_32x8d",
    "resnext101_64x4d",
    "wide_resnet50_2",
    "wide_resnet101_2",
]
