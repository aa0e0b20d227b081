"""The Triton kernels of window attention; `../window_attentions.py` has the operator.

A program computes one head: in forward for QUERIES positions of one window, in backward for several whole windows, one
after another. Position n of a window is in row n // WINDOW_W and column n % WINDOW_W of the window. On the map, the
position is shift_h rows further down and shift_w columns further right than without a shift. Rows and columns past the
end of the padded map wrap around to its beginning. Maps are contiguous, so the D features of a head are neighbours.
"""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.products import product


@triton.jit
def window_attention_forward(
    packed, bias, padding, cosine_scale,  # shapes: (B, H, W, 3, heads, D), (heads, N, N), (3, heads, D), (heads,)
    out,  # (B, H, W, heads, D)
    heads, height, width, down, across, shift_h, shift_w, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr,
    PADDING: tl.constexpr, COSINE: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the attention of QUERIES positions of a window to all N positions of that window. KEYS is at least N."""
    head = tl.program_id(0) % heads
    window = tl.program_id(0) // heads
    feature = tl.arange(0, BLOCK_D)
    n = tl.program_id(1) * QUERIES + tl.arange(0, QUERIES)
    m = tl.arange(0, KEYS)
    token, part, real, here = _places(n, window, height, width, down, across, shift_h, shift_w, WINDOW_H, WINDOW_W)
    tokens, parts, reals, there = _places(m, window, height, width, down, across, shift_h, shift_w, WINDOW_H, WINDOW_W)
    query = _vectors(packed, padding, token, feature, real, here, 0, head, heads, D, PADDING)
    key = _vectors(packed, padding, tokens, feature, reals, there, 1, head, heads, D, PADDING)
    value = _vectors(packed, padding, tokens, feature, reals, there, 2, head, heads, D, PADDING)
    scores = product(query, tl.trans(key), PRECISION, WIDEN)
    if COSINE:
        scores = scores * _inverse_lengths(query)[:, None] * _inverse_lengths(key)[None, :]
        scores = scores * tl.load(cosine_scale + head).to(tl.float32)
    else:
        scores = scores * scale
    exponentials = _exponentials(scores, bias, head, n, m, part, parts, WINDOW_H * WINDOW_W, SHIFTED)
    total = tl.sum(exponentials, axis=1)
    result = product(exponentials.to(value.dtype), value, PRECISION, WIDEN) / total[:, None]
    place = (token * heads + head)[:, None] * D + feature[None, :]
    tl.store(out + place, result.to(out.dtype.element_ty), mask=here[:, None] & (feature < D)[None, :])


@triton.jit
def window_attention_backward(
    dout, packed, bias, padding, cosine_scale,  # inputs as in forward; dout (B, H, W, heads, D)
    dpacked, dbias, dpadding, dscale,  # as packed; float32 sums: (P, heads, N, N), (P, 3, heads, D), (P, heads)
    heads, height, width, down, across, windows, shift_h, shift_w, scale,
    WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, KEYS: tl.constexpr,
    PADDING: tl.constexpr, COSINE: tl.constexpr, SHIFTED: tl.constexpr, PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of every P-th window of a head, where P is the number of programs per head. Each program
    recomputes the attention weights, and adds up in registers the gradients of the tensors that all windows share.
    """
    head = tl.program_id(0)
    program = tl.program_id(1)
    N: tl.constexpr = WINDOW_H * WINDOW_W
    feature = tl.arange(0, BLOCK_D)
    n = tl.arange(0, KEYS)
    to_bias = tl.zeros((KEYS, KEYS), tl.float32)
    to_key_padding = tl.zeros((BLOCK_D,), tl.float32)
    to_value_padding = tl.zeros((BLOCK_D,), tl.float32)
    to_scale = tl.zeros((KEYS,), tl.float32)
    for window in range(program, windows, tl.num_programs(1)):
        token, part, real, here = _places(n, window, height, width, down, across, shift_h, shift_w, WINDOW_H, WINDOW_W)
        inside = here[:, None] & (feature < D)[None, :]
        query = _vectors(packed, padding, token, feature, real, here, 0, head, heads, D, PADDING)
        key = _vectors(packed, padding, token, feature, real, here, 1, head, heads, D, PADDING)
        value = _vectors(packed, padding, token, feature, real, here, 2, head, heads, D, PADDING)
        gradient = tl.load(dout + (token * heads + head)[:, None] * D + feature[None, :], mask=inside, other=0.0)
        cosines = product(query, tl.trans(key), PRECISION, WIDEN)
        factor = scale
        if COSINE:
            factor = tl.load(cosine_scale + head).to(tl.float32)
            query_inverse, key_inverse = _inverse_lengths(query), _inverse_lengths(key)
            cosines = cosines * query_inverse[:, None] * key_inverse[None, :]
        weights = _exponentials(cosines * factor, bias, head, n, n, part, part, N, SHIFTED)
        weights = weights / tl.sum(weights, axis=1)[:, None]
        dweights = product(gradient, tl.trans(value), PRECISION, WIDEN)
        dscores = weights * (dweights - tl.sum(weights * dweights, axis=1)[:, None])
        to_bias += dscores
        dvalue = product(tl.trans(weights.to(value.dtype)), gradient, PRECISION, WIDEN)
        rounded = dscores.to(value.dtype)
        if COSINE:
            unit_query = (query.to(tl.float32) * query_inverse[:, None]).to(value.dtype)
            unit_key = (key.to(tl.float32) * key_inverse[:, None]).to(value.dtype)
            dquery = factor * product(rounded, unit_key, PRECISION, WIDEN)
            dkey = factor * product(tl.trans(rounded), unit_query, PRECISION, WIDEN)
            to_scale += tl.sum(dscores * cosines, axis=1)
            dquery = _through_normalizing(dquery, query, query_inverse)
            dkey = _through_normalizing(dkey, key, key_inverse)
        else:
            dquery = factor * product(rounded, key, PRECISION, WIDEN)
            dkey = factor * product(tl.trans(rounded), query, PRECISION, WIDEN)
        place = (token * 3 * heads + head)[:, None] * D + feature[None, :]
        tl.store(dpacked + place, dquery.to(dpacked.dtype.element_ty), mask=inside)
        tl.store(dpacked + place + heads * D, dkey.to(dpacked.dtype.element_ty), mask=inside)
        tl.store(dpacked + place + 2 * heads * D, dvalue.to(dpacked.dtype.element_ty), mask=inside)
        if PADDING:
            beyond = (real & ~here)[:, None]
            to_key_padding += tl.sum(tl.where(beyond, dkey, 0.0), axis=0)
            to_value_padding += tl.sum(tl.where(beyond, dvalue, 0.0), axis=0)
    square = ((program * heads + head) * N + n)[:, None] * N + n[None, :]
    tl.store(dbias + square, to_bias, mask=(n < N)[:, None] & (n < N)[None, :])
    if PADDING:  # forward drops results outside the map, so queries in the padding get no gradient
        start = dpadding + (program * 3 * heads + head) * D + feature
        tl.store(start, tl.zeros((BLOCK_D,), tl.float32), mask=feature < D)
        tl.store(start + heads * D, to_key_padding, mask=feature < D)
        tl.store(start + 2 * heads * D, to_value_padding, mask=feature < D)
    if COSINE:
        tl.store(dscale + program * heads + head, tl.sum(to_scale, axis=0))


@triton.jit
def _places(n, window, height, width, down, across, shift_h, shift_w, WINDOW_H: tl.constexpr, WINDOW_W: tl.constexpr):
    """Compute (token, part, real, here) for positions n of a window.

    token: the position's index on the map. part: the index (0 to 3) of the map's region from which the position comes;
    a shifted window joins up to four regions. real: whether n is in the window. here: whether n is on the map, not in
    the padding.
    """
    row = window // across % down * WINDOW_H + n // WINDOW_W + shift_h
    column = window % across * WINDOW_W + n % WINDOW_W + shift_w
    below, beside = row >= down * WINDOW_H, column >= across * WINDOW_W
    part = 2 * below.to(tl.int32) + beside.to(tl.int32)
    row = tl.where(below, row - down * WINDOW_H, row)
    column = tl.where(beside, column - across * WINDOW_W, column)
    real = n < WINDOW_H * WINDOW_W
    image = (window // (down * across)).to(tl.int64)
    token = (image * height + row) * width + column
    return token, part, real, real & (row < height) & (column < width)


@triton.jit
def _vectors(
    packed, padding, token, feature, real, here, part: tl.constexpr, head, heads, D: tl.constexpr, PADDING: tl.constexpr
):
    """Queries (part 0), keys (1) or values (2) of a head, (positions, BLOCK_D); zeros for positions outside the window
    and for features from D on.
    """
    place = ((token * 3 + part) * heads + head)[:, None] * D + feature[None, :]
    values = tl.load(packed + place, mask=here[:, None] & (feature < D)[None, :], other=0.0)
    if PADDING:
        beyond = tl.load(padding + (part * heads + head) * D + feature, mask=feature < D, other=0.0)
        values = tl.where((real & ~here)[:, None], beyond.to(values.dtype)[None, :], values)
    return values


@triton.jit
def _exponentials(scores, bias, head, n, m, part, parts, N: tl.constexpr, SHIFTED: tl.constexpr):
    """exp(s - maximum of each row) with s = scores + bias + mask, for queries n and keys m; 0 for keys outside the
    window.
    """
    known = (n < N)[:, None] & (m < N)[None, :]
    scores += tl.load(bias + (head * N + n)[:, None] * N + m[None, :], mask=known, other=0.0).to(tl.float32)
    if SHIFTED:
        scores += tl.where(part[:, None] != parts[None, :], -100.0, 0.0)
    scores = tl.where((m < N)[None, :], scores, float("-inf"))
    largest = tl.max(scores, axis=1)
    return tl.exp(scores - largest[:, None])


@triton.jit
def _inverse_lengths(vectors):
    """1 / max(|x|, 1e-12) of each row."""
    wide = vectors.to(tl.float32)
    return 1.0 / tl.maximum(tl.sqrt(tl.sum(wide * wide, axis=1)), 1e-12)


@triton.jit
def _through_normalizing(gradient, vectors, inverse):
    """The gradient of the vectors x, from the gradient of x / max(|x|, 1e-12)."""
    unit = tl.where((inverse < 1e12)[:, None], vectors.to(tl.float32) * inverse[:, None], 0.0)
    return (gradient - unit * tl.sum(gradient * unit, axis=1)[:, None]) * inverse[:, None]
