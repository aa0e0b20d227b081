"""Break-even sizes of made-up times are right, and each variant runs and times what it claims."""

from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import layer_norm

from rooftop.errors import MeasurementError
from rooftop.hardware import crossovers
from rooftop.hardware.crossovers import (
    DTYPES,
    OPERATIONS,
    BreakEven,
    Crossover,
    CrossoverPoint,
    find_break_even,
    measure_crossover,
)
from rooftop.hardware.timing import Timing

POSITIVE = st.floats(1e-3, 1e3)
RISING = st.lists(st.integers(1, 10**8), min_size=1, max_size=10, unique=True).map(sorted)
TIMES = RISING.flatmap(lambda sizes: st.tuples(*(st.tuples(st.just(size), POSITIVE, POSITIVE) for size in sizes)))


@given(st.floats(1.5, 9e5), st.floats(0.2, 3.0), st.floats(0.1, 3.0), POSITIVE)
def test_power_laws_break_even_exactly_where_they_cross(
    crossing: float, power: float, steeper: float, at_ms: float
) -> None:
    sizes = [4**k for k in range(11)]  # 1 to 1,048,576
    times = [
        (n, at_ms * (n / crossing) ** (power + steeper), at_ms * (n / crossing) ** power)
        for n in sizes
        if not math.isclose(n, crossing, rel_tol=1e-6)
    ]
    found = find_break_even(times)
    assert found.verdict == "from"
    assert found.size == pytest.approx(crossing, rel=1e-6)


@given(TIMES)
def test_the_verdict_says_what_was_measured(times: tuple[tuple[int, float, float], ...]) -> None:
    found = find_break_even(times)
    faster = [gpu_ms < cpu_ms for _, cpu_ms, gpu_ms in times]
    assert (found.verdict == "always") == all(faster)
    assert (found.verdict == "never") == (not any(faster))
    assert (found.verdict == "mixed") == (any(faster) and not faster[-1])
    assert (found.size is not None) == (found.verdict == "from")
    if found.size is not None:
        last_slower = max(size for size, cpu_ms, gpu_ms in times if gpu_ms >= cpu_ms)
        first_faster = min(size for size, *_ in times if size > last_slower)
        assert last_slower * (1 - 1e-9) <= found.size <= first_faster * (1 + 1e-9)


@given(TIMES, st.floats(1.0, 100.0))
def test_a_slower_gpu_breaks_even_no_earlier(times: tuple[tuple[int, float, float], ...], slower: float) -> None:
    def rank(found: BreakEven) -> float:
        return {"always": 0.0, "never": math.inf, "mixed": math.inf}.get(found.verdict, found.size or 0.0)

    slowed = [(size, cpu_ms, slower * gpu_ms) for size, cpu_ms, gpu_ms in times]
    assert rank(find_break_even(slowed)) >= rank(find_break_even(times)) * (1 - 1e-9)


def test_between_two_sizes_the_interpolation_is_logarithmic() -> None:
    assert find_break_even([(100, 1.0, 2.0), (10_000, 2.0, 1.0)]) == BreakEven("from", pytest.approx(1000))
    assert find_break_even([(100, 1.0, 4.0), (1600, 2.0, 1.0)]) == BreakEven("from", pytest.approx(100 * 16 ** (2 / 3)))


def test_times_that_cross_more_than_once_count_from_the_last() -> None:
    assert find_break_even([(1, 2, 1), (10, 1, 2), (1000, 2, 1)]) == BreakEven("from", pytest.approx(100))
    assert find_break_even([(1, 1, 2), (10, 2, 1), (1000, 1, 2)]) == BreakEven("mixed")


def test_equally_fast_is_not_faster() -> None:
    assert find_break_even([(1, 1.0, 1.0)]) == BreakEven("never")
    assert find_break_even([(1, 1.0, 1.0), (10, 2.0, 1.0)]) == BreakEven("from", pytest.approx(1))


def test_each_property_compares_its_own_times_and_the_json_holds_them() -> None:
    def timing(ms: float, spread: float = 0.01) -> Timing:
        return Timing(ms, ms, spread, 5)

    points = (
        CrossoverPoint(100, timing(1), timing(2), timing(9)),
        CrossoverPoint(10_000, timing(2), timing(1), timing(9, spread=0.2)),
    )
    crossover = Crossover("add", "float32", "elements", "a CPU", 2, "a GPU", {"torch": "2"}, "2026-01-01", points)
    assert crossover.break_even == BreakEven("from", pytest.approx(1000))
    assert crossover.break_even_with_transfers == BreakEven("never")
    assert crossover.unsteady == (10_000,)
    plain = json.loads(json.dumps(crossover.to_dict(), allow_nan=False))
    assert plain == crossover.to_dict()
    assert plain["break_even"] == {"verdict": "from", "size": pytest.approx(1000)}
    assert plain["break_even_with_transfers"] == {"verdict": "never", "size": None}
    assert plain["points"][1]["gpu"]["median_ms"] == 1


