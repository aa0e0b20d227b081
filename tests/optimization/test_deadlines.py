"""Code that takes too long is stopped, and a search goes on without it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import rooftop
from rooftop.optimization.deadlines import Deadline, StoppedError
from rooftop.rewrites import Candidate, Rule, Times

Forked = Callable[..., tuple[int | None, str, str]]

LONG_S = 150.0
"""Much longer than any of these tests takes, even on a busy machine."""


def compiles_for(seconds: float) -> None:
    """Code like a compiler's: it handles the errors of its parts, and cleans up."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        try:
            sum(range(100))
        except Exception:
            pytest.fail("the time was taken for an error")


def test_it_stops_what_takes_too_long() -> None:
    began = time.perf_counter()
    with pytest.raises(StoppedError), Deadline(0.1):
        compiles_for(LONG_S)
    assert time.perf_counter() - began < LONG_S / 2


def test_it_stops_waiting_in_the_main_thread() -> None:
    """A compiler waits for its worker processes, in a lock without a time limit or in a system call."""
    never = threading.Lock()
    never.acquire()
    for wait in (never.acquire, lambda: time.sleep(LONG_S), lambda: subprocess.run(["sleep", "150"], check=True)):
        began = time.perf_counter()
        with pytest.raises(StoppedError), Deadline(0.1):
            wait()
        assert time.perf_counter() - began < LONG_S / 2


def test_it_stops_what_takes_too_long_in_another_thread() -> None:
    stopped = []

    def run() -> None:
        with pytest.raises(StoppedError), Deadline(0.1):
            compiles_for(LONG_S)
        with Deadline(60.0):
            compiles_for(0.01)
        stopped.append(True)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(LONG_S / 2)
    assert stopped


def test_no_handler_of_a_signal_is_left_and_deadlines_nest() -> None:
    before = [signal.getsignal(number) for number in signal.valid_signals()]
    with pytest.raises(StoppedError), Deadline(60.0), Deadline(0.05):
        compiles_for(LONG_S)
    for seconds in (0.0, 0.0001, 0.001):
        for _ in range(30):
            deadline = Deadline(seconds)
            with suppress(StoppedError), deadline:
                compiles_for(0.0001)
            deadline.end()
    compiles_for(0.1)
    assert [signal.getsignal(number) for number in signal.valid_signals()] == before


def test_ctrl_c_in_the_same_moment_is_not_lost() -> None:
    deadline = Deadline(LONG_S)

    def get_both() -> None:
        """Both signals are blocked until both have arrived."""
        both = {signal.SIGINT, deadline._signal}
        signal.pthread_sigmask(signal.SIG_BLOCK, both)
        for number in both:
            signal.pthread_kill(threading.get_ident(), number)
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, both)
        finally:
            time.sleep(0.001)  # as code that cleans up, while the deadline's signal is handled

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background processes ignore SIGINT
    try:
        with pytest.raises(KeyboardInterrupt), deadline:
            get_both()
    finally:
        signal.signal(signal.SIGINT, before)
    deadline.end()


def test_a_deadline_that_has_passed_at_once_ends() -> None:
    for _ in range(50):
        deadline = Deadline(0.0)
        with suppress(StoppedError), deadline:
            compiles_for(0.001)
        assert deadline._over.is_set()


def test_the_end_of_a_block_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal arrives while the deadline is being ended, before it is marked as over."""
    deadline = Deadline(LONG_S)

    class Lock:
        def __enter__(self) -> None:
            os.kill(os.getpid(), deadline._signal)

        def __exit__(self, *error: object) -> None:
            pass

    with deadline:
        monkeypatch.setattr(deadline, "_lock", Lock())
    assert deadline._over.is_set()


HANDLED_BY_C = """
import ctypes, os, signal
from rooftop.optimization.deadlines import Deadline, StoppedError

libc = ctypes.CDLL(None)
calls = []
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(calls.append)
libc.signal(signal.SIGRTMAX, handler)
with Deadline(60):
    pass
os.kill(os.getpid(), signal.SIGRTMAX)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
try:
    with Deadline(0.1):
        while True:
            sum(range(100))
except StoppedError:
    pass
signal.pthread_sigmask(signal.SIG_UNBLOCK, signal.valid_signals())
print("done", len(calls))
"""


def test_signals_that_others_handle_or_block_are_left_alone(forked: Forked) -> None:
    assert forked(HANDLED_BY_C) == (0, "done 1\n", "")


def test_what_is_done_in_time_is_left_alone() -> None:
    for seconds in (0.0, 0.001, 0.01):
        with Deadline(seconds + 5):
            compiles_for(seconds)
    deadline = Deadline(0.02)
    with deadline:
        pass
    deadline.end()
    compiles_for(0.1)


PROFILED = """
import cProfile
from rooftop.optimization.deadlines import Deadline, StoppedError

def call(again):
    if again:
        return call(False)
    return 1

with Deadline(60):
    pass
for seconds in (0.0, 0.001, 0.002):
    try:
        with Deadline(seconds):
            sum(range(10_000))
    except StoppedError:
        pass
profile = cProfile.Profile()
profile.enable()
for _ in range(1000):
    call(True)
profile.disable()
print("done")
"""


def test_a_program_can_be_profiled_afterwards(forked: Forked) -> None:
    """CPython 3.11 loops forever under a profiler after an asynchronous exception for a thread was cancelled."""
    assert forked(PROFILED) == (0, "done\n", "")


def test_a_search_goes_on_without_a_rule_that_compiles_for_too_long() -> None:
    class Compiles(Rule):
        name = "compiles"

        def seconds(self, times: Times) -> float:
            return 0.1  # far too little

        def apply(self, candidate: Candidate) -> str:
            run = candidate.call

            def call(*args: Any) -> Any:
                compiles_for(4 * LONG_S)
                return run(*args)

            candidate.call = call
            return "the whole model"

    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    rooftop.optimize(model, x, rules=["cuda-graphs"])  # imports, which also take time
    began = time.perf_counter()
    found = rooftop.optimize(model, x, rules=[Compiles(), "cuda-graphs"], budget_s=3)
    assert time.perf_counter() - began < LONG_S
    verdicts = {change.rule: (change.verdict, change.reason) for change in found.changes}
    assert verdicts["compiles"][0] == "not tried"
    assert "its first call was stopped after" in verdicts["compiles"][1]
    assert not found.kept
