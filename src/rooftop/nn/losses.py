"""The cross entropy as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftop.kernels import cross_entropy
from rooftop.launch.symbolic import recorded_whole


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`torch.nn.CrossEntropyLoss` with z-loss, computed by `rooftop.kernels.cross_entropy`.

    For targets that are class probabilities, PyTorch computes the loss; with z-loss, such targets raise an error.
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.z_loss = z_loss

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        """Compute the loss. An input with V classes is (N, V), (V,) or (N, V, ...), and its target is (N,), () or
        (N, ...). The result is a scalar (); with reduction="none" it has the shape of target.
        """
        options = {
            "ignore_index": self.ignore_index,
            "reduction": self.reduction,
            "label_smoothing": self.label_smoothing,
        }
        return loss_of(input, target, self.weight, self.z_loss, **options)


@recorded_whole
def loss_of(input: Tensor, target: Tensor, weight: Tensor | None, z_loss: float, **options: Any) -> Tensor:
    """Compute the result of `CrossEntropyLoss`. If the target is class probabilities, PyTorch computes the result."""
    if isinstance(target, Tensor) and target.is_floating_point() and z_loss == 0.0:
        return torch.nn.functional.cross_entropy(input, target, weight, **options)
    if isinstance(target, Tensor) and target.dtype == torch.uint8:  # PyTorch accepts uint8 targets
        target = target.long()
    return cross_entropy(input, target, weight, z_loss=z_loss, **options)
