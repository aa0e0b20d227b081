"""The benchmark of layouts trains small variants on CPUs, all with the same losses, and reads timelines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Script = Callable[[str], ModuleType]


VARIANTS = {
    ("llama-1b-fsdp2", "dp=2 tp=1"): [
        "rooftop",
        "PyTorch, blocks compiled",
        "rooftop, blocks compiled",
        "rooftop, trained",
    ],
    ("llama-1b-tp2", "dp=1 tp=2"): [
        "rooftop",
        "rooftop, halves",
        "rooftop, halves, replayed",
        "rooftop, trained, halves, replayed",
        "rooftop, replayed",
        "PyTorch, blocks compiled",
        "PyTorch, asynchronous tensor parallel",
        "rooftop, blocks compiled",
    ],
    ("llama-1b-ddp2", "dp=2 tp=1"): [
        "rooftop",
        "PyTorch, blocks compiled",
        "rooftop, trained",
        "rooftop, trained, replayed",
    ],
    ("llama-135m-alone", "dp=1 tp=1"): [
        "rooftop",
        "PyTorch, blocks compiled",
        "PyTorch, compiled whole, CUDA graphs",
        "rooftop, blocks compiled",
        "rooftop, replayed",
        "rooftop, trained",
        "rooftop, trained, replayed",
    ],
}


@pytest.mark.usefixtures("fork")
def test_every_variant_trains_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    """Run in forks of a process that has imported torch, because importing it takes longer than the training."""
    parallel, out = script("parallel"), tmp_path / "parallel.json"
    forking = get_context("forkserver")
    monkeypatch.setattr(parallel.mp, "get_context", lambda method: forking)
    cases = [case for case, _ in VARIANTS]
    monkeypatch.setattr(
        sys, "argv", ["parallel.py", "--quick", "--seconds", "0.01", "--out", str(out), "--only", *cases]
    )
    assert parallel.main() == 0
    every = json.loads(out.read_text())["results"]
    rooftops = {"rooftop", "rooftop, blocks compiled", "rooftop, replayed", "rooftop, halves"}
    rooftops.add("rooftop, halves, replayed")
    for (case, layout), variants in VARIANTS.items():
        rows = [row for row in every if row["case"] == case]
        assert [row["variant"] for row in rows] == variants
        for row in rows:
            if "absent" not in row:
                assert row["layout"].startswith(layout)
                assert row["losses"] == pytest.approx(rows[0]["losses"], abs=1e-3)
                assert ("init_s" in row) == (row["variant"] in rooftops)
                assert row["tokens_per_s_per_gpu"] > 0
        assert rows[0]["losses"][2] < rows[0]["losses"][0] - 1e-3  # steps are made


def test_other_losses_fail_a_row(script: Script) -> None:
    parallel = script("parallel")
    assert parallel.disagreement([10.4, 10.0, 9.5], [10.41, 10.04, 9.45]) == ""
    assert "first losses" in parallel.disagreement([10.4, 10.0, 9.5], [10.43, 10.0, 9.5])
    assert "first losses" in parallel.disagreement([10.4, 10.0, 9.5], [10.4, float("nan"), 9.5])


def test_a_failed_variant_leaves_the_others(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    """Processes are started again for the remaining work."""
    parallel = script("parallel")
    starts: list[list[str]] = []

    def in_processes(jobs: list[Any]) -> Any:
        starts.append([job.variant for job in jobs])
        for job in jobs:
            yield job, None if job.variant == "bad" else {}, "out of memory" if job.variant == "bad" else ""
            if job.variant == "bad":
                return

    monkeypatch.setattr(parallel, "in_processes", in_processes)
    jobs = [SimpleNamespace(variant=variant) for variant in ("good", "bad", "late")]
    found = [(job.variant, problem) for job, _, problem in parallel.performed(jobs)]
    assert found == [("good", ""), ("bad", "out of memory"), ("late", "")]
    assert starts == [["good", "bad", "late"], ["late"]]


def test_exposed_is_what_no_computation_covers(tmp_path: Path, script: Script) -> None:
    timelines = script("timelines")
    path = tmp_path / "trace.json"

    def event(cat: str, name: str, begin: float, duration: float) -> dict[str, Any]:
        return {"cat": cat, "name": name, "ts": begin, "dur": duration}

    events = [
        event("kernel", "ncclDevKernel_AllGather", 0, 500),  # before the step
        event("user_annotation", timelines.STEP, 1000, 10_000),
        event("cpu_op", "aten::mm", 1000, 9000),
        event("kernel", "gemm", 2000, 1000),
        event("kernel", "norm", 2500, 1000),  # beside it: 2000 to 3500
        event("kernel", "ncclDevKernel_ReduceScatter", 3000, 1000),  # 500 of them without other work
        # 200 together with the other, and 1000 more without other work
        event("kernel", "ncclDevKernel_AllGather", 3800, 1200),
        event("gpu_memcpy", "Memcpy DtoD", 6000, 500),
        {"name": "no time", "cat": "process_name"},
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    found = timelines.communication(path)
    assert (found.total_ms, found.exposed_ms, found.busy_ms) == (2.0, 1.5, 3.5)
    kinds = timelines.by_kind(path)
    assert kinds == {"communication": 2.2, "matrix products": 1.0, "others": 1.0, "copies": 0.5}
    assert next(iter(kinds)) == "communication"
    path.write_text(json.dumps({"traceEvents": events[:1]}))
    with pytest.raises(ValueError, match="the trace has no event named"):
        timelines.communication(path)
    path.write_text(json.dumps({"traceEvents": events[:3]}))
    with pytest.raises(ValueError, match="the step has no GPU work"):
        timelines.communication(path)
