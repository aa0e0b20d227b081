"""The benchmark of virtual geometry runs, and its brute-force rasterizer draws what the renderer draws."""

from __future__ import annotations

import json
import math
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

NAMES = ("build", "frame", "brute force", "finer", "cameras", "hills", "views", "tree", "tree from far", "forest")
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "scene.py"
TABLES = runpy.run_path(str(ROOT / "benchmarks" / "kernels" / "tables.py"))


def test_a_quick_run_measures_all_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scene.json"
    monkeypatch.syspath_prepend(SCRIPT.parent)
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--quick", "--out", str(out)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0, capsys.readouterr()
    found = json.loads(out.read_text())
    assert not found["failed"]
    rows = {what: [row for row in found["rows"] if row["what"] == what] for what in NAMES}
    assert rows["build"][0]["bytes_per_triangle"] < 15
    for frame, brute in zip(rows["frame"], rows["brute force"], strict=True):
        assert frame["triangles"] == brute["triangles"] > frame["drawn"]["triangles"] > 0
        assert {"cull", "rasterize", "base_pass"} <= set(frame["stage_ms"])
        assert brute["same_coverage"] > 0.99
        assert brute["close"] > 0.98
        assert math.isfinite(frame["g_buffer_ms"])
    assert rows["finer"][1]["triangles"] == 4 * rows["finer"][0]["triangles"]
    assert rows["cameras"][0]["drawn"]["triangles"] > 0
    ours, *peers = rows["hills"]
    assert ours["by"] == "warp"
    assert ours["drawn"]["clusters"] > 1
    for peer, name in zip(peers, ("brute force", "rays"), strict=True):
        assert peer["by"] == name
        assert peer["same_coverage"] > 0.99
        assert peer["close"] > 0.98
    ours, *peers = rows["views"]
    assert ours["cameras"] == 4
    assert [peer["by"] for peer in peers] == ["rays, sah", "rays, median"]
    assert all(peer["same_coverage"] > 0.99 and peer["close"] > 0.97 for peer in peers)
    assert rows["tree"][0]["roots"] == 1
    assert len(rows["tree from far"]) == 12
    assert all(0.5 < row["covered"] < 1.5 for row in rows["tree from far"])
    assert rows["forest"][0]["drawn"]["triangles"] < rows["forest"][0]["triangles"]


def cells(text: str) -> list[list[str]]:
    """The rows of the tables in a text."""
    return [[each.strip(" *") for each in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]


def test_the_measurements_are_those_of_the_file() -> None:
    page = (ROOT / "docs" / "measurements" / "scene.md").read_text(encoding="utf-8")
    assert "<!-- figures: scene.json -->" in page
    assert TABLES["with_figures"](page, TABLES["RESULTS"]) == page, "run python benchmarks/kernels/tables.py"


def test_the_changes_are_those_of_the_file() -> None:
    page = (ROOT / "docs" / "measurements" / "scene.md").read_text(encoding="utf-8")
    runs = json.loads((TABLES["RESULTS"] / "scene_changes.json").read_text(encoding="utf-8"))
    _, table = page.split("## Changes to the kernels of a frame\n")[1].split("| ms | before |", 1)
    _, *rows = cells(table.split("\n\n")[0])
    case = ""
    for name, before, *after in rows:
        case = {"ten": "frame", "64": "cameras", "four": "cascades"}.get(name.split()[0], case)
        measured = [figure_of(run, case, name) for run in runs]
        assert [float(each) for each in before.split(", ")] == [rounded(measured[0]), rounded(measured[-1])], name
        assert [float(each) for each in after] == [rounded(each) for each in measured[1:-1]], name
    assert len(rows) == 17


def figure_of(run: dict[str, Any], case: str, name: str) -> float:
    """The figure of a run that a row of the table quotes."""
    if name.startswith("100 of"):
        found = run["moved"]["100"]["g_buffer_ms"]
    elif name.startswith("four cascades"):
        found = run["cascades"]["anew_ms"] - run["cascades"]["without_ms"]
    elif name.startswith("`"):
        found = run[case]["stage_ms"][name.strip("`")]
    else:
        found = run[case]["depth_ms" if name.endswith("a depth") else "g_buffer_ms"]
    return float(found)


def rounded(ms: float) -> float:
    return round(ms, 3 if ms < 1 else 2)


def test_the_guide_quotes_the_measurements() -> None:
    guide = (ROOT / "docs" / "scene.md").read_text(encoding="utf-8")
    measured = json.loads((TABLES["RESULTS"] / "scene.json").read_text(encoding="utf-8"))["rows"]
    quoted = [
        [triangles, drawn, depth, g_buffer, warp, plain]
        for triangles, size, drawn, _, depth, g_buffer, warp, _, plain, _ in (
            row for row in cells(TABLES["scenes"](measured)) if len(row) == 10
        )
        if size == "1920 x 1080"
    ]
    assert len(quoted) == 4
    _, table = guide.split("| triangles | drawn | depth | G-buffer | depth in Warp | every triangle |\n")
    assert cells(table.split("\n\n")[0])[1:] == quoted, (
        "the table of docs/scene.md, Speed, must have the committed figures"
    )
