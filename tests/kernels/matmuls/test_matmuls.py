"""linear_act and matmul, both ways: the CPU implementation, and (in a separate process) the Triton kernels
interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from rooftop.cost import CountingMode
from rooftop.kernels import linear_act, linear_act_plan, matmul
from rooftop.kernels.matmuls import launches as matmul_launches
from rooftop.kernels.matmuls import matmuls
from rooftop.kernels.matmuls import tables as matmul_tables
from rooftop.kernels.matmuls.launches import forward
from rooftop.kernels.matmuls.matmuls import activation_of, linear_act_and_before
from rooftop.kernels.matmuls.tables import (
    FEW_ROWS_ON_HOPPER,
    FUSED_ON_HOPPER,
    TWO_AN_SM,
    Entry,
    LinearPlan,
    Problem,
    Tile,
    choose,
)
from rooftop.kernels.operands.activations import ACTIVATIONS
from rooftop.launch import INTERPRETED, count_launches, fast_path, operators
from rooftop.launch.triton_launch import launch
from rooftop.nn import LinearAct
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda t: t,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
    "silu": functional.silu,
    "sigmoid": torch.sigmoid,
    "relu6": functional.relu6,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
}
DESCRIPTORS = Tile("descriptors", 32, 32, 16, 4, 2, group=2)
POINTERS = Tile("pointers", 32, 16, 32, 4, 2, group=2)
SMALL_TILES = {
    "descriptors": DESCRIPTORS,
    "descriptors, two parts of the columns": replace(DESCRIPTORS, parts=2),
    "descriptors, four parts of the columns": replace(DESCRIPTORS, columns=64, parts=4),
    "descriptors, K in three": replace(DESCRIPTORS, split=3),
    "one tile a program": replace(DESCRIPTORS, kernel="single", parts=2),
    "one tile of 48 columns a program": replace(DESCRIPTORS, kernel="single", parts=2, more=16),
    "pointers": POINTERS,
    "pointers, K in three": replace(POINTERS, split=3),
}


def by_torch(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "none", residual: Tensor | None = None
) -> Tensor:
    """The reference in PyTorch, one call after the other."""
    y = TORCH[activation](functional.linear(x, weight, bias))
    return y if residual is None else y + residual


Operands = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def operands(
    *shape: int, dtype: torch.dtype = torch.float32, bias: bool = True, residual: bool = False, device: str = "cpu"
) -> Operands:
    """x, weight, bias, residual of a product of shape (..., M, N, K)."""
    torch.manual_seed(sum(shape))
    *lead, n, k = shape

    def random(*size: int) -> Tensor:
        return torch.randn(*size).to(device=device, dtype=dtype)

    weight = (torch.randn(n, k) / max(1, k) ** 0.5).to(device=device, dtype=dtype)
    return random(*lead, k), weight, random(n) if bias else None, random(*lead, n) if residual else None


def output_and_gradients(
    function: Callable[..., Tensor], given_: Operands, activation: str, dy: Tensor
) -> dict[str, Tensor]:
    leaves = [t.detach().clone().requires_grad_() if t is not None else None for t in given_]
    x, weight, bias, residual = leaves
    y = function(x, weight, bias, activation, residual)
    y.backward(dy.to(y.dtype))
    names = ("dx", "dweight", "dbias", "dresidual")
    found = {name: t.grad for name, t in zip(names, leaves, strict=True) if t is not None}
    return {"y": y.detach(), **{name: g for name, g in found.items() if g is not None}}


def wide(given_: Operands) -> Operands:
    x, weight, bias, residual = (t.double() if t is not None else None for t in given_)
    assert x is not None
    assert weight is not None
    return x, weight, bias, residual


@contextmanager
def tiles_for_all() -> Iterator[None]:
    """Use the kernels for everything that a table decides, even where the library is faster."""
    before = matmul_tables.FUSED_ON_HOPPER
    matmul_tables.FUSED_ON_HOPPER = dict.fromkeys(before, (Entry(math.inf, replace(TWO_AN_SM, rows=64)),))
    choose.cache_clear()
    try:
        yield
    finally:
        matmul_tables.FUSED_ON_HOPPER = before
        choose.cache_clear()


def assert_gate(given_: Operands, activation: str, kernels: tuple[str, ...] = ()) -> None:
    """Output and gradients pass the numerics gate, and (interpreted, or on a GPU) come from the kernels."""
    dy = torch.randn(*given_[0].shape[:-1], given_[1].shape[0], device=given_[0].device).to(given_[0].dtype)
    with count_launches() as launches, tiles_for_all():
        ours = output_and_gradients(linear_act, given_, activation, dy)
    if INTERPRETED or dy.is_cuda:
        assert set(kernels) <= launches.keys(), launches
    eager = output_and_gradients(by_torch, given_, activation, dy)
    exact = output_and_gradients(by_torch, wide(given_), activation, dy.double())
    for name in exact:
        what = f"{name} of {activation} {tuple(dy.shape)} K={given_[0].shape[-1]} {dy.dtype}"
        assert_as_accurate(ours[name], eager[name], exact[name], what=what)


# ---- the numerics gate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gate(activation: str, dtype: torch.dtype, residual: bool) -> None:
    kernels = ("linear_act_backward", "add_column_sums")
    assert_gate(operands(33, 40, 72, dtype=dtype, residual=residual), activation, kernels)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (5, 7, 3), (65, 129, 33), (1, 8, 300), (2, 3, 24, 16), (0, 8, 16), (4, 0, 8), (4, 8, 0), (9,) * 2],
)
def test_gate_of_any_shape(shape: tuple[int, ...]) -> None:
    assert_gate(operands(*shape, dtype=torch.bfloat16), "silu")
    assert_gate(operands(*shape, dtype=torch.bfloat16, bias=False, residual=True), "sigmoid")


# The gate is not used, because for few elements PyTorch's largest error can be 0 by luck.
@given(st.integers(1, 40), st.integers(1, 70), st.integers(0, 70), st.sampled_from(ACTIVATIONS))
@settings(max_examples=10, deadline=None)
def test_any_size(m: int, n: int, k: int, activation: str) -> None:
    given_ = operands(m, n, k, residual=True)
    dy = torch.randn(m, n)
    with tiles_for_all():
        ours = output_and_gradients(linear_act, given_, activation, dy)
    exact = output_and_gradients(by_torch, wide(given_), activation, dy.double())
    for name in exact:
        torch.testing.assert_close(ours[name].double(), exact[name], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("across", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("tile", SMALL_TILES.values(), ids=SMALL_TILES.keys())
def test_every_kernel_of_several_tiles(tile: Tile, across: bool, dtype: torch.dtype) -> None:
    x, weight, bias, residual = operands(40, 72, 56, dtype=dtype, residual=True)
    if across:
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    plan = LinearPlan(tile.kernel, tile, "")
    with count_launches() as launches:
        y, before = forward(plan, x, weight, bias, "gelu", residual, True)
    assert launches[f"linear_act_{tile.kernel}"] == 1
    assert launches["linear_act_finish"] == (tile.split > 1)
    exact = wide((x, weight, bias, residual))
    assert_as_accurate(y, by_torch(x, weight, bias, "gelu", residual), by_torch(*exact[:3], "gelu", exact[3]))
    assert_as_accurate(before, functional.linear(x, weight, bias), functional.linear(*exact[:3]))
    y, before = forward(plan, x, weight, bias, "gelu", None, True, True)
    assert torch.equal(activation_of(before, "gelu"), y)


@pytest.mark.parametrize("dtype", [torch.float64, *DTYPES])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_what_was_activated_gives_the_result_again(activation: str, dtype: torch.dtype) -> None:
    x, weight, bias, _ = operands(2, 20, 37, 24, dtype=dtype)
    weight.requires_grad_()
    y, before = linear_act_and_before(x, weight, bias, activation)
    plain = linear_act(x, weight, bias, activation)  # rounds once in half precision
    if dtype in (torch.float32, torch.float64) or not INTERPRETED:
        assert torch.equal(y, plain)
    assert torch.equal(activation_of(before, activation), y)
    assert y.requires_grad
    assert not before.requires_grad
    for made in (linear_act_and_before(x, weight, bias, activation)[0], linear_act(x, weight, bias, activation)):
        made.sum().backward()
    assert weight.grad is not None


def test_what_was_activated_is_given_where_backward_keeps_it() -> None:
    x, weight, bias, _ = operands(2, 3, 4)
    for activation in ("none", "relu", "sigmoid"):
        with pytest.raises(ValueError, match=f"backward of '{activation}' does not need .*: use one of gelu"):
            linear_act_and_before(x, weight, bias, activation)
    with pytest.raises(ValueError, match=r"must be one of none, relu.*did you mean gelu"):
        activation_of(x, "gleu")


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("tile", [DESCRIPTORS, replace(DESCRIPTORS, split=2)], ids=["", "K in two"])
def test_descriptors_of_copies_where_rows_are_not_aligned(tile: Tile) -> None:
    x, weight, bias, residual = operands(40, 37, 51, dtype=torch.bfloat16, residual=True)
    assert residual is not None
    y, before = forward(LinearPlan("descriptors", tile, ""), x, weight, bias, "silu", residual.t().clone().t(), True)
    assert y.is_contiguous()
    exact = wide((x, weight, bias, residual))
    assert_as_accurate(y, by_torch(x, weight, bias, "silu", residual), by_torch(*exact[:3], "silu", exact[3]))
    assert_as_accurate(before, functional.linear(x, weight, bias), functional.linear(*exact[:3]))


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("tile", [POINTERS, replace(POINTERS, split=4)], ids=["", "K in four"])
def test_pointers_take_any_strides(tile: Tile) -> None:
    base = torch.randn(40, 70).half()
    for x in (base[::2, 1:60], base[:, ::2], base.t()[3:50], base[:1].expand(40, 70)):
        weight = torch.randn(2 * x.shape[1], 37).half().t()[:, ::2]
        residual = torch.randn(x.shape[0], 3 * 37).half()[:, :37]
        y, _ = forward(LinearPlan("pointers", tile, ""), x, weight, None, "relu", residual, False)
        exact = by_torch(x.double(), weight.double(), None, "relu", residual.double())
        assert_as_accurate(y, by_torch(x, weight, None, "relu", residual), exact)


def all_numbers(dtype: torch.dtype) -> Tensor:
    """All finite 16-bit numbers."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return numbers[numbers.isfinite()].double()


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "sigmoid"])
def test_activations_for_results_of_16_bits_are_far_within_their_rounding(activation: str, dtype: torch.dtype) -> None:
    """The error is within a tenth of a rounding step, for every number. (Rounding itself is half a step.)"""
    from rooftop.kernels.matmuls.triton_kernels import linear_act_finish

    x = all_numbers(dtype)
    exact = TORCH[activation](x)
    if activation == "gelu":  # below -8, 1 + erf has no correct digit left, even in double precision; nor has 1 + tanh
        exact = x * torch.special.log_ndtr(x).exp()
    elif activation == "gelu_tanh":
        exact = x * torch.sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3))
    y = torch.empty(len(x))
    launch(
        linear_act_finish, (1, 1), y.device, x.float(), None, None, y, None, 1, len(x), 1, len(x), len(x), 0,
        ACTIVATION=ACTIVATIONS.index(activation), HAS_BIAS=False, HAS_RESIDUAL=False, KEEP=False, ROUNDED=False,
        SPLIT=1, UNIT=1, ROWS=1, COLUMNS=1 << 16, HALF=True,
    )  # fmt: skip
    limits = torch.finfo(dtype)
    assert ((y - exact).abs() <= 0.1 * limits.eps * exact.abs() + 0.1 * limits.smallest_normal).all()


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "sigmoid"])
def test_derivatives_for_results_of_16_bits_are_far_within_their_rounding(activation: str) -> None:
    from rooftop.kernels.matmuls.triton_kernels import linear_act_backward

    x = all_numbers(torch.float16)
    x = x[x.abs() < 100].requires_grad_()
    (exact,) = torch.autograd.grad(TORCH[activation](x).sum(), x)
    dz = torch.empty(len(x))
    launch(
        linear_act_backward, (1, 1), dz.device, torch.ones(len(x)), x.detach().float(), dz, None, 1, len(x), len(x), 1,
        ACTIVATION=ACTIVATIONS.index(activation), OF_OUTPUT=False, SUM=False, UNIT=1, ROWS=1, COLUMNS=1 << 16,
        HALF=True,
    )  # fmt: skip
    limits = torch.finfo(torch.float16)
    assert ((dz - exact).abs() <= 0.2 * limits.eps * (exact.abs() + 0.1)).all()


