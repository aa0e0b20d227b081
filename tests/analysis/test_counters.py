"""Hardware counters: ncu's table is read correctly, refusals say what to do, and the bytes that kernels moved are shown
next to those that their operators must move."""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from rooftop.analysis import counters
from rooftop.analysis.counters import (
    KernelCounters,
    KernelRow,
    counted_step,
    find_ncu,
    hardware_counters,
    kernel_rows,
    parse_counters,
    profiler_name,
)
from rooftop.analysis.counters_table import counted_bytes, counters_table, short_name
from rooftop.analysis.program import Program
from rooftop.analysis.report_contents import OperatorRow
from rooftop.errors import MeasurementError

SAMPLE = Path(__file__).parent / "data" / "ncu_h200.csv"
"""Recorded on an H200 with ncu 2025.3.1: seven launches, with the used columns and a few others."""


def launch(name: str = "kernel", ms: float = 1.0, moved: float = 1e6, **values: float) -> KernelCounters:
    """A launch that only read."""
    fields = {"l2_bytes": moved, "issue_percent": 50.0, "tensor_percent": 0.0, "occupancy_percent": 80.0, **values}
    return KernelCounters(
        name, ms, moved, 0.0, **fields, registers=32.0, shared_bytes=0.0, grid=(1, 1, 1), block=(128, 1, 1)
    )


def row(name: str, moved: float) -> KernelRow:
    return KernelRow(name, (launch(name, moved=moved),))


def operator(kernels: tuple[str, ...], size: int, bound: str = "memory") -> OperatorRow:
    return OperatorRow("aten::add", "forward", (), "float32", 1, 0, {}, size, 1.0, 2.0, bound, kernels=kernels)


# ---- the table that ncu writes ---------------------------------------------------------------------------------------


def test_launches_are_read_in_order_with_their_units() -> None:
    launches = parse_counters(SAMPLE.read_text())
    assert len(launches) == 7
    product = launches[0]
    assert product.name == "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"
    assert product.ms == pytest.approx(0.175552)
    assert (product.dram_read_bytes, product.dram_written_bytes) == (150_073_344, 27_796_480)
    assert product.dram_bytes == 150_073_344 + 27_796_480
    assert product.l2_bytes == 1_043_656_160
    assert (product.issue_percent, product.tensor_percent, product.occupancy_percent) == (11.44, 89.19, 14.64)
    assert (product.registers, product.shared_bytes) == (168, 214_212)
    assert (product.grid, product.block) == ((2, 66, 1), (384, 1, 1))


def test_names_are_those_of_the_profiler() -> None:
    names = [launch.name for launch in parse_counters(SAMPLE.read_text())]
    assert names[1].startswith("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16")
    assert profiler_name("_Z4fillPfi") == "fill(float*, int)"
    long = f"_Z1200{'a' * 1200}v"
    assert profiler_name(long) == long, "the profiler does not shorten names of more than 1024 characters"


def test_a_counter_that_the_chip_does_not_have_is_nan() -> None:
    text = SAMPLE.read_text().replace('"89.19"', '"n/a"').replace("dram__bytes_write.sum", "dram__other.sum")
    product = parse_counters(text)[0]
    assert math.isnan(product.tensor_percent)
    assert math.isnan(product.dram_bytes)
    plain = kernel_rows([product])[0].to_dict()
    assert plain["dram_bytes"] is None
    assert json.loads(json.dumps(plain, allow_nan=False))["launches"][0]["dram_written_bytes"] is None


def test_messages_alone_are_no_launches() -> None:
    assert parse_counters("==WARNING== No kernels were profiled.\n") == []


def test_another_table_is_refused() -> None:
    with pytest.raises(MeasurementError, match=r"no column Block Size, Grid Size"):
        parse_counters('"ID","Kernel Name","gpu__time_duration.sum"\n"","","ns"\n"0","fill","1"\n')


# ---- rows ------------------------------------------------------------------------------------------------------------


def test_launches_of_one_name_make_one_row_by_falling_time() -> None:
    rows = kernel_rows(parse_counters(SAMPLE.read_text()))
    assert [row.ms for row in rows] == sorted((row.ms for row in rows), reverse=True)
    twice = next(row for row in rows if row.calls == 2)
    assert "nchwToNhwcKernel" in twice.name
    assert sum(row.calls for row in rows) == 7
    assert twice.ms == pytest.approx(sum(launch.ms for launch in twice.launches))
    assert twice.dram_bytes == sum(launch.dram_bytes for launch in twice.launches)
    assert twice.dram_rate == pytest.approx(twice.dram_bytes / (twice.ms / 1e3))


