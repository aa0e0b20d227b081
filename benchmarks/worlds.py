"""Shared code of benchmarks that run in one process and in several processes."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rooftop.hardware import devices
from rooftop.whole_files import write_json

Row = dict[str, Any]
LOOK_S = 0.5  # seconds between two checks for new rows


class Ended(Exception):
    """A process ended with a status other than 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with {status}")
        self.status = status


def rows_of(script: str, worlds: Iterable[int], passed: Sequence[str], keep: Callable[[list[Row]], None]) -> list[Row]:
    """Run a script in worlds of these numbers of processes, one after another, and return the rows that rank 0 writes
    (`told`).

    Args:
        passed: arguments for the script. They are followed by --worker with the name of the file for the rows.
        keep: called with all rows so far when there are new rows, so that an interrupted run keeps its rows.

    Raises:
        Ended: a process failed. Its output says why.
    """
    rows: list[Row] = []
    for ranks in worlds:
        with tempfile.TemporaryDirectory() as folder:
            found = Path(folder, "rows.jsonl")
            start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
            process = subprocess.Popen([*start, script, *passed, "--worker", str(found)])
            before, status, seen = rows, None, 0
            while status is None:
                with suppress(subprocess.TimeoutExpired):
                    status = process.wait(LOOK_S)
                lines = found.read_text().split("\n")[:-1] if found.exists() else []
                if len(lines) > seen:
                    print(*lines[seen:], sep="\n", flush=True)
                    seen, rows = len(lines), before + [json.loads(line) for line in lines]
                    keep(rows)
            if status:
                raise Ended(status)
    return rows


def told(rows: Iterable[Row], file: Path) -> None:
    """Write each row as it arrives, on rank 0 only."""
    for row in rows:
        if ranks_here()[1] == 0:
            with file.open("a") as lines:
                lines.write(json.dumps(row) + "\n")


def written(rows: Sequence[Row], out: Path | None, *, quick: bool, complete: bool) -> None:
    """Write rows to a file, with the device's name, and whether the run is `complete`."""
    if out is not None:
        device = next(d.to_dict() for d in devices() if d.kind == ("cpu" if quick else "cuda"))
        found = {"device": device, "torch": torch.__version__, "rows": list(rows)} | ({} if complete else {"cut": True})
        write_json(out, found)


def ranks_here() -> tuple[int, int]:
    """(number of ranks, this rank)."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def largest(value: float) -> float:
    """The largest value over all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64, device="cuda" if "nccl" in dist.get_backend() else "cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
