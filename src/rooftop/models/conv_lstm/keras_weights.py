"""Load weights that Keras saved: .keras and .weights.h5 files of Keras 3, and older .h5 files of Keras 2 and 3.

In Keras, a layer's name comes from the user or from a counter. So layers are matched by kind and order: the first
ConvLSTM2D of the file is matched with the model's first ConvLSTM2D, and so on. The counts of layers and the shapes must
agree. A Keras 3 file numbers the layers of a class in the order in which they were added to the model. An older file
lists the names of its layers in this order.

Keras stores kernels as (spatial dimensions, input channels, output channels); torch stores (output channels, input
channels, spatial dimensions). This module needs h5py: `pip install "rooftop[keras]"`.
"""

from __future__ import annotations

import io
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rooftop.errors import InputError, MissingExtraError, WeightsError
from rooftop.models.conv_lstm.layer import ConvLSTM2D
from rooftop.models.weights.dialects import Converted
from rooftop.models.weights.file_checks import called
from rooftop.models.weights.files import load_into
from rooftop.user_paths import user_path


@dataclass(frozen=True)
class KerasLayer:
    """A layer in a file: its kind (Keras's class in snake case), its name, and its weights in Keras's layout."""

    kind: str
    name: str
    weights: dict[str, Tensor]


CONVOLUTION = ("kernel", "bias")
WEIGHTS = {
    "conv_lstm2d": ("kernel", "recurrent_kernel", "bias"),
    "conv2d": CONVOLUTION,
    "conv3d": CONVOLUTION,
    "batch_normalization": ("gamma", "beta", "moving_mean", "moving_variance"),
}
"""The weight names of each known kind of layer. Keras 3 files number the weights in this order. A bias may be
missing."""

KINDS: tuple[tuple[str, tuple[type[nn.Module], ...]], ...] = (
    ("conv_lstm2d", (ConvLSTM2D,)),
    ("conv2d", (nn.Conv2d,)),
    ("conv3d", (nn.Conv3d,)),
    ("batch_normalization", (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)),
)
NAMES = {  # from Keras's name of a weight to torch's name, where these differ
    "conv2d": {"kernel": "weight"},
    "conv3d": {"kernel": "weight"},
    "batch_normalization": {
        "gamma": "weight",
        "beta": "bias",
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
    },
}


def load_keras_weights(model: nn.Module, path: str | Path) -> None:
    """Load a file that Keras wrote into a model of ConvLSTM2D, Conv2d, Conv3d and batch norms.

    Args:
        model: the model. Its modules of each kind, in the order of `model.modules()`, get the weights of the file's
            layers of this kind.
        path: a .keras, .weights.h5 or .h5 file.

    Raises:
        InputError: the file does not exist.
        WeightsError: the file is damaged, or its layers, weights or shapes do not match the model's; the message lists
            every mismatch.
        MissingExtraError: h5py is not installed.
    """
    path = user_path(path)
    load_into(model, keras_converted(model, path).tensors, path)


def keras_converted(model: nn.Module, path: Path) -> Converted:
    """Convert a file's weights to the model's keys and torch's layout.

    Arguments and errors are the same as for `load_keras_weights`, but shapes are not compared.
    """
    layers = defaultdict(list)
    for layer in read_keras_weights(path):
        layers[layer.kind].append(layer)
    modules = defaultdict(list)
    for name, module in model.named_modules():
        for kind, classes in KINDS:
            if isinstance(module, classes):
                modules[kind].append(name)
    if {kind: len(found) for kind, found in layers.items()} != {kind: len(found) for kind, found in modules.items()}:
        raise WeightsError(
            f"{path} does not fit the model: the file has {_counted(layers)}; the model needs {_counted(modules)}"
        )
    tensors: dict[str, Tensor] = {}
    sources: dict[str, tuple[str, ...]] = {}
    for kind, found in layers.items():
        for layer, name in zip(found, modules[kind], strict=True):
            prefix = f"{name}." if name else ""
            names = (f"{layer.name}/{each}" for each in layer.weights)
            for source, (key, value) in zip(names, as_torch(layer).items(), strict=True):
                tensors[prefix + key], sources[prefix + key] = value, (source,)
    return Converted("Keras", tensors, sources)


def as_torch(layer: KerasLayer) -> dict[str, Tensor]:
    """Convert the weights of a layer of a known kind to torch's names and layout."""
    renamed = {NAMES.get(layer.kind, {}).get(name, name): value for name, value in layer.weights.items()}
    return {name: _channels_first(value) if value.dim() > 1 else value for name, value in renamed.items()}


def _channels_first(kernel: Tensor) -> Tensor:
    """Permute a kernel from Keras's layout (..., C, F) to torch's layout (F, C, ...)."""
    spatial = range(kernel.dim() - 2)
    return kernel.permute(kernel.dim() - 1, kernel.dim() - 2, *spatial).contiguous()


