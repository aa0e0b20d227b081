"""Show a climb as a table in the terminal."""

from __future__ import annotations

from rich.markup import escape
from rich.table import Table

from rooftop.analysis.formats import percent_text, quantity_text, time_text
from rooftop.ladder.climbing import COMPILED, FAILED, MEASURED, WRONG, Climb, Outcome
from rooftop.ladder.rungs import CUDA

WITHOUT_GPU = (
    "No speeds are shown, because they need a GPU (--device cuda). Triton's interpreter ran the Triton kernels that "
    'are marked "right". CUDA C++ kernels were compiled for sm_90 but not run. A rung marked "-" was not tried.'
)
BAR = 20  # columns for 100%
STATUS = {COMPILED: "compiled, not run", "checked": "right", "absent": "-"}


def table(climb: Climb) -> Table:
    """A table with a row for each rung: its time, or if it was not timed, whether the result is right."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("rung", overflow="fold")
    shown.add_column("written in")
    if climb.roof_ms is None:
        shown.add_column("result")
    else:
        for name in ("time", climb.unit, "of roof"):
            shown.add_column(name, justify="right", no_wrap=True)
        shown.add_column("", no_wrap=True, min_width=BAR)
    shown.add_column("", overflow="fold", style="dim")
    for rung in climb.rungs:
        middle = [_status(rung)] if climb.roof_ms is None else _figures(rung)
        shown.add_row(escape(rung.name), rung.tool, *middle, escape(rung.note))
    return shown


def heading(climb: Climb) -> str:
    """The heading: the work, the device and the roof, with rich's markup."""
    text = f"[bold]{climb.ladder}[/bold]: {escape(climb.work)}, {escape(climb.device)}"
    if climb.roof_ms is None:
        return text
    return f"{text}, roof {time_text(climb.roof_ms)} ({climb.bound})"


def _figures(rung: Outcome) -> list[str]:
    if rung.ms is None or rung.rate is None or rung.percent_of_roof is None:
        return ["", "", "", _status(rung)]
    percent = rung.percent_of_roof
    bar = "█" * round(BAR * min(1.0, percent / 100))
    flag = " (!)" if percent > 100 else ""  # above 100% the measurement or the model is wrong
    colour = "cyan" if rung.tool == CUDA else "green"
    figures = [time_text(rung.ms), quantity_text(rung.rate).rstrip(), percent_text(percent) + flag]
    return [*figures, f"[{colour}]{bar}[/{colour}]"]


def _status(rung: Outcome) -> str:
    if rung.status in (WRONG, FAILED):
        return f"[red]{rung.status}[/red]"
    return STATUS.get(rung.status, "right" if rung.status == MEASURED else rung.status)
