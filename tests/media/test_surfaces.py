"""The kernel that converts a decoder's planes to tensors agrees with plain PyTorch for the same frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.launch.triton_launch import INTERPRETED, count_launches
from rooftop.media.colours import WEIGHTS, Colours, yuv_to_rgb
from rooftop.media.forms import Form, form_of
from rooftop.media.surfaces import Surface, all_to_rgb

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
few = settings(max_examples=12, deadline=None)


def to_rgb(surface: Surface, form: Form, turns: int = 0, mirrored: bool = False) -> Tensor:
    return all_to_rgb([surface], form, turns, mirrored)[0]


def planes_of(height: int, width: int, down: int, across: int, bits: int, seed: int) -> list[Tensor]:
    """Luma, Cb and Cr of random numbers, int32."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(height, width)] + 2 * [(-(-height // down), -(-width // across))]
    return [torch.randint(1 << bits, size, generator=generator, dtype=torch.int32) for size in sizes]


def surface(planes: list[Tensor], bits: int, paired: bool, colours: Colours, device: str) -> Surface:
    """Planes as a decoder stores them: padded rows, 10 and 12 bits in the upper bits of 16, and chroma possibly in
    pairs."""
    dtype = torch.uint8 if bits == 8 else torch.uint16
    y, u, v = ((each << (0 if bits == 8 else 16 - bits)).to(dtype) for each in planes)
    rows = torch.zeros(y.shape[0], y.shape[1] + 13, dtype=torch.int32).to(dtype)
    rows[:, : y.shape[1]] = y
    y = rows.to(device)[:, : y.shape[1]]
    if paired:
        pairs = torch.stack((u, v), -1).flatten(1).to(device)
        u, v = pairs[:, 0::2], pairs[:, 1::2]
    else:
        u, v = u.to(device), v.to(device)
    return Surface(y, u, v, bits, colours)


