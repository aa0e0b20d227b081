"""A training is saved while it continues. The saved values are those at the time of the save. The last complete
checkpoint always exists, whatever process is killed or disk is full, and no error is lost."""

from __future__ import annotations

import contextlib
import json
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor

from rooftop.cli.main import main
from rooftop.errors import InputError, ModelRunError
from rooftop.models import GptConfig
from rooftop.parallel import Layout
from rooftop.train import (
    GptTrainer,
    GptTraining,
    Saver,
    Tokens,
    find_training,
    load_training,
    run_steps,
    save_training,
)
from rooftop.train.checkpoints import files as checkpoint_files
from rooftop.train.checkpoints import folders as checkpoint_folders
from rooftop.train.checkpoints.locks import LOCK
from rooftop.train.checkpoints.saved_tensors import SavedTensors, whole_tensor
from rooftop.train.checkpoints.staging import Staging
from rooftop.train.checkpoints.trainer_tensors import tensors_of
from rooftop.train.checkpoints.training_records import read_record
from rooftop.train.checkpoints.trainings import nothing_saved, open_tensors
from rooftop.train.checkpoints.writing import WritingProcess
from rooftop.train.stopping import Stop

CONFIG = GptConfig(vocabulary=31, layers=2, width=16, heads=2, kv_heads=2, hidden=32, positions=8, dropout=0.1)
TRAINING = GptTraining(config=CONFIG, length=8, global_batch=2, micro_batch=2, learning_rate=0.01)
COUNTING = Tokens([np.arange(500) % 31], "counting")
Fork = Callable[..., BaseProcess]


def trainer(training: GptTraining = TRAINING, device: str = "cpu") -> GptTrainer:
    return GptTrainer(training, COUNTING, Layout(), Layout().process_groups(), torch.device(device))


def there(of: GptTrainer) -> dict[str, Tensor]:
    """The current weights and the state of the optimizer."""
    return {each.held.name: each.local.clone() for each in tensors_of(of)}


def tensors(folder: Path) -> dict[str, Tensor]:
    saved = open_tensors(read_record(folder))
    return {name: whole_tensor(saved, name) for name in saved.entries}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@contextmanager
def saving(folder: Path, of: GptTrainer, **options: Any) -> Iterator[Saver]:
    saver = Saver(folder, of, **options)
    try:
        yield saver
    finally:
        saver.close()


def goes_on(saver: Saver, one: GptTrainer, steps: int) -> None:
    """Save a training while its steps continue."""
    saver.begin()
    for _ in range(steps):
        one.advance()
        saver.after_step()
        time.sleep(0.01)


def begin_and_wait(saver: Saver) -> None:
    saver.begin()
    saver.wait()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


# ---- saved values ------------------------------------------------------------------------------------------------


def saved_during_a_step(folder: Path, stepped: threading.Event) -> bool:
    """Whether the saved values are those at the time of the save."""
    one = trainer()
    one.advance()
    before = there(one)
    with saving(folder, one) as saver:
        saver.begin()
        for _ in range(3):
            one.advance()
            stepped.set()
            saver.after_step()
        found = saver.wait()
    assert found is not None
    return same(tensors(found), before)


