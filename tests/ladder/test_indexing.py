"""The indexing ladder: every grid covers the matrix, and predictions agree with counts by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from rooftop.ladder import Ladder, climb
from rooftop.ladder.indexing import COLUMN, LAYOUTS, ROW, SWAPPED, TALL, WIDE, sectors, warps_with_work
from rooftop.ladder.rungs import CUDA


def test_the_rungs_in_cuda_on_the_cpu(
    cuda_on_cpu: Counter[str], ladder_on_cpu: Callable[[str, int], Ladder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooftop.ladder.indexing.SLAB", 32)
    outcomes = [rung for rung in climb(ladder_on_cpu("indexing", 37)).rungs if rung.tool == CUDA]
    assert [rung.status for rung in outcomes] == ["checked"] * 7, outcomes
    assert cuda_on_cpu["grid_2d"] == 2
    assert all(rung.note.startswith("predicted for an H200: ") for rung in outcomes)


@pytest.mark.parametrize(("name", "count"), [(COLUMN, 4), (ROW, 32), (SWAPPED, 32), (TALL, 8), (WIDE, 4)])
def test_sectors_that_a_warp_touches(name: str, count: int) -> None:
    assert sectors(LAYOUTS[name], 8192) == count


def test_warps_that_have_work() -> None:
    """An H200 holds 132 x 64 warps. A thread for each of 8,192 columns makes 256 warps; a full grid of threads fills
    them all."""
    pytest.importorskip("cuda.core")
    few = warps_with_work(LAYOUTS[COLUMN], 8192, 8192, (9, 0), 132)
    assert few == pytest.approx(256 / (132 * 64))
    assert warps_with_work(LAYOUTS[WIDE], 8192, 8192, (9, 0), 132) == 1.0
