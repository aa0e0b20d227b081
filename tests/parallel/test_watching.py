"""Ranks watch each other. If one rank fails in any way, all learn which rank failed, where it was, and what the others
wait for. Ranks that are only slow continue."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from rooftop.parallel import join, others_wait, process_states, report, waits, watching
from rooftop.parallel.exchanges import start_sum
from rooftop.parallel.flight_records import Operation
from rooftop.parallel.places import Place, place_here
from rooftop.parallel.process_states import ALIVE, GONE, STOPPED, Process
from rooftop.parallel.terminations import heard_by_a_thread
from rooftop.parallel.waits import Waits, context

Run = Callable[..., list[Any]]


@contextmanager
def impatient(**constants: float) -> Iterator[None]:
    """Shorter times than the defaults, except for a rank's answers, which can be slow on a busy machine."""
    with ExitStack() as stack:
        for name, value in {"NOTE_S": 0.5, "TELLING_S": 30.0, "ARRIVING_S": 20.0, **constants}.items():
            module = waits if name == "NOTE_S" else watching
            stack.enter_context(patch.object(module, name, value))
        yield


def errors_of(
    run: Run, failed: type[Exception], *arguments: Any, limit_s: float = 150.0, **options: Any
) -> dict[int, str]:
    """The error of each rank; all must come in time."""
    with pytest.raises(failed) as caught:
        run(*arguments, joined=False, limit_s=limit_s, **options)
    return caught.value.errors  # type: ignore[attr-defined]


# ---- kinds of failures -----------------------------------------------------------------------------------------------


def sums(wrong: int, what: str, kills: Path | None = None) -> None:
    """All ranks sum repeatedly; rank `wrong` does something else in its third step."""
    with (
        impatient(),
        patch.object(process_states, "OOM_KILLS", kills or Path("/proc/vmstat")),
        join(device="cpu", timeout_s=4.0 if what.startswith("hang") else 20.0) as world,
    ):
        for step in range(1, 9):
            report(f"step {step}")
            if step == 3 and world.rank == wrong:
                time.sleep(1.0)  # the last report may lag by half of this
                FAULTS[what](kills)
            start_sum(torch.ones(3), dist.group.WORLD)()


def exits_with_zero(_: Path | None) -> None:
    os._exit(0)


def is_killed_for_memory(kills: Path | None) -> None:
    assert kills is not None
    kills.write_text("pgfault 7\noom_kill 5\n")
    os.kill(os.getpid(), signal.SIGKILL)


def loses_its_connections(_: Path | None) -> None:
    """Close all of gloo's sockets to other ranks, but not the store's."""
    port = int(os.environ["MASTER_PORT"])
    for name in os.listdir("/proc/self/fd"):
        # not all of these are connected sockets
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and found.getpeername()[1] != port:
                found.shutdown(socket.SHUT_RDWR)


def hangs_in_python(_: Path | None) -> None:
    time.sleep(60)


def hangs_in_a_loader(_: Path | None) -> None:
    """Rank 1 hangs in a loader that returns nothing."""
    read, _write = os.pipe()
    os.read(read, 1)


FAULTS: dict[str, Callable[[Path | None], None]] = {
    "exit": exits_with_zero,
    "memory": is_killed_for_memory,
    "network": loses_its_connections,
    "hang in Python": hangs_in_python,
    "hang in a loader": hangs_in_a_loader,
}


@pytest.mark.parametrize("what", ["exit", "memory"])
def test_a_rank_that_ends_too_early_is_named(
    what: str, on_ranks: Run, ranks_failed: type[Exception], tmp_path: Path
) -> None:
    (tmp_path / "vmstat").write_text("pgfault 7\noom_kill 4\n")
    errors = errors_of(on_ranks, ranks_failed, 3, sums, 1, what, tmp_path / "vmstat")
    assert errors.pop(1) == "died"
    (error,) = set(errors.values())
    memory = "; in the meantime this machine's kernel killed a process for lack of memory" if what == "memory" else ""
    assert error.startswith(f"RankError: rank 1 of 3 is gone without an error (its process has ended{memory}); ")
    assert "; ranks 0, 2 await the all_reduce of 3 float32 (ranks 0-2)" in error
    assert re.search(r"; rank 1 was last at step \d, parallel/test_watching.py:\d+, in \w+$", error), error


