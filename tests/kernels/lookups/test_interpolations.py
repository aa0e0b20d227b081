"""Trilinear interpolation, both ways: the CPU implementation, and (in a separate process) the Triton kernels
interpreted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import trilinear_interpolate, trilinear_interpolate_cuda
from rooftop.kernels.lookups.cuda_interpolations import trilinear_reference
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(70, 32), (5, 300), (33, 17), (9, 1), (40, 6), (5, 520)]
CORNERS = torch.tensor([[i, j, k] for i in (-1.0, 1.0) for j in (-1.0, 1.0) for k in (-1.0, 1.0)])


def tensors(count: int, channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(count + channels)
    return torch.randn(count, 8, channels).to(dtype), torch.rand(count, 3) * 2 - 1


def eager(features: Tensor, points: Tensor) -> Tensor:
    """The operator as a user would write it in PyTorch, in the dtype of the features."""
    upper = ((points + 1) / 2).to(features.dtype)
    u, v, w = torch.stack((1 - upper, upper), 2).unbind(1)  # each of shape (B, 2)
    weights = u[:, :, None, None] * v[:, None, :, None] * w[:, None, None, :]
    return (weights.flatten(1)[:, :, None] * features).sum(1)


def forward_and_gradients(
    function: Callable[[Tensor, Tensor], Tensor], features: Tensor, points: Tensor, dout: Tensor
) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in (features, points)]
    out = function(*inputs)
    out.backward(dout.to(out.dtype))
    return [out.detach(), *(t.grad for t in inputs if t.grad is not None)]


def assert_gate(features: Tensor, points: Tensor) -> None:
    """Output and gradients pass the numerics gate, and (interpreted, or on a GPU) come from the kernels."""
    dout = torch.randn(features.shape[0], features.shape[2], device=features.device).to(features.dtype)
    with count_launches() as launches:
        ours = forward_and_gradients(trilinear_interpolate, features, points, dout)
    if INTERPRETED or features.device.type == "cuda":
        assert launches == {"trilinear_forward": 1, "trilinear_backward": 1}
    plain = forward_and_gradients(eager, features, points, dout)
    exact = forward_and_gradients(eager, features.double(), points.double(), dout.double())
    for name, *values in zip(("out", "dfeatures", "dpoints"), ours, plain, exact, strict=True):
        assert_as_accurate(*values, what=f"{name} of {tuple(features.shape)} {features.dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gate(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_gate(*tensors(*shape, dtype=dtype))


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_a_gradient_comes_alone(wanted: tuple[bool, bool]) -> None:
    inputs = [t.requires_grad_(w) for t, w in zip(tensors(6, 5), wanted, strict=True)]
    dout = torch.randn(6, 5)
    got = torch.autograd.grad(trilinear_interpolate(*inputs), [t for t in inputs if t.requires_grad], dout)
    expected = torch.autograd.grad(eager(*inputs), [t for t in inputs if t.requires_grad], dout)
    torch.testing.assert_close(got, expected)


def test_a_corner_is_its_feature_and_the_middle_the_mean() -> None:
    features, _ = tensors(8, 5)
    torch.testing.assert_close(trilinear_interpolate(features, CORNERS), features[range(8), range(8)])
    torch.testing.assert_close(trilinear_interpolate(features, torch.zeros(8, 3)), features.mean(1))


def test_what_is_linear_stays_so_and_goes_on_outside() -> None:
    slope, points = torch.randn(3, 4), 3 * torch.randn(20, 3)
    features = (CORNERS @ slope + 7).expand(20, 8, 4)
    exact = points @ slope + 7  # far outside, large terms cancel
    torch.testing.assert_close(trilinear_interpolate(features, points), exact, rtol=1e-4, atol=1e-4)


def test_it_agrees_with_grid_sample() -> None:
    features, points = tensors(1, 6)
    volume = features[0].t().reshape(1, 6, 2, 2, 2)  # (N, C, D, H, W): D is u, W is w
    grid = points.flip(1).reshape(1, 1, 1, 1, 3)
    expected = torch.nn.functional.grid_sample(volume, grid, align_corners=True).reshape(1, 6)
    torch.testing.assert_close(trilinear_interpolate(features, points), expected)


def test_points_in_half_precision_and_views() -> None:
    features, points = torch.randn(10, 4, 8).transpose(1, 2), torch.rand(10, 6)[:, ::2].half()
    torch.testing.assert_close(trilinear_interpolate(features, points), eager(features, points.float()))
    base = torch.randn(10 * 8 * 4 + 1)[1:].view(10, 8, 4)  # four bytes off alignment
    torch.testing.assert_close(trilinear_interpolate(base, points), eager(base, points.float()))
    out = trilinear_interpolate(features.requires_grad_(), points.requires_grad_())
    out.sum().backward()  # an expanded gradient: all strides 0
    assert points.grad is not None
    assert points.grad.dtype == torch.float16
    assert features.grad is not None
    torch.testing.assert_close(features.grad.sum(1), torch.ones(10, 4))  # weights sum to one


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_of_nothing(shape: tuple[int, int]) -> None:
    features, points = (t.requires_grad_() for t in tensors(*shape))
    with count_launches() as launches:
        out = trilinear_interpolate(features, points)
        out.sum().backward()
    assert out.shape == shape
    assert not launches
    assert points.grad is not None
    assert not points.grad.any()


def test_nan_stays_with_its_point() -> None:
    features, points = tensors(6, 4)
    points[2, 1] = float("nan")
    features[4, 3, 1] = float("nan")
    wrong = trilinear_interpolate(features, points).isnan()
    assert wrong.all(1).tolist() == [i == 2 for i in range(6)]
    assert wrong[4].tolist() == [False, True, False, False]


def test_all_runs_give_the_same_bits() -> None:
    features, points = tensors(9, 37)
    dout = torch.randn(9, 37)
    first, *others = [forward_and_gradients(trilinear_interpolate, features, points, dout) for _ in range(3)]
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_operator_checks_of_torch_library_and_the_gradient_check() -> None:
    features, points = (t.requires_grad_() for t in tensors(4, 6))
    torch.library.opcheck(torch.ops.rooftop.trilinear_interpolate.default, (features, points))
    backward = torch.ops.rooftop.trilinear_interpolate_backward.default
    for mask in ([True, True], [False, True]):
        torch.library.opcheck(backward, (torch.randn(4, 6), features.detach(), points.detach(), mask))
    exact = [t.detach().double().requires_grad_() for t in (features, points)]
    assert torch.autograd.gradcheck(trilinear_interpolate, exact)


def test_derivatives_that_it_has_not_are_refused() -> None:
    features, points = (t.requires_grad_() for t in tensors(4, 6))
    (gradient,) = torch.autograd.grad(trilinear_interpolate(features, points).sum(), points, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"trilinear_interpolate has no second derivative"):
        gradient.sum().backward()
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use trilinear_reference"):
        torch.func.jvp(lambda p: trilinear_interpolate(features.detach(), p), (points.detach(),), (points.detach(),))


def test_compiled_whole() -> None:
    features, points = tensors(6, 8)
    compiled = torch.compile(lambda f, p: 2 * trilinear_interpolate(f, p), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features, points), 2 * eager(features, points))


def test_autocast_changes_nothing() -> None:
    features, points = tensors(6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(trilinear_interpolate(features, points), trilinear_interpolate(features, points))
        assert trilinear_interpolate(features, points).dtype == torch.float32


def test_on_meta_tensors_only_shapes_are_made() -> None:
    features, points = (t.to("meta") for t in tensors(6, 8))
    assert trilinear_interpolate(features, points).shape == (6, 8)


def test_both_twins_cost_the_same() -> None:
    costs = []
    for function in (trilinear_interpolate, trilinear_interpolate_cuda):
        features, points = (t.requires_grad_() for t in tensors(10, 4))
        with CountingMode() as counted:
            function(features, points).backward(torch.ones(10, 4))
        costs.append([r.cost for r in counted.records if r.name.startswith("rooftop::")])
    (forward, backward), twin = costs
    assert [forward, backward] == twin
    assert forward is not None
    assert backward is not None
    assert (forward.total_flops, forward.read_bytes, forward.write_bytes) == (640, 4 * (320 + 30), 4 * 40)
    assert (backward.read_bytes, backward.write_bytes) == (4 * (320 + 30 + 40), 4 * (320 + 30))


@pytest.mark.parametrize(
    ("features", "points", "error", "message"),
    [
        (torch.randn(3, 4, 5), torch.randn(3, 3), ValueError, r"^trilinear_interpolate: expected features of shape"),
        (torch.randn(3, 8, 5), torch.randn(3, 2), ValueError, r"points of shape \(B, 3\), got \(3, 2\)"),
        (torch.randn(3, 8, 5), torch.randn(4, 3), ValueError, "3 cells, 4 points"),
        (torch.ones(3, 8, 5, dtype=torch.int64), torch.randn(3, 3), TypeError, "features must be bfloat16"),
        (torch.randn(3, 8, 5), [[0.0] * 3] * 3, TypeError, "points must be a tensor, got list"),
        (torch.randn(3, 8, 5), torch.randn(3, 3, device="meta"), ValueError, "features is on cpu, points on meta"),
    ],
)
def test_wrong_arguments(features: Tensor, points: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trilinear_interpolate(features, points)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 35


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (100_003, 32), (1000, 1024)])
def test_gate_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_gate(*(t.cuda() for t in tensors(*shape, dtype=dtype)))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    features = torch.randn(2_100_000, 8, 128, device="cuda", dtype=torch.float16)
    points = torch.rand(2_100_000, 3, device="cuda") * 2 - 1
    out = trilinear_interpolate(features, points)
    for some in (slice(0, 5), slice(2_099_990, 2_100_000)):
        expected = trilinear_reference(features[some], points[some])
        torch.testing.assert_close(out[some], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    features, points = (t.cuda() for t in tensors(64, 32))
    compiled = torch.compile(lambda f, p: trilinear_interpolate(f, p).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(features, points), eager(features, points).relu())
