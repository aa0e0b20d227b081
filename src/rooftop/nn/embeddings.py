"""Embeddings as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels import embedding


class Embedding(torch.nn.Embedding):
    """`torch.nn.Embedding`, with the same parameters and state dict, computed by `rooftop.kernels.embedding`."""

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
