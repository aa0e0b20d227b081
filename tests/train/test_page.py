"""The Python snippets of the pages about training run, and print what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
SNIPPETS = [
    pytest.param(match[1], id=f"{page}-line-{text[: match.start()].count(chr(10)) + 1}")
    for page in ("checkpoints", "data-parallel", "pipelines", "train", "training")
    for text in [(DOCS / f"{page}.md").read_text(encoding="utf-8")]
    for match in re.finditer(r"```python\n(.*?)```", text, re.DOTALL)
]


def test_each_page_has_a_snippet() -> None:
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_snippets_print_what_the_pages_say(
    snippet: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A comment at the start of a line below a `print` shows the printed text."""
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet"})
    said = re.findall(r"^ *# (.*)", snippet, re.MULTILINE)
    assert capsys.readouterr().out.splitlines() == said
