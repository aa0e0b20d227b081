"""Shifted-window attention with relative position bias, of a map of packed queries, keys and values.

    softmax(scale Q K^T + bias + mask) V          within each window and head
    softmax(c Q K^T / (|Q| |K|) + bias + mask) V  with cosine attention

Liu et al. 2021, "Swin Transformer", sections 3.1 and 3.2; cosine attention: Liu et al. 2022, "Swin Transformer V2". The
map is shifted cyclically before it is cut, so that a window at its end holds parts that are no neighbours: pairs of two
parts get a mask of -100, as in the origin. Neither the shift, nor the cut, nor the padding of a map that windows do not
divide exists in memory: a program reads the positions of its window where they lie. Bound by bytes at the sizes of Swin
(49 positions of 32 features): forward reads the map and writes a third as much.

Backward computes the weights again and keeps nothing but the inputs. Deterministic: no atomics.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, matrix_precision, precision_of
from rooftop.kernels.attentions.tables import WINDOW_BACKWARD, WINDOW_FORWARD, WINDOW_PROGRAMS_PER_SM, WindowConfig
from rooftop.kernels.operands.checks import check_finite, check_shape, check_tensors
from rooftop.kernels.operands.dtypes import FLOATS, accumulator_dtype
from rooftop.kernels.operands.launch_data import WordConstants, power_of_two
from rooftop.kernels.operands.references import by_reference
from rooftop.launch.operators import (
    differentiable,
    in_pytorch,
    no_second_derivative,
    no_tangents,
    operator,
    without_autocast,
)
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

MASKED = -100.0  # what the origin adds where parts are no neighbours: nearly, not exactly, nothing
SHORTEST = 1e-12  # of the lengths that vectors are divided by, as torch.nn.functional.normalize has it

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
    """(B, H, W, C) in plain PyTorch; float32 inside, or float64 for float64. Weights are dropped as torch drops."""
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
    """Gradients of the first four arguments; of padding and cosine_scale without elements where there are none."""
    query, key, value = _cut_heads(query_key_value, padding, heads, window, shift)
    left, right, factor = _scaled(query, key, cosine_scale, scale)
    weights = _weights(left, right, factor, bias, _shift_mask(query_key_value, window, shift))
    windows = _cut(dout, None, window, shift)  # (B, windows, N, C): nothing comes from beyond the map
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
    """(B, H, W, channels) padded, shifted and cut: (B, windows, N, channels)."""
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
    """The reverse of `_cut`: (B, H, W, channels) with the padding."""
    down, across = _windows(like, window)
    parts = windows.unflatten(2, (window[0], window[1])).unflatten(1, (down, across)).transpose(2, 3)
    shape = (like.shape[0], down * window[0], across * window[1], windows.shape[3])
    return parts.reshape(shape).roll((shift[0], shift[1]), (1, 2))


def _windows(x: Tensor, window: Sequence[int]) -> tuple[int, int]:
    """How many windows (down, across) cover a map (B, H, W, channels)."""
    return -(-x.shape[1] // window[0]), -(-x.shape[2] // window[1])


def _on_map(padded: Tensor, like: Tensor) -> Tensor:
    return padded[:, : like.shape[1], : like.shape[2]]


def _shift_mask(x: Tensor, window: Sequence[int], shift: Sequence[int]) -> Tensor | None:
    """(windows, 1, N, N): MASKED where one of a pair was moved from the other end of the map and the other not."""
    if not any(shift):
        return None
    (down, across), (high, wide) = _windows(x, window), window
    rows = torch.arange(down * high, device=x.device) >= down * high - shift[0]
    columns = torch.arange(across * wide, device=x.device) >= across * wide - shift[1]
    parts = 2 * rows[:, None] + columns.to(torch.int64)  # (H, W): which of four
    part = _cut(parts[None, :, :, None], None, window, (0, 0))[0]  # (windows, N, 1)
    return MASKED * (part != part.mT)[:, None]


def _scaled(
    query: Tensor, key: Tensor, cosine_scale: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor | float]:
    """(left, right, factor): what scores are products of."""
    if cosine_scale is None:
        return query, key, scale
    normalize = torch.nn.functional.normalize
    factor = cosine_scale.to(query.dtype)[:, None, None]
    return normalize(query, dim=-1, eps=SHORTEST), normalize(key, dim=-1, eps=SHORTEST), factor


def _weights(left: Tensor, right: Tensor, factor: Tensor | float, bias: Tensor, mask: Tensor | None) -> Tensor:
    scores = left @ right.mT * factor + bias.to(left.dtype)
    return (scores if mask is None else scores + mask).softmax(-1)


def _through_normalizing(gradient: Tensor, x: Tensor) -> Tensor:
    """The gradient of x, from that of x / max(|x|, SHORTEST)."""
    length = x.norm(dim=-1, keepdim=True)
    divisor = length.clamp_min(SHORTEST)
    unit = torch.where(length < SHORTEST, 0.0, x / divisor)
    return (gradient - unit * (gradient * unit).sum(-1, keepdim=True)) / divisor


# ---- launches --------------------------------------------------------------------------------------------------


def config_of(table: Sequence[WindowConfig], positions: int, features: int) -> WindowConfig | None:
    """The parameters for windows of so many positions; None where the kernels do not take them."""
    return next((c for c in table if positions <= c.positions and features <= c.features), None)


def _constants(x: Tensor, padding: Tensor | None, cosine_scale: Tensor | None, sizes: Sizes) -> WordConstants:
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
    """The next power of two; 16 at least, which matrix instructions need."""
    return max(16, power_of_two(size))


# ---- implementations -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """The numbers among the arguments."""

    heads: int
    window: Sequence[int]
    shift: Sequence[int]
    scale: float

    @property
    def all(self) -> tuple[int, Sequence[int], Sequence[int], float]:
        return self.heads, self.window, self.shift, self.scale


def _sizes(x: Tensor, heads: int, window: Sequence[int], shift: Sequence[int], scale: float) -> Sizes:
    """Of a call of the operator, which may be traced at one size of the map and run at another."""
    return Sizes(heads, window, _moved(x, window, shift), scale)


def _moved(x: Tensor, window: Sequence[int], shift: Sequence[int]) -> list[int]:
    """How far the map is shifted: not at all where one window covers it."""
    return [s if size > w else 0 for s, size, w in zip(shift, x.shape[1:3], window, strict=True)]


def _config(table: Sequence[WindowConfig], x: Tensor, sizes: Sizes) -> WindowConfig | None:
    """None: by the reference."""
    if by_reference(x):
        return None
    return config_of(table, sizes.window[0] * sizes.window[1], x.shape[3] // (3 * sizes.heads))


def _forward(x: Tensor, bias: Tensor, padding: Tensor | None, cosine_scale: Tensor | None, sizes: Sizes) -> Tensor:
    """x (B, H, W, 3 C)."""
    config = _config(WINDOW_FORWARD, x, sizes)
    if config is None:
        return window_attention_reference(x, bias, padding, cosine_scale, *sizes.all)
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
    """As the reference."""
    config = _config(WINDOW_BACKWARD, x, sizes)
    if config is None or x.numel() == 0:
        return window_attention_backward_reference(dout, x, bias, padding, cosine_scale, *sizes.all)
    require_triton()
    from rooftop.kernels.attentions.triton_kernels.window_attentions import window_attention_backward

    constants = _constants(x, padding, cosine_scale, sizes)
    down, across = _windows(x, sizes.window)
    windows = x.shape[0] * down * across
    programs = min(windows, -(-WINDOW_PROGRAMS_PER_SM * processors(x) // sizes.heads))
    sums = [  # of each program
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
    """Memory of all; what is not there is not read."""
    return tuple((bias if t is None else t).contiguous() for t in (x, bias, padding, cosine_scale))


# ---- registration ----------------------------------------------------------------------------------------------


@operator("window_attention")
def _window_attention(
    query_key_value: Tensor,
    bias: Tensor,
    padding: Tensor | None,
    cosine_scale: Tensor | None,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> Tensor:
    return _forward(query_key_value, bias, padding, cosine_scale, _sizes(query_key_value, heads, window, shift, scale))


@torch.library.register_fake("rooftop::window_attention")
def _(
    query_key_value: Tensor,
    bias: Tensor,
    padding: Tensor | None,
    cosine_scale: Tensor | None,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> Tensor:
    return query_key_value.new_empty((*query_key_value.shape[:3], query_key_value.shape[3] // 3))


def _by_reference(
    query_key_value: Tensor,
    bias: Tensor,
    padding: Tensor | None,
    cosine_scale: Tensor | None,
    heads: int,
    window: Sequence[int],
    shift: Sequence[int],
    scale: float,
) -> Tensor:
    sizes = _sizes(query_key_value, heads, window, shift, scale)
    return window_attention_reference(query_key_value, bias, padding, cosine_scale, *sizes.all)


in_pytorch("window_attention", _by_reference)


@operator("window_attention_backward")
def _window_attention_backward(
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
    return _backward(
        dout, query_key_value, bias, padding, cosine_scale, _sizes(query_key_value, heads, window, shift, scale)
    )


@torch.library.register_fake("rooftop::window_attention_backward")
def _(
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
    to_vectors = [bias.new_empty(0) if t is None else t.new_empty(t.shape) for t in (padding, cosine_scale)]
    return query_key_value.new_empty(query_key_value.shape), bias.new_empty(bias.shape), to_vectors[0], to_vectors[1]


def _save(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: Tensor) -> None:  # type: ignore[type-arg]
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, dout: Tensor) -> tuple[Tensor | None, ...]:
    tensors = ctx.saved_tensors  # type: ignore[attr-defined]
    found = _window_attention_backward(dout, *tensors, *ctx.rest)  # type: ignore[attr-defined]
    gradients = [None if tensor is None else each for tensor, each in zip(tensors, found, strict=True)]
    return *gradients, None, None, None, None


PLAIN = "the formula in PyTorch (rooftop.kernels.attentions.window_attentions.window_attention_reference)"
differentiable("window_attention", _differentiate, _save)
differentiable("window_attention_backward", no_second_derivative("window_attention", PLAIN))


@cost_of("rooftop::window_attention")
def _forward_cost(call: Call) -> Cost:
    """Scores and weighted values; of a pair's softmax 5 operations, and the bias; of a shifted map the mask.

    Cosine attention: 3 operations for each element of queries and keys, and the scale of its head for each pair.
    """
    cosine = call["cosine_scale"] is not None
    flops = _flops(call, 2, 6 + _is_shifted(call) + cosine, 6 * cosine)
    return Cost(distinct_bytes([call[name] for name in INPUTS]), distinct_bytes([call.out]), flops)


@cost_of("rooftop::window_attention_backward")
def _backward_cost(call: Call) -> Cost:
    """Scores again, gradients of weights, queries, keys and values; of a pair's softmax 6 operations, bias, its sum.

    Cosine attention: 5 more operations for each element of queries and keys, and 3 more for each pair.
    """
    cosine = call["cosine_scale"] is not None
    flops = _flops(call, 5, 8 + _is_shifted(call) + 4 * cosine, 16 * cosine)
    read = [call["dout"], *(call[name] for name in INPUTS)]
    given = (call["padding"] is not None, cosine)
    written = [*call.out[:2], *(each for each, is_given in zip(call.out[2:], given, strict=True) if is_given)]
    return Cost(distinct_bytes(read), distinct_bytes(written), flops)


INPUTS = ("query_key_value", "bias", "padding", "cosine_scale")


def _is_shifted(call: Call) -> bool:
    return any(_moved(call["query_key_value"], call["window"], call["shift"]))


def _flops(call: Call, products: int, of_pair: int, of_element: int) -> dict[str, int]:
    """Matrix products, other operations for each pair of positions, and for each element of the queries."""
    x, window, heads = call["query_key_value"], call["window"], call["heads"]
    down, across = _windows(x, window)
    positions = x.shape[0] * down * across * window[0] * window[1]
    pairs, width = positions * heads * window[0] * window[1], x.shape[3] // 3
    flops = {matrix_precision(x): 2 * products * pairs * (width // max(1, heads))}
    precision = precision_of(x.dtype)
    flops[precision] = flops.get(precision, 0) + of_pair * pairs + of_element * positions * width
    return flops


# ---- public ----------------------------------------------------------------------------------------------------


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
    """Attention within windows of a map that is shifted cyclically by (-h, -w) before it is cut and back after it.

    Args:
        query_key_value: (B, H, W, 3 C), bfloat16, float16, float32 or float64: of each position the queries of all
            heads, then the keys, then the values, as `torch.nn.Linear(C, 3 * C)` gives them. Any H and W: a map that
            windows do not divide is padded below and on the right, and what lies there is seen, as in the origin.
        bias: (heads, N, N), N = h * w positions of a window row by row: added to the scores of queries (second
            dimension) and keys (third). A floating point dtype, its own.
        heads: which share C evenly.
        window: (h, w) of a window in positions.
        shift: (h, w), from 0 to below the window's. Where one window covers the map there is none, as in the origin.
        padding: (3 C,), queries, keys and values of positions beyond the map: the bias of the linear layer, where the
            origin pads in front of it. None: zeros.
        cosine_scale: (heads,), makes it cosine attention: products of queries and keys of length 1, times this.
        scale: of the products of queries and keys otherwise; 1 / sqrt(C / heads) if not given.
        dropout: probability with which a weight, of a query and a key in a window and head, is set to zero, the others
            divided by 1 - dropout. Above 0 it is plain PyTorch, in which the weights of all windows are in memory.

    Returns:
        (B, H, W, C), contiguous, of query_key_value's dtype. The arithmetic is float32 (float64 for float64); the
        matrix products take half precision as it is. Under autocast query_key_value is cast to its dtype.

    Raises:
        TypeError: no dense tensors, or dtypes that do not fit.
        ValueError: shapes or devices that do not fit, a shift beyond the window, both scales, one that is not finite,
            or a dropout that is no probability.
        NotImplementedError: forward-mode differentiation, or a second derivative, without dropout.
    """
    _check(query_key_value, bias, heads, window, shift, padding, cosine_scale, scale)
    if not 0 <= dropout <= 1:
        raise ValueError(f"window_attention: dropout must be between 0 and 1, got {dropout}")
    if dropout == 0:
        no_tangents("window_attention", query_key_value, bias, padding, cosine_scale, instead=PLAIN)
    device = query_key_value.device.type
    if device != "meta" and torch.is_autocast_enabled(device) and query_key_value.dtype != torch.float64:
        query_key_value = query_key_value.to(torch.get_autocast_dtype(device))
    factor = float(scale) if scale is not None else 1 / math.sqrt(max(1, query_key_value.shape[3] // (3 * heads)))
    tensors = (query_key_value, bias, padding, cosine_scale)
    if dropout > 0:
        moved = _moved(query_key_value, window, shift)
        return window_attention_reference(*tensors, heads, window, moved, factor, dropout)
    result: Tensor = _window_attention(*tensors, heads, list(window), list(shift), factor)
    return result


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
            f"window_attention: expected query_key_value of shape (B, H, W, 3 C) with C a multiple of {heads} heads, "
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
    if not _is_count(heads) or heads < 1:
        raise ValueError(f"window_attention: heads must be a positive int, got {heads!r}")
    for name, pair, least in (("window", window, 1), ("shift", shift, 0)):
        is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not is_pair or not all(_is_count(each) and each >= least for each in pair):
            raise ValueError(f"window_attention: {name} must be two ints of at least {least}, got {pair!r}")
    if any(s >= w for s, w in zip(shift, window, strict=True)):
        raise ValueError(f"window_attention: shift must be below the window's size {tuple(window)}, got {tuple(shift)}")


def _is_count(value: object) -> bool:
    return isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool)