def test_steps_that_follow_do_not_change_what_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy begins late in the next step. The test must detect an optimizer that does not wait for the copy."""
    copy, stepped, patience_s = Staging._copy, threading.Event(), 0.3

    def late(self: Staging, sources: list[Tensor]) -> None:
        stepped.wait(patience_s)
        copy(self, sources)

    monkeypatch.setattr(Staging, "_copy", late)
    assert saved_during_a_step(tmp_path / "right", stepped)
    stepped.clear()
    patience_s = 30.0
    monkeypatch.setattr(Staging, "wait_to_change", lambda self: None)
    assert not saved_during_a_step(tmp_path / "wrong", stepped)


def test_beside_the_steps_and_at_once_the_same_is_written(tmp_path: Path) -> None:
    one = trainer()
    for _ in range(2):
        one.advance()
    at_once = save_training(tmp_path / "at once", one)
    with saving(tmp_path / "beside", one) as saver:
        saver.begin()
        beside = saver.wait()
    assert beside is not None
    assert names(beside) == names(at_once)
    for file in names(beside):
        assert (beside / file).read_bytes() == (at_once / file).read_bytes()


def test_steps_do_not_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    may_write = threading.Event()
    write = WritingProcess.__call__

    def slow(self: WritingProcess) -> None:
        assert may_write.wait(60)
        write(self)

    monkeypatch.setattr(WritingProcess, "__call__", slow)
    one = trainer()
    one.advance()
    with saving(tmp_path, one) as saver:
        saver.begin()
        for _ in range(3):
            one.advance()
            saver.after_step()
        assert nothing_saved(tmp_path)
        may_write.set()
        assert saver.wait() == tmp_path / "step-00000001"


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    one, expected = trainer(), []
    with saving(tmp_path, one) as saver:
        for _ in range(3):
            one.advance()
            expected.append(there(one))
            saver.begin()
        saver.wait()
    for step, before in enumerate(expected, 1):
        assert same(tensors(tmp_path / f"step-{step:08d}"), before)
    assert names(tmp_path) == ["latest", *(f"step-{step:08d}" for step in (1, 2, 3))]


def test_a_training_before_its_first_step_is_saved_too(tmp_path: Path) -> None:
    one = trainer()
    save_training(tmp_path, one)
    again = trainer()
    with torch.no_grad():
        for weight in again.weights.named.values():
            weight.zero_()
    load_training(find_training(tmp_path, TRAINING)[0], again)
    assert same(there(again), there(one))
    assert (again.step, len(again.optimizer.state)) == (0, 0)


def test_a_plan_follows_what_the_optimizer_has(tmp_path: Path) -> None:
    """The saver is prepared before the first step, when there is no state yet."""
    one = trainer()
    with saving(tmp_path, one) as saver:
        saver.prepare()
        few = saver.bytes
        one.advance()
        saver.begin()
        found = saver.wait()
    assert saver.bytes > 2.9 * few
    assert found is not None
    assert same(tensors(found), there(one))


def test_a_latest_without_any_step_is_no_training(tmp_path: Path) -> None:
    """DeepSpeed also writes such a file, beside its own folders."""
    (tmp_path / "latest").write_text("global_step100\n")
    assert checkpoint_folders.last_step(tmp_path) is None


@pytest.mark.parametrize("name", ["step-00000009", ""])
def test_a_latest_that_names_no_step_is_said_with_those_that_are_there(name: str, tmp_path: Path) -> None:
    for _ in run_steps(trainer(), 2, save=tmp_path, save_interval=1):
        pass
    (tmp_path / "latest").write_text(f"{name}\n")
    with pytest.raises(
        InputError, match="this step does not exist; complete steps are step-00000001, step-00000002: give one"
    ):
        read_record(tmp_path)
    assert read_record(tmp_path / "step-00000002").step == 2


def test_the_last_ones_are_kept(tmp_path: Path) -> None:
    one = trainer()
    for _ in run_steps(one, 5, save=tmp_path, save_interval=1, keep_last=2):
        pass
    assert names(tmp_path) == ["latest", "step-00000004", "step-00000005"]
    save_training(tmp_path, one, keep_last=1)
    assert names(tmp_path) == ["latest", "step-00000005.2"]
    of_others = tmp_path / "step-00000000.7"  # named like a step, but holds no training
    of_others.mkdir()
    (of_others / "notes.txt").write_text("mine")
    again = trainer()
    again.advance()
    save_training(tmp_path, again, keep_last=1)  # step 5 is later than the saved step 1, so it stays
    assert names(tmp_path) == ["latest", "step-00000000.7", "step-00000001", "step-00000005.2"]
    assert (of_others / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="keep_last must be 1 or more, got 0"):
        Saver(tmp_path, again, keep_last=0)


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_gpu_the_optimizer_waits_for_the_copy_and_the_host_for_nothing(
    graph: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Staging._copy

    def late(self: Staging, sources: list[Tensor]) -> None:
        torch.cuda._sleep(2_000_000_000)  # takes about a second on the stream of the copies
        copy(self, sources)

    one = trainer(replace(TRAINING, dtype=dtype, cuda_graph=graph), "cuda")
    with saving(tmp_path, one) as saver:
        for _ in range(6):  # a graph has been captured meanwhile
            one.advance()
            saver.after_step()
        saver.prepare()
        before = {name: tensor.cpu() for name, tensor in there(one).items()}
        monkeypatch.setattr(Staging, "_copy", late)
        began = time.perf_counter()
        saver.begin()
        one.advance()
        waited_s = time.perf_counter() - began
        for _ in range(2):
            one.advance()
            saver.after_step()
        found = saver.wait()
    assert found is not None
    assert same(tensors(found), before)
    assert waited_s < 0.4
    again = trainer(replace(TRAINING, dtype=dtype, cuda_graph=graph), "cuda")
    load_training(find_training(tmp_path, again.training)[0], again)
    assert same({name: tensor.cpu() for name, tensor in there(again).items()}, before)


@pytest.mark.gpu
def test_on_a_gpu_a_save_before_the_graph_is_captured_does_not_disturb_it(tmp_path: Path) -> None:
    one = trainer(replace(TRAINING, cuda_graph=True), "cuda")
    for _ in run_steps(one, 8, save=tmp_path, save_interval=1, interval=100):
        pass
    assert one._replayed is not None
    assert one._replayed.captured
    expected = {name: tensor.cpu() for name, tensor in there(one).items()}
    assert same(tensors(tmp_path), expected)
    assert len(names(tmp_path)) == 9


# ---- failures ----------------------------------------------------------------------------------------------------


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Processes started in this block cannot enlarge files beyond this size, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_full_disk_leaves_the_last_one_and_is_said(asynchronous: bool, tmp_path: Path) -> None:
    one = trainer()
    one.advance()
    with saving(tmp_path, one, asynchronous=asynchronous) as saver:
        saver.begin()
        saver.wait()
        expected = tensors(tmp_path)
        one.advance()
        # The copy is in a file in memory, which already exists.
        with largest_file(20_000), pytest.raises(OSError, match=r"could not be written .*\)\. Is there enough room"):
            goes_on(saver, one, 1000)
        assert same(tensors(tmp_path), expected)
        assert names(tmp_path) == ["latest", "step-00000001"]
        saver.begin()  # the disk has space again
        saver.wait()
        assert same(tensors(tmp_path), there(one))


def test_an_error_is_said_at_the_end_where_no_step_follows(tmp_path: Path) -> None:
    one = trainer()
    reports = run_steps(one, 2, save=tmp_path)
    assert [[report.step for report in next(reports)] for _ in range(2)] == [[1], [2]]
    with largest_file(20_000), pytest.raises(OSError, match="File too large"):
        next(reports)
    assert nothing_saved(tmp_path)


def test_a_loss_that_is_not_finite_lets_what_was_before_be_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, write = trainer(), WritingProcess.__call__

    def slow(self: WritingProcess) -> None:
        time.sleep(0.3)
        write(self)

    monkeypatch.setattr(WritingProcess, "__call__", slow)
    reports = run_steps(one, 9, save=tmp_path, save_interval=1)
    next(reports)
    monkeypatch.setattr(
        one, "advance", lambda: (setattr(one, "step", 2), (torch.tensor(torch.nan), torch.tensor(1.0)))[1]
    )
    with pytest.raises(ModelRunError, match="the loss of step 2 is nan"):
        next(reports)
    assert names(tmp_path) == ["latest", "step-00000001"]


def test_no_memory_for_the_copy_is_said(tmp_path: Path) -> None:
    one = trainer()
    one.advance()
    with saving(tmp_path, one) as saver, largest_file(20_000), pytest.raises(OSError, match="File too large"):
        saver.prepare()


def test_another_step_beside_the_same_tensors_is_refused(tmp_path: Path) -> None:
    """Files of two steps must not be mixed, because the training would continue with the wrong data."""
    one = trainer()
    found = save_training(tmp_path, one)
    said = json.loads((found / "training.json").read_text())
    (found / "training.json").write_text(json.dumps(said | {"step": 1}))
    with pytest.raises(InputError, match=r"was changed: its training\.json says step 1, its index step 0"):
        load_training(found, one)


def test_a_writing_process_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "writer.py"
    script.write_text("import sys; sys.exit('of no use')")
    monkeypatch.setattr(checkpoint_files, "__file__", str(script))
    one = trainer()
    one.advance()
    with saving(tmp_path / "run", one) as saver, pytest.raises(RuntimeError, match=r"ended with status 1: of no use"):
        begin_and_wait(saver)
    assert nothing_saved(tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not be written to"):
        Saver(tmp_path / "file" / "run", trainer())


@pytest.mark.parametrize("done", range(7))
def test_whatever_is_the_last_that_is_done_what_has_a_steps_name_is_whole(
    done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save is killed at each call that renames or removes files when one step replaces another."""
    one, left = trainer(), iter(range(done))
    save_training(tmp_path, one, keep_last=1)
    one.advance()

    def until_killed(what: Callable[..., None]) -> Callable[..., None]:
        def call(*arguments: Any, **options: Any) -> None:
            if next(left, None) is None:
                raise KeyboardInterrupt  # no code catches this exception to clean up
            what(*arguments, **options)

        return call

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint_folders.os, "replace", until_killed(checkpoint_folders.os.replace))
        patched.setattr(checkpoint_folders.os, "unlink", until_killed(checkpoint_folders.os.unlink))
        with contextlib.suppress(RuntimeError, KeyboardInterrupt):
            save_training(tmp_path, one, keep_last=1)
    for folder in tmp_path.glob("step-*"):
        saved = open_tensors(read_record(folder))
        assert isinstance(saved, SavedTensors)
        saved.verify()
    assert read_record(tmp_path).step == int(done > 2)  # calls: clean-up, naming the step, `latest`
    save_training(tmp_path, one, keep_last=1)
    assert [name.split(".")[0] for name in names(tmp_path)] == ["latest", "step-00000001"]


