"""Cost of operators that move data without arithmetic: fills, copies, concatenations, padding.

Zero flops is not zero work: a copy or a concatenation must move bytes like any other operator.
"""

from __future__ import annotations

from functools import lru_cache

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, is_sparse, tensor_bytes
from rooftop.cost.formulas.sparse_operands import addressed_bytes, index_bytes, value_bytes
from rooftop.cost.formulas.streaming import aten, elements, streaming
from rooftop.cost.registry import Formula, cost_of

# These operators only write: the tensor that gives the shape (`zeros_like`, `fill_`) is not read.
FILLS = """
    arange eye fft_fftfreq fft_rfftfreq fill full full_like linspace logspace new_full new_ones new_zeros ones
    ones_like range scalar_tensor tril_indices triu_indices zero zeros zeros_like
"""

COPIES = """
    _chunk_cat _conj_copy _copy_from _fw_primal_copy _indices_copy _jagged_to_padded_dense_forward _make_dual_copy
    _neg_view_copy _nested_from_padded _nested_get_values_copy _nested_tensor_from_mask
    _nested_tensor_from_tensor_list _nested_view_from_buffer_copy _nested_view_from_jagged_copy
    _pack_padded_sequence _padded_dense_to_jagged_forward _pin_memory _reshape_alias_copy _reshape_copy _stack
    _to_copy _values_copy alias_copy block_diag cat ccol_indices_copy channel_shuffle clone col_indices_copy
    contiguous crow_indices_copy detach_copy diag_embed expand_copy flip im2col indices_copy lift_fresh_copy
    native_channel_shuffle permute_copy pixel_shuffle pixel_unshuffle reflection_pad1d reflection_pad2d
    reflection_pad3d repeat replication_pad1d replication_pad2d replication_pad3d roll rot90 row_indices_copy
    split_copy split_with_sizes_copy squeeze_copy stack t_copy to_mkldnn to_padded_tensor transpose_copy unbind_copy
    unsqueeze_copy values_copy view_as_complex_copy view_as_real_copy view_copy
"""

# The gradient of a view is a full tensor: the view's elements, and zeros elsewhere.
VIEW_GRADIENTS = "diagonal_backward select_backward slice_backward"

cost_of(*aten(FILLS))(streaming(unread=["self"]))
cost_of(*aten(COPIES))(streaming())
cost_of(*aten(VIEW_GRADIENTS))(streaming())
cost_of(*aten("copy"))(streaming(unread=["self"]))  # the old values of `self` are not read
# The operator reads only the mask, to check whether its ones are on the left.
cost_of("aten::_nested_tensor_from_mask_left_aligned")(streaming(1, per="mask", unread=["t"]))
# The operator copies the weights one after another into cuDNN's layout.
cost_of("aten::_cudnn_rnn_flatten_weight")(streaming())
# These operators add up the gradients of all copies of an element: in overlapping windows, or in the padding.
cost_of(*aten("unfold_backward"))(streaming(1, per="grad_in"))
cost_of(*aten("col2im"))(streaming(1, per="self"))
cost_of(
    *aten("reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward"),
    *aten("replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward"),
)(streaming(1, per="grad_output", unread=["self"]))


def gathering(table: str) -> Formula:
    """A formula for an operator that picks elements of its argument `table`. The operator reads at most one element of
    this argument for each element of the result."""

    def formula(call: Call) -> Cost:
        source: Tensor = call[table]
        picked = addressed_bytes(source, elements(call.out))
        if is_sparse(source):  # the operator reads all indices, and the values that it picks
            picked = index_bytes(source) + value_bytes(call.out)
        return Cost(picked + distinct_bytes(call.read_tensors_except(table)), tensor_bytes(call.out))

    return formula


# A negative padding crops, so only the kept elements are read.
cost_of(*aten("constant_pad_nd diagonal_copy narrow_copy select_copy slice_copy as_strided_copy unfold_copy"))(
    gathering("self")
)


@cost_of("aten::tril", "aten::triu")
def triangle(call: Call) -> Cost:
    """The operator (tril or triu) reads the triangle that it keeps, and writes the whole matrix. In place, it only
    writes zeros to the other triangle."""
    matrix: Tensor = call["self"]  # (..., rows, columns)
    rows, columns = matrix.shape[-2:]
    if call.func._schema.name.startswith("aten::tril"):
        kept = _elements_below(rows, columns, call["diagonal"] + 1)
    else:
        kept = rows * columns - _elements_below(rows, columns, call["diagonal"])
    read = tensor_bytes(matrix) * kept // max(rows * columns, 1)
    if call.in_place:
        return Cost(0, tensor_bytes(matrix) - read)
    return Cost(read, tensor_bytes(call.out))


@lru_cache(maxsize=1024)
def _elements_below(rows: int, columns: int, diagonal: int) -> int:
    """The number of elements of a matrix strictly below the diagonal with index `diagonal`."""
    return sum(min(max(row + diagonal, 0), columns) for row in range(rows))
