"""Fused elementwise expressions, both ways: the CPU implementation, and (in a separate process) the Triton kernels
interpreted. The reference is the same function, called on tensors."""

from __future__ import annotations

import inspect
import itertools
import math
import operator
import pickle
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import add, axpy, fused, gelu, mul, relu, sigmoid, silu, tanh
from rooftop.kernels.elementwise import expressions, tables
from rooftop.kernels.elementwise.expression_texts import parse
from rooftop.kernels.elementwise.expression_types import NUMBER, SINGLE, TENSOR, Kind, promoted, types_of
from rooftop.kernels.elementwise.expressions import DTYPES, argument, text_of
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

FLOATS = [torch.float32, torch.bfloat16]
Function = Callable[..., Any]


def one(function: Function) -> Function:
    return lambda x: function(x)


def two(function: Function) -> Function:
    return lambda x, y: function(x, y)


UNARY: dict[str, Function] = {
    name: one(getattr(torch, name))
    for name in (
        *("abs", "ceil", "cos", "erf", "exp", "expm1", "floor", "log", "log1p", "log2", "neg", "reciprocal", "relu"),
        *("round", "rsqrt", "sigmoid", "sign", "sin", "sqrt", "square", "tanh", "trunc", "isnan"),
    )
} | {
    "gelu": one(F.gelu),
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": one(F.silu),
    "softplus": one(F.softplus),
    "leaky_relu": one(F.leaky_relu),
    "elu": one(F.elu),
    "hardtanh": one(F.hardtanh),
    "clamp": lambda x: x.clamp(-0.5, 1.5),
    "clamp_min": lambda x: torch.clamp(x, min=0.25),
    "power_3": lambda x: x**3,
    "power_1.7": lambda x: x**1.7,
    "power_-3": lambda x: x**-3.0,
    "half_power": lambda x: x**0.5,
    "power_of_2": lambda x: 2**x,
}
BINARY: dict[str, Function] = {
    "add": two(torch.add),
    "sub": lambda x, y: torch.sub(x, y, alpha=2),
    "mul": two(torch.mul),
    "div": two(torch.div),
    "pow": lambda x, y: x.abs() ** y,
    "maximum": two(torch.maximum),
    "minimum": two(torch.minimum),
    "where": lambda x, y: torch.where(x > y, x, y * 0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "clamp": lambda x, y: torch.clamp(x, max=y),
    "between": lambda x, y: (x > 0) & (y <= 0.5) | ~(x != y),
    "two": lambda x, y: (x * y, x - y),
}
POSITIVE = {"log", "log1p", "log2", "rsqrt", "sqrt", "power_1.7", "half_power"}
STEPS = {"ceil", "floor", "round", "sign", "trunc", "isnan", "between"}


def differentiable(name: str) -> Function:
    """The function, with a zero gradient if PyTorch returns none."""
    function = UNARY[name]
    return (lambda x: function(x) + 0.0 * x) if name in STEPS - {"isnan"} else function


def values(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    torch.manual_seed(sum(shape) + seed)
    return (1.5 * torch.randn(shape) + 0.2).to(dtype)


def as_tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def results_and_gradients(function: Function, tensors: list[Tensor], numbers: tuple[float, ...]) -> list[Tensor]:
    tensors = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in tensors]
    results = as_tuple(function(*tensors, *numbers))
    floating = [y for y in results if y.is_floating_point() and y.requires_grad]
    if not floating:
        return list(results)
    torch.manual_seed(1)
    gradients = [torch.randn(y.shape).to(y) for y in floating]
    wanted = [t for t in tensors if t.requires_grad]
    return [*(y.detach() for y in results), *torch.autograd.grad(floating, wanted, gradients)]


def assert_gate(function: Function, *tensors: Tensor, numbers: tuple[float, ...] = (), device: str = "cpu") -> None:
    """Results and gradients pass the numerics gate, and (interpreted, or on a GPU) come from a kernel."""
    on_device = [t.to(device) for t in tensors]
    with count_launches() as launches:
        ours = results_and_gradients(fused(function), on_device, numbers)
    assert not (INTERPRETED or device == "cuda") or launches
    eager = results_and_gradients(function, on_device, numbers)
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    exact = results_and_gradients(function, wide, numbers)
    assert len(ours) == len(eager)
    for mine, plain, truth in zip(ours, eager, exact, strict=True):
        if plain.is_floating_point():
            assert_as_accurate(mine, plain, truth.to(device).double())
        else:
            torch.testing.assert_close(mine, plain)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", UNARY)
def test_gate_of_functions(name: str, dtype: torch.dtype) -> None:
    x = values(7, 149, dtype=dtype)
    x = x.abs() + 0.01 if name in POSITIVE else x
    assert_gate(differentiable(name), x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", BINARY)
def test_gate_of_functions_of_two(name: str, dtype: torch.dtype) -> None:
    assert_gate(BINARY[name], values(9, 120, dtype=dtype), values(9, 120, dtype=dtype, seed=1))


SHAPES = {
    "row": [(6, 40), (40,)],
    "column": [(6, 40), (6, 1)],
    "row and column": [(40,), (6, 1)],
    "channels": [(2, 5, 3, 4), (5, 1, 1), (2, 5, 3, 4)],
    "five dimensions": [(2, 3, 2, 3, 7), (3, 1, 3, 1), (2, 1, 2, 1, 7)],
    "six dimensions": [(2, 1, 2, 1, 2, 1, 3), (1, 2, 1, 2, 1, 2, 1)],
    "one number": [(5, 33), ()],
    "numbers alone": [(), ()],
    "one element": [(1, 1), (1,)],
    "odd": [(3, 1, 1001), (1001,)],
}


@pytest.mark.parametrize("case", SHAPES)
def test_broadcast_tensors_and_their_gradients(case: str) -> None:
    tensors = [values(*shape, seed=i) for i, shape in enumerate(SHAPES[case])]
    ours, theirs = (
        results_and_gradients(f, tensors, (0.5,))
        for f in (fused(expression_of(len(tensors))), expression_of(len(tensors)))
    )
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)


SUMMED = {
    **SHAPES,
    "sum of all": [(7, 90), (1, 1)],
    "last of three": [(3, 4, 50), (3, 1, 50), (3, 4, 1)],
    "middle kept": [(3, 5, 90), (5, 1)],
    "first and last kept": [(3, 5, 90), (3, 1, 90)],
    "matrix": [(3, 5, 90), (5, 90)],
    "matrix of rows": [(3, 5, 90), (3, 5, 1)],
    "two rows": [(3, 5, 90), (5, 90), (90,)],
    "many rows": [(150, 9), (9,), (150, 1)],
    "many columns": [(3, 300), (300,), (3, 1)],
}


@pytest.mark.parametrize("wanted", ["all", "broadcast"])
@pytest.mark.parametrize("case", SUMMED)
def test_sums_of_gradients_in_tiles_of_any_size(case: str, wanted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tiles make loops over tiles and partial sums run at small sizes."""
    for table in ("SUMS", "LONG_SUMS"):
        monkeypatch.setattr(tables, table, tables.TileConfig(128, 32, 1))
    monkeypatch.setattr(tables, "PROGRAMS_PER_SM", 2)
    function = expression_of(len(SUMMED[case]))
    orders: list[Function] = [
        lambda t: t,
        lambda t: t.mT.contiguous().mT if t.dim() > 1 else t,
        lambda t: t.transpose(0, 1).contiguous().transpose(0, 1) if t.dim() > 1 else t,
    ]
    for order in orders:
        tensors = [order(values(*shape, seed=i)) for i, shape in enumerate(SUMMED[case])]
        dy = values(*torch.broadcast_shapes(*(t.shape for t in tensors)), seed=9)
        found = []
        for f in (fused(function), function):
            inputs = [t.clone().requires_grad_(wanted == "all" or t.shape != dy.shape) for t in tensors]
            given = [t for t in inputs if t.requires_grad]
            found.append(torch.autograd.grad(f(*inputs, 0.5), given, dy) if given else ())
        for mine, plain in zip(*found, strict=True):
            assert mine.shape == plain.shape
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-4)


def test_sums_of_half_precision_are_rounded_once() -> None:
    x = values(300, 40, dtype=torch.bfloat16)
    row, column = (torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((40,), (300, 1)))
    dy = values(300, 40, dtype=torch.bfloat16, seed=1)
    found = torch.autograd.grad(fused(lambda x, r, c: x * r * c)(x, row, column), [row, column], dy)
    exact = x.double() * dy.double()
    for mine, total in zip(found, (exact.sum(0), exact.sum(1, keepdim=True)), strict=True):
        torch.testing.assert_close(mine.double(), total, rtol=2**-7, atol=1e-4)  # the interpreter truncates


def test_sums_are_made_by_the_kernel_of_the_gradient() -> None:
    x, row, column = (values(*shape).requires_grad_() for shape in ((6, 40), (40,), (6, 1)))
    with count_launches() as launches:
        (x * 2).sum()
        y = fused(lambda x, c: x * c)(x, column)
        y.backward(torch.ones_like(y))
    assert launches.total() == 2 * int(INTERPRETED)
    with pytest.raises(ValueError, match="has 1 digits for the 2 dimensions"):
        torch.ops.rooftop.fused([x, row], [], "tt 0=1: a0 * a1")
    for head in ("tt 1=01", "tt 0=2", "tt 0=", "tt x", "tt 0=01 autocast"):
        with pytest.raises(ValueError, match="state the kept dimensions of a result,"):
            torch.ops.rooftop.fused([x, row], [], f"{head}: a0 * a1")
    with pytest.raises(TypeError, match="only floating point results are summed"):
        torch.ops.rooftop.fused([x, row], [], "tt 0=01: a0 > a1")
    (nothing,) = torch.ops.rooftop.fused([values(0, 4), row[:4]], [], "tt 0=01: a0 * a1")
    torch.testing.assert_close(nothing, torch.zeros(1, 4))


def expression_of(count: int) -> Function:
    if count == 2:
        return lambda x, y, s: x * torch.sigmoid(y) + s * y
    return lambda x, y, z, s: x * torch.sigmoid(y) + z.square() * s


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.lists(st.booleans(), min_size=4, max_size=4), st.permutations(range(4))), min_size=2, max_size=3
    ),
    st.booleans(),
)
@settings(max_examples=40, deadline=None)
def test_any_layout(sizes: list[int], tensors: list[tuple[list[bool], list[int]]], steps: bool) -> None:
    """Tensors with omitted or permuted dimensions, and with skipped elements."""
    made = []
    for kept, order in tensors:
        shape = [size if keep else 1 for size, keep in zip(sizes, kept, strict=False)]
        order = [d for d in order if d < len(sizes)]
        memory = values(*(shape[d] * (2 if steps else 1) for d in order))
        view = memory.permute([order.index(d) for d in range(len(sizes))])
        made.append(view[tuple(slice(None, size) for size in shape)])
    function = lambda *t: sum(t[1:], t[0]) * 0.5 - t[-1].abs()  # noqa: E731
    names = {2: lambda a, b: function(a, b), 3: lambda a, b, c: function(a, b, c)}
    ours, theirs = fused(names[len(made)])(*made), function(*made)
    torch.testing.assert_close(ours, theirs)
    if all(t.shape == made[0].shape for t in made):
        assert steps or steps_of(ours) == steps_of(theirs)


def steps_of(tensor: Tensor) -> list[int]:
    """Strides of the dimensions with more than one element. Dimensions of size 1 may have any stride."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def test_channels_last_and_transposed_results_keep_their_memory_order() -> None:
    double = fused(lambda x, y: x + y)
    for x in (values(2, 8, 5, 5).to(memory_format=torch.channels_last), values(9, 70).t(), values(9, 70)[:, ::2]):
        y = double(x, x)
        torch.testing.assert_close(y, x + x)
        assert y.stride() == (x + x).stride()
        bias = values(x.shape[1]).reshape(-1, *[1] * (x.dim() - 2))
        torch.testing.assert_close(double(x, bias), x + bias)
    mixed = double(values(70, 90), values(90, 70).t())
    torch.testing.assert_close(mixed, values(70, 90) + values(90, 70).t())


def test_empty_tensors() -> None:
    for shape in ((0,), (3, 0), (0, 5)):
        x = torch.empty(shape, requires_grad=True)
        y = fused(lambda x: torch.exp(x) * 2)(x)
        y.sum().backward()
        assert x.grad is not None
        assert y.shape == x.grad.shape == shape
    x, y = torch.empty(0, 4), torch.randn(4, requires_grad=True)
    mul(x, y).sum().backward()
    torch.testing.assert_close(y.grad, torch.zeros(4))


def test_nan_and_infinities_do_what_they_do_in_pytorch() -> None:
    exactly: dict[str, Any] = {"equal_nan": True, "rtol": 2e-6, "atol": 1e-37}
    x = torch.tensor(
        [math.nan, math.inf, -math.inf, 0.0, -0.0, 1.0, -1.0, 100.0, -100.0, 1e-30, 88.5, 0.5, 1.5, 2.5, -2.5]
    )
    for name, function in UNARY.items():
        # PyTorch's own gelu(inf) is inf or NaN, depending on the size of the tensor
        given = x[3:] if "gelu" in name else x
        ours, theirs = fused(function)(given), function(given)
        torch.testing.assert_close(ours, theirs, **exactly, msg=lambda m, n=name: f"{n}: {m}")
    a, b = x[:, None].expand(-1, len(x)).contiguous(), x.expand(len(x), -1)
    for name, function in (BINARY | {"pow": two(torch.pow)}).items():
        for ours, theirs in zip(as_tuple(fused(function)(a, b)), as_tuple(function(a, b)), strict=True):
            torch.testing.assert_close(ours, theirs, **exactly, msg=lambda m, n=name: f"{n}: {m}")


KINDS = [*(Kind(d, rank) for d in DTYPES.values() for rank in (TENSOR, SINGLE)), Kind(torch.int64, NUMBER)]
KINDS += [Kind(torch.float32, NUMBER), Kind(torch.bool, NUMBER)]


@given(st.lists(st.sampled_from(KINDS), min_size=2, max_size=2))
@settings(max_examples=200, deadline=None)
def test_dtypes_are_promoted_as_pytorch_promotes_them(kinds: list[Kind]) -> None:
    numbers = {torch.int64: 3, torch.float32: 1.5, torch.bool: True}
    operands = [
        numbers[k.dtype] if k.rank == NUMBER else torch.ones((2,) if k.rank == TENSOR else (), dtype=k.dtype)
        for k in kinds
    ]
    assert promoted(kinds) == torch.result_type(*operands)


OPERATORS: dict[str, Function] = {
    **{f"x**{power!r}": (lambda x, power=power: x**power) for power in (1, 2, 3, 4, 0.5, 2.0, -1.0, -2.0, 1.7)},
    **{name: two(getattr(torch, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne", "pow")},
    **{f"bitwise_{name}": two(getattr(torch, f"bitwise_{name}")) for name in ("and", "or", "xor")},
    **{f"logical_{name}": two(getattr(torch, f"logical_{name}")) for name in ("and", "or", "xor")},
    "bitwise_not": lambda x: ~x,
    "logical_not": one(torch.logical_not),
    "where": lambda x, y: torch.where(x != 0, x, y),
    "add, alpha=2": lambda x, y: torch.add(x, y, alpha=2),
    "sub, alpha=2": lambda x, y: torch.sub(x, y, alpha=2),
    "add, alpha=0.5": lambda x, y: torch.add(x, y, alpha=0.5),
    "addcmul": lambda x, y: torch.addcmul(x, x, y),
    "addcmul, value=2": lambda x, y: torch.addcmul(y, x, y, value=2),
    "addcdiv, value=0.5": lambda x, y: torch.addcdiv(x, x, y, value=0.5),
    "float": lambda x: x.float(),
}
REFUSED = "powers 1 to 4|pow of booleans|sub of booleans"
"""Operations of PyTorch that are refused: integer powers of integers, except small constant ones."""


def type_of(function: Function, *operands: Any) -> torch.dtype | Exception:
    try:
        return as_tuple(function(*operands))[0].dtype
    except (TypeError, RuntimeError) as error:
        return error


@pytest.mark.parametrize("name", [*sorted(UNARY.keys() - {"hardtanh"}), *BINARY, *OPERATORS])
def test_results_have_pytorchs_dtype_for_all_dtypes_of_operands(name: str) -> None:
    """Tested wherever PyTorch has a result, for tensors with and without dimensions, and for numbers. (hardtanh of
    integers is float32 here, because its limits are.)"""
    function = {**UNARY, **BINARY, **OPERATORS}[name]
    ours = fused(function)
    tensors = [torch.ones(shape, dtype=dtype) for dtype in DTYPES.values() for shape in ((2,), ())]
    pairs = itertools.chain(
        itertools.product(tensors, tensors), *(((x, n), (n, x)) for x in tensors for n in (True, 2, 1.5))
    )
    for operands in pairs if len(ours.names) == 2 else [(x,) for x in tensors]:
        shapes = [each.to("meta") if isinstance(each, Tensor) else each for each in operands]  # no kernel is needed
        found, expected = type_of(ours, *shapes), type_of(function, *operands)
        if isinstance(found, Exception):
            assert isinstance(expected, Exception) or re.search(REFUSED, str(found)), (operands, found)
        else:
            assert isinstance(expected, Exception) or found == expected, operands


def test_powers_of_booleans_and_integers_are_computed_in_the_dtype_of_the_result() -> None:
    x, n = torch.tensor([False, True]), torch.tensor([0, 100, 200], dtype=torch.uint8)
    for power in (1, 2, 3, 4, 2.0, -2.0):
        for operand in (x, n):
            torch.testing.assert_close(with_number(operator.pow, power)(operand), operand**power)
    torch.testing.assert_close(add(values(3).half(), n, alpha=0.3), values(3).half() + 0.3 * n.half())
    torch.testing.assert_close(add(n, x[1], alpha=3), torch.add(n, x[1], alpha=3))
    with pytest.raises(TypeError, match=r"alpha and value must be integers if the inputs are torch\.uint8"):
        add(n, n, alpha=0.5)


def test_results_of_add_lie_in_memory_as_input_with_and_without_alpha() -> None:
    x, y = values(4, 6), values(6, 4).t()
    for alpha in (1, 2):
        assert add(x, y, alpha=alpha).stride() == torch.add(x, y, alpha=alpha).stride()


@pytest.mark.parametrize("right", ["bool", "uint8", "int32", "int64", "bfloat16", "float32"])
@pytest.mark.parametrize("left", ["bool", "uint8", "int32", "bfloat16"])
def test_mixed_dtypes(left: str, right: str) -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(0, 200, (5, 9)).to(DTYPES[name]) for name in (left, right))

    def function(a: Any, b: Any) -> Any:
        return a + b, a * b, torch.maximum(a, b), a < b, a / (b + 1), torch.where(a > b, a, b), a + 2, (b + 0.5).float()

    for ours, theirs in zip(fused(function)(a, b), function(a, b), strict=True):
        tolerance = {} if not theirs.is_floating_point() else {"rtol": 0.02, "atol": 0.02}
        torch.testing.assert_close(ours, theirs, **tolerance)  # type: ignore[arg-type]


def test_integers_wrap_around_and_casts_round() -> None:
    x = torch.tensor([0, 100, 200, 255], dtype=torch.uint8)
    assert torch.equal(fused(lambda x: x * x + 7)(x), x * x + 7)
    assert torch.equal(fused(lambda x: (x & 0x0F) | ~(x ^ 3))(x), (x & 0x0F) | ~(x ^ 3))
    assert torch.equal(fused(lambda x: -x.to(torch.int32) * 3)(x), -x.to(torch.int32) * 3)
    y = torch.tensor([0.5, 1.5, -0.5, 2.5, 300.0])
    assert torch.equal(
        fused(lambda y: y.round().clamp(0, 255).to(torch.uint8))(y), y.round().clamp(0, 255).to(torch.uint8)
    )
    z = torch.randn(50)
    assert torch.equal(fused(lambda z: z.half().float())(z), z.half().float())
    half = torch.full((3,), 0.1).half()
    assert fused(lambda h: h == 0.1)(half).all()  # PyTorch rounds the number, then compares
    assert fused(lambda h, n: h == n)(half, 0.1).all()


def with_number(function: Function, number: float) -> Function:
    """A function of the first argument only, with the number as a constant in the kernel."""
    return fused(lambda x: function(x, number))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("number", [300, 70_000, 2**40 + 1, -(2**63), 2**64 - 1])
def test_numbers_beyond_integers_wrap_around_where_pytorchs_do(dtype: torch.dtype, number: int) -> None:
    x = torch.tensor([0, 1, 44, 100], dtype=dtype)
    for function in (lambda x, n: x + n, lambda x, n: n - x, lambda x, n: x * n, lambda x, n: x < n):
        expected = function(x, number)
        assert torch.equal(fused(function)(x, number), expected)
        assert torch.equal(with_number(function, number)(x), expected)


def test_numbers_beyond_integers_are_no_limits() -> None:
    x = torch.tensor([0, 1, 44, 100], dtype=torch.uint8)
    for function in (lambda x, n: x.clamp(max=n), lambda x, n: torch.where(x > 1, x, n)):
        assert torch.equal(fused(function)(x, 255), function(x, 255))
        with pytest.raises(ValueError, match=r"fused: 1000 is outside of the range of torch\.uint8, 0 to 255"):
            fused(function)(x, 1000)
        with pytest.raises(ValueError, match="fused: 1000 is outside"):
            with_number(function, 1000)(x)


def test_numbers_beyond_float32_are_infinite() -> None:
    x = torch.tensor([-1.0, 2.0])
    assert torch.equal(fused(lambda x: x * 1e300)(x), x * 1e300)
    assert torch.equal(fused(lambda x: x < 1e300)(x), x < 1e300)


def test_half_precision_is_rounded_once() -> None:
    x = values(1000, dtype=torch.bfloat16)
    ours = fused(lambda x: (x + 256) - 256)(x)
    # eager PyTorch loses eight bits between the two operators
    torch.testing.assert_close(ours, x, rtol=1e-2, atol=1e-4)


def test_numbers_change_without_another_kernel() -> None:
    scaled = fused(lambda x, a, n=2: x * a + n)
    x = torch.randn(5, 8)
    with count_launches() as launches:
        for a, n in ((0.5, 2), (3.0, 1), (16, 0), (True, 5_000_000_000)):
            torch.testing.assert_close(scaled(x, a, n), x * a + n)
        torch.testing.assert_close(scaled(x, n=7, a=2.5), x * 2.5 + 7)
        torch.testing.assert_close(scaled(x, 2.5), x * 2.5 + 2)
    assert not INTERPRETED or launches == {"fused_mul_add": 6}
    assert scaled.source(x, 0.5, 2) == scaled.source(x, 7.25, 3)


def test_names_of_pytorch() -> None:
    x, y = values(6, 30), values(30)
    torch.testing.assert_close(add(x, y, alpha=2), torch.add(x, y, alpha=2))
    torch.testing.assert_close(add(x, 1), x + 1)
    torch.testing.assert_close(axpy(0.3, x, y), 0.3 * x + y)
    torch.testing.assert_close(mul(x, y), x * y)
    for ours, theirs in ((relu, F.relu), (sigmoid, torch.sigmoid), (tanh, torch.tanh), (silu, F.silu), (gelu, F.gelu)):
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(gelu(x, "tanh"), F.gelu(x, approximate="tanh"))


def test_gradients_against_finite_differences_twice() -> None:
    def function(x: Any, y: Any, b: Any) -> Any:
        return F.gelu(x) * torch.sigmoid(y + b) / (1 + y * y), torch.exp(-x.abs()) + torch.tanh(b) ** 3

    shapes = ((3, 4), (3, 1), (4,))
    tensors = [values(*shape, seed=i).double().requires_grad_() for i, shape in enumerate(shapes)]
    assert torch.autograd.gradcheck(fused(function), tensors)
    assert torch.autograd.gradgradcheck(fused(function), tensors)  # also for sums


def test_gradients_where_functions_have_corners() -> None:
    x = torch.tensor([-1.0, 0.0, 0.0, 2.0, 200.0])
    y = torch.tensor([-1.0, 0.0, 3.0, 1.0, -200.0])
    for name, function in {**UNARY, **BINARY}.items():
        if name in STEPS or name in POSITIVE or name in ("reciprocal", "power_-3", "pow", "div"):
            continue
        tensors = [x, y] if name in BINARY else [x]
        for ours, theirs in zip(
            results_and_gradients(fused(function), tensors, ()),
            results_and_gradients(function, tensors, ()),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda a, b: torch.round(a / 0.5) * 0.5 + b, id="quantizer"),
        pytest.param(lambda a, b: torch.sign(torch.floor(a) * b), id="all"),
        pytest.param(lambda a, b: (torch.trunc(a) + a, torch.ceil(b) * 2), id="another path"),
        pytest.param(lambda a, b: torch.where(torch.ceil(a) > 0, b, torch.floor(b)), id="condition"),
        pytest.param(lambda a, b: b * 2, id="unused"),
    ],
)
def test_flat_functions_have_gradients_of_zero(function: Callable[..., Any]) -> None:
    """PyTorch gives None only for arguments of which no gradient exists, such as those of comparisons."""
    found = []
    for each in (fused(function), function):
        a, b = values(3, 4).requires_grad_(), values(4, seed=1).double().requires_grad_()
        result = each(a, b)
        torch.cat([y.flatten() for y in (result if isinstance(result, tuple) else (result,))]).sum().backward()
        found.append((a.grad, b.grad))
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs)


def test_operators_that_are_not_supported_are_named_with_those_that_are() -> None:
    for function, symbol in (
        (lambda a, b: a // b, "//"),
        (lambda a, b: 2 % b, "%"),
        (lambda a, b: a << b, "<<"),
        (lambda a, b: a @ b, "@"),
        (lambda a, b: a[0] + b, r"\[ \]"),
    ):
        with pytest.raises(TypeError, match=rf"have no {symbol}: a fused function may use \+ - .*, casts and .*floor"):
            fused(function)


def test_results_of_different_shapes_have_their_own_gradients() -> None:
    def function(x: Any, y: Any) -> Any:
        return x + 1, x * y, y > 0

    tensors = [values(5), values(3, 5)]
    ours, theirs = (results_and_gradients(f, tensors, ()) for f in (fused(function), function))
    for mine, plain in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, plain)


def test_backward_keeps_only_what_it_needs() -> None:
    kept: list[Tensor] = []
    x, y = torch.randn(5, requires_grad=True), torch.randn(5, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):  # type: ignore[func-returns-value]
        z = fused(lambda x, y: x * 2 + torch.exp(y))(x, y)
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]
    with count_launches() as launches:
        add(x, y).sum().backward()
    assert launches.total() == int(INTERPRETED)  # backward of a sum passes its gradient on unchanged
    z.sum().backward()


