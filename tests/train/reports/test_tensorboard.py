"""Event files of a training."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from rooftop.errors import MissingExtraError
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.tensorboard import STEP_TAGS, TensorBoard, summary_writer

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


def test_a_thread_that_cannot_write_prints_nothing_and_the_next_call_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tensorboard")
    writer = summary_writer()(str(tmp_path))
    inner = writer._get_file_writer().event_writer._async_writer

    def full(content: bytes) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(inner._writer, "write", full)
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)  # not pytest's own
    writer.add_scalar("a", 1.0, 1)
    inner._worker.join()
    with pytest.raises(OSError, match="No space left"):
        writer.add_scalar("a", 2.0, 2)
    assert capsys.readouterr().err == ""
