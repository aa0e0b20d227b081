"""A module is acted on when it is imported, once, and before the importing code continues."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from rooftop.analysis.compiled.when_imported import WhenImported


@pytest.fixture
def late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a module that is not imported yet."""
    (tmp_path / "package_of_late").mkdir()
    (tmp_path / "package_of_late" / "late.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield "package_of_late.late"
    for name in ("package_of_late.late", "package_of_late"):
        sys.modules.pop(name, None)


def double(module: ModuleType) -> None:
    module.value *= 2


def test_the_importing_code_sees_the_change(late: str) -> None:
    finders = list(sys.meta_path)
    with WhenImported(late, double):
        assert importlib.import_module("package_of_late")
        assert importlib.import_module(late).value == 2
        assert importlib.import_module(late).value == 2
        assert sys.meta_path == finders
    assert sys.modules[late].value == 2
    assert sys.modules[late].__spec__.loader.get_source(late) == "value = 1\n"


def test_an_imported_module_is_changed_at_once(late: str) -> None:
    module = importlib.import_module(late)
    with WhenImported(late, double):
        assert module.value == 2


def test_after_the_block_nothing_happens(late: str) -> None:
    finders = list(sys.meta_path)
    with WhenImported(late, double), WhenImported("no_such_module_of_ours", double):
        pass
    assert sys.meta_path == finders
    assert importlib.import_module(late).value == 1


def test_a_module_that_does_not_exist_raises_as_ever() -> None:
    with WhenImported("no_such_module_of_ours", double), pytest.raises(ModuleNotFoundError, match="no_such_module"):
        importlib.import_module("no_such_module_of_ours")


def test_an_import_that_raises_is_not_acted_on(late: str, tmp_path: Path) -> None:
    (tmp_path / "package_of_late" / "late.py").write_text("value = 1\nraise RuntimeError('halfway')\n")
    seen: list[ModuleType] = []
    with WhenImported(late, seen.append), pytest.raises(RuntimeError, match="halfway"):
        importlib.import_module(late)
    assert not seen