REFERENCES = {
    "add": lambda a, b: a + b,
    "matmul": lambda a, b: torch.einsum("ik,kj->ij", a, b),
    "linear": lambda x, weight, bias: torch.einsum("nk,fk->nf", x, weight) + bias,
    "layer_norm": lambda x, weight, bias: layer_norm(x, x.shape[1:]) * weight + bias,
}


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("place", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_with_and_without_transfers_give_the_result(operation: str, place: str) -> None:
    op, device = OPERATIONS[operation], torch.device(place)
    inputs, parameters = ([torch.randn(s, dtype=torch.float64) for s in f(3)] for f in (op.inputs, op.parameters))
    expected = REFERENCES[operation](*inputs, *parameters)
    resident = crossovers._resident(op, inputs, parameters, device)()
    assert resident.device.type == place
    torch.testing.assert_close(resident.cpu(), expected)
    call = crossovers._transferred(op, inputs, parameters, device)
    for result in (call(), call()):
        assert result.device.type == "cpu"
        torch.testing.assert_close(result, expected)


def test_transfers_fetch_the_inputs_each_time_but_not_the_parameters() -> None:
    op = OPERATIONS["linear"]
    inputs, parameters = ([torch.ones(s) for s in f(1)] for f in (op.inputs, op.parameters))
    moved: list[torch.Tensor] = []

    def seen(*operands: torch.Tensor) -> torch.Tensor:
        moved.extend(operands)
        return op.call(*operands)

    watched = crossovers.Operation(op.unit, op.sizes, op.inputs, op.parameters, seen)
    call = crossovers._transferred(watched, inputs, parameters, torch.device("cpu"))
    moved.clear()
    call(), call()
    x1, weight1, _, x2, weight2, _ = moved
    assert len({t.data_ptr() for t in (*inputs, x1, x2)}) == 3  # two copies
    assert weight1.data_ptr() == weight2.data_ptr()


def test_sizes_are_measured_rising_and_once_each_in_the_dtype_named() -> None:
    seen: list[tuple[str, float]] = []
    crossover = measure_crossover(
        "add",
        [4096, 16, 4096],
        dtype=torch.bfloat16,
        device="cpu",
        progress=lambda what, fraction: seen.append((what, fraction)),
        seconds=0.01,
    )
    assert [point.size for point in crossover.points] == [16, 4096]
    assert (crossover.operation, crossover.dtype, crossover.unit) == ("add", "bfloat16", "elements")
    assert seen == [("add, 16 elements", 0.0), ("add, 4,096 elements", 0.5), ("done", 1.0)]
    for point in crossover.points:  # a copy of both inputs and of the result cannot be free
        assert 0 < point.gpu.best_ms < point.gpu_with_transfers.median_ms


def test_operands_have_the_dtype_named_and_values_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []

    def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        seen.extend((a, b))
        return a + b

    add_ = OPERATIONS["add"]
    monkeypatch.setitem(
        OPERATIONS, "add", crossovers.Operation(add_.unit, add_.sizes, add_.inputs, add_.parameters, add)
    )
    before = torch.get_rng_state()
    measure_crossover("add", [64], dtype=torch.float16, device="cpu", seconds=0.001)
    assert torch.equal(torch.get_rng_state(), before)
    assert {t.dtype for t in seen} == {torch.float16}
    assert not torch.equal(seen[0], seen[1])


def test_default_sizes_end_where_the_cpu_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossovers, "LONG_MS", 0.0)
    assert [p.size for p in measure_crossover("matmul", device="cpu", seconds=0.001).points] == [16]
    named = measure_crossover("matmul", [2, 4], device="cpu", seconds=0.001)
    assert [point.size for point in named.points] == [2, 4]


def test_default_sizes_rise() -> None:
    for operation in OPERATIONS.values():
        assert list(operation.sizes) == sorted(set(operation.sizes))
        assert operation.sizes[0] >= 1


def test_what_cannot_be_measured_is_said() -> None:
    with pytest.raises(ValueError, match="no operation 'softmax': expected one of add, matmul, linear, layer_norm"):
        measure_crossover("softmax", device="cpu")
    with pytest.raises(ValueError, match="takes the dtypes float32, bfloat16, float16, float64, got int64"):
        measure_crossover("add", dtype=torch.int64, device="cpu")
    for sizes in ([], [0], [16, -1], [1.5]):
        with pytest.raises(ValueError, match="positive integers"):
            measure_crossover("add", sizes, device="cpu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got meta"):
        measure_crossover("add", device="meta")


def test_without_a_gpu_one_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasurementError, match="needs an NVIDIA GPU"):
        measure_crossover("add")


def test_too_little_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> CrossoverPoint:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(crossovers, "_point", full)
    with pytest.raises(MeasurementError, match="add of 1,024 elements does not fit"):
        measure_crossover("add", [1024], device="cpu")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_wins_large_products_and_loses_tiny_transferred_ones(dtype: torch.dtype) -> None:
    crossover = measure_crossover("matmul", [8, 2048], dtype=dtype, seconds=0.05)
    tiny, large = crossover.points
    assert large.gpu.median_ms < large.gpu_with_transfers.median_ms < large.cpu.median_ms
    assert tiny.cpu.median_ms < tiny.gpu_with_transfers.median_ms
    found = crossover.break_even_with_transfers
    assert found.verdict == "from"
    assert 8 < (found.size or 0) < 2048
    size, gpu_ms = 2048 * 2048 * dtype.itemsize, large.gpu_with_transfers.median_ms - large.gpu.median_ms
    # bytes/ms: no link to a host carries 1 TB/s, so this shows that the time includes the copies
    assert 3 * size / gpu_ms < 1e9
    with pytest.raises(ValueError, match="does not exist: torch can use"):
        measure_crossover("add", device=f"cuda:{torch.cuda.device_count()}")
