"""Show a training as one self-contained HTML page, which is written after each evaluation.

The page is in the folder of the run. While the training runs, the page reloads itself in a browser every few seconds.
Each version replaces the previous version atomically, so a reader never sees a partial page.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from rooftop.analysis.formats import percent_text, quantity_text, time_text
from rooftop.analysis.page import require_plotly
from rooftop.errors import MissingExtraError
from rooftop.train.fitting.records import EvaluationRecord, Facts, Fitted, StepRecord
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.reports.charts import curves
from rooftop.train.reports.histories import History, pace_of
from rooftop.train.reports.pictures import embedded, example_pictures
from rooftop.train.reports.roofs import TaskRoof, task_roof
from rooftop.train.reports.terminal import number_text, seconds_text, value_text
from rooftop.whole_files import write_whole
from rooftop.words import counted

REFRESH_S = 10
"""Seconds after which a browser reloads the page of a running training."""


class Page:
    """An observer that writes the page.

    Args:
        path: path of the page.
        name: name of the training, for the title.
        recipe: recipe of the training.
        earlier: returns the steps and evaluations of an earlier run in the same folder, up to a given step.

    Raises:
        MissingExtraError: plotly is not installed.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        recipe: Recipe,
        earlier: Callable[[int], tuple[list[StepRecord], list[EvaluationRecord]]] = lambda step: ([], []),
    ) -> None:
        try:
            self._plotly = require_plotly()
        except MissingExtraError as error:
            raise MissingExtraError('the page needs plotly: pip install "rooftop[report]"') from error
        self.path, self.history = path, History(recipe.run.batch)
        self._name, self._recipe, self._earlier = name, recipe, earlier
        self._pictures: list[tuple[str, str]] = []
        self._roof: TaskRoof | str | None = None

    def began(self, facts: Facts, task: Any) -> None:
        self.history.began(facts, task)
        if facts.before:
            self.history.steps, self.history.evaluations = self._earlier(facts.before)
            self.history.earlier = len(self.history.steps)
        self.write()

    def stepped(self, records: list[StepRecord]) -> None:
        self.history.stepped(records)

    def evaluated(self, record: EvaluationRecord) -> None:
        self.history.evaluated(record)
        self.write()

    def noted(self, note: str) -> None:
        self.history.noted(note)

    def ended(self, fitted: Fitted, model: Any) -> None:
        self.history.ended(fitted, model)
        self._pictures = [(text, embedded(each)) for text, each in example_pictures(self.history.task, model)]
        assert self.history.facts is not None
        try:
            self._roof = task_roof(self.history.task, model, self._recipe, self.history.facts)
        except Exception as error:  # the task's code may fail on fake tensors; the page then shows the reason
            self._roof = str(error)
        self.write()

    def write(self) -> None:
        """Write the page atomically."""
        write_whole(self.path, self.text())

    def text(self) -> str:
        """The HTML text of the current page."""
        history = self.history
        charts = curves(history)
        names = list(dict.fromkeys(name for record in history.evaluations for name in record.values))
        return page_of(
            "template.html.j2",
            self._plotly,
            charts,
            title=self._name,
            state=_state(history),
            refresh_s=None if history.fitted is not None else REFRESH_S,
            subtitle=_subtitle(history),
            figures=self._figures(),
            spans=_span_rows(history),
            notes=[*self._remarks(), *history.notes],
            pictures=self._pictures,
            names=names,
            evaluations=[_row(record, names) for record in reversed(history.evaluations)],
            recipe=recipe_rows(self._recipe),
            toml=self._recipe.toml(),
        )

    def _figures(self) -> list[tuple[str, str]]:
        """The numbers in large type on the page, as (number, caption): best metric, samples per second, share of the
        steps' time spent waiting for data, percentage of the fused roof of a step (see `TaskRoof`), peak memory of
        rank 0."""
        history, figures = self.history, list[tuple[str, str]]()
        best, task = history.best(), history.task
        if best is not None and task is not None and task.best in best.values:
            what = "validation loss" if task.best == "loss" else task.best
            figures.append((value_text(best.values[task.best]), f"best {what}, epoch {number_text(best.epoch)}"))
        pace = pace_of(history.steps[history.earlier :])
        if pace is not None:
            unit = task.unit if task is not None else "samples"
            figures.append((f"{pace.samples_per_s:,.0f}", f"{unit} per second"))
            figures.append((percent_text(100 * pace.waiting), "of the steps' time spent waiting for data"))
            if isinstance(self._roof, TaskRoof) and pace.samples_per_s > 0 and history.facts is not None:
                busy = pace.samples_per_s / history.facts.ranks / max(1e-9, 1 - pace.waiting)
                figures.append((percent_text(self._roof.percent(busy)), "of the roof of a step, without waiting"))
        if history.peak_bytes:
            figures.append((f"{quantity_text(history.peak_bytes)}B", "peak memory of rank 0"))
        return figures

    def _remarks(self) -> list[str]:
        if isinstance(self._roof, TaskRoof):
            roof = self._roof
            return [
                f"Roof of a step: {time_text(roof.fused_ms)} with everything fused, {time_text(roof.op_ms)} with every "
                f"operator at its own roof, for {counted(roof.samples, 'sample')} and "
                f"{quantity_text(roof.flops)}FLOP on one rank."
            ]
        return [f"No roof of a step: {self._roof}"] if self._roof else []


