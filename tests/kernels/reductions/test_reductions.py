"""Reductions, both ways: the CPU implementation, and (in a separate process) the Triton kernels interpreted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop import kernels
from rooftop.cost import CountingMode
from rooftop.kernels import amax, amin, argmax, argmin, mean, norm, reduction_plan, sum
from rooftop.kernels.operands.launch_data import ANY_BYTES
from rooftop.kernels.reductions import plans, tables
from rooftop.launch import INTERPRETED, count_launches
from rooftop.launch import counters as counting
from rooftop.testing import assert_as_accurate

Function = Callable[..., Tensor]
NORMS = {"norm1": 1, "norm2": 2, "norm_inf": math.inf}
DIFFERENTIABLE = ["sum", "mean", "amax", "amin", *NORMS]
PLACES = ["argmax", "argmin"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def ours(kind: str) -> Function:
    if kind in NORMS:
        return lambda x, dim=None, keepdim=False: norm(x, NORMS[kind], dim, keepdim)
    return getattr(kernels, kind)  # type: ignore[no-any-return]


def by_torch(kind: str) -> Function:
    if kind in NORMS:
        return lambda x, dim=None, keepdim=False: torch.linalg.vector_norm(x, NORMS[kind], dim, keepdim)
    if kind in ("amax", "amin"):
        return lambda x, dim=None, keepdim=False: getattr(torch, kind)(x, () if dim is None else dim, keepdim)
    return getattr(torch, kind)  # type: ignore[no-any-return]


def output_and_gradient(function: Function, x: Tensor, dim: Any, dy: Tensor | None = None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = function(x, dim)
    y.backward(torch.linspace(1, 2, y.numel(), device=y.device).reshape(y.shape).to(y.dtype) if dy is None else dy)
    assert x.grad is not None
    return [y.detach(), x.grad]


def assert_gate(kind: str, x: Tensor, dim: Any, device: str = "cpu") -> None:
    """Output and gradient pass the numerics gate, and (interpreted, or on a GPU) come from the kernels.

    For a single result, PyTorch's error can be 0 by luck. So the result and its gradient may be off by a few roundings.
    """
    x = x.to(device)
    with count_launches() as launches:
        mine = output_and_gradient(ours(kind), x, dim)
    if (INTERPRETED or device == "cuda") and x.numel():
        assert launches["reduce_tiles"] >= 1
        gradients = launches["spread_gradient"] + launches["share_gradient"]
        assert gradients == (kind not in ("sum", "mean"))
    eager, exact = (output_and_gradient(by_torch(kind), t, dim) for t in (x, x.double()))
    few = 32 * torch.finfo(x.dtype).eps
    for what, got, plain, truth in zip(("y", "dx"), mine, eager, exact, strict=True):
        if mine[0].numel() == 1:
            torch.testing.assert_close(got, truth.to(x.dtype), rtol=few, atol=few)
        else:
            assert_as_accurate(got, plain, truth, what=f"{what} of {kind} {tuple(x.shape)} {x.dtype} over {dim}")


def assert_places(x: Tensor, dim: int | None) -> None:
    for kind in PLACES:
        assert torch.equal(ours(kind)(x, dim), by_torch(kind)(x, dim)), (kind, x.shape, x.dtype, dim)


def values(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(math.prod(shape) + len(shape))
    return (2 * torch.randn(shape) + 1).to(dtype)


CASES = [
    ((7,), None),
    ((6, 40), 1),
    ((40, 6), 0),
    ((4, 5, 24), 1),
    ((3, 5, 7), (0, 2)),
    ((3, 0, 2), 0),
    ((2, 999), None),
]


@pytest.mark.parametrize("kind", DIFFERENTIABLE)
@pytest.mark.parametrize(("shape", "dim"), CASES)
def test_gate(shape: tuple[int, ...], dim: Any, kind: str) -> None:
    assert_gate(kind, values(*shape), dim)


@pytest.mark.parametrize("kind", ["mean", "amax", "norm2"])
@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize(("shape", "dim"), CASES[:3])
def test_gate_of_half_precision(shape: tuple[int, ...], dim: Any, dtype: torch.dtype, kind: str) -> None:
    assert_gate(kind, values(*shape, dtype=dtype), dim)


@pytest.mark.parametrize("dtype", DTYPES)
def test_places(dtype: torch.dtype) -> None:
    for shape, dim in CASES:
        if not isinstance(dim, tuple):
            assert_places(values(*shape, dtype=dtype), dim)


@pytest.fixture(params=[True, False], ids=["last combines", "second kernel"])
def last_combines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Use tiles so small that even a few elements are split, and test both ways to combine the parts."""
    split = tables.SplitConfig(4, request.param)
    monkeypatch.setattr(tables, "SPLIT", split)
    monkeypatch.setattr(tables, "ALL", (tables.AllConfig(ANY_BYTES, 256, 4, split),))
    for table in ("ROWS", "PLACES"):
        monkeypatch.setattr(tables, table, (tables.RowConfig(ANY_BYTES, 2, 256, 4),))
    monkeypatch.setattr(tables, "COLUMNS", tables.ColumnConfig(64, 1024, 4, split=split))
    plans.choose.cache_clear()
    yield bool(request.param)
    plans.choose.cache_clear()


