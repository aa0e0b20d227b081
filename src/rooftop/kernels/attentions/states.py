"""Attention over parts of the keys, put together: outputs weighted by their log-sum-exps.

out = (e^lse_a out_a + e^lse_b out_b) / e^lse with lse = log(e^lse_a + e^lse_b) is attention over the keys of both. The
merge is associative and commutative, and (0, -inf), where nothing was attended, changes nothing. Milakov and Gimelshein
2018, "Online normalizer calculation for softmax"; Liu et al. 2023, "Ring Attention with Blockwise Transformers". Bound
by memory: forward reads two outputs and writes one, backward reads three and writes two.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.attentions.tables import MERGE_BACKWARD, MERGE_FORWARD
from rooftop.kernels.operands.checks import check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import Constants, ElementsConfig, power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import differentiable, in_pytorch, no_second_derivative, no_tangents, operator
from rooftop.launch.strides import merged
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

# ---- reference -------------------------------------------------------------------------------------------------


def merge_reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """(out, lse) of (..., D) and (...)."""
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    weight_a, weight_b, lse = _weights(lse_a, lse_b)
    out = _weighted(weight_a[..., None], out_a.to(lse.dtype)) + _weighted(weight_b[..., None], out_b.to(lse.dtype))
    return out.to(dtype), lse


def merge_backward_reference(
    dout: Tensor, dlse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(dout_a, dlse_a, dout_b, dlse_b)."""
    weight_a, weight_b, _ = _weights(lse_a, lse_b)
    gradient, a, b = (t.to(weight_a.dtype) for t in (dout, out_a, out_b))
    both = weight_a * weight_b
    apart = _weighted(both, (gradient * (a - b)).sum(-1))
    to_lse = torch.zeros_like(lse_a) if dlse is None else dlse
    dout_a, dout_b = (_weighted(w[..., None], gradient) for w in (weight_a, weight_b))
    dlse_a, dlse_b = _weighted(weight_a, to_lse) + apart, _weighted(weight_b, to_lse) - apart
    return dout_a.to(out_a.dtype), dlse_a, dout_b.to(out_b.dtype), dlse_b


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    largest = torch.maximum(lse_a, lse_b)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    a, b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = a + b
    divisor = total.masked_fill(total == 0, 1.0)
    return a / divisor, b / divisor, shift + total.log()


def _weighted(weight: Tensor, values: Tensor) -> Tensor:
    """What has no weight counts for nothing, whatever it is."""
    return torch.where(weight == 0, 0.0, weight * values)


# ---- limits -----------------------------------------------------------------------------------------------------


MOST_FEATURES = 8192


