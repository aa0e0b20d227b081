"""Conversions as one kernel have the same bits as step-by-step operations of torch, on a GPU and in the interpreter."""

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
from rooftop.mat.conversions import WITHOUT_PROGRAMS, convert_blocks, scaling_of
from rooftop.mat.converting import convert
from rooftop.mat.type_codes import DEPTHS, CV_Bool

pytest.importorskip("triton")
launches = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"
CONVERTED = [number for number in range(len(DEPTHS)) if number not in WITHOUT_PROGRAMS]
# Numbers of 24 bits and of 53, and numbers outside the range of float32.
SCALES = [(1 / 255, 0.0), (1.0, 0.5), (255.0, 0.0), (1.5, 3.0), (-0.37, 1e5), (1.0 + 2.0**-40, -0.0), (1e300, 1e39)]
PAIRS = [(depth, new) for depth in CONVERTED for new in CONVERTED if depth != new]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_kernels_on_the_cpu(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) == len(PAIRS) + 3


def edges(depth: int) -> Tensor:
    """Numbers of a depth: its limits and those of other depths, halves, zeros of both signs, NaN and infinities."""
    one = DEPTHS[depth]
    if depth == CV_Bool:
        return torch.tensor([True, False])
    powers = [sign * 2.0**n + more for n in range(34) for sign in (1, -1) for more in (-1, -0.5, 0, 0.5, 1, 1.5)]
    if one.limits is None:
        special = [1e10, -1e10, 1e-40, -1e-40, 0.0, -0.0, -0.25, float("inf"), -float("inf"), float("nan")]
        return torch.tensor([*powers, *special], dtype=torch.float64).to(one.dtype)
    low, high = one.limits
    return torch.tensor([min(max(int(x), low), high) for x in powers], dtype=torch.int64).to(one.dtype)


def assert_same_bits(found: Tensor, expected: Tensor, depth: int) -> None:
    """The same bits, except that any NaN equals any other."""
    nan = expected.isnan() if expected.is_floating_point() else torch.zeros_like(expected, dtype=torch.bool)
    carrier = DEPTHS[depth].carrier
    assert torch.equal(found.view(carrier)[~nan], expected.view(carrier)[~nan])
    assert not nan.any() or bool(found[nan].isnan().all())


def assert_as_by_blocks(source: Tensor, target: Tensor, depth: int, new: int, alpha: float, beta: float) -> None:
    """One kernel writes the same values into the target as operations of torch write into a copy."""
    expected = torch.empty_like(target, memory_format=torch.contiguous_format)
    plain = abs(alpha - 1) < 2.0**-52 and abs(beta) < 2.0**-52
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy
        if INTERPRETED:  # the interpreter's numbers have no -0.0
            alpha, beta = (0.0 if float(np.float32(number)) == 0 else number for number in (alpha, beta))
        convert_blocks(source, expected, depth, new, None if plain else scaling_of(depth, new, alpha, beta))
        with count_launches() as counted:
            convert(source, target, depth, new, alpha, beta)
    assert sum(counted.values()) == 1, counted
    assert_same_bits(target, expected, new)


@launches
@pytest.mark.parametrize(("depth", "new"), PAIRS, ids=lambda n: DEPTHS[n].name)
def test_conversions_are_those_of_blocks(depth: int, new: int) -> None:
    source = edges(depth).reshape(1, -1, 1).to(DEVICE)
    for alpha, beta in [(1.0, 0.0), *SCALES]:
        target = torch.zeros(source.shape, dtype=DEPTHS[new].dtype, device=DEVICE)
        assert_as_by_blocks(source, target, depth, new, alpha, beta)


@launches
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    depth=st.sampled_from(CONVERTED),
    new=st.sampled_from(CONVERTED),
    alpha=st.floats(-300, 300) | st.floats(),
    beta=st.floats(-300, 300) | st.just(0.0) | st.floats(),
    channels=st.sampled_from([1, 2, 3, 4]),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 40)) | st.tuples(*[st.integers(1, 4)] * 3),
    margin=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 999),
)
def test_regions_with_any_scale(
    depth: int,
    new: int,
    alpha: float,
    beta: float,
    channels: int,
    sizes: tuple[int, ...],
    margin: tuple[int, int],
    seed: int,
) -> None:
    def region(whole: Tensor, before: int) -> Tensor:
        return whole[tuple(slice(before, before + n) for n in sizes)]

    rooms = [(*(n + 2 * before for n in sizes), channels) for before in margin]
    drawn = torch.from_numpy(np.random.default_rng(seed).choice(edges(depth).numpy(), rooms[0])).to(DEVICE)
    whole = torch.ones(rooms[1], device=DEVICE).to(DEPTHS[new].dtype)
    source, target = region(drawn, margin[0]), region(whole, margin[1])
    assert_as_by_blocks(source, target, depth, new, 0.5 if depth == new else alpha, beta)
    target.fill_(1)
    assert bool((whole == 1).all()), "memory outside the target was written"


@launches
def test_a_mat_is_converted_into_itself_and_nothing_is_launched_for_nothing() -> None:
    m = Mat(torch.arange(12, dtype=torch.uint8, device=DEVICE).reshape(3, 4))
    with count_launches() as counted:
        assert m.convertTo(-1, 2, 1, m) is m
    assert sum(counted.values()) == 1
    assert m.tensor().flatten().tolist() == list(range(1, 25, 2))
    with count_launches() as counted:
        Mat(torch.zeros(0, 4, dtype=torch.uint8, device=DEVICE)).convertTo(mat.CV_32F, 2)
    assert not counted


@launches
def test_other_scales_are_other_numbers_of_one_kernel() -> None:
    m = Mat(torch.arange(12, dtype=torch.uint8, device=DEVICE).reshape(3, 4))
    with count_launches() as counted:
        for alpha in (0.1, 0.2, 255.0):
            m.convertTo(mat.CV_32F, alpha)
    (name,) = counted
    assert counted[name] == 3
