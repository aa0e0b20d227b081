"""Launch parameters are in each family's `tables.py`, as data rather than code."""

from __future__ import annotations

import ast
import importlib
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import pytest

import rooftop.kernels

FILES = sorted(Path(rooftop.kernels.__file__).parent.glob("*/tables.py"))
FAMILIES = [file.parent.name for file in FILES]
MEASURED_ROWS = ("Entry", "FewRows")  # the columns of a measurement: a shape and its times, in the table's order
PREDICTED = ("not measured", "predicted", "none has been timed", "no figures", "not timed")


def table(family: str) -> Any:
    return importlib.import_module(f"rooftop.kernels.{family}.tables")


@pytest.mark.parametrize("file", FILES, ids=FAMILIES)
def test_entries_name_their_fields(file: Path) -> None:
    module = table(file.parent.name)
    for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        name = call.func.id if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) else ""
        configured = name.endswith("Config") and name != "SplitConfig"
        if configured and is_dataclass(getattr(module, name)):
            assert isinstance(call, ast.Call)
            assert not call.args, f"{file}:{call.lineno}"


@pytest.mark.parametrize("file", FILES, ids=FAMILIES)
def test_what_is_predicted_says_so_as_data(file: Path) -> None:
    """A comment says that values are predicted exactly if an entry has measured=False."""
    text = file.read_text(encoding="utf-8")
    said = any(words in text.lower().replace("\n# ", " ") for words in PREDICTED)
    if file.parent.name not in ("convolutions", "matmuls"):  # tables in which each class of shapes names a measurement
        assert said == ("measured=False" in text)


def test_launch_data_stands_nowhere_else() -> None:
    for file in FILES[0].parents[1].glob("*/*.py"):
        if file.name in ("tables.py", "row_tiles.py", "launch_data.py"):
            continue
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            assert not (isinstance(node, ast.ClassDef) and node.name.endswith("Config")), f"{file}: {node.name}"
