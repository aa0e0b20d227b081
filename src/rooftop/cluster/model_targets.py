"""Rooftop's own models as targets: classifiers and detectors of photographs.

On the CPU, all workers of a machine share one copy of the weights in shared memory. On GPUs, each worker has its own
engine.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rooftop.cluster.by_engine import ClassifierByEngine, DetrByEngine
from rooftop.cluster.items import check_count
from rooftop.cluster.photograph_calls import Answer, Classes, Objects, PhotographCall
from rooftop.cluster.photographs import Preparation
from rooftop.cluster.targets import pickled
from rooftop.errors import InputError, TargetError
from rooftop.inference import Engine
from rooftop.media.pillow_resize import Resize
from rooftop.models import detr_resnet50, detr_resnet101, detr_small, load_classifier, model_entry
from rooftop.models.detr.detection import load_detector, resizing
from rooftop.models.detr.network import Detr
from rooftop.models.images import IMAGENET, Preprocessing, cropping
from rooftop.models.registry import builtin_models

DETECTORS = {"detr_resnet50": detr_resnet50, "detr_resnet101": detr_resnet101, "detr_small": detr_small}
CLASSIFIER_BATCH, DETECTOR_BATCH = 16, 4  # the defaults of `rooftop classify` and `rooftop detect`


@dataclass(frozen=True)
class PackedModel:
    """A model in two parts: its pickled structure, and one tensor with all weights.

    Attributes:
        places: (first byte, dtype, shape) of each parameter and buffer, in the order of `_tensors`.
    """

    structure: bytes
    weights: Tensor  # (bytes,) uint8
    places: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]

    @staticmethod
    def of(model: nn.Module) -> PackedModel:
        """Pack a model. The weights are copied into memory that other processes can share."""
        model = copy.deepcopy(model).requires_grad_(False)
        places, end = [], 0
        for tensor in _tensors(model):
            places.append((end, tensor.dtype, tuple(tensor.shape)))
            end += -(-tensor.numel() * tensor.element_size() // 64) * 64
        weights = torch.empty(end, dtype=torch.uint8).share_memory_()
        for tensor, place in zip(_tensors(model), places, strict=True):
            _part(weights, place).copy_(tensor)
            tensor.data = torch.empty(0, dtype=tensor.dtype)
        return PackedModel(pickled(model, type(model).__name__), weights, tuple(places))

    def unpacked(self) -> nn.Module:
        """Recreate the model. The model's weights are views of `weights`."""
        import cloudpickle

        model: nn.Module = cloudpickle.loads(self.structure)
        for tensor, place in zip(_tensors(model), self.places, strict=True):
            tensor.data = _part(self.weights, place)
        return model


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _part(weights: Tensor, place: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
    first, dtype, shape = place
    size = torch.Size(shape).numel() * dtype.itemsize
    return weights[first : first + size].view(dtype).view(shape)


@dataclass(frozen=True)
class ModelTarget:
    """A classifier or a detector of photographs as a target.

    Attributes:
        prepare: turns a photograph into the model's input. Decoding threads or processes call this function.
        answer: turns the model's results into rows.
    """

    name: str
    arguments: dict[str, Any]
    batch: int
    packed: PackedModel
    dtype: torch.dtype | None
    prepare: Preparation
    answer: Answer
    columns: Any = field(compare=False)

    def load(self, device: str) -> PhotographCall:
        """Load the model on the device, and return a call that turns prepared photographs into rows."""
        model = self.packed.unpacked()
        if device != "cpu":
            engine = Engine(model.to(device), dtype=self.dtype)
            model = DetrByEngine(engine) if isinstance(model, Detr) else ClassifierByEngine(engine)
        elif self.dtype is not None:
            model = model.to(self.dtype)
        call = PhotographCall(model, self.answer, device, self.batch, self.prepare.change)
        if device != "cpu" and isinstance(self.answer, Classes):  # a detector's shapes vary with the photographs
            call.warm_up(self.answer.preprocessing.crop, self.batch)
        return call

    def sent(self) -> ModelTarget:
        """Return the target with its own copy of the weights, since another machine cannot share this memory."""
        return replace(self, packed=replace(self.packed, weights=self.packed.weights.clone()))


def model_names() -> list[str]:
    """The names of the models that can be targets."""
    return [*(name for name, entry in builtin_models().items() if entry.classifies), *DETECTORS]


def model_target(
    name: str,
    weights: str | Path | None = None,
    seed: int | None = None,
    *,
    top: int = 5,
    threshold: float = 0.7,
    dtype: torch.dtype | None = None,
    batch: int | None = None,
) -> ModelTarget:
    """Make a target from a model of `rooftop classify` or `rooftop detect`, with given or random weights.

    Args:
        top: number of classes per photograph.
        threshold: minimum score of detected objects.
        dtype: compute dtype. None: bfloat16 on a GPU, float32 on a CPU.
        batch: photographs per call. None: 16 for a classifier, 4 for a detector.

    Raises:
        TargetError: there is no such model.
        InputError: both weights and a seed are given, a detector gets neither, or a number is out of range.
        WeightsError: see `load_classifier` and `load_detector`.
    """
    if weights is not None and seed is not None:
        raise InputError("expected weights or a seed of random weights, got both")
    if batch is not None:
        check_count("batch", batch, 1)
    check_count("top", top, 1)
    if isinstance(threshold, bool) or not isinstance(threshold, Real) or not 0 <= threshold <= 1:
        raise InputError(f"threshold is {threshold!r}, expected a number in 0..1")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"dtype is {dtype!r}, expected a floating-point dtype of torch, such as torch.float16")
    if name in DETECTORS:
        if weights is None and seed is None:
            raise InputError(f"{name} needs weights (or, to try the model, a seed for random weights)")
        detector = load_detector(name, weights) if weights is not None else _seeded(DETECTORS[name], seed or 0)
        detector.auxiliary = False  # type: ignore[assignment]
        return _target(name, weights, seed, {"threshold": threshold}, batch or DETECTOR_BATCH, detector, dtype)
    if name not in model_names():
        model_entry(name)  # for an unknown model, this raises and names similar models
        raise TargetError(f"{name} is not a classifier or detector of photographs: expected {', '.join(model_names())}")
    if seed is None:
        weights = weights or "DEFAULT"
        model, preprocessing = load_classifier(name, weights)
    else:
        model, preprocessing = _seeded(model_entry(name).build, seed), IMAGENET
    return _target(name, weights, seed, {"top": top}, batch or CLASSIFIER_BATCH, model, dtype, preprocessing)


