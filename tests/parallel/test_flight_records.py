"""Reads dumps of PyTorch's flight recorder: hand-made dumps in the documented format, and gloo's own."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rooftop.parallel import flight_records
from rooftop.parallel.flight_records import (
    Operation,
    lacking,
    lacks,
    newest,
    progress,
    ranks_in_words,
    ranks_of_groups,
    recorded,
    unfinished,
)
from rooftop.parallel.watching import poll

Run = Callable[..., list[Any]]

SUM, GATHER, SEND = "nccl:all_reduce", "nccl:all_gather", "nccl:send 0->1"


def entry(name: str, group: str, number: int, state: str, at: int, sizes: list[int] | None = None) -> dict[str, Any]:
    """An entry in the format of NCCL's recorder, version 2.10."""
    two = name == SEND
    return {
        "frames": [{"name": "sum_", "filename": "gradients.py", "line": 155}],
        "record_id": at,
        "pg_id": int(group),
        "process_group": (group, "data parallel"),
        "collective_seq_id": 0 if two else number,
        "p2p_seq_id": number if two else 0,
        "op_id": at,
        "profiling_name": name,
        "time_created_ns": 1_700_000_000_000_000_000 + at,
        "input_sizes": [[3, 5]] if sizes is None else [sizes],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[3, 5]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": state == "completed",
        "timeout_ms": 600_000,
        "is_p2p": two,
    }


def dump(*entries: dict[str, Any]) -> dict[str, Any]:
    return {
        "version": "2.10",
        "pg_config": {
            "0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"},
            "1": {"name": "1", "desc": "tensor parallel", "ranks": "[2, 3]"},
        },
        "pg_status": {
            "0": {"last_enqueued_collective": 5, "last_started_collective": 5, "last_completed_collective": 4}
        },
        "entries": list(entries),
    }


DUMPS = {
    0: dump(entry(SUM, "0", 4, "completed", 1), entry(SUM, "0", 5, "started", 2), entry(SUM, "0", 6, "scheduled", 3)),
    1: dump(entry(SUM, "0", 4, "completed", 1), entry(SUM, "0", 5, "scheduled", 2)),
    2: dump(entry(SUM, "0", 4, "completed", 1), entry(GATHER, "1", 9, "started", 7, [8])),
    3: dump(entry(SUM, "0", 4, "completed", 1)),
}


def of_rank(rank: int) -> tuple[Operation, ...]:
    return unfinished([DUMPS[rank]], {})


def test_what_a_rank_has_launched_and_not_ended() -> None:
    first = Operation("all_reduce", "0", (0, 1, 2, 3), 5, "3x5 bfloat16")
    second = Operation("all_reduce", "0", (0, 1, 2, 3), 6, "3x5 bfloat16")
    assert of_rank(0) == (first, second)
    assert unfinished([dump(*reversed(DUMPS[0]["entries"]))], {}) == (first, second)  # by time
    assert of_rank(3) == ()
    assert newest([DUMPS[2]], {}) == Operation("all_gather", "1", (2, 3), 9, "8 bfloat16")
    assert newest([dump()], {}) is None


@pytest.mark.parametrize(("name", "dtype"), [("Char", "int8"), ("Short", "int16"), ("Bool", "bool")])
def test_dtypes_have_torchs_names(name: str, dtype: str) -> None:
    (found,) = unfinished([dump({**entry(SUM, "0", 5, "started", 2), "input_dtypes": [name]})], {})
    assert found.what == f"3x5 {dtype}"


def test_groups_that_a_dump_does_not_name_are_those_of_the_process() -> None:
    """gloo's dumps name no groups."""
    one = {**dump(entry("gloo:barrier", "7", 1, "scheduled", 1, [])), "pg_config": {"": {"name": "", "ranks": "[]"}}}
    one["entries"][0] |= {"input_sizes": [], "input_dtypes": []}
    (found,) = unfinished([one], {"7": (4, 6)})
    assert found.words == "barrier (ranks 4, 6)"
    assert found.numbered == "barrier (number 1 of ranks 4, 6)"


