"""Ranks that start together, fail together and end together.

    with join(layout, settings={"seed": 1}) as world:
        ...  # torch.distributed is initialized, by NCCL on GPUs and by gloo on CPUs

If anything goes wrong, every rank raises an error about this failure, and no rank waits for a rank that will not come:

- before anything is communicated, each rank checks its own environment, layout and device;
- at a roll call (`rooftop.parallel.roll_call`), all ranks learn which rank is missing, cannot start, or has other
  settings;
- a rank that raises within the block reports its error, and the other ranks raise when communication with it fails;
- a thread of each rank detects ranks that are killed, suspended or hanging (`rooftop.parallel.watching`);
- no rank leaves the block before all ranks have reached its end.

For these checks, ranks use torch.distributed's store instead of collectives, in which a failed rank might not take
part. A `join` block uses these keys of the store. In a key with R, R is the number of a rank:

| key | |
|---|---|
| `beat/R` | a count that rises while the rank lives |
| `place/R`, `told/R` | the rank's last activity; whether the rank has reported its activity since another rank asked |
| `seen/R` | the rank knows which rank failed |
| `ended/R` | SIGTERM has ended the rank |
| `done/R`, `left/R` | the rank has reached the end of the block; the rank knows that all ranks have reached it |
| `asked` | a rank asks all ranks to report their activity |
| `failed` | the first failure |
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from rooftop.errors import FAILURE
from rooftop.parallel.captures import graphs_end_here
from rooftop.parallel.errors import RankError
from rooftop.parallel.flight_records import ranks_in_words
from rooftop.parallel.launchers import Launch, launched
from rooftop.parallel.layouts import Layout
from rooftop.parallel.places import begin
from rooftop.parallel.process_states import Process
from rooftop.parallel.roll_call import LINGER_S, MeetingOver, RollCall, StoreEnded, say
from rooftop.parallel.terminations import Termination, heard_by_a_thread
from rooftop.parallel.watching import Failure, Watch, note_interrupted, poll
from rooftop.words import first_line, in_a_line

PATIENCE_S = 20.0
TIMEOUT_S = 600.0
LATER_S = 30.0
"""PyTorch's own timeout of communication is this many seconds longer than `timeout_s`. By then, an error has already
named the rank that keeps the others waiting.
"""
BROKEN = re.compile(r"Connection (was likely )?(closed|reset|refused)|Broken pipe|[Tt]imed out|NCCL|recvValue")
"""Matches parts of the error messages that the end of another rank may cause."""
CUT = re.compile(r"Connection (was likely )?(closed|reset)|Broken pipe")
"""Matches parts of the error messages about a broken connection."""


@dataclass(frozen=True)
class World:
    """This process as one of the ranks.

    Attributes:
        rank, size: this process's rank, and the number of ranks.
        device: the device for computation. A GPU is also torch.cuda's current device.
    """

    rank: int
    size: int
    device: torch.device


@contextmanager
def join(
    layout: Layout | None = None,
    *,
    settings: Mapping[str, object] | None = None,
    device: str | None = None,
    patience_s: float = PATIENCE_S,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[World]:
    """Initialize torch.distributed within the block, for the processes that a launcher has started. Every rank must
    call this.

    A single process is a world of one rank, without a process group. If a process group exists, the block uses it and
    does not destroy it. A group that the block creates is destroyed at the end of the block. Before the group is
    destroyed, CUDA graphs that were captured within the block are reset, because NCCL waits for graphs that contain its
    work.

    Args:
        layout: the layout, with as many ranks as the world.
        settings: values that must be equal on all ranks, such as the seed or the model's sizes. Values are compared by
            `repr`.
        device: "cuda" or "cpu". Default: a GPU, if there is one. Of several GPUs, a rank uses the GPU with its local
            rank as index, or the only GPU that SLURM makes visible.
        patience_s: maximum time between the arrivals of the first and the last rank.
        timeout_s: maximum time that ranks wait for a live rank, in communication and at the end of the block.

    Raises:
        ValueError: the launcher's variables or the layout are wrong. Nothing has been communicated.
        RankError: a rank is missing, cannot start, has other settings, or failed within the block. The rank that failed
            first raises its own exception instead of RankError.
    """
    launch = launched()
    there = dist.is_available() and dist.is_initialized()
    if there:
        launch = Launch(dist.get_rank(), dist.get_world_size(), launch.local_rank, launch.launcher)
    if layout is not None:
        layout.check(launch.size)
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    where, problem = _place(kind, launch)
    if launch.launcher == "alone" and not there:
        if problem:
            raise RankError(problem)
        yield World(0, 1, where)
        return
    compared = {"layout": layout, "device": where.type, **(settings or {})}
    number = _joined[launch.address, launch.port, launch.attempt]
    _joined[launch.address, launch.port, launch.attempt] += 1
    store, processes = _at_the_store(launch, number, there, compared, problem, patience_s)
    if where.type == "cuda":
        torch.cuda.set_device(where)
    begin()
    try:
        with heard_by_a_thread() as termination, _ranks(launch, store, processes, termination, timeout_s) as ranks:
            if not there:
                # Number the groups from 0 in every block. Otherwise, a rank on which an earlier block did not start
                # would use other keys in the store than the other ranks.
                dist.distributed_c10d._world.group_count = 0
                dist.init_process_group(
                    "nccl" if where.type == "cuda" else "gloo",
                    store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
                    rank=launch.rank,
                    world_size=launch.size,
                    timeout=timedelta(seconds=timeout_s + min(timeout_s, LATER_S)),
                    device_id=_bound_device(where),
                )
            with nullcontext() if there or where.type != "cuda" else graphs_end_here():
                yield World(launch.rank, launch.size, where)
            ranks.end(timeout_s)
    finally:
        if not there and dist.is_initialized():
            dist.destroy_process_group()
            _forget_meshes()


@contextmanager
def _ranks(
    launch: Launch, store: Any, processes: list[Process], termination: Termination, timeout_s: float
) -> Iterator[_Ranks]:
    """Create the `_Ranks` object of this process, and yield it. If any rank fails within the `with` block, all ranks
    raise an error.

    Args:
        store: the store of the `join` block.
        processes: the operating system's processes of all ranks, which this rank watches.
        termination: records whether SIGTERM has asked this process to end.
        timeout_s: as in `join`.
    """
    launcher = os.getppid() if launch.elastic else None
    watch = Watch(store, launch.rank, launch.size, processes, launcher, termination, timeout_s)
    ranks = _Ranks(watch, holds_store=launch.rank == 0 and not launch.served)
    with ranks.failing_together():
        yield ranks


def _forget_meshes() -> None:
    """Clear DTensor's cache of operators' output layouts, which contain device meshes of this block. In a later block,
    DTensor would use these meshes instead of new meshes of the same ranks, although their process groups no longer
    exist.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _at_the_store(
    launch: Launch,
    number: int,
    there: bool,
    settings: Mapping[str, object],
    problem: str,
    patience_s: float,
) -> tuple[Any, list[Process]]:
    """Connect to the store of a `join` block, and wait for all ranks there (`RollCall`). Return the store and the
    processes of the ranks. `number` counts the blocks of this process from 0, separately for each address, port and
    attempt.

    If a rank enters the next block before rank 0 has closed the previous block's store, it connects to that old store.
    When the old store closes, the rank reconnects.
    """
    until = time.monotonic() + patience_s
    while True:
        store = dist.distributed_c10d._get_default_store() if there else _opened(launch, patience_s)
        try:
            for meeting in count():
                place = dist.PrefixStore(f"rooftop/{number}/{meeting}", store)  # type: ignore[attr-defined]
                call = RollCall(place, launch.rank, launch.size, holds_store=launch.rank == 0 and not launch.served)
                try:
                    return place, call.call(settings, problem, patience_s)
                except MeetingOver:
                    continue
        except StoreEnded:
            may_be_old = number > 0 and launch.rank > 0 and not (there or launch.served)
            if not may_be_old or time.monotonic() >= until:
                raise


