"""Every operator gets its module and phase: forward, backward (by the node's maker) and optimizer."""

from __future__ import annotations

import gc
import re
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.utils.checkpoint import checkpoint

from rooftop.analysis.attribution import AUTOGRAD, LOSS, OPTIMIZER, ModuleTracker
from rooftop.cost import CountingMode, Record


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x).sin())


def run(tracker: ModuleTracker, step: object) -> list[Record]:
    with tracker, CountingMode(tracker.locate) as counted:
        step()  # type: ignore[operator]
    return counted.records


def scopes(records: list[Record], name: str, phase: str) -> list[str]:
    return [r.scope for r in records if r.name == f"aten::{name}" and r.phase == phase]


def test_forward_operators_belong_to_the_innermost_running_module() -> None:
    net, x = Net(), torch.randn(3, 4)
    records = run(ModuleTracker(net), lambda: net(x))
    assert scopes(records, "addmm", "forward") == [
        "blocks.0.up",
        "blocks.0.down",
        "blocks.1.up",
        "blocks.1.down",
        "head",
    ]
    assert scopes(records, "tanh", "forward") == ["blocks.0", "blocks.1"]
    assert scopes(records, "sin", "forward") == [""]


def test_backward_operators_belong_to_the_module_that_made_their_node() -> None:
    net, x = Net(), torch.randn(3, 4)
    records = run(ModuleTracker(net), lambda: net(x).sum().backward())
    assert scopes(records, "tanh_backward", "backward") == ["blocks.1", "blocks.0"]
    assert scopes(records, "cos", "backward") == [""]
    products = scopes(records, "mm", "backward")
    assert products[:4] == ["head", "head", "blocks.1.down", "blocks.1.down"]
    assert set(products) == {"head", *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down"))}
    assert scopes(records, "sum", "forward") == [LOSS]


def test_accumulated_gradients_belong_to_the_owner_of_the_parameter() -> None:
    net, x = Net(), torch.randn(3, 4)
    net(x).sum().backward()  # the second step adds to existing gradients
    records = run(ModuleTracker(net), lambda: net(x).sum().backward())
    assert sorted(scopes(records, "add_", "backward")) == sorted(
        name.rpartition(".")[0] for name, _ in net.named_parameters()
    )


def test_recomputed_operators_are_backward_work_of_their_module() -> None:
    net, x = Net(), torch.randn(3, 4, requires_grad=True)
    block = net.blocks[0]
    records = run(ModuleTracker(net), lambda: net.head(checkpoint(block, x, use_reentrant=False)).sum().backward())
    assert scopes(records, "tanh", "forward") == ["blocks.0"]
    assert scopes(records, "tanh", "backward") == ["blocks.0"]


class Checkpointed(nn.Module):
    """Two checkpointed layers, whose activations backward recomputes. A function wraps the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda y: self.layers[0](y.sin()).tanh(), x, use_reentrant=True)
        return checkpoint(self.layers[1], x, use_reentrant=True)


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Checkpointed()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * 2)


def test_what_a_reentrant_checkpoint_makes_belongs_to_the_module_that_makes_it() -> None:
    net, x = Wrapped(), torch.randn(3, 4, requires_grad=True)
    records = run(ModuleTracker(net), lambda: net(x).sum().backward())
    products = scopes(records, "addmm", "backward") + scopes(records, "mm", "backward")
    assert sorted(products) == ["body.layers.0"] * 3 + ["body.layers.1"] * 3
    assert scopes(records, "tanh_backward", "backward") == ["body"]
    assert scopes(records, "cos", "backward") == ["body"]
    assert scopes(records, "sin", "backward") == ["body"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_a_checkpoint_inside_a_checkpoint_is_told_as_well() -> None:
    inner = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.whole, x, use_reentrant=True)

        def whole(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, self.first(x), use_reentrant=True)

    net, x = nn.Sequential(Outer(), nn.Sigmoid()), torch.randn(3, 4, requires_grad=True)
    records = run(ModuleTracker(net), lambda: net(x).sum().backward())
    assert scopes(records, "tanh_backward", "backward") == ["0.inner.1"]
    assert scopes(records, "sigmoid_backward", "backward") == ["1"]
    assert sorted(scopes(records, "mm", "backward")) == ["0.first"] * 2 + ["0.inner.0"] * 2


def test_the_graph_of_a_backward_pass_belongs_to_the_modules_that_it_differentiates() -> None:
    """A gradient penalty: the second backward pass differentiates what the first one computes."""
    net, x = Net(), torch.randn(3, 4, requires_grad=True)

    def penalty() -> None:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().sum().backward()

    records = run(ModuleTracker(net), penalty)
    tanh = scopes(records, "tanh_backward", "backward")
    assert set(tanh) == {"blocks.0", "blocks.1"}
    second = [r.scope for r in records if r.phase == "backward" and r.name in ("aten::mm", "aten::addmm")]
    assert set(second) == {"head", *(f"blocks.{i}.{name}" for i in (0, 1) for name in ("up", "down"))}
    assert not [r for r in records if r.scope == "(autograd)" and r.name == "aten::mm"]


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return x


def in_a_thread(run: Callable[..., None], *arguments: Any) -> None:
    thread = threading.Thread(target=run, args=arguments)
    thread.start()
    thread.join()


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_number_of_two_threads_is_that_of_the_node_that_can_still_be_run(reentrant: bool) -> None:
    """On a GPU, sequence numbers begin at 0 in each of two threads. In this test, the other thread reaches this
    thread's numbers without a frame of `backward` on its stack. Both threads are new, so that a given number is reached
    after few nodes."""
    number = torch._C._autograd._get_sequence_nr
    run_backward = torch.autograd.Variable._execution_engine.run_backward
    net, x, slope = Recomputed(reentrant), torch.randn(3, 4, requires_grad=True), torch.ones(3, 4)

    def elsewhere(ahead: int, found: list[Record]) -> None:
        tracker, one = ModuleTracker(net), torch.ones(1, requires_grad=True)
        for _ in range(20):
            one.neg()  # lets the other thread's numbers stay behind

        def backward() -> None:
            while number() < first + ahead:
                one.neg()
            with CountingMode(tracker.locate) as counted:
                run_backward((y,), (slope,), False, False, (), accumulate_grad=True)
            found.extend(counted.records)

        with tracker, CountingMode(tracker.locate):
            first, y = number(), net(x)
            in_a_thread(backward)

    for ahead in range(-12, 16):
        records: list[Record] = []
        in_a_thread(elsewhere, ahead, records)
        assert sorted(scopes(records, "mm", "backward")) == ["layers.0"] * 2 + ["layers.1"] * 2, ahead
        assert scopes(records, "tanh_backward", "backward") == ["", ""], ahead


@pytest.mark.gpu
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_work_belongs_to_its_module_on_a_gpu(reentrant: bool) -> None:
    """On a GPU, the backward pass runs in another thread, and its nodes have that thread's numbers."""
    net, x = Recomputed(reentrant).cuda(), torch.randn(3, 4, device="cuda", requires_grad=True)
    for _ in range(5):
        records = run(ModuleTracker(net), lambda: net(x).sum().backward())
        assert sorted(scopes(records, "mm", "backward")) == ["layers.0"] * 2 + ["layers.1"] * 2
        assert scopes(records, "tanh_backward", "backward") == ["", ""]


def test_a_module_of_several_parents_runs_under_each_of_them() -> None:
    shared = nn.Linear(100, 100)
    net = nn.Sequential(*(nn.Sequential(shared, nn.ReLU()) for _ in range(3)))
    tracker, x = ModuleTracker(net), torch.randn(1, 100, requires_grad=True)
    records = run(tracker, lambda: net(x).sum().backward())
    assert scopes(records, "addmm", "forward") == ["0.0", "1.0", "2.0"]
    assert scopes(records, "mm", "backward") == ["2.0", "2.0", "1.0", "1.0", "0.0", "0.0"]
    assert [tracker.traffic[f"{i}.0"].calls for i in range(3)] == [1, 1, 1]


def test_a_module_that_its_caller_does_not_hold_is_named_by_who_holds_it() -> None:
    class Caller(nn.Module):
        def __init__(self, called: nn.Module) -> None:
            super().__init__()
            self.called = [called]  # not registered

        def forward(self, x: Tensor) -> Tensor:
            return self.called[0](x)

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4))})
            self.caller = Caller(self.blocks["a"][0])

        def forward(self, x: Tensor) -> Tensor:
            return self.caller(x)

    net, x = nn.Sequential(Pair(), Pair()), torch.randn(3, 4)
    records = run(ModuleTracker(net), lambda: net(x))
    assert scopes(records, "addmm", "forward") == ["0.blocks.a.0", "1.blocks.a.0"]


