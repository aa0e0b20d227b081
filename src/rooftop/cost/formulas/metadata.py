"""Operators that cost nothing because they access no elements: views, allocations, queries about a tensor.

These operators are listed by name, so an unlisted operator counts as uncovered and never as free.
"""

from __future__ import annotations

from rooftop.cost.accounting import FREE, Call, Cost
from rooftop.cost.formulas.streaming import aten
from rooftop.cost.registry import cost_of

VIEWS = """
    _conj _fw_primal _indices _make_dual _mkldnn_transpose _neg_view _nested_get_jagged_dummy _nested_get_lengths
    _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets _nested_get_ragged_idx _nested_get_values
    _nested_view_from_buffer _nested_view_from_jagged _reshape_alias _sparse_compressed_tensor_unsafe
    _sparse_coo_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors _unsafe_view _values alias as_strided
    ccol_indices chunk col_indices crow_indices detach diagonal expand expand_as indices lift lift_fresh movedim
    narrow numpy_T permute positive reshape row_indices select slice slice_inverse sparse_compressed_tensor split
    split_with_sizes squeeze swapaxes t tensor_split transpose unbind unfold unsafe_chunk unsafe_split
    unsafe_split_with_sizes unsqueeze values view view_as view_as_complex view_as_real
"""

ALLOCATIONS = """
    _cudnn_init_dropout_state _efficientzerotensor _empty_affine_quantized _empty_per_channel_affine_quantized
    _lazy_clone _resize_output _resize_output_ _sparse_compressed_tensor_with_dims _sparse_coo_tensor_with_dims
    empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided resize resize_
    resize_as resize_as_ resize_as_sparse_ set set_ sparse_coo_tensor sparse_resize_ sparse_resize_and_clear_
"""

QUESTIONS = """
    _assert_scalar _assert_tensor_metadata _coalesced _coalesced_ _dimI _dimV _functional_assert_scalar
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size _fused_sdp_choice
    _has_compatible_shallow_copy_type _has_same_storage_numel _make_dep_token _nested_tensor_size
    _nested_tensor_storage_offsets _nested_tensor_strides _nnz _print _use_cudnn_ctc_loss _use_miopen_ctc_loss
    _version dense_dim dim is_coalesced is_contiguous is_non_overlapping_and_dense is_pinned is_same_size is_set_to
    is_strides_like_format numel q_per_channel_axis q_per_channel_scales q_per_channel_zero_points q_scale
    q_zero_point qscheme record_stream requires_grad_ size sparse_dim storage_offset stride sym_constrain_range
    sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride
"""

OUTSIDE_ATEN = """
    mkldnn::_nbytes mkldnn::data_ptr profiler::_record_function_enter profiler::_record_function_enter_new
    profiler::_record_function_exit
"""


@cost_of(*aten(VIEWS), *aten(ALLOCATIONS), *aten(QUESTIONS), *OUTSIDE_ATEN.split())
def metadata(call: Call) -> Cost:
    """No bytes and no flops."""
    return FREE
