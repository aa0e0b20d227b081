"""The device refuses the pages that NumPy refuses."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftop.launch.warp_launch import launch_warp
from rooftop.scene import Geometry, layouts
from rooftop.scene.pages import heads_of, page_head_words, wrong_in_page
from rooftop.scene.streaming import admission
from rooftop.scene.streaming.page_table import PageTable

VALUES = st.sampled_from([-(2**31), -2, -1, 0, 1, 7, 255, 2**16, 2**24, 2**30, 2**31 - 1])


@pytest.fixture(scope="module", params=["today", "version 3"])
def knot(
    request: pytest.FixtureRequest,
    paged_knot: Geometry,
    in_old_layout: Callable[..., Geometry],
    tmp_path_factory: pytest.TempPathFactory,
) -> Geometry:
    """A mesh of many pages, in the current layout and in the previous one."""
    if request.param == "today":
        return paged_knot
    return in_old_layout(paged_knot, tmp_path_factory.mktemp("old") / "knot.rtg")


def refused(words: np.ndarray, reach: int, attributes: int, groups: int, device: str) -> bool:
    row = torch.tensor([[3, 0, len(words), reach, attributes, groups]])
    page_at = torch.full((5,), -1, device=device)
    votes, refusal = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    arriving, placed = row.to(device), torch.from_numpy(np.append(words, 0).astype(np.int32)).to(device)
    launch_warp(admission.admit_pages, (admission.LANES,), placed, arriving, votes, page_at, refusal)
    is_wrong = refusal.item() != 0
    assert page_at.tolist() == ([-1] * 5 if is_wrong else [-1, -1, -1, 0, -1])
    assert refusal.item() == (4 if is_wrong else 0)
    assert votes.item() == 0
    return is_wrong


@pytest.mark.parametrize("count", [1, 16, 17, 300, 1100, 2048])
def test_any_number_of_pages_in_any_order(knot: Geometry, count: int, device: str) -> None:
    """Rows of one launch are of pages that come, that go, and that are named twice; others stay as they were."""
    random = np.random.default_rng(count)
    words, limits = torch.from_numpy(knot.page(0).copy()), np.array([0, 1, knot.attributes, knot.meta["groups"]])
    limits[0] = len(words)
    table = PageTable(2 * count, torch.cat([words, words.new_zeros(2)]).to(device))
    comes = random.random(2 * count) < 0.5
    for _ in range(3):
        pages = random.integers(0, 2 * count, count)
        before, comes = table.page_at.tolist(), ~comes

        def write(some: np.ndarray, rows: np.ndarray, comes: np.ndarray = comes) -> None:
            rows[: len(some)] = np.column_stack(
                [some, np.where(comes[some], 0, -1), np.broadcast_to(limits, (len(some), 4))]
            )
            rows[len(some) :, 0] = -1

        table.tell(pages, write)
        expected = [
            (0 if comes[page] else -1) if page in set(pages.tolist()) else before[page] for page in range(2 * count)
        ]
        assert table.page_at.tolist() == expected
        assert not table.refused.any()


def first_head(page: np.ndarray, attributes: int) -> tuple[int, int]:
    """The start of the heads of a page, and the number of words of each."""
    groups = int(page[layouts.PAGE_GROUPS]) & (1 << layouts.PAGE_GROUP_BITS) - 1
    return layouts.PAGE_WORDS + layouts.GROUP_WORDS * groups, page_head_words(page, attributes)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_word_of_a_head(knot: Geometry, device: str, data: st.DataObject) -> None:
    page = data.draw(st.integers(0, knot.pages - 1))
    words = knot.page(page).copy()
    begin, size = first_head(words, knot.attributes)
    end = begin + size * int(words[layouts.PAGE_CLUSTERS])
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, end - 1))
        words[at] = data.draw(VALUES | st.integers(0, 2**31 - 1) | st.just(min(int(words[at]) + 1, 2**31 - 1)))
    groups, reach = knot.meta["groups"], int(knot.page_reach[page])
    expected = wrong_in_page(words, knot.attributes, groups) is not None or words[0] < reach
    assert refused(words, reach, knot.attributes, groups, device) == expected


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_bit_of_a_mask(knot: Geometry, device: str, data: st.DataObject) -> None:
    """Masks whose number of vertices or references differs from the head would lead out of the streams."""
    page = data.draw(st.integers(0, knot.pages - 1))
    words = knot.page(page).copy()
    heads = heads_of(words, knot.attributes)
    head = heads[data.draw(st.integers(0, len(heads) - 1))]
    masks = 12 if head[layouts.CLUSTER_MASKS] == layouts.FANS_AND_EXPLICIT else 8
    changes = data.draw(st.lists(st.tuples(st.integers(0, masks - 1), st.integers(0, 31)), min_size=1, max_size=2))
    bits = words.view(np.uint32)
    for word, bit in changes:
        bits[head[layouts.CLUSTER_STREAMS] + word] ^= np.uint32(1 << bit)
    wrong = wrong_in_page(words, knot.attributes, knot.meta["groups"])
    assert refused(words, 1, knot.attributes, knot.meta["groups"], device) == (wrong is not None)
    if len(changes) == 1:
        assert wrong is not None
        assert "masks" in wrong


def test_every_word_of_a_cluster(knot: Geometry, device: str) -> None:
    page = knot.page(knot.pages - 1)
    begin, size = first_head(page, knot.attributes)
    found = set()
    for word in range(size):
        for value in (-(2**31), -1, 0, 3, 1 << 20, 2**31 - 1):
            words = page.copy()
            words[begin + size * (int(page[layouts.PAGE_CLUSTERS]) - 1) + word] = value
            wrong = wrong_in_page(words, knot.attributes, knot.meta["groups"]) is not None
            assert refused(words, 1, knot.attributes, knot.meta["groups"], device) == wrong
            if wrong:
                found.add(word)
    checked = {layouts.CLUSTER_COUNTS, layouts.CLUSTER_STREAMS, layouts.CLUSTER_GROUP, layouts.CLUSTER_SOURCE}
    if knot.version > 3:
        checked = {layouts.HEAD_COUNTS, layouts.HEAD_BOX, layouts.HEAD_STREAMS}
    assert found >= checked
