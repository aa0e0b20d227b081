"""The profiler's kernels are assigned to calls by the markers between which they ran."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from rooftop.errors import MeasurementError
from rooftop.hardware import kernel_times as kernel_times_module
from rooftop.hardware.kernel_times import MARKER, Variant, joined, kernel_times


@dataclass
class Event:
    """The fields of the profiler's result that are read."""

    called: str
    start: int
    duration: int = 1000
    where: str = "CUDA"
    annotation: bool = False
    kind: str = field(default="kernel")

    def name(self) -> str:
        return self.called

    def start_ns(self) -> int:
        return self.start

    def duration_ns(self) -> int:
        return self.duration

    def device_type(self) -> SimpleNamespace:
        return SimpleNamespace(name=self.where)

    def is_user_annotation(self) -> bool:
        return self.annotation

    def activity_type(self) -> str:
        return self.kind


def stream(*names: str) -> list[Event]:
    """Kernels in order; a kernel named "split 3000" lasts that many ns."""
    events = []
    for i, each in enumerate(names):
        name, _, duration = each.partition(" ")
        events.append(Event(name, 10_000 * i, int(duration or 1000)))
    return events


M = MARKER


def test_kernels_between_markers_are_those_of_the_call_and_preparations_are_not() -> None:
    events = stream("prepare 9000", M, "gemm 2000", "reduce 500", M, "prepare 9000", M, "gemm 1800", "reduce 400", M)
    assert joined(events, [2]) == [[(0.002, 0.0005), (0.0018, 0.0004)]]


def test_calls_go_to_their_variants_in_order_whatever_the_order_of_the_events() -> None:
    events = stream(M, "a 100", M, M, "b 200", M, M, "b 300", M)
    assert joined(events[::-1], [1, 2]) == [[(0.0001,)], [(0.0002,), (0.0003,)]]


def test_only_work_of_the_device_counts() -> None:
    events = [
        *stream(M, "copy 700", M),
        Event("cudaLaunchKernel", 5_000, where="CPU", kind="cuda_runtime"),
        Event("a label", 5_001, annotation=True),
        Event("Context Sync", 11_000, kind="cuda_sync"),
    ]
    events[1].kind = "gpu_memcpy"
    assert joined(events, [1]) == [[(0.0007,)]]


@pytest.mark.parametrize(
    "names",
    [
        (M, "a", M),  # the second call is lost
        (M, "a", M, M, M),  # the second call's kernel is lost
        (M, "a", M, M, "b"),  # the second call's last marker is lost
        (),
    ],
)
def test_lost_records_are_an_error_and_never_a_figure(names: tuple[str, ...]) -> None:
    with pytest.raises(MeasurementError, match=r"the profiler recorded \d of 2 calls.*rooftop doctor"):
        joined(stream(*names), [1, 1])


def test_calls_and_markers_run_on_the_gpu_that_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    second, current, ran = torch.device("cuda", 1), [torch.device("cuda", 0)], list[tuple[str, torch.device]]()

    @contextmanager
    def on(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def runs(what: str) -> Callable[..., None]:
        return lambda *args: ran.append((what, current[-1]))

    names = SimpleNamespace(events=stream(M, "a", M))
    monkeypatch.setattr(torch.cuda, "device", on)
    monkeypatch.setattr(torch.cuda, "synchronize", runs("wait"))
    monkeypatch.setattr(kernel_times_module, "Trace", lambda device, host: nullcontext(names))
    monkeypatch.setitem(sys.modules, "rooftop.hardware.bandwidth_kernels", SimpleNamespace(marker=runs(M)))
    assert kernel_times([Variant(runs("a"), repeats=1)], second) == [[(0.001,)]]
    assert ran == [(what, second) for what in (M, "wait", M, "a", M)]
    assert current == [torch.device("cuda", 0)]


@pytest.mark.gpu
def test_a_copy_takes_as_long_as_its_bytes_need() -> None:
    x, y = torch.randn(1 << 26, device="cuda"), torch.empty(1 << 26, device="cuda")
    y.copy_(x)
    one, two = kernel_times(
        [Variant(lambda: y.copy_(x), repeats=5), Variant(lambda: (y.copy_(x), x.copy_(y)), repeats=3)],
        torch.device("cuda"),
    )
    assert [len(call) for call in one] == [1] * 5
    assert [len(call) for call in two] == [2] * 3
    assert min(map(sum, two)) == pytest.approx(2 * min(map(sum, one)), rel=0.1)
    assert 0.3e12 < 2 * x.nbytes / (min(map(sum, one)) / 1e3) < 20e12
