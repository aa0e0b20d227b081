"""Ceilings are upper bounds, stay the same when saved and loaded, and name a file that is not theirs when they refuse
it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooftop.errors import CeilingsFileError
from rooftop.hardware import Ceilings, MemoryPoint, measure, measure_ceilings
from rooftop.hardware.ceilings import ceilings_of, known_machines
from rooftop.hardware.histories import history_of
from rooftop.hardware.kernel_times import Variant, kernel_times
from rooftop.hardware.measuring import cache_path
from rooftop.hardware.probes import full_precision, identity

Switches = dict[str, object]
Measurement = tuple[Ceilings, Switches, Switches]  # ceilings, and the global settings before and after


def test_json_round_trip(measured: Ceilings, tmp_path: Path) -> None:
    path = tmp_path / "ceilings.json"
    measured.save(path)
    assert Ceilings.load(path) == measured
    assert os.listdir(tmp_path) == ["ceilings.json"]


sizes = st.integers(0, 1 << 40)
raises = st.lists(st.tuples(sizes, st.floats(1e6, 1e15), st.booleans()), max_size=4)


def raised(ceilings: Ceilings, steps: list[tuple[int, float, bool]]) -> Ceilings:
    for size, rate, in_place in steps:
        ceilings = ceilings.raised_memory(size, rate, "an operator", in_place)
    return ceilings


@given(sizes, sizes, raises, st.booleans())
def test_rate_never_rises_with_the_working_set(
    measured: Ceilings, one: int, other: int, steps: list[tuple[int, float, bool]], in_place: bool
) -> None:
    ceilings = raised(measured, steps)
    small, large = sorted((one, other))
    assert ceilings.rate(small, in_place) >= ceilings.rate(large, in_place)
    assert ceilings.rate(small, in_place=True) >= ceilings.rate(small)


@given(sizes, raises)
def test_raising_lowers_no_rate_and_reaches_what_raised_it(
    measured: Ceilings, size: int, steps: list[tuple[int, float, bool]]
) -> None:
    ceilings = raised(measured, steps)
    for in_place in (False, True):
        assert ceilings.rate(size, in_place) >= measured.rate(size, in_place)
    for at, rate, in_place in steps:
        assert ceilings.rate(at, in_place) >= rate
    assert Ceilings.from_dict(json.loads(json.dumps(ceilings.to_dict()))) == ceilings


def test_a_raise_is_noted_and_what_is_no_raise_changes_nothing(measured: Ceilings) -> None:
    fp32, floor = measured.peak("fp32"), measured.kernel_floor_ms
    assert measured.raised("fp32", fp32 / 2, "aten::mm") is measured
    assert measured.raised_memory(1 << 20, measured.rate(1 << 20), "aten::add") is measured
    assert measured.lowered_floor(2 * floor, "aten::add") is measured
    faster = measured.raised("fp32", 2 * fp32, "aten::mm").lowered_floor(floor / 2, "aten::fill_")
    assert (faster.peak("fp32"), faster.kernel_floor_ms) == (2 * fp32, floor / 2)
    assert [(each.figure, each.before, each.after, each.by) for each in faster.raises] == [
        ("flops fp32", fp32, 2 * fp32, "aten::mm"),
        ("kernel_floor_ms", floor, floor / 2, "aten::fill_"),
    ]
    for wrong in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="expected a positive number"):
            measured.raised("fp32", wrong, "aten::mm")


PATTERNS = ("working_set_bytes", "read", "write", "copy", "triad")


def test_machines_that_come_with_rooftop_load_in_the_format_in_which_they_were_written() -> None:
    for name in known_machines():
        there = ceilings_of(name)
        assert there.rate(32 << 20) > 1.2 * there.rate(1 << 30)
        assert 0.5 < there.sustained["bf16"] / there.peak("bf16") < 1
    before = {key: value for key, value in there.to_dict().items() if key not in ("sustained", "pulse", "raises")}
    before["memory"] = [{key: rate for key, rate in each.items() if key in PATTERNS} for each in before["memory"]]
    first = Ceilings.from_dict(before)  # the format of the first instrument
    assert (first.sustained, first.raises) == ({}, ())
    assert first.rate(1 << 30) == there.rate(1 << 30)


def test_rate_is_never_below_what_was_measured(measured: Ceilings) -> None:
    for point in measured.memory:
        assert measured.rate(point.working_set_bytes) >= point.best
        assert measured.rate(point.working_set_bytes, in_place=True) >= point.update
        assert measured.rate(point.working_set_bytes + 1) >= max(
            p.best for p in measured.memory if p.working_set_bytes >= point.working_set_bytes
        )


def test_no_plain_loop_is_far_above_a_ceiling(
    measured: Ceilings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The machine is shared, so only one of three measurements must agree within a third. (The benchmark requires 5% on
    a dedicated GPU.)"""
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    size = 1 << 27
    x, y = torch.rand(size // 4), torch.empty(size // 4)
    a, b = torch.rand(1024, 1024), torch.rand(1024, 1024)
    shares = []
    for attempt in range(3):
        ceilings = measured if attempt == 0 else measure_ceilings("cpu", refresh=True)
        copied = 2 * size / (measure(lambda: y.copy_(x), device="cpu").median_ms / 1e3)
        product = 2 * 1024**3 / (measure(lambda: a @ b, device="cpu").median_ms / 1e3)
        shares.append(max(copied / ceilings.rate(2 * size), product / ceilings.peak("fp32")))
        if shares[-1] <= 1.33:
            return
    pytest.fail(f"plain loops at these shares of the ceilings: {shares}")


def test_a_precision_that_was_not_measured_is_an_error(measured: Ceilings) -> None:
    with pytest.raises(ValueError, match=r"no fp8 rate was measured.*known rates are fp64, fp32"):
        measured.peak("fp8")


def test_the_cache_is_used_and_refreshed(measured: Ceilings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    path = cache_path(identity(torch.device("cpu")))
    measured.save(path)
    assert measure_ceilings("cpu") == measured
    path.write_text("{")
    with pytest.raises(CeilingsFileError, match="rooftop ceilings --refresh"):
        measure_ceilings("cpu")


def test_a_cache_that_cannot_be_written_loses_no_measurement(
    measured: Ceilings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("rooftop.hardware.measuring.probe", lambda *_: history_of(measured))
    with pytest.warns(UserWarning, match="could not be stored in .*set ROOFTOP_CACHE"):
        assert measure_ceilings("cpu") == measured


def test_a_cache_that_cannot_be_read_loses_no_measurement(
    measured: Ceilings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "circle").symlink_to(tmp_path / "circle")  # reading through it is an OSError, even for root
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path / "circle"))
    monkeypatch.setattr("rooftop.hardware.measuring.probe", lambda *_: history_of(measured))
    with pytest.warns(UserWarning, match="could not be stored in .*set ROOFTOP_CACHE"):
        assert measure_ceilings("cpu") == measured


def _switches() -> list[object]:
    """PyTorch's switches for float32 products and convolutions; None for an older one that cannot be read."""
    cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
    newer = (torch.backends, products, cudnn, cudnn.conv, cudnn.rnn, torch.backends.mkldnn.matmul)
    older = (torch.get_float32_matmul_precision, lambda: products.allow_tf32, lambda: cudnn.allow_tf32)
    found: list[object] = [switch.fp32_precision for switch in newer]
    for read in older:
        try:
            found.append(read())
        except RuntimeError:
            found.append(None)
    return found


@pytest.mark.parametrize(
    "turn",
    [
        "torch.set_float32_matmul_precision('medium')",
        "torch.backends.cuda.matmul.fp32_precision = 'tf32'",
        "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
        "torch.backends.fp32_precision = 'tf32'",
    ],
)
def test_float32_is_measured_in_float32_whatever_the_program_has_set(turn: str) -> None:
    """Also if the program has set only PyTorch's newer switches: reading the older ones is then an error."""
    with full_precision():  # restores the switches for other tests
        exec(turn)
        before = _switches()
        with full_precision():
            with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
                inside = _switches()
            assert inside[1:2] + inside[3:] == ["ieee"] * 4 + ["highest", False, False]
        assert _switches() == before


def test_measuring_leaves_switches_and_random_numbers_as_they_were(
    measurement: Measurement,
) -> None:
    _, before, after = measurement
    assert after == before


@pytest.mark.gpu
def test_measuring_a_gpu_leaves_switches_and_random_numbers_as_they_were(
    measured_with_switches_turned: Callable[[str], Measurement], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    _, before, after = measured_with_switches_turned("cuda")
    assert after == before


@pytest.mark.parametrize("pulse", [[1], {"product": "x"}, {"product": -1.0}, 3, {"product": None}])
def test_a_pulse_that_is_none_is_refused(pulse: object) -> None:
    with pytest.raises(ValueError, match=r"AttributeError|could not convert|not positive|TypeError"):
        Ceilings.from_dict({**ceilings_of("h100").to_dict(), "pulse": pulse})


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format": 3}', '{"format": 2}', '{"format": 1}', "\x00\xff"])
def test_any_other_file_is_refused_by_name(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(CeilingsFileError, match=r"other\.json is not a usable ceilings file"):
        Ceilings.load(path)


@pytest.mark.parametrize("change", [{"memory": []}, {"flops": {"fp32": 0.0}}, {"memory": [{"read": 1}]}])
def test_damaged_figures_are_refused(change: dict[str, object], measured: Ceilings, tmp_path: Path) -> None:
    path = tmp_path / "damaged.json"
    path.write_text(json.dumps({**measured.to_dict(), **change}))
    with pytest.raises(CeilingsFileError, match="damaged"):
        Ceilings.load(path)


def test_a_failed_save_leaves_the_old_file(measured: Ceilings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ceilings.json"
    path.write_text("old")

    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full_disk)
    with pytest.raises(OSError, match="No space left"):
        measured.save(path)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["ceilings.json"]


def test_wrong_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="cpu and cuda devices, got meta"):
        measure_ceilings("meta")
    with pytest.raises(ValueError, match="does not exist"):
        measure_ceilings(f"cuda:{torch.cuda.device_count()}")


def test_the_best_pattern_counts() -> None:
    point = MemoryPoint(1, read=1.0, write=4.0, copy=2.0, triad=3.0, cast=5.0, update=9.0)
    assert (point.best, point.best_in_place) == (5.0, 9.0)


def test_a_machine_without_raises_has_all_figures_of_all_parts(measured: Ceilings) -> None:
    assert set(measured.flops) == {"fp64", "fp32", "bf16", "fp16"}
    for point in measured.memory:
        assert min(point.read, point.write, point.copy, point.triad, point.cast, point.update) > 0
    assert 0 <= measured.conditions["others_cores"] <= measured.conditions["cores"] + 0.5
    assert set(measured.spread) >= {"flops fp32", "kernel_floor_ms"}


@pytest.mark.gpu
@pytest.mark.alone
def test_gpu_kernel_floor_is_below_an_eager_launch() -> None:
    ceilings = measure_ceilings("cuda")
    assert 0 < ceilings.kernel_floor_ms < ceilings.launch_eager_ms
    assert 0 < ceilings.launch_graph_ms < ceilings.launch_eager_ms  # kernels of a graph may overlap a little
    assert ceilings.rate(16 << 20) > 1.2 * ceilings.rate(1 << 30)  # L2 is faster than DRAM


@pytest.mark.gpu
@pytest.mark.alone
def test_no_plain_loop_on_a_gpu_is_more_than_5_percent_above_its_ceiling() -> None:
    ceilings = measure_ceilings("cuda")
    x = torch.randn(1 << 28, device="cuda")
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / (measure(lambda: y.copy_(x), device="cuda").median_ms / 1e3)
    assert 0.7 * ceilings.rate(2 * x.nbytes) < copied <= 1.05 * ceilings.rate(2 * x.nbytes)
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    product = 2 * 8192**3 / (measure(lambda: a @ b, device="cuda").median_ms / 1e3)
    assert 0.6 * ceilings.peak("bf16") < product <= ceilings.peak("bf16")  # sustained, so slower than a burst
    assert ceilings.sustained["bf16"] <= ceilings.peak("bf16")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(("m", "n", "k"), [(8192, 1024, 4096), (5120, 5120, 2560), (16384, 3072, 768)])
def test_no_kernel_of_a_product_is_above_the_ceiling(m: int, n: int, k: int) -> None:
    ceilings = measure_ceilings("cuda", precisions=["bf16"], transfers=False, links=False)
    a, b = (torch.randn(*shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
    torch.mm(a, b)
    (calls,) = kernel_times([Variant(lambda: torch.mm(a, b), repeats=10, pause_s=0.02)], torch.device("cuda"))
    assert 2 * m * n * k / (min(map(sum, calls)) / 1e3) <= 1.02 * ceilings.peak("bf16")


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("mebibytes", [1, 6, 20, 37, 55, 90, 300])
def test_no_elementwise_kernel_is_above_the_ceiling_right_after_its_input_was_written(mebibytes: int) -> None:
    ceilings = measure_ceilings("cuda", precisions=[], transfers=False, links=False)
    x = torch.randn(mebibytes << 17, device="cuda")  # half of the working set
    y, half = torch.empty_like(x), torch.empty(x.numel(), dtype=torch.bfloat16, device="cuda")
    work = [
        (2 * x.nbytes, lambda: torch.add(x, 1.0, out=y)),
        (x.nbytes + half.nbytes, lambda: half.copy_(x)),
        (x.nbytes, lambda: x.sum()),
    ]
    variants = [Variant(call, prepare=lambda: x.mul_(1.0), repeats=10) for _, call in work]
    for (moved, _), calls in zip(work, kernel_times(variants, torch.device("cuda")), strict=True):
        roof_ms = max(1e3 * moved / ceilings.rate(moved), ceilings.kernel_floor_ms)
        assert min(map(sum, calls)) >= roof_ms / 1.03


@pytest.mark.parametrize(
    "change",
    [{"kernel_floor_ms": None}, {"launch_eager_ms": "x"}, {"links": {"a": [1]}}, {"transfers": None}, {"flops": 3}],
)
def test_figures_that_are_no_numbers_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"expected a finite number|AttributeError"):
        Ceilings.from_dict({**ceilings_of("h100").to_dict(), **change})


@pytest.mark.parametrize("figure", [float("nan"), 10**400, True])
def test_figures_that_are_not_finite_are_refused(figure: object) -> None:
    plain = ceilings_of("h100").to_dict()
    plain["memory"][0]["read"] = figure
    with pytest.raises(ValueError, match=r"expected a finite number|OverflowError"):
        Ceilings.from_dict(plain)
