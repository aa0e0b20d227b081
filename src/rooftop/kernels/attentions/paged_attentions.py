"""Paged attention: one new position of each sequence attends to keys and values that are stored in pages.

softmax(q K^T scale) V over the positions that a page table lists for each sequence: Kwon et al. 2023, "Efficient Memory
Management for Large Language Model Serving with PagedAttention". The kernel is bound by memory: it reads each page once
for all query heads that share a key head (Ainslie et al. 2023, "GQA"). The heads of one sequence are too few to fill a
GPU. So several programs divide the positions of a sequence, and a second kernel merges their results by log-sum-exps in
float32 (Dao et al. 2023, "Flash-Decoding for long-context inference").

The operator is for inference and has no gradient. The lengths are in a tensor, and the launch does not depend on their
values. So a CUDA graph can be replayed while sequences grow.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.attentions.tables import MOST_SPLITS, PROGRAMS_PER_PROCESSOR, paged_config
from rooftop.kernels.operands.checks import check_finite, check_same_dtype, check_tensors, is_integer
from rooftop.kernels.operands.dtypes import FLOATS, INDICES, accumulator_dtype
from rooftop.kernels.operands.launch_data import Constants, power_of_two
from rooftop.kernels.operands.references import without_kernels
from rooftop.launch.known_calls import depends
from rooftop.launch.operators import declare, no_tangents
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import INTERPRETED, launch, processors, require_triton

# ---- reference -------------------------------------------------------------------------------------------------


def paged_attention_reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None = None,
) -> Tensor:
    """Compute `paged_attention` (B, H, D) in plain PyTorch, with the softmax in float32 (float64 for float64)."""
    inside = accumulator_dtype(query.dtype)
    key, value = (_gathered(stored, pages).to(inside) for stored in (keys, values))  # (B, H_k, T, D)
    room = key.shape[2]
    there = ((pages >= 0) & (pages < keys.shape[0])).repeat_interleave(keys.shape[2], 1)[:, None, None]  # (B, 1, 1, T)
    position = torch.arange(room, device=query.device)
    seen = position < lengths[:, None]
    if window is not None:
        seen &= position >= lengths[:, None] - window
    seen = seen[:, None, None]
    grouped = query.to(inside).unflatten(1, (key.shape[1], -1))  # (B, H_k, G, D)
    scores = torch.where(there, grouped @ key.mT * scale, torch.nan).masked_fill(~seen, -torch.inf)  # (B, H_k, G, T)
    weights = torch.where(seen, scores.softmax(-1), 0.0)  # zeros for sequences without positions
    found = (weights @ torch.where(seen.mT, value, 0.0)).flatten(1, 2)
    wrong = (lengths < 0) | (lengths > room)
    return found.masked_fill(wrong[:, None, None], torch.nan).to(query.dtype)


def _gathered(stored: Tensor, pages: Tensor) -> Tensor:
    """Gather the keys or values (B, H_k, W * P, D) at all positions of `pages` (B, W), in order. At the positions of a
    page whose index is outside the cache, the result is arbitrary.
    """
    found = stored[pages.long().clamp(0, stored.shape[0] - 1)]  # (B, W, H_k, P, D)
    return found.transpose(1, 2).flatten(2, 3)


# ---- on the CPU ------------------------------------------------------------------------------------------------


def _attend_one_by_one(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Sequence[Sequence[int]],
    lengths: Sequence[int],
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Compute the same as `paged_attention_reference`, one sequence at a time. Page tables and lengths are Python
    numbers that the caller has checked.
    """
    _, kv_heads, page, width = keys.shape
    for row, length in enumerate(lengths):
        if length == 0:
            out[row] = 0
            continue
        places = _attended(length, window, page)
        begin = 0 if window is None else max(0, length - window)
        own, seen = tables[row][places], slice(begin - places.start * page, length - places.start * page)
        key, value = _side_by_side(keys, own)[None, :, seen], _side_by_side(values, own)[None, :, seen]
        grouped = query[row].reshape(1, kv_heads, -1, width)  # queries of one position
        found = torch.nn.functional.scaled_dot_product_attention(grouped, key, value, scale=scale)
        out[row] = found.reshape(-1, width)


