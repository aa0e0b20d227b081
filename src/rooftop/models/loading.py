"""Load a model by name, with weights from any source.

    model = load("swin_t", "swin_tiny_patch4_window7_224.safetensors").eval()  # timm's
    print(load_report("swin_t", "swin_tiny_patch4_window7_224.safetensors"))   # what would happen to each key

The keys in the file show which library wrote the file (`rooftop.models.weights.dialects`). The tensors are renamed to
Rooftop's keys, and each tensor must match a parameter or buffer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rooftop.errors import TargetError, WeightsError
from rooftop.models.conv_lstm.keras_weights import keras_converted
from rooftop.models.conv_lstm.network import NextFrameNetwork, colour_next_frame_network, next_frame_network
from rooftop.models.detr.network import Detr, detr_resnet50, detr_resnet101
from rooftop.models.detr.small import detr_small
from rooftop.models.registry import builtin_models
from rooftop.models.vision.hybrid import Hybrid
from rooftop.models.vision.left_out import differing_keys
from rooftop.models.vision.resnet import ResNet
from rooftop.models.vision.swin import SwinTransformer
from rooftop.models.weights.checkpoint_contents import Contents
from rooftop.models.weights.dialects import DETR, HYBRID, NEXT_FRAME, RESNET, SWIN, Converted, Dialect, converted
from rooftop.models.weights.files import fitting, options_of, read_checkpoint, weights_file
from rooftop.models.weights.load_reports import LoadReport, compared
from rooftop.words import did_you_mean


@dataclass(frozen=True)
class Family:
    """A family of models whose weights come from the same libraries.

    Attributes:
        kind: name of the family in error messages.
        dialects: how these libraries name the weights.
        head: the key of the bias of the class logits; None: the models have no classes.
        others: number of logits besides the class logits, such as DETR's logit for "no object".
    """

    kind: str
    dialects: tuple[Dialect, ...]
    head: str | None = None
    others: int = 0


class Matched(NamedTuple):
    """The report on a file, and the file's tensors by the model's keys."""

    report: LoadReport
    tensors: dict[str, Tensor]


FAMILIES: dict[type[nn.Module], Family] = {
    ResNet: Family("a ResNet", RESNET, "fc.bias"),
    SwinTransformer: Family("a Swin Transformer", SWIN, "head.bias"),
    Hybrid: Family("a hybrid of convolutions and attention", HYBRID, "head.bias"),
    Detr: Family("a DETR", DETR, "class_embed.bias", others=1),
    NextFrameNetwork: Family("a next-frame network", NEXT_FRAME),
}
UNREGISTERED = (detr_resnet50, detr_resnet101, detr_small, next_frame_network, colour_next_frame_network)
"""Builders that `builtin_models` does not list, because their models return no class logits of an image."""

KERAS = (".keras", ".h5", ".hdf5")


def load(name: str, weights: str | Path, *, strict: bool = True, part: str | None = None, **options: Any) -> nn.Module:
    """Load a built-in model with weights: in training mode, on the CPU, in float32.

    Args:
        name: name of a model, i.e. of its builder in this package, e.g. "resnet50", "swin_v2_t", "detr_resnet101",
            "next_frame_network".
        weights: a file from torch.save, safetensors (.safetensors) or Keras (.keras, .h5), with the keys of any known
            library; or a name of published weights, as for the builder. A `Path` is never a name.
        strict: whether every key of the model and of the file must match, with its shape. If False, weights that do not
            fit are skipped, and the model keeps its own initial values of these weights; use `num_classes=7,
            strict=False` for a new head.
        part: which weights to load from a file that contains several sets of weights; `load_report` and errors name the
            sets. None: the averaged weights (EMA, SWA) if there are any, or the only weights.
            `models/weights/checkpoint_contents.py` lists the kinds of checkpoints.
        options: options of the builder, e.g. num_classes. Options that the weights determine can be omitted: dilation
            for "COCO_DC5", and options that `rooftop train` wrote into the file.

    Raises:
        TargetError: there is no such model; the message suggests similar names.
        InputError: `weights` is neither a name nor a file.
        WeightsError: the file cannot be fetched or read, or is damaged.
        WeightsError: the file has weights of several models, of a different kind of model or for a different number of
            classes, or does not fit. With strict=False: no key fits.
        MissingExtraError: safetensors or h5py is needed and not installed.
        TypeError: the builder does not have an option.
    """
    build = _builder(name)
    path = _file(name, weights)
    model = build(**options_of(name, weights) | options)
    report, tensors = _matched(model, path, part)
    if strict:
        _check(name, model, report, tensors)
    elif not report.used:
        raise WeightsError(
            f"no key of {path} (its keys are named as in {report.origin}) fits {name}: {report.problems()}"
        )
    if report.differing_keys:
        warnings.warn(f"{path}: {report.differences()}", stacklevel=2)
    model.load_state_dict({key: tensors[key] for key in report.used}, strict=False)
    return model


def load_report(name: str, weights: str | Path, *, part: str | None = None, **options: Any) -> LoadReport:
    """Report what `load` would do with each key of the file and of the model, without loading the weights.

    Arguments and errors are the same as for `load`, but keys that do not fit do not raise: the report lists them.
    """
    build = _builder(name)
    path = _file(name, weights)
    with torch.device("meta"):
        model = build(**options_of(name, weights) | options)
    return _matched(model, path, part).report


def matched(model: nn.Module, weights: str | Path, *, name: str = "", part: str | None = None) -> Matched:
    """Read weights for an existing model, and match them with the model's keys, without changing the model.

    The model may be one of Rooftop's models, or any other model whose keys are the keys in the file.

    Args:
        model: the model that the weights are for.
        weights, part: as in `load`; published weights need `name`.
        name: name of the model's builder; "" if the weights are a file.

    Raises:
        InputError, WeightsError, MissingExtraError: as in `load`, except for keys that do not fit.
    """
    path = weights_file(name or type(model).__name__, weights)
    if isinstance(model, tuple(FAMILIES)):
        return _matched(model, path, part)
    contents = read_checkpoint(path, part)
    report = compared(model.state_dict(), contents.tensors, path, "the model's own")
    return Matched(_of_part(report, contents), contents.tensors)


def _builder(name: str) -> Callable[..., nn.Module]:
    builders = {key: entry.build for key, entry in builtin_models().items()}
    builders.update({build.__name__: build for build in UNREGISTERED})
    if name not in builders:
        there_are = f"there are {', '.join(builders)}"
        raise TargetError(f"{name!r} is not a built-in model{did_you_mean(name, builders)}: {there_are}")
    return builders[name]


def _file(name: str, weights: str | Path) -> Path:
    if not isinstance(weights, str | Path):
        raise TypeError(f"weights is {weights!r}: expected a file or a published name; {name}() builds without weights")
    return weights_file(name, weights)


def _matched(model: nn.Module, path: Path, part: str | None) -> Matched:
    """Match a file's tensors with the keys of one of Rooftop's models."""
    found, contents = _converted(model, path, part)
    differing = differing_keys(model, found.left_out)
    report = compared(model.state_dict(), found.tensors, path, found.origin, found.sources, found.unneeded, differing)
    return Matched(report if contents is None else _of_part(report, contents), found.tensors)


def _of_part(report: LoadReport, contents: Contents) -> LoadReport:
    """Add to a report which of the file's sets of weights was loaded, and the names of the other sets."""
    return replace(report, taken=contents.taken, averaged=contents.averaged, others=contents.others)


