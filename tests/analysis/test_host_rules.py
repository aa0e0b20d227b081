"""Advice about the host predicts gains that can be computed by hand, names lines, and is absent if nothing can be
gained."""

from __future__ import annotations

import dataclasses

import pytest

from rooftop.analysis.advice.host_rules import (
    HOST_RULES,
    data_loading,
    freed_memory,
    host_synchronizations,
    launch_gap,
    unpinned_transfers,
)
from rooftop.analysis.findings import Findings
from rooftop.analysis.instruments import MeasuredOperator, Plain
from rooftop.analysis.kernel_join import Kernel
from rooftop.analysis.report_contents import Gaps, Summary
from rooftop.cost import Cost, Record
from rooftop.hardware.ceilings import Ceilings
from rooftop.hardware.page_faults import PageFaults

PAGEABLE_IN, PAGEABLE_OUT = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"
PINNED_IN = "Memcpy HtoD (Pinned -> Device)"


@pytest.fixture
def gpu(ceilings: Ceilings) -> Ceilings:
    """A launch in a graph takes 2 us, 1 us of which is the kernel itself. Pinned copies are 4 times as fast to the GPU,
    and twice as fast from the GPU."""
    rates = {
        "host_to_device_pageable": 1e9,
        "host_to_device_pinned": 4e9,
        "device_to_host_pageable": 1e9,
        "device_to_host_pinned": 2e9,
    }
    return dataclasses.replace(ceilings, kind="cuda", transfers=rates)


def operator(name: str, place: str = "", *kernels: str) -> MeasuredOperator:
    record = Record(f"aten::{name}", ((1,),), "float32", "cuda:0", "", "forward", Cost(1, 1), place=place)
    return MeasuredOperator(record, 0.1, kernels)


def copy(name: str, ms: float) -> Kernel:
    return Kernel(name, 0, int(1e6 * ms), 0, 0)


def found(
    ceilings: Ceilings,
    *operators: MeasuredOperator,
    wall_ms: float = 10.0,
    busy_ms: float = 2.0,
    samples: int | None = 16,
    plain: Plain | None = None,
) -> Findings:
    """A step of 100 kernels."""
    summary = Summary(wall_ms, 0.0, busy_ms, 0.0, 0.0, 0, 0, 0, 100, samples, 1)
    return Findings(operators, [], summary, Gaps(0.0, 0.0, wall_ms - busy_ms), ceilings, plain)


def plain(waiting_ms: float = 0.0, loading_ms: float = 0.0, kernels: tuple[Kernel, ...] = ()) -> Plain:
    return Plain(2.0, list(kernels), [], waiting_ms, loading_ms, compiled=False)


def test_a_graph_saves_the_launch_gap(gpu: Ceilings) -> None:
    (advice,) = launch_gap(found(gpu))
    assert advice.gain_ms == pytest.approx(8.0)
    assert "launch gap 8.00 ms of 10.00 ms" in advice.evidence


@pytest.mark.parametrize(("host_ms", "low_ms"), [(None, 8.0), (8.0, 6.0), (1.0, 0.2), (12.0, 8.0)])
def test_a_graph_gains_less_where_the_host_can_be_faster(host_ms: float | None, low_ms: float, gpu: Ceilings) -> None:
    """The GPU is busy for 2 ms with 100 kernels, and needs 2 us from one kernel to the next."""
    (advice,) = launch_gap(dataclasses.replace(found(gpu), host_ms=host_ms))
    assert advice.low_ms == pytest.approx(low_ms)


def test_what_a_program_does_otherwise_while_it_is_captured_is_taken_off(gpu: Ceilings) -> None:
    (advice,) = launch_gap(dataclasses.replace(found(gpu), traced_more_ms=3.0))
    assert advice.gain_ms == pytest.approx(8.0 - 3.0)
    assert "take 3.00 ms more" in advice.evidence
    (refused,) = launch_gap(dataclasses.replace(found(gpu), traced_more_ms=None))
    assert refused.title == "Double the batch to 32"


