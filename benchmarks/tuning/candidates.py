"""Tune launch parameters: check each candidate on a small problem, then time all candidates interleaved.

A tuner lists tasks, with the most promising first, and calls `main`. Separate processes check the candidates and share
Triton's cache, so that candidates compile in parallel. Then this process times each task, with candidates and peers
interleaved and replayed from CUDA graphs. Figures are written after each task. No task starts after `--seconds`.
`--quick` tests a tuner on the CPU, through Triton's interpreter, at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

QUICK = "--quick" in sys.argv
if QUICK:
    os.environ["TRITON_INTERPRET"] = "1"  # set before rooftop, which reads it, is imported
DEVICE = "cpu" if QUICK else "cuda"
CACHE_BYTES = 50 << 20  # size of an H200's L2; a query would initialize CUDA before the processes start

Call = Callable[[], object]
Settings = dict[tuple[ModuleType, str], Any]  # the tables to set: (module, name) -> value
Job = tuple[int, str]  # a candidate: (number of its task, its name)


@dataclass
class Task:
    """One size of one kernel.

    Attributes:
        name: name of the task in the output.
        moved_bytes: bytes that the operator must read and write.
        candidates: the tables to set for each candidate, by its name.
        call: function that creates the tensors, and returns the call to time.
        check: compares the call with the correct result on a problem that is small, since many checks run at once.
        peers: functions that create calls to time next to the candidates.
        goal: what the table should reach, in words.
        repeats: how many times a call does the work, each time on other tensors, so that they do not come from L2.
        graph: whether calls are replayed from a CUDA graph; False if the host waits for the GPU.
        changed: called after tables have been set, to clear caches that depend on them.
        flops: for compute-bound operators: figures are TFLOP/s instead of TB/s.
    """

    name: str
    moved_bytes: int
    candidates: dict[str, Settings]
    call: Callable[[], Call]
    check: Callable[[], None]
    peers: dict[str, Callable[[], Call]] = field(default_factory=dict)
    goal: str = ""
    repeats: int = 1
    graph: bool = True
    changed: Callable[[], None] = lambda: None
    flops: int = 0

    def cleared(self) -> None:
        """Clear the caches that depend on the tables."""
        from rooftop.launch import known_calls

        self.changed()
        known_calls.forget()

    @contextmanager
    def settled(self, candidate: str) -> Iterator[None]:
        """Set a candidate's tables while the block runs."""
        settings = self.candidates[candidate]
        before = {(module, name): getattr(module, name) for module, name in settings}
        for (module, name), value in settings.items():
            setattr(module, name, value)
        self.cleared()
        try:
            yield
        finally:
            for (module, name), value in before.items():
                setattr(module, name, value)
            self.cleared()