def test_forward_mode_is_pytorchs() -> None:
    x, tangent = values(4).double(), values(4, seed=1).double()
    ours, theirs = (torch.func.jvp(f, (x,), (tangent,)) for f in (fused(UNARY["tanh"]), torch.tanh))
    torch.testing.assert_close(ours, theirs)


def test_text_is_read_back_as_the_same_tree() -> None:
    a, b = argument(0), argument(1)
    tree = F.gelu(a) * torch.where(a > -3, b, -math.inf) ** -2.0 - (2**a) / (-b) + (a.bfloat16() != b)
    text = text_of((tree, a))
    assert parse(text) == (tree, a) or all(x is y for x, y in zip(parse(text), (tree, a), strict=True))
    deep = a
    for _ in range(3000):
        deep = torch.sin(deep) * deep  # without shared nodes, the tree would have 2^3000 nodes
    assert parse(text_of((deep,)))[0] is deep


def texts() -> st.SearchStrategy[str]:
    """Expressions whose meaning depends on operator precedence."""
    binary = st.sampled_from(["+", "-", "*", "/", "**", "&", "|", "^"])
    inner = st.recursive(
        st.sampled_from(["a0", "a1", "a2"]),
        lambda part: (
            st.tuples(st.sampled_from("-~"), part).map("".join)
            | st.tuples(part, binary, part).map(" ".join)
            | part.map(lambda text: f"({text})")
        ),
    )
    return inner | st.tuples(inner, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), inner).map("".join)


