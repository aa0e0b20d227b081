"""The benchmark of `rooftop.optimize` measures each variant of a model, and keeps finished rows if a later one
fails."""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch


@pytest.fixture
def optimize(script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = script("optimize")
    monkeypatch.setattr(module, "SECONDS", 0.05)
    return module


def test_a_row_has_each_way_and_what_the_search_found(
    optimize: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr("torch.compile", lambda model, **_: model)  # compiling takes 15 s; other tests compile
    noted: list[dict[str, Any]] = []

    def note(known: dict[str, Any]) -> None:
        noted.append(json.loads(json.dumps(known)))

    job = optimize.Job(optimize.QUICK, 1, "inference")
    plan = tmp_path / "plans" / "plan.json"
    with optimize.Turn(tmp_path / "turns") as turn:
        row = optimize.measured(job, torch.device("cpu"), turn, note, 3.0, plan)
    assert not row["errors"]
    assert row["done"]
    assert row["ms"].keys() == row["spread"].keys() == {"eager", "compile default", "optimize"}
    first = next(known for known in noted if "kept" in known)
    assert first["kept"] == row["kept"]
    assert "compile default" not in first["ms"], "figures are written as soon as they are measured"
    assert {change["rule"] for change in row["changes"]} >= {"fold-norms", "cuda-graphs"}
    assert row["search"]["before"] > 0
    assert json.loads(plan.read_text())["rules"] == row["kept"]
    with optimize.Turn(tmp_path / "turns") as turn:
        row = optimize.measured(job, torch.device("cpu"), turn, note, 3.0, plan)
    assert not row["errors"]
    assert row["seconds"].keys() == {"plan", "compile default"}, "the plan is applied without a search"


def test_a_row_without_compiling_and_graphs(optimize: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    job = optimize.Job(optimize.QUICK, 1, "inference")
    with optimize.Turn(tmp_path / "turns") as turn:
        row = optimize.measured(job, torch.device("cpu"), turn, lambda row: None, 3.0, uncompiled=True)
    assert not row["errors"]
    assert row["ms"].keys() == {"eager", "optimize"}
    tried = {change["rule"] for change in row["changes"]}
    assert "fold-norms" in tried
    assert not tried & {"compile", "compile-blocks", "compile-reduce-overhead", "cuda-graphs"}


def test_a_search_gives_its_turn_away_while_it_compiles_and_its_clock_stands_still(
    optimize: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "turns"
    with optimize.Turn(path) as turn, optimize.Turn(path) as other, path.open() as third:
        turn.take()
        with optimize.search_in(turn):
            clock = optimize.searching.time
            began, real = clock.perf_counter(), time.perf_counter()
            with optimize.searching.Deadline(60.0):
                other.take()  # would block if the turn had not been passed on
                threading.Timer(0.3, other.pass_on).start()
            assert time.perf_counter() - real >= 0.3
            assert clock.perf_counter() - began < 0.2
        assert optimize.searching.time is time
        with pytest.raises(BlockingIOError):
            fcntl.flock(third, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_way_that_raises_is_an_error_of_its_row(
    optimize: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")

    def broken(model: Any, **_: Any) -> Any:
        raise ValueError("no compiler")

    monkeypatch.setattr("torch.compile", broken)
    job = optimize.Job(optimize.QUICK, 2, "training")
    with optimize.Turn(tmp_path / "turns") as turn:
        row = optimize.measured(job, torch.device("cpu"), turn, lambda known: None, 0.5)
    assert row["errors"] == {"compile default": "ValueError: no compiler"}
    assert row["ms"].keys() == {"eager", "optimize"}


@pytest.mark.parametrize(("name", "limit", "said"), [("nothing", 120.0, "KeyError"), ("tiny_gpt2", 0.2, "not done")])
def test_a_row_that_fails_or_takes_too_long_is_a_row(
    optimize: ModuleType, name: str, limit: float, said: str, tmp_path: Path
) -> None:
    options = argparse.Namespace(
        budget=3.0,
        quick=True,
        limit=limit,
        logs=tmp_path / "logs",
        plans=None,
        autotune=False,
        uncompiled=False,
        cache=None,
    )
    (place,) = optimize.places([None], 1, tmp_path)
    row = optimize.row_of(optimize.Job(name, 1, "inference"), place, 300.0, options)
    assert said in row["errors"]["row"]
    assert (row["model"], row["ms"]) == (name, {})
    assert len(list((tmp_path / "logs").iterdir())) == 1


def test_the_most_telling_rows_come_first(optimize: ModuleType) -> None:
    found = optimize.jobs([], "both", "both")
    assert [name for name, job in zip(optimize.TELLING, found, strict=False) if not job.named(name)] == []
    assert len(set(found)) == len(found) == 3 * 13 + 12
    assert [str(job) for job in optimize.jobs(["gpt2:1"], "both", "both")] == ["gpt2 batch 1 inference"]
    assert [str(job) for job in optimize.jobs(["gpt2:training"], "both", "both")] == ["gpt2 batch 8 training"]
    assert {job.batch for job in optimize.jobs([], "small", "inference")} == {1}
    assert {job.mode for job in optimize.jobs(["bert"], "both", "training")} == {"training"}
    assert {job.name for job in optimize.jobs(["level3"], "both", "both")} == set(optimize.level3.NETWORKS)
    assert all(optimize.jobs([name], "both", "both") for name in optimize.AUTOTUNED)
    assert [job.name for job in optimize.jobs(["vit"], "small", "both")][:1] == ["vit_base_patch16_224"]


def test_a_row_that_does_not_exist_is_an_error(
    optimize: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["optimize.py", "--only", "resnet50", "resnet51"])
    with pytest.raises(SystemExit):
        optimize.main()
    assert "no row is named 'resnet51': resnet50:128, gpt2:1" in capsys.readouterr().err


def test_places_share_the_processors(optimize: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(32)))
    found = optimize.places([0, 1], optimize.AT_ONCE, tmp_path)
    assert len(found) == 2 * optimize.AT_ONCE
    cores = [core for place in found for core in place.cores]
    assert len(set(cores)) == len(cores) <= 32
    assert {place.gpu: place.turns.name for place in found} == {0: "turns0", 1: "turns1"}
    monkeypatch.setattr(optimize, "first_sibling", lambda core: (core % 16, core))
    for place in optimize.places([0, 1], optimize.AT_ONCE, tmp_path):
        assert {(core + 16) % 32 for core in place.cores} == set(place.cores), "both threads of each physical core"


@pytest.mark.parametrize("name", ["googlenet", "shufflenet", "unet_softmax", "net_vlad", "mini_gpt_block", "mamba2"])
def test_networks_of_level_3(optimize: ModuleType, name: str) -> None:
    """Two samples, in images as small as the pools allow."""
    torch.manual_seed(0)
    _, make, (_, *shape) = optimize.level3.NETWORKS[name]
    shape = [min(size, 64) for size in shape] if len(shape) == 3 else shape
    model = optimize.level3.StateSpace(2) if name == "mamba2" else make()
    with torch.no_grad():
        found = model.eval()(torch.rand(2, *shape))
    assert found.isfinite().all()
    assert found.std() > 0


def test_the_state_space_is_the_recurrence(optimize: ModuleType) -> None:
    torch.manual_seed(0)
    model = optimize.level3.StateSpace(2, tokens=12, heads=3, width=4, state=5, chunk=4).double()
    x = torch.randn(2, 12, 3, 4, dtype=torch.float64)
    state, expected = torch.zeros(2, 3, 4, 5, dtype=torch.float64), []
    for t in range(12):
        update = torch.einsum("bhn,bhp->bhpn", model.B[:, t], x[:, t])
        state = model.A[:, t].exp()[..., None, None] * state + update
        expected.append(torch.einsum("bhn,bhpn->bhp", model.C[:, t], state))
    torch.testing.assert_close(model(x), torch.stack(expected, 1))


@pytest.mark.parametrize(("faster_ms", "errors"), [(0.5, {}), (1.3, {}), (0.5, {"row": "ValueError"})])
def test_rows_are_written_and_errors_and_slower_ones_are_failures(
    optimize: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faster_ms: float, errors: dict[str, str]
) -> None:
    measured = []

    def row_of(job: Any, place: Any, left_s: float, options: argparse.Namespace) -> dict[str, Any]:
        assert (place.gpu, options.budget) == (None, 3.0)
        measured.append(job)
        ms = {"eager": 2.0, "compile default": 1.0, "optimize": 0.5 if job.mode == "training" else faster_ms}
        close = [{"rule": "compile", "predicted_ms": 1.0, "measured_ms": 1.2, "close": True}]
        named = {"model": job.name, "batch": job.batch, "mode": job.mode, "errors": errors, "predictions": close}
        named["done"] = not errors
        return {**named, "ms": ms, "spread": dict.fromkeys(ms, 0.05)}

    pytest.importorskip("transformers")
    monkeypatch.setattr(optimize, "row_of", row_of)
    out = tmp_path / "optimize.json"
    monkeypatch.setattr(sys, "argv", ["optimize.py", "--quick", "--budget", "3", "--out", str(out)])
    assert optimize.main() == bool(errors)
    written = json.loads(out.read_text())
    assert optimize.failed(written["results"], quick=False) == (bool(errors) or faster_ms > 1)
    assert sorted(row["mode"] for row in written["results"]) == ["inference", "training"]
    assert written["summary"]["training, over compile default"] == pytest.approx(2.0)
    assert written["summary"]["small batch, over best"] == pytest.approx(1 / faster_ms)
    assert written["summary"]["predictions within 30%"] == 1.0
    assert len(measured) == 2
    optimize.main()
    assert len(measured) == (4 if errors else 2), "finished rows are not measured again"
    assert len(json.loads(out.read_text())["results"]) == 2


@pytest.mark.parametrize(("ms", "slow"), [(1.0, False), (1.04, False), (1.3, True)])
def test_slower_is_beyond_the_spread_of_the_best(optimize: ModuleType, ms: float, slow: bool) -> None:
    times = {"eager": 2.0, "compile default": 1.0, "optimize": ms}
    assert optimize.slower({"ms": times, "spread": dict.fromkeys(times, 0.05)}) is slow


def test_predictions_are_close_within_a_third_or_if_both_are_small(optimize: ModuleType) -> None:
    def change(predicted_ms: float, measured_ms: float | None) -> dict[str, Any]:
        return {"rule": "compile", "predicted_ms": predicted_ms, "measured_ms": measured_ms}

    changes = [change(1.0, 1.2), change(1.0, 2.0), change(0.0, 0.1), change(0.0, 1.0), change(1.0, None)]
    found = optimize.predictions(changes, 10.0)
    assert [each["close"] for each in found] == [True, False, True, False]