def derivatives(x: Tensor, activation: str) -> Tensor:
    """The derivative by backward's kernel, in float32."""
    return matmul_launches.backward(torch.ones(1, len(x)), x[None], activation, False, False)[0][0]


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu", "sigmoid"])
def test_derivatives_in_float32_lose_nothing_to_cancellation(activation: str) -> None:
    """The error is within a few roundings of the largest term of the derivative's sum."""
    x = torch.linspace(-12, 12, 4001)
    wide_x = x.double().requires_grad_()
    (exact,) = torch.autograd.grad(TORCH[activation](wide_x).sum(), wide_x)
    error = (derivatives(x, activation) - exact).abs()
    assert error.max() < 4 * torch.finfo(torch.float32).eps


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_derivatives_of_very_large_numbers_are_0_or_1() -> None:
    for activation in ("gelu", "gelu_tanh", "silu"):
        found = derivatives(torch.tensor([-1e18, -1e13, -1e4, 1e4, 1e13, 1e18]), activation)
        assert found.tolist() == [0, 0, 0, 1, 1, 1], activation


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_sums_for_the_bias_do_not_lose_more_with_more_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program adds up 512 tiles of 0.1. Once the sum is large, all roundings go in the same direction."""
    monkeypatch.setattr(matmul_launches, "BACKWARD_PROGRAMS_PER_SM", 1)
    dy = torch.full((8192, 3), 0.1)
    _, sums = matmul_launches.backward(dy, dy, "none", False, True)
    torch.testing.assert_close(sums.double(), dy.double().sum(0), rtol=2.0**-22, atol=0)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
def test_sums_for_the_bias_keep_infinities() -> None:
    dy = torch.ones(600, 3)
    dy[7, 0], dy[300, 1], dy[8, 2], dy[301, 2] = math.inf, -math.inf, math.inf, -math.inf
    _, sums = matmul_launches.backward(dy, dy, "none", False, True)
    torch.testing.assert_close(sums, dy.sum(0), equal_nan=True)


@pytest.mark.skipif(not INTERPRETED, reason="needs the interpreter")
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_a_library_product_of_rows_that_are_not_aligned(
    activation: str, keep: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are padded as on a GPU. The results are the same and contiguous, and the operands stay unchanged."""
    x, weight, bias, residual = operands(20, 37, 51, dtype=torch.bfloat16, residual=True)
    before = [t.clone() for t in (x, weight)]
    monkeypatch.setattr(matmul_launches, "missing_columns", lambda columns, _: -columns % 64)
    monkeypatch.setattr(matmul_launches, "LEAST_PADDED", 1)
    with count_launches() as launches:
        y, kept = forward(LinearPlan("library", None, ""), x, weight, bias, activation, residual, keep)
    assert (launches["pad_rows"], launches["linear_act_finish"]) == (2, 1)
    assert y.is_contiguous()
    assert kept.is_contiguous()
    exact = wide((x, weight, bias, residual))
    assert_as_accurate(y, by_torch(x, weight, bias, activation, residual), by_torch(*exact[:3], activation, exact[3]))
    if keep:
        assert_as_accurate(kept, functional.linear(x, weight, bias), functional.linear(*exact[:3]))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, weight), strict=True))


