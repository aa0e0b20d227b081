"""The Python snippets of the page about data run, and print what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "data.md").read_text(encoding="utf-8")
SNIPPETS = [
    pytest.param(match[1], id=f"line-{TEXT[: match.start()].count(chr(10)) + 1}")
    for match in re.finditer(r"```python\n(.*?)```", TEXT, re.DOTALL)
]


def test_the_page_has_snippets() -> None:
    assert len(SNIPPETS) >= 3


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_print_what_the_page_says(
    snippet: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A comment at the start of a line below a `print` shows the printed text."""
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})
    said = re.findall(r"^ *# (.*)", snippet, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
