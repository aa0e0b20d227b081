"""Loops that Numba compiles: when they are compiled, which Mats they support, and agreement with blocks of rows."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop import mat
from rooftop.launch import INTERPRETED, numba_loops
from rooftop.mat import Mat, MatExpr, loop_programs
from rooftop.mat.remembered import remember
from rooftop.mat.type_codes import DEPTHS

pytest.importorskip("numba")
from rooftop.mat.masked_loops import copy_by_loops

pytestmark = pytest.mark.skipif(INTERPRETED, reason="kernels replace the loops")
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
    monkeypatch.setattr(loop_programs, "run_loop", counting(loop_programs.run_loop, 0))
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
    assert counted == [2, 1]  # a new form of expression must be compiled first
    (Mat(a) * 2 + Mat(b)).numpy()
    assert np.array_equal((Mat(a) * 3 + Mat(b)).numpy(), np.clip(a.astype(int) * 3 + b, 0, 255))
    assert counted == [4, 2]  # a new constant needs no compilation


def test_small_mats_wait_for_nothing(at_once: None, counted: Counted) -> None:
    small = Mat(image(1, (9, 9, 3)))
    (small + small).numpy()
    assert counted == [0, 0]


def test_without_numba_rows_do_the_same(monkeypatch: pytest.MonkeyPatch, at_once: None, counted: Counted) -> None:
    a, b = Mat(image(1)), Mat(image(2))
    expected = (a * 0.3 + b).numpy()
    monkeypatch.setattr(numba_loops, "numba_is_installed", lambda: False)
    assert np.array_equal((a * 0.3 + b).numpy(), expected)
    assert counted == [1, 1]
    monkeypatch.undo()
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
    "hundreds of operations": lambda: (
        sum(range(1, 200), start=Mat(image(3, (90, 90, 1), "i4"), mat.CV_32SC1) + 0),
        image(3, (90, 90, 1), "i4") + 19900,
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
    whole[1:120].assign(whole[0:119] * 2)  # shifted, with the result as if everything had been read first
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


def test_what_a_thread_raised_keeps_nothing_of_its_caller() -> None:
    def fails() -> weakref.ref[np.ndarray]:
        given = np.zeros(4)

        def work(first: int, last: int) -> None:
            raise MemoryError(f"no room for {given[first]}")

        with pytest.raises(MemoryError):
            numba_loops.in_threads(work, 10, 1)
        return weakref.ref(given)

    gc.disable()
    try:
        assert fails()() is None
    finally:
        gc.enable()


# ---- special cases -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_loops", [False, True])
def test_zeros_have_signs(monkeypatch: pytest.MonkeyPatch, at_once: None, by_loops: bool) -> None:
    monkeypatch.setattr(numba_loops, "LEAST_ELEMENTS", 0 if by_loops else 1 << 40)
    monkeypatch.setattr(loop_programs, "LEAST_COLUMNS", 1)
    one, zero = Mat(np.ones((4, 4, 2), "f4")), Mat(np.full((4, 4, 1), -0.0, "f4"))
    assert (one / (0.0, -0.0)).to_mat()[0, 0] == (np.inf, -np.inf)
    both = (one / (0.0, 1.0) + one / (-0.0, 1.0)).to_mat()[0, 0]
    assert np.isnan(both[0])
    for chosen in (mat.minimum(zero, 0.0), mat.maximum(zero, 0.0)):
        assert np.signbit(chosen.numpy()).all()
    for chosen in (mat.minimum(zero * -1, -0.0), mat.maximum(-0.0, zero * -1)):
        assert not np.signbit(chosen.numpy()).any()
    signs = [np.signbit(one.convertTo(mat.CV_32F, alpha).numpy()).all() for alpha in (0.0, -0.0, 0.0)]
    assert signs == [False, True, False]


def test_scales_are_numbers_of_any_kind(at_once: None, counted: Counted) -> None:
    m = Mat(image(3, LARGE))
    doubled = m.convertTo(mat.CV_64F, torch.tensor(2.0), np.float32(1)).numpy()  # type: ignore[arg-type]
    assert np.array_equal(doubled, image(3, LARGE) * 2.0 + 1)
    assert np.array_equal(m.convertTo(mat.CV_64F, 1, 2**63).numpy(), image(3, LARGE) + 2.0**63)
    assert counted[0] == 2
    for wrong in ("2x", None, 1j):
        with pytest.raises((TypeError, ValueError)):
            m.convertTo(mat.CV_64F, wrong)  # type: ignore[arg-type]


def test_tiny_and_huge_numbers_share_a_loop(at_once: None, counted: Counted) -> None:
    x = image(3, LARGE).astype("f8")
    for number in (1e-300, 0.3, 1e300):
        assert np.array_equal((Mat(x) * number).numpy(), x * number)
    assert counted == [3, 1]


def test_no_more_loops_than_there_may_be(monkeypatch: pytest.MonkeyPatch, at_once: None, counted: Counted) -> None:
    monkeypatch.setattr(loop_programs, "MOST_LOOPS", 1)
    m = Mat(image(3, LARGE))
    for expression, expected in ((m + 1, 1), (m * 3, 1), (m + 2, 2)):
        expression.to_mat()
        assert counted == [expected, 1]


def test_a_default_device_changes_nothing(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    x = image(3, (40, 50, 3))
    expected = (Mat(x) * 0.3 + (1, 2, 3)).numpy()
    with torch.device("meta"):
        for least in (1 << 40, 0):
            monkeypatch.setattr(numba_loops, "LEAST_ELEMENTS", least)
            assert np.array_equal((Mat(x) * 0.3 + (1, 2, 3)).numpy(), expected)
            m = Mat(40, 50, mat.CV_8UC3, 1)
            m.setTo((1, 2, 3), Mat(np.ascontiguousarray(x[..., 0])) > 100)
            m[0, 0] = 5
            m.push_back(m[0:1])
            assert m[40, 0] == (5, 5, 5)


def test_a_process_that_forks_while_a_thread_compiles() -> None:
    """A forked child must find the compiler's lock released."""
    from numba.core.compiler_lock import global_compiler_lock as lock

    assert numba_loops.numba_works()
    taken = threading.Event()

    def compiling() -> None:
        with lock:
            taken.set()
            time.sleep(0.5)

    thread = threading.Thread(target=compiling)
    thread.start()
    taken.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # warnings of forks in a process with threads
        child = os.fork()
    if child == 0:
        os._exit(0 if lock._lock.acquire(timeout=60) else 1)
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_place_to_keep_loops_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    plain = numba.njit

    def refusing(*given: object, **options: object) -> object:
        def decorate(function: object) -> object:
            if options.get("cache"):
                raise RuntimeError("cannot cache function: no locator available")
            return plain(*given, **options)(function)

        return decorate

    monkeypatch.setattr(numba, "njit", refusing)
    assert numba_loops.kept_loop(lambda x: x + 1)(2) == 3