def test_percentages_of_a_row_are_weighted_by_time() -> None:
    rows = kernel_rows([launch(ms=3.0, occupancy_percent=100.0), launch(ms=1.0, occupancy_percent=20.0)])
    assert rows[0].occupancy_percent == pytest.approx(80.0)


# ---- moved and counted -----------------------------------------------------------------------------------------------


def test_a_kernel_must_move_what_its_operators_must() -> None:
    rows = [row("a", 3e6), row("b", 5e6)]
    counted = counted_bytes(rows, [operator(("a",), 1_000_000), operator(("a",), 500_000), operator(("b",), 5_000_000)])
    assert (counted["a"].bytes, counted["a"].shared) == (1.5e6, False)
    assert (counted["b"].bytes, counted["b"].shared) == (5e6, False)


def test_operators_of_several_kernels_divide_their_bytes_by_what_those_moved() -> None:
    rows = [row("a", 3e6), row("b", 1e6)]
    counted = counted_bytes(rows, [operator(("a", "b", "Memset (Device)"), 2_000_000)])
    assert [(counted[name].bytes, counted[name].shared) for name in "ab"] == [(1.5e6, True), (0.5e6, True)]


@pytest.mark.parametrize("operators", [[], [operator(("a",), 100), operator(("a",), 0, "uncovered")]])
def test_without_a_formula_for_all_its_operators_a_kernel_has_no_figure(operators: list[OperatorRow]) -> None:
    assert counted_bytes([row("a", 1e6)], operators)["a"].bytes is None


class _Report:
    """The part of a report that the table reads."""

    def __init__(self, *ops: OperatorRow) -> None:
        self.ops = ops
        self.ceilings = {"levels": [{"name": "DRAM", "capacity_bytes": None, "rate": 4e9}]}


def lines(rows: list[KernelRow], report: _Report, limit: int = 12) -> dict[str, list[str]]:
    out = io.StringIO()
    Console(width=110, color_system=None, file=out).print(counters_table(rows, report, limit))  # type: ignore[arg-type]
    text = out.getvalue()
    assert max(map(len, text.splitlines())) <= 110
    return {words[0]: words[1:] for line in text.splitlines() if (words := line.split())}


def test_the_table_marks_what_is_read_again() -> None:
    found = lines(
        [row("again", 3e6), row("once", 1e6), row("unknown", 1e6)],
        _Report(operator(("again",), 2_000_000), operator(("once",), 1_000_000)),
    )
    assert found["again"] == ["1", "1", "ms", "3", "MB", "3", "75%", "0%", "80%", "2", "MB", "1.50", "(!)"]
    assert found["once"][-1] == "1.00"
    assert found["unknown"][-2:] == ["-", "-"]


def test_a_few_bytes_have_no_ratio_and_rows_have_a_limit() -> None:
    found = lines([row("tiny", 5e3), row("left_out", 1e6)], _Report(operator(("tiny",), 4)), limit=1)
    assert found["tiny"][-1] == "-"
    assert "left_out" not in found


