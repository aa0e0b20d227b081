"""Cost of operators of sparse tensors: conversions, merging, masks, reductions, and products with a sparse result.

The formulas of ordinary operators (`mm`, `add`, `relu`) count their sparse operands with the help of `sparse_operands`.
This file covers the operators that exist only for sparse tensors. Wrapping indices and values in a tensor moves nothing
(`metadata`). A conversion moves the data that the result does not share with the operand.
"""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, is_sparse, parts, stored_elements, tensor_bytes
from rooftop.cost.formulas.matmuls import matrix_flops, merged
from rooftop.cost.formulas.ordering import comparison_depth
from rooftop.cost.formulas.softmaxes import SOFTMAX_BACKWARD_FLOPS, SOFTMAX_FLOPS
from rooftop.cost.formulas.sparse_operands import (
    addressed_bytes,
    factor_bytes,
    index_bytes,
    new_bytes,
    value_bytes,
)
from rooftop.cost.formulas.streaming import arithmetic, aten, elements, moved_once, requested, streaming
from rooftop.cost.registry import cost_of


@cost_of(*aten("_coalesce"))
def coalesce(call: Call) -> Cost:
    """The operator sorts the nnz coordinates (nnz log₂ nnz comparisons) and adds values with the same coordinates."""
    scattered: Tensor = call["self"]
    entries = scattered._nnz()
    additions = stored_elements(scattered) - stored_elements(call.out)
    return Cost(
        tensor_bytes(scattered),
        tensor_bytes(call.out),
        arithmetic(entries * comparison_depth(entries) + additions, [scattered]),
    )


@cost_of(*aten("_to_sparse _to_sparse_bsc _to_sparse_bsr _to_sparse_csc _to_sparse_csr"))
def to_sparse(call: Call) -> Cost:
    """A conversion from a dense tensor compares each element with zero. A conversion between sparse layouts moves only
    the parts that the result does not share with the operand.

    For example, a conversion from COO to CSR reads the row index of each entry and writes the row pointers. The result
    may share the columns and the values with the operand.
    """
    source: Tensor = call["self"]
    if not is_sparse(source):
        return Cost(tensor_bytes(source), tensor_bytes(call.out), arithmetic(source.numel(), [source]))
    kept = distinct_bytes([source]) + distinct_bytes([call.out]) - distinct_bytes([source, call.out])
    return Cost(tensor_bytes(source) - kept, new_bytes([call.out], [source]))


cost_of("aten::_to_dense")(streaming())
cost_of(*aten("_convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _spdiags"))(streaming())
# The operator checks that pointers ascend and that plain indices are inside the shape. Only the comparisons of plain
# indices count, one each.
cost_of("aten::_validate_compressed_sparse_indices")(streaming(1, per="plain_idx"))
cost_of("aten::copy_sparse_to_sparse")(streaming(unread=["self"]))
cost_of("aten::_sparse_broadcast_to")(streaming())


@cost_of(*aten("sparse_mask _sparse_mask_projection"))
def sparse_mask(call: Call) -> Cost:
    """The operator picks the elements at the positions of the mask. The operator does not read the mask's values."""
    source, mask = call["self"], call["mask"]
    picked = tensor_bytes(source) if is_sparse(source) else addressed_bytes(source, stored_elements(call.out))
    return Cost(picked + index_bytes(mask), tensor_bytes(call.out))


cost_of(*aten("_sparse_csr_prod _sparse_csr_sum _sparse_sum"))(streaming(1, per="self"))


@cost_of("aten::_sparse_sum_backward")
def sum_backward(call: Call) -> Cost:
    """Backward repeats the gradient at each position of the operand. Backward does not need the operand's values."""
    gradient: Tensor = call["grad"]
    read = distinct_bytes([gradient, *parts(call["self"])[:-1]])
    return Cost(read, new_bytes([call.out], [gradient]))


# Missing elements count as minus infinity, so this is a softmax of the stored elements.
cost_of(*aten("_sparse_log_softmax _sparse_softmax"))(streaming(SOFTMAX_FLOPS))
cost_of(*aten("_sparse_log_softmax_backward_data _sparse_softmax_backward_data"))(
    streaming(SOFTMAX_BACKWARD_FLOPS, unread=["self"])
)


