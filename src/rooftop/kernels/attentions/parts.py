"""Attention to a part of the keys. The results of all parts are merged later; the gradients of a part are computed from
the merged results.

Forward returns a part's result and log-sum-exp, which `merge_attention_states` merges. Backward reads the merged
results, because with L over all keys, exp(S - L) are the probabilities of the whole row, and rowsum(dO O) is the sum
over the whole row. So backward does not need the results of single parts. Liu et al. 2023, "Ring Attention with
Blockwise Transformers" (arXiv:2310.01889).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from rooftop.kernels.attentions.attentions import attention, kv_of_groups, scores_of
from rooftop.kernels.attentions.plans import plan_of, shape_of


def attention_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute (out, log-sum-exp) of attention to a part of the keys, without gradients.

    Args:
        query: (B, H, S_q, D).
        key, value: (B, H_k, S_k, D), where H_k divides H.
        mask: (S_q, S_k) bool, True where a query attends to a key; None: each query attends to all keys.
        is_causal: as in `attention`.
        scale: factor of the scores.
    """
    with torch.no_grad():
        return attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True, return_lse=True
        )


def attention_part_backward(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dquery, dkey, dvalue) of one part of the keys; `out` and `lse` are the merged results of all parts."""
    mask = None if mask is None else mask[None, None]
    shape = shape_of(query, key, value, mask, is_causal)
    if plan_of(shape, query.device, "backward").backend == "reference":
        return attention_part_backward_reference(dout, query, key, value, mask, out, lse, is_causal, scale)
    features = query.shape[3]
    if features % 8:  # the back ends load 16 bytes at a time
        dout, query, key, value, out = (pad(t, (0, -features % 8)) for t in (dout, query, key, value, out))
    found = torch.ops.rooftop.attention_backward(
        dout, None, query, key, value, mask, out, lse.contiguous(), is_causal, scale, False
    )
    dquery, dkey, dvalue = (each[..., :features] for each in found[:3])
    return dquery, dkey, dvalue


def attention_part_backward_reference(
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `attention_part_backward` in plain PyTorch, with float32 or float64 intermediates."""
    scores, keys, values = scores_of(query, key, value, mask, is_causal, scale)
    weights = (scores - lse[..., None]).exp().masked_fill((lse == -math.inf)[..., None], 0.0)
    gradient = dout.to(scores.dtype)
    delta = (gradient * out.to(scores.dtype)).sum(-1, keepdim=True)
    dscores = weights * (gradient @ values.mT - delta)
    dquery = dscores @ keys * scale
    dkey = dscores.mT @ query.to(scores.dtype) * scale
    dvalue = weights.mT @ gradient
    return dquery.to(query.dtype), kv_of_groups(dkey, key).to(key.dtype), kv_of_groups(dvalue, value).to(value.dtype)
