"""Compute the matrix products and inverses of expressions with BLAS and LAPACK.

A product with a factor and a term, `alpha * A @ B + beta * C`, is one call; transposes are views.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rooftop.mat.expressions import MatExpr
from rooftop.mat.type_codes import DEPTHS


class Gemm(NamedTuple):
    """alpha * left @ right + beta * term."""

    alpha: float
    left: MatExpr
    right: MatExpr
    beta: float
    term: MatExpr | None


def gemm_of(root: MatExpr) -> Gemm | None:
    """The single GEMM call that computes the root's value; None if one call cannot compute it.

    The call includes numeric factors of the product, and a matrix that is added to or subtracted from the product.
    """
    factor, each = _scaled(root)
    if each._operation == "product":
        return _gemm(factor, each, 0.0, None)
    if each._operation not in ("add", "sub"):
        return None
    sign = -1.0 if each._operation == "sub" else 1.0
    (a, one), (b, other) = _scaled(each._operands[0]), _scaled(each._operands[1])
    if one._operation == "product" and other._operation != "numbers":
        return _gemm(factor * a, one, factor * sign * b, other)
    if other._operation == "product" and one._operation != "numbers":
        return _gemm(factor * sign * b, other, factor * a, one)
    return None


def _gemm(alpha: float, product: MatExpr, beta: float, term: MatExpr | None) -> Gemm:
    (a, left), (b, right) = (_scaled(operand) for operand in product._operands)
    return Gemm(alpha * a * b, left, right, beta, term)


def _scaled(each: MatExpr) -> tuple[float, MatExpr]:
    """Split an expression into (numeric factor, remaining expression)."""
    factor = 1.0
    while True:
        if each._operation == "neg":
            factor, each = -factor, each._operands[0]
        elif each._operation in ("mul", "div") and len({*_numbers(each)}) == 1:
            (number,) = {*_numbers(each)}
            left, right = each._operands
            if each._operation == "mul":
                factor *= number
            elif right._operation == "numbers" and number:
                factor /= number
            else:
                return factor, each
            each = right if left._operation == "numbers" else left
        else:
            return factor, each


def _numbers(each: MatExpr) -> tuple[float, ...]:
    return next((tuple(map(float, o._value)) for o in each._operands if o._operation == "numbers"), ())


def multiply_into(target: Tensor, left: Tensor, right: Tensor, alpha: float, beta: float, term: Tensor | None) -> None:
    """Compute target = alpha * left @ right + beta * term; all tensors are (rows, columns). The target must not overlap
    `left` or `right`, but may be `term`."""
    if not target.numel():
        return
    if left.shape[1] == 0:  # no columns to multiply: the product is 0
        target.zero_() if term is None else torch.mul(term, beta, out=target)
        return
    if term is None and alpha == 1:
        torch.mm(left, right, out=target)
    elif term is None:
        # with beta = 0, BLAS does not read target's old values, so NaNs among them do not spread
        torch.addmm(target, left, right, beta=0, alpha=alpha, out=target)
    else:
        torch.addmm(term, left, right, beta=beta, alpha=alpha, out=target)


def inverse_of(x: Tensor, method: str, depth: int) -> Tensor:
    """The inverse of a matrix x (rows, columns), or with "svd" its pseudo-inverse, in float32 or float64.

    Raises:
        numpy.linalg.LinAlgError: there is no inverse, x is not positive definite ("cholesky"), or the decomposition
            does not converge ("svd").
    """
    wide = x.float() if DEPTHS[depth].size_bytes == 2 else x
    if not wide.numel():
        return wide.transpose(0, 1)
    try:
        if method == "svd":
            return torch.linalg.pinv(wide)
        if method == "cholesky":
            return torch.cholesky_inverse(torch.linalg.cholesky(wide))
        return torch.linalg.inv(wide)
    except RuntimeError as error:  # torch's own LinAlgError is a subclass
        raise np.linalg.LinAlgError(f"inv by {method!r}: {error}") from error
