"""The page of a training: self-contained, safe, and written whole after each evaluation."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from rooftop.errors import MissingExtraError
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.charts import MOST_POINTS, thinned
from rooftop.train.reports.page import Page
from rooftop.train.reports.pictures import embedded, example_pictures
from rooftop.train.reports.shields import Shielded

RECIPE = Recipe.of({"run": {"epochs": 3, "batch": 20}, "mix": {"mixup": 0.2}})


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Page:
    """A page with a short script in plotly's place."""
    monkeypatch.setattr("rooftop.train.reports.page.require_plotly", lambda: "/* plotly </script> */")
    return Page(tmp_path / "page.html", "resnet", RECIPE)


def charts_of(text: str) -> dict[str, Any]:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None
    return {chart["id"]: chart for chart in json.loads(data[1])}


def test_it_is_there_from_the_beginning_and_changes_with_each_evaluation(page: Page, scripted: SimpleNamespace) -> None:
    task, texts = scripted.task(), []
    page.began(scripted.facts(task, RECIPE), task)
    texts.append(page.path.read_text())
    page.stepped([scripted.step(step, 20) for step in range(1, 11)])
    assert page.path.read_text() == texts[0]
    page.evaluated(scripted.evaluation(1))
    texts.append(page.path.read_text())
    assert "beginning" in texts[0]
    assert "running, step 10 of 30" in texts[1]
    assert all('http-equiv="refresh"' in text for text in texts)
    assert [path.name for path in page.path.parent.iterdir()] == ["page.html"]


def test_it_has_curves_of_loss_metrics_rate_and_speed(page: Page, scripted: SimpleNamespace) -> None:
    scripted.fit(scripted.task(), RECIPE, [page])
    charts = charts_of(page.path.read_text())
    assert list(charts) == [
        *("chart-loss", "chart-metric0", "chart-learning-rate", "chart-grad-norm", "chart-samples-per-s"),
        "chart-waiting",
    ]
    training, validation = charts["chart-loss"]["series"]
    assert (len(training["x"]), training["y"][0]) == (30, 2.0)
    assert (validation["x"], validation["y"]) == ([1.0, 2.0, 3.0], [1.0, 0.5, pytest.approx(1 / 3, abs=1e-5)])
    assert charts["chart-metric0"]["title"] == "accuracy"


def test_at_the_end_it_stands_still_and_has_examples_recipe_and_times(
    page: Page, scripted: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path / "cache"))  # another test may have measured this machine
    scripted.fit(scripted.task(), RECIPE, [page])
    text = page.path.read_text()
    assert 'http-equiv="refresh"' not in text
    assert "a &lt;square&gt; &amp; its class" in text
    assert "data:image/png;base64," in text
    assert re.search(r'class="changed"><th scope="row">mixup</th><td>0.2</td>', text)
    assert re.search(r"waiting for data <b>3.8 s</b> <span class=\"muted\">20%", text)
    assert "No roof of a step: the ceilings of this machine are not measured yet" in text


def test_nothing_in_it_asks_for_the_network_or_ends_a_script(page: Page, scripted: SimpleNamespace) -> None:
    task = scripted.task()
    scripted.fit(task, RECIPE, [page], values={"loss": 1.0, "accuracy": 0.5, "</script><b>": 0.1})
    text = page.path.read_text()
    assert not re.findall(r'(?:src|href)="(?!data:)', text)
    assert text.count("</script>") == 3
    assert "<b>: " not in text


def test_a_loss_that_is_not_finite_is_left_out_of_the_curve(page: Page, scripted: SimpleNamespace) -> None:
    scripted.fit(scripted.task(), RECIPE, [page], values={"loss": float("nan"), "accuracy": 0.5})
    assert [each["name"] for each in charts_of(page.path.read_text())["chart-loss"]["series"]] == ["training"]


def test_a_resumed_run_shows_what_came_before(tmp_path: Path, page: Page, scripted: SimpleNamespace) -> None:
    asked = []

    def earlier(step: int) -> tuple[list[Any], list[Any]]:
        asked.append(step)
        return [scripted.step(number, 20) for number in range(1, step + 1)], [scripted.evaluation(1)]

    resumed = Page(tmp_path / "page.html", "resnet", RECIPE, earlier)
    scripted.fit(scripted.task(), RECIPE, [resumed], before=10)
    training, validation = charts_of(resumed.path.read_text())["chart-loss"]["series"]
    assert asked == [10]
    assert len(training["x"]) == 30
    assert validation["x"] == [1.0, 2.0, 3.0]
    assert resumed.history.spans().steps == pytest.approx(20 * scripted.step_s * 0.75)  # the resumed run's steps


def test_without_plotly_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingExtraError, match=r'the page needs plotly: pip install "rooftop\[report\]"'):
        Page(tmp_path / "page.html", "resnet", RECIPE)


def test_long_curves_keep_their_mean() -> None:
    points = [(float(step), float(step % 7)) for step in range(1, 2501)]
    short = thinned(points)
    assert len(short) <= MOST_POINTS
    assert short[0] == (3.0, 2.0)
    assert short[-1][0] == 2500.0
    assert thinned(points[:10]) == points[:10]


def test_small_pictures_are_enlarged_and_large_ones_made_small() -> None:
    import base64
    import io

    def size_of(side: int) -> tuple[int, int]:
        address = embedded(Image.new("RGB", (side, side // 2)))
        return Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).size

    assert size_of(8) == (96, 48)
    assert size_of(200) == (200, 100)
    assert size_of(2000) == (480, 240)


def test_examples_leave_the_random_state_alone(scripted: SimpleNamespace) -> None:
    task = scripted.task()
    task.examples = lambda model, device: [(str(torch.rand(1).item()), Image.new("RGB", (8, 8)))]
    before = torch.get_rng_state()
    assert len(example_pictures(task, task.model)) == 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_report_that_fails_is_told_of_once_and_the_training_goes_on(page: Page, scripted: SimpleNamespace) -> None:
    lines: list[str] = []
    page.path.mkdir()  # a folder, to which no file can be renamed
    (page.path / "full").touch()
    fitted = scripted.fit(scripted.task(), RECIPE, [Shielded(page, "the page", lines.append)])
    assert fitted.reason == "done"
    assert len(lines) == 1
    assert lines[0].startswith("note: the page ends here, and the training continues:")


# ---- the roof --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_roof_of_a_step_counts_its_flops(
    scripted: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    from rooftop.hardware import ceilings_of
    from rooftop.hardware.histories import history_of
    from rooftop.train.reports import roofs

    task, ceilings = scripted.task(), ceilings_of("h200")
    monkeypatch.setattr(roofs, "ceilings_history", lambda device: history_of(ceilings))
    recipe = RECIPE.updated({"run": {"precision": precision, "accumulate": 2}, "optimizer": {"name": "adamw"}})
    before = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    found = roofs.task_roof(task, task.model, recipe, scripted.facts(task, recipe))
    assert found.samples == 20
    assert found.flops >= 20 * 2 * 6 * 3 * 2  # forward, and the gradient of the weights
    assert 0 < found.fused_ms <= found.op_ms
    assert found.percent(2 * 20 / (found.fused_ms / 1e3)) == pytest.approx(200)
    assert all(torch.equal(tensor, before[name]) for name, tensor in task.model.state_dict().items())
    assert not task.model.training
