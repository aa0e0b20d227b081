"""Errors are reported in one line, and neither checkpoints nor weights are lost."""

from __future__ import annotations

import json
import math
import re
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.errors import DivergedError, InputError, ModelRunError
from rooftop.train.fitting import StepRecord, fit, read_metrics, stepping
from rooftop.train.fitting.run_folders import RunFolder, identity_of
from rooftop.train.fitting.states import same_state
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.task import Task

pytest.importorskip("safetensors")
NUMBERS = [(torch.tensor([float(index % 5), 1.0]), torch.tensor(index % 2)) for index in range(24)]


class Root(nn.Module):
    """A square root, whose gradient at 0 is infinite; its output is finite."""

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.detach()).abs().sqrt() + x


class Breaks(nn.Module):
    """Returns NaN in some of its calls."""

    def __init__(self, when: Callable[[int], bool], value: float = math.nan) -> None:
        super().__init__()
        self.when, self.value, self.calls = when, value, 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if self.when(self.calls):
                return x * self.value
        return x


def task(*layers: nn.Module, train: Any = NUMBERS, **changes: Any) -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), *layers, nn.BatchNorm1d(4), nn.Linear(4, 2))
    changes = {"valid": NUMBERS[:5], "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), **changes}
    return Task(model, train, **changes)


def recipe(steps: int = 8, optimizer: str = "adamw", **sections: Any) -> Recipe:
    usual: dict[str, Any] = {
        "run": {"steps": steps, "batch": 4, **sections.pop("run", {})},
        "optimizer": {"name": optimizer, "lr": 0.01},
        "schedule": {"name": "constant", "warmup": 0.0},
        "loading": {"how": "here"},
    }
    return Recipe.of({**usual, **sections})


class Notes:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[StepRecord] = []

    def noted(self, note: str) -> None:
        self.notes.append(note)

    def stepped(self, records: list[StepRecord]) -> None:
        self.steps += records

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def state_of(what: Task) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in what.model.state_dict().items()}


def after(steps: int, what: Task, how: Recipe) -> dict[str, Tensor]:
    """The state of a task's model after this number of steps without a fault."""
    fit(what, how.updated({"run": {"steps": steps}}), device="cpu")
    return state_of(what)


# ---- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [1, 5])
def test_a_nan_ends_the_training_and_names_the_first_module(interval: int, tmp_path: Path) -> None:
    """Even if the host reads the fault late, the weights and the last checkpoint are those before the step."""
    how = recipe()
    what = task(Breaks(lambda call: call >= 4))
    words = (
        "step 4: the loss is nan, and its gradient's norm is nan; first not finite: the output of 1 "
        r"\(Breaks\)\. .*step-00000003 is the last checkpoint\. A smaller optimizer\.lr may "
        r"help; faults\.not_finite=skip skips"
    )
    with pytest.raises(ModelRunError, match=words):
        fit(what, how, device="cpu", out=tmp_path, interval=interval, save_every=3)
    assert same_state(state_of(what), after(3, task(Breaks(lambda call: False)), how))
    assert (tmp_path / "checkpoints/latest").read_text() == "step-00000003\n"
    assert [record.step for record in read_metrics(tmp_path / "metrics.jsonl")[0]] == [1, 2, 3]


def test_a_gradient_that_is_not_finite_names_its_parameter() -> None:
    with pytest.raises(
        ModelRunError, match=r"step 1: the loss is \d\.\d+, .* nan; first not finite: the gradient of 0\."
    ):
        fit(task(Root()), recipe(), device="cpu")


def test_a_batch_that_is_not_finite_names_its_samples() -> None:
    numbers = [*NUMBERS[:-1], (torch.tensor([math.inf, 0.0]), torch.tensor(0))]
    with pytest.raises(ModelRunError, match=r"first not finite: the batch itself, samples (\d+, )*23(, \d+)*\."):
        fit(task(train=numbers), recipe(), device="cpu")


def test_a_loss_that_is_not_finite_is_named_itself() -> None:
    loss: Callable[..., Tensor] = lambda model, batch: model(batch[0]).sum() / 0  # noqa: E731
    with pytest.raises(ModelRunError, match=r"step 1: the loss is -?inf.*; first not finite: the loss itself"):
        fit(task(loss=loss), recipe(), device="cpu")


