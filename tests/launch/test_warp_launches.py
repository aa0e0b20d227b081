"""Launches of Warp kernels whose arguments are packed once."""

from __future__ import annotations

import weakref

import pytest
import torch

from rooftop.launch.triton_launch import count_launches
from rooftop.launch.warp_launch import Launches

wp = pytest.importorskip("warp")


@wp.struct
class Scaled:
    items: wp.array(dtype=wp.float32)
    factor: wp.float32


@wp.kernel
def scale(scaled: Scaled, shift: wp.int32, stride: wp.int32):
    for i in range(wp.tid(), scaled.items.shape[0], stride):
        scaled.items[i] = scaled.items[i] * scaled.factor + wp.float32(shift)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if request.param == "cuda" else torch.device("cpu")


def scaled(items: torch.Tensor, factor: float) -> Scaled:
    struct = Scaled()
    struct.factor = factor
    struct.items = of(items)
    return struct


def of(items: torch.Tensor) -> wp.array:
    wp.init()
    return wp.from_torch(items)


def test_a_kernel_gets_what_a_struct_says_at_the_launch(device: torch.device) -> None:
    launches, first, second = Launches(device), torch.ones(5, device=device), torch.ones(9, device=device)
    struct = scaled(first, 2.0)
    with count_launches() as counted:
        launches(scale, 4, struct, 1, 4)
        struct.factor = 10.0
        launches(scale, 4, struct, 1, 4)
        struct.items = of(second)  # an array of another size
        launches(scale, 4, struct, 1, 4)
    assert first.tolist() == [31.0] * 5
    assert second.tolist() == [11.0] * 9
    assert counted == {"scale": 3}
    assert len(launches._kept) == 1


def test_other_arguments_are_not_those_of_before(device: torch.device) -> None:
    launches, items = Launches(device), torch.ones(5, device=device)
    launches(scale, 4, scaled(items, 2.0), 1, 4)
    launches(scale, 4, scaled(items, 3.0), 1, 4)  # another struct
    launches(scale, 4, scaled(items, 3.0), 2, 4)  # another number
    launches(scale, 2, scaled(items, 1.0), 1, 2)  # fewer threads
    launches(scale, 0, scaled(items, 5.0), 1, 1)
    assert items.tolist() == [33.0] * 5


def test_memory_is_held_until_launches_are_cleared(device: torch.device) -> None:
    launches = Launches(device)
    struct = scaled(torch.ones(5, device=device), 2.0)
    launches(scale, 4, struct, 0, 4)
    known = weakref.ref(struct)
    del struct
    assert known() is not None  # the cache keeps it, because its memory holds the arguments
    launches.clear()
    assert known() is None


@pytest.mark.gpu
def test_any_stream_and_graph() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    launches, items = Launches(device), torch.ones(1 << 20, device=device)
    struct = scaled(items, 2.0)
    launches(scale, 1024, struct, 0, 1024)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.graph(graph, stream=stream):
        launches(scale, 1024, struct, 1, 1024)
        launches(scale, 1024, struct, 0, 1024)
    assert items.unique().tolist() == [2.0]
    struct.factor = 100.0  # a graph keeps the arguments of its capture
    graph.replay()
    torch.cuda.synchronize()
    assert items.unique().tolist() == [10.0]
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        items.fill_(3.0)
        launches(scale, 1024, struct, 0, 1024)  # runs after sleep and fill, on the same stream
    torch.cuda.synchronize()
    assert items.unique().tolist() == [300.0]
