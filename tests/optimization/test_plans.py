"""A plan is applied in a new process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from rooftop import optimize
from rooftop.models.vision.resnet import BasicBlock, ResNet

PROGRAM = """
import sys, torch, rooftop
from rooftop.models.vision.resnet import BasicBlock, ResNet

torch.manual_seed(0)
model, x = ResNet(BasicBlock, (1, 1, 1, 1)).eval(), torch.randn(2, 3, 32, 32)
found = rooftop.optimize(model, x, plan=sys.argv[1])
assert found.kept == ["fold-norms", "channels-last"], found
assert not found.differs, found.differs
with torch.no_grad():
    torch.testing.assert_close(found.module(x), model(x), rtol=1e-4, atol=1e-4)
assert not found.module.unproven
"""


def test_a_saved_plan_is_applied_in_a_new_process(
    tmp_path: Path, forked: Callable[[str, str], tuple[int, str, str]]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"version": 1, "rules": ["fold-norms", "channels-last"]}))
    optimize(ResNet(BasicBlock, (1, 1, 1, 1)).eval(), torch.randn(2, 3, 32, 32), plan=path).save(path)
    status, _, errors = forked(PROGRAM, str(path))
    assert status == 0, errors
