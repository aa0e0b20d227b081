"""All variants in the benchmark of `rooftop map` do the same work."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("distributed")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "mapping.py"


WAYS = ["rooftop", "Dask map_partitions"]


def test_a_quick_run_measures_these_ways(tmp_path: Path) -> None:
    """The script counts the rows of each variant, and fails if a row is an error."""
    out = tmp_path / "mapping.json"
    words = ["--quick", "--only", "resnet50", "--ways", *WAYS, "--out", str(out)]
    done = subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, *rows = json.loads(out.read_text())["rows"]
    assert first["items"] == 8
    assert first["decoding"] > 0 < first["computing"]
    assert [row["way"] for row in rows] == WAYS
    assert all(row["items_per_s"] > 0 < row["percent"] for row in rows)
