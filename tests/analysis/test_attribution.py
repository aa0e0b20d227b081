"""Every operator is told its module and phase: forward, backward (by what made the node) and optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rooftop.analysis.attribution import LOSS, OPTIMIZER, ModuleTracker
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


def test_traffic_counts_inputs_outputs_and_parameters() -> None:
    net, x = Net(), torch.randn(3, 4)
    tracker = ModuleTracker(net)
    run(tracker, lambda: net(x))
    up = tracker.traffic["blocks.0.up"]
    assert (up.type, up.calls, up.parameters) == ("Linear", 1, 4 * 8 + 8)
    assert (up.input_bytes, up.output_bytes, up.parameter_bytes) == (4 * 3 * 4, 4 * 3 * 8, 4 * (4 * 8 + 8))
    assert up.grad_input_bytes == 0  # x asks for no gradient
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
