"""Cost of matrix products: 2 m n k flops, and every operand is moved once.

A sparse factor counts by its stored elements. With a dense (k, n) factor the product takes 2 nnz n flops, and only the
addressed rows of the dense factor are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes, matrix_precision
from rooftop.cost.formulas.sparse_operands import factor_bytes, multiply_adds
from rooftop.cost.formulas.streaming import arithmetic, aten, elements, moved_once, requested, streaming
from rooftop.cost.registry import cost_of


def matrix_flops(left: Tensor, products: int) -> dict[str, int]:
    """Flops of this many multiply-adds in the precision of `left`. A complex multiply-add counts as four real
    multiply-adds."""
    return {matrix_precision(left): (8 if left.is_complex() else 2) * products} if products else {}


def merged(*parts: dict[str, int]) -> dict[str, int]:
    """Sum of several counts of flops by precision."""
    return {p: sum(part.get(p, 0) for part in parts) for p in dict.fromkeys(p for part in parts for p in part)}


@cost_of(*aten("_int_mm _sparse_sparse_matmul bmm dot hspmm mm mv vdot"))
def product(call: Call) -> Cost:
    """(m, k) @ (k, n), batched or not: 2 m n k."""
    left, right = call.read_tensors  # (..., m, k) or (k,); (..., k, n) or (k,)
    return Cost(
        factor_bytes(left, right), distinct_bytes([call.out]), matrix_flops(left, multiply_adds(left, right, call.out))
    )


@cost_of(*aten("_addmm_activation _sparse_addmm addbmm addmm addmv baddbmm sspaddmm"))
def product_and_sum(call: Call) -> Cost:
    """`beta * self + alpha * (left @ right)`. With beta 0, `self` is not read. A factor of 1 costs no
    multiplication."""
    left, right = call.read_tensors_except("self")  # (..., m, k); (..., k, n) or (k,)
    products = multiply_adds(left, right, call.out)
    if call.func._schema.name.startswith("aten::addbmm"):
        products *= left.shape[0]  # the operator sums over the batch, too
    beta, alpha = call["beta"], call["alpha"]
    epilogue = (beta != 0) + (beta not in (0, 1)) + (alpha != 1)
    if "use_gelu" in call:
        epilogue += 9 if call["use_gelu"] else 1  # 9 for gelu in its tanh form, 1 for relu
    addends = [call["self"]] if beta != 0 else []
    flops = merged(matrix_flops(left, products), arithmetic(epilogue * elements(call.out), [left]))
    return Cost(factor_bytes(left, right, *addends), distinct_bytes([call.out]), flops)


# An outer product added to a matrix takes one multiplication and one addition per element.
cost_of("aten::addr")(streaming(2))


@cost_of(*aten("_scaled_mm _scaled_mm_v2"))
def scaled_product(call: Call) -> Cost:
    """Cost of a product of fp8 operands. Each result is multiplied by the scales of both operands (2 flops)."""
    left: Tensor = call["self"]  # (m, k)
    epilogue = 2 + (call["bias"] is not None)
    flops = merged(
        matrix_flops(left, call.out.numel() * left.shape[-1]), arithmetic(epilogue * call.out.numel(), [call.out])
    )
    return moved_once(call, flops)


@cost_of(*aten("_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"))
def grouped_product(call: Call) -> Cost:
    """One product for each group of rows (mixture of experts). If both operands are matrices, the groups divide the
    contracted dimension."""
    left, right = call["self"], call["mat2"]  # (m, k) or (g, m, k); (k, n) or (g, k, n)
    if left.ndim == right.ndim == 2:
        products = left.shape[0] * left.shape[1] * right.shape[1]
    else:
        products = call.out.numel() * left.shape[-1]
    return moved_once(call, matrix_flops(left, products))


@cost_of("aten::_foreach_mm")
def products(call: Call) -> Cost:
    """Cost of the products of two lists of matrices: first with first, second with second, and so on."""
    pairs = zip(call["self"], call["mat2"], strict=True)
    flops = merged(*(matrix_flops(left, left.shape[0] * left.shape[1] * right.shape[1]) for left, right in pairs))
    return moved_once(call, flops)


@cost_of("aten::_trilinear")
def trilinear(call: Call) -> Cost:
    """Sums of products of three tensors (`nn.Bilinear`): one multiply-add for each combination of their dimensions. Two
    factors are multiplied and summed over the longest summed dimension first. The result has so few elements that its
    multiplication with the third factor is not counted.
    """
    first, second, third = call["i1"], call["i2"], call["i3"]
    sizes = torch.broadcast_shapes(
        *(
            _expanded(tensor, call[name])
            for tensor, name in ((first, "expand1"), (second, "expand2"), (third, "expand3"))
        )
    )
    return Cost(distinct_bytes([first, second, third]), distinct_bytes([call.out]), matrix_flops(first, prod(sizes)))


def _expanded(tensor: Tensor, dimensions: Sequence[int]) -> tuple[int, ...]:
    """Insert sizes of 1 into the tensor's shape, so that the returned shape has them at the indices `dimensions`."""
    sizes = list(tensor.shape)
    for dimension in sorted(dimensions):
        sizes.insert(dimension, 1)
    return tuple(sizes)


@cost_of(*aten("linear mkldnn_linear"))
def linear(call: Call) -> Cost:
    """Cost of a linear layer that PyTorch runs as one operator, as it does for nested tensors and opaque layouts."""
    source, weight, bias = call.read_tensors[0], call["weight"], call["bias"]  # (..., k), (n, k), (n,)
    flops = merged(
        matrix_flops(source, source.numel() * weight.shape[0]),
        arithmetic((bias is not None) * call.out.numel(), [source]),
    )
    return moved_once(call, flops)


@cost_of("aten::linear_backward")
def linear_backward(call: Call) -> Cost:
    """Cost of the gradients of the input (reads the weights), of the weights (reads the input), and of the bias (a
    sum)."""
    source, gradient, weight = call["self"], call["grad_output"], call["weight"]
    to_input, to_weight, to_bias = call["output_mask"]
    flops = merged(
        matrix_flops(source, source.numel() * weight.shape[0] * (to_input + to_weight)),
        arithmetic(to_bias * gradient.numel(), [source]),
    )
    read = [gradient, source if to_weight else None, weight if to_input else None]
    return Cost(distinct_bytes(read), distinct_bytes(requested(call.results, call["output_mask"])), flops)
