"""Cost of sorting, selection and search: one pass over the data, and the comparisons of a sort or a binary search."""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensors_in
from rooftop.cost.formulas.streaming import arithmetic, aten, elements, streaming
from rooftop.cost.registry import cost_of


def comparison_depth(count: int) -> int:
    """Comparisons of a binary search among `count` values: log₂ of `count`, rounded up."""
    return max(count - 1, 0).bit_length()


@cost_of(*aten("argsort msort sort"))
def sort(call: Call) -> Cost:
    """A sort takes n log₂ n comparisons for each line of n elements."""
    keys: Tensor = call["self"]
    length = (keys.shape[call.get("dim", 0)] if keys.ndim else 1) or 1
    comparisons = keys.numel() * comparison_depth(length)
    read, written = call.read_tensors, call.written_tensors
    return Cost(distinct_bytes(read), distinct_bytes(written), arithmetic(comparisons, read))


@cost_of(*aten("searchsorted bucketize"))
def binary_search(call: Call) -> Cost:
    """A binary search takes log₂ n comparisons for each value. The boundaries are read once."""
    boundaries: Tensor = call["boundaries"] if "boundaries" in call else call["sorted_sequence"]
    comparisons = elements(call["self"]) * comparison_depth(boundaries.shape[-1])
    read = call.read_tensors
    return Cost(distinct_bytes(read), distinct_bytes([call.out]), arithmetic(comparisons, read))


@cost_of(
    *aten("_histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors histogram"),
)
def histogram(call: Call) -> Cost:
    """For each point of (..., D), a histogram takes a binary search among the edges of each dimension, and an addition.

    If the number of bins is given instead of the edges, a subtraction and a division for each coordinate find its bin.
    If the range is not given either, two comparisons for each coordinate first find the minimum and maximum.
    """
    points: Tensor = call["self"]
    bins, name = call["bins"], call.func._schema.name
    if name == "aten::_histogramdd_bin_edges":  # this operator computes only bounds and edges
        return streaming(2, per="self")(call)
    edges = list(tensors_in(bins))
    if edges:
        dimensions = len(edges) if isinstance(bins, (list, tuple)) else 1
        search = sum(points.numel() // dimensions * comparison_depth(edge.numel()) for edge in edges)
    else:
        dimensions = len(bins) if isinstance(bins, (list, tuple)) else 1
        search = points.numel() * (2 + 2 * (call["range"] is None))
    read = call.read_tensors
    flops = search + points.numel() // dimensions
    return Cost(distinct_bytes(read), distinct_bytes(call.written_tensors), arithmetic(flops, read))


# These operators need at least one comparison for each element.
cost_of(
    *aten("kthvalue median mode nanmedian topk _unique _unique2 unique_consecutive unique_dim unique_dim_consecutive")
)(streaming(1, per="self"))
cost_of("aten::isin")(streaming(1))
