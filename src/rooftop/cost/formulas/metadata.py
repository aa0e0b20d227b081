"""Operators that touch no element: views, allocations, questions about a tensor.

They are listed by name, so that an operator nobody thought of counts as uncovered and never as free.
"""

from __future__ import annotations

from rooftop.cost.accounting import FREE, Call, Cost
from rooftop.cost.formulas.streaming import aten
from rooftop.cost.registry import cost_of

VIEWS = """
    _conj _fw_primal _indices _make_dual _neg_view _reshape_alias _unsafe_view _values alias as_strided chunk
    col_indices crow_indices detach diagonal expand expand_as indices lift lift_fresh movedim narrow numpy_T permute
    positive reshape row_indices select slice slice_inverse split split_with_sizes squeeze swapaxes t tensor_split
    transpose unbind unfold unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze values view view_as
    view_as_complex view_as_real
"""

ALLOCATIONS = """
    _cudnn_init_dropout_state _efficientzerotensor _lazy_clone _resize_output _resize_output_ empty empty_like
    empty_permuted empty_strided new_empty new_empty_strided resize resize_ resize_as resize_as_ set set_
"""

QUESTIONS = """
    _assert_scalar _assert_tensor_metadata _fused_sdp_choice _has_compatible_shallow_copy_type _has_same_storage_numel
    _nnz _version dense_dim dim is_coalesced is_contiguous is_non_overlapping_and_dense is_pinned is_same_size is_set_to
    is_strides_like_format numel record_stream requires_grad_ size sparse_dim storage_offset stride sym_constrain_range
    sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride
"""

OUTSIDE_ATEN = """
    profiler::_record_function_enter profiler::_record_function_enter_new profiler::_record_function_exit
"""


@cost_of(*aten(VIEWS), *aten(ALLOCATIONS), *aten(QUESTIONS), *OUTSIDE_ATEN.split())
def metadata(call: Call) -> Cost:
    """Nothing moves and nothing is computed."""
    return FREE