@pytest.mark.parametrize("kind", ["mean", "norm2", "norm_inf", "amin", "argmax"])
@pytest.mark.parametrize(("shape", "dim"), [((502,), None), ((2003,), None), ((3, 300), 1), ((101, 24), 0)])
def test_what_several_programs_split(last_combines: bool, shape: tuple[int, ...], dim: Any, kind: str) -> None:
    x = values(*shape)
    for _ in range(2 if kind == "mean" else 1):  # the second call uses the counters that the first call left
        with count_launches() as launches:
            y = ours(kind)(x, dim)
        torch.testing.assert_close(y, by_torch(kind)(x, dim), rtol=1e-5, atol=1e-4)
        if INTERPRETED:
            assert launches["reduce_tiles"] == 1
            assert launches["combine_partials"] == (not last_combines)
            assert not any(zeros.any() for zeros in counting._of_stream.values())


def test_nan_and_ties_across_programs(last_combines: bool) -> None:
    x = values(502)
    x[[300, 400, 450]] = 50.0
    x[[200, 350]] = -50.0
    assert (argmax(x), argmin(x), amax(x), amin(x)) == (300, 200, 50, -50)
    x[[399, 470]] = math.nan
    assert (argmax(x), argmin(x)) == (399, 399)
    assert all(f(x).isnan() for f in (amax, amin, sum, norm))
    mine, truth = (output_and_gradient(f("amax"), (torch.arange(502) % 40).float(), None) for f in (ours, by_torch))
    torch.testing.assert_close(mine, truth)
    assert_places(torch.full((502,), -math.inf), None)
    assert_places(torch.full((50, 24), math.inf), 0)


def test_ten_runs_give_the_same_bits(last_combines: bool) -> None:
    for x, dim in ((values(502), None), (values(50, 24), 0)):
        first, *others = [norm(x, 2, dim) for _ in range(3 if INTERPRETED else 10)]
        assert all(torch.equal(first, other) for other in others)


# The gate is not used, because for few elements PyTorch's largest error can be 0 by luck.
@given(st.lists(st.integers(1, 6), max_size=5), st.data(), st.sampled_from([*DIFFERENTIABLE, *PLACES]))
@settings(max_examples=40, deadline=None)
def test_any_dimensions_and_strides(shape: list[int], data: st.DataObject, kind: str) -> None:
    x = values(*shape)
    x = x.permute(data.draw(st.permutations(range(x.dim()))))
    if x.dim():
        x = x[:: data.draw(st.integers(1, 2))]
    some = st.lists(st.integers(-x.dim(), x.dim() - 1), unique_by=lambda d: d % x.dim()) if x.dim() else st.just([])
    one = st.sampled_from([None, *range(x.dim())])
    dim, keepdim = data.draw(one if kind in PLACES else some), data.draw(st.booleans())
    with count_launches() as launches:
        mine = ours(kind)(x, dim, keepdim)
    plan = reduction_plan("norm" if kind in NORMS else kind, x, dim, ord=NORMS.get(kind, 2))
    assert launches == Counter(plan.kernels)
    torch.testing.assert_close(mine, by_torch(kind)(x, dim, keepdim), rtol=1e-5, atol=1e-5)
    if kind in DIFFERENTIABLE:
        mine, truth = (output_and_gradient(f(kind), x, dim)[1] for f in (ours, by_torch))
        torch.testing.assert_close(mine, truth, rtol=1e-5, atol=1e-5)


