"""A network over batches of photographs, as a call in two halves: the GPU has work while results are read.

    call = PhotographCall(network, Classes(top=5), "cuda", batch=64)
    rows = call(photographs)                            # begin and finish
    begun = call.begin(photographs)                     # copied, normalized, computed; the host does not wait
    rows = call.finish(begun)                           # waits

The uint8 pixels of a batch go to the device from pinned memory, on a stream of their own, and are normalized there.
The results come back in pinned memory. On the CPU the same code runs without streams.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from rooftop.data.handing_over import Copies
from rooftop.errors import ModelRunError
from rooftop.models.detr.detection import best_first
from rooftop.models.detr.detection import class_names as coco_names
from rooftop.models.detr.losses import batch_of_detections
from rooftop.models.detr.network import Detr
from rooftop.models.images import IMAGENET, Preprocessing, normalization, normalized_by, not_finite
from rooftop.models.vision.classification import class_names as imagenet_names

CALLED = "this photograph"


@dataclass(frozen=True)
class Shown:
    """A photograph as a model sees it: its size (width, height), and pixels (H, W, 3) uint8, not yet normalized."""

    size: tuple[int, int]
    pixels: Tensor


class Computed(NamedTuple):
    """Results on the device, whose first dimension is the photographs; and the number of classes of the network."""

    results: tuple[Tensor, ...]
    classes: int


class Answer(Protocol):
    """The results of a network for photographs."""

    @property
    def preprocessing(self) -> Preprocessing: ...

    def compute(self, network: nn.Module, images: list[Tensor], sizes: list[tuple[int, int]]) -> Computed:
        """The results. The host does not wait for them.

        Args:
            images: (B, 3, H, W), normalized; several of (1, 3, H, W), if the photographs have several shapes.
            sizes: (width, height) of the photographs.
        """

    def rows(self, photographs: list[Shown], results: Sequence[Tensor], classes: int) -> list[dict[str, Any]]:
        """The row of each photograph, from results in the host's memory.

        Raises:
            ModelRunError: a result is not finite.
        """


@dataclass(frozen=True)
class _Begun:
    """A batch on the device, its results on their way; times are events of a GPU, or seconds."""

    photographs: list[Shown]
    results: list[Tensor]
    classes: int
    started: Any
    ended: Any


class PhotographCall:
    """The call: photographs to rows.

    Args:
        network: on the device.
        batch: on a GPU, smaller batches are filled up to this number, because a CUDA graph belongs to one shape.

    Attributes:
        device_s: seconds that the device has worked on finished batches.
        pins: whether pixels in pinned memory are sent without another copy.
    """

    def __init__(self, network: nn.Module, answer: Answer, device: str, batch: int) -> None:
        self._network, self._answer = network, answer
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
        """The rows of photographs."""
        return self.finish(self.begin(photographs))

    @torch.inference_mode()
    def begin(self, photographs: list[Shown]) -> _Begun:
        """Start the work on photographs; on a GPU the host does not wait.

        Raises:
            ModelRunError: memory does not suffice.
        """
        filled = [*photographs, *photographs[:1] * (self._filled_to - len(photographs))]
        try:
            pixels = self._sent(filled)
            started = self._now()
            images = [normalized_by(each, self._constants).to(self._dtype) for each in pixels]
            results, classes = self._answer.compute(self._network, images, [each.size for each in filled])
            on_host = [self._to_host(each) for each in results]
        except torch.cuda.OutOfMemoryError as error:
            self._filled_to = 0  # the photographs are tried one by one
            raise ModelRunError(
                f"{len(filled)} photographs at once do not fit into memory; use a smaller batch"
            ) from error
        return _Begun(photographs, on_host, classes, started, self._now())

    def finish(self, begun: _Begun) -> list[dict[str, Any]]:
        """Wait for a batch; return its rows.

        Raises:
            ModelRunError: a result is not finite.
        """
        if self._on_gpu:
            begun.ended.synchronize()
            self.device_s += begun.started.elapsed_time(begun.ended) / 1e3
        else:
            self.device_s += begun.ended - begun.started
        count = len(begun.photographs)
        return self._answer.rows(begun.photographs, [each[:count] for each in begun.results], begun.classes)

    def warm_up(self, side: int, batch: int) -> None:
        """Compute a batch of black squares, so that kernels are compiled and a CUDA graph is captured."""
        black = Shown((side, side), torch.zeros(side, side, 3, dtype=torch.uint8))
        begun = self.begin([black] * batch)
        if self._on_gpu:
            begun.ended.synchronize()

    def _sent(self, photographs: list[Shown]) -> list[Tensor]:
        """The pixels on the device: (B, H, W, 3) if all have one shape, else (1, H, W, 3) of each."""
        pixels = [each.pixels for each in photographs]
        if self.pins and not all(each.is_pinned() for each in pixels):
            pixels = self._pinned(pixels)
        there: list[Tensor] = self._copies.hand_over(self._copies.begin(pixels))
        return [torch.stack(there)] if len({each.shape for each in there}) == 1 else [each[None] for each in there]

    @staticmethod
    def _pinned(pixels: list[Tensor]) -> list[Tensor]:
        """The pixels in one piece of pinned memory.

        NumPy copies. torch's operators would wake a team of threads, whose cores decode.
        """
        ends = np.cumsum([each.numel() for each in pixels]).tolist()
        whole = torch.empty(ends[-1], dtype=torch.uint8, pin_memory=True)
        place, parts = whole.numpy(), []
        for each, end in zip(pixels, ends, strict=True):
            place[end - each.numel() : end] = each.contiguous().numpy().reshape(-1)
            parts.append(whole[end - each.numel() : end].view(each.shape))
        return parts

    def _to_host(self, result: Tensor) -> Tensor:
        if not self._on_gpu:
            return result
        return torch.empty(result.shape, dtype=result.dtype, pin_memory=True).copy_(result, non_blocking=True)

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # waiting takes no core from decoding
        event.record(torch.cuda.current_stream(self._device))
        return event


@dataclass(frozen=True)
class Classes:
    """The `top` most probable classes of a classifier."""

    top: int
    preprocessing: Preprocessing

    def compute(self, network: nn.Module, images: list[Tensor], sizes: list[tuple[int, int]]) -> Computed:
        """Whether the logits are finite, (B,); probabilities and classes, (B, top)."""
        logits = network(torch.cat(images) if len(images) > 1 else images[0]).float()  # (B, classes)
        best = logits.softmax(1).topk(min(self.top, logits.shape[1]))
        return Computed((logits.isfinite().all(1), best.values, best.indices), logits.shape[1])

    def rows(self, photographs: list[Shown], results: Sequence[Tensor], classes: int) -> list[dict[str, Any]]:
        """Label, name and probability of the most probable class, and lists of the most probable ones."""
        finite, probabilities, labels = (each.tolist() for each in results)
        if not all(finite):
            raise not_finite(CALLED)
        names = imagenet_names(None, classes)
        rows = []
        for of_labels, of_probabilities in zip(labels, probabilities, strict=True):
            of_names = [names[label] for label in of_labels] if names else [None] * len(of_labels)
            rows.append(
                {
                    "label": of_labels[0],
                    "name": of_names[0],
                    "probability": of_probabilities[0],
                    "labels": of_labels,
                    "names": of_names,
                    "probabilities": of_probabilities,
                }
            )
        return rows


@dataclass(frozen=True)
class Objects:
    """The objects of a detector with at least a score."""

    threshold: float
    preprocessing: Preprocessing = IMAGENET

    def compute(self, network: nn.Module, images: list[Tensor], sizes: list[tuple[int, int]]) -> Computed:
        """Of each photograph: whether its predictions are finite; the number of scores that reach the threshold;
        scores and labels (B, queries), best first; boxes (B, queries, 4)."""
        assert isinstance(network, Detr)
        predictions = network(images[0] if len(images) == 1 else [image for each in images for image in each])
        logits, boxes = predictions.logits, predictions.boxes
        finite = logits.isfinite().flatten(1).all(1) & boxes.isfinite().flatten(1).all(1)
        found = batch_of_detections(predictions, [(height, width) for width, height in sizes])
        edges = torch.tensor(sizes, dtype=found.boxes.dtype).repeat(1, 2).unsqueeze(1)  # (B, 1, 4)
        scores, labels, boxes = best_first(found, edges.to(found.boxes.device, non_blocking=True))
        counts = (scores >= self.threshold).sum(1)
        return Computed((finite, counts, scores, labels, boxes), logits.shape[-1] - 1)

    def rows(self, photographs: list[Shown], results: Sequence[Tensor], classes: int) -> list[dict[str, Any]]:
        """The size of a photograph, and lists of its objects, best score first."""
        finite, *parts = results
        if not finite.all():
            raise not_finite(CALLED)
        names = coco_names(None, classes)
        rows = []
        for photograph, count, *part in zip(photographs, *(each.tolist() for each in parts), strict=True):
            scores, labels, boxes = (each[:count] for each in part)
            rows.append(
                {
                    "width": photograph.size[0],
                    "height": photograph.size[1],
                    "labels": labels,
                    "names": [names[label] or None for label in labels] if names else [None] * count,
                    "scores": scores,
                    "boxes": boxes,
                }
            )
        return rows
