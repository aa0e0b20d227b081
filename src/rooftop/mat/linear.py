"""Determinants and linear systems, computed by LAPACK or the GPU's solver on the operands' device.

Source of names and meanings: `cv::determinant`, `cv::solve` of OpenCV.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rooftop.mat.expressions import check_matrix
from rooftop.mat.matrix import Mat, MatLike, as_mat
from rooftop.mat.type_codes import typeToString
from rooftop.mat.vector_products import in_float32

SOLUTIONS = ("lu", "cholesky", "qr", "svd")


def determinant(m: MatLike) -> float:
    """Determinant of a square floating-point matrix with one channel, by LU in the matrix's own precision. The
    determinant of a matrix without rows is 1.0.

    Raises:
        TypeError: the numbers are integers, or there are several channels.
        ValueError: the matrix is not square.
    """
    x = _matrix(m, "a determinant")
    if x.rows != x.cols:
        raise ValueError(f"a determinant needs a square matrix, got {x}")
    return float(torch.linalg.det(in_float32(x._tensor()[..., 0])))


def solve(a: MatLike, b: MatLike, method: Literal["lu", "cholesky", "qr", "svd"] = "lu") -> Mat:
    """Solve a x = b. "lu" requires a square `a`, and "cholesky" a positive definite `a`. "qr" requires linearly
    independent columns and returns the least-squares solution. "svd" returns the shortest least-squares solution.

    Args:
        a: (rows, cols), one channel of floating-point numbers.
        b: (rows, columns), of the same type as `a`.

    Returns:
        The solution x, (cols, columns).

    Raises:
        TypeError: the types differ, or are integers.
        ValueError: `a` and `b` have different numbers of rows, the method needs a square matrix, or the method is
            unknown.
        numpy.linalg.LinAlgError: this method finds no solution. In that case OpenCV returns false.
    """
    if method not in SOLUTIONS:
        raise ValueError(f"the method of solve is one of {', '.join(SOLUTIONS)}, got {method!r}")
    left, right = _matrix(a, "a system of equations"), _matrix(b, "its right side")
    if left.type() != right.type():
        raise TypeError(
            f"both sides of a system need the same type, got {typeToString(left.type())} and "
            f"{typeToString(right.type())}: convertTo one of them"
        )
    if left.rows != right.rows:
        raise ValueError(f"the two sides of a system need the same number of rows, got {left.rows} and {right.rows}")
    if method in ("lu", "cholesky") and left.rows != left.cols:
        raise ValueError(f"solve by {method!r} needs a square matrix, got {left}: use 'qr' or 'svd'")
    result = Mat(left.cols, right.cols, left.type(), device=left.device)
    if not result.empty():
        found = _solution(in_float32(left._tensor()[..., 0]), in_float32(right._tensor()[..., 0]), method)
        result._writable()[..., 0].copy_(found)
    return result


def _solution(a: Tensor, b: Tensor, method: str) -> Tensor:
    try:
        if method == "lu":
            return torch.linalg.solve(a, b)
        if method == "cholesky":
            return torch.cholesky_solve(b, torch.linalg.cholesky(a))
        if method == "svd":
            return torch.linalg.pinv(a) @ b
        if a.shape[0] < a.shape[1]:
            raise RuntimeError("there are fewer equations than unknowns: use 'svd'")
        q, r = torch.linalg.qr(a)
        if not bool((r.diagonal().abs() > torch.finfo(r.dtype).eps * r.abs().max()).all()):
            raise RuntimeError("the columns are linearly dependent: use 'svd'")
        return torch.linalg.solve_triangular(r, q.mT @ b, upper=True)
    except RuntimeError as error:  # torch's own LinAlgError is a subclass
        raise np.linalg.LinAlgError(f"solve by {method!r}: {error}") from error


def _matrix(m: MatLike, what: str) -> Mat:
    x = as_mat(m)
    check_matrix(x, what, "convertTo(CV_32F)")
    return x
