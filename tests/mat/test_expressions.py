"""Expressions: properties known before evaluation, targets of their values, products, and agreement with OpenCV."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from rooftop import mat
from rooftop.mat import CV_8U, CV_8UC1, CV_8UC3, CV_16S, CV_32F, CV_32FC1, CV_32S, CV_64FC1, Mat, MatExpr, Scalar

cv2 = pytest.importorskip("cv2")


def image(seed: int, shape: tuple[int, ...] = (7, 9, 3), dtype: str = "u1") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape).astype(dtype)


def test_saturated_once_at_the_store() -> None:
    a, b = Mat(2, 2, CV_8U, 100), Mat(2, 2, CV_8U, 70)
    assert (4 * (a - b)).numpy().tolist() == [[120, 120]] * 2
    assert (4 * (b - a) + 300).numpy().tolist() == [[180, 180]] * 2
    assert (a * 0.5 + b * 0.25).numpy().tolist() == [[68, 68]] * 2  # 67.5: half to even


def test_large_expressions_of_64_bits_in_regions_and_in_place() -> None:
    """The expression has more elements than are computed at a time, and overwrites its own operands."""
    array = np.random.default_rng(0).integers(-(2**62), 2**62, (700, 400)).astype(np.int64)
    m = Mat(array.copy())
    region = m[3:690, 5:390]
    region[...] = region * 3 - 1
    expected = array.copy()
    inside = array[3:690, 5:390].astype(object) * 3 - 1
    expected[3:690, 5:390] = np.clip(inside, -(2**63), 2**63 - 1).astype(np.int64)
    assert np.array_equal(m.numpy(), expected)


def test_type_and_size_are_known_without_evaluating(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooftop.mat.evaluation.evaluate_into", None)
    a = Mat(5, 8, CV_8UC3)
    expression = (a + a * 2).t()
    assert expression.type() == CV_8UC3
    assert (expression.rows, expression.cols, expression.dims, expression.channels()) == (8, 5, 2, 3)
    assert tuple(expression.size) == (8, 5)
    assert expression.size() == (5, 8)
    assert (a > 3).type() == CV_8UC3
    assert (Mat(5, 8, CV_32F) >= Mat(5, 8, CV_32F)).type() == CV_8UC1
    x, y = Mat(3, 4, CV_32F), Mat(4, 6, CV_32F)
    assert tuple((x @ y).size) == tuple((x * y).size) == (3, 6)
    assert tuple(x.inv("svd").size) == (4, 3)
    assert repr(expression) == "MatExpr(8 x 5 CV_8UC3, cpu: M0.t() + (M0.t() * 2))"
    assert repr(-a > 2.5) == "MatExpr(5 x 8 CV_8UC3, cpu: (-M0) > 2.5)"


def test_numbers_are_held_by_value_and_mats_by_memory() -> None:
    a, numbers = Mat(1, 1, CV_8UC3, 1), [1, 2, 3]
    expression = a + numbers
    numbers[0] = 100
    a.setTo(10)
    assert expression[0, 0] == (11, 12, 13)
    before = a.data_ptr()
    a.create(2, 2, CV_8U)  # another Mat with that name
    assert expression[0, 0] == (11, 12, 13)
    assert a.data_ptr() != before
    assert (Mat(1, 1, CV_8UC3, 5) + Scalar(1))[0, 0] == (6, 5, 5)
    assert (5 + Mat(1, 1, CV_8UC3, 5))[0, 0] == (10, 10, 10)
    assert (np.float32(2) - Mat(1, 1, CV_8U, 1))[0, 0] == 1


def test_every_way_to_a_value() -> None:
    a, b = Mat(image(0)), Mat(image(1))
    expected = np.clip(a.numpy().astype(int) + b.numpy(), 0, 255)
    expression = a + b
    into = Mat(7, 9, CV_8UC3)
    pointer = into.data_ptr()
    assert into.assign(expression) is into
    whole = Mat.zeros(9, 11, CV_8UC3)
    whole[1:8, 2:11] = expression
    pushed = Mat(0, 9, CV_8UC3)
    pushed.push_back(expression)
    copied = expression.copyTo(Mat(7, 9, CV_8UC3))
    for value in (
        *(Mat(expression), into, whole[1:8, 2:11], expression.to_mat(), mat.evaluate(expression), pushed, copied),
        *(mat.eval(expression, Mat()), expression.clone(), mat.merge(mat.split(expression)), Mat(expression.tensor())),
        Mat(np.asarray(expression)),
    ):
        assert np.array_equal(value.numpy(), expected)
    assert into.data_ptr() == pointer
    wide = expression.to_mat(CV_16S)  # the numbers before they saturate
    assert np.array_equal(wide.numpy(), a.numpy().astype(int) + b.numpy())
    region = Mat.zeros(7, 9, mat.CV_16SC3)
    region[:, :] = expression
    assert np.array_equal(region.numpy(), wide.numpy())
    shared = Mat().assign(a)
    assert shared.data is a.data


def test_masks_are_expressions() -> None:
    a = Mat(image(3, (6, 7)))
    expected = np.where(a.numpy() > 100, 9, a.numpy())
    a.setTo(9, a > 100)
    assert np.array_equal(a.numpy(), expected)
    kept = a.copyTo(mask=(a < 50) | (a == 9))
    assert np.array_equal(kept.numpy(), np.where((expected < 50) | (expected == 9), expected, 0))


def test_operands_that_the_target_overlaps() -> None:
    a = Mat(image(4, (6, 6)))
    expected = a.numpy().T.copy()
    pointer = a.data_ptr()
    a.assign(a.t())
    assert np.array_equal(a.numpy(), expected)
    assert a.data_ptr() == pointer
    whole = image(5, (8, 8))
    expected = np.minimum(whole[0:7].astype(int) + whole[1:8], 255)
    Mat(whole[1:8]).assign(Mat(whole[0:7]) + Mat(whole[1:8]))  # Mat does not know that the two share memory
    assert np.array_equal(whole[1:8], expected)
    x = Mat(np.arange(9, dtype=np.float32).reshape(3, 3))
    expected = x.numpy() @ x.numpy() + x.numpy()
    x.assign(x @ x + x)
    assert np.array_equal(x.numpy(), expected)


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "f4", "f8"])
def test_single_operations_are_those_of_opencv(dtype: str) -> None:
    a, b = ((image(n, (31, 17, 3)).astype("i4") - (0 if dtype[0] == "u" else 128)).astype(dtype) for n in (6, 7))
    b[::5] = 0
    x, y = Mat(a), Mat(b)
    expected: dict[str, tuple[MatExpr, Any]] = {
        "add": (x + y, cv2.add(a, b)),
        "subtract": (x - y, cv2.subtract(a, b)),
        "multiply": (x.mul(y), cv2.multiply(a, b)),
        "absdiff": (mat.absdiff(x, y), cv2.absdiff(a, b)),
        "min": (mat.minimum(x, y), cv2.min(a, b)),
        "max": (mat.max(x, y), cv2.max(a, b)),
        "gt": (x > y, cv2.compare(a, b, cv2.CMP_GT)),
        "eq": (x == y, cv2.compare(a, b, cv2.CMP_EQ)),
        "le": (x <= 5, cv2.compare(a, np.full_like(a, 5), cv2.CMP_LE)),
        "scalar": (x + Scalar(1, 2, 3), cv2.add(a, (1, 2, 3, 0))),
    }
    with np.errstate(all="ignore"):
        expected["divide"] = (x / y, cv2.divide(a, b))
    if dtype[0] != "f":
        expected["and"] = (x & y, cv2.bitwise_and(a, b))
        expected["or"] = (x | y, cv2.bitwise_or(a, b))
        expected["xor"] = (x ^ y, cv2.bitwise_xor(a, b))
        expected["not"] = (~x, cv2.bitwise_not(a))
    for name, (expression, value) in expected.items():
        assert np.array_equal(expression.numpy(), value, equal_nan=True), name


def test_integers_divided_by_zero_are_zero_and_floats_follow_ieee() -> None:
    a, zero = Mat(1, 2, CV_8U, 7), Mat.zeros(1, 2, CV_8U)
    assert ((a / zero) + 3).numpy().tolist() == [[3, 3]]
    assert (a / 0).numpy().tolist() == (5 / zero).numpy().tolist() == [[0, 0]]
    f = Mat(np.array([[1, -1, 0]], np.float32))
    assert np.array_equal((f / 0).numpy(), [[np.inf, -np.inf, np.nan]], equal_nan=True)


def test_whole_numbers_of_64_bits_are_exact() -> None:
    a = Mat(np.array([[2**61 + 1, -(2**61) - 1]]))
    assert mat.maximum(a, 5).numpy().tolist() == [[2**61 + 1, 5]]
    b = Mat(np.array([[2**31 - 1, -(2**31)]], np.int32))
    assert (b.mul(b) - b).to_mat(mat.CV_64S).numpy().tolist() == [[(2**31 - 1) * (2**31 - 2), 2**62 + 2**31]]
    big = Mat(np.array([[2**64 - 1, 2**63]], np.uint64))
    assert (big & (2**63)).numpy().tolist() == [[2**63, 2**63]]
    assert (~big).numpy().tolist() == [[0, 2**63 - 1]]


def test_half_precision_is_rounded_once() -> None:
    """1 + 2^-11 + 2^-40 is nearer to 1 + 2^-10 than to 1, but in float32 both are equally near."""
    a = Mat(np.array([[1.0]], np.float16))
    for depth, bits in ((mat.CV_16F, 11), (mat.CV_16BF, 8)):
        ones = a.convertTo(depth)
        expression = ones + 2.0**-bits + 2.0**-40
        assert float(expression.tensor().flatten()[0]) == 1 + 2.0 ** (1 - bits)
        assert float((ones + 2.0**-bits).tensor().flatten()[0]) == 1


@pytest.mark.parametrize("depth", [CV_32F, mat.CV_64F, mat.CV_16F, mat.CV_16BF])
def test_products_with_factors_and_terms(depth: int) -> None:
    rng = np.random.default_rng(8)
    x, y, z = (Mat(torch.from_numpy(rng.integers(-4, 5, s).astype("f8"))) for s in ((3, 4), (4, 5), (3, 5)))
    a, b, c = (m.numpy() for m in (x, y, z))
    p, q, r = (m.convertTo(depth) for m in (x, y, z))
    cases = [
        (p * q, a @ b),
        (p @ q * 2, 2 * a @ b),
        (-(2 * p @ (q * 0.5)) + r * 3, 3 * c - a @ b),
        (r / 2 - p @ q, c / 2 - a @ b),
        ((p @ q).t() + r.t(), (a @ b + c).T),
        ((p + 1) @ q, (a + 1) @ b),
        (abs(p @ q) + 1, abs(a @ b) + 1),
        (p @ q @ q.t(), a @ b @ b.T),
    ]
    for expression, expected in cases:
        assert expression.type() == depth
        assert np.array_equal(expression.tensor().double().numpy()[..., 0], expected), expression


def test_a_product_with_factor_and_term_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    real = torch.addmm
    monkeypatch.setattr(torch, "addmm", lambda *a, **k: calls.append(k) or real(*a, **k))
    a = Mat(np.random.default_rng(0).normal(size=(4, 4)))
    out = Mat(4, 4, CV_64FC1)
    out.assign(a.t() @ a * 2 - a * 3)
    assert [(k["alpha"], k["beta"]) for k in calls] == [(2.0, -3.0)]
    assert np.allclose(out.numpy(), a.numpy().T @ a.numpy() * 2 - a.numpy() * 3)


def test_inverses() -> None:
    a = np.random.default_rng(1).normal(size=(4, 4))
    m, spd = Mat(a), Mat(a @ a.T + np.eye(4))
    assert np.allclose((m.inv() @ m).numpy(), np.eye(4))
    assert np.allclose((spd.inv("cholesky") * spd).numpy(), np.eye(4))
    assert np.allclose(Mat(a[:, :2]).inv("svd").numpy(), np.linalg.pinv(a[:, :2]))
    assert np.allclose(m.t().inv().numpy(), np.linalg.inv(a.T))
    for method, wrong in (("lu", Mat.zeros(3, 3, CV_64FC1)), ("cholesky", Mat(-np.eye(3)))):
        with pytest.raises(np.linalg.LinAlgError, match=f"inv by '{method}'"):
            wrong.inv(method).to_mat()  # type: ignore[arg-type]


def test_large_mats_are_divided_among_threads_and_blocks() -> None:
    a, b = image(9, (700, 500, 3)), image(10, (700, 500, 3))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = np.clip(np.rint(a * 0.3 + b[:, ::-1] * 0.7 - np.array([1, 2, 3])), 0, 255)
        x, y = Mat(a), Mat(np.ascontiguousarray(b[:, ::-1]))
        assert np.array_equal((x * 0.3 + y * 0.7 - (1, 2, 3)).numpy(), expected)
        part, region = np.s_[3:699, 5:490], Mat.zeros(700, 500, CV_8UC3)
        region[part] = x[part] * 0.3 + y[part] * 0.7 - (1, 2, 3)
        assert np.array_equal(region.numpy()[part], expected[part])
        assert region.numpy().astype(int).sum() == expected[part].sum()
        turned = (x.t() - 3).numpy()
        assert np.array_equal(turned, np.clip(a.astype(int) - 3, 0, 255).swapaxes(0, 1))
        row = (Mat(a.reshape(1, -1, 3)) + Scalar(1, 2, 3)).numpy()
        assert np.array_equal(row, np.clip(a.reshape(1, -1, 3) + np.array([1, 2, 3]), 0, 255))
    finally:
        torch.set_num_threads(threads)


def test_an_error_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftop.mat import planning, row_programs

    def broken(*given: Any, out: Any) -> None:
        raise MemoryError("no room")

    monkeypatch.setitem(row_programs._FUNCTIONS, "add", broken)
    monkeypatch.setattr(planning, "_plans", {})
    with pytest.raises(MemoryError, match="no room"):
        (Mat(1000, 1000, CV_32F, 1) + Mat(1000, 1000, CV_32F, 2)).to_mat()


@pytest.mark.parametrize("numbers", [Scalar(0.0, 0.25, -0.0), 0.0])
def test_of_two_zeros_the_same_one_is_chosen_wherever_the_number_stands(numbers: Any) -> None:
    m = Mat(np.array([0.0, -0.0, -0.0], np.float32).repeat(300).reshape(20, 15, 3))
    for choose in (mat.minimum, mat.maximum):
        chosen = [choose(m, numbers).numpy(), choose(numbers, m).numpy()]
        assert chosen[0].tobytes() == chosen[1].tobytes()


def test_empty_and_one_dimensional() -> None:
    assert Mat(Mat(0, 3, CV_8U) + 1).empty()
    assert Mat(Mat() + Mat()).empty()
    assert (Mat((4,), CV_8U, 3) * 2).numpy().tolist() == [6] * 4
    assert (Mat(0, 3, CV_32F).t() @ Mat(0, 2, CV_32F)).numpy().tolist() == [[0, 0]] * 3


def test_mats_are_still_hashed_by_identity() -> None:
    a, b = Mat(2, 2, CV_8U, 1), Mat(2, 2, CV_8U, 1)
    assert len({a, b, a}) == 2
    assert (a == b).numpy().tolist() == [[255, 255]] * 2
    assert (a == None) is False  # noqa: E711
    with pytest.raises(TypeError, match="no single truth value"):
        bool(a == b)


def test_arrays_and_tensors_are_operands() -> None:
    a = image(11, (4, 5))
    m = Mat(a)
    expected = np.clip(a.astype(int) * 2, 0, 255)
    for expression in (m + a, a + m, m + torch.from_numpy(a)):
        assert isinstance(expression, MatExpr)
        assert np.array_equal(expression.numpy(), expected)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (
            lambda a, f: a + f,
            TypeError,
            "a sum takes two Mats of the same type, got CV_8UC3 and CV_32FC1: convertTo one",
        ),
        (
            lambda a, f: a + a[1:],
            ValueError,
            "a sum takes two Mats of the same size, got 4 x 5 and 3 x 5: Mats are not broadcast",
        ),
        (lambda a, f: a * a, TypeError, r"a.mul\(b\) multiplies element by element, and convertTo\(CV_32F\) converts"),
        (lambda a, f: f @ f, ValueError, "a product of 4 x 5 and 4 x 5: the first must have as many columns"),
        (lambda a, f: f & f, TypeError, "bitwise operations need integers, got CV_32FC1"),
        (lambda a, f: a & 1.5, TypeError, "bitwise operations need integers"),
        (lambda a, f: f.inv(), ValueError, "an inverse needs a square matrix, got 4 x 5: 'svd' gives"),
        (lambda a, f: f.inv("qr"), ValueError, "one of lu, cholesky, svd, got 'qr'"),
        (lambda a, f: Mat((2, 2, 2), CV_8U).t(), ValueError, r"t\(\) needs two dimensions, got 2 x 2 x 2"),
        (lambda a, f: a.mul("3"), TypeError, "mul takes a Mat, an expression, an array or numbers, got str"),
        (lambda a, f: a + "3", TypeError, "unsupported operand"),
        (lambda a, f: a * 10**400, ValueError, "a number of more than 1023 bits is too large for a Mat"),
        (lambda a, f: a & float("nan"), TypeError, "bitwise operations need integers"),
        (lambda a, f: a.copyTo(None, [1, 2]), TypeError, "a mask must be a Mat, an expression, an array or a tensor"),
        (lambda a, f: mat.minimum(1, 2), TypeError, "one of them must be a Mat"),
        (lambda a, f: Mat(3, 3, CV_8UC3).__setitem__(slice(0, 2), a + 1), ValueError, "cannot be assigned to a region"),
    ],
)
def test_what_cannot_be_expressed(make: Any, error: type[Exception], said: str) -> None:
    a, f = Mat.zeros(4, 5, CV_8UC3), Mat.zeros(4, 5, CV_32FC1)
    with pytest.raises(error, match=said):
        make(a, f)


def test_read_only_memory_is_read_and_not_written() -> None:
    array = image(12, (3, 3))
    array.flags.writeable = False
    m = Mat(array)
    assert np.array_equal((m + 0).numpy(), array)
    with pytest.raises(ValueError, match="a read-only array"):
        m.assign(m + 1)


def test_in_place_is_the_assignment_of_the_expression() -> None:
    """In-place operators also change regions, whether a variable holds them or not, and keep the depth."""
    operations: dict[str, Callable[[Any, Any], Any]] = {
        "+": operator.iadd, "-": operator.isub, "*": operator.imul, "/": operator.itruediv, "&": operator.iand,
        "|": operator.ior, "^": operator.ixor,
    }  # fmt: skip
    plain: dict[str, Callable[[Any, Any], Any]] = {
        "+": operator.add, "-": operator.sub, "*": operator.mul, "/": operator.truediv, "&": operator.and_,
        "|": operator.or_, "^": operator.xor,
    }  # fmt: skip
    numbers = np.random.default_rng(0).integers(0, 256, (5, 6, 3)).astype(np.uint8)
    for name, operation in operations.items():
        array, other = numbers.copy(), numbers.copy()
        image, expected = Mat(array), Mat(other)
        region = same = image[1:4, 2:5]
        region = operation(region, 7)
        assert region is same
        expected[1:4, 2:5] = plain[name](Mat(other)[1:4, 2:5], 7)
        assert np.array_equal(array, other), name
        image[0:1] = operation(image[0:1], image[2:3]) if name not in "*/" else image[0:1]
        assert array.ctypes.data == image.numpy().ctypes.data
    image[0:1] += 300
    assert (array[0] == 255).all()
    whole = Mat.eye(2, 2, CV_32F)
    data = whole.data_ptr()
    whole @= Mat(np.float32([[1, 2], [3, 4]]))
    whole *= 2
    whole[...] -= 1
    assert whole.numpy().tolist() == [[1, 3], [5, 7]]
    assert whole.data_ptr() == data
    with pytest.raises(TypeError):
        whole += "text"
    with pytest.raises(ValueError, match="of the same size"):
        whole += Mat(3, 3, CV_32F)


def test_all_that_is_not_named() -> None:
    m = Mat(np.arange(24, dtype=np.int32).reshape(2, 3, 4), CV_32S)
    assert m[...].numpy().tolist() == m.numpy().tolist()
    assert m[..., 1:3].numpy().tolist() == m.numpy()[..., 1:3].tolist()
    assert m[1, ..., 2:4].numpy().tolist() == m.numpy()[1:2, :, 2:4].tolist()
    assert m[..., 1, 2, 3] == m[1, ..., 2, 3] == 23
    m[...] = m + 1
    assert m[0, 0, 0] == 1
    with pytest.raises(IndexError, match="4 indices"):
        m[..., 1, 1, 1, 1]


def test_not_a_number_is_a_number_among_others() -> None:
    """NaN works in small and in large Mats, which take different code paths."""
    for size in ((3, 4), (600, 700)):
        m = Mat(np.ones(size, np.float32))
        for e in (m + float("nan"), m - float("nan"), m * float("nan"), float("nan") / m):
            assert np.isnan(Mat(e).numpy()).all()
        assert np.isinf(Mat(m - float("inf")).numpy()).all()
        m += float("nan")
        assert np.isnan(m.numpy()).all()
