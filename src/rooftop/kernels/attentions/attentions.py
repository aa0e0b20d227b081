"""Scaled dot-product attention by the fastest of PyTorch's back ends, with the log-sum-exp of each row of scores.

The scores are S = Q K^T scale + mask. The results are softmax(S) V and L = log(sum(exp(S))) of each row. The back ends
are flash (Dao 2023, "FlashAttention-2"), cuDNN's fused kernels and the memory-efficient ones (Rabe and Staats 2021).
For more than a few hundred positions, attention is bound by flops. `attention_plan` names the back end of a call and
the reason.

The gradient of the scores, given the gradients dO and dL: dS = P (dO V^T - delta + dL), where P are the probabilities
and delta = rowsum(dO O). The back ends compute delta from dO and O, and use O for nothing else. So the operator
replaces O by an O' with rowsum(dO O') = delta - dL:

    O' = O - dL dO / |dO|^2

If dO is 0 or negligible next to dL, one element of dO becomes dL / 2^40 and the same element of O' becomes -2^40: only
their product matters. The values 2^40 and dL / 2^40 need the range of bfloat16 or float32, so in float16 the gradient
with respect to L raises an error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, overload

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, matrix_precision, precision_of
from rooftop.cost.formulas.attentions import visible_pairs
from rooftop.kernels.attentions.plans import AttentionPlan, Direction, plan_of, shape_of
from rooftop.kernels.attentions.states import MOST_FEATURES, like_rows, row_places, rows_tile, unit_features
from rooftop.kernels.attentions.tables import MERGE_BACKWARD
from rooftop.kernels.operands.autocasting import cast_by_autocast
from rooftop.kernels.operands.checks import check_dtype, check_finite, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.launch.operators import declare, no_second_derivative, no_tangents, without_autocast
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.strides import same_layout
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

# ---- reference -------------------------------------------------------------------------------------------------


@without_autocast
def attention_reference(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute (out (B, H, S_q, D_v), log-sum-exp (B, H, S_q)) in plain PyTorch, with float32 or float64 intermediates.
    If there are no keys, out is 0 and the log-sum-exp is -inf.
    """
    scores, _, values = scores_of(query, key, value, mask, is_causal, scale)
    lse = scores.logsumexp(-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], -math.inf)
    return (_probabilities(scores, lse) @ values).to(query.dtype), lse


