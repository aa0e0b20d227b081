"""Rates of the stages between disk and model, and the stage that is the bottleneck."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from rooftop.data import ImageFolder, ImageTransform, headspace
from rooftop.data.headspace import STAGES, bound
from rooftop.errors import InputError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(3):
            pixels = np.random.default_rng(number).integers(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.jpg")
    return tmp_path


def test_each_stage_of_an_image_folder(folder: Path) -> None:
    data = ImageFolder(folder, ImageTransform(16, {"crop": 0.3, "flip": 0.5}, train=True))
    seen: list[tuple[int, ...]] = []
    told: list[str] = []

    def step(value: list[Tensor]) -> None:
        seen.append(tuple(value[0].shape))

    found = headspace(
        data, 4, step, how="threads", workers=2, seconds=0.01, show=lambda what, fraction: told.append(what)
    )
    assert [row.stage for row in found.rows] == ["disk", "decode", "augment", "collate", "loader", "model"]
    assert all(row.samples_per_s > 0 for row in found.rows)
    assert set(seen) == {(4, 3, 16, 16)}
    assert (found.workers, found.loading) == (2, "by 2 threads")
    assert found.bounds in STAGES
    assert {"disk", "decode", "augment", "collate", "loader", "model"} == set(told)


def test_a_loader_that_takes_longer_than_its_time_has_a_rate() -> None:
    found = headspace(TensorDataset(torch.zeros(4, 3)), 4, seconds=0.0, workers=1, how="here")
    assert all(row.samples_per_s > 0 for row in found.rows)


def test_a_data_set_without_steps_of_its_own_is_one_stage() -> None:
    found = headspace(TensorDataset(torch.zeros(7, 3)), 4, seconds=0.01, workers=1)
    assert [row.stage for row in found.rows] == ["sample", "collate", "loader"]
    assert found.bounds in ("sample", "collate")
    with pytest.raises(InputError, match="no samples"):
        headspace(TensorDataset(torch.zeros(0, 3)), 4)


def test_a_sample_that_raises_is_not_hidden(folder: Path) -> None:
    (folder / "cat" / "1.jpg").write_bytes(b"no photograph")
    with pytest.raises(InputError, match=r"cat/1\.jpg is not an image"):
        headspace(ImageFolder(folder), 4, seconds=0.01, workers=2)


RATES = {"disk": 9000.0, "decode": 1000.0, "augment": 3000.0, "collate": 8000.0, "loader": 700.0, "copy": 20000.0}


@pytest.mark.parametrize(
    ("changes", "bounds", "why"),
    [
        ({}, "decode", "decode is 69% of the workers' time"),  # 1 of 1 + 1/3 + 1/9
        ({"model": 350.0}, "model", "the loader can supply 2.0 times as many samples as the model uses"),
        ({"model": 1400.0}, "decode", "decode is 69% of the workers' time, and the model waits 50% of the time"),
        ({"copy": 300.0, "model": 500.0}, "copy", "gets only 300 samples/s, and the model waits 40% of the time"),
        ({"copy": 300.0}, "copy", "the device gets only 300 samples/s"),
        ({"disk": 200.0}, "disk", "disk is 79% of the workers' time"),
        ({"collate": 650.0, "loader": 600.0}, "collate", "the one thread that collates"),
    ],
)
def test_what_bounds(changes: dict[str, float], bounds: str, why: str) -> None:
    stage, said = bound({**RATES, **changes})
    assert stage == bounds
    assert why in said