@given(texts())
def test_operators_bind_as_in_python(text: str) -> None:
    assert parse(text)[0] is eval(text, {f"a{i}": argument(i) for i in range(3)})


@pytest.mark.parametrize(
    "text",
    ["(" * 3000 + "a0" + ")" * 3000, "-" * 3000 + "a0", "+".join(["a0"] * 3000), "abs(" * 3000 + "a0" + ")" * 3000],
)
def test_texts_of_any_depth_are_read_whatever_the_callers_stack(text: str) -> None:
    def after(calls: int) -> Any:
        return after(calls - 1) if calls else parse.__wrapped__(text)

    used = len(inspect.stack())
    (tree,) = after(sys.getrecursionlimit() - used - 60)
    assert tree is parse(text)[0]
    assert parse(text_of((tree,)))[0] is tree
    (y,) = torch.ops.rooftop.fused([torch.ones(2, device="meta")], [], f"t: {text}")
    assert y.shape == (2,)


def test_threads_have_one_node_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(WeakValueDictionary[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key, default)
            time.sleep(0.02)
            return found

    monkeypatch.setattr(expressions, "_NODES", Slow())
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: argument(0), range(2))
    assert first is second


@fused
def scaled_sigmoid(x: Any) -> Any:
    return torch.sigmoid(x) * 2


