"""Images for training: random draws, transforms, and the size at which JPEGs are decoded."""

from __future__ import annotations

import io
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from rooftop.data import ImageFolder, ImageTransform, Loader, Normalizer, Pixels, image_transforms
from rooftop.data.colour_jitter import Colour, draw_jitter, jittered
from rooftop.data.image_transforms import Drawn
from rooftop.data.rand_augment import NAMES, Operation, apply_operations, draw_operations
from rooftop.errors import InputError
from rooftop.media.images import pillow_image
from rooftop.models.images import preprocess
from rooftop.testing import no_waiting_for_gpu
from rooftop.train.recipes.recipe import Augment

ALL = {"crop": 0.2, "flip": 0.5, "shift": 0.2, "jitter": 0.4, "hue": 0.1, "rand_augment": 2, "magnitude": 7.0}
ALL |= {"erase": 0.5}


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """An image of smooth colours, which looks alike at all sizes of decoding."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def saved(image: Image.Image, **how: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, **{"format": "JPEG", "quality": 95, **how})
    return file.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for label, name in enumerate(("cat", "dog", "emu")):
        (tmp_path / name / "more").mkdir(parents=True)
        for number in range(2):
            photograph(40 + 3 * label, 30, 10 * label + number).save(tmp_path / name / f"{number}.png")
        photograph(30, 44, label).save(tmp_path / name / "more" / "3.JPG")
        (tmp_path / name / "notes.txt").write_text("not a photograph")
    (tmp_path / ".hidden").mkdir()
    return tmp_path


def test_validation_images_are_those_that_classify_sees() -> None:
    image = photograph(300, 260)
    judged = ImageTransform(224, {"crop": 0.35, "flip": 1.0})
    assert torch.equal(judged(image, np.random.default_rng(0)), preprocess(image))
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)
    assert torch.equal(judged(pixels), preprocess(image))
    assert torch.equal(ImageTransform(224, ALL, train=True)(image), preprocess(image))  # nothing to draw from


def test_without_a_crop_the_whole_shorter_side_is_kept() -> None:
    image = photograph(64, 48)
    found = ImageTransform(48, mean=(0, 0, 0), std=(1, 1, 1))(image)
    assert torch.equal(found, torch.from_numpy(np.array(image.crop((8, 0, 56, 48)))).permute(2, 0, 1) / 255)


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 99))
def test_drawn_crops_lie_in_the_image(width: int, height: int, seed: int) -> None:
    transform = ImageTransform(16, ALL, train=True)
    drawn = transform.draw(width, height, np.random.default_rng(seed))
    assert drawn == transform.draw(width, height, np.random.default_rng(seed))
    if drawn.crop is not None:
        left, top, right, bottom = drawn.crop
        assert 0 <= left < right <= 1 + 1e-12
        assert 0 <= top < bottom <= 1 + 1e-12
        assert 0.2 - 1e-9 <= (right - left) * (bottom - top) <= 1 + 1e-9
        shape = (right - left) * width / ((bottom - top) * height)
        assert 3 / 4 - 1e-9 <= shape <= 4 / 3 + 1e-9
    if drawn.erased is not None:
        top, left, bottom, right = drawn.erased  # type: ignore[assignment]
        assert 0 <= top < bottom <= 16
        assert 0 <= left < right <= 16
    assert max(map(abs, drawn.shift)) <= 3


def test_draws_have_the_probabilities_that_were_asked_for() -> None:
    transform = ImageTransform(20, {"crop": 0.5, "flip": 0.3, "erase": 0.6, "shift": 0.1}, train=True)
    generator = np.random.default_rng(0)
    drawn = [transform.draw(100, 100, generator) for _ in range(2000)]
    assert abs(np.mean([each.flip for each in drawn]) - 0.3) < 0.05
    assert abs(np.mean([each.erased is not None for each in drawn]) - 0.6) < 0.05
    assert {each.shift[0] for each in drawn} == set(range(-2, 3))
    areas = [(r - a) * (b - t) for a, t, r, b in (each.crop for each in drawn if each.crop is not None)]
    assert 0.64 < np.mean(areas) < 0.75  # large areas of long shapes do not fit


def test_each_change_does_what_it_is_called() -> None:
    transform = ImageTransform(32, mean=(0, 0, 0), std=(1, 1, 1))
    image = photograph(32, 32)
    plain = transform.apply(image, Drawn())
    assert torch.equal(transform.apply(image, Drawn(flip=True)), plain.flip(2))
    shifted = transform.apply(image, Drawn(shift=(3, -2)))
    assert torch.equal(shifted[:, :-2, 3:], plain[:, 2:, :-3])
    assert not shifted[:, -2:].any()
    assert not shifted[:, :, :3].any()
    erased = transform.apply(image, Drawn(erased=(1, 2, 11, 12)))
    assert not erased[:, 1:11, 2:12].any()
    erased[:, 1:11, 2:12] = plain[:, 1:11, 2:12]
    assert torch.equal(erased, plain)
    corner = transform.apply(image, Drawn(crop=(0.0, 0.0, 0.5, 0.5)))
    expected = transform.apply(image.crop((0, 0, 16, 16)).resize((32, 32), Image.Resampling.BILINEAR), Drawn())
    assert (corner - expected).abs().max() <= 1.01 / 255  # PyTorch and Pillow resize with a difference of one level


@pytest.mark.parametrize("vectorized", [True, False])
def test_crops_are_resized_as_by_pillow(vectorized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Crops are enlarged and reduced, flipped or not, with whole pixels at the edges, and agree within one level."""
    monkeypatch.setattr(image_transforms, "VECTORIZED", vectorized)
    noise = np.random.default_rng(0).integers(0, 256, (300, 401, 3), dtype=np.uint8)
    image = Image.fromarray(noise)
    transform = ImageTransform(64, {"crop": 0.1}, train=True, normalize=False)
    for crop in ((0.0, 0.0, 1.0, 1.0), (0.1, 0.301, 0.25, 0.999), (0.5, 0.5, 0.5, 0.5)):
        part = image.crop(image_transforms.box(crop, 401, 300))
        expected = np.array(part.resize((64, 64), Image.Resampling.BILINEAR)).astype(int)
        for flip in (False, True):
            found = transform.apply(image, Drawn(crop=crop, flip=flip))
            assert isinstance(found, Pixels)
            assert np.abs(found.values.numpy() - (expected[:, ::-1] if flip else expected)).max() <= 1