@cost_of("aten::sparse_sampled_addmm")
def sampled_product(call: Call) -> Cost:
    """`beta * self + alpha * (mat1 @ mat2)` at the stored elements of `self`. Each stored element takes 2 * k flops,
    where k is the inner dimension of the product, plus the arithmetic of beta and alpha."""
    pattern, left, right = call["self"], call["mat1"], call["mat2"]  # (m, n) sparse, (m, k), (k, n)
    beta, alpha = call["beta"], call["alpha"]
    count, depth = stored_elements(call.out), left.shape[-1]
    read = index_bytes(pattern) + (value_bytes(pattern) if beta != 0 else 0)
    read += addressed_bytes(left, count * depth) + addressed_bytes(right, count * depth)
    epilogue = (beta != 0) + (beta not in (0, 1)) + (alpha != 1)
    flops = merged(matrix_flops(left, count * depth), arithmetic(epilogue * count, [left]))
    return Cost(read, tensor_bytes(call.out), flops)


@cost_of("aten::_sparse_mm_reduce_impl")
def product_reduced(call: Call) -> Cost:
    """Cost of a product that takes maxima, minima or means instead of sums. For maxima and minima, the positions of the
    picked elements are also results."""
    left, right = call["self"], call["other"]  # (m, k) sparse, (k, n)
    count = stored_elements(left) * right.shape[-1]
    division = elements(call.results[0]) if call["reduce"] == "mean" else 0
    flops = merged(matrix_flops(left, count), arithmetic(division, [left]))
    return Cost(factor_bytes(left, right), distinct_bytes(call.results), flops)


@cost_of("aten::_sparse_mm_reduce_impl_backward")
def product_reduced_backward(call: Call) -> Cost:
    """Cost of the gradients of the matrix's values (reads the other factor) and of the other factor (reads the
    values)."""
    left, gradient, right = call["self"], call["grad_out"], call["weight"]  # (m, k) sparse, (m, n), (k, n)
    wanted = call["output_mask"]
    count = stored_elements(left) * right.shape[-1]
    read = index_bytes(left) + distinct_bytes([gradient, call["arg_out"]])
    read += (addressed_bytes(right, count) if wanted[0] else 0) + (value_bytes(left) if wanted[1] else 0)
    flops = matrix_flops(left, count * sum(wanted))
    return Cost(read, distinct_bytes(requested(call.results, wanted)), flops)


@cost_of(*aten("_sparse_semi_structured_mm _sparse_semi_structured_addmm"))
def semi_structured_product(call: Call) -> Cost:
    """Each row of the (m, k) factor keeps two of every four consecutive elements. They are stored as (m, k / 2), and
    their positions separately. The sparsity halves the number of multiplications.
    """
    kept = call["mat1"]
    epilogue = (call["beta"] != 0) + (call["beta"] not in (0, 1)) + (call["alpha"] != 1) if "beta" in call else 0
    flops = merged(
        matrix_flops(kept, kept.numel() * call["mat2"].shape[-1]), arithmetic(epilogue * call.out.numel(), [kept])
    )
    return moved_once(call, flops)


@cost_of("aten::_sparse_semi_structured_linear")
def semi_structured_linear(call: Call) -> Cost:
    """Cost of (..., k) times (n, k / 2) kept weights, then bias and activation."""
    source, kept = call["input"], call["weight"]
    epilogue = (call["bias"] is not None) + (call["activation"] not in (None, "none"))
    flops = merged(
        matrix_flops(source, source.numel() // source.shape[-1] * kept.numel()),
        arithmetic(epilogue * call.out.numel(), [source]),
    )
    return moved_once(call, flops)


@cost_of("aten::_cslt_sparse_mm")
def compressed_product(call: Call) -> Cost:
    """Cost of a semi-structured product whose kept elements and positions are in one buffer. The buffer's size
    does not determine k, so k is the number of rows of the dense factor."""
    depth = call["dense_B"].shape[0]  # (k, n)
    epilogue = (call["bias"] is not None) + (call["alpha"] is not None)
    flops = merged(
        matrix_flops(call["dense_B"], call.out.numel() * depth // 2),
        arithmetic(epilogue * call.out.numel(), [call.out]),
    )
    return moved_once(call, flops)


cost_of(*aten("_cslt_compress _to_sparse_semi_structured"))(streaming())
