"""Show the python ladder in the terminal and as a chart."""

from __future__ import annotations

from math import log10

from rich.markup import escape
from rich.table import Table

from rooftop.analysis.formats import percent_text, quantity_text, time_text
from rooftop.ladder.chart import framed
from rooftop.ladder.climbing import FAILED, WRONG
from rooftop.ladder.python_climbing import SpeedClimb, SpeedOutcome
from rooftop.ladder.python_ladder import ALL, GPU, ONE

COLOURS = {ONE: "#9a9a9a", ALL: "#4c9fd6", GPU: "#76a92c"}
BUSY_CORES = 0.2  # if other programs used fewer cores than this, the measured times are hardly disturbed


def heading(climb: SpeedClimb) -> str:
    """The heading: the work, the devices and the roofs, with rich's markup."""
    roofs = ", ".join(
        f"{time_text(ms)} on {'the GPU' if where == GPU else where}" for where, ms in climb.roofs_ms.items()
    )
    return f"[bold]python[/bold]: {escape(climb.work)}, {escape(', '.join(climb.devices))}\nroof: {roofs}"


def table(climb: SpeedClimb) -> Table:
    """A table with a row for each rung: its time, its speed-up over the first rung, its percent of roof, and the bytes
    that it copies."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("rung", overflow="fold")
    shown.add_column("written in", no_wrap=True)
    for name in ("time", "times faster", "of roof"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("which roof", no_wrap=True)
    shown.add_column("bytes copied", justify="right", no_wrap=True)
    shown.add_column("", overflow="fold", style="dim")
    for rung in climb.rungs:
        copied = f"{rung.copied_bytes:,}" if rung.copied_bytes is not None else ""
        shown.add_row(escape(rung.name), rung.tool, *_figures(rung), rung.roof, copied, escape(rung.note))
    return shown


def stops(climb: SpeedClimb) -> Table:
    """A table that says for each rung in which case it is fast enough, so that one need not climb further."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("written in", no_wrap=True)
    shown.add_column("rung", no_wrap=True)
    shown.add_column("stop here if", overflow="fold")
    for rung in climb.rungs:
        shown.add_row(rung.tool, escape(rung.name), escape(rung.stop))
    return shown


def _figures(rung: SpeedOutcome) -> list[str]:
    if rung.ms is None or rung.percent_of_roof is None:
        return [f"[red]{rung.status}[/red]" if rung.status in (WRONG, FAILED) else "-", "", ""]
    flag = " (!)" if rung.percent_of_roof > 100 else ""  # above 100% the measurement or the model is wrong
    faster = (
        "" if rung.speed_up is None else f"{rung.speed_up:,.3g}" if rung.speed_up < 100 else f"{rung.speed_up:,.0f}"
    )
    return [time_text(rung.ms), faster, percent_text(rung.percent_of_roof) + flag]


def disturbed(climb: SpeedClimb) -> str:
    """A note that other programs ran during the measurement; empty if they used hardly any cores."""
    if climb.other_cores <= BUSY_CORES:
        return ""
    return (
        f"Other programs kept {climb.other_cores:.1f} cores busy during the measurement, so rungs on all cores are "
        "slower than on an idle machine. Measure again when the machine is idle."
    )


def page(climb: SpeedClimb) -> str:
    """One HTML page that needs no network: a bar for each rung's time, and a line for each roof."""
    from plotly import graph_objects

    timed = [rung for rung in climb.rungs if rung.ms is not None]
    labels = [f"{rung.name}, {rung.tool}" for rung in timed]
    ends = [*climb.roofs_ms.values(), *(rung.ms or 0.0 for rung in timed)]
    figure = graph_objects.Figure()
    for where in climb.roofs_ms:
        rungs = [(label, rung) for label, rung in zip(labels, timed, strict=True) if rung.roof == where]
        figure.add_bar(
            y=[label for label, _ in rungs],
            x=[rung.ms for _, rung in rungs],
            text=[_label(rung) for _, rung in rungs],
            textposition="outside",
            cliponaxis=False,
            name="the GPU" if where == GPU else where,
            orientation="h",
            marker_color=COLOURS[where],
        )
        figure.add_vline(climb.roofs_ms[where], line_dash="dot", line_color=COLOURS[where])
    figure.update_xaxes(
        title="ms, logarithmic; dotted: the roofs", type="log", range=[log10(min(ends) / 2), log10(max(ends) * 1.5)]
    )
    figure.update_yaxes(categoryorder="array", categoryarray=labels[::-1], automargin=True)
    figure.update_layout(
        template="plotly_white",
        height=180 + 34 * len(labels),
        legend={"orientation": "h", "y": 1.08},
        margin={"r": 240},
    )
    chart = figure.to_html(full_html=False, include_plotlyjs=True, div_id="ladder-python")
    said = [*climb.remarks, *filter(None, [disturbed(climb)])]
    return framed("From plain Python to the roof", chart, [f"{climb.work}, {', '.join(climb.devices)}"], said)


def _label(rung: SpeedOutcome) -> str:
    copied = f", copies {quantity_text(rung.copied_bytes)}B" if rung.copied_bytes else ""
    return f"{time_text(rung.ms or 0.0)}, {percent_text(rung.percent_of_roof or 0.0)} of roof{copied}"
