"""Photographs are resized by the GPU where it gives Pillow's pixels, and where they are decoded in all other cases."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from rooftop.cluster import photographs as photographs_module
from rooftop.cluster.photographs import Preparation, Shown
from rooftop.errors import InputError
from rooftop.media.pillow_resize import Resize
from rooftop.models.images import Preprocessing, cropping

pytest.importorskip("pyarrow")


class Cropped(Preparation):
    def __init__(self, interpolation: Image.Resampling = Image.Resampling.BILINEAR) -> None:
        self.preprocessing = Preprocessing(16, 14, interpolation)

    def change(self, width: int, height: int) -> Resize:
        return cropping(width, height, self.preprocessing)


def saved(path: Path, width: int, height: int, mode: str = "RGB") -> str:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), np.uint8)
    Image.fromarray(pixels).convert(mode).save(path)
    return str(path)


@pytest.mark.parametrize("name", ["a.jpg", "a.png"])
def test_a_whole_photograph_becomes_what_the_host_makes_of_it(tmp_path: Path, name: str) -> None:
    path, prepare = saved(tmp_path / name, 50, 40), Cropped()
    whole, resized = prepare.read(path, "cuda"), prepare.read(path, "cpu")
    assert (whole.size, whole.resized, whole.pixels.shape) == ((50, 40), False, (40, 50, 3))
    assert (resized.size, resized.resized, resized.pixels.shape) == ((50, 40), True, (14, 14, 3))
    changed = prepare.change(50, 40).by_pillow(Image.fromarray(whole.pixels.numpy()))
    np.testing.assert_array_equal(np.asarray(changed), resized.pixels.numpy())


def test_what_the_gpu_does_not_resize_alike_is_resized_by_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, tall = saved(tmp_path / "usual.jpg", 50, 40), saved(tmp_path / "tall.png", 20, 90)
    assert Cropped().read(tall, "cuda").resized  # Pillow 13 resizes columns first
    assert Cropped(Image.Resampling.LANCZOS).read(usual, "cuda").resized
    monkeypatch.setattr(photographs_module, "MOST_PIXELS", 50 * 40)
    assert not Cropped().read(usual, "cuda").resized
    monkeypatch.setattr(photographs_module, "MOST_PIXELS", 50 * 40 - 1)
    assert Cropped().read(usual, "cuda").resized
    monkeypatch.setattr(photographs_module, "MOST_PIXELS", 50 * 40)
    monkeypatch.setattr(photographs_module, "has_triton", lambda: False)
    assert Cropped().read(usual, "cuda").resized


def test_grey_photographs_have_three_channels(tmp_path: Path) -> None:
    path = saved(tmp_path / "grey.jpg", 30, 30, "L")
    assert Cropped().read(path, "cuda").pixels.shape == (30, 30, 3)


def test_a_damaged_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(b"no photograph")
    for device in ("cpu", "cuda"):
        with pytest.raises(InputError, match=r"a\.jpg"):
            Cropped().read(str(tmp_path / "a.jpg"), device)


@pytest.mark.gpu
def test_a_gpu_makes_the_hosts_pixels_of_any_batch(tmp_path: Path) -> None:
    """Batches of one size and of several, with photographs that the host has resized among them."""
    from rooftop.cluster.model_targets import model_target

    sizes = [(500, 375), (500, 375), (375, 500), (640, 427), (90, 400), (31, 33)]
    paths = [saved(tmp_path / f"{number}.jpg", *size) for number, size in enumerate(sizes)]
    for name, options in (("resnet50", {}), ("detr_resnet50", {"threshold": 0.0})):
        target = model_target(name, seed=0, batch=6, **options)
        call = target.load("cuda")
        for some in (paths, paths[:2], paths[4:5]):
            whole: list[Shown] = [target.prepare.read(path, "cuda") for path in some]
            resized = [target.prepare.read(path, "cpu") for path in some]
            assert all(each.resized for each in resized)
            found, expected = ([image for batch in call._sent(each) for image in batch] for each in (whole, resized))
            assert len(found) == len(some)
            assert all(torch.equal(*each) for each in zip(found, expected, strict=True))
            assert call(whole) == call(resized)
