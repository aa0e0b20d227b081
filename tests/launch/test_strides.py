"""Merged dimensions visit the same elements, and strides allow no further merging."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from rooftop.launch.strides import Dims, merged, same_layout


def places(dims: Dims, n: int) -> list[int]:
    """The memory offset of each element of a tensor, in order."""
    indices = product(*(range(size) for size, _ in dims))
    return [sum(i * steps[n] for i, (_, steps) in zip(index, dims, strict=True)) for index in indices]


X = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
VIEWS = {
    "contiguous": (1, [X]),
    "a region": (3, [X[:, :2, :3]]),
    "of two": (3, [X, X[:, :1].expand(2, 3, 4, 5)]),
    "transposed": (4, [X.transpose(1, 2)]),
    "repeated": (1, [X[:1, :1, :1, :1].expand(2, 3, 4, 5)]),
    "of two orders": (2, [X.view(6, 20), X.view(20, 6).t()]),
}


@pytest.mark.parametrize("name", VIEWS)
def test_merged_dimensions_have_the_same_elements(name: str) -> None:
    count, tensors = VIEWS[name]
    dims = merged(tensors[0].shape, *(each.stride() for each in tensors))
    assert len(dims) == count
    for n, each in enumerate(tensors):
        memory = each.as_strided((each.untyped_storage().nbytes() // 8,), (1,), 0)
        begin = each.storage_offset()
        assert memory[[begin + place for place in places(dims, n)]].tolist() == each.flatten().tolist()


def test_dimensions_of_one_are_left_out() -> None:
    x: Tensor = torch.zeros(1, 4, 1, 5, 1)
    assert merged(x.shape, x.stride()) == [(20, (1,))]
    assert merged((1, 1), (7, 3)) == []


def test_the_layout_of_a_tensor_is_its_shape_and_the_strides_of_larger_dimensions() -> None:
    x = torch.zeros(1, 3, 4)
    for other, same in [
        (x.as_strided((1, 3, 4), (99, 4, 1)), True),
        (x.as_strided((1, 3, 4), (12, 1, 3)), False),
        (x.view(3, 4), False),
        (x.view(3, 1, 4), False),
    ]:
        assert same_layout(x, other) == same_layout(other, x) == same
