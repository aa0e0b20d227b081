"""The generator against its published answers, and the distributions of its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from rooftop.kernels import Box, counter_dropout, random_key, random_normal, random_uniform
from rooftop.kernels.randoms.words import (
    QUANTILES,
    WORD,
    normal_quantiles_reference,
    philox_reference,
    words_reference,
)

special, stats = (pytest.importorskip(f"scipy.{name}") for name in ("special", "stats"))

# Counter, key and answer of Philox 4x32-10, from the tests of Random123 (kat_vectors).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
MANY = 1 << 20
KEY = random_key(2024, "a name")


def hexadecimal(words: str) -> list[int]:
    return [int(word, 16) for word in words.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_published_answers(counter: str, key: str, answer: str) -> None:
    low, high = hexadecimal(key)
    words = philox_reference([torch.tensor([word]) for word in hexadecimal(counter)], low | high << 32)
    assert [int(word) for word in words] == hexadecimal(answer)


def test_four_elements_share_a_block_in_order() -> None:
    block = philox_reference([torch.tensor([word]) for word in (3, 1, 7, 2)], KEY)
    places = 4 * (3 + (1 << 32)) + torch.arange(4)
    words = words_reference(places, KEY, 7 + (2 << 32))
    assert words.tolist() == [int(word) for word in block]
    assert torch.equal(words_reference(places, KEY, 7 + (2 << 32), grouped=True), words)


def test_keys_are_those_of_the_standard_hash() -> None:
    """The keys must never change, because models are made with them."""
    assert random_key(0, "") == 4331143152044847043
    assert random_key(1, "blocks.0.attention.weight") == -7998578973078255543
    assert len({random_key(seed, name) for seed in range(50) for name in ("a", "b", "ab", "")}) == 200
    for wrong, error in (
        ((1.0, "a"), TypeError),
        ((1, 2), TypeError),
        ((-1, "a"), ValueError),
        ((1 << 64, ""), ValueError),
    ):
        with pytest.raises(error, match="random_key: "):
            random_key(*wrong)  # type: ignore[arg-type]


# ---- quantiles -------------------------------------------------------------------------------------------------


def some_words() -> Tensor:
    """All octaves of both tails, and the ends of each."""
    generator = torch.Generator().manual_seed(0)
    tails = [torch.randint(0, 1 << bits, (4000,), generator=generator) for bits in range(1, 32)]
    ends = torch.tensor([(1 << bits) + more for bits in range(31) for more in (-1, 0)])
    below = torch.cat((*tails, ends))
    return torch.cat((below, WORD - below))


def test_quantiles_are_those_of_the_normal_distribution() -> None:
    words = some_words()
    exact = special.ndtri((words.double().numpy() + 0.5) / 2**32)
    error = np.abs(normal_quantiles_reference(words).double().numpy() - exact)
    assert error.max() < 2e-7 + 2**-24 * 4  # errors of the polynomial, and of rounding a number below 8 to float32


def test_quantiles_are_symmetric() -> None:
    words = some_words()
    assert torch.equal(normal_quantiles_reference(words), -normal_quantiles_reference(WORD - words))


def test_quantiles_rise() -> None:
    words = some_words().unique()
    assert normal_quantiles_reference(words).diff().min() > -2e-7  # octaves meet, so two polynomials apply


@pytest.mark.parametrize("deviations", [0.1, 1.0, 2.0, 3.0, 4.0, 5.0, 5.5, 6.0])
def test_tails_have_the_words_that_they_should(deviations: float) -> None:
    """The fraction of all 2^32 words whose number is below a limit equals that of the distribution."""
    expected = special.ndtr(-deviations) * 2**32
    slack = 2 + math.ceil(5e-7 * stats.norm.pdf(deviations) * 2**32)  # the error of a quantile
    near = torch.arange(max(0, int(expected) - slack), int(expected) + slack)
    below = normal_quantiles_reference(near) < -deviations
    assert bool(below[0])
    assert not bool(below[-1])


def test_the_table_is_of_polynomials_through_chebyshev_nodes() -> None:
    nodes = np.cos(np.pi * (np.arange(8) + 0.5) / 8)
    for octave, row in enumerate(QUANTILES):
        quantiles = -special.ndtri((1.5 + nodes / 2) / 2 ** (octave + 2))
        exact = np.polynomial.chebyshev.cheb2poly(np.polynomial.chebyshev.chebfit(nodes, quantiles, 7))
        assert np.abs(exact * 2**28 - row).max() < 0.6


# ---- distributions ---------------------------------------------------------------------------------------------


def test_normal_numbers_are_normal() -> None:
    z = random_normal((MANY,), KEY, dtype=torch.float64)
    for power, moment, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):  # spread: the variance of z^power
        assert abs(z.pow(power).mean() - moment) < 4 * math.sqrt(spread / MANY)
    assert stats.kstest(z.numpy(), "norm").pvalue > 0.01
    assert 4 < z.abs().max() < 6.34


def test_truncated_numbers_are_those_of_the_truncated_distribution() -> None:
    low, high, mean, std = -0.3, 1.9, 0.5, 0.8
    z = random_normal((MANY,), KEY, mean=mean, std=std, low=low, high=high)
    assert low <= z.min() <= low + 1e-4
    assert high - 1e-4 <= z.max() <= torch.tensor(high)
    exact = stats.truncnorm((low - mean) / std, (high - mean) / std, mean, std)
    assert stats.kstest(z.double().numpy(), exact.cdf).pvalue > 0.01
    one_sided = random_normal((MANY,), KEY, low=1.0)
    assert stats.kstest(one_sided.double().numpy(), stats.truncnorm(1, np.inf).cdf).pvalue > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_numbers_are_uniform(dtype: torch.dtype) -> None:
    u = random_uniform((MANY,), KEY, dtype=dtype)
    assert 0 <= u.min() < 1e-5
    assert 1 - 1e-5 < u.max() < 1
    assert stats.kstest(u.double().numpy(), "uniform").pvalue > 0.01
    bits = 24 if dtype == torch.float32 else 53
    assert torch.equal((u.double() * 2.0**bits) % 1, torch.zeros(MANY, dtype=torch.float64))
    assert 0.49 < ((u.double() * 2.0**bits) % 2).mean() < 0.51, "the last bit is 1 in half of the cases"


def test_float64_goes_on_where_float32_ends() -> None:
    coarse, fine = (random_uniform((999,), KEY, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert torch.equal((fine * 2**24).floor(), coarse.double() * 2**24)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.93])
def test_dropout_drops_as_often_as_it_should(p: float) -> None:
    x = torch.ones(MANY)
    dropped = counter_dropout(x, p, KEY) == 0
    assert abs(dropped.double().mean() - p) < 4 * math.sqrt(p * (1 - p) / MANY)


OTHERS: dict[str, Callable[[], Tensor]] = {
    "name": lambda: random_normal((MANY,), random_key(2024, "another name")),
    "seed": lambda: random_normal((MANY,), random_key(2025, "a name")),
    "step": lambda: random_normal((MANY,), KEY, step=1),
    "far step": lambda: random_normal((MANY,), KEY, step=1 << 32),
    "places": lambda: random_normal(Box((1 << 33,), (1 << 32,), (MANY,)), KEY),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_name_seed_step_or_place_has_other_numbers(other: str) -> None:
    first, second = random_normal((MANY,), KEY), OTHERS[other]()
    assert abs((first * second).double().mean()) < 4 / math.sqrt(MANY)
    assert int((first == second).sum()) < 20


def test_neighbours_are_independent() -> None:
    z = random_normal((MANY,), KEY).double()
    for distance in (1, 2, 3, 4, 1024):
        assert abs((z[distance:] * z[:-distance]).mean()) < 4 / math.sqrt(MANY - distance)
    signs = (random_normal((MANY // 8, 8), KEY) > 0).long() @ (1 << torch.arange(8))
    assert stats.chisquare(np.bincount(signs.numpy(), minlength=256)).pvalue > 0.01


def test_words_of_places_beyond_32_bits() -> None:
    starts = [0, (1 << 31) - 2, 1 << 32, 1 << 34, (1 << 62) - 2]
    found = [random_uniform(Box((1 << 62,), (start,), (2,)), KEY) for start in starts]
    for start, numbers in zip(starts, found, strict=True):
        for number, place in zip(numbers.tolist(), (start, start + 1), strict=True):
            block = place // 4
            counter = [torch.tensor([word]) for word in (block & WORD, block >> 32, 0, 0)]
            assert number == (int(philox_reference(counter, KEY)[place % 4]) >> 8) / 2**24
    assert all(not torch.equal(a, b) for a, b in pairwise(found))
