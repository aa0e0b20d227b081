"""The device refuses the pages that NumPy refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftop.launch.warp_launch import launch_warp
from rooftop.scene import Geometry, layouts
from rooftop.scene.geometry import _wrong_in_page
from rooftop.scene.streaming import admission

VALUES = st.sampled_from([-(2**31), -2, -1, 0, 1, 7, 255, 2**16, 2**24, 2**30, 2**31 - 1])


def refused(words: np.ndarray, reach: int, fixed_bits: int, groups: int, device: str) -> bool:
    row = torch.tensor([[3, 0, len(words), reach, fixed_bits, groups]])
    page_at = torch.full((5,), -1, device=device)
    wrong, refusal = (torch.zeros(1, dtype=torch.int32, device=device) for _ in range(2))
    arriving, placed = row.to(device), torch.from_numpy(np.append(words, 0).astype(np.int32)).to(device)
    launch_warp(admission.check_pages, (admission.LANES,), placed, arriving, wrong)
    launch_warp(admission.admit_pages, (1,), arriving, wrong, page_at, refusal)
    assert page_at.tolist() == ([-1] * 5 if wrong.item() else [-1, -1, -1, 0, -1])
    assert refusal.item() == (4 if wrong.item() else 0)
    return bool(wrong.item())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_changed_word_of_a_head(paged_ball: Geometry, device: str, data: st.DataObject) -> None:
    page = data.draw(st.integers(0, paged_ball.pages - 1))
    words = paged_ball.page(page).copy()
    heads = layouts.PAGE_WORDS + layouts.GROUP_WORDS * int(words[1]) + layouts.CLUSTER_WORDS * int(words[0])
    for _ in range(data.draw(st.integers(0, 2))):
        at = data.draw(st.integers(0, heads - 1))
        words[at] = data.draw(VALUES | st.integers(0, 2**31 - 1) | st.just(int(words[at]) + 1))
    groups, reach = paged_ball.meta["groups"], int(paged_ball.page_reach[page])
    expected = _wrong_in_page(words, paged_ball.fixed_bits, groups) is not None or words[0] < reach
    assert refused(words, reach, paged_ball.fixed_bits, groups, device) == expected


@pytest.mark.parametrize("word", range(layouts.CLUSTER_WORDS))
def test_every_word_of_a_cluster(paged_ball: Geometry, device: str, word: int) -> None:
    page = paged_ball.page(paged_ball.pages - 1)
    at = layouts.PAGE_WORDS + layouts.GROUP_WORDS * int(page[1]) + layouts.CLUSTER_WORDS * (int(page[0]) - 1) + word
    found = []
    for value in (-(2**31), -1, 0, 3, 1 << 20, 2**31 - 1):
        words = page.copy()
        words[at] = value
        expected = _wrong_in_page(words, paged_ball.fixed_bits, paged_ball.meta["groups"]) is not None
        assert refused(words, 1, paged_ball.fixed_bits, paged_ball.meta["groups"], device) == expected
        found.append(expected)
    checked = {layouts.CLUSTER_COUNTS, layouts.CLUSTER_STREAMS, layouts.CLUSTER_GROUP, layouts.CLUSTER_SOURCE}
    assert any(found) or word not in checked
