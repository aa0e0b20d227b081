"""Run the python ladder and the memory ladder, for the figures of docs/speed.md. They use a CPU and, if there is one, a
GPU.

    python benchmarks/speed.py [--out benchmarks/results/cpu/speed.json] [--charts FOLDER]

Each rung of the python ladder is checked against plain Python, then timed. The memory ladder is measured level by
level. If other programs ran, the file says how many cores they used (`other_cores`). For this reason, the page quotes
only ratios within a run, never times. `--rows` prints the page's table for an existing file. The exit status is 1 if a
rung is wrong.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from rooftop.hardware.device import versions
from rooftop.ladder import memory_shown, python_shown
from rooftop.ladder.memory_climbing import climb_memory
from rooftop.ladder.python_climbing import climb_python
from rooftop.ladder.python_ladder import python_ladder
from rooftop.whole_files import write_json

FOLDER = Path(__file__).resolve().parent


def main() -> None:
    # Dask imports a package `sparse`, and would import the benchmark of that name from this folder.
    sys.path[:] = [each for each in sys.path if Path(each or ".").resolve() != FOLDER]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--charts", type=Path, help="folder for charts (HTML)")
    parser.add_argument("--size", type=int, help="number of points of the python ladder")
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="print the page's table from this file, and measure nothing"
    )
    options = parser.parse_args()
    if options.rows is not None:
        print("\n".join(rows(json.loads(options.rows.read_text(encoding="utf-8")))))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = Console(width=130, highlight=False)
    with python_ladder(options.size, device) as ladder:
        python = climb_python(ladder, device)
    console.print(python_shown.heading(python), python_shown.table(python), sep="\n")
    for remark in (*python.remarks, python_shown.disturbed(python)):
        console.print(remark, markup=False)
    climbs = [climb_memory(where) for where in dict.fromkeys((torch.device("cpu"), device))]
    for climb in climbs:
        console.print(
            memory_shown.heading(climb), memory_shown.table(climb), memory_shown.flight_table(climb), sep="\n"
        )
        for remark in memory_shown.said(climb):
            console.print(remark, markup=False)
    if options.out is not None:
        found = {
            "environment": {"devices": python.devices, "versions": versions()},
            "python": python.to_dict(),
            "memory": [climb.to_dict() for climb in climbs],
        }
        write_json(options.out, found)
    if options.charts is not None:
        options.charts.mkdir(parents=True, exist_ok=True)
        (options.charts / "python.html").write_text(python_shown.page(python), encoding="utf-8")
        for climb in climbs:
            (options.charts / f"memory-{climb.kind}.html").write_text(memory_shown.page(climb), encoding="utf-8")
    if python.failures:
        sys.exit("\n".join(["what failed:", *(f"{each.tool}, {each.name}: {each.note}" for each in python.failures)]))


def rows(found: dict[str, Any]) -> list[str]:
    """The table of docs/speed.md. It has only ratios and bytes, which also apply to other machines."""
    table = []
    for each in found["python"]["rungs"]:
        if each["ms"] is not None:
            copied = "" if each["copied_bytes"] is None else f"{each['copied_bytes']:,}"
            share = f"{percent(each['percent_of_roof'])} of {each['roof']}"
            table.append(f"| {each['name']} | {each['tool']} | {times(each['speed_up'])} | {share} | {copied} |")
    return table


def times(value: float) -> str:
    """Format a speed-up with two digits."""
    return f"{float(f'{value:.2g}'):,.10g}"


def percent(value: float) -> str:
    """Format a percentage of the roof with two digits."""
    return f"{float(f'{value:.2g}'):.10g}%" if value >= 0.1 else "<0.1%"


if __name__ == "__main__":
    main()
