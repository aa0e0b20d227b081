"""Measure the ranks of a script. Each rank records its own steps.

A script's steps cannot be repeated in lockstep, unlike those of `rooftop.analyze`. But the script's collectives keep
its ranks in step. So the same steps, by number, are watched on all ranks, without additional communication. At the end
each rank leaves its row, or the reason why it has no row, in the store of `torchrun`. The first rank waits for the
others' rows, and names the missing ranks.
"""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from rooftop.analysis.advice.rank_rules import rank_advice
from rooftop.analysis.formats import time_text
from rooftop.analysis.ranks.lockstep import agent_store
from rooftop.analysis.ranks.measuring import RANK_STEP_LABEL, rank_row
from rooftop.analysis.ranks.merging import RankRow, Ranks, compared
from rooftop.analysis.report import Report
from rooftop.hardware.traces import Label, Trace

STEPS_BETWEEN_WAITS = {"cpu": 1, "cuda": 2}
"""Number of steps in a stretch. At the end of a stretch, the host waits for the device. (If each step on a GPU were a
stretch, launches would count as exposed communication.)
"""
# maximum time that the first rank waits for each other rank in turn, after its own script has ended
ROW_TIMEOUT = timedelta(seconds=60)


class RankInstrument:
    """Run the profiler around some steps of this rank. Afterwards, `row` returns the result."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._together = STEPS_BETWEEN_WAITS[device.type]
        self._trace = Trace(device)
        self._label = ExitStack()
        self._steps = 0

    def __enter__(self) -> RankInstrument:
        self._trace.__enter__()
        self._label.enter_context(Label(RANK_STEP_LABEL))
        return self

    def step_ended(self) -> None:
        """Report the end of a step. Do not call this after the last step of the block."""
        self._steps += 1
        if self._steps % self._together == 0:
            self._end_stretch()
            self._label.enter_context(Label(RANK_STEP_LABEL))

    def _end_stretch(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._label.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end_stretch()
        self._trace.__exit__(kind, error, tb)

    def row(self, rank: int) -> RankRow:
        """This rank's times of one step: the median over the watched stretches, divided by the number of steps in a
        stretch (see `STEPS_BETWEEN_WAITS`).
        """
        row = rank_row(self._trace.events, rank, self._device)
        times = {name: value / self._together for name, value in asdict(row).items() if name.endswith("_ms")}
        return replace(row, **times)


def gathered_rows(row: RankRow | None, why_none: str) -> tuple[Ranks | None, list[str]]:
    """Put this rank's row into the store. On the first rank, return all ranks' rows, and a note on each rank without a
    row. On the other ranks, return (None, []).

    Args:
        row: this rank's measurements.
        why_none: the reason, if `row` is None.
    """
    ranks, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    store = agent_store() or _own_store()
    if store is None:
        return None, [
            "The ranks could not be compared, because torchrun's store is gone. The report covers only rank 0."
        ]
    try:
        store.set(f"rooftop/row/{rank}", json.dumps([asdict(row) if row is not None else None, why_none]))
    except RuntimeError as error:
        return None, [f"The ranks could not be compared: rank {rank} cannot reach torchrun's store ({error})."]
    return _collected(store, ranks) if rank == 0 else (None, [])


def _collected(store: Any, ranks: int) -> tuple[Ranks | None, list[str]]:
    rows, notes = [], []
    patience = ROW_TIMEOUT
    for rank in range(ranks):
        key = f"rooftop/row/{rank}"
        try:
            store.wait([key], patience)
            plain, why_none = json.loads(store.get(key))
        except RuntimeError:  # a timeout is a RuntimeError, and so is a lost connection
            patience = timedelta(seconds=1)  # the other ranks have already had `ROW_TIMEOUT` to send their rows
            notes.append(f"Rank {rank} of {ranks} is not in the report: it ended before it sent its measurements.")
            continue
        if plain is None:
            notes.append(f"Rank {rank} of {ranks} is not in the report: {why_none}.")
        else:
            rows.append(RankRow(**plain))
    return (compared(rows) if rows else None), notes


def _own_store() -> Any:
    """The store of the program's process group, for use if torchrun serves no store; None if the group is gone."""
    if dist.is_available() and dist.is_initialized():
        return dist.distributed_c10d._get_default_store()
    return None


def with_ranks(report: Report, ranks: Ranks) -> Report:
    """Add the rows of all ranks, and the advice that follows from them, to the first rank's report."""
    advice = sorted([*report.advice, *rank_advice(ranks)], key=lambda item: -item.gain_ms)
    # on a GPU, NCCL's kernels count as busy time, so communication is in the kernel gap
    gap = "kernel gap" if report.device["kind"] == "cuda" else "launch gap"
    first = ranks.rows[0]
    note = (
        f"Rank {first.rank}'s {gap} contains {time_text(first.exposed_ms)} of exposed communication, including waits."
    )
    return replace(report, ranks=ranks, advice=tuple(advice), notes=(*report.notes, note))