@pytest.mark.parametrize("decides", ["host", "device"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_a_step_that_is_skipped_leaves_no_trace(optimizer: str, decides: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, optimizer and the statistics of the batch norm stay unchanged."""
    if decides == "device":  # as on a GPU
        monkeypatch.setattr(stepping, "READ_FREELY", ())
    how = recipe(3, optimizer, faults={"not_finite": "skip"})
    what = task(Breaks(lambda call: call == 3))
    seen = Notes()
    fit(what, how, device="cpu", observers=[seen])
    assert [record.skipped for record in seen.steps] == [False, False, True]
    assert math.isnan(seen.steps[2].loss)
    assert seen.notes == ["step 3 was skipped: its loss is nan, its gradient's norm nan"]
    assert same_state(state_of(what), after(2, task(Breaks(lambda call: False)), how))


@pytest.mark.parametrize("interval", [1, 4])
def test_training_goes_on_after_a_skipped_step_but_not_for_ever(interval: int) -> None:
    how = recipe(12, faults={"not_finite": "skip", "most_skipped": 2})
    seen = Notes()
    what = task(Breaks(lambda call: call in (2, 3, 6)))
    done = fit(what, how, device="cpu", observers=[seen], interval=interval)
    assert done.steps == 12
    assert [record.step for record in seen.steps if record.skipped] == [2, 3, 6]
    assert all(tensor.isfinite().all() for tensor in state_of(what).values())
    with pytest.raises(ModelRunError, match=r"step 7: the loss is nan.* \(Breaks\).*; 3 steps in a row were skipped"):
        fit(task(Breaks(lambda call: call >= 5)), how, device="cpu", interval=interval)


def test_an_overflow_of_float16_is_no_fault() -> None:
    """The scaler skips the step and halves its scale. A loss that is not finite is a fault in float16 too."""
    seen = Notes()
    loud: Callable[..., Tensor] = lambda model, batch: 40 * model(batch[0]).square().mean()  # noqa: E731
    fit(task(loss=loud), recipe(12, run={"precision": "fp16"}), device="cpu", observers=[seen])
    skipped = [record.step for record in seen.steps if record.skipped]
    assert skipped
    assert skipped == [*range(1, len(skipped) + 1)]
    assert all(math.isfinite(record.loss) for record in seen.steps)
    with pytest.raises(ModelRunError, match="step 2: the loss is nan"):
        fit(task(Breaks(lambda call: call >= 2)), recipe(run={"precision": "fp16"}), device="cpu")


def test_a_training_that_skips_every_step_has_failed() -> None:
    """In float16, a gradient that is not finite is no fault of its own. But no step has changed the weights."""
    how = recipe(4, run={"precision": "fp16"})
    with pytest.raises(DivergedError, match=r"all 4 steps were skipped"):
        fit(task(Root(), train=[(torch.zeros(2), torch.tensor(0))] * 8), how, device="cpu")


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_the_device_decides_as_the_host_does(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host and device skip the same steps, even the first step, which creates the optimizer's state."""
    how = recipe(4, optimizer, faults={"not_finite": "skip"})
    found = []
    for freely in (("cpu",), ()):
        monkeypatch.setattr(stepping, "READ_FREELY", freely)
        what = task(Breaks(lambda call: call in (1, 3)))
        fit(what, how, device="cpu")
        found.append(state_of(what))
    assert same_state(*found)


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_on_a_gpu_a_skipped_step_leaves_no_trace(optimizer: str) -> None:
    how = recipe(4, optimizer, faults={"not_finite": "skip"}, run={"deterministic": True})
    what = task(Breaks(lambda call: call in (1, 4)))
    fit(what, how, device="cuda")
    plain = task(Breaks(lambda call: call == 1))
    fit(plain, how.updated({"run": {"steps": 3}}), device="cuda")
    assert same_state(state_of(what), state_of(plain))


# ---- memory, disk, damage --------------------------------------------------------------------------------------------


def test_out_of_memory_is_one_line_that_says_what_helps() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB"
        )

    words = r"out of memory in step 1 \(CUDA out of memory\. Tried to allocate 2\.00 GiB\): use a smaller run\.batch"
    with pytest.raises(ModelRunError, match=words):
        fit(task(loss=loss), recipe(), device="cpu")


def test_out_of_memory_on_a_cpu_is_one_line_too() -> None:
    class Grows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.zeros(1 << 50).sum()

    words = r"out of memory in step 1 \(the CPU cannot allocate 4194304\.00 GiB more\): use a smaller run\.batch"
    with pytest.raises(ModelRunError, match=words):
        fit(task(Grows()), recipe(), device="cpu")


class RaisesKeyError:
    """Data and functions that raise."""

    def __call__(self, *arguments: Any) -> Any:
        raise KeyError("shapes differ")

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        raise KeyError("shapes differ")


@pytest.mark.parametrize(
    "name", ["loss", "metrics", "judge", "alter", "prepare", "settle", "collate", "train", "valid"]
)
def test_an_error_of_a_function_of_the_task_names_the_function_and_its_line(name: str) -> None:
    said = {"train": "train data", "valid": "valid data", "collate": "train data"}.get(name, name)
    with pytest.raises(ModelRunError, match=rf"the task's {said} raised KeyError: 'shapes .*test_faults\.py:\d+\)$"):
        fit(task(**{name: RaisesKeyError()}), recipe(1), device="cpu")


@pytest.mark.parametrize("how", ["threads", "processes"])
def test_an_error_of_the_data_is_named_in_any_worker(how: str) -> None:
    loading = {"how": how, "workers": 1}
    with pytest.raises(
        ModelRunError, match=r"train data raised KeyError: .*sample \d+ was read \(.*test_faults\.py:\d+"
    ):
        fit(task(train=RaisesKeyError()), recipe(1, loading=loading), device="cpu")


def test_an_error_of_rooftop_itself_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepping, "dropout_seed", None)
    with pytest.raises(TypeError, match="not callable"):
        fit(task(), recipe(), device="cpu")


def cross_entropy(model: nn.Module, batch: Any, **options: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], **options)


