"""A script is run as `python SCRIPT ARGUMENTS` would, and recorded; how it ends is told in one line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from rooftop.analysis import Report
from rooftop.analysis.recordings import NEEDED
from rooftop.analysis.scripts import analyze_script
from rooftop.errors import InputError, ModelRunError
from rooftop.hardware.ceilings import Ceilings

TRAINING = f"""
import argparse, sys
from pathlib import Path

import torch
import __main__
from NAME_beside import double

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
steps = 0

def main():
    global steps
    net = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range({NEEDED} * parser.parse_args().epochs):
        double(net(torch.ones(2, 8))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    assert __main__.steps == steps  # as multiprocessing and pickle look it up
    Path(__file__).with_name("seen.txt").write_text(f"{{sys.argv[1:]}} {{steps}}")

if __name__ == "__main__":
    main()
"""


def script(folder: Path, text: str) -> Path:
    path = folder / "train.py"
    path.write_text(text)
    return path


def run(folder: Path, text: str, ceilings: Ceilings, *arguments: str) -> Report:
    return analyze_script(script(folder, text), arguments, device="cpu", ceilings=ceilings)


def test_a_training_script_is_recorded_step_by_step(tmp_path: Path, ceilings: Ceilings) -> None:
    beside = f"net_{abs(hash(tmp_path))}"
    (tmp_path / f"{beside}_beside.py").write_text("def double(x): return x * 2\n")
    before = (sys.argv, list(sys.path), sys.modules["__main__"])
    report = run(tmp_path, TRAINING.replace("NAME", beside), ceilings, "--epochs", "2")
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before
    assert (tmp_path / "seen.txt").read_text() == f"['--epochs', '2'] {2 * NEEDED}"
    assert report.target == "train.py"
    assert report.mode == f"{2 * NEEDED} recorded steps"
    assert {row.phase for row in report.ops} == {"forward", "backward", "optimizer"}
    assert report.modules.find("(optimizer)").calls == 1


ONE = "import sys, torch\ntorch.ones(3).relu()\n"


@pytest.mark.parametrize("end", ["", "sys.exit()", "sys.exit(0)", "raise SystemExit"])
def test_a_script_without_an_optimizer_is_one_step(end: str, tmp_path: Path, ceilings: Ceilings) -> None:
    report = run(tmp_path, ONE + end, ceilings)
    assert {row.name: row.calls for row in report.ops if row.flops} == {"aten::relu": 1}
    assert any("The report is of the block" in note for note in report.notes)


@pytest.mark.parametrize(
    ("end", "message"),
    [
        ("sys.exit(3)", r"train\.py ended with exit status 3$"),
        ("sys.exit('no data')", r"train\.py ended with exit status 1: no data$"),
        ("def f():\n  {}['key']\nf()", r"train\.py raised KeyError: 'key' \(.*train\.py:4\)$"),
        ("def f(:", r"train\.py raised SyntaxError: .*line 3"),
        ("import nowhere_at_all", r"raised ModuleNotFoundError: .*nowhere_at_all"),
    ],
)
def test_a_script_that_fails(end: str, message: str, tmp_path: Path, ceilings: Ceilings) -> None:
    before = (sys.argv, list(sys.path), sys.modules["__main__"])
    with pytest.raises(ModelRunError, match=message):
        run(tmp_path, ONE + end, ceilings)
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_an_interruption_is_the_users(tmp_path: Path, ceilings: Ceilings) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, ONE + "raise KeyboardInterrupt", ceilings)


def test_nothing_to_report(tmp_path: Path, ceilings: Ceilings) -> None:
    with pytest.raises(InputError, match="no operator of PyTorch ran"):
        run(tmp_path, "print('nothing')", ceilings)
    with pytest.raises(InputError, match="there is no such script"):
        analyze_script(tmp_path / "missing.py", ceilings=ceilings)


@pytest.mark.parametrize("ends", ["", "sys.exit(0)", "raise ValueError('in the child')"])
def test_a_forked_process_ends_where_the_script_does(
    ends: str, tmp_path: Path, ceilings: Ceilings, capfd: pytest.CaptureFixture[str]
) -> None:
    forking = f"""
import os, sys
import torch

torch.ones(3) + 1
child = os.fork()
if child == 0:
    {ends or "pass"}
else:
    _, status = os.waitpid(child, 0)
    assert (status == 0) == {not ends.startswith("raise")}
"""
    process = os.getpid()
    report = run(tmp_path, forking, ceilings)
    assert os.getpid() == process  # a child that came here would go on with all tests
    assert report.ops
    assert ("ValueError: in the child" in capfd.readouterr().err) == ends.startswith("raise")


def test_the_folder_is_that_of_before(tmp_path: Path, ceilings: Ceilings) -> None:
    before = Path.cwd()
    run(tmp_path, "import os, torch\nos.chdir('/')\ntorch.ones(3) + 1", ceilings)
    assert Path.cwd() == before
