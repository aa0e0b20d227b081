"""The effect of a recipe on a built model, by itself and in the loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from rooftop.models.weights.files import read_weights
from rooftop.train.fitting.loop import fit
from rooftop.train.recipes import Recipe, mixer, prepare_model
from rooftop.train.stopping import Stop
from rooftop.train.tasks.task import Task


def network(classes: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.0), nn.Linear(6, classes))


def loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def task() -> Task:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(16, 4), torch.randint(3, (16,)))
    return Task(model=network(), train=data, loss=loss, metadata={"classes": ["a", "b", "c"]})


def recipe(path: Path, **more: Any) -> Recipe:
    source = network(5)
    torch.save(source.state_dict(), path)
    model = {"weights": str(path), "frozen": ["0", "1"], "dropout": 0.25}
    values = {
        "run": {"steps": 3, "batch": 8},
        "model": model,
        "ema": {"decay": 0.9, "every": 2},
        "loading": {"how": "here"},
    }
    return Recipe.of({**values, **more})


def test_everything_that_is_done_is_said(tmp_path: Path) -> None:
    given, path = task(), tmp_path / "start.pth"
    assert prepare_model(given, recipe(path)) == [
        f"{path} (the model's own): 7 of the model's 9 keys are loaded; new for 3 classes: 4.weight, 4.bias",
        "dropout 0.25 in 1 layers",
        "frozen: 0, 1",
    ]
    assert torch.equal(given.model[0].weight, torch.load(path)["0.weight"])
    assert given.model[3].p == 0.25
    assert not given.model[0].weight.requires_grad


def test_a_training_that_goes_on_needs_no_file(tmp_path: Path) -> None:
    given, before = task(), recipe(tmp_path / "start.pth")
    (tmp_path / "start.pth").unlink()
    assert prepare_model(given, before, begins=False) == ["dropout 0.25 in 1 layers", "frozen: 0, 1"]


class Notes:
    """An observer that keeps all events."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def began(self, facts: Any, task: Task) -> None: ...

    def stepped(self, records: Any) -> None: ...

    def evaluated(self, record: Any) -> None: ...

    def noted(self, note: str) -> None:
        self.told.append(note)

    def ended(self, fitted: Any, model: Any) -> None: ...


def test_the_loop_prepares_the_model_and_tells(tmp_path: Path) -> None:
    given, notes = task(), Notes()
    before = recipe(tmp_path / "start.pth")
    start = torch.load(tmp_path / "start.pth")
    fit(given, before, device="cpu", observers=[notes])
    assert [note.split(" ")[0] for note in notes.told] == [str(tmp_path / "start.pth"), "dropout", "frozen:"]
    after = given.model.state_dict()
    assert all(torch.equal(after[name], start[name]) for name in start if name.startswith(("0.", "1.")))
    assert not torch.equal(after["4.weight"], task().model.state_dict()["4.weight"])


class StopsAfter(Notes):
    """Asks to stop after a step."""

    def __init__(self, last: int) -> None:
        super().__init__()
        self.last, self.stop = last, Stop()

    def stepped(self, records: Any) -> None:
        self.stop.requested |= any(record.step == self.last for record in records)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_stopped_training_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    """The training has everything that has a state, and continues after the original file is removed."""
    pytest.importorskip("safetensors")
    optimizer = {"name": name, "lr": 0.02, "layer_decay": 0.7, "clip": 0.5}
    model = {"weights": str(tmp_path / "start.pth"), "dropout": 0.25}
    before = recipe(tmp_path / "start.pth", optimizer=optimizer, mix={"mixup": 0.4}, model=model)
    before = before.updated({"run": {"steps": 6}})

    def mixed() -> Task:
        return replace(task(), alter=mixer(before.mix, 3))

    whole = mixed()
    fit(whole, before, device="cpu", out=tmp_path / "whole")
    stops = StopsAfter(3)
    fit(mixed(), before, device="cpu", out=tmp_path / "run", observers=[stops], stop=stops.stop)
    (tmp_path / "start.pth").unlink()
    again = mixed()
    fitted = fit(again, before, device="cpu", out=tmp_path / "run", resume=True)
    assert fitted.steps == 6
    assert all(torch.equal(each, again.model.state_dict()[key]) for key, each in whole.model.state_dict().items())
    means = [read_weights(tmp_path / out / "last.safetensors") for out in ("whole", "run")]
    assert means[0].keys() == means[1].keys()
    assert all(torch.equal(each, means[1][key]) for key, each in means[0].items())
    assert not torch.equal(means[0]["0.weight"], whole.model.state_dict()["0.weight"])
