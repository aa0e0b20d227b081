"""`torchrun -m rooftop analyze`: one report of all ranks, written once; a rank that fails ends all, with one line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from rooftop.analysis.report import Report
from rooftop.hardware.ceilings import Ceilings, MemoryLevel, MemoryPoint

Run = Callable[..., tuple[int, str, str]]

NET = """
import os, time
import torch
from torch import nn

RANK = int(os.environ["RANK"])

class Net(nn.Module):
    def __init__(self, seconds=0.0, wrong=False):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        self.seconds, self.wrong = seconds, wrong
        self.calls = []  # a log, which goes on

    def forward(self, x):
        self.calls.append(len(self.calls) + 1)
        if torch.autograd._profiler_enabled():  # the steps that are looked at: they are few
            time.sleep(self.seconds)
        if self.wrong and len(self.calls) == 5:
            raise KeyError("no such voxel")
        return self.layers(x)

x = torch.randn(16, 64)
def delayed(): return Net(0.3 * RANK), x
def wrong_first(): return Net(wrong=RANK == 0), x
def wrong_second(): return Net(wrong=RANK == 1), x
def unbuilt():
    if RANK == 1:
        raise OSError("weights.bin is not on this machine")
    return Net(), x
"""

SCRIPT = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(20):
    time.sleep(0.1 * dist.get_rank())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
dist.destroy_process_group()
"""


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """A separate folder for `analyze`, with the programs that the tests analyze."""
    rates = tuple(MemoryPoint(size, 1e9, 1e9, 1e9, 1e9) for size in (1 << 14, 1 << 30))
    measured = {"launch_eager_ms": 0.01, "launch_graph_ms": 0.002, "transfers": {}, "links": {}, "spread": {}}
    ceilings = Ceilings(
        "Test machine", "test", "cpu", 1, {}, "2026-01-01T00:00:00Z", memory=rates, kernel_floor_ms=0.001,
        levels=(MemoryLevel("DRAM", None, 1e9),), flops={"fp32": 1e9}, disturbed=(), **measured,  # type: ignore[arg-type]
    )  # fmt: skip
    ceilings.save(tmp_path / "ceilings.json")
    (tmp_path / "net.py").write_text(NET)
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "script.py").write_text(SCRIPT)
    return ["--device", "cpu", "--ceilings", str(tmp_path / "ceilings.json")]


@pytest.fixture
def torchrun(options: list[str], tmp_path: Path) -> Run:
    """Runs `rooftop analyze ...` by the real torchrun on two ranks, returns (status, stdout, stderr)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "PYTHONPATH": str(tmp_path)}

    def call(*words: str) -> tuple[int, str, str]:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [*start, "-m", "rooftop", "analyze", *words, *options]
        done = subprocess.run(
            command, cwd=tmp_path / "work", env=environment, capture_output=True, text=True, timeout=300
        )
        return done.returncode, done.stdout, done.stderr

    return call


AGENT = """
import signal
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from rooftop.cli.main import run

where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "one", "--nproc-per-node", "2"]
config, *_ = config_from_args(parse_args([*where, "rooftop"]))
config.start_method = "fork"

def rank():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # not what the agent does on them
    run()

elastic_launch(config, rank)()
"""


@pytest.fixture
def run(options: list[str], tmp_path: Path, fork: Callable[..., BaseProcess]) -> Run:
    """Like `torchrun`, but with torchrun's agent in this process, whose ranks have already imported torch."""

    def call(*words: str) -> tuple[int, str, str]:
        said = {"output": tmp_path / "output", "errors": tmp_path / "errors"}
        environment = {"PYTHONPATH": str(tmp_path)}
        agent = fork(AGENT, "analyze", *words, *options, environment=environment, folder=tmp_path / "work", **said)
        agent.join(300)
        assert agent.exitcode is not None, "not done after 300 s"
        return agent.exitcode, said["output"].read_text(), said["errors"].read_text()

    return call


def files(tmp_path: Path) -> set[str]:
    return {path.name for path in (tmp_path / "work").iterdir()} - {"script.py", "__pycache__"}


