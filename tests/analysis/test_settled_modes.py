"""Dispatch modes may end in any order. Afterwards, PyTorch's state is the same as if the modes had never been
active."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import rooftop
from rooftop.analysis.recordings import NEEDED
from rooftop.analysis.settled_modes import modes_settled
from rooftop.hardware.ceilings import Ceilings


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_modes_end_in_any_order(order: tuple[int, ...]) -> None:
    modes = [Counting() for _ in range(3)]
    with modes_settled():
        for mode in modes:
            mode.__enter__()
        for ended, index in enumerate(order, 1):
            modes[index].__exit__(None, None, None)
            before = [mode.calls for mode in modes]
            torch.ones(3)
            counted = [mode.calls - calls for mode, calls in zip(modes, before, strict=True)]
            assert counted == [int(place not in order[:ended]) for place in range(3)]
            assert _python_dispatch._is_in_torch_dispatch_mode == (ended < 3)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not _python_dispatch._is_in_non_infra_torch_dispatch_mode


@pytest.mark.parametrize("length", range(1, NEEDED + 1))
def test_a_mode_of_the_program_begins_and_ends_in_any_stage(length: int, ceilings: Ceilings) -> None:
    net = nn.Linear(8, 4)
    flops = []
    with rooftop.recording(ceilings=ceilings, device="cpu") as recorded:
        for _ in range(2 + NEEDED // length):
            with FlopCounterMode(display=False) as counter:
                for _ in range(length):
                    net(torch.ones(2, 8))
                    recorded.step()
            flops.append(counter.get_total_flops())
    assert flops == [length * 2 * 2 * 8 * 4] * len(flops)
    assert torch._C._len_torch_dispatch_stack() == 0
    recorded.report.table()
