"""Costs of collectives on one rank of four, counted by hand: what the rank reads and writes in its own memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from rooftop.cost import CountingMode

RANKS = 4
PART = 4 * 6 * 5  # bytes of `part()`
WHOLE = RANKS * PART


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    """Four ranks, but only this one exists, so its collectives return immediately."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def part() -> Tensor:
    return torch.ones(6, 5)


def parts() -> list[Tensor]:
    return [part() for _ in range(RANKS)]


def whole() -> Tensor:
    return torch.ones(6 * RANKS, 5)


def world() -> Any:
    return dist.group.WORLD


def waited(result: Tensor) -> Tensor:
    return functional.wait_tensor(result)


def coalesced() -> None:
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu")):
        dist.all_reduce(part())
        dist.all_reduce(part())


COUNTED: list[tuple[str, Callable[[], object], int, int]] = [
    ("c10d::allreduce_", lambda: dist.all_reduce(part()), PART, PART),
    ("c10d::allreduce_coalesced_", coalesced, 2 * PART, 2 * PART),
    ("c10d::broadcast_", lambda: dist.broadcast(part(), 1), 0, PART),
    ("c10d::reduce_", lambda: dist.reduce(part(), 1), PART, 0),
    ("c10d::send", lambda: dist.send(part(), 1), PART, 0),
    ("c10d::recv_", lambda: dist.recv(part(), 1), 0, PART),
    ("c10d::allgather_", lambda: dist.all_gather(parts(), part()), PART, WHOLE),
    ("c10d::_allgather_base_", lambda: dist.all_gather_into_tensor(whole(), part()), PART, WHOLE),
    ("c10d::gather_", lambda: dist.gather(part(), parts()), PART, WHOLE),
    ("c10d::scatter_", lambda: dist.scatter(part(), parts()), WHOLE, PART),
    ("c10d::reduce_scatter_", lambda: dist.reduce_scatter(part(), parts()), WHOLE, PART),
    ("c10d::_reduce_scatter_base_", lambda: dist.reduce_scatter_tensor(part(), whole()), WHOLE, PART),
    ("c10d::alltoall_", lambda: dist.all_to_all(parts(), parts()), WHOLE, WHOLE),
    ("c10d::alltoall_base_", lambda: dist.all_to_all_single(whole(), whole()), WHOLE, WHOLE),
    ("c10d::barrier", lambda: dist.barrier(), 0, 0),
    ("_c10d_functional::all_reduce", lambda: waited(functional.all_reduce(part(), "sum", world())), PART, PART),
    (
        "_c10d_functional::all_gather_into_tensor",
        lambda: waited(functional.all_gather_tensor(part(), 0, world())),
        PART,
        WHOLE,
    ),
    (
        "_c10d_functional::reduce_scatter_tensor",
        lambda: waited(functional.reduce_scatter_tensor(whole(), "sum", 0, world())),
        WHOLE,
        PART,
    ),
]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize(("name", "run", "read", "write"), COUNTED, ids=[name for name, *_ in COUNTED])
def test_a_rank_reads_what_it_gives_and_writes_what_it_gets(
    name: str, run: Callable[[], object], read: int, write: int
) -> None:
    with CountingMode() as counted:
        run()
    (record,) = [record for record in counted.records if record.name == name]
    assert record.cost is not None, record.uncovered
    assert (record.cost.read_bytes, record.cost.write_bytes, record.cost.total_flops) == (read, write, 0)
