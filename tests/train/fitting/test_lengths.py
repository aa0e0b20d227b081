"""The number of steps of a training, and the actions after each step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.errors import InputError
from rooftop.train.fitting.lengths import Lengths
from rooftop.train.recipes.recipe import Recipe


def lengths(samples: int, ranks: int = 1, save_every: int | None = None, every: float = 1.0, **run: Any) -> Lengths:
    return Lengths.of(Recipe.of({"run": run, "evaluation": {"every": every}}), samples, ranks, save_every)


def test_epochs_and_steps() -> None:
    assert lengths(100, batch=32, epochs=2.5).steps == 8  # an epoch has 3 steps; 4 samples wait for another order
    assert lengths(100, batch=32, steps=5).steps == 5
    assert lengths(100, batch=32, epochs=0.01).steps == 1
    found = lengths(100, batch=20, epochs=3)
    assert [step for step in range(1, 16) if found.evaluates(step)] == [5, 10, 15]
    assert [step for step in range(1, 16) if found.saves(step)] == [5, 10, 15]
    assert [step for step in range(1, 16) if lengths(100, batch=20, epochs=3, every=0.4).evaluates(step)] == [
        *range(2, 15, 2),
        15,
    ]
    assert [step for step in range(1, 16) if lengths(100, save_every=4, batch=20, epochs=3).saves(step)] == [
        4,
        8,
        12,
        15,
    ]


def test_a_run_has_at_least_one_update_of_the_averaged_weights() -> None:
    recipe = Recipe.of({"run": {"batch": 20, "epochs": 2}, "ema": {"decay": 0.9, "every": 32}})
    with pytest.raises(InputError, match=r"ema\.every is 32, but .* only 10 steps.*set ema\.every to at most 10"):
        Lengths.of(recipe, 100, 1)
    assert Lengths.of(recipe.with_values(["run.steps=32"]), 100, 1).steps == 32


@given(st.integers(1, 200), st.integers(1, 64), st.integers(1, 20))
def test_steps_go_through_the_epochs_in_order(samples: int, batch: int, epochs: int) -> None:
    found = lengths(samples, batch=batch, epochs=epochs)
    seen = [found.epoch_of(step) for step in range(1, found.steps + 1)]
    assert seen == [(epoch, number) for epoch in range(epochs) for number in range(found.per_epoch)]
    assert found.per_epoch * found.batch <= samples


def test_fewer_samples_than_a_batch_are_one_batch() -> None:
    found = lengths(5, ranks=2, batch=64, accumulate=4)
    assert (found.batch, found.parts, found.per_epoch) == (5, 1, 1)


def test_batches_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(InputError, match=r"run\.batch is 64: expected a multiple of 6, which is 2 ranks x .*=3"):
        lengths(100, ranks=2, batch=64, accumulate=3)
    with pytest.raises(InputError, match="have 3 samples: expected at least one for each of 4 ranks"):
        lengths(3, ranks=4, batch=64)


def test_copies_of_a_sample_must_fill_a_forward_pass() -> None:
    def repeated(repeats: int, **run: int) -> Lengths:
        return Lengths.of(Recipe.of({"run": run, "augment": {"repeats": repeats}}), 100, 1)

    assert repeated(4, batch=32, accumulate=2).per_epoch == 3  # same length as without repeats
    words = r"augment\.repeats is 3: expected a number that divides the 16 samples .* or e\.g\. run\.batch=30$"
    with pytest.raises(InputError, match=words):
        repeated(3, batch=32, accumulate=2)
    with pytest.raises(InputError, match=r"divides the 100 samples of .* ranks, or e\.g\. run\.batch=98$"):
        repeated(7, batch=128)
    assert repeated(7, batch=98).per_epoch == 1
    with pytest.raises(InputError, match=r"divides the 16 samples of a forward pass over all ranks$"):
        repeated(40, batch=32, accumulate=2)
