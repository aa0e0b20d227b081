"""Photographs that a device decodes: the same changes, places and errors as on the CPU, and nearly the same pixels.

The device is the CPU, with Pillow in NVJPEG's place.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rooftop.data import ImageFolder, ImageTransform, Loader, Part, Pixels, device_images
from rooftop.data.device_crops import changed_by_torch
from rooftop.data.device_images import (
    DeviceImages,
    Encoded,
    EncodedBatch,
    EncodedImages,
    encoded_batch,
    faster_decoding,
)  # fmt: skip
from rooftop.data.image_transforms import Drawn
from rooftop.data.pieces import Made
from rooftop.errors import InputError
from rooftop.media.images import ImageDecoder, ImageFile
from rooftop.testing import no_waiting_for_gpu

AUGMENT = {"crop": 0.3, "flip": 0.5, "shift": 0.2, "erase": 0.5}
CPU = torch.device("cpu")


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """JPEGs, one of them to be rotated, and PNGs."""
    for label, name in enumerate(("cat", "dog")):
        (tmp_path / name).mkdir()
        for number in range(4):
            image = photograph(60 + 10 * number, 50, 10 * label + number)
            exif = Image.Exif()
            exif[0x0112] = 6 if number == 1 else 1
            suffix, how = (".png", {}) if number == 3 else (".jpg", {"quality": 95, "exif": exif})
            image.save(tmp_path / name / f"{number}{suffix}", **how)
    return tmp_path


class PillowsNvjpeg(ImageDecoder):
    """A stand-in for a GPU's decoder: Pillow decodes JPEGs as stored, in groups, like NVJPEG."""

    def __init__(self, device: torch.device) -> None:
        super().__init__("cpu")
        self.groups: list[int] = []

    def _decoded(self, group: Any) -> Any:
        return self._by_either(group, self._all)

    def _all(self, contents: Sequence[bytes]) -> list[Tensor]:
        self.groups.append(len(contents))
        decoded = []
        for content in contents:
            with Image.open(io.BytesIO(content)) as image:
                decoded.append(torch.from_numpy(np.array(image.convert("RGB")).transpose(2, 0, 1).copy()))
        return decoded


def on_device(transform: ImageTransform) -> DeviceImages:
    return DeviceImages(transform, PillowsNvjpeg)


@pytest.mark.parametrize("how", ["here", "threads", "processes"])
def test_the_device_makes_the_changes_of_the_cpu(folder: Path, how: str) -> None:
    """The test reads two epochs with crops, flips, shifts and erased parts, and with JPEGs that are to be rotated."""
    transform = ImageTransform(24, AUGMENT, train=True, normalize=False)
    images = ImageFolder(folder, transform)
    options: dict[str, Any] = {"shuffle": True, "seed": 2, "workers": 2}
    arrive = on_device(transform)
    files = EncodedImages(images)
    with Loader(files, 3, how=how, collate=encoded_batch, arrive=arrive, **options) as there:
        for epoch in range(2):
            here = Loader(images, 3, how="here", **options)
            for one, other in zip(here.batches(epoch), there.batches(epoch), strict=True):
                (expected, labels), (found, same_labels) = one.value, other.value
                assert isinstance(found, Pixels)
                assert found.values.shape == expected.values.shape
                assert found.values.dtype == torch.uint8
                assert torch.equal(found.erased, expected.erased)
                assert torch.equal(labels, same_labels)
                assert torch.equal(one.places, other.places)
                assert torch.equal(one.indices, other.indices)
                apart = (found.values.float() - expected.values.float()).abs()
                assert apart.mean() < 3  # levels of 255; a wrong flip or crop differs by 20 or more
    decoder = arrive._decoders[CPU]
    assert isinstance(decoder, PillowsNvjpeg)
    assert decoder.by_pillow["PNG"] == 4  # two in each epoch
    assert max(decoder.groups) == 3


@pytest.mark.parametrize("how", ["here", "threads", "processes"])
@pytest.mark.parametrize("share", [1e-9, 0.5])
def test_the_cpu_decodes_its_share_itself(folder: Path, how: str, share: float) -> None:
    transform = ImageTransform(24, AUGMENT, train=True, normalize=False)
    images = ImageFolder(folder, transform)
    options: dict[str, Any] = {"shuffle": True, "seed": 2, "workers": 2}
    arrive = on_device(transform)
    files = EncodedImages(images, share)
    on_cpu = [isinstance(files[index][0], Pixels) for index in range(len(files))]
    with Loader(files, 3, how=how, collate=encoded_batch, arrive=arrive, **options) as there:
        for epoch in range(2):
            here = Loader(images, 3, how="here", **options)
            for one, other in zip(here.batches(epoch), there.batches(epoch), strict=True):
                (expected, labels), (found, same_labels) = one.value, other.value
                assert torch.equal(found.erased, expected.erased)
                assert torch.equal(labels, same_labels)
                assert torch.equal(one.indices, other.indices)
                for index, values, others in zip(one.indices, expected.values, found.values, strict=True):
                    apart = (values.float() - others.float()).abs()
                    assert torch.equal(values, others) if on_cpu[index] else apart.mean() < 6
    assert on_cpu.count(True) == {1e-9: 7, 0.5: 3}[share]  # index 0 always belongs to the device
    decoder = arrive._decoders[CPU]
    assert isinstance(decoder, PillowsNvjpeg)
    assert sum(decoder.groups) + decoder.by_pillow["PNG"] == 2 * on_cpu.count(False)  # in two epochs


