"""Mixed batches follow their formulas, and are the same for any number of ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.errors import InputError
from rooftop.train.recipes.mixing import mixer
from rooftop.train.recipes.recipe import Mix
from rooftop.train.tasks.classification import cross_entropy

CLASSES = 5


def generator_of(place: int) -> np.random.Generator:
    return np.random.default_rng((7, place))


def batch(count: int, height: int = 6, width: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    images = torch.rand(count, 3, height, width, generator=generator)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def altered(mix: Mix, given: Any, places: list[int]) -> tuple[Tensor, Tensor]:
    alter = mixer(mix, CLASSES)
    assert alter is not None
    return alter(given, torch.tensor(places), generator_of)


def test_nothing_is_mixed_where_both_are_off() -> None:
    assert mixer(Mix(label_smoothing=0.1), CLASSES) is None


def test_mixup_is_the_weighted_mean_of_a_pair() -> None:
    images, labels = batch(8)
    mixed, targets = altered(Mix(mixup=0.4), (images, labels), [*range(8)])
    whole = torch.nn.functional.one_hot(labels, CLASSES).float()
    for first in range(0, 8, 2):
        weight = generator_of(first).beta(0.4, 0.4)
        for one, two in ((first, first + 1), (first + 1, first)):
            torch.testing.assert_close(mixed[one], (weight * images[one] + (1 - weight) * images[two]))
            torch.testing.assert_close(targets[one], (weight * whole[one] + (1 - weight) * whole[two]))


def test_cutmix_takes_a_box_and_its_part_of_the_target() -> None:
    images, labels = torch.zeros(20, 1, 16, 16), torch.arange(20) % 2
    images[1::2] = 1
    mixed, targets = altered(Mix(cutmix=1.0), (images, labels), [*range(20)])
    parts = set()
    for first in range(0, 20, 2):
        assert set(mixed[first].unique().tolist()) <= {0.0, 1.0}
        part = mixed[first].mean().item()
        parts.add(round(part, 4))
        assert targets[first].tolist() == pytest.approx([1 - part, part, 0, 0, 0])
        assert targets[first + 1].tolist() == pytest.approx([part, 1 - part, 0, 0, 0])
        assert torch.equal(mixed[first], 1 - mixed[first + 1])
        rows, columns = mixed[first, 0].nonzero(as_tuple=True)
        if len(rows):  # every pixel of a box
            box = mixed[first, 0, rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
            assert box.all()
    assert len(parts) > 5


def test_with_both_a_pair_takes_one() -> None:
    images = torch.zeros(64, 1, 16, 16)
    images[1::2] = 1
    mixed, targets = altered(Mix(mixup=1.0, cutmix=1.0), (images, torch.arange(64) % 2), [*range(64)])
    cut = sum(set(mixed[first].unique().tolist()) <= {0.0, 1.0} for first in range(0, 64, 2))
    assert 8 <= cut <= 24  # of 32
    torch.testing.assert_close(targets[::2, 1], mixed[::2].mean((1, 2, 3)))


@given(st.integers(1, 6), st.lists(st.integers(0, 6), max_size=3), st.booleans(), st.booleans())
@settings(max_examples=25, deadline=None)
def test_ranks_do_not_matter(pairs: int, cuts: list[int], mixup: bool, last: bool) -> None:
    """A batch cut at even positions gives the same numbers, bit for bit."""
    count = 2 * pairs - last
    images, labels = batch(count)
    mix = Mix(mixup=0.8 if mixup else 0.0, cutmix=1.0)
    places = [*range(count)]
    whole = altered(mix, (images, labels), places)
    borders = sorted({0, count, *(min(2 * cut, count) for cut in cuts)})
    parts = [altered(mix, (images[a:b], labels[a:b]), places[a:b]) for a, b in itertools.pairwise(borders)]
    assert torch.equal(whole[0], torch.cat([part[0] for part in parts]))
    assert torch.equal(whole[1], torch.cat([part[1] for part in parts]))
    assert torch.allclose(whole[1].sum(1), torch.ones(count))
    if last:
        assert torch.equal(whole[0][-1], images[-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtype_and_memory_format_stay(dtype: torch.dtype) -> None:
    images, labels = batch(4)
    images = images.to(dtype, memory_format=torch.channels_last)
    mixed, targets = altered(Mix(mixup=1.0, cutmix=1.0), (images, labels), [*range(4)])
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert targets.dtype == torch.float32


def test_an_empty_part_of_a_batch() -> None:
    images, labels = batch(4)
    mixed, targets = altered(Mix(mixup=1.0, cutmix=1.0), (images[:0], labels[:0]), [])
    assert mixed.shape == (0, 3, 6, 9)
    assert targets.shape == (0, CLASSES)


def test_what_cannot_be_mixed() -> None:
    with pytest.raises(InputError, match="set both to 0"):
        mixer(Mix(mixup=0.2), 0)
    with pytest.raises(InputError, match="floating point"):
        altered(Mix(mixup=0.2), (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(2).long()), [0, 1])
    with pytest.raises(InputError, match=r"mix\.cutmix=0"):
        altered(Mix(cutmix=0.2), (torch.zeros(2, 3), torch.zeros(2).long()), [0, 1])


def smoothed(logits: Tensor, targets: Tensor, part: float) -> Tensor:
    """Szegedy et al. 2016, section 7."""
    whole = torch.nn.functional.one_hot(targets, CLASSES) if targets.dim() == 1 else targets
    mixed = (1 - part) * whole + part / CLASSES
    return -(mixed * logits.double().log_softmax(1)).sum(1).mean()


@pytest.mark.parametrize("part", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [lambda labels: labels, lambda labels: torch.rand(len(labels), CLASSES).softmax(1)])
def test_the_loss(part: float, dtype: torch.dtype, kind: Callable[[Tensor], Tensor]) -> None:
    logits, targets = torch.randn(7, CLASSES).to(dtype), kind(batch(7)[1])
    found = cross_entropy(torch.nn.Identity(), (logits, targets), part)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), smoothed(logits, targets, part), rtol=1e-5, atol=1e-6)
