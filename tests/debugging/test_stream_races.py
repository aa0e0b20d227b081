"""A race between streams is reported with both lines. A stream that waits, or uses other bytes, is not reported."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop.debugging.stream_races import StreamRace, StreamRaceError, _Launches, _Watcher, check_streams
from rooftop.hardware.source_lines import SourceLine

A, B = 0, 7
"""Streams."""


class Kept(TorchDispatchMode):
    """Keep all results, because the watcher is not told when the CPU's memory is freed and reused."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.results.append(func(*args, **(kwargs or {})))
        return self.results[-1]


class Machine:
    """CPU operators on pretended streams."""

    def __init__(self) -> None:
        self.kept = Kept()
        self.races: list[StreamRace] = []
        self.watcher = _Watcher(self.races)
        self.stream = A

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        before, self.stream = self.stream, stream
        with self.kept, _Launches(self.watcher, "cpu", lambda: self.stream):
            yield
        self.stream = before

    def waits(self, stream: int, other: int) -> None:
        self.watcher.hear("event_creation", 99)
        self.watcher.hear("event_record", 99, other)
        self.watcher.hear("event_wait", 99, stream)
        self.watcher.hear("event_deletion", 99)

    def free(self, tensor: Tensor) -> None:
        self.watcher.hear("memory_deallocation", tensor.untyped_storage().data_ptr())

    def allocate(self, tensor: Tensor) -> None:
        self.watcher.hear("memory_allocation", tensor.untyped_storage().data_ptr())


def here() -> SourceLine:
    """The line of the caller."""
    frame = inspect.stack()[1]
    return SourceLine(frame.filename, frame.lineno)


def test_a_read_that_does_not_wait_is_named_with_both_lines() -> None:
    machine = Machine()
    with machine.on(A):
        x, first = torch.empty(10, 20).normal_(), here()
    with machine.on(B):
        _, second = x[1:].sum(), here()
    (race,) = machine.races
    assert (race.first.operator, race.first.action, race.first.stream) == ("aten::normal_", "writes", A)
    assert (race.second.operator, race.second.action, race.second.stream) == ("aten::sum", "reads", B)
    assert (race.first.line, race.second.line) == (first, second)
    assert (race.first.shape, race.second.shape) == ((10, 20), (9, 20))
    assert not race.reused
    assert f"on the default stream at {first}" in race.message
    assert "wait_stream" in race.message


@pytest.mark.parametrize(
    "wait",
    [
        lambda machine: machine.waits(B, A),
        lambda machine: machine.watcher.hear("device_synchronization"),
        lambda machine: machine.watcher.hear("stream_synchronization", A),
    ],
)
def test_a_read_that_waits_is_no_race(wait: Callable[[Machine], None]) -> None:
    machine = Machine()
    with machine.on(A):
        x = torch.empty(10).normal_()
    wait(machine)
    with machine.on(B):
        x.sum()
    assert machine.races == []


def test_waiting_for_what_came_before_the_write_does_not_help() -> None:
    machine = Machine()
    with machine.on(A):
        x = torch.zeros(10)
    machine.waits(B, A)
    with machine.on(A):
        x.add_(1)
    with machine.on(B):
        x.sum()
    assert [race.first.operator for race in machine.races] == ["aten::add_"]


def test_a_write_while_another_stream_reads_is_a_race() -> None:
    machine = Machine()
    x = torch.zeros(10)
    with machine.on(B):
        x.sum()
    with machine.on(A):
        torch._foreach_add_([torch.ones(3), x], 1)
    (race,) = machine.races
    assert (race.first.action, race.second.action) == ("reads", "writes")


def test_other_halves_of_one_storage_are_no_race() -> None:
    machine = Machine()
    x = torch.zeros(10)
    with machine.on(A):
        x[:5].fill_(1)
    with machine.on(B):
        x[5:].fill_(1)
    assert machine.races == []
    with machine.on(A):
        x[4:6].fill_(1)
    assert len(machine.races) == 1


def test_shapes_may_be_taken_and_views_made_without_waiting() -> None:
    machine = Machine()
    with machine.on(A):
        x = torch.zeros(4, 5)
    with machine.on(B):
        y = torch.zeros_like(x.t())
        x.new_empty(3)
    assert machine.races == []
    with machine.on(A):
        y.sum()  # zeros_like wrote it
    assert len(machine.races) == 1


def test_all_outputs_of_an_operator_are_written() -> None:
    machine = Machine()
    x = torch.rand(4, 5)
    with machine.on(A):
        _, indices = x.max(dim=1)
    with machine.on(B):
        indices.sum()
    assert len(machine.races) == 1


def test_a_loop_reports_its_race_once() -> None:
    machine = Machine()
    x = torch.zeros(10)
    for _ in range(3):
        with machine.on(A):
            x.fill_(1)
        with machine.on(B):
            x.sum()
    assert sorted((race.first.action, race.second.action) for race in machine.races) == [
        ("reads", "writes"),
        ("writes", "reads"),
    ]