def test_a_share_is_spread_evenly() -> None:
    for share in (0.1, 0.27, 0.9):
        files = EncodedImages.__new__(EncodedImages)
        files.share = share
        found = [files._by_device(index) for index in range(20_000)]
        for first in range(0, 20_000, 1000):
            assert abs(sum(found[first : first + 1000]) - 1000 * share) < 4
        assert abs(sum(found[::10]) - 2000 * share) < 30


def test_a_share_needs_images_that_are_not_normalized(folder: Path) -> None:
    """Normalized images are no `Pixels`, which could not join a batch."""
    images = ImageFolder(folder, ImageTransform(24, train=True))
    with pytest.raises(InputError, match=r"share is 0\.5: .* pass normalize=False to the transform"):
        EncodedImages(images, 0.5)
    assert EncodedImages(images).share == 1


@pytest.mark.parametrize("share", [0, -0.1, 1.5, float("nan")])
def test_a_share_out_of_range_is_refused(folder: Path, share: float) -> None:
    with pytest.raises(InputError, match="expected a number above 0, up to 1"):
        EncodedImages(ImageFolder(folder, ImageTransform(24, train=True, normalize=False)), share)


@pytest.mark.parametrize("skip", [True, False])
def test_a_damaged_file_of_either_part_is_named_or_skipped(folder: Path, skip: bool) -> None:
    transform = ImageTransform(16, AUGMENT, train=True, normalize=False)
    files = EncodedImages(ImageFolder(folder, transform), 0.5)
    places = [next(i for i in range(6) if isinstance(files[i][0], Pixels) == on_cpu) for on_cpu in (True, False)]
    for place in places:
        path = Path(files.name(place))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    arrive, options = on_device(transform), {"collate": encoded_batch, "how": "here"}
    if not skip:
        for place in places:
            with pytest.raises(InputError, match=re.escape(Path(files.name(place)).name)):
                list(Loader(Part(files, [place]), 1, arrive=arrive, **options))
        return
    loader = Loader(files, len(files), arrive=arrive, on_damage="skip", **options)
    (batch,) = loader
    assert sorted(each.sample for each in loader.skipped) == sorted(places)
    left = [index for index in range(len(files)) if index not in places]
    assert batch.indices.tolist() == batch.places.tolist() == left
    assert batch.value[1].tolist() == [files.labels[index] for index in left]
    assert len(batch.value[0].values) == len(left)


def test_a_comparison_sees_a_wrong_change() -> None:
    """Leaving out one change causes a difference far above the bound of the test above."""
    transform = ImageTransform(24, AUGMENT, train=True, normalize=False)
    pixels = torch.from_numpy(np.array(photograph(60, 50)).transpose(2, 0, 1).copy())
    plain = changed_by_torch(pixels, Drawn(), transform).float()
    for drawn in (Drawn(flip=True), Drawn(shift=(4, -3)), Drawn(crop=(0.0, 0.0, 0.5, 0.6))):
        changed = changed_by_torch(pixels, drawn, transform).float()
        assert (changed - plain).abs().mean() > 6
        image = transform.apply(photograph(60, 50), drawn)
        assert isinstance(image, Pixels)
        assert (changed - image.values.float()).abs().mean() < 2


def test_the_central_square_is_that_of_the_cpu() -> None:
    transform = ImageTransform(32, {"crop": 0.3}, normalize=False)
    for width, height in ((60, 50), (33, 70), (36, 36)):
        image = photograph(width, height)
        pixels = torch.from_numpy(np.array(image).transpose(2, 0, 1).copy())
        found = changed_by_torch(pixels, Drawn(), transform)
        expected = transform(image)
        assert isinstance(expected, Pixels)
        assert (found.float() - expected.values.float()).abs().mean() < 2


@pytest.mark.parametrize("name", ["cat/0.jpg", "cat/3.png"])
def test_a_damaged_file_is_named_or_skipped(folder: Path, name: str) -> None:
    path = folder / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    transform = ImageTransform(16, AUGMENT, train=True, normalize=False)
    files = EncodedImages(ImageFolder(folder, transform))
    index = files.paths.index(str(path))
    options: dict[str, Any] = {"how": "threads", "collate": encoded_batch, "arrive": on_device(transform)}
    with pytest.raises(InputError, match=rf"sample {index}: .*{name} cannot be read"):
        list(Loader(files, 4, **options))
    loader = Loader(files, 4, on_damage="skip", **options)
    batches = list(loader)
    assert [len(batch.places) for batch in batches] == [3, 4]
    assert index not in batches[0].indices
    assert len(batches[0].value[0].values) == len(batches[0].value[1]) == 3
    ((skipped, its_name, reason),) = loader.skipped
    assert (skipped, its_name) == (index, str(path))
    assert "cannot be read" in reason


