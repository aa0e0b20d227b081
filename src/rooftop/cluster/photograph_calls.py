"""Run a network on batches of photographs by calls in two halves, so that the GPU has work while the host reads
results.

    call = PhotographCall(network, Classes(5, preprocessing), "cuda", batch=64)
    rows = call(photographs)                            # both halves; a list of dicts
    begun = call.begin(photographs)                     # starts to copy, normalize and compute; the host does not wait
    table = call.finish(begun)                          # waits for the results: a pyarrow.RecordBatch

A separate stream copies the uint8 pixels of a batch from pinned memory to the device. The device resizes photographs
that are not resized yet, and normalizes all. The results are copied back to pinned memory. On the CPU, the same code
runs without streams.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rooftop.cluster.arrow import load_arrow
from rooftop.cluster.photographs import Shown
from rooftop.data.handing_over import Copies
from rooftop.errors import ModelRunError
from rooftop.media.pillow_resize import Resize, resized_on_device
from rooftop.models.detr.detection import best_first
from rooftop.models.detr.detection import class_names as coco_names
from rooftop.models.detr.losses import batch_of_detections
from rooftop.models.detr.network import Detr
from rooftop.models.images import IMAGENET, Preprocessing, normalization, normalized_by, not_finite
from rooftop.models.vision.classification import class_names as imagenet_names

CALLED = "this photograph"
SIZES = 4096  # maximum number of photograph sizes whose `Resize` is cached


class Computed(NamedTuple):
    """Results of a network on its device, with one entry per photograph along the first dimension, and the network's
    number of classes."""

    results: tuple[Tensor, ...]
    classes: int


class Answer(Protocol):
    """How to compute a network's results for photographs, and turn them into rows."""

    @property
    def preprocessing(self) -> Preprocessing: ...

    def compute(self, network: nn.Module, images: list[Tensor], sizes: list[tuple[int, int]]) -> Computed:
        """Compute the results. The host does not wait for the results.

        Args:
            images: normalized images: one tensor (B, 3, H, W), or several of (1, 3, H, W) if the photographs have
                several shapes.
            sizes: (width, height) of the photographs.
        """

    @property
    def columns(self) -> Any:
        """The pyarrow.Schema of the rows."""

    def table(self, photographs: list[Shown], results: Sequence[Tensor], classes: int) -> Any:
        """Make a pyarrow.RecordBatch with a row for each photograph, from results in host memory.

        The columns are made from whole tensors. A detector predicts a hundred boxes per photograph: to make a Python
        object for each of their numbers would take longer than the network.

        Raises:
            ModelRunError: a result is not finite.
        """


@dataclass(frozen=True)
class _Begun:
    """A batch that the device computes. `started` and `ended` are CUDA events, or seconds if the device is the CPU."""

    photographs: list[Shown]
    results: list[Tensor]
    classes: int
    started: Any
    ended: Any


@lru_cache(SIZES)
def no_change(width: int, height: int) -> Resize:
    """A `Resize` (the change of a photograph's size) that keeps the width and the height."""
    return Resize((width, height))


