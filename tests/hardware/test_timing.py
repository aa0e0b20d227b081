"""The timing policy: medians, spreads, interleaving and rotation."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from rooftop.hardware import timing
from rooftop.hardware.graphs import collection_paused, waits_for_gpu
from rooftop.hardware.timing import (
    LEAST_SAMPLES,
    balanced_orders,
    compare,
    compare_slow,
    measure,
    rotated,
    rotated_copies,
)


class Clock:
    """A stand-in for `time`, in which only calls take time."""

    def __init__(self) -> None:
        self.now, self.calls = 0.0, 0

    def perf_counter(self) -> float:
        return self.now

    def perf_counter_ns(self) -> int:
        return round(1e9 * self.now)

    def takes(self, *seconds: float) -> Callable[[], None]:
        """A function whose calls take these times, in turn."""
        durations = itertools.cycle(seconds)

        def call() -> None:
            self.calls += 1
            self.now += next(durations)

        return call


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(timing, "time", clock)
    return clock


def test_events_are_recorded_on_the_device_of_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if another GPU is current: an event of that GPU would not wait for the calls."""
    current, recorded = [torch.device("cuda", 0)], set[torch.device]()

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append(which)
        yield
        current.pop()

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...
        def record(self) -> None:
            recorded.add(current[-1])

        def synchronize(self) -> None: ...
        def elapsed_time(self, end: object) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: recorded.add(current[-1]))
    measure(lambda: None, device="cuda:1", seconds=0.0, warm_up_seconds=0.0)
    assert recorded == {torch.device("cuda", 1)}


def test_the_median_is_the_time_of_one_call(clock: Clock) -> None:
    found = measure(clock.takes(0.002, 0.002, 0.002, 0.008), device="cpu", seconds=0.05, warm_up_seconds=0.01)
    assert (found.best_ms, found.median_ms) == (pytest.approx(2.0), pytest.approx(2.0))
    assert found.samples >= LEAST_SAMPLES
    assert found.spread >= 0


def test_the_time_of_a_call_is_that_of_the_machines_clock() -> None:
    found = measure(lambda: time.sleep(0.002), device="cpu", seconds=0.05, warm_up_seconds=0.01)
    assert 2.0 <= found.best_ms <= found.median_ms
    assert found.samples >= LEAST_SAMPLES


def test_short_calls_are_timed_many_at_a_time(clock: Clock) -> None:
    found = measure(clock.takes(1e-6), device="cpu", seconds=0.02, warm_up_seconds=0.01)
    assert clock.calls > 100 * found.samples
    assert found.median_ms == pytest.approx(1e-3)


def test_variants_are_interleaved() -> None:
    order: list[str] = []
    variants = {name: lambda name=name: (order.append(name), time.sleep(0.002)) for name in "ab"}
    timings = compare(variants, device="cpu", seconds=0.1, warm_up_seconds=0.0)
    assert timings.keys() == {"a", "b"}
    changes = sum(left != right for left, right in itertools.pairwise(order))
    assert changes >= 8  # at least five rounds of both calls


def test_rotation_passes_each_set_in_turn() -> None:
    seen: list[float] = []
    sets = [[torch.tensor(float(i))] for i in range(3)]
    call = rotated(lambda t: seen.append(t.item()), sets)
    for _ in range(5):
        call()
    assert seen == [0, 1, 2, 0, 1]


def test_copies_together_exceed_the_cache_twice() -> None:
    x = torch.randn(1000, requires_grad=True)  # 4,000 bytes
    copies = rotated_copies([x], cache_bytes=10_000)
    assert copies[0][0] is x
    assert sum(4 * t.numel() for (t,) in copies) >= 20_000
    assert all(torch.equal(t, x) and t.requires_grad for (t,) in copies)
    assert len({t.data_ptr() for (t,) in copies}) == len(copies)


def test_a_graph_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="needs a CUDA device, got cpu"):
        measure(lambda: None, device="cpu", graph=True)


@pytest.mark.gpu
@pytest.mark.alone
def test_a_replayed_launch_is_cheaper_than_an_eager_one() -> None:
    x = torch.zeros(1, device="cuda")
    eager = measure(lambda: x.add_(1), device="cuda")
    replayed = measure(lambda: x.add_(1), device="cuda", graph=True)
    assert replayed.median_ms < eager.median_ms


def test_rounds_take_the_variants_in_balanced_orders() -> None:
    calls: list[str] = []
    compare({name: partial(calls.append, name) for name in "abc"}, device="cpu", seconds=0.01, warm_up_seconds=0.001)
    runs = [name for name, _ in itertools.groupby(calls)]  # a sample consists of many calls of one function
    followers = set(itertools.pairwise(runs))
    assert {("a", "b"), ("b", "a"), ("a", "c"), ("c", "a"), ("b", "c"), ("c", "b")} <= followers


def test_what_is_slow_is_called_once_a_sample() -> None:
    calls: list[str] = []

    def slow(name: str) -> None:
        calls.append(name)
        time.sleep(0.02)

    found = compare_slow({name: partial(slow, name) for name in "ab"}, samples=3)
    assert Counter(calls) == {"a": 3, "b": 3}
    assert calls[:2] != calls[2:4]
    assert all(each.samples == 3 and each.best_ms >= 20 for each in found.values())
    assert compare_slow({}) == {}


@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 8, 11])
def test_each_follows_each_other_one_equally_often(count: int) -> None:
    orders = balanced_orders(count)
    assert all(sorted(order) == list(range(count)) for order in orders)
    followers = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert set(followers) == {(i, j) for i in range(count) for j in range(count) if i != j}
    assert len(set(followers.values())) <= 1


def test_the_garbage_collector_rests_and_goes_on() -> None:
    with collection_paused():
        assert not gc.isenabled()
        with collection_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.gpu
def test_a_call_that_waits_for_the_gpu_is_known() -> None:
    x = torch.ones(3, device="cuda")
    assert waits_for_gpu(lambda: x.sum().item())
    assert not waits_for_gpu(lambda: x.sum())
    assert torch.cuda.get_sync_debug_mode() == 0