def test_gradients_where_rows_are_not_aligned(monkeypatch: pytest.MonkeyPatch) -> None:
    given_ = [t.double().requires_grad_() for t in operands(20, 37, 51)[:3] if t is not None]
    expected = torch.autograd.grad(linear_act(*given_, "gelu").square().sum(), given_)
    monkeypatch.setattr(matmuls, "missing_columns", lambda columns, _: -columns % 64)
    monkeypatch.setattr(matmuls, "LEAST_PADDED", 1)
    torch.testing.assert_close(torch.autograd.grad(linear_act(*given_, "gelu").square().sum(), given_), expected)
    few = [t.double().requires_grad_() for t in operands(5, 7, 9)[:3] if t is not None]
    assert torch.autograd.gradgradcheck(lambda *t: linear_act(*t, "sigmoid"), few, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(("m", "n", "k"), [(700, 1001, 512), (512, 512, 1023), (300, 4095, 131)])
def test_on_a_gpu_rows_that_are_not_aligned(m: int, n: int, k: int, activation: str) -> None:
    assert_gate(operands(m, n, k, dtype=torch.bfloat16, residual=True, device="cuda"), activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 1024, 512, 256), (4096, 264, 1000), (300, 2049, 513), (3, 4096, 4096)])
def test_what_pytorch_computes_as_well_is_its_own(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A direct call of PyTorch has the bits of the operator, with less work for the host. Modes still see the
    operator."""
    x, weight, bias, _ = operands(*shape, dtype=dtype, device="cuda")
    assert bias is not None
    for added in (None, bias):
        expected = torch.ops.rooftop.linear_act(x.flatten(0, -2), weight, added, "none", None, False)[0]
        assert torch.equal(linear_act(x, weight, added).flatten(0, -2), expected)
        with CountingMode() as counted:
            linear_act(x, weight, added)
        seen = [record.name for record in counted.records]
        assert [name for name in seen if "view" not in name] == ["rooftop::linear_act"]
    aligned = not any(size * x.element_size() % 16 for size in weight.shape)
    leaf, others = weight.clone().requires_grad_(), bias.clone().requires_grad_()
    with patch.object(matmuls, "_linear_act", wraps=matmuls._linear_act) as operator:
        linear_act(x, leaf)
        by_library = linear_act_plan(x, leaf).backend == "library"
        assert operator.called != (by_library and aligned)
        operator.reset_mock()
        linear_act(x, leaf, others)  # with a gradient that a kernel sums
        linear_act(x.flatten(0, -2).t().contiguous().t(), leaf)
        assert operator.call_count == 2
    assert linear_act(x[:0], leaf).shape == (0, *x.shape[1:-1], len(leaf))


# ---- laws ----------------------------------------------------------------------------------------------------------


def test_without_activation_it_is_linear() -> None:
    x, weight, _, _ = operands(20, 24, 16)
    torch.testing.assert_close(linear_act(2 * x + 1, weight), 2 * linear_act(x, weight) + weight.sum(1))
    torch.testing.assert_close(linear_act(x, torch.eye(16), activation="relu"), x.relu())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_without_k_there_is_the_bias_alone(activation: str) -> None:
    bias, residual = torch.randn(8), torch.randn(4, 8)
    y = linear_act(torch.empty(4, 0), torch.empty(8, 0), bias, activation, residual)
    torch.testing.assert_close(y, TORCH[activation](bias.expand(4, 8)) + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(0, 8, 16), (4, 0, 8), (4, 8, 0), (0, 8, 0), (4, 0, 0), (0, 0, 0)])
def test_without_rows_columns_or_k_it_is_as_in_pytorch(
    shape: tuple[int, ...], activation: str, dtype: torch.dtype
) -> None:
    dy = torch.randn(shape[:2]).to(dtype)
    for bias, residual in ((True, False), (False, True)):
        given_ = operands(*shape, dtype=dtype, bias=bias, residual=residual)
        theirs = output_and_gradients(by_torch, given_, activation, dy)
        rounding = {"rtol": 0.016, "atol": 8 * torch.finfo(dtype).eps}  # for sums of four numbers
        torch.testing.assert_close(output_and_gradients(linear_act, given_, activation, dy), theirs, **rounding)
        with torch.no_grad():
            torch.testing.assert_close(linear_act(*given_[:3], activation, given_[3]), theirs["y"], **rounding)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_stays_in_its_row(activation: str) -> None:
    x, weight, bias, _ = operands(8, 16, 16, dtype=torch.float16)
    x[1, 3] = math.nan
    ours, theirs = linear_act(x, weight, bias, activation), by_torch(x, weight, bias, activation)
    assert ours[1].isnan().all()
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
def test_infinity_does_what_it_does_in_pytorch(activation: str) -> None:
    x, weight, bias, _ = operands(8, 16, 16)
    x[2, 5] = math.inf
    torch.testing.assert_close(linear_act(x, weight, bias, activation), by_torch(x, weight, bias, activation))


def test_a_large_offset_does_not_swamp_the_differences() -> None:
    x, weight, bias, _ = operands(16, 24, 40)
    assert_gate((1e4 + x, weight - weight.mean(1, keepdim=True), bias, None), "gelu")


def test_five_runs_give_the_same_bits() -> None:
    given_, dy = operands(65, 16, 24, dtype=torch.bfloat16, residual=True), torch.randn(65, 16)
    first, *others = [output_and_gradients(linear_act, given_, "gelu", dy) for _ in range(5)]
    assert all(torch.equal(first[name], other[name]) for other in others for name in first)


def test_views_with_any_strides() -> None:
    base, weight = torch.randn(3, 40, 130), torch.randn(24, 200)
    pairs = (
        (base[:, ::2, 5:70], weight[:, :65]),
        (base.transpose(1, 2), weight[:, 3:43]),
        (base[..., ::2], weight[::2, :65]),
    )
    for x, w in pairs:
        torch.testing.assert_close(linear_act(x, w, None, "silu"), functional.silu(functional.linear(x, w)))
    x = torch.randn(6, 40, requires_grad=True)
    linear_act(x, weight[:, :40]).sum().backward()  # an expanded gradient: all strides 0
    torch.testing.assert_close(x.grad, weight[:, :40].sum(0).expand(6, 40))


@pytest.mark.parametrize(
    ("a", "b"),
    [((3,), (3,)), ((3,), (3, 5)), ((4, 3), (3,)), ((4, 3), (3, 5)), ((2, 4, 3), (3, 5)), ((2, 4, 3), (2, 3, 5))],
)
def test_matmul_is_that_of_pytorch(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    ours, theirs = ([torch.randn(a).requires_grad_(), torch.randn(b).requires_grad_()] for _ in range(2))
    for mine, other in zip(ours, theirs, strict=True):
        mine.data.copy_(other.data)
    y, expected = matmul(*ours), torch.matmul(*theirs)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


# ---- gradients, torch.library, compile, autocast --------------------------------------------------------------------


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_against_finite_differences(activation: str, residual: bool) -> None:
    given_ = [t.requires_grad_() for t in wide(operands(3, 4, 5, residual=residual)) if t is not None]

    def call(x: Tensor, weight: Tensor, bias: Tensor, added: Tensor | None = None) -> Tensor:
        return linear_act(x, weight, bias, activation, added)

    assert torch.autograd.gradcheck(call, given_)


def test_only_the_gradients_that_are_wanted_are_made() -> None:
    x, weight, bias, _ = operands(4, 8, 16)
    assert bias is not None
    (gradient,) = torch.autograd.grad(linear_act(x, weight, bias.requires_grad_(), "sigmoid").sum(), bias)
    share = torch.sigmoid(functional.linear(x, weight, bias))
    torch.testing.assert_close(gradient, (share * (1 - share)).sum(0))
    y = torch.ops.rooftop.linear_act(x, weight, None, "silu", None, False)
    assert y[1].numel() == 0
    expected = torch.autograd.grad(linear_act(x.requires_grad_(), weight, None, "silu").sum(), x)
    for call in (torch.ops.rooftop.linear_act, matmuls._linear_act):  # values that were not kept are computed again
        found = torch.autograd.grad(call(x, weight, None, "silu", None, False)[0].sum(), x)
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_has_a_second_derivative(activation: str) -> None:
    given_ = [t.requires_grad_() for t in wide(operands(3, 4, 2, residual=True)) if t is not None]
    assert torch.autograd.gradgradcheck(
        lambda x, weight, bias, residual: linear_act(x, weight, bias, activation, residual), given_
    )


def test_on_meta_tensors_only_shapes_are_made() -> None:
    x, weight = torch.empty(2, 3, 5, device="meta"), torch.empty(7, 5, device="meta")
    assert linear_act(x, weight, activation="silu").shape == (2, 3, 7)


@pytest.mark.parametrize("activation", ["gelu", "sigmoid"])
def test_operator_checks_of_torch_library(activation: str) -> None:
    x, weight, bias, residual = operands(4, 8, 16, residual=True)
    operator = torch.ops.rooftop.linear_act.default
    tensors = [t.requires_grad_() for t in (x, weight, bias, residual) if t is not None]
    torch.library.opcheck(operator, (*tensors[:3], activation, tensors[3], activation != "none"))
    if activation != "gelu":
        torch.library.opcheck(operator, (*tensors[:3], activation, None, False))


def test_compiled_whole() -> None:
    given_ = operands(6, 8, 16, residual=True)
    leaves = [t.requires_grad_() for t in given_ if t is not None]

    def call(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return linear_act(x, weight, bias, "gelu", residual) * 2

    y = torch.compile(call, fullgraph=True, backend="aot_eager")(*leaves)
    torch.testing.assert_close(y, call(*leaves))
    ours = torch.autograd.grad(y.square().sum(), leaves)
    theirs = torch.autograd.grad((2 * by_torch(*leaves[:3], "gelu", leaves[3])).square().sum(), leaves)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_compiled_for_sizes_that_change() -> None:
    compiled = torch.compile(
        lambda x, weight, bias: linear_act(x, weight, bias, "silu"), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for shape in ((6, 8, 16), (3, 12, 5)):
        x, weight, bias, _ = operands(*shape)
        leaves = [t.requires_grad_() for t in (x, weight, bias) if t is not None]
        y, expected = compiled(*leaves), by_torch(*leaves, "silu")
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
        ours, theirs = (torch.autograd.grad(each.square().sum(), leaves) for each in (y, expected))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("residual", [False, True], ids=["", "residual"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_eager_call_past_the_dispatcher_gives_the_same_bits(
    activation: str, residual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_, dy = operands(5, 8, 16, residual=residual), torch.randn(5, 8)
    assert operators._declared["linear_act"].recorded is not None
    direct = output_and_gradients(linear_act, given_, activation, dy)
    monkeypatch.setattr(fast_path, "is_plain", lambda arguments: False)
    dispatched = output_and_gradients(linear_act, given_, activation, dy)
    assert direct.keys() == dispatched.keys()
    assert all(torch.equal(direct[name], dispatched[name]) for name in direct)


def test_backward_fills_no_memory_for_what_was_activated() -> None:
    x, weight, bias, _ = operands(5, 8, 16)
    y = linear_act(x.requires_grad_(), weight, bias, "silu")
    with CountingMode() as counted:
        y.backward(torch.ones_like(y))
    assert not [r.name for r in counted.records if "zero" in r.name]


def test_autocast_casts_as_it_does_for_linear() -> None:
    x, weight, bias, residual = operands(4, 8, 16, residual=True)
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        alone, added = linear_act(x, weight, bias, "silu"), linear_act(x, weight, bias, "silu", residual)
        theirs = by_torch(x, weight, bias, "silu", residual)
        assert matmul(x, weight.t()).dtype == torch.bfloat16
    assert alone.dtype == torch.bfloat16
    assert added.dtype == theirs.dtype == torch.float32
    torch.testing.assert_close(added, theirs, rtol=2e-2, atol=2e-2)
    added.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_cost_is_what_a_person_counts() -> None:
    x, weight, bias, residual = operands(10, 24, 16, residual=True)
    with CountingMode() as counted:
        linear_act(x.requires_grad_(), weight, bias, "silu", residual).backward(torch.ones(10, 24))
    costs = {r.name: r.cost for r in counted.records}
    forward_, backward = costs["rooftop::linear_act"], costs["rooftop::linear_act_backward"]
    assert forward_ is not None
    assert backward is not None
    assert forward_.total_flops == 2 * 10 * 24 * 16 + (4 + 1 + 1) * 240
    assert forward_.read_bytes == 4 * (10 * 16 + 24 * 16 + 24 + 240)
    assert forward_.write_bytes == 4 * 2 * 240  # the result, and the input of the activation
    assert (backward.total_flops, backward.read_bytes, backward.write_bytes) == (8 * 240, 4 * 480, 4 * 240)
    assert costs["aten::mm"] is not None


# ---- the choice of a
# plan-----------------------------------------------------------------------------------------------


def problem(m: int, n: int, k: int, **other: object) -> Problem:
    found = {"dtype": torch.bfloat16, "activation": "sigmoid", "aligned": True, "finish": True, "library_finish": False}
    found |= {"sms": 132}
    return Problem(m, n, k, capability=other.pop("capability", 9), **{**found, **other})  # type: ignore[arg-type]


def test_plans_depend_on_the_shape_and_the_gpu() -> None:
    assert choose(problem(4096, 4096, 4096)).backend == "descriptors"
    assert choose(problem(4096, 4096, 4096)).tile == FUSED_ON_HOPPER["sigmoid"][-1].tile
    assert choose(problem(512, 4096, 4096)).tile != FUSED_ON_HOPPER["sigmoid"][-1].tile
    assert choose(problem(512, 1024, 4095, aligned=False)).backend == "pointers"
    assert choose(problem(4096, 4096, 4096, capability=8)).backend == "pointers"
    for library in ({"finish": False}, {"library_finish": True}, {"dtype": torch.float32}):
        assert choose(problem(4096, 4096, 4096, **library)).backend == "library"  # type: ignore[arg-type]
    assert choose(problem(4096, 4096, 0)).backend == "library"


def test_few_rows_have_small_tiles() -> None:
    for entry in FEW_ROWS_ON_HOPPER:
        assert entry.tile_ms is not None and entry.library_ms is not None  # noqa: PT018
        assert entry.tile_ms < entry.library_ms
        assert entry.shape is not None
        assert choose(problem(*entry.shape)).tile == entry.tile
        assert choose(problem(*entry.shape, activation="gelu_tanh")).backend == "library", (
            "the library has this epilogue"
        )
    by_library: dict[str, object] = {"library_finish": True, "activation": "relu"}
    assert choose(problem(100, 2048, 256, **by_library)).backend == "single"
    assert choose(problem(100, 2048, 512, **by_library)).backend == "library"
    assert choose(problem(950, 256, 256, finish=False)).backend == "single"
    assert choose(problem(950, 256, 2048)).tile not in [entry.tile for entry in FEW_ROWS_ON_HOPPER]


def test_the_library_is_taken_where_it_measured_faster() -> None:
    for activation, table in FUSED_ON_HOPPER.items():
        assert table[-1].tiles == math.inf, activation
        assert [entry.tiles for entry in table] == sorted(entry.tiles for entry in table)
        for entry in table:
            if entry.tile_ms is not None and entry.library_ms is not None:
                assert (entry.tile is None) == (entry.library_ms < entry.tile_ms), activation


def test_a_plan_says_what_is_taken_and_why() -> None:
    x, weight, bias, _ = operands(16, 16, 16, dtype=torch.bfloat16)
    plan = linear_act_plan(x, weight, bias, "silu")
    assert plan.backend == ("single" if INTERPRETED else "reference")
    assert str(plan).startswith(plan.backend)
    assert plan.reason in str(plan)
    assert linear_act_plan(x.double(), weight.double()).reason == "float64"
    if INTERPRETED:
        unaligned = torch.randn(16, 17).bfloat16()[:, 1:]
        # too small to be worth an aligned copy
        assert linear_act_plan(unaligned, weight, bias, "silu").backend == "pointers"
        x, weight, bias, _ = operands(16, 16, 1032, dtype=torch.bfloat16)
        assert linear_act_plan(x, weight, bias).backend == "library"


def test_the_module_has_the_state_of_linear() -> None:
    plain, ours = torch.nn.Linear(16, 8), LinearAct(16, 8, activation="gelu")
    ours.load_state_dict(plain.state_dict())
    x, residual = torch.randn(2, 5, 16), torch.randn(2, 5, 8)
    torch.testing.assert_close(ours(x, residual), functional.gelu(plain(x)) + residual)
    assert "activation=gelu" in repr(ours)
    with pytest.raises(ValueError, match="activation must be one of"):
        LinearAct(16, 8, activation="tanh")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input": [1.0]}, TypeError, "input must be a tensor, got list"),
        ({"weight": None}, TypeError, "weight must be a tensor, got NoneType"),
        ({"input": torch.ones(3, 4, dtype=torch.int64)}, TypeError, "input must be bfloat16, .* got torch.int64"),
        ({"weight": torch.eye(4).to_sparse()}, TypeError, "weight must be dense"),
        ({"weight": torch.ones(5, 4).half()}, TypeError, "input is torch.float32, weight torch.float16: cast"),
        ({"weight": torch.ones(5, 3)}, ValueError, r"expected input .* got \(3, 4\) and \(5, 3\)"),
        ({"weight": torch.ones(4)}, ValueError, r"expected input .* got \(3, 4\) and \(4,\)"),
        ({"bias": torch.ones(4)}, ValueError, r"expected bias of shape \(5,\), got \(4,\)"),
        ({"bias": torch.ones(5, device="meta")}, ValueError, "input is on cpu, bias on meta"),
        ({"residual": torch.ones(5)}, ValueError, r"expected residual of shape \(3, 5\), got \(5,\): use .expand"),
        ({"activation": "tanh"}, ValueError, "activation must be one of none, relu, .* got 'tanh'"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    for function in (linear_act, linear_act_plan):
        with pytest.raises(error, match=message):
            function(**{"input": torch.randn(3, 4), "weight": torch.randn(5, 4), **arguments})  # type: ignore[arg-type]


def test_wrong_arguments_of_matmul() -> None:
    with pytest.raises(ValueError, match=r"\(3, 4\) and \(5, 2\) do not match"):
        matmul(torch.ones(3, 4), torch.ones(5, 2))
    with pytest.raises(ValueError, match="must have at least one dimension"):
        matmul(torch.tensor(1.0), torch.ones(5, 2))


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 120


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "shape", [(16, 64, 72), (500, 4096, 1024), (2048, 1000, 264), (300, 2049, 513), (4096, 3072, 768)]
)
def test_gate_on_a_gpu(shape: tuple[int, ...], activation: str, dtype: torch.dtype) -> None:
    assert_gate(operands(*shape, dtype=dtype, device="cuda"), activation)
    assert_gate(operands(*shape, dtype=dtype, device="cuda", residual=True), activation)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(500, 4096, 1024), (300, 2049, 513), (64, 48, 0)])
def test_gate_without_a_gradient_on_a_gpu(shape: tuple[int, ...], activation: str, dtype: torch.dtype) -> None:
    """If no input needs a gradient, cuBLAS may apply bias and activation itself."""
    given_ = operands(*shape, dtype=dtype, device="cuda")
    exact = by_torch(*wide(given_)[:3], activation)
    assert_as_accurate(linear_act(*given_[:3], activation), by_torch(*given_[:3], activation), exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("across", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("split", [1, 3])
@pytest.mark.parametrize("kernel", ["descriptors", "pointers"])
def test_every_kernel_on_a_gpu(kernel: str, split: int, keep: bool, across: bool, dtype: torch.dtype) -> None:
    x, weight, bias, residual = operands(1000, 1544, 1032, dtype=dtype, residual=True, device="cuda")
    if across:
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    tile = Tile(kernel, 128, 128, 64, 8, 3, parts=2 if kernel == "descriptors" else 1, split=split)  # type: ignore[arg-type]
    y, before = forward(LinearPlan(tile.kernel, tile, ""), x, weight, bias, "gelu", residual, keep)
    exact = wide((x, weight, bias, residual))
    assert_as_accurate(y, by_torch(x, weight, bias, "gelu", residual), by_torch(*exact[:3], "gelu", exact[3]))
    if keep:
        assert_as_accurate(before, functional.linear(x, weight, bias), functional.linear(*exact[:3]))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("across", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize(
    "tile",
    [
        replace(TWO_AN_SM, lag=5),
        Tile("single", 128, 128, 64, 4, 3, parts=2),
        Tile("single", 128, 128, 64, 4, 3, parts=2, early=True),
        Tile("single", 128, 128, 64, 8, 4, parts=2, more=64),
    ],
    ids=["out of step", "one tile a program", "one tile a program, early", "one tile of 192 columns a program"],
)
def test_programs_out_of_step_and_of_one_tile_on_a_gpu(tile: Tile, across: bool, activation: str) -> None:
    x, weight, bias, residual = operands(3000, 2056, 520, dtype=torch.bfloat16, residual=True, device="cuda")
    if across:
        x, weight = x.t().contiguous().t(), weight.t().contiguous().t()
    for added in (None, residual):
        y, before = forward(LinearPlan(tile.kernel, tile, ""), x, weight, bias, activation, added, True)
        exact = wide((x, weight, bias, added))
        theirs = by_torch(x, weight, bias, activation, added)
        assert_as_accurate(y, theirs, by_torch(*exact[:3], activation, exact[3]))
        assert_as_accurate(before, functional.linear(x, weight, bias), functional.linear(*exact[:3]))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    rows = (1 << 31) // 4096 + 64
    x = torch.randn(rows, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) / 64
    unaligned = torch.randn(rows, 4097, device="cuda", dtype=torch.bfloat16)[:, 1:]
    for each in (x, unaligned):
        y = linear_act(each, weight, None, "silu")
        for row in (slice(0, 8), slice(rows // 2, rows // 2 + 8), slice(rows - 8, rows)):
            expected = functional.silu(functional.linear(each[row], weight))
            torch.testing.assert_close(y[row], expected, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    x, weight, bias, _ = operands(256, 512, 384, dtype=torch.bfloat16, device="cuda")
    compiled = torch.compile(lambda x: linear_act(x, weight, bias, "silu").square(), fullgraph=True)
    torch.testing.assert_close(compiled(x), linear_act(x, weight, bias, "silu").square())


@pytest.mark.gpu
def test_replayed_from_a_graph_on_a_gpu() -> None:
    x, weight, bias, _ = operands(512, 1024, 512, dtype=torch.bfloat16, device="cuda")
    expected = linear_act(x, weight, bias, "gelu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear_act(x, weight, bias, "gelu")
    y.zero_()
    graph.replay()
    assert torch.equal(y, expected)