def rows_tile(config: ElementsConfig, width: int) -> Constants:
    """Launch parameters for rows of so many elements."""
    block = power_of_two(width)
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(1, config.elements // block), "num_warps": config.warps}


# ---- implementations -------------------------------------------------------------------------------------------


def row_places(*tensors: Tensor) -> tuple[int, int, list[int]]:
    """(heads, positions, strides of batch, head and position of each tensor (B, H, S, D)) to find a row by its number.

    Where the rows of each are one distance apart, each is a batch of its own: Triton does not divide by what is 1.
    """
    sizes = tensors[0].shape[:3]
    distances = [merged(sizes, t.stride()[:3]) for t in tensors]
    if all(len(distance) <= 1 for distance in distances):
        return 1, 1, [stride for d in distances for stride in (d[0][1][0] if d else 0, 0, 0)]
    return sizes[1], sizes[2], [stride for t in tensors for stride in t.stride()[:3]]


def unit_features(x: Tensor) -> Tensor:
    """The features of a row side by side; rows may lie anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()


def like_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Memory in the order of x (B, H, S, D) where its features are side by side, else contiguous."""
    dtype = dtype or x.dtype
    return torch.empty_like(x, dtype=dtype) if x.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    if by_reference(lse):
        for target, value in zip((out, lse), merge_reference(out_a, lse_a, out_b, lse_b), strict=True):
            target.copy_(value)
        return
    require_triton()
    from rooftop.kernels.attentions.triton_kernels.states import merge_forward

    if lse.numel() == 0:
        return
    out_a, out_b = unit_features(out_a), unit_features(out_b)
    tile = rows_tile(MERGE_FORWARD, out.shape[3])
    tensors = (out_a, lse_a.contiguous(), out_b, lse_b.contiguous(), out, lse)
    heads, positions, strides = row_places(out_a, out_b, out)
    sizes = (lse.numel(), heads, positions, *strides)
    launch(merge_forward, (-(-lse.numel() // tile["ROWS"]),), out.device, *tensors, *sizes, **tile)


def _merge_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    if by_reference(lse_a):
        values = merge_backward_reference(dout, dlse, out_a, lse_a, out_b, lse_b)
        for target, value in zip(results, values, strict=True):
            target.copy_(value)
        return
    require_triton()
    from rooftop.kernels.attentions.triton_kernels.states import merge_backward

    if lse_a.numel() == 0:
        return
    dout, out_a, out_b = (unit_features(t) for t in (dout, out_a, out_b))
    tile = rows_tile(MERGE_BACKWARD, out_a.shape[3])
    whole = [t.contiguous() if t is not None else None for t in (dlse, lse_a, lse_b)]
    tensors = (dout, whole[0], out_a, whole[1], out_b, whole[2], *results)
    heads, positions, strides = row_places(dout, out_a, out_b, results[0], results[2])
    sizes = (lse_a.numel(), heads, positions, *strides)
    grid = (-(-lse_a.numel() // tile["ROWS"]),)
    launch(merge_backward, grid, out_a.device, *tensors, *sizes, HAS_DLSE=dlse is not None, **tile)


# ---- registration ----------------------------------------------------------------------------------------------


def _merged_memory(out_a: Tensor, lse_a: Tensor, out_b: Tensor) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    return like_rows(out_a, dtype), lse_a.new_empty(lse_a.shape)


def _gradient_memory(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return like_rows(out_a), lse_a.new_empty(lse_a.shape), like_rows(out_b), lse_b.new_empty(lse_b.shape)


@operator("merge_attention_states")
def _states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = _merged_memory(out_a, lse_a, out_b)
    _merge(out_a, lse_a, out_b, lse_b, out, lse)
    return out, lse


@torch.library.register_fake("rooftop::merge_attention_states")
def _(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return _merged_memory(out_a, lse_a, out_b)


in_pytorch("merge_attention_states", merge_reference)


@operator("merge_attention_states_", mutates=("out", "lse"))
def _states_in_place(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    _merge(out, lse, part, part_lse, out, lse)  # a row is read before it is written


@torch.library.register_fake("rooftop::merge_attention_states_")
def _(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    return None


@operator("merge_attention_states_backward")
def _states_backward(
    dout: Tensor, dlse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    results = _gradient_memory(out_a, lse_a, out_b, lse_b)
    _merge_backward(dout, dlse, out_a, lse_a, out_b, lse_b, results)
    return results


@torch.library.register_fake("rooftop::merge_attention_states_backward")
def _(
    dout: Tensor, dlse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _gradient_memory(out_a, lse_a, out_b, lse_b)


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:  # type: ignore[type-arg]
    ctx.save_for_backward(*inputs)
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, dout: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    out_a, lse_a, out_b, lse_b = ctx.saved_tensors  # type: ignore[attr-defined]
    if dout is None and dlse is None:
        return None, None, None, None
    if dout is None:
        dout = torch.zeros_like(out_a)
    return _states_backward(dout, dlse, out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]


PLAIN = "the formula in plain PyTorch"
differentiable("merge_attention_states", _differentiate, _save)
differentiable("merge_attention_states_backward", no_second_derivative("merge_attention_states", PLAIN))


@cost_of("rooftop::merge_attention_states")
def _forward_cost(call: Call) -> Cost:
    """Two products and a sum an element; maximum, exponentials, sum, logarithm and divisions a row."""
    out, lse = call.out
    flops = 3 * out.numel() + 11 * lse.numel()
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes([out, lse]), {precision_of(lse.dtype): flops})


@cost_of("rooftop::merge_attention_states_")
def _in_place_cost(call: Call) -> Cost:
    """As of `merge_attention_states`."""
    out, lse = call["out"], call["lse"]
    flops = 3 * out.numel() + 11 * lse.numel()
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes([out, lse]), {precision_of(lse.dtype): flops})


@cost_of("rooftop::merge_attention_states_backward")
def _backward_cost(call: Call) -> Cost:
    """Two products for the gradients, three operations for their difference an element; the weights again a row."""
    lse = call["lse_a"]
    flops = 5 * call["dout"].numel() + 15 * lse.numel()
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes(call.out), {precision_of(lse.dtype): flops})


# ---- public ----------------------------------------------------------------------------------------------------


@recorded_whole
def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of two parts, from what `attention(..., return_lse=True)` gives for each.

    Args:
        out_a, out_b: (B, H, S, D), bfloat16, float16, float32 or float64, any strides.
        lse_a, lse_b: (B, H, S), the logarithm of the sum of exponentials of each row's scores; float32, or float64 with
            float64 outputs. -inf: nothing was attended, and that row of the output counts for nothing.

    Returns:
        (out, lse). The output has the wider of both dtypes, so that one accumulated in float32 stays so; where nothing
        was attended at all it is 0. The arithmetic is that of the log-sum-exps.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    _check(out_a, lse_a, out_b, lse_b)
    no_tangents("merge_attention_states", out_a, lse_a, out_b, lse_b, instead=PLAIN)
    out, lse = _states(out_a, lse_a, out_b, lse_b)
    return out, lse


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into what is there, in place, without gradients.

    Args:
        out, lse: (B, H, S, D) and (B, H, S); views whose features are side by side.
        part, part_lse: of the same shapes.
    """
    rows = lse.contiguous()
    with torch.no_grad():
        torch.ops.rooftop.merge_attention_states_(out, rows, part, part_lse)
        if rows is not lse:
            lse.copy_(rows)


def _check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    name = "merge_attention_states"
    given = {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b}
    check_tensors(name, **given)
    check_tensors(name, FLOATS, out_a=out_a, out_b=out_b)
    wide = accumulator_dtype(out_a.dtype, out_b.dtype)
    for argument, tensor in given.items():
        if argument.startswith("lse") and tensor.dtype != wide:
            raise TypeError(f"{name}: {argument} must be {wide} beside these outputs, got {tensor.dtype}")
    if out_a.dim() != 4 or out_a.shape != out_b.shape or out_a.shape[3] > MOST_FEATURES:
        raise ValueError(
            f"{name}: expected outputs of one shape (B, H, S, D), D up to {MOST_FEATURES}, "
            f"got {tuple(out_a.shape)} and {tuple(out_b.shape)}"
        )
    if lse_a.shape != out_a.shape[:3] or lse_b.shape != out_a.shape[:3]:
        raise ValueError(
            f"{name}: expected log-sum-exps of shape {tuple(out_a.shape[:3])}, "
            f"got {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
