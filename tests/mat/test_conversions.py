"""convertTo: rounding, saturation, scale and shift, over all pairs of depths.

cv2 has no convertTo, but `cv2.normalize` ends with this conversion. With NORM_INF, the scale is `alpha / norm` and
there is no shift. With NORM_MINMAX, scale and shift follow from the least and the greatest value.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop import mat
from rooftop.mat import Mat
from rooftop.mat.type_codes import DEPTHS

cv2 = pytest.importorskip("cv2")

DEPTH_NUMBERS = range(len(DEPTHS))
INTEGERS = [number for number in DEPTH_NUMBERS if DEPTHS[number].limits]
FLOATS = [mat.CV_32F, mat.CV_64F, mat.CV_16F, mat.CV_16BF]
# The depths that cv2 accepts as arrays. cv2 converts 64-bit integers to 32-bit ones on input.
TAKEN = [mat.CV_8U, mat.CV_8S, mat.CV_16U, mat.CV_16S, mat.CV_32S, mat.CV_32F, mat.CV_64F]
GIVEN = [number for number in DEPTH_NUMBERS if number != mat.CV_16BF]  # NumPy has no such dtype
SMALL = [mat.CV_8U, mat.CV_8S, mat.CV_16U, mat.CV_16S]


def values(depth: int, seed: int, count: int = 97) -> np.ndarray:
    """Values of a depth: random, at its limits, and halves, whose rounding differs most."""
    rng = np.random.default_rng(seed)
    limits = DEPTHS[depth].limits
    dtype: Any = DEPTHS[depth].numpy
    if limits is not None:
        drawn = rng.integers(limits[0], limits[1], count, dtype=dtype, endpoint=True)
        small = rng.integers(0, min(300, limits[1]), count).astype(dtype)
        return np.concatenate([drawn, small, np.array([limits[0], limits[1], 0, 1], dtype)])[None]
    halves = rng.integers(-600, 140_000, count) / 2
    return np.concatenate([rng.normal(0, 300, count), halves, rng.normal(0, 1e6, count), [0.5, 1.5, -0.5]])[
        None
    ].astype(dtype)


def scaled_by_opencv(array: np.ndarray, depth: int, scale: float) -> tuple[np.ndarray, float]:
    """The values that OpenCV converts, and its scale."""
    norm = cv2.norm(array, cv2.NORM_INF)
    return cv2.normalize(array, None, scale * norm, 0, cv2.NORM_INF, depth), scale * norm / norm


@pytest.mark.parametrize("new", GIVEN)
@pytest.mark.parametrize("depth", TAKEN)
def test_every_pair_of_depths_without_a_scale(depth: int, new: int) -> None:
    array = values(depth, 3 * depth + new)
    expected, scale = scaled_by_opencv(array, new, 1)
    assert scale == 1
    with np.errstate(over="ignore"):
        ours = Mat(array).convertTo(new).numpy()
    assert ours.dtype == DEPTHS[new].numpy
    assert np.array_equal(ours, expected)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(TAKEN),
    st.sampled_from(GIVEN),
    st.floats(-40, 40).filter(lambda a: abs(a) > 1e-3) | st.sampled_from([0.5, 1 / 255, 2.0, -1.0]),
    st.integers(0, 10_000),
)
def test_every_pair_of_depths_with_a_scale(depth: int, new: int, alpha: float, seed: int) -> None:
    array = values(depth, seed)
    # OpenCV converts floating values from 2^31 on to the least integer, so ours are only compared below that.
    if DEPTHS[new].limits and depth in (mat.CV_32S, mat.CV_32F, mat.CV_64F):
        array = (array // 64 if depth == mat.CV_32S else array / 64).astype(array.dtype)
    expected, scale = scaled_by_opencv(array, new, alpha)
    ours = Mat(array).convertTo(new, scale).numpy()
    if new in SMALL or (depth in SMALL and new != mat.CV_Bool):
        assert np.array_equal(ours, expected)
        return
    tolerance = 2.0**-22 if depth in (mat.CV_32F, mat.CV_32S, mat.CV_64F) else 0
    assert np.allclose(ours.astype("f8"), expected.astype("f8"), rtol=tolerance, atol=0)


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from(TAKEN), st.sampled_from([*SMALL, mat.CV_32F, mat.CV_32S]), st.integers(0, 10_000), st.booleans(),
    st.floats(-300, 300, width=32), st.floats(1, 3000, width=32),
)  # fmt: skip
def test_scale_and_shift(depth: int, new: int, seed: int, halves: bool, low: float, extent: float) -> None:
    array = values(depth, seed)
    # scale and shift turn small numbers into halves, so that the result depends on one rounding
    if halves:
        array = (array.astype("f8") % 64).astype(array.dtype)
        low, extent = round(low) + 0.5, (float(array.max()) - float(array.min())) * 0.5
    smin, smax = float(array.min()), float(array.max())
    high = low + extent
    scale = (high - low) * (1 / (smax - smin))
    shift = low - smin * scale
    if new == mat.CV_32F:
        scale = float(np.float32(scale))
        shift = float(np.float32(low) - np.float32(smin * scale))
    expected = cv2.normalize(array, None, low, high, cv2.NORM_MINMAX, new)
    ours = Mat(array).convertTo(new, scale, shift).numpy()
    if depth in SMALL or new in SMALL:
        assert np.array_equal(ours, expected)
    else:
        error = np.abs(ours.astype("f8") - expected.astype("f8"))
        bound = 2.0**-22 * (np.abs(array.astype("f8") * scale) + abs(shift)) + (0 if new == mat.CV_32F else 1)
        assert (error <= bound).all()


def exactly(x: float | int, depth: int, alpha: Fraction, beta: Fraction) -> int:
    low, high = DEPTHS[depth].limits or (0, 0)
    return min(max(round(alpha * Fraction(x) + beta), low), high)  # half to even


@pytest.mark.parametrize("new", INTEGERS)
@pytest.mark.parametrize("depth", [*INTEGERS, mat.CV_64F, mat.CV_32F])
def test_integers_are_exact_without_a_scale(depth: int, new: int) -> None:
    """Conversions are also correct where OpenCV's are wrong: CV_32U into signed depths, floating values from 2^31 on,
    and 64 bits."""
    if depth in INTEGERS:
        low, high = DEPTHS[depth].limits or (0, 0)
        numbers: list[Any] = [low, low + 1, 0, 1, 127, min(128, high), high // 2, high // 2 + 1, high - 1, high]
    else:
        numbers = [2.0**n * s for n in (31, 32, 62, 63, 64, 70) for s in (-1, 1)] + [2.0**63 - 1024, 2.0**64 - 2048]
        numbers += [0.5, 1.5, 2.5, -0.5, 1e30, -1e30]
    array = np.array([numbers], DEPTHS[depth].numpy)
    expected = [exactly(x, new, Fraction(1), Fraction(0)) for x in array[0].tolist()]
    assert Mat(array).convertTo(new).numpy()[0].tolist() == expected


@pytest.mark.parametrize("new", INTEGERS)
@pytest.mark.parametrize("depth", FLOATS)
@pytest.mark.parametrize(("alpha", "beta"), [(1, 0), (2, 0), (1, 3), (2, 3)])
def test_nan_is_the_least_integer_and_infinity_the_limits(depth: int, new: int, alpha: float, beta: float) -> None:
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]], dtype=DEPTHS[depth].dtype)
    low, high = DEPTHS[new].limits or (0, 0)
    assert Mat(x).convertTo(new, alpha, beta).numpy()[0].tolist() == [low, high, low, alpha + beta]


def test_nan_is_what_opencv_makes_of_it() -> None:
    array = np.array([[0, 1, np.nan, 200, -5] * 9], np.float32)
    for new in GIVEN:
        expected = cv2.normalize(array, None, -5, 200, cv2.NORM_MINMAX, new)  # from -5..200 to -5..200
        if new == mat.CV_64S:  # OpenCV converts through 32 bits
            expected[expected == -(2**31)] = -(2**63)
        assert np.array_equal(Mat(array).convertTo(new).numpy(), expected, equal_nan=new in FLOATS)


@pytest.mark.parametrize("depth", DEPTH_NUMBERS)
@pytest.mark.parametrize("new", DEPTH_NUMBERS)
def test_small_numbers_go_through_every_pair(depth: int, new: int) -> None:
    x = torch.tensor([[0.0, 1.0]]).to(DEPTHS[depth].dtype)
    plain = Mat(x).convertTo(new).tensor()
    assert plain.dtype == DEPTHS[new].dtype
    assert plain.double().flatten().tolist() == [0, 1]
    scaled = Mat(x).convertTo(new, 3, 2).tensor().double().flatten().tolist()
    assert scaled == ([1, 1] if new == mat.CV_Bool else [2, 5])


@pytest.mark.parametrize("new", [mat.CV_8U, mat.CV_32S, mat.CV_64S, mat.CV_64U])
@pytest.mark.parametrize("depth", [mat.CV_64S, mat.CV_64U])
@pytest.mark.parametrize(("alpha", "beta"), [(1, 1), (-1, 3), (2, 0), (2**40, -(2**70)), (0, 7), (1e300, 0)])
def test_64_bits_by_a_whole_scale_and_shift_are_exact(depth: int, new: int, alpha: float, beta: float) -> None:
    low, high = DEPTHS[depth].limits or (0, 0)
    array = np.array([[low, low + 1, 0, 1, 2**53 + 1, 2**60 + 1, 2**62 + 3, high - 1, high]], DEPTHS[depth].numpy)
    expected = [exactly(x, new, Fraction(alpha), Fraction(beta)) for x in array[0].tolist()]
    m = Mat(array)
    assert m.convertTo(new, alpha, beta).numpy()[0].tolist() == expected
    if new == depth:
        assert m.convertTo(-1, alpha, beta, dst=m).numpy()[0].tolist() == expected


@pytest.mark.parametrize("new", [mat.CV_32S, mat.CV_32U, mat.CV_64S, mat.CV_64U, mat.CV_64F])
def test_wide_integers_are_scaled_in_float64(new: int) -> None:
    """OpenCV uses float32 for some of these depths, which has only 24 bits."""
    array = np.array([[2**30 + 1, 2**26 + 3, 123_456_789]], np.uint32)
    ours = Mat(array).convertTo(new, 1, 1).numpy()
    assert ours[0].tolist() == [x + 1 for x in array[0].tolist()]


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 10])
def test_regions_and_channels(channels: int) -> None:
    array = np.random.default_rng(0).normal(100, 90, (6, 7, channels)).astype(np.float32)
    whole = Mat.zeros(9, 9, mat.CV_8UC(channels))
    region = whole[1:5, 2:7]
    assert Mat(array)[1:5, 1:6].convertTo(mat.CV_8U, dst=region) is region
    expected = np.clip(np.rint(array[1:5, 1:6]), 0, 255).astype(np.uint8)
    assert np.array_equal(region.numpy(), expected.squeeze(-1) if channels == 1 else expected)
    assert whole.numpy().astype(int).sum() == expected.astype(int).sum()  # nothing outside the region was written


def test_a_mat_may_be_converted_into_itself() -> None:
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    m = Mat(array)
    pointer = m.data_ptr()
    assert m.convertTo(-1, 2, dst=m) is m
    assert array.ravel().tolist() == list(range(0, 24, 2))
    assert m.data_ptr() == pointer
    m.convertTo(mat.CV_16F, 0.5, dst=m)
    assert m.type() == mat.CV_16FC1
    assert m.numpy().ravel().tolist() == list(range(12))
    shifted = Mat(np.arange(20, dtype=np.uint8).reshape(5, 4))
    shifted[0:4].convertTo(None, 1, 100, dst=shifted[1:5])
    assert shifted.numpy()[1:].ravel().tolist() == list(range(100, 116))


def test_what_cannot_be_converted() -> None:
    with pytest.raises(TypeError, match="expected a type, or a dtype of torch or NumPy, got 'CV_32F'"):
        Mat.zeros(2, 2, mat.CV_8U).convertTo("CV_32F")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="20 is not the code of a type"):
        Mat.zeros(2, 2, mat.CV_8U).convertTo(20)
    assert Mat.zeros(2, 2, mat.CV_8UC3).convertTo(torch.float16).type() == mat.CV_16FC3
