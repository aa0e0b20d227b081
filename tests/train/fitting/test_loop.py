"""The loop on one rank: its results, its files, and how it ends."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.testing import no_waiting_for_gpu
from rooftop.train.checkpoints.locks import locked
from rooftop.train.fitting import (
    EvaluationRecord,
    Facts,
    Fitted,
    StepRecord,
    exported_metadata,
    fit,
    loop,
    read_metrics,
)
from rooftop.train.fitting.lengths import Lengths
from rooftop.train.fitting.readings import Reading
from rooftop.train.fitting.run_folders import identity_of
from rooftop.train.fitting.states import same_state
from rooftop.train.fitting.stepping import Stepper, dropout_seed, generator_of
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.stopping import Stop
from rooftop.train.tasks.task import Task

safetensors = pytest.importorskip("safetensors.torch")
DTYPE = torch.float64
CLASSES = 3


class Points:
    """Points around a center for each class, changed at random in training."""

    def __init__(self, count: int, noise: float = 0.1) -> None:
        generator = torch.Generator().manual_seed(count)
        self.labels = torch.arange(count) % CLASSES
        self.points = 2 * F.one_hot(self.labels, 4).to(DTYPE) + 0.3 * torch.randn(
            count, 4, generator=generator, dtype=DTYPE
        )
        self.noise = noise

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]

    def draw(self, index: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        return self.points[index] + self.noise * torch.from_numpy(generator.standard_normal(4)), self.labels[index]


def network(dropout: float = 0.0, norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Identity(), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(8, CLASSES)).to(DTYPE)


def loss_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def task(count: int = 48, **changes: Any) -> Task:
    usual = Task(
        model=network(),
        train=Points(count),
        valid=Points(13, noise=0.0),
        loss=loss_of,
        metrics=lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        best="accuracy",
        maximize=True,
        metadata={"model": "points", "classes": ["a", "b", "c"]},
    )
    return replace(usual, **changes)


def recipe(**sections: dict[str, Any]) -> Recipe:
    usual = Recipe.of(
        {
            "run": {"epochs": 3, "batch": 8},
            "optimizer": {"lr": 0.2, "weight_decay": 0.0},
            "loading": {"how": "here"},
        }
    )
    return usual.updated(sections)


class Seen:
    """An observer that keeps all events."""

    def __init__(self, act: Callable[[StepRecord], None] = lambda record: None) -> None:
        self.events: list[str] = []
        self.steps: list[StepRecord] = []
        self.evaluations: list[EvaluationRecord] = []
        self.notes: list[str] = []
        self.facts: Facts | None = None
        self.final: dict[str, Tensor] = {}
        self.act = act

    def began(self, facts: Facts, task: Task) -> None:
        self.events.append("began")
        self.facts = facts

    def stepped(self, records: list[StepRecord]) -> None:
        self.events.append("stepped")
        self.steps += records
        for record in records:
            self.act(record)

    def evaluated(self, record: EvaluationRecord) -> None:
        self.events.append("evaluated")
        self.evaluations.append(record)

    def noted(self, note: str) -> None:
        self.events.append("noted")
        self.notes.append(note)

    def ended(self, fitted: Fitted, model: nn.Module) -> None:
        self.events.append("ended")
        assert not model.training
        self.final = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    @property
    def losses(self) -> Tensor:
        return torch.tensor([record.loss for record in self.steps], dtype=DTYPE)


def fitted(what: Task, how: Recipe, **options: Any) -> tuple[Fitted, Seen]:
    seen = Seen()
    return fit(what, how, device="cpu", observers=[seen], **options), seen


# ---- results ---------------------------------------------------------------------------------------------------------


def test_a_training_learns_and_says_what_it_did(tmp_path: Path) -> None:
    how = recipe(optimizer={"name": "adamw", "lr": 0.1})
    done, seen = fitted(task(), how, out=tmp_path)
    assert (done.steps, done.reason, done.out) == (18, "done", tmp_path)
    assert seen.events == ["began", *([*["stepped"] * 6, "evaluated"] * 3), "ended"]
    assert seen.facts == Facts(67, 67, 48, 13, 18, 6, 0, 1, "cpu", seen.facts.loading if seen.facts else "")
    assert [record.step for record in seen.steps] == [*range(1, 19)]
    assert [record.epoch for record in seen.evaluations] == [1.0, 2.0, 3.0]
    assert done.last == seen.evaluations[-1]
    assert seen.evaluations[-1].values["accuracy"] > 0.9
    assert seen.losses[-3:].mean() < 0.7 * seen.losses[0]
    assert read_metrics(tmp_path / "metrics.jsonl") == (seen.steps, seen.evaluations)
    assert Recipe.read(tmp_path / "recipe.toml") == how


def test_the_first_steps_are_those_of_plain_pytorch() -> None:
    """One batch has all samples, so their order does not matter."""
    plain = recipe(run={"batch": 12, "steps": 4}, schedule={"name": "constant", "warmup": 0.0})
    data = Points(12, noise=0.0)
    _, seen = fitted(task(train=data), plain)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    expected, norms = [], []
    for _ in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, (data.points, data.labels))
        loss.backward()
        norms.append(
            float(torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None]).norm())
        )
        optimizer.step()
        expected.append(loss.item())
    torch.testing.assert_close(seen.losses, torch.tensor(expected, dtype=DTYPE), rtol=0, atol=1e-12)
    assert [record.grad_norm for record in seen.steps] == pytest.approx(norms, abs=1e-12)


def mixed(batch: Any, places: Tensor, generator_of: Any) -> Any:
    """Mixes samples 2k and 2k+1 with a number drawn for the pair."""
    points, labels = batch
    weights = torch.tensor([generator_of(int(place) // 2 * 2).beta(0.4, 0.4) for place in places], dtype=DTYPE)[:, None]
    targets = F.one_hot(labels, CLASSES).to(DTYPE)
    others = torch.arange(len(places)) ^ 1
    return weights * points + (1 - weights) * points[others], weights * targets + (1 - weights) * targets[others]


def test_the_losses_are_the_same_for_any_number_of_parts() -> None:
    """The training has mixup, and samples that are redrawn in each epoch."""
    losses = [fitted(task(count=51, alter=mixed), recipe(run={"accumulate": parts}))[1].losses for parts in (1, 2, 4)]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=0, atol=1e-12)
    unmixed = fitted(task(count=51), recipe())[1].losses
    assert (unmixed - losses[0]).abs().max() > 1e-3


def test_each_sample_of_the_validation_counts_once() -> None:
    """13 samples in batches of 8: the last batch is shorter, and its mean counts less."""
    _, seen = fitted(what := task(), recipe(evaluation={"batch": 8}))
    data = Points(13)
    model = what.model.eval()
    with torch.no_grad():
        expected = {
            "loss": float(loss_of(model, (data.points, data.labels))),
            "accuracy": float((model(data.points).argmax(1) == data.labels).double().mean()),
        }
    assert seen.evaluations[-1].values == pytest.approx(expected, abs=1e-12)


def test_the_mean_weights_are_evaluated_and_exported(tmp_path: Path) -> None:
    how = recipe(ema={"decay": 0.9}, run={"epochs": 1})
    _, seen = fitted(what := task(), how, out=tmp_path)
    last = safetensors.load_file(tmp_path / "last.safetensors")
    assert all(torch.equal(last[name], tensor) for name, tensor in seen.final.items())
    # the caller continues with its own generator
    assert not torch.equal(last["0.weight"], what.model.state_dict()["0.weight"])
    model, data = network(), Points(13)
    model.load_state_dict(last)
    assert seen.evaluations[-1].values["loss"] == pytest.approx(
        loss_of(model, (data.points, data.labels)).item(), abs=1e-12
    )


def test_dropout_differs_by_step_and_rank_only() -> None:
    assert len({dropout_seed(*each) for each in [(0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0)]}) == 4
    how = recipe(run={"epochs": 1})
    before = torch.random.get_rng_state()
    one = fitted(task(model=network(dropout=0.5)), how)[1].losses
    torch.rand(5)
    assert torch.equal(one, fitted(task(model=network(dropout=0.5)), how)[1].losses)
    assert not torch.equal(one, fitted(task(), how)[1].losses)
    torch.random.set_rng_state(before)
    model = network(dropout=0.5)
    state = torch.random.get_rng_state()
    fit(task(model=model), how, device="cpu")
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's generator is unchanged


def test_channels_last_and_autocast_reach_the_model() -> None:
    seen: list[tuple[bool, torch.dtype]] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        output = model(batch[0])
        seen.append((batch[0].is_contiguous(memory_format=torch.channels_last), output.dtype))
        return output.float().square().mean()

    images = [(torch.randn(3, 4, 5),) for _ in range(8)]
    what = Task(nn.Conv2d(3, 4, 3), images, loss, valid=images)
    fitted(what, recipe(run={"channels_last": True, "precision": "bf16", "epochs": 1}))
    assert seen == [(True, torch.bfloat16)] * 2  # a step and an evaluation
    assert what.model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("workspace", [None, ":16:8"])
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_deterministic_algorithms_are_on_in_the_loop_only(
    mode: int, workspace: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    on: list[tuple[int, bool]] = []
    name, debug_mode = "CUBLAS_WORKSPACE_CONFIG", torch.get_deterministic_debug_mode
    monkeypatch.delenv(name, raising=False)
    if workspace is not None:
        monkeypatch.setenv(name, workspace)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        on.append((debug_mode(), name in os.environ))
        return loss_of(model, batch)

    try:
        torch.set_deterministic_debug_mode(mode)
        fitted(task(loss=loss), recipe(run={"deterministic": True, "steps": 1}))
        assert set(on) == {(2, True)}
        assert debug_mode() == mode
        assert os.environ.get(name) == workspace
    finally:
        torch.set_deterministic_debug_mode(0)


def test_the_model_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop compiles the model once for training and once for evaluation. Nothing is compiled again for the shorter
    last batch or in later epochs."""
    compiled: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(torch.is_grad_enabled())
        return graph.forward

    monkeypatch.setattr(loop, "COMPILER", backend)
    torch._dynamo.reset()
    one = fitted(task(), recipe(run={"epochs": 2, "compile": True}))[1]
    assert sorted(compiled) == [False, True]
    torch.testing.assert_close(one.losses, fitted(task(), recipe(run={"epochs": 2}))[1].losses, rtol=0, atol=1e-12)
    assert one.evaluations[-1].values["loss"] > 0


