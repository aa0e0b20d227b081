"""Rooftop predicts for which programs torch.compile uses channels last, and agrees with torch's own decision."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.graph import GraphLowering
from torch.func import functional_call
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from rooftop import models
from rooftop.analysis.advice.compiler_layouts import compiler_lays_out_channels_last
from rooftop.analysis.instruments import MeasuredOperator
from rooftop.cost import CountingMode


def conv(*channels: int, kernel: int = 3, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(*channels, kernel, padding=kernel // 2, groups=groups)


PROGRAMS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: models.resnet18(num_classes=4),
    "grouped": lambda: nn.Sequential(conv(3, 128), conv(128, 128, groups=4), conv(128, 128)),
    "grouped most": lambda: nn.Sequential(conv(3, 256), conv(256, 256, groups=2), conv(256, 64, kernel=1)),
    "depthwise": lambda: nn.Sequential(conv(3, 128), conv(128, 128, groups=128), conv(128, 128, kernel=1)),
    "narrowing": lambda: nn.Sequential(conv(3, 256), conv(256, 96)),
    "narrowing, kernel of one": lambda: nn.Sequential(conv(3, 256), conv(256, 96, kernel=1)),
    "small": lambda: nn.Sequential(conv(3, 32), conv(32, 64)),
    "narrowing, small": lambda: nn.Sequential(conv(3, 64), conv(64, 32), conv(32, 128)),
    "patches": lambda: nn.Sequential(nn.Conv2d(3, 192, 8, 8), nn.Flatten(2), nn.Linear(16, 16)),
    "few": lambda: nn.Sequential(conv(3, 128), *[nn.Sigmoid() for _ in range(320)]),
    "none": lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)),
}


@cache
def observed(name: str, train: bool) -> tuple[list[MeasuredOperator], GraphModule]:
    """A program's operators, and its graph in the form that a compiler gets. Operators and graph are the same on every
    device."""
    module, x = PROGRAMS[name]().train(train), torch.randn(2, 3, 32, 32)

    def phase() -> tuple[str, str]:
        return "", "backward" if torch._C._current_graph_task_id() >= 0 else "forward"

    with CountingMode(phase) as counted:
        y = module(x)
        if train:
            y.sum().backward()
    operators = [MeasuredOperator(record, 1.0, ()) for record in counted.records]

    def forward(state: dict[str, Tensor], image: Tensor) -> Tensor:
        with torch.no_grad():
            found: Tensor = functional_call(module, state, image)
        return found

    graph = make_fx(forward, tracing_mode="fake")(module.state_dict(), x)
    return operators, graph


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_torch_decides(name: str, train: bool, on_gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    operators, graph = observed(name, train)
    if on_gpu:
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    expected = GraphLowering.decide_layout_opt(graph, is_inference=not train)
    assert compiler_lays_out_channels_last(operators, on_gpu) is expected
    assert name != "none" or not expected
    assert not (on_gpu and name == "few" and expected)
