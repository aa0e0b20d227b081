"""What runs in a worker of a Dask scheduler: a task finds the job that the worker was given, and does a chunk of it."""

from __future__ import annotations

from typing import Any

from rooftop.cluster.working import Chunk, Outcome
from rooftop.errors import ModelRunError

CARRIERS: dict[str, Any] = {}
"""Of the jobs that this process has, by token."""


def do_chunk(token: str, chunk: Chunk) -> Outcome | tuple[int, int]:
    """A task: the outcome, or (first, count) of the items that took too long."""
    carrier = CARRIERS.get(token)
    if carrier is None:
        raise ModelRunError("this worker has not got the job: does it run another version of rooftop?")
    return carrier.do(chunk)