# ---- the best, the last, the end -------------------------------------------------------------------------------------


def scripted(*accuracies: float) -> Callable[[nn.Module, torch.device], dict[str, float]]:
    values = iter(accuracies)
    return lambda model, device: {"score": next(values)}


def test_the_best_weights_are_exported(tmp_path: Path) -> None:
    weights: list[Tensor] = []
    judge = scripted(0.5, 0.9, math.nan)

    def judged(model: nn.Module, device: torch.device) -> dict[str, float]:
        weights.append(model.state_dict()["0.weight"].clone())
        return judge(model, device)

    done, seen = fitted(task(judge=judged, best="score"), recipe(), out=tmp_path)
    assert [record.best for record in seen.evaluations] == [True, True, False]
    assert done.best == seen.evaluations[1]
    for name, number in (("best", 1), ("last", 2)):
        found = safetensors.load_file(tmp_path / f"{name}.safetensors")
        assert torch.equal(found["0.weight"], weights[number])
        assert exported_metadata(tmp_path / f"{name}.safetensors") == task().metadata


def test_training_ends_where_it_gets_no_better(tmp_path: Path) -> None:
    settled: list[bool] = []
    what = task(
        judge=scripted(0.1, 0.3, 0.4, 0.5, 0.5), best="score", maximize=False, settle=lambda model: settled.append(True)
    )
    how = recipe(run={"epochs": 9}, evaluation={"patience": 2})
    done, seen = fitted(what, how, out=tmp_path)
    assert done.reason == "no improvement for 2 evaluations"
    assert done.steps == 18
    assert settled == [True]  # and evaluated again
    assert len(seen.evaluations) == 4
    assert (tmp_path / "last.safetensors").is_file()
    again, seen = fitted(task(best="score", maximize=False), how, out=tmp_path, resume=True)
    assert (again.reason, again.steps, again.best) == (done.reason, 18, done.best)
    assert seen.events == ["began", "ended"]


