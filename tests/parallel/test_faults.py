"""`rooftop train gpt` under torchrun when a rank or a launcher dies: all ranks end and name it, or continue with fewer
ranks."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
import pytest

from rooftop.cli.main import main

Fork = Callable[..., BaseProcess]

AGENT = """
import os, signal, sys, time
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, parse_args
from rooftop.cli.main import run
from rooftop.parallel import watching
from rooftop.train import GptTrainer

watching.TELLING_S, watching.ARRIVING_S = 30.0, 20.0  # on a busy machine ranks answer late
watching.STOPPED_S = 2.0
tell_place = watching.Watch._tell_place

def telling(watch, *arguments, **options):
    tell_place(watch, *arguments, **options)
    if watch._told[1].reported:
        open(f"told-{watch.rank}", "w").close()

watching.Watch._tell_place = telling
advance = GptTrainer.advance

def in_its_time(trainer):
    if not os.path.exists("fast"):
        time.sleep(float(os.environ.get("STEP_S", 0)) * (10 if os.path.exists("slow") else 1))
    return advance(trainer)

GptTrainer.advance = in_its_time
at = sys.argv.index("train")
config, *_ = config_from_args(parse_args([*sys.argv[1:at], "rooftop"]))
config.start_method = "fork"
sys.argv[1:at] = []

def rank():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # not what the agent does on them
    run()

elastic_launch(config, rank)()
"""
"""torchrun's own agent, with ranks that have already imported torch. (torchrun would import it in each rank.)"""

WORDS = [
    *(
        "train",
        "gpt",
        "--device",
        "cpu",
        "--no-roof",
        "--log-interval",
        "1",
        "--num-layers",
        "1",
        "--hidden-size",
        "16",
    ),
    *("--num-attention-heads", "2", "--seq-length", "8", "--dropout", "0.1", "--data-path", "book.txt"),
    *("--metrics", "lines"),
]


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("up and down the stairs " * 400)
    return tmp_path


def losses(path: Path) -> dict[int, float]:
    found = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {line["step"]: line["loss"] for line in found}


def wait_for_step(path: Path, step: int, agents: list[BaseProcess], limit_s: float = 300.0) -> None:
    until = time.monotonic() + limit_s
    while max(losses(path), default=0) < step:
        assert all(agent.is_alive() for agent in agents)
        assert time.monotonic() < until
        time.sleep(0.05)


def wait_for(done: Callable[[], bool], agent: BaseProcess, limit_s: float = 300.0) -> None:
    until = time.monotonic() + limit_s
    while not done():
        assert agent.is_alive()
        assert time.monotonic() < until
        time.sleep(0.05)


def ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:  # the process has just ended
        return True


def ranks_of(agent: BaseProcess) -> list[psutil.Process]:
    return sorted(psutil.Process(agent.pid).children(), key=lambda process: process.pid)