def test_what_a_killed_training_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-00000007.abc-1.unfinished").mkdir()
    (tmp_path / ".step-00000007.abc-1.unfinished" / "rank-00000.safetensors").write_text("half")
    (tmp_path / ".latest.unfinished").write_text("half")
    assert nothing_saved(tmp_path)
    save_training(tmp_path, trainer())
    assert names(tmp_path) == ["latest", "step-00000000"]


# ---- killed ------------------------------------------------------------------------------------------------------

SAVES_ALWAYS = """
import sys
from pathlib import Path
import numpy as np, torch
from rooftop.errors import InputError, ModelRunError
from rooftop.models import GptConfig
from rooftop.parallel import Layout
from rooftop.train import GptTrainer, GptTraining, Tokens, find_training, load_training, nothing_saved, run_steps
config = GptConfig(vocabulary=31, layers=2, width=64, heads=2, kv_heads=2, hidden=256, positions=8)
training = GptTraining(config=config, length=8, global_batch=2, micro_batch=2, learning_rate=0.01)
tokens = Tokens([np.arange(500) % 31], "counting")
trainer = GptTrainer(training, tokens, Layout(), Layout().process_groups(), torch.device("cpu"))
folder = Path(sys.argv[1])
if not nothing_saved(folder):
    load_training(find_training(folder, training)[0], trainer)
print("steps", flush=True)
for _ in run_steps(trainer, 10**6, save=folder, save_interval=1, keep_last=2, interval=10**9):
    pass
"""