@pytest.mark.parametrize("name", NAMES)
def test_operations_of_rand_augment(name: str) -> None:
    image = photograph(24, 18)
    before = np.array(image)
    for strength in (0.0, 0.5, -1.0):
        found = apply_operations(image, [Operation(name, strength)])
        assert (found.size, found.mode) == (image.size, "RGB")
        same = np.array_equal(np.array(found), before)
        if name == "identity" or (strength == 0 and name not in ("auto_contrast", "equalize")):
            assert same
        elif strength < 0:
            assert not same
    assert np.array_equal(np.array(image), before)  # not changed in place


def test_operations_are_drawn_equally_with_one_magnitude() -> None:
    drawn = draw_operations(2800, 5.0, np.random.default_rng(0))
    assert {abs(each.strength) for each in drawn} == {0.5}
    assert 0.4 < np.mean([each.strength > 0 for each in drawn]) < 0.6
    counts = [sum(each.name == name for each in drawn) for name in NAMES]
    assert min(counts) > 140
    assert max(counts) < 260


@pytest.mark.usefixtures("torchvision_models")
@pytest.mark.parametrize(
    ("name", "amount"),
    [
        *((name, factor) for name in ("brightness", "contrast", "saturation") for factor in (0.0, 0.2, 0.9, 1.4)),
        *(("hue", part) for part in (-0.5, -0.31, 0.0, 0.1, 0.5)),
    ],
)
def test_colour_jitter_is_torchvisions(name: str, amount: float) -> None:
    from torchvision.transforms import functional

    image = photograph(30, 20)
    found = jittered(image, [Colour(name, amount)])
    assert np.array_equal(np.asarray(found), np.asarray(getattr(functional, f"adjust_{name}")(image, amount)))


def test_colour_jitter_is_drawn_evenly_and_in_any_order() -> None:
    generator = np.random.default_rng(0)
    drawn = [draw_jitter(0.4, 0.1, generator) for _ in range(2000)]
    assert len({tuple(each.name for each in one) for one in drawn}) == 24  # orders of four
    for name, low, high in (
        ("brightness", 0.6, 1.4),
        ("contrast", 0.6, 1.4),
        ("saturation", 0.6, 1.4),
        ("hue", -0.1, 0.1),
    ):
        amounts = [each.amount for one in drawn for each in one if each.name == name]
        assert len(amounts) == 2000
        assert low <= min(amounts) < low + 0.05 * (high - low)
        assert high >= max(amounts) > high - 0.05 * (high - low)
        assert np.mean(amounts) == pytest.approx((low + high) / 2, abs=0.02 * (high - low) + 0.005)
    assert {each.name for each in draw_jitter(0.4, 0.0, generator)} == {"brightness", "contrast", "saturation"}
    assert [each.name for each in draw_jitter(0.0, 0.1, generator)] == ["hue"]


