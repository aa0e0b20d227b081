"""Read PyTorch's flight recorder of communication: the operations that a rank has launched and that have not ended.

    operations = unfinished(recorded(), ranks_of_groups())       # this rank's operations, oldest first
    print(lacking({0: operations, 1: ()}))                       # rank 1 lacks the all_reduce ..., which rank 0 awaits

PyTorch keeps the last operations of NCCL and of gloo in a ring buffer of TORCH_FR_BUFFER_SIZE entries (default 2000, 0
to disable; formerly TORCH_NCCL_TRACE_BUFFER_SIZE). PyTorch returns the operations as a pickled dict. This module reads
these fields:

| key | |
|---|---|
| `pg_config` | NCCL: for each group, by its name, `ranks` as text, "[0, 1]" |
| `pg_status` | for each group, `last_enqueued_collective` and `last_completed_collective` |
| `entries` | for each operation, the fields below |
| `process_group` | (name, description) |
| `profiling_name` | "nccl:all_reduce" |
| `collective_seq_id`, `p2p_seq_id`, `is_p2p` | the operation's number; whether it is a send or receive |
| `input_sizes`, `input_dtypes` | sizes and dtypes of the operation's tensors |
| `time_created_ns` | time of the launch |
| `state`, `retired` | "scheduled", "started" or "completed"; whether the operation has ended |

All ranks of a group count its collectives in the same order, so equal numbers mean the same collective.

Source: https://docs.pytorch.org/tutorials/prototype/flight_recorder_tutorial.html
"""

from __future__ import annotations

import ast
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch.distributed as dist

RECORDERS = ("_dump_nccl_trace", "_dump_fr_trace")
"""Functions of torch's extension that read the recorders of NCCL (in builds with NCCL) and gloo (PyTorch 2.9)."""
DTYPES = {
    "Float": "float32",
    "Double": "float64",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
}
"""ATen's names of dtypes that differ from torch's names in more than case."""


@dataclass(frozen=True)
class Operation:
    """A collective, send or receive that a rank has launched.

    Attributes:
        name: the operation's name, such as "all_reduce".
        group: the group's name.
        ranks: the group's ranks.
        number: number among the collectives that this rank has launched in the group, from 1. Sends and receives
            together have a count of their own.
        what: shape and dtype of the first tensor; "" without tensors.
        between_two: whether the operation is a send or a receive.
    """

    name: str
    group: str
    ranks: tuple[int, ...]
    number: int
    what: str = ""
    between_two: bool = False

    @property
    def words(self) -> str:
        """The operation in words for a longer message, such as "all_reduce of 7 float32 (ranks 0-3)"."""
        return f"{self._called} ({ranks_in_words(self.ranks)})"

    @property
    def numbered(self) -> str:
        """The operation in words with its number, such as "all_reduce of 7 float32 (number 5 of ranks 0-3)"."""
        return f"{self._called} (number {self.number} of {ranks_in_words(self.ranks)})"

    @property
    def _called(self) -> str:
        return f"{self.name} of {self.what}" if self.what else self.name


def recorded() -> list[dict[str, Any]]:
    """Dump the communication operations of this process: one dump for each flight recorder that this build of PyTorch
    has."""
    return [pickle.loads(dump(True, False, False)) for dump in _recorders()]


def progress() -> tuple[tuple[str, int, int], ...]:
    """For each group, return (number of the group, number of the last collective that was launched, number of the last
    collective that has ended). This query takes 0.1 ms.

    PyTorch reads its table of groups without a lock. If this process launches the first collective of a group at the
    same moment, the process may crash, so call this only if `launched` has not changed for a while.

    A group's number counts all groups that this process has created. Unlike a name, a number is never reused after the
    group is destroyed.
    """
    states = [pickle.loads(dump(False, False, True)).get("pg_status", {}) for dump in _recorders()]
    return tuple(
        (group, status["last_enqueued_collective"], status["last_completed_collective"])
        for each in states
        for group, status in each.items()
    )


def launched() -> tuple[tuple[str, int], ...]:
    """For each group of this process, return (name, number of collectives that were launched), without the recorder.
    The number is -1 if the group's back end does not count.
    """
    names = dist.distributed_c10d._world.pg_names
    return tuple((name, _count_of(group)) for group, name in list(names.items()))


def _count_of(group: Any) -> int:
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return -1


def _recorders() -> list[Any]:
    from torch._C import _distributed_c10d as extension

    found = (getattr(extension, name, None) for name in RECORDERS)
    return [each for each in found if each is not None]


def ranks_of_groups() -> dict[str, tuple[int, ...]]:
    """The ranks of each group of this process, by the group's name."""
    world = dist.distributed_c10d._world
    return {name: tuple(world.pg_group_ranks.get(group, ())) for group, name in list(world.pg_names.items())}


