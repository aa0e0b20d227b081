"""Shifted-window attention with relative position bias, over a map of packed queries, keys and values.

    softmax(scale Q K^T + bias + mask) V          within each window and head
    softmax(c Q K^T / (|Q| |K|) + bias + mask) V  with cosine attention

Liu et al. 2021, "Swin Transformer", sections 3.1 and 3.2; cosine attention: Liu et al. 2022, "Swin Transformer V2". The
map is shifted cyclically before it is cut into windows, so a window at the map's end may contain regions that are not
neighbours on the map. A pair of positions from two such regions gets a mask of -100, as in the original model. The
shifted, padded and cut map is never written to memory: a program reads the positions of its window directly from the
original map. The operator is bound by memory at the sizes of Swin (49 positions of 32 features): forward reads the map,
and writes a third as many bytes as it reads.

Only the inputs are kept for backward, which computes the attention weights again. Backward uses no atomics, so
gradients are deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.attentions.tables import WINDOW_BACKWARD, WINDOW_FORWARD, WINDOW_PROGRAMS_PER_SM, WindowConfig
from rooftop.kernels.operands.autocasting import cast_by_autocast
from rooftop.kernels.operands.checks import check_finite, check_number, check_shape, check_tensors, is_integer
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import WordConstants, power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import declare, no_second_derivative, no_tangents, without_autocast
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

MASKED = -100.0  # added to the score of two positions from different regions of the map: the weight becomes nearly 0
PLAIN = "the formula in PyTorch (rooftop.kernels.attentions.window_attentions.window_attention_reference)"
SHORTEST = 1e-12  # minimum norm by which vectors are divided, as in torch.nn.functional.normalize

# ---- reference -------------------------------------------------------------------------------------------------


@without_autocast
def window_attention_reference(
    query_key_value: Tensor,
    bias: Tensor,
    padding: Tensor | None,
    cosine_scale: Tensor | None,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    scale: float,
    dropout: float = 0.0,
) -> Tensor:
    """Compute window attention (B, H, W, C) in plain PyTorch, in float32 (float64 for float64). Dropout of attention
    weights uses PyTorch's random numbers.
    """
    query, key, value = _cut_heads(query_key_value, padding, heads, window, shift)
    mask = _shift_mask(query_key_value, window, shift)
    weights = _weights(*_scaled(query, key, cosine_scale, scale), bias, mask)
    if dropout > 0:
        weights = torch.nn.functional.dropout(weights, dropout)
    out = _joined((weights @ value).transpose(2, 3).flatten(3), query_key_value, window, shift)
    return _on_map(out, query_key_value).to(query_key_value.dtype).contiguous()


@without_autocast
def window_attention_backward_reference(
    dout: Tensor,
    query_key_value: Tensor,
    bias: Tensor,
    padding: Tensor | None,
    cosine_scale: Tensor | None,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the first four inputs (query_key_value, bias, padding, cosine_scale). Gradients of an absent padding
    or cosine_scale are empty.
    """
    query, key, value = _cut_heads(query_key_value, padding, heads, window, shift)
    left, right, factor = _scaled(query, key, cosine_scale, scale)
    weights = _weights(left, right, factor, bias, _shift_mask(query_key_value, window, shift))
    windows = _cut(dout, None, window, shift)  # (B, windows, N, C), zero outside the map
    gradient = windows.unflatten(-1, (heads, -1)).transpose(2, 3).to(weights.dtype)
    dweights = gradient @ value.mT
    dscores = weights * (dweights - (weights * dweights).sum(-1, keepdim=True))  # (B, windows, heads, N, N)
    dquery, dkey = dscores @ right * factor, dscores.mT @ left * factor
    dscale = bias.new_empty(0)
    if cosine_scale is not None:
        dscale = (dscores * (left @ right.mT)).sum((0, 1, 3, 4)).to(cosine_scale.dtype)
        dquery, dkey = _through_normalizing(dquery, query), _through_normalizing(dkey, key)
    packed = torch.stack((dquery, dkey, weights.mT @ gradient))  # (3, B, windows, heads, N, D)
    full = _joined(packed.permute(1, 2, 4, 0, 3, 5).flatten(3), query_key_value, window, shift)
    height, width = query_key_value.shape[1:3]
    dpadding = bias.new_empty(0)
    if padding is not None:
        dpadding = (full[:, height:].sum((0, 1, 2)) + full[:, :height, width:].sum((0, 1, 2))).to(padding.dtype)
    dqkv = _on_map(full, query_key_value).to(query_key_value.dtype).contiguous()
    return dqkv, dscores.sum((0, 1)).to(bias.dtype), dpadding, dscale