def read_keras_weights(path: str | Path) -> list[KerasLayer]:
    """Read all layers that have weights from a .keras, .weights.h5 or .h5 file.

    The layers of one kind are in the order of the Keras model.

    Raises:
        InputError, WeightsError, MissingExtraError: see `load_keras_weights`.
    """
    path = user_path(path)
    try:
        import h5py
    except ImportError as error:
        raise MissingExtraError('reading Keras weights needs h5py: pip install "rooftop[keras]"') from error
    if not path.is_file():
        raise InputError(f"{path} is not a file: expected a .keras, .weights.h5 or .h5 file that Keras wrote")
    try:
        source: Any = path
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                source = io.BytesIO(archive.read("model.weights.h5"))
        with h5py.File(source, "r") as file:
            root = file.get("model_weights", file)
            layers = list(_by_names(root) if "layer_names" in root.attrs else _by_numbers(file))
    except (OSError, KeyError, ValueError, TypeError, RuntimeError, zipfile.BadZipFile) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(
            f"{path} is damaged or not a file of Keras weights ({type(error).__name__}: {error}){called(path)}. "
            "Expected a file written by model.save() or model.save_weights() of Keras"
        ) from error
    if not layers:
        raise WeightsError(f"{path} holds no layer with weights: expected a file written by model.save() of Keras")
    return layers


def _by_names(root: Any) -> Iterator[KerasLayer]:
    """Read the layers of a file that is older than Keras 3. It lists its layers and their weights by name."""
    for name in map(_text, root.attrs["layer_names"]):
        group = root[name]
        paths = [_text(each) for each in group.attrs["weight_names"]]
        weights = {_last(each): _tensor(group[each]) for each in paths}
        if len(weights) < len(paths):  # a nested model, or a wrapper such as Bidirectional
            raise WeightsError(f"{name} has several layers, and the file does not tell their order: {', '.join(paths)}")
        if weights:
            yield KerasLayer(_kind(weights), name, weights)


def _by_numbers(file: Any) -> Iterator[KerasLayer]:
    """Read the layers of a Keras 3 file. Its HDF5 groups are named by the layer's class and a counter, such as
    conv2d_1."""
    found: list[tuple[str, int, str, list[Tensor]]] = []

    def visit(path: str, item: Any) -> None:
        parts = path.split("/")
        if parts[-1] != "vars" or len(parts) < 3 or parts[0] == "optimizer" or not len(item):
            return
        layer = parts[:-2] if parts[-2] == "cell" else parts[:-1]
        kind, number = re.fullmatch(r"(.+?)(?:_(\d+))?", layer[-1]).groups()  # type: ignore[union-attr]
        tensors = [_tensor(item[each]) for each in sorted(item, key=int)]
        found.append((kind, int(number or 0), "/".join(layer), tensors))

    file.visititems(visit)
    if len({name.rpartition("/")[0] for *_, name, _ in found}) > 1:
        names = ", ".join(sorted(name for *_, name, _ in found))
        raise WeightsError(f"the file does not tell the order of layers in nested models: {names}")
    for kind, _, name, tensors in sorted(found, key=lambda each: each[:2]):
        known = WEIGHTS.get(kind, tuple(map(str, range(len(tensors)))))
        if len(tensors) > len(known) or (kind == "batch_normalization" and len(tensors) != 4):
            raise WeightsError(
                f"{name} has {len(tensors)} weights: expected {', '.join(known)} (only a bias may be missing)"
            )
        yield KerasLayer(kind, name, dict(zip(known, tensors, strict=False)))


def _kind(weights: dict[str, Tensor]) -> str:
    """Infer the kind of a layer from its weights, because a file that is older than Keras 3 does not store classes of
    layers."""
    if "recurrent_kernel" in weights and weights["recurrent_kernel"].dim() == 4:
        return "conv_lstm2d"
    if "moving_mean" in weights:
        return "batch_normalization"
    dimensions = weights["kernel"].dim() if set(weights) <= {"kernel", "bias"} and "kernel" in weights else 0
    return {4: "conv2d", 5: "conv3d"}.get(dimensions, f"layer of {', '.join(weights)}")


def _tensor(dataset: Any) -> Tensor:
    return torch.from_numpy(np.asarray(dataset[()]))  # h5py returns a scalar as a NumPy number, not as an array


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def _last(path: str) -> str:
    """The name of a weight, such as "kernel", at the end of a path such as layer/cell/kernel:0."""
    return path.rpartition("/")[2].partition(":")[0]


def _counted(kinds: dict[str, list[Any]]) -> str:
    return ", ".join(f"{len(found)} {kind}" for kind, found in sorted(kinds.items())) or "no layer of a known kind"
