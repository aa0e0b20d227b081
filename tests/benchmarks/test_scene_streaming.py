"""The benchmark of streaming runs, and its quick run streams."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scene_streaming.py"


def test_a_quick_run_streams_without_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "streaming.json"
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--quick", "--out", str(out), "--folder", str(tmp_path / "rocks")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr()
    found = json.loads(out.read_text())
    rows = {row["what"]: row for row in found["rows"]}
    assert rows["scene"]["files"] == 9
    for name in ("streamed", "streamed, waited for"):
        assert rows[name]["hole_pixels"] == 0
        assert rows[name]["evicted"] > 0
        assert rows[name]["pool_bytes"] < rows["scene"]["bytes"]
    assert rows["first picture"]["pages"] > 0
    assert set(found["judged"]["goals"]) <= set(found["judged"])


def test_a_rock_is_closed(script: Callable[[str], ModuleType]) -> None:
    vertices, faces = script("scene_streaming").rock(3000, 1)
    _, welded = np.unique(vertices.round(9), axis=0, return_inverse=True)
    edges = np.sort(welded.ravel()[faces][:, [[0, 1], [1, 2], [2, 0]]].reshape(-1, 2), axis=1)
    assert (np.unique(edges, axis=0, return_counts=True)[1] == 2).all()
    assert 2000 < len(faces) < 4000
