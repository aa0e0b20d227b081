"""torchvision as an oracle, for tests only.

Its PyPI builds are CUDA builds, which fail to import beside a CPU torch until the operators that their compiled part
would bring are declared; the models themselves are Python.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

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
