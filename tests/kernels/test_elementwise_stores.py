"""Expressions stored into memory that is there: strided results, repeating operands, float64, one kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rooftop.kernels.elementwise_stores import store_fused
from rooftop.launch import INTERPRETED
from rooftop.launch.triton_launch import count_launches

pytest.importorskip("triton")
launches = pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="kernels run on a GPU")
DEVICE = "cpu" if INTERPRETED else "cuda"


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 9).to(
        DEVICE, dtype
    )


@pytest.mark.skipif(INTERPRETED, reason="is what runs the others so")
def test_kernels_on_the_cpu(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) == 7


@launches
@pytest.mark.parametrize("columns", [slice(0, 40), slice(3, 20), slice(7, 8)])
def test_regions_are_written_and_nothing_beside_them(columns: slice) -> None:
    a, b = drawn(9, 40), drawn(40, 9, seed=1).t()
    whole = torch.full((9, 40), 7.0, dtype=torch.float64, device=DEVICE)
    expected = whole.clone()
    with count_launches() as counted:
        store_fused(
            "ttn: a0 * (float64(a2) + 0.0) + a1 / 3", [a[2:8, columns], b[2:8, columns]], [0.5], whole[2:8, columns]
        )
    assert sum(counted.values()) == 1
    expected[2:8, columns] = a[2:8, columns] * 0.5 + b[2:8, columns] / 3
    assert torch.equal(whole, expected)


@launches
def test_float64_is_rounded_after_each_operation() -> None:
    a, b, c = (drawn(5000, seed=n) for n in range(3))
    out = torch.empty_like(a)
    store_fused("ttt: a0 * a1 + a2 / a0", [a, b, c], [], out)
    assert torch.equal(out, a * b + c / a)


@launches
def test_operands_that_repeat_along_the_last_dimension() -> None:
    x = drawn(5, 1400, 3, dtype=torch.float32)
    row = torch.tensor([1.0, 20.0, 300.0], device=DEVICE)
    for given in (x, x[1:4, 5:900]):
        out = torch.empty_like(x)[: given.shape[0], : given.shape[1]]
        store_fused("tt: a0 + a1", [given, row], [], out, {1: 3})
        assert torch.equal(out, given + row)


@launches
def test_dimensions_that_do_not_merge() -> None:
    x = drawn(4, 4, 4, 4, 4, 4, 4)[tuple([slice(0, 3)] * 7)]
    out = torch.zeros((4,) * 7, dtype=torch.float64, device=DEVICE)[tuple([slice(1, 4)] * 7)]
    store_fused("t: a0 + 1", [x], [], out)
    assert torch.equal(out, x + 1)


@launches
def test_what_is_refused() -> None:
    x = drawn(4)
    with pytest.raises(TypeError, match="the result has dtype"):
        store_fused("t: a0 + 1", [x], [], x.float())
    with pytest.raises(TypeError, match="exp is not computed in float64"):
        store_fused("t: exp(a0)", [x], [], x)
    with pytest.raises(ValueError, match="takes other arguments"):
        store_fused("tt: a0 + a1", [x], [], x)
