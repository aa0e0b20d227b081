"""Collectives between ranks: what each rank must read and write in its own memory.

What must go over the links is not counted here: ceilings know bandwidths of memory, and the report of several ranks
shows communication as time (see `rooftop.analysis.ranks.measuring`).
"""

from __future__ import annotations

from rooftop.cost.accounting import FREE, Call, Cost, distinct_bytes
from rooftop.cost.registry import cost_of

EAGER = """
    _allgather_base_ _reduce_scatter_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ allreduce_
    allreduce_coalesced_ alltoall_ alltoall_base_ broadcast_ gather_ recv_ recv_any_source_ reduce_ reduce_scatter_
    reduce_scatter_tensor_coalesced_ scatter_ send
"""
FUNCTIONAL = """
    all_gather_into_tensor all_gather_into_tensor_coalesced all_reduce all_reduce_ all_reduce_coalesced
    all_reduce_coalesced_ all_to_all_single broadcast broadcast_ reduce_scatter_tensor reduce_scatter_tensor_coalesced
"""


@cost_of(*(f"c10d::{name}" for name in EAGER.split()), *(f"_c10d_functional::{name}" for name in FUNCTIONAL.split()))
def collective(call: Call) -> Cost:
    """Each tensor that goes in is read, each that comes out written."""
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes(call.written_tensors))


@cost_of("c10d::barrier", "c10d::monitored_barrier_", "_c10d_functional::wait_tensor")
def waiting(call: Call) -> Cost:
    """Nothing moves."""
    return FREE
