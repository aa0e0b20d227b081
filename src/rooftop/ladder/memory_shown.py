"""Show the memory ladder in the terminal and as a chart."""

from __future__ import annotations

from math import log10
from typing import Any

from rich.markup import escape
from rich.table import Table

from rooftop.analysis.formats import percent_text, quantity_text
from rooftop.ladder.chart import framed
from rooftop.ladder.memory_levels import Flight, Level, MemoryClimb
from rooftop.ladder.python_shown import BUSY_CORES

COLOURS = ("#4c9fd6", "#76a92c", "#e0703a", "#8a63d2", "#9a9a9a", "#c2a500")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def heading(climb: MemoryClimb) -> str:
    """The heading of the table, with rich's markup."""
    return f"[bold]memory[/bold]: latency and rate of each level, {escape(climb.device)}"


def table(climb: MemoryClimb) -> Table:
    """A table with a row for each level."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    shown.add_column("level", no_wrap=True)
    of_unit = f"B/s of a {climb.unit}"
    for name in ("loaded from", "latency", "B/s in all", of_unit, "in flight", f"of a {climb.unit}"):
        shown.add_column(name, justify="right")
    for level in climb.levels:
        shown.add_row(
            level.name,
            size_text(level.working_set_bytes),
            latency_text(level.latency_ns),
            quantity_text(level.rate).rstrip(),
            quantity_text(level.rate / level.units).rstrip(),
            size_text(level.in_flight_bytes),
            size_text(level.in_flight_bytes / level.units),
        )
    return shown


def flight_table(climb: MemoryClimb) -> Table:
    """A table with a row for each concurrency and parallelism: the prediction by Little's law, and the measurement."""
    shown = Table(box=None, padding=(0, 2, 0, 0), title=f"Little's law in {climb.flown}", title_justify="left")
    for name in ("loads of a thread", "threads", "bytes in flight", "B/s expected", "B/s measured", "of expected"):
        shown.add_column(name, justify="right")
    for flight in climb.flights:
        percent = 100 * flight.rate / flight.expected
        flag = " (!)" if percent > 100 else ""  # the level's measured latency is too long, or its measured rate too low
        shown.add_row(
            f"{flight.concurrency}",
            f"{flight.parallelism:,}",
            size_text(flight.in_flight_bytes),
            quantity_text(flight.expected).rstrip(),
            quantity_text(flight.rate).rstrip(),
            percent_text(percent) + flag,
        )
    return shown


def said(climb: MemoryClimb) -> list[str]:
    """The remarks below the tables, and a note if other programs ran during the measurement."""
    if climb.other_cores <= BUSY_CORES:
        return list(climb.remarks)
    busy = (
        f"Other programs kept {climb.other_cores:.1f} cores busy during the measurement, and shared "
        "caches and memory with the measurement."
    )
    return [*climb.remarks, busy]


