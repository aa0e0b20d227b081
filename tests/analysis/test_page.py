"""The report's page: self-contained, safe, and working in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftop
from rooftop.analysis.page import RANK_PARTS, render_page
from rooftop.analysis.ranks.merging import RankRow, compared
from rooftop.analysis.report import Report
from rooftop.analysis.report_contents import Compilation, GraphBreak, Recompilation
from rooftop.hardware.ceilings import Ceilings

HOSTILE = "</script><script>alert(1)</script><b>&\"'"


@pytest.fixture(scope="module")
def report(round_ceilings: Ceilings) -> dict[str, Any]:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    return rooftop.analyze(net, torch.randn(4, 3, 16, 16), train=True, ceilings=round_ceilings).to_dict()


@pytest.fixture(scope="module")
def prediction(round_ceilings: Ceilings) -> dict[str, Any]:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    return rooftop.predict(net, torch.randn(4, 64), train=True, ceilings=round_ceilings).to_dict()


ROWS = [RankRow(0, "cuda:0", 50, 30, 24, 20), RankRow(1, "cuda:1", 50, 48, 8, 4), RankRow(2, "cuda:2", 48, 30, 24, 18)]
GUARD = "0/0: n == 3    # for i in range(n):  (HINT: mark it dynamic)\nUser stack trace:\n  net.py, line 9"


def with_ranks(report: dict[str, Any]) -> dict[str, Any]:
    return {**report, "ranks": compared(ROWS).to_dict()}


def compiled(report: dict[str, Any]) -> dict[str, Any]:
    breaks = (GraphBreak("net.py:7", "Tensor.item()", 1.5),)
    again = tuple(Recompilation("net.py:8", "forward", GUARD, 0.5) for _ in range(30))
    uncovered = [{"name": "triton_poi_fused_0", "calls": 1, "measured_ms": 1.0, "reason": "not_reconstructed_" * 9}]
    return {**report, "compilation": asdict(Compilation(2, 12, 12.25, breaks, again)), "uncovered": uncovered}


def hostile(report: dict[str, Any]) -> dict[str, Any]:
    ops = [{**op, "name": HOSTILE, "modules": [HOSTILE]} for op in report["ops"]]
    child = {**report["modules"], "name": HOSTILE, "type": HOSTILE, "children": []}
    modules = {**report["modules"], "children": [*report["modules"]["children"], child]}
    ranks = compared([replace(row, device=HOSTILE) for row in ROWS]).to_dict()
    breaks, again = (GraphBreak(HOSTILE, HOSTILE, 1.5),), (Recompilation(HOSTILE, HOSTILE, HOSTILE + "\n", 0.5),)
    compilation = asdict(Compilation(2, 12, 12.25, breaks, again))
    named = {"target": HOSTILE, "notes": [HOSTILE], "ranks": ranks, "compilation": compilation}
    return {**report, **named, "ops": ops, "modules": modules}


def empty(report: dict[str, Any]) -> dict[str, Any]:
    modules = {**report["modules"], "children": [], "percent_of_roof": None}
    memory = {"peak_bytes": 0, "timeline": []}
    return {**report, "ops": [], "modules": modules, "advice": [], "memory": memory, "notes": [], "uncovered": []}


def large(report: dict[str, Any], rows: int) -> dict[str, Any]:
    ops = [{**report["ops"][i % len(report["ops"])], "calls": i} for i in range(rows)]
    return {**report, "ops": ops}


def without_plotly(page: str) -> str:
    """The page without the embedded library."""
    return re.sub(r"<script>/\*\*.*?</script>", "", page, flags=re.S)


def test_nothing_is_fetched_from_anywhere(report: dict[str, Any]) -> None:
    page = without_plotly(render_page(report))
    assert len(page) < 400_000
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", page)
    assert "@import" not in page
    assert "http://" not in page
    assert "https://" not in page


def test_the_flag_tells_the_percent_above_which_it_is_shown(report: dict[str, Any]) -> None:
    ops = [{name: value for name, value in op.items() if name != "flagged"} for op in report["ops"]]
    assert "of its roof: an error" not in render_page({**report, "ops": ops})
    ops[0]["flagged"] = True
    assert "More than 102% of its roof: an error" in render_page({**report, "ops": ops})


def test_names_cannot_break_out(report: dict[str, Any]) -> None:
    page = without_plotly(render_page(hostile(report)))
    assert "<script>alert" not in page
    assert "<b>&" not in page


def test_the_figures_are_in_the_text_without_scripts(report: dict[str, Any]) -> None:
    page = without_plotly(render_page(report))
    for op in report["ops"]:
        assert op["name"] in page
    for label in ("fusion headroom", "kernel gap", "launch gap", "Operators", "This machine"):
        assert label in page


def test_the_page_is_the_same_each_time(report: dict[str, Any]) -> None:
    assert render_page(report) == render_page(report)


def test_what_is_not_there_has_no_section(report: dict[str, Any]) -> None:
    page = without_plotly(render_page(report))
    assert "Ranks</h2>" not in page
    assert "Compilation</h2>" not in page


def test_ranks_are_in_the_text(report: dict[str, Any]) -> None:
    page = without_plotly(render_page(with_ranks(report)))
    ranks = compared(ROWS)
    assert ranks.straggler == 1
    assert ranks.sentence in page
    assert page.count("straggler</em>") == 1
    assert "training, 3 ranks" in page
    late = re.search(r'<tr class="late">(.*?)</tr>', page, flags=re.S)
    assert late is not None
    figures = re.findall(r'data-label="(\w+)">([^<]+)<', late[1])
    assert figures == [
        *(("wall", "50 ms"), ("own", "46 ms"), ("exposed", "4 ms"), ("waited", "0 µs"), ("collectives", "8 ms")),
    ]


def test_a_compiler_speaks_briefly_unless_asked(report: dict[str, Any]) -> None:
    page = without_plotly(render_page(compiled(report)))
    shown = re.sub(r"<details>.*?</details>", "", page, flags=re.S)
    assert "0/0: n == 3" in shown
    assert "HINT" not in shown
    assert "HINT: mark it dynamic" in page
    assert "<b>12.2 s</b>" in page
    assert "Tensor.item()" in shown


def test_a_prediction_pretends_no_measurement(prediction: dict[str, Any]) -> None:
    page = without_plotly(render_page(prediction))
    text = re.sub(r"<(style|script).*?</\1>", "", page, flags=re.S)
    for word in ("of roof", "measured</button>", "kernel gap", "achieved", "busy", "wall time"):
        assert word not in text, word
    assert "<b>≥ " in text
    assert "predicted" in text
    assert "aten::addmm" in text


def test_a_large_report_stays_small(report: dict[str, Any]) -> None:
    assert len(render_page(large(report, 5000)).encode()) < 10_000_000


# ---- in headless Chromium ----------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")


class Page:
    """A report opened in a browser, with all its messages and requests.

    All reports are opened in one tab from one file, so that the browser does not compile the same scripts again, which
    would take longer than everything else.
    """

    def __init__(self, tab: Any, path: Path, report: dict[str, Any], width: int, scheme: str) -> None:
        path.write_text(render_page(report), encoding="utf-8")
        self.said: list[str] = []
        self.page = tab
        self.heard = {
            "console": lambda message: self.said.append(message.text),
            "pageerror": lambda error: self.said.append(str(error)),
            "request": lambda request: self._requested(request.url),
        }
        for event, hear in self.heard.items():
            self.page.on(event, hear)
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelector('#modules .slice, #modules svg') !== null")

    def close(self) -> None:
        for event, hear in self.heard.items():
            self.page.remove_listener(event, hear)
        self.page.goto("about:blank")  # stops the scripts of the opened page

    def _requested(self, url: str) -> None:
        if not url.startswith(("data:", "file:", "blob:")):
            self.said.append(f"request: {url}")


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def tab(chromium: Any) -> Any:
    return chromium.new_page()


Open = Callable[..., Page]


@pytest.fixture
def opened(tab: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Open a report in a window of this width and in a colour scheme."""
    path, pages = tmp_path_factory.getbasetemp() / "report.html", []

    def open_(report: dict[str, Any], width: int = 1280, scheme: str = "light") -> Page:
        pages.append(Page(tab, path, report, width, scheme))
        return pages[-1]

    yield open_
    for page in pages:
        page.close()


