"""The law of expressions: they are computed in float64, then rounded and saturated once when stored. Whole numbers are
exact.

`grown` draws a tree as nested tuples, `built` makes its expression, and `lawful` computes the required numbers with
NumPy's float64 and Python's integers, without Rooftop's arithmetic. Under TRITON_INTERPRET=1 the CPU runs the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rooftop import mat
from rooftop.launch import INTERPRETED, numba_loops
from rooftop.mat import Mat, MatExpr, loop_programs
from rooftop.mat.type_codes import CV_MAKETYPE, DEPTHS, CV_Bool

INTEGERS = [number for number, depth in enumerate(DEPTHS) if depth.limits]
FLOATS = [mat.CV_32F, mat.CV_64F, mat.CV_16F, mat.CV_16BF]
ALL = [*INTEGERS, *FLOATS, CV_Bool]
if INTERPRETED:  # the interpreter truncates to bfloat16
    ALL.remove(mat.CV_16BF)
# Precision in bits, the smallest distance of two numbers as a power of two, and the greatest number.
FORMATS = {
    mat.CV_16F: (11, -24, 65504.0),
    mat.CV_16BF: (8, -133, float(torch.finfo(torch.bfloat16).max)),
    mat.CV_32F: (24, -149, float(np.finfo("f4").max)),
}
SAME_TYPE = ["add", "sub", "mul", "div", "min", "max", "neg", "abs"]
COMPARED = {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq}
COMPARED["ne"] = operator.ne
BITS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
FUNCTIONS: dict[str, Any] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "neg": operator.neg,
    "abs": abs,
    "min": np.minimum,
    "max": np.maximum,
}


@dataclass
class Grown:
    """A tree ("leaf", number), ("numbers", value), (operation, *operands), and its leaves as (Mat, transposed)."""

    tree: tuple[Any, ...]
    leaves: list[tuple[Mat, bool]]
    depth: int
    channels: int
    sizes: tuple[int, ...]


def values(rng: np.random.Generator, depth: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Numbers of a depth, many of them small, some at its limits. Some floats are infinite or NaN."""
    one = DEPTHS[depth]
    small = rng.integers(-9, 10, shape)
    if depth == CV_Bool:
        return torch.from_numpy(small > 0)
    if one.limits is None:
        x = np.where(rng.random(shape) < 0.5, small / 2, rng.normal(0, 100, shape))
        x[rng.random(shape) < 0.03] = rng.choice([np.nan, np.inf, -np.inf, 1e30, 1e-40])
        return torch.from_numpy(x).to(one.dtype)
    low, high = one.limits
    numpy: Any = one.numpy
    x = rng.integers(low, high, shape, dtype=numpy, endpoint=True)
    x = np.where(rng.random(shape) < 0.4, np.clip(small, low, high).astype(numpy), x)
    x = np.where(rng.random(shape) < 0.05, numpy.type(high), x)
    return torch.from_numpy(np.ascontiguousarray(x))


