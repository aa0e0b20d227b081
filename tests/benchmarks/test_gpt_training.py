"""The benchmark of GPT-2's training runs, and refuses to compare sides that compute different things."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rooftop.hardware import Ceilings

Script = Callable[[str], ModuleType]


def test_both_sides_are_timed_and_start_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script, measured: Ceilings
) -> None:
    benchmark = script("gpt_training")
    words = ["gpt_training.py", "--quick", "--out", str(tmp_path / "out"), "--trials", "chunk 8192", "split"]
    monkeypatch.setattr(sys, "argv", words)
    assert benchmark.main() == 0
    found = json.loads((tmp_path / "out").read_text())["results"]
    assert [row["variant"] for row in found] == ["rooftop", "rooftop, chunk 8192", "rooftop, split", "PyTorch"]
    found = [found[0], found[3]]
    assert found[0]["first_loss"] == pytest.approx(found[1]["first_loss"], rel=0.01)
    assert all(row["tokens_per_s"] > 0 and row["percent_of_roof"] > 0 for row in found)


def test_trials_compute_the_same(monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    """Chunks of the loss have the rows of the trial, and split gradients are those of one product."""
    benchmark = script("gpt_training")
    with benchmark.chunked(2048):
        assert benchmark.linear_losses.chunk_rows(32768, 768, 50257) == 2048
    assert benchmark.linear_losses.chunk_rows(32768, 768, 50257) == 4096
    assert [benchmark.parts_for(*shape, 132) for shape in ((3072, 768), (2304, 768), (50304, 768))] == [3, 2, 1]
    dz, x = torch.randn(48, 30), torch.randn(48, 20)
    usual = benchmark.matmuls._products
    with benchmark.split_gradients():
        assert benchmark.matmuls._products is not usual
        dx, dweight = benchmark.matmuls._products(dz, x, None)
    assert benchmark.matmuls._products is usual
    assert dx is None
    torch.testing.assert_close(dweight, dz.t() @ x)