def test_which_rank_lacks_which_collective_in_one_line() -> None:
    """Rank 2 also lacks the collective that ranks 0 and 1 await, but it waits for rank 3 itself."""
    ranks = {rank: of_rank(rank) for rank in DUMPS}
    assert lacking(ranks) == "rank 3 lacks the all_gather of 8 bfloat16 (number 9 of ranks 2-3), which rank 2 awaits"
    assert [(each.by, each.awaited_by) for each in lacks(ranks)] == [((3,), (2,)), ((2, 3), (0, 1)), ((1, 2, 3), (0,))]
    assert lacking(ranks, by=[1]) == (
        "ranks 1-3 lack the all_reduce of 3x5 bfloat16 (number 6 of ranks 0-3), which rank 0 awaits"
    )
    assert lacking({0: (), 1: ()}) == ""


def test_a_collective_that_all_have_launched_is_said_to_be_stuck() -> None:
    stuck = unfinished([dump(entry(GATHER, "1", 9, "started", 7, [8]))], {})
    said = "every rank has called the all_gather of 8 bfloat16 (number 9 of ranks 2-3), and yet ranks 2-3 await it"
    assert lacking({2: stuck, 3: stuck}) == said


def test_sends_are_no_collectives() -> None:
    sent = unfinished([dump(entry(SEND, "0", 3, "started", 1))], {})
    assert sent[0].between_two
    assert sent[0].number == 3
    assert lacking({0: sent, 1: ()}) == ""


@pytest.mark.parametrize(
    ("ranks", "words"), [([3], "rank 3"), ([0, 1, 2, 5], "ranks 0-2, 5"), ([1, 3], "ranks 1, 3"), ([4, 5], "ranks 4-5")]
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert ranks_in_words(ranks) == words


def test_each_recorder_that_a_build_has_is_read() -> None:
    from torch._C import _distributed_c10d as extension

    def nccl(*_: object) -> bytes:
        return pickle.dumps(DUMPS[0])

    with (
        patch.object(extension, "_dump_nccl_trace", nccl, create=True),
        patch.object(flight_records, "RECORDERS", ("_dump_nccl_trace", "_dump_of_no_build")),
    ):
        assert recorded() == [DUMPS[0]]
        assert progress() == (("0", 5, 4),)


def launched_alone() -> tuple[list[str], bool, list[str]]:
    """The collective that rank 0 has launched and rank 1 has not.

    A thread of gloo records the end of an operation a moment later, first in its entry, then in the group's numbers.
    Groups of earlier tests in this process are still in its records, with lower numbers.
    """

    def waits() -> bool:
        _, launched, ended = max(progress(), key=lambda each: int(each[0]))
        return launched > ended

    work, store = None, dist.distributed_c10d._get_default_store()
    dist.barrier()
    ended = poll(lambda: not unfinished(recorded(), ranks_of_groups()) and not waits(), time.monotonic() + 60)
    assert ended, (progress(), unfinished(recorded(), ranks_of_groups()))
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(7), async_op=True)
    found = unfinished(recorded(), ranks_of_groups())
    waited = waits()
    store.set(f"read/{dist.get_rank()}", "1")
    store.wait(["read/0", "read/1"])
    if dist.get_rank() == 1:
        dist.all_reduce(torch.ones(7))
    if work is not None:
        work.wait()
    poll(lambda: not unfinished(recorded(), ranks_of_groups()), time.monotonic() + 60)
    return [each.words for each in found], waited, [each.words for each in unfinished(recorded(), ranks_of_groups())]


@pytest.mark.parametrize("groups_before", [0, 2])
def test_gloo_says_what_is_unfinished(on_ranks: Run, groups_before: int) -> None:
    """The records also work in processes that had other groups before, whose numbers remain in the records."""
    for _ in range(groups_before):
        on_ranks(2, launched_alone)
    (first, first_waits, after), (second, second_waits, _) = on_ranks(2, launched_alone)
    assert first == ["all_reduce of 7 float32 (ranks 0-1)"]
    assert first_waits
    assert second == []
    assert not second_waits
    assert after == []
