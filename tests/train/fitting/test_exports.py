"""Exported weights are complete or absent, and describe themselves."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from rooftop.errors import InputError
from rooftop.train.fitting.exports import export_weights, exported_metadata

safetensors = pytest.importorskip("safetensors.torch")


def test_weights_and_what_they_are(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(3))
    model.append(model[0])  # the same weights under two names
    export_weights(tmp_path / "best.safetensors", model, {"model": "mine", "classes": ["cat", "dög"]})
    found = safetensors.load_file(tmp_path / "best.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert exported_metadata(tmp_path / "best.safetensors") == {"model": "mine", "classes": ["cat", "dög"]}


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
