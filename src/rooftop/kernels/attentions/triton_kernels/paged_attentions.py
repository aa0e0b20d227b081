"""Triton kernels of attention over pages of keys and values; `../paged_attentions.py` has the operator."""

from __future__ import annotations

import triton
import triton.language as tl

from rooftop.kernels.operands.triton_kernels.products import product


@triton.jit
def attend_pages(
    query, keys, values,  # shapes: (B, H, D), (N, H_k, P, D), (N, H_k, P, D)
    pages, lengths, out,  # shapes: (B, W), (B,), (B, H, D)
    partial, partial_lse,  # shapes: (B, H, SPLITS, D), (B, H, SPLITS), float32; unused for one split
    kv_heads, width, page_count, scale,  # H_k, W, N
    query_batch, query_head, key_page, key_head, key_position, value_page, value_head, value_position, pages_batch,
    WINDOW: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Compute the attention of ROWS query heads (of the GROUP query heads that share one key head) to one part of a
    sequence's positions. SPLITS parts cover all positions, or only the last WINDOW positions.
    """
    program = tl.program_id(0)
    split = program % SPLITS
    chunk = program // SPLITS % tl.cdiv(GROUP, ROWS)
    pair = program // SPLITS // tl.cdiv(GROUP, ROWS)
    kv_head = pair % kv_heads
    b = (pair // kv_heads).to(tl.int64)
    given = tl.load(lengths + b).to(tl.int64)
    room = width.to(tl.int64) * PAGE
    length = tl.minimum(given, room)
    begin = length * 0
    if WINDOW:
        begin = tl.maximum(length - WINDOW, 0)
    # Every part has the same whole number of tiles. Only the last part that has positions can end earlier; the parts
    # after it are empty.
    part = tl.cdiv(tl.cdiv(length - begin, KEYS), SPLITS) * KEYS
    first = begin + split * part
    last = tl.minimum(length, first + part)

    member = chunk * ROWS + tl.arange(0, ROWS)
    feature = tl.arange(0, BLOCK)
    head = kv_head * GROUP + member
    inside = (member < GROUP)[:, None] & (feature < WIDTH)[None, :]
    place = b * query_batch + head.to(tl.int64)[:, None] * query_head + feature[None, :]
    q = tl.load(query + place, mask=inside, other=0.0)  # (ROWS, BLOCK)
    largest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, BLOCK), tl.float32)
    key_start = keys + kv_head.to(tl.int64) * key_head + feature[None, :]
    value_start = values + kv_head.to(tl.int64) * value_head + feature[None, :]
    for start in range(first, last, KEYS):
        position = start + tl.arange(0, KEYS)
        real = position < last
        page = tl.load(pages + b * pages_batch + position // PAGE, mask=real, other=0).to(tl.int64)
        known = real & (page >= 0) & (page < page_count)
        there = known[:, None] & (feature < WIDTH)[None, :]
        slot = position % PAGE
        k = tl.load(key_start + (page * key_page + slot * key_position)[:, None], mask=there, other=0.0)
        v = tl.load(value_start + (page * value_page + slot * value_position)[:, None], mask=there, other=0.0)
        if GROUP == 1:
            scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)[None, :]
        else:
            scores = product(q, tl.trans(k), "ieee", WIDEN)
        scores = tl.where(known[None, :], scores * scale, tl.where(real, float("nan"), float("-inf"))[None, :])
        larger = tl.maximum(largest, tl.max(scores, axis=1))
        shift = tl.where(larger == float("-inf"), 0.0, larger)
        weights = tl.exp(scores - shift[:, None])  # (ROWS, KEYS)
        shrunk = tl.exp(largest - shift)
        total = total * shrunk + tl.sum(weights, axis=1)
        sums = sums * shrunk[:, None]
        if GROUP == 1:
            sums += tl.sum(tl.trans(weights) * v.to(tl.float32), axis=0)[None, :]
        else:
            sums += product(weights.to(v.dtype), v, "ieee", WIDEN)
        largest = larger

    wrong = (given < 0) | (given > room)
    total = tl.where(wrong, float("nan"), total)
    result = sums / tl.where(total == 0, 1.0, total)[:, None]
    row = b * kv_heads * GROUP + head
    if SPLITS == 1:
        tl.store(out + row[:, None] * WIDTH + feature[None, :], result.to(out.dtype.element_ty), mask=inside)
    else:
        piece = row * SPLITS + split
        tl.store(partial + piece[:, None] * WIDTH + feature[None, :], result, mask=inside)
        shift = tl.where(largest == float("-inf"), 0.0, largest)
        tl.store(partial_lse + piece, shift + tl.log(total), mask=member < GROUP)


@triton.jit
def merge_splits(
    partial, partial_lse, out,  # (rows, SPLITS, WIDTH) and (rows, SPLITS) in float32; out: (rows, WIDTH)
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Merge the results of all parts for one row: each result is weighted by the exponential of its log-sum-exp."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    feature = tl.arange(0, BLOCK)
    lse = tl.load(partial_lse + row * SPLITS + part, mask=part < SPLITS, other=float("-inf"))
    largest = tl.max(lse, axis=0)
    weights = tl.exp(lse - tl.where(largest == float("-inf"), 0.0, largest))
    total = tl.sum(weights, axis=0)
    weights = weights / tl.where(total == 0, 1.0, total)
    inside = (part < SPLITS)[:, None] & (feature < WIDTH)[None, :]
    place = (row * SPLITS + part)[:, None] * WIDTH + feature[None, :]
    values = tl.load(partial + place, mask=inside, other=0.0)
    result = tl.sum(weights[:, None] * values, axis=0)
    tl.store(out + row * WIDTH + feature, result.to(out.dtype.element_ty), mask=feature < WIDTH)