def test_powers_of_one_argument_share_their_products() -> None:
    assert fused(lambda x: x**3 + torch.square(x)).text == "t0 = base(a0, 1); t1 = t0 * t0; (t1 * t0) + t1"


def test_pickled_by_name() -> None:
    assert pickle.loads(pickle.dumps(scaled_sigmoid)) is scaled_sigmoid


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "a0 +",
            "__import__('os')",
            "a0.real",
            "a0[0]",
            "f(a0)",
            "exp(a0, a0)",
            "x + 1",
            "lambda: a0",
            "a0 if a1 else 2",
        ),
        *("t0 = a0", "import os; a0", "a0 < a1 < a2", "a0 | a1 == a0 < 2", "exp(x=a0)", "'a0'", "1 + 2", "a0, "),
        *("(a0", "a0)", "exp(a0", "(a0, a0)", "()", "exp()", "a0 a0", "a0 = 1", "t0 = a0, a0; t0", "1a0", "a0 + 2.5.1"),
        *(f"a0 + {2**64}", f"a0 - {10**400}", f"a0 - {'9' * 5000}"),
    ],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="fused:"):
        torch.ops.rooftop.fused([torch.ones(2)], [], "t: " + text)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: fused(lambda x: torch.softmax(x, 0)), TypeError, "softmax is not elementwise"),
        (lambda x: fused(lambda x: x.sum()), AttributeError, "have no 'sum': a fused function may use"),
        (lambda x: fused(lambda x: x if x > 0 else -x), TypeError, r"no truth value .* torch\.where"),
        (lambda x: fused(lambda x: x[0]), TypeError, r"have no \[ \]"),
        (lambda x: fused(lambda x: x + torch.ones(3)), TypeError, "not an argument of the function: add an argument"),
        (lambda x: fused(lambda x: 3.0), TypeError, "must return expressions"),
        (lambda x: fused(lambda *x: x[0]), TypeError, r"without \* and \*\*"),
        (lambda x: fused(lambda x: torch.div(x, 2, rounding_mode="floor")), TypeError, "rounding mode"),
        (lambda x: mul(x, "two"), TypeError, "other must be a tensor or a number, got str"),
        (lambda x: mul(2, 3), ValueError, "expected 1 to 8 tensors, got 0"),
        (lambda x: fused(lambda x, y: x)(x), TypeError, "the argument y is missing"),
        (lambda x: fused(lambda x: x * 2)(x, y=2), TypeError, "unexpected arguments y"),
        (lambda x: mul(x, torch.ones(4)), ValueError, r"shapes \(3,\), \(4,\) do not broadcast"),
        (lambda x: mul(x, torch.ones(3, device="meta")), ValueError, "are on cpu and meta"),
        (lambda x: mul(x, x.to_sparse()), TypeError, "other must be dense"),
        (lambda x: mul(x, x.to(torch.complex64)), TypeError, "one of the dtypes"),
        (lambda x: fused(lambda x: x & 1)(x), TypeError, "needs booleans or integers"),
        (lambda x: fused(lambda x: -(x > 0))(x), TypeError, "neg of booleans"),
        (lambda x: fused(lambda x: x**7)(x.int()), TypeError, "powers 1 to 4"),
        (lambda x: fused(lambda x: torch.where(x, x, 0))(x), TypeError, "condition of where must be boolean"),
        (lambda x: fused(torch.abs), TypeError, "has no readable signature"),
        (lambda x: gelu(x, "fast"), ValueError, "approximate must be"),
    ],
)
def test_wrong_calls(call: Function, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.ones(3))


