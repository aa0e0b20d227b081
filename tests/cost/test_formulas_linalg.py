"""Costs of factorizations and solvers, and of products that are not plain ones, against counts done by hand.

Sizes are multiples of 3 where a textbook count divides by it. Bytes are elements * 4 for float32, * 8 for int64 and for
complex64, * 4 for int32 (pivots, error codes).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rooftop.cost import CountingMode
from rooftop.cost.formulas.linear_algebra import reflectors, singular_value_flops

aten = torch.ops.aten


class Hand(NamedTuple):
    """One operator, a program that runs it last, and its cost counted by hand."""

    operator: str
    run: Callable[[], object]
    flops: int
    read: int
    write: int


def x(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64).to(dtype)


def leaf(*shape: int) -> Tensor:
    return torch.rand(*shape).requires_grad_()


def definite(*batch: int, size: int = 6) -> Tensor:
    """Symmetric positive definite matrices."""
    root = x(*batch, size, size)
    return root @ root.mT + size * torch.eye(size)


def triangle(size: int = 6) -> Tensor:
    return torch.linalg.cholesky(definite(size=size))


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


LU = torch.linalg.lu_factor
INDEFINITE = torch.linalg.ldl_factor

FACTORIZATIONS = [
    # n³ / 3 = 72 for n = 6, two of them; the error code is an int32.
    Hand("linalg_cholesky_ex", lambda: torch.linalg.cholesky(definite(2)), 2 * 72, 72 * 4, 72 * 4 + 2 * 4),
    Hand("cholesky_inverse", lambda: torch.cholesky_inverse(triangle()), 2 * 72, 36 * 4, 36 * 4),
    Hand("linalg_ldl_factor_ex", lambda: INDEFINITE(definite()), 72, 36 * 4, 36 * 4 + 6 * 4 + 4),
    # 2 n³ / 3; the pivots and an error code are int32.
    Hand("linalg_lu_factor_ex", lambda: LU(x(6, 6)), 144, 36 * 4, 36 * 4 + 6 * 4 + 4),
    # (9, 6): 36 (9 - 2).
    Hand("linalg_lu_factor_ex", lambda: LU(x(9, 6)), 36 * 7, 54 * 4, 54 * 4 + 6 * 4 + 4),
    Hand("linalg_lu_factor_ex", lambda: LU(x(6, 9)), 36 * 7, 54 * 4, 54 * 4 + 6 * 4 + 4),
    Hand("linalg_lu", lambda: torch.linalg.lu(x(6, 6)), 144, 36 * 4, 3 * 36 * 4),
    Hand("lu_unpack", lambda: torch.lu_unpack(*LU(x(6, 6))), 0, 36 * 4 + 6 * 4, 3 * 36 * 4),
    # The determinant: the factors are results too, and six factors of the diagonal.
    Hand("_linalg_det", lambda: torch.linalg.det(x(6, 6)), 144 + 6, 36 * 4, 4 + 36 * 4 + 6 * 4),
    Hand("_linalg_slogdet", lambda: torch.linalg.slogdet(x(6, 6)), 144 + 6, 36 * 4, 4 + 4 + 36 * 4 + 6 * 4),
    Hand("linalg_inv_ex", lambda: torch.linalg.inv(x(6, 6)), 2 * 216, 36 * 4, 36 * 4 + 4),
    # A complex flop is four.
    Hand(
        "linalg_inv_ex",
        lambda: torch.linalg.inv(definite().to(torch.complex64)),
        4 * 2 * 216,
        36 * 8,
        36 * 8 + 4,
    ),
    # (9, 6): R takes 2 * 36 (9 - 2) = 504 flops, and six columns of Q from its six reflectors another 504.
    Hand("linalg_qr", lambda: torch.linalg.qr(x(9, 6)), 504 + 504, 54 * 4, (54 + 36) * 4),
    Hand("linalg_qr", lambda: torch.linalg.qr(x(9, 6), mode="r"), 504, 54 * 4, 36 * 4),
    # All nine: 4 * 9 * 9 * 6 - 2 * 18 * 36 + 4 * 216 / 3 = 936.
    Hand("linalg_qr", lambda: torch.linalg.qr(x(9, 6), mode="complete"), 504 + 936, 54 * 4, (81 + 54) * 4),
    Hand("geqrf", lambda: torch.geqrf(x(9, 6)), 504, 54 * 4, (54 + 6) * 4),
    Hand(
        "linalg_householder_product",
        lambda: torch.linalg.householder_product(x(9, 6), x(6)),
        504,
        (54 + 6) * 4,
        54 * 4,
    ),
    # Six reflectors of length 9 on 5 columns: 4 * 9 * 5 * 6 - 2 * 5 * 36.
    Hand(
        "ormqr",
        lambda: torch.ormqr(x(9, 6), x(6), x(9, 5)),
        1080 - 360,
        (54 + 6 + 45) * 4,
        45 * 4,
    ),
    Hand("linalg_eig", lambda: torch.linalg.eig(x(6, 6)), 25 * 216, 36 * 4, (6 + 36) * 8),
    # One triangle of 21 elements is read; vectors are 36 more results.
    Hand("_linalg_eigh", lambda: torch.linalg.eigh(definite(2)), 2 * 9 * 216, 2 * 21 * 4, 2 * (6 + 36) * 4),
    Hand("_linalg_eigh", lambda: aten._linalg_eigh(definite(), compute_v=False), 4 * 216 // 3, 21 * 4, 6 * 4),
    # Two error codes.
    Hand("_linalg_check_errors", lambda: torch.linalg.cholesky(definite(2)), 2, 2 * 4, 0),
    Hand("_linalg_eigvals", lambda: aten._linalg_eigvals(x(6, 6)), 10 * 216, 36 * 4, 6 * 8),
    # (9, 6), values alone: the lesser of 4 * 9 * 36 - 4 * 72 = 1008 and 2 * 9 * 36 + 2 * 216 = 1080.
    Hand("_linalg_svd", lambda: aten._linalg_svd(x(9, 6), False, False), 1008, 54 * 4, 6 * 4),
    # Thin factors: the lesser of 14 * 9 * 36 + 8 * 216 = 6264 and 6 * 9 * 36 + 20 * 216 = 6264, which are equal here.
    Hand(
        "_linalg_svd",
        lambda: torch.linalg.svd(x(9, 6), full_matrices=False),
        6264,
        54 * 4,
        (54 + 6 + 36) * 4,
    ),
    # All of U: the lesser of 4 * 81 * 6 + 8 * 9 * 36 + 9 * 216 = 6480 and 4 * 81 * 6 + 22 * 216 = 6696.
    Hand("_linalg_svd", lambda: torch.linalg.svd(x(6, 9)), 6480, 54 * 4, (36 + 6 + 81) * 4),
    Hand("linalg_pinv", lambda: aten.linalg_pinv.atol_rtol_tensor(x(9, 6)), 6264 + 2 * 54 * 6, 54 * 4, 54 * 4),
]

SOLVERS = [
    # n² k flops. The triangle of 21 elements is read, but only 15 elements if the diagonal is known to be one.
    Hand(
        "linalg_solve_triangular",
        lambda: torch.linalg.solve_triangular(triangle(), x(6, 5), upper=False),
        36 * 5,
        (21 + 30) * 4,
        30 * 4,
    ),
    Hand(
        "linalg_solve_triangular",
        lambda: torch.linalg.solve_triangular(triangle(), x(6, 5), upper=False, unitriangular=True),
        36 * 5,
        (15 + 30) * 4,
        30 * 4,
    ),
    Hand(
        "triangular_solve",
        lambda: aten.triangular_solve(x(6, 5), triangle(), False),
        36 * 5,
        (36 + 30) * 4,
        (30 + 36) * 4,
    ),
    Hand("cholesky_solve", lambda: torch.cholesky_solve(x(6, 5), triangle()), 2 * 36 * 5, (21 + 30) * 4, 30 * 4),
    Hand(
        "_cholesky_solve_helper",
        lambda: aten._cholesky_solve_helper(x(6, 5), triangle(), False),
        2 * 36 * 5,
        (21 + 30) * 4,
        30 * 4,
    ),
    Hand(
        "linalg_lu_solve",
        lambda: torch.linalg.lu_solve(*LU(x(6, 6)), x(6, 5)),
        2 * 36 * 5,
        (36 + 6 + 30) * 4,
        30 * 4,
    ),
    Hand(
        "linalg_ldl_solve",
        lambda: torch.linalg.ldl_solve(*INDEFINITE(definite()), x(6, 5)),
        2 * 36 * 5,
        (36 + 6 + 30) * 4,
        30 * 4,
    ),
    # The factors, pivots and error code are results too.
    Hand(
        "_linalg_solve_ex",
        lambda: torch.linalg.solve(x(6, 6), x(6, 5)),
        144 + 2 * 36 * 5,
        (36 + 30) * 4,
        (30 + 36 + 6 + 1) * 4,
    ),
    # (9, 6) by QR: 504, its reflectors on 5 columns 720, a triangular solve 36 * 5; the rank is not computed.
    Hand(
        "linalg_lstsq",
        lambda: torch.linalg.lstsq(x(9, 6), x(9, 5), driver="gels"),
        504 + 720 + 180,
        (54 + 45) * 4,
        (30 + 5) * 4,
    ),
]

PRODUCTS = [
    Hand(
        "_int_mm",
        lambda: torch._int_mm(torch.ones(32, 16, dtype=torch.int8), torch.ones(16, 24, dtype=torch.int8)),
        2 * 32 * 24 * 16,
        32 * 16 + 16 * 24,
        32 * 24 * 4,
    ),
    # 2 samples, (3) and (4) features, 5 results.
    Hand(
        "_trilinear",
        lambda: nn.Bilinear(3, 4, 5)(x(2, 3), x(2, 4)),
        2 * 2 * 5 * 3 * 4,
        (2 * 3 + 2 * 4 + 5 * 3 * 4) * 4,
        2 * 5 * 4,
    ),
    Hand(
        "_euclidean_dist",
        lambda: torch.cdist(x(40, 3), x(30, 3)),
        2 * 40 * 30 * 3 + 2 * 70 * 3 + 4 * 1200,
        70 * 3 * 4,
        1200 * 4,
    ),
    # Six pairs of four rows of three.
    Hand("_pdist_forward", lambda: F.pdist(x(4, 3)), 6 * (3 * 3 + 1), 12 * 4, 6 * 4),
    Hand(
        "_pdist_backward",
        lambda: F.pdist(leaf(4, 3)).backward(torch.ones(6)),
        4 * 6 * 3,
        (6 + 12 + 6) * 4,
        12 * 4,
    ),
    Hand("renorm", lambda: x(4, 3).renorm(2, 0, 1.0), 3 * 12, 12 * 4, 12 * 4),
]
if hasattr(aten, "_foreach_mm"):  # PyTorch 2.11 has none
    PRODUCTS.append(
        Hand(
            "_foreach_mm",
            lambda: aten._foreach_mm([meta(3, 4), meta(5, 6)], [meta(4, 2), meta(6, 7)]),
            2 * (3 * 2 * 4 + 5 * 7 * 6),
            (12 + 8 + 30 + 42) * 2,
            (6 + 35) * 2,
        )
    )


@pytest.mark.parametrize("hand", [*FACTORIZATIONS, *SOLVERS, *PRODUCTS], ids=lambda hand: hand.operator)
def test_cost_is_what_a_person_counts(hand: Hand) -> None:
    with CountingMode() as counted:
        hand.run()
    records = [record for record in counted.records if record.name == f"aten::{hand.operator}"]
    assert records, f"the program ran only {sorted({record.name for record in counted.records})}"
    cost = records[-1].cost
    assert cost is not None, records[-1].uncovered
    assert (cost.total_flops, cost.read_bytes, cost.write_bytes) == (hand.flops, hand.read, hand.write)


@pytest.mark.parametrize("size", [3, 30, 300])
def test_square_textbook_counts_agree_with_each_other(size: int) -> None:
    # Golub & Van Loan: Q and R of a square matrix 8 n³ / 3, of which Q is half.
    assert reflectors(size, size, size) == pytest.approx(4 * size**3 / 3)
    # All vectors of a square matrix: 22 n³ by Golub-Reinsch, which is the lesser of the two.
    assert singular_value_flops(size, size, vectors=True, full=True) == pytest.approx(22 * size**3)
    # A wide matrix costs what its transpose does.
    assert singular_value_flops(size, 2 * size, vectors=True, full=True) == singular_value_flops(
        2 * size, size, vectors=True, full=True
    )
