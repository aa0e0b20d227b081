"""Scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rooftop.hardware import timing

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are taken once, because tests check what is made of them."""
    monkeypatch.setattr(timing, "LEAST_SAMPLES", 1)
    monkeypatch.setattr(timing, "LEAST_SAMPLE_S", 1e-5)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """The script with that name, imported only for this test."""

    def imported(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(FOLDER)
        return importlib.import_module(name)

    return imported