def test_a_rank_that_loses_the_network_ends_all(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    errors = errors_of(on_ranks, ranks_failed, 3, sums, 1, "network")
    assert sorted(errors) == [0, 1, 2]
    own = [error for error in errors.values() if error.startswith("RuntimeError: ")]
    heard = {error for error in errors.values() if error.startswith("RankError: ")}
    assert len(own) == 1, errors  # one message, from the rank that found the fault first
    (line,) = heard
    said = r"RankError: rank \d of 3 failed: RuntimeError: .*(Connection (closed|reset)|Broken pipe).*"
    assert re.match(f"{said}; all ranks are alive: check the network between them$", line), line


@pytest.mark.parametrize("what", ["hang in Python", "hang in a loader"])
def test_a_rank_that_hangs_is_named_and_ended(
    what: str, on_ranks: Run, ranks_failed: type[Exception], capfd: pytest.CaptureFixture[str]
) -> None:
    """If the main thread stays blocked, the watch ends the process and reports where the thread was."""
    with patch.dict(os.environ, {"HANGS": what}):
        errors = errors_of(on_ranks, ranks_failed, 3, leaving, 2, what)
    assert errors.pop(2) == "died"
    (error,) = set(errors.values())
    said = (
        r"rank 2 of 3 hangs: for [\d.]+ s rank 2 lacks the all_reduce of 3 float32 \(number \d of ranks 0-2\), which "
    )
    where = FAULTS[what].__name__
    assert re.match(
        f"RankError: {said}ranks 0-1 await; rank 2 is at step 3, .*test_watching.py:\\d+, in {where}", error
    )


def leaving(wrong: int, what: str) -> None:
    """Only rank `wrong` does not end by itself, and the watch soon ends it."""
    with impatient(LEAVING_S=0.5 if os.environ["RANK"] == str(wrong) else 60.0, STUCK_S=0.4, LOOK_S=0.2):
        sums(wrong, what)


# ---- slow ranks ------------------------------------------------------------------------------------------------------


def slow(kind: str) -> tuple[float, list[str]]:
    """Rank 1 takes 2.5 s between two sums. The test's limits report a rank after 0.5 s, and end a rank that is stopped
    for 1 s.

    If a delay is expected, rank 1 takes 4 s and would be reported after 2 s. The others must learn of the delay before
    that.
    """
    with (
        impatient(NOTE_S=2.0 if kind == "expected" else 0.5, STOPPED_S=1.0, STUCK_S=0.2, LOOK_S=0.2, SILENT_S=1.0),
        patch.object(watching, "print", create=True) as shown,
        join(device="cpu", timeout_s=20.0) as world,
    ):
        total = start_sum(torch.ones(3), dist.group.WORLD)()
        if world.rank == 1:
            SLOW[kind]()
        value = float(start_sum(total, dist.group.WORLD)()[0])
    return value, [call.args[0] for call in shown.call_args_list]


def computes() -> None:
    until = time.monotonic() + 2.5
    while time.monotonic() < until:
        sum(range(1000))


def keeps_the_lock() -> None:
    """Stops all of Python: not even the watching thread runs."""
    ctypes.PyDLL(None).usleep(2_500_000)


def is_expected_to() -> None:
    with others_wait("measuring this machine"):
        time.sleep(4.0)


SLOW: dict[str, Callable[[], None]] = {"computes": computes, "lock": keeps_the_lock, "expected": is_expected_to}


@pytest.mark.parametrize("kind", SLOW)
def test_what_is_slow_and_alive_is_named_and_goes_on(kind: str, on_ranks: Run) -> None:
    (first, notes), (second, others) = on_ranks(2, slow, kind, joined=False)
    assert first == second == 4.0
    assert not others
    notes = [note for note in notes if "number 2 of ranks" in note]  # without the note that rank 1 has begun late
    if kind == "expected":
        assert not notes
        return
    seconds = [int(re.findall(r"note: for (\d+) s", note)[0]) for note in notes]
    assert seconds
    assert all(after + 0.5 >= 2 * (before - 0.5) for before, after in pairwise(seconds))  # waits double
    said = r"rooftop: note: for \d+ s rank 1 lacks the all_reduce of 3 float32 \(number 2 of ranks 0-1\), which rank 0 "
    said += r"awaits; rank 1 is at .*test_watching.py:.*. All ranks end when this wait has lasted for 20 s"
    assert re.match(said, notes[0])


def with_a_broken_recorder() -> tuple[float, list[str]]:
    def broken() -> None:
        raise RuntimeError("CUDA error: operation not permitted")

    with (
        patch.object(watching, "progress", broken),
        patch.object(watching, "print", create=True) as shown,
        join(device="cpu", timeout_s=20.0),
    ):
        assert watching.poll(lambda: shown.called, time.monotonic() + 60)
        value = float(start_sum(torch.ones(3), dist.group.WORLD)()[0])
    return value, [call.args[0] for call in shown.call_args_list]


def test_a_recorder_that_fails_fails_no_rank(on_ranks: Run) -> None:
    for rank, (value, notes) in enumerate(on_ranks(2, with_a_broken_recorder, joined=False)):
        assert value == 2.0
        why = "CUDA error: operation not permitted"
        assert notes == [f"rooftop: note: rank {rank} cannot read PyTorch's flight recorder ({why})"]


def reads_while_training() -> int:
    """How often the recorder is read while collectives are launched."""
    with (
        patch.object(watching, "STUCK_S", 60.0),
        patch.object(watching, "progress", wraps=watching.progress) as read,
        join(device="cpu", timeout_s=60.0),
    ):
        for _ in range(10):
            dist.all_reduce(torch.ones(3), group=dist.new_group())
            time.sleep(watching.PLACE_S / 4)
        return read.call_count


def test_the_recorder_is_not_read_while_collectives_are_launched(on_ranks: Run) -> None:
    """PyTorch's recorder may crash a process that reads it beside the first collective of a group."""
    assert on_ranks(2, reads_while_training, joined=False) == [0, 0]


# ---- the launcher ----------------------------------------------------------------------------------------------------


def orphaned() -> None:
    """Sum on two ranks without end. To rank 1, its launcher seems to be gone."""
    with join(device="cpu", timeout_s=20.0) as world, patch.object(os, "getppid", lambda: 1):
        while True:
            time.sleep(0.05)
            dist.all_reduce(torch.full((1,), float(world.rank)))


def test_a_rank_whose_launcher_is_gone_ends_all(on_ranks: Run, ranks_failed: type[Exception]) -> None:
    """The orphaned process still runs, and would continue to train next to the restarted ranks."""
    environments = {rank: {"TORCHELASTIC_RUN_ID": "one"} if rank else {} for rank in range(2)}
    errors = errors_of(on_ranks, ranks_failed, 2, orphaned, environments=environments)
    for error in errors.values():
        assert error.startswith("RankError: ranks 0-1 of 2: the launcher (torchrun) that started them is gone")


# ---- SIGTERM ---------------------------------------------------------------------------------------------------------


def test_a_thread_hears_sigterm_and_forks_do_not() -> None:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    with heard_by_a_thread() as termination:
        assert not termination.asked
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, b".")
            time.sleep(30)
            os._exit(0)
        os.read(read, 1)  # by now the child no longer has its parent's handler
        os.kill(child, signal.SIGTERM)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGTERM
        assert not termination.asked
        os.kill(os.getpid(), signal.SIGTERM)
        assert termination.asked
        assert termination.ours
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1


