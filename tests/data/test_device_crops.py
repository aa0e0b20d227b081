"""The kernels that crop and resize on a device give the pixels of PyTorch's operators, one photograph after another."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftop.data import ImageTransform, device_crops
from rooftop.data.device_crops import changed, changed_by_torch
from rooftop.data.image_transforms import Drawn
from rooftop.launch.triton_launch import INTERPRETED, count_launches

CHANGES = (
    Drawn(),
    Drawn(flip=True, shift=(-3, 5)),
    Drawn(crop=(0.0, 0.0, 1.0, 1.0)),
    Drawn(crop=(0.11, 0.2, 0.73, 0.9), flip=True),
    Drawn(crop=(0.5, 0.5, 0.5, 0.5), shift=(4, -2)),
    Drawn(crop=(0.9, 0.1, 1.0, 1.0)),
)
SIZES = ((37, 60), (20, 20), (96, 31), (7, 5), (50, 50), (20, 3))


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_by_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) >= 3


def photographs(device: str = "cpu", larger: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = [(3, larger * height, larger * width) for height, width in SIZES]
    return [torch.randint(256, size, generator=generator, dtype=torch.uint8).to(device) for size in sizes]


def compared(given: list[Tensor], size: int, augment: dict[str, float]) -> None:
    transform = ImageTransform(size, augment, train=True)
    drawn = list(CHANGES)
    with count_launches() as launches:
        found = changed(given, drawn, transform)
    assert set(launches) == {"resize_rows", "resize_columns"}
    expected = torch.stack([changed_by_torch(*each, transform) for each in zip(given, drawn, strict=True)])
    assert found.dtype == torch.uint8
    apart = (found.int() - expected.int()).abs()
    assert apart.max() <= 1  # a mean that lies between two levels
    assert (apart > 0).float().mean() < 0.01


@pytest.mark.skipif(not INTERPRETED, reason="by the interpreter")
@pytest.mark.parametrize("size", [16, 23])
@pytest.mark.parametrize("augment", [{"crop": 0.3}, {}])
def test_the_kernels_give_pytorchs_pixels(size: int, augment: dict[str, float]) -> None:
    """Photographs are enlarged and reduced, flipped and shifted, with central squares of both sizes of the shorter
    side."""
    compared(photographs(), size, augment)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [224, 23])
def test_on_a_gpu(size: int) -> None:
    pytest.importorskip("triton")
    compared(photographs("cuda", 12), size, {"crop": 0.3})


@pytest.mark.parametrize("pixels", [10_000, 1])
def test_groups_fit_on_the_device(pixels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftop.data import device_images
    from rooftop.media.images import ImageFile

    monkeypatch.setattr(device_images, "GROUP_PIXELS", pixels)
    shapes = [(50, 100), (50, 100), (10, 10), (200, 200), (20, 20)]
    files = [ImageFile("x", b"abc"[: number % 3], shape, 1, None) for number, shape in enumerate(shapes)]
    batch = device_images.EncodedBatch.of([device_images.Encoded(file, Drawn()) for file in files])
    groups = [list(group) for group in batch.groups()]
    assert groups == ([[0, 1], [2], [3], [4]] if pixels > 1 else [[0], [1], [2], [3], [4]])
    assert [bytes(file.content) for file in batch.whole_files()] == [b"abc"[: number % 3] for number in range(5)]
    assert np.prod(batch.content.shape) == 4


def test_without_triton_pytorch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_crops, "has_triton", lambda: False)
    transform = ImageTransform(16, {"crop": 0.3}, train=True)
    with count_launches() as launches:
        found = changed(photographs(), list(CHANGES), transform)
    assert not launches
    assert found.shape == (6, 16, 16, 3)
