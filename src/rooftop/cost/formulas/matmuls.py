"""Matrix products: 2 m n k flops, every operand moved once.

A sparse factor counts by its stored elements: 2 nnz n flops with a dense (k, n), of which the rows addressed are read.
"""

from __future__ import annotations

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, matrix_precision
from rooftop.cost.formulas.sparse_operands import factor_bytes, multiply_adds
from rooftop.cost.formulas.streaming import arithmetic, aten, elements, streaming
from rooftop.cost.registry import cost_of


def matrix_flops(left: Tensor, products: int) -> dict[str, int]:
    """Flops of so many multiply-adds in the precision of `left`; a complex one is four real ones."""
    return {matrix_precision(left): (8 if left.is_complex() else 2) * products} if products else {}


def merged(*parts: dict[str, int]) -> dict[str, int]:
    """Flops by precision, added up."""
    return {p: sum(part.get(p, 0) for part in parts) for p in dict.fromkeys(p for part in parts for p in part)}


@cost_of(*aten("_int_mm _sparse_sparse_matmul bmm dot hspmm mm mv vdot"))
def product(call: Call) -> Cost:
    """(m, k) @ (k, n), batched or not: 2 m n k."""
    left, right = call.read_tensors  # (..., m, k), (..., k, n) or (k,)
    return Cost(
        factor_bytes(left, right), distinct_bytes([call.out]), matrix_flops(left, multiply_adds(left, right, call.out))
    )


@cost_of(*aten("_addmm_activation _sparse_addmm addbmm addmm addmv baddbmm sspaddmm"))
def product_and_sum(call: Call) -> Cost:
    """`beta * self + alpha * (left @ right)`: with beta 0, `self` is not read; a factor of 1 is no multiplication."""
    left, right = call.read_tensors_except("self")  # (..., m, k), (..., k, n) or (k,)
    products = multiply_adds(left, right, call.out)
    if call.func._schema.name.startswith("aten::addbmm"):
        products *= left.shape[0]  # the batch is summed too
    beta, alpha = call["beta"], call["alpha"]
    epilogue = (beta != 0) + (beta not in (0, 1)) + (alpha != 1)
    if "use_gelu" in call:
        epilogue += 9 if call["use_gelu"] else 1  # gelu's tanh form, or relu
    addends = [call["self"]] if beta != 0 else []
    flops = merged(matrix_flops(left, products), arithmetic(epilogue * elements(call.out), [left]))
    return Cost(factor_bytes(left, right, *addends), distinct_bytes([call.out]), flops)


# The outer product added to a matrix: one multiplication, one addition.
cost_of("aten::addr")(streaming(2))


@cost_of(*aten("_scaled_mm _scaled_mm_v2"))
def scaled_product(call: Call) -> Cost:
    """fp8 operands, scaled on the way out."""
    left: Tensor = call["self"]  # (m, k)
    epilogue = 2 + (call["bias"] is not None)
    flops = merged(
        matrix_flops(left, call.out.numel() * left.shape[-1]), arithmetic(epilogue * call.out.numel(), [call.out])
    )
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes([call.out]), flops)


@cost_of(*aten("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"))
def grouped_product(call: Call) -> Cost:
    """One product for each group of rows (mixture of experts). Two matrices: the groups split the contraction."""
    left, right = call["self"], call["mat2"]  # (m, k) or (g, m, k); (k, n) or (g, k, n)
    if left.ndim == right.ndim == 2:
        products = left.shape[0] * left.shape[1] * right.shape[1]
    else:
        products = call.out.numel() * left.shape[-1]
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes([call.out]), matrix_flops(left, products))
