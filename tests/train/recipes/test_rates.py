"""The learning rate over a run."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.errors import InputError
from rooftop.train.recipes.rates import rate_factor
from rooftop.train.recipes.recipe import Schedule


def factors(steps: int, **values: object) -> list[float]:
    schedule = Schedule(**values)  # type: ignore[arg-type]
    return [rate_factor(schedule, step, steps) for step in range(1, steps + 1)]


def test_a_constant_rate_after_its_warm_up() -> None:
    assert factors(5, name="constant", warmup=0.4) == [0.5, 1, 1, 1, 1]


def test_cosine_is_torchs() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    torchs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=8, eta_min=0.1)
    expected = []
    for _ in range(8):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        torchs.step()
    assert factors(8, name="cosine", warmup=0.0, least=0.1) == pytest.approx(expected)
    assert factors(10, name="cosine", warmup=0.2, least=0.1)[2:] == pytest.approx(expected)


def test_wsd_stays_and_falls_by_a_line() -> None:
    found = factors(10, name="wsd", warmup=0.2, decay=0.4, least=0.2)
    assert found == pytest.approx([0.5, 1, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])


@given(
    st.sampled_from(["constant", "cosine", "wsd"]),
    st.integers(1, 40),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.floats(0, 1),
)
@settings(max_examples=50, deadline=None)
def test_a_rate_rises_then_falls_and_is_never_wasted(
    name: str, steps: int, warmup: float, decay: float, least: float
) -> None:
    found = factors(steps, name=name, warmup=warmup, decay=decay, least=least)
    top = round(warmup * steps)
    assert all(a < b for a, b in pairwise(found[:top]))
    assert all(a >= b for a, b in pairwise(found[top:]))
    assert max(found) == 1
    assert min(found) > 0
    assert min(found[top:], default=1) >= least - 1e-12


def test_what_does_not_fit() -> None:
    with pytest.raises(InputError, match="at most 1"):
        rate_factor(Schedule(name="wsd", warmup=0.6, decay=0.5), 1, 10)
    with pytest.raises(ValueError, match="step 11"):
        rate_factor(Schedule(), 11, 10)
    assert math.isclose(rate_factor(Schedule(warmup=0.0), 1, 1), 1.0)
