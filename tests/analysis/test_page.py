"""The report's page: self-contained, safe, and working in a real browser."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rooftop
from rooftop.analysis.page import render_page
from rooftop.analysis.report import Report
from rooftop.hardware.ceilings import Ceilings

HOSTILE = "</script><script>alert(1)</script><b>&\"'"


@pytest.fixture(scope="module")
def report(round_ceilings: Ceilings) -> dict[str, Any]:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 14 * 14, 10))
    return rooftop.analyze(net, torch.randn(4, 3, 16, 16), train=True, ceilings=round_ceilings).to_dict()


def hostile(report: dict[str, Any]) -> dict[str, Any]:
    ops = [{**op, "name": HOSTILE, "modules": [HOSTILE]} for op in report["ops"]]
    child = {**report["modules"], "name": HOSTILE, "type": HOSTILE, "children": []}
    modules = {**report["modules"], "children": [*report["modules"]["children"], child]}
    return {**report, "target": HOSTILE, "notes": [HOSTILE], "ops": ops, "modules": modules}


def empty(report: dict[str, Any]) -> dict[str, Any]:
    modules = {**report["modules"], "children": [], "percent_of_roof": None}
    memory = {"peak_bytes": 0, "timeline": []}
    return {**report, "ops": [], "modules": modules, "advice": [], "memory": memory, "notes": [], "uncovered": []}


def large(report: dict[str, Any]) -> dict[str, Any]:
    ops = [{**report["ops"][i % len(report["ops"])], "calls": i} for i in range(5000)]
    return {**report, "ops": ops}


def without_plotly(page: str) -> str:
    """The page less the embedded library."""
    return re.sub(r"<script>/\*\*.*?</script>", "", page, flags=re.S)


def test_nothing_is_fetched_from_anywhere(report: dict[str, Any]) -> None:
    page = without_plotly(render_page(report))
    assert len(page) < 400_000
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!data:)", page)
    assert "@import" not in page
    assert "http://" not in page
    assert "https://" not in page


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


def test_a_large_report_stays_small(report: dict[str, Any]) -> None:
    assert len(render_page(large(report)).encode()) < 10_000_000


# ---- in headless Chromium ----------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]
FLAGS += ["--disable-sync", "--no-first-run"]
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium or google-chrome")


class Page:
    """A report opened in a browser, with everything that it said or asked for."""

    def __init__(self, browser: Any, folder: Path, report: dict[str, Any], width: int, scheme: str) -> None:
        path = folder / "report.html"
        path.write_text(render_page(report), encoding="utf-8")
        self.said: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda request: self._requested(request.url))
        self.page.goto(path.as_uri())
        self.page.wait_for_function("document.querySelector('#modules .slice, #modules svg') !== null")

    def _requested(self, url: str) -> None:
        if not url.startswith(("data:", "file:", "blob:")):
            self.said.append(f"request: {url}")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.mark.browser
@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("change", [dict, hostile, empty])
def test_it_opens_without_a_word(
    change: Any, scheme: str, width: int, browser: Any, report: dict[str, Any], tmp_path: Path
) -> None:
    opened = Page(browser, tmp_path, change(report), width, scheme)
    assert opened.said == []
    assert opened.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    assert opened.page.evaluate("document.documentElement.dataset.theme") == scheme
    points = opened.page.evaluate("document.querySelectorAll('#roofline .points path').length")
    assert points == sum(op["flops"] > 0 for op in change(report)["ops"])


@pytest.mark.browser
@needs_chromium
def test_the_table_sorts_and_filters(browser: Any, report: dict[str, Any], tmp_path: Path) -> None:
    page = Page(browser, tmp_path, report, 1280, "light").page
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
    page.fill("#filter", "4x3x16x16")  # shapes as people type them
    assert page.evaluate(shown) == ["aten::convolution"]


@pytest.mark.browser
@needs_chromium
def test_the_theme_switches_and_the_page_prints(browser: Any, report: dict[str, Any], tmp_path: Path) -> None:
    opened = Page(browser, tmp_path, report, 1280, "light")
    opened.page.click("#theme")
    assert opened.page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert opened.page.pdf().startswith(b"%PDF")
    assert opened.said == []


@pytest.mark.browser
@needs_chromium
def test_five_thousand_operators_open(browser: Any, report: dict[str, Any], tmp_path: Path) -> None:
    opened = Page(browser, tmp_path, large(report), 1280, "light")
    opened.page.fill("#filter", "relu")
    assert opened.said == []


def test_the_json_form_alone_is_enough(report: dict[str, Any]) -> None:
    assert render_page(Report.from_dict(report).to_dict()) == render_page(report)
