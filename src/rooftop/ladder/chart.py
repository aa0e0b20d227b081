"""Draw a chart of measured ladders, with each rung's percent of the roof, on one HTML page that needs no network."""

from __future__ import annotations

import html
from collections.abc import Sequence

from rooftop.analysis.formats import time_text
from rooftop.errors import MissingExtraError
from rooftop.ladder.climbing import Climb
from rooftop.ladder.rungs import CPU, CUDA, PYTORCH, TRITON

COLOURS = {CPU: "#9a9a9a", CUDA: "#76a92c", TRITON: "#4c9fd6", PYTORCH: "#e0703a"}


def require_plotly(option: str = "--chart") -> None:
    """Check, before the work begins, that plotly is installed for the chart that an option requests.

    Raises:
        MissingExtraError: plotly is not installed.
    """
    try:
        import plotly.graph_objects  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            f'the chart needs plotly: pip install "rooftop[report]" (or leave {option} out)'
        ) from error


def page(climbs: Sequence[Climb]) -> str:
    """The HTML page with a chart for each climbed ladder. Rungs without a time are left out, so a ladder without timed
    rungs has an empty chart."""
    charts = "".join(_chart(climb, first=place == 0) for place, climb in enumerate(climbs))
    return framed("The ladder", charts)


def framed(
    heading: str, charts: str, above: Sequence[str] = (), below: Sequence[str] = (), *, title: str | None = None
) -> str:
    """An HTML page around charts, with paragraphs above and below. By default the heading is also the page's title."""
    before, after = ("".join(f"<p>{html.escape(text)}</p>\n" for text in texts) for texts in (above, below))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{html.escape(title or heading)}</title>
<style>body {{ max-width: 1100px; margin: 0 auto; padding: 24px 20px; font: 16px/1.5 system-ui, sans-serif; }}</style>
</head>
<body>
<h1>{html.escape(heading)}</h1>
{before}{charts}
{after}</body>
</html>
"""


def _chart(climb: Climb, first: bool) -> str:
    """The HTML of one ladder: its heading, a bar for each timed rung, coloured by tool, with the first rung on top, and
    the remarks."""
    from plotly import graph_objects

    measured = [rung for rung in climb.rungs if rung.percent_of_roof is not None]
    names = list(dict.fromkeys(rung.name for rung in measured))
    figure = graph_objects.Figure()
    for tool in dict.fromkeys(rung.tool for rung in measured):
        rungs = [rung for rung in measured if rung.tool == tool]
        figure.add_bar(
            y=[rung.name for rung in rungs],
            x=[rung.percent_of_roof for rung in rungs],
            text=[f"{rung.percent_of_roof:.3g}% ({time_text(rung.ms or 0.0)})" for rung in rungs],
            name=tool,
            orientation="h",
            marker_color=COLOURS.get(tool, "#888888"),
        )
    figure.add_vline(100, line_dash="dot")
    figure.update_xaxes(title="percent of roof")
    figure.update_yaxes(categoryorder="array", categoryarray=names[::-1], automargin=True)
    figure.update_layout(template="plotly_white", height=160 + 44 * len(names), legend={"orientation": "h", "y": 1.1})
    chart = figure.to_html(full_html=False, include_plotlyjs=first, div_id=f"ladder-{climb.ladder}")
    remarks = "".join(f"<p>{html.escape(remark)}</p>\n" for remark in climb.remarks)
    title, work = html.escape(climb.ladder), html.escape(f"{climb.work}, {climb.device}")
    return f"<h2>{title}</h2>\n<p>{work}</p>\n{chart}\n{remarks}"
