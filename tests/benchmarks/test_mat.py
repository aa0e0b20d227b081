"""The benchmark of Mats runs in a small size on a CPU, next to OpenCV and torch, and refuses peers with other
results."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cv2")
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "mat.py"
TABLES = runpy.run_path(str(ROOT / "benchmarks" / "kernels" / "tables.py"))


@pytest.mark.usefixtures("measured")
def test_every_operation_beside_its_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "mat.json"
    command = [SCRIPT.name, "--quick", "--device", "cpu", "--seconds", "0.002", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", command)
    runpy.run_path(str(SCRIPT), run_name="__main__")
    found = json.loads(out.read_text())
    assert found["environment"]["versions"]
    rows = found["rows"]
    names = {"add", "greater", "blend", "weighted", "each channel", "five", "masked", "converted"}
    assert {(row["operation"], row["dtype"], row["region"]) for row in rows} == {
        (name, dtype, region) for name in names for dtype in ("uint8", "float32") for region in (False, True)
    }
    assert all(row["ms"].keys() == {"rooftop", "opencv", "torch"} and min(row["ms"].values()) > 0 for row in rows)


def test_a_peer_with_another_result_is_not_timed() -> None:
    check = runpy.run_path(str(SCRIPT))["check"]
    check("add", "torch", torch.tensor([3, 4]), torch.tensor([3, 5]))  # one level: rounded twice
    with pytest.raises(SystemExit, match=r"add: torch differs from ours by 2\.0"):
        check("add", "torch", torch.tensor([3, 3]), torch.tensor([3, 5]))


@pytest.mark.parametrize("page", ["mat", "media"])
def test_the_page_has_the_figures_of_the_files(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    assert "<!-- figures: cpu/" in text
    assert TABLES["with_figures"](text, TABLES["RESULTS"]) == text, "run python benchmarks/kernels/tables.py"


def test_tables_of_a_gpu_and_of_a_cpu() -> None:
    row = {"operation": "add", "dtype": "uint8", "region": True, "ms": {"rooftop": 1.0, "opencv": 2.0, "torch": 9.0}}
    assert TABLES["relative_times"]([row]).splitlines()[-1] == "| add | uint8, regions | **0.50** | 4.5 |"
    row |= {"tb_per_s": {"rooftop": 3.5, "torch": 1.0, "compile": 3.0}, "roof_tb_per_s": 4.25}
    assert TABLES["arrays"]([row]).splitlines()[-1] == "| add | uint8, regions | 4.25 | **3.50** | 1.00 | 3.00 |"
    rates = {"rooftop, CPU, rgb": 50, "rooftop, CPU, input": 25, "OpenCV, bgr in the host's memory": 100}
    rates["PyAV, frames in the host's memory"] = 300
    (last,) = TABLES["relative_rates"]([{"name": "clip", "frames_per_s": rates}]).splitlines()[-1:]
    assert last == "| clip | **0.50** | **0.25** | - | 3.00 |"
