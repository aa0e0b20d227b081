"""A plan is applied in a new process, within seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from rooftop import optimize
from rooftop.models import resnet18

LONGEST_S = 240.0
"""Forty times what it takes on an idle machine."""
PROGRAM = """
import sys, torch, rooftop
from rooftop.models import resnet18

torch.manual_seed(0)
model, x = resnet18().eval(), torch.randn(2, 3, 48, 48)
found = rooftop.optimize(model, x, plan=sys.argv[1])
assert found.kept == ["fold-norms", "channels-last"], found
assert not found.differs, found.differs
with torch.no_grad():
    torch.testing.assert_close(found.module(x), model(x), rtol=1e-4, atol=1e-4)
assert not found.module.unproven
"""


def test_a_saved_plan_is_applied_in_a_new_process(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, "rules": ["fold-norms", "channels-last"]}))
    optimize(resnet18().eval(), torch.randn(2, 3, 48, 48), plan=path).save(path)
    words = [sys.executable, "-c", PROGRAM, str(path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    assert done.returncode == 0, done.stderr
