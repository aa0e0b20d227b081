"""RandAugment's kernels give Pillow's pixels, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rooftop.data import ImageTransform, Normalizer
from rooftop.data import rand_augment as operations_module
from rooftop.data.device_augment import _by_pillow, augmented, encoded
from rooftop.data.pixels import Pixels
from rooftop.data.rand_augment import NAMES, Operation, draw_operations
from rooftop.errors import InputError
from rooftop.launch.triton_launch import INTERPRETED, count_launches

STRENGTHS = (-1.0, -0.9, -0.37, 0.0, 0.15, 0.625, 0.9, 1.0)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_by_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) >= 15


def images(size: int, device: str = "cpu") -> Tensor:
    """Noise, smooth images with few levels, one colour, two colours, and black."""
    generator = torch.Generator().manual_seed(size)
    noise = torch.randint(256, (2, size, size, 3), generator=generator)
    ramp = (torch.arange(size)[:, None, None] * 3 + torch.arange(size)[None, :, None] * torch.tensor([1, 2, 0])) % 256
    smooth = torch.stack([ramp // 2 + 60, 255 - ramp])
    plain = torch.full((1, size, size, 3), 77)
    two = torch.where(noise[:1] > 128, 200, 30)
    return torch.cat([noise, smooth, plain, two, torch.zeros_like(plain)]).byte().to(device)


def compared(given: Tensor, drawn: list[tuple[Operation, ...]]) -> None:
    operations = torch.stack([encoded(each, given.shape[1]) for each in drawn])
    with count_launches() as launches:
        found = augmented(given, operations.to(given.device))
    assert dict(launches) == {"write_tables": len(drawn[0]), "apply_operation": len(drawn[0])}
    expected = torch.stack([_by_pillow(*each) for each in zip(given.cpu(), operations, strict=True)])
    assert torch.equal(found.cpu(), expected)


@pytest.mark.skipif(not INTERPRETED, reason="by the interpreter")
@pytest.mark.parametrize("name", NAMES)
def test_each_operation(name: str) -> None:
    """Each kind of image has every strength, in turn. Two blocks of threads share an image."""
    given = images(33)
    for first in range(0, len(STRENGTHS), 2):
        strengths = [STRENGTHS[(first + number) % len(STRENGTHS)] for number in range(len(given))]
        compared(given, [(Operation(name, strength),) for strength in strengths])


@pytest.mark.skipif(not INTERPRETED, reason="by the interpreter")
def test_different_operations_one_after_another() -> None:
    generator = np.random.default_rng(0)
    given = images(19)
    for magnitude in (0.0, 9.0):
        compared(given, [draw_operations(3, magnitude, generator) for _ in given])


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_each_operation_on_a_gpu(name: str) -> None:
    for size in (1, 2, 23, 224):
        given = images(size, "cuda")
        for strength in STRENGTHS:
            compared(given, [(Operation(name, strength),)] * len(given))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_small_images_and_none(size: int) -> None:
    given = images(size)
    operations = encoded([Operation("sharpness", 0.9), Operation("rotate", -0.9)], size).expand(len(given), -1, -1)
    assert augmented(given, operations).shape == given.shape
    assert augmented(given[:0], operations[:0]).shape == (0, size, size, 3)
    assert augmented(given, operations[:, :0]) is given


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, o: (x.float(), o), r"images must be \(N, H, W, 3\) uint8, got .*float32"),
        (lambda x, o: (x[0], o), "images must be"),
        (lambda x, o: (x, o[:2]), r"operations must be \(7, count, 9\), got \(2, 1, 9\)"),
        (lambda x, o: (x, o[0]), "operations must be"),
        (lambda x, o: (x, o.float()), "operations must be float64 on cpu, got torch.float32"),
    ],
)
def test_wrong_arguments(change: Callable[..., tuple[Tensor, Tensor]], words: str) -> None:
    given = images(4)
    operations = torch.stack([encoded([Operation("equalize", 0.5)], 4)] * len(given))
    with pytest.raises(ValueError, match=words):
        augmented(*change(given, operations))


def test_rotations_and_shifts_are_those_of_pillow() -> None:
    image = Image.fromarray(images(40)[0].numpy())
    for strength in (-0.9, 0.31, 1.0):
        turned = operations_module.apply_operations(image, [Operation("rotate", strength)])
        expected = image.rotate(operations_module.MOST_DEGREES * strength, fillcolor=operations_module.FILL)
        different = (np.asarray(turned) != np.asarray(expected)).any(2).mean()
        assert different < 0.01  # Pillow rounds its matrix to 15 digits


AUGMENTS = ({"crop": 0.3, "rand_augment": 2}, {"shift": 0.2, "jitter": 0.3, "rand_augment": 1})


@pytest.mark.parametrize("augment", AUGMENTS)
def test_a_transform_that_leaves_operations_gives_the_same_images(augment: dict[str, float]) -> None:
    now = ImageTransform(20, {**augment, "erase": 0.5}, train=True, normalize=False)
    later = ImageTransform(20, {**augment, "erase": 0.5, "rand_augment_on": "gpu"}, train=True, normalize=False)
    normalize = Normalizer()
    for seed in range(12):
        image = Image.fromarray(np.random.default_rng(seed).integers(0, 256, (30, 44, 3), dtype=np.uint8))
        one, other = (each(image, np.random.default_rng(seed)) for each in (now, later))
        assert isinstance(one, Pixels)
        assert isinstance(other, Pixels)
        assert other.operations.shape == (augment["rand_augment"], 9)
        found = [normalize(Pixels(*(part[None] for part in each))) for each in (one, other)]
        assert torch.equal(*found)
    judged = ImageTransform(20, {**augment, "rand_augment_on": "gpu"}, normalize=False)(image)
    assert isinstance(judged, Pixels)
    assert judged.operations.shape == (0, 9), "images for validation have no operations"


def test_a_transform_that_normalizes_leaves_nothing() -> None:
    with pytest.raises(InputError, match="pass normalize=False"):
        ImageTransform(20, {"rand_augment": 2, "rand_augment_on": "gpu"}, train=True)
    with pytest.raises(InputError, match="rand_augment_on is 'tpu': expected 'cpu' or 'gpu'"):
        ImageTransform(20, {"rand_augment_on": "tpu"}, train=True, normalize=False)


def test_operations_need_a_batch_of_squares() -> None:
    operations = encoded([Operation("shift_x", 0.9)], 4)
    with pytest.raises(ValueError, match="operations must be"):
        Normalizer()(Pixels(images(4)[:1], torch.zeros(1, 4, dtype=torch.int16), operations))
    with pytest.raises(ValueError, match="operations are encoded for square images"):
        augmented(images(4)[:1, :3], operations[None])


@pytest.mark.skipif(not INTERPRETED, reason="by the interpreter")
def test_strides_of_operations() -> None:
    given = images(9)
    operations = torch.stack([encoded([Operation("rotate", 0.9), Operation("color", -0.5)], 9)] * len(given))
    apart = operations.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(augmented(given, apart), augmented(given, operations))
