"""Load published weights by name: find them in the cache or download them, check them, and copy them into a model.

A published file has the first eight hex digits of its SHA-256 in its name (`resnet50-11ad3fa6.pth`). The file's
contents are checked against these digits after the download, and again at each use. Files are stored in torchvision's
folder (`torch.hub.get_dir()/checkpoints`), so that torchvision and Rooftop use each other's downloads.

The environment variable `ROOFTOP_WEIGHTS_URL` replaces the base address of the files by a mirror or a folder
(file:///...).
"""

from __future__ import annotations

import argparse
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn

from rooftop.errors import InputError, WeightsError
from rooftop.models.images import Preprocessing
from rooftop.models.registry import builtin_models
from rooftop.models.weights.checkpoint_contents import Contents, weights_in
from rooftop.models.weights.downloads import download, sha256_of
from rooftop.models.weights.file_checks import called, damaged_entry
from rooftop.models.weights.load_reports import COMPUTED, compared
from rooftop.models.weights.safetensors_files import safetensors_library, unreadable_safetensors
from rooftop.models.weights.trained_files import trained_file
from rooftop.user_paths import user_path
from rooftop.words import did_you_mean

PUBLIC_URL = "https://download.pytorch.org/models"
DETR_URL = "https://dl.fbaipublicfiles.com/detr"


@dataclass(frozen=True)
class Weights:
    """A published weights file, and the preprocessing of photographs for it.

    Attributes:
        file: name of the file, NAME-SHA256.pth with the first eight hex digits of the checksum.
        preprocessing: the preprocessing with which the published accuracy was measured; None for a detector, which gets
            whole photographs (`rooftop.models.detect`).
        publisher: the base address, to which the file's name is appended.
        dilation: whether the fourth stage of the ResNet keeps the resolution of the third stage ("DC5"). The file does
            not contain this setting.
    """

    file: str
    preprocessing: Preprocessing | None
    publisher: str = PUBLIC_URL
    dilation: bool = False

    @property
    def sha256(self) -> str:
        """The first eight hex digits of the file's SHA-256."""
        return Path(self.file).stem.rpartition("-")[2]

    @property
    def url(self) -> str:
        """The download address of the file."""
        return f"{(os.environ.get('ROOFTOP_WEIGHTS_URL') or self.publisher).rstrip('/')}/{self.file}"

    @property
    def path(self) -> Path:
        """The path of the file after its download."""
        return Path(torch.hub.get_dir()) / "checkpoints" / self.file


_256, _232 = Preprocessing(resize=256), Preprocessing(resize=232)


def _bicubic(resize: int, crop: int = 224) -> Preprocessing:
    return Preprocessing(resize, crop, Image.Resampling.BICUBIC)


WEIGHTS: dict[str, dict[str, Weights]] = {
    builder: {
        f"IMAGENET1K_V{version}": Weights(f"{builder}-{sha256}.pth", preprocessing)
        for version, (sha256, preprocessing) in enumerate(files, start=1)
    }
    for builder, files in {
        "resnet18": [("f37072fd", _256)],
        "resnet34": [("b627a593", _256)],
        "resnet50": [("0676ba61", _256), ("11ad3fa6", _232)],
        "resnet101": [("63fe2227", _256), ("cd907fc2", _232)],
        "resnet152": [("394f9c45", _256), ("f82ba261", _232)],
        "resnext50_32x4d": [("7cdf4587", _256), ("1a0047aa", _232)],
        "resnext101_32x8d": [("8ba56ff5", _256), ("110c445d", _232)],
        # this model's V1 weights were already trained with the recipe of other models' V2 weights
        "resnext101_64x4d": [("173b62eb", _232)],
        "wide_resnet50_2": [("95faca4d", _256), ("9ba9bcbe", _232)],
        "wide_resnet101_2": [("32ee1156", _256), ("d733dc28", _232)],
        "swin_t": [("704ceda3", _bicubic(232))],
        "swin_s": [("5e29d889", _bicubic(246))],
        "swin_b": [("68c6b09e", _bicubic(238))],
        "swin_v2_t": [("b137f0e2", _bicubic(260, 256))],
        "swin_v2_s": [("637d8ceb", _bicubic(260, 256))],
        "swin_v2_b": [("781e5279", _bicubic(272, 256))],
    }.items()
}
# From the README of facebookresearch/detr. The network with dilation is never the default, because it is slower than
# the network without dilation.
WEIGHTS |= {
    "detr_resnet50": {
        "COCO_DC5": Weights("detr-r50-dc5-f0fb7ef5.pth", None, DETR_URL, dilation=True),
        "COCO": Weights("detr-r50-e632da11.pth", None, DETR_URL),
    },
    "detr_resnet101": {
        "COCO_DC5": Weights("detr-r101-dc5-a2e86def.pth", None, DETR_URL, dilation=True),
        "COCO": Weights("detr-r101-2c7b67e5.pth", None, DETR_URL),
    },
}
"""The published files by builder and name, oldest first; "DEFAULT" means the last file of a builder."""


