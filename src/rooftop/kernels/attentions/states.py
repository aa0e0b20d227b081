"""Merge attention over parts of the keys: outputs are weighted by the exponentials of their log-sum-exps.

out = (e^lse_a out_a + e^lse_b out_b) / e^lse with lse = log(e^lse_a + e^lse_b) is attention over the keys of both
parts. The merge is associative and commutative, and (0, -inf), the result of attention to no keys, changes nothing.
Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"; Liu et al. 2023, "Ring Attention with
Blockwise Transformers". The merge is bound by memory: forward reads two outputs and writes one; backward reads three
tensors and writes two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.attentions.tables import MERGE_BACKWARD, MERGE_FORWARD
from rooftop.kernels.operands.checks import check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import Constants, ElementsConfig, power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import declare, no_second_derivative, no_tangents
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.strides import merged
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import launch, require_triton

PLAIN = "the formula in plain PyTorch"

# ---- reference -------------------------------------------------------------------------------------------------


def merge_reference(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the merged (out, lse), of shapes (..., D) and (...), in plain PyTorch."""
    dtype = torch.promote_types(out_a.dtype, out_b.dtype)
    weight_a, weight_b, lse = _weights(lse_a, lse_b)
    out = _weighted(weight_a[..., None], out_a.to(lse.dtype)) + _weighted(weight_b[..., None], out_b.to(lse.dtype))
    return out.to(dtype), lse


