"""Photographs become the same tensors as with torchvision; files that are not photographs are refused by name."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data

from rooftop.errors import InputError
from rooftop.models.images import (
    MEAN,
    STD,
    Preprocessing,
    check_images,
    cropped,
    find_images,
    load_images,
    normalized,
    normalized_pixels,
    preprocess,
    read_image,
)


@pytest.fixture
def cat() -> Image.Image:
    return Image.fromarray(data.chelsea())  # 451 x 300


def test_preprocessing_is_resize_crop_normalize(cat: Image.Image) -> None:
    """Preprocessing equals PyTorch's antialiased resize, except for the rounding of 8-bit pixels."""
    pixels = torch.from_numpy(np.array(cat)).permute(2, 0, 1)[None].float()
    resized = torch.nn.functional.interpolate(
        pixels, size=(256, 256 * 451 // 300), mode="bilinear", antialias=True
    ).round()
    left = round((resized.shape[3] - 224) / 2)
    cropped = resized[0, :, 16:240, left : left + 224] / 255
    expected = (cropped - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]
    torch.testing.assert_close(preprocess(cat), expected, rtol=0, atol=1.01 / 255 / min(STD))


@pytest.mark.parametrize("resize", [256, 232])
def test_preprocessing_is_torchvisions_bit_for_bit(resize: int, torchvision_models: ModuleType) -> None:
    from torchvision.transforms._presets import ImageClassification

    theirs = ImageClassification(crop_size=224, resize_size=resize)
    for pixels in (data.chelsea(), data.astronaut()[:77, :301], data.coffee()[:301, :78]):
        photo = Image.fromarray(pixels)
        assert torch.equal(preprocess(photo, Preprocessing(resize=resize)), theirs(photo))


@pytest.mark.parametrize("form", ["png", "jpg", "webp", "tif"])
def test_tensors_are_to_the_bit_those_of_pillow_and_torch(form: str, cat: Image.Image, tmp_path: Path) -> None:
    """Threads decode the photographs and NumPy prepares them, in the order of the files."""
    for number in range(5):
        cat.rotate(20 * number).save(tmp_path / f"{number}.{form}")
    batch = load_images([tmp_path])
    for number, found in enumerate(batch):
        with Image.open(tmp_path / f"{number}.{form}") as image:
            resized = image.resize((256 * 451 // 300, 256), Image.Resampling.BILINEAR)
        shown = resized.crop((80, 16, 304, 240))
        pixels = torch.from_numpy(np.array(shown, dtype=np.float32)) / 255
        expected = ((pixels - torch.tensor(MEAN)) / torch.tensor(STD)).permute(2, 0, 1)
        assert torch.equal(found, expected)
        assert torch.equal(normalized(shown), expected)


def test_a_batch_from_files_and_folders(cat: Image.Image, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("b.png", "a.jpg", "notes.txt"):
        (folder / name).write_text("") if name.endswith("txt") else cat.save(folder / name)
    single = tmp_path / "single.bmp"
    cat.save(single)
    assert [p.name for p in find_images([folder, single])] == ["a.jpg", "b.png", "single.bmp"]
    batch = load_images([folder, single])
    assert (batch.shape, batch.dtype) == ((3, 3, 224, 224), torch.float32)
    assert torch.equal(batch[1], batch[2])


@pytest.mark.parametrize("mode", ["L", "RGBA", "CMYK", "P", "1"])
def test_other_colour_modes_become_rgb(mode: str, cat: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "photo.tif"
    cat.convert(mode).save(path)
    assert read_image(path).mode == "RGB"


def test_what_is_transparent_lies_on_white(tmp_path: Path) -> None:
    path = tmp_path / "logo.png"
    Image.new("RGBA", (2, 1), (200, 0, 0, 0)).save(path)
    assert np.array(read_image(path)).tolist() == [[[255, 255, 255]] * 2]


def test_beginnings_are_checked_without_decoding(cat: Image.Image, tmp_path: Path) -> None:
    cat.save(tmp_path / "whole.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:5000])
    check_images([tmp_path / "whole.jpg", tmp_path / "half.jpg"])
    (tmp_path / "text.jpg").write_text("no image")
    with pytest.raises(InputError, match=r"text\.jpg is not an image"):
        check_images([tmp_path / "whole.jpg", tmp_path / "text.jpg"])


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    path = tmp_path / "deep.png"
    Image.fromarray(np.array([[0, 32768], [65535, 257]], dtype=np.uint16)).save(path)
    assert np.array(read_image(path))[..., 0].tolist() == [[0, 128], [255, 1]]


def test_exif_orientation_is_respected(cat: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6  # to be rotated by 90 degrees
    cat.save(path, exif=exif)
    assert read_image(path).size == (cat.height, cat.width)


def test_what_is_no_photograph_is_refused_by_name(cat: Image.Image, tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image")
    cat.save(tmp_path / "whole.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:5000])
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("text.jpg", "not an image that Pillow can read"),
        ("half.jpg", "cannot be read"),
        ("empty", "has no photographs"),
        ("missing.jpg", "does not exist"),
    ):
        with pytest.raises(InputError, match=message) as caught:
            load_images([tmp_path / name])
        assert name in str(caught.value)


def test_a_batch_of_no_photographs_is_refused() -> None:
    with pytest.raises(InputError, match="got no paths"):
        load_images([])


def test_pixels_of_a_batch_are_normalized_bit_for_bit(cat: Image.Image) -> None:
    photos = [cropped(cat), cropped(cat.transpose(Image.Transpose.FLIP_LEFT_RIGHT))]
    pixels = torch.stack([torch.from_numpy(np.array(photo)) for photo in photos])
    expected = torch.stack([normalized(photo) for photo in photos])
    found = normalized_pixels(pixels)
    assert torch.equal(found, expected)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(normalized_pixels(pixels[0, :3, :5], (0.1, 0.2, 0.3), (0.3, 0.2, 0.1)),
                       normalized(photos[0].crop((0, 0, 5, 3)), (0.1, 0.2, 0.3), (0.3, 0.2, 0.1)))  # fmt: skip
    assert normalized_pixels(pixels[:0]).shape == (0, 3, 224, 224)


@pytest.mark.gpu
def test_pixels_are_normalized_on_a_gpu_as_on_the_cpu() -> None:
    pixels = torch.arange(256, dtype=torch.uint8)[:, None, None].expand(256, 1, 3)
    assert torch.equal(normalized_pixels(pixels.cuda()).cpu(), normalized_pixels(pixels))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resize": 0}, "resize must be an int of at least 1, got 0"),
        ({"crop": 1.5}, r"crop must be an int of at least 1, got 1\.5"),
        ({"mean": (0.5,)}, r"mean must be three numbers, got \(0\.5,\)"),
        ({"std": (0.2, 0.0, 0.2)}, r"std must be three positive numbers, got \(0\.2, 0\.0, 0\.2\)"),
    ],
)
def test_a_preprocessing_that_makes_no_image(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=f"Preprocessing: {message}"):
        Preprocessing(**options)