@pytest.mark.parametrize("refuses", [False, True])
def test_a_graph_with_an_optimizer_says_what_that_needs(refuses: bool, gpu: Ceilings) -> None:
    (advice,) = launch_gap(dataclasses.replace(found(gpu), refuses_capture=refuses))
    assert ("capturable=True" in advice.evidence) is refuses


WAITED_FOR = operator("_local_scalar_dense", "train.py:12")
"""Reasons why a graph cannot contain the step."""


@pytest.mark.parametrize(("busy_ms", "gain_ms"), [(2.0, 5.0), (5.0, 5.0), (8.0, 2.0)])
def test_a_larger_batch_hides_the_host_behind_the_gpu(busy_ms: float, gain_ms: float, gpu: Ceilings) -> None:
    """A doubled batch takes the host's time of one step or the GPU's time of two steps, whichever is longer."""
    (advice,) = launch_gap(found(gpu, WAITED_FOR, busy_ms=busy_ms))
    assert advice.gain_ms == pytest.approx(gain_ms)
    assert advice.title == "Double the batch to 32"


def test_a_larger_batch_of_nothing(gpu: Ceilings) -> None:
    assert launch_gap(found(gpu, WAITED_FOR, samples=None)) == launch_gap(found(gpu, WAITED_FOR, samples=0)) == []


def test_a_list_of_samples_costs_the_host_more_for_more_of_them(gpu: Ceilings) -> None:
    assert launch_gap(dataclasses.replace(found(gpu, WAITED_FOR), batched=False)) == []
    (graph,) = launch_gap(dataclasses.replace(found(gpu), batched=False))
    assert "a batch of" not in graph.evidence


def test_one_gap_has_one_item(gpu: Ceilings) -> None:
    (graph,) = launch_gap(found(gpu, busy_ms=2.0))
    assert graph.title == "Replay the step from a CUDA graph"
    assert "a batch of 32 would hide part of this gap" in graph.evidence
    (busy,) = launch_gap(found(gpu, busy_ms=9.5))
    assert "batch" not in busy.evidence


@pytest.mark.parametrize("busy_ms", [9.0, 9.5, 10.0])
def test_a_busy_gpu_hears_nothing_of_a_larger_batch(busy_ms: float, gpu: Ceilings) -> None:
    assert launch_gap(found(gpu, WAITED_FOR, busy_ms=busy_ms)) == []


def test_waits_are_named_with_their_lines_and_counts(gpu: Ceilings) -> None:
    item = operator("_local_scalar_dense", "train.py:12")
    step = found(
        gpu,
        *[item] * 3,
        operator("_to_copy", "train.py:14", PAGEABLE_OUT),
        operator("copy_", "train.py:15", PAGEABLE_OUT),
        operator("nonzero", "model.py:7"),
        operator("relu"),
        plain=plain(waiting_ms=3.0),
    )
    (advice,) = host_synchronizations(step)
    assert advice.gain_ms == pytest.approx(3.0)
    assert "3.00 ms" in advice.evidence
    assert ".item() at train.py:12 (3 times)" in advice.evidence
    for place in ("_to_copy at train.py:14", "copy_ at train.py:15", "nonzero at model.py:7"):
        assert place in advice.evidence
    assert "relu" not in advice.evidence


def test_copies_that_nobody_waits_for_are_not_named(gpu: Ceilings) -> None:
    step = found(
        gpu,
        operator("_to_copy", "train.py:3", PINNED_IN),
        operator("copy_", "train.py:4", PINNED_IN),
        operator("copy_", "", PAGEABLE_OUT),  # in the backward pass: no line of the program is running
        operator("_local_scalar_dense", "train.py:12"),
        plain=plain(waiting_ms=3.0),
    )
    (advice,) = host_synchronizations(step)
    assert advice.evidence.endswith("waited for it: .item() at train.py:12")


