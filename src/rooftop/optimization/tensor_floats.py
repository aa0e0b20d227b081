"""Run a model as tensor cores run it in TF32: they drop the lowest 13 bits of float32 operands.

PyTorch allows TF32 in convolutions by default, and in matrix products on request. Which kernels use TF32 depends on
shapes and layouts, so a model may run without TF32 until a change uses another layout. So if PyTorch's settings allow
TF32, the error of TF32 is allowed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftop.cost import matrix_precision
from rooftop.hardware.observing import LightMode

DROPPED = (1 << 13) - 1
"""The bits of a float32 that TF32 does not have."""
PRODUCTS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "baddbmm": (1, 2), "linear": (0, 1), "matmul": (0, 1)}
"""Argument positions of the operands of each operator."""


class InTensorFloats(LightMode):
    """Drop the bits that TF32 lacks from operands of convolutions and matrix products, where PyTorch's settings allow
    TF32.

    Attributes:
        used: whether any operand was changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = list(args)
        for place in _operands(func):
            if place < len(given) and isinstance(given[place], Tensor):
                given[place] = self._dropped(given[place], "conv" in func._schema.name)
        return func(*given, **(kwargs or {}))

    def _dropped(self, tensor: Tensor, convolution: bool) -> Tensor:
        if tensor.dtype != torch.float32 or matrix_precision(tensor, convolution=convolution) != "tf32":
            return tensor
        self.used = True
        return (tensor.view(torch.int32) & ~DROPPED).view(torch.float32)


def _operands(func: Any) -> tuple[int, ...]:
    space, _, name = func._schema.name.partition("::")
    if space != "aten":
        return ()
    if "conv" in name:
        return (0, 1, 2) if name.endswith("backward") else (0, 1)
    return PRODUCTS.get(name, ())
