"""The tables of the pages are those that benchmarks/kernels/tables.py makes from the committed figures.

The snippets of docs/kernels.md and docs/operators.md run.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

from rooftop import kernels, nn

ROOT = Path(__file__).resolve().parents[2]
TABLES = runpy.run_path(str(ROOT / "benchmarks" / "kernels" / "tables.py"))
DOCS = ROOT / "docs"
PAGE = (DOCS / "kernels.md").read_text(encoding="utf-8")
OPERATORS = (DOCS / "operators.md").read_text(encoding="utf-8")
MARKED = "before\n<!-- figures: some.json -->\nold\n<!-- end of figures -->\nafter\n"


def filled(tmp_path: Path, content: Any) -> str:
    (tmp_path / "some.json").write_text(json.dumps(content))
    return TABLES["with_figures"](MARKED, tmp_path)


@pytest.mark.parametrize("name", [str(page.relative_to(DOCS)) for page in TABLES["PAGES"]])
def test_each_page_is_up_to_date(name: str) -> None:
    page = (DOCS / name).read_text(encoding="utf-8")
    assert TABLES["with_figures"](page, TABLES["RESULTS"]) == page, "run python benchmarks/kernels/tables.py"
    assert page.count("<!-- figures:") == page.count("<!-- end of figures -->") == len(TABLES["MARKED"].findall(page))


def test_the_guide_has_the_overview_and_the_measurements_have_the_rest() -> None:
    assert re.findall("<!-- figures: (.*) -->", PAGE) == ["overview"]
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("measurements/kernels*.md")]
    shown = [f"{name}.json" for page in pages for name in re.findall(r"<!-- figures: (\w+)\.json -->", page)]
    assert len(shown) == len(set(shown))
    assert {f"{line.file}.json" for line in TABLES["OVERVIEW"]} <= set(shown)


def test_the_overview_takes_the_rows_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"columns": 8, "direction": "forward", "roof": 4.0, "unit": "TB/s", "graph": {"rooftop": 3.0, "torch": 1.0}},
        {"columns": 8, "direction": "backward", "roof": 4.0, "unit": "TB/s", "graph": {"rooftop": 2.5, "compile": 2.0}},
        {"columns": 8, "features": 2, "roof": 4.0, "unit": "TB/s", "graph": {"rooftop": 9.0}},
        {"columns": 9, "direction": "forward", "roof": 4.0, "unit": "TB/s", "graph": {"rooftop": 8.0}},
    ]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows}))
    line = TABLES["Line"]("norm", "4x8", "some", {"columns": 8, "features": None})
    monkeypatch.setitem(TABLES["overview"].__globals__, "OVERVIEW", (line,))
    assert TABLES["overview"](tmp_path).splitlines()[2:] == [
        "| `norm` forward, TB/s | 4x8 | 4.00 | **3.00** | 1.00 | - | - |",
        "| `norm` backward, TB/s | 4x8 | 4.00 | **2.50** | - | 2.00 | - |",
        "",
        TABLES["BOLD"],
    ]
    monkeypatch.setitem(TABLES["overview"].__globals__, "OVERVIEW", (line._replace(has={"columns": 7}),))
    with pytest.raises(ValueError, match=r"some\.json has no row"):
        TABLES["overview"](tmp_path)


def test_directions_stand_beside_each_other_and_ours_is_first(tmp_path: Path) -> None:
    row = {"columns": 128, "direction": "forward", "roof": 4.6859, "unit": "TB/s"}
    other = {"columns": 128, "direction": "backward", "roof": 4.7, "unit": "TB/s"}
    rows = [
        {**row, "graph": {"torch": 0.478, "rooftop": 4.0881}, "eager": {"rooftop": 1.0}},
        {**other, "graph": {"torch": 123.4, "rooftop": 4567.8}, "eager": {}},
        {**row, "columns": 256, "graph": {"rooftop": 3.0}, "eager": {}},
    ]
    text = filled(tmp_path, {"environment": {"device": "Some GPU"}, "rows": rows})
    assert text == (
        "before\n<!-- figures: some.json -->\n\nIn TB/s:\n\n"
        "| columns | forward: roof | rooftop | torch | backward: roof | rooftop | torch |\n"
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |\n"
        "| 128 | 4.69 | **4.09** | 0.48 | 4.70 | **4,568** | 123 |\n"
        "| 256 | 4.69 | **3.00** | - | - | - | - |\n\n"
        f"`benchmarks/results/h200/some.json`, Some GPU. {TABLES['BOLD']}\n\n<!-- end of figures -->\nafter\n"
    )
    assert TABLES["with_figures"](text, tmp_path) == text, "a second run changes nothing"


def test_operators_that_are_described_otherwise_have_tables_of_their_own(tmp_path: Path) -> None:
    rows = [
        {"operator": "rope", "shape": [2, 3], "causal": True, "roof": 1.0, "unit": "us", "rates": {"rooftop": 2.0}},
        {"operator": "swiglu", "rows": 4, "roof": 1.0, "unit": "us", "graph": {}, "eager": {"rooftop": 2.5}},
    ]
    text = filled(tmp_path, {"rows": rows})
    assert "`rope`, us:\n\n| shape | causal | roof | rooftop |\n| ---: | ---: | ---: | ---: |\n| 2 x 3 | yes |" in text
    assert "`swiglu`, us:\n\n| rows | roof | rooftop |\n| ---: | ---: | ---: |\n| 4 | 1.00 | **2.50** |" in text


def test_a_page_may_show_some_rows_of_a_file(tmp_path: Path) -> None:
    rows = [{"kind": kind, "rows": n, "roof": 1.0, "rates": {"rooftop": n}} for kind in ("a", "b") for n in (2, 3, 4)]
    (tmp_path / "some.json").write_text(json.dumps({"threads": 2, "rows": rows}))
    text = TABLES["with_figures"](MARKED.replace("some.json", "some.json kind=b rows=2,4"), tmp_path)
    assert re.findall(r"^\| (\w+ \| \d+) ", text, re.MULTILINE) == ["b | 2", "b | 4"]
    assert text.startswith("before\n<!-- figures: some.json kind=b rows=2,4 -->\n\nIn ")
    assert TABLES["with_figures"](text, tmp_path) == text


def test_what_was_not_measured_says_how(tmp_path: Path) -> None:
    text = TABLES["with_figures"](MARKED, tmp_path)
    assert "No figures yet: `python benchmarks/kernels/some.py --out benchmarks/results/h200/some.json`." in text
    assert "old" not in text


def tensors(snippet: str) -> dict[str, Any]:
    """The variables that the page's snippets do not define, with small shapes. Some names have other shapes in other
    snippets."""
    rows, heads = torch.randn(4, 8, requires_grad=True), torch.randn(1, 2, 6, 8)
    names = ("x", "residual", "gate", "hidden", "logits", "both")
    by_shape = {**dict.fromkeys(names, rows), **dict.fromkeys(("query", "key", "value", "key_a", "key_b"), heads)}
    by_shape |= {"value_a": heads, "value_b": heads, "cos": torch.rand(6, 4), "sin": torch.rand(6, 4)}
    by_shape |= {"scores": torch.randn(2, 6, 6), "keep": torch.ones(6, 6, dtype=torch.bool).tril(), "d": 8}
    by_shape |= {"weight": torch.randn(8, 8) if "linear_act" in snippet or "embedding" in snippet else torch.ones(8)}
    by_shape |= {"bias": torch.zeros(8), "linear_bias": torch.zeros(8), "head": torch.nn.Linear(8, 8, bias=False)}
    by_shape |= {"target": torch.arange(4), "tokens": torch.arange(4), "model": torch.nn.LayerNorm(8)}
    by_shape |= {"features": torch.randn(5, 8, 3), "points": torch.zeros(5, 3)}
    by_shape |= {"cell": torch.randn(1, 2, 3, 3), **dict.fromkeys(("recurrent", "inputs"), torch.randn(1, 8, 3, 3))}
    if "amax" in snippet:
        by_shape["x"] = torch.randn(2, 3, 4)
    return by_shape


@pytest.mark.filterwarnings("ignore:`isinstance:FutureWarning")  # a warning of torch.export itself
@pytest.mark.parametrize("snippet", re.findall(r"```python\n(.*?)```", PAGE + OPERATORS, re.DOTALL))
def test_every_snippet_of_the_pages_runs(snippet: str) -> None:
    exec(compile(snippet, "snippet", "exec"), {"__name__": "snippet", **tensors(snippet)})


def test_the_overview_names_every_operator_and_module() -> None:
    overview = PAGE[: PAGE.index("\n## ")]
    operators = {name for name in kernels.__all__ if name.islower() and not name.endswith("_plan")}
    operators.remove("decompositions")  # described in a separate section
    modules = {name for name in nn.__all__ if name[0].isupper() and name not in ("Replacement", "KINDS")}
    assert {name for name in operators | modules if f"`{name}`" not in overview} == set()


def test_every_operator_of_the_overview_is_described() -> None:
    described = set(re.findall(r"^## (.*)", OPERATORS, re.MULTILINE))
    linked = set(re.findall(r"operators\.md#([\w-]+)", PAGE))
    assert linked == {re.sub(r"[^\w ]", "", heading.lower()).replace(" ", "-") for heading in described}


def test_figures_of_what_pays_are_those_of_the_measurements() -> None:
    section = PAGE.split("## When it pays\n")[1].split("\n## ")[0]
    tables = "".join(page.read_text(encoding="utf-8") for page in (DOCS / "measurements").glob("kernels*.md"))
    figures = set(re.findall(r"(?<![\w,.])\d+\.\d+", section))
    measured = set(re.findall(r"(?<![\w,.])\d+\.\d+", tables))
    assert len(figures) > 30
    assert figures <= measured
