"""A network is built for at least one class."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rooftop import models


@pytest.mark.parametrize("build", [models.resnet18, models.swin_t, models.hybrid_t, models.detr_resnet50])
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (0, ValueError, "num_classes must be at least 1, got 0"),
        (-1, ValueError, "num_classes must be at least 1, got -1"),
        (2.5, TypeError, "num_classes must be an int, got 2.5"),
        ("7", TypeError, "num_classes must be an int, got '7'"),
    ],
)
def test_what_is_no_number_of_classes(
    build: Callable[..., nn.Module], given: object, error: type[Exception], message: str
) -> None:
    with torch.device("meta"), pytest.raises(error, match=message):
        build(num_classes=given)
