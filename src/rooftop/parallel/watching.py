"""Watch the other ranks in a thread, so that no rank waits forever for a failed rank.

| what the thread detects | how | after |
|---|---|---|
| a failure that another rank has reported | from the store | 0.2 s |
| the end of a rank's process on this machine | /proc | 0.2 s |
| a rank on this machine that a signal has suspended | /proc | `STOPPED_S` |
| another machine whose ranks send no heartbeats | the ranks' heartbeat counts in the store | `SILENT_S` |
| the end of the launcher that started this rank | the parent's PID | 0.2 s |
| SIGTERM, which the launcher sends to all ranks when one has ended | `rooftop.parallel.terminations` | 0.2 s |
| ranks that wait for a live rank | flight recorders and reported activity | `NOTE_S`: a note; `timeout_s`: a failure |

Each rank watches the next rank on its machine, and the first rank of a machine watches the next machine. Ranks wait up
to `timeout_s` for a live rank, which may compile, save, read, or hold the GIL (so that its own thread cannot send
heartbeats).

The rank that detects a failure asks all other ranks what they wait for, and writes the failure to the store with their
answers. Then each rank aborts its waits in NCCL or gloo. If a rank's main thread does not leave the block, the watching
thread kills the process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from rooftop.parallel.flight_records import (
    Operation,
    launched,
    newest,
    progress,
    ranks_in_words,
    ranks_of_groups,
    recorded,
    unfinished,
)
from rooftop.parallel.peer_memory import end_waits
from rooftop.parallel.places import Place, interrupted, place_here
from rooftop.parallel.process_states import GONE, STOPPED, Process, oom_kills
from rooftop.parallel.progress import all_places
from rooftop.parallel.terminations import Termination
from rooftop.parallel.waits import Waits, context
from rooftop.words import first_line

WATCH_S = 0.2
"""Seconds between a rank's heartbeats, and between its checks for failed ranks."""
SILENT_S = 20.0
"""A rank on another machine counts as failed after this many seconds without a heartbeat. A thread sends heartbeats
during any computation of the rank, unless code that holds the GIL blocks this thread.
"""
STOPPED_S = 8.0
"""A rank on this machine counts as failed after a signal has suspended it for this many seconds."""
SILENCE_S = 3.0
"""After a broken connection or SIGTERM, a rank counts as gone after this many seconds without a heartbeat."""
NOTICING_S = 1.0
"""Seconds within which all ranks notice a failure. A suspended rank that wakes after this time finds no other rank to
continue with.
"""
TELLING_S = 1.0
"""After a rank has detected a failure, the rank waits this many seconds for the other ranks to report what they wait
for.
"""
ARRIVING_S = 0.6
"""A rank that waits for nothing delays its answer by this many seconds if it is asked what it waits for. In this time,
it may begin to wait for the failed rank.
"""
PLACE_S = 0.4
"""Seconds between a rank's reports of its current activity, if the activity has changed."""
LOOK_S = 1.0
"""Seconds between two checks of which rank waits for which other rank."""
STUCK_S = 2.0
"""Reading the whole flight recorder takes 0.1 s, so it is read only after no collective has begun or ended for this
long. Its counts of collectives are read after half of this time without a launch (see `flight_records.progress`).
"""
LEAVING_S = 60.0
"""Seconds that a program has to leave the block after a failure. Then the watching thread kills the process."""
ENDED = ("its process has ended", "their processes have ended")
NO_TAG = (1 << 30) + 7  # the tag of a message that no rank ever sends


@dataclass(frozen=True)
class Failure:
    """A failure: the ranks that have failed (`culprits`), and the error message (`words`), without the text about what
    other ranks wait for."""

    words: str
    culprits: tuple[int, ...]


