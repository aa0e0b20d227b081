"""Sizes and strides beyond 32 bits, for the kernels that multiply them by the width of their loads. Torch allocates the
memory lazily, so the tests touch only a few pages of it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop import kernels
from rooftop.kernels.gated import launches
from rooftop.kernels.operands.strided_rows import unit
from rooftop.launch import INTERPRETED

FAR = 1 << 31


def far_rows() -> Tensor:
    """Two rows whose beginnings are 2^31 elements apart, like the logits of the last token of two long sequences."""
    rows = torch.empty(FAR + 64, dtype=torch.bfloat16).as_strided((2, 64), (FAR, 1))
    return rows.copy_(torch.randn(2, 64))


def cross_entropy(function: Callable[..., Tensor], x: Tensor) -> Tensor:
    return function(x, torch.tensor([3, 5]))


CALLS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "softmax": (kernels.softmax, partial(F.softmax, dim=-1)),
    "layer_norm": (lambda x: kernels.layer_norm(x, 64), lambda x: F.layer_norm(x, (64,))),
    "cross_entropy": (partial(cross_entropy, kernels.cross_entropy), partial(cross_entropy, F.cross_entropy)),
    "amax": (lambda x: kernels.amax(x, -1), lambda x: x.amax(-1)),
    "gelu": (kernels.gelu, F.gelu),
    "swiglu": (lambda x: kernels.swiglu(x, x), lambda x: F.silu(x) * x),
}


@pytest.mark.parametrize("name", CALLS)
def test_rows_that_are_two_billion_elements_apart(name: str) -> None:
    ours, by_torch = CALLS[name]
    x = far_rows()
    torch.testing.assert_close(ours(x).float(), by_torch(x.float()), atol=2e-2, rtol=2e-2)


def test_masks_whose_columns_are_far_apart() -> None:
    mask = torch.empty(63 * (1 << 26) + 4, dtype=torch.bool).as_strided((4, 64), (1, 1 << 26))
    mask.copy_(torch.rand(4, 64) > 0.3)
    x = torch.randn(4, 64)
    expected = x.masked_fill(~mask, -torch.inf).softmax(-1)
    torch.testing.assert_close(kernels.softmax(x, mask=mask), expected)


def test_the_unit_of_sizes_beyond_32_bits_is_one() -> None:
    assert [unit(16, 24), unit(4, 0), unit(FAR - 8, 8), unit(FAR, 8)] == [8, 4, 8, 1]


def test_contiguous_tensors_of_two_billion_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """SwiGLU sees contiguous tensors as one row. A kernel must not compute the row's length from 32-bit factors."""
    pytest.importorskip("triton")
    launched: list[tuple[int, int]] = []  # (columns as the kernel gets them, unit)

    def launch(kernel: Any, grid: Any, device: Any, *arguments: Any, UNIT: int, **constants: int) -> None:
        _, columns, *_ = (each for each in arguments if isinstance(each, int))
        launched.append((columns, UNIT))

    monkeypatch.setattr(launches, "require_triton", lambda: None)
    monkeypatch.setattr(launches, "launch", launch)
    gate = torch.empty(FAR // 1024, 1024, dtype=torch.bfloat16, device="meta")
    launches.forward(gate, gate)
    launches.backward(gate, gate, gate, gate, gate)
    assert launched == [(FAR, 1), (FAR, 1)]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) == 9
