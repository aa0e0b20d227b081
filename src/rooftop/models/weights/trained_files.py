"""The metadata of a weights file: the model, the classes, and the preprocessing of images.

`rooftop train` writes this metadata into the header of its safetensors files, under `KEY`, as JSON:

    {"model": "resnet18", "options": {"num_classes": 3, "small_images": true}, "classes": ["cat", "dog", "owl"],
     "preprocessing": {"resize": 36, "crop": 32, "interpolation": "bilinear", "mean": [...], "std": [...]}}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from rooftop.errors import WeightsError
from rooftop.models.images import MEAN, STD, Preprocessing
from rooftop.models.weights.safetensors_files import safetensors_library, unreadable_safetensors
from rooftop.user_paths import user_path

KEY = "rooftop"


@dataclass(frozen=True)
class TrainedFile:
    """The metadata of a weights file.

    Attributes:
        model: name of the builder.
        options: options of the builder.
        classes: names of the classes in the order of the logits, or of a detector's labels; empty if unknown.
        preprocessing: preprocessing of photographs for a classifier; None if the file does not state it.
        sides: size of the shorter side of a detector's input, and the limit of its longer side, in pixels; None if the
            file does not state them.
    """

    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    classes: tuple[str, ...] = ()
    preprocessing: Preprocessing | None = None
    sides: tuple[int, int] | None = None


def trained_file(weights: str | Path) -> TrainedFile | None:
    """Read the metadata of a file; None if the file does not exist or has no metadata.

    Raises:
        WeightsError: the file is damaged.
        MissingExtraError: the file is a .safetensors file, and safetensors is not installed.
    """
    path = user_path(weights)
    if path.suffix.lower() != ".safetensors" or not path.is_file():
        return None
    library = safetensors_library()
    try:
        with library.safe_open(path, framework="pt", device="cpu") as file:
            header = file.metadata() or {}
    except (library.SafetensorError, OSError) as error:
        raise unreadable_safetensors(path, error) from error
    try:
        said = json.loads(header.get(KEY, "{}"))
        return _read(said) if isinstance(said.get("model"), str) else None  # without "model", the entry is not ours
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise WeightsError(f"{path}: {KEY!r} in its header was not written by rooftop train ({error!r})") from error


def plain_preprocessing(preprocessing: Preprocessing) -> dict[str, Any]:
    """The preprocessing as plain JSON values, which a file stores."""
    return {
        "resize": preprocessing.resize,
        "crop": preprocessing.crop,
        "interpolation": preprocessing.interpolation.name.lower(),
        "mean": list(preprocessing.mean),
        "std": list(preprocessing.std),
    }


def _read(said: Mapping[str, Any]) -> TrainedFile:
    how, sides = said.get("preprocessing"), said.get("sides")
    return TrainedFile(
        str(said["model"]),
        dict(said.get("options", {})),
        tuple(map(str, said.get("classes", ()))),
        None if how is None else _preprocessing(how),
        None if sides is None else (int(sides[0]), int(sides[1])),
    )


def _preprocessing(how: Mapping[str, Any]) -> Preprocessing:
    mean, std = ([float(each) for each in how.get(name, usual)] for name, usual in (("mean", MEAN), ("std", STD)))
    filter_ = Image.Resampling[str(how.get("interpolation", "bilinear")).upper()]
    return Preprocessing(
        int(how["resize"]), int(how["crop"]), filter_, (mean[0], mean[1], mean[2]), (std[0], std[1], std[2])
    )
