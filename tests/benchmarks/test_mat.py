"""The benchmark of Mats runs small on a CPU, beside OpenCV and torch, and refuses a peer with another result."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("cv2")
SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "mat.py"


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
    with pytest.raises(SystemExit, match=r"add: torch is 2\.0 away"):
        check("add", "torch", torch.tensor([3, 3]), torch.tensor([3, 5]))
