"""Trilinear interpolation in CUDA C++: the reference, and the kernels themselves on the CPU (`cuda_on_cpu`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import trilinear_interpolate_cuda
from rooftop.kernels.lookups import cuda_interpolations as module
from rooftop.kernels.lookups.cuda_interpolations import kernel_for, trilinear_reference
from rooftop.kernels.operands.cuda_texts import cuda_text
from rooftop.launch import count_launches, cuda, fast_path, operators
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tensors(count: int, channels: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(count + channels)
    return torch.randn(count, 8, channels).to(dtype), torch.rand(count, 3) * 2 - 1


def eager(features: Tensor, points: Tensor) -> Tensor:
    """The operator as a user would write it in PyTorch, in the dtype of the features."""
    upper = ((points + 1) / 2).to(features.dtype)
    ends = torch.stack((1 - upper, upper), 2)  # (B, 3, 2)
    u, v, w = ends.unbind(1)
    weights = u[:, :, None, None] * v[:, None, :, None] * w[:, None, None, :]
    return (weights.flatten(1)[:, :, None] * features).sum(1)


def forward_and_gradients(function: object, features: Tensor, points: Tensor, dout: Tensor) -> list[Tensor]:
    inputs = [t.detach().clone().requires_grad_() for t in (features, points)]
    out = function(*inputs)  # type: ignore[operator]
    out.backward(dout.to(out.dtype))
    return [out.detach(), *(t.grad for t in inputs if t.grad is not None)]


def assert_gate(features: Tensor, points: Tensor) -> None:
    dout = torch.randn(features.shape[0], features.shape[2], device=features.device).to(features.dtype)
    ours = forward_and_gradients(trilinear_interpolate_cuda, features, points, dout)
    plain = forward_and_gradients(eager, features, points, dout)
    exact = forward_and_gradients(eager, features.double(), points.double(), dout.double())
    for name, *values in zip(("out", "dfeatures", "dpoints"), ours, plain, exact, strict=True):
        assert_as_accurate(*values, what=f"{name} of {tuple(features.shape)} {features.dtype}")


SHAPES = [(70, 32), (5, 300), (33, 17), (9, 1), (40, 6)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gate(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert_gate(*tensors(*shape, dtype=dtype))


KERNELS = {
    "trilinear_forward": ["__half, float, 4", "__nv_bfloat16, float, 8", "double, double, 2", "float, __half, 1",
                          "float, __half, 4", "float, float, 1", "float, float, 4"],
    "trilinear_backward": ["__half, float, 4", "__nv_bfloat16, float, 8", "double, double, 2", "float, float, 1"],
}  # fmt: skip


@pytest.fixture
def launches(compile_for_cpu: Callable[[str, Sequence[str]], None], cuda_on_cpu: Counter[str]) -> Counter[str]:
    """The launches on the CPU, whose kernels are compiled together."""
    compile_for_cpu(
        cuda_text(*module.CUDA_FILES), [f"{name}<{types}>" for name, each in KERNELS.items() for types in each]
    )
    return cuda_on_cpu


@pytest.mark.parametrize(
    ("shape", "dtype"), [((70, 32), torch.bfloat16), ((5, 300), torch.float16), ((33, 17), torch.float32)]
)
def test_gate_of_the_kernels_on_the_cpu(shape: tuple[int, int], dtype: torch.dtype, launches: Counter[str]) -> None:
    assert_gate(*tensors(*shape, dtype=dtype))
    assert launches == {"trilinear_forward": 1, "trilinear_backward": 1}


def test_the_kernels_have_the_gradients_of_finite_differences(launches: Counter[str]) -> None:
    features, points = (t.double().requires_grad_() for t in tensors(1, 2))
    assert torch.autograd.gradcheck(trilinear_interpolate_cuda, (features, points))
    assert launches["trilinear_backward"]


@pytest.mark.parametrize("wanted", [(True, False), (False, True)])
def test_a_gradient_comes_alone(wanted: tuple[bool, bool], launches: Counter[str]) -> None:
    inputs = [t.requires_grad_(w) for t, w in zip(tensors(6, 5), wanted, strict=True)]
    dout = torch.randn(6, 5)
    got = torch.autograd.grad(trilinear_interpolate_cuda(*inputs), [t for t in inputs if t.requires_grad], dout)
    expected = torch.autograd.grad(eager(*inputs), [t for t in inputs if t.requires_grad], dout)
    torch.testing.assert_close(got, expected)


def test_a_corner_is_its_feature_and_the_middle_the_mean() -> None:
    features, _ = tensors(8, 5)
    corners = torch.tensor([[i, j, k] for i in (-1.0, 1.0) for j in (-1.0, 1.0) for k in (-1.0, 1.0)])
    torch.testing.assert_close(trilinear_interpolate_cuda(features, corners), features[range(8), range(8)])
    torch.testing.assert_close(trilinear_interpolate_cuda(features, torch.zeros(8, 3)), features.mean(1))


def test_what_is_linear_stays_so_and_goes_on_outside() -> None:
    corners = torch.tensor([[i, j, k] for i in (-1.0, 1.0) for j in (-1.0, 1.0) for k in (-1.0, 1.0)])
    slope, points = torch.randn(3, 4), 3 * torch.randn(20, 3)
    features = (corners @ slope + 7).expand(20, 8, 4)
    exact = points @ slope + 7  # far outside, large terms cancel
    torch.testing.assert_close(trilinear_interpolate_cuda(features, points), exact, rtol=1e-4, atol=1e-4)


def test_it_agrees_with_grid_sample() -> None:
    features, points = tensors(1, 6)
    volume = features[0].t().reshape(1, 6, 2, 2, 2)  # (N, C, D, H, W): D is u, W is w
    grid = points.flip(1).reshape(1, 1, 1, 1, 3)
    expected = torch.nn.functional.grid_sample(volume, grid, align_corners=True).reshape(1, 6)
    torch.testing.assert_close(trilinear_interpolate_cuda(features, points), expected)


def test_points_in_half_precision_and_views(launches: Counter[str]) -> None:
    features, points = torch.randn(10, 4, 8).transpose(1, 2), torch.rand(10, 6)[:, ::2].half()
    expected = trilinear_reference(features, points)
    torch.testing.assert_close(trilinear_interpolate_cuda(features, points), expected)
    base = torch.randn(10 * 8 * 4 + 1)[1:].view(10, 8, 4)  # four bytes off alignment
    torch.testing.assert_close(trilinear_interpolate_cuda(base, points), trilinear_reference(base, points))


@pytest.mark.parametrize("shape", [(0, 5), (5, 0)])
def test_of_nothing(shape: tuple[int, int], launches: Counter[str]) -> None:
    features, points = (t.requires_grad_() for t in tensors(*shape))
    out = trilinear_interpolate_cuda(features, points)
    assert out.shape == shape
    out.sum().backward()
    assert not launches
    assert points.grad is not None
    assert not points.grad.any()


def test_nan_stays_with_its_point(launches: Counter[str]) -> None:
    features, points = tensors(6, 4)
    points[2, 1] = float("nan")
    assert trilinear_interpolate_cuda(features, points).isnan().all(1).tolist() == [i == 2 for i in range(6)]


def test_operator_checks_of_torch_library_and_the_gradient_check() -> None:
    features, points = (t.requires_grad_() for t in tensors(4, 6))
    torch.library.opcheck(torch.ops.rooftop.trilinear_interpolate_cuda.default, (features, points))
    backward = torch.ops.rooftop.trilinear_interpolate_cuda_backward.default
    for mask in ([True, True], [True, False], [False, True]):
        torch.library.opcheck(backward, (torch.randn(4, 6), features.detach(), points.detach(), mask))
    exact = [t.detach().double().requires_grad_() for t in (features, points)]
    assert torch.autograd.gradcheck(trilinear_interpolate_cuda, exact)
    out = trilinear_interpolate_cuda(*exact)
    (gradient,) = torch.autograd.grad(out.square().sum(), exact[0], create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative: use trilinear_reference"):
        gradient.sum().backward()
    plain = [t.detach() for t in exact]
    with pytest.raises(NotImplementedError, match="no forward-mode derivative: use trilinear_reference under jvp"):
        torch.func.jvp(lambda p: trilinear_interpolate_cuda(plain[0], p), (plain[1],), (plain[1],))


def test_an_eager_call_past_the_dispatcher_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    features, points = tensors(6, 8)
    assert operators._declared["trilinear_interpolate_cuda"].recorded is not None
    direct = forward_and_gradients(trilinear_interpolate_cuda, features, points, torch.ones(6, 8))
    monkeypatch.setattr(fast_path, "is_plain", lambda arguments: False)
    dispatched = forward_and_gradients(trilinear_interpolate_cuda, features, points, torch.ones(6, 8))
    assert len(direct) == 3
    assert all(map(torch.equal, direct, dispatched))


def test_compiled_whole() -> None:
    features, points = tensors(6, 8)
    compiled = torch.compile(lambda f, p: 2 * trilinear_interpolate_cuda(f, p), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features, points), 2 * trilinear_reference(features, points))


def test_cost_is_what_a_person_counts() -> None:
    features, points = (t.requires_grad_() for t in tensors(10, 4))
    with CountingMode() as counted:
        trilinear_interpolate_cuda(features, points).backward(torch.ones(10, 4))
    costs = {r.name: r.cost for r in counted.records}
    forward = costs["rooftop::trilinear_interpolate_cuda"]
    backward = costs["rooftop::trilinear_interpolate_cuda_backward"]
    assert forward is not None
    assert backward is not None
    assert (forward.total_flops, forward.read_bytes, forward.write_bytes) == (640, 4 * (320 + 30), 4 * 40)
    assert (backward.total_flops, backward.read_bytes) == (3 * 320, 4 * (320 + 30 + 40))
    assert backward.write_bytes == 4 * (320 + 30)


@pytest.mark.parametrize(
    ("features", "points", "error", "message"),
    [
        (torch.randn(3, 4, 5), torch.randn(3, 3), ValueError, r"features of shape \(B, 8, C\), got \(3, 4, 5\)"),
        (torch.randn(3, 8, 5), torch.randn(3, 2), ValueError, r"points of shape \(B, 3\), got \(3, 2\)"),
        (torch.randn(3, 8, 5), torch.randn(4, 3), ValueError, "3 cells, 4 points"),
        (torch.ones(3, 8, 5, dtype=torch.int64), torch.randn(3, 3), TypeError, "features must be bfloat16"),
        (torch.randn(3, 8, 5), [[0.0] * 3] * 3, TypeError, "points must be a tensor, got list"),
        (torch.randn(3, 8, 5), torch.randn(3, 3, device="meta"), ValueError, "features is on cpu, points on meta"),
    ],
)
def test_wrong_arguments(features: Tensor, points: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trilinear_interpolate_cuda(features, points)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile_without_spills(arch: str) -> None:
    pytest.importorskip("cuda.core")
    for dtype in (torch.float16, torch.float64):
        features, points = (t.to(dtype) for t in tensors(4, 64))
        for direction in ("forward", "backward"):
            name, _, _ = kernel_for(f"trilinear_{direction}", points, (features,))
            binary = cuda.compile(cuda_text(*module.CUDA_FILES), name, arch=arch).binary
            assert binary.spill_bytes == 0, binary.log


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (100_003, 32), (1000, 1024)])
def test_gate_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    with count_launches() as launches:
        assert_gate(*(t.cuda() for t in tensors(*shape, dtype=dtype)))
    assert {name.partition("<")[0] for name in launches} == {"trilinear_forward", "trilinear_backward"}


@pytest.mark.gpu
def test_captured_in_a_cuda_graph_on_another_stream() -> None:
    features, points = (t.cuda() for t in tensors(1000, 32))
    torch.cuda.synchronize()
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):  # the first launch, which loads the kernel, is in the capture
        out = trilinear_interpolate_cuda(features, points)
    features.copy_(torch.randn_like(features))
    graph.replay()
    torch.testing.assert_close(out, trilinear_reference(features, points))


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    features = torch.randn(2_100_000, 8, 128, device="cuda", dtype=torch.float16)
    points = torch.rand(2_100_000, 3, device="cuda") * 2 - 1
    out = trilinear_interpolate_cuda(features, points)
    for some in (slice(0, 5), slice(2_099_990, 2_100_000)):
        torch.testing.assert_close(out[some], trilinear_reference(features[some], points[some]), rtol=1e-2, atol=1e-2)


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    features, points = (t.cuda() for t in tensors(64, 32))
    compiled = torch.compile(lambda f, p: trilinear_interpolate_cuda(f, p).relu(), fullgraph=True)
    torch.testing.assert_close(compiled(features, points), trilinear_reference(features, points).relu())