@st.composite
def grown(draw: Any, depths: list[int] = ALL, most: int = 6) -> Grown:
    """A tree of up to `most` operations. The tree's Mats are whole, regions, transposed, or shifted views of one
    block."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    channels = draw(st.sampled_from([1, 1, 2, 3, 4, 5]))
    sizes = draw(st.tuples(st.integers(1, 7), st.integers(1, 9)) | st.tuples(*[st.integers(1, 4)] * 3))
    leaves: list[tuple[Mat, bool]] = []
    left = draw(st.integers(1, most))

    def leaf(depth: int) -> tuple[Any, ...]:
        same = [n for n, (m, _) in enumerate(leaves) if m.depth() == depth]
        kind = draw(st.sampled_from(["whole", "region", "again", "turned", "shifted"]))
        if kind == "again" and same:
            return "leaf", draw(st.sampled_from(same))
        turned = kind == "turned" and len(sizes) == 2
        own = sizes[::-1] if turned else sizes
        room = own if kind in ("whole", "again") else tuple(n + draw(st.integers(0, 3)) for n in own)
        corner = tuple(draw(st.integers(0, a - b)) for a, b in zip(room, own, strict=True))
        fitting = [leaves[n][0] for n in same if not leaves[n][1]]
        if kind == "shifted" and fitting and fitting[0].isSubmatrix() and len(sizes) == 2:
            region = draw(st.sampled_from(fitting))._header_of_itself()
            region.adjustROI(1, -1, 0, 0)
            if tuple(region.size) == sizes:
                leaves.append((region, False))
                return "leaf", len(leaves) - 1
        whole = Mat(values(rng, depth, (*room, channels)), CV_MAKETYPE(depth, 1)).reshape(channels, room)
        leaves.append((whole[tuple(slice(c, c + n) for c, n in zip(corner, own, strict=True))], turned))
        return "leaf", len(leaves) - 1

    def numbers(depth: int) -> tuple[Any, ...]:
        one = st.integers(-3, 300) | st.integers(-8, 8).map(lambda n: n / 4) | st.floats(-40, 40)
        one = one | st.sampled_from([0, 1, -1, 255, 65535, 2**31, 0.1, 1 / 3])
        return "numbers", draw(one | st.lists(one, min_size=channels, max_size=channels).map(tuple))

    def whole_numbers() -> tuple[Any, ...]:
        one = st.integers(0, 300) | st.integers(-(2**40), 2**40)
        return "numbers", draw(one | st.lists(one, min_size=channels, max_size=channels).map(tuple))

    def tree(depth: int) -> tuple[Any, ...]:
        nonlocal left
        if left <= 0:
            return leaf(depth)
        left -= 1
        kinds = list(SAME_TYPE)
        kinds += [*BITS, "not"] if depth in INTEGERS or depth == CV_Bool else []
        kinds += ["compare"] * 3 if depth == mat.CV_8U else []
        kind = draw(st.sampled_from(kinds))
        if kind in ("neg", "abs", "not"):
            return kind, tree(depth)
        if kind == "compare":
            kind, depth = draw(st.sampled_from(list(COMPARED))), draw(st.sampled_from(depths))
        operands = [tree(depth), tree(depth)]
        which = draw(st.sampled_from([None, None, 0, 1]))
        if which is not None:
            operands[which] = whole_numbers() if kind in BITS else numbers(depth)
        return kind, *operands

    depth = draw(st.sampled_from(depths))
    return Grown(tree(depth), leaves, depth, channels, sizes)


def built(whose: Grown, leaves: list[Mat] | None = None) -> MatExpr:
    """The expression of a tree, with `others` in place of its own Mats if they are given."""
    mats = leaves or [m for m, _ in whose.leaves]

    def of(tree: tuple[Any, ...]) -> Any:
        kind, *operands = tree
        if kind == "leaf":
            m, turned = mats[operands[0]], whose.leaves[operands[0]][1]
            return m.t() if turned else m
        if kind == "numbers":
            return operands[0]
        a, *rest = map(of, operands)
        if kind == "mul":
            return a.mul(*rest) if isinstance(a, (Mat, MatExpr)) else rest[0].mul(a)
        if kind == "div":
            return a / rest[0]
        if kind in ("min", "max"):
            return {"min": mat.minimum, "max": mat.maximum}[kind](a, *rest)
        return {**FUNCTIONS, **COMPARED, **BITS, "not": operator.invert}[kind](a, *rest)

    return of(whose.tree)


# ---- the law -----------------------------------------------------------------------------------------------------


class NotWholeError(Exception):
    """An expression whose values may not be whole numbers."""


@dataclass
class Value:
    """Numbers: Python integers if all are whole, otherwise float64."""

    numbers: np.ndarray
    depth: int


def lawful(whose: Grown, tree: tuple[Any, ...] | None = None, depth: int | None = None) -> np.ndarray:
    """The stored values, (..., channels): Python integers (object), booleans or float64 numbers that the depth can
    represent.

    A tree of a single leaf has the leaf's values. A tree whose root is a bitwise operation of 64 bits keeps all bits.
    """
    tree = whose.tree if tree is None else tree
    with np.errstate(all="ignore"):
        try:
            found = _value(whose, tree, exact=True)
        except NotWholeError:
            whole = _is_wide_bits(whose, tree) and depth in (None, _depth_of(whose, [tree]))
            found = _bits_of_operands(whose, tree) if whole else _value(whose, tree, exact=False)
        return _stored(found.numbers, found.depth if depth is None else depth)


def _value(whose: Grown, tree: tuple[Any, ...], exact: bool) -> Value:
    found = _any_value(whose, tree, exact)
    return found if exact else Value(found.numbers.astype("f8"), found.depth)


def _any_value(whose: Grown, tree: tuple[Any, ...], exact: bool) -> Value:
    kind, *operands = tree
    if kind == "leaf":
        return _leaf(*whose.leaves[operands[0]], exact)
    if kind == "div" and operands[1][0] == "numbers":  # division by a power of two is multiplication by its inverse
        numbers = operands[1][1] if isinstance(operands[1][1], tuple) else (operands[1][1],)
        if all(n and abs(np.frexp(n)[0]) == 0.5 for n in numbers):
            inverse = tuple(1 / n for n in numbers)
            kind, operands = "mul", [operands[0], ("numbers", inverse if len(inverse) > 1 else inverse[0])]
    if _is_wide_bits(whose, tree):
        return _bits_of_operands(whose, tree)
    depth = _depth_of(whose, operands)
    if kind in BITS or kind == "not":
        return _bits(kind, [_operand(whose, each, depth, exact, bits=True).numbers for each in operands], depth)
    a, *rest = [_operand(whose, each, depth, exact) for each in operands]
    if kind in COMPARED:
        truth = COMPARED[kind](a.numbers, rest[0].numbers)
        return Value(_objects(np.where(truth, 255, 0)), mat.CV_8U)
    if kind == "div":
        if exact:
            raise NotWholeError
        quotient = a.numbers.astype("f8") / rest[0].numbers.astype("f8")
        if depth in INTEGERS or depth == CV_Bool:
            quotient = np.where(rest[0].numbers == 0, 0.0, quotient)
        return Value(quotient, depth)
    return Value(FUNCTIONS[kind](*(each.numbers for each in (a, *rest))), depth)


def _depth_of(whose: Grown, operands: list[Any]) -> int:
    """The depth of an operation's operands."""
    for kind, *below in operands:
        if kind == "leaf":
            return whose.leaves[below[0]][0].depth()
        if kind in COMPARED:
            return mat.CV_8U
        if kind != "numbers":
            return _depth_of(whose, below)
    raise AssertionError("an operation of numbers alone")