_joined: Counter[tuple[str, int, int]] = Counter()  # number of `join` blocks so far, by address, port and attempt
_bound = False  # whether a group of this process has ever been bound to its GPU


def _bound_device(where: torch.device) -> torch.device | None:
    """The GPU to which the new process group is bound; None: the group is not bound. The ranks of a bound group connect
    immediately, and the process groups of a layout are split from it.

    Only the first process group of a process is bound, because splitting a later group causes a segmentation fault
    (pytorch/pytorch#192109).
    """
    global _bound
    if where.type != "cuda" or _bound:
        return None
    _bound = True
    return where


def _place(kind: str, launch: Launch) -> tuple[torch.device, str]:
    """Return this rank's device, and the reason why the rank cannot start; "" if it can. `kind` is "cuda" or "cpu"."""
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device={kind!r}: expected 'cuda' or 'cpu'; the rank determines the GPU's index")
    if kind == "cpu":
        return torch.device("cpu"), ""
    count = torch.cuda.device_count()
    index = 0 if launch.launcher == "slurm" and count == 1 else launch.local_rank
    if launch.launcher == "alone" and count == 0:
        return torch.device("cuda", 0), "PyTorch finds no GPU here: use device='cpu' (--device cpu)"
    problem = (
        f"it is process {index} on a machine with {count} visible GPUs: start at most one process per GPU, or use "
        "device='cpu'"
    )
    return torch.device("cuda", index), "" if index < count else problem


