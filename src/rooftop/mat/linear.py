"""Linear algebra whose result is no element by element value: dot and cross products, determinants, systems of
equations. By BLAS and LAPACK, on the device of the operands.

Source of names and meanings: `cv::Mat::dot`, `cv::Mat::cross`, `cv::determinant`, `cv::solve` of OpenCV.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rooftop.mat.conversions import row_blocks
from rooftop.mat.expressions import FLOATING, MatExpr, check_matrix
from rooftop.mat.matrix import Mat, MatLike, as_mat
from rooftop.mat.type_codes import typeToString

SOLUTIONS = ("lu", "cholesky", "qr", "svd")


def dot(a: Mat | MatExpr, b: MatLike) -> float:
    """The sum of the products of all numbers, those of all channels together, in float64.

    Raises:
        TypeError: other types.
        ValueError: other sizes.
    """
    x, y = _pair("a dot product", a, b)
    found = 0.0
    for one, other in row_blocks(x._tensor(), y._tensor()):
        found += float(torch.dot(one.double().flatten(), other.double().flatten()))
    return found


def cross(a: Mat | MatExpr, b: MatLike) -> Mat:
    """The cross product of two vectors of three floating numbers, (3, 1), (1, 3) or one element of three channels.

    Raises:
        TypeError: other types, or integers.
        ValueError: no three numbers.
    """
    x, y = _pair("a cross product", a, b)
    if x.depth() not in FLOATING:
        raise TypeError(f"a cross product is of floating numbers, got {typeToString(x.type())}: convertTo(CV_32F)")
    if x.total() * x.channels() != 3:
        raise ValueError(f"a cross product is of three numbers, got {x}")
    result = Mat(x.size, x.type(), device=x.device)
    found = torch.linalg.cross(_wide(x._tensor().flatten()), _wide(y._tensor().flatten()))
    result._writable().copy_(found.view(result._writable().shape))
    return result


def determinant(m: MatLike) -> float:
    """Of a square matrix of one channel of floating numbers, 1.0 of one without rows. By LU, in its own precision.

    Raises:
        TypeError: integers, or several channels.
        ValueError: not square.
    """
    x = _matrix(m, "a determinant")
    if x.rows != x.cols:
        raise ValueError(f"a determinant is of a square matrix, got {x}")
    return float(torch.linalg.det(_wide(x._tensor()[..., 0])))


def solve(a: MatLike, b: MatLike, method: Literal["lu", "cholesky", "qr", "svd"] = "lu") -> Mat:
    """x with a x = b: exactly, for a square `a` by "lu" or, if it is positive definite, "cholesky"; of least squares
    by "qr", for columns that depend on no others, or by "svd", of all such solutions the shortest.

    Args:
        a: (rows, cols) of one channel of floating numbers.
        b: (rows, columns) of the same type.

    Returns:
        (cols, columns).

    Raises:
        TypeError: other types, or integers.
        ValueError: another number of rows, a matrix that is not square, an unknown method.
        numpy.linalg.LinAlgError: there is no solution by this method. OpenCV returns false there.
    """
    if method not in SOLUTIONS:
        raise ValueError(f"the method of solve is one of {', '.join(SOLUTIONS)}, got {method!r}")
    left, right = _matrix(a, "a system of equations"), _matrix(b, "its right side")
    if left.type() != right.type():
        raise TypeError(
            f"a system has one type, got {typeToString(left.type())} and {typeToString(right.type())}: convertTo one"
        )
    if left.rows != right.rows:
        raise ValueError(f"a system needs as many right sides as equations, got {left.rows} and {right.rows} rows")
    if method in ("lu", "cholesky") and left.rows != left.cols:
        raise ValueError(f"solve by {method!r} is of a square matrix, got {left}: take 'qr' or 'svd'")
    result = Mat(left.cols, right.cols, left.type(), device=left.device)
    if not result.empty():
        found = _solution(_wide(left._tensor()[..., 0]), _wide(right._tensor()[..., 0]), method)
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
            raise RuntimeError("there are fewer equations than unknowns: take 'svd'")
        q, r = torch.linalg.qr(a)
        if not bool((r.diagonal().abs() > torch.finfo(r.dtype).eps * r.abs().max()).all()):
            raise RuntimeError("a column depends on others: take 'svd'")
        return torch.linalg.solve_triangular(r, q.mT @ b, upper=True)
    except RuntimeError as error:  # torch's own LinAlgError is one
        raise np.linalg.LinAlgError(f"solve by {method!r}: {error}") from error


def _pair(what: str, a: Mat | MatExpr, b: MatLike) -> tuple[Mat, Mat]:
    """Two Mats of one type and size."""
    x, y = (as_mat(each) for each in (a, b))
    if x.type() != y.type():
        raise TypeError(f"{what} is of two of one type, got {typeToString(x.type())} and {typeToString(y.type())}")
    if x.size != y.size:
        raise ValueError(f"{what} is of two of one size, got {x} and {y}")
    return x, y


def _matrix(m: MatLike, what: str) -> Mat:
    x = as_mat(m)
    check_matrix(x, what, "convertTo(CV_32F)")
    return x


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.element_size() == 2 else x