class Endless(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from NUMBERS


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"loss": partial(cross_entropy, reduction="none")}, r"loss returned a tensor of shape \(4,\).*use \.mean\(\)"),
        ({"loss": lambda *given: cross_entropy(*given)[None]}, r"loss returned a tensor of shape \(1,\)"),
        ({"loss": lambda *given: cross_entropy(*given).item()}, r"loss returned float: .*leave out \.item"),
        ({"loss": lambda *given: cross_entropy(*given).detach()}, "loss returned .* has no gradient: leave out detach"),
        ({"loss": lambda *given: {"loss": cross_entropy(*given)}}, "loss returned dict: expected the mean"),
        ({"loss": lambda *given: None}, "loss returned None: expected the mean"),
        (
            {"metrics": lambda *given: {"right": 0.5}},
            "metrics returned 'right': float: expected a dict",
        ),
        ({"metrics": lambda *given: {"right": np.ones(4)}}, "metrics returned 'right': ndarray"),
        ({"metrics": lambda *given: None}, "metrics returned None"),
        ({"metrics": lambda *given: {"right": torch.tensor(0.5)}}, r"metrics returned 'right': a tensor of shape \(\)"),
        ({"metrics": lambda *given: {"loss": torch.ones(4)}}, "the name of the validation loss: give this metric anot"),
        ({"model": nn.Linear(4, 3, device="meta")}, "the task's model has weight on the meta device, without values"),
        ({"metrics": lambda *given: [torch.ones(4)]}, "metrics returned list"),
        ({"judge": lambda *given: None}, "judge returned None: expected a dict from name to number"),
        ({"judge": lambda *given: {"AP": [1]}}, "judge returned dict: expected a dict from name to number"),
        ({"train": Endless()}, r"train is of type Endless, which has no len\(\): expected numbered samples"),
        ({"valid": Endless()}, r"valid is of type Endless, which has no len\(\)"),
        ({"model": nn.LazyLinear(2)}, "uninitialized parameter weight: call the model once"),
        ({"collate": lambda samples: None}, "collate returned None: expected a batch"),
    ],
)
def test_a_task_that_breaks_its_contract_is_told_what_was_expected(changes: dict[str, Any], said: str) -> None:
    what = task(**changes) if "model" not in changes else Task(changes["model"], NUMBERS, cross_entropy)
    with pytest.raises(InputError, match=said):
        fit(what, recipe(1), device="cpu")


@pytest.mark.gpu
def test_out_of_memory_explains_what_holds_it() -> None:
    class Grows(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.zeros(1 << 42, device=x.device).sum()

    with pytest.raises(ModelRunError, match="out of memory in step 1") as caught:
        fit(task(Grows()), recipe(), device="cuda")
    assert re.search(r"requested in 1 at .*test_faults\.py:\d+\n", caught.value.__notes__[0])


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file can grow, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_full_disk_keeps_the_checkpoint_before_and_the_weights(tmp_path: Path) -> None:
    what, how = task(), recipe(9)
    ways = ""

    class Fills(Notes):
        def stepped(self, records: list[StepRecord]) -> None:
            if records[-1].step == 4:
                limits.enter_context(largest_file(2_000))

    from contextlib import ExitStack

    with ExitStack() as limits, pytest.raises(OSError, match="checkpoint of step 6 could not be written") as caught:
        fit(what, how, device="cpu", out=tmp_path, save_every=3, observers=[Fills()])
    ways = str(caught.value)
    assert "(File too large)" in ways
    assert ways.endswith("checkpoints/step-00000003 is kept: make room, then --resume")
    assert "\n" not in ways
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-00000003"]
    assert same_state(state_of(what), after(6, task(), how))  # the weights of the running training
    done = fit(task(), how, device="cpu", out=tmp_path, save_every=3, resume=True)
    assert done.steps == 9


@pytest.mark.parametrize("name", ["rank-00000.safetensors", "index.json", "training.json"])
def test_a_damaged_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    fit(task(), recipe(), device="cpu", out=tmp_path)
    path = tmp_path / "checkpoints/step-00000008" / name
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"damaged|was changed|cannot be read"):
        fit(task(), recipe(), device="cpu", out=tmp_path, resume=True)


