"""Cost of reads and writes at computed positions: embedding, gather, scatter, index, masks.

The number of *different* positions depends on values, which a cost must not read. By convention, all indices count as
different, up to the size of the indexed dimension, and masks count as true everywhere. So an operator with repeated
indices (a small vocabulary in a large batch) may be faster than its roof, by the bytes that repetition saves.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, tensor_bytes
from rooftop.cost.formulas.movement import gathering
from rooftop.cost.formulas.sparse_operands import addressed_bytes, new_bytes
from rooftop.cost.formulas.streaming import arithmetic, aten, streaming
from rooftop.cost.registry import Formula, cost_of

cost_of(*aten("_unsafe_index _unsafe_masked_index gather index index_select masked_select take"))(gathering("self"))
cost_of("aten::embedding")(gathering("weight"))

cost_of(*aten("masked_fill nonzero nonzero_static argwhere"))(streaming())
cost_of("aten::masked_fill_")(streaming(unread=["self"]))
cost_of("aten::repeat_interleave")(streaming())
# The operator writes the gradients at the mask's true positions one after another, then zeros.
cost_of("aten::masked_scatter_backward")(streaming())
cost_of("aten::embedding_dense_backward")(streaming(1, per="grad_output"))


@cost_of(*aten("_embedding_bag _embedding_bag_forward_only"))
def embedding_bag(call: Call) -> Cost:
    """The operator sums the rows of each bag. The operator reads rows and indices once. Each element of each row takes
    one addition, and with `per_sample_weights` also one multiplication."""
    table, indices = call["weight"], call["indices"]
    rows = min(indices.numel() * table.shape[1] * table.element_size(), tensor_bytes(table))
    flops = indices.numel() * table.shape[1] * (1 if call["per_sample_weights"] is None else 2)
    return Cost(
        rows + distinct_bytes(call.read_tensors_except("weight")),
        distinct_bytes(call.written_tensors),
        arithmetic(flops, [table]),
    )


@cost_of(*aten("_embedding_bag_backward _embedding_bag_dense_backward"))
def embedding_bag_backward(call: Call) -> Cost:
    """Backward adds each bag's gradient to the rows of the bag's indices, and writes the whole table of gradients. If
    the gradient is sparse, backward writes only the rows of the indices.

    Several arguments map an index to its bag (`offset2bag`, `offsets`, `bag_size`). Only one of these arguments counts
    as read.
    """
    gradient, indices = call["grad"], call["indices"]  # (bags, E), (indices,)
    read = [gradient, indices, _bags(call), call["per_sample_weights"]]
    flops = indices.numel() * gradient.shape[-1] * (1 if call["per_sample_weights"] is None else 2)
    # A sparse gradient holds `indices` itself as the positions of its rows, so they are not written.
    return Cost(distinct_bytes(read), new_bytes([call.out], [indices]), arithmetic(flops, [gradient]))


def _bags(call: Call) -> Tensor:
    """The argument that maps indices to bags: `offset2bag`, or `offsets` if `offset2bag` is empty, as for sums."""
    bags: Tensor = call["offset2bag"]
    return bags if bags.numel() or "offsets" not in call else call["offsets"]


@cost_of("aten::_embedding_bag_per_sample_weights_backward")
def embedding_bag_weights_backward(call: Call) -> Cost:
    """The gradient of each index's weight is the dot product of the index's row and its bag's gradient."""
    table, indices, gradient = call["weight"], call["indices"], call["grad"]
    count = indices.numel() * table.shape[1]
    read = addressed_bytes(table, count) + distinct_bytes([gradient, indices, _bags(call)])
    return Cost(read, tensor_bytes(call.out), arithmetic(2 * count, [table]))


@cost_of("aten::embedding_renorm")
def embedding_renorm(call: Call) -> Cost:
    """Cost of the norm of each indexed row (2 flops for each element), and of scaling the row."""
    table, indices = call["self"], call["indices"]
    count = indices.numel() * table.shape[1]
    rows = addressed_bytes(table, count)
    return Cost(rows + tensor_bytes(indices), rows, arithmetic(3 * count, [table]))


