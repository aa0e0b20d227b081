"""Parts of tensors: their places in the whole, and the cuts that layouts make."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.kernels import Box


@st.composite
def boxes(draw: st.DrawFn, most: int = 12, dimensions: int = 4) -> Box:
    """Parts that are within their whole, with any strides."""
    shape, start, size, stride = [], [], [], []
    for _ in range(draw(st.integers(1, dimensions))):
        extent = draw(st.integers(1, most))
        first = draw(st.integers(0, extent - 1))
        pace = draw(st.integers(1, 4))
        shape.append(extent)
        start.append(first)
        size.append(draw(st.integers(1, 1 + (extent - 1 - first) // pace)))
        stride.append(pace)
    return Box(tuple(shape), tuple(start), tuple(size), tuple(stride))


def places(box: Box) -> Tensor:
    """The places of the part's elements in the flat whole, computed by the map that kernels get."""
    sizes, strides, offset = box.index_map()
    found = torch.tensor([offset])
    for size, stride in zip(sizes, strides, strict=True):
        found = (found[:, None] + stride * torch.arange(size)).flatten()
    return found


def numbered(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).view(shape)


@given(boxes())
@settings(max_examples=100, deadline=None)
def test_the_map_of_a_part_is_where_its_elements_are(box: Box) -> None:
    assert torch.equal(places(box), box.of(numbered(box.shape)).flatten())


def test_dimensions_that_follow_each_other_are_one() -> None:
    assert Box.whole((3, 4, 5)).index_map() == ([60], [1], 0)
    assert Box.shard((8, 6), 0, 1, 4).index_map() == ([12], [1], 12)
    assert Box.shard((8, 6), 1, 1, 2).index_map() == ([8, 3], [6, 1], 3)
    assert Box.whole(()).index_map() == ([1], [1], 0)
    assert Box((7, 5), (2, 3), (1, 1)).index_map() == ([1], [1], 13)


@pytest.mark.parametrize("make", [Box.shard, Box.zigzag])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_parts_of_a_cut_are_the_whole(make: Callable[..., Box], dim: int, count: int) -> None:
    shape = (16, 8, 24)
    held = torch.cat([places(make(shape, dim, index, count)) for index in range(count)])
    assert torch.equal(held.sort().values, numbered(shape).flatten())


def test_a_zigzag_holds_a_chunk_from_the_front_and_one_from_the_back() -> None:
    assert places(Box.zigzag((16,), 0, 1, 4)).tolist() == [2, 3, 12, 13]
    assert Box.zigzag((2, 16, 3), 1, 0, 4).of(numbered((2, 16, 3)))[1, :, :, 0].tolist() == [[48, 51], [90, 93]]


def test_a_part_can_be_cut_again() -> None:
    twice = Box.shard((8, 6), 0, 1, 2).cut(1, 2, 3)
    assert torch.equal(twice.of(numbered((8, 6))), numbered((8, 6))[4:, 4:])
    every_second = Box((8,), (1,), (4,), (2,)).cut(0, 1, 2)
    assert places(every_second).tolist() == [5, 7]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Box((4, 4), (0,), (4, 4)), "the same number of dimensions,"),
        (lambda: Box((4,), (2,), (3,)), "3 elements from index 2, 1 apart, do not fit in a dimension of 4"),
        (lambda: Box((4,), (0,), (3,), (2,)), "3 elements from index 0, 2 apart"),
        (lambda: Box((4,), (-1,), (2,)), "2 elements from index -1"),
        (lambda: Box((4,), (0,), (2,), (0,)), "0 apart"),
        (lambda: Box.shard((6, 4), 0, 0, 4), r"dimension 0 of \(6, 4\) cannot be cut into 4 equal pieces"),
        (lambda: Box.zigzag((6, 4), 0, 0, 2), r"cannot be cut into 4 equal pieces"),
        (lambda: Box.shard((6, 4), 1, 2, 2), "index must be from 0 to 1 for 2 parts, got 2"),
        (lambda: Box.shard((6, 4), 2, 0, 2), r"no dimension 2 in \(6, 4\)"),
    ],
)
def test_parts_that_cannot_be(make: Callable[[], Box], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
