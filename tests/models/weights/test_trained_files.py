"""The metadata of a weights file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from rooftop.errors import WeightsError
from rooftop.models import detr_small, load, load_classifier, load_detector, resnet18
from rooftop.models.images import Preprocessing
from rooftop.models.weights.trained_files import KEY, plain_preprocessing, trained_file

safetensors = pytest.importorskip("safetensors.torch")
HOW = Preprocessing(36, 32, Image.Resampling.BICUBIC, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
OPTIONS = {"num_classes": 3, "small_images": True, "channels": 4}


def written(path: Path, model: torch.nn.Module, said: object) -> Path:
    safetensors.save_file(model.state_dict(), path, metadata={"format": "pt", KEY: json.dumps(said)})
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    said = {
        "model": "resnet18",
        "options": OPTIONS,
        "classes": ["a", "b", "c"],
        "preprocessing": plain_preprocessing(HOW),
    }
    return written(tmp_path / "best.safetensors", resnet18(num_classes=3, small_images=True, channels=4), said)


def test_a_file_says_what_it_is(file: Path) -> None:
    found = trained_file(file)
    assert found is not None
    assert (found.model, dict(found.options), found.classes) == ("resnet18", OPTIONS, ("a", "b", "c"))
    assert found.preprocessing == HOW


def test_loaders_take_its_options(file: Path) -> None:
    model, preprocessing = load_classifier("resnet18", file)
    assert preprocessing == HOW
    assert model(torch.randn(2, 3, 8, 8)).shape == (2, 3)
    assert torch.equal(load("resnet18", file).conv1.weight, model.conv1.weight)  # type: ignore[union-attr,arg-type]


def test_a_detector_too(tmp_path: Path) -> None:
    options = {"num_classes": 2, "width": 16, "layers": 1, "channels": [8, 8]}
    model = detr_small(**options)
    file = written(tmp_path / "best.safetensors", model, {"model": "detr_small", "options": options, "sides": [64, 96]})
    found = trained_file(file)
    assert found is not None
    assert found.sides == (64, 96)
    for other in (load_detector("detr_small", file), detr_small(weights=file)):
        assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("said", [{}, {"step": 3}, {"model": {"layers": 2}}])
def test_other_files_say_nothing(said: object, tmp_path: Path) -> None:
    assert trained_file(written(tmp_path / "x.safetensors", torch.nn.Linear(1, 1), said)) is None
    assert trained_file("DEFAULT") is None
    assert trained_file(tmp_path / "x.pth") is None
    torch.save({}, tmp_path / "x.pth")
    assert trained_file(tmp_path / "x.pth") is None


def test_a_header_that_is_damaged(tmp_path: Path) -> None:
    file = written(
        tmp_path / "x.safetensors", torch.nn.Linear(1, 1), {"model": "resnet18", "preprocessing": {"crop": 3}}
    )
    with pytest.raises(WeightsError, match=r"'rooftop' in its header was not written by rooftop train \(KeyError"):
        trained_file(file)
    for said in ({"preprocessing": {"resize": 5, "crop": 3, "mean": [0.5]}}, {"sides": [5]}):
        written(file, torch.nn.Linear(1, 1), {"model": "resnet18", **said})
        with pytest.raises(WeightsError, match=r"was not written by rooftop train \(IndexError"):
            trained_file(file)
    file.write_bytes(b"not safetensors")
    with pytest.raises(WeightsError, match="is damaged or not a safetensors file"):
        trained_file(file)