def _cut_heads(
    packed: Tensor, padding: Tensor | None, heads: int, window: Sequence[int], shift: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, (B, windows, heads, N, D) each."""
    windows = _cut(packed, padding, window, shift)  # (B, windows, N, 3 C)
    features = packed.shape[3] // (3 * heads)
    parts = windows.unflatten(-1, (3, heads, features)).permute(3, 0, 1, 4, 2, 5)
    query, key, value = parts.to(accumulator_dtype(packed.dtype))
    return query, key, value


def _cut(x: Tensor, padding: Tensor | None, window: Sequence[int], shift: Sequence[int]) -> Tensor:
    """Pad and shift a map (B, H, W, channels), and cut it into windows (B, windows, N, channels)."""
    batch, height, width, channels = x.shape
    down, across = _windows(x, window)
    padded = torch.nn.functional.pad(x, (0, 0, 0, across * window[1] - width, 0, down * window[0] - height))
    if padding is not None:
        rows = torch.arange(padded.shape[1], device=x.device) < height
        columns = torch.arange(padded.shape[2], device=x.device) < width
        padded = torch.where((rows[:, None] & columns)[..., None], padded, padding.to(x.dtype))
    rolled = padded.roll((-shift[0], -shift[1]), (1, 2)).unflatten(2, (across, window[1]))
    cut = rolled.unflatten(1, (down, window[0])).transpose(2, 3)  # (B, down, across, window, window, channels)
    return cut.reshape(batch, down * across, window[0] * window[1], channels)


def _joined(windows: Tensor, like: Tensor, window: Sequence[int], shift: Sequence[int]) -> Tensor:
    """The reverse of `_cut`, except that the result keeps the padding: (B, padded H, padded W, channels)."""
    down, across = _windows(like, window)
    parts = windows.unflatten(2, (window[0], window[1])).unflatten(1, (down, across)).transpose(2, 3)
    shape = (like.shape[0], down * window[0], across * window[1], windows.shape[3])
    return parts.reshape(shape).roll((shift[0], shift[1]), (1, 2))


def _windows(x: Tensor, window: Sequence[int]) -> tuple[int, int]:
    """The number of windows (down, across) that cover a map (B, H, W, channels)."""
    return -(-x.shape[1] // window[0]), -(-x.shape[2] // window[1])


def _on_map(padded: Tensor, like: Tensor) -> Tensor:
    """Cut off the padding of a map (B, padded H, padded W, channels): the result has the H and W of `like`."""
    return padded[:, : like.shape[1], : like.shape[2]]


def _shift_mask(x: Tensor, window: Sequence[int], shift: Sequence[int]) -> Tensor | None:
    """The mask (windows, 1, N, N). A pair of positions gets MASKED if, along the height or along the width, only one of
    both was shifted in from the opposite end of the map, and 0 otherwise. None if there is no shift.
    """
    if not any(shift):
        return None
    (down, across), (high, wide) = _windows(x, window), window
    rows = torch.arange(down * high, device=x.device) >= down * high - shift[0]
    columns = torch.arange(across * wide, device=x.device) >= across * wide - shift[1]
    parts = 2 * rows[:, None] + columns.to(torch.int64)  # (padded H, padded W): each position's part, from 0 to 3
    part = _cut(parts[None, :, :, None], None, window, (0, 0))[0]  # (windows, N, 1)
    return MASKED * (part != part.mT)[:, None]


def _scaled(
    query: Tensor, key: Tensor, cosine_scale: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | float]:
    """Return (left, right, factor), from which the attention scores are computed as factor * (left @ right^T). `left`
    and `right` are query and key, normalized to length 1 if there is a `cosine_scale`.
    """
    if cosine_scale is None:
        return query, key, scale
    normalize = torch.nn.functional.normalize
    factor = cosine_scale.to(query.dtype)[:, None, None]
    return normalize(query, dim=-1, eps=SHORTEST), normalize(key, dim=-1, eps=SHORTEST), factor


def _weights(left: Tensor, right: Tensor, factor: Tensor | float, bias: Tensor, mask: Tensor | None) -> Tensor:
    scores = left @ right.mT * factor + bias.to(left.dtype)
    return (scores if mask is None else scores + mask).softmax(-1)


def _through_normalizing(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of the vectors x, from the gradient of x / max(|x|, SHORTEST)."""
    length = x.norm(dim=-1, keepdim=True)
    divisor = length.clamp_min(SHORTEST)
    unit = torch.where(length < SHORTEST, 0.0, x / divisor)
    return (gradient - unit * (gradient * unit).sum(-1, keepdim=True)) / divisor


# ---- launches --------------------------------------------------------------------------------------------------


def config_of(table: Sequence[WindowConfig], positions: int, features: int) -> WindowConfig | None:
    """Launch parameters for windows of `positions` positions; None if the kernels do not support such windows."""
    return next((c for c in table if positions <= c.positions and features <= c.features), None)


def _constants(x: Tensor, padding: Tensor | None, cosine_scale: Tensor | None, sizes: Sizes) -> WordConstants:
    """The constants of the forward kernel, which the backward kernel uses as well."""
    features = x.shape[3] // (3 * sizes.heads)
    covered = [size % window == 0 for size, window in zip(x.shape[1:3], sizes.window, strict=True)]
    return {
        "WINDOW_H": sizes.window[0],
        "WINDOW_W": sizes.window[1],
        "D": features,
        "BLOCK_D": _block(features),
        "KEYS": _block(sizes.window[0] * sizes.window[1]),
        "PADDING": padding is not None and not all(covered),
        "COSINE": cosine_scale is not None,
        "SHIFTED": any(sizes.shift),
        "PRECISION": "tf32" if matrix_precision(x) == "tf32" else "ieee",
        "WIDEN": INTERPRETED and x.dtype == torch.bfloat16,
    }


def _block(size: int) -> int:
    """The smallest power of two that is at least max(size, 16); operands of matrix instructions have sides of at least
    16.
    """
    return max(16, power_of_two(size))


# ---- implementations -------------------------------------------------------------------------------------------


class Sizes(NamedTuple):
    """The arguments of window attention that are not tensors."""

    heads: int
    window: Sequence[int]
    shift: Sequence[int]
    scale: float


def _sizes(x: Tensor, heads: int, window: Sequence[int], shift: Sequence[int], scale: float) -> Sizes:
    """The `Sizes` of a call. The sizes are computed at each call, because the size of the map may differ between runs
    of a traced program.
    """
    return Sizes(heads, window, _moved(x, window, shift), scale)


def _moved(x: Tensor, window: Sequence[int], shift: Sequence[int]) -> list[int]:
    """The shift (down, across) of the map x (B, H, W, channels) in positions. The shift is 0 along a dimension of the
    map that a single window covers.
    """
    return [s if size > w else 0 for s, size, w in zip(shift, x.shape[1:3], window, strict=True)]


def _config(table: Sequence[WindowConfig], x: Tensor, sizes: Sizes) -> WindowConfig | None:
    """Launch parameters of a kernel; None if the reference computes the call."""
    if by_reference(x):
        return None
    return config_of(table, sizes.window[0] * sizes.window[1], x.shape[3] // (3 * sizes.heads))


def _forward(x: Tensor, bias: Tensor, padding: Tensor | None, cosine_scale: Tensor | None, sizes: Sizes) -> Tensor:
    """Compute window attention of packed queries, keys and values x (B, H, W, 3 C)."""
    config = _config(WINDOW_FORWARD, x, sizes)
    if config is None:
        return window_attention_reference(x, bias, padding, cosine_scale, *sizes)
    require_triton()
    from rooftop.kernels.attentions.triton_kernels.window_attentions import window_attention_forward

    out = x.new_empty((*x.shape[:3], x.shape[3] // 3))
    if out.numel() == 0:
        return out
    constants = _constants(x, padding, cosine_scale, sizes)
    queries = min(config.queries, int(constants["KEYS"]))
    down, across = _windows(x, sizes.window)
    grid = (x.shape[0] * down * across * sizes.heads, -(-sizes.window[0] * sizes.window[1] // queries))
    tensors = (*_contiguous(x, bias, padding, cosine_scale), out)
    numbers = (sizes.heads, *x.shape[1:3], down, across, *sizes.shift, sizes.scale)
    tile = {"QUERIES": queries, "num_warps": config.warps, "num_stages": config.stages}
    launch(window_attention_forward, grid, x.device, *tensors, *numbers, **constants, **tile)
    return out


def _backward(
    dout: Tensor, x: Tensor, bias: Tensor, padding: Tensor | None, cosine_scale: Tensor | None, sizes: Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the same as `window_attention_backward_reference`."""
    config = _config(WINDOW_BACKWARD, x, sizes)
    if config is None or x.numel() == 0:
        return window_attention_backward_reference(dout, x, bias, padding, cosine_scale, *sizes)
    require_triton()
    from rooftop.kernels.attentions.triton_kernels.window_attentions import window_attention_backward

    constants = _constants(x, padding, cosine_scale, sizes)
    down, across = _windows(x, sizes.window)
    windows = x.shape[0] * down * across
    programs = min(windows, -(-WINDOW_PROGRAMS_PER_SM * processors(x) // sizes.heads))
    sums = [  # each program's partial sums
        x.new_empty((programs, *bias.shape), dtype=torch.float32),
        x.new_empty((programs, x.shape[3] if constants["PADDING"] else 0), dtype=torch.float32),
        x.new_empty((programs, sizes.heads if cosine_scale is not None else 0), dtype=torch.float32),
    ]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tensors = (dout.contiguous(), *_contiguous(x, bias, padding, cosine_scale), dx, *sums)
    numbers = (sizes.heads, *x.shape[1:3], down, across, windows, *sizes.shift, sizes.scale)
    grid = (sizes.heads, programs)
    tile = {"num_warps": config.warps, "num_stages": config.stages}
    launch(window_attention_backward, grid, x.device, *tensors, *numbers, **constants, **tile)
    to_padding = bias.new_empty(0) if padding is None else torch.zeros_like(padding)
    if constants["PADDING"]:
        to_padding = sums[1].sum(0).to(to_padding.dtype)
    to_scale = bias.new_empty(0) if cosine_scale is None else sums[2].sum(0).to(cosine_scale.dtype)
    return dx, sums[0].sum(0).to(bias.dtype), to_padding, to_scale


def _contiguous(x: Tensor, bias: Tensor, padding: Tensor | None, cosine_scale: Tensor | None) -> tuple[Tensor, ...]:
    """Copy arguments that are not contiguous. An absent argument becomes an empty tensor, which the kernel does not
    read.
    """
    return tuple((bias if t is None else t).contiguous() for t in (x, bias, padding, cosine_scale))


# ---- operators -------------------------------------------------------------------------------------------------


class WindowAttention(NamedTuple):
    """Window attention (B, H, W, C) of packed queries, keys and values (B, H, W, 3 C)."""

    query_key_value: Tensor
    bias: Tensor
    padding: Tensor | None
    cosine_scale: Tensor | None
    heads: int
    window: Sequence[int]
    shift: Sequence[int]
    scale: float

    def run(self) -> Tensor:
        return _forward(*self[:4], self._sizes())

    def fake(self) -> Tensor:
        x = self.query_key_value
        return x.new_empty((*x.shape[:3], x.shape[3] // 3))

    def in_pytorch(self) -> Tensor:
        return window_attention_reference(*self[:4], *self._sizes())

    def _sizes(self) -> Sizes:
        return _sizes(self.query_key_value, *self[4:])

    @staticmethod
    def gradients(kept: WindowAttention, wanted: Sequence[bool], dout: Tensor) -> list[Tensor | None]:
        found = _window_attention_backward(dout, *kept)
        return [None if given is None else each for given, each in zip(kept[:4], found, strict=True)]

    def cost(self, made: Tensor) -> Cost:
        """Flops of the matrix products for scores and values. Each pair of positions adds 5 flops for the softmax, 1
        for the bias, and 1 for the mask of a shifted map.

        Cosine attention adds 3 for each element of queries and of keys, and 1 for the scale of each pair.
        """
        cosine = self.cosine_scale is not None
        flops = _flops(self.query_key_value, self._sizes(), 2, 6 + cosine, 6 * cosine)
        return Cost(distinct_bytes(self[:4]), distinct_bytes([made]), flops)


class WindowAttentionBackward(NamedTuple):
    """Gradients of the map, the bias, the padding and the cosine scale. The gradient of an absent input is empty."""

    dout: Tensor
    query_key_value: Tensor
    bias: Tensor
    padding: Tensor | None
    cosine_scale: Tensor | None
    heads: int
    window: Sequence[int]
    shift: Sequence[int]
    scale: float

    def run(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return _backward(*self[:5], self._sizes())

    def fake(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x, bias, *vectors = self[1:5]
        to_padding, to_scale = (bias.new_empty(0) if t is None else t.new_empty(t.shape) for t in vectors)
        return x.new_empty(x.shape), bias.new_empty(bias.shape), to_padding, to_scale

    def _sizes(self) -> Sizes:
        return _sizes(self.query_key_value, *self[5:])

    def cost(self, made: tuple[Tensor, ...]) -> Cost:
        """Flops of the matrix products for scores and for the gradients of attention weights, queries, keys and values.
        Each pair of positions adds 6 flops for the softmax and 2 for the bias.

        Cosine attention adds 8 for each element of queries and of keys, and 4 for each pair.
        """
        cosine = self.cosine_scale is not None
        flops = _flops(self.query_key_value, self._sizes(), 5, 8 + 4 * cosine, 16 * cosine)
        written = [each for given, each in zip(self[1:5], made, strict=True) if given is not None]
        return Cost(distinct_bytes(self[:5]), distinct_bytes(written), flops)


def _precision(arguments: Sequence[Any]) -> str | None:
    """The precision of matrix products of float32 inputs, "fp32" or "tf32", from PyTorch's switches. None if the inputs
    are not float32."""
    return matrix_precision(arguments[0]) if arguments[0].dtype == torch.float32 else None


_window_attention = declare("window_attention", WindowAttention, known=_precision)
_window_attention_backward = declare(
    "window_attention_backward",
    WindowAttentionBackward,
    derivative=no_second_derivative("window_attention", PLAIN),
    known=_precision,
)


def _flops(x: Tensor, sizes: Sizes, products: int, of_pair: int, of_element: int) -> dict[str, int]:
    """Flops of window attention: `products` matrix products per window and head, `of_pair` operations for each pair of
    a query and a key, and `of_element` operations for each element of the queries. If the map is shifted, the mask adds
    one operation for each pair.
    """
    window, heads = sizes.window, sizes.heads
    down, across = _windows(x, window)
    positions = x.shape[0] * down * across * window[0] * window[1]
    pairs, width = positions * heads * window[0] * window[1], x.shape[3] // 3
    flops = {matrix_precision(x): 2 * products * pairs * (width // max(1, heads))}
    precision = precision_of(x.dtype)
    others = (of_pair + any(sizes.shift)) * pairs + of_element * positions * width
    flops[precision] = flops.get(precision, 0) + others
    return flops


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def window_attention(
    query_key_value: Tensor,
    bias: Tensor,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int] = (0, 0),
    *,
    padding: Tensor | None = None,
    cosine_scale: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Attention within windows of a map. The map is shifted cyclically by -`shift` before it is cut into windows, and
    shifted back afterwards.

    Args:
        query_key_value: (B, H, W, 3 C), bfloat16, float16, float32 or float64. Each position has the queries of all
            heads, then the keys, then the values, as `torch.nn.Linear(C, 3 * C)` returns them. H and W are arbitrary: a
            map whose size is not a multiple of the window's is padded below and on the right. Queries also attend to
            the padded positions, as in the original model.
        bias: (heads, N, N) for the N = h * w positions of a window, row by row. The bias is added to the scores of
            queries (second dimension) and keys (third). The bias may have a different floating-point dtype from
            query_key_value.
        heads: the number of heads, which divides C.
        window: (h, w), the size of a window in positions.
        shift: (h, w), each at least 0 and below the window's size. A dimension that one window covers is not shifted,
            as in the original model.
        padding: (3 C,), the queries, keys and values at padded positions; None: zeros. The original model pads before
            its linear layer, so these values are the bias of that layer.
        cosine_scale: (heads,). If given, attention is cosine attention: scores are products of normalized queries and
            keys, times this factor.
        scale: without cosine attention, the factor of the products of queries and keys; 1 / sqrt(C / heads) if not
            given.
        dropout: probability with which an attention weight is set to zero; the other weights are divided by 1 -
            dropout. With dropout above 0, plain PyTorch computes the result, with the weights of all windows in memory.

    Returns:
        (B, H, W, C), contiguous, of query_key_value's dtype. The arithmetic is float32 (float64 for float64); the
        matrix products read half precision without conversion. Under autocast, query_key_value is cast to autocast's
        dtype.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, its dtype is wrong, or scale or dropout is not a number.
        ValueError: shapes or devices do not match, the shift is not below the window's size, both scales are given, a
            scale is not finite, or dropout is not a probability.
        NotImplementedError: forward-mode differentiation or a second derivative, if dropout is 0.
    """
    _check(query_key_value, bias, heads, window, shift, padding, cosine_scale, scale)
    check_number("window_attention", "dropout", dropout)
    if not 0 <= dropout <= 1:
        raise ValueError(f"window_attention: dropout must be between 0 and 1, got {dropout}")
    if dropout == 0:
        no_tangents("window_attention", query_key_value, bias, padding, cosine_scale, instead=PLAIN)
    (query_key_value,) = cast_by_autocast(query_key_value)
    factor = float(scale) if scale is not None else 1 / math.sqrt(max(1, query_key_value.shape[3] // (3 * heads)))
    tensors = (query_key_value, bias, padding, cosine_scale)
    if dropout > 0:
        moved = _moved(query_key_value, window, shift)
        return window_attention_reference(*tensors, heads, window, moved, factor, dropout)
    return _window_attention(*tensors, heads, list(window), list(shift), factor)


def _check(
    x: Tensor,
    bias: Tensor,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    padding: Tensor | None,
    cosine_scale: Tensor | None,
    scale: float | None,
) -> None:
    tensors = {"query_key_value": x, "bias": bias, "padding": padding, "cosine_scale": cosine_scale}
    check_tensors("window_attention", FLOATS, ("padding", "cosine_scale"), **tensors)
    _check_window(heads, window, shift)
    if x.dim() != 4 or x.shape[3] % (3 * heads):
        raise ValueError(
            f"window_attention: expected query_key_value of shape (B, H, W, 3 C) with C divisible by {heads} heads, "
            f"got {tuple(x.shape)}"
        )
    positions = window[0] * window[1]
    expected = {"bias": (heads, positions, positions), "padding": (x.shape[3],), "cosine_scale": (heads,)}
    for name, shape in expected.items():
        check_shape("window_attention", name, tensors[name], shape)
    if scale is None:
        return
    if cosine_scale is not None:
        raise ValueError("window_attention: give scale or cosine_scale, not both")
    check_finite("window_attention", "scale", scale, "a number or None")


def _check_window(heads: int, window: Sequence[int], shift: Sequence[int]) -> None:
    if not is_integer(heads) or heads < 1:
        raise ValueError(f"window_attention: heads must be a positive int, got {heads!r}")
    for name, pair, least in (("window", window, 1), ("shift", shift, 0)):
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not all(is_integer(each) and each >= least for each in pair):
            raise ValueError(f"window_attention: {name} must be two ints of at least {least}, got {pair!r}")
    if any(s >= w for s, w in zip(shift, window, strict=True)):
        raise ValueError(f"window_attention: shift must be below the window's size {tuple(window)}, got {tuple(shift)}")