def _converted(model: nn.Module, path: Path, part: str | None) -> tuple[Converted, Contents | None]:
    """Read a file and convert its tensors to the model's keys. The contents are None for a file of Keras."""
    if path.suffix.lower() in KERAS:
        if part is not None:
            raise WeightsError(f"{path} is a Keras file, which contains one model: leave out part={part!r}")
        return keras_converted(model, path), None
    family, contents = _family(model), read_checkpoint(path, part)
    try:
        return converted(contents.tensors, family.dialects, family.kind), contents
    except WeightsError as error:
        raise WeightsError(f"{path}: {error}") from error


def _family(model: nn.Module) -> Family:
    return next(family for kind, family in FAMILIES.items() if isinstance(model, kind))


def _check(name: str, model: nn.Module, report: LoadReport, tensors: dict[str, Tensor]) -> None:
    """Raise WeightsError with the remedy if the file does not fit the model."""
    if report.fits:
        return
    family = _family(model)
    if family.head in report.mismatched:
        found, expected = (shape[0] - family.others for shape in report.mismatched[family.head])
        raise WeightsError(
            f"{report.path} has {found} classes, {name} was built for {expected}: pass num_classes={found}, "
            f"or strict=False to keep a new head for {expected} classes"
        )
    raise WeightsError(
        f"{report.path} (its keys are named as in {report.origin}) does not fit {name}: {report.problems()}. "
        f"{len(report.used)} keys fit: strict=False loads only these, and load_report lists every key. "
        f"{'' if report.quantized else fitting(tensors)}".rstrip()
    )
