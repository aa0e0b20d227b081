"""Objects of the user's own code are found by the names of their modules and files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rooftop.errors import TargetError
from rooftop.user_code import named_object


@pytest.mark.parametrize("folder", ["plain_folder", "version.2", ".hidden"])
def test_a_file_may_be_in_any_folder(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"task_in_{folder.strip('.').replace('.', '_')}"
    Path(folder).mkdir()
    Path(folder, f"{name}.py").write_text(f"def where(): return {folder!r}\n")
    assert named_object(f"{folder}/{name}.py:where", "module:name")() == folder


def test_a_file_with_several_dots_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("task.v2.py").write_text("def where(): return 2\n")
    with pytest.raises(TargetError, match=r"task\.v2\.py: Python cannot import a file with several dots in its name"):
        named_object("task.v2.py:where", "module:name")
