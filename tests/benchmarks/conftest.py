"""Scripts of benchmarks/ as modules."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """The script with that name, imported only for this test."""

    def imported(name: str) -> ModuleType:
        monkeypatch.syspath_prepend(FOLDER)
        return importlib.import_module(name)

    return imported
