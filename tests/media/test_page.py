"""The example of docs/media.md runs and prints what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("av")
PAGE = Path(__file__).resolve().parents[2] / "docs" / "media.md"


def test_the_example_prints_what_the_page_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})
    assert capsys.readouterr().out.splitlines() == re.findall(r"^# (.*)", snippet, re.MULTILINE)