def _seeded(build: Callable[[], nn.Module], seed: int) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


def _target(
    name: str,
    weights: str | Path | None,
    seed: int | None,
    options: dict[str, Any],
    batch: int,
    model: nn.Module,
    dtype: torch.dtype | None,
    preprocessing: Preprocessing | None = None,
) -> ModelTarget:
    made_of = {
        "weights": None if weights is None else str(weights),
        "seed": seed,
        "dtype": None if dtype is None else str(dtype),
        **options,
    }
    prepare: Preparation
    answer: Answer
    if preprocessing is not None:
        prepare, answer = _Cropped(preprocessing), Classes(options["top"], preprocessing)
    else:
        prepare, answer = _Resized(), Objects(options["threshold"])
    folded = Engine(model, dtype=torch.float32, constants=False).model  # on the CPU, fold norms once for all workers
    return ModelTarget(name, made_of, batch, PackedModel.of(folded), dtype, prepare, answer, answer.columns)


@dataclass(frozen=True)
class _Cropped(Preparation):
    preprocessing: Preprocessing

    def change(self, width: int, height: int) -> Resize:
        return cropping(width, height, self.preprocessing)


@dataclass(frozen=True)
class _Resized(Preparation):
    def change(self, width: int, height: int) -> Resize:
        return resizing(width, height, 800, 1333)
