"""Histories of ceilings: the best figure counts, merges work in any order, and the causes of raised ceilings are
kept."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.errors import CeilingsFileError
from rooftop.hardware import Ceilings, MemoryLevel, MemoryPoint, measure_ceilings
from rooftop.hardware import measuring as measuring_module
from rooftop.hardware.ceilings import ceilings_of
from rooftop.hardware.figures import better
from rooftop.hardware.histories import MOST_MEASUREMENTS, History, Machine, Measurement, history_of
from rooftop.hardware.measuring import cache_path, ceilings_history, forget_ceilings, keep
from rooftop.hardware.probes import identity, machine_of

MIB = 1 << 20
MACHINE = Machine("Test machine", "test", "cpu", 1, {}, {"L2": 4 * MIB})
FLOORS = {"kernel_floor_ms": 0.001, "launch_eager_ms": 0.01, "launch_graph_ms": 0.002}
NAMES = [
    *FLOORS,
    *(f"memory {size} {pattern}" for size in (MIB, 64 * MIB) for pattern in ("read", "copy", "update")),
    *("flops fp32", "flops bf16", "sustained bf16", "transfers host_to_device_pinned", "links all_reduce_2_gpus"),
]
MOMENTS = ("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z", "2026-01-03T00:00:00Z")


def conditions(others: float) -> dict[str, float]:
    """Conditions with other programs on this many of the two cores that the measurement needs."""
    return {"others_cores": others, "threads": 2.0, "cores": 2.0}


def measurement(
    figures: Mapping[str, float], at: str = MOMENTS[0], others: float = 0.0, **spread: float
) -> Measurement:
    return Measurement(at, {**FLOORS, f"memory {MIB} copy": 1e9, **figures}, spread, conditions(others))


def history(*measurements: Measurement) -> History:
    return History(MACHINE, measurements)


ALWAYS = {*FLOORS, f"memory {MIB} copy", f"memory {64 * MIB} copy"}  # sizes are the same in all measurements
figures = st.fixed_dictionaries(
    {name: st.floats(1e-3, 1e12) for name in sorted(ALWAYS)},
    optional={name: st.floats(1e-3, 1e12) for name in NAMES if name not in ALWAYS},
)
measurements = st.builds(
    lambda found, at, others: Measurement(at, found, dict.fromkeys(found, 0.01), conditions(others)),
    figures,
    st.sampled_from(MOMENTS),
    st.sampled_from([0.0, 0.5]),
)


@st.composite
def histories(draw: st.DrawFn) -> History:
    """A few measurements, and possibly figures that operators raised."""
    found = history(draw(measurements))
    for each in draw(st.lists(measurements, max_size=3)):
        found = found.merged(history(each))
    if draw(st.booleans()):
        raised = found.ceilings().raised_memory(draw(st.integers(1, 1 << 32)), draw(st.floats(1e3, 1e13)), "aten::add")
        found = found.merged(history_of(raised.lowered_floor(draw(st.floats(1e-5, 1.0)), "aten::add_")))
    return found


few = settings(max_examples=40)  # each example consists of two or three histories of up to 17 figures


@few
@given(histories(), histories())
def test_merging_is_commutative_and_idempotent(one: History, other: History) -> None:
    together = one.merged(other)
    assert together == other.merged(one)
    assert together.merged(one) == together.merged(together) == together


@few
@given(histories(), histories(), histories())
def test_merging_is_associative(one: History, other: History, third: History) -> None:
    assert one.merged(other).merged(third) == one.merged(other.merged(third))


@few
@given(histories(), histories(), st.integers(0, 1 << 33), st.booleans())
def test_no_merge_lowers_a_ceiling(one: History, other: History, size: int, in_place: bool) -> None:
    before, after = one.ceilings(), one.merged(other).ceilings()
    for name, value in one.figures.items():
        assert better(name, one.merged(other).figures[name], value) == one.merged(other).figures[name]
    assert after.rate(size, in_place) >= before.rate(size, in_place)
    assert after.kernel_floor_ms <= before.kernel_floor_ms
    assert all(after.peak(precision) >= rate for precision, rate in before.flops.items())


@given(histories())
def test_a_history_survives_its_file(found: History) -> None:
    plain = json.loads(json.dumps(found.to_dict()))
    assert History.from_dict(plain) == found
    assert Ceilings.from_dict(plain) == found.ceilings()


@given(histories())
def test_ceilings_alone_are_a_history_that_gives_the_same_ceilings(found: History) -> None:
    ceilings = found.ceilings()
    assert history_of(ceilings).figures == found.figures
    assert history_of(ceilings).ceilings() == ceilings


def test_ceilings_alone_stay_disturbed_where_they_were() -> None:
    """The best memory rate is from a measurement under load; the other figures are from a later measurement on a quiet
    machine."""
    loaded = history(measurement({"flops fp32": 1e9, f"memory {MIB} read": 9e9}, others=0.5))
    quiet = measurement({"flops fp32": 2e9, f"memory {MIB} read": 5e9}, at=MOMENTS[1])
    ceilings = loaded.merged(history(quiet)).ceilings()
    assert ceilings.disturbed == ("memory",)
    assert history_of(ceilings).ceilings() == ceilings


def test_the_best_of_a_figure_is_never_pruned() -> None:
    found = history(measurement({"flops fp32": 9e9}))
    for day in range(3 * MOST_MEASUREMENTS):
        found = found.merged(history(measurement({"flops fp32": 1e9 + day}, at=f"2026-02-01T00:00:{day:02d}Z")))
    assert found.ceilings().peak("fp32") == 9e9
    assert len(found.measurements) == MOST_MEASUREMENTS + 1


def test_what_came_out_lower_is_named_with_the_date_of_what_stays() -> None:
    found = history(measurement({"flops fp32": 1e9, "flops bf16": 4e9}))
    found = found.merged(history(measurement({"flops fp32": 0.5e9, "flops bf16": 3.95e9}, at=MOMENTS[1])))
    (lower,) = found.lower()  # bf16 had the same figure
    assert (lower.figure, lower.new, lower.kept, lower.kept_at) == ("flops fp32", 0.5e9, 1e9, MOMENTS[0])


def test_a_measurement_under_load_is_disturbed_until_a_quiet_one_confirms_it() -> None:
    loaded = history(measurement({"flops fp32": 0.5e9}, others=0.5))
    assert set(loaded.ceilings().disturbed) >= {"matrix fp32", "memory"}
    quiet = measurement({"flops fp32": 0.48e9}, at=MOMENTS[1])
    assert loaded.merged(history(quiet)).ceilings().disturbed == ()
    faster = measurement({"flops fp32": 0.9e9}, at=MOMENTS[1])
    assert loaded.merged(history(faster)).ceilings().disturbed == ()
    assert loaded.merged(history(faster)).ceilings().peak("fp32") == 0.9e9


def test_only_a_best_that_was_not_reproduced_is_disturbed() -> None:
    figures = {"flops fp32": 1e9, "transfers host_to_device_pageable": 1e9, f"memory {MIB} read": 5e8}
    spread = {"flops fp32": 0.02, "transfers host_to_device_pageable": 0.3, f"memory {MIB} read": 0.9}
    ceilings = history(Measurement(MOMENTS[0], {**measurement(figures).figures}, spread, {})).ceilings()
    assert ceilings.disturbed == ("host to device pageable",)  # the read does not set the rate of its working set
    assert ceilings.disturbed_of(["memory", "launches", "fp32"]) == ()
    assert ceilings.disturbed_of(["transfers"]) == ceilings.disturbed


@pytest.mark.parametrize(
    ("words", "part"),
    [
        *[("read 2 MiB", "memory"), ("triad 512 KiB", "memory"), ("memory 24 MiB", "memory"), ("memory", "memory")],
        *[("matrix bf16", "bf16"), ("convolution tf32", "tf32"), ("sustained fp16", "fp16")],
        *[("launch eager", "launches"), ("kernel floor", "launches"), ("device to device", "links")],
        *[("host_to_device pageable", "transfers"), ("device to host pinned", "transfers")],
        ("all reduce 8 gpus", "links"),
    ],
)
def test_disturbed_figures_of_both_formats_belong_to_a_part(words: str, part: str) -> None:
    ceilings = replace(history(measurement({})).ceilings(), disturbed=(words,))
    parts = {"memory", "launches", "transfers", "links", "bf16", "tf32", "fp16"}
    assert ceilings.disturbed_of([part]) == (words,)
    assert ceilings.disturbed_of(parts - {part}) == ()


# ---- in the cache --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of this CPU in an empty cache."""
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    return cache_path(identity(torch.device("cpu")))


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A stand-in for the measurement: it returns these figures for the requested parts; "others" is the load."""
    rates = {"flops fp32": 0.110e12, "flops bf16": 1e12, "flops fp64": 5e10, "flops fp16": 4e10, "others": 0.0}
    machine = machine_of(torch.device("cpu"))
    count = iter(range(60))

    def probe(device: torch.device, parts: list[str], progress: object) -> History:
        rates["parts"] = len(parts)
        found = {name: rate for name, rate in rates.items() if name.removeprefix("flops ") in parts}
        found |= FLOORS if "launches" in parts else {}
        found |= {f"memory {MIB} copy": rates.get("copy", 1e9)} if "memory" in parts else {}
        at = f"2026-03-01T00:00:{next(count):02d}Z"
        return History(machine, (Measurement(at, found, {}, conditions(rates["others"])),))

    monkeypatch.setattr(measuring_module, "probe", probe)
    return rates


def test_a_refresh_under_load_changes_no_verdict(cache: Path, probes: dict[str, float]) -> None:
    quiet = measure_ceilings("cpu")
    probes.update({"flops fp32": 0.055e12, "copy": 0.5e9, "others": 0.6})
    loaded = measure_ceilings("cpu", refresh=True)
    assert (loaded.flops, loaded.memory, loaded.kernel_floor_ms) == (quiet.flops, quiet.memory, quiet.kernel_floor_ms)
    assert loaded.disturbed == quiet.disturbed == ()
    kept = ceilings_history("cpu")
    assert kept is not None
    assert [each.figure for each in kept.lower()] == ["flops fp32", f"memory {MIB} copy"]
    assert kept.measurements[1].conditions == conditions(0.6)


def test_a_first_measurement_under_load_is_used_with_a_mark(cache: Path, probes: dict[str, float]) -> None:
    probes["others"] = 0.6
    assert "matrix fp32" in measure_ceilings("cpu").disturbed


def test_only_what_is_missing_is_measured(cache: Path, probes: dict[str, float]) -> None:
    first = measure_ceilings("cpu", precisions=["fp32"], transfers=False, links=False)
    assert list(first.flops) == ["fp32"]
    with pytest.raises(ValueError, match="no bf16 rate was measured"):
        first.peak("bf16")
    del probes["parts"]
    # a CPU has neither of the last two parts
    assert measure_ceilings("cpu", precisions=["fp32", "tf32", "fp8"]) == first
    assert "parts" not in probes
    second = measure_ceilings("cpu", precisions={"bf16", "fp32"})
    assert probes["parts"] == 1
    assert set(second.flops) == {"fp32", "bf16"}
    assert set(measure_ceilings("cpu").flops) == {"fp32", "bf16", "fp64", "fp16"}
    assert probes["parts"] == 2
    with pytest.raises(ValueError, match="unknown precision 'float32'; known are fp64, fp32"):
        measure_ceilings("cpu", precisions=["float32"])


def test_what_raised_a_ceiling_is_kept_and_survives_a_refresh(cache: Path, probes: dict[str, float]) -> None:
    by = "aten::mm (8192, 4096) x (4096, 1024) fp32"
    raised = measure_ceilings("cpu").raised("fp32", 0.121e12, by)
    kept = keep(raised, "cpu")
    assert kept.peak("fp32") == measure_ceilings("cpu", refresh=True).peak("fp32") == 0.121e12
    (found,) = kept.raises
    assert (found.figure, found.before, found.after, found.by) == ("flops fp32", 0.110e12, 0.121e12, by)
    probes["flops fp32"] = 0.125e12
    better_now = measure_ceilings("cpu", refresh=True)
    assert (better_now.peak("fp32"), better_now.raises) == (0.125e12, ())  # the raise no longer counts
    assert forget_ceilings("cpu")
    assert not forget_ceilings("cpu")
    probes["flops fp32"] = 0.08e12
    assert measure_ceilings("cpu").peak("fp32") == 0.08e12


def test_only_ceilings_of_this_machine_are_kept(cache: Path, probes: dict[str, float]) -> None:
    measure_ceilings("cpu")
    before = cache.read_text()
    with pytest.raises(ValueError, match=r"those of NVIDIA H200 .*only measurements of this machine are kept"):
        keep(ceilings_of("h200").raised("bf16", 1e15, "aten::mm"), "cpu")
    assert cache.read_text() == before


def test_raises_are_kept_where_no_file_is_any_more(cache: Path, probes: dict[str, float]) -> None:
    raised = measure_ceilings("cpu").lowered_floor(1e-4, "aten::fill_")
    forget_ceilings("cpu")
    assert keep(raised, "cpu") == measure_ceilings("cpu") == raised


def test_a_corrupt_file_loses_no_raise_silently(cache: Path, probes: dict[str, float]) -> None:
    raised = measure_ceilings("cpu").lowered_floor(1e-4, "aten::fill_")
    cache.write_text("{")
    with pytest.raises(CeilingsFileError, match="rooftop ceilings --refresh"):
        keep(raised, "cpu")
    assert measure_ceilings("cpu", refresh=True).kernel_floor_ms == FLOORS["kernel_floor_ms"]


@pytest.mark.parametrize("change", [{"history": {}}, {"history": []}, {"history": {"machine": {}}}])
def test_a_damaged_history_is_refused_by_name(change: dict[str, object], cache: Path, probes: dict[str, float]) -> None:
    measure_ceilings("cpu")
    cache.write_text(json.dumps({**json.loads(cache.read_text()), **change}))
    with pytest.raises(CeilingsFileError, match=cache.name.replace("+", r"\+")):
        measure_ceilings("cpu")


def test_files_of_the_first_format_load_and_are_measured_anew_in_the_cache(
    cache: Path, probes: dict[str, float], tmp_path: Path
) -> None:
    old = {**history(measurement({"flops fp32": 7e12})).ceilings().to_dict(), "format": 1}
    for name in ("sustained", "conditions", "raises"):
        del old[name]
    old["memory"] = [{k: v for k, v in p.items() if k in MemoryPoint.__match_args__[:5]} for p in old["memory"]]
    cache.write_text(json.dumps(old))
    loaded = Ceilings.load(cache)
    assert (loaded.peak("fp32"), loaded.rate(MIB), loaded.sustained, loaded.raises) == (7e12, 1e9, {}, ())
    assert loaded.levels == (MemoryLevel("L2", 4 * MIB, 1e9), MemoryLevel("DRAM", None, 1e9))
    assert measure_ceilings("cpu").peak("fp32") == probes["flops fp32"]  # the old instrument's figures do not stay


def _keep_raises(folder: str, ceilings: Ceilings, number: int) -> None:
    os.environ["ROOFTOP_CACHE"] = folder
    for step in range(5):
        rate = 2e9 * (10 * number + step + 1)
        keep(ceilings.raised_memory((number * 5 + step + 1) * MIB, rate, f"process {number}"), "cpu")


def test_processes_that_write_at_once_lose_nothing(cache: Path, probes: dict[str, float], tmp_path: Path) -> None:
    ceilings = measure_ceilings("cpu")
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_keep_raises, args=(str(tmp_path), ceilings, n)) for n in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    kept = ceilings_history("cpu")
    assert kept is not None
    assert len(kept.raises) == 15
    assert kept.ceilings().rate(1) == 2e9 * 25
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
