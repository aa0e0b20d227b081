"""Headers on the same memory: sizes, steps, flags and offsets are those that OpenCV computes.

cv2 shows little of a cv::Mat: only `cv2.UMat` says whether a region is continuous, whether it is a submatrix and where
it begins. Other properties are compared with NumPy's views of the same array and with OpenCV's rules, which this file
writes out.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.mat import CV_8U, CV_8UC1, CV_8UC3, CV_32FC1, CV_32FC2, CV_64FC3, Mat

cv2 = pytest.importorskip("cv2")
RNG = np.random.default_rng(5)


def image(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return RNG.integers(0, 255, shape).astype(dtype)


def follows(sizes: tuple[int, ...], steps: tuple[int, ...]) -> bool:
    """Whether elements are contiguous, found by visiting all of them. OpenCV ignores only leading dimensions of size
    1."""
    places = np.zeros(sizes, np.int64)
    for axis, (size, step) in enumerate(zip(sizes, steps, strict=True)):
        places += (np.arange(size) * step).reshape([-1 if i == axis else 1 for i in range(len(sizes))])
    return bool((np.diff(places.ravel()) == steps[-1]).all())


def same_memory(m: Mat, array: np.ndarray) -> bool:
    """The same elements at the same addresses, with the same strides wherever strides matter."""
    cut = m.numpy()
    if cut.shape != array.shape or not np.array_equal(cut, array):
        return False
    if not array.size:
        return True
    strides = [(a, b) for a, b, size in zip(cut.strides, array.strides, cut.shape, strict=True) if size > 1]
    return all(a == b for a, b in strides) and cut.ctypes.data == array.ctypes.data


@st.composite
def ranges(draw: st.DrawFn, sizes: tuple[int, ...]) -> tuple[slice, ...]:
    cuts = []
    for size in sizes:
        start = draw(st.integers(0, size - 1))
        cuts.append(slice(start, draw(st.integers(start + 1, size))))
    return tuple(cuts)


SIZES_2D = st.tuples(st.integers(1, 7), st.integers(1, 7))


@settings(max_examples=80, deadline=None)
@given(st.data(), SIZES_2D, st.sampled_from([1, 2, 3, 4, 10]))
def test_regions_have_the_flags_and_the_offset_that_opencv_gives_them(
    data: st.DataObject, sizes: tuple[int, int], channels: int
) -> None:
    array = image(*sizes, channels)
    rows, cols = data.draw(ranges(sizes))
    ours = Mat(array)[rows, cols]
    theirs = cv2.UMat(cv2.UMat(array), (rows.start, rows.stop), (cols.start, cols.stop))
    assert ours.isSubmatrix() == theirs.isSubmatrix()
    assert ours.isContinuous() == theirs.isContinuous()
    assert ours.data_ptr() - array.ctypes.data == theirs.offset
    assert same_memory(ours, np.squeeze(array[rows, cols], 2) if channels == 1 else array[rows, cols])


@settings(max_examples=60, deadline=None)
@given(st.data(), SIZES_2D, st.booleans())
def test_a_chain_of_regions_knows_its_place_in_the_whole(
    data: st.DataObject, sizes: tuple[int, int], adjust: bool
) -> None:
    array = image(*sizes, 3)
    cut, view = Mat(array), array
    x = y = 0
    for _ in range(3):
        rows, cols = data.draw(ranges(view.shape[:2]))
        cut, view = cut[rows, cols], view[rows, cols]
        y, x = y + rows.start, x + cols.start
    (width, height), (left, top) = cut.locateROI()
    h, w = view.shape[:2]
    assert (left, top) == (x, y)
    assert (width, height) == (sizes[1], sizes[0])
    assert same_memory(cut, view)
    if not adjust:
        return
    by = [data.draw(st.integers(-3, 9)) for _ in range(4)]
    row1, row2 = min(max(y - by[0], 0), sizes[0]), max(0, min(y + h + by[1], sizes[0]))
    col1, col2 = min(max(x - by[2], 0), sizes[1]), max(0, min(x + w + by[3], sizes[1]))
    (row1, row2), (col1, col2) = sorted((row1, row2)), sorted((col1, col2))
    assert cut.adjustROI(*by) is cut
    assert same_memory(cut, array[row1:row2, col1:col2])
    assert tuple(cut.size) == (row2 - row1, col2 - col1)


@settings(max_examples=80, deadline=None)
@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_ranges_of_n_dimensions(data: st.DataObject, sizes: list[int]) -> None:
    array = image(*sizes, dtype="float32")
    cuts = data.draw(ranges(tuple(sizes)))
    m = Mat(array, CV_32FC1)[cuts]
    assert same_memory(m, array[cuts])
    assert m.isSubmatrix() == (tuple(m.size) != tuple(sizes))
    assert m.isContinuous() == follows(tuple(m.size), m.step)
    assert m.clone().isContinuous()
    assert np.array_equal(m.clone().numpy(), array[cuts])


def test_numbers_of_a_header() -> None:
    m = Mat(4, 6, CV_64FC3)
    assert (m.type(), m.depth(), m.channels(), m.elemSize(), m.elemSize1()) == (CV_64FC3, 6, 3, 24, 8)
    assert (m.rows, m.cols, m.dims, m.total(), len(m)) == (4, 6, 2, 24, 4)
    assert m.step == (144, 24)
    assert (m.step1(), m.step1(1)) == (18, 3)
    assert m.size == (4, 6)
    assert m.size() == (6, 4)  # cv::Size: width first
    part = m[1:3, 2:3]
    assert part.step == (144, 24)
    assert part.data is m.data
    cube = Mat((2, 3, 4), CV_8UC1)
    assert (cube.rows, cube.cols, cube.dims, cube.step) == (-1, -1, 3, (12, 4, 1))
    with pytest.raises(ValueError, match="width and height exist for at most two dimensions"):
        cube.size()
    line = Mat((5,), CV_8U)
    assert (line.rows, line.cols, line.dims, line.size()) == (1, 5, 1, (5, 1))


def test_repr_says_what_matters() -> None:
    m = Mat.zeros(4, 6, CV_8UC3)
    assert repr(m) == "Mat(4 x 6 CV_8UC3, cpu, continuous)"
    assert repr(m[:, 1:3]) == "Mat(4 x 2 CV_8UC3, cpu, not continuous, submatrix)"
    assert repr(Mat()) == "Mat(empty, cpu)"


def test_single_rows_and_columns_may_be_continuous() -> None:
    m = Mat(4, 6, CV_8UC3)
    assert m.row(2).isContinuous()
    assert m[2:3, 1:4].isContinuous()
    assert not m.col(2).isContinuous()
    assert Mat(4, 1, CV_8UC3).col(0).isContinuous()
    assert m[1:2, 1:2].isContinuous()
    whole = m[0:4, 0:6]
    assert whole.isContinuous()
    assert not whole.isSubmatrix()  # as in OpenCV, ranges that cut nothing off make no submatrix
    assert Mat((3, 4, 5), CV_8U)[1:2].isContinuous()
    assert Mat((3, 4, 5), CV_8U)[1:3].isContinuous()
    assert not Mat((3, 4, 5), CV_8U)[:, 1:2].isContinuous()


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0), (0, 0), (3, 0, 2)])
def test_no_elements(sizes: tuple[int, ...]) -> None:
    m = Mat(sizes, CV_8UC3)
    assert m.empty()
    assert m.isContinuous()
    assert m.data is None
    assert (m.total(), m.data_ptr(), tuple(m.size)) == (0, 0, sizes)
    assert m.numpy().shape == (*sizes, 3)
    assert tuple(m.clone().size) == sizes
    assert tuple(m.setTo(1).convertTo(CV_32FC1).size) == sizes


def test_a_mat_without_sizes_has_no_elements() -> None:
    released = Mat(2, 2, CV_8UC3, 7)
    released.release()
    for m, shape in ((Mat(), (0,)), (Mat((), CV_8U, 5), (0,)), (Mat.zeros((), CV_8UC3), (0, 3)), (released, (0, 3))):
        assert m.empty()
        assert (m.total(), m.data, m.dims) == (0, None, 0)
        assert m.numpy().shape == np.asarray(m).shape == np.from_dlpack(m).shape == shape
        assert m.tensor().shape == (0, m.channels())
        with m.mapped() as array:
            assert array.size == 0
        m[...] = 3
        for other in (m[...], m[()], m.clone(), Mat(m), m.convertTo(CV_32FC1), Mat(m > 1), m.copyTo()):
            assert (other.dims, other.channels()) == (0, m.channels())
        for wrong in (lambda m: m.at(), lambda m: m.at(0), lambda m: m[0], lambda m: m[0, 0]):
            with pytest.raises(IndexError, match=r"Mat\(empty, cpu\), because it is empty"):
                wrong(m)
        assert m.dot(m) == 0
        assert Mat(m.numpy()).empty()
        assert m.reshape(1, (-1,)).size == (0,)
    with pytest.raises(ValueError, match=r"0 numbers \(\(\), 1 channels\) cannot be reshaped to \(1, 1\)"):
        Mat().reshape(1, (1, 1))
    with pytest.raises(ValueError, match=r"reshape needs at least one size, got \(\)"):
        Mat.zeros(1, 1, CV_8U).reshape(0, ())


def test_empty_regions_keep_their_other_size() -> None:
    m = Mat(4, 6, CV_8UC3)
    assert tuple(m[2:2].size) == (0, 6)
    assert m[2:2].isSubmatrix()
    assert m[2:2].empty()
    assert m[:, 6:6].numpy().shape == (4, 0, 3)
    assert Mat().empty()
    assert (Mat().rows, Mat().cols, Mat().dims, tuple(Mat().size), len(Mat())) == (0, 0, 0, (), 0)


@settings(max_examples=60, deadline=None)
@given(SIZES_2D, st.data())
def test_diagonals(sizes: tuple[int, int], data: st.DataObject) -> None:
    array = image(*sizes, dtype="int32")
    d = data.draw(st.integers(1 - sizes[0], sizes[1] - 1))
    diagonal = Mat(array).diag(d)
    assert diagonal.numpy().ravel().tolist() == np.diagonal(array, d).tolist()
    assert diagonal.cols == 1
    assert diagonal.isSubmatrix() == (sizes != (1, 1))
    diagonal.setTo(-7)
    assert np.diagonal(array, d).tolist() == [-7] * len(diagonal)
    assert (array == -7).sum() == len(diagonal)


def test_rows_columns_and_rectangles() -> None:
    array = image(5, 7, 3)
    m = Mat(array)
    assert same_memory(m.row(2), array[2:3])
    assert same_memory(m.col(4), array[:, 4:5])
    assert same_memory(m.rowRange(1, 4), array[1:4])
    assert same_memory(m.colRange(2, 7), array[:, 2:7])
    assert same_memory(m.roi(2, 1, 3, 4), array[1:5, 2:5])  # x, y, width, height
    assert same_memory(m[3], array[3:4])
    assert same_memory(m[1:3, 4], array[1:3, 4:5])
    assert [row.numpy().tolist() for row in m] == [row[None].tolist() for row in array]


@settings(max_examples=100, deadline=None)
@given(st.data(), SIZES_2D, st.sampled_from([1, 2, 3, 4, 6]))
def test_reshape_sees_the_same_numbers(data: st.DataObject, sizes: tuple[int, int], channels: int) -> None:
    array = image(*sizes, channels)
    m = Mat(array)
    new_cn = data.draw(st.sampled_from([c for c in (1, 2, 3, 4, 6) if (sizes[1] * channels) % c == 0]))
    seen = m.reshape(new_cn)
    assert same_memory(seen.reshape(1), array.reshape(sizes[0], -1))
    assert tuple(seen.size) == (sizes[0], sizes[1] * channels // new_cn)
    assert seen.channels() == new_cn
    total = array.size
    new_rows = data.draw(st.sampled_from([r for r in range(1, total + 1) if total % r == 0]))
    assert same_memory(m.reshape(1, new_rows), array.reshape(new_rows, -1))


def test_reshape_keeps_gaps_where_only_channels_change() -> None:
    array = image(4, 6, 3)
    part = Mat(array)[1:3, 2:4]
    seen = part.reshape(1)
    assert tuple(seen.size) == (2, 6)
    assert seen.step == (18, 1)
    assert seen.isSubmatrix()
    assert same_memory(seen, array.reshape(4, 18)[1:3, 6:12])
    with pytest.raises(ValueError, match=r"gaps between the rows \(isContinuous\(\) is False\); clone\(\) first"):
        part.reshape(0, 4)
    with pytest.raises(ValueError, match="gaps between its rows"):
        part.reshape(0, (2, 1, 2))


def test_reshape_of_n_dimensions() -> None:
    array = image(2, 3, 4, dtype="float32")
    m = Mat(array, CV_32FC1)
    assert same_memory(m.reshape(1, (4, 6)), array.reshape(4, 6))
    assert same_memory(m.reshape(1, 6), array.reshape(6, 4))
    assert same_memory(m.reshape(2), array.reshape(2, 3, 2, 2))
    assert same_memory(m.reshape(1, (0, -1)), array.reshape(2, 12))
    assert same_memory(m.reshape(2, (3, 4)), array.reshape(3, 4, 2))
    assert m.reshape(2, (3, 4)).type() == CV_32FC2
    line = Mat(np.arange(12, dtype="uint8"))
    assert line.reshape(3, 2).numpy().tolist() == np.arange(12).reshape(2, 2, 3).tolist()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda m: m.reshape(5),
            "24 numbers .* cannot be divided into 3 rows|rows of 6 numbers cannot be divided into elements of 5",
        ),
        (lambda m: m.reshape(0, 7), "numbers .* cannot be divided into 7 rows of equal length"),
        (lambda m: m.reshape(0, -1), "a number of rows of at least 0"),
        (lambda m: m.reshape(1, (5, -1)), r"cannot be reshaped to \(5, -1\) with 1 channels"),
        (lambda m: m.reshape(1, (-1, -1)), "one may be -1"),
        (lambda m: m.reshape(1, (2, 2, 0)), "the 0 at dimension 2"),
        (lambda m: m.reshape(-2), "1 to 512 channels, got -2"),
        (lambda m: m.roi(0, 0, -1, 2), "a width and a height of at least 0"),
        (lambda m: m[0:4:2], "cannot have a step, got 2"),
        (lambda m: Mat((2, 2, 2), CV_8U).locateROI(), "locateROI needs two dimensions"),
        (lambda m: m[1:1].locateROI(), "locateROI needs a Mat with elements"),
        (lambda m: Mat((2, 2, 2), CV_8U).row(0), "rows needs two dimensions"),
    ],
)
def test_what_cannot_be_seen_so(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Mat.zeros(4, 2, CV_8UC3))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m[-1], "index -1 of dimension 0 is out of range 0 to 3; to count from the end, use 3"),
        (lambda m: m[4], "index 4 of dimension 0 is out of range 0 to 3$"),
        (lambda m: m[0, 6], "index 6 of dimension 1"),
        (lambda m: m[0, 0, 0], "3 indices of 2 dimensions: .*channels have no index"),
        (lambda m: m[2:1], "range 2:1 of dimension 0 is not within 0:4"),
        (lambda m: m[0:5], "range 0:5 of dimension 0 is not within 0:4"),
        (lambda m: m[:-1], "range 0:-1 .*negative numbers do not count from the end here"),
        (lambda m: m.row(4), "index 4 of row"),
        (lambda m: m.colRange(-2, 3), "range -2:3 of columns"),
        (lambda m: m.roi(4, 0, 3, 2), "range 4:7 of columns is not within 0:6"),
        (lambda m: m.diag(6), "4 x 6 has no diagonal 6: expected -3 to 5"),
        (lambda m: m.step1(2), r"step1\(2\): the Mat has 2 dimensions: expected 0 to 1"),
        (lambda m: m.at(1, 2, 3), r"Mat.at\(\) needs 2 indices"),
    ],
)
def test_places_that_are_not_there(call: object, message: str) -> None:
    with pytest.raises(IndexError, match=message):
        call(Mat.zeros(4, 6, CV_8UC3))  # type: ignore[operator]


def test_an_index_is_an_integer() -> None:
    m = Mat.zeros(4, 6, CV_8UC3)
    for wrong in (1.0, "1", None, True):
        with pytest.raises(TypeError, match="must be an integer or a range"):
            m[wrong]  # type: ignore[index]
    with pytest.raises(TypeError, match="needs integers"):
        m[0.0:2.0]  # type: ignore[misc]


@settings(max_examples=60, deadline=None)
@given(st.data(), SIZES_2D, st.integers(1, 10), st.sampled_from(["u1", "i2", "u2", "u4", "u8", "f4", "f2", "?"]))
def test_elements_are_read_and_written(data: st.DataObject, sizes: tuple[int, int], channels: int, dtype: str) -> None:
    array = image(*sizes, channels).astype(dtype)
    m = Mat(array)[: sizes[0]]
    y, x = data.draw(st.integers(0, sizes[0] - 1)), data.draw(st.integers(0, sizes[1] - 1))
    expected = array[y, x].tolist()
    assert m[y, x] == (expected[0] if channels == 1 else tuple(expected))
    assert m.at(y, x) == m[y, x]
    new = tuple(range(1, channels + 1))
    m[y, x] = new if channels > 1 else new[0]
    wanted = array.copy()
    wanted[y, x] = np.array(new).astype(dtype)
    assert np.array_equal(array, wanted)
    assert m[y, x] == (wanted[y, x, 0].item() if channels == 1 else tuple(wanted[y, x].tolist()))


def test_at_counts_along_a_single_row_or_column() -> None:
    row, column = Mat(np.array([[3, 4, 5]], np.int16)), Mat(np.array([[3], [4]], np.int16))
    assert [row.at(i) for i in range(3)] == [3, 4, 5]
    assert column.at(1) == 4
    assert Mat(np.array([7, 8], np.int16)).at(1) == 8
    with pytest.raises(IndexError):
        row.at(3)


def test_values_are_assigned_to_regions() -> None:
    array = image(5, 6, 3)
    expected = array.copy()
    m = Mat(array)
    m[1:3, 2:5] = (1, 2, 3)
    expected[1:3, 2:5] = (1, 2, 3)
    m[4] = 9
    expected[4] = 9
    source = image(2, 2, 3)
    m[0:2, 0:2] = Mat(source)
    expected[0:2, 0:2] = source
    m[2:4, 4:6] = source
    expected[2:4, 4:6] = source
    m[0:4, 0:5] = m[1:5, 1:6]  # overlapping, with the result as if the operands had been copied first
    expected[0:4, 0:5] = expected[1:5, 1:6].copy()
    assert np.array_equal(array, expected)
    with pytest.raises(ValueError, match="sizes and types must be equal; convertTo changes the type"):
        m[0:2, 0:2] = Mat(source).convertTo(CV_32FC1)
