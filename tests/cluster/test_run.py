"""The loop alone, with workers that fail at random: each item gets one row, whatever is lost, and in any order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.cluster.events import Event, Finished, Hung, Lost
from rooftop.cluster.items import Decoding, Item
from rooftop.cluster.mapping import _Run
from rooftop.cluster.parts import Parts
from rooftop.cluster.tables import Failure, to_batch
from rooftop.cluster.targets import CallableTarget
from rooftop.cluster.working import Chunk, Job, Outcome

pq = pytest.importorskip("pyarrow.parquet")


class DrawnWorkers:
    """Workers that return chunks in random order with random fates: f(inished), l(ost), d(eath), h(ung). In the end,
    all chunks finish."""

    def __init__(self, fates: list[tuple[str, int]]) -> None:
        self.fates, self.chunks = fates, list[Chunk]()
        self.most = 0

    def has_room(self, careful: bool = False) -> bool:
        return len(self.chunks) < (1 if careful else 4)

    def give(self, chunk: Chunk) -> None:
        assert chunk.items
        assert not chunk.careful or len(chunk.items) == 1
        self.chunks.append(chunk)
        self.most = max(self.most, len(self.chunks))

    def take(self, patience_s: float) -> list[Event]:
        fate, number = self.fates.pop() if self.fates else ("f", 0)
        chunk = self.chunks.pop(number % len(self.chunks))
        if fate == "l":
            return [Lost(chunk, None)]
        if fate == "d":
            return [Lost(chunk, "the worker ended", 1 + number % 2)]
        if fate == "h":
            first = number % len(chunk.items)
            return [Hung(chunk, first, 1 + number % (len(chunk.items) - first))]
        # every third item fails, and the first results have no type
        outcomes: list[Any] = [
            Failure("third") if item.place % 3 == 0 else {"n": item.place if item.place > 4 else None}  # type: ignore[operator]
            for item in chunk.items
        ]
        rows, errors, columns = to_batch(chunk.items, outcomes, chunk.columns, chunk.learn)
        return [Finished(chunk, Outcome(rows, errors, columns, len(outcomes), len(outcomes), 0.01, 0.01, "a"))]

    def close(self, at_once: bool = False) -> None:
        pass


@given(
    count=st.integers(1, 60),
    batch=st.integers(1, 5),
    fates=st.lists(st.tuples(st.sampled_from("fffldh"), st.integers(0, 9)), max_size=40),
)
def test_each_item_has_one_row(
    count: int, batch: int, fates: list[tuple[str, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    out: Path = tmp_path_factory.mktemp("run") / "out"
    workers = DrawnWorkers(list(fates))
    job = Job(CallableTarget("my.py:fn", ("my.py", "fn"), batch), Decoding("text"), 1, 1.0)
    with Parts(out, "my.py:fn", {}) as parts:
        run = _Run(parts, None, None)
        run.all(workers, job, iter([Item("a", place, "") for place in range(count)]))
    rows = sorted(pq.read_table(out).to_pylist(), key=lambda row: row["place"])
    assert [row["place"] for row in rows] == list(range(count))
    assert (run.items, run.errors) == (count, sum(row["error"] is not None for row in rows))
    for row in rows:
        assert row["error"] is not None or row["place"] % 3
        assert row["error"] in (None, "third") or "ended during" in row["error"] or "took longer" in row["error"]
        if "n" in row and row["error"] is None:
            assert row["n"] == (row["place"] if row["place"] > 4 else None)
    if not any(fate in "dh" for fate, _ in fates):
        assert {row["error"] for row in rows} <= {None, "third"}
