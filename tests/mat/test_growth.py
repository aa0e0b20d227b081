"""Rows are added and removed as in a list, and never overwrite the rows of another header."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop import mat
from rooftop.mat import CV_8U, CV_8UC3, CV_32FC1, Mat

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(0, 4)),
        st.tuples(st.just("pop"), st.integers(0, 3)),
        st.tuples(st.just("resize"), st.integers(0, 9)),
        st.tuples(st.just("reserve"), st.integers(0, 20)),
        st.tuples(st.just("share"), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=70, deadline=None)
@given(OPERATIONS, st.sampled_from([CV_8U, CV_8UC3, mat.CV_64FC1, mat.CV_16UC(5)]), st.integers(1, 3))
def test_rows_are_those_of_a_list(operations: list[tuple[str, int]], type: int, cols: int) -> None:
    """Headers created between the operations keep their rows."""
    m = Mat(0, cols, type)
    rows: list[int] = []
    shared: list[tuple[Mat, list[int]]] = []
    number = 0
    for what, count in operations:
        if what == "push":
            new = Mat(count, cols, type)
            for row in range(count):
                number += 1
                new.row(row).setTo(number % 200)
            m.push_back(new)
            rows += [(number - count + 1 + row) % 200 for row in range(count)]
        elif what == "pop":
            count = min(count, len(rows))
            m.pop_back(count)
            del rows[len(rows) - count :]
        elif what == "resize":
            m.resize(count, 7)
            rows = rows[:count] + [7] * (count - len(rows))
        elif what == "reserve":
            m.reserve(count)
        else:
            shared.append((Mat(m), list(rows)))
        for header, expected in [(m, rows), *shared]:
            assert tuple(header.size) == (len(expected), cols)
            numbers = header.tensor().double().reshape(len(expected), cols * header.channels())
            assert numbers.tolist() == [[float(row)] * numbers.shape[1] for row in expected]
            assert header.isContinuous()


def test_pushing_takes_memory_seldom() -> None:
    m = Mat(0, 1, CV_32FC1)
    blocks = set()
    for number in range(1000):
        m.push_back(number)
        blocks.add(m.data_ptr())
    assert m.numpy()[:, 0].tolist() == list(range(1000))
    assert len(blocks) <= 12  # from 16 on, the capacity grows by half each time: 16 * 1.5 ** 11 > 1000


def test_reserved_rows_come_without_a_move() -> None:
    m = Mat(2, 3, CV_8UC3, 1)
    m.reserve(50)
    pointer = m.data_ptr()
    assert len(m) == 2
    for _ in range(48):
        m.push_back(Mat(1, 3, CV_8UC3, 2))
    assert m.data_ptr() == pointer
    m.push_back(Mat(1, 3, CV_8UC3, 3))
    assert m.data_ptr() != pointer
    assert m.numpy()[:, 0, 0].tolist() == [1] * 2 + [2] * 48 + [3]
    m.pop_back(10)
    pointer = m.data_ptr()
    m.push_back(Mat(5, 3, CV_8UC3, 4))
    assert m.data_ptr() == pointer


@pytest.mark.parametrize("wrong", [2.5, "3", None])
def test_a_number_of_rows_is_an_integer(wrong: object) -> None:
    """`resize(3.5)` made a Mat of 3.5 rows."""
    m = Mat(2, 3, CV_8UC3, 1)
    for change in (m.resize, m.reserve, m.pop_back):
        with pytest.raises(TypeError, match="integer"):
            change(wrong)  # type: ignore[arg-type]
    assert m.size == (2, 3)
    m.resize(np.int64(4))
    assert m.size == (4, 3)


def test_a_mat_is_pushed_to_itself() -> None:
    m = Mat(np.arange(6, dtype=np.uint8).reshape(3, 2))
    m.push_back(m)
    assert m.numpy().tolist() == [[0, 1], [2, 3], [4, 5]] * 2
    m.push_back(m[1:3])
    assert m.numpy().tolist() == [[0, 1], [2, 3], [4, 5]] * 2 + [[2, 3], [4, 5]]
    m.reserve(100)
    m.push_back(m.rowRange(0, 2))  # in place
    assert m.numpy()[-2:].tolist() == [[0, 1], [2, 3]]


def test_rows_pushed_to_a_region_leave_the_whole_alone() -> None:
    array = np.arange(20, dtype=np.uint8).reshape(5, 4)
    before = array.copy()
    region = Mat(array)[1:3, 1:3]
    region.push_back(Mat(np.array([[90, 91]], np.uint8)))
    assert region.numpy().tolist() == [[5, 6], [9, 10], [90, 91]]
    assert not region.isSubmatrix()
    assert np.array_equal(array, before)
    cut = Mat(array)[0:4]
    cut.pop_back(2)
    assert cut.isSubmatrix()
    assert cut.numpy().tolist() == before[:2].tolist()


def test_two_headers_push_to_places_of_their_own() -> None:
    """Unlike here, OpenCV lets the second header overwrite the row of the first."""
    one = Mat(1, 1, CV_8U, 1)
    one.reserve(64)
    two = Mat(one)
    one.push_back(2)
    two.push_back(3)
    assert one.numpy().ravel().tolist() == [1, 2]
    assert two.numpy().ravel().tolist() == [1, 3]


def test_memory_that_was_given_is_not_grown_into() -> None:
    array = np.arange(8, dtype=np.uint8).reshape(4, 2)
    m = Mat(array)
    m.pop_back(2)
    m.push_back(Mat(np.array([[90, 91]], np.uint8)))
    assert m.numpy().tolist() == [[0, 1], [2, 3], [90, 91]]
    assert array.ravel().tolist() == list(range(8))


def test_rows_of_more_dimensions_and_of_one() -> None:
    cube = Mat((0, 2, 2), CV_8U)
    cube.push_back(Mat((2, 2, 2), CV_8U, 4))
    cube.push_back(Mat((1, 2, 2), CV_8U, 5))
    assert cube.numpy()[:, 1, 1].tolist() == [4, 4, 5]
    line = Mat((0,), mat.CV_32FC2)
    line.push_back((1, 2))
    line.push_back((3, 4))
    assert line.numpy().tolist() == [[1, 2], [3, 4]]


def test_an_empty_mat_takes_the_type_of_what_is_pushed() -> None:
    m = Mat()
    source = Mat(2, 3, CV_8UC3, 8)
    m.push_back(source)
    assert (m.type(), tuple(m.size)) == (CV_8UC3, (2, 3))
    assert m.data is not source.data


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.push_back(Mat(1, 2, CV_8UC3)), "must have the same length and type"),
        (lambda m: m.push_back(Mat(1, 3, CV_8U)), "must have the same length and type"),
        (lambda m: m.push_back(5), "one element can be pushed to a single column"),
        (lambda m: m.pop_back(3), "cannot remove 3 rows from"),
        (lambda m: m.pop_back(-1), "cannot remove -1 rows from"),
        (lambda m: m.reserve(-1), "reserve takes a number of rows"),
        (lambda m: m.resize(-1), "resize takes a number of rows"),
        (lambda m: Mat().reserve(3), r"create\(0, cols, type\) first"),
    ],
)
def test_rows_that_do_not_fit(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(Mat.zeros(2, 3, CV_8UC3))  # type: ignore[operator]