def test_a_chip_that_counts_no_dram_bytes_has_times_only() -> None:
    found = lines([row("fill", math.nan)], _Report(operator(("fill",), 2_000_000)))
    assert found["fill"] == ["1", "1", "ms", "-", "-", "-", "0%", "80%", "-", "-"]
    assert "note:" not in found


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::norm<c10::Half, float>(int, float)", "norm<Half, float>"),
        ("nvjet_sm90_tst_256x128", "nvjet_sm90_tst_256x128"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, 7>(cublasGemv<int>)", "kernel<int, 7>"),
        ("fill(float*, int)", "fill"),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


# ---- refusals --------------------------------------------------------------------------------------------------------

FakeNcu = Callable[[str], Path]


@pytest.fixture
def fake_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    """Put a shell script named ncu on PATH of a machine that seems to have a GPU. $LOG is the file that it must
    write."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(body: str) -> Path:
        path = tmp_path / "ncu"
        find_log = 'for word in "$@"; do [ "$last" = --log-file ] && LOG=$word; last=$word; done\n'
        path.write_text(f"#!/bin/sh\n{find_log}{body}\n")
        path.chmod(0o755)
        return path

    return write


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(MeasurementError, match="need an NVIDIA GPU"):
        hardware_counters(["true"])


def test_without_ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters.shutil, "which", lambda name, path=None: None)
    with pytest.raises(MeasurementError, match=r"ncu .* apt-get install cuda-nsight-compute-\d+-\d+"):
        find_ncu()


def test_ncu_is_found_in_the_toolkit(fake_ncu: FakeNcu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ncu("exit 0").rename(tmp_path / "moved")
    (tmp_path / "bin").mkdir()
    (tmp_path / "moved").rename(tmp_path / "bin" / "ncu")
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_ncu() == str(tmp_path / "bin" / "ncu")


def test_the_newest_installation_comes_first() -> None:
    paths = [Path("2024.3.2"), Path("2025.3.1"), Path("2025.10.0")]
    assert max(paths, key=counters._version).name == "2025.10.0"


@pytest.mark.parametrize("where", ['"$LOG"', "/dev/stderr"])
def test_forbidden_counters_say_what_to_do(fake_ncu: FakeNcu, where: str) -> None:
    fake_ncu(f"echo '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission' > {where}; exit 1")
    with pytest.raises(MeasurementError, match=r"cap-add=SYS_ADMIN.*NVreg_RestrictProfilingToAdminUsers=0"):
        hardware_counters(["true"])


def test_a_command_that_fails_is_named_with_its_last_words(fake_ncu: FakeNcu) -> None:
    fake_ncu(
        'echo loading; echo "rooftop: error: no model that is called resnet49" >&2; '
        'echo "==ERROR== The application returned an error code (2)." > "$LOG"; exit 2'
    )
    with pytest.raises(MeasurementError, match=r"status 2: The application .* \(2\)\. no model that"):
        hardware_counters(["true"])


def test_a_step_without_kernels_is_said(fake_ncu: FakeNcu) -> None:
    fake_ncu('echo "==WARNING== No kernels were profiled." > "$LOG"')
    with pytest.raises(MeasurementError, match="no kernel on a GPU: No kernels were profiled"):
        hardware_counters(["true"])


def test_what_takes_too_long_is_ended_with_all_that_it_started(fake_ncu: FakeNcu) -> None:
    fake_ncu("sleep 600")
    began = time.monotonic()
    with pytest.raises(MeasurementError, match=r"did not finish within 0\.2 s"):
        hardware_counters(["true"], timeout_s=0.2)
    assert time.monotonic() - began < 60


def test_ncu_is_asked_for_every_counter_and_given_the_command(fake_ncu: FakeNcu, tmp_path: Path) -> None:
    fake_ncu(f'echo "$*" > {tmp_path}/words; cat {SAMPLE} > "$LOG"')
    assert hardware_counters(["python", "-m", "rooftop"]) == parse_counters(SAMPLE.read_text())
    words = (tmp_path / "words").read_text().split()
    assert words[words.index("--metrics") + 1].split(",") == list(counters.METRICS.values())
    assert words[-3:] == ["python", "-m", "rooftop"]


def test_a_step_on_the_cpu_has_no_counters() -> None:
    with pytest.raises(MeasurementError, match="Linear runs on cpu"):
        counted_step(Program(nn.Linear(2, 2), (torch.zeros(1, 2),), {}))


# ---- for real --------------------------------------------------------------------------------------------------------

CHILD = """
import torch
from rooftop.analysis.counters import counted_step
from rooftop.analysis.program import Program
x = torch.randn(1 << 26, device="cuda")
counted_step(Program(torch.Tensor.sum, (x,), {}))
"""


@pytest.mark.gpu
def test_a_sum_reads_each_byte_once() -> None:
    least = math.inf  # memory's counters also count what other processes move at the same time
    for _ in range(5):
        try:
            launches = hardware_counters([sys.executable, "-c", CHILD])
        except MeasurementError as error:
            if "ERR_NVGPUCTRPERM" in str(error) or "need ncu" in str(error) or "initialize the profiler" in str(error):
                pytest.skip(str(error))
            raise
        largest = kernel_rows(launches)[0]
        assert "reduce_kernel" in largest.name
        least = min(least, largest.dram_bytes)
        if least < 1.05 * (4 << 26):
            break
    assert least == pytest.approx(4 << 26, rel=0.05)
    assert 0 < largest.occupancy_percent <= 100
