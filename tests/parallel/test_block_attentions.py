"""Blocks of attention, alone or many in one launch, agree with attention by the definition, forward and backward."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.parallel import Context, ContextAttention, Documents, Packing, block_attentions
from rooftop.parallel.block_attentions import Blocks, Given
from rooftop.parallel.packings import Block
from rooftop.testing import assert_as_accurate


class Layer:
    """An attention with the interface that `ContextAttention` needs."""

    weights_dropout, training = None, True

    def __init__(self, window: int | None) -> None:
        self.window = window


def inputs(batch: int, heads: int, kv_heads: int, length: int, features: int, device: str) -> list[Tensor]:
    """Queries, keys, values and the gradient of the result, in memory as (B, S, H, D)."""
    made = torch.Generator().manual_seed(0)
    shapes = [(batch, length, count, features) for count in (heads, kv_heads, kv_heads, heads)]
    return [torch.randn(shape, generator=made).to(device, torch.bfloat16).transpose(1, 2) for shape in shapes]


def by_definition(given: list[Tensor], documents: Documents, window: int | None, dtype: torch.dtype) -> list[Tensor]:
    query, key, value, dout = (each.to(dtype) for each in given)
    leaves = [each.detach().requires_grad_() for each in (query, key, value)]
    groups = query.shape[1] // key.shape[1]
    keys, values = (each.repeat_interleave(groups, 1) for each in leaves[1:])
    places = torch.arange(query.shape[2], device=query.device)
    starts = documents.starts().to(query.device)[:, None, :, None]
    seen = (places <= places[:, None]) & (places >= starts)
    if window is not None:
        seen = seen & (places > places[:, None] - window)
    scores = (leaves[0] @ keys.mT * query.shape[3] ** -0.5).masked_fill(~seen, -math.inf)
    out = scores.softmax(-1) @ values
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def of_ranks(given: list[Tensor], packing: Packing, window: int | None) -> list[Tensor]:
    """Attention computed by blocks, one rank after the other, with all keys available. The ranks' parts are put
    together."""
    query, key, value, dout = given
    scale, wide = query.shape[3] ** -0.5, block_attentions.wide_dtype(query)
    ranks = range(len(packing.held))
    found = [torch.zeros_like(each) for each in (query, query, key, value)]
    totals = [torch.zeros_like(each, dtype=wide) for each in (key, value)]

    for rank in ranks:
        chunks = packing.held[rank]
        there, queries = chunks.positions(query.device), len(chunks)
        mine, gradient = (chunks.of(each, 2) for each in (query, dout))
        others = [other for other in ranks if window is not None or other != rank]
        runs = sorted(run for other in others for run in packing.rows(rank, other, window))
        at = torch.cat([torch.arange(*run) for run in runs]).to(query.device) if runs else there[:0]
        listed = packing.full_blocks(rank, runs) if window is None else packing.blocks(rank, ranks, window)
        own, rest = (
            Blocks(blocks, len(query), queries, len(rows), query.device)
            for blocks, rows in ((packing.own_blocks(rank), there), (listed, at))
        )
        keys, values = key[:, :, at], value[:, :, at]
        if window is None:
            out, lse = own.attended(mine, key[:, :, there], value[:, :, there], scale, query.dtype)
        else:
            out, lse = (each.new_empty(each.shape) for each in (mine, mine[..., 0].to(wide)))
        rest.attend(mine, keys, values, scale, out, lse)
        backward = Given(gradient, mine, out, lse, scale)
        dquery = torch.zeros_like(mine)
        if window is None:
            dquery, *parts = own.gradients(backward, key[:, :, there], value[:, :, there], query.dtype)
            for total, part in zip(totals, parts, strict=True):
                total[:, :, there] += part
        for total, part in zip(totals, rest.add_gradients(backward, keys, values, dquery, query.dtype), strict=True):
            total[:, :, at] += part
        found[0][:, :, there], found[1][:, :, there] = out, dquery
    found[2:] = [total.to(key.dtype) for total in totals]
    return found


CASES = {
    "one document": ([[]], 1, None),
    "short ones": ([[5, 6, 40, 100, 130, 131, 200, 290]], 1, None),
    "of two sequences": ([[100], [7, 50, 51, 52, 300]], 1, None),
    "two ranks": ([[30, 170], [120, 140, 200]], 2, None),
    "four ranks": ([[1, 2, 90, 319]], 4, None),
    "windows": ([[30, 170], [120, 140, 200]], 2, 33),
}
LENGTH = 320


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 4, 64), (8, 2, 128), (2, 1, 40)], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu_blocks_are_as_accurate_as_eager(name: str, heads: tuple[int, int, int]) -> None:
    ends, ranks, window = CASES[name]
    given = inputs(len(ends), *heads[:2], LENGTH, heads[2], "cuda")
    documents = Documents.of_ends(LENGTH, ends)
    packing = Packing.of(LENGTH, ranks, documents)
    eager, exact = (by_definition(given, documents, window, dtype) for dtype in (torch.bfloat16, torch.float64))
    for what, ours, plain, truth in zip(
        ("out", "dquery", "dkey", "dvalue"), of_ranks(given, packing, window), eager, exact, strict=True
    ):
        assert_as_accurate(ours, plain, truth, what=what)


@pytest.mark.gpu
def test_on_a_gpu_short_documents_run_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = inputs(1, 4, 2, LENGTH, 64, "cuda")
    # documents of different lengths, because equal lengths form one batch
    documents = Documents.of_ends(LENGTH, [list(range(7, LENGTH, 10))])
    attention: Any = Layer(None)

    def launched() -> int:
        made = ContextAttention(Context(), Packing.of(LENGTH, 1, documents))
        made.attended(attention, *given[:3])
        cuda = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=cuda, acc_events=True) as profile:
            made.attended(attention, *given[:3])
            torch.cuda.synchronize()
        return sum("flash" in event.key or "fmha" in event.key for event in profile.events())

    assert launched() <= 2
    monkeypatch.setattr(block_attentions, "TOGETHER", 0)
    assert launched() >= 32


@pytest.mark.parametrize("name", CASES)
def test_blocks_are_attention_by_the_definition(name: str) -> None:
    ends, ranks, window = CASES[name]
    given = [each.double() for each in inputs(len(ends), 4, 2, LENGTH, 6, "cpu")]
    documents = Documents.of_ends(LENGTH, ends)
    found = of_ranks(given, Packing.of(LENGTH, ranks, documents), window)
    for ours, truth in zip(found, by_definition(given, documents, window, torch.float64), strict=True):
        torch.testing.assert_close(ours, truth, rtol=0, atol=1e-11)


def test_merging_does_not_lose_with_the_number_of_blocks() -> None:
    """In bfloat16, a query that sees 64 blocks is as accurate as one that sees a single block."""
    given = inputs(1, 2, 2, 256, 8, "cpu")
    causal = Documents.of_ends(256, [[]])
    eager, exact = (by_definition(given, causal, None, dtype)[0] for dtype in (torch.bfloat16, torch.float64))
    tiles = [(at, at + 4) for at in range(0, 256, 4)]
    own = [Block(None, tile, tile, True) for tile in tiles]
    others = [Block(None, tile, other, False) for tile in tiles for other in tiles if other < tile]
    out = block_attentions.empty_like_rows(given[0], torch.float32)
    lse = out.new_empty(out.shape[:3])
    for blocks in (own, others):
        Blocks(blocks, 1, 256, 256, torch.device("cpu")).attend(*given[:3], 8**-0.5, out, lse)
    assert_as_accurate(out.to(torch.bfloat16), eager, exact)


def test_groups_have_no_query_twice() -> None:
    packing = Packing.of(64, 2, Documents.of_ends(64, [[10, 50], [33]]))
    for rank in range(2):
        blocks = packing.blocks(rank, [0, 1])
        groups = block_attentions._grouped(blocks)
        assert sorted((b for group in groups for b in group), key=repr) == sorted(blocks, key=repr)
        for group in groups:
            assert len({block.causal for block in group}) == 1
            taken = [(block.row, query) for block in group for query in range(*block.queries)]
            assert len(set(taken)) == len(taken)