def _operand(whose: Grown, tree: tuple[Any, ...], depth: int, exact: bool, bits: bool = False) -> Value:
    if tree[0] != "numbers":
        return _value(whose, tree, exact)
    numbers = list(tree[1]) if isinstance(tree[1], tuple) else [tree[1]] * whose.channels
    if bits:
        exact = True
    if exact and not all(float(n).is_integer() for n in numbers):
        raise NotWholeError
    shape = (*whose.sizes, whose.channels)
    if not exact:
        return Value(np.broadcast_to(np.array([float(n) for n in numbers]), shape), depth)
    whole = [int(n) for n in numbers]
    return Value(np.broadcast_to(np.array(whole, dtype=object), shape), depth)


def _leaf(m: Mat, turned: bool, exact: bool) -> Value:
    x = m.tensor().contiguous()
    depth, limits = m.depth(), DEPTHS[m.depth()].limits
    array = x.double().numpy() if limits is None else x.numpy()
    array = array.swapaxes(0, 1) if turned else array
    if not exact:
        return Value(array.astype("f8"), depth)
    if limits is None and depth != CV_Bool:
        raise NotWholeError
    return Value(_objects(array), depth)


def _objects(array: np.ndarray) -> np.ndarray:
    """The numbers as Python integers."""
    found = np.empty(array.shape, dtype=object)
    found[...] = np.array([int(n) for n in array.ravel().tolist()], dtype=object).reshape(array.shape)
    return found


def _is_wide_bits(whose: Grown, tree: tuple[Any, ...]) -> bool:
    """Whether this is a bitwise operation of 64 bits. The operands of such an operation are evaluated separately, since
    float64 cannot represent 64 bits."""
    kind, *operands = tree
    return (kind in BITS or kind == "not") and DEPTHS[_depth_of(whose, operands)].size_bytes == 8


def _bits_of_operands(whose: Grown, tree: tuple[Any, ...]) -> Value:
    kind, *operands = tree
    depth = _depth_of(whose, operands)
    numbers = [
        _objects(_leaf(*whose.leaves[each[1]], exact=True).numbers) if each[0] == "leaf"
        else _operand(whose, each, depth, True, bits=True).numbers if each[0] == "numbers"
        else lawful(whose, each)
        for each in operands
    ]  # fmt: skip
    return _bits(kind, numbers, depth)


def _bits(kind: str, of: list[np.ndarray], depth: int) -> Value:
    low, high = (0, 1) if depth == CV_Bool else DEPTHS[depth].limits or (0, 0)
    ints = [_objects(_stored(each, depth)) for each in of]
    if kind == "not":
        return Value((-1 if low < 0 else high) - ints[0], depth)
    return Value(BITS[kind](*ints), depth)