def unfinished(dumps: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[int, ...]]) -> tuple[Operation, ...]:
    """The operations that a rank has launched and that have not ended, the oldest first.

    Args:
        dumps: the dumps of this rank.
        groups: the ranks of each group, by name, for dumps that do not include the ranks.
    """
    return tuple(
        operation
        for entry, operation in _operations(dumps, groups)
        if not entry.get("retired") and entry.get("state") != "completed"
    )


def newest(dumps: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[int, ...]]) -> Operation | None:
    """The communication operation that a rank has launched last, whether or not it has ended. `unfinished` would omit a
    failed operation, which counts as ended."""
    found = _operations(dumps, groups)
    return found[-1][1] if found else None


def _operations(
    dumps: Sequence[Mapping[str, Any]], groups: Mapping[str, tuple[int, ...]]
) -> list[tuple[Mapping[str, Any], Operation]]:
    """(entry in one of the rank's dumps, operation) for each communication operation of a rank, the oldest first."""
    found = []
    for dump in dumps:
        said = {name: _ranks_of(config) for name, config in dump.get("pg_config", {}).items()}
        for entry in dump.get("entries", ()):
            group = str(entry["process_group"][0])
            two = bool(entry.get("is_p2p"))
            operation = Operation(
                name=str(entry["profiling_name"]).partition(":")[2] or str(entry["profiling_name"]),
                group=group,
                ranks=said.get(group) or groups.get(group, ()),
                number=int(entry["p2p_seq_id" if two else "collective_seq_id"]),
                what=_tensor(entry),
                between_two=two,
            )
            found.append((entry, operation))
    return sorted(found, key=lambda pair: pair[0].get("time_created_ns") or 0)


def _ranks_of(config: Mapping[str, Any]) -> tuple[int, ...]:
    return tuple(ast.literal_eval(config.get("ranks") or "[]"))


def _tensor(entry: Mapping[str, Any]) -> str:
    sizes, dtypes = entry.get("input_sizes") or (), entry.get("input_dtypes") or ()
    if not sizes:
        return ""
    shape = "x".join(map(str, sizes[0])) or "one"
    dtype = DTYPES.get(dtypes[0], str(dtypes[0]).lower()) if dtypes else "numbers"
    return f"{shape} {dtype}"


# ---- several ranks -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lack:
    """A collective in which ranks wait, because other ranks of its group have not launched it. If `by` is empty, all
    ranks have launched it, but it has not ended.

    Attributes:
        operation: the collective, as recorded by the ranks that wait.
        by: the ranks that lack the collective.
        awaited_by: the ranks that wait in the collective.
    """

    operation: Operation
    by: tuple[int, ...]
    awaited_by: tuple[int, ...]

    @property
    def words(self) -> str:
        """The text for a message, such as "rank 2 lacks the all_reduce of 7 float32 (number 5 of ranks 0-3), which
        ranks 0-1, 3 await"."""
        lacks, await_ = "lack" if len(self.by) > 1 else "lacks", "await" if len(self.awaited_by) > 1 else "awaits"
        waiting = f"{ranks_in_words(self.awaited_by)} {await_}"
        if not self.by:
            return f"every rank has called the {self.operation.numbered}, and yet {waiting} it"
        return f"{ranks_in_words(self.by)} {lacks} the {self.operation.numbered}, which {waiting}"


def lacks(unfinished_of: Mapping[int, Sequence[Operation]]) -> list[Lack]:
    """All collectives in which ranks wait. The list begins with collectives that are lacked only by ranks that wait in
    no other collective.

    A rank that lacks one collective may be waiting in another collective. A rank that waits in another collective is
    blocked, and is not the cause.

    Args:
        unfinished_of: for each rank, its launched operations that have not ended.
    """
    in_it: dict[tuple[str, int], tuple[Operation, list[int]]] = {}
    for rank, operations in unfinished_of.items():
        for operation in operations:
            if not operation.between_two:
                in_it.setdefault((operation.group, operation.number), (operation, []))[1].append(rank)
    found = [
        Lack(operation, tuple(rank for rank in operation.ranks if rank not in waiting), tuple(sorted(waiting)))
        for operation, waiting in in_it.values()
    ]
    held_up = {rank for each in found for rank in each.awaited_by}
    return sorted(found, key=lambda each: (not each.by, len(held_up & set(each.by)), -len(each.awaited_by)))


def lacking(unfinished_of: Mapping[int, Sequence[Operation]], by: Collection[int] = ()) -> str:
    """One line about the first of `lacks`, the most likely cause of the wait; "" if no rank waits.

    Args:
        unfinished_of: for each rank, its launched operations that have not ended.
        by: ranks. A collective that one of these ranks lacks is preferred.
    """
    found = sorted(lacks(unfinished_of), key=lambda each: not set(by) & set(each.by))
    return found[0].words if found else ""


def ranks_in_words(ranks: Collection[int]) -> str:
    """Return ranks as text: [0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(runs) == 1 and len(runs[0]) == 1 else 'ranks'} {', '.join(words)}"