def test_a_module_whose_attributes_cannot_be_asked_for_ends_nothing() -> None:
    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def __getattr__(self, name: str) -> Any:
            found = self.__dict__["_modules"].get(name)
            if found is None:
                raise KeyError(name)
            return found

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    tracker = ModuleTracker()
    records = run(tracker, lambda: Closed()(torch.ones(3, 4)))
    assert scopes(records, "addmm", "forward")
    assert "KeyError" in tracker.uncounted["Closed"]


def test_a_module_that_calls_itself_is_one_scope() -> None:
    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.join = nn.Linear(4, 4)

        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            return self.join(self(x, depth - 1) if depth else x)

    net, x = nn.Sequential(Tree()), torch.randn(3, 4)
    records = run(ModuleTracker(net), lambda: net(x))
    assert scopes(records, "addmm", "forward") == ["0.join"] * 3


def test_optimizer_operators_are_their_own_phase() -> None:
    net, x = Net(), torch.randn(3, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        net(x).sum().backward()
        optimizer.step()

    tracker = ModuleTracker(net)
    records = run(tracker, step)
    updates = [r for r in records if r.phase == "optimizer"]
    assert updates
    assert {r.scope for r in updates} == {OPTIMIZER}
    assert tracker.optimizers == [optimizer]


def test_no_model_and_no_optimizer_is_kept_alive() -> None:
    """A program may drop a model to free memory for the next one. A new model of the same kind gets its own name."""
    x, tracker = torch.randn(3, 4), ModuleTracker()

    def trained() -> tuple[list[weakref.ref[Any]], list[Record], ModuleTracker]:
        net = Net()
        optimizer = torch.optim.Adam(net.parameters())
        with CountingMode(tracker.locate) as counted:
            net(x).sum().backward()
            optimizer.step()
        seen = tracker.snapshot()
        return [weakref.ref(each) for each in (net, net.head, net.head.weight, optimizer)], counted.records, seen

    with tracker:
        first, records, seen = trained()
        gc.collect()
        assert [each() for each in first] == [None] * 4
        others = trained()[1]
    assert scopes(records, "sin", "forward") == [""]
    assert scopes(others, "sin", "forward") == ["Net"]
    weights = sum(4 * p.numel() for p in Net().parameters())
    assert seen.optimizer_traffic().read >= 4 * weights  # with gradients and two states
    assert seen.optimizer_traffic().refuses_capture


def test_an_optimizer_counts_as_often_as_it_steps() -> None:
    weight = torch.ones(100, requires_grad=True)
    weight.grad = torch.ones(100)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    tracker = ModuleTracker()
    with tracker:
        optimizer.step()
        once = tracker.optimizer_traffic()
        optimizer.step()
    assert (once.read, once.written) == (800, 400)
    assert tracker.optimizer_traffic().read == 1600


def test_traffic_counts_inputs_outputs_and_parameters() -> None:
    net, x = Net(), torch.randn(3, 4)
    tracker = ModuleTracker(net)
    run(tracker, lambda: net(x))
    up = tracker.traffic["blocks.0.up"]
    assert (up.type, up.calls, sum(up.parameters.values())) == ("Linear", 1, 4 * 8 + 8)
    assert (up.input_bytes, up.output_bytes, up.parameter_bytes) == (4 * 3 * 4, 4 * 3 * 8, 4 * (4 * 8 + 8))
    assert up.grad_input_bytes == 0  # x needs no gradient
    assert tracker.traffic["blocks.0.down"].grad_input_bytes == 4 * 3 * 8


def test_a_module_called_twice_is_one_scope_with_two_calls() -> None:
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    net = nn.Sequential(layer, layer)
    tracker = ModuleTracker(net)
    records = run(tracker, lambda: net(x))
    assert scopes(records, "addmm", "forward") == ["0", "0"]
    assert tracker.traffic["0"].calls == 2


def test_modules_called_by_a_function_get_names_of_their_own() -> None:
    first, second, x = nn.Linear(4, 4), nn.Linear(4, 4), torch.randn(3, 4)
    records = run(ModuleTracker(), lambda: second(first(x).relu()))
    assert scopes(records, "addmm", "forward") == ["", "Linear"]


def test_an_exception_in_forward_leaves_no_hook_and_no_open_scope() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("broken")

    net, x = nn.Sequential(nn.Linear(4, 4), Broken()), torch.randn(3, 4)
    tracker = ModuleTracker(net)
    try:
        run(tracker, lambda: net(x))
    except RuntimeError:
        pass
    else:
        raise AssertionError("the module's exception must reach the caller")
    assert tracker.locate() == (LOSS, "forward")
    calls = tracker.traffic["0"].calls
    net[0](x)
    assert tracker.traffic["0"].calls == calls


class Interrupted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)
        self.late = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        if self.late:
            raise KeyboardInterrupt
        return x.sin()


