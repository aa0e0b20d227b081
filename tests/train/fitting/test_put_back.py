"""Tensors are restored if the flag is true, and unchanged otherwise."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch

from rooftop.testing import no_waiting_for_gpu
from rooftop.train.fitting.put_back import PutBack


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("back", [True, False])
def test_put_back_or_not(back: bool, device: str) -> None:
    tensors = [
        torch.arange(6.0, device=device).view(2, 3).t(),  # not contiguous
        torch.tensor(3, device=device),
        torch.tensor([True, False], device=device),
        torch.ones(2, 4, 3, 3, device=device).to(memory_format=torch.channels_last),
        torch.empty(0, device=device),
    ]
    before = [each.clone() for each in tensors]
    where = torch.tensor(back, device=device)
    kept = PutBack()
    with no_waiting_for_gpu() if device == "cuda" else nullcontext():
        for _ in range(2):  # the second call reuses the memory of the first call
            kept.take(tensors)
            for each in tensors:
                each.fill_(math.nan if each.is_floating_point() else 1)
            kept.put_back(where)
            if back:
                continue
            break
    for each, was in zip(tensors, before, strict=True):
        changed = torch.full_like(was, math.nan if was.is_floating_point() else 1)
        torch.testing.assert_close(each, was if back else changed, rtol=0, atol=0, equal_nan=True)


def test_other_tensors_take_other_memory() -> None:
    kept = PutBack()
    one, other = torch.ones(3), torch.ones(4)
    kept.take([one])
    kept.take([other])
    one.zero_()
    other.zero_()
    kept.put_back(torch.tensor(True))
    assert one.tolist() == [0, 0, 0]
    assert other.tolist() == [1, 1, 1, 1]