def test_one_report_names_the_delayed_rank(run: Run, tmp_path: Path) -> None:
    status, out, err = run("net:delayed", "--train", "--json", "r.json", "-o", "r.html", "--trace", "t.json")
    assert status == 0, err
    assert files(tmp_path) == {"r.json", "r.html", "t.json"}
    for once in ("Rank 1 (cpu) holds the others up", "the straggler", "report: r.json", "of roof: "):
        assert out.count(once) == 1, once
    ranks = Report.from_json(tmp_path / "work" / "r.json").ranks
    assert ranks is not None
    assert ranks.straggler == 1
    assert ranks.rows[0].waited_ms > 150
    assert ranks.rows[1].own_ms > 300
    assert ranks.sentence in (tmp_path / "work" / "r.html").read_text()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("net:wrong_first", "rank 0 of 2 failed: DistributedDataParallel raised KeyError for inputs 16x64:float32"),
        ("net:wrong_second", "rank 1 of 2 failed: DistributedDataParallel raised KeyError for inputs 16x64:float32"),
        ("net:unbuilt", "rank 1 of 2 failed: net:unbuilt raised OSError: weights.bin is not on this machine"),
        ("resnet5", "failed: 'resnet5' is neither a built-in model"),
    ],
)
def test_a_rank_that_fails_ends_all_with_one_line(run: Run, tmp_path: Path, target: str, message: str) -> None:
    began = time.monotonic()
    status, out, err = run(target, "--train", "--json", "r.json")
    assert status == 1
    assert time.monotonic() - began < 200
    (line,) = [line for line in err.splitlines() if line.startswith("rooftop: error: ")]
    assert message in line
    assert out == ""
    assert files(tmp_path) == set()


def test_a_folder_that_is_missing_is_said_by_the_rank_that_writes(run: Run) -> None:
    status, _, err = run("net:delayed", "--json", "missing/r.json")
    assert status == 1
    assert err.count("rooftop: error: ") == err.count("there is no folder missing") == 1


@pytest.mark.parametrize(
    ("launcher", "words", "message"),
    [
        ("torchrun", ("net:delayed", "--dtype", "fp12"), "'fp12' is not one of"),
        ("run", ("net:delayed", "--predict", "no such machine"), "no such machine"),
        ("run", ("script.py", "--train"), "--train: not for a whole script"),
    ],
)
def test_a_wrong_call_is_said_once(
    request: pytest.FixtureRequest, tmp_path: Path, launcher: str, words: tuple[str, ...], message: str
) -> None:
    _, out, err = request.getfixturevalue(launcher)(*words)
    assert err.count("rooftop: error: ") == 1
    (line,) = [line for line in err.splitlines() if line.startswith("rooftop: error: ")]
    assert message in line
    # status of the rank that failed first; torchrun ends the other
    assert re.findall(r"exitcode +: (\d+) ", err)[-1] == "2"
    assert (out, files(tmp_path)) == ("", set())


def test_a_script_is_one_report_of_all_ranks(run: Run, tmp_path: Path) -> None:
    status, out, err = run("script.py", "--json", "r.json", "--no-html", "--trace", "t.json")
    assert status == 0, err
    assert files(tmp_path) == {"r.json", "t.json"}
    assert out.count("of roof: ") == out.count("ranks, a step of each") == 1
    report = Report.from_json(tmp_path / "work" / "r.json")
    assert "c10d::allreduce_" in {row.name for row in report.ops}
    assert report.ranks is not None
    assert [row.rank for row in report.ranks.rows] == [0, 1]
    assert report.ranks.straggler == 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.usefixtures("options")
def test_a_script_with_nccl_ends_and_is_told_that_cupti_stays(tmp_path: Path) -> None:
    """Detaching CUPTI while NCCL's threads ran made both processes hang."""
    ceilings = replace(Ceilings.load(tmp_path / "ceilings.json"), kind="cuda")
    ceilings.save(tmp_path / "ceilings.json")
    script = SCRIPT.replace("(8, 8)", "(8, 8).cuda()").replace("(4, 8)", "(4, 8).cuda()").replace('"gloo"', '"nccl"')
    script = script.replace("import time", "import os, time").replace(
        "dist.init", "torch.cuda.set_device(int(os.environ['LOCAL_RANK']))\ndist.init", 1
    )
    (tmp_path / "work" / "script.py").write_text(script)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    words = ["script.py", "--no-html", "--json", "r.json", "--device", "cuda", "--ceilings", "../ceilings.json"]
    done = subprocess.run(
        [*start, "-m", "rooftop", "analyze", *words], cwd=tmp_path / "work", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    report = Report.from_json(tmp_path / "work" / "r.json")
    assert report.ranks is not None
    assert [row.rank for row in report.ranks.rows] == [0, 1]
    assert any("CUPTI" in note and "NCCL" in note for note in report.notes)
