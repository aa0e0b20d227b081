"""Environment variables that control the C++ parts, with valid and invalid values."""

from __future__ import annotations

import math
import threading
import warnings
from pathlib import Path

import pytest

from rooftop.launch import cpp_extensions, native_calls
from rooftop.launch.cpp_extensions import Extension, asked
from rooftop.scene.streaming import page_reader


def test_a_compilation_in_the_background_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROOFTOP_COMPILED_CALLS", raising=False)
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    monkeypatch.setattr(cpp_extensions, "compiler", lambda: ("g++",))
    compiled = threading.Event()
    monkeypatch.setattr(Extension, "_await", lambda self, then: compiled.wait())
    extension = Extension("part", tmp_path / "part.cpp")
    extension.source.write_text("")
    assert extension.wait(math.inf), "nothing is compiled yet"
    extension.ask(lambda module: None, "Python")
    assert not extension.wait(-1.0)
    assert not extension.wait(0.01)
    threading.Timer(0.1, compiled.set).start()
    assert extension.wait(math.inf)


@pytest.mark.parametrize("value", ["false", "off", "WAIT", "2", "-1"])
def test_a_wrong_value_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_COMPILED_CALLS", value)
    with pytest.warns(UserWarning, match=f"ROOFTOP_COMPILED_CALLS={value} is ignored: expected 0, 1 or wait"):
        assert asked() == "1"
    with pytest.warns(UserWarning, match="expected 0, 1 or wait"):
        native_calls.state()


@pytest.mark.parametrize(("value", "meant"), [("", "1"), ("0", "0"), ("1", "1"), ("wait", "wait")])
def test_a_known_value_is_taken(value: str, meant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_COMPILED_CALLS", value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert asked() == meant


def test_python_reads_pages_after_waiting_for_a_compiler_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOFTOP_COMPILED_CALLS", "wait")
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    monkeypatch.setattr(cpp_extensions, "compiler", lambda: ("false",))
    monkeypatch.setattr(page_reader, "extension", Extension("no_reader", Path(page_reader.__file__)))
    monkeypatch.setattr(page_reader, "_asked", False)
    monkeypatch.setattr(page_reader, "_module", None)
    with pytest.warns(UserWarning, match=r"=wait: Python reads all pages, because .* was not compiled") as warned:
        assert page_reader.compiled() is None
    assert page_reader.compiled() is None
    assert len(warned) == 1