def test_killed_at_any_time_the_last_one_is_whole(fork: Fork, tmp_path: Path) -> None:
    """The training is killed five times, and continues each time from the files that are left.
    benchmarks/checkpoint_kills.py kills two ranks a hundred times."""
    draw, folder, before = random.Random(1), tmp_path / "run", 0
    for number in range(5):
        output = tmp_path / f"said-{number}"
        words = {"environment": {}, "folder": tmp_path, "output": output, "errors": tmp_path / "errors"}
        process = fork(SAVES_ALWAYS, str(folder), **words)
        until = time.monotonic() + 120
        while not (output.exists() and "steps" in output.read_text()):
            assert time.monotonic() < until
            assert process.is_alive(), (tmp_path / "errors").read_text()
            time.sleep(0.01)
        if number == 0:
            wait_until((folder / "latest").exists)
        time.sleep(draw.uniform(0.0, 0.4))
        process.kill()
        process.join()
        record = read_record(folder)
        saved = open_tensors(record)
        assert isinstance(saved, SavedTensors)
        saved.verify()
        assert record.step >= before
        assert {float(whole_tensor(saved, name)) for name in saved.entries if name.startswith("optimizer.step.")} == {
            float(record.step)
        }
        before = record.step
    assert before > 0
    wait_until(lambda: not writers(tmp_path))


