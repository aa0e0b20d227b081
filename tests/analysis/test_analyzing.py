"""`rooftop.analyze` measures a step, its parts of the wall time add up, and the program is unchanged afterwards."""

from __future__ import annotations

import copy
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import rooftop
from rooftop.analysis import kept_weights
from rooftop.analysis.instruments import PlainInstrument
from rooftop.analysis.program import Program
from rooftop.cost.accounting import tensors_in
from rooftop.errors import InputError, ModelRunError
from rooftop.hardware.ceilings import Ceilings


def small_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 10)
    )


@pytest.mark.parametrize("train", [False, True])
def test_the_account_balances(train: bool, ceilings: Ceilings) -> None:
    report = rooftop.analyze(small_net(), torch.randn(4, 3, 16, 16), train=train, ceilings=ceilings)
    summary, gaps = report.summary, report.gaps
    parts = summary.fused_roof_ms + gaps.fusion_headroom_ms + gaps.kernel_gap_ms + gaps.launch_gap_ms
    assert parts == pytest.approx(summary.wall_ms)
    assert gaps.launch_gap_ms >= 0
    assert gaps.fusion_headroom_ms >= 0
    assert sum(row.measured_ms for row in report.ops) == pytest.approx(report.modules.measured_ms)
    assert sum(row.flops for row in report.ops) == report.modules.flops == summary.flops
    assert report.coverage == pytest.approx(1.0)
    assert {row.phase for row in report.ops} == ({"forward", "backward"} if train else {"forward"})


def test_flops_are_those_of_the_layers(ceilings: Ceilings) -> None:
    report = rooftop.analyze(small_net(), torch.randn(4, 3, 16, 16), ceilings=ceilings)
    convolution, linear = 2 * 4 * 8 * 16 * 16 * 3 * 9, 2 * 4 * 2048 * 10
    assert report.summary.flops == pytest.approx(convolution + linear, rel=0.1)
    assert report.modules.find("0").flops == pytest.approx(convolution, rel=0.05)
    assert report.summary.samples == 4
    assert report.summary.parameters == sum(p.numel() for p in small_net().parameters())


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("was_training", [False, True])
def test_model_and_random_state_are_as_before(train: bool, was_training: bool, ceilings: Ceilings) -> None:
    net = small_net().train(was_training)
    net[1].eval()  # one module in a different mode than the rest
    x = torch.randn(4, 3, 16, 16)
    net(x).sum().backward()
    before = copy.deepcopy(net.state_dict())
    gradients = [p.grad.clone() for p in net.parameters() if p.grad is not None]
    flags = [m.training for m in net.modules()]
    torch.manual_seed(7)
    random_state = torch.get_rng_state()
    rooftop.analyze(net, x, train=train, ceilings=ceilings)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert [m.training for m in net.modules()] == flags
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(torch.equal(p.grad, g) for p, g in zip(net.parameters(), gradients, strict=True))  # type: ignore[arg-type]