def test_views_are_read_where_they_are() -> None:
    """After dimensions are merged by their strides, two kept and two reduced dimensions need no copy, nor does an
    expanded dimension."""
    base = values(4, 6, 5, 8)
    image = base.to(memory_format=torch.channels_last)
    views = {
        "channels last, over the image": (image, (2, 3)),
        "channels last, over all but channels": (image, (0, 2, 3)),
        "over all but channels": (base, (0, 2, 3)),
        "transposed, all": (base.permute(3, 1, 0, 2), None),
        "some of the rows": (base[:, :, 1:4], 3),
        "expanded": (values(6, 1).expand(6, 7), 1),
        "expanded, kept": (values(1, 40).expand(6, 40), 1),
    }
    for what, (x, dim) in views.items():
        dims = tuple(range(x.dim())) if dim is None else (dim,) if isinstance(dim, int) else dim
        assert plans.view_of(x.shape, x.stride(), dims, False) is not None, what
        torch.testing.assert_close(sum(x, dim), torch.sum(x, dim), msg=what)
        torch.testing.assert_close(amax(x, dim), torch.amax(x, () if dim is None else dim), msg=what)


def test_the_gradient_has_the_layout_of_the_input() -> None:
    x = values(2, 8, 3, 5).to(memory_format=torch.channels_last)
    dx = output_and_gradient(amax, x, (2, 3))[1]
    assert dx.is_contiguous(memory_format=torch.channels_last)
    assert sum(x.requires_grad_()).grad_fn is not None


def test_the_gradient_of_an_expanded_input_whose_gradient_needs_a_copy() -> None:
    x = values(1, 3, 1, 5, 6).expand(2, 3, 4, 5, 6)  # needs no copy, but its gradient without the zeros does
    for kind in ("amax", "norm2"):
        mine, truth = (output_and_gradient(f(kind), x, (1, 3))[1] for f in (ours, by_torch))
        torch.testing.assert_close(mine, truth)


def test_a_large_offset_does_not_swamp_the_differences() -> None:
    for kind in ("mean", "norm2"):
        assert_gate(kind, 1e4 + torch.randn(3, 2000), 1)
        assert_gate(kind, 1e4 + torch.randn(1500, 4), 0)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_integers_and_booleans(dtype: torch.dtype) -> None:
    x = torch.randint(0, 2, (5, 70)) if dtype == torch.bool else torch.randint(-100, 100, (5, 70))
    x = x.to(dtype)
    for dim in (0, 1, None):
        mine, truth = sum(x, dim), torch.sum(x, dim)
        assert mine.dtype == truth.dtype == torch.int64
        assert torch.equal(mine, truth)
        for kind in ("amax", "amin"):
            mine, truth = ours(kind)(x, dim), by_torch(kind)(x, dim)
            assert mine.dtype == dtype
            assert torch.equal(mine, truth)
        assert_places(x.to(torch.uint8) if dtype == torch.bool else x, dim)
    assert torch.equal(argmax(x, 1), argmax(x.to(torch.int64), 1))
    assert torch.equal(mean(x, 1, dtype=torch.float32), torch.mean(x, 1, dtype=torch.float32))


