"""Cost of scaled dot-product attention: matrix products, and a softmax of scores that are never written to memory.

With B sequences, H query heads and P pairs of a query and a visible key, in dimensions D (keys) and V (values):

    forward    2 B H P (D + V)          scores, weighted values
    backward   2 B H P (3 D + 2 V)      scores again; gradients of weights and values (V), of queries and keys (D)

P is S_q · S_k. Under a causal mask, P counts only the pairs up to the diagonal: S (S + 1) / 2 for a square. (Tools that
ignore the causal mask report about twice as many flops.) A tensor mask is read and added. The pairs that a tensor mask
hides depend on its values, so every pair counts. Fewer key heads than query heads (grouped queries) save bytes, but no
flops.
"""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.softmaxes import SOFTMAX_BACKWARD_FLOPS, SOFTMAX_FLOPS
from rooftop.cost.formulas.streaming import arithmetic, aten, moved_once, requested, streaming
from rooftop.cost.registry import cost_of


def visible_pairs(queries: int, keys: int, causal: bool) -> int:
    """Number of pairs (i, j) of a query and a key: all pairs, or under a causal mask (aligned at the first query) the
    pairs with j ≤ i.
    """
    if not causal:
        return queries * keys
    square = min(queries, keys)
    return square * (square + 1) // 2 + (queries - square) * keys


@cost_of(
    *aten("_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention"),
    *aten("_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu"),
    *aten("_scaled_dot_product_fused_attention_overrideable"),
)
def attention(call: Call) -> Cost:
    """Attention reads queries, keys, values and the mask. The operator writes the output and, if requested, each row's
    log-sum-exp."""
    query, key, value, bias = call["query"], call["key"], call["value"], _bias(call)
    pairs = _pairs(call, query, key)
    dimensions = key.shape[-1] + value.shape[-1]
    flops = merged(
        matrix_flops(query, pairs * dimensions),
        arithmetic(pairs * (SOFTMAX_FLOPS + (bias is not None)), [query]),
    )
    read = distinct_bytes([query, *_seen(call, query, key, value), bias])
    return Cost(read, distinct_bytes(call.results[:2]), flops)


@cost_of(
    *aten("_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward"),
    *aten("_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward"),
    *aten("_scaled_dot_product_fused_attention_overrideable_backward"),
)
def attention_backward(call: Call) -> Cost:
    """Backward computes the scores again, then only the matrix products that the requested gradients need."""
    query, key, value, bias = call["query"], call["key"], call["value"], _bias(call)
    gradient = call["grad_out"] if "grad_out" in call else call["grad_out_"]
    mask = call.get("grad_input_mask", (True, True, True, bias is not None))
    to_query, to_key, to_value, to_bias = mask
    through_softmax = to_query or to_key or to_bias
    pairs = _pairs(call, query, key)
    per_pair = key.shape[-1] * (1 + to_query + to_key) + value.shape[-1] * (to_value + through_softmax)
    # For each pair: exp(score - logsumexp), the addition of a mask, then the gradient of softmax.
    pointwise = pairs * (2 + (bias is not None) + SOFTMAX_BACKWARD_FLOPS * through_softmax)
    flops = merged(matrix_flops(query, pairs * per_pair), arithmetic(pointwise, [query]))
    read = [gradient, query, *_seen(call, query, key, value), bias, call["logsumexp"]]
    read += [call["out"]] if through_softmax else []
    return Cost(distinct_bytes(read), distinct_bytes(requested(call.results, mask)), flops)


def _bias(call: Call) -> Tensor | None:
    bias: Tensor | None = call.get("attn_bias", call.get("attn_mask"))
    return bias


def _pairs(call: Call, query: Tensor, key: Tensor) -> int:
    batch, heads, queries, _ = query.shape  # (B, H, S_q, D)
    return batch * heads * visible_pairs(queries, key.shape[2], call["is_causal"])


def _seen(call: Call, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
    """The parts of keys and values that some query sees. Under a causal mask, no query sees keys and values at
    positions after the last query.
    """
    queries, keys = query.shape[2], key.shape[2]
    if not call["is_causal"] or keys <= queries:
        return [key, value]
    return [tensor.narrow(2, 0, queries) for tensor in (key, value)]


@cost_of("aten::_native_multi_head_attention")
def multi_head_attention(call: Call) -> Cost:
    """Cost of the inference path of `nn.MultiheadAttention`: projections and attention in one operator."""
    query, key, value = call["query"], call["key"], call["value"]  # (B, S, E) each
    _, _, width = _dense(query).shape
    flops = merged(
        _linear(query, width, width),
        _linear(key, width, width),
        _linear(value, width, width),
        _attention_flops(query, key.shape[1], call["num_head"]),
        _linear(query, width, width),
    )
    return moved_once(call, flops)


@cost_of("aten::_transformer_encoder_layer_fwd")
def transformer_encoder_layer(call: Call) -> Cost:
    """Cost of the inference path of `nn.TransformerEncoderLayer`: a whole layer in one operator."""
    source: Tensor = _dense(call["src"])  # (B, S, E)
    width, hidden = source.shape[-1], call["ffn_weight_1"].shape[0]
    # Each element of `src`: two norms of 7 flops, two residual additions. Each hidden element: gelu (5) or relu (1).
    pointwise = (2 * 7 + 2) * source.numel()
    pointwise += (5 if call["use_gelu"] else 1) * source.numel() // width * hidden
    flops = merged(
        _linear(source, width, 3 * width),
        _attention_flops(source, source.shape[1], call["num_heads"]),
        _linear(source, width, width),
        _linear(source, width, hidden),
        _linear(source, hidden, width),
        arithmetic(pointwise, [source]),
    )
    return moved_once(call, flops)


def _dense(tensor: Tensor) -> Tensor:
    if tensor.is_nested:
        raise ValueError("the lengths in a nested tensor are values, and a cost is computed from shapes only")
    return tensor


def _linear(tokens: Tensor, inputs: int, outputs: int) -> dict[str, int]:
    """Flops of a linear layer with bias on (B, S, E)."""
    rows = tokens.shape[0] * tokens.shape[1]
    return merged(matrix_flops(tokens, rows * inputs * outputs), arithmetic(rows * outputs, [tokens]))


def _attention_flops(query: Tensor, keys: int, heads: int) -> dict[str, int]:
    batch, queries, width = query.shape
    pairs = batch * queries * keys  # (query, key) pairs of one head, over the batch
    return merged(matrix_flops(query, 2 * pairs * width), arithmetic(pairs * heads * SOFTMAX_FLOPS, [query]))


# The operator adds the bias, scales the queries, and writes three tensors.
cost_of("aten::_transform_bias_rescale_qkv")(streaming(1, per="qkv"))