def copies_past_cache(tensor_bytes: int) -> int:
    """How many problems of this size together are at least twice as large as the L2 cache."""
    return 1 if QUICK else max(1, -(-2 * CACHE_BYTES // tensor_bytes))


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=dtype)


def main(tasks: Sequence[Task], description: str | None) -> None:
    """Check and time the tasks. All tuners have the options that this function parses."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--seconds", type=float, default=50, help="seconds after which no further task is started")
    parser.add_argument(
        "--processes", type=int, default=min(15, os.cpu_count() or 1), help="number of processes that check candidates"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny run on the CPU, to test the script")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="run only these tasks", default=[])
    options = parser.parse_args()
    unknown = set(options.only) - {task.name for task in tasks}
    if unknown:
        parser.error(f"no task {', '.join(sorted(unknown))}; the tasks are: {', '.join(task.name for task in tasks)}")
    _run([task for task in tasks if not options.only or task.name in options.only], options)


_tasks: list[Task] = []  # global, so that the forked processes have them


def _prove(job: Job) -> str | None:
    """Check a candidate. Return its error, or None if it is correct."""
    task = _tasks[job[0]]
    try:
        with task.settled(job[1]):
            task.check()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]} (from {error.__cause__ or error.__context__})"
    return None


def _proofs(jobs: list[Job], processes: int, until: float) -> dict[Job, str | None]:
    if QUICK:
        return {job: _prove(job) for job in jobs}
    assert not torch.cuda.is_initialized()  # after CUDA's initialization, forked processes cannot use the GPU
    found = _proven_by(jobs, processes, until)
    # An out-of-bounds access also makes later candidates in the same process fail. So all candidates with CUDA errors
    # are checked again, each in its own process.
    broken = [job for job, why in found.items() if why and ("CUDA error" in why or "[CUDA]" in why)]
    return found | _proven_by(broken, processes, until, tasks_per_process=1)


def _proven_by(
    jobs: list[Job], processes: int, until: float, tasks_per_process: int | None = None
) -> dict[Job, str | None]:
    found: dict[Job, str | None] = {}
    if not jobs:
        return found
    with multiprocessing.get_context("fork").Pool(processes, maxtasksperchild=tasks_per_process) as pool:
        waiting = {job: pool.apply_async(_prove, (job,)) for job in jobs}
        for job, proof in waiting.items():
            try:
                found[job] = proof.get(timeout=max(0.1, until - time.perf_counter()))
            except multiprocessing.TimeoutError:
                found[job] = "not compiled in time"
        pool.terminate()
    return found


def _run(tasks: list[Task], options: argparse.Namespace) -> None:
    began = time.perf_counter()
    _tasks[:] = tasks
    jobs = [(i, name) for i, task in enumerate(tasks) for name in task.candidates]
    print(f"{len(jobs)} candidates of {len(tasks)} tasks", flush=True)
    proofs = _proofs(jobs, options.processes, began + 0.55 * options.seconds)
    if not QUICK and not torch.cuda.is_available():  # not queried earlier, because the query initializes CUDA
        sys.exit("there is no GPU: --quick tests the script without one")
    failed = {f"{tasks[i].name}: {name}": why for (i, name), why in proofs.items() if why}
    for name, why in failed.items():
        print(f"FAILED {name}: {why}", flush=True)
    right = {job for job, why in proofs.items() if why is None}
    print(f"{len(right)} candidates are correct, after {time.perf_counter() - began:.1f} s", flush=True)
    device = "CPU" if QUICK else torch.cuda.get_device_name()
    found: dict[str, Any] = {"device": device, "torch": torch.__version__, "rows": [], "failed": failed}
    for i, task in enumerate(tasks):
        if time.perf_counter() - began > options.seconds and not QUICK:
            print(f"out of time before {task.name}", flush=True)
            break
        try:
            names = [name for name in task.candidates if (i, name) in right]
            row = _timed(task, names[:1] if QUICK else names, failed)
            found["rows"].append(row)
            print(_line(row), flush=True)
        except Exception as error:
            failed[task.name] = traceback.format_exc()[-1500:]
            print(f"FAILED {task.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        if options.out:
            _save(options.out, found)
        if not QUICK:
            torch.cuda.empty_cache()
    print(f"done after {time.perf_counter() - began:.1f} s", flush=True)
    if QUICK and failed:
        sys.exit(1)


def _timed(task: Task, candidates: Sequence[str], failed: dict[str, str]) -> dict[str, Any]:
    from rooftop.hardware import compare

    torch.manual_seed(0)
    stream = None if QUICK else torch.cuda.Stream()  # backward runs on its forward's stream: see `captured`
    calls: dict[str, Call] = {}
    with nullcontext() if stream is None else torch.cuda.stream(stream):
        call = task.call()
        for name in (*candidates, *task.peers):
            try:
                calls[name] = _prepared(task, name, call, stream)
            except Exception as error:  # this candidate cannot be launched at this size, or this peer cannot run
                failed[f"{task.name}: {name}"] = why = f"{type(error).__name__}: {str(error)[:300]}"
                print(f"FAILED {task.name}: {name}: {why}", flush=True)
        if stream is not None:
            stream.synchronize()
        seconds, warm_up = (0.001, 0.0) if QUICK else (0.02, 0.005)
        times = compare(calls, device=DEVICE, seconds=seconds, warm_up_seconds=warm_up)
    us = {name: 1e3 * time.median_ms / task.repeats for name, time in times.items()}
    us = dict(sorted(us.items(), key=lambda item: item[1]))
    rates = {name: (task.flops or task.moved_bytes) / value / 1e6 for name, value in us.items()}
    best = next((name for name in us if name in task.candidates), None)
    tables = {} if best is None else {f"{m.__name__}.{n}": v for (m, n), v in task.candidates[best].items()}
    unit = "TFLOP/s" if task.flops else "TB/s"
    row = {"task": task.name, "goal": task.goal, "us": us, "unit": unit, "rates": rates}
    return row | {"best": best, "tables": tables}


def _prepared(task: Task, name: str, call: Call, stream: torch.cuda.Stream | None) -> Call:
    """The call to time: `call` with the candidate's tables, or a peer's own call."""
    from rooftop.hardware.graphs import captured

    graph = task.graph and stream is not None
    if name in task.peers:
        peer = task.peers[name]()
        return captured(peer, stream) if graph else peer

    def with_tables() -> object:
        with task.settled(name):
            return call()

    return captured(with_tables, stream) if graph else with_tables


def _line(row: dict[str, Any]) -> str:
    values = "  ".join(f"{name} {us:.2f} us {row['rates'][name]:.2f}" for name, us in row["us"].items())
    return f"{row['task']} (goal {row['goal']}; {row['unit']}): {values}"


def _save(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    written = json.dumps(found, indent=1, default=lambda o: asdict(o) if is_dataclass(o) else str(o))
    path.write_text(written + "\n")
