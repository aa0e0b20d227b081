"""Embeddings as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rooftop.kernels import embedding
from rooftop.kernels.lookups.embeddings import check_unsupported


class Embedding(torch.nn.Embedding):
    """`torch.nn.Embedding`, with the same parameters and state dict, computed by `rooftop.kernels.embedding`.

    Raises:
        NotImplementedError: max_norm, scale_grad_by_freq or sparse is given.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_unsupported(self.max_norm, self.scale_grad_by_freq, self.sparse)

    def reset_parameters(self) -> None:
        """Draw initial values, as `torch.nn.Embedding` does. On the meta device there are none, and PyTorch would
        import its compiler to draw them, which takes more than a second."""
        if not self.weight.is_meta:
            super().reset_parameters()

    def forward(self, input: Tensor) -> Tensor:
        """Look up tokens of any shape. The result is (*input.shape, D). Errors are as in `embedding`."""
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
