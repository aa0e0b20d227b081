"""Shared code of the lessons in this folder: each rung with its change, and its result on this machine."""

from __future__ import annotations

import argparse
from collections.abc import Mapping

import torch

from rooftop.analysis.formats import percent_text, time_text
from rooftop.hardware import measure_ceilings
from rooftop.ladder import Outcome, build, climb


def tell(name: str, text: str, why: Mapping[str, str]) -> None:
    """Run a ladder and print it; `why` says what each rung changes."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="problem size: elements of a vector, or side of a matrix")
    options = parser.parse_args()
    try:
        ladder = build(name, options.size)
    except ValueError as error:
        parser.error(str(error))
    found = climb(ladder, measure_ceilings() if torch.cuda.is_available() else None)
    print(f"{found.work} ({found.device})")
    if found.roof_ms is not None:
        print(f"The roof: {time_text(found.roof_ms)}, set by {found.bound}.")
    told = ""
    for rung in found.rungs:
        if rung.name != told:
            print(f"\n{rung.name}: {why[rung.name]}")
            told = rung.name
        print(f"    {rung.tool:9} {did(rung)}")
    for remark in found.remarks:
        print(f"\n{remark}")


def did(rung: Outcome) -> str:
    """The result of a rung, in one line."""
    note = f" ({rung.note})" if rung.note else ""
    if rung.ms is None or rung.percent_of_roof is None:
        return f"{rung.status}{note}"
    return f"{time_text(rung.ms)}, {percent_text(rung.percent_of_roof)} of roof{note}"