@pytest.mark.parametrize(
    ("number", "more", "said"),
    [
        (signal.SIGKILL, [], "rank 2 of 4 is gone without an error"),
        (signal.SIGKILL, ["--save", "run"], "rank 2 of 4 is gone without an error"),
        (signal.SIGSTOP, [], "rank 2 of 4 has given no sign of life for 2 s: it is suspended"),
    ],
)
def test_a_rank_that_dies_or_stops_ends_all_and_is_named(
    number: signal.Signals, more: list[str], said: str, fork: Fork, book: Path
) -> None:
    """Ranks end and name the failed rank by default, without any flag."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "one", "--nproc-per-node", "4"]
    words = [*where, *WORDS, *more, "--train-iters", "1000000"]
    agent = fork(AGENT, *words, environment={}, folder=book, output=book / "out", errors=book / "err")
    wait_for_step(book / "lines", 6, [agent])
    wait_for((book / "told-2").exists, agent)  # six steps may take less time than the interval between two reports
    ranks = ranks_of(agent)
    began = time.monotonic()
    ranks[2].send_signal(number)
    agent.join(180)
    assert agent.exitcode not in (None, 0)
    assert all(ended(rank) for rank in ranks)
    assert time.monotonic() - began < 150
    errors = (book / "err").read_text()
    (line,) = [line for line in errors.splitlines() if line.startswith("rooftop: error: ")]
    assert said in line
    assert re.search(r"; ranks? [013].* awaits? the all_reduce of .* \(ranks 0-3\)", line), line
    assert re.search(r"; rank 2 was last at step \d+, \w+/\S+\.py:\d+, in \w+", line), line


def test_sigterm_ends_all_ranks_without_an_error(fork: Fork, book: Path) -> None:
    """Without saves, ranks end at once. A launcher that ends its ranks does not count as a failed rank."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "one", "--nproc-per-node", "2"]
    words = [*where, *WORDS, "--train-iters", "1000000"]
    agent = fork(AGENT, *words, environment={}, folder=book, output=book / "out", errors=book / "err")
    wait_for_step(book / "lines", 3, [agent])
    ranks = ranks_of(agent)
    assert agent.pid is not None
    os.kill(agent.pid, signal.SIGTERM)
    agent.join(120)
    assert agent.exitcode not in (None, 0)
    assert all(ended(rank) for rank in ranks)
    assert "rooftop: error" not in (book / "err").read_text()


# ---- elastic ---------------------------------------------------------------------------------------------------------


STEPS = 40
OWN_STORES = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""If launchers share a store, PyTorch 2.13 does not accept a later launcher that the others do not know."""


def launcher(
    number: int, port: int, steps: int, fork: Fork, book: Path, environment: dict[str, str] | None = None
) -> BaseProcess:
    """One of two launchers of a training on two machines; a single launcher may continue the training."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "two", "--nnodes", "1:2"]
    soon = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
    where += ["--nproc-per-node", "2", "--max-restarts", "2", "--rdzv-conf", soon]
    words = ["--global-batch-size", "4", "--train-iters", str(steps), "--save", "run", "--load", "run"]
    words = [*where, *WORDS, *words, "--save-interval", "5"]
    said = {"output": book / f"out{number}", "errors": book / f"err{number}"}
    pause = {"STEP_S": "0.1"}  # launchers come and go within few steps: up to a file `fast`, and 1 s with a file `slow`
    return fork(AGENT, *words, environment={**pause, **(environment or {})}, folder=book, **said)


def two_launchers(
    port: int, steps: int, fork: Fork, book: Path, environment: dict[str, str] | None = None
) -> tuple[BaseProcess, BaseProcess]:
    """The first launcher has the store at which they meet, so the store survives when the second launcher is killed."""
    first = launcher(1, port, steps, fork, book, environment)
    wait_for(lambda: port in listening(first), first)
    return first, launcher(2, port, steps, fork, book, environment)


def listening(process: BaseProcess) -> set[int]:
    """The ports at which a process listens."""
    found = psutil.Process(process.pid).net_connections("tcp")
    return {each.laddr.port for each in found if each.status == psutil.CONN_LISTEN}


def starts(book: Path) -> list[tuple[int, int]]:
    """(ranks, the step from which they continued) of each start."""
    said = "".join(path.read_text() for path in sorted(book.glob("out?")))
    parts = re.split(r"float32 on (\d) x cpu", said)[1:]
    gone_on = (re.search(r"continuing after step (\d+) of", part) for part in parts[1::2])
    return [(int(size), int(found[1]) if found else 0) for size, found in zip(parts[::2], gone_on, strict=True)]


def wait_for_checkpoint(book: Path, step: int, agent: BaseProcess) -> None:
    """A process of low priority writes it, which takes seconds on a busy machine: steps take longer meanwhile."""
    (book / "slow").touch()
    wait_for((book / "run" / f"step-{step:08d}").exists, agent)
    (book / "slow").unlink()


