"""Show an ablation as a table in the terminal and as an HTML page."""

from __future__ import annotations

import json
import math
from typing import Any

from rich.table import Table

from rooftop.train.reports.ablations import Ablation, Worth, deviation_of, mean_of
from rooftop.train.reports.page import REFRESH_S, page_of, recipe_rows
from rooftop.train.reports.terminal import decimals_of


def ablation_heading(ablation: Ablation) -> str:
    """The heading of an ablation: the compared metric, and the result of the whole recipe."""
    better = "more" if ablation.maximize else "less"
    values = list(ablation.values.values())
    decimals = decimals_of(max(map(abs, values), default=1.0))
    spread = f" ± {deviation_of(values):.{decimals}f} (standard deviation)" if len(values) > 1 else ""
    reached = f"; the whole recipe reaches {mean_of(values):.{decimals}f}{spread}" if values else ""
    return f"{ablation.metric} of the last evaluation, {better} is better{reached}"


def ablation_table(ablation: Ablation) -> Table:
    """Format a table with a row for each switch. A positive worth means that the switch helps on average over the
    seeds; the last column says whether the worth is within noise."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, justify in zip(HEADINGS, ("left", "left", "right", "right", "right", "right", "left"), strict=True):
        table.add_column(name, justify=justify, no_wrap=justify == "right")  # type: ignore[arg-type]
    for worth in ablation.worths:
        table.add_row(*row_of(worth))
    return table


HEADINGS = ("switch", "on (off)", "with", "without", "worth", "std. error", "")


def row_of(worth: Worth) -> tuple[str, ...]:
    """The table row of a switch, in the order of HEADINGS. All numbers of a row have the same number of decimals."""
    decimals = decimals_of(max(map(abs, (*worth.with_it, *worth.without_it))))
    return (
        worth.switch.name,
        f"{json.dumps(worth.switch.on)} ({json.dumps(worth.switch.off)})",
        f"{mean_of(worth.with_it):.{decimals}f}",
        f"{mean_of(worth.without_it):.{decimals}f}",
        f"{worth.mean:+.{decimals}f}",
        "unknown" if worth.error is None else f"{worth.error:.{decimals}f}",
        worth.verdict,
    )


def ablation_page(ablation: Ablation, name: str, plotly: str) -> str:
    """Render the page of an ablation: worths with their 95% intervals, the table, and the recipe."""
    return page_of(
        "ablation.html.j2",
        plotly,
        [_chart(ablation)] if ablation.worths else [],
        title=f"{name}: what each switch is worth",
        state=f"{ablation.finished} of {ablation.runs} runs",
        refresh_s=REFRESH_S if ablation.finished < ablation.runs else None,
        subtitle=ablation_heading(ablation),
        headings=HEADINGS,
        rows=[(row_of(worth), worth.verdict not in ("helps", "hurts")) for worth in ablation.worths],
        recipe=recipe_rows(ablation.recipe),
        toml=ablation.recipe.toml(),
    )


def _chart(ablation: Ablation) -> dict[str, Any]:
    worths = [worth for worth in ablation.worths if math.isfinite(worth.mean)]
    each = [(worth, value) for worth in worths for value in worth.differences]
    means = {
        "name": "mean with its 95% interval",
        "x": [worth.mean for worth in worths],
        "y": [worth.switch.name for worth in worths],
        "error": [worth.interval or 0.0 for worth in worths],
        "mode": "markers",
        "colour": 0,
    }
    single = {
        "name": "of one seed",
        "x": [value for _, value in each],
        "y": [worth.switch.name for worth, _ in each],
        "mode": "markers",
        "colour": 1,
    }
    return {
        "id": "chart-worth",
        "title": "worth",
        "across": f"worth in {ablation.metric}: right of 0 the switch helps",
        "series": [single, means],
        "sideways": True,
    }
