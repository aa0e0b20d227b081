"""Kernels find the operator that launched them, by either correlation id, and device time is counted once."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.analysis.kernel_join import Kernel, busy_ms, device_kernels, kernels_by_label


@dataclass
class Event:
    """One event with the interface of the profiler's."""

    label: str
    start: int
    duration: int
    device: str = "CPU"
    correlation: int = 0
    linked: int = 0
    thread: int = 1
    kind: str = "cpu_op"
    annotation: bool = False

    def name(self) -> str:
        return self.label

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.device)

    def correlation_id(self) -> int:
        return self.correlation

    def linked_correlation_id(self) -> int:
        return self.linked

    def start_thread_id(self) -> int:
        return self.thread

    def is_user_annotation(self) -> bool:
        return self.annotation

    def activity_type(self) -> str:
        return self.kind


def kernel(name: str, start: int, duration: int, **ids: int) -> Event:
    return Event(name, start, duration, device="CUDA", kind="kernel", **ids)


def test_kernel_joins_the_label_around_the_operator_that_it_is_linked_to() -> None:
    events = [
        Event("op 0", 0, 100, correlation=1),
        Event("aten::conv", 10, 80, correlation=2),
        Event("op 1", 200, 100, correlation=3),
        Event("aten::relu", 210, 80, correlation=4),
        kernel("conv_kernel", 1000, 500, linked=2),
        kernel("relu_kernel", 1500, 50, linked=4),
        kernel("relu_again", 1550, 50, linked=4),
    ]
    joined, orphans = kernels_by_label(events, "op ")
    assert [k.name for k in joined[0]] == ["conv_kernel"]
    assert [k.name for k in joined[1]] == ["relu_kernel", "relu_again"]
    assert orphans == []


def test_labels_on_two_threads_do_not_mix() -> None:
    """The backward pass runs on another thread, sometimes while the calling thread waits inside a label."""
    events = [
        Event("op 0", 0, 1000, correlation=1, thread=1),
        Event("op 1", 100, 50, correlation=2, thread=2),
        Event("aten::mm", 110, 20, correlation=3, thread=2),
        Event("aten::add", 120, 20, correlation=4, thread=1),
        kernel("mm_kernel", 2000, 10, linked=3),
        kernel("add_kernel", 2010, 10, linked=4),
    ]
    joined, _ = kernels_by_label(events, "op ")
    assert {number: [k.name for k in kernels] for number, kernels in joined.items()} == {
        0: ["add_kernel"],
        1: ["mm_kernel"],
    }


def test_kernel_without_link_joins_through_its_launch() -> None:
    events = [
        Event("op 7", 0, 100, correlation=1),
        Event("cudaLaunchKernel", 50, 5, correlation=900, thread=77),
        kernel("k", 1000, 10, correlation=900),
    ]
    joined, orphans = kernels_by_label(events, "op ")
    assert [k.name for k in joined[7]] == ["k"]
    assert orphans == []


def test_kernel_launched_outside_any_label_is_an_orphan_not_dropped() -> None:
    events = [
        Event("op 0", 0, 100, correlation=1),
        Event("cudaLaunchKernel", 150, 5, correlation=900),
        kernel("k", 1000, 10, correlation=900),
    ]
    joined, orphans = kernels_by_label(events, "op ")
    assert not joined
    assert [k.name for k in orphans] == ["k"]


def test_spans_of_labels_and_waits_on_the_device_are_not_work() -> None:
    events = [
        kernel("k", 0, 10),
        Event("op 0", 0, 500, device="CUDA", kind="gpu_user_annotation", annotation=True),
        Event("Stream Wait Event", 0, 500, device="CUDA", kind="cuda_sync"),
    ]
    assert [k.name for k in device_kernels(events)] == ["k"]


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=12))
def test_busy_time_is_the_length_of_the_union(spans: list[tuple[int, int]]) -> None:
    kernels = [Kernel("k", start, start + length, 0, 0) for start, length in spans]
    covered = {tick for start, length in spans for tick in range(start, start + length)}
    assert busy_ms(kernels) == pytest.approx(len(covered) / 1e6)