def test_a_numba_that_cannot_be_imported_is_named_once(monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    monkeypatch.setitem(sys.modules, "numba.core.compiler_lock", None)
    numba_loops.numba_works.cache_clear()
    try:
        with pytest.warns(RuntimeWarning, match="Numba is installed, but cannot be imported"):
            assert not numba_loops.numba_works()
        monkeypatch.setitem(sys.modules, "rooftop.mat.masked_loops", None)  # importing it fails, like importing Numba
        m, mask = Mat(image(1)), Mat(image(2)[..., :1].copy())
        m.setTo((1, 2, 3), mask > 100)
        assert np.array_equal(m.numpy(), np.where(image(2)[..., :1] > 100, [1, 2, 3], image(1)))
        assert np.array_equal((m + 0.5).numpy(), np.clip(np.rint(m.numpy() + 0.5), 0, 255))
    finally:
        numba_loops.numba_works.cache_clear()


def test_threads_may_forget_at_once() -> None:
    kept: dict[int, int] = {}
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: remember(kept, n, n, 4), range(4000)))
    assert len(kept) == 4


# ---- conversions and masks ---------------------------------------------------------------------------------------


@pytest.fixture
def however_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_loops, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(loop_programs, "LEAST_COLUMNS", 1)


DEPTHS_WITH_LOOPS = [n for n, depth in enumerate(DEPTHS) if depth.name not in ("64S", "64U", "16F", "16BF")]
SCALES = [(1.0, 0.0), (1 / 255, 0.0), (1.0, 0.5), (1.5, 3.0), (-0.37, 1e5)]

ALL_SCALES = [(mat.CV_8U, mat.CV_32F), (mat.CV_32F, mat.CV_8U), (mat.CV_16S, mat.CV_32S), (mat.CV_32S, mat.CV_64F)]


def edges(depth: int) -> torch.Tensor:
    """Numbers of a depth: its limits and those of other depths, halves, NaN and infinities."""
    one = DEPTHS[depth]
    if depth == mat.CV_Bool:
        return torch.tensor([True, False])
    powers = [sign * 2.0**n + more for n in range(34) for sign in (1, -1) for more in (-1, -0.5, 0, 0.5, 1, 1.5)]
    if one.limits is None:
        return torch.tensor([*powers, 1e10, -1e10, 1e-40, 0.0, float("inf"), -float("inf"), float("nan")]).to(one.dtype)
    low, high = one.limits
    return torch.tensor([min(max(int(x), low), high) for x in powers], dtype=torch.int64).to(one.dtype)


