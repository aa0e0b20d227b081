"""Kernels have the times of steps without labels, whichever run determined their operators."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rooftop
from rooftop.analysis.instruments import Labelled, medians
from rooftop.analysis.kernel_join import Kernel
from rooftop.analysis.kernel_times import KernelTimes, in_launch_order, times_of_sequence
from rooftop.cost import FREE, Record

NAMES = ("gemm", "relu", "gemm", "copy")


def step_of(names: tuple[str, ...], ms: float, first: int = 0, start_ns: int = 0) -> list[Kernel]:
    """Kernels one after the other, launched in this order, with these durations in ms. Launches are numbered from
    `first`."""
    length = int(1e6 * ms)
    return [
        Kernel(name, start_ns + n * length, start_ns + (n + 1) * length, first + n, 0) for n, name in enumerate(names)
    ]


def record(name: str) -> Record:
    return Record(name, ((1,),), "float32", "cuda:0", "", "forward", FREE)


def labelled(kernels: list[Kernel], groups: tuple[tuple[int, ...], ...], orphans: tuple[int, ...] = ()) -> Labelled:
    by_operator = [[kernels[place] for place in group] for group in groups]
    records = [record(f"operator {number}") for number in range(len(groups))]
    return Labelled.on_gpu(records, by_operator, [kernels[place] for place in orphans])


def test_an_operator_takes_the_time_that_its_kernels_take_without_labels() -> None:
    """Labelled, each kernel took 5 ms; without labels 1, 2, 3 and 4 ms."""
    run = labelled(step_of(NAMES, 5.0), ((0, 1), (2,)), (3,))
    undisturbed = KernelTimes(NAMES, (1.0, 2.0, 3.0, 4.0), 10.0, 8)
    notes: list[str] = []
    operators, unattributed_ms = medians([run], notes, undisturbed)
    assert [op.measured_ms for op in operators] == [3.0, 3.0]
    assert [op.kernels for op in operators] == [("gemm", "relu"), ("gemm",)]
    assert unattributed_ms == 4.0
    assert notes == []


def test_a_labelled_step_that_launches_other_kernels_keeps_its_times_and_says_so() -> None:
    run = labelled(step_of(("gemm", "add"), 5.0), ((0,), (1,)))
    notes: list[str] = []
    operators, _ = medians([run, run], notes, KernelTimes(("gemm", "relu"), (1.0, 1.0), 2.0, 8))
    assert [op.measured_ms for op in operators] == [5.0, 5.0]
    assert any("different kernels with and without labels on its operators:" in note for note in notes)


def test_runs_that_a_busy_host_slowed_down_do_not_count() -> None:
    """Six of nine runs took three times as long."""
    records = [record("a"), record("b")]
    runs = [
        Labelled(records, [(factor * 1.0, ()), (factor * 2.0, ())], 0.0) for factor in (3, 1, 3, 3, 1.1, 3, 3, 1.2, 3)
    ]
    operators, _ = medians(runs, [])
    assert [op.measured_ms for op in operators] == pytest.approx([1.1, 2.2])


@given(order=st.permutations(range(4)))
def test_the_order_of_launch_is_found_again(order: list[int]) -> None:
    kernels = step_of(NAMES, 1.0)
    assert in_launch_order([kernels[place] for place in order]) == kernels


def test_kernels_of_one_graph_are_in_the_order_in_which_they_started() -> None:
    kernels = [dataclasses.replace(kernel, correlation_id=7) for kernel in step_of(NAMES, 1.0)]
    assert in_launch_order(kernels[::-1]) == kernels


def test_the_first_steps_of_a_sequence_are_not_counted() -> None:
    slow = [k for n in range(2) for k in step_of(NAMES, 9.0, 10 * n, 10**9 * n)]
    steady = [k for n in range(2, 7) for k in step_of(NAMES, 2.0, 10 * n, 10**9 * n)]
    seen = times_of_sequence(slow + steady, steps=7, lead=2)
    assert seen == KernelTimes(NAMES, (2.0,) * 4, 8.0, 5)


def test_work_that_overlaps_keeps_the_gpu_busy_once() -> None:
    first, second = step_of(("a",), 4.0), step_of(("b",), 4.0, 1, 2_000_000)
    seen = times_of_sequence(first + second, steps=1, lead=0)
    assert seen is not None
    assert seen.busy_ms == 6.0


@pytest.mark.parametrize("second", [("gemm", "relu", "copy", "gemm"), NAMES[:3], (*NAMES, "add")])
def test_steps_that_differ_have_no_common_times(second: tuple[str, ...]) -> None:
    kernels = [*step_of(NAMES, 1.0), *step_of(second, 1.0, 10, 10**9), *step_of(NAMES, 1.0, 20, 2 * 10**9)]
    assert times_of_sequence(kernels, steps=3, lead=1) is None


@pytest.mark.gpu
def test_operators_add_up_to_the_busy_time_of_a_sequence_on_a_gpu() -> None:
    """Many small operators, which labels would slow down."""
    net = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.GELU()) for _ in range(40)))
    report = rooftop.analyze(net.cuda(), torch.randn(256, 512, device="cuda"))
    assert sum(row.measured_ms for row in report.ops) == pytest.approx(report.summary.busy_ms, rel=0.05)
    assert report.summary.latency_ms is not None
    assert not any("other kernels" in note for note in report.notes)
