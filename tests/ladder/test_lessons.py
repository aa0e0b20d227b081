"""Each lesson of examples/ladder runs unchanged, and explains the change of every rung."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

from rooftop.ladder import LADDERS

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "ladder"


@pytest.mark.parametrize("name", list(LADDERS))
def test_a_lesson_tells_of_every_rung(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    monkeypatch.setattr("rooftop.ladder.layer.digits", lambda device: ())
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--size", "1000" if torch.cuda.is_available() else "40"])
    said = runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    for rung, why in said["WHY"].items():  # a rung without one raises KeyError
        assert f"\n{rung}: {why}\n" in printed
    assert f"python examples/ladder/{name}.py" in said["__doc__"]
