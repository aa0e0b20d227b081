"""Cost of factorizations, solvers and spectra of dense matrices: the flops of the textbook algorithm, and each matrix
moved once.

Counts are the leading terms of Golub & Van Loan, Matrix Computations, 4th edition (chapter 3 for LU, 4 for Cholesky,
5 for QR, 7 and 8 for eigenvalues and singular values), for each (m, n) matrix of a batch with k right-hand sides:

    Cholesky                       n³ / 3                 its inverse 2 n³ / 3
    symmetric indefinite (LDLᵀ)    n³ / 3
    LU, square                     2 n³ / 3               inverse 2 n³
    triangular solve               n² k                   with both factors 2 n² k
    QR (Householder), m ≥ n        2 n² (m - n / 3)       Q's columns as many again
    eigenvalues, symmetric         4 n³ / 3               with vectors 9 n³
    eigenvalues, nonsymmetric      10 n³                  with vectors 25 n³
    singular values, m ≥ n         the lesser of the Golub-Reinsch and R-SVD algorithms (figure 8.6.1)

These algorithms run on vector units as much as on matrix units, so their flops count as elementwise arithmetic in the
precision of the matrix, never as tf32. A complex flop counts as four real flops.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from rooftop.cost.accounting import Call, Cost, distinct_bytes
from rooftop.cost.formulas.streaming import arithmetic, aten, elements, moved_once, requested, streaming
from rooftop.cost.registry import Formula, cost_of

Count = Callable[[int, int], float]
"""Flops of a matrix with m rows and n columns."""


def _cholesky(m: int, n: int) -> float:
    return n**3 / 3


def _lu(m: int, n: int) -> float:
    """Flops of an LU factorization: n² (m - n / 3) for m ≥ n. A wide matrix counts as its transpose."""
    long, short = max(m, n), min(m, n)
    return short**2 * (long - short / 3)


def _householder(m: int, n: int) -> float:
    long, short = max(m, n), min(m, n)
    return 2 * short**2 * (long - short / 3)


def reflectors(m: int, n: int, k: int) -> float:
    """Flops of applying k Householder reflectors of length m to n columns (LAPACK's orgqr, working note 41)."""
    return 4 * m * n * k - 2 * (m + n) * k**2 + 4 * k**3 / 3


def singular_value_flops(m: int, n: int, vectors: bool, full: bool) -> float:
    """Flops of the SVD of an (m, n) matrix: singular values alone, or with `vectors` also the thin factors, of which
    the left one has all its columns if `full`."""
    long, short = max(m, n), min(m, n)
    if not vectors:
        return min(4 * long * short**2 - 4 * short**3 / 3, 2 * long * short**2 + 2 * short**3)
    if full and long > short:
        return min(
            4 * long**2 * short + 8 * long * short**2 + 9 * short**3,
            4 * long**2 * short + 22 * short**3,
        )
    return min(14 * long * short**2 + 8 * short**3, 6 * long * short**2 + 20 * short**3)


def _of_matrix(count: Count, *, unread: tuple[str, ...] = ()) -> Formula:
    """A formula for an operator whose first argument is an (m, n) matrix or a batch of them, with `count(m, n)` flops
    for each matrix."""

    def formula(call: Call) -> Cost:
        matrix: Tensor = next(iter(call.arguments.values()))  # (..., m, n)
        return _cost(call, matrix, count(*matrix.shape[-2:]), call.read_tensors_except(*unread), call.written_tensors)

    return formula


def _cost(call: Call, matrix: Tensor, flops: float, read: list[Tensor], written: list[Tensor]) -> Cost:
    """The cost with this many flops for each real matrix of the batch, or four times as many for a complex one."""
    batch = matrix.numel() // max(matrix.shape[-2] * matrix.shape[-1], 1)
    total = round(batch * flops) * (4 if matrix.is_complex() else 1)
    return Cost(distinct_bytes(read), distinct_bytes(written), arithmetic(total, [matrix]))


cost_of(*aten("cholesky linalg_cholesky_ex linalg_ldl_factor_ex"))(_of_matrix(_cholesky))
cost_of("aten::cholesky_inverse")(_of_matrix(lambda m, n: 2 * n**3 / 3))
cost_of(*aten("linalg_lu linalg_lu_factor_ex"))(_of_matrix(_lu))
# These operators also multiply the elements of the diagonal with each other.
cost_of(*aten("_linalg_det _linalg_slogdet"))(_of_matrix(lambda m, n: _lu(m, n) + n))
cost_of("aten::linalg_inv_ex")(_of_matrix(lambda m, n: 2 * n**3))
cost_of("aten::geqrf")(_of_matrix(_householder))
cost_of(*aten("_linalg_eigvals linalg_eigvals"))(_of_matrix(lambda m, n: 10 * n**3))
cost_of("aten::linalg_eig")(_of_matrix(lambda m, n: 25 * n**3))
# The pseudoinverse needs an SVD with vectors and one matrix product.
cost_of("aten::linalg_pinv")(
    _of_matrix(lambda m, n: singular_value_flops(m, n, vectors=True, full=False) + 2 * m * n * min(m, n))
)
cost_of("aten::lu_unpack")(streaming())


@cost_of("aten::linalg_qr")
def qr(call: Call) -> Cost:
    """QR returns only R (mode "r"), or also as many columns of Q as there are reflectors ("reduced"), or all m columns
    ("complete")."""
    matrix: Tensor = call["A"]
    m, n = matrix.shape[-2:]
    flops = _householder(m, n)
    if call["mode"] != "r":
        flops += reflectors(m, m if call["mode"] == "complete" else min(m, n), min(m, n))
    return _cost(call, matrix, flops, [matrix], call.written_tensors)


@cost_of("aten::linalg_householder_product")
def householder_product(call: Call) -> Cost:
    """Cost of multiplying k Householder reflectors of length m. Only the first n columns of the product are
    computed.
    """
    vectors: Tensor = call["input"]  # (..., m, n)
    m, n = vectors.shape[-2:]
    return _cost(call, vectors, reflectors(m, n, call["tau"].shape[-1]), call.read_tensors, [call.out])


@cost_of("aten::ormqr")
def apply_reflectors(call: Call) -> Cost:
    """Applying k reflectors of length m to n columns takes 4 m n k - 2 n k² flops, as does applying them to rows from
    the right."""
    other: Tensor = call["input3"]
    m, n = other.shape[-2:] if call["left"] else reversed(other.shape[-2:])
    k = call["input2"].shape[-1]
    return _cost(call, other, 4 * m * n * k - 2 * n * k**2, call.read_tensors, [call.out])


@cost_of("aten::_linalg_svd")
def singular_values(call: Call) -> Cost:
    """Cost of the SVD. Without `compute_uv` the factors are empty."""
    matrix: Tensor = call["A"]
    m, n = matrix.shape[-2:]
    flops = singular_value_flops(m, n, vectors=call["compute_uv"], full=call["full_matrices"])
    written = requested(call.results, [call["compute_uv"], True, call["compute_uv"]])
    return _cost(call, matrix, flops, [matrix], written)


def _triangle_bytes(matrix: Tensor, *, diagonal: bool) -> int:
    """Bytes of one triangle of each (n, n) matrix in a batch."""
    n = matrix.shape[-1]
    return distinct_bytes([matrix]) * (n + 1 if diagonal else n - 1) // max(2 * n, 1)


@cost_of("aten::_linalg_check_errors")
def check_errors(call: Call) -> Cost:
    """The operator compares the error code of each matrix with zero."""
    codes: Tensor = call["info"]
    return Cost(distinct_bytes([codes]), 0, arithmetic(codes.numel(), [codes]))


@cost_of("aten::_linalg_eigh")
def symmetric_eigenvalues(call: Call) -> Cost:
    """The operator reads one triangle. Without `compute_v` the vectors stay empty."""
    matrix: Tensor = call["A"]
    n = matrix.shape[-1]
    written = requested(call.results, [True, call["compute_v"]])
    cost = _cost(call, matrix, 9 * n**3 if call["compute_v"] else 4 * n**3 / 3, [], written)
    return cost + Cost(_triangle_bytes(matrix, diagonal=True))


@cost_of("aten::linalg_solve_triangular")
def solve_triangular(call: Call) -> Cost:
    """A triangular solve takes n² k flops and reads only one triangle of the matrix."""
    return _triangular(call, call["self"], call["B"], unit=call["unitriangular"])


@cost_of("aten::triangular_solve")
def triangular_solve(call: Call) -> Cost:
    """Cost of the older triangular solve, which also returns a copy of the matrix."""
    return _triangular(call, call["A"], call["self"], unit=call["unitriangular"])


def _triangular(call: Call, matrix: Tensor, right: Tensor, *, unit: bool) -> Cost:
    solution: Tensor = call.results[0]
    # to copy the matrix, the operator reads all of it
    copied = distinct_bytes([matrix]) if len(call.results) > 1 else 0
    read = copied or _triangle_bytes(matrix, diagonal=not unit)
    flops = elements(solution) * matrix.shape[-1] * (4 if solution.is_complex() else 1)
    return Cost(read + distinct_bytes([right]), distinct_bytes([solution]) + copied, arithmetic(flops, [solution]))


@cost_of(*aten("_cholesky_solve_helper cholesky_solve linalg_ldl_solve linalg_lu_solve"))
def solve_factored(call: Call) -> Cost:
    """Two triangular solves take 2 n² k flops. They read all of an LU factorization, but of a Cholesky factor only one
    triangle."""
    name = call.func._schema.name
    solution: Tensor = call.out
    flops = 2 * solution.numel() * _order(call) * (4 if solution.is_complex() else 1)
    if "cholesky" in name:
        factor: Tensor = call["A"] if "A" in call else call["input2"]
        read = _triangle_bytes(factor, diagonal=True) + distinct_bytes([call["self"]])
    else:
        read = distinct_bytes(call.read_tensors)
    return Cost(read, distinct_bytes([solution]), arithmetic(flops, [solution]))


def _order(call: Call) -> int:
    """The number of rows n of the (n, n) factors that the operator reads."""
    factor: Tensor = next(call[name] for name in ("LU", "LD", "A", "input2") if name in call)
    return factor.shape[-1]


@cost_of("aten::_linalg_solve_ex")
def solve(call: Call) -> Cost:
    """Cost of an LU factorization, which is also returned, and of two triangular solves."""
    matrix, solution = call["A"], call.results[0]
    n = matrix.shape[-1]
    batch = matrix.numel() // max(n * n, 1)
    flops = round(batch * _lu(n, n)) + 2 * solution.numel() * n
    return moved_once(call, arithmetic(flops * (4 if matrix.is_complex() else 1), [matrix]))


@cost_of("aten::linalg_lstsq")
def least_squares(call: Call) -> Cost:
    """Cost of a QR factorization, of applying its reflectors to k right-hand sides, and of a triangular solve. Wide
    matrices count as their transposes."""
    matrix, right = call["self"], call["b"]  # (..., m, n); (..., m, k) or (..., m)
    m, n = matrix.shape[-2:]
    k = right.shape[-1] if right.ndim == matrix.ndim else 1
    short = min(m, n)
    flops = _householder(m, n) + 4 * max(m, n) * short * k - 2 * short**2 * k + short**2 * k
    return _cost(call, matrix, flops, call.read_tensors, call.written_tensors)