# The operator reduces each run of rows to one row; `lengths` has the number of rows of each run. Backward repeats the
# gradient of a run for each row of the run; for a mean it also divides.
cost_of("aten::segment_reduce")(streaming(1, per="data"))


@cost_of("aten::_segment_reduce_backward")
def segment_reduce_backward(call: Call) -> Cost:
    """Backward of sums and means does not read the data. Backward of a minimum or maximum searches the data for
    elements that equal the result. Backward of a product divides the result by the data."""
    extremum = call["reduce"] not in ("sum", "mean")
    read = call.read_tensors if extremum else call.read_tensors_except("data", "output")
    flops = call["data"].numel() * (0 if call["reduce"] == "sum" else 1)
    return Cost(distinct_bytes(read), tensor_bytes(call.out), arithmetic(flops, [call.out]))


def scattering(addressed: Callable[[Call], int], flops: int = 0, *, accumulates: bool | str = False) -> Formula:
    """A formula for an operator that writes elements of `self` at computed positions.

    In place, the operator accesses only these elements. Out of place, the operator writes a full copy of `self`. It
    reads the elements that it does not overwrite; if it accumulates, it reads all elements.

    Args:
        addressed: the number of elements that the indices address.
        flops: flops per addressed element, if the operator accumulates.
        accumulates: whether the old value of an addressed element is needed. A str names an argument: the old value is
            needed if that argument is given and true.
    """

    def formula(call: Call) -> Cost:
        target: Tensor = call["self"]
        adds = bool(call.get(accumulates)) if isinstance(accumulates, str) else accumulates
        count = addressed(call)
        touched = min(count * target.element_size(), tensor_bytes(target))
        read = distinct_bytes(call.read_tensors_except("self"))
        if call.in_place:
            read, write = read + adds * touched, touched
        else:
            read, write = read + tensor_bytes(target) - (not adds) * touched, tensor_bytes(call.out)
        return Cost(read, write, arithmetic(adds * flops * count, [target]))

    return formula


def _elements_of(name: str) -> Callable[[Call], int]:
    return lambda call: call[name].numel()


def _rows_of_index(call: Call) -> int:
    """Number of elements in the slices of `self` along `dim` that an index vector selects."""
    target, index = call["self"], call["index"]
    return index.numel() * target.numel() // max(target.shape[call["dim"]] if target.ndim else 1, 1)


def _indexed_elements(call: Call) -> int:
    """Number of elements that `self[indices]` addresses: the number of positions after the indices are broadcast, times
    the sizes of the dimensions without an index.

    A mask addresses as many elements as it has true values. The shape of the mask does not give that number, so all its
    values count as true.
    """
    target, indices = call["self"], [index for index in call["indices"] if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        return call["values"].numel()
    whole = [
        size
        for dimension, size in enumerate(target.shape)
        if dimension >= len(call["indices"]) or call["indices"][dimension] is None
    ]
    return prod(torch.broadcast_shapes(*(index.shape for index in indices))) * prod(whole)


cost_of(*aten("_index_put_impl_ _unsafe_index_put index_put"))(
    scattering(_indexed_elements, 1, accumulates="accumulate")
)
cost_of(*aten("_unsafe_masked_index_put_accumulate"))(scattering(_elements_of("values"), 1, accumulates=True))
cost_of(*aten("index_add index_reduce"))(scattering(_elements_of("source"), 1, accumulates=True))
cost_of("aten::index_copy")(scattering(_elements_of("source")))
cost_of("aten::masked_scatter")(scattering(_elements_of("source")))
cost_of("aten::index_fill")(scattering(_rows_of_index))
cost_of("aten::scatter")(scattering(_elements_of("index"), 1, accumulates="reduce"))
cost_of(*aten("scatter_add scatter_reduce"))(scattering(_elements_of("index"), 1, accumulates=True))
cost_of("aten::put")(scattering(_elements_of("index"), 1, accumulates="accumulate"))
cost_of(*aten("as_strided_scatter diagonal_scatter select_scatter slice_scatter"))(scattering(_elements_of("src")))