@pytest.mark.browser
@needs_chromium
# Some report is shown in each scheme at each width.
@pytest.mark.parametrize(
    ("change", "scheme", "width"),
    [
        (dict, "light", 1280),
        (empty, "dark", 390),
        (with_ranks, "dark", 390),
        (hostile, "light", 390),
        (compiled, "dark", 1280),
    ],
)
def test_it_opens_without_a_word(change: Any, scheme: str, width: int, opened: Open, report: dict[str, Any]) -> None:
    found = opened(change(report), width, scheme)
    assert found.said == []
    assert found.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert found.page.evaluate("document.documentElement.dataset.theme") == scheme
    points = found.page.evaluate("document.querySelectorAll('#roofline .points path').length")
    assert points == sum(op["flops"] > 0 for op in change(report)["ops"])


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_a_prediction_opens_without_a_word(width: int, scheme: str, opened: Open, prediction: dict[str, Any]) -> None:
    found = opened(prediction, width, scheme)
    assert found.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    headings = "[...document.querySelectorAll('#operators th')].map(h => h.textContent)"
    assert found.page.evaluate(headings) == ["operator", "phase", "shapes", "dtype", "calls", "share", "roof", "bound"]
    found.page.click("#operators th:nth-child(7) button")  # the order changes from falling to rising
    roofs = found.page.evaluate(
        "[...document.querySelectorAll('#operators td:nth-child(7)')].map(c => +c.dataset.value)"
    )
    assert roofs == sorted(roofs)
    hovers = found.page.evaluate("[...document.getElementById('roofline').data].at(-1).text")
    assert hovers
    assert not any("of roof" in hover for hover in hovers)
    assert found.said == []


