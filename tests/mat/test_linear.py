"""Dot and cross products, determinants and systems of equations, against NumPy and OpenCV."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rooftop import mat
from rooftop.mat import Mat

rng = np.random.default_rng(5)
A, B = rng.normal(size=(4, 4)), rng.normal(size=(4, 2))
POSITIVE = A @ A.T + np.eye(4)


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "i4", "f4", "f8"])
def test_dot_is_the_sum_of_all_products(dtype: str) -> None:
    x, y = (rng.integers(0, 100, (300, 200, 3)).astype(dtype) for _ in range(2))
    expected = float((x.astype("f8") * y.astype("f8")).sum())
    assert Mat(x).dot(Mat(y)) == expected
    assert Mat(x)[3:9, 10:20].dot(Mat(y)[3:9, 10:20]) == float((x.astype("f8") * y)[3:9, 10:20].sum())
    assert (Mat(x) + Mat(y)).dot(Mat(y)) == float(np.dot((Mat(x) + Mat(y)).numpy().astype("f8").ravel(), y.ravel()))


def test_dot_of_nothing_and_of_half_precision() -> None:
    assert Mat(0, 3, mat.CV_32F).dot(Mat(0, 3, mat.CV_32F)) == 0
    half = Mat(torch.full((70, 1000, 1), 3.0).half())
    assert half.dot(half) == 630_000  # beyond half precision's largest number


@pytest.mark.parametrize("shape", [(3, 1), (1, 3), (1, 1, 3)])
def test_cross(shape: tuple[int, ...]) -> None:
    x, y = (rng.normal(size=3).astype("f4") for _ in range(2))
    found = Mat(x.reshape(shape)).cross(Mat(y.reshape(shape)))
    assert np.allclose(found.numpy().ravel(), np.cross(x, y), atol=1e-6)
    assert found.size == Mat(x.reshape(shape)).size


def test_determinants() -> None:
    cv2 = pytest.importorskip("cv2")
    assert mat.determinant(Mat(A)) == pytest.approx(cv2.determinant(A))
    assert mat.determinant(Mat(A).t() * 2) == pytest.approx(16 * np.linalg.det(A))
    assert mat.determinant(A[1:, 1:].copy()) == pytest.approx(np.linalg.det(A[1:, 1:]))
    assert mat.determinant(Mat.zeros(3, 3, mat.CV_32F)) == 0
    assert mat.determinant(Mat(0, 0, mat.CV_64F)) == 1


@pytest.mark.parametrize("method", ["lu", "cholesky", "qr", "svd"])
def test_solutions(method: Any) -> None:
    found = mat.solve(Mat(POSITIVE), Mat(B), method)
    assert np.allclose(POSITIVE @ found.numpy(), B)
    half = mat.solve(Mat(torch.from_numpy(POSITIVE).half()), Mat(torch.from_numpy(B).half()), method)
    assert half.depth() == mat.CV_16F
    assert np.allclose(half.tensor()[..., 0].double().numpy(), found.numpy(), atol=0.05)


def test_least_squares() -> None:
    tall = A[:, :2].copy()
    expected = np.linalg.lstsq(tall, B, rcond=None)[0]
    assert np.allclose(mat.solve(tall, B, "qr").numpy(), expected)
    assert np.allclose(mat.solve(tall, B, "svd").numpy(), expected)
    wide = np.linalg.lstsq(A[:2], B[:2], rcond=None)[0]
    assert np.allclose(mat.solve(A[:2].copy(), B[:2].copy(), "svd").numpy(), wide)
    assert mat.solve(Mat(0, 3, mat.CV_64F), Mat(0, 2, mat.CV_64F), "svd").numpy().tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("method", ["lu", "cholesky", "qr"])
def test_no_solution_is_an_error(method: Any) -> None:
    with pytest.raises(np.linalg.LinAlgError, match=f"solve by '{method}'"):
        mat.solve(Mat.ones(3, 3, mat.CV_64F), Mat.ones(3, 1, mat.CV_64F), method)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda a, u: a.dot(u),
            TypeError,
            "a dot product takes two vectors of the same type, got CV_64FC1 and CV_8UC1",
        ),
        (lambda a, u: a.dot(a[1:]), ValueError, "a dot product takes two vectors of the same size"),
        (lambda a, u: u.cross(u), TypeError, "a cross product needs floating-point numbers, got CV_8UC1"),
        (lambda a, u: a.cross(a), ValueError, "a cross product needs vectors of three numbers"),
        (lambda a, u: mat.determinant(u), TypeError, "a determinant needs one channel of floating-point numbers"),
        (lambda a, u: mat.determinant(a[1:]), ValueError, "a determinant needs a square matrix"),
        (lambda a, u: mat.solve(a, a, "ql"), ValueError, "one of lu, cholesky, qr, svd, got 'ql'"),
        (lambda a, u: mat.solve(a, a[1:]), ValueError, "need the same number of rows, got 4 and 3"),
        (lambda a, u: mat.solve(a[1:], a[1:]), ValueError, "solve by 'lu' needs a square matrix"),
        (lambda a, u: mat.solve(a, a.convertTo(mat.CV_32F)), TypeError, "both sides of a system need the same type"),
        (lambda a, u: mat.solve(a[1:], a[1:], "qr"), np.linalg.LinAlgError, "fewer equations than unknowns"),
    ],
)
def test_what_cannot_be_computed(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call(Mat(A), Mat.ones(4, 4, mat.CV_8U))


@pytest.mark.gpu
def test_on_a_gpu_too() -> None:
    a, b = Mat(POSITIVE).cuda(), Mat(B).cuda()
    assert a.dot(a) == pytest.approx(float((POSITIVE**2).sum()))
    assert mat.determinant(a) == pytest.approx(np.linalg.det(POSITIVE))
    for method in ("lu", "cholesky", "qr", "svd"):
        assert np.allclose(POSITIVE @ mat.solve(a, b, method).cpu().numpy(), B)  # type: ignore[arg-type]
    with pytest.raises(np.linalg.LinAlgError):
        mat.solve(Mat.ones(3, 3, mat.CV_64F).cuda(), Mat.ones(3, 1, mat.CV_64F).cuda())
