"""SwiGLU, both ways: the CPU implementation, and (in a separate process) the Triton kernels interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import swiglu
from rooftop.launch import INTERPRETED, count_launches
from rooftop.nn import SwiGLU
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def by_torch(gate: Tensor, up: Tensor | None = None) -> Tensor:
    gate, up = (gate, up) if up is not None else gate.chunk(2, -1)
    return F.silu(gate) * up


def results(function: Callable[..., Tensor], inputs: list[Tensor], dy: Tensor) -> list[Tensor]:
    inputs = [t.detach().requires_grad_() for t in inputs]
    y = function(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, dy)]


def assert_gate(*inputs: Tensor, device: str = "cpu") -> None:
    given_ = [t.to(device) for t in inputs]
    dy = torch.randn_like(by_torch(*given_))
    with count_launches() as launches:
        ours = results(swiglu, given_, dy)
    if (INTERPRETED or device == "cuda") and dy.numel():
        assert launches == {"swiglu_forward": 1, "swiglu_backward": 1}
    eager = results(by_torch, given_, dy)
    exact = results(by_torch, [t.double() for t in given_], dy.double())
    for what, *values in zip(("y", "dgate", "dup"), ours, eager, exact, strict=False):
        assert_as_accurate(*values, what=f"{what} {tuple(inputs[0].shape)} {inputs[0].dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 64), (3, 4100), (9, 1000), (0, 16), (3, 0), (33, 2), (10,)])
def test_gate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(sum(shape))
    assert_gate(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))
    assert_gate((3 * torch.randn(*shape[:-1], 2 * shape[-1])).to(dtype))


@given(st.integers(1, 20), st.integers(1, 300))
@settings(max_examples=12, deadline=None)
def test_packed_and_separate_are_the_same(rows: int, columns: int) -> None:
    packed = torch.randn(rows, 2 * columns)
    gate, up = (half.clone() for half in packed.chunk(2, -1))
    dy = torch.randn(rows, columns)
    y, dgate, dup = results(swiglu, [gate, up], dy)
    y_packed, gradient = results(swiglu, [packed], dy)
    torch.testing.assert_close(y, by_torch(gate, up))
    torch.testing.assert_close((y_packed, gradient), (y, torch.cat((dgate, dup), -1)))


def test_a_gate_far_from_zero_is_open_or_shut() -> None:
    up = torch.randn(4)
    assert torch.equal(swiglu(torch.full((4,), 100.0), up), 100 * up)
    assert swiglu(torch.full((4,), -1e4), up).abs().max() == 0
    assert torch.equal(swiglu(torch.zeros(4), up).abs(), torch.zeros(4))


def test_infinities_and_nan_do_what_they_do_in_pytorch() -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e4, -1e4, 88.0, -90.0])
    gate, up = (t.flatten() for t in torch.meshgrid(special, special, indexing="ij"))
    torch.testing.assert_close(swiglu(gate, up), by_torch(gate, up), equal_nan=True)


def test_views_with_any_strides() -> None:
    base = torch.randn(40, 130)
    for view in (base[::2], base[:, 5:71], base.t(), base[:, 2::2], base[3:4].expand(7, 130)):
        torch.testing.assert_close(swiglu(view), by_torch(view))
        torch.testing.assert_close(swiglu(view, view.contiguous()), by_torch(view, view))
    gate = base.clone().requires_grad_()
    swiglu(gate, base).sum().backward()  # an expanded gradient: all strides 0
    (expected,) = torch.autograd.grad(by_torch(base.requires_grad_(), base.detach()).sum(), base)
    torch.testing.assert_close(gate.grad, expected)


def test_gradients_against_finite_differences() -> None:
    gate, up = (torch.randn(3, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(swiglu, (gate, up))
    assert torch.autograd.gradcheck(swiglu, (gate,))


def test_operator_checks_of_torch_library() -> None:
    x, operator = torch.randn(4, 6, requires_grad=True), torch.ops.rooftop.swiglu.default
    torch.library.opcheck(operator, (x, torch.randn(4, 6, requires_grad=True)))
    torch.library.opcheck(operator, (x, None))
    torch.library.opcheck(operator, (x.detach().t(), torch.randn(6, 4)))


def test_compiled_whole() -> None:
    x = torch.randn(6, 32, requires_grad=True)
    compiled = torch.compile(lambda x: swiglu(x) * 2, fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, 2 * swiglu(x))
    y.sum().backward()
    assert x.grad is not None


def test_the_module_is_the_function() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(SwiGLU()(x), swiglu(x))
    assert torch.equal(SwiGLU()(x, x), swiglu(x, x))


def test_cost_is_what_a_person_counts() -> None:
    x = torch.randn(10, 80, requires_grad=True)
    with CountingMode() as counted:
        swiglu(x).backward(torch.ones(10, 40))
    costs = {r.name: r.cost for r in counted.records}
    forward, backward = costs["rooftop::swiglu"], costs["rooftop::swiglu_backward"]
    assert forward is not None
    assert backward is not None
    assert (forward.total_flops, forward.read_bytes, forward.write_bytes) == (6 * 400, 4 * 800, 4 * 400)
    assert (backward.total_flops, backward.read_bytes, backward.write_bytes) == (12 * 400, 4 * 1200, 4 * 800)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0],), TypeError, "gate must be a tensor, got list"),
        ((torch.arange(4),), TypeError, "gate must be bfloat16"),
        ((torch.eye(4).to_sparse(),), TypeError, "gate must be dense"),
        ((torch.zeros(2, 3),), ValueError, r"packed tensor must be \(..., 2 N\), got \(2, 3\)"),
        ((torch.tensor(1.0),), ValueError, "must have a dimension"),
        ((torch.zeros(2, 3), torch.zeros(3)), ValueError, r"expected up of gate's shape \(2, 3\), got \(3,\)"),
        ((torch.zeros(3), torch.zeros(3).half()), TypeError, "gate is torch.float32, up torch.float16"),
        ((torch.zeros(3), torch.zeros(3, device="meta")), ValueError, "gate is on cpu, up on meta"),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        swiglu(*arguments)  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [1, 7, 200, 1000, 4096, 11_008, 14_336, 50_257])
def test_gate_on_a_gpu(columns: int, dtype: torch.dtype) -> None:
    x = torch.randn(67, 2 * columns, dtype=dtype)
    assert_gate(x, device="cuda")
    assert_gate(*(half.contiguous() for half in x.chunk(2, -1)), device="cuda")


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    x = torch.randn(131_073, 2 * 16_384, device="cuda", dtype=torch.bfloat16)  # y has 2^31 + 16384
    y = swiglu(x)
    for row in (0, 65_536, 131_072):
        torch.testing.assert_close(y[row], by_torch(x[row].float()).bfloat16())
    gate, up = (half.contiguous() for half in x.chunk(2, -1))  # the kernel sees them as one row
    del x
    assert torch.equal(swiglu(gate, up), y)


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    x = torch.randn(64, 768, device="cuda")
    compiled = torch.compile(lambda x: swiglu(x).square(), fullgraph=True)
    torch.testing.assert_close(compiled(x), swiglu(x).square())