def size_text(size_bytes: float) -> str:
    """Format a number of bytes: "16 KiB", "1.5 MiB"; "" for 0."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if size_bytes >= unit:
            return f"{size_bytes / unit:.3g} {name}"
    return f"{size_bytes:,.0f} B" if size_bytes else ""


def latency_text(nanoseconds: float) -> str:
    """Format a latency: "1.3 ns", "2.1 us"."""
    return f"{nanoseconds:.3g} ns" if nanoseconds < 1000 else f"{nanoseconds / 1e3:.3g} us"


def page(climb: MemoryClimb) -> str:
    """One HTML page that needs no network: a chart of the levels by latency and rate, then a chart of rates by bytes in
    flight.
    """
    charts = "\n".join(
        figure.to_html(full_html=False, include_plotlyjs=first, div_id=f"ladder-memory-{name}")
        for name, figure, first in (("levels", _levels(climb), True), ("law", _law(climb), False))
    )
    above = [f"Latency and rate of each level, {climb.device}"]
    return framed("The memory, level by level", charts, above, said(climb))


def _levels(climb: MemoryClimb) -> Any:
    """A chart of rate by latency, on logarithmic axes. Levels on the same dotted line have the same number of bytes in
    flight."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    slowest, fastest = (pick(level.latency_ns for level in climb.levels) for pick in (max, min))
    ends = [fastest / 2, slowest * 2]
    exponents = range(2, 9)
    lowest, highest = min(level.rate for level in climb.levels) / 3, max(level.rate for level in climb.levels) * 3
    for exponent in exponents:
        rates = [10**exponent / (1e-9 * ns) for ns in ends]
        if max(rates) < lowest or min(rates) > highest:
            continue
        figure.add_scatter(
            x=ends, y=rates, mode="lines", line={"dash": "dot", "color": "#cccccc"}, showlegend=False, hoverinfo="skip"
        )
        at = ends[1] if lowest < rates[1] else 10**exponent / (1e-9 * 1.2 * lowest)
        if ends[0] <= at <= ends[1]:
            figure.add_annotation(
                x=log10(at), y=log10(10**exponent / (1e-9 * at)), text=_power(exponent), showarrow=False,
                font={"size": 11, "color": "#888888"}, xanchor="right", yanchor="bottom",
            )  # fmt: skip
    figure.add_scatter(
        x=[level.latency_ns for level in climb.levels],
        y=[level.rate for level in climb.levels],
        mode="markers+text",
        text=[_label(level) for level in climb.levels],
        textposition="middle right",
        marker={"size": 11, "color": [COLOURS[n % len(COLOURS)] for n in range(len(climb.levels))]},
        showlegend=False,
        cliponaxis=False,
    )
    figure.update_xaxes(title="latency, ns", type="log", range=[log10(ends[0]), log10(ends[1])])
    figure.update_yaxes(title="B/s of all", type="log", exponentformat="SI", range=[log10(lowest), log10(highest)])
    figure.update_layout(template="plotly_white", height=480, margin={"r": 230, "t": 30}, title=None)
    return figure


def _label(level: Level) -> str:
    return f"{level.name}: {latency_text(level.latency_ns)}, {quantity_text(level.rate)}B/s"


def _power(exponent: int) -> str:
    return f"{quantity_text(10.0**exponent)}B in flight"


def _law(climb: MemoryClimb) -> Any:
    """A chart of the measured rate by bytes in flight, with a line for each parallelism (number of threads), and a line
    for Little's law."""
    from plotly import graph_objects

    figure = graph_objects.Figure()
    level = next(each for each in climb.levels if each.name == climb.flown)
    by_parallelism: dict[int, list[Flight]] = {}
    for flight in climb.flights:
        by_parallelism.setdefault(flight.parallelism, []).append(flight)
    least = min(flight.in_flight_bytes for flight in climb.flights)
    most = max(2 * level.in_flight_bytes, *(flight.in_flight_bytes for flight in climb.flights))
    figure.add_scatter(
        x=[least, level.in_flight_bytes, most],
        y=[1e9 * least / level.latency_ns, level.rate, level.rate],
        mode="lines",
        line={"dash": "dot", "color": "#888888"},
        name="Little's law",
    )
    for number, (parallelism, flights) in enumerate(by_parallelism.items()):
        figure.add_scatter(
            x=[flight.in_flight_bytes for flight in flights],
            y=[flight.rate for flight in flights],
            mode="lines+markers",
            name=f"{parallelism:,} thread{'' if parallelism == 1 else 's'}, "
            f"{' '.join(str(flight.concurrency) for flight in flights)} loads each",
            marker_color=COLOURS[number % len(COLOURS)],
        )
    figure.update_xaxes(title=f"bytes in flight, {climb.flown}", type="log")
    figure.update_yaxes(title="B/s", type="log", exponentformat="SI")
    figure.update_layout(template="plotly_white", height=460, legend={"orientation": "h", "y": 1.12}, margin={"t": 60})
    return figure
