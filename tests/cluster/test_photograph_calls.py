"""A network over batches of photographs in two halves: the rows that `classify` and `detect` give, for any batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from rooftop.cluster.model_targets import ModelTarget, model_target
from rooftop.cluster.photograph_calls import Classes, Objects, PhotographCall, Shown
from rooftop.errors import ModelRunError
from rooftop.models.images import IMAGENET

pytest.importorskip("pyarrow")


def photographs(target: ModelTarget, count: int, shape: Callable[[int], tuple[int, int]]) -> list[Any]:
    random = np.random.default_rng(0)
    made = (random.integers(0, 255, (*shape(number), 3), np.uint8) for number in range(count))
    return [target.prepare(Image.fromarray(pixels)) for pixels in made]


class Brightest(nn.Module):
    """Logits (B, 3): the mean of each colour."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.batches: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.batches.append(len(images))
        return images.mean((2, 3)) * self.weight


def shown(*colour: int) -> Shown:
    return Shown((2, 2), torch.tensor(colour, dtype=torch.uint8).expand(4, 4, 3).contiguous())


def test_a_second_batch_is_begun_before_the_first_is_finished() -> None:
    network = Brightest()
    call = PhotographCall(network, Classes(1, IMAGENET), "cpu", 4)
    first, second = call.begin([shown(255, 0, 0), shown(0, 255, 0)]), call.begin([shown(0, 0, 255)])
    assert [row["label"] for row in call.finish(first).to_pylist()] == [0, 1]
    assert call.device_s > 0
    assert [row["label"] for row in call.finish(second).to_pylist()] == [2]
    assert network.batches == [2, 1]


def test_a_smaller_batch_is_filled_up_and_has_as_many_rows_as_photographs() -> None:
    """A CUDA graph has a fixed shape, so GPUs need full batches."""
    network = Brightest()
    call = PhotographCall(network, Classes(2, IMAGENET), "cpu", 4)
    call._filled_to = 4
    assert [row["label"] for row in call([shown(0, 255, 0), shown(0, 0, 255)])] == [1, 2]
    assert network.batches == [4]


def test_photographs_of_several_shapes_give_what_each_gives_alone() -> None:
    target = model_target("detr_resnet50", seed=0, threshold=0.0)
    photos = photographs(target, 2, lambda number: (12 + 6 * number, 400))  # narrow, so that the network is quick
    assert photos[0].pixels.shape != photos[1].pixels.shape
    sizes = []

    class Noted(Objects):
        def compute(self, network: nn.Module, images: list[Tensor], sizes_: list[tuple[int, int]]) -> Any:
            sizes.extend([tuple(each.shape) for each in images])
            return super().compute(network, images, sizes_)

    call = target.load("cpu")
    call._answer = Noted(0.0)
    rows = call(photos)
    assert sizes == [(1, 3, *photo.pixels.shape[:2]) for photo in photos]
    assert [(row["width"], row["height"]) for row in rows] == [(400, 12), (400, 18)]
    assert all(len(row["scores"]) == 100 for row in rows)


def test_results_that_are_not_finite_are_an_error() -> None:
    network = Brightest()
    network.weight.data[0] = torch.nan
    call = PhotographCall(network, Classes(1, IMAGENET), "cpu", 4)
    with pytest.raises(ModelRunError, match="is not finite: its weights are damaged"):
        call([shown(1, 2, 3)])


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options"), [("resnet50", {}), ("detr_resnet50", {"threshold": 0.0})])
def test_a_gpu_gives_the_rows_of_the_cpu(name: str, options: dict[str, Any]) -> None:
    target = model_target(name, seed=0, batch=4, dtype=torch.float32, **options)
    photos = photographs(target, 10, lambda number: (60, 80))
    call = target.load("cuda")
    begun = [call.begin(photos[first : first + 4]) for first in (0, 4, 8)]  # all begin before the first result is read
    found = [row for each in begun for row in call.finish(each).to_pylist()]
    expected = target.load("cpu")(photos)
    assert call.device_s > 0
    assert len(found) == 10
    column = "probabilities" if name == "resnet50" else "scores"  # best first; with random weights, labels are close
    for one, other in zip(found, expected, strict=True):
        assert set(one) == set(other)
        assert np.allclose(one[column], other[column], rtol=2e-2, atol=1e-3)


@pytest.mark.gpu
def test_the_host_does_not_wait_for_a_batch_that_is_begun() -> None:
    """Only the first batches make the host wait, because they compile kernels and capture a graph."""
    target = model_target("resnet50", seed=0, batch=4)
    photos = photographs(target, 4, lambda number: (60, 80))
    call = target.load("cuda")
    call(photos)
    torch.cuda.set_sync_debug_mode("error")
    try:
        begun = call.begin(photos)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(call.finish(begun)) == 4
