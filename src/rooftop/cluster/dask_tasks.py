"""The task in a worker of a Dask scheduler: it finds the worker's job and does one chunk of it."""

from __future__ import annotations

from typing import Any

from rooftop.cluster.working import Chunk, Outcome
from rooftop.errors import ModelRunError

CARRIERS: dict[str, Any] = {}
"""Collects the results of the jobs that this process has, by token."""


def do_chunk(token: str, chunk: Chunk) -> Outcome | tuple[int, int]:
    """Do a chunk; return the outcome, or (first, count) of the items that took too long."""
    carrier = CARRIERS.get(token)
    if carrier is None:
        raise ModelRunError("this worker did not receive the job: does it have another version of rooftop?")
    return carrier.do(chunk)
