"""Linear layers fused with the operations after them."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels import linear_act
from rooftop.kernels.operands.activations import ACTIVATIONS
from rooftop.words import did_you_mean


class LinearAct(torch.nn.Linear):
    """`torch.nn.Linear` followed by an activation, computed by `rooftop.kernels.linear_act`. Parameters and state dict
    are those of `torch.nn.Linear`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "none",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Arguments as in `torch.nn.Linear` and `linear_act`; an unknown activation raises ValueError."""
        if activation not in ACTIVATIONS:
            raise ValueError(
                f"LinearAct: activation must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
                f"{did_you_mean(activation, ACTIVATIONS)}"
            )
        super().__init__(in_features, out_features, bias, device, dtype)
        self.activation = activation

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute activation(linear(input)) + residual.

        The input is (..., in_features); the residual and the result are (..., out_features).
        """
        return linear_act(input, self.weight, self.bias, self.activation, residual)

    def extra_repr(self) -> str:
        """The text of `torch.nn.Linear.extra_repr`, followed by the activation."""
        return f"{super().extra_repr()}, activation={self.activation}"
