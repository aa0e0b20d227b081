"""The matmul ladder: every rung gives the product, even at the edges of its tiles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from rooftop.ladder import Ladder, build, climb
from rooftop.ladder.climbing import difference
from rooftop.ladder.rungs import CUDA


def test_the_rungs_in_cuda_multiply_on_the_cpu(
    cuda_on_cpu: Counter[str], ladder_on_cpu: Callable[[str, int], Ladder]
) -> None:
    outcomes = [rung for rung in climb(ladder_on_cpu("matmul", 40)).rungs if rung.tool == CUDA]
    assert [rung.status for rung in outcomes] == ["checked"] * 5 + ["absent"], outcomes
    assert cuda_on_cpu["tensor_cores"] == 2


def test_tensor_cores_over_several_tiles(
    cuda_on_cpu: Counter[str], ladder_on_cpu: Callable[[str, int], Ladder]
) -> None:
    ladder = ladder_on_cpu("matmul", 136)
    rung = next(r for r in ladder.rungs if r.kernels == ("tensor_cores<2>",))
    assert rung.run is not None
    assert difference(ladder, rung.run()) == ""


def test_one_wrong_element_shows() -> None:
    ladder = build("matmul", 64, "cpu")
    right = ladder.exact.half()
    assert difference(ladder, right) == ""
    right[5, 7] += 0.5
    assert "1 of 4,096 elements are wrong: element 327" in difference(ladder, right)


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 8 rows and columns, got 100"):
        build("matmul", 100, "cpu")
    with pytest.raises(ValueError, match="1 to 16,384"):
        build("matmul", 1 << 20, "cpu")