class Encoders(nn.Module):
    """A network that follows another one, as in MoCo, in the ways that programs write it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.query, self.key = way, nn.Linear(4, 4), nn.Linear(4, 4)
        self.more = nn.ModuleList()

    def forward(self, x: Tensor) -> Tensor:
        key = self.key.weight
        if self.way == "in place":
            with torch.no_grad():
                key.mul_(0.9).add_(self.query.weight, alpha=0.1)
        elif self.way == "values of data":
            key.data.mul_(0.9)
        elif self.way == "data":
            key.data = key.data * 0.9 + self.query.weight.data * 0.1
        elif self.way == "parameter":
            self.key.weight = nn.Parameter(key.detach() * 0.9)
        elif self.way == "modules":
            self.more.append(nn.Linear(4, 4))
        return self.query(x) + self.key(x)


@pytest.mark.parametrize("way", ["in place", "values of data", "data", "parameter", "modules"])
@pytest.mark.parametrize("train", [False, True])
def test_weights_that_a_module_changes_itself_are_put_back(way: str, train: bool) -> None:
    model = Encoders(way)
    named, values = dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1) if train else None
    program = Program(model, (torch.ones(2, 4),), {}, train=train, optimizer=optimizer)
    with program.preserved():
        for _ in range(4):
            program.step()
        assert len(model.more) <= 2
    now = dict(model.named_parameters())
    assert {name: id(p) for name, p in now.items()} == {name: id(p) for name, p in named.items()}
    assert {name for name, p in now.items() if not torch.equal(p, values[name])} == (
        {"query.weight", "query.bias"} if train else set()
    )
    assert not any("load them again" in note for note in program.notes)


def test_weights_that_are_too_large_to_copy_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "MOST_BYTES", 10)
    for way, told in (("in place", True), ("data", True), ("modules", False)):
        program = Program(Encoders(way), (torch.ones(2, 4),), {})
        with program.preserved():
            program.step()
        assert any("changed its weights (key.weight)" in note for note in program.notes) == told


def test_state_is_put_back_when_the_model_raises(ceilings: Ceilings) -> None:
    net = small_net().train()
    with pytest.raises(ModelRunError, match=r"Sequential raised RuntimeError for inputs 4x5x16x16:float32"):
        rooftop.analyze(net, torch.randn(4, 5, 16, 16), ceilings=ceilings)
    assert net.training


def test_buffers_and_the_gradient_of_an_input_are_put_back(ceilings: Ceilings) -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.register_buffer("last", torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.last = x.detach()
            return x * 2

    net, x = Counting(), torch.randn(3, requires_grad=True)
    x.grad = torch.ones(3)
    rooftop.analyze(net, x, ceilings=ceilings)
    rooftop.analyze(net, x, train=True, ceilings=ceilings)
    assert net.calls == 0
    assert torch.equal(net.last, torch.zeros(3))
    assert torch.equal(x.grad, torch.ones(3))


class Resizing(nn.Module):
    """A module that writes a longer value into its buffer at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        self.seen.resize_(self.seen.numel() + 1)  # type: ignore[operator, union-attr]
        return x + 1


def made_for_inference() -> nn.Module:
    with torch.inference_mode():
        return nn.BatchNorm1d(3)


def with_buffer(buffer: Tensor) -> nn.Module:
    net = nn.Linear(3, 3)
    net.register_buffer("kept", buffer)
    return net


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    "build",
    [
        Resizing,
        made_for_inference,
        lambda: with_buffer(torch.ones(1).expand(5)),
        lambda: with_buffer(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        lambda: with_buffer(torch.eye(3).to_sparse()),
        lambda: torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))),
        lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()),
    ],
    ids=["resized", "inference", "expanded", "nested", "sparse", "script", "lazy"],
)
def test_buffers_of_any_kind_are_put_back(build: Callable[[], nn.Module], ceilings: Ceilings) -> None:
    net = build()
    lazy = any(nn.parameter.is_lazy(value) for value in net.state_dict().values())
    before = {name: str(value) for name, value in net.state_dict().items()}
    rooftop.analyze(net, torch.randn(4, 3), ceilings=ceilings)
    assert lazy or {name: str(value) for name, value in net.state_dict().items()} == before


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("train", [False, True])
def test_a_nested_input_has_no_shape_to_show(train: bool, ceilings: Ceilings) -> None:
    ragged = torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(5, 3)])
    report = rooftop.analyze(nn.Linear(3, 4), ragged, train=train, ceilings=ceilings)
    assert report.inputs == ("nested float32",)
    assert report.summary.samples == 2