def _stored(array: np.ndarray, depth: int) -> np.ndarray:
    if depth == CV_Bool:
        return array != 0
    limits = DEPTHS[depth].limits
    if limits is None:
        return _rounded(array.astype("f8"), depth)
    low, high = limits
    flat = [
        low if x != x else high if x == np.inf else low if x == -np.inf else min(max(round(x), low), high)
        for x in array.ravel().tolist()
    ]
    return np.array(flat, dtype=object).reshape(array.shape)


def _rounded(x: np.ndarray, depth: int) -> np.ndarray:
    """Round to the nearest number of a format, half to even, by definition."""
    if depth not in FORMATS:
        return x
    bits, least, greatest = FORMATS[depth]
    _, exponent = np.frexp(x)
    quantum = np.ldexp(1.0, np.maximum(exponent - bits, least))
    rounded = np.where(np.isfinite(x), np.rint(x / quantum) * quantum, x)
    return np.where(np.abs(rounded) > greatest, np.copysign(np.inf, x), rounded)


def numbers_of(m: Mat) -> np.ndarray:
    """The elements of a Mat in the form of `lawful`."""
    x = m.tensor().cpu()
    if DEPTHS[m.depth()].limits is None and m.depth() != CV_Bool:
        return x.double().numpy()
    return x.numpy() if m.depth() == CV_Bool else np.array(x.tolist(), dtype=object).reshape(x.shape)


def same(ours: np.ndarray, expected: np.ndarray) -> bool:
    if ours.dtype == object or expected.dtype == object:
        return bool((ours == expected).all())
    return np.array_equal(ours, expected, equal_nan=True)


def evaluated(expression: MatExpr, into: Mat | None = None) -> Mat:
    with np.errstate(all="ignore"):  # the interpreter computes with NumPy
        if into is None:
            return expression.to_mat()
        into[tuple(slice(None) for _ in into.size)] = expression
        return into


