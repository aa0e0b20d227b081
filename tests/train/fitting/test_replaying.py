"""A replayed model trains as the model itself; on the CPU, by graphs that run the code again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.rewrites.graphs_again import run_again
from torch import Tensor, nn

from rooftop.errors import InputError
from rooftop.rewrites.graphs import UncapturedError
from rooftop.rewrites.training_graphs import Backward, Forward, Recorded
from rooftop.train.fitting.feeding import Part
from rooftop.train.fitting.replaying import ReplayedModel
from rooftop.train.fitting.stepping import Stepper
from rooftop.train.recipes.recipe import Recipe
from rooftop.train.tasks.task import Task

CPU = torch.device("cpu")


class Network(nn.Module):
    """A norm with statistics and dropout. The loss uses an attribute of the model, too.

    There is no bias before the norm: its true gradient is zero, and AdamW takes full steps along its rounding errors.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        first = nn.Linear(4, 16, bias=False)
        self.layers = nn.Sequential(first, nn.BatchNorm1d(16), nn.Dropout(dropout), nn.Linear(16, 3))
        self.scale = 0.5

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)  # type: ignore[no-any-return]


class Counting(Network):
    """Counts the runs of its forward. torch.compile would compile each count anew."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


def loss_of(model: Any, batch: Any) -> Tensor:
    return model.scale * F.cross_entropy(model(batch[0]), batch[1])


def stepper_of(model: nn.Module, device: torch.device, **run: Any) -> Stepper:
    what = Task(model=model.to(device), train=[], loss=loss_of)
    optimizer = {"name": "adamw", "lr": 0.01, "clip": 1.0}
    how = Recipe.of({"run": {"batch": 8, **run}, "optimizer": optimizer, "ema": {"decay": 0.9}})
    return Stepper(what, how, 20, device, None, 0)


def parts(number: int, device: torch.device, rows: int = 8) -> list[Part]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(rows, 4, generator=generator), torch.randint(3, (rows,), generator=generator)
    return [Part((x.to(device), y.to(device)), torch.arange(rows), torch.arange(rows), 1.0)]


def test_steps_are_those_of_the_model() -> None:
    torch.manual_seed(0)
    model = Counting()
    plain, replayed = stepper_of(copy.deepcopy(model), CPU), stepper_of(model, CPU)
    replayed._replayed = ReplayedModel(model, CPU, run_again)
    for number in range(1, 7):
        rows = 8 if number % 3 else 5  # the last batch of a pass is smaller
        expected = plain.step(number, parts(number, CPU, rows))
        torch.testing.assert_close(replayed.step(number, parts(number, CPU, rows)), expected)
    for (name, one), other in zip(model.state_dict().items(), plain.task.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, msg=name)
    assert vars(model).get("_compiled_call_impl") is None
    calls = model.calls
    model.eval()(torch.randn(2, 4))
    assert model.calls == calls + 1, "outside of a step, the model itself runs"


def test_graphs_are_captured_again_if_weights_move() -> None:
    model = Network()
    replays = ReplayedModel(model, CPU, run_again)
    with replays.active():
        before = model(torch.ones(2, 4))
    before.sum().backward()
    model.layers[3].weight.data = torch.zeros_like(model.layers[3].weight)
    with replays.active():
        after = model(torch.ones(2, 4))
    assert torch.equal(after, model.layers[3].bias.expand(2, 3))


def test_the_precision_belongs_to_a_graph() -> None:
    model = Network()
    replays = ReplayedModel(model, CPU, run_again)
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        with replays.active(), torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            result = model(torch.ones(2, 4))
        assert result.dtype == dtype
        result.sum().backward()


def test_what_cannot_be_captured_is_said() -> None:
    def fails(forward: Forward, backward: Backward) -> Recorded:
        raise UncapturedError("the host waits for the GPU at model.py:7", [])

    model = Network()
    replays = ReplayedModel(model, CPU, fails)
    words = r"cannot be replayed \(the host waits .*model.py:7\): set run.replay=false"
    with pytest.raises(InputError, match=words), replays.active():
        model(torch.ones(2, 4))
    assert vars(model).get("_compiled_call_impl") is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")  # the compiler's advice
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_on_a_gpu(precision: str, compiled: bool) -> None:
    """The same steps, with dropout's masks of the same seeds."""
    device = torch.device("cuda")
    torch.manual_seed(0)
    model = Network(dropout=0.0 if compiled else 0.5)  # compiled code draws other masks
    plain = stepper_of(copy.deepcopy(model), device, precision=precision)
    replayed = stepper_of(model, device, precision=precision, replay=True)
    if compiled:
        model.compile()
        plain.task.model.compile()
    alive = []
    for number in range(1, 9):
        rows = 8 if number % 4 else 5
        expected = plain.step(number, parts(number, device, rows))
        alive.append(replayed.step(number, parts(number, device, rows)))
        torch.testing.assert_close(alive[-1], expected, rtol=1e-2, atol=1e-3, equal_nan=True)
    tolerance = 1e-4 if precision == "fp32" else 2e-2
    for (name, one), other in zip(model.state_dict().items(), plain.task.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, msg=name)