def test_a_best_metric_that_is_not_there_is_named() -> None:
    with pytest.raises(
        InputError, match=r"best metric is 'acuracy', but the evaluation returned loss, accuracy \(did you"
    ):
        fitted(task(best="acuracy"), recipe())


# ---- stopped and resumed ---------------------------------------------------------------------------------------------


def state_of(out: Path) -> dict[str, Tensor]:
    folder = out / "checkpoints" / (out / "checkpoints" / "latest").read_text().strip()
    return safetensors.load_file(folder / "rank-00000.safetensors")  # type: ignore[no-any-return]


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_a_signal_ends_the_step_and_saves(number: signal.Signals, name: str, tmp_path: Path) -> None:
    how = recipe(ema={"decay": 0.9}, optimizer={"name": "adamw", "lr": 0.01})
    what = {"model": network(dropout=0.3, norm=True), "alter": mixed}
    whole = tmp_path / "whole"
    fit(task(**{**what, "model": network(0.3, norm=True)}), how, device="cpu", out=whole)
    out = tmp_path / "stopped"
    seen = Seen(lambda record: os.kill(os.getpid(), number) if record.step == 8 else None)
    done = fit(task(**what), how, device="cpu", out=out, observers=[seen])
    assert done.reason == f"stopped by {name}"
    assert done.steps in (8, 9)  # in mid-epoch; the signal comes while the eighth step is reported
    saved = out / "checkpoints" / f"step-{done.steps:08d}"
    assert seen.notes == [
        f"stopped by {name} after step {done.steps}; saved in {saved}: --resume continues from there",
    ]
    assert not (out / "last.safetensors").exists()
    done, later = fitted(task(**{**what, "model": network(0.3, norm=True)}), how, out=out, resume=True)
    assert done.reason == "done"
    assert later.facts is not None
    assert later.facts.before == seen.steps[-1].step
    assert same_state(state_of(out), state_of(whole))
    records = [
        [replace(each, samples_per_s=0, waiting=0, peak_bytes=0) for each in read_metrics(path / "metrics.jsonl")[0]]
        for path in (out, whole)
    ]
    assert records[0] == records[1]
    assert same_state(*(safetensors.load_file(path / "last.safetensors") for path in (out, whole)))


