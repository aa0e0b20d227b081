"""The accelerated interpreter computes what Triton's own interpreter computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rooftop.launch import INTERPRETED

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

in_interpreted_run = pytest.mark.skipif(not INTERPRETED, reason="runs within the last test")


@triton.jit
def _after(a, b, c, d):
    return a * c, b * c + d


@triton.jit
def _compose(slopes, offsets, slope_out, offset_out, rows: tl.constexpr, columns: tl.constexpr):
    places = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None, :]  # (rows, columns)
    slope, offset = tl.reduce((tl.load(slopes + places), tl.load(offsets + places)), 1, _after)
    tl.store(slope_out + tl.arange(0, rows), slope)
    tl.store(offset_out + tl.arange(0, rows), offset)


@triton.jit
def _double(x, y):
    tl.store(y, tl.load(x) * 2)


@in_interpreted_run
@pytest.mark.parametrize("columns", [1, 2, 8])
def test_a_reduction_keeps_the_order(columns: int) -> None:
    """The composition of maps x -> slope * x + offset: associative, not commutative. Small integers are exact."""
    slopes, offsets = torch.randint(-2, 3, (2, 4, columns)).float()
    found = torch.full((2, 4), torch.nan)
    _compose[(1,)](slopes, offsets, found[0], found[1], rows=4, columns=columns)
    slope, offset = torch.ones(4), torch.zeros(4)
    for column in range(columns):
        slope, offset = slope * slopes[:, column], offset * slopes[:, column] + offsets[:, column]
    assert torch.equal(found, torch.stack((slope, offset)))


@in_interpreted_run
@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_integers_wrap_around_as_on_a_gpu(dtype: torch.dtype) -> None:
    limits, y = torch.iinfo(dtype), torch.zeros(1, dtype=dtype)
    for x, doubled in ((limits.max // 2, limits.max - 1), (limits.max, -2)):
        _double[(1,)](torch.tensor([x], dtype=dtype), y)
        assert y.item() == doubled


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) == 5