@dataclass
class Watch:
    """Watches the other ranks in a thread of this rank.

    Attributes:
        store: the thread's own connection to the block's store.
        processes: the processes of all ranks.
        launcher: PID of the launcher, which is this process's parent; None: unknown.
        termination: records whether this process has received SIGTERM.
        timeout_s: how long ranks may wait for a live rank.
        failure: the first failure; empty until this rank notices it.
        at: for each program that this rank's GPUs ran at the time of the failure, a text that says how far it was.
        noticed: an event that is set once this rank knows of a failure.
    """

    store: Any
    rank: int
    size: int
    processes: Sequence[Process]
    launcher: int | None
    termination: Termination
    timeout_s: float
    failure: str = ""
    at: list[str] = field(default_factory=list)
    noticed: threading.Event = field(default_factory=threading.Event)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        machines = list(dict.fromkeys(process.machine for process in self.processes))
        here = self.processes[self.rank].machine
        self._here = [rank for rank, process in enumerate(self.processes) if process.machine == here]
        self._next = self._here[(self._here.index(self.rank) + 1) % len(self._here)]
        there = machines[(machines.index(here) + 1) % len(machines)]
        ours = self.rank == self._here[0] and there != here
        self._there = _Signs([r for r, each in enumerate(self.processes) if ours and each.machine == there])
        self._stopped_s, self._looked_there_at = 0.0, time.monotonic()
        self._asked_at: float | None = None
        self._asked_for_place_at: float | None = None
        self._beats_then = dict[int, int]()
        self._told: tuple[float, Place | None] = (float("-inf"), None)
        self._launched: tuple[object, float] = ((), time.monotonic())
        self._moved: tuple[object, float] = ((), time.monotonic())
        self._first_beat: tuple[int, float] = (-1, time.monotonic())
        self._looked_at = time.monotonic()
        self._waits, self._noted_s = Waits(self.size), 0.0
        self._killed_before, self._recorder_works = oom_kills(), True

    @contextmanager
    def on(self) -> Iterator[None]:
        """Watch the other ranks in a thread, within the `with` block."""
        thread = threading.Thread(target=self._run, args=(self.store.clone(),), name="rooftop ranks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(timeout=10 * WATCH_S)

    # ---- called by the main thread ----

    def tell(self, failure: Failure) -> str:
        """Report a failure. Return the first failure on any rank: this failure, unless there is an earlier one."""
        if not self.noticed.is_set():
            try:
                return self._tell(self.store, failure)
            except RuntimeError:  # the store has ended, which the thread will report
                self.noticed.wait(2 * WATCH_S)
        return self.failure or failure.words

    def gone(self, error: BaseException) -> Failure | None:
        """A `Failure` with the ranks that have ended without a report, because their end may have caused this rank's
        error. None if there are no such ranks.

        The call waits for `SILENCE_S` seconds to find them. If the store ends, the call ends earlier, with a `Failure`
        that says so. If the watching thread notices a failure, the call ends earlier, with None.
        """
        try:
            before = beats(self.store, range(self.size))
            if self.noticed.wait(SILENCE_S):
                return None
            silent = self._silent_since(self.store, before)
        except RuntimeError as closed:
            return self._store_gone(closed)
        return self._gone(silent, str(error)) if silent else None

    # ---- the thread ----

    def _run(self, store: Any) -> None:
        failure: Failure | None = None
        try:
            self._tell_place(store)
            while not self._stop.wait(WATCH_S):
                store.add(f"beat/{self.rank}", 1)
                if (failure := self._found(store)) is not None:
                    self._tell(store, failure)
                if store.check(["failed"]):
                    self.failure = store.get("failed").decode()
                    store.set(f"seen/{self.rank}", "1")
                    break
                self._tell_place(store, asked=store.check(["asked"]))
        except RuntimeError as error:
            if not self._stop.is_set():
                self.failure = self._store_gone(error).words
        if not self.failure:
            return
        self.at = all_places()  # read before the abort, after which GPUs continue
        self.noticed.set()
        abort_communication()
        if failure is not None:
            time.sleep(NOTICING_S)
            self._wake(failure.culprits)
        self._leave()

    def _found(self, store: Any) -> Failure | None:
        return (
            self._neighbour(store)
            or self._other_machine(store)
            or self._launcher_gone()
            or self._asked_to_end(store)
            or self._let_wait(store)
        )

    def _leave(self) -> None:
        """After a failure, kill this process if its main thread does not leave the `with` block in time. Nothing else
        can free a hanging thread."""
        until, asked_until = time.monotonic() + LEAVING_S, float("inf")
        while not self._stop.wait(WATCH_S):
            if self.termination.asked and asked_until == float("inf"):
                asked_until = time.monotonic() + SILENCE_S
            if time.monotonic() < min(until, asked_until):
                continue
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
            stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
            words = f"rank {self.rank} of {self.size} does not end by itself ({self.failure}); it is killed at:"
            print(f"rooftop: {words}\n{stack}", file=sys.stderr, flush=True)
            os._exit(1)

    # ---- detection of failures ----

    def _neighbour(self, store: Any) -> Failure | None:
        """Check the next rank on this machine: it may have ended, or a signal may have suspended it."""
        if self._next == self.rank:
            return None
        state, now = self.processes[self._next].state(), time.monotonic()
        # A late check counts as punctual, because a scheduler may have suspended both ranks.
        passed_s, self._looked_there_at = min(now - self._looked_there_at, 2 * WATCH_S), now
        self._stopped_s = self._stopped_s + passed_s if state == STOPPED else 0.0
        if state == GONE:
            ends_too = self._asked_at is not None and self.termination.ours
            gone = [] if ends_too else self._gone_here(store)
            return self._gone(gone, ENDED[len(gone) > 1], store) if gone else None
        if self._stopped_s >= STOPPED_S:
            words = f"rank {self._next} of {self.size} has given no sign of life for {STOPPED_S:g} s: it is suspended"
            return Failure(words, (self._next,))
        return None

    def _gone_here(self, store: Any) -> list[int]:
        gone = [rank for rank in self._here if rank != self.rank and self.processes[rank].state() == GONE]
        return [rank for rank in gone if not store.check([f"done/{rank}"])]

    def _other_machine(self, store: Any) -> Failure | None:
        silent_s = self._there.silent_s(store)
        if silent_s < SILENT_S or store.check([f"done/{self._there.ranks[0]}"]):
            return None
        has, are = ("have", "they are") if len(self._there.ranks) > 1 else ("has", "it is")
        words = f"{ranks_in_words(self._there.ranks)} of {self.size} {has} given no sign of life for {SILENT_S:g} s"
        return Failure(f"{words}: {are} suspended, or gone", tuple(self._there.ranks))

    def _launcher_gone(self) -> Failure | None:
        if self.launcher is None or os.getppid() == self.launcher:
            return None
        # name only this launcher's ranks, since a machine may have several launchers
        ours = [rank for rank in self._here if self.processes[rank].parent == self.processes[self.rank].parent]
        words = f"{ranks_in_words(ours)} of {self.size}: the launcher (torchrun) that started"
        return Failure(f"{words} {'them' if len(ours) > 1 else 'it'} is gone", tuple(ours))

    def _asked_to_end(self, store: Any) -> Failure | None:
        """After SIGTERM, look for ranks that are gone. If there are none, end this process, unless the program handles
        SIGTERM itself.
        """
        if not self.termination.asked:
            return None
        if self._asked_at is None:
            self._asked_at, self._beats_then = time.monotonic(), beats(store, range(self.size))
            gone = self._gone_here(store)
            return self._gone(gone, ENDED[len(gone) > 1], store) if gone else None
        if not self._beats_then or time.monotonic() - self._asked_at < SILENCE_S:
            return None
        silent, self._beats_then = self._silent_since(store, self._beats_then), {}
        if silent:
            return self._gone(silent, "this rank was asked to end", store)
        if self.termination.ours:
            store.set(f"ended/{self.rank}", "SIGTERM")
            os._exit(128 + signal.SIGTERM)
        return None

    def _silent_since(self, store: Any, before: dict[int, int]) -> list[int]:
        now = beats(store, range(self.size))
        alive = {rank for rank in self._here if self.processes[rank].state() != GONE}
        silent = [rank for rank, beat in now.items() if beat == before[rank] and rank not in alive]
        return [rank for rank in silent if not store.check([f"done/{rank}"])]

    def _gone(self, ranks: Sequence[int], why: str, store: Any = None) -> Failure:
        ended = [rank for rank in ranks if store is not None and store.check([f"ended/{rank}"])]
        if ended:
            was = "were" if len(ended) > 1 else "was"
            return Failure(f"{ranks_in_words(ended)} of {self.size} {was} ended by SIGTERM", tuple(ended))
        what = "are" if len(ranks) > 1 else "is"
        killed = oom_kills() - self._killed_before
        memory = "; in the meantime this machine's kernel killed a process for lack of memory" if killed > 0 else ""
        words = f"{ranks_in_words(ranks)} of {self.size} {what} gone without an error ({first_line(why)}{memory})"
        return Failure(words, tuple(ranks))

    def _store_gone(self, error: RuntimeError) -> Failure:
        """Describe an error of the store as the end of the process that held the store."""
        words = f"rank 0 of {self.size}, or the launcher that held the store, is gone ({first_line(error)})"
        return Failure(words, ())

    def _let_wait(self, store: Any) -> Failure | None:
        """Check which rank waits for which other rank. Rank 0 makes this check, or rank 1 if rank 0 sends no
        heartbeats.
        """
        now = time.monotonic()
        if self.rank > 1 or now - self._looked_at < LOOK_S:
            return None
        self._looked_at = now
        if self.rank == 1:
            beat = store.add("beat/0", 0)
            if beat != self._first_beat[0]:
                self._first_beat = beat, now
            if now - self._first_beat[1] < SILENCE_S:
                return None
        wait = self._waits.look(places_of(store, range(self.size)), now)
        if wait is None:
            self._noted_s = 0.0
            return None
        if wait.seconds >= self.timeout_s:
            who = f"{ranks_in_words(wait.culprits)} of {self.size} {'hang' if len(wait.culprits) > 1 else 'hangs'}"
            return Failure(f"{who if wait.culprits else 'all ranks hang'}: {wait.words}", wait.culprits)
        if wait.seconds >= 2 * self._noted_s:
            self._noted_s = wait.seconds
            words = f"rooftop: note: {wait.words}. All ranks end when this wait has lasted for {self.timeout_s:g} s"
            print(words, file=sys.stderr, flush=True)
        return None

    # ---- reports of ranks ----

    def _tell(self, store: Any, failure: Failure) -> str:
        """Write a failure to the store for all ranks, together with what the other ranks wait for. Return the first
        failure.
        """
        words = failure.words
        if failure.culprits:
            store.set("asked", "1")
            others = [rank for rank in range(self.size) if rank not in failure.culprits]
            told = [f"told/{rank}" for rank in others]

            def all_have_told() -> bool:
                self._tell_place(store, asked=True)
                return self.noticed.is_set() or store.check(["failed"]) or store.check(told)

            poll(all_have_told, time.monotonic() + TELLING_S)
            words += context(places_of(store, range(self.size)), failure.culprits)
            for rank in failure.culprits:
                store.set(f"seen/{rank}", "1")  # no rank should wait until a failed rank sets this key
        return str(store.compare_set("failed", "", words).decode())

    def _tell_place(self, store: Any, asked: bool = False) -> None:
        now, (when, before) = time.monotonic(), self._told
        asked = asked and not store.check([f"told/{self.rank}"])
        if not asked and now - when < PLACE_S:
            return
        place = place_here(self._operations(now, asked))
        if asked or place != before:
            store.set(f"place/{self.rank}", place.to_json())
        if asked and self._asked_for_place_at is None:
            self._asked_for_place_at = now
        if asked and (place.operations or place.awaited or now - (self._asked_for_place_at or now) >= ARRIVING_S):
            store.set(f"told/{self.rank}", "1")
        self._told = now, place

    def _operations(self, now: float, asked: bool) -> tuple[Operation, ...]:
        """This rank's communication that is launched and has not ended. The flight recorder is read only if no
        collective has finished for a while, or if another rank asks."""
        if self.size == 1 or not self._recorder_works or not dist.is_initialized():
            return ()
        if (counts := launched()) != self._launched[0]:
            self._launched = counts, now
        if not asked and now - self._launched[1] < STUCK_S / 2:
            return ()
        try:
            moved = progress()
            if moved != self._moved[0]:
                self._moved = moved, now
            waits = any(begun > ended for _, begun, ended in moved) and now - self._moved[1] >= STUCK_S / 2
            return unfinished(recorded(), ranks_of_groups()) if waits or asked else ()
        except RuntimeError as error:  # ignore CUDA errors, because training does not depend on the recorder
            self._recorder_works = False
            words = f"rooftop: note: rank {self.rank} cannot read PyTorch's flight recorder ({first_line(error)})"
            print(words, file=sys.stderr, flush=True)
            return ()

    def _wake(self, ranks: Iterable[int]) -> None:
        """Wake suspended ranks on this machine, so that they learn of the failure and end, as launchers expect."""
        for rank in ranks:
            if rank in self._here and self.processes[rank].state() == STOPPED:
                with suppress(OSError):
                    os.kill(self.processes[rank].number, signal.SIGCONT)


class _Signs:
    """Tells for how long none of the ranks of another machine has sent a heartbeat."""

    def __init__(self, ranks: list[int]) -> None:
        self.ranks = ranks
        self._last, self._silent_s, self._at = 0, 0.0, time.monotonic()

    def silent_s(self, store: Any) -> float:
        """Seconds since the last heartbeat from any rank of the other machine. Delays of the store do not count."""
        if not self.ranks:
            return 0.0
        total = sum(beats(store, self.ranks).values())
        now = time.monotonic()
        self._silent_s = 0.0 if total != self._last else self._silent_s + min(now - self._at, 2 * WATCH_S)
        self._last, self._at = total, now
        return self._silent_s


def beats(store: Any, ranks: Iterable[int]) -> dict[int, int]:
    """The number of heartbeats that each of these ranks has sent."""
    return {rank: store.add(f"beat/{rank}", 0) for rank in ranks}


def places_of(store: Any, ranks: Iterable[int]) -> dict[int, Place]:
    """The activity (`Place`) that each rank reported last. Ranks without a report are omitted."""
    there = [rank for rank in ranks if store.check([f"place/{rank}"])]
    return {rank: Place.from_json(store.get(f"place/{rank}")) for rank in there}


def note_interrupted() -> None:
    """Record which of this rank's waits failed: the operation launched last. If this rank has already reported a wait,
    that report stays.
    """
    last = newest(recorded(), ranks_of_groups()) if dist.is_initialized() and not place_here(()).awaited else None
    if last is not None:
        interrupted(last.words)


def abort_communication() -> None:
    """Abort waits in NCCL, in gloo, and in kernels that wait for other ranks' data."""
    end_waits()
    if not dist.is_initialized():
        return
    groups = sorted(dist.distributed_c10d._world.pg_names.items(), key=lambda item: item[1], reverse=True)
    for group, _ in groups:
        if group.size() == 1:
            continue
        if "nccl" in dist.get_backend(group):
            group.abort()
        elif "gloo" in dist.get_backend(group):
            _break_gloo(group)


def _break_gloo(group: dist.ProcessGroup) -> None:
    """Make a gloo wait time out. gloo then breaks all connections of the group, so that all other waits fail.

    A wait for a dead rank fails at once and breaks no connection, so this function waits for each rank in turn.
    """
    for distance in range(1, group.size()):
        other = (group.rank() + distance) % group.size()
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], other, NO_TAG).wait(timedelta(milliseconds=1))


def poll(done: Callable[[], bool], until: float) -> bool:
    """Poll a condition until a time (of `time.monotonic`), less and less often. Return whether the condition became
    true."""
    pause_s = 0.001
    while not done():
        if time.monotonic() >= until:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True