def test_a_batch_of_which_nothing_can_be_read_has_no_value(folder: Path) -> None:
    for path in folder.rglob("*.*"):
        path.write_bytes(path.read_bytes()[:200])
    transform = ImageTransform(16, normalize=False)
    files = EncodedImages(ImageFolder(folder, transform))
    places = np.arange(2)
    halves = [ImageFile(path, Path(path).read_bytes(), (50, 60), 1, "JPEG without its end") for path in files.paths[:2]]
    content = [Encoded(each, Drawn()) for each in halves]
    made = Made((EncodedBatch.of(content), torch.zeros(2, dtype=torch.int64)), places, places)
    found = on_device(transform)(made, CPU, True)
    assert found.value is None
    assert len(found.damaged) == 2
    assert len(found.indices) == 0


@pytest.mark.parametrize(
    ("augment", "said"), [({"rand_augment": 2}, "rand_augment=2"), ({"jitter": 0.4, "hue": 0.1}, "jitter=0.4, hue=0.1")]
)
def test_changes_of_the_cpu_are_refused(folder: Path, augment: dict[str, float], said: str) -> None:
    images = ImageFolder(folder, ImageTransform(16, augment, train=True, normalize=False))
    with pytest.raises(InputError, match=f"a GPU cannot apply {said}: decode on the CPU"):
        EncodedImages(images)
    assert faster_decoding(images, 4, CPU) == ("cpu", f"a GPU cannot apply {said}")


def test_without_a_gpu_it_is_refused(folder: Path) -> None:
    transform = ImageTransform(16, normalize=False)
    files = EncodedImages(ImageFolder(folder, transform))
    with pytest.raises(InputError, match=r"augment\.decode=gpu needs a GPU, but the training runs on cpu"):
        list(Loader(files, 4, how="here", collate=encoded_batch, arrive=DeviceImages(transform), device="cpu"))
    assert faster_decoding(files.images, 4, CPU) == ("cpu", "the training runs on the CPU")


class Slow(PillowsNvjpeg):
    def _all(self, contents: Sequence[bytes]) -> list[Tensor]:
        time.sleep(0.05 * len(contents))
        return super()._all(contents)


def test_a_slow_device_is_not_chosen(folder: Path) -> None:
    transform = ImageTransform(16, normalize=False)
    images = ImageFolder(folder, transform)
    found = faster_decoding(images, 4, CPU, how="here", seconds=0.1, arrive=DeviceImages(transform, Slow))
    assert found.device == "cpu"
    of_gpu = re.match(r"(\d+) images/s by the GPU, [\d,]+ by the CPU", found.why)
    assert of_gpu is not None
    assert int(of_gpu[1]) <= 27  # 50 ms for each JPEG; the device decodes no PNGs


@pytest.mark.parametrize(("of_gpu", "chosen"), [(1000.0, "cpu"), (2100.0, "cpu"), (2900.0, "gpu"), (9000.0, "gpu")])
def test_a_gpu_must_be_clearly_faster(
    of_gpu: float, chosen: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = iter([1000.0, of_gpu])
    monkeypatch.setattr(device_images, "loader_rate", lambda loader, seconds: (next(rates), None))
    transform = ImageTransform(16, normalize=False)
    found = faster_decoding(ImageFolder(folder, transform), 4, CPU, arrive=on_device(transform))
    assert found.device == chosen
    assert found.why.startswith(f"{of_gpu:,.0f} images/s by the GPU, 1,000 by the CPU")
    assert ("the GPU also has to train" in found.why) == (of_gpu == 2100.0)


@pytest.mark.gpu
def test_a_gpu_decodes_nearly_the_pixels_of_the_cpu(folder: Path) -> None:
    pytest.importorskip("torchvision")
    from rooftop.media.nvjpeg import missing

    gpu = torch.device("cuda", 0)
    if reason := missing(gpu):
        pytest.skip(reason)
    transform = ImageTransform(24, AUGMENT, train=True, normalize=False)
    images = ImageFolder(folder, transform)
    options: dict[str, Any] = {"shuffle": True, "how": "threads", "device": gpu}
    there = Loader(EncodedImages(images), 8, collate=encoded_batch, arrive=DeviceImages(transform), **options)
    (one,), (other,) = Loader(images, 8, **options), there
    assert other.value[0].values.is_cuda
    assert other.value[1].is_cuda
    apart = (one.value[0].values.float() - other.value[0].values.float()).abs()
    assert apart.mean() < 4
    with no_waiting_for_gpu():
        other.value[0].values.float().mean()
