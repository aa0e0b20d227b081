"""Cost of the attention kernels that libraries and nested tensors call directly, not through
`scaled_dot_product_attention`. Here the dimension of the heads comes after the dimension of the positions.

Queries are (B, S, H, D). With `cum_seq` queries are (1, T, H, D) or (T, H, D): sequences of different lengths, packed
end to end. The lengths are values of a tensor, but a cost depends only on shapes. Sequences that attend to themselves
have at least as many pairs as B equal sequences of T / B positions, since the sum of squares is least for equal
lengths. So the formulas count the pairs of B equal sequences.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.softmaxes import SOFTMAX_BACKWARD_FLOPS, SOFTMAX_FLOPS
from rooftop.cost.formulas.streaming import arithmetic, aten
from rooftop.cost.registry import cost_of


@cost_of(
    *aten("_cudnn_attention_forward _efficient_attention_forward _flash_attention_forward"),
    *aten("_flash_attention_forward_no_dropout_inplace"),
    *("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_out"),
)
def attention_kernel(call: Call) -> Cost:
    """The kernel reads queries, keys, values, the lengths of the sequences and the bias. The kernel writes the output
    and each row's log-sum-exp."""
    query, key, value, bias = call["query"], call["key"], call["value"], _bias(call)
    pairs = _pairs(call)
    flops = merged(
        matrix_flops(query, pairs * (key.shape[-1] + value.shape[-1])),
        arithmetic(pairs * (SOFTMAX_FLOPS + (bias is not None)), [query]),
    )
    written = [call["out"], call.out] if "out" in call else call.results[:2]
    return Cost(distinct_bytes([query, key, value, bias, *_lengths(call)]), distinct_bytes(written), flops)


@cost_of(
    *aten("_cudnn_attention_backward _efficient_attention_backward _flash_attention_backward"),
    "torch_attn::_varlen_attn_backward",
)
def attention_kernel_backward(call: Call) -> Cost:
    """Backward computes the scores again, and the gradients of queries, keys and values. The gradient of the bias takes
    no matrix product; if it is requested, it counts as written."""
    query, key, value, bias = call["query"], call["key"], call["value"], _bias(call)
    gradient = call["grad_out"] if "grad_out" in call else call["grad_out_"]
    pairs = _pairs(call)
    flops = merged(
        matrix_flops(query, pairs * (3 * key.shape[-1] + 2 * value.shape[-1])),
        arithmetic(pairs * (2 + (bias is not None) + SOFTMAX_BACKWARD_FLOPS), [query]),
    )
    log_sum_exp = call["logsumexp"] if "logsumexp" in call else call["lse"]
    read = [gradient, query, key, value, bias, call["out"], log_sum_exp, *_lengths(call)]
    written = [*call.results[:3], *(call.results[3:] if call.get("bias_requires_grad") else [])]
    return Cost(distinct_bytes(read), distinct_bytes(written), flops)


def _bias(call: Call) -> Tensor | None:
    bias: Tensor | None = call.get("bias", call.get("attn_bias"))
    return bias


def _lengths(call: Call) -> list[Tensor | None]:
    names = (*_STARTS, "cum_seq_k", "cu_seqlens_k", "cu_seq_k", "seqlen_k", "seqused_k")
    return [call.get(name) for name in names]


_STARTS = ("cum_seq_q", "cu_seqlens_q", "cu_seq_q")
"""Names of the argument that holds the start of each sequence of queries, and the end of the last sequence."""


def _pairs(call: Call) -> int:
    """Number of pairs of a query and a visible key, over all heads and sequences."""
    query, key = call["query"], call["key"]
    starts: Tensor | None = next((call[name] for name in _STARTS if name in call), None)
    heads = query.shape[-2]
    # A causal mask shows positions up to the query's own. Some operators align keys and queries at the first position,
    # others at the last; the pairs are counted as if they were aligned at the first.
    causal = call["is_causal"] if "is_causal" in call else call["custom_mask_type"] != 0
    left, right = _window(call, causal)
    if starts is None or starts.numel() == 0:
        return query.shape[0] * heads * windowed_pairs(query.shape[-3], key.shape[-3], left, right)
    positions, sequences = query.shape[-3], starts.numel() - 1
    if key.shape[-3] != positions or call.get("block_table") is not None or call.get("seqused_k") is not None:
        raise ValueError("the lengths of packed sequences are values, and a cost is computed from shapes only")
    length, longer = divmod(positions, sequences)
    pairs = (sequences - longer) * windowed_pairs(length, length, left, right)
    return heads * (pairs + longer * windowed_pairs(length + 1, length + 1, left, right))


def _window(call: Call, causal: bool) -> tuple[int | None, int | None]:
    """How many positions a query attends to before and after its own position; None means all."""
    left, right = call.get("window_size_left"), call.get("window_size_right")
    window = call.get("window_size")
    if isinstance(window, (list, tuple)):
        left, right = window
    elif window:  # the memory-efficient kernel's window is this many positions, up to and including the query's own
        left = window - 1
    left = None if left is None or left < 0 else left
    right = None if right is None or right < 0 else right
    return left, (0 if causal else right)


@lru_cache(maxsize=1024)
def windowed_pairs(queries: int, keys: int, left: int | None, right: int | None) -> int:
    """Number of pairs (i, j) with i - left ≤ j ≤ i + right; None means no limit."""
    if left is None and right is None:
        return queries * keys
    total = 0
    for i in range(queries):
        first = 0 if left is None else max(0, i - left)
        last = keys - 1 if right is None else min(keys - 1, i + right)
        total += max(0, last - first + 1)
    return total
