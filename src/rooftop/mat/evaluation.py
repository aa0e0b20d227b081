"""The value of an expression, written into a Mat.

What is no element by element operation is done first: matrix products and inverses go to BLAS and LAPACK, a sum above a
product within the same call. The rest is one pass over memory: blocks of rows on the CPU (`row_programs.py`), one
kernel on a GPU (`kernel_programs.py`).
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.launch.triton_launch import INTERPRETED
from rooftop.mat.allocation import same_device
from rooftop.mat.copies import apart, overlap, same_elements
from rooftop.mat.exactness import bounds_of, computing_dtype
from rooftop.mat.expressions import BITWISE, MatExpr, leaf, node, rebuilt, topological
from rooftop.mat.matrix import Mat
from rooftop.mat.products import gemm_of, inverse_of, multiply_into
from rooftop.mat.row_programs import row_program
from rooftop.mat.type_codes import CV_MAKETYPE, CV_MAT_CN, CV_MAT_DEPTH, DEPTHS, type_code


def evaluate(expression: MatExpr, dst: Mat | None = None, rtype: Any = None) -> Mat:
    """Evaluates an expression and gives the Mat with its value.

    Args:
        dst: gets size and type by `create`, so that nothing is allocated when it has them; a new Mat if None. It may
            overlap what the expression reads.
        rtype: a depth, a type, whose channels are not looked at, or a dtype, to store the numbers as; None is the
            expression's own.

    Returns:
        dst.
    """
    depth = expression.depth() if rtype is None or rtype == -1 else CV_MAT_DEPTH(type_code(rtype))
    type = CV_MAKETYPE(depth, expression.channels())
    dst = Mat(device=expression._device) if dst is None else dst
    if not dst.empty() and not same_device(dst._device, expression._device):
        raise ValueError(f"an expression on {expression._device} cannot be stored in {dst}: move one with to(device)")
    dst.create(expression._sizes, type, device=expression._device)
    if not dst.empty():
        evaluate_into(expression, dst._writable(), depth)
    return dst


def evaluate_into(expression: MatExpr, target: Tensor, depth: int) -> None:
    """Writes the value into a tensor (..., channels) of a depth."""
    root = _simpler(expression)
    if _multiplied(root, target, depth):
        return
    root = rebuilt(root, _without_matrices)
    if _is_of_bits(root, depth):
        _run(_as_bits(root), target.view(DEPTHS[depth].carrier), _depth_of_bits(depth), bits=True)
        return
    if any(each._operation in BITWISE and DEPTHS[each.depth()].size_bytes == 8 for each in topological(root)):
        root = _without_wide_bits(root, depth)
    _run(root, target, depth)


def _run(root: MatExpr, target: Tensor, depth: int, bits: bool = False) -> None:
    """One pass. No products are left."""
    if root._operation == "mat" and root.depth() == depth:
        into = target if bits else target.view(DEPTHS[depth].carrier)
        into.copy_(apart(tensor_of(root, bits=True), into))
        return
    bounds = bounds_of(root)
    dtype = DEPTHS[depth].dtype if bits else computing_dtype(root, bounds, depth)
    leaves = [each for each in topological(root) if each._operation == "mat"]
    tensors = [tensor_of(each, bits) for each in leaves]
    tensors = [apart(tensor, target) for tensor in tensors]
    if target.device.type == "cpu" and not INTERPRETED:
        row_program(root, bounds, dtype, depth).run(tensors, target)
    else:
        from rooftop.mat import kernel_programs  # which imports Triton

        kernel_programs.run(root, bounds, dtype, leaves, tensors, target, depth)


def tensor_of(each: MatExpr, bits: bool = False) -> Tensor:
    """The elements of a leaf (..., channels)."""
    header, transposed = each._value
    tensor: Tensor = header._bits() if bits else header._tensor()
    return tensor.transpose(0, 1) if transposed else tensor


# ---- simpler trees -----------------------------------------------------------------------------------------------


def _simpler(root: MatExpr) -> MatExpr:
    """Quotients by powers of two as products: these are exact, and so their bounds are known."""

    def change(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr | None:
        if each._operation != "div" or operands[1]._operation != "numbers":
            return None
        numbers = operands[1]._value
        if not all(np.isfinite(number) and number and _is_power_of_two(number) for number in numbers):
            return None
        inverse = node("numbers", (), *_of(operands[1]), tuple(1 / number for number in numbers))
        return node("mul", (operands[0], inverse), *_of(each))

    return rebuilt(root, change)


def _of(each: MatExpr) -> tuple[int, tuple[int, ...], torch.device]:
    return each._type, each._sizes, each._device


def _is_power_of_two(number: float) -> bool:
    exact = abs(Fraction(number))
    powers = [part & (part - 1) == 0 for part in (exact.numerator, exact.denominator)]
    return all(powers) and 2**-60 <= exact <= 2**60


def _without_matrices(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr | None:
    """Products and inverses computed, as leaves."""
    if each._operation not in ("product", "inverse"):
        return None
    new = node(each._operation, operands, *_of(each), each._value)
    m = Mat(each._sizes, each._type, device=each._device)
    if not m.empty():
        _multiplied(new, m._writable(), each.depth())
    return leaf(m)


def _multiplied(root: MatExpr, target: Tensor, depth: int) -> bool:
    """Writes the value of a product, with factor and term, or of an inverse; False for anything else."""
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
    """The value as (rows, columns); of a Mat its own memory, of anything else new memory."""
    found = each if each._operation == "mat" else leaf(evaluate(each))
    return tensor_of(found)[..., 0]


# ---- bits ----------------------------------------------------------------------------------------------------------


def _is_of_bits(root: MatExpr, depth: int) -> bool:
    """Whether it is made of bitwise operations alone, so that any 64 bits can be computed with."""
    inner = [each for each in topological(root) if each._operation not in ("mat", "numbers")]
    return bool(inner) and root.depth() == depth and all(each._operation in BITWISE for each in inner)


def _depth_of_bits(depth: int) -> int:
    """The depth whose dtype carries the bits of another."""
    return next(number for number, each in enumerate(DEPTHS) if each.dtype == DEPTHS[depth].carrier)


def _as_bits(root: MatExpr) -> MatExpr:
    """The same operations on the carriers of the bits."""
    depth = root.depth()
    carried = _depth_of_bits(depth)
    bits = DEPTHS[depth].size_bytes * 8
    low, high = DEPTHS[depth].limits or (0, 1)
    type = CV_MAKETYPE(carried, CV_MAT_CN(root._type))

    def carry(number: int | float) -> int:
        stored = min(max(int(number), low), high) if DEPTHS[depth].limits is not None else int(number != 0)
        least = (DEPTHS[carried].limits or (0, 0))[0]
        return (stored - least) % (1 << bits) + least

    def change(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr:
        value: Any = each._value
        if each._operation == "numbers":
            value = tuple(carry(number) for number in value)
        if each._operation == "not" and DEPTHS[depth].limits is None:  # Bool has one bit
            one = node("numbers", (), type, each._sizes, each._device, (1,) * CV_MAT_CN(type))
            return node("xor", (operands[0], one), type, each._sizes, each._device)
        return node(each._operation, operands, type, each._sizes, each._device, value)

    return rebuilt(root, change)


def _without_wide_bits(root: MatExpr, depth: int) -> MatExpr:
    """Bitwise operations of 64 bits computed, as leaves, unless everything is computed in int64."""
    if computing_dtype(root, bounds_of(root), depth) == torch.int64:
        return root

    def change(each: MatExpr, operands: tuple[MatExpr, ...]) -> MatExpr | None:
        if each._operation not in BITWISE or DEPTHS[each.depth()].size_bytes != 8:
            return None
        simple = tuple(
            operand if operand._operation in ("mat", "numbers") else leaf(evaluate(operand)) for operand in operands
        )
        return leaf(evaluate(node(each._operation, simple, *_of(each))))

    return rebuilt(root, change)