def test_a_handler_of_the_program_is_called_as_ever() -> None:
    heard = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with heard_by_a_thread() as termination:
            os.kill(os.getpid(), signal.SIGTERM)
            assert heard == [signal.SIGTERM]
            assert termination.asked
            assert not termination.ours
    finally:
        signal.signal(signal.SIGTERM, before)


# ---- processes -------------------------------------------------------------------------------------------------------


def test_a_process_is_alive_stopped_or_gone() -> None:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, repr(Process.here()).encode())
        time.sleep(600)
        os._exit(0)
    process = eval(os.read(read, 4096).decode())
    assert process == Process(Process.here().machine, child, process.began, os.getpid())
    assert process.state() == ALIVE
    os.kill(child, signal.SIGSTOP)
    os.waitpid(child, os.WUNTRACED)
    assert process.state() == STOPPED
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert process.state() == GONE
    # a process id that the system has reused
    assert Process(process.machine, os.getpid(), process.began + 1).state() == GONE


# ---- words -----------------------------------------------------------------------------------------------------------


def operation(number: int, ranks: tuple[int, ...] = (0, 1, 2, 3), group: str = "dp") -> Operation:
    return Operation("all_reduce", group, ranks, number, "7 float32")


def test_a_place_is_the_innermost_line_of_the_program() -> None:
    report("step 7")
    place = place_here((operation(5),))
    assert re.fullmatch(r"step 7, parallel/test_watching.py:\d+, in test_a_place_is_.*", place.words)
    assert Place.from_json(place.to_json()) == place
    report("")