def test_operator_checks_of_torch_library() -> None:
    checked = torch.ops.rooftop.fused.default
    x, y = values(4, 6).requires_grad_(), values(6).requires_grad_()
    torch.library.opcheck(checked, ([x, y], [0.5], "tnt: a0 * sigmoid(a2) + a1"))
    torch.library.opcheck(checked, ([x, y], [0.5], "tnt 0=01 1=10: a0 * sigmoid(a2) + a1, a0 * a2"))
    torch.library.opcheck(checked, ([x.detach().bfloat16(), y], [], "tt: t0 = a0 * a1; t0 * t0, t0 > 0, exp(a1)"))


@pytest.mark.parametrize("dynamic", [None, True])
def test_compiled_whole(dynamic: bool | None) -> None:
    scaled = fused(lambda x, y, a: torch.tanh(x) * a * y)
    x, y = values(6, 32).requires_grad_(), values(32).requires_grad_()
    compiled = torch.compile(lambda x, y, a: scaled(x, y, a) * 2, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for a in (0.5, 0.75, 0.875):
        found = compiled(x, y, a)
        torch.testing.assert_close(found, 2 * (torch.tanh(x) * a * y))
    found[:, 0].sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(y.grad[0], 2 * 0.875 * torch.tanh(x[:, 0]).sum())


def test_on_meta_tensors_only_shapes_are_made() -> None:
    found = fused(lambda x, y: (x * y, x > 1))(torch.empty(3, 1, device="meta").half(), torch.empty(4, device="meta"))
    assert [(y.shape, y.dtype) for y in found] == [((3, 4), torch.float32), ((3, 1), torch.bool)]


def test_autocast_keeps_float32_where_pytorch_does() -> None:
    a = argument(0)
    tree = (torch.exp(a) + a, a * 2, a**3, torch.square(a), a.add(a, alpha=2))
    types = types_of(tree, [Kind(torch.float16, TENSOR)], autocast=True)
    wide, half = torch.float32, torch.float16
    assert [types[id(each)].kind.dtype for each in tree] == [wide, half, wide, wide, half]
    x = values(8, dtype=torch.bfloat16).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert gelu(x).dtype == F.gelu(x).dtype
    (y,) = torch.ops.rooftop.fused([x], [], "t autocast: exp(a0)")
    torch.testing.assert_close(y, x.float().exp())
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16


def test_cost_is_what_a_person_counts() -> None:
    x, row = values(10, 40).requires_grad_(), values(40)
    with CountingMode() as counted:
        fused(lambda x, r, s: x * torch.sigmoid(r) + s)(x, row, 0.5).backward(torch.ones(10, 40))
    forward, backward = (r.cost for r in counted.records if r.name == "rooftop::fused")
    assert forward is not None
    assert backward is not None
    assert (forward.total_flops, forward.read_bytes, forward.write_bytes) == (40 + 2 * 400, 4 * 440, 4 * 400)
    assert (backward.total_flops, backward.read_bytes, backward.write_bytes) == (40 + 400, 4 * 440, 4 * 400)
    with CountingMode() as counted:
        torch.ops.rooftop.fused([x.detach(), row], [], "tt 0=01: a0 * a1")
    (summed,) = (r.cost for r in counted.records if r.name == "rooftop::fused")
    assert summed is not None
    assert (summed.total_flops, summed.read_bytes, summed.write_bytes) == (2 * 400, 4 * 440, 4 * 40)


WITHOUT_KERNELS = "results_have_pytorchs_dtype or texts_of_any_depth or finite_differences or text_is or wrong_calls"


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__, "-k", f"not ({WITHOUT_KERNELS})") > 180


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16])
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_gate_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    x, y = values(67, 1001, dtype=dtype), values(67, 1001, dtype=dtype, seed=1)
    x = x.abs() + 0.01 if name in POSITIVE else x
    if name in BINARY:
        assert_gate(BINARY[name], x, y, device="cuda")
    else:
        assert_gate(
            lambda x: UNARY[name](x) + 0.0 * x if name in STEPS - {"isnan"} else UNARY[name](x), x, device="cuda"
        )


