"""Ranks that start together, fail together and end together.

    with join(layout, settings={"seed": 1}) as world:
        ...  # torch.distributed is up: NCCL where there is a GPU, gloo where there is none

Whatever goes wrong, every rank raises, with the same words, and none waits for one that will not come:

- before anything is communicated, each rank checks its own environment, layout and device;
- at a roll call, rank 0 says who is missing, who cannot start, and whose settings differ;
- a rank that raises within the block says so, and the others raise when their communication with it breaks;
- the block ends at no rank before it has ended at all.

All this goes through the store of torch.distributed and not through collectives, since one that has failed cannot be
counted on to join one. What waits inside a communication is freed by a thread that watches the store: it aborts the
communicators of NCCL, and breaks the connections of gloo. Each rank also watches the next one's signs of life, so that
one that is stopped, or gone with its machine, is found although nothing of it breaks.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist

from rooftop.errors import FAILURE
from rooftop.parallel.captures import graphs_end_here
from rooftop.parallel.errors import RankError
from rooftop.parallel.launchers import Launch, launched
from rooftop.parallel.layouts import Layout
from rooftop.parallel.progress import all_places

PATIENCE_S = 20.0
TIMEOUT_S = 600.0
JUDGING = 1.2
"""Rank 0 judges the roll call when its patience ends; another rank does so after this many times as long."""
LINGER_S = 3.0
"""A rank that holds the store, or has failed, stays this long for the others to hear why; they need a tenth of it."""
WATCH_S = 0.2
"""How often a rank gives a sign of life, and asks whether another one has failed."""
SILENT_S = 20.0
"""A rank without a sign of life for so long has failed. Signs come from a thread, whatever the rank computes; but code
that keeps Python's lock keeps that thread from giving them."""
NOTICING_S = 1.0
"""In so long all ranks have noticed a failure: what is woken then can go on with nobody."""
NO_TAG = (1 << 30) + 7  # of a message that nobody sends
SILENCE_S = 3.0
"""Where a connection has broken, a rank without a sign of life for so long is gone."""
BROKEN = re.compile(r"Connection (closed|reset|refused)|Broken pipe|[Tt]imed out|NCCL|recvValue")
"""What an error says that may come of another rank's end."""


@dataclass(frozen=True)
class World:
    """This process among the others.

    Attributes:
        rank, size: which, of how many.
        device: where it computes; the current device of torch.cuda if it is a GPU.
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
    """torch.distributed for the processes that a launcher started, within the block. Every rank must come here.

    A process by itself is a world of one rank, without a process group. A group that is there already is used, and is
    there afterwards. A group that is made here is destroyed at the end of the block. CUDA graphs that were captured in
    the block are reset before: NCCL waits for graphs that hold its work.

    Args:
        layout: refused if it has another number of ranks than the world.
        settings: what must be the same at all ranks, such as the seed or the sizes of the model; compared by `repr`.
        device: "cuda" or "cpu"; a GPU if there is one. On several GPUs a rank takes the one of its number on its
            machine, or the only one that SLURM lets it see.
        patience_s: how long after the first rank the last one may come.
        timeout_s: of a collective, and between the first and the last rank that end the block.

    Raises:
        ValueError: the launcher's variables or the layout are wrong. Nothing has been communicated.
        RankError: a rank did not come, cannot start, has other settings or failed within the block. At the rank that
            failed first, its own exception instead.
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
    ranks = _at_the_store(launch, number, there, compared, problem, patience_s)
    store = ranks.store
    if where.type == "cuda":
        torch.cuda.set_device(where)
    try:
        with ranks.watching():
            if not there:
                dist.distributed_c10d._world.group_count = 0  # one that could not start has been counted: keys differ
                dist.init_process_group(
                    "nccl" if where.type == "cuda" else "gloo",
                    store=dist.PrefixStore("group", store),  # type: ignore[attr-defined]
                    rank=launch.rank,
                    world_size=launch.size,
                    timeout=timedelta(seconds=timeout_s),
                    device_id=_bound_device(where),
                )
            with nullcontext() if there or where.type != "cuda" else graphs_end_here():
                yield World(launch.rank, launch.size, where)
            ranks.end(timeout_s)
    finally:
        if not there and dist.is_initialized():
            dist.destroy_process_group()
            _forget_meshes()


