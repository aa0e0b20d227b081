"""Sorting, selection and search: one pass over the data, and the comparisons of a sort or of a binary search."""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes
from rooftop.cost.formulas.streaming import arithmetic, aten, elements, streaming
from rooftop.cost.registry import cost_of


@cost_of(*aten("argsort msort sort"))
def sort(call: Call) -> Cost:
    """n log₂ n comparisons for each line of n elements."""
    keys: Tensor = call["self"]
    length = (keys.shape[call.get("dim", 0)] if keys.ndim else 1) or 1
    comparisons = keys.numel() * _bits(length)
    read, written = call.read_tensors, call.written_tensors
    return Cost(distinct_bytes(read), distinct_bytes(written), arithmetic(comparisons, read))


@cost_of(*aten("searchsorted bucketize"))
def binary_search(call: Call) -> Cost:
    """log₂ n comparisons for each value; the boundaries are read once."""
    boundaries: Tensor = call["boundaries"] if "boundaries" in call else call["sorted_sequence"]
    comparisons = elements(call["self"]) * _bits(boundaries.shape[-1])
    read = call.read_tensors
    return Cost(distinct_bytes(read), distinct_bytes([call.out]), arithmetic(comparisons, read))


# One comparison for each element is the least that selects; `unique` needs to have seen each of them too.
cost_of(*aten("kthvalue median mode nanmedian topk _unique _unique2 unique_consecutive unique_dim"))(
    streaming(1, per="self")
)
cost_of("aten::isin")(streaming(1))


def _bits(count: int) -> int:
    """log₂ of a count, rounded up."""
    return max(count - 1, 0).bit_length()
