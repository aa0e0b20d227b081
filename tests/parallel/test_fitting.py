"""Any number of ranks trains a task with the same losses, evaluations and files. The ranks stop and fail together."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rooftop.cli.train_task import Call, _Training
from rooftop.data.device_images import DecodingChoice
from rooftop.parallel import join
from rooftop.parallel.sums import Sums
from rooftop.train.fitting import StepRecord, fit, read_metrics
from rooftop.train.fitting.batch_norms import batch_norms_over_ranks
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks import classification, find_task
from rooftop.train.tasks.task import Task

Run = Callable[..., list[Any]]
DTYPE = torch.float64


class Images:
    """Small images, changed at random in training."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.linspace(0, 1 + index % 3, 32, dtype=DTYPE).view(2, 4, 4), torch.tensor(index % 3)


class DrawnImages(Images):
    def draw(self, index: int, generator: np.random.Generator) -> tuple[Tensor, Tensor]:
        image, label = self[index]
        return image + 0.3 * torch.from_numpy(generator.standard_normal((2, 4, 4))), label


def network() -> nn.Sequential:
    """There is no bias before a norm, because its gradient would be only rounding, which AdamW would enlarge."""
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(24, 8, bias=False),
        nn.BatchNorm1d(8),
        nn.Linear(8, 3),
    ).to(DTYPE)