def reuse(machine: Machine, before_free: Callable[[Tensor], object] = lambda x: None) -> None:
    """x, read by B, is freed, and its memory is given to a new tensor that A writes."""
    x = torch.zeros(10)
    machine.allocate(x)
    with machine.on(A):
        x.zero_()
    machine.waits(B, A)
    with machine.on(B):
        x.sum()
    before_free(x)
    machine.free(x)
    machine.allocate(x)
    with machine.on(A):
        x.fill_(1)


def test_memory_that_is_reused_while_another_stream_reads_is_a_race() -> None:
    machine = Machine()
    reuse(machine)
    (race,) = machine.races
    assert race.reused
    assert (race.first.operator, race.second.operator) == ("aten::sum", "aten::fill_")
    assert "record_stream" in race.message


def test_memory_that_the_allocator_keeps_or_that_is_waited_for_may_be_reused() -> None:
    machine = Machine()
    reuse(machine, lambda x: machine.watcher.record_stream(x.untyped_storage().data_ptr(), B))
    reuse(machine, lambda x: machine.waits(A, B))
    assert machine.races == []


def test_the_error_tells_all_races() -> None:
    machine = Machine()
    reuse(machine)
    error = StreamRaceError(machine.races)
    assert error.races == tuple(machine.races)
    assert str(error) == machine.races[0].message


def test_torchs_own_sanitizer_does_not_listen_afterwards(forked: Callable[[str], tuple[int, str, str]]) -> None:
    code = (
        "import torch; from torch.cuda import _gpu_trace as trace; from rooftop.debugging import stream_races as ours\n"
        "ours._listen(); ours._listen()\n"
        "assert trace.MemoryAllocationCallbacks.callback_list[0].func is ours._heard\n"
        "assert [len(r.callback_list) for n, r in vars(trace).items() if n.endswith('Callbacks')] == [1] * 10\n"
        "trace.MemoryAllocationCallbacks.fire_callbacks(1)"
    )
    assert forked(code) == (0, "", "")


def test_without_cuda_nothing_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with check_streams() as check:
        torch.ones(3).sum()
    assert check.races == []


SIZE = 1 << 23  # 32 MiB, large enough for a separate segment of the allocator


def wrong() -> tuple[SourceLine, SourceLine]:
    """The classic mistake; returns its two lines."""
    x, first = torch.empty(SIZE, device="cuda").normal_(), here()
    with torch.cuda.stream(torch.cuda.Stream()):
        _, second = x.sum(), here()
    torch.cuda.synchronize()
    return first, second


@pytest.mark.gpu
def test_on_a_gpu_a_missing_wait_is_found() -> None:
    with check_streams(raises=False) as check:
        first, second = wrong()
    (race,) = check.races
    assert (race.first.operator, race.second.operator) == ("aten::normal_", "aten::sum")
    assert (race.first.line, race.second.line) == (first, second)
    assert race.second.shape == (SIZE,)
    assert race.first.stream == 0 != race.second.stream


@pytest.mark.gpu
def test_on_a_gpu_a_second_check_works_and_the_first_has_ended() -> None:
    with check_streams(raises=False) as earlier:
        pass
    with pytest.raises(StreamRaceError, match="aten::sum reads"), check_streams():
        wrong()
    wrong()  # outside, where nothing is watched
    assert earlier.races == []
    with pytest.raises(ZeroDivisionError), check_streams():  # noqa: PT012 - its own exception goes before
        wrong()
        _ = 1 / 0


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["wait_stream", "wait_event", "synchronize", "item"])
def test_on_a_gpu_streams_that_wait_are_right(how: str) -> None:
    with check_streams():
        x = torch.empty(SIZE, device="cuda").normal_()
        side = torch.cuda.Stream()
        if how == "wait_stream":
            side.wait_stream(torch.cuda.current_stream())
        elif how == "wait_event":
            side.wait_event(torch.cuda.current_stream().record_event())
        elif how == "synchronize":
            torch.cuda.synchronize()
        else:
            x[0].item()
        with torch.cuda.stream(side):
            x.sum()
        torch.cuda.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("record", [False, True])
def test_on_a_gpu_memory_that_is_reused_too_early_is_found(record: bool) -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    with check_streams(raises=False) as check:
        x = torch.zeros(SIZE, device="cuda")
        address = x.data_ptr()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)  # cycles: about 50 ms, in which the allocator must not reuse it
            x.sum()
        if record:
            x.record_stream(side)
        del x
        y = torch.ones(SIZE, device="cuda")
    torch.cuda.synchronize()
    assert (y.data_ptr() == address) is not record
    assert [race.reused for race in check.races] == ([] if record else [True])