def _attended(length: int, window: int | None, page: int) -> slice:
    """The pages that a sequence's query reads, as a slice of the sequence's page table. `length`: number of positions
    of the sequence; `page`: number of positions in a page.
    """
    begin = 0 if window is None else max(0, length - window)
    return slice(begin // page, -(-length // page))


def _side_by_side(stored: Tensor, own: Sequence[int]) -> Tensor:
    """The keys or values (H_k, T, D) at all positions in the pages `own` of a cache (N, H_k, P, D). If the page indices
    in `own` are consecutive, as in a new cache, the function slices the cache instead of copying pages by index.
    """
    if len(own) == 1:
        return stored[own[0]]
    in_a_row = own == list(range(own[0], own[0] + len(own)))
    found = stored[own[0] : own[0] + len(own)] if in_a_row else stored.index_select(0, torch.tensor(own, device="cpu"))
    return found.transpose(0, 1).flatten(1, 2)


# ---- limits -----------------------------------------------------------------------------------------------------


MOST_FEATURES = 256


def splits_of(programs: int, room: int, tile: int, multiprocessors: int) -> int:
    """Number of parts into which `paged_attention` splits the positions of a sequence.

    Args:
        programs: number of programs if the positions were not split.
        room: the maximum number of positions to which a query can attend.
        tile: positions that a program reads in one step.
        multiprocessors: the GPU's number of multiprocessors.
    """
    wanted = -(-PROGRAMS_PER_PROCESSOR * multiprocessors // max(1, programs))
    return max(1, min(wanted, -(-room // tile), MOST_SPLITS))


# ---- implementations -------------------------------------------------------------------------------------------


def _attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
) -> None:
    """Write the result (B, H, D) to `out`: by the kernels, by PyTorch's attention on a CPU, or by the reference for
    float64.
    """
    numbers = _checked_values(keys, pages, lengths, window) if without_kernels(query.device) else None
    if out.numel() == 0:
        return
    batch, heads, width = query.shape
    count, kv_heads, page = keys.shape[:3]
    if 0 in (count, page, pages.shape[1]):  # no sequence can have a position
        out.copy_(torch.where(lengths == 0, 0.0, torch.nan)[:, None, None].expand_as(out))
        return
    if numbers is not None and query.dtype != torch.float64:
        _attend_one_by_one(query, keys, values, *numbers, scale, window, out)
        return
    if query.dtype == torch.float64:
        out.copy_(paged_attention_reference(query, keys, values, pages, lengths, scale, window))
        return
    require_triton()
    from rooftop.kernels.attentions.triton_kernels.paged_attentions import attend_pages, merge_splits

    query, keys, values, pages = (t if t.stride(-1) == 1 else t.contiguous() for t in (query, keys, values, pages))
    group = heads // kv_heads
    config = paged_config(group, width, query.element_size())
    programs = batch * kv_heads * -(-group // config.rows)
    room = pages.shape[1] * page
    splits = splits_of(programs, min(room, window or room), config.keys, processors(query))
    constants: Constants = {"WIDTH": width, "BLOCK": max(16, power_of_two(width)), "SPLITS": splits}
    tile: Constants = {"WINDOW": window or 0, "PAGE": page, "GROUP": group, "ROWS": config.rows}
    tile |= {"WIDEN": INTERPRETED and query.dtype == torch.bfloat16}
    tile |= {"KEYS": config.keys, "num_warps": config.warps, "num_stages": config.stages}
    partial, partial_lse = out, out
    if splits > 1:
        partial = out.new_empty((batch, heads, splits, width), dtype=torch.float32)
        partial_lse = out.new_empty((batch, heads, splits), dtype=torch.float32)
    sizes = (kv_heads, pages.shape[1], count, scale)
    strides = (*query.stride()[:2], *keys.stride()[:3], *values.stride()[:3], pages.stride(0))
    memory = (query, keys, values, pages, lengths.contiguous(), out, partial, partial_lse)
    launch(attend_pages, (programs * splits,), out.device, *memory, *sizes, *strides, **tile, **constants)
    if splits > 1:
        parts = power_of_two(splits)
        launch(merge_splits, (batch * heads,), out.device, partial, partial_lse, out, PARTS=parts, **constants)


# ---- operator --------------------------------------------------------------------------------------------------


class PagedAttention(NamedTuple):
    """The operator of `paged_attention`. `positions`: the total number of positions to which the queries of all
    sequences attend; None if unknown. Only the cost depends on this number.
    """

    query: Tensor
    keys: Tensor
    values: Tensor
    pages: Tensor
    lengths: Tensor
    scale: float
    positions: int | None
    window: int | None = None

    def run(self) -> Tensor:
        out = self.fake()
        _attend(*self[:6], self.window, out)
        return out

    def fake(self) -> Tensor:
        return self.query.new_empty(self.query.shape)

    def cost(self, made: Tensor) -> Cost:
        """Flops: two matrix products, and 5 operations of softmax for each pair of a query and a position to which that
        query attends.
        """
        query, keys, _, pages, lengths, _, positions, _ = self
        (batch, heads, width), kv_heads = query.shape, keys.shape[1]
        seen = batch if positions is None else positions
        read = distinct_bytes([query, lengths]) + 2 * seen * kv_heads * width * keys.element_size()
        read += -(-seen // max(1, keys.shape[2])) * pages.element_size()
        pairs = seen * heads
        return Cost(read, distinct_bytes([made]), {precision_of(query.dtype): pairs * (4 * width + 5)})


_paged_attention = declare("paged_attention", PagedAttention, known=True)


# ---- public ----------------------------------------------------------------------------------------------------


@repeated
@recorded_whole
def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    pages: Tensor,
    lengths: Tensor,
    *,
    scale: float | None = None,
    positions: int | None = None,
    window: int | None = None,
) -> Tensor:
    """Compute softmax(q K^T scale) V for one query position of each sequence, for inference.

    Args:
        query: (B, H, D), bfloat16, float16, float32 or float64; D up to 256.
        keys, values: (N, H_k, P, D) each, N pages of P positions, with the dtype of the queries. H is a multiple of
            H_k; the query heads h * H / H_k to (h + 1) * H / H_k - 1 share key head h. Positions that no query attends
            to may contain any values.
        pages: (B, W) int32 or int64, the pages of each sequence in order.
        lengths: (B,) int32 or int64, the number of positions that each query attends to, from 0 to W * P. If a length
            is 0, the result of that query is 0.
        scale: factor of the scores; None: 1 / sqrt(D).
        positions: the sum of `lengths`, or with a window the sum of min(length, window), if known. Only the cost
            depends on `positions`. With None, the cost counts one position per sequence.
        window: each query attends only to the last `window` positions of its sequence; None: to all positions. Pages
            without such positions are not read, so their entries in `pages` may have any values.

    Returns:
        (B, H, D), dtype of the queries; scores, softmax and merging are float32 (float64 for float64).

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is wrong.
        ValueError: shapes or devices do not match, or the scale is not finite. On the CPU, ValueError is also raised
            if a query attends to a page outside the cache, or if a length is negative or exceeds the page table. On a
            GPU, the result of such a sequence is NaN.
        NotImplementedError: a tensor requires a gradient, or forward-mode differentiation is active.
    """
    tensors = {"query": query, "keys": keys, "values": values, "pages": pages, "lengths": lengths}
    _check(tensors)
    if scale is not None:
        check_finite("paged_attention", "scale", scale, "a number or None")
    if positions is not None and not is_integer(positions):
        raise TypeError(f"paged_attention: positions must be an int or None, got {positions!r}")
    if isinstance(positions, int) and positions < 0:
        raise ValueError(f"paged_attention: positions, a total over all sequences, must be 0 or more, got {positions}")
    if window is not None and not is_integer(window):
        raise TypeError(f"paged_attention: window must be an int or None, got {window!r}")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: window must be at least 1 position, got {window}")
    no_tangents("paged_attention", query, keys, values, instead="attention")
    if torch.is_grad_enabled() and any(t.requires_grad for t in (query, keys, values)):
        raise NotImplementedError(
            "paged_attention has no gradient: query, keys and values must not require one; use attention for "
            "training, or call paged_attention under torch.no_grad()"
        )
    factor = 1 / math.sqrt(max(1, query.shape[2])) if scale is None else float(scale)
    out: Tensor = _paged_attention(query, keys, values, pages, lengths, factor, positions, window)
    return out


def _check(tensors: dict[str, Tensor]) -> None:
    name = "paged_attention"
    query = tensors["query"]
    keys, pages = tensors["keys"], tensors["pages"]
    check_tensors(name, FLOATS, query=query, keys=keys, values=tensors["values"])
    check_tensors(name, INDICES, (), ("query", query), pages=pages, lengths=tensors["lengths"])
    check_same_dtype(name, "query", query, "convert one of them", keys=keys, values=tensors["values"])
    if query.dim() != 3 or query.shape[2] > MOST_FEATURES:
        raise ValueError(f"{name}: expected query (B, H, D), D up to {MOST_FEATURES}, got {tuple(query.shape)}")
    if keys.dim() != 4 or keys.shape != tensors["values"].shape or keys.shape[3] != query.shape[2]:
        raise ValueError(
            f"{name}: expected keys and values of one shape (N, H_k, P, {query.shape[2]}), "
            f"got {tuple(keys.shape)} and {tuple(tensors['values'].shape)}"
        )
    heads, kv_heads = query.shape[1], keys.shape[1]
    if (heads % kv_heads if kv_heads else heads) != 0:
        raise ValueError(f"{name}: the {kv_heads} heads of keys must divide the {heads} heads of query")
    if pages.dim() != 2 or pages.shape[0] != query.shape[0] or tensors["lengths"].shape != query.shape[:1]:
        raise ValueError(
            f"{name}: expected pages ({query.shape[0]}, W) and lengths ({query.shape[0]},) for the "
            f"{query.shape[0]} sequences of query, got {tuple(pages.shape)} and {tuple(tensors['lengths'].shape)}"
        )


def _checked_values(
    keys: Tensor, pages: Tensor, lengths: Tensor, window: int | None
) -> tuple[list[list[int]], list[int]]:
    """Check the lengths, and the indices of the pages to which queries attend. Return pages and lengths as Python
    numbers.
    """
    count, page, room = keys.shape[0], keys.shape[2], pages.shape[1] * keys.shape[2]
    depends("pages and lengths are checked at each call")
    numbers: list[int] = lengths.tolist()
    if numbers and (min(numbers) < 0 or max(numbers) > room):
        raise ValueError(
            f"paged_attention: lengths must be from 0 to {room}, the capacity of {pages.shape[1]} pages of {page} "
            f"positions, got {min(numbers)} to {max(numbers)}"
        )
    tables: list[list[int]] = pages.tolist()
    for table, length in zip(tables, numbers, strict=True):
        wrong = [each for each in table[_attended(length, window, max(1, page))] if not 0 <= each < count]
        if wrong:
            raise ValueError(f"paged_attention: pages must be from 0 to {count - 1}, got {wrong[0]}")
    return tables, numbers
