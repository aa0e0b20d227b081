"""Pages are taken, written, read and freed, and no sequence affects the pages of another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.models.gpt.configs import GptConfig
from rooftop.models.gpt.paged_cache import PagedCache, cache_bytes

CONFIG = GptConfig(vocabulary=17, layers=2, width=8, heads=4, kv_heads=2, hidden=8, positions=64, norm="rms",
                   position="rope", activation="swiglu", biases=False)  # fmt: skip


def cache(pages: int = 6, page: int = 4) -> PagedCache:
    return PagedCache(CONFIG, pages, page=page, dtype=torch.float32, device="cpu")


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=30))
def test_no_page_belongs_to_two_and_none_is_lost(steps: list[tuple[bool, int]]) -> None:
    ours, held = cache(), list[list[int]]()
    for take, number in steps:
        if take and ours.pages_for(number) <= ours.free:
            held.append(ours.take(number))
            assert len(held[-1]) == -(-number // 4)
        elif not take and held:
            ours.give_back(held.pop(number % len(held)))
        taken = [page for pages in held for page in pages]
        assert len(set(taken)) == len(taken) == ours.pages - ours.free
        assert set(taken) <= set(range(1, 7)), "page 0 belongs to no sequence"


def test_a_full_cache_says_what_it_takes() -> None:
    ours = cache()
    ours.take(17)
    page_bytes = 2 * 2 * 2 * 4 * 2 * 4  # keys and values, layers, heads, positions, features, float32
    message = (
        rf"5 positions take 2 pages of 4 positions \({2 * page_bytes:,} bytes\), but 1 of 6 are free: free .* "
        rf"at least 7 pages \({8 * page_bytes:,} bytes\)"
    )
    with pytest.raises(ValueError, match=message):
        ours.take(5)
    assert ours.free == 1
    assert ours.page_bytes == page_bytes == cache_bytes(CONFIG, 4, torch.float32)
    assert ours.bytes == 7 * page_bytes == ours.keys.nbytes + ours.values.nbytes


@pytest.mark.parametrize("wrong", [[0], [6], [1, 1], [-1]])
def test_only_what_was_taken_is_given_back(wrong: list[int]) -> None:
    ours = cache()
    pages = ours.take(9)
    with pytest.raises(ValueError, match="expected different pages that are in use,"):
        ours.give_back(wrong)
    assert ours.free == 3
    ours.give_back(pages)
    assert ours.free == 6
    with pytest.raises(ValueError, match="at least one page"):
        cache(pages=0)


def test_positions_lie_where_the_table_says_and_padding_with_nobody() -> None:
    ours = cache()
    ours.keys.zero_()
    table = torch.tensor([[5, 2], [3, 0]])
    first = ours.first(table, torch.tensor([6, 1]), 6)
    assert first.pages.tolist() == [[5, 5, 5, 5, 2, 2], [3, 0, 0, 0, 0, 0]]
    assert first.slots.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    key = torch.arange(1.0, 2 * 2 * 6 * 2 + 1).view(2, 2, 6, 2)  # (B, H_k, S, D)
    ours.write(1, first.pages, first.slots, key, -key)
    assert torch.equal(ours.keys[1, 5], key[0, :, :4])
    assert torch.equal(ours.keys[1, 2, :, :2], key[0, :, 4:])
    assert torch.equal(ours.values[1, 3, :, 0], -key[1, :, 0])
    untouched = ours.keys.clone()
    untouched[1, [0, 2, 3, 5]] = 0
    assert not untouched.any()
    assert not ours.keys[1, 3, :, 1:].any()


def test_the_next_position_of_each_and_of_nobody() -> None:
    following = cache().next(torch.tensor([[5, 2], [3, 1], [4, 0]]), torch.tensor([6, -1, 3]))
    assert following.pages.tolist() == [[2], [0], [4]]
    assert following.slots.tolist() == [[2], [0], [3]]
    assert following.lengths.tolist() == [7, 0, 4]


@pytest.mark.parametrize(
    ("pages", "page", "error"),
    [(0, 4, ValueError), (4, 0, ValueError), (-1, 4, ValueError), (1.5, 4, TypeError), (4, "2", TypeError),
     (True, 4, TypeError), (4, None, TypeError)],
)  # fmt: skip
def test_pages_that_are_none(pages: Any, page: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="PagedCache: "):
        cache(pages, page)
