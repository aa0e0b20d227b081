"""`rooftop ceilings` and `rooftop report`: what they print and write, and one clear line for what goes wrong."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import rooftop
from rooftop.cli import ceilings as verb
from rooftop.cli.main import main
from rooftop.hardware import Ceilings, measure_ceilings
from rooftop.hardware.figures import in_words
from rooftop.hardware.histories import history_of
from rooftop.hardware.measuring import cache_path, keep
from rooftop.hardware.probes import identity

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def cache(measured: Ceilings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the ceilings of this CPU and nothing else."""
    folder = tmp_path_factory.mktemp("cache")
    measured.save(folder / cache_path(identity(torch.device("cpu"))).name)
    return folder


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cache: Path) -> Run:
    """Runs `rooftop ...` in an empty folder with that cache, returns (status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROOFTOP_CACHE", str(cache))

    def call(*words: str) -> tuple[int, str, str]:
        status = main(list(words))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def assert_one_line(result: tuple[int, str, str], status: int, *parts: str) -> None:
    assert result[0] == status, result
    assert result[2].startswith("rooftop: error: ")
    assert result[2].count("\n") == 1
    for part in parts:
        assert part in result[2]


def test_tables_in_a_pipe_are_not_cut(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe the table had 80 columns, and all long bars were cut to the same length."""
    monkeypatch.setattr(verb, "measure_ceilings", lambda *where, **how: rooftop.hardware.ceilings_of("h200"))
    status, out, _ = run("ceilings", "--device", "cpu")
    assert status == 0
    assert "█" * 20 in out
    assert "…" not in out


def test_ceilings_as_tables_as_json_and_as_a_file_are_the_same(run: Run) -> None:
    status, out, _ = run("ceilings", "--device", "cpu", "-o", "mine.json")
    assert status == 0
    assert "working set" in out
    assert "matrix fp32" in out
    assert "launch, eager" in out
    saved = Ceilings.load("mine.json")
    status, out, _ = run("ceilings", "--device", "cpu", "--json")
    assert status == 0
    assert Ceilings.from_dict(json.loads(out)) == saved == measure_ceilings("cpu")


def test_a_disturbed_measurement_is_said(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    disturbed = Ceilings.from_dict({**measure_ceilings("cpu").to_dict(), "disturbed": ["matrix fp64"]})
    monkeypatch.setattr("rooftop.cli.ceilings.measure_ceilings", lambda *_, **__: disturbed)
    status, out, _ = run("ceilings")
    assert status == 0
    assert "disturbed: matrix fp64 may be too low" in " ".join(out.split())


def test_a_refresh_says_what_came_out_lower_and_that_the_higher_stays(
    run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(shutil.copytree(cache, tmp_path / "own")))
    good = measure_ceilings("cpu")
    loaded = replace(
        good,
        measured_at="2100-01-01T00:00:00Z",
        flops={**good.flops, "fp32": good.peak("fp32") / 2},
        conditions={"others_cores": 1.5, "cores": 2.0, "threads": 2.0},
        disturbed=(in_words("flops fp32"),),
    )
    monkeypatch.setattr("rooftop.hardware.measuring.probe", lambda *_: history_of(loaded))
    status, out, _ = run("ceilings", "--device", "cpu", "--refresh")
    said = " ".join(out.split())
    assert status == 0
    assert "lower this time, so the earlier value stays" in said
    assert f"was {good.peak('fp32') / 1e12:,.3g} TFLOP/s on {good.measured_at}" in said
    assert "other processes used the machine during the measurement: 1.5 of 2 cores" in said
    assert measure_ceilings("cpu").flops == good.flops
    status, out, _ = run("ceilings", "--device", "cpu", "--forget")
    assert measure_ceilings("cpu").peak("fp32") == good.peak("fp32") / 2
    assert f"disturbed: {in_words('flops fp32')} may be too low" in " ".join(out.split())


def test_what_an_operator_raised_is_said(
    run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(shutil.copytree(cache, tmp_path / "own")))
    keep(measure_ceilings("cpu").raised("fp32", 9e15, "aten::mm (8, 4) x (4, 2)"), "cpu")
    said = " ".join(run("ceilings", "--device", "cpu")[1].split())
    assert "matrix fp32 raised by aten::mm (8, 4) x (4, 2) on" in said
    assert "-> 9e+03 TFLOP/s" in said


def test_ceilings_refuse_what_cannot_be_done_before_measuring(run: Run) -> None:
    assert_one_line(run("ceilings", "--device", "tpu"), 2, "tpu")
    assert_one_line(run("ceilings", "--device", f"cuda:{torch.cuda.device_count()}"), 2, "cuda")
    assert_one_line(run("ceilings", "--device", "cpu", "-o", "no/such/folder/c.json"), 2, "no/such/folder")
    assert_one_line(run("ceilings", "--device", "cpu", "-o", "."), 2, "folder")
    assert_one_line(run("ceilings", "--device", "cpu", "-o", "-"), 2, "- is not a file name")
    assert_one_line(run("ceilings", "extra"), 2, "extra")
    assert os.listdir() == []


def test_a_corrupt_cache_is_named_and_refresh_mends_it(
    run: Run, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = measure_ceilings("cpu")
    file = Path(shutil.copytree(cache, tmp_path / "own"), next(cache.iterdir()).name)
    monkeypatch.setenv("ROOFTOP_CACHE", str(file.parent))
    file.write_text(json.dumps(good.to_dict())[:1000])
    assert_one_line(run("ceilings", "--device", "cpu"), 1, str(file), "rooftop ceilings --refresh")
    monkeypatch.setattr("rooftop.hardware.measuring.probe", lambda *_: history_of(good))
    assert run("ceilings", "--device", "cpu", "--refresh")[0] == 0
    assert Ceilings.load(file) == good


def test_a_report_becomes_a_page(run: Run) -> None:
    pytest.importorskip("plotly")
    model, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    rooftop.analyze(model, x).to_json("net.json")
    assert run("report", "net.json")[:2] == (0, "report: net.html\n")
    assert run("report", "net.json", "-o", "other.html")[0] == 0
    page = Path("other.html").read_text(encoding="utf-8")
    assert page == Path("net.html").read_text(encoding="utf-8")
    assert "aten::addmm" in page


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"format": 99}', "\x00\xff"])
def test_a_file_that_is_no_report_is_named_and_nothing_written(run: Run, text: str) -> None:
    Path("bad.json").write_text(text, encoding="latin-1")
    assert_one_line(run("report", "bad.json"), 2, "bad.json")
    assert os.listdir() == ["bad.json"]


def test_report_refuses_paths_before_the_work(run: Run) -> None:
    assert_one_line(run("report", "missing.json"), 2, "missing.json")
    assert_one_line(run("report", "."), 2, "directory")
    Path("r.json").write_text("{}")
    assert_one_line(run("report", "r.json", "-o", "no/such/r.html"), 2, "no/such")
    assert_one_line(run("report", "r.json", "-o", "./r.json"), 2, "the JSON report itself")
    assert Path("r.json").read_text() == "{}"