def test_a_program_stops_it(tmp_path: Path) -> None:
    stop = Stop()
    seen = Seen(lambda record: setattr(stop, "requested", record.step == 3))
    done = fit(task(), recipe(), device="cpu", out=tmp_path, observers=[seen], stop=stop)
    assert done.reason == "stopped by the program"


KILLED = """
import os, random, signal, socket, sys, time
import numpy as np, torch
from torch import nn
import torch.nn.functional as F
from rooftop.train.fitting import fit
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.task import Task

class Images:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return self.draw(index, np.random.default_rng(0))
    def draw(self, index, generator):
        image = np.full((1, 6, 6), index / 40, np.float32) + generator.standard_normal((1, 6, 6), dtype=np.float32)
        return torch.from_numpy(image), index % 3

class Says:
    def __init__(self, said):
        self.said = said
    def __getattr__(self, name):
        return lambda *_: None
    def stepped(self, records):
        os.write(self.said, bytes([records[-1].step]))

def train(out, said):
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(128, 16), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(16, 3))
    recipe = Recipe.of({
        "run": {"epochs": 2, "batch": 4, "precision": "fp16", "accumulate": 2},
        "optimizer": {"name": "muon", "lr": 0.01},
        "ema": {"decay": 0.9},
        "augment": {"repeats": 2},
        "loading": {"how": how, "workers": 1 + (ranks == 1)},
    })
    loss = lambda model, batch: F.cross_entropy(model(batch[0]).float(), batch[1])
    task = Task(model, Images(), loss, valid=Images())
    fit(task, recipe, device="cpu", out=out, resume=True, save_every=3, observers=[Says(said)])

def begin(out, said, rank, port):
    pid = os.fork()
    if pid:
        return pid
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(out, said)
    os._exit(0)

def run(out, until):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hears, said = os.pipe()
    pids = [begin(out, said, rank, port) for rank in range(ranks)]
    os.close(said)
    while (step := os.read(hears, 1)) and (until is None or step[0] < until):
        pass
    if until is not None:
        time.sleep(draw.uniform(0, 0.01))  # in a step, an evaluation or a save
        for pid in draw.sample(pids, ranks):  # either rank dies first
            os.kill(pid, signal.SIGKILL)
    os.close(hears)
    print(*{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids}, flush=True)

how, ranks = sys.argv[1], int(sys.argv[2])
draw = random.Random(1)
run("whole", None)
for until in sorted(draw.sample(range(4, 18), 3)):
    run("killed", until)
run("killed", None)
"""


