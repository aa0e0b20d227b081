"""The task in a worker of a Dask scheduler: it finds the worker's job, which does one chunk."""

from __future__ import annotations

from typing import Any

from rooftop.cluster.working import Chunk, Outcome
from rooftop.errors import ModelRunError

CARRIERS: dict[str, Any] = {}
"""The jobs of this process, by token."""


def do_chunk(token: str, chunk: Chunk) -> Outcome | tuple[int, int]:
    """Do a chunk; return the outcome, or (first, count) of the items that took too long."""
    carrier = CARRIERS.get(token)
    if carrier is None:
        raise ModelRunError("this worker did not receive the job: does it have another version of rooftop?")
    return carrier.do(chunk)
