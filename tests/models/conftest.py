"""What the tests of models share: torchvision as an oracle, made-up weights, and no way to the network.

torchvision's PyPI builds are CUDA builds, which fail to import beside a CPU torch until the operators that their
compiled part would bring are declared; the models themselves are Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rooftop import models

OPERATORS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@pytest.fixture(scope="session")
def torchvision_models() -> Iterator[ModuleType]:
    library = torch.library.Library("torchvision", "FRAGMENT")
    if not hasattr(torch.ops.torchvision, "nms"):
        for schema in OPERATORS:
            library.define(schema)
    import torchvision.models

    yield torchvision.models  # noqa: PT022 (the library must outlive the tests)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where weights are kept, empty and for one test only; the server that they come from does not exist."""
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
    with torch.random.fork_rng():
        torch.manual_seed(0)
        torch.save(models.resnet18(num_classes=3).state_dict(), path)
    return path