def test_integers_at_their_limits() -> None:
    limits = torch.iinfo(torch.int64)
    x = torch.tensor([[limits.min, limits.min + 1], [limits.max, limits.max - 1]])
    assert amax(x, 1).tolist() == [limits.min + 1, limits.max]
    assert argmax(x, 1).tolist() == [1, 0]
    assert argmin(x[:, :1]) == 0
    assert sum(torch.full((3,), 2**31 - 1, dtype=torch.int32)) == 3 * (2**31 - 1)


def test_a_dtype_is_what_pytorch_casts_to_first() -> None:
    x = values(8, 96, dtype=torch.bfloat16)
    for dtype in (torch.float32, torch.float64, torch.float16, torch.int32, torch.int64):
        torch.testing.assert_close(sum(x, 1, dtype=dtype), torch.sum(x, 1, dtype=dtype))
    torch.testing.assert_close(norm(x, dtype=torch.float32), torch.linalg.vector_norm(x, dtype=torch.float32))
    torch.testing.assert_close(sum(x > 1, dtype=torch.float32), torch.sum(x > 1, dtype=torch.float32))
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    mean(mine, 1, dtype=torch.float32).sum().backward()
    torch.mean(theirs, 1, dtype=torch.float32).sum().backward()
    assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]


def test_nothing() -> None:
    x = torch.empty(3, 0)
    assert sum(x) == 0
    assert torch.equal(sum(x, 1), torch.zeros(3))
    assert mean(x).isnan()
    assert torch.equal(norm(x, 1, dim=1), torch.zeros(3))
    assert sum(x, 0).shape == amax(x, 0).shape == argmax(x, 0).shape == (0,)
    for function in (amax, amin, argmax, argmin, lambda x, dim: norm(x, math.inf, dim)):
        for dim in (1, None):
            with pytest.raises(ValueError, match=r"dimension 1 of shape \(3, 0\) is empty"):
                function(x, dim)


@pytest.mark.parametrize("kind", [*DIFFERENTIABLE, *PLACES])
def test_a_tensor_without_dimensions(kind: str) -> None:
    x = torch.tensor(-3.0)
    for dim in (None, 0, -1):
        assert ours(kind)(x, dim) == by_torch(kind)(x, dim)
    assert ours(kind)(x).data_ptr() != x.data_ptr()


@pytest.mark.parametrize("kind", [*DIFFERENTIABLE, *PLACES])
def test_nan_and_infinities_do_what_they_do_in_pytorch(kind: str) -> None:
    x = values(6, 50)
    x[1, 3], x[2, 4], x[4, ::2], x[5, 7] = math.nan, math.inf, -math.inf, math.nan
    x[3], x[5, 2] = -math.inf, math.inf
    for dim in (0, 1, None):
        torch.testing.assert_close(ours(kind)(x, dim), by_torch(kind)(x, dim), equal_nan=True)


@pytest.mark.parametrize("kind", ["amax", "amin", *NORMS])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_ties_and_zeros_share_the_gradient_as_in_pytorch(dim: int | None, kind: str) -> None:
    x = torch.randint(-2, 3, (7, 30)).float()
    x[3] = 0
    mine, truth = (output_and_gradient(f(kind), x, dim)[1] for f in (ours, by_torch))
    torch.testing.assert_close(mine, truth)


@pytest.mark.parametrize("kernels", [["share_gradient"], ["reduce_tiles", "spread_gradient"]])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_ties_are_counted_by_either_kernel(
    dim: int | None, kernels: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "SHARE_ELEMENTS", 4096 if len(kernels) == 1 else 0)
    plans.choose.cache_clear()
    x = torch.randint(-3, 4, (37, 100)).float().requires_grad_()
    for kind in ("amax", "norm_inf"):
        mine, truth = (f(kind)(x, dim) for f in (ours, by_torch))
        with count_launches() as launches:
            (dx,) = torch.autograd.grad(mine, x, mine)
        torch.testing.assert_close(dx, *torch.autograd.grad(truth, x, truth))
        assert list(launches) == (kernels if INTERPRETED else [])
    plans.choose.cache_clear()