def _forget_meshes() -> None:
    """Let go of the meshes that DTensor remembers with its operators: a mesh of equal ranks in a later block would be
    taken for one of these, whose groups have ended."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _at_the_store(
    launch: Launch, number: int, there: bool, settings: Mapping[str, object], problem: str, patience_s: float
) -> _Ranks:
    """The ranks of block `number`, after their roll call.

    A rank may begin the next block before rank 0 has closed the store of the previous one, and connects to that store
    then. When it closes, the rank connects again.
    """
    until = time.monotonic() + patience_s
    while True:
        store = dist.distributed_c10d._get_default_store() if there else _opened(launch, patience_s)
        store = dist.PrefixStore(f"rooftop/{launch.attempt}/{number}", store)  # type: ignore[attr-defined]
        ranks = _Ranks(store, launch.rank, launch.size, holds_store=launch.rank == 0 and not launch.served)
        try:
            ranks.call_the_roll(settings, problem, patience_s)
            return ranks
        except _StoreEnded:
            may_be_old = number > 0 and launch.rank > 0 and not (there or launch.served)
            if not may_be_old or time.monotonic() >= until:
                raise


class _StoreEnded(RankError):
    """The store ended during the roll call."""


_joined: Counter[tuple[str, int, int]] = Counter()  # a launcher's store outlives a block: keys are used once
_bound = False  # whether a group of this process was bound to its GPU


def _bound_device(where: torch.device) -> torch.device | None:
    """The GPU to which a group is bound: it connects at once then, and groups of a layout are split from it.

    The first of a process only: splitting a later one ends in a segmentation fault (pytorch/pytorch#192109).
    """
    global _bound
    if where.type != "cuda" or _bound:
        return None
    _bound = True
    return where


def _place(kind: str, launch: Launch) -> tuple[torch.device, str]:
    """Where this rank computes, and what stands against it."""
    if kind not in ("cuda", "cpu"):
        raise ValueError(f"device={kind!r}: expected 'cuda' or 'cpu'; which GPU follows from the rank")
    if kind == "cpu":
        return torch.device("cpu"), ""
    count = torch.cuda.device_count()
    index = 0 if launch.launcher == "slurm" and count == 1 else launch.local_rank
    problem = (
        f"it is process {index} on its machine, which shows {count} GPUs: start at most one process for each GPU, or "
        "compute with device='cpu'"
    )
    return torch.device("cuda", index), "" if index < count else problem


def _opened(launch: Launch, patience_s: float) -> Any:
    """The store where the ranks meet; rank 0 holds it unless the launcher does."""
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
                f"rank 0 of {launch.size} cannot open the store at {place}, where the ranks meet; is MASTER_ADDR this "
                f"machine, and MASTER_PORT free? ({_line(error)})"
            ) from error
        raise RankError(
            f"rank 0 of {launch.size} did not come within {patience_s:g} s: nobody has opened the store at {place}, "
            "where the ranks meet (MASTER_ADDR, MASTER_PORT); see what it says"
        ) from error


class _Ranks:
    """What the ranks tell each other through a store. Keys, one of each for a rank:

    here/R    its settings, and what stands against its start      beat/R  counts up while it lives
    heard/R   it has heard a verdict that is not good              done/R  it has ended the block
    seen/R    it knows which rank failed                           left/R  it has heard that all have ended the block

    and two for all: `verdict` of the roll call ("" is good), and `failed`, the first failure within the block.
    """

    def __init__(self, store: Any, rank: int, size: int, holds_store: bool) -> None:
        self.store, self.rank, self.size, self.holds_store = store, rank, size, holds_store
        self.failure = ""
        self._at = list[str]()  # where this rank's GPU was when another rank failed
        self._stop = threading.Event()
        self._noticed = threading.Event()

    # ---- before ----

    def call_the_roll(self, settings: Mapping[str, object], problem: str, patience_s: float) -> None:
        """Until all ranks are here and agree.

        Raises:
            RankError: some are not or do not; the same at all that are here.
        """
        words = {name: repr(value) for name, value in settings.items()}
        try:
            self.store.set(f"here/{self.rank}", json.dumps([words, problem]))
            if self.rank == 0:
                self._judge(time.monotonic() + patience_s, patience_s)
            verdict = self._verdict(patience_s)
            if verdict:
                self._say("heard", LINGER_S if self.holds_store else 0.0, self._present())
        except RuntimeError as error:
            raise _StoreEnded(
                f"rank 0 of {self.size} ended during the roll call; see what it says ({_line(error)})"
            ) from error
        if verdict:
            raise RankError(verdict)

    def _verdict(self, patience_s: float) -> str:
        try:
            self.store.wait(["verdict"], timedelta(seconds=JUDGING * patience_s))
        except RuntimeError:  # rank 0 is not here, and the store is the launcher's
            self._judge(time.monotonic(), patience_s)
        return str(self.store.get("verdict").decode())[1:]

    def _judge(self, until: float, patience_s: float) -> None:
        """Write the verdict, unless there is one. Its first letter only makes it a value: an empty one is none."""
        everybody = [f"here/{rank}" for rank in range(self.size)]
        _poll(lambda: self.store.check(everybody), until)
        present = self._present()
        entries = {rank: json.loads(self.store.get(f"here/{rank}")) for rank in present}
        self.store.compare_set("verdict", "", "=" + self._said_of(entries, patience_s))

    def _present(self) -> list[int]:
        if self.store.check([f"here/{rank}" for rank in range(self.size)]):
            return list(range(self.size))
        return [rank for rank in range(self.size) if self.store.check([f"here/{rank}"])]

    def _said_of(self, entries: Mapping[int, tuple[dict[str, str], str]], patience_s: float) -> str:
        missing = [rank for rank in range(self.size) if rank not in entries]
        if missing:
            return (
                f"{_ranks(missing)} of {self.size} did not come within {patience_s:g} s of rank {min(entries)}: look "
                "at what they say, or give late ones more time with patience_s"
            )
        problems = {rank: problem for rank, (_, problem) in entries.items() if problem}
        if problems:
            return "; ".join(f"rank {rank} of {self.size} cannot start: {text}" for rank, text in problems.items())
        names = dict.fromkeys(name for words, _ in entries.values() for name in words)
        different = []
        for name in names:
            values: dict[str, list[int]] = {}
            for rank, (words, _) in entries.items():
                values.setdefault(words.get(name, "not given"), []).append(rank)
            if len(values) > 1:
                different.append(f"{name} is " + ", ".join(f"{value} at {_ranks(at)}" for value, at in values.items()))
        if different:
            return f"the ranks have different settings: {'; '.join(different)}. Start all of them with the same"
        return ""

    # ---- within ----

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Hear of failures of other ranks, and let them hear of this one's."""
        thread = threading.Thread(target=self._watch, args=(self.store.clone(),), name="rooftop ranks", daemon=True)
        thread.start()
        try:
            yield
        except BaseException as error:
            mine = f"rank {self.rank} of {self.size} failed: {_reason(error)}"
            if isinstance(error, RankError):  # says of whom it speaks
                mine = str(error)
            first = self._fail(self._gone_instead(error) or mine)
            self._say("seen", LINGER_S, range(self.size))
            if first.startswith(f"rank {self.rank} of {self.size} has given no sign"):
                time.sleep(LINGER_S)  # the others speak first: a launcher ends all when one is gone
            of_another = isinstance(error, RankError) and self._at  # the block has ended, as far as Python knows
            if not isinstance(error, Exception) or (first == mine and not of_another):
                setattr(error, FAILURE, first)
                raise
            raise _heard("; ".join([first, *(self._at or getattr(error, "__notes__", []))]), first) from error
        finally:
            self._stop.set()
            thread.join(timeout=10 * WATCH_S)

    def _watch(self, store: Any) -> None:
        silent, following = "", _Signs((self.rank + 1) % self.size, self.size)
        try:
            store.set(f"process/{self.rank}", f"{os.getpid()} {socket.gethostname()}")
            while not self._stop.wait(WATCH_S):
                store.add(f"beat/{self.rank}", 1)
                if silent := following.silent(store):
                    store.compare_set("failed", "", silent)
                if store.check(["failed"]):
                    self.failure = store.get("failed").decode()
                    store.set(f"seen/{self.rank}", "1")
                    break
        except RuntimeError as error:  # the store has ended
            if not self._stop.is_set():
                self.failure = f"rank 0 of {self.size}, or the launcher that held the store, is gone ({_line(error)})"
        if self.failure:
            self._at = all_places()  # a GPU that is freed goes on
            self._noticed.set()
            _abort_communication()
        if silent:
            time.sleep(NOTICING_S)
            with suppress(RuntimeError):
                following.wake(store)

    def _fail(self, text: str) -> str:
        """The first failure: this one, unless another rank's is known."""
        if not self._noticed.is_set():
            try:
                return str(self.store.compare_set("failed", "", text).decode())
            except RuntimeError:  # the store is gone with the rank that held it: the thread will say so
                self._noticed.wait(2 * WATCH_S)
        return self.failure or text

    def _gone_instead(self, error: BaseException) -> str:
        """Which ranks are gone without a word, if this error may come of that."""
        if not isinstance(error, RuntimeError) or isinstance(error, RankError) or not BROKEN.search(str(error)):
            return ""
        try:
            before = self._beats()
            if self._noticed.wait(SILENCE_S):
                return ""
            silent = [rank for rank, beat in self._beats().items() if beat == before[rank] and rank != self.rank]
            for rank in silent:
                self.store.set(f"seen/{rank}", "1")  # nobody waits for it to see
        except RuntimeError:
            return ""
        what = "are" if len(silent) > 1 else "is"
        return f"{_ranks(silent)} of {self.size} {what} gone without an error ({_line(error)})" if silent else ""

    def _beats(self) -> dict[int, int]:
        return {rank: self.store.add(f"beat/{rank}", 0) for rank in range(self.size)}

    # ---- after ----

    def end(self, timeout_s: float) -> None:
        """Until the block has ended at all ranks.

        Raises:
            RankError: it failed at one, or has not ended within `timeout_s` of this one.
        """
        everybody = [f"done/{rank}" for rank in range(self.size)]
        self.store.set(f"done/{self.rank}", "1")
        until = time.monotonic() + timeout_s
        if not _poll(lambda: self._noticed.is_set() or self.store.check(everybody), until):
            late = [rank for rank in range(self.size) if not self.store.check([f"done/{rank}"])]
            raise RankError(f"{_ranks(late)} of {self.size} did not end within {timeout_s:g} s of rank {self.rank}")
        if self._noticed.is_set():
            raise _heard(self.failure, self.failure)
        self._say("left", PATIENCE_S if self.holds_store else 0.0, range(self.size))

    def _say(self, key: str, linger_s: float, ranks: Iterable[int]) -> None:
        """Set this rank's key, and stay a while until the others have set theirs."""
        try:
            self.store.set(f"{key}/{self.rank}", "1")
            others = [f"{key}/{rank}" for rank in ranks]
            if linger_s:
                _poll(lambda: self.store.check(others), time.monotonic() + linger_s)
        except RuntimeError:  # the store has ended: nobody is left to tell
            return


def _heard(words: str, failure: str) -> RankError:
    """What a rank raises that has heard of another's failure."""
    error = RankError(words)
    setattr(error, FAILURE, failure)
    return error


class _Signs:
    """The signs of life of a rank, as another one sees them."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._last, self._at = -1, time.monotonic()

    def silent(self, store: Any) -> str:
        """That it has given none for too long, in words; empty if it has, or has ended."""
        beat, now = store.add(f"beat/{self.rank}", 0), time.monotonic()
        if beat != self._last:
            self._last, self._at = beat, now
        if now - self._at < SILENT_S or store.check([f"done/{self.rank}"]):
            return ""
        return f"rank {self.rank} of {self.size} has given no sign of life for {SILENT_S:g} s: it is stopped, or gone"

    def wake(self, store: Any) -> None:
        """Let it go on if it is stopped on this machine: it hears of the failure and ends. Launchers wait for that."""
        if store.check([f"process/{self.rank}"]):
            process, host = store.get(f"process/{self.rank}").decode().split(" ", 1)
            if host == socket.gethostname():
                with suppress(OSError):
                    os.kill(int(process), signal.SIGCONT)


def _abort_communication() -> None:
    """Free what waits in NCCL or gloo."""
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
    """A wait of gloo that times out breaks all connections of its group, and with them all other waits.

    One for a rank that has gone already fails at once, and breaks no other.
    """
    for distance in range(1, group.size()):
        other = (group.rank() + distance) % group.size()
        with suppress(RuntimeError):
            group.recv([torch.empty(1)], other, NO_TAG).wait(timedelta(milliseconds=1))


def _poll(done: Callable[[], bool], until: float) -> bool:
    """Whether it is done before a time (of `time.monotonic`); asks ever more rarely."""
    pause_s = 0.001
    while not done():
        if time.monotonic() >= until:
            return False
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, 0.05)
    return True


def _ranks(ranks: Iterable[int]) -> str:
    """[0, 1, 2, 5] -> "ranks 0-2, 5"."""
    runs = [[rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda item: item[1] - item[0])]
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"{'rank' if len(runs) == 1 and len(runs[0]) == 1 else 'ranks'} {', '.join(words)}"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {_line(error)}" if str(error) else type(error).__name__


def _line(error: BaseException) -> str:
    """The first line, without the address of the C++ source."""
    return re.sub(r"^\[[^]]*\.(cc|cpp|h|hpp):\d+\] ", "", (str(error).splitlines() or [""])[0])
