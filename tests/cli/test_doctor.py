"""`rooftop doctor`: its output, its exit status, and that it runs even if torch cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import rooftop
from rooftop.cli.commands.doctor import command
from rooftop.doctor.findings import Finding

WORKS = Finding("torch", "works", "2.11.0, CUDA 13.0 build")
ABSENT = Finding("Charts", "absent", "not installed", "", 'pip install "rooftop[report]"', needed=False)
BROKEN = Finding(
    *("Triton", "broken", "triton 3.5.1", "torch asks for triton==3.6.0"),  # type: ignore[arg-type]
    'pip install --force-reinstall "triton==3.6.0"',
)


def doctor(monkeypatch: pytest.MonkeyPatch, *findings: Finding, words: tuple[str, ...] = ()) -> Result:
    monkeypatch.setattr("rooftop.doctor.diagnosis.diagnose", lambda: list(findings))
    return CliRunner().invoke(command, words)


def test_each_problem_is_shown_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    result = doctor(monkeypatch, WORKS, ABSENT, BROKEN)
    assert result.exit_code == 1
    assert result.output.splitlines() == [
        "✓  torch   2.11.0, CUDA 13.0 build",
        "-  Charts  not installed",
        '           pip install "rooftop[report]"',
        "✗  Triton  triton 3.5.1",
        "           torch asks for triton==3.6.0",
        '           pip install --force-reinstall "triton==3.6.0"',
        "broken: Triton",
    ]


def test_what_is_optional_may_be_absent_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    optional = Finding("Warp", "broken", "warp-lang 1.9.0", "OSError", "pip install warp-lang", needed=False)
    result = doctor(monkeypatch, WORKS, ABSENT, optional)
    assert result.exit_code == 0
    assert result.output.endswith("\nEverything required works.\n")
    assert "✗  Warp" in result.output


def test_json_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    result = doctor(monkeypatch, WORKS, ABSENT, BROKEN, words=("--json",))
    assert result.exit_code == 1
    assert json.loads(result.output) == {"ok": False, "findings": [asdict(each) for each in (WORKS, ABSENT, BROKEN)]}
    result = doctor(monkeypatch, WORKS, words=("--json",))
    assert result.exit_code == 0
    assert json.loads(result.output)["ok"] is True


def test_the_exit_status_is_what_main_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.doctor.diagnosis.diagnose", lambda: [BROKEN])
    assert command.main([], standalone_mode=False) == 1


def test_install_kernel_comes_before_the_diagnosis(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr("rooftop.doctor.diagnosis.install_kernel", lambda: done.append("kernel"))
    assert doctor(monkeypatch, WORKS).exit_code == 0
    assert done == []
    assert doctor(monkeypatch, WORKS, words=("--install-kernel",)).exit_code == 0
    assert done == ["kernel"]


def test_where_torch_cannot_be_imported_it_says_why(tmp_path: Path) -> None:
    """A real process whose torch lacks a library, as after an incomplete update."""
    (tmp_path / "torch.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    source = Path(rooftop.__file__).parents[1]
    program = "from rooftop.cli.commands.doctor import command; command(['--json'])"
    run = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{source}"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1, run.stderr
    found = {each["part"]: each for each in json.loads(run.stdout)["findings"]}
    assert found["torch"]["status"] == "broken"
    assert found["torch"]["problem"] == "OSError: libcudart.so.13: cannot open shared object file"
    assert "--force-reinstall" in found["torch"]["command"]
    assert found["Python"]["status"] == "works"
    assert "Ceilings cache" not in found