def test_the_gradient_of_a_maximum_that_is_nan_is_nan() -> None:
    x = values(3, 20)
    x[1, 5] = math.nan
    dx = output_and_gradient(amax, x, 1)[1]
    assert dx[1].isnan().all()
    assert dx[[0, 2]].isfinite().all()


@pytest.mark.parametrize("kind", DIFFERENTIABLE)
def test_gradients_against_finite_differences(kind: str) -> None:
    x = values(3, 4, 2).double().requires_grad_()
    for dim in (None, 1, (0, 2)):
        assert torch.autograd.gradcheck(lambda x, dim=dim: ours(kind)(x, dim), (x,))


def test_on_meta_tensors_only_shapes_are_made() -> None:
    x = torch.empty(3, 5, device="meta")
    assert sum(x, 0).shape == (5,)
    assert argmax(x, 1, keepdim=True).shape == (3, 1)


def test_operator_checks_of_torch_library() -> None:
    x, operator = values(4, 6).requires_grad_(), torch.ops.rooftop.reduce.default
    for kind, dims in (("sum", [0]), ("amax", [0, 1]), ("norm2", [1])):
        torch.library.opcheck(operator, (x, kind, dims, True, torch.float32))
    torch.library.opcheck(operator, (x.detach().bfloat16(), "argmin", [1], False, torch.int64))


def test_compiled_whole() -> None:
    x = values(6, 32).requires_grad_()
    compiled = torch.compile(lambda x: amax(x, 1) + mean(x) + argmin(x, 1), fullgraph=True, backend="aot_eager")
    y = compiled(x)
    torch.testing.assert_close(y, torch.amax(x, 1) + torch.mean(x) + torch.argmin(x, 1))
    y.sum().backward()
    assert x.grad is not None


def test_autocast_changes_nothing_on_the_cpu_as_in_pytorch() -> None:
    x = values(4, 32, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert sum(x).dtype == torch.sum(x).dtype
        assert norm(x).dtype == torch.linalg.vector_norm(x).dtype


def test_cost_is_what_a_person_counts() -> None:
    x = values(10, 40).requires_grad_()
    with CountingMode() as counted:
        mean(x, 1)
        norm(x, 2, 1).backward(torch.ones(10))
    (first, second, backward) = (r.cost for r in counted.records if r.name.startswith("rooftop::"))
    assert first is not None
    assert second is not None
    assert backward is not None
    assert (first.total_flops, first.read_bytes, first.write_bytes) == (410, 1600, 40)
    assert (second.total_flops, second.read_bytes, second.write_bytes) == (810, 1600, 40)
    assert (backward.total_flops, backward.read_bytes, backward.write_bytes) == (800, 1680, 1600)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: sum(x, 2), ValueError, r"sum: dim 2 is out of range for an input of shape \(3, 4\)"),
        (lambda x: sum(x, (0, -2)), ValueError, "contains a dimension twice"),
        (lambda x: amax(x, 1.0), TypeError, "dim must be"),
        (lambda x: argmax(x, (0, 1)), TypeError, "argmax: dim must be an int or None"),
        (lambda x: sum([1.0]), TypeError, "input must be a tensor, got list"),
        (lambda x: sum(x.to_sparse()), TypeError, "input must be dense"),
        (lambda x: sum(x.to(torch.complex64)), TypeError, "input must be bfloat16.* got torch.complex64"),
        (lambda x: mean(x.int()), TypeError, "mean: input must be bfloat16.*; or give dtype"),
        (lambda x: sum(x, dtype=torch.complex64), TypeError, "dtype must be bfloat16"),
        (lambda x: norm(x.int()), TypeError, "norm: input must be bfloat16"),
        (lambda x: norm(x, 3), ValueError, "ord must be 1, 2 or infinity, got 3"),
        (lambda x: norm(x, dtype=torch.float16), TypeError, "narrower"),
    ],
)
def test_wrong_arguments(call: Callable[[Tensor], Tensor], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call(torch.randn(3, 4))


def test_counters_are_shared_within_a_stream_and_few() -> None:
    device = torch.device("cpu")
    first, second = counting.counters(device, 3), counting.counters(device, 5)
    assert first is not None
    assert second is not None
    assert first.data_ptr() == second.data_ptr()
    assert counting.counters(device, counting.STREAM_COUNTERS + 1) is None
    one, other = counting._captured_zeros(device, 5), counting._captured_zeros(device, 1)
    assert one is not None
    assert other is not None
    assert other.data_ptr() - one.data_ptr() == 32  # results have gaps, and begin at multiples of 16 bytes
    assert counting._captured_zeros(device, counting.CAPTURED_COUNTERS) is None


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 140


GPU_CASES = [
    *(((n,), None) for n in (1, 1000, 4096, (1 << 20) + 3, 1 << 22)),
    *(((50, n), 1) for n in (1, 15, 64, 1000, 4096, 20_000, 50257)),
    *(((n, 48), 0) for n in (1, 33, 5000)),
    *(((2, 100_000), 1), ((100_000, 3), 0), ((30, 77, 129), 1), ((16, 24, 7, 9), (0, 2, 3))),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "dim"), GPU_CASES)