examples = settings(
    max_examples=40 if INTERPRETED else 200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


@examples
@given(grown())
def test_new_memory_has_the_lawful_numbers(tree: Grown) -> None:
    expression = built(tree)
    expected = lawful(tree)
    found = evaluated(expression)
    assert found.type() == expression.type()
    assert tuple(found.size) == tuple(expression.size)
    assert same(numbers_of(found), expected)


@examples
@given(
    grown(depths=[mat.CV_64S, mat.CV_64U, mat.CV_32S]), st.sampled_from([*INTEGERS, mat.CV_32F, mat.CV_64F, CV_Bool])
)
def test_64_bit_integers_are_exact(tree: Grown, depth: int) -> None:
    """Sums, products of products, and their conversions to any depth."""
    assert same(numbers_of(built(tree).to_mat(depth)), lawful(tree, depth=depth))


@examples
@given(grown(most=3), st.sampled_from(ALL))
def test_regions_of_any_depth_get_them_too(tree: Grown, depth: int) -> None:
    """Values are rounded once, to the depth of the region. Nothing outside the region is written, and no memory is
    allocated."""
    whole = Mat(tuple(n + 3 for n in tree.sizes), CV_MAKETYPE(depth, tree.channels), 1)
    region = whole[tuple(slice(1, n + 1) for n in tree.sizes)]
    pointer = region.data_ptr()
    evaluated(built(tree), region)
    assert region.data_ptr() == pointer
    expected = lawful(tree, depth=depth)
    assert same(numbers_of(region), expected)
    region.setTo(1)
    assert (numbers_of(whole).astype("f8") == 1).all()


@examples
@given(grown(most=4), st.data())
def test_targets_may_be_what_is_read(tree: Grown, data: Any) -> None:
    """Writing into a leaf itself, shifted or transposed, works as if everything had been read first."""
    expected = lawful(tree)
    expression = built(tree)
    targets = [m for m, _ in tree.leaves if m.type() == expression.type()]
    if not targets:
        return
    target = data.draw(st.sampled_from(targets))._header_of_itself()
    down = data.draw(st.sampled_from([-1, 0, 1]))
    if target.isSubmatrix() and target.dims == 2:
        target.adjustROI(-down, down, 0, 0)
    if tuple(target.size) != tree.sizes:
        return
    evaluated(expression, target)
    assert same(numbers_of(target), expected)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_kernels_follow_the_law(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) == 12


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(grown(most=5), st.data())
def test_compiled_loops_follow_the_law(tree: Grown, data: Any) -> None:
    """Numba's loops run even for small Mats, and write into new memory and into a leaf. Each example compiles one
    loop."""
    expression, expected = built(tree), lawful(tree)
    targets = [m for m, _ in tree.leaves if m.type() == expression.type() and tuple(m.size) == tree.sizes]
    into = data.draw(st.sampled_from([None, *targets]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numba_loops, "LEAST_ELEMENTS", 0)
        patch.setattr(loop_programs, "LEAST_COLUMNS", 1)
        patch.setattr(loop_programs, "PATIENCE_SECONDS", 0.0)
        assert same(numbers_of(evaluated(expression, into)), expected)


@pytest.mark.gpu
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(grown(most=4))
def test_a_gpu_follows_the_law(tree: Grown) -> None:
    """Each example compiles a separate kernel, so there are few examples."""
    there = [m.cuda() for m, _ in tree.leaves]
    found = evaluated(built(tree, there))
    assert found.device.type == "cuda"
    assert same(numbers_of(found), lawful(tree))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("depth", [mat.CV_8S, mat.CV_8U, mat.CV_16S, mat.CV_16U, mat.CV_32S, mat.CV_32U])
def test_numbers_at_the_limits_follow_the_law(depth: int, device: str) -> None:
    """All numbers of depths up to 16 bits are tested, because a compiler that knows the limits uses special
    instructions."""
    numpy: Any = DEPTHS[depth].numpy
    least, most = DEPTHS[depth].limits or (0, 0)
    near = np.arange(-300, 300)
    numbers = np.arange(least, most + 1) if most < 1 << 16 else np.concatenate([least + 300 + near, near, most + near])
    wide = numbers.clip(least, most)
    x, top, low = (
        Mat(torch.from_numpy(each.astype(numpy).reshape(1, -1)).to(device))
        for each in (wide, np.full_like(wide, most), np.full_like(wide, least))
    )
    laws: list[tuple[MatExpr, np.ndarray]] = [
        (-x, -wide),
        (-(x & x), -wide),
        (abs(x), abs(wide)),
        (abs(x & x), abs(wide)),
        (x + x, 2 * wide),
        (x - top, wide - most),
        (low - x, least - wide),
        (-(x + x), -2 * wide),
        (-(x + x | low), -((2 * wide).clip(least, most) | least)),
        (-(x & x) + top, most - wide),
        (-(x ^ low) > 5, np.where(-(wide ^ least) > 5, 255, 0)),
    ]
    for expression, expected in laws:
        low_end, high_end = DEPTHS[expression.depth()].limits or (0, 0)
        found = numbers_of(evaluated(expression)).reshape(-1)
        assert (found == expected.clip(low_end, high_end)).all(), expression


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_integers_of_64_bits_are_exact_and_saturate_once(dtype: Any, device: str) -> None:
    limits = np.iinfo(dtype)
    numbers = [2**60 + 1, 2**62 + 3, 5, int(limits.max), int(limits.min), 2**53 + 1]
    others = [2**60, 2**62 + 1, 7, int(limits.max) - 1, 1, 2**53]
    a, b = (
        Mat(torch.tensor([each], dtype=torch.from_numpy(np.zeros(1, dtype)).dtype).to(device))
        for each in (numbers, others)
    )
    cases: list[tuple[MatExpr, list[int]]] = [
        (a + 1, [x + 1 for x in numbers]),
        (-a, [-x for x in numbers]),
        (abs(a), [abs(x) for x in numbers]),
        (a - b, [x - y for x, y in zip(numbers, others, strict=True)]),
        (mat.absdiff(a, b), [abs(x - y) for x, y in zip(numbers, others, strict=True)]),
        (a + b - b, numbers),
        (a.mul(b).mul(b) - a.mul(b.mul(b)) + 3, [3] * 6),
        (mat.minimum(a, b), [min(x, y) for x, y in zip(numbers, others, strict=True)]),
        (a > b, [255 * (x > y) for x, y in zip(numbers, others, strict=True)]),
        (a == b + 1, [255 * (x == y + 1) for x, y in zip(numbers, others, strict=True)]),
    ]
    for expression, expected in cases:
        low, high = (0, 255) if expression.depth() == mat.CV_8U else (int(limits.min), int(limits.max))
        found = expression.to_mat().cpu().numpy()[0].tolist()
        assert found == [min(max(x, low), high) for x in expected], expression
    assert (a - b).to_mat(mat.CV_64F).cpu().numpy()[0].tolist() == [
        float(x - y) for x, y in zip(numbers, others, strict=True)
    ]
    assert (a + a).to_mat(mat.CV_64F).cpu().numpy()[0].tolist() == [float(2 * x) for x in numbers]