@pytest.mark.parametrize(("how", "ranks"), [("threads", 1), ("processes", 1), ("processes", 2)])
def test_killed_three_times_it_ends_with_the_same_bits(how: str, ranks: int, fork: Any, tmp_path: Path) -> None:
    """The training is killed in mid-epoch, while samples are read ahead. The training uses repeated augmentation,
    dropout, batch norm, fp16, mean weights and Muon."""
    files = {"output": tmp_path / "output", "errors": tmp_path / "errors"}
    process = fork(KILLED, how, str(ranks), environment={}, folder=tmp_path, **files)
    process.join(600)
    said = (tmp_path / "errors").read_text()
    assert process.exitcode == 0, said
    assert (tmp_path / "output").read_text().split() == ["0", "-9", "-9", "-9", "0"], said
    one, other = (tmp_path / name for name in ("whole", "killed"))
    assert same_state(state_of(one), state_of(other))
    assert same_state(*(safetensors.load_file(path / "last.safetensors") for path in (one, other)))
    steps, evaluations = read_metrics(other / "metrics.jsonl")
    assert [each.step for each in steps] == [*range(1, 21)]
    assert [each.loss for each in steps] == [each.loss for each in read_metrics(one / "metrics.jsonl")[0]]
    assert [each.step for each in evaluations] == [10, 20]
    assert len(list((other / "checkpoints").glob("*"))) == 3  # the last two, and `latest`


class Named:
    """Samples with an array of texts, which are new objects in each call, and a sparse tensor."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        self.kept.append(np.array([f"name {index}"], dtype=object))
        return self.kept[-1], index


class Sparse:
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return torch.eye(3).to_sparse()


def test_the_identity_of_data_is_that_of_their_values() -> None:
    data = Named()
    first, again = (identity_of(task(valid=data), recipe())["data"]["valid"]["content"] for _ in range(2))
    assert first == again
    assert len(set(first)) == 3
    assert identity_of(task(valid=Sparse()), recipe())["data"]["valid"]["content"] == ["RuntimeError"]


def test_another_training_is_refused_with_what_differs(tmp_path: Path) -> None:
    fit(task(), recipe(run={"epochs": 1}), device="cpu", out=tmp_path)
    with pytest.raises(InputError, match=r"already holds a training \(step-00000006\): resume it, or give another"):
        fit(task(), recipe(run={"epochs": 1}), device="cpu", out=tmp_path)
    for what, how, words in (
        (
            task(),
            recipe(run={"epochs": 1}, optimizer={"lr": 0.3}),
            r"recipe\.optimizer\.lr is 0\.3 now and 0\.2 in the checkpoint",
        ),
        (task(count=40), recipe(run={"epochs": 1}), r"data\.train\.samples is 40 now and 48 in the checkpoint"),
        (
            task(valid=Points(13, noise=0.5)),
            recipe(run={"epochs": 1}),
            r"data\.valid\.content is .* now and ",
        ),
        (task(best="loss"), recipe(run={"epochs": 1}), r'task\.best is "loss" now and "accuracy" in the checkpoint'),
        (
            task(model=network(norm=True)),
            recipe(run={"epochs": 1}),
            r"task\.tensors is .*; task\.parameters is 83 now",
        ),
    ):
        with pytest.raises(InputError, match=f"holds another training: .*{words}"):
            fit(what, how, device="cpu", out=tmp_path, resume=True)
    longer = rf"To train longer, start from its weights: model.weights={tmp_path}/last.safetensors, in another folder"
    with pytest.raises(InputError, match=longer):
        fit(task(), recipe(run={"epochs": 2}), device="cpu", out=tmp_path, resume=True)
    how = recipe(run={"epochs": 1}, loading={"ahead": 2}, faults={"not_finite": "skip"})
    assert fit(task(), how, device="cpu", out=tmp_path, resume=True).reason == "done"


HOLDS = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process 7 on here", file=file, flush=True)
print("locked", flush=True)
sys.stdin.read()
"""