@without_autocast
def attention_backward_reference(
    dout: Tensor,
    dlse: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute (dquery, dkey, dvalue, dscores) in plain PyTorch. dscores (B, H, S_q, S_k) is the gradient of the scaled
    and masked scores."""
    scores, keys, values = scores_of(query, key, value, mask, is_causal, scale)
    weights, gradient = _probabilities(scores, lse), dout.to(scores.dtype)
    dweights = gradient @ values.mT
    delta = (weights * dweights).sum(-1, keepdim=True)
    dscores = weights * (dweights - (delta if dlse is None else delta - dlse[..., None]))
    dkey = dscores.mT @ query.to(scores.dtype) * scale
    dvalue = weights.mT @ gradient
    dquery = (dscores @ keys * scale).to(query.dtype)
    return dquery, kv_of_groups(dkey, key).to(key.dtype), kv_of_groups(dvalue, value).to(value.dtype), dscores


def scores_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (scores (B, H, S_q, S_k), keys, values), with keys and values repeated for each query head."""
    inside = accumulator_dtype(query.dtype)
    keys, values = (_for_heads(t.to(inside), query.shape[1]) for t in (key, value))
    scores = query.to(inside) @ keys.mT * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores, keys, values


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """Attention probabilities. Masked keys have probability 0, also in rows in which all keys are masked. The function
    does not compute exp(scores - lse), because the rounding of lse would cost accuracy.
    """
    return scores.softmax(-1).masked_fill((lse == -math.inf)[..., None], 0.0)


def _for_heads(x: Tensor, heads: int) -> Tensor:
    """Keys or values (B, H_k, S, D), with each head repeated for its group of query heads."""
    return x if x.shape[1] in (0, heads) else x.repeat_interleave(heads // x.shape[1], 1)


def kv_of_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """Sum a gradient over each group of query heads: the reverse of `_for_heads`."""
    heads = like.shape[1]
    return gradient if heads in (0, gradient.shape[1]) else gradient.unflatten(1, (heads, -1)).sum(2)


# ---- implementations -------------------------------------------------------------------------------------------

aten = torch.ops.aten
ALIGNMENT = 16  # bytes of a load; the back ends require rows whose size is a multiple of this number


def _aligned_rows(x: Tensor) -> Tensor:
    """Return x, or a copy, with stride 1 in the last dimension. If the size of a row is a multiple of 16 bytes, all
    other strides of the result are also multiples of 16 bytes.
    """
    x, size = unit_features(x), x.element_size()
    strides = [stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    apart = x.shape[-1] * size % ALIGNMENT == 0 and any(stride * size % ALIGNMENT for stride in strides)
    return x.contiguous() if apart else x


def _at_aligned_address(x: Tensor) -> Tensor:
    """The tensor, copied if its address is not a multiple of 16 bytes."""
    return x.clone() if x.data_ptr() % ALIGNMENT else x


def _forward(
    backend: str, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the output and the log-sum-exps with a back end. The arguments may be fake tensors."""
    if backend == "reference":
        return attention_reference(query, key, value, mask, is_causal, scale)
    query, key, value = (_aligned_rows(t) for t in (query, key, value))
    if backend == "flash":
        found = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
        return found[0], found[1]
    if backend == "cudnn":
        found = aten._scaled_dot_product_cudnn_attention(
            query, key, value, None, True, 0.0, is_causal, False, scale=scale
        )
        return found[0], found[1].reshape(query.shape[:3])
    bias = _bias(mask, query, key)
    keys, values = (_for_heads(t, query.shape[1]) for t in (key, value))
    found = aten._scaled_dot_product_efficient_attention(query, keys, values, bias, True, 0.0, is_causal, scale=scale)
    lse = found[1].narrow(-1, 0, query.shape[2])  # the memory-efficient back end pads lse to multiples of 32 queries
    if mask is not None:  # for a query without visible keys, lse is +inf or 0, depending on the release of PyTorch
        sees = (mask if mask.dtype == torch.bool else mask != -math.inf).any(-1)
        lse = lse.masked_fill(~sees, -math.inf)
    return found[0], lse.contiguous()


def _backward(
    backend: str,
    dout: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    mask_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute (dquery, dkey, dvalue, dscores or None) with one of PyTorch's fused back ends."""
    dout = dout if 0 not in dout.stride() else dout.contiguous()
    tensors = (_at_aligned_address(t) for t in (dout, query, key, value, out))
    dout, query, key, value, out = (_aligned_rows(t) for t in tensors)
    seed = torch.empty((), dtype=torch.int64, device=query.device)  # placeholder: without dropout no seed is read
    lengths = (None, None, query.shape[2], key.shape[2])
    if backend == "flash":
        return *aten._scaled_dot_product_flash_attention_backward(
            dout, query, key, value, out, lse, *lengths, 0.0, is_causal, seed, seed, scale=scale
        ), None
    if backend == "cudnn":
        # PyTorch caches cuDNN's plans by the strides of the inputs alone, so out and dout must have the strides that
        # PyTorch's own forward gives to out: those of query.
        dout, out = (_in_order_of(t, query) for t in (dout, out))
        return *aten._scaled_dot_product_cudnn_attention_backward(
            dout, query, key, value, out, lse.unsqueeze(-1), seed, seed, None, *lengths, 0.0, is_causal, scale=scale
        ), None
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel assumes that out is stored as (B, S, H, D)
    bias = _bias(mask, query, key)
    keys, values = (_for_heads(t, query.shape[1]) for t in (key, value))
    if mask is not None:  # without a mask, each row attends to at least one key
        lse = lse.masked_fill(lse == -math.inf, math.inf)
    if rows := -query.shape[2] % 32:
        lse = torch.nn.functional.pad(lse, (0, rows), value=math.inf)
    wanted = [True, True, True, mask_gradient]
    dquery, dkey, dvalue, dbias = aten._scaled_dot_product_efficient_attention_backward(
        dout, query, keys, values, bias, out, lse, seed, seed, 0.0, wanted, is_causal, scale=scale
    )
    dscores = dbias.narrow(-1, 0, key.shape[2]) if mask_gradient else None
    return dquery, kv_of_groups(dkey, key), kv_of_groups(dvalue, value), dscores


def _in_order_of(x: Tensor, query: Tensor) -> Tensor:
    """x (of the query's shape) in the query's memory layout, copied if needed."""
    target = torch.empty_like(query)
    return x if same_layout(x, target) else target.copy_(x)


def _bias(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """Convert a mask to a bias on the scores, (B, H, S_q, S_k), whose rows begin at multiples of 16 elements."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, -math.inf)
    keys = key.shape[2]
    mask = mask.to(query.dtype).expand(*mask.shape[:-1], keys)
    padded = torch.nn.functional.pad(mask, (0, -keys % 16)).narrow(-1, 0, keys)
    return padded.expand(*query.shape[:3], keys)


def _with_lse_gradient(dout: Tensor, dlse: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """Return (dout', out') with rowsum(dout' out') = rowsum(dout out) - dlse. The module's docstring derives dout' and
    out'.
    """
    new_dout, new_out = like_rows(dout), like_rows(out)
    require_triton()
    from rooftop.kernels.attentions.triton_kernels.states import fold_lse_gradient

    dout, out = unit_features(dout), unit_features(out)
    tile = rows_tile(MERGE_BACKWARD, out.shape[3])
    tensors = (dout, dlse.contiguous(), out, new_dout, new_out)
    heads, positions, strides = row_places(dout, out, new_dout, new_out)
    sizes = (dlse.numel(), heads, positions, LIMIT, *strides)
    launch(fold_lse_gradient, (-(-dlse.numel() // tile["ROWS"]),), out.device, *tensors, *sizes, **tile)
    return new_dout, new_out


LIMIT = 2.0**40  # the module's docstring explains this factor


# ---- operators -------------------------------------------------------------------------------------------------


class Kept(NamedTuple):
    """The values that backward needs."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    is_causal: bool
    scale: float


class Attention(NamedTuple):
    """Attention: returns (out (B, H, S_q, D_v), the log-sum-exp of each row (B, H, S_q))."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float

    def run(self) -> tuple[Tensor, Tensor]:
        plan = plan_of(shape_of(*self[:5]), self.query.device, "forward")
        query, key, value = (_at_aligned_address(t) for t in self[:3])
        return _forward(plan.backend, query, key, value, *self[3:])

    def fake(self) -> tuple[Tensor, Tensor]:
        query, value = self.query, self.value
        plan = plan_of(shape_of(*self[:5]), query.device, "forward")
        if plan.backend != "reference":
            return _forward(plan.backend, *self)
        shape, wide = query.shape[:3], accumulator_dtype(query.dtype)
        return query.new_empty((*shape, value.shape[3])), query.new_empty(shape, dtype=wide)

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        return attention_reference(*self)

    def keep(self, made: tuple[Tensor, Tensor]) -> Kept:
        query, key, value, mask, is_causal, scale = self
        return Kept(query, key, value, mask, *made, is_causal, scale)

    @staticmethod
    def gradients(
        kept: Kept, wanted: Sequence[bool], dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if dlse is not None and kept.query.dtype == torch.float16 and kept.query.device.type == "cuda":
            raise NotImplementedError(
                "attention: the gradient of the log-sum-exp needs the range of bfloat16 or float32, which float16 lacks"
            )
        dout = torch.zeros_like(kept.out) if dout is None else dout
        dquery, dkey, dvalue, dmask = _attention_backward(dout, dlse, *kept, wanted[3])
        return dquery, dkey, dvalue, dmask if wanted[3] else None

    @staticmethod
    def once() -> bool:
        return True

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        """Flops of the matrix products for scores and values. Each pair of a query and a key adds 5 flops for the
        softmax, and 1 if there is a mask.
        """
        flops = _flops(self, self.query.shape[3] + self.value.shape[3], 5)
        return Cost(distinct_bytes(self[:4]), distinct_bytes(made), flops)


class AttentionBackward(NamedTuple):
    """The gradients (dquery, dkey, dvalue, dmask) of attention; dmask is empty unless `mask_gradient`."""

    dout: Tensor
    dlse: Tensor | None
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    out: Tensor
    lse: Tensor
    is_causal: bool
    scale: float
    mask_gradient: bool

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dout, dlse, query, key, value, mask, out, lse, is_causal, scale, mask_gradient = self
        plan = plan_of(shape_of(query, key, value, mask, is_causal), query.device, "backward")
        found: tuple[Tensor, Tensor, Tensor, Tensor | None]
        if plan.backend == "reference":
            found = attention_backward_reference(dout, dlse, query, key, value, mask, lse, is_causal, scale)
        else:
            if dlse is not None:
                dout, out = _with_lse_gradient(dout, dlse, out)
            found = _backward(plan.backend, dout, *self[2:6], out, *self[7:])
        targets = _gradients_of(query, key, value, mask, is_causal)
        dquery, dkey, dvalue = (_laid_out(t, target) for t, target in zip(found[:3], targets, strict=True))
        return dquery, dkey, dvalue, _mask_gradient(found[3], mask if mask_gradient else None, query)

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key, value, mask = self[2:6]
        shape = mask.shape if mask is not None and self.mask_gradient else (0,)
        dmask = query.new_empty(shape, dtype=_mask_dtype(mask, query))
        return *_gradients_of(query, key, value, mask, self.is_causal), dmask

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops of the matrix products for scores and for the gradients of queries, keys, values and attention weights.
        Each pair of a query and a key adds 6 flops for the softmax, and 1 if there is a mask.
        """
        flops = _flops(self, 3 * self.query.shape[3] + 2 * self.value.shape[3], 6)
        written = made if self.mask is not None and self.mask_gradient else made[:3]
        return Cost(distinct_bytes(self[:8]), distinct_bytes(written), flops)


_attention = declare("attention", Attention, known="itself")
_attention_backward = declare(
    "attention_backward",
    AttentionBackward,
    known="itself",
    derivative=no_second_derivative(
        "attention", "torch.nn.functional.scaled_dot_product_attention with its math back end"
    ),
)


def _gradients_of(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the gradients of query, key and value. With the memory-efficient back end and without grouped queries,
    the gradients have the layout that this back end returns. In other cases, each gradient has the layout of its tensor
    (see `like_rows`). The layout does not depend on PyTorch's settings, which may change between tracing and running a
    program.
    """
    plan = plan_of(shape_of(query, key, value, mask, is_causal), query.device, "backward", settings=False)
    if plan.backend == "efficient" and key.shape[1] == query.shape[1]:
        return _by_positions(query), _by_positions(key), _by_positions(value)
    return like_rows(query), like_rows(key), like_rows(value)


def _by_positions(x: Tensor) -> Tensor:
    """Allocate a result with the shape of x (B, H, S, D), stored in memory in the order (B, S, H, D)."""
    batches, heads, positions, features = x.shape
    return x.new_empty((batches, positions, heads, features)).transpose(1, 2)


def _laid_out(gradient: Tensor | None, target: Tensor) -> Tensor:
    """Return the gradient with the strides of `target`: the fake implementation promises these strides. A gradient with
    other strides is copied into `target`.
    """
    assert gradient is not None
    return gradient if gradient.stride() == target.stride() else target.copy_(gradient)


def _mask_dtype(mask: Tensor | None, query: Tensor) -> torch.dtype:
    return mask.dtype if mask is not None and mask.is_floating_point() else query.dtype


def _mask_gradient(dscores: Tensor | None, mask: Tensor | None, query: Tensor) -> Tensor:
    """Sum the gradient of the mask over the dimensions in which the mask was broadcast. The result is empty if no
    gradient is needed.
    """
    if mask is None or dscores is None:
        return query.new_empty(0, dtype=_mask_dtype(mask, query))
    wide = dscores.dtype if dscores.dtype == torch.float64 else torch.float32
    return dscores.to(wide).sum_to_size(mask.shape).to(mask.dtype, copy=True).contiguous()


def _flops(call: Attention | AttentionBackward, products: int, others: int) -> dict[str, int]:
    """Flops of attention by precision. For each pair of a query and a key that the causal mask allows, all matrix
    products together take `products` multiply-adds. `others`: the other operations per pair, without the addition of
    `call.mask`.
    """
    query = call.query
    batches, heads, queries, _ = query.shape
    pairs = batches * heads * visible_pairs(queries, call.key.shape[2], call.is_causal)
    flops = {matrix_precision(query): 2 * pairs * products}
    pointwise = precision_of(query.dtype)
    flops[pointwise] = flops.get(pointwise, 0) + pairs * (others + (call.mask is not None))
    return flops


# ---- public ----------------------------------------------------------------------------------------------------


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...


@repeated
@recorded_whole
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, with the arguments of `torch.nn.functional.scaled_dot_product_attention` but without dropout.

    Args:
        query: (B, H, S_q, D), bfloat16, float16, float32 or float64, any strides.
        key, value: (B, H, S_k, D) and (B, H, S_k, D_v). With `enable_gqa`, keys and values may have fewer heads than
            queries; the number of heads of keys must divide H.
        attn_mask: broadcastable to (B, H, S_q, S_k). A numeric mask is added to the scores; in a boolean mask, False
            excludes a key. A mask cannot be combined with `is_causal`.
        is_causal: query i attends to the keys 0 to i.
        scale: factor of the scores; 1 / sqrt(D) if not given.
        enable_gqa: each head of the keys serves a group of heads of the queries.
        return_lse: also return the log-sum-exp of each row's scores, for `merge_attention_states`. The log-sum-exp is
            differentiable, except in float16 on a GPU.

    Returns:
        The output (B, H, S_q, D_v). With `return_lse`, a tuple of the output and the log-sum-exp (B, H, S_q), which is
        float32 (float64 for float64 inputs). In a row that attends to no keys, the output is 0 and the log-sum-exp
        -inf. Under autocast the output has autocast's dtype, as in PyTorch. The last bits of gradients may differ from
        run to run, because the back ends add up gradients of queries or keys atomically.
        `torch.use_deterministic_algorithms(True)` makes gradients reproducible.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match, the scale is not finite, or attn_mask is given with is_causal.
        NotImplementedError: forward-mode differentiation, a second derivative, or in backward the gradient of the
            log-sum-exp in float16 on a GPU.
    """
    _check(query, key, value, attn_mask, is_causal, scale, enable_gqa)
    no_tangents("attention", query, key, value, attn_mask, instead="PyTorch's math back end")
    bias = attn_mask if attn_mask is not None and attn_mask.is_floating_point() else None
    query, key, value, bias = cast_by_autocast(query, key, value, bias)
    attn_mask = attn_mask if bias is None else bias
    features, out_features = query.shape[3], value.shape[3]
    factor = float(scale) if scale is not None else 1 / math.sqrt(max(1, features))
    if query.device.type == "cuda" and query.dtype != torch.float64:  # the back ends load 16 bytes at a time
        query, key, value = (_padded(t) for t in (query, key, value))
    mask = attn_mask if attn_mask is None or attn_mask.dim() == 4 else _four_dimensions(attn_mask)
    out, lse = _attention(query, key, value, mask, is_causal, factor)
    if out.shape[3] != out_features:
        out = out[..., :out_features]
    return (out, lse) if return_lse else out


def attention_plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    direction: Direction = "forward",
) -> AttentionPlan:
    """Return the back end that `attention` uses for the same arguments, and the reason; `direction` is "forward" or
    "backward". Unlike `attention`, the function does not cast tensors under autocast: pass tensors of autocast's dtype.

    Raises:
        TypeError, ValueError: as in `attention`, or if the direction is unknown.
    """
    if direction not in ("forward", "backward"):
        raise ValueError(f"attention_plan: direction must be 'forward' or 'backward', got {direction!r}")
    _check(query, key, value, attn_mask, is_causal, None, enable_gqa)
    return plan_of(shape_of(query, key, value, attn_mask, is_causal), query.device, direction)


def _padded(x: Tensor) -> Tensor:
    """Pad the features of a tensor with zeros, to a multiple of eight features."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


def _four_dimensions(mask: Tensor) -> Tensor:
    return mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> None:
    check_tensors("attention", None, ("attn_mask",), query=query, key=key, value=value, attn_mask=mask)
    for argument, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != 4:
            raise ValueError(f"attention: expected {argument} of shape (B, H, S, D), got {tuple(tensor.shape)}")
    check_dtype("attention", "query", query.dtype, FLOATS)
    if not query.dtype == key.dtype == value.dtype:
        raise TypeError(f"attention: query, key and value must have one dtype, got {query.dtype}, {key.dtype}, "
                        f"{value.dtype}")  # fmt: skip
    _check_shapes(query, key, value, enable_gqa)
    if scale is not None:
        check_finite("attention", "scale", scale, "a number or None")
    if mask is not None:
        _check_mask(query, key, mask, is_causal)


def _check_shapes(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    batches, heads, _, features = query.shape
    if key.shape[:3] != value.shape[:3] or key.shape[0] != batches or key.shape[3] != features:
        raise ValueError(
            f"attention: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} do not "
            "match: expected (B, H, S_q, D), (B, H, S_k, D) and (B, H, S_k, D_v)"
        )
    if max(features, value.shape[3]) > MOST_FEATURES:
        raise ValueError(
            f"attention: heads may have up to {MOST_FEATURES} features, got {features} of the query and "
            f"{value.shape[3]} of the value"
        )
    if key.shape[1] == heads:
        return
    if not enable_gqa:
        raise ValueError(
            f"attention: query has {heads} heads, key {key.shape[1]}: for grouped queries, give enable_gqa=True"
        )
    if key.shape[1] == 0 or heads % key.shape[1]:
        raise ValueError(f"attention: the {key.shape[1]} heads of the key do not divide the {heads} heads of the query")


def _check_mask(query: Tensor, key: Tensor, mask: Tensor, is_causal: bool) -> None:
    if is_causal:
        raise ValueError("attention: give attn_mask or is_causal, not both")
    if mask.dtype not in (*FLOATS, torch.bool):
        raise TypeError(f"attention: attn_mask must be boolean or floating point, got {mask.dtype}")
    scores = (*query.shape[:3], key.shape[2])
    if mask.dim() > 4 or any(m != 1 and m != n for m, n in zip(mask.shape[::-1], scores[::-1], strict=False)):
        raise ValueError(f"attention: attn_mask of shape {tuple(mask.shape)} does not broadcast to {scores}")
