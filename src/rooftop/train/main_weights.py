"""The weights that an optimizer steps: a model's own, or float32 copies where it computes in a narrow dtype.

In bfloat16 a weight has 8 bits: a step of less than 1/256 of it would be lost, and so would the small ones among the
gradients of several micro-batches. So both are kept in float32, and the model gets what the step makes, rounded.

Source: Micikevicius et al. 2018, "Mixed Precision Training" (arXiv:1710.03740), section 3.1.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MainWeights:
    """Of a model in float32 or float64, which then computes in `dtype`.

    Args:
        model: gets the dtype, with the same parameters in it.
        dtype: bfloat16; or the one that it has, and nothing is copied.

    Attributes:
        named: what the optimizer steps, by the model's names; tied ones once. Their gradients are complete after each
            backward; with copies the model's own are gone by then.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        own = dict(model.named_parameters())
        self.narrow = any(parameter.dtype != dtype for parameter in own.values())
        self.named = own
        if not self.narrow:
            return
        self.named = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in own.items()}
        model.to(dtype)
        self._model_has: list[Tensor] = list(own.values())
        for name, parameter in own.items():
            parameter.register_post_accumulate_grad_hook(_AddedTo(self.named[name]))

    @torch.no_grad()
    def publish(self) -> None:
        """Give the model what the optimizer has made."""
        if self.narrow:
            torch._foreach_copy_(self._model_has, [*self.named.values()])


class _AddedTo:
    """Moves a parameter's gradient into that of its copy."""

    def __init__(self, main: nn.Parameter) -> None:
        self.main = main

    def __call__(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        if self.main.grad is None:
            self.main.grad = parameter.grad.to(self.main.dtype)
        else:
            self.main.grad += parameter.grad
        parameter.grad = None