def test_without_colour_jitter_the_other_draws_stay() -> None:
    """Without colour jitter, a recipe draws the same numbers as before that option existed."""
    usual = {"crop": 0.2, "flip": 0.5, "rand_augment": 2}
    one, other = (
        ImageTransform(16, augment, train=True).draw(40, 30, np.random.default_rng(3))
        for augment in (usual, {**usual, "jitter": 0.0, "hue": 0.0})
    )
    assert one == other
    assert one.jitter == ()


# ---- normalized on the device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_last", [False, True])
def test_images_that_are_normalized_on_the_device_have_the_same_bits(folder: Path, channels_last: bool) -> None:
    """Batches are compared one by one, with crops, flips, RandAugment and erased parts."""
    here, there = (
        ImageFolder(folder, ImageTransform(16, ALL, train=True, normalize=normalize)) for normalize in (True, False)
    )
    normalize = Normalizer(channels_last=channels_last)
    erased = 0
    for one, other in zip(Loader(here, 3, seed=4, how="here"), Loader(there, 3, seed=4, how="threads"), strict=True):
        (images, labels), (pixels, same_labels) = one.value, other.value
        assert isinstance(pixels, Pixels)
        assert pixels.values.dtype == torch.uint8
        assert torch.equal(normalize(pixels), images)
        assert torch.equal(labels, same_labels)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert normalize(pixels).is_contiguous(memory_format=layout)
        erased += int(pixels.erased.any(1).sum())
    assert erased > 0
    image = Image.new("RGB", (40, 30), "teal")
    judged = ImageTransform(16, ALL, normalize=False)(image)
    assert isinstance(judged, Pixels)
    assert judged.erased.tolist() == [0, 0, 0, 0]
    batch = Pixels(*(each[None] for each in judged))
    assert torch.equal(normalize(batch)[0], ImageTransform(16, ALL)(image))


def test_a_quarter_of_the_bytes_is_copied(folder: Path) -> None:
    """The batch has images of 32 x 32. The labels and the place of the erased part are copied in addition."""
    copied = []
    for normalize in (True, False):
        data = ImageFolder(folder, ImageTransform(32, normalize=normalize))
        loader = Loader(data, len(data), how="here", device="meta")
        next(iter(loader))
        copied.append(loader.copied_bytes - 8 * len(data))
    assert copied[0] == len(data) * 3 * 32 * 32 * 4
    assert copied[1] == len(data) * (3 * 32 * 32 + 8)
    assert copied[0] / copied[1] == pytest.approx(4, rel=0.01)
    loader = Loader(data, 2, how="here")
    next(iter(loader))
    assert loader.copied_bytes == 0  # nothing is copied to a CPU


@pytest.mark.gpu
def test_on_a_gpu_images_are_normalized_without_waiting(folder: Path) -> None:
    data = ImageFolder(folder, ImageTransform(16, ALL, train=True, normalize=False))
    pixels = next(iter(Loader(data, 4, how="here"))).value[0]
    normalize = Normalizer()
    there = Pixels(*(each.cuda() for each in pixels))
    normalize(there)
    with no_waiting_for_gpu():
        found = normalize(there)
    assert torch.equal(found.cpu(), normalize(pixels))