class Patient(nn.Module):
    """A module that continues when a module inside it has been interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Interrupted())
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.inner(x)
        except KeyboardInterrupt:
            return self.head(x.cos())


@pytest.mark.parametrize("times", [1, 20])
def test_a_module_that_was_interrupted_runs_no_more(times: int) -> None:
    """PyTorch calls no hook when an exception ends a module. The exception may keep the module's frame alive, or a
    later frame may take its place in memory."""
    net, x = Net(), torch.randn(3, 4)
    slow = Interrupted()
    net.add_module("slow", slow)

    def step() -> None:
        for _ in range(times):
            try:
                slow(x)
            except KeyboardInterrupt:
                x.exp()
                net.head(x).cos().sum().backward()
            x.tan()
            net.blocks[0](x)

    records = run(ModuleTracker(net), step)
    assert scopes(records, "exp", "forward") == [LOSS] * times
    assert scopes(records, "tan", "forward") == [LOSS] * times
    assert scopes(records, "addmm", "forward") == ["slow.up", "head", "blocks.0.up", "blocks.0.down"] * times
    backward = [r.scope for r in records if r.phase == "backward" and r.name in ("aten::mm", "aten::sin")]
    assert backward == [AUTOGRAD, "head"] * times


def test_a_module_that_catches_the_interruption_of_another_goes_on_as_itself() -> None:
    net, x = Patient(), torch.randn(3, 4)
    tracker = ModuleTracker(net)
    records = run(tracker, lambda: [net(x), net.inner[0].up(x)])
    assert scopes(records, "cos", "forward") == [""]
    assert scopes(records, "addmm", "forward") == ["inner.0.up", "head", "inner.0.up"]
    assert tracker.traffic["head"].calls == 1
    assert tracker.traffic[""].calls == 1
    assert "inner" not in tracker.traffic


def test_nothing_of_an_interrupted_call_is_kept() -> None:
    slow, kept = Interrupted(), list[weakref.ref[Tensor]]()

    def step() -> None:
        x = torch.randn(3, 4)
        kept.append(weakref.ref(x))
        with pytest.raises(KeyboardInterrupt):
            slow(x)

    with ModuleTracker(slow) as tracker, CountingMode(tracker.locate):
        step()
        gc.collect()
        assert kept[0]() is None


# ---- an observer neither ends nor changes anything -----------------------------------------------------------------


def test_modules_under_transforms_move_what_all_samples_move() -> None:
    """`torch.func` wraps tensors. The wrapper shows one sample, but memory holds all samples."""
    layer, x = nn.Linear(16, 4), torch.randn(32, 16)
    weights = {name: weight.detach() for name, weight in layer.named_parameters()}

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(layer, weights, (sample,)).square().sum()

    for step in (
        lambda: vmap(layer)(x),
        lambda: vmap(grad(loss), (None, 0))(weights, x),
        lambda: grad(loss)(weights, x),
        lambda: jvp(layer, (x,), (x,)),
    ):
        tracker, expected = ModuleTracker(layer), step()
        with tracker, CountingMode(tracker.locate):
            found = step()
        torch.testing.assert_close(found, expected)
        assert tracker.uncounted == {}
        assert (tracker.traffic[""].input_bytes, tracker.traffic[""].output_bytes) == (4 * 32 * 16, 4 * 32 * 4)


def _graph(traced: torch.jit.ScriptModule) -> str:
    """The text of the graph, without the numbers that TorchScript gives to the types of a process."""
    return re.sub(r"___torch_mangle_\d+\.", "", str(traced.graph))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_what_is_traced_has_the_graph_that_it_has_without_us() -> None:
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(3, 4)
    expected = _graph(torch.jit.trace(net, x))
    tracker = ModuleTracker(net)
    with tracker, CountingMode(tracker.locate):
        traced = torch.jit.trace(net, x)
    assert _graph(traced) == expected
    assert "traced by torch.jit.trace" in tracker.uncounted["Linear"]


def test_tensors_of_an_unknown_kind_end_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(tensors: object) -> int:
        raise NotImplementedError("no storage")

    net, x = nn.Linear(4, 4), torch.randn(3, 4)
    monkeypatch.setattr("rooftop.analysis.attribution.distinct_bytes", refused)
    monkeypatch.setattr("rooftop.cost.counting._described", refused)
    tracker = ModuleTracker(net)
    records = run(tracker, lambda: net(x))
    assert tracker.uncounted == {"Linear": "NotImplementedError: no storage"}
    assert tracker.traffic == {}
    assert [r.cost for r in records] == [None] * len(records)
    assert "tensors cannot be read: NotImplementedError: no storage" in records[-1].uncovered
    tracker.restart()
    assert tracker.uncounted == {}


def test_after_an_optimizer_that_raised_forward_is_forward() -> None:
    class Refusing(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise RuntimeError("not now")

    net, x = Net(), torch.randn(3, 4)
    optimizer = Refusing(net.parameters(), lr=0.1)

    def step() -> None:
        with pytest.raises(RuntimeError, match="not now"):
            optimizer.step()
        net(x)

    records = run(ModuleTracker(net), step)
    assert {r.phase for r in records} == {"forward"}


def test_labels_for_the_profiler_are_no_operators() -> None:
    def step() -> None:
        with torch.profiler.record_function("mine"):
            torch.ones(3).sin()

    assert {r.name.partition("::")[0] for r in run(ModuleTracker(), step)} == {"aten"}


def test_a_warning_that_was_shown_is_not_shown_again() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for _ in range(3):
            warnings.warn("mine", stacklevel=1)
            with ModuleTracker():
                pass
    assert len(shown) == 1


class Force(nn.Module):
    """A network whose output is a gradient, as in models of molecules: F = -dE/dx."""

    def __init__(self, slope: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.outer, self.slope = nn.Linear(4, 4), nn.Linear(4, 4), slope

    def forward(self, x: Tensor) -> Tensor:
        return self.slope(lambda x: self.outer(self.inner(x).tanh()).sum(), x).sin()


def slope_of_autograd(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(energy(x), x, create_graph=True)
    return slope


def slope_of_functions(energy: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.func.grad(energy)(x)


@pytest.mark.parametrize("slope", [slope_of_autograd, slope_of_functions])
def test_gradients_taken_inside_a_module_belong_to_the_modules_that_they_pass(slope: Any) -> None:
    net, x = nn.Sequential(Force(slope)), torch.randn(3, 4, requires_grad=True)
    records = run(ModuleTracker(net), lambda: net(x))
    assert scopes(records, "mm", "backward") == ["0.outer", "0.inner"]
    assert scopes(records, "tanh_backward", "backward") == ["0"]
    assert scopes(records, "sin", "forward") == ["0"]


def test_what_follows_gradients_taken_inside_a_module_is_its_own() -> None:
    net, x = nn.Sequential(Force(slope_of_autograd)), torch.randn(3, 4, requires_grad=True)
    records = run(ModuleTracker(net), lambda: net(x).sum().backward())
    assert scopes(records, "cos", "backward") == ["0"]
    assert set(scopes(records, "mm", "backward")) == {"0.inner", "0.outer"}


def test_a_module_recomputed_inside_a_module_that_asks_for_gradients_is_told() -> None:
    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            (slope,) = torch.autograd.grad(checkpoint(self.layer, x, use_reentrant=False).sum(), x)
            return slope.exp()

    net, x = nn.Sequential(Recomputed()), torch.randn(3, 4, requires_grad=True)
    records = run(ModuleTracker(net), lambda: net(x))
    assert scopes(records, "tanh", "backward") == ["0.layer.1"]
    assert scopes(records, "mm", "backward") == ["0.layer.2", "0.layer.0"]
    assert scopes(records, "exp", "forward") == ["0"]
