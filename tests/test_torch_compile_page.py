"""The tables of docs/torch-compile.md quote committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "torch-compile.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results" / "h200"


def cells(name: str) -> list[float]:
    """The numbers in the row of a table, from the second column on, also those in brackets."""
    (row,) = re.findall(rf"^\| {re.escape(name)}\b[^|]*\|(.*)\|$", PAGE, re.MULTILINE)
    return [float(number) for number in re.findall(r"[\d.]+", row)]


def quoted(figure: float) -> float:
    """A time with three digits, as the page has it."""
    return float(f"{figure:.3g}")


def test_steps_with_and_without_the_compiler() -> None:
    results = json.loads((RESULTS / "compiled.json").read_text(encoding="utf-8"))["results"]
    measured = {row["case"]: row for row in results}
    programs = {
        "ResNet-50, inference": "ResNet-50 inference batch 32",
        "ResNet-50, training": "ResNet-50 training batch 32",
        "GPT-2, inference": "GPT-2 inference batch 4, 512 tokens",
        "GPT-2, training": "GPT-2 training batch 4, 512 tokens",
    }
    for name, case in programs.items():
        default, graphs = measured[f"{case}, default"], measured[f"{case}, reduce-overhead"]
        walls = [default["eager_wall_ms"], default["wall_ms"], graphs["wall_ms"]]
        busy = [default["eager_busy_ms"], default["busy_ms"]]
        assert cells(name) == [quoted(each) for each in walls + busy], name


def test_blocks_of_both_libraries() -> None:
    rows = json.loads((RESULTS / "blocks.json").read_text(encoding="utf-8"))["rows"]
    for name, block in (("GPT-2, width", "gpt"), ("Llama, width", "llama"), ("Swin, width", "swin")):
        expected = []
        for direction in ("inference", "training"):
            (row,) = [row for row in rows if row["block"] == block and row["direction"] == direction]
            for each in ("rooftop", "rooftop, compiled", "torch, compiled"):
                expected += [quoted(row["graph"][each]), quoted(row["eager"][each])]
        assert cells(name) == expected, name
