"""Data for training: folders of images, tar shards, and a loader that keeps the device busy.

from rooftop.data import ImageFolder, ImageTransform, Loader

data = ImageFolder("photographs/train", ImageTransform(224, {"crop": 0.35, "flip": 0.5}, train=True))
for images, labels in (batch.value for batch in Loader(data, 64, shuffle=True, device="cuda")): ...
"""

from rooftop.data.headspace import Headspace, headspace
from rooftop.data.image_folders import ImageFolder
from rooftop.data.image_transforms import ImageTransform
from rooftop.data.loader import LoadedBatch, Loader
from rooftop.data.pixels import Normalizer, Pixels
from rooftop.data.samples import DrawnSamples, Part, Samples, StagedSamples, sample
from rooftop.data.tar_shards import TarShards

__all__ = [
    "DrawnSamples",
    "Headspace",
    "ImageFolder",
    "ImageTransform",
    "LoadedBatch",
    "Loader",
    "Normalizer",
    "Part",
    "Pixels",
    "Samples",
    "StagedSamples",
    "TarShards",
    "headspace",
    "sample",
]