@pytest.mark.parametrize("orientation", [1, 6])
def test_jpegs_are_decoded_no_larger_than_needed(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = saved(photograph(640, 480), exif=exif)
    whole = pillow_image(content)
    for factor, expected in ((1.0, 1), (1.9, 1), (2.0, 2), (3.9, 2), (9.0, 8)):
        sizes: list[tuple[int, int]] = []
        small = pillow_image(content, lambda *size, f=factor, s=sizes: (s.append(size), f)[1])  # type: ignore[misc]
        assert sizes == [whole.size]
        assert small.size == (whole.width // expected, whole.height // expected)
        again = whole.resize(small.size, Image.Resampling.BOX)
        assert np.abs(np.array(again, dtype=int) - np.array(small)).mean() < 3
    assert pillow_image(saved(photograph(64, 48), format="PNG"), lambda width, height: 8.0).size == (64, 48)


def test_a_crop_of_a_smaller_decoding_shows_the_same_part() -> None:
    content = saved(photograph(640, 480))
    transform = ImageTransform(48, {"crop": 0.1, "flip": 0.5}, train=True)
    smaller = 0
    for seed in range(8):
        image, drawn = transform.decode(content, np.random.default_rng(seed), None)
        expected = transform(pillow_image(content), np.random.default_rng(seed))
        assert (transform.apply(image, drawn) - expected).abs().mean() < 0.06
        assert drawn.crop is not None
        assert (drawn.crop[2] - drawn.crop[0]) * image.width >= 47
        smaller += image.width < 640
    assert smaller >= 4


def test_with_less_detail_more_jpegs_are_decoded_small() -> None:
    content = saved(photograph(400, 300))
    drawn = {}
    for detail in (1.0, 0.5):
        transform = ImageTransform(128, {"crop": 0.5, "detail": detail}, train=True)
        images = [transform.decode(content, np.random.default_rng(seed), None) for seed in range(8)]
        drawn[detail] = [changes for _, changes in images]
        for image, changes in images:
            assert changes.crop is not None
            side = min((changes.crop[2] - changes.crop[0]) * 400, (changes.crop[3] - changes.crop[1]) * 300)
            width = image.width if isinstance(image, Image.Image) else image.shape[1]
            assert width == 400 // max(factor for factor in (1, 2, 4) if factor <= max(1, side / 128 / detail))
        whole = ImageTransform(128, {"crop": 0.5}, train=True)
        for seed, (image, changes) in enumerate(images):
            expected = whole(pillow_image(content), np.random.default_rng(seed))
            assert (transform.apply(image, changes) - expected).abs().mean() < 0.06
    assert drawn[1.0] == drawn[0.5]


def test_folders_are_classes(folder: Path) -> None:
    data = ImageFolder(folder)
    assert data.classes == ["cat", "dog", "emu"]
    assert [Path(each).name for each in data.paths] == ["0.png", "1.png", "3.JPG"] * 3
    assert data.labels == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    image, label = data[4]
    assert label == 1
    assert torch.equal(image, torch.from_numpy(np.array(Image.open(data.name(4)))).permute(2, 0, 1))
    sizes = ImageFolder(folder, lambda image, generator: image.size)
    assert [sizes[index][0] for index in (0, 2, 3)] == [(40, 30), (30, 44), (43, 30)]


def test_steps_of_a_sample_make_the_sample(folder: Path) -> None:
    data = ImageFolder(folder, ImageTransform(16, ALL, train=True))
    for index in range(len(data)):
        one, other = np.random.default_rng(index), np.random.default_rng(index)
        decoded = data.decoded(index, data.content(index), one)
        expected, label = data.draw(index, other)
        assert torch.equal(data.changed(index, decoded, one)[0], expected)
        assert label == data.labels[index]


def test_training_images_are_the_same_by_threads(folder: Path) -> None:
    data = ImageFolder(folder, ImageTransform(16, Augment(crop=0.3, flip=0.5, rand_augment=2, erase=0.5), train=True))
    here, threads = (
        [(batch.value[0], batch.value[1]) for batch in Loader(data, 4, shuffle=True, how=how, workers=2).batches(1)]
        for how in ("here", "threads")
    )
    assert here[0][0].shape == (4, 3, 16, 16)
    assert here[0][0].dtype == torch.float32
    for one, other in zip(here, threads, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_a_damaged_photograph_is_named(folder: Path) -> None:
    path = folder / "dog" / "1.png"
    path.write_bytes(path.read_bytes()[:200])
    data = ImageFolder(folder, ImageTransform(16))
    with pytest.raises(InputError, match=r"sample 4: .*dog/1\.png cannot be read"):
        list(Loader(data, 4, how="here"))
    loader = Loader(data, 4, how="here", on_damage="skip")
    assert sum(len(batch.indices) for batch in loader) == 8
    assert [(each.sample, each.name) for each in loader.skipped] == [(4, str(path))]


def test_folders_without_photographs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not a folder"):
        ImageFolder(tmp_path / "none")
    with pytest.raises(InputError, match="one folder of photographs for each class"):
        ImageFolder(tmp_path)
    (tmp_path / "cat").mkdir()
    with pytest.raises(InputError, match=r"cat holds no photographs .*: add photographs of this class, or remove the"):
        ImageFolder(tmp_path)
    Image.new("RGB", (4, 4)).save(tmp_path / "cat" / "1.png")
    for name in ("2.gif", "notes.txt"):
        (tmp_path / "cat" / name).touch()
    with pytest.warns(UserWarning, match=r"holds 1 unused image, the first one is .*2\.gif: expected"):
        assert len(ImageFolder(tmp_path)) == 1


@pytest.mark.parametrize(
    ("augment", "said"),
    [
        ({"crop": 0.0}, "crop above 0"),
        ({"detail": 0.0}, "expected detail above 0, up to 1"),
        ({"flip": 1.5}, "from 0 to 1"),
        ({"magnitude": 11}, "magnitude from 0 to 10"),
        ({"flipp": 0.5}, "did you mean flip"),
    ],
)
def test_wrong_arguments(augment: dict[str, float], said: str) -> None:
    with pytest.raises(InputError, match=said):
        ImageTransform(16, augment, train=True)
    with pytest.raises(InputError, match="size is 0"):
        ImageTransform(0)
    for pixels in (torch.zeros(1, 4, 4), torch.zeros(3, 0, 4, dtype=torch.uint8)):
        with pytest.raises(InputError, match=r"expected \(3, H, W\), torch.uint8"):
            ImageTransform(16)(pixels)


def test_a_link_to_a_folder_around_it_is_left_out(folder: Path) -> None:
    count = len(ImageFolder(folder))
    photograph(9, 9).save(folder / ".hidden" / "1.png")
    for name, target in (("loop", folder / "cat"), ("around", folder), ("other", folder / ".hidden")):
        (folder / "cat" / name).symlink_to(target)
    assert len(ImageFolder(folder)) == count + 1


def test_colours_have_three_values() -> None:
    with pytest.raises(InputError, match=r"expected a batch, \(N, H, W, 3\); for one image, use image\(\)"):
        Normalizer()(ImageTransform(8, normalize=False)(photograph(9, 9)))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r'has mode "L": expected RGB, so call image\.convert\("RGB"\) first'):
        ImageTransform(16)(Image.new("L", (20, 20)))
    image = photograph(20, 20)
    with_alpha, without = (ImageTransform(16)(each) for each in (image.convert("RGBA"), image))
    assert torch.equal(with_alpha, without)  # type: ignore[arg-type]
    assert ImageTransform(16, mean=map(float, (0, 0, 0))).mean == (0.0, 0.0, 0.0)  # type: ignore[arg-type]
    for constants in ({"mean": (0.5,)}, {"std": (0.2, 0.2)}, {"std": (0.2, 0.0, 0.2)}):
        for make in (partial(ImageTransform, 16), Normalizer):
            with pytest.raises(InputError, match="expected three numbers each, and std above 0"):
                make(**constants)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_the_square_of_a_very_long_photograph_is_made_without_the_rest(
    train: bool, turned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    sides: list[int] = []
    resize = Image.Image.resize

    def watched(image: Image.Image, size: tuple[int, int], *args: Any, **kwargs: Any) -> Image.Image:
        sides.extend(size)
        return resize(image, size, *args, **kwargs)

    transform = ImageTransform(32, {"crop": 0.9} if train else None, train=train, normalize=False)
    long = photograph(1, 4000) if turned else photograph(4000, 1)
    monkeypatch.setattr(Image.Image, "resize", watched)
    pixels = transform(long, np.random.default_rng(0) if train else None)
    assert isinstance(pixels, Pixels)
    assert pixels.values.shape == (32, 32, 3)
    assert max(sides, default=0) <= 32


@pytest.mark.parametrize("margin", [0.0, 0.2])
def test_the_square_is_that_of_the_whole_photograph(margin: float, monkeypatch: pytest.MonkeyPatch) -> None:
    transform = ImageTransform(32, {"crop": 1 - margin}, normalize=False)
    image = photograph(600, 90)
    whole = transform(image).values.int()
    monkeypatch.setattr(image_transforms, "LONGEST", 1)
    part = transform(image).values.int()
    assert (part - whole).abs().max() <= 4
    assert (part - transform(photograph(600, 90, seed=1)).values.int()).abs().max() > 40


@pytest.mark.parametrize(
    "name", [each for each in image_transforms._Augment.__dataclass_fields__ if each != "rand_augment_on"]
)
@pytest.mark.parametrize("value", ["0.5", None, True, [1], 1j])
def test_a_setting_that_is_no_number_is_named(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"augment\.{name} is .*: expected a"):
        ImageTransform(8, {name: value}, train=True)


def test_sizes_and_operations_are_integers() -> None:
    for value in (1.5, float("nan")):
        with pytest.raises(InputError, match=r"rand_augment is .*: expected an integer"):
            ImageTransform(8, {"rand_augment": value})
    for size in (1.5, "8", None, True, 0):
        with pytest.raises(InputError, match=r"size is .*: expected an integer of 1 or more"):
            ImageTransform(size)  # type: ignore[arg-type]
    assert ImageTransform(np.int64(8), {"detail": np.float32(0.5), "rand_augment": np.int32(1)}).size == 8
