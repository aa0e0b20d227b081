"""Let max pools skip the indices of the maxima, which only training needs (`kernels.max_pool2d`)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from rooftop.kernels import max_pool2d
from rooftop.kernels.operands.dtypes import FLOATS
from rooftop.rewrites.fusing import value_of


def replace_pools(model: nn.Module) -> dict[str, str]:
    """Let `kernels.max_pool2d` compute each `nn.MaxPool2d` of a model, in place, for inference.

    Returns:
        "MaxPool2d" for each replaced pool, by module name. Pools that return indices, are subclasses or have another
        forward are not replaced.
    """
    replaced = {}
    for name, module in model.named_modules():
        as_usual = type(module) is nn.MaxPool2d and "forward" not in vars(module)
        if as_usual and not module.return_indices:
            module.__dict__["forward"] = _Pooling(module)
            replaced[name] = "MaxPool2d"
    return replaced


class _Pooling:
    """The replaced `forward` of an `nn.MaxPool2d`, which runs Rooftop's kernel."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        self.pool = pool

    def __call__(self, input: Any) -> Tensor:
        pool, input = self.pool, value_of(input)
        if not isinstance(input, Tensor) or input.dim() != 4 or input.dtype not in FLOATS:
            return nn.MaxPool2d.forward(pool, input)  # an unbatched image, or arguments that PyTorch refuses
        return max_pool2d(input, pool.kernel_size, pool.stride, pool.padding, pool.dilation, bool(pool.ceil_mode))
