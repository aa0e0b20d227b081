"""Loops that Numba compiles: when they are, which Mats they take, and that they give what blocks of rows give."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from rooftop import mat
from rooftop.launch import INTERPRETED, numba_loops
from rooftop.mat import Mat, MatExpr, evaluation, loop_programs

pytest.importorskip("numba")
pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels take their place")
Counted = list[int]


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    """[loops that ran, loops that were compiled], with nothing compiled before."""
    counts = [0, 0]

    def counting(function: Callable[..., object], n: int) -> Callable[..., object]:
        def call(*given: object) -> object:
            counts[n] += 1
            return function(*given)

        return call

    monkeypatch.setattr(loop_programs, "_loops", {})
    monkeypatch.setattr(loop_programs, "_spent", {})
    monkeypatch.setattr(loop_programs, "_run", counting(loop_programs._run, 0))
    monkeypatch.setattr(loop_programs, "compiled_loop", counting(loop_programs.compiled_loop, 1))
    return counts


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_programs, "PATIENCE_SECONDS", 0.0)


def image(seed: int, shape: tuple[int, ...] = (120, 90, 3), dtype: str = "u1") -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, shape).astype(dtype)


def test_a_form_is_compiled_once_rows_have_taken_as_long(monkeypatch: pytest.MonkeyPatch, counted: Counted) -> None:
    monkeypatch.setattr(loop_programs, "PATIENCE_SECONDS", 1e-9)
    a, b = image(1), image(2)
    expected = np.clip(a.astype(int) + b, 0, 255)
    for ran, compiled in ((0, 0), (1, 1), (2, 1)):
        assert np.array_equal((Mat(a) + Mat(b)).numpy(), expected)
        assert counted == [ran, compiled]
    (Mat(a) * 2 + Mat(b)).numpy()
    assert counted == [2, 1]  # another form waits for itself
    (Mat(a) * 2 + Mat(b)).numpy()
    assert np.array_equal((Mat(a) * 3 + Mat(b)).numpy(), np.clip(a.astype(int) * 3 + b, 0, 255))
    assert counted == [4, 2]  # another number does not


def test_small_mats_wait_for_nothing(at_once: None, counted: Counted) -> None:
    small = Mat(image(1, (9, 9, 3)))
    (small + small).numpy()
    assert counted == [0, 0]


def test_without_numba_rows_do_the_same(monkeypatch: pytest.MonkeyPatch, at_once: None, counted: Counted) -> None:
    a, b = Mat(image(1)), Mat(image(2))
    expected = (a * 0.3 + b).numpy()
    monkeypatch.setattr(evaluation, "numba_is_installed", lambda: False)
    assert np.array_equal((a * 0.3 + b).numpy(), expected)
    assert counted == [1, 1]
    numba_loops.numba_is_installed.cache_clear()
    monkeypatch.setattr(numba_loops, "find_spec", lambda name: None)
    assert not numba_loops.numba_is_installed()
    numba_loops.numba_is_installed.cache_clear()


LARGE = (300, 400, 3)
CASES: dict[str, Callable[[], tuple[MatExpr, np.ndarray, bool]]] = {
    # name: the expression, what it is, and whether a loop can do it
    "regions": lambda: (
        Mat(image(3, LARGE))[7:290, 5:211] + Mat(image(4, LARGE))[0:283, 150:356],
        np.clip(image(3, LARGE)[7:290, 5:211].astype(int) + image(4, LARGE)[0:283, 150:356], 0, 255),
        True,
    ),
    "a number for each channel, more than a row": lambda: (
        Mat(image(3, LARGE)) - (10, 20, 30),
        np.clip(image(3, LARGE).astype(int) - [10, 20, 30], 0, 255),
        True,
    ),
    "the same Mat twice": lambda: (
        Mat(image(3, LARGE)).mul(m := Mat(image(3, LARGE))) - m,
        np.clip(image(3, LARGE).astype(int) ** 2 - image(3, LARGE), 0, 255),
        True,
    ),
    "ranges of three dimensions": lambda: (
        Mat(image(3, (9, 60, 70), "i2"), mat.CV_16SC1)[1:8, 3:50, 10:70] * 400,
        np.clip(image(3, (9, 60, 70)).astype(int)[1:8, 3:50, 10:70] * 400, -32768, 32767),
        True,
    ),
    "transposed": lambda: (
        Mat(image(3, LARGE)).t() + 9,
        np.clip(image(3, LARGE).swapaxes(0, 1).astype(int) + 9, 0, 255),
        False,
    ),
    "half precision": lambda: (
        Mat(torch.from_numpy(image(3, LARGE)).half()) + 0.5,
        image(3, LARGE) + 0.5,
        False,
    ),
    "narrow regions": lambda: (
        Mat(image(3, (4000, 9, 3)))[:, 0:4] + 1,
        np.clip(image(3, (4000, 9, 3))[:, :4].astype(int) + 1, 0, 255),
        False,
    ),
    "eight images": lambda: (
        sum((Mat(image(n)) for n in range(1, 8)), start=Mat(image(0)) + 0),
        np.clip(sum(image(n).astype(int) for n in range(8)), 0, 255),
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_loop_takes(at_once: None, counted: Counted, name: str) -> None:
    expression, expected, by_loop = CASES[name]()
    assert np.array_equal(expression.to_mat().tensor().double().squeeze(-1).numpy(), expected)
    assert counted == [by_loop, by_loop]


def test_into_what_is_read(at_once: None, counted: Counted) -> None:
    a, b = image(5), image(6)
    m = Mat(a.copy())
    m.assign(m + Mat(b))
    assert np.array_equal(m.numpy(), np.clip(a.astype(int) + b, 0, 255))
    whole = Mat(a.copy())
    whole[1:120].assign(whole[0:119] * 2)  # shifted: as if all was read first
    assert np.array_equal(whole.numpy()[1:], np.clip(a[:119].astype(int) * 2, 0, 255))
    assert counted == [2, 2]


def test_in_several_threads(at_once: None, counted: Counted) -> None:
    a = image(7, (1100, 1000, 3))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        expected = np.clip(np.rint(a * 0.3 + 1), 0, 255)
        assert np.array_equal((Mat(a) * 0.3 + 1).numpy(), expected)
        assert np.array_equal((Mat(a)[1:, :999] * 0.3 + 1).numpy(), expected[1:, :999])
    finally:
        torch.set_num_threads(threads)
    assert counted[0] == 2


def test_a_plan_keeps_no_mat() -> None:
    from weakref import ref

    m = Mat(image(8))
    block = ref(m.data)
    (m + 1).to_mat()
    del m
    assert block() is None


def test_a_thread_that_fails_is_heard() -> None:
    def work(first: int, last: int) -> None:
        if first:
            raise MemoryError("no room")

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(MemoryError, match="no room"):
            numba_loops.in_threads(work, 10, 2)
        numba_loops.in_threads(work, 1, 2)
    finally:
        torch.set_num_threads(threads)
