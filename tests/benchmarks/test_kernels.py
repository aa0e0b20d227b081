"""Without a GPU, kernel benchmarks still print their help, and say that they need a GPU."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"
SCRIPTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("repeating", "tables"))


def started(monkeypatch: pytest.MonkeyPatch, name: str, *words: str) -> int | str | None:
    """Run a script; return its exit status."""
    monkeypatch.setattr(sys, "argv", [name, *words])
    monkeypatch.syspath_prepend(str(FOLDER))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(FOLDER / f"{name}.py"), run_name="__main__")
    return ended.value.code


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_no_gpu(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert started(monkeypatch, name, "--help") == 0
    assert f"python benchmarks/kernels/{name}.py" in capsys.readouterr().out


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
@pytest.mark.parametrize("name", SCRIPTS)
def test_without_a_gpu_one_line_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert started(monkeypatch, name) == 2
    assert "error: needs an NVIDIA GPU" in capsys.readouterr().err