def mixed(batch: Any, places: Tensor, generator_of: Any) -> Any:
    """Mixup of samples 2k and 2k+1."""
    images, labels = batch
    drawn = [generator_of(int(place) // 2 * 2).beta(0.4, 0.4) for place in places]
    weights = torch.tensor(drawn, dtype=DTYPE)
    targets = F.one_hot(labels, 3).to(DTYPE)
    others = torch.arange(len(places)) ^ 1
    mixed_images = torch.lerp(images[others], images, weights[:, None, None, None])
    return mixed_images, torch.lerp(targets[others], targets, weights[:, None])


def recipe(**sections: Any) -> Recipe:
    usual = Recipe.of(
        {
            "run": {"epochs": 2, "batch": 16},
            "optimizer": {"name": "adamw", "lr": 0.02, "clip": 1.0},
            "ema": {"decay": 0.8},
            "loading": {"how": "here"},
        }
    )
    return usual.updated(sections)


class Acts:
    def __init__(self, act: Callable[[StepRecord], None] = lambda record: None) -> None:
        self.act = act
        self.notes: list[str] = []

    def stepped(self, records: list[StepRecord]) -> None:
        for record in records:
            self.act(record)

    def noted(self, note: str) -> None:
        self.notes.append(note)

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def task(**changes: Any) -> Task:
    usual: dict[str, Any] = {
        "model": network(),
        "train": DrawnImages(50),
        "valid": Images(19),  # batches of 16 and 3, so one of four ranks has nothing in the last batch
        "loss": lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        "metrics": lambda model, batch: {"accuracy": model(batch[0]).argmax(1) == batch[1]},
        "judge": lambda model, device: {"rank": float(dist.get_rank()) if dist.is_initialized() else 0.0},
        "alter": mixed,
    }
    return Task(**{**usual, **changes})


def trained(out: str, accumulate: int = 1) -> tuple[Any, Tensor, Tensor]:
    """(the last evaluation, weights and buffers as one row, running statistics)"""
    what = task()
    done = fit(what, recipe(run={"accumulate": accumulate}), device="cpu", out=out)
    assert done.last is not None
    row = torch.cat([each.reshape(-1).to(DTYPE) for each in what.model.state_dict().values()])
    return dict(done.last.values), row, what.model[1].running_var.clone()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_are_the_same_for_any_number_of_ranks(accumulate: int, on_ranks: Run, tmp_path: Path) -> None:
    """The training has batch norms over all ranks, mixup, augmentation, clipping, mean weights and an uneven last
    batch."""
    expected_values, expected_row, _ = trained(str(tmp_path / "1"), accumulate)
    steps, evaluations = read_metrics(tmp_path / "1" / "metrics.jsonl")
    assert len(steps) == 6
    for ranks in (2, 4):
        out = tmp_path / str(ranks)
        for values, row, _ in on_ranks(ranks, trained, str(out), accumulate, joined=False):
            assert values == pytest.approx(expected_values, abs=1e-10)
            torch.testing.assert_close(row, expected_row, rtol=0, atol=1e-10)
        found, evaluated = read_metrics(out / "metrics.jsonl")
        assert [each.loss for each in found] == pytest.approx([each.loss for each in steps], abs=1e-10)
        assert [each.grad_norm for each in found] == pytest.approx([each.grad_norm for each in steps], abs=1e-10)
        assert [each.values["accuracy"] for each in evaluated] == [each.values["accuracy"] for each in evaluations]


class Uneven(nn.Module):
    """The second rank does not reach a layer, and the first one reaches it last in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.other, self.first = nn.Linear(32, 8), nn.Linear(32, 8)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.to(DTYPE)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        more = self.other(x) if dist.get_rank() == 0 else 0.0
        y: Tensor = self.last(self.norm(self.first(x) + more))
        return y


def summed(in_backward: bool, accumulate: int, uneven: bool) -> tuple[Tensor, int]:
    """(weights and buffers as one row after two passes; gradients whose sum backward began)"""
    begun = [0]
    add = Sums.add

    def counting(self: Sums, tensor: Tensor) -> None:
        begun[0] += any("backward" in frame.name for frame in traceback.extract_stack())
        add(self, tensor)

    torch.manual_seed(5)
    what = task(model=Uneven() if uneven else network())
    with patch.object(Sums, "add", counting):
        fit(what, recipe(run={"sum_in_backward": in_backward, "accumulate": accumulate}), device="cpu")
    return torch.cat([each.reshape(-1).to(DTYPE) for each in what.model.state_dict().values()]), begun[0]


@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_that_are_summed_in_backward_have_the_same_bits(accumulate: int, uneven: bool, on_ranks: Run) -> None:
    """The model has batch norms that communicate between two ranks, and a layer that only one rank reaches."""
    after = on_ranks(2, summed, False, accumulate, uneven, joined=False)
    during = on_ranks(2, summed, True, accumulate, uneven, joined=False)
    for row, begun in after:
        assert torch.equal(row, after[0][0])
        assert begun == 0
    for row, begun in during:
        assert torch.equal(row, after[0][0])
        assert begun >= 6  # at least one sum in each of six steps
    if not uneven:
        assert during[0][1] == 6 * len(list(network().parameters()))


def checkpointed(in_backward: bool) -> None:
    """One layer in two segments that autograd computes in passes of their own."""
    layer = nn.Linear(32, 32).to(DTYPE)
    end = nn.Linear(32, 3).to(DTYPE)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].flatten(1).requires_grad_()
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=True)
        return F.cross_entropy(end(x), batch[1])

    how = recipe(run={"sum_in_backward": in_backward})
    fit(task(model=nn.Sequential(layer, end), loss=loss, valid=None), how, device="cpu")


def test_a_gradient_in_several_passes_is_refused_with_the_switch_that_helps(on_ranks: Run, ranks_failed: Any) -> None:
    with pytest.raises(ranks_failed) as caught:
        on_ranks(2, checkpointed, True, joined=False)
    assert all("set run.sum_in_backward=false" in words for words in caught.value.errors.values())
    on_ranks(2, checkpointed, False, joined=False)


# ---- batch norms -----------------------------------------------------------------------------------------------------

SHAPES = {nn.BatchNorm1d: (5, 3), nn.BatchNorm2d: (5, 3, 2, 4), nn.BatchNorm3d: (5, 3, 2, 1, 2)}


def normalized(options: dict[str, Any]) -> list[list[Tensor]]:
    """By kind: output, gradients of input and parameters, and running statistics after two steps, for this rank's
    uneven part of 5 samples. Gradients of parameters are summed over the ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    found = []
    for kind, shape in SHAPES.items():
        generator = torch.Generator().manual_seed(1)
        norm = nn.Sequential(kind(3, dtype=DTYPE, **options))
        own = slice(rank * 5 // size, (rank + 1) * 5 // size)
        for _ in range(2):
            x = 1e4 + torch.randn(shape, generator=generator, dtype=DTYPE)
            weights = torch.randn(shape, generator=generator, dtype=DTYPE)
            x = x[own].requires_grad_()
            norm.zero_grad()
            with batch_norms_over_ranks(norm, dist.group.WORLD if size > 1 else None) as names:
                assert names == (["0"] if size > 1 else [])
                y = norm(x)
                (y * weights[own]).sum().backward()
        assert type(norm[0]) is kind
        parameters = [each.grad for each in norm.parameters() if each.grad is not None]
        for gradient in parameters:
            dist.all_reduce(gradient)
        found.append([y.detach(), x.grad, *parameters, *(each.to(DTYPE) for each in norm.buffers())])
    return found


@pytest.mark.parametrize(
    "options", [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}], ids=str
)
def test_a_batch_norm_over_ranks_is_that_of_the_whole_batch(options: dict[str, Any], on_ranks: Run) -> None:
    (expected,) = on_ranks(1, normalized, options)
    one, other = on_ranks(2, normalized, options)
    for whole, first, second in zip(expected, one, other, strict=True):
        for number, tensor in enumerate(whole):
            found = torch.cat([first[number], second[number]]) if number < 2 else first[number]
            torch.testing.assert_close(found, tensor, rtol=1e-8, atol=1e-8)
            if number >= 2:
                assert torch.equal(first[number], second[number])


# ---- the end, together -----------------------------------------------------------------------------------------------


def stopped(out: str) -> tuple[str, int, list[str]]:
    """The second rank receives SIGTERM in its third step."""
    calls = [0]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        calls[0] += 1
        if model.training and calls[0] == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return F.cross_entropy(model(batch[0]), batch[1])

    seen = Acts()
    done = fit(task(loss=loss, valid=None), recipe(run={"epochs": 9}), device="cpu", out=out, observers=[seen])
    return done.reason, done.steps, seen.notes


def test_a_signal_at_one_rank_stops_all_after_the_same_step(on_ranks: Run, tmp_path: Path) -> None:
    one, other = on_ranks(2, stopped, str(tmp_path), joined=False)
    assert one[:2] == other[:2] == ("stopped by SIGTERM", 4)
    saved = tmp_path / "checkpoints" / "step-00000004"
    assert one[2] == [f"stopped by SIGTERM after step 4; saved in {saved}: --resume continues from there"]
    assert other[2] == []
    assert (saved / "training.json").is_file()


def fails(out: str) -> None:
    """The loss of the second rank is NaN in the second step, because a module on this rank returns NaN."""
    what = task(valid=None)
    calls = [0]

    def break_it(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        calls[0] += 1
        return output * float("nan") if calls[0] >= 2 and dist.get_rank() == 1 else None

    what.model[4].register_forward_hook(break_it)
    fit(what, recipe(), device="cpu", out=out)


def test_a_nan_at_one_rank_ends_all_with_the_same_words(on_ranks: Run, ranks_failed: Any, tmp_path: Path) -> None:
    with pytest.raises(ranks_failed) as caught:
        on_ranks(2, fails, str(tmp_path), joined=False)
    assert set(caught.value.errors) == {0, 1}
    for words in caught.value.errors.values():
        assert "step 2: the loss is nan" in words
        assert "first not finite: the output of 4 (Linear)" in words


def differs(out: str) -> None:
    fit(task(), recipe(run={"seed": int(os.environ["RANK"])}), out=out)


def test_ranks_with_other_recipes_are_refused(on_ranks: Run, ranks_failed: Any, tmp_path: Path) -> None:
    with pytest.raises(ranks_failed) as caught:
        on_ranks(2, differs, str(tmp_path), joined=False)
    assert all("the ranks have different settings: training is" in words for words in caught.value.errors.values())


def on_one_rank_again(out: str) -> list[int]:
    seen = Acts()
    fit(task(), recipe(run={"epochs": 2}), device="cpu", out=out, observers=[seen], resume=True)
    return [record.step for record in read_metrics(Path(out) / "metrics.jsonl")[0]]


def stops_itself(out: str) -> None:
    from rooftop.train.stopping import Stop

    stop = Stop()
    seen = Acts(lambda record: setattr(stop, "requested", record.step == 3))
    fit(task(), recipe(run={"epochs": 2}), device="cpu", out=out, observers=[seen], stop=stop)


def test_another_number_of_ranks_goes_on(on_ranks: Run, tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    on_ranks(2, stops_itself, out, joined=False)
    assert on_one_rank_again(out) == [*range(1, 7)]
    whole = read_metrics(Path(out) / "metrics.jsonl")[0]
    trained(str(tmp_path / "one"))
    expected = read_metrics(tmp_path / "one" / "metrics.jsonl")[0]
    assert [each.loss for each in whole] == pytest.approx([each.loss for each in expected], abs=1e-10)


def decided(folder: str) -> str:
    """Where the images are decoded; only rank 0 measures."""
    measured = patch.object(classification, "faster_decoding", _measured)
    values = ["augment.decode=auto", "augment.size=8", "model.options={channels=4}"]
    with measured, join(device="cpu") as world:
        build, defaults = find_task("resnet", folder)
        training = _Training(build, Call("resnet", folder), Path(folder), world, page=False)
        recipe, what = training._decided(Recipe.of(defaults).with_values(values))
        assert what.arrive is not None
        return recipe.augment.decode


def _measured(*args: Any, **options: Any) -> DecodingChoice:
    assert dist.get_rank() == 0
    return DecodingChoice("gpu", "it is faster here")


def test_all_ranks_decode_where_the_first_one_measured_it_to_be_faster(on_ranks: Run, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        for number in range(2):
            Image.new("RGB", (16, 16), "red" if name == "cat" else "blue").save(tmp_path / name / f"{number}.jpg")
    assert on_ranks(2, decided, str(tmp_path), joined=False) == ["gpu", "gpu"]
