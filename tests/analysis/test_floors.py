"""Op roofs and fused roofs against figures computed by hand: 1 GB/s, 1 GFLOP/s in fp32, 1 us kernel floor."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rooftop.analysis.attribution import ModuleTracker
from rooftop.analysis.floors import module_tree, operator_rows
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.analysis.report_contents import ModuleNode
from rooftop.cost import CountingMode
from rooftop.hardware.ceilings import Ceilings

BATCH, WIDTH = 32, 64
ACTIVATION_BYTES = 4 * BATCH * WIDTH
WEIGHT_BYTES, BIAS_BYTES = 4 * WIDTH * WIDTH, 4 * WIDTH
LINEAR_FLOPS = 2 * BATCH * WIDTH * WIDTH
MS_PER_BYTE = MS_PER_FLOP = 1e-6


def observed(
    net: nn.Module, *, train: bool, optimizer: torch.optim.Optimizer | None = None
) -> tuple[list[MeasuredOperator], ModuleTracker]:
    """The operators of one step, each with a time of 1 ms."""
    x = torch.randn(BATCH, WIDTH, requires_grad=train)
    tracker = ModuleTracker(net)
    with torch.set_grad_enabled(train), tracker, CountingMode(tracker.locate) as counted:
        out = net(x)
        if train:
            out.backward(torch.ones_like(out))
        if optimizer is not None:
            optimizer.step()
    return [MeasuredOperator(record, 1.0, ()) for record in counted.records], tracker


def tree_of(net: nn.Module, ceilings: Ceilings, **how: object) -> ModuleNode:
    operators, tracker = observed(net, **how)  # type: ignore[arg-type]
    return module_tree(operators, tracker, ceilings, "Sequential")


def test_rows_group_equal_calls_and_add_them_up(ceilings: Ceilings) -> None:
    net = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    operators, _ = observed(net, train=False)
    rows = {row.name: row for row in operator_rows(operators, ceilings)}
    relu = rows["aten::relu"]
    assert (relu.calls, relu.modules, relu.measured_ms, relu.bound) == (2, ("0", "1"), 2.0, "memory")
    assert relu.bytes == 2 * 2 * ACTIVATION_BYTES
    assert relu.roof_ms == pytest.approx(relu.bytes * MS_PER_BYTE)
    assert relu.percent_of_roof == pytest.approx(100 * relu.roof_ms / 2.0)


def test_compute_bound_and_launch_bound_rows_say_so(ceilings: Ceilings) -> None:
    operators, _ = observed(nn.Linear(WIDTH, WIDTH), train=False)
    rows = {row.name: row for row in operator_rows(operators, ceilings)}
    product = rows["aten::addmm"]
    assert product.bound == "compute"
    assert product.roof_ms == pytest.approx((LINEAR_FLOPS + BATCH * WIDTH) * MS_PER_FLOP, rel=0.02)
    one = torch.randn(1)
    with CountingMode() as counted:
        torch.relu(one)
    (row,) = operator_rows([MeasuredOperator(r, 1.0, ()) for r in counted.records], ceilings)
    assert (row.bound, row.roof_ms) == ("launch", ceilings.kernel_floor_ms)


def test_views_have_no_roof_and_no_percentage(ceilings: Ceilings) -> None:
    operators, _ = observed(nn.Flatten(0), train=False)
    (row,) = operator_rows(operators, ceilings)
    assert (row.bound, row.roof_ms, row.percent_of_roof, row.flagged) == ("none", 0.0, None, False)


def test_an_operator_without_formula_is_uncovered_not_free(ceilings: Ceilings) -> None:
    @torch.library.custom_op("rooftop_test_floors::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    x = torch.eye(3)
    with CountingMode() as counted:
        twice(x)
    rows = operator_rows([MeasuredOperator(r, 1.0, ()) for r in counted.records], ceilings)
    (row,) = [row for row in rows if "twice" in row.name]
    assert (row.bound, row.percent_of_roof, row.uncovered) == ("uncovered", None, "no formula")


def test_op_roof_counts_intermediates_and_fused_roof_does_not(ceilings: Ceilings) -> None:
    net = nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh())
    tree = tree_of(net, ceilings, train=False)
    assert tree.op_roof_ms == pytest.approx(3 * 2 * ACTIVATION_BYTES * MS_PER_BYTE)
    assert tree.fused_roof_ms == pytest.approx(2 * ACTIVATION_BYTES * MS_PER_BYTE)
    for child in tree.children:
        assert child.fused_roof_ms == pytest.approx(child.op_roof_ms)


def test_fused_roof_of_a_training_step_moves_everything_once_each_way(ceilings: Ceilings) -> None:
    """The forward pass reads x and writes y; the backward pass reads dy and x and writes dx: five tensors, whatever the
    steps between."""
    tree = tree_of(nn.Sequential(nn.ReLU(), nn.Sigmoid(), nn.Tanh(), nn.ReLU()), ceilings, train=True)
    assert tree.fused_roof_ms == pytest.approx(5 * ACTIVATION_BYTES * MS_PER_BYTE, rel=0.3)
    assert tree.fused_roof_ms < tree.op_roof_ms


def test_fused_roof_counts_all_flops(ceilings: Ceilings) -> None:
    net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    tree = tree_of(net, ceilings, train=False)
    assert tree.flops >= 4 * LINEAR_FLOPS
    assert tree.fused_roof_ms == pytest.approx(tree.flops * MS_PER_FLOP)
    assert tree.parameters == 4 * (WIDTH * WIDTH + WIDTH)


def test_the_optimizer_reads_parameters_gradients_and_state_once(ceilings: Ceilings) -> None:
    net = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    observed(net, train=True, optimizer=optimizer)  # creates the momentum buffers
    tree = tree_of(net, ceilings, train=True, optimizer=optimizer)
    update = tree.find("(optimizer)")
    # p, g, m read, p, m written
    assert update.fused_roof_ms == pytest.approx(5 * (WEIGHT_BYTES + BIAS_BYTES) * MS_PER_BYTE)
    assert update.fused_roof_ms <= update.op_roof_ms


def test_each_level_of_the_tree_holds_all_time_flops_and_floors_below_it(ceilings: Ceilings) -> None:
    net = nn.Sequential(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), nn.Linear(WIDTH, WIDTH))
    operators, tracker = observed(net, train=True)
    tree = module_tree(operators, tracker, ceilings, "Sequential")
    assert tree.measured_ms == pytest.approx(len(operators))
    for node in (tree, tree.find("0")):
        inside = sum(child.measured_ms for child in node.children)
        assert inside <= node.measured_ms + 1e-9
        assert sum(child.flops for child in node.children) <= node.flops
        assert node.fused_roof_ms <= node.op_roof_ms + 1e-12
    with pytest.raises(KeyError, match=r"no module .*: .* has "):
        tree.find("0.7")


def test_a_module_of_several_parents_works_in_each_and_has_its_parameters_once(ceilings: Ceilings) -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            shared = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.ModuleList(nn.Sequential(shared, nn.Linear(WIDTH, WIDTH)) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    tree = tree_of(Blocks(), ceilings, train=False)
    one = WIDTH * WIDTH + WIDTH
    for number in range(3):
        shared = tree.find(f"blocks.{number}.0")
        assert (shared.flops, shared.parameters, shared.calls) == (tree.find(f"blocks.{number}.1").flops, one, 1)
    assert tree.find("blocks").parameters == tree.parameters == 4 * one
    assert tree.flops == 6 * tree.find("blocks.0.0").flops
