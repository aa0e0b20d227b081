"""The kernels that resize photographs on a device give Pillow's pixels, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from rooftop.errors import InputError
from rooftop.launch.triton_launch import INTERPRETED, count_launches
from rooftop.media.pillow_resize import FILTERS, Resize, resized_on_device

by_the_interpreter = pytest.mark.skipif(not INTERPRETED, reason="by the interpreter")
BICUBIC = Image.Resampling.BICUBIC


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_by_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) >= 5


def photograph(width: int, height: int, seed: int = 0) -> Tensor:
    """Noise of full contrast, (height, width, 3) uint8: cubic weights then go below 0 and above 255."""
    random = np.random.default_rng(seed)
    return torch.from_numpy(np.where(random.random((height, width, 3)) < 0.5, 0, 255).astype(np.uint8))


def compared(photographs: Sequence[Tensor], changes: Sequence[Resize], device: str = "cpu") -> None:
    ends = np.cumsum([each.numel() for each in photographs]).tolist()
    places = [(end - each.numel(), *each.shape[:2]) for end, each in zip(ends, photographs, strict=True)]
    pixels = torch.cat([each.reshape(-1) for each in photographs]).to(device)
    with count_launches() as launches:
        found = resized_on_device(pixels, places, changes)
    assert launches == {"resize_across": 1, "resize_down": 1}
    expected = [
        np.asarray(change.by_pillow(Image.fromarray(each.numpy())))
        for each, change in zip(photographs, changes, strict=True)
    ]
    assert len(found) == (1 if len({each.shape for each in expected}) == 1 else len(photographs))
    for got, wanted in zip([each for batch in found for each in batch], expected, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), wanted)


@by_the_interpreter
@settings(max_examples=60)
@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    to=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    filter=st.sampled_from(list(FILTERS)),
    box=st.none() | st.tuples(st.integers(-5, 30), st.integers(-5, 30), st.integers(1, 20), st.integers(1, 20)),
)
def test_any_size_and_box_gives_pillows_pixels(
    size: tuple[int, int],
    to: tuple[int, int],
    filter: Image.Resampling,
    box: tuple[int, int, int, int] | None,
) -> None:
    if box is not None:
        left, top, width, height = box
        box = left, top, left + width, top + height
    assume(Resize(to).runs_on_device(*size))
    compared([photograph(*size)], [Resize(to, box, filter)])


@by_the_interpreter
def test_a_batch_of_several_sizes_and_changes() -> None:
    photographs = [photograph(*size, seed) for seed, size in enumerate([(50, 30), (3, 70), (50, 30), (1, 1)])]
    changes = [Resize((20, 25)), Resize((9, 200), (0, 90, 9, 99), BICUBIC), Resize((50, 30)), Resize((5, 4))]
    compared(photographs, changes)


@by_the_interpreter
def test_a_batch_of_one_size() -> None:
    compared([photograph(31, 17, seed) for seed in range(3)], [Resize((24, 12), (2, 1, 20, 11))] * 3)


@by_the_interpreter
def test_a_large_reduction_has_many_weights() -> None:
    compared([photograph(900, 4)], [Resize((7, 3))])


@by_the_interpreter
def test_a_box_outside_the_photograph_is_black() -> None:
    compared([photograph(8, 8)], [Resize((8, 8), (20, 20, 24, 23))])


def test_what_cannot_be_resized_is_refused() -> None:
    pixels = torch.zeros(30, dtype=torch.uint8)
    for given_, places, changes, message in (
        (pixels.float(), [(0, 1, 1)], [Resize((1, 1))], "expected .bytes,. uint8"),
        (pixels[::2], [(0, 1, 1)], [Resize((1, 1))], "contiguous"),
        (pixels, [], [], "and 1 to 65535 photographs"),
        (pixels, [(0, 1, 1)], [], "one change for each"),
        (pixels, [(0, 3, 4)], [Resize((1, 1))], "inside the 30 bytes"),
        (pixels, [(-1, 1, 1)], [Resize((1, 1))], "starts at byte -1"),
        (pixels, [(0, 0, 4)], [Resize((1, 1))], "4 x 0 pixels: expected sizes"),
        (pixels, [(0, 1, 1)], [Resize((0, 1))], "at least 1 x 1 pixel"),
        (pixels, [(0, 1, 1)], [Resize((4, 4), (2, 2, 2, 3))], "at least 1 x 1 pixel"),
        (pixels, [(0, 1, 1)], [Resize((4, 4), None, Image.Resampling.LANCZOS)], "BILINEAR or BICUBIC"),
        (pixels, [(0, 5, 2)], [Resize((2, 1))], "rows first"),
        (pixels, [(0, 1, 1)], [Resize((40_000, 40_000))], "2..31 values in each of .* use Resize.by_pillow"),
        (pixels, [(0, 1, 1)], [Resize((1, 70_000))], "at most 65535 rows"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=message):
            resized_on_device(given_, places, changes)


@pytest.mark.gpu
def test_photographs_on_a_gpu() -> None:
    sizes = [(500, 375), (640, 480), (480, 640), (3000, 10), (1, 1), (2, 30)]
    photographs = [photograph(*size, seed) for seed, size in enumerate(sizes)]
    for changes in (
        [Resize((1066, 800))] * len(sizes),
        [Resize((300 + each, 400), (58, 16, 282, 240), BICUBIC) for each in range(len(sizes))],
        [Resize((30, 40 + each)) for each in range(len(sizes))],
    ):
        compared(photographs, changes, "cuda")
