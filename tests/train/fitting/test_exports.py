"""Exported weights are complete or absent, and describe themselves."""

from __future__ import annotations

import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from rooftop.errors import InputError
from rooftop.train.fitting import Fitted, fit
from rooftop.train.fitting.exports import export_weights, exported_metadata
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.task import Task

safetensors = pytest.importorskip("safetensors.torch")


def test_weights_and_what_they_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(3))
    model.append(model[0])  # the same weights under two names
    export_weights(tmp_path / "best.safetensors", model, {"model": "mine", "classes": ["cat", "dög"]})
    found = safetensors.load_file(tmp_path / "best.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert exported_metadata(tmp_path / "best.safetensors") == {"model": "mine", "classes": ["cat", "dög"]}


def test_equal_weights_have_equal_files(tmp_path: Path) -> None:
    model = nn.Linear(3, 5)
    contents = set()
    for number in range(8):
        export_weights(tmp_path / f"{number}.safetensors", model, {"model": "dög"})
        contents.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(contents) == 1
    assert torch.equal(safetensors.load_file(tmp_path / "0.safetensors")["weight"], model.weight)


class Keeps(nn.Module):
    """A linear layer with a further state."""

    def __init__(self, extra: object = None, **buffers: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(2, 2), extra
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class KeepsExtra(Keeps):
    def get_extra_state(self) -> object:
        return self.extra

    def set_extra_state(self, state: object) -> None: ...


def trained(model: nn.Module, out: Path, epochs: int = 1, **changes: Any) -> Fitted:
    points = [(torch.ones(2), torch.zeros(2)) for _ in range(8)]
    task = Task(model, points, lambda model, batch: (model(batch[0]) - batch[1]).square().mean(), **changes)
    how = {"run": {"batch": 4, "epochs": epochs}, "loading": {"how": "here"}}
    return fit(task, Recipe.of(how), device="cpu", out=out, save_every=1)


@pytest.mark.parametrize(
    ("model", "changes", "said"),
    [
        (KeepsExtra({"a": 1}), {}, "state _extra_state is a dict.*return a tensor from get_extra_state"),
        (Keeps(z=torch.zeros(2, dtype=torch.complex128)), {}, "state z is torch.complex128.*persistent=False"),
        (Keeps(z=torch.zeros(2).to_sparse()), {}, "state z is torch.sparse_coo.*dense"),
        (Keeps(), {"metadata": {"t": torch.tensor(1)}}, r"metadata\['t'\] is not JSON.*tensor\.tolist"),
        (Keeps(), {"metadata": {"t": {(1, 2): 3}}}, r"metadata\['t'\] is not JSON"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused_before_the_first_step(
    model: nn.Module, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=said):
        trained(model, tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_a_buffer_of_any_dtype_is_saved(dtype: torch.dtype, tmp_path: Path) -> None:
    trained(Keeps(z=torch.tensor([1, 2]).to(dtype)), tmp_path)
    assert torch.equal(safetensors.load_file(tmp_path / "last.safetensors")["z"], torch.tensor([1, 2]).to(dtype))


def test_a_full_disk_leaves_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    export_weights(path, nn.Linear(2, 2), {"number": 1})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    try:
        with pytest.raises(OSError, match=r"best\.safetensors cannot be written \(File too large\): make room"):
            export_weights(path, nn.Linear(99, 99), {"number": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert exported_metadata(path) == {"number": 1}
    assert [each.name for each in tmp_path.iterdir()] == ["best.safetensors"]


def test_files_of_others_say_nothing(tmp_path: Path) -> None:
    safetensors.save_file({"weight": torch.ones(2)}, tmp_path / "other.safetensors")
    assert exported_metadata(tmp_path / "other.safetensors") == {}
    (tmp_path / "text.safetensors").write_text("hello")
    with pytest.raises(InputError, match="cannot be read as a safetensors file"):
        exported_metadata(tmp_path / "text.safetensors")