def test_a_wait_gains_no_more_than_the_gpu_stands_still(gpu: Ceilings) -> None:
    (advice,) = host_synchronizations(found(gpu, busy_ms=9.0, plain=plain(waiting_ms=3.0)))
    assert advice.gain_ms == pytest.approx(1.0)


def test_pinned_memory_copies_at_its_own_rate(gpu: Ceilings) -> None:
    kernels = (copy(PAGEABLE_IN, 4.0), copy(PAGEABLE_OUT, 2.0), copy(PINNED_IN, 1.0), copy("gemm", 1.0))
    step = found(
        gpu,
        operator("_to_copy", "train.py:3", PAGEABLE_IN),
        operator("_to_copy", "train.py:9", PINNED_IN),
        plain=plain(kernels=kernels),
    )
    (advice,) = unpinned_transfers(step)
    assert advice.gain_ms == pytest.approx(4.0 * 3 / 4 + 2.0 / 2)
    assert advice.evidence.startswith("2 transfers between the GPU and host memory that is not pinned: 6.00 ms")
    assert "(train.py:3)" in advice.evidence


@pytest.mark.parametrize("rates", [{}, {"host_to_device_pageable": 2e9, "host_to_device_pinned": 1e9}])
def test_pinning_gains_nothing_where_it_is_not_known_to_be_faster(rates: dict[str, float], gpu: Ceilings) -> None:
    step = found(dataclasses.replace(gpu, transfers=rates), plain=plain(kernels=(copy(PAGEABLE_IN, 4.0),)))
    assert [item.gain_ms for item in unpinned_transfers(step)] == [0.0]


def test_data_that_is_loaded_beside_the_step(gpu: Ceilings, ceilings: Ceilings) -> None:
    (advice,) = data_loading(found(gpu, plain=plain(loading_ms=3.0)))
    assert advice.gain_ms == pytest.approx(3.0)
    assert "3.00 ms of 10.00 ms" in advice.evidence
    (advice,) = data_loading(found(ceilings, busy_ms=10.0, plain=plain(loading_ms=3.0)))
    assert advice.gain_ms == pytest.approx(3.0)  # on a CPU, loading consists of operators too


def test_data_that_is_ready_before_the_gpu_is_gains_nothing(gpu: Ceilings) -> None:
    (advice,) = data_loading(found(gpu, busy_ms=10.0, plain=plain(loading_ms=3.0)))
    assert advice.gain_ms == 0


def test_a_step_that_keeps_the_gpu_busy_hears_nothing_about_its_host(gpu: Ceilings) -> None:
    step = found(gpu, operator("relu"), busy_ms=10.0, plain=plain())
    assert [item.title for rule in HOST_RULES for item in rule(step) if item.gain_ms > 0] == []


def test_what_was_not_run_hears_nothing_about_waits_copies_and_data(gpu: Ceilings, ceilings: Ceilings) -> None:
    assert [rule(found(gpu)) for rule in (host_synchronizations, unpinned_transfers, data_loading)] == [[], [], []]
    assert [item for rule in HOST_RULES for item in rule(found(ceilings))] == []


def test_memory_that_is_taken_again_in_each_step_is_advice(ceilings: Ceilings) -> None:
    on_two = dataclasses.replace(ceilings, threads=2)
    steady = dataclasses.replace(found(on_two), faults=PageFaults(6000.0, 4.0))
    (advice,) = freed_memory(steady)
    assert advice.gain_ms == pytest.approx(3.0)
    assert advice.low_ms == pytest.approx(2.0)
    assert "takes 6,000 pages of memory from the system again; the system needs 4.00 ms for them" in advice.evidence
    assert freed_memory(dataclasses.replace(steady, faults=PageFaults(100.0, 4.0))) == []  # the system did other work
    assert freed_memory(found(on_two)) == []
