"""`rooftop.optimize` by the machine's own clock."""

from __future__ import annotations

import torch

import rooftop
from rooftop.models.vision.resnet import BasicBlock, ResNet


def test_a_network_of_convolutions() -> None:
    torch.manual_seed(0)
    model, x = ResNet(BasicBlock, (1, 1, 1, 1)).eval(), torch.randn(2, 3, 32, 32)
    found = rooftop.optimize(model, x, rules=["fold-norms", "channels-last", "constants"], budget_s=60)
    for change in found.changes:  # a gain smaller than the checks of a call is refused in the end
        assert change.verdict in ("kept", "no gain") or "together they are slower" in change.reason, change
    assert all(change.error is not None and change.error <= 1 for change in found.changes if change.verdict == "kept")
    with torch.no_grad():
        torch.testing.assert_close(found.module(x), model(x), rtol=1e-4, atol=1e-4)
    assert not found.module.unproven
    assert found.module.fc is model.fc
