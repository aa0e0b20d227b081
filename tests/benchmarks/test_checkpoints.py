"""The benchmarks of saving run: a training is saved while it is timed, and killed while it saves."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from rooftop.models import GptConfig
from rooftop.train import save_training

Script = Callable[[str], ModuleType]
TINY = GptConfig(vocabulary=31, layers=1, width=16, heads=2, kv_heads=2, hidden=32, positions=64)


def test_what_a_save_costs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script) -> None:
    benchmark = script("checkpoints")
    monkeypatch.setattr(benchmark, "SMALL", TINY)
    words = ["--small", "--folder", str(tmp_path / "run"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["checkpoints.py", *words, "--rounds", "2", "--steps", "1"])
    assert benchmark.main() == 0
    found = json.loads((tmp_path / "out").read_text())
    assert len(found["rounds"]) == 2
    # float32 parameters and two moments, and the step counts of 16 tensors
    assert found["bytes_of_rank"] == 12 * TINY.parameters + 4 * 16
    assert all(found[name] > 0 for name in ("plain_ms", "saving_ms", "blocked_s", "write_s", "percent_of_disk"))
    assert [*(tmp_path / "run").iterdir()] == []


def test_what_is_left_of_a_kill_is_looked_at(tmp_path: Path, script: Script) -> None:
    """The kills themselves are in tests/train/test_savers.py."""
    kills = script("checkpoint_kills")
    assert kills.step_in(tmp_path / "nowhere") == 0
    tokens = kills.Tokens([kills.np.arange(500) % 31], "counting")
    trainer = kills.GptTrainer(
        kills.TRAINING, tokens, kills.Layout(), kills.Layout().process_groups(), kills.torch.device("cpu")
    )
    trainer.advance()
    saved = save_training(tmp_path, trainer)
    assert kills.step_in(tmp_path) == 1
    content = bytearray((saved / "rank-00000.safetensors").read_bytes())
    content[-1] ^= 1
    (saved / "rank-00000.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="has changed"):
        kills.step_in(tmp_path)