def writers(folder: Path) -> list[int]:
    """Processes that write checkpoints of trainings in this folder. These processes end with their training."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = checkpoint_files.__file__ in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
            if ours and process.cwd() == str(folder):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_until(done: Callable[[], bool], limit_s: float = 120.0) -> None:
    until = time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


# ---- stopped -----------------------------------------------------------------------------------------------------


def test_a_stop_is_heard_while_each_step_waits_for_the_save_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(*given: Any, **options: Any) -> Path:
        time.sleep(0.1)
        return checkpoint_folders.complete(*given, **options)

    monkeypatch.setattr("rooftop.train.checkpoints.savers.complete", slow)
    one, stop = trainer(), Stop()
    for _ in run_steps(one, 8, save=tmp_path, save_interval=1, interval=1, stop=stop):
        stop.requested = one.step >= 3
    assert one.step == 5


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
]


@pytest.fixture
def book(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "book.txt").write_text("up and down the stairs " * 40)
    return tmp_path


def lines(path: Path) -> list[tuple[int, float]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in found]


def test_a_second_training_of_the_command_is_refused(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (book / "run").mkdir()
    code = (
        "import fcntl, sys; file = open('run/.lock', 'w'); fcntl.lockf(file, fcntl.LOCK_EX); print(flush=True); "
        "sys.stdin.read()"
    )
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert main([*WORDS, "--save", "run", "--train-iters", "1"]) == 2
        assert "run is used by another training, which is starting: wait for its end" in capsys.readouterr().err
        other.kill()


@pytest.mark.parametrize(
    ("number", "name", "status"), [(signal.SIGTERM, "SIGTERM", 143), (signal.SIGINT, "Ctrl-C", 130)]
)
def test_a_signal_saves_and_the_same_words_go_on(
    number: signal.Signals, name: str, status: int, fork: Fork, book: Path
) -> None:
    words = [*WORDS, "--save", "run", "--load", "run", "--keep-last", "1", "--metrics", "lines"]
    program = f"import sys; from rooftop.cli.main import main; sys.exit(main({[*words, '--train-iters', '1000000']!r}))"
    streams = {"environment": {}, "folder": book, "output": book / "out", "errors": book / "err"}
    process = fork(program, **streams)
    wait_until(lambda: (book / "lines").exists() and len((book / "lines").read_text().splitlines()) > 5)
    assert process.pid is not None
    psutil.Process(process.pid).send_signal(number)
    process.join(120)
    assert process.exitcode == status
    step = read_record(book / "run").step
    assert f"stopped by {name} after step {step}; --load run resumes" in (book / "err").read_text()
    assert "run has no checkpoint yet: starting at step 1" in (book / "out").read_text()
    assert lines(book / "lines")[-1][0] == step
    assert main([*words, "--train-iters", str(step + 2)]) == 0
    assert main([*WORDS, "--metrics", "whole", "--train-iters", str(step + 2)]) == 0
    assert lines(book / "lines") == lines(book / "whole")
    assert names(book / "run") == ["latest", f"step-{step + 2:08d}"]


def test_only_a_folder_that_is_saved_to_may_be_missing(book: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*WORDS, "--train-iters", "1"]
    for more in (["--load", "run"], ["--load", "run", "--save", "other"]):
        assert main([*words, *more]) == 2
        assert "no training was saved in run" in capsys.readouterr().err
    assert not (book / "run").exists()
    assert main([*words, "--load", "run", "--save", f"{book}/run"]) == 0
    assert "run has no checkpoint yet: starting at step 1" in capsys.readouterr().out
    assert main([*words, "--load", "run", "--save", "run"]) == 2
    assert "run already has 1 steps: expected a larger --train-iters, got 1" in capsys.readouterr().err
    (book / "run" / "latest").unlink()  # killed just before this existed: the step is complete
    assert main([*words, "--load", "run", "--save", "run"]) == 2
    assert "run already has 1 steps" in capsys.readouterr().err
    assert main([*words, "--keep-last", "2"]) == 2
    assert "--keep-last needs a folder to save to: expected --save DIR" in capsys.readouterr().err
    for option in ("--no-async-save", "--async-save"):
        assert main([*words, option]) == 2
        assert f"{option} needs a folder to save to: expected --save DIR" in capsys.readouterr().err


def test_the_writing_process_does_not_hear_what_the_training_is_sent(tmp_path: Path) -> None:
    """A scheduler sends SIGTERM, and a terminal Ctrl-C, to all processes of a job. The writing process ignores both."""
    script = [sys.executable, "-I", "-S", checkpoint_files.__file__]
    piece = checkpoint_files.FilePiece("up", "F32", (3,), (0,), (3,))
    with tempfile.TemporaryFile() as memory:
        memory.write(bytes(piece.bytes))
        memory.flush()
        process = subprocess.Popen(script, stdin=subprocess.PIPE, text=True, pass_fds=[memory.fileno()])
        wait_until(lambda: ignores(process.pid, signal.SIGTERM) and ignores(process.pid, signal.SIGINT))
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        process.communicate(checkpoint_files.request(tmp_path / "file", [piece], memory.fileno()))
    assert process.returncode == 0
    assert checkpoint_files.read_header(tmp_path / "file")[1]["up"]["shape"] == [3]


def test_the_writing_process_ends_with_its_training(tmp_path: Path) -> None:
    """The writing process writes no further block if the training's process is gone."""
    script = [sys.executable, "-I", "-S", checkpoint_files.__file__]
    piece = checkpoint_files.FilePiece("up", "F32", (3,), (0,), (3,))
    with tempfile.TemporaryFile() as memory:
        memory.write(bytes(piece.bytes))
        memory.flush()
        said = json.loads(checkpoint_files.request(tmp_path / "file", [piece], memory.fileno())) | {"parent": 1}
        ended = subprocess.run(script, input=json.dumps(said), text=True, pass_fds=[memory.fileno()], check=False)
    assert ended.returncode == 1
    header, _ = checkpoint_files.read_header(tmp_path / "file")
    assert (tmp_path / "file").stat().st_size == len(header)


def ignores(pid: int, number: int) -> bool:
    """Whether a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = (line.split()[1] for line in status.splitlines() if line.startswith("SigIgn"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_the_writing_process_needs_nothing_but_the_standard_library() -> None:
    """Because it imports only the standard library, the writing process starts at once, in any folder."""
    program = f"""
import runpy, sys
runpy.run_path({checkpoint_files.__file__!r})
print([name for name in ("torch", "numpy", "rooftop") if name in sys.modules])
"""
    found = subprocess.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
