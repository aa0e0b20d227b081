"""merge, split, extractChannel, insertChannel and mixChannels agree with OpenCV, even when they write into regions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.mat import CV_8U, CV_8UC3, CV_32FC1, Mat, extractChannel, insertChannel, merge, mixChannels, split

cv2 = pytest.importorskip("cv2")
SIZES = st.tuples(st.integers(1, 6), st.integers(1, 6))
DTYPES = ["u1", "i1", "u2", "i2", "i4", "f4", "f8", "f2"]


def array(sizes: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 120, sizes).astype(dtype)


def image(sizes: tuple[int, int], channels: int, dtype: str, seed: int = 0) -> np.ndarray:
    """A random image in the shape that OpenCV-Python uses."""
    return array(sizes if channels == 1 else (*sizes, channels), dtype, seed)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.lists(st.integers(1, 4), min_size=1, max_size=5), st.sampled_from(DTYPES))
def test_merge(sizes: tuple[int, int], counts: list[int], dtype: str) -> None:
    arrays = [image(sizes, count, dtype, seed) for seed, count in enumerate(counts)]
    expected = cv2.merge(arrays)
    merged = merge([Mat(each) for each in arrays])
    assert merged.channels() == sum(counts)
    assert np.array_equal(merged.numpy(), expected)
    whole = Mat.zeros(sizes[0] + 2, sizes[1] + 1, merged.type())
    region = whole[1 : sizes[0] + 1, 1:]
    assert merge([Mat(each) for each in arrays], region) is region
    assert np.array_equal(region.numpy(), expected)
    assert whole.numpy().astype("f8").sum() == expected.astype("f8").sum()


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 10), st.sampled_from(DTYPES))
def test_split_and_extract(sizes: tuple[int, int], channels: int, dtype: str) -> None:
    given_array = image(sizes, channels, dtype)
    expected = cv2.split(given_array)
    parts = split(Mat(given_array))
    assert len(parts) == channels
    for number, (ours, theirs) in enumerate(zip(parts, expected, strict=True)):
        assert np.array_equal(ours.numpy(), theirs)
        assert np.array_equal(extractChannel(Mat(given_array), number).numpy(), cv2.extractChannel(given_array, number))
    assert np.array_equal(merge(parts).numpy(), given_array)
    whole = [Mat.zeros(sizes[0] + 1, sizes[1] + 1, parts[0].type()) for _ in parts]
    regions = [m[1:, 1:] for m in whole]
    assert all(a is b for a, b in zip(split(Mat(given_array), regions), regions, strict=True))
    for m, theirs in zip(whole, expected, strict=True):
        assert np.array_equal(m.numpy()[1:, 1:], theirs)
        assert not m.numpy()[0].any()


@settings(max_examples=40, deadline=None)
@given(SIZES, st.integers(1, 6), st.data())
def test_insert(sizes: tuple[int, int], channels: int, data: st.DataObject) -> None:
    plane, target = array(sizes, "i2", 1), image(sizes, channels, "i2", 2)
    number = data.draw(st.integers(0, channels - 1))
    expected = cv2.insertChannel(plane, target.copy(), number)
    m = Mat(target)
    assert insertChannel(Mat(plane), m, number) is m
    assert np.array_equal(target, expected.reshape(target.shape))


@settings(max_examples=80, deadline=None)
@given(
    SIZES,
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
    st.data(),
)
def test_mix_channels(sizes: tuple[int, int], sources: list[int], targets: list[int], data: st.DataObject) -> None:
    given_arrays = [image(sizes, count, "u1", seed) for seed, count in enumerate(sources)]
    into = [image(sizes, count, "u1", 10 + seed) for seed, count in enumerate(targets)]
    numbers = data.draw(st.permutations(range(sum(targets))))[: data.draw(st.integers(1, sum(targets)))]
    pairs = [(data.draw(st.integers(-1, sum(sources) - 1)), to) for to in numbers]
    flat = [number for pair in pairs for number in pair]
    expected = cv2.mixChannels(given_arrays, [each.copy() for each in into], flat)
    mats = [Mat(each) for each in into]
    assert mixChannels([Mat(each) for each in given_arrays], mats, data.draw(st.sampled_from([flat, pairs]))) == mats
    for ours, theirs in zip(into, expected, strict=True):
        assert np.array_equal(ours, theirs.reshape(ours.shape))


def test_channels_are_swapped_in_place() -> None:
    bgr = array((3, 4, 3), "u1")
    rgb = bgr[..., ::-1].copy()
    m = Mat(bgr)
    mixChannels(m, m, [0, 2, 1, 1, 2, 0])
    assert np.array_equal(bgr, rgb)
    mixChannels(m, m, np.array([[0, 2], [1, 1], [2, 0]]))
    mixChannels(m, m, np.array([0, 2, 1, 1, 2, 0]))
    assert np.array_equal(bgr, rgb)
    merge([extractChannel(m, 2), *split(m)[:2]], m)
    assert np.array_equal(bgr, rgb[..., [2, 0, 1]])


def test_merge_of_what_it_writes_to() -> None:
    whole = Mat(array((2, 6), "u1"))
    before = whole.clone().numpy()
    planes = [whole[:, 0:2], whole[:, 2:4], whole[:, 4:6]]
    merge(planes, whole.reshape(3))
    assert np.array_equal(
        whole.numpy().reshape(2, 2, 3), np.stack([before[:, 0:2], before[:, 2:4], before[:, 4:6]], -1)
    )


def test_no_elements() -> None:
    empty = Mat(0, 4, CV_8UC3)
    assert [tuple(m.size) for m in split(empty)] == [(0, 4)] * 3
    assert merge(split(empty)).type() == CV_8UC3
    assert [m.dims for m in split(Mat((), CV_8UC3))] == [0] * 3


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: merge([]), ValueError, "at least one Mat"),
        (lambda m: merge([Mat(), Mat()]), ValueError, r"Mats with sizes, got Mat\(empty, cpu\)"),  # as in OpenCV
        (lambda m: merge([m, Mat.zeros(2, 3, CV_8U)]), ValueError, "the same size, depth and device, got .* and"),
        (lambda m: merge([m, Mat.zeros(2, 2, CV_32FC1)]), ValueError, "CV_8UC1 and CV_32FC1 for each channel"),
        (lambda m: merge([m] * 171), ValueError, "513 channels are too many"),
        (lambda m: extractChannel(m, 3), IndexError, "there is no channel 3"),
        (lambda m: insertChannel(m, m, 0), ValueError, "takes a Mat of one channel"),
        (lambda m: split(m, [m]), ValueError, "writes 3 Mats, got 1"),
        (lambda m: mixChannels(m, m, [0, 1, 2]), ValueError, "pairs of a channel .* got 3 numbers"),
        (lambda m: mixChannels(m, m, [3, 0]), IndexError, "fromTo 3 -> 0: src has channels 0 to 2"),
        (lambda m: mixChannels(m, m, [0, -1]), IndexError, "fromTo 0 -> -1"),
        (lambda m: mixChannels([], m, []), ValueError, "at least one Mat in src and in dst"),
    ],
)
def test_what_cannot_be_put_together(call: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(Mat.zeros(2, 2, CV_8UC3))  # type: ignore[operator]
