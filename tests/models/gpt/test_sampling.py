"""Choosing the next token: the possible tokens and their probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.models.gpt.sampling import Sampling, choose, numbers_of

PROBABLE = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15], dtype=torch.float64)
EVEN = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000


def shares(sampling: Sampling, probable: torch.Tensor = PROBABLE) -> list[float]:
    """The frequency of each token for evenly spread random numbers."""
    chosen = choose(probable.log().expand(len(EVEN), -1), EVEN, sampling)
    return (chosen.bincount(minlength=len(probable)) / len(EVEN)).tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0, 1, 0, 0, 0]),
        (Sampling(1.0), PROBABLE.tolist()),
        (Sampling(0.5), (PROBABLE**2 / (PROBABLE**2).sum()).tolist()),
        (Sampling(1.0, top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(1.0, top_k=99), PROBABLE.tolist()),
        (Sampling(1.0, top_p=0.69), [0, 4 / 7, 0, 3 / 7, 0]),
        (Sampling(1.0, top_p=0.71), [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        (Sampling(1.0, top_p=0.01), [0, 1, 0, 0, 0]),
        # the three have 0.85 in all, and 0.4 / 0.85 is less than half
        (Sampling(1.0, top_k=3, top_p=0.5), [0, 4 / 7, 0, 3 / 7, 0]),
    ],
)
def test_tokens_are_chosen_as_often_as_they_should(sampling: Sampling, expected: list[float]) -> None:
    assert shares(sampling) == pytest.approx(expected, abs=2e-3)


def test_of_equal_tokens_the_first_count() -> None:
    assert shares(Sampling(1.0, top_k=2), torch.ones(5) / 5) == pytest.approx([0.5, 0.5, 0, 0, 0], abs=2e-3)
    assert shares(Sampling(), torch.ones(5) / 5) == [1, 0, 0, 0, 0]


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=12), st.sampled_from([0.0, 0.3, 1.0]),
    st.one_of(st.none(), st.integers(1, 14)), st.floats(0.01, 1), st.floats(0.1, 5),
)  # fmt: skip
def test_what_has_no_probability_is_never_chosen(
    logits: list[float], number: float, top_k: int | None, top_p: float, temperature: float
) -> None:
    given = torch.tensor([[*logits, -torch.inf], [-torch.inf, *logits]])
    last = 1 - 2.0**-53
    numbers = torch.tensor([number, number], dtype=torch.float64).clamp(max=last)
    first, second = choose(given, numbers, Sampling(temperature, top_k, top_p)).tolist()
    assert first != len(logits)
    assert second == first + 1


@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("temperature", [1e-320, 1e-30, 1e308])
def test_the_coldest_is_greedy_and_the_hottest_even(temperature: float, options: dict[str, Any]) -> None:
    sampling = Sampling(temperature, **options)
    count = 5 if not options else 2 if "top_k" in options else 3  # of five equally likely tokens, three reach a half
    expected = [1 / count] * count if temperature > 1 else [1.0]
    assert sorted(shares(sampling), reverse=True)[: len(expected)] == pytest.approx(expected, abs=2e-3)
    if temperature < 1:
        assert shares(sampling) == shares(Sampling())


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.5)])
def test_of_no_numbers_nothing_is_chosen(sampling: Sampling) -> None:
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor([[1.0, nan, 0.0], [nan] * 3, [-inf] * 3, [1.0, inf, inf], [-inf, 0.0, -inf]])
    for number in (0.0, 0.7):
        numbers = torch.full((5,), number, dtype=torch.float64)
        assert choose(logits, numbers, sampling).tolist() == [-1, -1, -1, -1, 1]


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": "1"}, TypeError), ({"temperature": None}, TypeError), ({"temperature": True}, TypeError),
        ({"temperature": torch.nan}, ValueError), ({"temperature": torch.inf}, ValueError),
        ({"top_p": "1"}, TypeError), ({"top_p": None}, TypeError), ({"top_p": torch.nan}, ValueError),
    ],
)  # fmt: skip
def test_numbers_of_another_kind(options: dict[str, Any], error: type[Exception]) -> None:
    (name,) = options
    with pytest.raises(error, match=f"{name} must be "):
        Sampling(**options)


def test_numbers_are_a_function_of_seed_sequence_and_position() -> None:
    whole = numbers_of(5, 3, 1000, "cpu")
    assert torch.equal(numbers_of(5, 3, 10, "cpu"), whole[:10])
    assert not (numbers_of(6, 3, 1000, "cpu") == whole).any()
    assert not (numbers_of(5, 4, 1000, "cpu") == whole).any()
    assert ((whole >= 0) & (whole < 1)).all()
    assert abs(whole.mean() - 0.5) < 0.05
    assert len(whole.unique()) == 1000
    numbers_of(5, 2**31 - 1, 3, "cpu")
    with pytest.raises(ValueError, match="a sequence number must be from 0 to 2147483647"):
        numbers_of(5, 2**31, 3, "cpu")