@pytest.mark.parametrize("depth", DEPTHS_WITH_LOOPS, ids=lambda n: DEPTHS[n].name)
def test_conversions_are_those_of_blocks(
    monkeypatch: pytest.MonkeyPatch, at_once: None, counted: Counted, depth: int
) -> None:
    """Conversions into every depth, plain and scaled. test_conversions.py compares the blocks with OpenCV."""
    m = Mat(edges(depth).reshape(1, -1, 1))
    scales = {new: SCALES[:1] if (depth + new) % 2 else SCALES[:: len(SCALES) - 1] for new in DEPTHS_WITH_LOOPS}
    scales |= {new: SCALES for new in DEPTHS_WITH_LOOPS if (depth, new) in ALL_SCALES}
    pairs = [(new, *scale) for new in DEPTHS_WITH_LOOPS for scale in scales[new]]
    by_blocks = [m.convertTo(*pair) for pair in pairs]
    assert counted == [0, 0]
    monkeypatch.setattr(numba_loops, "LEAST_ELEMENTS", 0)
    for pair, expected in zip(pairs, by_blocks, strict=True):
        found = m.convertTo(*pair)
        assert found.type() == expected.type()
        assert np.array_equal(found.numpy(), expected.numpy(), equal_nan=found.depth() in (mat.CV_32F, mat.CV_64F))
    assert counted[0] == len([pair for pair in pairs if pair != (depth, 1.0, 0.0)])


def test_a_region_is_converted_where_it_is(at_once: None, counted: Counted) -> None:
    a = image(9, LARGE)
    whole = Mat(300, 400, mat.CV_32FC3, 7)
    Mat(a)[10:290, 20:390].convertTo(mat.CV_32F, 0.5, 1, whole[10:290, 20:390])
    assert np.array_equal(whole.numpy()[10:290, 20:390], a[10:290, 20:390] * np.float32(0.5) + 1)
    assert (whole.numpy()[:10] == 7).all()
    assert counted == [1, 1]


@given(
    kind=st.sampled_from(["u1", "i2", "f4", "f8", "?"]),
    channels=st.sampled_from([1, 2, 3, 4, 5, 8]),
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 40)) | st.tuples(*[st.integers(1, 4)] * 3) | st.just((2, 3000)),
    by_number=st.booleans(),
    value=st.booleans(),
    region=st.booleans(),
    share=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 99),
)
@settings(max_examples=150, deadline=None)
def test_masked_copies_are_what_numpy_says(
    kind: str,
    channels: int,
    sizes: tuple[int, ...],
    by_number: bool,
    value: bool,
    region: bool,
    share: float,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    room = tuple(n + 2 for n in sizes) if region else sizes
    part = tuple(slice(1, n + 1) if region else slice(None) for n in sizes)
    target, source = (torch.from_numpy(rng.integers(0, 100, (*room, channels)).astype(kind)) for _ in range(2))
    mask = torch.from_numpy((rng.random((*room, channels if by_number else 1)) < share) * rng.integers(1, 255)).byte()
    given_source = source[part][(0,) * len(sizes)] if value else source[part]
    expected = target.clone()
    expected[part] = torch.where(mask[part] != 0, given_source, target[part])
    done = copy_by_loops(given_source, target[part], mask[part])
    assert done != (value and by_number and channels > 1)
    assert not done or torch.equal(target, expected)


def test_a_large_image_is_copied_under_a_mask_by_threads() -> None:
    a, b = image(10, (900, 800, 3)), image(11, (900, 800, 3))
    mask = np.zeros((900, 800), np.uint8)
    mask[100:700, 3:790] = image(12, (600, 787)) > 100
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        m = Mat(a.copy())
        Mat(b).copyTo(m, Mat(mask))
        assert np.array_equal(m.numpy(), np.where(mask[..., None] != 0, b, a))
        m.setTo((1, 2, 3), Mat(mask))
        assert np.array_equal(m.numpy(), np.where(mask[..., None] != 0, [1, 2, 3], a))
    finally:
        torch.set_num_threads(threads)


def test_columns_apart_are_left_to_torch() -> None:
    x = torch.zeros(4, 5, 1, dtype=torch.uint8)
    assert not copy_by_loops(x, torch.zeros(4, 10, 1, dtype=torch.uint8)[:, ::2], x)
