"""The reduction ladder: every rung gives the exact sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch

from rooftop.ladder import Ladder, build, climb
from rooftop.ladder.climbing import difference
from rooftop.ladder.rungs import CUDA


@pytest.mark.parametrize("size", [255, 5003])
def test_the_rungs_in_cuda_add_on_the_cpu(
    size: int, cuda_on_cpu: Counter[str], ladder_on_cpu: Callable[[str, int], Ladder]
) -> None:
    outcomes = [rung for rung in climb(ladder_on_cpu("reduction", size)).rungs if rung.tool == CUDA]
    assert len(outcomes) == 9
    assert {rung.status for rung in outcomes} == {"checked"}, outcomes
    assert cuda_on_cpu["one_pass"] == 1


def test_one_pass_can_be_launched_again(cuda_on_cpu: Counter[str], ladder_on_cpu: Callable[[str, int], Ladder]) -> None:
    """The kernel has set its counter back to zero."""
    ladder = ladder_on_cpu("reduction", 3001)
    rung = next(r for r in ladder.rungs if r.tool == CUDA and r.name == "16-byte loads, one pass")
    assert rung.run is not None
    for _ in range(3):
        ladder.poisoned[0].fill_(torch.nan)
        assert difference(ladder, rung.run()) == ""


def test_an_element_that_is_left_out_shows() -> None:
    ladder = build("reduction", 1000, "cpu")
    assert "1 of 1 elements are wrong" in difference(ladder, (ladder.exact - 1).float())
    assert difference(ladder, ladder.exact.float()) == ""
    assert "is nan" in difference(ladder, torch.tensor([torch.nan]))
