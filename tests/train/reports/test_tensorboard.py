"""Event files of a training."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rooftop.errors import MissingExtraError
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.tensorboard import STEP_TAGS, TensorBoard

RECIPE = Recipe.of({"run": {"epochs": 2, "batch": 20}})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_steps_evaluations_and_examples_are_in_the_event_file(tmp_path: Path, scripted: SimpleNamespace) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    scripted.fit(scripted.task(), RECIPE, [TensorBoard(tmp_path, RECIPE)])
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert set(found.Tags()["scalars"]) == {*STEP_TAGS, "valid/loss", "valid/accuracy"}
    losses = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert losses == [(step, pytest.approx(2 / step**0.5)) for step in range(1, 21)]
    assert [(event.step, event.value) for event in found.Scalars("valid/accuracy")] == [(10, 0.5), (20, 0.75)]
    assert len(found.Tags()["images"]) == 1


def test_without_it_a_message_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(MissingExtraError, match=r'pip install "rooftop\[train\]"'):
        TensorBoard(tmp_path, RECIPE)
    assert not list(tmp_path.iterdir())