def wait_for_start(book: Path, ranks: int, agent: BaseProcess, least: int = 1) -> int:
    """Wait until this many ranks have continued, after at least some steps; return the step from which they did."""
    until = time.monotonic() + 300
    while True:
        for size, step in starts(book):
            if size == ranks and step >= least:
                return step
        assert agent.is_alive()
        assert time.monotonic() < until
        time.sleep(0.05)


def one_is_killed(first: BaseProcess, second: BaseProcess, book: Path) -> int:
    """Two launchers, the second of which dies; return the step from which the other continued."""
    wait_for_step(book / "lines", 8, [first, second])
    wait_for_checkpoint(book, 5, first)
    orphans = ranks_of(second)
    second.kill()
    step = wait_for_start(book, 2, first)
    assert step in range(5, max(losses(book / "lines")) + 1, 5)  # the last checkpoint may not have been complete yet
    assert all(ended(rank) for rank in orphans)
    said = (book / "err1").read_text() + (book / "err2").read_text()
    gone = "ranks 2-3 of 4 are gone without an error (their processes have ended); "
    orphaned = "ranks 2-3 of 4: the launcher (torchrun) that started them is gone"
    ended_first = any(f"rank {rank} of 4 failed: " in said for rank in (2, 3))
    assert ended_first or "rank 2 of 4 " in said or gone in said or orphaned in said
    assert "ranks 0-3 of 4:" not in said  # the launcher of ranks 0 and 1 is alive
    return step


def go_on(step: int, until: int, fork: Fork, book: Path) -> dict[int, float]:
    """Losses of two ranks that continue alone."""
    where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "--rdzv-id", "one", "--nproc-per-node", "2"]
    words = ["--global-batch-size", "4", "--train-iters", str(until), "--load", f"run/step-{step:08d}"]
    words = [*where, *WORDS[:-1], "again", *words]
    again = fork(AGENT, *words, environment={}, folder=book, output=book / "again-out", errors=book / "again-err")
    again.join(300)
    assert again.exitcode == 0, (book / "again-err").read_text()
    return losses(book / "again")


def test_a_training_goes_on_with_the_launcher_that_is_left(
    fork: Fork, book: Path, free_port: Callable[[], int]
) -> None:
    """The remaining launcher continues from the last checkpoint, with the losses of two ranks that continue alone."""
    port = free_port()
    first, second = two_launchers(port, STEPS, fork, book)
    step = one_is_killed(first, second, book)
    (book / "fast").touch()
    first.join(300)
    assert first.exitcode == 0, (book / "err1").read_text()
    found = losses(book / "lines")
    assert sorted(found) == list(range(1, STEPS + 1))
    assert go_on(step, STEPS, fork, book) == {at: loss for at, loss in found.items() if at > step}
    assert main([*WORDS[:-1], "whole", "--global-batch-size", "4", "--train-iters", str(STEPS)]) == 0
    assert losses(book / "whole") == pytest.approx(found, abs=1e-4)


def test_a_launcher_that_comes_again_takes_part(fork: Fork, book: Path, free_port: Callable[[], int]) -> None:
    """The new launcher's count of restarts differs from the other launcher's count. Ranks that end for the restart save
    first."""
    port, steps = free_port(), 50
    first, second = two_launchers(port, steps, fork, book, OWN_STORES)
    fewer = one_is_killed(first, second, book)
    wait_for_step(book / "lines", fewer + 5, [first])
    wait_for_checkpoint(book, fewer + 5, first)
    (book / "slow").touch()  # the steps must not end before the new launcher is there
    third = launcher(3, port, steps, fork, book, OWN_STORES)
    more = wait_for_start(book, 4, first, least=fewer + 5)
    (book / "fast").touch()
    for agent in (first, third):
        agent.join(300)
        assert agent.exitcode == 0, (book / "err1").read_text() + (book / "err3").read_text()
    found = losses(book / "lines")
    assert sorted(found) == list(range(1, steps + 1))
    assert go_on(fewer, more, fork, book) == {at: loss for at, loss in found.items() if fewer < at <= more}
