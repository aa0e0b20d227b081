"""Let all ranks agree on a few numbers once per step, in the background.

Each rank sends a few numbers. One step later every rank gets the minimum of each number over all ranks. So all ranks
make the same decision after the same step. For example, all ranks save if one rank received a stop signal. All ranks
start the next phase of a save once all have finished the previous phase. If one rank could not write, all ranks raise.

    step 7     sends [0]             receives the minimum of step 6
    step 8     one rank sends [-1]   receives [0]
    step 9     sends [0]             every rank receives [-1]

The hosts exchange the numbers with gloo, in a separate process group, while the next step computes, so no GPU waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rooftop.parallel.exchanges import Group

T = TypeVar("T")


class Agreement:
    """Computes minima of numbers over all ranks. All ranks must create the object and call each method.

    Args:
        count: how many numbers each rank sends.

    Attributes:
        ranks: number of ranks.
    """

    def __init__(self, count: int) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group: Group = dist.new_group(backend="gloo") if several else None
        self.ranks = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0
        self._numbers = torch.zeros(count, dtype=torch.int64)
        self._work: Any = None

    def exchange(self, numbers: Sequence[int]) -> list[int]:
        """Send this rank's numbers. Return the minimum over all ranks of each number that the previous call sent.

        The first call returns zeros.
        """
        if self._work is not None:
            self._work.wait()
        heard = self._numbers.tolist()
        self._numbers = torch.tensor(numbers, dtype=torch.int64)
        if self._group is not None:
            self._work = dist.all_reduce(self._numbers, op=dist.ReduceOp.MIN, group=self._group, async_op=True)
        return heard  # type: ignore[no-any-return]

    def finish(self) -> None:
        """Wait until the last exchange is complete. Call this before the process group is destroyed."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def close(self) -> None:
        """Destroy the process group that the hosts use. If a message is in flight, do nothing; the shutdown of
        torch.distributed destroys the group."""
        if self._group is not None and self._work is None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None

    def gathered(self, value: T) -> list[T]:
        """Gather a picklable value from each rank, in the order of ranks."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self._group)
        return found
