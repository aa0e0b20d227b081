"""What all tests share: which of them run here, and torchvision."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


TORCHVISION = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


@pytest.fixture(scope="session")
def torchvision_models() -> Iterator[ModuleType]:
    """torchvision as an oracle. Its published builds are CUDA builds, which fail to import beside a CPU torch until the
    operators of their compiled part are declared; the models themselves are Python."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    if torch.version.cuda is None and not hasattr(torch.ops.torchvision, "nms"):
        for schema in TORCHVISION:
            library.define(schema)
    yield pytest.importorskip("torchvision.models")  # noqa: PT022 (the library must outlive the tests)