def test_a_second_training_in_a_folder_is_refused_while_the_first_one_runs(tmp_path: Path) -> None:
    how = recipe(run={"epochs": 1})
    words = [sys.executable, "-c", HOLDS, str(tmp_path / ".lock")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        for resume in (False, True):
            with pytest.raises(InputError, match="is used by another training, process 7 on here: wait for its end"):
                fit(task(), how, device="cpu", out=tmp_path, resume=resume)
        assert os.listdir(tmp_path) == [".lock"]
        other.kill()
    with locked(tmp_path):  # the command and the loop both lock the folder
        fit(task(), how, device="cpu", out=tmp_path)
        other_process = subprocess.run([*words[:2], HOLDS.replace("LOCK_EX", "LOCK_EX | 4"), words[3]], check=False)
        assert other_process.returncode == 1, "the loop has kept the lock of the command"


def test_resume_without_a_checkpoint_begins(tmp_path: Path) -> None:
    assert fit(task(), recipe(run={"steps": 2}), device="cpu", out=tmp_path, resume=True).steps == 2
    with pytest.raises(InputError, match="resume needs out"):
        fit(task(), recipe(), device="cpu", resume=True)
    with pytest.raises(InputError, match="keep_last is 0: expected 1 or more"):
        fit(task(), recipe(), device="cpu", keep_last=0)


def test_how_samples_are_read_is_told_once_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    fit(task(), recipe(run={"steps": 1}), device="cpu", observers=[seen])
    assert seen.facts is not None
    assert seen.facts.loading == "in the loop"
    assert not seen.notes
    monkeypatch.setattr("rooftop.data.choosing.QUICK_S", 0.0)  # so that each way of loading is timed
    seen = Seen()
    how = recipe(run={"steps": 60}, loading={"how": "auto", "workers": 2})
    fit(task(), how, device="cpu", observers=[seen])
    assert seen.facts is not None
    assert seen.facts.loading == ""
    (note,) = seen.notes
    assert re.match(r"loading (in the loop|by 2 threads|by 2 processes) \(a batch takes ", note)


# ---- the step on a GPU -----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_step_does_not_wait_for_the_gpu(optimizer: str, precision: str) -> None:
    from rooftop.train.fitting.feeding import Part

    device = torch.device("cuda")
    what = task(model=network(norm=True).float().to(device))
    how = recipe(run={"precision": precision}, optimizer={"name": optimizer, "clip": 1.0}, ema={"decay": 0.9})
    stepper = Stepper(what, how, 10, device, None, 0)
    points = Points(8)
    batch = points.points.float().to(device), points.labels.to(device)
    part = Part(batch, torch.arange(8), torch.arange(8), 1.0)
    stepper.step(1, [part])
    with no_waiting_for_gpu():
        for number in range(2, 5):
            row = stepper.step(number, [part])
    assert row[:2].isfinite().all()


def test_the_next_step_is_launched_before_results_are_read() -> None:
    """At an evaluation and at the end, all results are read at once."""
    order: list[str] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if model.training:
            order.append("step")
        return loss_of(model, batch)

    seen = Seen(lambda record: order.append(f"read {record.step}"))
    fit(task(loss=loss), recipe(run={"epochs": 2}), device="cpu", observers=[seen], interval=4)
    steps = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]  # six in an epoch
    reads_before = {2: [1], 6: [2, 3, 4], 7: [5, 6], 10: [7, 8], 13: [9, 10, 11, 12]}  # step 4 is read after step 5
    expected = []
    for step in [*steps, 13]:
        expected += [f"read {read}" for read in reads_before.get(step, [])]
        expected += ["step"] * (step < 13)
    assert order == expected


@pytest.mark.gpu
def test_to_begin_a_reading_does_not_wait_for_the_gpu() -> None:
    with no_waiting_for_gpu():
        reading = Reading(2, [torch.full((4,), float(number), device="cuda") for number in range(2)])
    assert reading.rows() == [[0.0] * 4, [1.0] * 4]


def test_lengths_of_the_training_are_those_of_the_loader() -> None:
    """The reported length of a training is that of its loader."""
    seen: list[list[int]] = []

    def alter(batch: Any, places: Tensor, generator_of: Any) -> Any:
        seen.append(places.tolist())
        return batch

    fitted(task(count=21, alter=alter, valid=None, best="loss"), recipe(run={"accumulate": 2, "epochs": 2}))
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2 * Lengths.of(recipe(), 21, 1).per_epoch
    assert generator_of(1, 2)(3).random() == np.random.default_rng((1, 2, 3)).random()


def test_a_checkpoint_from_before_a_switch_existed_is_resumed(tmp_path: Path) -> None:
    """The switch then has its default."""
    fit(task(), recipe(run={"epochs": 1}), device="cpu", out=tmp_path)
    (described,) = (tmp_path / "checkpoints").glob("*/training.json")
    content = json.loads(described.read_text())
    del content["identity"]["recipe"]["run"]["replay"]
    del content["identity"]["recipe"]["augment"]["rand_augment_on"]
    described.write_text(json.dumps(content))
    assert fit(task(), recipe(run={"epochs": 1}), device="cpu", out=tmp_path, resume=True).steps == 6
    content["identity"]["recipe"]["run"]["seed"] = 7
    described.write_text(json.dumps(content))
    with pytest.raises(InputError, match=r"recipe\.run\.seed is 0 now and 7 in the checkpoint"):
        fit(task(), recipe(run={"epochs": 1}), device="cpu", out=tmp_path, resume=True)