class PhotographCall:
    """A call from photographs to rows.

    Args:
        network: the network, on the device.
        batch: the batch size on a GPU. Smaller batches are padded to this size, because a CUDA graph has fixed shapes.
        change: the resize of a photograph of a given width and height, for photographs that are not yet resized.

    Attributes:
        device_s: seconds that the device has spent on finished batches.
        pins: whether pixels that are in pinned memory are sent to the device without a further copy on the host.
    """

    def __init__(
        self,
        network: nn.Module,
        answer: Answer,
        device: str,
        batch: int,
        change: Callable[[int, int], Resize] = no_change,
    ) -> None:
        self._network, self._answer, self._change = network, answer, lru_cache(SIZES)(change)
        self._device = torch.device(device)
        self._on_gpu = self._device.type == "cuda"
        self._filled_to = batch if self._on_gpu else 0
        self._copies = Copies(self._device)
        self.pins = self._copies.pins
        preprocessing = answer.preprocessing
        self._constants = normalization(preprocessing.mean, preprocessing.std, self._device)
        self._dtype = next(network.parameters()).dtype
        self.device_s = 0.0

    def __call__(self, photographs: list[Shown]) -> list[dict[str, Any]]:
        """Compute the rows of photographs, and wait for them."""
        rows: list[dict[str, Any]] = self.finish(self.begin(photographs)).to_pylist()
        return rows

    @torch.inference_mode()
    def begin(self, photographs: list[Shown]) -> _Begun:
        """Start to compute the results of photographs. On a GPU, the host does not wait.

        Raises:
            ModelRunError: the batch does not fit into the GPU's memory.
        """
        filled = [*photographs, *photographs[:1] * (self._filled_to - len(photographs))]
        try:
            pixels = self._sent(filled)
            started = self._now()
            images = [normalized_by(each, self._constants).to(self._dtype) for each in pixels]
            results, classes = self._answer.compute(self._network, images, [each.size for each in filled])
            on_host = [self._to_host(each) for each in results]
        except torch.cuda.OutOfMemoryError as error:
            self._filled_to = 0  # the worker then tries the photographs one by one
            raise ModelRunError(
                f"{len(filled)} photographs at once do not fit into GPU memory; use a smaller batch"
            ) from error
        return _Begun(photographs, on_host, classes, started, self._now())

    def finish(self, begun: _Begun) -> Any:
        """Wait for a batch, and return its rows as a pyarrow.RecordBatch.

        Raises:
            ModelRunError: a result is not finite.
        """
        if self._on_gpu:
            begun.ended.synchronize()
            self.device_s += begun.started.elapsed_time(begun.ended) / 1e3
        else:
            self.device_s += begun.ended - begun.started
        count = len(begun.photographs)
        return self._answer.table(begun.photographs, [each[:count] for each in begun.results], begun.classes)

    def warm_up(self, side: int, batch: int) -> None:
        """Run the model once on `batch` black images of `side` x `side` pixels, so that its kernels are compiled and a
        CUDA graph is captured."""
        black = Shown((side, side), torch.zeros(side, side, 3, dtype=torch.uint8))
        begun = self.begin([black] * batch)
        if self._on_gpu:
            begun.ended.synchronize()

    def _sent(self, photographs: list[Shown]) -> list[Tensor]:
        """Copy the pixels to the device, and resize there the photographs that are not resized yet.

        Returns one tensor (B, H, W, 3) if all results have the same shape, otherwise a (1, H, W, 3) per photograph.
        """
        pixels = [each.pixels for each in photographs]
        if self.pins and not pixels[0].is_pinned():  # the pixels of a batch are pinned, or none of them are
            pixels = self._pinned(pixels)
        copied = self._copies.begin_joined(pixels, partial(self._resized, photographs))
        images: list[Tensor] = self._copies.hand_over(copied)
        return images

    def _resized(self, photographs: list[Shown], pixels: Tensor) -> list[Tensor]:
        """Split `pixels`, (bytes,) on the device, into photographs, and resize those that are not resized yet."""
        sizes = [each.pixels.numel() for each in photographs]
        shapes = [tuple(each.pixels.shape) for each in photographs]
        if not all(each.resized for each in photographs):
            starts = accumulate(sizes, initial=0)
            places = [(start, height, width) for start, (height, width, _) in zip(starts, shapes, strict=False)]
            changes = [
                (no_change if each.resized else self._change)(width, height)
                for each, (height, width, _) in zip(photographs, shapes, strict=True)
            ]
            return resized_on_device(pixels, places, changes)
        if len(set(shapes)) == 1:
            return [pixels.view(len(shapes), *shapes[0])]
        return [part.view(1, *shape) for part, shape in zip(pixels.split(sizes), shapes, strict=True)]

    @staticmethod
    def _pinned(pixels: list[Tensor]) -> list[Tensor]:
        """Copy the pixels into one block of pinned memory.

        NumPy makes the copies. torch's operators would wake a team of threads on cores that decode.
        """
        whole = torch.empty(sum(each.numel() for each in pixels), dtype=torch.uint8, pin_memory=True)
        parts = whole.split([each.numel() for each in pixels])
        for part, each in zip(parts, pixels, strict=True):
            np.copyto(part.numpy(), each.numpy().reshape(-1))
        return [part.view(each.shape) for part, each in zip(parts, pixels, strict=True)]

    def _to_host(self, result: Tensor) -> Tensor:
        if not self._on_gpu:
            return result
        return torch.empty(result.shape, dtype=result.dtype, pin_memory=True).copy_(result, non_blocking=True)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # a blocking wait leaves the core to decoding
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(frozen=True)
class Classes:
    """The call that finds the `top` most probable classes of each photograph, by a classifier."""

    top: int
    preprocessing: Preprocessing

    def compute(self, network: nn.Module, images: list[Tensor], sizes: list[tuple[int, int]]) -> Computed:
        """Classify photographs. The results are whether a photograph's logits are finite, (B,), and its highest
        probabilities and their classes, (B, top) each."""
        logits = network(torch.cat(images) if len(images) > 1 else images[0]).float()  # (B, classes)
        best = logits.softmax(1).topk(min(self.top, logits.shape[1]))
        return Computed((logits.isfinite().all(1), best.values, best.indices), logits.shape[1])

    @property
    def columns(self) -> Any:
        """The label, name and probability of the most probable class, and lists of the `top` classes."""
        pa = load_arrow()
        best = [("label", pa.int64()), ("name", pa.string()), ("probability", pa.float32())]
        names, probabilities = pa.list_(pa.string()), pa.list_(pa.float32())
        return pa.schema([*best, ("labels", pa.list_(pa.int64())), ("names", names), ("probabilities", probabilities)])

    def table(self, photographs: list[Shown], results: Sequence[Tensor], classes: int) -> Any:
        finite, probabilities, labels = (each.numpy() for each in results)  # (B,), (B, top) and (B, top)
        if not finite.all():
            raise not_finite(CALLED)
        names = _named(labels, _names(imagenet_names, classes))
        count, top = labels.shape
        ends = np.arange(0, top * count + 1, top, dtype=np.int32)
        first = load_arrow().array(ends[:-1])
        whole = [_values(labels), names, _values(probabilities)]
        columns = [*(each.take(first) for each in whole), *(_lists(each, ends) for each in whole)]
        return load_arrow().RecordBatch.from_arrays(columns, schema=self.columns)


