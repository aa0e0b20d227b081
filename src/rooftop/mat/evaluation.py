"""Compute the value of an expression into memory.

Operations that are not elementwise run first: BLAS and LAPACK compute matrix products and inverses. A product and the
addition of a term to it are one call. All other operations make one pass over memory: blocks of rows on the CPU
(`row_programs.py`), one kernel on a GPU (`kernel_programs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rooftop.launch.numba_loops import worth_a_loop
from rooftop.launch.triton_launch import INTERPRETED
from rooftop.mat.blocks import Block, new_block
from rooftop.mat.copies import apart, overlap, same_elements
from rooftop.mat.expressions import BITWISE, FLOATING, MatExpr, leaf, node, rebuilt, topological
from rooftop.mat.planning import ExpressionPlan, of, plan_of, simpler
from rooftop.mat.products import gemm_of, inverse_of, multiply_into
from rooftop.mat.type_codes import CV_64F, CV_MAKETYPE, CV_MAT_DEPTH, DEPTHS, type_code
from rooftop.mat.whole_numbers import store_whole_numbers


def store(expression: MatExpr, dst: Block, rtype: Any = None) -> None:
    """Evaluate an expression into a header's memory.

    Args:
        dst: the target. `create` sets the target's size and type, and allocates nothing if both already match. `dst`
            may overlap the expression's Mats.
        rtype: the depth of the stored numbers: a depth, a type (its channels are ignored), or a dtype; None keeps the
            expression's depth.

    Raises:
        ValueError: dst has elements on another device.
    """
    depth, type = expression.depth(), expression._type
    if rtype is not None and rtype != -1:
        depth = CV_MAT_DEPTH(type_code(rtype))
        type = CV_MAKETYPE(depth, expression.channels())
    dst.prepare_for(expression._sizes, type, expression._device)
    if not dst.empty():
        evaluate_into(expression, dst._writable(), depth)


def evaluate_into(expression: MatExpr, target: Tensor, depth: int) -> None:
    """Write the expression's value into a tensor (..., channels) of this depth."""
    nodes = topological(expression)
    by_kernel = target.device.type != "cpu" or INTERPRETED
    if by_kernel and _launched(nodes, target, depth):
        return
    if any(each._operation in ("product", "inverse") for each in nodes):
        root = simpler(expression)
        if _multiplied(root, target, depth):
            return
        nodes = topological(rebuilt(root, _without_matrices))
    plan = plan_of(nodes, depth)
    if plan.has_wide_bits and not plan.is_large:
        nodes = topological(rebuilt(nodes[-1], _without_wide_bits))
        plan = plan_of(nodes, depth)
    into = target.view(DEPTHS[depth].carrier) if plan.bits or plan.is_copy else target
    tensors = [tensor_of(each, plan.bits or plan.is_copy) for each in nodes if each._operation == "mat"]
    if plan.is_copy:
        into.copy_(apart(tensors[0], into))
        return
    if plan.is_large:
        _store_large(plan, nodes[-1], [apart(tensor, into) for tensor in tensors], into)
        return
    if by_kernel:
        from rooftop.mat.kernel_programs import Evaluation  # this imports Triton

        Evaluation(nodes, target, depth).run(plan, tensors, into)
        return
    tensors = [apart(tensor, into) for tensor in tensors]
    if not worth_a_loop(into.numel()):
        plan.rows.run(tensors, into)
    else:
        from rooftop.mat import loop_programs

        loop_programs.run(plan, tensors, into)


def _store_large(plan: ExpressionPlan, root: MatExpr, tensors: Sequence[Tensor], into: Tensor) -> None:
    """Store integers that may exceed int64. For a floating depth, the integers are first rounded to float64."""
    if plan.depth not in FLOATING or plan.depth == CV_64F:
        store_whole_numbers(plan.root, plan.bounds, plan.leaves, tensors, into, plan.depth)
        return
    wide = new_block(root._sizes, CV_MAKETYPE(CV_64F, root.channels()), root._device)
    store_whole_numbers(plan.root, plan.bounds, plan.leaves, tensors, wide._writable(), CV_64F)
    evaluate_into(leaf(wide), into, plan.depth)


def _launched(nodes: Sequence[MatExpr], target: Tensor, depth: int) -> bool:
    """Launch the kernel that is cached for this expression and its Mats' types, sizes, steps and alignments. Return
    whether there is one and it was launched."""
    from rooftop.mat.kernel_programs import Evaluation

    return Evaluation(nodes, target, depth).again()


def tensor_of(each: MatExpr, bits: bool = False) -> Tensor:
    """The elements of a leaf (..., channels)."""
    header, transposed = each._value
    tensor: Tensor = header._bits() if bits else header._tensor()
    return tensor.transpose(0, 1) if transposed else tensor


# ---- operations that are not elementwise -----------------------------------------------------------------------------


def _without_matrices(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr | None:
    """Replace a node that is a matrix product or an inverse by a leaf with its computed value. Return None for any
    other node. (For `rebuilt`.)
    """
    if each._operation not in ("product", "inverse"):
        return None
    new = node(each._operation, operands, *of(each), each._value)
    m = new_block(each._sizes, each._type, each._device)
    if not m.empty():
        _multiplied(new, m._writable(), each.depth())
    return leaf(m)


def _multiplied(root: MatExpr, target: Tensor, depth: int) -> bool:
    """Write the value of an inverse, or of `alpha * A @ B + beta * C`. For any other expression, or if `depth` is not
    the expression's own depth, write nothing and return False."""
    if depth != root.depth():
        return False
    into = target[..., 0]  # (rows, columns): one channel
    if root._operation == "inverse":
        into.copy_(inverse_of(_matrix(root._operands[0]), root._value, depth))
        return True
    gemm = gemm_of(root)
    if gemm is None:
        return False
    left, right = (_matrix(each) for each in (gemm.left, gemm.right))
    term = None if gemm.term is None else _matrix(gemm.term)
    if any(overlap(each, into) or same_elements(each, into) for each in (left, right)) or (
        term is not None and overlap(term, into)
    ):
        result = torch.empty(into.shape, dtype=into.dtype, device=into.device)
        multiply_into(result, left, right, gemm.alpha, gemm.beta, term)
        into.copy_(result)
    else:
        multiply_into(into, left, right, gemm.alpha, gemm.beta, term)
    return True


def _matrix(each: MatExpr) -> Tensor:
    """The value of a node as a tensor (rows, columns): a Mat's own memory, or new memory for any other node."""
    found = each if each._operation == "mat" else _computed(each)
    return tensor_of(found)[..., 0]


def _without_wide_bits(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr | None:
    """Replace a node that is a bitwise operation on 64 bits by a leaf with its computed value. Return None for any
    other node. (For `rebuilt`.)
    """
    if each._operation not in BITWISE or DEPTHS[each.depth()].size_bytes != 8:
        return None
    simple = tuple(operand if operand._operation in ("mat", "numbers") else _computed(operand) for operand in operands)
    return _computed(node(each._operation, simple, *of(each)))


def _computed(each: MatExpr) -> MatExpr:
    """Compute the value of a node into new memory, and return a leaf for this memory."""
    m = new_block(each._sizes, each._type, each._device)
    if not m.empty():
        evaluate_into(each, m._writable(), each.depth())
    return leaf(m)
