"""CUPTI is found if it is loaded. After CUPTI is detached, a process still works: traced again, in threads, in CUDA
graphs."""

from __future__ import annotations

import gc
import queue
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from rooftop.hardware import cupti
from rooftop.hardware.traces import Trace

THREADS = """
import threading, torch
from rooftop.hardware.traces import Trace

device, over = torch.device("cuda"), threading.Event()
def work():
    a = torch.randn(256, 256, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        while not over.is_set():
            for _ in range(20):
                torch.mm(a, a)
            torch.zeros(1000, pin_memory=True).to(device, non_blocking=True)
            stream.synchronize()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
b = torch.randn(64, 64, device=device, requires_grad=True)
for _ in range(60):
    with Trace(device):
        (b @ b).sum().backward()
over.set()
for thread in threads: thread.join()
torch.cuda.synchronize()
print("went on")
"""


def test_a_library_of_this_process_is_found_by_its_name() -> None:
    python = Path(sys.executable).resolve().name
    found = cupti._loaded("libc.so") or cupti._loaded(python)
    assert found is not None
    assert Path(found).exists()
    assert cupti._loaded("libnobody_has_this.so") is None


def test_without_cupti_there_is_nothing_to_detach(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cupti, "_library", None)
    monkeypatch.setattr(cupti, "_MAPS", tmp_path / "maps")
    assert not cupti.detach()
    (tmp_path / "maps").write_text("7f00-7f01 r-xp 00000000 08:01 12    /lib/libnothing.so\n7f02-7f03 rw-p 0 00:00 0\n")
    assert not cupti.detach()


def test_threads_that_wait_in_the_standard_library_are_in_no_call() -> None:
    over, waiting = threading.Event(), queue.Queue[int]()
    idle = ThreadPoolExecutor(1)
    idle.submit(int).result()
    threads = [threading.Thread(target=over.wait), threading.Thread(target=waiting.get)]
    for thread in threads:
        thread.start()
    try:
        ends = time.monotonic() + 60
        while cupti.others_in_calls():  # a thread that has just begun does not wait yet
            assert time.monotonic() < ends, cupti.others_in_calls()
            time.sleep(1e-3)
    finally:
        over.set()
        waiting.put(0)
        idle.shutdown()


def test_a_thread_that_computes_may_be_in_a_call() -> None:
    began, over = threading.Event(), threading.Event()

    def work() -> None:
        a = torch.ones(300, 300)
        while not over.is_set():
            began.set() if float((a @ a).sum()) else None

    thread = threading.Thread(target=work, name="work")
    thread.start()
    assert began.wait(60)
    try:
        ends = time.monotonic() + 60
        while cupti.others_in_calls() != "the thread work":
            assert time.monotonic() < ends
            time.sleep(1e-3)
    finally:
        over.set()
        thread.join()
    assert cupti.others_in_calls() == ""


def test_what_a_pool_calls_may_be_in_a_call_also_without_a_frame_of_its_own() -> None:
    """If a pool runs an operator, the innermost Python frame belongs to the standard library."""
    a, ends = torch.ones(2000, 2000), time.monotonic() + 60
    with ThreadPoolExecutor(1) as pool:
        product = pool.submit(torch.mm, a, a)
        while not cupti.others_in_calls().startswith("the thread ThreadPoolExecutor"):
            assert time.monotonic() < ends
            if product.done():  # before this thread could run
                product = pool.submit(torch.mm, a, a)


def test_who_asks_keeps_no_caller() -> None:
    """If a frame was stored in its own local variable, all callers and their tensors stayed until a garbage
    collection."""

    def caller() -> weakref.ref[torch.Tensor]:
        held = torch.ones(1000)
        assert cupti.others_in_calls() == ""
        return weakref.ref(held)

    gc.collect()
    gc.disable()
    try:
        assert caller()() is None
    finally:
        gc.enable()


def test_cupti_stays_where_a_thread_may_be_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    finalized = list[int]()

    def finalize() -> int:
        finalized.append(0)
        return 0

    monkeypatch.setattr(cupti, "_library", SimpleNamespace(cuptiFinalize=finalize))
    monkeypatch.setattr(cupti, "others_in_calls", lambda: "the thread work")
    monkeypatch.setattr(cupti, "PATIENCE_S", 0.01)
    assert not cupti.detach()
    assert (cupti.stays_for, finalized) == ("the thread work", [])
    answers = iter(["the thread work", ""])
    monkeypatch.setattr(cupti, "others_in_calls", lambda: next(answers))
    switches = sys.getswitchinterval()
    assert cupti.detach()
    assert (cupti.stays_for, finalized) == ("", [0])
    assert sys.getswitchinterval() == switches


def test_nccl_is_always_in_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(pg_map=["group"], pg_backend_config={"group": "cpu:gloo"})
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed.distributed_c10d, "_world", world)
    assert cupti.others_in_calls() == ""
    world.pg_backend_config["group"] = "cpu:gloo,cuda:nccl"
    assert cupti.others_in_calls() == "NCCL"


@pytest.mark.gpu
def test_every_trace_sees_all_kernels_also_those_of_graphs() -> None:
    device = torch.device("cuda")
    a = torch.randn(64, 64, device=device)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.mm(a, a)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with Trace(device):
        torch.mm(a, a)
    with torch.cuda.graph(graph):
        for _ in range(5):
            torch.relu(a)
    seen = []
    for _ in range(8):
        with Trace(device) as trace:
            graph.replay()
            torch.sin(a)
        seen.append(sum("CUDA" in str(event.device_type()) for event in trace.events))
        graph.replay()
    assert seen == [6] * 8
    assert cupti._library is not None


@pytest.mark.gpu
def test_the_program_s_own_profiler_sees_its_kernels_after_ours() -> None:
    device = torch.device("cuda")
    a = torch.randn(64, 64, device=device)
    with Trace(device):
        torch.relu(a)
    with torch.profiler.profile(acc_events=True) as profiler:
        for _ in range(3):
            torch.relu(a)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 3


@pytest.mark.gpu
def test_other_threads_launch_kernels_while_it_is_detached() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "went on" in done.stdout
