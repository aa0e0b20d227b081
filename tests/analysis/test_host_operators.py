"""Work on the CPU in a GPU's step is not the GPU's work: it has no roof, a graph cannot contain it, and a note says
so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import rooftop
from rooftop.analysis import reporting
from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.compiled.graphs import CompiledGraphs
from rooftop.analysis.instruments import Labelled
from rooftop.analysis.kernel_join import Kernel
from rooftop.analysis.recorded_report import recorded_report
from rooftop.analysis.report import Report
from rooftop.analysis.stages import Lap, Laps, Watched
from rooftop.cost import CountingMode
from rooftop.hardware.ceilings import Ceilings

WALL_MS = 50.0
KERNEL = Kernel("sgemm", 0, 2_000_000, 1, 1)


def report_of(
    net: nn.Module, x: torch.Tensor, on_gpu: set[str], ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> Report:
    """A GPU's step in which the operators of these modules ran on the GPU, 2 ms each, and the others on the CPU."""
    monkeypatch.setattr(reporting, "_device", lambda device: {"kind": "cuda", "name": "a GPU"})
    net, x = net.bfloat16(), x.bfloat16()  # in bfloat16, so that no other precision is timed, which would need a GPU
    tracker = ModuleTracker(net)
    with torch.no_grad(), tracker, CountingMode(tracker.locate) as counted:
        net(x)
    records = [replace(r, device="cuda:0" if r.scope in on_gpu else "cpu") for r in counted.records]
    kernels = [[KERNEL] if r.scope in on_gpu else [] for r in records]
    labelled = Watched(Labelled.on_gpu(records, kernels, []), tracker.snapshot(), WALL_MS)
    steps = [Lap(number, "warm", WALL_MS, (1, 0)) for number in range(1, 7)]
    return recorded_report(
        [Laps(steps=6, laps=steps, labelled=[labelled], timed_ms=[WALL_MS] * 4, timed_calls=[(1, 0)] * 4)],
        torch.device("cuda"),
        replace(ceilings, kind="cuda"),
        CompiledGraphs(),
        measures=False,
        name="train.py",
        start_up=None,
        needed=11,
        traced=False,
        profiled=False,
        least=0,
        notes=[],
    )


def said_of_cpu(report: Report) -> list[str]:
    return [note for note in report.notes if "ran on the CPU" in note]


def test_a_program_that_leaves_its_model_on_the_cpu_is_told_so(
    ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
    report = report_of(net, torch.ones(8, 64), set(), ceilings, monkeypatch)
    (said,) = said_of_cpu(report)
    assert said.startswith("Nothing ran on the GPU: the operators (aten::addmm, aten::relu) ran on the CPU.")
    assert '.to("cuda")' in said
    assert "--device cpu" in said
    assert (report.summary.percent_of_roof, report.summary.busy_ms, report.summary.flops) == (0.0, 0.0, 0)
    assert not report.advice
    assert "ran on the CPU" in str(report.to_dict())


def test_what_the_cpu_prepares_is_no_work_of_the_gpu_and_in_no_graph(
    ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = nn.Sequential(nn.Linear(256, 256), nn.ReLU()), torch.ones(64, 256)
    whole, gpu_part = (report_of(net, x, scopes, ceilings, monkeypatch) for scopes in ({"0", "1"}, {"1"}))
    assert not said_of_cpu(whole)
    (said,) = said_of_cpu(gpu_part)
    assert "aten::addmm" in said
    rows = {row.name: row for row in gpu_part.ops}
    assert (rows["aten::addmm"].roof_ms, rows["aten::addmm"].flops) == (0.0, 0)
    assert rows["aten::relu"].roof_ms == next(row for row in whole.ops if row.name == "aten::relu").roof_ms
    assert gpu_part.gaps.kernel_gap_ms == pytest.approx(2.0 - rows["aten::relu"].roof_ms)
    assert any("CUDA graph" in item.title for item in whole.advice)
    assert not any("CUDA graph" in item.title or "batch" in item.title for item in gpu_part.advice)


def test_counters_on_the_cpu_are_not_worth_a_word(ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.counter = nn.Linear(64, 64), nn.ReLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counter(torch.ones(1, dtype=torch.bfloat16))
            return self.net(x)

    report = report_of(Counting(), torch.ones(8, 64), {"net"}, ceilings, monkeypatch)
    assert not said_of_cpu(report)
    assert any("CUDA graph" in item.title for item in report.advice)


@pytest.mark.gpu
@pytest.mark.parametrize("part", ["none", "augmentation"])
def test_a_recording_of_a_gpu_tells_what_the_cpu_does(part: str) -> None:
    device = "cpu" if part == "none" else "cuda"
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).to(device)
    with rooftop.recording(device="cuda", find_steps=True) as recorded, torch.no_grad():
        for _ in range(20):
            net(torch.randn(4, 3, 256, 256).clamp(-1, 1).to(device))
    (said,) = said_of_cpu(recorded.report)
    assert said.startswith("Nothing ran on the GPU") == (part == "none")
    assert ("aten::convolution" in said) == (part == "none")
    assert all(row.percent_of_roof is None or row.percent_of_roof <= 102 for row in recorded.report.ops)