@pytest.mark.parametrize("device", DEVICES)
@few
@given(
    size=st.tuples(st.integers(1, 37), st.integers(1, 70)),
    sampling=st.sampled_from([(2, 2, True), (1, 1, False), (2, 2, False), (1, 2, True)]),
    bits=st.sampled_from([8, 10, 12]),
    matrix=st.sampled_from(sorted(WEIGHTS)),
    full=st.booleans(),
    dtype=st.sampled_from([torch.uint8, torch.float32, torch.float16]),
    seed=st.integers(0, 99),
)
def test_colours_are_those_of_the_formula(
    device: str,
    size: tuple[int, int],
    sampling: tuple[int, int, bool],
    bits: int,
    matrix: str,
    full: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    down, across, paired = sampling
    planes, colours = planes_of(*size, down, across, bits, seed), Colours(matrix, full)
    with count_launches() as launches:
        found = to_rgb(surface(planes, bits, paired, colours, device), form_of("rgb", dtype, None, None)).cpu()
    assert launches == {"frame_to_rgb": 1}
    expected = yuv_to_rgb(*planes, colours, bits, dtype)
    assert found.shape == expected.shape
    assert found.dtype == dtype
    levels = 1 if dtype == torch.uint8 else 255  # a tie may be rounded the other way
    assert (found.double() - expected.double()).abs().max() * levels <= (1 if dtype == torch.uint8 else 0.13)
    assert dtype != torch.uint8 or (found != expected).float().mean() < 0.01


def resized(planes: list[Tensor], colours: Colours, size: tuple[int, int], turns: int, mirrored: bool) -> Tensor:
    """The resized picture in float64, computed step by step: (3, h, w) in 0..1."""
    rgb = torch.rot90(yuv_to_rgb(*planes, colours, 8, torch.float64), turns, (1, 2))
    rgb = rgb.flip(2) if mirrored else rgb
    return F.interpolate(rgb[None], size, mode="bilinear", antialias=True)[0]


@pytest.mark.parametrize("device", DEVICES)
@few
@given(
    size=st.tuples(st.integers(2, 24), st.integers(2, 32)),  # PyTorch is wrong about columns of one pixel
    to=st.tuples(st.integers(6, 24), st.integers(6, 32)),
    turns=st.integers(0, 3),
    mirrored=st.booleans(),
    seed=st.integers(0, 99),
)
def test_resized_turned_and_normalized_in_one_launch(
    device: str, size: tuple[int, int], to: tuple[int, int], turns: int, mirrored: bool, seed: int
) -> None:
    planes, colours = planes_of(*size, 2, 2, 8, seed), Colours("bt709", False)
    given_surface = surface(planes, 8, True, colours, device)
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    with count_launches() as launches:
        whole = to_rgb(given_surface, form_of("rgb", torch.uint8, to, None), turns, mirrored).cpu()
        normal = to_rgb(given_surface, form_of("rgb", torch.float32, to, (mean, std)), turns, mirrored).cpu()
    assert sum(launches.values()) == 2
    expected = resized(planes, colours, to, turns, mirrored)
    assert (whole.double() - 255 * expected).abs().max() <= 0.501
    scaled = (expected - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(normal.double(), scaled, rtol=0, atol=2e-5)


@pytest.mark.parametrize("device", DEVICES)
@settings(max_examples=6, deadline=None)
@given(
    counts=st.sampled_from([[0], [1, 8], [9], [7, 1]]),
    to=st.sampled_from([None, (5, 8)]),
    turns=st.integers(0, 3),
)
def test_many_are_each_as_it_is_alone(device: str, counts: list[int], to: tuple[int, int] | None, turns: int) -> None:
    """Frames may have any sizes; eight of the same size need one launch."""
    form, given_surfaces, launched = form_of("rgb", torch.uint8, to, None), [], 0
    for number, count in enumerate(counts):
        size = (6 + 2 * number, 8)
        given_surfaces += [
            surface(planes_of(*size, 2, 2, 8, seed), 8, True, Colours("bt709", False), device) for seed in range(count)
        ]
        launched += -(-count // 8)
    alone = [to_rgb(each, form, turns) for each in given_surfaces]
    with count_launches() as launches:
        together = all_to_rgb(given_surfaces, form, turns)
    assert sum(launches.values()) == launched
    assert len(together) == len(alone)
    assert all(map(torch.equal, together, alone))
    if alone:
        for wrong in (alone[1:], [each.float() for each in alone], [each.transpose(1, 2) for each in alone]):
            with pytest.raises(ValueError, match=r"contiguous tensors of torch\.uint8, one for each"):
                all_to_rgb(given_surfaces, form, turns, into=wrong)
    places = [torch.zeros_like(each) for each in alone]
    all_to_rgb(given_surfaces, form, turns, into=places)
    assert all(map(torch.equal, places, alone))


@pytest.mark.parametrize("device", DEVICES)
def test_a_frame_of_one_colour_stays_it_at_any_size(device: str) -> None:
    planes = [torch.full((36, 48), 100), torch.full((18, 24), 90), torch.full((18, 24), 160)]
    given_surface = surface(planes, 8, True, Colours("bt601", False), device)
    one = to_rgb(given_surface, form_of("rgb", torch.float32, None, None)).cpu()[:, :1, :1]
    for size in ((7, 5), (36, 49), (50, 60)):
        found = to_rgb(given_surface, form_of("rgb", torch.float32, size, None)).cpu()
        torch.testing.assert_close(found, one.expand_as(found), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("given_form", "said"),
    [
        ({"output": "bgr"}, 'expected "rgb" or "nv12"'),
        ({"dtype": torch.int32}, r"expected one of torch\.uint8"),
        ({"resize": (0, 5)}, r"expected \(height, width\)"),
        ({"resize": 224}, r"expected \(height, width\)"),
        ({"normalize": ((0, 0, 0), (1, 1, 1))}, "needs a floating dtype"),
        ({"dtype": torch.float32, "normalize": ((0, 0, 0), (1, 0, 1))}, "std above 0"),
        ({"dtype": torch.float32, "normalize": (0.5, 0.5)}, "three numbers each"),
        ({"output": "nv12", "resize": (4, 4)}, "leave out resize"),
        ({"output": "nv12", "dtype": torch.float32}, "leave out resize"),
    ],
)
def test_what_frames_cannot_be_is_refused(given_form: dict[str, Any], said: str) -> None:
    asked: dict[str, Any] = {"output": "rgb", "dtype": torch.uint8, "resize": None, "normalize": None}
    with pytest.raises(ValueError, match=said):
        form_of(**{**asked, **given_form})


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 10
