"""A script is run as `python SCRIPT ARGUMENTS` would, and recorded; its end is reported in one line."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from rooftop.analysis import Report, attribution, recordings
from rooftop.analysis.recordings import NEEDED
from rooftop.analysis.scripts import run_script
from rooftop.cost import counting
from rooftop.errors import InputError
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.traces import Trace

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
    ended = run_script(script(folder, text), arguments, device="cpu", ceilings=ceilings)
    assert ended.status == 0, ended.problem
    assert ended.report is not None, ended.problem
    return ended.report


Command = Callable[..., tuple[int | None, str, str]]


@pytest.fixture
def command(tmp_path: Path, ceilings: Ceilings, forked: Command) -> Command:
    """Analyze a script by `rooftop analyze` in a separate process; return status, stdout and stderr."""

    def analyzed(text: str, *options: str) -> tuple[int | None, str, str]:
        path = script(tmp_path, text)
        ceilings.save(tmp_path / "ceilings.json")
        words = ["analyze", str(path), "--ceilings", "ceilings.json", "--no-html", "--device", "cpu", *options]
        return forked("from rooftop.cli.main import run; run()", *words)

    return analyzed


@pytest.mark.parametrize(
    "end", ["sys.stdout = open(os.devnull, 'w')", "sys.stdout = io.StringIO()", "sys.stdout.close()"]
)
def test_the_report_is_printed_where_the_script_has_put_away_its_output(end: str, command: Command) -> None:
    status, output, errors = command(f"import io, os, sys, torch\ntorch.ones(4) + 1\n{end}\n")
    assert status == 0, errors
    assert "of roof" in (errors if "close" in end else output)


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
    assert any("The report covers the block" in note for note in report.notes)


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
    ended = run_script(script(tmp_path, ONE + end), device="cpu", ceilings=ceilings)
    assert ended.status != 0
    assert re.search(message, ended.problem), ended.problem
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_an_interruption_is_the_users(tmp_path: Path, ceilings: Ceilings) -> None:
    ended = run_script(script(tmp_path, ONE + "raise KeyboardInterrupt"), device="cpu", ceilings=ceilings)
    assert isinstance(ended.error, KeyboardInterrupt)


def test_nothing_to_report(tmp_path: Path, ceilings: Ceilings) -> None:
    ended = run_script(script(tmp_path, "print('nothing')"), device="cpu", ceilings=ceilings)
    assert ended.report is None
    assert "no operator of PyTorch ran" in ended.problem
    with pytest.raises(InputError, match="no such script"):
        run_script(tmp_path / "missing.py", ceilings=ceilings)


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
    assert os.getpid() == process  # a child process that reached this line would run all further tests
    assert report.ops
    assert ("ValueError: in the child" in capfd.readouterr().err) == ends.startswith("raise")


def test_the_folder_is_that_of_before(tmp_path: Path, ceilings: Ceilings) -> None:
    before = Path.cwd()
    run(tmp_path, "import os, torch\nos.chdir('/')\ntorch.ones(3) + 1", ceilings)
    assert Path.cwd() == before


def test_a_script_knows_where_it_lies(tmp_path: Path, ceilings: Ceilings, capsys: pytest.CaptureFixture[str]) -> None:
    """Python gives `__file__` and tracebacks the whole path, and leaves `sys.argv[0]` as it was typed."""
    text = "import os, sys, torch\nprint(__file__, sys.argv[0])\nos.chdir('/')\nos.stat(__file__)\n1 / 0"
    path, folder = script(tmp_path, text), Path.cwd()
    typed = os.path.relpath(path, folder)
    ended = run_script(typed, device="cpu", ceilings=ceilings)
    assert capsys.readouterr().out == f"{path} {typed}\n"
    assert isinstance(ended.error, ZeroDivisionError)
    assert f'File "{path}", line 5' in ended.traceback


def test_errors_that_are_no_exceptions_end_with_a_report(tmp_path: Path, ceilings: Ceilings) -> None:
    text = LOOP + "import asyncio\nraise asyncio.CancelledError('stop')"
    ended = run_script(script(tmp_path, text), device="cpu", ceilings=ceilings)
    assert ended.status == 1
    assert ended.report is not None
    assert "raised CancelledError: stop" in ended.problem
    assert "scripts.py" not in ended.traceback


def test_the_script_s_own_hook_tells_of_its_error(
    tmp_path: Path, ceilings: Ceilings, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "sys.excepthook = lambda kind, error, trace: print('HOOK', error, trace.tb_lineno)\nraise ValueError('hi')"
    before = sys.excepthook
    ended = run_script(script(tmp_path, ONE + text), device="cpu", ceilings=ceilings)
    assert sys.excepthook is before
    assert capsys.readouterr().out == "HOOK hi 4\n"
    assert ended.traceback == ""


# ---- ends of a script --------------------------------------------------------------------------------------------

LOOP = f"""
import os, random, sys
import numpy, torch

torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(), torch.nn.ReLU(), torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(net.parameters())
for step in range({NEEDED} + 3):
    loss = net(torch.randn(6, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {{step}}: loss {{loss.item():.9f}}")
print(torch.rand(1).item(), random.random(), numpy.random.rand(), flush=True)
print("not all is well", file=sys.stderr, flush=True)
"""
ENDS = {
    "": 0,
    "sys.exit(3)": 3,
    "sys.exit('no data')": 1,
    "sys.exit(('no data', 2))": 1,
    "os._exit(4)": 4,
    "def f():\n    raise ValueError('not now')\nf()": 1,
    "raise KeyboardInterrupt": 130,
}


@pytest.fixture(scope="module")
def plain_lines(fork: Callable[..., BaseProcess], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `LOOP` prints without an analysis."""
    folder = tmp_path_factory.mktemp("plain")
    files = {"output": folder / "output", "errors": folder / "errors"}
    fork(LOOP, environment={}, folder=folder, **files).join(60)
    lines = files["output"].read_text().splitlines()
    assert len(lines) == NEEDED + 4
    return lines


@pytest.mark.parametrize(
    ("end", "status"), ENDS.items(), ids=["end", "exit", "text", "tuple", "_exit", "error", "interrupted"]
)
def test_a_script_ends_as_it_would_and_prints_what_it_would(
    end: str, status: int, plain_lines: list[str], tmp_path: Path, command: Command
) -> None:
    """The command reports the script's steps; its process ends where and how the script ends it."""
    got, output, errors = command(LOOP + end, "--json", "report.json")
    assert got == status
    assert output.splitlines()[: len(plain_lines)] == plain_lines
    assert f"train.py  {NEEDED + 3} recorded steps" in output
    of_profiler = "Memory block of unknown size"  # PyTorch's message about tensors older than its profiler
    errors = "".join(line for line in errors.splitlines(keepends=True) if of_profiler not in line)
    assert errors.startswith("not all is well\n")
    said = {"sys.exit('no data')": "no data", "sys.exit(('no data', 2))": "('no data', 2)"}.get(end)
    assert said is None or said in errors.splitlines()
    assert said is not None or "no data" not in errors
    if "ValueError" in end:
        traceback = errors[errors.index("Traceback") :]
        assert traceback.index("train.py") < traceback.index("in f\n") < traceback.index("ValueError: not now")
        assert "runpy" not in traceback
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["mode"] == f"{NEEDED + 3} recorded steps"


@pytest.mark.parametrize(
    ("end", "status", "problem"),
    [
        ("raise ValueError('early')", 1, "raised ValueError: early"),
        ("sys.exit(2)", 2, "ended with exit status 2"),
        ("raise KeyboardInterrupt", 130, "interrupted"),
    ],
)
def test_a_script_that_fails_early_has_no_report(
    end: str, status: int, problem: str, tmp_path: Path, ceilings: Ceilings
) -> None:
    ended = run_script(script(tmp_path, ONE + end), ceilings=ceilings, device="cpu")
    assert (ended.report, ended.status) == (None, status)
    assert problem in ended.problem


def test_a_process_that_ends_at_once_has_its_report_made_before(
    tmp_path: Path, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`os._exit` runs no `finally`, and in a forked process it is unchanged. The report is written to the command's
    folder even if the script has changed the working directory."""

    class EndedError(BaseException):
        pass

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr(os, "_exit", end)
    seen, before = [], os.getcwd()
    ended = run_script(
        script(tmp_path, LOOP + "os.chdir('/')\nos._exit(6)"),
        ceilings=ceilings,
        device="cpu",
        before_exit=lambda run: seen.append((run.status, run.report is not None, os.getcwd())),
    )
    with pytest.raises(EndedError, match="6"):
        raise ended.error or AssertionError("the process went on")
    assert seen == [(6, True, before)]


def test_a_watchdog_that_ends_the_process_ends_it_with_its_report(command: Command) -> None:
    """The watchdog is a thread other than the observed one."""
    watched = """
    import os
    import threading
    import time
    import torch

    net = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def watchdog():
        done.wait()
        os._exit(3)

    done = threading.Event()
    threading.Thread(target=watchdog, daemon=True).start()
    for step in range(100_000):
        net(torch.randn(4, 8)).sum().backward()
        optimizer.step()
        if step == 40:
            done.set()
        time.sleep(0.001)
    """
    status, output, errors = command(textwrap.dedent(watched))
    assert status == 3, errors
    assert "of roof" in output
    assert "Traceback" not in errors


# ---- other work of a script --------------------------------------------------------------------------------------


def test_a_training_in_other_processes_is_not_reported_without_a_word(tmp_path: Path, ceilings: Ceilings) -> None:
    """Hogwild: this process creates the model and waits."""
    hogwild = """
    import time
    import torch
    import torch.multiprocessing as mp

    def train(net):
        until = time.process_time() + 0.4
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        while time.process_time() < until:
            net(torch.ones(2, 8)).sum().backward()
            optimizer.step()

    net = torch.nn.Linear(8, 4)
    net.share_memory()
    context = mp.get_context("fork")
    processes = [context.Process(target=train, args=(net,)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert not any(process.exitcode for process in processes)
    net(torch.ones(2, 8))
    """
    report = run(tmp_path, textwrap.dedent(hogwild), ceilings)
    (note,) = [note for note in report.notes if "other processes" in note]
    assert note.startswith("Most of the work is in other processes")
    assert "2 processes of multiprocessing (fork)" in note
    assert "Their work is not in the report" in note


def test_modules_in_other_threads_are_named(tmp_path: Path, ceilings: Ceilings) -> None:
    threads = """
    import threading
    import torch

    net = torch.nn.Linear(8, 4)
    for index in range(2):
        thread = threading.Thread(target=net, args=(torch.ones(2, 8),), name=f"worker {index}")
        thread.start()
        thread.join()
    net(torch.ones(2, 8))
    """
    report = run(tmp_path, textwrap.dedent(threads), ceilings)
    (note,) = [note for note in report.notes if "other threads ran modules" in note]
    assert note.startswith("2 other threads ran modules (worker 0, worker 1)")


def test_a_script_that_starts_nothing_has_no_word_on_it(tmp_path: Path, ceilings: Ceilings) -> None:
    report = run(tmp_path, LOOP, ceilings)
    of_others = ("work is in other processes", "script started", "ran modules")  # not the notes about other programs
    assert not [note for note in report.notes if any(words in note for words in of_others)]


STRANGE = """
import torch
from torch import nn

class Strange(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.weights = [p for p in self.inner._parameters.values()]

    def forward(self, x):
        return self.inner(x)

    {strange}

net = Strange()
optimizer = torch.optim.SGD(net.weights, lr=0.1)
for _ in range(14):
    loss = net(torch.ones(2, 4)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    "strange",
    [
        "def parameters(self): return self.weights",
        "def named_modules(self, *args, **kwargs): raise RuntimeError('not mine')",
        "def named_parameters(self, *args, **kwargs): raise RuntimeError('not mine')",
        "def __eq__(self, other): return NotImplemented",
    ],
)
def test_modules_that_are_unlike_others_train_as_ever(strange: str, tmp_path: Path, ceilings: Ceilings) -> None:
    report = run(tmp_path, STRANGE.format(strange=strange), ceilings)
    assert report.mode == "14 recorded steps"
    assert report.modules.find("inner").parameters == 20


WRAPPED = """
import torch
weight = torch.ones(4, requires_grad=True)

class Wrapper(torch.optim.Optimizer):
    def __init__(self, base):
        self.base = base
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = dict(), dict()
        self._patch_step_function()

    def step(self):
        self.base.step()

class Locked(torch.optim.Optimizer):
    def __init__(self):
        super().__init__([weight], dict())

    @property
    def state(self):
        raise RuntimeError("not yours")

    @state.setter
    def state(self, value):
        pass

    @torch.no_grad()
    def step(self):
        weight.sub_(0.1 * weight.grad)

optimizer = OPTIMIZER
for _ in range(14):
    weight.square().sum().backward()
    optimizer.step()
    weight.grad = None
"""


@pytest.mark.parametrize("optimizer", ["Wrapper(torch.optim.SGD([weight], lr=0.1))", "Locked()"])
def test_optimizers_that_are_unlike_others_step_as_ever(optimizer: str, tmp_path: Path, ceilings: Ceilings) -> None:
    report = run(tmp_path, WRAPPED.replace("OPTIMIZER", optimizer), ceilings)
    assert report.mode == "14 recorded steps"
    name = optimizer.partition("(")[0]
    assert any(f"The inputs and outputs of {name} could not be counted" in note for note in report.notes)


AT_HOME = """
import atexit, gc, io, os, sys, threading, weakref
import torch

print(__annotations__, type(__loader__).__name__, sys.path[0] == os.path.dirname(__file__))

def deep(n):
    return 0 if n == 0 else deep(n - 1)

deep(sys.getrecursionlimit() - 60)
storage = torch.UntypedStorage(64)
alive = weakref.ref(storage)
kept = torch.empty(0).set_(storage)
storage = kept = None
gc.collect()
print("freed", alive() is None)
net = torch.nn.Linear(4, 4)
for _ in range(14):
    net(torch.ones(2, 4)).sum().backward()
if os.fork() == 0:
    file = open("child.txt", "w")
    file.write("written")
    atexit.register(lambda: print("child at exit"))
    sys.exit("child says bye")
os.wait()
os.makedirs("inner")
os.chdir("inner")

def after():
    threading.main_thread().join()
    print("thread in", os.path.basename(os.getcwd()), sys.argv[1:])

threading.Thread(target=after).start()
atexit.register(lambda: print("exit in", os.path.basename(os.getcwd())))
sys.stdout = io.TextIOWrapper(sys.stdout.detach(), encoding="utf-8", line_buffering=True)
print("the end")
sys.exit(5)
"""


def test_a_script_finds_what_it_would_find_alone(tmp_path: Path, ceilings: Ceilings) -> None:
    """The script's environment stays until its threads have ended and its exit functions have run, which is after the
    report. Nothing is said on stderr that the script would not say."""
    path = script(tmp_path, AT_HOME)
    ceilings.save(tmp_path / "ceilings.json")
    analysis = ["-m", "rooftop", "analyze", "--no-html", "--ceilings", "ceilings.json", "--device", "cpu"]
    outputs = []
    for words in ([str(path), "--word"], [*analysis, str(path), "--", "--word"]):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 5, done.stderr
        assert (tmp_path / "child.txt").read_text() == "written"
        assert done.stderr == "child says bye\n"
        outputs.append(done.stdout)
        (tmp_path / "child.txt").unlink()
        (tmp_path / "inner").rmdir()
    alone, analyzed = outputs
    assert alone.splitlines()[0] == "{} SourceFileLoader True"
    assert "freed True" in alone
    assert "thread in inner ['--word']" in alone
    assert [line for line in analyzed.splitlines() if line in alone.splitlines()] == alone.splitlines()
    assert analyzed.index("of roof:") < analyzed.index("exit in inner")


def test_a_stance_of_the_script_stays(tmp_path: Path, ceilings: Ceilings, capsys: pytest.CaptureFixture[str]) -> None:
    text = "with torch.compiler.set_stance('eager_on_recompile'):\n    for _ in range(14): torch.ones(4) + 1\n"
    run(tmp_path, f"import torch\n{text}    print(torch._dynamo.eval_frame._stance.stance)", ceilings)
    assert capsys.readouterr().out == "eager_on_recompile\n"


@pytest.mark.parametrize(
    ("hook", "status", "said"),
    [("sys.exit(7)", 7, ""), ("raise RuntimeError('in the hook')", 1, "Error in sys.excepthook:")],
)
def test_a_hook_may_end_the_script_otherwise(
    hook: str, status: int, said: str, tmp_path: Path, ceilings: Ceilings, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"import sys, torch\ntorch.ones(4) + 1\ndef hook(*error):\n    {hook}\nsys.excepthook = hook\n1 / 0\n"
    ended = run_script(script(tmp_path, text), device="cpu", ceilings=ceilings)
    assert ended.status == status
    printed = capsys.readouterr().err
    assert said in printed
    assert not said or "Original exception was:" in printed


LIMITED = """
import signal
import torch

class TimeLimit(Exception):
    pass

def stop(*arguments):
    raise TimeLimit

net = torch.nn.Linear(8, 4)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
before = signal.signal(signal.SIGUSR1, stop)
caught = 0
for _ in range(20):
    try:
        net(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    except TimeLimit:
        caught += 1
signal.signal(signal.SIGUSR1, before)
assert caught == 1
"""


@pytest.mark.parametrize(
    ("owner", "name"), [(counting, "_record"), (counting, "formula_for"), (attribution.ModuleTracker, "_add_traffic")]
)
def test_what_a_handler_of_the_script_raises_in_our_code_reaches_it(
    owner: Any, name: str, tmp_path: Path, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = getattr(owner, name), list[str]()

    def interrupted(*args: Any) -> Any:
        if not calls and callable(signal.getsignal(signal.SIGUSR1)):
            calls.append(name)
            signal.raise_signal(signal.SIGUSR1)
        return original(*args)

    monkeypatch.setattr(owner, name, interrupted)
    ended = run_script(script(tmp_path, LIMITED), device="cpu", ceilings=ceilings)
    assert ended.status == 0, ended.traceback
    assert ended.report is not None


EVALUATING = """
import torch

net = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(40):
    net(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step + 1 == {after}:
        with torch.no_grad():
            for _ in range(300):
                net(torch.ones(2, 4))
"""


@pytest.mark.parametrize("after", [1, 3, 4, 5])
def test_a_long_evaluation_in_a_watched_step_is_not_watched_to_its_end(
    after: int, tmp_path: Path, ceilings: Ceilings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recordings, "MOST_MODULE_CALLS", 100)
    events: list[int] = []
    end_of_trace = Trace.__exit__

    def counted(trace: Trace, *error: Any) -> None:
        end_of_trace(trace, *error)
        events.append(sum(event.name() == "aten::addmm" for event in trace.events))

    monkeypatch.setattr(Trace, "__exit__", counted)
    report = run(tmp_path, EVALUATING.format(after=after), ceilings)
    assert report.mode == "40 recorded steps"
    assert max(events) <= 3
    assert {row.name: row.calls for row in report.ops}["aten::addmm"] == 1