@pytest.mark.parametrize("name", ["checkpoints", "recipe.toml", "metrics.jsonl"])
def test_a_path_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    if name == "checkpoints":
        (tmp_path / name).touch()
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match=rf"{tmp_path}/{name} cannot be written \((File exists|Is a directory)\): exp"):
        fit(task(), recipe(), device="cpu", out=tmp_path)


def test_a_disk_without_any_room_is_named(tmp_path: Path) -> None:
    with largest_file(0), pytest.raises(OSError, match=rf"{tmp_path}/run cannot be written .*: make room, then resume"):
        fit(task(), recipe(), device="cpu", out=tmp_path / "run")


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    what, how = task(), recipe(2)
    folder = RunFolder(tmp_path, 2)
    folder.begin(how)
    left = folder.checkpoints / ".step-00000001.abcd.unfinished"
    left.mkdir()
    (left / "rank-00000.safetensors").write_bytes(b"half")
    assert folder.load(identity_of(what, how)) is None
    folder.begin(how)
    assert not left.exists()


class Damaged:
    """Samples, one of which cannot be read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        if index == 7:
            raise OSError("picture 7 is cut off")
        return NUMBERS[index]


def test_a_metric_that_is_not_finite_is_null_in_all_files(tmp_path: Path) -> None:
    what = task(metrics=lambda model, batch: {"wrong": torch.full((len(batch[0]),), math.nan)})
    fit(what, recipe(6), device="cpu", out=tmp_path)
    (training,) = tmp_path.glob("checkpoints/step-*/training.json")
    for text in (training.read_text(), *(tmp_path / "metrics.jsonl").read_text().splitlines()):
        json.loads(text, parse_constant=pytest.fail)
    done = fit(what, recipe(6), device="cpu", out=tmp_path, resume=True)
    assert done.last is not None
    assert math.isnan(done.last.values["wrong"])


def test_a_damaged_sample_is_skipped_and_named(tmp_path: Path) -> None:
    """The loss is the mean over the batch's other samples. The damaged sample is named once, not in each pass."""
    seen = Notes()
    how = recipe(18, faults={"damaged": "skip"})
    done = fit(task(train=Damaged()), how, device="cpu", observers=[seen])
    assert done.steps == 18
    assert len(seen.notes) == 1
    assert "sample 7" in seen.notes[0]
    assert "cut off" in seen.notes[0]
    with pytest.raises(Exception, match="cut off"):
        fit(task(train=Damaged()), recipe(6), device="cpu")


def test_a_damaged_sample_of_the_validation_is_skipped_and_named() -> None:
    seen = Notes()
    how = recipe(18, faults={"damaged": "skip"}, evaluation={"every": 1.0})
    fit(task(valid=Damaged(), train=Damaged()), how, device="cpu", observers=[seen])
    assert sorted(seen.notes) == [
        "sample 7 was skipped: picture 7 is cut off",
        "validation sample 7 was skipped: picture 7 is cut off",
    ]


def test_a_step_without_a_readable_sample_ends_the_training_and_says_so() -> None:
    class Unreadable(Damaged):
        def __getitem__(self, index: int) -> Any:
            raise OSError(f"picture {index} is cut off")

    with pytest.raises(
        InputError, match=r"step 1 has no readable sample on rank 0; .* cut off.*use a larger run.batch"
    ):
        fit(task(train=Unreadable()), recipe(6, faults={"damaged": "skip"}), device="cpu")


def test_the_loss_of_a_smaller_batch_is_the_mean_of_its_samples() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).sum() * 0 + 3.0

    seen = Notes()
    how = recipe(6, faults={"damaged": "skip"}, run={"accumulate": 2, "batch": 8})
    fit(task(train=Damaged(), loss=loss), how, device="cpu", observers=[seen])
    assert [record.loss for record in seen.steps] == pytest.approx([3.0] * 6, abs=1e-12)