def test_what_others_await_of_a_rank_that_failed() -> None:
    places = {
        0: Place("step 3", "net.py:7, in forward", "", (operation(5),)),
        1: Place("step 3", "net.py:7, in forward", "", (operation(2, (0, 1), "tp"),)),
        2: Place("step 3", "data.py:9, in read"),
        3: Place("step 3", "", "the backward of rank 2"),
    }
    assert context(places, [2]) == (
        "; rank 0 awaits the all_reduce of 7 float32 (ranks 0-3); rank 3 awaits the backward of rank 2"
        "; rank 2 was last at step 3, data.py:9, in read"
    )


def test_a_wait_is_told_when_it_has_lasted() -> None:
    """The message names a rank that has not posted an operation that others wait for. The message names no rank that
    waits itself or is expected to take long."""
    seen = Waits(4)
    computing, reading = Place("step 3", "net.py:7, in forward"), Place("step 3", "data.py:9, in read")
    places = {0: Place(operations=(operation(5),)), 1: Place(operations=(operation(5),)), 2: computing, 3: reading}
    places[2] = Place(operations=(operation(8, (2, 3), "tp"),))
    assert seen.look(places, 0.0) is None
    assert seen.look(places, 19.0) is None
    wait = seen.look(places, 21.0)
    assert wait is not None
    assert wait.culprits == (3,)
    assert wait.words.startswith(
        "for 21 s rank 3 lacks the all_reduce of 7 float32 (number 8 of ranks 2-3), which rank 2"
    )
    assert wait.words.endswith("; rank 3 is at step 3, data.py:9, in read")
    assert seen.look({**places, 3: Place("measuring", long=True)}, 22.0) is None
    assert seen.look({**places, 0: computing, 1: computing, 2: computing}, 50.0) is None
    assert seen.look(places, 60.0) is None  # the rank waits again


# ---- on GPUs ---------------------------------------------------------------------------------------------------------


def hangs_on_gpus(how: str) -> None:
    """Rank 1 of two hangs in Python or is stopped, while rank 0's GPU (not its Python code) waits for it."""
    with impatient(LEAVING_S=5.0), join(device="cuda", timeout_s=15.0) as world:
        found = torch.ones(7, device=world.device)
        dist.all_reduce(found)
        torch.cuda.synchronize()
        if world.rank == 1:
            time.sleep(60) if how == "hang" else os.kill(os.getpid(), signal.SIGSTOP)
        dist.all_reduce(found)
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("how", ["hang", "stop"])
def test_on_gpus_the_flight_recorder_says_what_a_rank_lacks(
    how: str, on_ranks: Run, ranks_failed: type[Exception]
) -> None:
    with pytest.raises(ranks_failed) as caught:
        on_ranks(2, hangs_on_gpus, how, joined=False, limit_s=45.0)
    error = caught.value.errors[0]  # type: ignore[attr-defined]
    if how == "hang":
        assert re.match(
            r"RankError: rank 1 of 2 hangs: for \d+ s rank 1 lacks the all_reduce of 7 float32 \(number 2", error
        )
    else:
        said = "has given no sign of life for 8 s: it is suspended; rank 0 awaits"
        assert re.match(f"RankError: rank 1 of 2 {said}", error)
        assert "the all_reduce of 7 float32 (ranks 0-1)" in error
