"""The order of clusters in CUDA C++: on the CPU (`cuda_on_cpu`), and on a GPU."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from rooftop.scene.rendering import sort_clusters

COUNTS = (0, 1, 2, 63, 65, 1000, 2047, 2048, 2049, 9000)
ROOM = 9000


@pytest.mark.parametrize("count", COUNTS)
def test_on_the_cpu(count: int, cuda_on_cpu: Counter[str]) -> None:
    puts_in_order(count, ROOM, "cpu")
    assert cuda_on_cpu == {"sort_tiles": 1, "merge_tiles": 1}


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "room"), [*((count, ROOM) for count in COUNTS), (300_001, 1 << 19)])
def test_on_a_gpu(count: int, room: int) -> None:
    puts_in_order(count, room, "cuda")


def test_what_found_no_room_is_not_looked_for(cuda_on_cpu: Counter[str]) -> None:
    puts_in_order(5000, 100, "cpu")


def puts_in_order(count: int, room: int, device: str) -> None:
    generator = torch.Generator().manual_seed(count)
    pairs, whats = (torch.randperm(room, generator=generator) for _ in range(2))
    items = (pairs % 97) << 32 | whats  # all keys are different, or many are of one pair
    counters = torch.tensor([7, count, 7], dtype=torch.int32)
    there = min(count, room)
    found = torch.full((room,), -5, dtype=torch.int64)
    found[:there] = items[:there]
    out = torch.full_like(found, -3)
    found, counters, out = (tensor.to(device) for tensor in (found, counters, out))
    sort_clusters.sort(found, counters, 1, out)
    assert torch.equal(out[:there].cpu(), items[:there].sort().values)
    assert (out[there:] == -3).all()
    assert (found[there:] == -5).all()
