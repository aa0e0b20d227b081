"""Max pooling of images for inference: y = the largest value in each window, without its position.

The operator is bound by memory: the kernel reads the image once, and writes one result for each window. PyTorch's
operator also writes the position of each maximum, which only backward needs. A position has 8 bytes, while a value in
half precision has 2 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.convolutions import launches
from rooftop.kernels.convolutions.tables import Geometry, PoolPlan
from rooftop.kernels.operands.checks import check_tensors, two_integers
from rooftop.kernels.operands.dtypes import FLOATS
from rooftop.launch.operators import declare, no_tangents
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

Pair = int | Sequence[int]

# ---- operator --------------------------------------------------------------------------------------------------


class MaxPool(NamedTuple):
    """Max pooling of x (N, C, H, W) to (N, C, OH, OW). The result is channels last if x is channels last and the shape
    of x distinguishes this format from contiguous.
    """

    x: Tensor
    kernel: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    ceil_mode: bool

    def run(self) -> Tensor:
        plan = launches.pool_plan_of(self.x, _geometry(*self))
        if plan.backend == "reference":
            return self.in_pytorch()
        return launches.max_pool(plan, self.x).contiguous(memory_format=self._format())

    def fake(self) -> Tensor:
        shape = (*self.x.shape[:2], *_geometry(*self).out)
        return self.x.new_empty(shape).to(memory_format=self._format())

    def in_pytorch(self) -> Tensor:
        x, *window, ceil_mode = self
        kernel, stride, padding, dilation = map(list, window)
        y = functional.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
        return y.contiguous(memory_format=self._format())

    def _format(self) -> torch.memory_format:
        last = self.x.is_contiguous(memory_format=torch.channels_last) and not self.x.is_contiguous()
        return torch.channels_last if last else torch.contiguous_format

    def cost(self, made: Tensor) -> Cost:
        """Flops: one comparison for each element of each window. Only pixels inside windows count as read."""
        from rooftop.cost.formulas.windows import touched_bytes

        x, *window, _ = self
        read = touched_bytes(x, made.shape[2:], *window)
        return Cost(read, distinct_bytes([made]), {precision_of(x.dtype): made.numel() * math.prod(self.kernel)})


_max_pool2d = declare("max_pool2d", MaxPool, known=True)


def _geometry(
    x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    ceil_mode: bool,
) -> Geometry:  # fmt: skip
    (batch, channels, height, width), (down, right), (lines, pixels) = x.shape, stride, padding
    window, apart = (kernel[0], kernel[1]), (dilation[0], dilation[1])
    return Geometry(
        batch, channels, height, width, channels, window, (down, right), (lines, pixels), apart, 1, ceil_mode
    )


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def max_pool2d(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False,
) -> Tensor:  # fmt: skip
    """The largest value in each window, for inference, with the arguments of `torch.nn.functional.max_pool2d`.

    On a GPU, a Rooftop kernel computes the result if the input is channels last
    (`.to(memory_format=torch.channels_last)`) and not float64, and a window has 25 elements or fewer. PyTorch computes
    all other results.

    Args:
        input: (N, C, H, W), bfloat16, float16, float32 or float64.
        kernel_size, stride, padding, dilation: a number, or a pair (vertical, horizontal). A stride of None means the
            kernel size. Padding has the value -inf, and is at most half of the kernel size.
        ceil_mode: round the size of the result up instead of down. If the size is rounded up, the last window may reach
            beyond the padded image.

    Returns:
        (N, C, OH, OW), channels last if input is. A result is NaN if its window contains a NaN.

    Raises:
        TypeError: the input's layout is not `torch.strided`, its dtype is not floating point, or a size is not an
            integer.
        ValueError: shapes or sizes do not match.
        NotImplementedError: the input needs a gradient, or forward-mode differentiation is active.
    """
    window = _window("max_pool2d", input, kernel_size, stride, padding, dilation, ceil_mode)
    no_tangents("max_pool2d", input)
    if torch.is_grad_enabled() and input.requires_grad:
        raise NotImplementedError(
            "max_pool2d has no gradient: use torch.nn.functional.max_pool2d to train, or torch.no_grad()"
        )
    return _max_pool2d(input, *window)


def max_pool2d_plan(
    input: Tensor, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0, dilation: Pair = 1,
    ceil_mode: bool = False,
) -> PoolPlan:  # fmt: skip
    """Return how `max_pool2d` would compute a call, and the reason, without computing it. Arguments and errors are
    those of `max_pool2d`, except for the errors about gradients.
    """
    window = _window("max_pool2d_plan", input, kernel_size, stride, padding, dilation, ceil_mode)
    return launches.pool_plan_of(input, _geometry(input, *window))


def _window(
    name: str, x: Tensor, kernel_size: Pair, stride: Pair | None, padding: Pair, dilation: Pair, ceil_mode: bool
) -> tuple[list[int], list[int], list[int], list[int], bool]:
    """Check the arguments, and return (kernel, stride, padding, dilation, ceil_mode)."""
    check_tensors(name, FLOATS, input=x)
    kernel = list(two_integers(name, "kernel_size", kernel_size, 1))
    padded = list(two_integers(name, "padding", padding, 0))
    apart = list(two_integers(name, "dilation", dilation, 1))
    steps = kernel if stride is None else list(two_integers(name, "stride", stride, 1))
    if type(ceil_mode) is not bool:
        raise TypeError(f"{name}: ceil_mode must be True or False, got {ceil_mode!r}")
    if x.dim() != 4 or 0 in x.shape[1:]:
        raise ValueError(f"{name}: expected input (N, C, H, W) with channels and pixels, got {tuple(x.shape)}")
    if any(2 * p > k for p, k in zip(padded, kernel, strict=True)):
        raise ValueError(f"{name}: padding must be at most half of kernel_size {kernel}, got {padded}")
    if min(_geometry(x, kernel, steps, padded, apart, ceil_mode).out) < 1:
        raise ValueError(
            f"{name}: the window does not fit into the input, {tuple(x.shape)} with kernel_size={kernel}, "
            f"padding={padded}, dilation={apart}: pad the input"
        )
    return kernel, steps, padded, apart, ceil_mode
