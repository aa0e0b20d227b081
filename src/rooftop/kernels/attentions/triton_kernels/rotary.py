"""The Triton kernel of rotary position embeddings; `../rotary.py` has the operators."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate(
    x, y, other, other_y,  # (B, H, S, D), features contiguous; `other` may have a different H, or H = 0
    cos, sin, starts,  # shapes: (B or 1, T, R / 2), (B or 1, T, R / 2), (B,) or None
    groups, heads, other_heads, positions, offset, table_positions,
    x_batch, x_head, x_position, y_batch, y_head, y_position,
    other_batch, other_head, other_position, other_y_batch, other_y_head, other_y_position,
    cos_batch, cos_position, sin_batch, sin_position,
    HAS_STARTS: tl.constexpr, INTERLEAVED: tl.constexpr, CONJUGATE: tl.constexpr,
    WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    POSITIONS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate POSITIONS positions of HEADS heads, reading cos and sin once for all these heads.

    The first `groups` groups of heads belong to x, and the remaining groups to `other`. Results at positions outside
    the tables are NaN.
    """
    other_groups = tl.cdiv(other_heads, HEADS)
    blocks = tl.cdiv(positions, POSITIONS)
    program = tl.program_id(0)
    group = program % (groups + other_groups)
    block = program // (groups + other_groups) % blocks
    batch = (program // (groups + other_groups) // blocks).to(tl.int64)
    position = block * POSITIONS + tl.arange(0, POSITIONS)  # (POSITIONS,)
    place = (position + offset).to(tl.int64)
    if HAS_STARTS:
        place += tl.load(starts + batch)
    pair = tl.arange(0, BLOCK)
    known = ((place >= 0) & (place < table_positions))[:, None] & (pair < PAIRS)[None, :]
    # A local variable, because Triton raises an error if the value of a global has changed, and NaN never equals
    # itself.
    nan = float("nan")
    cosine = tl.load(cos + batch * cos_batch + place[:, None] * cos_position + pair[None, :], mask=known, other=nan)
    sine = tl.load(sin + batch * sin_batch + place[:, None] * sin_position + pair[None, :], mask=known, other=nan)
    cosine, sine = cosine.to(tl.float32), sine.to(tl.float32)  # (POSITIONS, BLOCK)
    if CONJUGATE:
        sine = -sine
    inside, row = position < positions, position.to(tl.int64)
    if group < groups:
        first = group * HEADS
        source = x + batch * x_batch + row[:, None] * x_position
        target = y + batch * y_batch + row[:, None] * y_position
        _rotate_heads(
            source, target, x_head, y_head, first, heads, inside, cosine, sine,
            INTERLEAVED, WIDTH, PAIRS, BLOCK, REST, HEADS,
        )  # fmt: skip
    else:
        first = (group - groups) * HEADS
        source = other + batch * other_batch + row[:, None] * other_position
        target = other_y + batch * other_y_batch + row[:, None] * other_y_position
        _rotate_heads(
            source, target, other_head, other_y_head, first, other_heads, inside, cosine, sine,
            INTERLEAVED, WIDTH, PAIRS, BLOCK, REST, HEADS,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    source, target, source_head, target_head, first, heads, inside, cosine, sine,
    INTERLEAVED: tl.constexpr, WIDTH: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Rotate each pair (a, b) to (a cos - b sin, b cos + a sin). All heads are loaded before the first is stored."""
    pair, both = tl.arange(0, BLOCK), tl.arange(0, 2 * BLOCK)
    left, right = (), ()
    for index in tl.static_range(HEADS):
        there = inside[:, None] & (first + index < heads)
        start = source + (first + index).to(tl.int64) * source_head
        if INTERLEAVED:
            tile = tl.load(start + both[None, :], mask=there & (both < 2 * PAIRS)[None, :], other=0.0)
            a, b = tl.split(tl.reshape(tile, (tile.shape[0], BLOCK, 2)))
        else:
            there = there & (pair < PAIRS)[None, :]
            a = tl.load(start + pair[None, :], mask=there, other=0.0)
            b = tl.load(start + (pair + PAIRS)[None, :], mask=there, other=0.0)
        left, right = left + (a,), right + (b,)
    for index in tl.static_range(HEADS):
        there = inside[:, None] & (first + index < heads)
        start = target + (first + index).to(tl.int64) * target_head
        a, b = left[index].to(tl.float32), right[index].to(tl.float32)
        real = (a * cosine - b * sine).to(target.dtype.element_ty)
        imaginary = (b * cosine + a * sine).to(target.dtype.element_ty)
        if INTERLEAVED:
            tile = tl.reshape(tl.join(real, imaginary), (real.shape[0], 2 * BLOCK))
            tl.store(start + both[None, :], tile, mask=there & (both < 2 * PAIRS)[None, :])
        else:
            tl.store(start + pair[None, :], real, mask=there & (pair < PAIRS)[None, :])
            tl.store(start + (pair + PAIRS)[None, :], imaginary, mask=there & (pair < PAIRS)[None, :])
    if REST > 0:  # the features that are not rotated
        column = 2 * PAIRS + tl.arange(0, REST)
        for index in tl.static_range(HEADS):
            there = inside[:, None] & (first + index < heads) & (column < WIDTH)[None, :]
            head = (first + index).to(tl.int64)
            kept = tl.load(source + head * source_head + column[None, :], mask=there)
            tl.store(target + head * target_head + column[None, :], kept, mask=there)
