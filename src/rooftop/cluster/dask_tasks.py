"""The task that a Dask worker runs: find the job that the worker has received, and compute one chunk of items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooftop.cluster.working import Chunk
from rooftop.errors import ModelRunError

if TYPE_CHECKING:
    from rooftop.cluster.dask_processes import Done

CARRIERS: dict[str, Any] = {}
"""The jobs of this process, by token."""


def do_chunk(token: str, chunk: Chunk) -> Done:
    """Dask task: compute a chunk of items by the job that this worker holds under the run's token."""
    carrier = CARRIERS.get(token)
    if carrier is None:
        raise ModelRunError("this worker did not receive the job: does it have another version of rooftop?")
    done: Done = carrier.do(chunk)
    return done