def test_gate_on_a_gpu(shape: tuple[int, ...], dim: Any, dtype: torch.dtype) -> None:
    x = values(*shape, dtype=dtype)
    for kind in DIFFERENTIABLE:
        assert_gate(kind, x, dim, device="cuda")
    if not isinstance(dim, tuple):
        assert_places(x.cuda(), dim)


@pytest.mark.gpu
def test_ten_runs_give_the_same_bits_on_a_gpu(last_combines: bool) -> None:
    for x, dim in ((torch.randn(1 << 22, device="cuda"), None), (torch.randn(100_000, 40, device="cuda"), 0)):
        first, *others = [sum(x, dim) for _ in range(10)]
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
def test_graphs_replayed_on_several_streams_at_once() -> None:
    """Captured launches have separate counters, so replays at the same time as each other and as eager calls are
    correct."""
    x = torch.randn(1 << 20, device="cuda")
    expected = sum(x)
    graphs = []
    for _ in range(2):
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            results = [sum(x) for _ in range(20)]
        graphs.append((graph, stream, results))
    torch.cuda.synchronize()
    for _ in range(50):
        for graph, stream, _ in graphs:
            with torch.cuda.stream(stream):
                graph.replay()
        assert torch.equal(sum(x), expected)
    torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for *_, results in graphs for result in results)


@pytest.mark.gpu
@pytest.mark.large
@pytest.mark.parametrize("more", [4096, 4099])  # a multiple of eight, and an odd number
def test_more_than_two_billion_elements_on_a_gpu(more: int) -> None:
    x = torch.zeros((1 << 31) + more, device="cuda", dtype=torch.int8)
    x[-3] = 7
    assert sum(x) == 7
    assert argmax(x) == x.numel() - 3
    assert argmax(x[: 1 << 31].view(8, -1), 0).sum() == 0
    table = x[: 1 << 31].view(1 << 16, 1 << 15)
    assert sum(table, 0).shape == (1 << 15,)


@pytest.mark.gpu
def test_autocast_on_a_gpu_is_that_of_pytorch() -> None:
    x = values(64, 300, dtype=torch.bfloat16).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        for kind in DIFFERENTIABLE:
            assert ours(kind)(x, 1).dtype == by_torch(kind)(x, 1).dtype, kind


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    x = values(64, 768).cuda()
    compiled = torch.compile(lambda x: sum(x, 1).square(), fullgraph=True)
    torch.testing.assert_close(compiled(x), sum(x, 1).square())


@pytest.mark.parametrize("dim", [None, 1])
@pytest.mark.parametrize("kind", ["amax", "amin"])
def test_the_gradient_of_an_extreme_is_constant(kind: str, dim: int | None) -> None:
    """The second derivative of an extreme is zero, not missing, so a gradient penalty needs no exception."""
    x = torch.randn(3, 4, requires_grad=True)
    (first,) = torch.autograd.grad(getattr(kernels, kind)(x, dim).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert torch.equal(second, torch.zeros_like(x))
