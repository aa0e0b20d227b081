"""A benchmark that runs once by one process and once by several: what both kinds of script share."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rooftop.hardware import devices

Row = dict[str, Any]


class Ended(Exception):
    """Processes ended with a status that is not 0."""

    def __init__(self, status: int) -> None:
        super().__init__(f"ended with {status}")
        self.status = status


def rows_of(script: str, ranks: int, passed: Sequence[str]) -> list[Row]:
    """What rank 0 of so many processes of a script writes, which is told where by --worker.

    Raises:
        Ended: a process failed; it has said why.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder, "rows.json")
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        status = subprocess.run([*start, script, *passed, "--worker", str(found)]).returncode
        if status:
            raise Ended(status)
        rows: list[Row] = json.loads(found.read_text())
        return rows


def told(rows: Iterable[Row]) -> Iterator[Row]:
    """The same, each printed by rank 0 as it comes: a run that is cut off has said what it had."""
    for row in rows:
        if ranks_here()[1] == 0:
            print(json.dumps(row), flush=True)
        yield row


def written(rows: Sequence[Row], out: Path | None, *, quick: bool) -> None:
    """Print rows, and write them to a file with the device's name."""
    for row in rows:
        print(json.dumps(row))
    if out is not None:
        device = next(d.to_dict() for d in devices() if d.kind == ("cpu" if quick else "cuda"))
        out.parent.mkdir(parents=True, exist_ok=True)
        found = {"device": device, "torch": torch.__version__, "rows": list(rows)}
        out.write_text(json.dumps(found, indent=1) + "\n")


def ranks_here() -> tuple[int, int]:
    """(ranks, this one)."""
    return (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)


def largest(value: float) -> float:
    """Of all ranks."""
    if not dist.is_initialized():
        return value
    found = torch.tensor(value, dtype=torch.float64, device="cuda" if "nccl" in dist.get_backend() else "cpu")
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)