def merge_backward_reference(
    dout: Tensor, dlse: Tensor | None, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients (dout_a, dlse_a, dout_b, dlse_b) in plain PyTorch."""
    weight_a, weight_b, _ = _weights(lse_a, lse_b)
    gradient, a, b = (t.to(weight_a.dtype) for t in (dout, out_a, out_b))
    both = weight_a * weight_b
    apart = _weighted(both, (gradient * (a - b)).sum(-1))
    to_lse = torch.zeros_like(lse_a) if dlse is None else dlse
    dout_a, dout_b = (_weighted(w[..., None], gradient) for w in (weight_a, weight_b))
    dlse_a, dlse_b = _weighted(weight_a, to_lse) + apart, _weighted(weight_b, to_lse) - apart
    return dout_a.to(out_a.dtype), dlse_a, dout_b.to(out_b.dtype), dlse_b


def _weights(lse_a: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (w_a, w_b, lse) from the log-sum-exps of two parts, or (0, 0, -inf) if both log-sum-exps are -inf."""
    largest = torch.maximum(lse_a, lse_b)
    shift = largest.masked_fill(largest == -torch.inf, 0.0)
    a, b = (lse_a - shift).exp(), (lse_b - shift).exp()
    total = a + b
    divisor = total.masked_fill(total == 0, 1.0)
    return a / divisor, b / divisor, shift + total.log()


def _weighted(weight: Tensor, values: Tensor) -> Tensor:
    """weight * values; 0 where the weight is 0, even if the value is infinite or NaN."""
    return torch.where(weight == 0, 0.0, weight * values)


# ---- limits -----------------------------------------------------------------------------------------------------


MOST_FEATURES = 8192


def rows_tile(config: ElementsConfig, width: int) -> Constants:
    """Launch parameters of the merging kernels for rows of `width` elements."""
    block = power_of_two(width)
    return {"WIDTH": width, "BLOCK": block, "ROWS": max(1, config.elements // block), "num_warps": config.warps}


# ---- rows ------------------------------------------------------------------------------------------------------


def row_places(*tensors: Tensor) -> tuple[int, int, list[int]]:
    """The kernel arguments from which a kernel computes the address of a row: the numbers of heads and positions, and
    each tensor's strides of batch, head and position.

    If the rows of every tensor are equally spaced, each row counts as a batch element with one head and one position,
    because Triton omits divisions by 1.
    """
    sizes = tensors[0].shape[:3]
    distances = [merged(sizes, t.stride()[:3]) for t in tensors]
    if all(len(distance) <= 1 for distance in distances):
        return 1, 1, [stride for d in distances for stride in (d[0][1][0] if d else 0, 0, 0)]
    return sizes[1], sizes[2], [stride for t in tensors for stride in t.stride()[:3]]


def unit_features(x: Tensor) -> Tensor:
    """x itself if the features of each row are contiguous, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def like_rows(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate a result: with the strides of x (B, H, S, D) if the features of x are contiguous, else contiguous."""
    dtype = dtype or x.dtype
    return torch.empty_like(x, dtype=dtype) if x.stride(-1) == 1 else x.new_empty(x.shape, dtype=dtype)


# ---- operators -------------------------------------------------------------------------------------------------


class MergeAttentionStates(NamedTuple):
    """Merge the states of two parts to (out, lse), of shapes (B, H, S, D) and (B, H, S)."""

    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor

    def run(self) -> tuple[Tensor, Tensor]:
        out, lse = self.fake()
        _merge(*self, out, lse)
        return out, lse

    def fake(self) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(self.out_a.dtype, self.out_b.dtype)
        return like_rows(self.out_a, dtype), self.lse_a.new_empty(self.lse_a.shape)

    def in_pytorch(self) -> tuple[Tensor, Tensor]:
        return merge_reference(*self)

    @staticmethod
    def gradients(
        kept: MergeAttentionStates, wanted: Sequence[bool], dout: Tensor | None, dlse: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _states_backward(torch.zeros_like(kept.out_a) if dout is None else dout, dlse, *kept)

    def cost(self, made: tuple[Tensor, Tensor]) -> Cost:
        return _cost(self, *made)


class MergeAttentionStatesBackward(NamedTuple):
    """The gradients (dout_a, dlse_a, dout_b, dlse_b) of `MergeAttentionStates`."""

    dout: Tensor
    dlse: Tensor | None
    out_a: Tensor
    lse_a: Tensor
    out_b: Tensor
    lse_b: Tensor

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results = self.fake()
        if by_reference(self.lse_a):
            for target, value in zip(results, merge_backward_reference(*self), strict=True):
                target.copy_(value)
            return results
        require_triton()
        from rooftop.kernels.attentions.triton_kernels.states import merge_backward

        if self.lse_a.numel() == 0:
            return results
        dout, out_a, out_b = (unit_features(t) for t in (self.dout, self.out_a, self.out_b))
        dlse, lse_a, lse_b = (None if t is None else t.contiguous() for t in (self.dlse, self.lse_a, self.lse_b))
        tile = rows_tile(MERGE_BACKWARD, out_a.shape[3])
        tensors = (dout, dlse, out_a, lse_a, out_b, lse_b, *results)
        heads, positions, strides = row_places(dout, out_a, out_b, results[0], results[2])
        sizes = (self.lse_a.numel(), heads, positions, *strides)
        grid = (-(-self.lse_a.numel() // tile["ROWS"]),)
        launch(merge_backward, grid, out_a.device, *tensors, *sizes, HAS_DLSE=dlse is not None, **tile)
        return results

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dlse_a, dlse_b = (lse.new_empty(lse.shape) for lse in (self.lse_a, self.lse_b))
        return like_rows(self.out_a), dlse_a, like_rows(self.out_b), dlse_b

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops: 5 for each element (a product for dout_a and one for dout_b; a difference, a product and a sum for
        dout . (out_a - out_b)), and 15 for the weights of each row.
        """
        flops = 5 * self.dout.numel() + 15 * self.lse_a.numel()
        return Cost(distinct_bytes(self), distinct_bytes(made), {precision_of(self.lse_a.dtype): flops})


class MergeAttentionStatesInPlace(NamedTuple):
    """Merge (part, part_lse) into (out, lse), in place."""

    out: Tensor
    lse: Tensor
    part: Tensor
    part_lse: Tensor

    def run(self) -> None:
        _merge(*self, self.out, self.lse)  # safe in place: the kernel reads each row before it writes that row

    def fake(self) -> None:
        return None

    def cost(self, made: None) -> Cost:
        return _cost(self, self.out, self.lse)


_states = declare("merge_attention_states", MergeAttentionStates, known=True)
_states_backward = declare(
    "merge_attention_states_backward",
    MergeAttentionStatesBackward,
    derivative=no_second_derivative("merge_attention_states", PLAIN),
    known=True,
)
_states_in_place = declare("merge_attention_states_", MergeAttentionStatesInPlace, mutates=("out", "lse"))


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, out: Tensor, lse: Tensor) -> None:
    """Write the merged states to out and lse, which may be out_a and lse_a."""
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


def _cost(read: Sequence[Tensor], out: Tensor, lse: Tensor) -> Cost:
    """Flops: 3 for each element, and 11 for the weights and the log-sum-exp of each row."""
    flops = 3 * out.numel() + 11 * lse.numel()
    return Cost(distinct_bytes(read), distinct_bytes([out, lse]), {precision_of(lse.dtype): flops})


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def merge_attention_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the keys of two parts, from the results of `attention(..., return_lse=True)` for each part.

    Args:
        out_a, out_b: (B, H, S, D), bfloat16, float16, float32 or float64, any strides.
        lse_a, lse_b: (B, H, S), the log-sum-exp of each row's scores; float32, or float64 with float64 outputs. -inf
            means that the row attends to no keys of this part: the merge ignores that row of the part's output.

    Returns:
        (out, lse). The output has the dtype to which PyTorch promotes out_a and out_b, so that an output accumulated in
        float32 stays float32. The output is 0 for rows that attend to no keys in either part. The arithmetic is done in
        the dtype of the log-sum-exps.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match.
        NotImplementedError: forward-mode differentiation, or a second derivative.
    """
    _check(out_a, lse_a, out_b, lse_b)
    no_tangents("merge_attention_states", out_a, lse_a, out_b, lse_b, instead=PLAIN)
    return _states(out_a, lse_a, out_b, lse_b)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge the attention results of a part of the keys into `out` and `lse`, in place and without gradients.

    Args:
        out, lse: (B, H, S, D) and (B, H, S); the features of `out` must be contiguous.
        part, part_lse: tensors of the same shapes.
    """
    rows = lse.contiguous()
    with torch.no_grad():
        _states_in_place(out, rows, part, part_lse)
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
            raise TypeError(f"{name}: {argument} must be {wide} for these outputs, got {tensor.dtype}")
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