@pytest.mark.browser
@needs_chromium
def test_bars_of_the_ranks_are_to_scale(opened: Open, report: dict[str, Any]) -> None:
    page = opened(with_ranks(report)).page
    bars = (
        "[...document.querySelectorAll('#ranks .bar .stack')].map(bar => "
        "[...bar.children].map(part => part.getBoundingClientRect().width / bar.getBoundingClientRect().width))"
    )
    assert len(RANK_PARTS) == 3
    expected = [[30 / 50, 4 / 50, 16 / 50], [46 / 50, 4 / 50, 0], [30 / 50, 4 / 50, 14 / 50]]
    colours = "[...document.querySelectorAll('#ranks .parts i')].map(i => getComputedStyle(i).background)"
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("window.innerWidth") == width
        assert page.evaluate(bars) == [pytest.approx(row, abs=0.01) for row in expected]
        assert len(set(page.evaluate(colours))) == 3


@pytest.mark.browser
@needs_chromium
def test_labels_of_modules_stand_out_from_their_colours(opened: Open, report: dict[str, Any]) -> None:
    page = opened(report).page
    luminance = "c => (([r, g, b]) => 0.299 * r + 0.587 * g + 0.114 * b)(c.match(/\\d+/g).map(Number))"
    contrasts = page.evaluate(
        f"(() => {{ const l = {luminance}; return [...document.querySelectorAll('#modules .slice')]"
        ".filter(s => s.querySelector('text')?.textContent).map(s => Math.abs("
        "l(getComputedStyle(s.querySelector('path')).fill) - l(getComputedStyle(s.querySelector('text')).fill))) })()"
    )
    assert len(contrasts) > 3
    assert min(contrasts) > 90


@pytest.mark.browser
@needs_chromium
def test_in_a_notebook_it_stays_in_its_frame(chromium: Any, report: dict[str, Any], tmp_path: Path) -> None:
    shown = Report.from_dict(hostile(report))._repr_html_()
    assert len(shown) < 7_000_000
    notebook = tmp_path / "notebook.html"
    notebook.write_text(
        f"<!doctype html><meta charset='utf-8'><title>mine</title><main>{shown}</main>", encoding="utf-8"
    )
    page, said = chromium.new_page(viewport={"width": 900, "height": 900}), []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("dialog", lambda dialog: said.append(dialog.message))
    page.goto(notebook.as_uri())
    frame = page.frame_locator("iframe").locator("#modules .slice").first
    frame.wait_for(state="attached")
    assert page.evaluate("document.querySelectorAll('main > *').length") == 1
    box = page.locator("iframe").bounding_box()
    assert box is not None
    assert box["width"] < 900 < box["width"] + 40
    assert 500 < box["height"] < 900
    (inside,) = [f for f in page.frames if f != page.main_frame]
    assert inside.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert inside.evaluate("(() => { try { return parent.document.title } catch { return null } })()") is None
    assert said == []
    page.context.close()


