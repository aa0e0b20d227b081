"""Copies under a mask by one kernel agree with NumPy and touch nothing else, on a GPU and in the interpreter."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop import mat
from rooftop.launch import INTERPRETED
from rooftop.launch.triton_launch import count_launches
from rooftop.mat import Mat
from rooftop.mat.masked_copies import copy_by_kernel

triton = pytest.importorskip("triton")
launches = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_kernels_on_the_cpu(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) == 5


def bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits."""
    drawn = rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8)
    return torch.from_numpy(drawn).view(dtype)[..., 0].to(DEVICE)


@launches
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    dtype=st.sampled_from([torch.uint8, torch.int16, torch.int32, torch.int64]),
    channels=st.sampled_from([1, 2, 3, 4, 5, 8]),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 70)) | st.tuples(*[st.integers(1, 4)] * 4) | st.just((3, 900)),
    by_number=st.booleans(),
    value=st.booleans(),
    before=st.tuples(*[st.integers(0, 9)] * 3),
    share=st.sampled_from([0.0, 0.5, 0.97, 1.0]),
    seed=st.integers(0, 99),
)
def test_masked_copies_are_what_numpy_says(
    dtype: torch.dtype,
    channels: int,
    sizes: tuple[int, ...],
    by_number: bool,
    value: bool,
    before: tuple[int, int, int],
    share: float,
    seed: int,
) -> None:
    """Regions that begin anywhere, each in an image of a different size."""
    rng = np.random.default_rng(seed)

    def region(whole: Tensor, before: int) -> Tensor:
        return whole[tuple(slice(min(before, 2), min(before, 2) + n) for n in sizes[:-1])][
            ..., before : before + sizes[-1], :
        ]

    def room(before: int, numbers: int) -> tuple[int, ...]:
        return (*(n + 2 * min(before, 2) for n in sizes[:-1]), sizes[-1] + 2 * before, numbers)

    whole = bits(rng, room(before[0], channels), dtype)
    source = region(bits(rng, room(before[1], channels), dtype), before[1])
    marks = channels if by_number else 1
    chosen = rng.random(room(before[2], marks)) < share
    mask = region(
        torch.from_numpy((chosen * rng.integers(1, 256, chosen.shape)).astype(np.uint8)).to(DEVICE), before[2]
    )
    given_source = source[(0,) * len(sizes)] if value else source
    expected = whole.clone()
    region(expected, before[0]).copy_(torch.where(mask != 0, given_source, region(expected, before[0])))
    given_source = given_source.cpu() if value else given_source
    with count_launches() as counted:
        copy_by_kernel(given_source, region(whole, before[0]), mask)
    assert set(counted) == {"masked_copy"}
    assert torch.equal(whole, expected)


@launches
@pytest.mark.parametrize("channels", [1, 3])
def test_one_launch_for_images_and_their_regions(channels: int) -> None:
    rng = np.random.default_rng(0)
    whole, other = (Mat(bits(rng, (40, 50, channels), torch.uint8)) for _ in range(2))
    mask = Mat(bits(rng, (40, 50, 1), torch.uint8) // 128)
    for part in (slice(None), slice(3, 33)):
        into, some, chosen = whole[part, part], other[part, part], mask[part, part]
        expected = torch.where(chosen.tensor() != 0, some.tensor(), into.tensor())
        numbers = tuple(range(7, 7 + channels))
        with count_launches() as counted:
            some.copyTo(into, chosen)
        assert counted == {"masked_copy": 1}
        assert torch.equal(into.tensor(), expected)
        expected = torch.where(chosen.tensor() != 0, torch.tensor(numbers, device=DEVICE), expected).to(torch.uint8)
        into.setTo(numbers, chosen)
        assert torch.equal(into.tensor(), expected)


@launches
def test_nan_keeps_its_bits() -> None:
    one = torch.tensor([0x7FC12345, -0x3FEDCC, 0x7F800001], dtype=torch.int32, device=DEVICE).view(torch.float32)
    target = Mat.zeros(1, 3, mat.CV_32FC1, device=DEVICE)
    Mat(one.reshape(1, 3)).copyTo(target, Mat(torch.tensor([[1, 0, 255]], dtype=torch.uint8, device=DEVICE)))
    assert target.tensor().view(torch.int32).flatten().tolist() == [0x7FC12345, 0, 0x7F800001]


@launches
def test_diagonals_and_nothing() -> None:
    m = Mat.zeros(6, 6, mat.CV_16SC2, device=DEVICE)
    mask = Mat.ones(6, 6, mat.CV_8U, device=DEVICE)
    mask[2, 2] = 0
    m.diag().setTo((3, 4), mask.diag())
    expected = torch.zeros(6, 6, 2, dtype=torch.int16)
    expected[[0, 1, 3, 4, 5], [0, 1, 3, 4, 5]] = torch.tensor([3, 4], dtype=torch.int16)
    assert torch.equal(m.tensor().cpu(), expected)
    with count_launches() as counted:
        m[2:2].setTo(1, mask[2:2])
    assert not counted