@dataclass(frozen=True)
class Objects:
    """The objects that a detector finds with at least a minimum score."""

    threshold: float
    preprocessing: Preprocessing = IMAGENET

    def compute(self, network: nn.Module, images: list[Tensor], sizes: list[tuple[int, int]]) -> Computed:
        """Return for each photograph whether its predictions are finite, (B,), the number of scores that reach the
        threshold, (B,), the scores and the labels, (B, queries) each, and the boxes, (B, queries, 4). The best score is
        first."""
        assert isinstance(network, Detr)
        predictions = network(images[0] if len(images) == 1 else [image for each in images for image in each])
        logits, boxes = predictions.logits, predictions.boxes
        finite = logits.isfinite().flatten(1).all(1) & boxes.isfinite().flatten(1).all(1)
        found = batch_of_detections(predictions, [(height, width) for width, height in sizes])
        edges = torch.tensor(sizes, dtype=found.boxes.dtype).repeat(1, 2).unsqueeze(1)  # (B, 1, 4)
        scores, labels, boxes = best_first(found, edges.to(found.boxes.device, non_blocking=True))
        counts = (scores >= self.threshold).sum(1)
        return Computed((finite, counts, scores, labels, boxes), logits.shape[-1] - 1)

    @property
    def columns(self) -> Any:
        """The size of a photograph, and lists of its objects, best score first."""
        pa = load_arrow()
        numbers, names = pa.list_(pa.int64()), pa.list_(pa.string())
        size = [("width", pa.int64()), ("height", pa.int64())]
        boxes = pa.list_(pa.list_(pa.float32()))
        return pa.schema(
            [*size, ("labels", numbers), ("names", names), ("scores", pa.list_(pa.float32())), ("boxes", boxes)]
        )

    def table(self, photographs: list[Shown], results: Sequence[Tensor], classes: int) -> Any:
        # NumPy selects the objects. torch's operators would wake a team of threads on cores that decode.
        finite, counts, scores, labels, boxes = (each.numpy() for each in results)
        if not finite.all():
            raise not_finite(CALLED)
        found = np.arange(scores.shape[1]) < counts[:, None]  # (B, queries)
        scores, labels, boxes = scores[found], labels[found], boxes[found]  # (objects,), (objects,), (objects, 4)
        ends = np.concatenate([[0], counts.cumsum()]).astype(np.int32)
        edges = _lists(_values(boxes), np.arange(0, boxes.size + 1, 4, dtype=np.int32))
        pa = load_arrow()
        size = [pa.array([each.size[axis] for each in photographs], pa.int64()) for axis in (0, 1)]
        names = _named(labels, _names(coco_names, classes))
        lists = [_lists(each, ends) for each in (_values(labels), names, _values(scores), edges)]
        return pa.RecordBatch.from_arrays([*size, *lists], schema=self.columns)


def _values(values: np.ndarray) -> Any:
    """All values as a one-dimensional Arrow array with its own memory, since the memory of `values` may be pinned."""
    return load_arrow().array(values.reshape(-1).copy())


def _lists(values: Any, ends: Any) -> Any:
    """An Arrow array of lists of values. List n has the values from ends[n] up to ends[n + 1]."""
    pa = load_arrow()
    return pa.ListArray.from_arrays(pa.array(ends), values)


@cache
def _names(names_of: Callable[[None, int], Sequence[str] | None], classes: int) -> Any:
    """The names of all classes as an Arrow array, null for a class without a known name; None if no name is known."""
    names = names_of(None, classes)
    return None if names is None else load_arrow().array([name or None for name in names], load_arrow().string())


def _named(labels: np.ndarray, names: Any) -> Any:
    """The name of each label as an Arrow array."""
    pa = load_arrow()
    return pa.nulls(labels.size, pa.string()) if names is None else names.take(_values(labels))