def page_of(template: str, plotly: str, charts: list[dict[str, Any]], **values: Any) -> str:
    """Render the page of a training from its template, with all data inside."""
    files = resources.files("rooftop.train.reports") / "page_files"
    shared = resources.files("rooftop.analysis") / "page_files" / "page.css"
    style = shared.read_text(encoding="utf-8") + (files / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    data = json.dumps(charts, allow_nan=False, separators=(",", ":"))
    # escaped, so that the JSON cannot close its <script> element
    for character, escaped in (("&", "\\u0026"), ("<", "\\u003c"), (">", "\\u003e")):
        data = data.replace(character, escaped)
    return environment.from_string((files / template).read_text(encoding="utf-8")).render(
        charts=charts,
        style=Markup(style),
        script=Markup((files / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(plotly.replace("</script", "<\\/script")),
        data=Markup(data),
        **values,
    )


def recipe_rows(recipe: Recipe) -> dict[str, list[tuple[str, str, bool]]]:
    """List the switches by section: name, value, and whether the value differs from the default."""
    default = Recipe().plain()
    return {
        section: [(name, json.dumps(value), value != default[section][name]) for name, value in values.items()]
        for section, values in recipe.plain().items()
    }


def _state(history: History) -> str:
    if history.fitted is not None:
        return "done" if history.fitted.reason == "done" else history.fitted.reason
    if history.facts is None or not history.steps:
        return "beginning"
    return f"running, step {history.steps[-1].step:,} of {history.facts.steps:,}"


def _subtitle(history: History) -> str:
    facts = history.facts
    if facts is None:
        return ""
    unit = history.task.unit
    words = [
        f"{facts.parameters:,} parameters"
        + (f", {facts.trained:,} trained" if facts.trained != facts.parameters else ""),
        f"{facts.samples:,} {unit}, {facts.held_out:,} held out",
        f"{counted(facts.steps, 'step')} of {history.batch:,}",
        f"{facts.ranks} x {facts.device}",
    ]
    return " · ".join([*words, *([facts.loading] if facts.loading else [])])


def _span_rows(history: History) -> list[Mapping[str, Any]]:
    spans = history.spans()
    if not history.steps[history.earlier :] or spans.all <= 0:
        return []
    parts = (
        ("steps", spans.steps, "forward, backward and the optimizer"),
        (
            "waiting for data",
            spans.waiting,
            "more workers, smaller pictures on disk or less augmentation shorten this wait",
        ),
        ("the rest", spans.rest, "evaluation, saving, and the time before the first step"),
    )
    return [
        {"label": label, "share": value / spans.all, "time": seconds_text(value), "meaning": meaning}
        for label, value, meaning in parts
    ]


def _row(record: EvaluationRecord, names: list[str]) -> Mapping[str, Any]:
    shown = [value_text(record.values[name]) if name in record.values else "" for name in names]
    return {"epoch": number_text(record.epoch), "step": f"{record.step:,}", "shown": shown, "best": record.best}
