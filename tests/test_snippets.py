"""Every block of Python on every page runs on a CPU and prints what the page says.

A page marks a block as `py` if it needs a GPU, a file, several processes, or names that the block does not define.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
WITH_GIVEN_NAMES = ("kernels.md", "operators.md")  # tests/kernels/test_page.py
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
SNIPPETS = [
    pytest.param(match[1], id=f"{page.stem}-line-{text[: match.start()].count(chr(10)) + 1}")
    for page in PAGES
    if page.name not in WITH_GIVEN_NAMES
    for text in [page.read_text(encoding="utf-8")]
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
]
NEEDS = {"rooftop.media": "av", "rooftop.cluster": "pyarrow"}


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_it_prints_what_the_page_says(
    snippet: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a comment that says what is printed, "..." stands for any text."""
    for name, package in NEEDS.items():
        if name in snippet:
            pytest.importorskip(package)
    if "rooftop.optimize(" in snippet:  # no page says what a search keeps, so short rounds are enough
        monkeypatch.setattr("rooftop.optimization.rounds.ROUND_S", 0.02)
    monkeypatch.chdir(tmp_path)
    module = ModuleType("snippet")
    monkeypatch.setitem(sys.modules, "snippet", module)  # torch.compile imports the module of a function
    exec(compile(snippet, "snippet", "exec"), module.__dict__)
    printed = iter(capsys.readouterr().out.splitlines())
    for said in said_in(snippet):
        pattern = ".*".join(map(re.escape, said.split("...")))
        assert any(re.fullmatch(pattern, line) for line in printed), f"not printed, or not in this order: {said}"


def said_in(snippet: str) -> list[str]:
    """The comments that say what is printed: below a `print`, or at the end of the block."""
    lines = [line.strip() for line in snippet.splitlines()]
    last = max(number for number, line in enumerate(lines) if not line.startswith("# "))
    said, follows = [], False
    for number, line in enumerate(lines):
        if line.startswith("# ") and (follows or number > last):
            said.append(line.removeprefix("# "))
        else:
            follows = line.startswith("print(") or (follows and not line)
    return said


def test_the_pages_say_what_is_printed() -> None:
    assert said_in("print(1)\n# 1\n# 2\n\nx = 3  # three\n# four\nf(x)\n# 5") == ["1", "2", "5"]
    assert sum(len(said_in(str(each.values[0]))) for each in SNIPPETS) > 70
