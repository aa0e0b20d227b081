"""Max pools that do not write where the maxima were, which only training needs (`kernels.max_pool2d`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rooftop.inference.fusing import value_of
from rooftop.kernels import max_pool2d
from rooftop.kernels.operands.dtypes import FLOATS


def replace_pools(model: nn.Module) -> dict[str, str]:
    """Let `kernels.max_pool2d` compute a model's `nn.MaxPool2d`, in place, for inference.

    Returns:
        Their names in the model, with their kind. Those that give indices, round up, are of a subclass or have another
        forward stay as they are.
    """
    replaced = {}
    for name, module in model.named_modules():
        as_usual = type(module) is nn.MaxPool2d and "forward" not in vars(module)
        if as_usual and not module.return_indices and not module.ceil_mode:
            module.__dict__["forward"] = _Pooling(module)
            replaced[name] = "MaxPool2d"
    return replaced


class _Pooling:
    """The forward of such a pool."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        self.pool = pool

    def __call__(self, input: Any) -> Tensor:
        pool, input = self.pool, value_of(input)
        if not isinstance(input, Tensor) or input.dim() != 4 or input.dtype not in FLOATS:
            return nn.MaxPool2d.forward(pool, input)  # a single image, or what PyTorch refuses
        return max_pool2d(input, pool.kernel_size, pool.stride, pool.padding, pool.dilation)
