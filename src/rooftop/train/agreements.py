"""What the ranks of a training agree on once a step, beside the step.

Each rank says a few numbers; the least of each over all ranks is known one step later, the same on every rank. So all
of them do the same after the same step: save because one was told to stop, go on to the next part of a save because
all have written theirs, or raise because one could not.

    step 7     says [0]          hears what was said at step 6
    step 8     says [-1] here    hears [0]
    step 9     says [0]          hears [-1], on every rank

The numbers go through gloo on the hosts, in a group of their own, while the next step computes: a GPU need not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from rooftop.parallel.exchanges import Group

T = TypeVar("T")


class Agreement:
    """Numbers of all ranks. Every rank makes it and calls its methods together with the others.

    Args:
        count: how many numbers each rank says.

    Attributes:
        ranks: how many there are.
    """

    def __init__(self, count: int) -> None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        self._group: Group = dist.new_group(backend="gloo") if several else None
        self.ranks = dist.get_world_size() if several else 1
        self.rank = dist.get_rank() if several else 0
        self._numbers = torch.zeros(count, dtype=torch.int64)
        self._work: Any = None

    def exchange(self, numbers: Sequence[int]) -> list[int]:
        """Send this rank's numbers; return the minimum over all ranks of what they sent in the call before.

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
        """Wait for the others' last numbers. Nothing must be on its way when the process group ends."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def close(self) -> None:
        """Let go of the group, if nothing is on its way; else it ends with torch.distributed."""
        if self._group is not None and self._work is None and dist.is_initialized():
            dist.destroy_process_group(self._group)
            self._group = None

    def gathered(self, value: T) -> list[T]:
        """What each rank gives, by rank; pickled."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.ranks
        dist.all_gather_object(found, value, group=self._group)
        return found