@pytest.mark.gpu
@pytest.mark.parametrize("case", SHAPES)
def test_broadcast_tensors_on_a_gpu(case: str) -> None:
    tensors = [values(*shape, seed=i) for i, shape in enumerate(SHAPES[case])]
    assert_gate(expression_of(len(tensors)), *tensors, numbers=(0.5,), device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*FLOATS, torch.float16])
def test_long_sums_of_gradients_on_a_gpu(dtype: torch.dtype) -> None:
    """All calls return the same bits."""
    shapes = [(3001, 4100), (4100,), (3001, 1), (3001, 4100)]
    x, row, column, dy = (values(*shape, seed=i).to("cuda", dtype) for i, shape in enumerate(shapes))
    assert_gate(lambda x, r, c: x * torch.sigmoid(r) * c, x, row, column, device="cuda")
    inputs = [t.requires_grad_() for t in (x, row, column)]
    y = fused(lambda x, r, c: x * torch.sigmoid(r) * c)(*inputs)
    first, again = (torch.autograd.grad(y, inputs, dy, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    x = torch.randn(131_073, 16_384, device="cuda", dtype=torch.bfloat16)  # 2^31 + 16384
    row = torch.randn(16_384, device="cuda", dtype=torch.bfloat16)
    for at in (0, 65_536, 131_072):
        torch.testing.assert_close(add(x, row)[at], x[at] + row)
        torch.testing.assert_close(add(x, x)[at], x[at] + x[at])


@pytest.mark.gpu
def test_autocast_on_a_gpu() -> None:
    x = values(8, 16).cuda().half()
    functions: list[Function] = [UNARY["exp"], UNARY["sigmoid"], lambda x: torch.log(x.abs() + 1) * x, lambda x: x**3]
    with torch.autocast("cuda", torch.float16):
        for function in functions:
            ours, theirs = fused(function)(x), function(x)
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_a_number_on_the_cpu_and_a_graph_on_a_gpu() -> None:
    x = values(64, 96).cuda()
    torch.testing.assert_close(mul(x, torch.tensor(2.5)), x * 2.5)
    compiled = torch.compile(lambda x: silu(x).square(), fullgraph=True)
    torch.testing.assert_close(compiled(x), F.silu(x).square())