HEADS = ("fc.bias", "head.bias")
"""Keys of the last layer's bias, whose length is the number of classes."""


def load_weights(model: nn.Module, builder: str, weights: str | Path) -> None:
    """Load published weights of `builder`, or a file, into a model; the file must have every key, with the right shape.

    Raises:
        InputError: `weights` is neither a name nor a file.
        WeightsError: the file cannot be fetched, is damaged, or belongs to another model.
        MissingExtraError: the file is a .safetensors file, and safetensors is not installed.
    """
    path = weights_file(builder, weights)
    load_into(model, read_weights(path), path)


def weights_file(builder: str, weights: str | Path) -> Path:
    """Return the file for a published name (downloaded if necessary) or for a path. A `Path` is never a name.

    Raises:
        InputError: `weights` is neither a name nor a file.
        WeightsError: the file cannot be fetched or does not match its checksum.
    """
    published = published_weights(builder, weights)
    if published is None:
        return _existing(builder, weights)
    path = published.path
    if not path.exists():
        download(published.url, path, published.sha256)
    elif not (found := sha256_of(path)).startswith(published.sha256):
        raise WeightsError(
            f"{path} is damaged: its SHA-256 begins with {found[:8]}, expected {published.sha256}. "
            f"Delete it to have it downloaded again from {published.url}"
        )
    return path


def published_weights(builder: str, weights: str | Path) -> Weights | None:
    """The published file that `weights` names for this builder; None if `weights` is not a published name."""
    named = {} if isinstance(weights, Path) else WEIGHTS.get(builder, {})
    return list(named.values())[-1] if named and weights == "DEFAULT" else named.get(str(weights))


def preprocessing_of(builder: str, weights: str | Path) -> Preprocessing:
    """The preprocessing of photographs for these weights.

    A copy of a published file is recognized by its file name.

    A file that `rooftop train` wrote contains its preprocessing. For any other file, the shorter side is resized to 256
    pixels and the central 224 x 224 pixels are used.
    """
    published = _named_or_copied(builder, weights)
    if published is None and (trained := trained_file(weights)) is not None and trained.preprocessing is not None:
        return trained.preprocessing
    return (published and published.preprocessing) or Preprocessing()


def options_of(builder: str, weights: str | Path) -> dict[str, Any]:
    """The builder's options for these weights.

    A copy of a published file is recognized by its file name.

    For published weights of a dilated DETR the result is {"dilation": True}, because keys and shapes do not show the
    dilation. For a file that `rooftop train` wrote for this builder, the result is the options in the file. For all
    other weights, including files of `rooftop train` for other builders, the result is empty.
    """
    published = _named_or_copied(builder, weights)
    if published is None and (trained := trained_file(weights)) is not None and trained.model == builder:
        return dict(trained.options)
    return {"dilation": True} if published and published.dilation else {}


def _named_or_copied(builder: str, weights: str | Path) -> Weights | None:
    by_file = {entry.file: entry for entry in WEIGHTS.get(builder, {}).values()}
    return published_weights(builder, weights) or by_file.get(Path(weights).name)


def read_weights(path: Path, part: str | None = None) -> dict[str, Tensor]:
    """Read a model's weights from a file to the CPU: the tensors of `read_checkpoint`, which has the same arguments and
    errors."""
    return read_checkpoint(path, part).tensors


