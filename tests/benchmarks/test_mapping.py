"""All variants in the benchmark of `rooftop map` do the same work."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("distributed")

WAYS = ["rooftop", "Dask map_partitions"]


def test_a_quick_run_measures_these_ways(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[[str], ModuleType]
) -> None:
    """The script counts the rows of each variant, and fails if a row is an error."""
    mapping, out = script("mapping"), tmp_path / "mapping.json"
    folder = str(Path(mapping.__file__ or "").parent)  # where workers find the script
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]))
    words = ["--quick", "--only", "resnet50", "--ways", *WAYS, "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["mapping.py", *words])
    assert mapping.main() == 0
    first, *rows = json.loads(out.read_text())["rows"]
    assert first["items"] == 8
    assert first["decoding"] > 0 < first["computing"]
    assert [row["way"] for row in rows] == WAYS
    assert all(row["items_per_s"] > 0 < row["percent"] for row in rows)
