"""Predicted fusion agrees with counts by hand: reads, writes for other kernels, and recomputation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rooftop.analysis.advice.fusion import SUMMING, Fused, fused
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.cost import CountingMode
from rooftop.hardware.ceilings import Ceilings

ROWS, WIDTH = 500, 500
UNIT_MS = 1.0  # one tensor of ROWS x WIDTH float32 at 1 GB/s


def counted(forward: Callable[[], Tensor], backward: bool = False) -> list[MeasuredOperator]:
    """The operators, each with the time of its bytes at 1 GB/s."""
    with CountingMode() as mode:
        output = forward()
        forwards = len(mode.records)
        if backward:
            output.backward(torch.ones_like(output))
    phases = ["forward"] * forwards + ["backward"] * (len(mode.records) - forwards)
    records = [replace(r, phase=phase) for r, phase in zip(mode.records, phases, strict=True)]
    return [MeasuredOperator(r, r.cost.bytes / 1e6 if r.cost else 0.0, ()) for r in records]


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, WIDTH)


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(WIDTH, WIDTH)


def seen(found: Fused) -> tuple[int, int, float, float]:
    return found.operators, found.kernels, round(found.now_ms, 2), round(found.after_ms, 2)


def test_an_activation_between_two_products_saves_nothing(ceilings: Ceilings, x: Tensor, weight: Tensor) -> None:
    operators = counted(lambda: functional.gelu(x @ weight) @ weight)
    assert fused(operators, ceilings) == Fused()


def test_a_chain_reads_once_and_writes_once(ceilings: Ceilings, x: Tensor, weight: Tensor) -> None:
    """Three elementwise operators after a product: 2 units each; fused, 1 read and 1 written."""
    operators = counted(lambda: ((x @ weight).mul(2).relu() - 1) @ weight)
    assert seen(fused(operators, ceilings)) == (3, 1, 6.0, 2.0)


def test_in_place_and_through_views_it_is_the_same(ceilings: Ceilings, x: Tensor, weight: Tensor) -> None:
    operators = counted(lambda: ((x @ weight).mul_(2).view(-1).relu_().sub_(1)).view(ROWS, WIDTH) @ weight)
    assert seen(fused(operators, ceilings)) == (3, 1, 6.0, 2.0)


def test_a_residual_sum_joins_the_norm_after_it_and_is_kept_for_the_next(
    ceilings: Ceilings, x: Tensor, weight: Tensor
) -> None:
    """The sum moves 3 units and the norm 2. Fused: product and x are read, sum and norm are written. The last sum comes
    after a product."""

    def block() -> Tensor:
        y = x + x @ weight
        return y + functional.layer_norm(y, (WIDTH,)) @ weight

    found = fused(counted(block), ceilings)
    assert (found.operators, found.kernels) == (2, 1)
    assert (found.now_ms, found.after_ms) == pytest.approx((5 * UNIT_MS, 4 * UNIT_MS), rel=0.01)


def test_a_sum_over_columns_is_a_kernel_of_its_own(ceilings: Ceilings, x: Tensor, weight: Tensor) -> None:
    over_columns = counted(lambda: (x @ weight).relu().sum(0))
    over_rows = counted(lambda: (x @ weight).relu().sum(-1))
    assert fused(over_columns, ceilings) == Fused()
    found = fused(over_rows, ceilings)
    assert (found.operators, found.kernels) == (2, 1)
    assert (found.now_ms, found.after_ms) == pytest.approx((3 * UNIT_MS, UNIT_MS), rel=0.01)


@pytest.fixture
def gpu(ceilings: Ceilings) -> Ceilings:
    return replace(ceilings, kind="cuda")


def slowed(operators: list[MeasuredOperator], *names: str) -> list[MeasuredOperator]:
    """Operators with these names take twice as long as their bytes."""
    return [
        replace(op, measured_ms=op.measured_ms * (2 if any(name in op.record.name for name in names) else 1))
        for op in operators
    ]


def test_a_slow_norm_between_two_products_is_written_anew_and_an_activation_is_not(
    ceilings: Ceilings, gpu: Ceilings, x: Tensor, weight: Tensor
) -> None:
    """Elementwise kernels already move each byte once, so what makes them slow remains after compilation. On a CPU, a
    norm is as fast as a compiled one."""
    operators = counted(lambda: functional.gelu(functional.layer_norm(x.relu() @ weight, (WIDTH,)) @ weight) @ weight)
    assert fused(operators, gpu) == Fused()
    assert fused(slowed(operators, "gelu"), gpu) == Fused()
    assert seen(fused(slowed(operators, "gelu", "layer_norm"), gpu)) == (1, 1, 4.01, 2.0)
    assert fused(slowed(operators, "gelu", "layer_norm"), ceilings) == Fused()


def test_a_step_of_norms_alone_is_not_promised_the_whole_roof(gpu: Ceilings, x: Tensor) -> None:
    operators = slowed(counted(lambda: functional.layer_norm(x, (WIDTH,))), "layer_norm")
    assert seen(fused(operators, gpu)) == (1, 1, 4.01, 2.36)


def test_a_copy_from_the_host_is_no_kernel(gpu: Ceilings, x: Tensor, weight: Tensor) -> None:
    operators = counted(lambda: x.clone().relu() @ weight)
    assert fused(operators, gpu).kernels == 1
    of_copy = ("Memcpy HtoD (Pinned -> Device)",)
    copied = [replace(op, kernels=of_copy if "clone" in op.record.name else ()) for op in operators]
    assert fused(slowed(copied, "clone"), gpu) == Fused()


def test_a_slow_sum_over_columns_is_written_anew_and_joins_nothing(gpu: Ceilings, x: Tensor, weight: Tensor) -> None:
    operators = slowed(counted(lambda: (x.relu() @ weight).mul(2).sum(0)), "sum")
    assert seen(fused(operators, gpu)) == (1, 1, 2.0, 1.0)


def test_parts_are_put_together_in_the_kernel_that_reads_them(ceilings: Ceilings, x: Tensor, weight: Tensor) -> None:
    """Two products side by side read 2 units and write 2, and so does the activation after them. Fusion leaves half of
    these units."""
    operators = counted(lambda: torch.cat([x @ weight, weight @ x]).relu() @ weight)
    assert seen(fused(operators, ceilings)) == (2, 1, 8.0, 4.0)


def test_backward_computes_a_formula_again_rather_than_read_what_it_left(ceilings: Ceilings, weight: Tensor) -> None:
    """Forward pass of x * sigmoid(x) after a product: the sigmoid moves 2 units and the product 3; fused, they move 2.
    Backward pass: its operators move five units in addition to the gradient and the result. After fusion, x is the only
    one of the five that still moves."""
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)

    def forward() -> Tensor:
        y = leaf @ weight
        return (y * torch.sigmoid(y)) @ weight

    operators = counted(forward, backward=True)
    joined = [op for op in operators if "mm" not in op.record.name and op.record.cost and op.record.cost.bytes]
    assert [op.record.phase for op in joined].count("forward") >= 2
    found = fused(operators, ceilings)
    assert found.kernels == 2
    assert found.after_ms == pytest.approx((2 + 3) * UNIT_MS, rel=0.01)


def test_statistics_of_a_batch_take_another_pass(ceilings: Ceilings) -> None:
    image, kernel = torch.randn(4, 64, 31, 31), torch.randn(64, 64, 1, 1)
    norm = nn.BatchNorm2d(64)
    size_ms = image.numel() * 4 / 1e6
    operators = counted(lambda: norm(functional.conv2d(image, kernel)).relu())
    of_norm = "native_batch_norm"
    slow = [replace(op, measured_ms=op.measured_ms * (2 if of_norm in op.record.name else 1)) for op in operators]
    found = fused(slow, ceilings)
    assert (found.operators, found.kernels) == (2, 1)
    # two of three passes are for sums over rows
    assert found.after_ms == pytest.approx(3 * size_ms / SUMMING, rel=0.01)
    norm.eval()
    with torch.no_grad():
        found = fused(counted(lambda: norm(functional.conv2d(image, kernel)).relu()), ceilings)
    assert found.after_ms == pytest.approx(2 * size_ms, rel=0.01)


def test_a_loss_over_long_rows_reads_them_twice(ceilings: Ceilings) -> None:
    hidden, table = torch.randn(16, 8), torch.randn(8, 40_000)
    targets = torch.randint(40_000, (16,))
    size_ms = 16 * 40_000 * 4 / 1e6
    found = fused(counted(lambda: functional.cross_entropy((hidden @ table) * 0.5, targets)), ceilings)
    assert (found.operators, found.kernels) == (3, 1)
    assert found.now_ms == pytest.approx(4 * size_ms, rel=0.01)
    assert found.after_ms == pytest.approx(2 * size_ms, rel=0.01)


def test_compiled_kernels_come_as_near_to_their_roof_as_those_of_the_step(
    ceilings: Ceilings, x: Tensor, weight: Tensor
) -> None:
    operators = counted(lambda: ((x @ weight).mul(2).relu() - 1) @ weight)
    slower = [replace(op, measured_ms=op.measured_ms / 0.8) for op in operators]
    assert fused(slower, ceilings).after_ms == pytest.approx(2 / 0.8)


def test_what_other_things_than_memory_bind_says_nothing_of_compiled_kernels(
    ceilings: Ceilings, x: Tensor, weight: Tensor
) -> None:
    """A power takes ten times as long as its bytes need; the other operators take as long as their bytes need."""
    operators = counted(lambda: ((x @ weight).mul(2).pow(3).relu() - 1) @ weight)
    slow = [replace(op, measured_ms=op.measured_ms * (10 if "pow" in op.record.name else 1)) for op in operators]
    assert fused(slow, ceilings).now_ms == pytest.approx(13 * 2 * UNIT_MS)
    assert fused(slow, ceilings).after_ms == pytest.approx(2 * UNIT_MS, rel=0.01)


def test_small_operators_are_no_faster_fused_than_others_of_the_step(ceilings: Ceilings, weight: Tensor) -> None:
    """Two kilobytes move in 2 us, but each operator took 0.1 ms. So one fused kernel in place of these operators also
    takes 0.1 ms."""
    small = torch.randn(1, WIDTH)
    operators = [
        replace(op, measured_ms=0.1 if op.record.cost and op.record.cost.bytes else 0.0)
        for op in counted(lambda: ((small @ weight).mul(2).relu() - 1) @ weight)
    ]
    found = fused(operators, ceilings)
    assert (found.operators, found.kernels) == (3, 1)
    assert found.after_ms == pytest.approx(0.1)


def test_what_left_no_tensors_stays_as_it_is(ceilings: Ceilings, x: Tensor) -> None:
    operators = counted(lambda: x.mul(2).relu())
    bare = [
        MeasuredOperator(replace(op.record, spec=None, inputs=(), outputs=()), op.measured_ms, ()) for op in operators
    ]
    assert fused(bare, ceilings) == Fused()
    assert fused([], ceilings) == Fused()
