"""The work on chunks in a worker: batches are begun before the results of the last one are read, even across chunks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from rooftop.cluster.items import Decoding, Item
from rooftop.cluster.tables import Failure
from rooftop.cluster.targets import CallableTarget, PipelinedCall
from rooftop.cluster.working import Chunk, Decoded, Job, Outcome, Workshop, decoded

pytest.importorskip("pyarrow")


@dataclass
class Halves:
    """A call in two halves that notes what happens; values of `bad` raise in one of them."""

    bad: dict[int, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    device_s: float = 0.0

    def begin(self, values: list[int]) -> list[int]:
        self.notes.append(f"begin {values}")
        if any(self.bad.get(value) == "begin" for value in values):
            raise ValueError("no beginning")
        return values

    def finish(self, begun: list[int]) -> Sequence[Any]:
        self.notes.append(f"finish {begun}")
        self.device_s += 0.5
        if any(self.bad.get(value) == "finish" for value in begun):
            raise ValueError("no end")
        return [{"n": value} for value in begun]

    def __call__(self, values: list[int]) -> Sequence[Any]:
        return self.finish(self.begin(values))


class Numbers:
    """Decoded items, each with its place."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.items = deque(item for chunk in chunks for item in chunk.items)

    def take(self, count: int) -> list[Decoded]:
        return [Decoded(self.items.popleft().place, 0.25) for _ in range(count)]


def done(call: Any, sizes: Sequence[int], together: bool = True) -> list[Outcome]:
    """The outcomes of chunks of these sizes, in batches of two. All chunks are available at once, or each arrives when
    the loop waits for it."""
    places = iter(range(sum(sizes)))
    chunks = [Chunk(n, [Item("a", next(places), "") for _ in range(size)], learn=True) for n, size in enumerate(sizes)]
    shop = Workshop(Job(loaded(call), Decoding("text"), 1), "cpu", "it")
    waiting = deque(chunks)

    def given(wait: bool) -> Chunk | None:
        return waiting.popleft() if waiting and (wait or together) else None

    return list(shop.outcomes(given, Numbers(chunks), lambda chunk, first, count: nullcontext()))


def loaded(call: Any) -> Any:
    class Target(CallableTarget):
        def load(self, device: str) -> Any:
            return call

    return Target("my.py:fn", None, 2)


def numbers(outcomes: Sequence[Outcome]) -> list[list[int | None]]:
    return [outcome.batch.column("n").to_pylist() for outcome in outcomes]


def test_a_batch_is_begun_before_the_last_one_is_read_also_of_the_next_chunk() -> None:
    call = Halves()
    assert isinstance(call, PipelinedCall)
    outcomes = done(call, [4, 2])
    assert call.notes == [
        "begin [0, 1]", "begin [2, 3]", "finish [0, 1]", "begin [4, 5]", "finish [2, 3]", "finish [4, 5]",
    ]  # fmt: skip
    assert numbers(outcomes) == [[0, 1, 2, 3], [4, 5]]
    assert [outcome.call_s for outcome in outcomes] == [1.0, 0.5]
    assert [outcome.decode_s for outcome in outcomes] == [1.0, 0.5]


def test_nothing_waits_for_a_chunk_that_is_not_there() -> None:
    call = Halves()
    assert numbers(done(call, [2, 2], together=False)) == [[0, 1], [2, 3]]
    assert call.notes == ["begin [0, 1]", "finish [0, 1]", "begin [2, 3]", "finish [2, 3]"]


@pytest.mark.parametrize("half", ["begin", "finish"])
def test_a_batch_that_fails_is_tried_item_by_item(half: str) -> None:
    outcomes = done(Halves({3: half}), [6])
    assert numbers(outcomes) == [[0, 1, 2, None, 4, 5]]
    assert outcomes[0].errors == 1
    assert outcomes[0].batch.column("error")[3].as_py().startswith("ValueError: no ")


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
def test_each_exception_of_a_users_code_is_an_error_of_its_item(kind: type[BaseException]) -> None:
    def call(values: list[int]) -> Sequence[Any]:
        if 1 in values:
            raise kind("stop")
        return [{"n": value} for value in values]

    def decode(item: Item) -> Any:
        raise kind("stop")

    (outcome,) = done(call, [4])
    assert numbers([outcome]) == [[0, None, 2, 3]]
    assert outcome.batch.column("error")[1].as_py() == f"{kind.__name__}: stop"
    assert decoded(decode, Item("a", 0, "")).value == Failure(f"{kind.__name__}: stop")


def test_a_plain_call_works_on_one_batch_after_another() -> None:
    assert numbers(done(lambda values: [{"n": value} for value in values], [3, 3, 1])) == [[0, 1, 2], [3, 4, 5], [6]]


def test_rows_of_a_large_chunk_are_one_table_whose_columns_are_learned_late() -> None:
    def call(values: list[int]) -> Sequence[Any]:
        return [{"n": value, "late": [value] if value >= 150 else None} for value in values]

    (outcome,) = done(call, [200])
    assert numbers([outcome]) == [list(range(200))]
    assert outcome.batch.column("late").to_pylist() == [None] * 150 + [[value] for value in range(150, 200)]
    assert outcome.columns.field("late").type == outcome.batch.schema.field("late").type
    assert outcome.batch.column("place").to_pylist() == list(range(200))
