"""The report as one self-contained HTML page: no network, no other file.

The template contains all text, so the page can be read without JavaScript. plotly draws the charts from JSON data in
the page; plotly's script is in the page too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from rooftop.analysis.formats import percent_interval_text, percent_text, quantity_text, short_reason, time_text
from rooftop.analysis.report_contents import FLAGGED_PERCENT
from rooftop.errors import MissingExtraError

PARTS = (
    ("roof", "fused_roof_ms", "inputs, parameters and outputs moved once, all flops: nothing could be faster here"),
    ("fusion headroom", "fusion_headroom_ms", "intermediates that go through memory between operators: fuse them"),
    ("kernel gap", "kernel_gap_ms", "kernels slower than this machine allows: use faster kernels"),
    ("launch gap", "launch_gap_ms", "the device waits for the host: graphs, larger batches, fewer operators"),
)
PREDICTED_PARTS = (  # in a prediction, kernels run at their roofs and have no gap
    PARTS[0],
    PARTS[1],
    ("launch gap", "launch_gap_ms", "launched eagerly, the device would wait for the host: graphs, larger batches"),
)
ON_CPU = {"launch_gap_ms": "time between operators, in Python, PyTorch and the system: larger batches, fewer operators"}
"""Parts of the wall time with another meaning on a CPU than on a GPU, because no host launches a CPU's work."""
RANK_PARTS = (
    ("own", "what the rank needs by itself"),
    ("transfer", "exposed communication, without the time spent waiting: collectives while nothing else runs"),
    ("waited", "exposed communication in which the rank waits for a slower rank"),
)


def require_plotly() -> str:
    """The JavaScript source of plotly, for inclusion in a page.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise MissingExtraError(
            'the HTML report needs plotly: pip install "rooftop[report]" (or leave the report out: --no-html)'
        ) from error
    script: str = get_plotlyjs()
    return script


def render_page(report: Mapping[str, Any]) -> str:
    """Render the HTML page of a report, given in its JSON form (see `Report.to_dict`).

    Raises:
        MissingExtraError: plotly is not installed.
    """
    files = resources.files("rooftop.analysis") / "page_files"
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        ms=ms, quantity=quantity, shapes=shapes_text, short_reason=short_reason, percent=percent_text
    )
    template = environment.from_string((files / "template.html.j2").read_text(encoding="utf-8"))
    return template.render(
        report=report,
        interval=_interval(report["summary"]),
        parts=_parts(report),
        columns=[column for column in COLUMNS if not (report["predicted"] and column[0] in MEASURED_COLUMNS)],
        ranks=_rank_bars(report["ranks"]) if report["ranks"] else None,
        rank_parts=RANK_PARTS,
        flagged_percent=f"{FLAGGED_PERCENT:g}",
        total_ms=sum(op["measured_ms"] for op in report["ops"]) or 1.0,
        style=Markup((files / "page.css").read_text(encoding="utf-8")),
        script=Markup((files / "page.js").read_text(encoding="utf-8")),
        plotly=Markup(require_plotly().replace("</script", "<\\/script")),
        data=Markup(_embedded(report)),
    )


def _interval(summary: Mapping[str, Any]) -> str:
    """The interval of the percent of roof, if it is wide enough to matter."""
    low, high = summary["percent_interval"]
    text = percent_interval_text(summary["percent_of_roof"], low, high)
    return text.partition("(")[2].removesuffix(")")


COLUMNS = (  # columns of the operator table: (heading, whether its cells are numbers)
    *(("operator", False), ("phase", False), ("shapes", False), ("dtype", False), ("calls", True), ("measured", True)),
    *(("share", True), ("roof", True), ("% of roof", True), ("bound", False), ("gap", True)),
)
MEASURED_COLUMNS = ("measured", "% of roof", "gap")
"""Columns that a prediction lacks, because each of its operators takes its roof time."""


def _parts(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of the wall time: label, ms, share of the wall time, meaning, number of its colour."""
    values = {"fused_roof_ms": report["summary"]["fused_roof_ms"], **report["gaps"]}
    wall_ms = report["summary"]["wall_ms"]
    colours = {name: number for number, (_, name, _) in enumerate(PARTS, 1)}
    return [
        {
            "label": label,
            "ms": values[name],
            "share": max(0.0, values[name] / wall_ms),
            "meaning": ON_CPU.get(name, meaning) if report["device"]["kind"] == "cpu" else meaning,
            "colour": colours[name],
        }
        for label, name, meaning in (PREDICTED_PARTS if report["predicted"] else PARTS)
    ]


def _rank_bars(ranks: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Each rank's row with the parts of its bar (see `RANK_PARTS`) as shares of the longest step of any rank."""
    longest_ms = max(row["wall_ms"] for row in ranks["rows"]) or 1.0
    bars = []
    for row in ranks["rows"]:
        parts_ms = (row["own_ms"], row["exposed_ms"] - row["waited_ms"], row["waited_ms"])
        parts = [
            {"label": label, "ms": part_ms, "share": max(0.0, part_ms / longest_ms)}
            for (label, _), part_ms in zip(RANK_PARTS, parts_ms, strict=True)
        ]
        bars.append({**row, "parts": parts, "late": row["rank"] == ranks["straggler"]})
    return bars


def _embedded(report: Mapping[str, Any]) -> str:
    """JSON text that is safe inside a script element: it cannot contain the closing tag."""
    plain = {name: report[name] for name in ("ops", "modules", "ceilings", "memory", "predicted")}
    text = json.dumps(plain, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def ms(value: float) -> str:
    """ "12.3 ms", "45.6 µs", "1,234 ms"."""
    return time_text(value).replace(" us", " µs")


def quantity(value: float, unit: str = "") -> str:
    """ "65.4 GB": a quantity with a decimal prefix and its unit."""
    return quantity_text(value) + unit


SHAPES_SHOWN = 8
"""Largest number of shapes shown. An optimizer's operator on lists has a tensor for each parameter."""


def shapes_text(shapes: list[list[int]]) -> str:
    """ "8×3×224×224, 64×3×7×7"; for a long list, the first shapes and how many more there are."""
    more = f", {len(shapes) - SHAPES_SHOWN} more" if len(shapes) > SHAPES_SHOWN else ""
    return ", ".join("×".join(map(str, shape)) or "scalar" for shape in shapes[:SHAPES_SHOWN]) + more
