"""The probes of a GPU, run on CPU tensors: shapes, layouts, patterns, and the figure of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.errors import MeasurementError
from rooftop.hardware import gpu_bandwidth, gpu_matrices
from rooftop.hardware.figures import Samples
from rooftop.hardware.gpu_bandwidth import working_sets
from rooftop.hardware.gpu_matrices import PILOT, Product, products_to_try, sustained_rates
from rooftop.hardware.kernel_times import Kernels, Variant
from rooftop.launch import INTERPRETED

CPU = torch.device("cpu")
MIB, GIB = 1 << 20, 1 << 30


@pytest.fixture
def free_gibibytes(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The free memory of the simulated GPU."""
    free = [1.0]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free[0] * GIB), 80 * GIB))
    return free


@given(st.integers(1, 256), st.integers(1, 160))
def test_working_sets_rise_and_fit_twice_into_free_memory(l2_mebibytes: int, free_gibibytes: int) -> None:
    sizes = working_sets(l2_mebibytes * MIB, free_gibibytes * GIB)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 256 << 10
    assert sizes[-1] <= free_gibibytes * GIB // 2
    around = [s for s in sizes if l2_mebibytes * MIB // 2 <= s <= 4 * l2_mebibytes * MIB]
    assert len(around) >= 5 or l2_mebibytes < 8


def test_around_l2_no_working_set_is_a_third_larger_than_the_next_smaller_one() -> None:
    sizes = [s for s in working_sets(50 * MIB, 80 * GIB) if 25 * MIB <= s <= 200 * MIB]
    assert len(sizes) >= 12
    assert all(later <= 1.34 * earlier for earlier, later in pairwise(sizes))


@given(st.integers(1, 200))
def test_whole_waves_fill_all_processors(processors: int) -> None:
    for product in products_to_try(processors, "bf16"):
        assert min(product.m, product.n, product.k) > 0
    found = list(gpu_matrices._whole_waves(processors))
    tiles = [tile for tile in gpu_matrices.TILES for _ in gpu_matrices.WAVES]
    for (m, n), (tile_m, tile_n) in zip(found, tiles, strict=True):
        assert m % tile_m == n % tile_n == 0
        assert (m // tile_m) * (n // tile_n) % processors == 0


def test_the_shapes_that_stood_above_their_roof_are_tried() -> None:
    products = products_to_try(132, "bf16")
    assert {Product(8192, 1024, 4096, layout) for layout in ("nn", "nt", "tn")} <= set(products)
    assert any(product.bias for product in products)
    assert any(product.batch > 1 for product in products)
    assert {product.layout for product in products_to_try(132, "fp8")} == {"nt"}


@pytest.mark.parametrize(
    "product",
    [
        *(Product(48, 32, 16, layout) for layout in ("nn", "nt", "tn")),
        Product(48, 32, 16, "nt", bias=True),
        *(Product(24, 8, 16, layout, batch=3) for layout in ("nn", "nt")),
    ],
)
@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
def test_a_product_is_computed_as_it_says(
    product: Product, precision: str, free_gibibytes: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_matrices, "MOST_ELEMENTS", PILOT**2)
    operands = gpu_matrices._Operands(CPU, precision)
    assert operands.hold(product)
    allowed = torch.backends.cuda.matmul.allow_tf32
    operands.call(product)()
    assert torch.backends.cuda.matmul.allow_tf32 == allowed  # restored: these precisions turn it off
    b, m, n, k = product.batch, product.m, product.n, product.k
    left = operands._left[: b * m * k].double()
    right = operands._right[: b * k * n].double()
    left = left.view(b, k, m).transpose(1, 2) if product.layout == "tn" else left.view(b, m, k)
    right = right.view(b, n, k).transpose(1, 2) if product.layout == "nt" else right.view(b, k, n)
    expected = left @ right + (operands._right[:n].double() if product.bias else 0.0)
    found = operands._out[: b * m * n].view(b, m, n).double()
    torch.testing.assert_close(found, expected, rtol=2e-2 if precision == "bf16" else 1e-5, atol=1e-1)
    assert product.flops == 2 * b * m * n * k


def test_a_full_gpu_is_named(free_gibibytes: list[float]) -> None:
    free_gibibytes[0] = 0.01
    with pytest.raises(
        MeasurementError, match="the fp32 rate of cpu needs 128 MiB of free memory, but only 10 are free"
    ):
        gpu_matrices._Operands(CPU, "fp32")


class FakeTimes:
    """A stand-in for the profiler: it runs the calls, and reports the times from `ms` for a variant's kernels."""

    def __init__(self, ms: dict[int, float]) -> None:
        self.ms, self.sessions = ms, list[Sequence[Variant]]()

    def __call__(self, variants: Sequence[Variant], device: torch.device) -> list[list[Kernels]]:
        self.sessions.append(variants)
        for variant in variants:
            variant.prepare()
            variant.run()
        return [[(self.ms.get(i, 1.0),)] * variant.repeats for i, variant in enumerate(variants)]


def test_the_fastest_candidates_run_again_after_longer_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    times = FakeTimes({17: 0.5, 3: 0.25})
    monkeypatch.setattr(gpu_matrices, "kernel_times", times)
    candidates = [gpu_matrices._Candidate(lambda: None, 1000) for _ in range(30)]
    samples = Samples()
    best = gpu_matrices._race(samples, CPU, "bf16", candidates, 1e9)
    first, final = times.sessions
    assert len(first) == 30
    assert [variant.run for variant in final[:2]] == [candidates[3].call, candidates[17].call]
    assert min(v.pause_s for v in final) > max(v.pause_s for v in first)
    assert samples.figures == {"flops bf16": 1000 / 0.25e-3}
    assert best.call is final[3].run  # the fourth sample of the final session was the fastest of that session


@pytest.mark.skipif(not INTERPRETED, reason="launches Triton kernels on the CPU")
def test_each_pattern_moves_what_it_says_and_its_rate_goes_to_its_figure(
    free_gibibytes: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    times = FakeTimes({})
    monkeypatch.setattr(gpu_bandwidth, "kernel_times", times)
    monkeypatch.setattr(gpu_bandwidth, "working_sets", lambda l2, free: [96 << 10, 192 << 10])
    samples = Samples()
    gpu_bandwidth.measure_bandwidth(samples, CPU, 128 << 10, lambda done: None)
    for size in (96 << 10, 192 << 10):
        moved = {name.split()[2]: rate * 1e-3 for name, rate in samples.figures.items() if name.split()[1] == str(size)}
        assert set(moved) == {"read", "write", "copy", "triad", "cast", "update"}
        assert moved.pop("update") == 2 * size
        assert all(0.98 * size <= each <= size for each in moved.values())
    assert len(times.sessions) == 2


def test_a_sustained_rate_is_that_of_a_call_that_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    class Event:
        def __init__(self, **_: bool) -> None:
            self.at = 0

        def record(self) -> None:
            self.at = calls

        def synchronize(self) -> None: ...

        def elapsed_time(self, later: Event) -> float:
            return float(later.at - self.at)  # 1 ms a call

    def call() -> None:
        nonlocal calls
        calls += 1

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    assert sustained_rates(call, 2_000_000, CPU) == pytest.approx([2e9] * 4)
    assert calls >= 300
