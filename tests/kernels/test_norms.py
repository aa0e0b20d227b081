"""Layer norm, both ways: the CPU implementation, and (in a process of its own) the Triton kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import layer_norm
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL = (1, 7, 64, 100, 200, 512, 768, 1000, 1024, 1536, 2048)
GPU_SIZES = (*SMALL, 2560, 3072, 4096, 5120, 8192, 11008, 16384, 20815, 32768, 50257, 262144)


def forward_and_gradients(
    norm: object, x: Tensor, weight: Tensor | None, bias: Tensor | None, dy: Tensor
) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() if t is not None else None for t in (x, weight, bias)]
    y = norm(inputs[0], x.shape[-1:], *inputs[1:])  # type: ignore[operator]
    y.backward(dy.to(y.dtype))
    return [y.detach(), *(t.grad for t in inputs if t is not None and t.grad is not None)]


def assert_gate(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, kernels: tuple[str, ...] = (), device: str = "cpu"
) -> None:
    """Output and gradients pass the numerics gate, and (interpreted, or on a GPU) come from the kernels."""
    x, weight, bias = (t.to(device) if t is not None else None for t in (x, weight, bias))  # type: ignore[assignment]
    dy = torch.randn_like(x)
    with count_launches() as launches:
        ours = forward_and_gradients(layer_norm, x, weight, bias, dy)
    if (INTERPRETED or device == "cuda") and x.numel():
        assert launches
        assert set(kernels) <= launches.keys()
    doubles = (t.double() if t is not None else None for t in (x, weight, bias))
    eager = forward_and_gradients(F.layer_norm, x, weight, bias, dy)
    exact = forward_and_gradients(F.layer_norm, *doubles, dy.double())  # type: ignore[arg-type]
    names = ["y", "dx", *(name for name, t in (("dweight", weight), ("dbias", bias)) if t is not None)]
    for name, *values in zip(names, ours, eager, exact, strict=True):
        assert_as_accurate(*values, what=f"{name} of {tuple(x.shape)} {x.dtype}")


def tensors(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(sum(shape))
    x = (2 * torch.randn(*shape) + 1).to(dtype)
    return x, torch.randn(shape[-1]).to(dtype), torch.randn(shape[-1]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 1), (5, 7), (2, 3, 64), (33, 768), (9, 1000), (0, 16), (3, 2048)])
def test_gate(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    assert_gate(*tensors(*shape, dtype=dtype), kernels=("layer_norm_forward", "layer_norm_backward"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_of_rows_longer_than_a_tile(dtype: torch.dtype) -> None:
    kernels = ("layer_norm_forward_long", "layer_norm_row_sums", "layer_norm_backward_long")
    assert_gate(*tensors(5, 33_001, dtype=dtype), kernels=kernels)


# From 32 columns on: of fewer sums over the rows, PyTorch's worst error can be 0 by luck.
@given(st.integers(1, 40), st.integers(32, 300), st.booleans(), st.booleans())
@settings(max_examples=15, deadline=None)
def test_gate_of_any_shape_with_and_without_weight_and_bias(rows: int, columns: int, w: bool, b: bool) -> None:
    x, weight, bias = tensors(rows, columns)
    assert_gate(x, weight if w else None, bias if b else None)


def test_rows_are_normal_and_a_shift_changes_nothing() -> None:
    x, _, _ = tensors(17, 300)
    y = layer_norm(x, 300)
    torch.testing.assert_close(y.mean(1), torch.zeros(17), rtol=0, atol=1e-5)
    torch.testing.assert_close(y.var(1, unbiased=False), torch.ones(17), rtol=1e-4, atol=0)
    torch.testing.assert_close(layer_norm(x + 64, 300), y, rtol=1e-3, atol=1e-4)


def test_a_large_offset_does_not_swamp_the_variance() -> None:
    x = 1e4 + torch.randn(9, 777)
    assert_gate(x, None, None)
    assert layer_norm(x, 777).std(unbiased=False).item() == pytest.approx(1, abs=0.01)


def test_views_with_any_strides() -> None:
    base = torch.randn(40, 130)
    for view in (base[::2], base[:, 5:70], base.t(), base[:, ::2], base[3:4].expand(7, 130)):
        torch.testing.assert_close(
            layer_norm(view, view.shape[-1:]), F.layer_norm(view, view.shape[-1:]), rtol=1e-5, atol=1e-5
        )


def test_weights_and_gradients_with_any_strides() -> None:
    x, weight, bias = torch.randn(6, 40), torch.randn(40, 3)[:, 1], torch.randn(1).expand(40)
    assert_gate(x, weight, bias)
    ours, theirs = (t.requires_grad_() for t in (x.clone(), x.clone()))
    layer_norm(ours, 40, weight).sum().backward()  # an expanded gradient: all strides 0
    F.layer_norm(theirs, (40,), weight).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, False), (False, False, True)])
@pytest.mark.parametrize("columns", [48, 1_000, 33_001])
def test_a_gradient_comes_alone(columns: int, wanted: tuple[bool, bool, bool]) -> None:
    inputs = [t.requires_grad_(w) for t, w in zip(tensors(5, columns), wanted, strict=True)]
    dy = torch.randn(5, columns)
    layer_norm(inputs[0], columns, *inputs[1:]).backward(dy)
    ours = [t.grad for t in inputs]
    for t in inputs:
        t.grad = None
    F.layer_norm(inputs[0], (columns,), *inputs[1:]).backward(dy)
    for t, mine, needed in zip(inputs, ours, wanted, strict=True):
        assert (mine is not None) == needed
        if mine is not None:
            torch.testing.assert_close(mine, t.grad, rtol=1e-4, atol=1e-4)


def test_several_normalized_dimensions() -> None:
    x, weight = torch.randn(4, 3, 5, 6), torch.randn(5, 6)
    torch.testing.assert_close(layer_norm(x, (5, 6), weight), F.layer_norm(x, (5, 6), weight), rtol=1e-5, atol=1e-5)


def test_a_bad_row_stays_alone() -> None:
    x = torch.randn(6, 50)
    x[1, 3], x[4, 0] = float("nan"), float("inf")
    y = layer_norm(x, 50)
    assert y[[1, 4]].isnan().all()
    good = [0, 2, 3, 5]
    torch.testing.assert_close(y[good], F.layer_norm(x[good], (50,)), rtol=1e-5, atol=1e-5)


def test_float32_weights_with_half_precision_rows() -> None:
    x, weight, bias = tensors(8, 96)
    x = x.bfloat16()
    exact = F.layer_norm(x.double(), (96,), weight.double(), bias.double())
    assert_as_accurate(layer_norm(x, 96, weight, bias), exact.bfloat16(), exact)


def test_ten_runs_give_the_same_bits() -> None:
    x, weight, bias = tensors(65, 200)
    dy = torch.randn_like(x)
    first, *others = [forward_and_gradients(layer_norm, x, weight, bias, dy) for _ in range(10)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_gradients_against_finite_differences() -> None:
    x, weight, bias = (t.double().requires_grad_() for t in tensors(3, 5))
    assert torch.autograd.gradcheck(lambda x, w, b: layer_norm(x, 5, w, b), (x, weight, bias))


def test_derivatives_that_it_has_not_are_refused() -> None:
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer_norm(x, 5).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), x)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: layer_norm(x, 5), (x.detach(),), (x.detach(),))


def test_on_meta_tensors_only_shapes_are_made() -> None:
    assert layer_norm(torch.empty(3, 5, device="meta"), 5).shape == (3, 5)


def test_operator_checks_of_torch_library() -> None:
    x, weight, bias = (t.requires_grad_() for t in tensors(4, 6))
    torch.library.opcheck(torch.ops.rooftop.layer_norm.default, (x, weight, bias, 1e-5))
    torch.library.opcheck(torch.ops.rooftop.layer_norm.default, (x.detach(), None, None, 1e-5))


def test_compiled_whole() -> None:
    x, weight, bias = tensors(6, 32)
    compiled = torch.compile(lambda x, w, b: layer_norm(x, 32, w, b) * 2, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, bias), 2 * layer_norm(x, 32, weight, bias))


def test_autocast_gives_float32_as_pytorch_does() -> None:
    x, weight, bias = tensors(4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer_norm(x.bfloat16(), 32, weight, bias).dtype == torch.float32


def test_cost_is_what_a_person_counts() -> None:
    x, weight, bias = (t.requires_grad_() for t in tensors(10, 40))
    with CountingMode() as counted:
        layer_norm(x, 40, weight, bias).backward(torch.ones(10, 40))
    costs = {r.name: r.cost for r in counted.records}
    forward, backward = costs["rooftop::layer_norm"], costs["rooftop::layer_norm_backward"]
    assert forward is not None
    assert backward is not None
    assert (forward.total_flops, forward.read_bytes, forward.write_bytes) == (7 * 400, 4 * 480, 4 * 420)
    assert (backward.total_flops, backward.write_bytes) == (13 * 400, 4 * 480)
    assert backward.read_bytes == 4 * (400 + 400 + 40 + 20)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.randn(3, 4), 5), ValueError, r"expected x of shape \(\.\.\., 5\), got \(3, 4\)"),
        ((torch.randn(4), (3, 4)), ValueError, "expected x of shape"),
        ((torch.randn(3, 0), 0), ValueError, "at least one element"),
        ((torch.randn(3, 4), ()), ValueError, "at least one element"),
        ((torch.ones(3, 4, dtype=torch.int64), 4), TypeError, "x must be bfloat16"),
        (([1.0, 2.0], 2), TypeError, "x must be a tensor, got list"),
        ((torch.randn(3, 4), 4.0), TypeError, "int or a sequence of ints, got 4.0"),
        ((torch.randn(3, 4), 4, [1.0] * 4), TypeError, "weight must be a tensor, got list"),
        ((torch.eye(4).to_sparse(), 4), TypeError, "x must be dense"),
        ((torch.randn(3, 4), 4, torch.randn(3)), ValueError, r"expected weight of shape \(4,\), got \(3,\)"),
        ((torch.randn(3, 4), 4, torch.randn(4, device="meta")), ValueError, "x is on cpu, weight on meta"),
    ],
)
def test_wrong_arguments(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer_norm(*arguments)  # type: ignore[arg-type]


@pytest.mark.skipif(INTERPRETED, reason="this is the outer process")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 40


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", GPU_SIZES)
def test_gate_on_a_gpu(columns: int, dtype: torch.dtype) -> None:
    assert_gate(*tensors(67, columns, dtype=dtype), device="cuda")


@pytest.mark.gpu
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    x = torch.randn(131_073, 16_384, device="cuda", dtype=torch.bfloat16)  # 2^31 + 16384
    y = layer_norm(x, 16_384)
    for row in (0, 65_536, 131_072):
        torch.testing.assert_close(y[row], F.layer_norm(x[row], (16_384,)), rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_ten_runs_give_the_same_bits_on_a_gpu() -> None:
    x, weight, bias = (t.cuda() for t in tensors(5000, 1000, dtype=torch.bfloat16))
    dy = torch.randn_like(x)
    first, *others = [forward_and_gradients(layer_norm, x, weight, bias, dy) for _ in range(10)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    x, weight, bias = (t.cuda() for t in tensors(64, 768))
    compiled = torch.compile(lambda x, w, b: layer_norm(x, 768, w, b).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(x, weight, bias), layer_norm(x, 768, weight, bias).relu())
