"""cuDNN's operators cost as much as PyTorch's operators of the same definition, and can be counted without a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost
from rooftop.cost.counting import counted

aten = torch.ops.aten


def cost(func: Any, *args: Any, out: Any, **kwargs: Any) -> Cost:
    found, why = counted(Call(func, args, kwargs, out))
    assert found is not None, why
    return found


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def test_the_bilinear_grid_sampler_each_way() -> None:
    source, grid, out = empty(2, 3, 16, 16), empty(2, 4, 4, 2), empty(2, 3, 4, 4)
    bilinear, zeros, align_corners = 0, 0, True
    settings = (bilinear, zeros, align_corners)
    assert cost(aten.cudnn_grid_sampler.default, source, grid, out=out) == cost(
        aten.grid_sampler_2d.default, source, grid, *settings, out=out
    )
    gradients = (torch.empty_like(source), torch.empty_like(grid))
    assert cost(aten.cudnn_grid_sampler_backward.default, source, grid, out, out=gradients) == cost(
        aten.grid_sampler_2d_backward.default, out, source, grid, *settings, [True, True], out=gradients
    )


def test_the_ctc_loss_comes_with_its_gradient() -> None:
    """cuDNN does the flops of PyTorch's forward and backward operators, but never writes the table between them to
    memory."""
    steps, batch, classes, labels = 50, 4, 20, 10
    log_probs, targets = empty(steps, batch, classes), empty(batch, labels, dtype=torch.int64)
    lengths = ([steps] * batch, [labels] * batch)
    loss, table, gradient = empty(batch), empty(batch, steps, 2 * labels + 1), torch.empty_like(log_probs)
    both = cost(aten._cudnn_ctc_loss.default, log_probs, targets, *lengths, 0, False, False, out=(loss, gradient))
    forward = cost(aten._ctc_loss.default, log_probs, targets, *lengths, out=(loss, table))
    backward = cost(
        aten._ctc_loss_backward.default, empty(batch), log_probs, targets, *lengths, loss, table, 0, out=gradient
    )
    assert both.flops == (forward + backward).flops
    assert both.read_bytes == 4 * steps * batch * classes + 8 * batch * labels
    assert both.write_bytes == 4 * batch + 4 * steps * batch * classes
