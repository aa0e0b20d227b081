"""Processes that a script starts are reported, with their kind, number and CPU time."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from rooftop.analysis.other_processes import OtherProcesses, _program

BUSY = "import time\nwhile time.process_time() < 0.7: pass"


def busy(seconds: float) -> None:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass


def test_forked_processes_are_named_with_their_time() -> None:
    context = multiprocessing.get_context("fork")
    with OtherProcesses() as others:
        processes = [context.Process(target=busy, args=(0.4,)) for _ in range(2)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    assert others.cpu_s > 0.7
    assert others.cpu_s > others.own_s
    assert others.said.startswith("Most of the work is in other processes: the script started")
    assert "2 processes of multiprocessing (fork)" in others.said


def test_what_os_fork_starts_is_named() -> None:
    with OtherProcesses() as others:
        for _ in range(2):
            child = os.fork()
            if child == 0:
                busy(0.4)
                os._exit(0)
            os.waitpid(child, 0)
    assert "2 processes by os.fork()" in others.said
    assert others.said.startswith("Most of the work is in other processes")


def test_what_starts_unseen_is_named_by_its_time() -> None:
    with OtherProcesses() as others:
        os.waitpid(os.posix_spawn(sys.executable, [sys.executable, "-c", BUSY], dict(os.environ)), 0)
    assert others.said.startswith("The script started other processes. Together they used")


def test_a_spawned_process_is_named() -> None:
    with OtherProcesses() as others:
        process = multiprocessing.get_context("spawn").Process(target=sum, args=([1, 2],))
        process.start()
        process.join()
    assert process.exitcode == 0
    assert "1 process of multiprocessing (spawn)" in others.said


def test_workers_of_a_loader_are_named() -> None:
    with OtherProcesses() as others:
        for _ in DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, num_workers=2):
            pass
    assert "The script started 2 DataLoader workers" in others.said


def test_programs_are_named_if_they_took_time() -> None:
    with OtherProcesses() as others:
        subprocess.run(["true"], check=True)
    assert others.said == ""
    with OtherProcesses() as others:
        subprocess.run([sys.executable, "-c", BUSY], check=True)
    assert "1 process of python" in others.said


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["/opt/my tools/gcc", "a.c"], "gcc"),
        ("/usr/bin/gcc a.c", "gcc"),
        ([b"gcc"], "gcc"),
        ([], ""),
        (Path("/a b"), "a b"),
    ],
)
def test_the_name_of_a_program(arguments: object, name: str) -> None:
    assert _program(arguments) == name


def test_what_still_runs_at_the_end_has_its_time_until_then() -> None:
    with OtherProcesses() as others:
        process = multiprocessing.get_context("fork").Process(target=busy, args=(60,))
        process.start()
        ends = time.monotonic() + 60
        while psutil.Process(process.pid).cpu_times().user < 0.3:
            assert time.monotonic() < ends
            time.sleep(0.05)
    try:
        assert process.is_alive()
        assert 0.25 < others.cpu_s < 10
    finally:
        process.kill()
        process.join()


def test_what_could_not_be_started_is_not_named() -> None:
    with OtherProcesses() as others, pytest.raises(FileNotFoundError):
        subprocess.run(["/no/such/program"], check=True)
    assert (others.children, others.said) == ({}, "")


def test_python_is_as_it_was_afterwards() -> None:
    before = multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__
    with OtherProcesses() as others:
        assert multiprocessing.process.BaseProcess.start is not before[0]
    assert (multiprocessing.process.BaseProcess.start, subprocess.Popen.__init__) == before
    subprocess.run(["true"], check=True)
    assert others.children == {}
