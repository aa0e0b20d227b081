"""A failed capture raises the error that occurred inside it, and keeps no memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.hardware.graphs import captured_into


@contextmanager
def cannot_end(*_: Any) -> Iterator[None]:
    """Like `torch.cuda.graph`, which reports that a capture with an error cannot end."""
    try:
        yield
    finally:
        raise RuntimeError("the capture cannot end")


def test_what_went_wrong_in_a_capture_is_raised_and_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", cannot_end)
    stand_in: Any = None

    def fails() -> weakref.ref[Tensor]:
        x = torch.ones(4)
        with pytest.raises(ValueError, match="not this one"), captured_into(stand_in, stand_in):
            raise ValueError(f"not this one: {x.shape}")
        return weakref.ref(x)

    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()
