"""Every name in docs/mat.md exists."""

from __future__ import annotations

import re
from pathlib import Path

from rooftop import mat

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "mat.md").read_text(encoding="utf-8")


def test_names_called_the_same_are_there() -> None:
    (table,) = re.findall(r"## OpenCV's names\n(.*?)\n## ", PAGE, re.DOTALL)
    same = [row.split("|")[1] for row in table.splitlines() if re.search(r"\| the same", row)]
    names = {name for cell in same for name in re.findall(r"`(?:Mat::|m\.)?(\w+)", cell)}
    assert len(names) > 40
    assert not [name for name in names if not hasattr(mat, name) and not hasattr(mat.Mat, name)]


def test_every_exported_name_is_there_once() -> None:
    assert len(set(mat.__all__)) == len(mat.__all__)
    assert all(hasattr(mat, name) for name in mat.__all__)