@pytest.mark.browser
@needs_chromium
def test_long_names_leave_the_figures_on_the_page(opened: Open, report: dict[str, Any]) -> None:
    """Names of kernels that a compiler made, with and without places at which a browser breaks words."""
    names = ["inductor::fused_" + "_".join(["native_layer_norm_backward"] * 12), "x" * 400, "my ops::" + "word " * 60]
    ops = [{**op, "name": names[i % 3]} for i, op in enumerate(report["ops"])]
    page = opened({**report, "ops": ops}).page
    scroll = "document.querySelector('.scroll:has(#operators)')"
    for width in (1280, 1101, 768, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(f"window.innerWidth === {width} && document.documentElement.scrollWidth <= {width}")
        outside = page.evaluate(
            "[...document.querySelectorAll('#operators td')].filter(cell => { const box = cell.getBoundingClientRect();"
            " return box.width && (box.left < 0 || box.right > window.innerWidth + 0.5); })"
            ".map(cell => cell.textContent)"
        )
        assert outside == []
        assert page.evaluate(f"{scroll}.scrollWidth - {scroll}.clientWidth") <= 1


@pytest.mark.browser
@needs_chromium
def test_lines_of_the_roofline_are_told_apart_without_colour(opened: Open, report: dict[str, Any]) -> None:
    levels = [
        {"name": name, "rate": rate, "bytes": 1 << 20} for name, rate in (("L1", 4e12), ("L2", 2e12), ("DRAM", 1e12))
    ]
    ceilings = {**report["ceilings"], "levels": [{**report["ceilings"]["levels"][0], **level} for level in levels]}
    page = opened({**report, "ceilings": ceilings}).page
    lines = page.evaluate(
        "document.getElementById('roofline').data.filter(t => t.mode === 'lines').map(t => [t.name, t.line.dash])"
    )
    assert len(lines) > 3
    assert len({dash for _, dash in lines}) == len(lines)
    texts = page.evaluate("[...document.querySelectorAll('#roofline .annotation-text')].map(t => t.textContent)")
    assert sorted(texts) == sorted(name.split()[0] for name, _ in lines)


@pytest.mark.browser
@needs_chromium
def test_the_table_sorts_and_filters(opened: Open, report: dict[str, Any]) -> None:
    page = opened(report).page
    values = "[...document.querySelectorAll('#operators tbody tr')].map(r => Number(r.cells[7].dataset.value))"
    page.click("#operators th:nth-child(8) button")
    falling = page.evaluate(values)
    assert falling == sorted(falling, reverse=True)
    page.click("#operators th:nth-child(8) button")
    assert page.evaluate(values) == sorted(falling)
    assert len(set(falling)) > 3
    page.fill("#filter", "convolution_backward")
    shown = "[...document.querySelectorAll('#operators tbody tr:not([hidden])')].map(r => r.cells[0].textContent)"
    assert set(page.evaluate(shown)) == {"aten::convolution_backward"}
    page.fill("#filter", "")
    page.select_option("#phase", "forward")
    assert len(page.evaluate(shown)) == sum(op["phase"] == "forward" for op in report["ops"])
    page.fill("#filter", "4x3x16x16")  # shapes as users type them
    assert page.evaluate(shown) == ["aten::convolution"]


@pytest.mark.browser
@needs_chromium
def test_the_theme_switches_and_the_page_prints(opened: Open, report: dict[str, Any]) -> None:
    found = opened(report)
    found.page.click("#theme")
    assert found.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert found.page.pdf().startswith(b"%PDF")
    assert found.said == []


@pytest.mark.browser
@needs_chromium
def test_two_thousand_operators_open(opened: Open, report: dict[str, Any]) -> None:
    found = opened(large(report, 2000))
    found.page.fill("#filter", "relu")
    assert found.said == []


def test_the_json_form_alone_is_enough(report: dict[str, Any]) -> None:
    assert render_page(Report.from_dict(report).to_dict()) == render_page(report)
