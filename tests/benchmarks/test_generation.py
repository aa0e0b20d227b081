"""The benchmark of generation runs each model in a small size on a CPU, next to transformers with the same weights."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "generation.py"


@pytest.mark.parametrize("case", ["gpt2-xl-1", "llama-1b-16"])
def test_a_text_beside_transformers_which_write_the_same(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchvision_models: ModuleType
) -> None:
    pytest.importorskip("transformers")
    out = tmp_path / "generation.json"
    monkeypatch.setattr(sys, "argv", [SCRIPT.name, "--quick", "--only", case, "--out", str(out)])
    monkeypatch.syspath_prepend(SCRIPT.parent)
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 0
    rows = json.loads(out.read_text())["results"]
    assert [row["variant"] for row in rows] == ["rooftop", "transformers, static", "transformers, dynamic"]
    for row in rows:
        assert row["agree"] == row["new"]  # every token, in float32
        assert row["roof_ms"] > 0
