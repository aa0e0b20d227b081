"""copyTo, clone, setTo and create copy bits as OpenCV does, even into regions, and nothing outside the region
changes."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop import mat
from rooftop.mat import CV_8UC3, CV_32FC3, Mat, Scalar
from rooftop.mat.type_codes import DEPTHS

cv2 = pytest.importorskip("cv2")

DTYPES = ["u1", "i1", "u2", "i2", "i4", "u4", "f2", "f4", "f8", "?"]
SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9))


def bits(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Random bits, so for floats also NaN."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    drawn = np.random.default_rng(seed).integers(0, 2 if dtype == "?" else 256, count, np.uint8)
    return drawn.view(dtype).reshape(shape)


def same_bits(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


@settings(max_examples=80, deadline=None)
@given(
    SIZES, st.integers(1, 10), st.sampled_from(DTYPES), st.sampled_from(["u1", "i1", "?"]), st.booleans(),
    st.integers(0, 1000), st.booleans(),
)  # fmt: skip
def test_copies_under_a_mask_are_those_of_opencv(
    sizes: tuple[int, int], channels: int, dtype: str, mask_dtype: str, of_channels: bool, seed: int, new: bool
) -> None:
    source, target = bits((*sizes, channels), dtype, seed), bits((*sizes, channels), dtype, seed + 1)
    mask = bits((*sizes, channels) if of_channels else sizes, mask_dtype, seed + 2)
    mask[np.random.default_rng(seed).random(mask.shape) < 0.5] = 0
    wanted = np.zeros_like(target) if new else target.copy()
    spread = mask if of_channels else mask[..., None]
    np.copyto(wanted, source, where=spread != 0)
    if mask_dtype == "u1" and not of_channels:  # the depths that all of cv2 accepts
        theirs = cv2.copyTo(source, mask, None if new else target.copy())
        assert same_bits(theirs.reshape(wanted.shape), wanted)
    ours = Mat(source).copyTo(None if new else Mat(target), Mat(mask))
    assert same_bits(ours.numpy().reshape(wanted.shape), wanted)
    assert new or same_bits(target, wanted)


@settings(max_examples=60, deadline=None)
@given(SIZES, st.integers(1, 5), st.sampled_from(DTYPES), st.data())
def test_regions_are_copied_into_regions(
    sizes: tuple[int, int], channels: int, dtype: str, data: st.DataObject
) -> None:
    source, whole = bits((*sizes, channels), dtype), bits((14, 13, channels), dtype, 1)
    y, x = data.draw(st.integers(0, 14 - sizes[0])), data.draw(st.integers(0, 13 - sizes[1]))
    wanted = whole.copy()
    wanted[y : y + sizes[0], x : x + sizes[1]] = source
    region = Mat(whole)[y : y + sizes[0], x : x + sizes[1]]
    pointer = region.data_ptr()
    assert Mat(source).copyTo(region) is region
    assert region.data_ptr() == pointer
    assert same_bits(whole, wanted)
    copied = region.clone()
    assert copied.isContinuous()
    assert not copied.isSubmatrix()
    assert copied.data is not region.data
    assert same_bits(copied.numpy().reshape(source.shape), source)


@pytest.mark.parametrize("dtype", ["u1", "f4"])
@pytest.mark.parametrize("masked", [False, True])
def test_what_overlaps_is_read_before_it_is_written(dtype: str, masked: bool) -> None:
    array = bits((6, 7, 3), dtype)
    for rows, into in ((slice(0, 4), slice(1, 5)), (slice(1, 5), slice(0, 4))):
        wanted, m = array.copy(), Mat(array.copy())
        mask = np.ones((4, 7), np.uint8)
        wanted[into] = wanted[rows].copy()
        m[rows].copyTo(m[into], mask if masked else None)
        assert same_bits(m.numpy(), wanted)


def test_a_mask_that_is_written_to_is_read_first() -> None:
    array = np.tile(np.array([1, 0, 1, 1, 0, 0], np.uint8), (500, 60))
    wanted = array.copy()
    wanted[1:][array[:-1] != 0] = 0
    Mat(array)[1:].setTo(0, Mat(array)[0:499])
    assert np.array_equal(array, wanted)


def test_a_wrong_mask_leaves_the_target_alone() -> None:
    target = Mat(2, 2, CV_8UC3, 4)
    with pytest.raises(ValueError, match="a mask of"):
        Mat.zeros(3, 3, CV_8UC3).copyTo(target, np.ones((2, 2), np.uint8))
    assert target.numpy().tolist() == [[[4, 4, 4]] * 2] * 2


def test_numbers_of_numpy_are_sizes() -> None:
    assert tuple(Mat(np.int64(2), np.int32(3), CV_8UC3, np.float32(1)).size) == (2, 3)


def test_large_images_go_through_in_blocks() -> None:
    """The image has more rows than one block on the CPU."""
    source = bits((400, 300, 3), "u1")
    mask = bits((400, 300), "u1", 1) & 1
    assert same_bits(Mat(source).copyTo(mask=mask).numpy(), cv2.copyTo(source, mask))
    filled = Mat.zeros(400, 300, CV_8UC3).setTo((1, 2, 3), mask).numpy()
    assert same_bits(filled, (mask[..., None] * np.array([1, 2, 3], np.uint8)))
    scaled = Mat(source).convertTo(mat.CV_32F, 0.5, 3).numpy()
    assert np.array_equal(scaled, source * np.float32(0.5) + 3)


@settings(max_examples=80, deadline=None)
@given(
    SIZES, st.integers(1, 10), st.sampled_from(range(len(DEPTHS))), st.booleans(), st.booleans(),
    st.lists(st.floats(-70_000, 70_000) | st.just(float("nan")) | st.integers(-300, 300), min_size=10, max_size=10),
)  # fmt: skip
def test_set_to_writes_what_converting_the_numbers_gives(
    sizes: tuple[int, int], channels: int, depth: int, masked: bool, single: bool, numbers: list[float]
) -> None:
    type = mat.CV_MAKETYPE(depth, channels)
    given_numbers = numbers[:1] if single else numbers[:channels]
    row = Mat(torch.tensor([given_numbers if not single else numbers[:1] * channels], dtype=torch.float64)).convertTo(
        depth
    )
    whole = Mat((sizes[0] + 1, sizes[1] + 2), type, 1)
    before = whole.clone().tensor()
    m = whole[1:, 1 : sizes[1] + 1]
    mask = bits(sizes, "u1") & 1
    assert m.setTo(given_numbers[0] if single else given_numbers, mask if masked else None) is m
    chosen = torch.from_numpy(mask).bool()[..., None] if masked else torch.ones(1, dtype=torch.bool)
    carrier = DEPTHS[depth].carrier
    wanted = before.view(carrier)
    wanted[1:, 1 : sizes[1] + 1] = torch.where(
        chosen, row.tensor().view(carrier).reshape(channels), wanted[1:, 1 : sizes[1] + 1]
    )
    ours = whole.tensor().view(carrier)
    nan = whole.tensor().double().isnan().expand_as(ours)
    assert torch.equal(ours[~nan], wanted[~nan])
    assert torch.equal(nan, before.double().isnan())


def test_scalars_are_opencvs() -> None:
    assert Scalar(5) == (5, 0, 0, 0)
    assert Scalar.all(2) == (2, 2, 2, 2)
    assert repr(Scalar(1, 2)) == "Scalar(1, 2, 0, 0)"
    m = Mat(2, 2, CV_8UC3)
    assert m.setTo(7)[0, 0] == (7, 7, 7)  # one number: all channels, as Mat::setTo(double)
    assert m.setTo(Scalar(7))[0, 0] == (7, 0, 0)
    assert m.setTo((1, 2))[0, 0] == (1, 2, 0)
    assert m.setTo((1, 2, 3, 4))[1, 1] == (1, 2, 3)
    assert m.setTo(np.array([4.5, 5.5, 300]))[1, 1] == (4, 6, 255)
    assert m.setTo(torch.tensor([1, 2, 3]))[1, 0] == (1, 2, 3)
    assert Mat(1, 1, mat.CV_64S, 2**62 + 1)[0, 0] == 2**62 + 1
    assert Mat(1, 1, mat.CV_64U, 2.0**70)[0, 0] == 2**64 - 1
    assert Mat(1, 1, mat.CV_64U, 2**63 + 5)[0, 0] == 2**63 + 5
    with pytest.raises(ValueError, match=r"6 numbers for an element of CV_8UC3, which has 3 channels: .* 1 to 4"):
        m.setTo(range(6))
    with pytest.raises(ValueError, match=r"2 numbers for an element of CV_8UC\(5\)"):
        Mat(2, 2, mat.CV_8UC(5)).setTo((1, 2))
    with pytest.raises(TypeError, match="expected a number or a tuple of numbers, got 'red'"):
        m.setTo("red")


def test_nan_is_set() -> None:
    m = Mat.zeros(3, 3, CV_32FC3)
    m.setTo(float("nan"), np.eye(3, dtype=np.uint8))
    assert np.isnan(m.numpy()).sum() == 9
    assert np.isnan(m.numpy()[1, 1]).all()


def test_ones_and_eye_are_in_the_first_channel() -> None:
    assert Mat.ones(2, 3, CV_8UC3).numpy().tolist() == [[[1, 0, 0]] * 3] * 2
    assert Mat.ones(2, 3, mat.CV_8U).numpy().tolist() == [[1, 1, 1]] * 2
    assert np.array_equal(Mat.eye(3, 4, mat.CV_64F).numpy(), np.eye(3, 4))
    assert Mat.eye(2, 2, mat.CV_8UC(6))[1, 1] == (1, 0, 0, 0, 0, 0)
    assert Mat.zeros((2, 3, 4), mat.CV_16S).numpy().tolist() == np.zeros((2, 3, 4), int).tolist()
    assert Mat.zeros(0, 3, CV_8UC3).empty()
    with pytest.raises(ValueError, match="eye takes two sizes"):
        Mat.eye((2, 2, 2), mat.CV_8U)


def test_create_allocates_only_when_it_must() -> None:
    whole = Mat.zeros(5, 6, CV_8UC3)
    region, pointer = whole[1:3, 2:4], whole[1:3, 2:4].data_ptr()
    assert region.create(2, 2, CV_8UC3) is region
    assert region.data_ptr() == pointer
    assert region.isSubmatrix()
    region.create(2, 3, CV_8UC3)
    assert region.data is not whole.data
    assert not region.isSubmatrix()
    assert tuple(region.size) == (2, 3)
    data = region.data
    region.create((2, 3), mat.CV_32FC3)
    assert region.data is not data
    region.create((0, 3), CV_8UC3)
    assert region.empty()
    assert region.data is None
    whole.release()
    assert whole.empty()
    assert whole.dims == 0


def test_a_mat_whose_memory_cannot_be_allocated_is_empty() -> None:
    m = Mat(2, 2, CV_8UC3, 1)
    with pytest.raises(MemoryError, match="2147483648 x 268435456 CV_8UC3 needs"):
        m.create(2**31, 2**28, CV_8UC3)
    assert (m.dims, m.data, m.numpy().size) == (0, None, 0)
    with pytest.raises(ValueError, match=r"fewer than 2\^63"):
        Mat(1, 1, CV_8UC3).reserve(2**63)


def test_copies_of_an_empty_mat_are_empty() -> None:
    """As in OpenCV, which releases the target."""
    image = Mat(4, 4, CV_8UC3, 1)
    for target in (Mat(2, 2, CV_8UC3, 0), image[0:2]):
        for copied in (Mat().copyTo(target), Mat().convertTo(CV_8UC3, dst=target)):
            assert copied is target
            assert (target.dims, target.data) == (0, None)
    assert image.numpy().min() == 1


def test_new_memory_under_a_mask_is_zero_elsewhere() -> None:
    array = np.full((3, 3), 9, np.uint8)
    assert Mat(array).copyTo(mask=np.eye(3, dtype=np.uint8)).numpy().tolist() == (9 * np.eye(3)).tolist()
    other = Mat(2, 2, CV_8UC3, 4)
    Mat(array).copyTo(other, np.eye(3, dtype=np.uint8))
    assert other.numpy().tolist() == (9 * np.eye(3)).tolist()


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones((4, 4), np.float32), TypeError, "must be CV_8U, CV_8S or CV_Bool, with 1 or 3 channels, got CV_32FC1"),
        (np.ones((4, 4, 2), np.uint8), TypeError, "got CV_8UC2"),
        (np.ones((4, 5), np.uint8), ValueError, r"a mask of \(4, 5\) for elements of \(4, 4\)"),
    ],
)
def test_what_is_no_mask(mask: np.ndarray, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mat.zeros(4, 4, CV_8UC3).copyTo(mask=mask)
    with pytest.raises(error, match=message):
        Mat.zeros(4, 4, CV_8UC3).setTo(1, mask)


@pytest.mark.parametrize(
    ("given_arguments", "error", "message"),
    [
        ((2, 3), TypeError, r"sizes \(2, 3\) came without a type: pass one, such as CV_8UC3"),
        ((2, -3, 0), ValueError, r"sizes must be at least 0, got \(2, -3\)"),
        ((2**40, 2**40, 0), ValueError, "a Mat of 1099511627776 x 1099511627776 CV_8UC1 needs .* fewer than 2.63"),
        ((2**63, 1, 0), ValueError, "needs 9,223,372,036,854,775,808 bytes, but a tensor has fewer than 2.63"),
        (((0, 2**40, 2**40), 0), ValueError, "a Mat of 0 x 1099511627776 x .* fewer than 2.63"),
        (
            (2**31, 2**28, 0),
            MemoryError,
            "2147483648 x 268435456 CV_8UC1 needs 576,460,.* bytes, but the host has .* free",
        ),
        ((2, 3, 0, 1, 5), TypeError, "1 arguments too many"),
        (([[1, 2], [3, 4]],), TypeError, r"np.array\(...\) makes an array"),
        ((5,), TypeError, "got 5"),
        ((2, 3, "CV_8U"), TypeError, "a type is a number such as CV_8UC3, got 'CV_8U'"),
        ((2, 3, 31), ValueError, "31 is not the code of a type"),
        ((np.zeros((2, 2)), 6, 7), TypeError, "takes an array and a type, got 3 arguments"),
    ],
)
def test_arguments_that_make_no_mat(given_arguments: tuple, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Mat(*given_arguments)


def test_copies_by_pythons_own_means() -> None:
    array = bits((3, 4, 3), "f4")
    m = Mat(array)[1:, 1:]
    assert copy.copy(m).data is m.data
    assert copy.deepcopy(m).data is not m.data
    for other in (copy.deepcopy(m), pickle.loads(pickle.dumps(m))):
        assert other.type() == m.type()
        assert same_bits(other.numpy(), np.ascontiguousarray(array[1:, 1:]))
    for empty in (Mat(), Mat((), CV_8UC3), Mat(0, 3, CV_8UC3)):
        other = pickle.loads(pickle.dumps(empty))
        assert (tuple(other.size), other.type()) == (tuple(empty.size), empty.type())
