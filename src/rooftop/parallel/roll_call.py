"""The roll call checks that all ranks are present, can start and have the same settings. If any check fails, the roll
call tells all ranks which rank is the cause.

Ranks meet in a store. A launcher's store outlives the ranks: when the launcher restarts the ranks, perhaps fewer or
other ranks, the store still has entries of the earlier ranks. So meetings are numbered. A rank enters the first meeting
that has no verdict yet. If an earlier process with the same rank has entered this meeting and has ended, the rank
closes the meeting, and all ranks continue with the next meeting. Before the verdict, only a rank that answers counts as
present. The restart count in the environment would not suffice, since each launcher has its own count.

A meeting has these keys in the store, which must differ from the keys of `watching.py`:

| key | |
|---|---|
| `here/R` | rank R's settings, the reason if the rank cannot start, and its process |
| `who` | a rank is about to decide; each rank that reads this key answers |
| `answer/R` | rank R is present |
| `verdict` | "=" and the problem ("=" alone: no problem), or `GO_ON`: continue with the next meeting |
| `processes` | the processes of all ranks, by rank |
| `heard/R` | rank R has read a negative verdict |
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from rooftop.parallel.errors import RankError
from rooftop.parallel.flight_records import ranks_in_words
from rooftop.parallel.process_states import Process
from rooftop.parallel.watching import poll
from rooftop.words import first_line

JUDGING = 1.2
"""Rank 0 decides the roll call when its patience ends. If rank 0 does not decide, another rank decides after this
multiple of rank 0's patience.
"""
LINGER_S = 3.0
"""A rank that runs the store or has failed stays for this many seconds, so that the others can learn the reason. The
other ranks need a tenth of this time.
"""
ANSWER_S = 1.0
"""Seconds within which a waiting rank answers."""
GO_ON = "go on"


class StoreEnded(RankError):
    """The store at which the ranks meet closed during the roll call."""


class MeetingOver(Exception):
    """Raised if this process must enter the next meeting: this meeting already has a verdict, or an earlier process has
    entered it with the same rank as a present process."""


@dataclass(frozen=True)
class RollCall:
    """One rank's view of a meeting.

    Attributes:
        store: the meeting's store.
        holds_store: whether this process runs the store, which closes when the process ends.
    """

    store: Any
    rank: int
    size: int
    holds_store: bool

    def call(self, settings: Mapping[str, object], problem: str, patience_s: float) -> list[Process]:
        """Wait until all ranks are present and agree. Return their processes, by rank.

        Raises:
            RankError: some ranks are missing, cannot start or disagree. All present ranks raise the same error.
            MeetingOver: this process must enter the next meeting.
        """
        words = {name: repr(value) for name, value in settings.items()}
        mine = json.dumps([words, problem, asdict(Process.here()), secrets.token_hex(8)])
        try:
            if self.store.check(["verdict"]):
                raise MeetingOver
            if self.store.compare_set(f"here/{self.rank}", "", mine).decode() != mine:
                self._decide(GO_ON)
                raise MeetingOver
            if self.rank == 0:
                self._judge(time.monotonic() + patience_s, patience_s)
            else:
                self._answer(patience_s)
            verdict = self._verdict(patience_s)
            if verdict == GO_ON:
                raise MeetingOver
            if verdict != "=":
                say(self.store, "heard", self.rank, LINGER_S if self.holds_store else 0.0, self._present())
                raise RankError(verdict[1:])
            return [Process(**each) for each in json.loads(self.store.get("processes"))]
        except RankError:
            raise
        except RuntimeError as error:
            raise StoreEnded(
                f"rank 0 of {self.size} ended while the ranks were starting; see its output ({first_line(error)})"
            ) from error

    def _answer(self, patience_s: float) -> None:
        try:
            self.store.wait(["who"], timedelta(seconds=JUDGING * patience_s))
        except RuntimeError:  # rank 0 is missing, and the launcher runs the store
            self._judge(time.monotonic() + ANSWER_S, patience_s)
        self.store.set(f"answer/{self.rank}", "1")

    def _verdict(self, patience_s: float) -> str:
        try:
            self.store.wait(["verdict"], timedelta(seconds=JUDGING * patience_s))
        except RuntimeError:  # the rank that set `who` has ended
            self._judge(time.monotonic(), patience_s)
        return str(self.store.get("verdict").decode())

    def _judge(self, until: float, patience_s: float) -> None:
        """Wait for the answers of all ranks, at most until the time `until`. Then write the meeting's verdict, unless
        another rank has written one."""
        self.store.set("who", "1")
        self.store.set(f"answer/{self.rank}", "1")
        everybody = [f"answer/{rank}" for rank in range(self.size)]
        poll(lambda: self.store.check(["verdict"]) or self.store.check(everybody), until)
        entries = {rank: json.loads(self.store.get(f"here/{rank}")) for rank in self._present()}
        wrong = self._said_of({rank: (words, problem) for rank, (words, problem, *_) in entries.items()}, patience_s)
        if not wrong:
            self.store.set("processes", json.dumps([process for _, (_, _, process, _) in sorted(entries.items())]))
        self._decide("=" + wrong)

    def _decide(self, verdict: str) -> None:
        """Write the verdict, unless there is one already. Then set the key `who`, which ends the wait of ranks in
        `_answer`."""
        self.store.compare_set("verdict", "", verdict)
        self.store.set("who", "1")

    def _present(self) -> list[int]:
        if self.store.check([f"answer/{rank}" for rank in range(self.size)]):
            return list(range(self.size))
        return [rank for rank in range(self.size) if self.store.check([f"answer/{rank}"])]

    def _said_of(self, entries: Mapping[int, tuple[dict[str, str], str]], patience_s: float) -> str:
        missing = [rank for rank in range(self.size) if rank not in entries]
        if missing:
            return (
                f"{ranks_in_words(missing)} of {self.size} did not come within {patience_s:g} s of rank "
                f"{min(entries)}: see their output, or give late ranks more time with patience_s"
            )
        problems = {rank: problem for rank, (_, problem) in entries.items() if problem}
        if problems:
            return "; ".join(f"rank {rank} of {self.size} cannot start: {text}" for rank, text in problems.items())
        different = list(_differences([(rank, words) for rank, (words, _) in entries.items()]))
        if different:
            return f"the ranks have different settings: {'; '.join(different)}. Start all ranks with the same settings"
        return ""


def _differences(entries: Sequence[tuple[int, Mapping[str, str]]]) -> Iterable[str]:
    for name in dict.fromkeys(name for _, words in entries for name in words):
        values: dict[str, list[int]] = {}
        for rank, words in entries:
            values.setdefault(words.get(name, "not given"), []).append(rank)
        if len(values) > 1:
            yield f"{name} is " + ", ".join(f"{value} at {ranks_in_words(at)}" for value, at in values.items())


def say(store: Any, key: str, rank: int, linger_s: float, ranks: Iterable[int]) -> None:
    """Set this rank's key (`key`/`rank`), and wait up to `linger_s` seconds until all `ranks` have set theirs."""
    try:
        store.set(f"{key}/{rank}", "1")
        others = [f"{key}/{each}" for each in ranks]
        if linger_s:
            poll(lambda: store.check(others), time.monotonic() + linger_s)
    except RuntimeError:  # the store has closed, so no rank can read the key
        return
