"""Embeddings as a module."""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.kernels import embedding


class Embedding(torch.nn.Embedding):
    """`torch.nn.Embedding`, parameters and state included, computed by `rooftop.kernels.embedding`."""

    def forward(self, input: Tensor) -> Tensor:
        """input of any shape, tokens; (*input.shape, D). What `embedding` refuses is refused here."""
        return embedding(
            input,
            self.weight,
            self.padding_idx,
            self.max_norm,
            self.norm_type,
            self.scale_grad_by_freq,
            self.sparse,
        )