class Sums(nn.Module):
    """A function that accepts any arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return torch.stack([t.sum() for t in tensors_in([args, kwargs])]).sum()


@pytest.mark.parametrize(
    ("arguments", "samples", "batched"),
    [
        ([torch.ones(4, 3)], 4, True),
        ([[torch.ones(3, 8, 8), torch.ones(3, 8, 8)]], 2, False),  # images of a detector
        ([[torch.ones(5), torch.ones(7), torch.ones(6)]], 3, False),  # sentences
        ([[torch.ones(2, 16, 8, 8), torch.ones(2, 16, 4, 4)]], 2, True),  # feature maps of one batch
        ([(torch.ones(6, 3), torch.ones(6, 5))], 6, True),
        ([{"x": torch.ones(7, 3)}], 7, True),
        ([torch.ones(()), torch.ones(9)], 9, True),
        ([torch.ones(())], None, True),
    ],
)
def test_samples_of_a_step(arguments: list[Any], samples: int | None, batched: bool, ceilings: Ceilings) -> None:
    assert rooftop.analyze(Sums(), *arguments, ceilings=ceilings).summary.samples == samples
    assert Program(Sums(), tuple(arguments), {}).is_batched is batched


@dataclass(slots=True)
class Output:
    logits: Tensor
    more: list[Any]


def test_outputs_in_dataclasses_are_sent_back_and_counted(ceilings: Ceilings) -> None:
    class Wrapping(nn.Module):
        def __init__(self, wraps: bool) -> None:
            super().__init__()
            self.linear, self.wraps = nn.Linear(3, 3), wraps

        def forward(self, x: Tensor) -> Any:
            first, second = self.linear(x), self.linear(x)
            return Output(first, [Output(second, [])]) if self.wraps else (first, second)

    x = torch.randn(4, 3)
    wrapped, bare = (rooftop.analyze(Wrapping(wraps), x, train=True, ceilings=ceilings) for wraps in (True, False))
    assert wrapped.summary.flops == bare.summary.flops
    assert wrapped.summary.fused_roof_ms == bare.summary.fused_roof_ms


def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path, ceilings: Ceilings) -> None:
    def step() -> None:
        pytest.fail("the step ran")

    for trace in (tmp_path, tmp_path / "missing" / "trace.json"):
        with pytest.raises(ValueError, match=r"trace='.*': expected the path of a file in an existing"):
            rooftop.analyze(step, trace=trace, ceilings=ceilings)


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
def test_modules_that_are_false_or_have_no_length(ceilings: Ceilings) -> None:
    empty = nn.Sequential().train()
    report = rooftop.analyze(empty, torch.randn(3), ceilings=ceilings)
    assert report.ops == ()
    assert any("No operator of PyTorch ran" in note for note in report.notes)
    assert empty.training
    compiled = torch.compile(nn.Linear(8, 4), backend="eager")
    report = rooftop.analyze(compiled, torch.randn(2, 8), ceilings=ceilings)
    assert report.summary.flops == 136
    assert report.coverage == 1.0


def test_a_step_that_writes_to_its_input_says_so(ceilings: Ceilings) -> None:
    report = rooftop.analyze(lambda x: x.add_(1), torch.zeros(8), ceilings=ceilings)
    assert any("writes to small tensors" in note for note in report.notes)


def test_optimizer_step_is_part_of_the_account(ceilings: Ceilings) -> None:
    net = small_net()
    optimizer = torch.optim.AdamW(net.parameters())
    report = rooftop.analyze(net, torch.randn(4, 3, 16, 16), train=True, optimizer=optimizer, ceilings=ceilings)
    assert "optimizer" in {row.phase for row in report.ops}
    assert report.modules.find("(optimizer)").measured_ms > 0
    assert report.coverage > 0.95


def test_a_plain_function_is_run_as_it_is(ceilings: Ceilings) -> None:
    net, x = small_net(), torch.randn(4, 3, 16, 16)

    def step(x: Tensor) -> None:
        net(x).square().mean().backward()

    report = rooftop.analyze(step, x, ceilings=ceilings)
    assert (report.mode, report.target) == ("callable", "step")
    assert {row.phase for row in report.ops} == {"forward", "backward"}


def test_inference_mode_is_taken_apart_as_autograd_does(ceilings: Ceilings) -> None:
    net, x = small_net().eval(), torch.randn(4, 3, 16, 16)

    @torch.inference_mode()
    def step(x: Tensor) -> Tensor:
        return net(x)

    inside = {row.name for row in rooftop.analyze(step, x, ceilings=ceilings).ops}
    assert {"aten::convolution", "aten::addmm"} <= inside


def test_a_step_that_differs_each_time_says_so(ceilings: Ceilings) -> None:
    count = 0

    def step(x: Tensor) -> None:
        nonlocal count
        count += 1
        for _ in range(count):
            x = x.relu()

    report = rooftop.analyze(step, torch.randn(8), ceilings=ceilings)
    assert any("other operators each time" in note for note in report.notes)


def test_outputs_may_have_another_shape_in_each_run(ceilings: Ceilings) -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.linear(x)
            return y[torch.rand(len(y)) > 0.5]

    assert rooftop.analyze(Picking(), torch.randn(64, 4), train=True, ceilings=ceilings).mode == "training"


def test_modules_in_threads_of_their_own_are_told(ceilings: Ceilings) -> None:
    class Threaded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            with ThreadPoolExecutor(1) as pool:
                return self.inside(x) + pool.submit(self.outside, x).result()

    report = rooftop.analyze(Threaded(), torch.randn(4, 3), ceilings=ceilings)
    assert any("ran in threads other than the step" in note for note in report.notes)
    assert report.modules.find("inside").calls == 1
    assert [child.name for child in report.modules.children if child.calls] == ["inside"]


def test_analyses_in_several_threads_do_not_see_each_others_modules(ceilings: Ceilings) -> None:
    def names(width: int) -> list[str]:
        net = nn.Sequential(*(nn.Linear(width, width) for _ in range(width)))
        return [child.name for child in rooftop.analyze(net, torch.ones(2, width), ceilings=ceilings).modules.children]

    with ThreadPoolExecutor(2) as pool:
        assert [sorted(found) for found in pool.map(names, (2, 3))] == [["0", "1"], ["0", "1", "2"]]


def test_outputs_in_float8_are_trained(ceilings: Ceilings) -> None:
    class Narrow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).to(torch.float8_e4m3fn)

    report = rooftop.analyze(Narrow(8, 8), torch.randn(2, 8), train=True, ceilings=ceilings)
    assert {row.phase for row in report.ops} >= {"forward", "backward"}


LINEAR = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"target": 3}, TypeError, "expected a module or another callable, got int"),
        ({"target": nn.ReLU(), "loss": torch.sum}, ValueError, "need train=True"),
        ({"target": nn.ReLU(), "train": True}, InputError, "no output of ReLU requires a gradient"),
        ({"target": nn.Linear(3, 2), "train": True, "loss": lambda y: y}, InputError, r"one number.*shape \(2,\)"),
        ({"target": nn.Linear(3, 2), "train": True, "loss": lambda y: 3.0}, InputError, "one number.*got float"),
        ({"target": nn.Linear(3, 2), "train": True, "loss": "mse"}, TypeError, "loss='mse': expected a function"),
        ({"target": nn.Linear(3, 2), "train": True, "optimizer": torch.optim.SGD}, TypeError, "expected an optimizer"),
        (
            {"target": LINEAR, "train": True, "optimizer": torch.optim.LBFGS(LINEAR.parameters())},
            TypeError,
            "recording",
        ),
        ({"target": nn.Linear(3, 2), "train": "yes"}, TypeError, "train='yes': expected True or False"),
        ({"target": nn.Linear(3, 2), "ceilings": "h200"}, TypeError, r"analyze\(ceilings='h200'\): expected Ceilings"),
        ({"target": nn.Linear(3, 2, device="meta")}, ValueError, "a cpu or cuda device, but Linear .* is on meta"),
    ],
)
def test_wrong_arguments(
    arguments: dict[str, object], error: type[Exception], message: str, ceilings: Ceilings
) -> None:
    target, rest = arguments["target"], {"ceilings": ceilings, **arguments}
    del rest["target"]
    with pytest.raises(error, match=message):
        rooftop.analyze(target, torch.randn(3), **rest)  # type: ignore[arg-type]


def generated(x: Tensor) -> Iterator[Tensor]:
    yield x + 1


async def awaited(x: Tensor) -> Tensor:
    return x + 1


async def generated_and_awaited(x: Tensor) -> AsyncIterator[Tensor]:
    yield x + 1


@pytest.mark.parametrize(
    ("target", "kind"), [(generated, "generator"), (awaited, "coroutine"), (generated_and_awaited, "async_generator")]
)
@pytest.mark.parametrize("train", [False, True])
def test_an_output_that_has_not_run_yet_is_refused(target: Callable[..., Any], kind: str, train: bool) -> None:
    """The report showed no operator and a launch gap of 100%."""
    with pytest.raises(InputError, match=rf"{target.__name__} is of type {kind}.*list\(model\(\*inputs\)\)"):
        Program(target, (torch.ones(2, requires_grad=True),), {}, train=train).step()


def test_a_module_that_computes_gradients_is_told_why_it_cannot() -> None:
    class Forces(nn.Linear):
        def forward(self, positions: Tensor) -> Tensor:
            positions = positions.detach().requires_grad_()
            return torch.autograd.grad(super().forward(positions).sum(), positions)[0]

    model, inputs = Forces(3, 1), (torch.ones(2, 3),)
    with pytest.raises(ModelRunError, match=r"does not require grad.*torch\.no_grad\(\) unless.*enable_grad\(\)"):
        Program(model, inputs, {}).step()
    Program(lambda x: model(x), inputs, {}).step()


def test_fake_tensors_are_for_predictions(ceilings: Ceilings) -> None:
    with rooftop.analysis.fake_tensors():
        net = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"Linear or its input is a fake tensor.*rooftop\.predict"):
        rooftop.analyze(net, torch.randn(3), ceilings=ceilings)


def test_memory_over_time_rises_above_what_was_there(ceilings: Ceilings) -> None:
    net, x = small_net(), torch.randn(64, 3, 16, 16)
    report = rooftop.analyze(net, x, train=True, ceilings=ceilings)
    held = 4 * (report.summary.parameters + x.numel())
    activations = 4 * 64 * 8 * 16 * 16
    assert report.memory[0][1] >= held
    assert report.peak_bytes >= held + 2 * activations
    assert [ms for ms, _ in report.memory] == sorted(ms for ms, _ in report.memory)


def test_a_slow_step_is_run_few_times(ceilings: Ceilings) -> None:
    """Two steps warm up, one is profiled, and at most nine are labelled. The first block has five steps, each of three
    more blocks has four."""

    class Slow(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            Slow.calls += 1
            time.sleep(0.1)  # reaches the minimum time of the measurement
            return x.relu()

    rooftop.analyze(Slow(), torch.ones(3), ceilings=ceilings)
    assert Slow.calls <= 2 + 1 + 9 + (5 + 3 * 4)


@pytest.mark.gpu
def test_the_pace_at_which_the_host_launches_is_seen_on_a_gpu() -> None:
    x = torch.randn(64, 64, device="cuda")
    with PlainInstrument(x.device, 0) as plain:
        for _ in range(50):
            torch.relu_(x)
        torch.cuda.synchronize()
    launched = plain.result.launched
    assert len(launched) == 50
    assert launched[0] < launched[25] < launched[-1] == 1.0  # the first step takes long, because the profiler starts
    assert list(launched) == sorted(launched)
