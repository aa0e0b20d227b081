"""Laws of every backward pass. A backward pass gives the same gradients inside and outside of autocast, like PyTorch's
own operators. Autograd creates no zeros for additional results of forward, because writing zeros would cost as much as
reading these results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop import kernels

Made = tuple[list[Tensor], Callable[..., Any]]


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(*shape).requires_grad_() for shape in shapes]


LINE = torch.tensor([[-1, 0, 1], [0, 1, 2], [1, 2, -1]], dtype=torch.int32)  # three sites in a row
CASES: dict[str, Callable[[], Made]] = {
    "attention": lambda: (leaves(*[(2, 3, 16, 8)] * 3), kernels.attention),
    "linear_act": lambda: (leaves((16, 24), (20, 24), (20,)), lambda x, w, b: kernels.linear_act(x, w, b, "gelu")),
    "linear_cross_entropy": lambda: (
        leaves((16, 24), (50, 24)),
        lambda h, w: kernels.linear_cross_entropy(h, w, torch.arange(16)),
    ),
    "cross_entropy": lambda: (leaves((16, 24)), lambda x: kernels.cross_entropy(x, torch.arange(16))),
    "layer_norm": lambda: (leaves((16, 24), (24,), (24,)), lambda x, w, b: kernels.layer_norm(x, (24,), w, b)),
    "softmax": lambda: (leaves((16, 24)), lambda x: kernels.softmax(x, -1)),
    "swiglu": lambda: (leaves((16, 24), (16, 24)), kernels.swiglu),
    "counter_dropout": lambda: (leaves((16, 24)), lambda x: kernels.counter_dropout(x, 0.5, 3)),
    "trilinear_interpolate": lambda: (leaves((16, 8, 8), (16, 3)), kernels.trilinear_interpolate),
    "trilinear_interpolate_cuda": lambda: (leaves((16, 8, 8), (16, 3)), kernels.trilinear_interpolate_cuda),
    "window_attention": lambda: (
        leaves((1, 6, 6, 48), (2, 9, 9)),
        lambda x, bias: kernels.window_attention(x, bias, 2, (3, 3), (1, 1)),
    ),
    "sparse_conv": lambda: (
        leaves((3, 5), (4, 3, 5), (4,)),
        lambda x, w, b: kernels.sparse_conv(x, w, b, LINE),
    ),
    "sparse_max_pool": lambda: (leaves((3, 5)), lambda x: kernels.sparse_max_pool(x, LINE)),
    "sparse_avg_pool": lambda: (leaves((3, 5)), lambda x: kernels.sparse_avg_pool(x, LINE)),
    "sparse_global_max_pool": lambda: (leaves((3, 5)), lambda x: kernels.sparse_global_max_pool(x, LINE[0], 2)),
    "sparse_global_avg_pool": lambda: (leaves((3, 5)), lambda x: kernels.sparse_global_avg_pool(x, LINE[0], 2)),
    "conv_lstm_gates": lambda: (leaves((2, 16, 4, 4), (2, 4, 4, 4)), kernels.conv_lstm_gates),
    "conv_lstm_sequence": lambda: (leaves((3, 2, 16, 4, 4), (16, 4, 3, 3)), kernels.conv_lstm_sequence),
}


@pytest.mark.parametrize("name", CASES)
def test_a_backward_within_autocast_is_one_outside(name: str) -> None:
    def gradients(inside: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        inputs, function = CASES[name]()
        with torch.autocast("cpu", torch.bfloat16):
            found = function(*inputs)
            outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if t.requires_grad]
            douts = [torch.randn(t.shape).to(t.dtype) for t in outputs]
            if inside:
                return torch.autograd.grad(outputs, inputs, douts)
        return torch.autograd.grad(outputs, inputs, douts)

    for within, outside in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(within, outside)


class Zeros(TorchDispatchMode):
    """The shapes of the zero tensors that are created."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        if function.overloadpacket is torch.ops.aten.zeros:
            self.shapes.append(tuple(found.shape))
        return found


@pytest.mark.parametrize("name", CASES)
def test_a_backward_makes_no_zeros_for_what_has_no_gradient(name: str) -> None:
    inputs, function = CASES[name]()
    found = function(*inputs)
    outputs = [t for t in (found if isinstance(found, tuple) else (found,)) if t.requires_grad]
    douts = [torch.randn(t.shape).to(t.dtype) for t in outputs]
    with Zeros() as zeros:
        torch.autograd.grad(outputs, inputs, douts)
    sums = [t.shape for t in inputs] if name.startswith("trilinear") else []  # gradients that are added up
    assert set(zeros.shapes) <= set(sums), zeros.shapes