def _opened(launch: Launch, patience_s: float) -> Any:
    """Connect to the store (of torch.distributed) at which the ranks meet. Rank 0 also runs the store, unless the
    launcher runs it."""
    holds = launch.rank == 0 and not launch.served
    try:
        return dist.TCPStore(  # type: ignore[attr-defined]
            launch.address,
            launch.port,
            is_master=holds,
            timeout=timedelta(seconds=patience_s),
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        place = f"{launch.address}:{launch.port}"
        if holds:
            raise RankError(
                f"rank 0 of {launch.size} cannot open the store at {place}, where the ranks meet. Check that "
                f"MASTER_ADDR is this machine and that MASTER_PORT is free ({first_line(error)})"
            ) from error
        raise RankError(
            f"rank 0 of {launch.size} did not come within {patience_s:g} s: nobody has opened the store at {place}, "
            "where the ranks meet (MASTER_ADDR, MASTER_PORT); see the output of rank 0"
        ) from error


class _Ranks:
    """A `join` block as this process, one of the ranks, sees it. The object raises an error in this process when any
    rank fails, and waits for all ranks at the end of the block.
    """

    def __init__(self, watch: Watch, holds_store: bool) -> None:
        self.watch, self.store, self.holds_store = watch, watch.store, holds_store
        self.rank, self.size = watch.rank, watch.size

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Watch the other ranks within the `with` block. If one fails, communication is aborted, so that this rank's
        pending calls raise errors. An error in the block is reported to the other ranks; if another rank failed first,
        that rank's failure is raised instead."""
        with self.watch.on():
            try:
                yield
            except BaseException as error:
                first, mine = self._first_failure(error)
                say(self.store, "seen", self.rank, LINGER_S, range(self.size))
                if first.startswith(f"rank {self.rank} of {self.size} has given no sign of life"):
                    # let other ranks report first, because a launcher ends all ranks once one rank is gone
                    time.sleep(LINGER_S)
                at = self.watch.at
                # True if `end` has raised the error because another rank failed: here, Python had finished the block,
                # but the GPU was still at the places `at`.
                of_another = isinstance(error, RankError) and at
                if not isinstance(error, Exception) or (first == mine and not of_another):
                    setattr(error, FAILURE, first)
                    raise
                raise _heard("; ".join([first, *(at or getattr(error, "__notes__", []))]), first) from error

    def _first_failure(self, error: BaseException) -> tuple[str, str]:
        """Return two texts: the first failure on any rank, and this rank's failure, which raised `error` here."""
        mine = f"rank {self.rank} of {self.size} failed: {in_a_line(error)}"
        if isinstance(error, RankError):  # the error already names the rank that failed
            mine = str(error)
        failure = Failure(mine, ())
        if isinstance(error, RuntimeError) and not isinstance(error, RankError) and BROKEN.search(str(error)):
            note_interrupted()
            if (gone := self.watch.gone(error)) is not None:
                failure = gone
            elif CUT.search(str(error)):
                mine = f"{mine}; all ranks are alive: check the network between them"
                failure = Failure(mine, ())
        return self.watch.tell(failure), mine

    def end(self, timeout_s: float) -> None:
        """Wait until all ranks have reached the end of the `join` block.

        Raises:
            RankError: a rank failed within the block, or did not reach its end within `timeout_s` after this rank.
        """
        everybody = [f"done/{rank}" for rank in range(self.size)]
        self.store.set(f"done/{self.rank}", "1")
        noticed, until = self.watch.noticed, time.monotonic() + timeout_s
        if not poll(lambda: noticed.is_set() or self.store.check(everybody), until):
            late = [rank for rank in range(self.size) if not self.store.check([f"done/{rank}"])]
            who = f"{ranks_in_words(late)} of {self.size}"
            raise RankError(f"{who} did not reach the end of the block within {timeout_s:g} s after rank {self.rank}")
        if noticed.is_set():
            raise _heard(self.watch.failure, self.watch.failure)
        say(self.store, "left", self.rank, PATIENCE_S if self.holds_store else 0.0, range(self.size))


def _heard(words: str, failure: str) -> RankError:
    """The error that this rank raises because another rank has failed. `words` is the error's message, and `failure`
    the text of the first failure."""
    error = RankError(words)
    setattr(error, FAILURE, failure)
    return error
