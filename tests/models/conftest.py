"""Shared fixtures of the tests of models: made-up weights, and no access to the network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rooftop import models


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for weights, used by one test only. The server of the weights does not exist."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setattr(torch.hub, "_hub_dir", None)
    monkeypatch.setenv("ROOFTOP_WEIGHTS_URL", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "*")
    return tmp_path / "torch" / "hub" / "checkpoints"


@pytest.fixture(scope="session")
def resnet18_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Made-up weights of a ResNet-18 with three classes."""
    path = tmp_path_factory.mktemp("weights") / "three.pth"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        torch.save(models.resnet18(num_classes=3).state_dict(), path)
    return path
