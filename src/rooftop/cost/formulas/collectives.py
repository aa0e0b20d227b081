"""Cost of collectives between ranks: the bytes that each rank must read and write in its own memory.

Traffic over the links is not counted, since ceilings are memory bandwidths. The report of several ranks shows
communication as time (see `rooftop.analysis.ranks.measuring`).
"""

from __future__ import annotations

from rooftop.cost.accounting import FREE, Call, Cost, distinct_bytes, tensors_in
from rooftop.cost.registry import cost_of

FILLED = ("output", "output_tensor", "output_tensors", "outputs", "output_lists")
"""Arguments that a c10d collective only writes, although its schema does not say so."""
TWO_SIDED = """
    _allgather_base_ _reduce_scatter_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ alltoall_
    alltoall_base_ gather_ reduce_scatter_ reduce_scatter_tensor_coalesced_ scatter_
"""
FUNCTIONAL = """
    all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_reduce all_reduce_
    all_reduce_coalesced all_reduce_coalesced_ all_to_all_single broadcast broadcast_ reduce_scatter_tensor
    reduce_scatter_tensor_coalesced reduce_scatter_tensor_out
"""


@cost_of(*(f"c10d::{name}" for name in TWO_SIDED.split()))
def two_sided(call: Call) -> Cost:
    """A collective with separate inputs and outputs reads the inputs and writes the outputs."""
    filled = list(tensors_in([call.get(name) for name in FILLED]))
    return Cost(distinct_bytes(call.read_tensors_except(*FILLED)), distinct_bytes(filled))


@cost_of("c10d::allreduce_", "c10d::allreduce_coalesced_")
def all_reduce(call: Call) -> Cost:
    """All-reduce reads and writes each tensor."""
    moved = distinct_bytes(tensors_in(call["tensors"]))
    return Cost(moved, moved)


@cost_of("c10d::send", "c10d::reduce_")
def given(call: Call) -> Cost:
    """Cost of `send` and `reduce` for one rank, which reads each tensor that it sends. In a reduce one rank also writes
    the sum. This write is not counted, because the formula does not know the rank.
    """
    return Cost(distinct_bytes(tensors_in(call["tensors"])))


@cost_of("c10d::recv_", "c10d::recv_any_source_", "c10d::broadcast_")
def taken(call: Call) -> Cost:
    """Cost of `recv` and `broadcast` for one rank, which writes each tensor that it receives. (The source of a
    broadcast reads the tensor instead: the same number of bytes.)"""
    return Cost(0, distinct_bytes(tensors_in(call["tensors"])))


@cost_of(*(f"_c10d_functional::{name}" for name in FUNCTIONAL.split()))
def functional(call: Call) -> Cost:
    """A functional collective reads each input tensor and writes each output tensor."""
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes(call.written_tensors))


@cost_of("c10d::barrier", "c10d::monitored_barrier_", "_c10d_functional::wait_tensor")
def waiting(call: Call) -> Cost:
    """Cost of a barrier, or of waiting for a collective: neither moves data."""
    return FREE
