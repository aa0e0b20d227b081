"""Scaled dot-product attention as PyTorch computes it on an NVIDIA GPU: in one kernel if a kernel supports the call,
otherwise as separate matrix products and a softmax.

This file follows PyTorch's ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp, for Ampere and later GPUs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.torch_versions import torch_at_least

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


def attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention on fake CPU tensors, but with a GPU's operators: one kernel if a GPU has a kernel for these
    shapes, dtypes and masks, otherwise separate matrix products and a softmax."""
    if query.dim() == 3 and all(t.dim() == 3 for t in (key, value)) and torch_at_least(2, 14):
        # since PyTorch 2.14, tensors (H, S, D) count as a batch of one
        mask = attn_mask.unsqueeze(0) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        query, key, value = (t.unsqueeze(0) for t in (query, key, value))
        output = attention(func, query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return output.squeeze(0)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        shown, hidden = (torch.scalar_tensor(v, dtype=query.dtype) for v in (0.0, float("-inf")))
        attn_mask = torch.where(attn_mask, shown, hidden)
    kernel = _kernel_for(query, key, value, attn_mask, is_causal, enable_gqa)
    with_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if kernel == "flash":
        width = query.shape[-1]
        query, key, value = (_padded(t, 8) for t in (query, key, value))
        scale = scale if scale is not None else width**-0.5
        flash = aten._scaled_dot_product_flash_attention
        output = flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0][..., :width]
    elif kernel == "math":
        math = aten._scaled_dot_product_attention_math
        output = math(query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    else:
        bias = _bias(attn_mask, query, key)
        if kernel == "cudnn":
            cudnn = aten._scaled_dot_product_cudnn_attention
            output = cudnn(query, key, value, bias, with_gradient, dropout_p, is_causal, False, scale=scale)[0]
        else:
            efficient = aten._scaled_dot_product_efficient_attention
            output = efficient(query, key, value, bias, with_gradient, dropout_p, is_causal, scale=scale)[0]
    attended: Tensor = output
    return attended


def _kernel_for(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, grouped: bool) -> str:
    """The kernel that an NVIDIA GPU (Ampere or later) runs for this attention; "math" if none supports the call."""
    tensors = (query, key, value)
    if any(t.dim() != 4 or t.dtype != query.dtype or t.numel() == 0 for t in tensors) or query.is_nested:
        return "math"
    if len({t.shape[0] for t in tensors}) > 1 or (mask is not None and is_causal):
        return "math"
    same_heads = len({t.shape[1] for t in tensors}) == 1
    if not same_heads and not grouped:
        return "math"
    enabled, half = torch.backends.cuda, query.dtype in _HALVES
    widths = {t.shape[-1] for t in tensors}
    aligned = all(width % (8 if half else 4) == 0 for width in widths)
    if enabled.flash_sdp_enabled() and half and mask is None and len(widths) == 1 and max(widths) <= 256:
        return "flash"
    efficient = same_heads and (half or query.dtype == torch.float32)
    if enabled.mem_efficient_sdp_enabled() and efficient and aligned and query.shape[-1] == key.shape[-1]:
        return "efficient"
    if enabled.cudnn_sdp_enabled() and half and aligned and max(widths) <= 256:
        return "cudnn"
    return "math"


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    missing = -tensor.shape[-1] % multiple
    return F.pad(tensor, (0, missing)) if missing else tensor


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask expanded to (B, H, S_q, S_k). In memory, each row of S_k elements is padded to a multiple of 16."""
    if mask is None:
        return None
    keys = key.shape[2]
    if mask.shape[-1] == keys:
        mask = _padded(mask, 16)[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], keys)