def read_checkpoint(path: Path, part: str | None = None) -> Contents:
    """Read a model's weights from a file to the CPU; the result also names the weights that were chosen.

    No code from the file runs. The checkpoint is searched for weights, and prefixes that wrappers have added to the
    keys are removed. `rooftop.models.weights.checkpoint_contents` describes which weights are chosen.

    Args:
        path: file written by torch.save or safetensors.
        part: name of the weights to read from a file with several models or averages.

    Raises:
        WeightsError: the file is damaged, is not a file of tensors, or has weights of several models; or a tensor is
            sparse or has no data.
        MissingExtraError: the file is a .safetensors file, and safetensors is not installed.
    """
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise WeightsError(f"{path} is damaged or not a file of weights: it is empty. {EXPECTED}")
        content = _safetensors(path) if path.suffix.lower() == ".safetensors" else _unpickled(path)
    except OSError as error:
        raise WeightsError(f"{path} cannot be read: {error.strerror or error}") from error
    try:
        found = weights_in(content, part)
    except WeightsError as error:
        raise WeightsError(f"{path} {error}") from error
    for key, tensor in found.tensors.items():
        if tensor.is_meta or tensor.layout != torch.strided:
            what = "has no data (it is on the meta device)" if tensor.is_meta else f"is {tensor.layout}"
            raise WeightsError(f"{path}: {key} {what}: save the weights as dense tensors that have data")
    return found


EXPECTED = "Expected a file written by torch.save(model.state_dict(), path)"
SAFE: list[Any] = [argparse.Namespace]  # training scripts save their options, which are plain data


def _unpickled(path: Path) -> Any:
    try:
        # torch warns about files that it cannot read; we raise errors for them
        with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals(SAFE):
            content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch.load raises RuntimeError, EOFError, UnpicklingError, ...
        if forbidden := re.search(r"GLOBAL (\w+(?:\.\w+)+)", str(error)):
            raise WeightsError(
                f"{path} holds more than tensors: loading {forbidden[1]} could run code, so it is refused. {EXPECTED}"
            ) from error
        raise WeightsError(
            f"{path} is damaged or not a file of weights: torch.load(weights_only=True) raised "
            f"{type(error).__name__}{called(path)}. {EXPECTED}"
        ) from error
    if (entry := damaged_entry(path)) is not None:
        raise WeightsError(f"{path} is damaged: the bytes of {entry} do not match its checksum. Copy the file again")
    return content


def _safetensors(path: Path) -> dict[str, Tensor]:
    library = safetensors_library()
    try:
        tensors: dict[str, Tensor] = library.torch.load_file(path)
    except library.SafetensorError as error:
        raise unreadable_safetensors(path, error) from error
    return tensors


def load_into(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copy tensors into the model's parameters and buffers.

    Raises:
        WeightsError: a key is missing, unknown, quantized or of a different shape; the message names `path`.
    """
    report = compared(model.state_dict(), tensors, path)
    if not report.fits:
        fits = "" if report.quantized else fitting(tensors)  # `fitting` compares only shapes
        raise WeightsError(f"{path} does not fit the model: {report.problems()}. {fits}".rstrip())
    model.load_state_dict(tensors, strict=False)


def fitting(tensors: Mapping[str, Tensor]) -> str:
    """Return a sentence that names the built-in models with tensors of these shapes; "" if there are none."""
    found = {key: tuple(value.shape) for key, value in tensors.items()}
    classes = next((found[key][0] for key in HEADS if found.get(key)), 1000)
    names = []
    for name in builtin_models():
        usual = _shapes(name, 1000)
        if {key for key in usual if not key.endswith(COMPUTED)} - found.keys() or found.keys() - usual.keys():
            continue  # these keys are of another model, whatever the number of classes
        shapes = _shapes(name, classes)
        complete = {key: shape for key, shape in shapes.items() if key.endswith(COMPUTED)} | found
        if shapes == complete:
            names.append(f"{name}()" if classes == 1000 else f"{name}(num_classes={classes})")
    return f"The file fits {' and '.join(names)}" if names else ""


@cache
def _shapes(name: str, classes: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a built-in model's tensors, by key. Cached, because building all models takes seconds, even on
    the meta device."""
    with torch.device("meta"):
        model = builtin_models()[name].build(num_classes=classes)
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def _existing(builder: str, weights: str | Path) -> Path:
    path = user_path(weights)
    if path.is_file():
        return path
    names = ["DEFAULT", *WEIGHTS[builder]] if builder in WEIGHTS else []
    problem = "is a folder" if path.is_dir() else "is neither a file nor the name of published weights"
    hint = did_you_mean(weights, names)
    has = f"{builder} has {', '.join(names)}, or give a file" if names else f"{builder} has none of these: give a file"
    raise InputError(f"weights {str(weights)!r} {problem}{hint}; {has}")
