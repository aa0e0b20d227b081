"""Batch norm over sites is PyTorch's batch norm of the rows that are sites, on the CPU and (in a separate process)
with the Triton kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.kernels import decompositions
from rooftop.launch import INTERPRETED, count_launches
from rooftop.sparse.site_norms import site_norm
from rooftop.testing import assert_as_accurate

FORWARD = ("site_moments", "merge_moments", "normalize_sites")
BACKWARD = ("site_gradient_sums", "site_gradient")


def given(rows: int, channels: int, dtype: torch.dtype = torch.float64, share: float = 0.7) -> tuple[Tensor, ...]:
    """x (with NaN in rows that are not sites), sites, weight and bias."""
    generator = torch.Generator().manual_seed(rows + channels)
    sites = torch.rand(rows, generator=generator) < share
    x = torch.randn(rows, channels, generator=generator).where(sites[:, None], torch.nan).to(dtype)
    weight, bias = torch.randn(2, channels, generator=generator, dtype=torch.float64).unbind(0)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return x, sites, weight.to(wide), bias.to(wide)


def ours(x: Tensor, sites: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return site_norm(x, sites, weight, bias, None, None, 1e-5)[0]  # type: ignore[no-any-return]


def by_torch(x: Tensor, sites: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.batch_norm(x[sites], None, None, weight, bias, True, 0.1, 1e-5)
    return x.new_zeros(x.shape).index_put((sites.nonzero()[:, 0],), y)


def outcome(function: Callable[..., Tensor], x: Tensor, sites: Tensor, *parameters: Tensor) -> list[Tensor]:
    """The result, and the gradients of x, weight and bias."""
    leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
    y = function(leaves[0], sites, *leaves[1:])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(y)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize(("rows", "channels"), [(2, 1), (7, 3), (100, 16), (300, 65)])
def test_it_is_the_batch_norm_of_the_sites(rows: int, channels: int) -> None:
    x, sites, weight, bias = given(rows, channels)
    sites[:2] = True
    x[:2] = torch.randn(2, channels)
    for mine, theirs in zip(
        outcome(ours, x, sites, weight, bias), outcome(by_torch, x, sites, weight, bias), strict=True
    ):
        torch.testing.assert_close(mine.nan_to_num(7), theirs.nan_to_num(7), rtol=1e-10, atol=1e-10)
    assert not ours(x, sites, weight, bias)[~sites].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "channels"), [(200, 16), (1000, 7), (130, 100)])
def test_gate(rows: int, channels: int, dtype: torch.dtype) -> None:
    assert_gate(given(rows, channels, dtype))


def assert_gate(arguments: tuple[Tensor, ...]) -> None:
    with count_launches() as launches:
        found = outcome(ours, *arguments)
    by_kernel = INTERPRETED or arguments[0].is_cuda
    assert launches == (dict.fromkeys((*FORWARD, *BACKWARD), 1) if by_kernel else {})
    eager = outcome(by_torch, *arguments)
    x, sites, *parameters = arguments
    exact = outcome(by_torch, x.double(), sites, *(t.double() for t in parameters))
    for what, *each in zip(("y", "dx", "dweight", "dbias"), found, eager, exact, strict=True):
        assert_as_accurate(*each, what=what)


def test_a_large_offset() -> None:
    x, sites, weight, bias = given(500, 5, torch.float32)
    assert_gate((x + 1e4, sites, weight, bias))


def test_moments_are_those_of_the_sites() -> None:
    x, sites, weight, bias = given(80, 6, torch.float32)
    _, mean, var, count, _, _ = site_norm(x, sites, weight, bias, None, None, 1e-5)
    torch.testing.assert_close(mean, x[sites].mean(0), check_dtype=False)  # wider than x on the CPU
    torch.testing.assert_close(var, x[sites].var(0, correction=0), check_dtype=False)
    assert count.tolist() == [int(sites.sum())]


@pytest.mark.parametrize("count", [0, 1])
def test_of_fewer_than_two_sites_the_running_statistics_stand_in(count: int) -> None:
    x, sites, weight, bias = given(40, 4, torch.float32, share=0.0)
    x, sites = x.clone(), sites.clone()
    x[:count], sites[:count] = 3.0, True
    mean, var = torch.tensor([1.0, 2, 3, 4]), torch.tensor([4.0, 1, 9, 0.25])
    leaf = x.requires_grad_()
    y = site_norm(leaf, sites, weight, bias, mean, var, 0.0)[0]
    torch.testing.assert_close(y[:count], (x[:count] - mean) / var.sqrt() * weight + bias)
    assert not y[count:].any()
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    torch.testing.assert_close(dx[:count], (weight / var.sqrt()).expand(count, 4))
    assert not dx[count:].any()


def test_without_weights_and_without_rows() -> None:
    x, sites, *_ = given(50, 3, torch.float32)
    y = site_norm(x, sites, None, None, None, None, 1e-5)[0]
    torch.testing.assert_close(y[sites], F.batch_norm(x[sites], None, None, training=True))
    empty, mean, _, count, _, _ = site_norm(x[:0], sites[:0], None, None, None, None, 1e-5)
    assert (empty.shape, mean.tolist(), count.tolist()) == ((0, 3), [0, 0, 0], [0])


def test_any_strides() -> None:
    x, sites, weight, bias = given(60, 8)
    views = (x.t().contiguous().t()[::2], sites[::2], weight.repeat_interleave(2)[::2], bias)
    for mine, theirs in zip(outcome(ours, *views), outcome(by_torch, *(t.contiguous() for t in views)), strict=True):
        torch.testing.assert_close(mine.nan_to_num(7), theirs.nan_to_num(7), rtol=1e-10, atol=1e-10)


def test_gradients_by_differences() -> None:
    x, sites, weight, bias = given(9, 2)
    x = x.nan_to_num(0).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *a: ours(a[0], sites, *a[1:]), (x, *(t.requires_grad_() for t in (weight, bias)))
    )


def test_operator_checks_of_torch_library() -> None:
    x, sites, weight, bias = given(30, 4, torch.float32)
    x, running = x.nan_to_num(0).requires_grad_(), (torch.zeros(4), torch.ones(4))
    operator = torch.ops.rooftop.site_norm.default
    torch.library.opcheck(operator, (x, sites, weight.requires_grad_(), bias.requires_grad_(), *running, 1e-5))
    torch.library.opcheck(operator, (x, sites, None, None, None, None, 1e-5))


@pytest.mark.filterwarnings("ignore:.isinstance.treespec:FutureWarning")
def test_compiled_an_exported_program_runs_without_rooftop() -> None:
    class Norm(torch.nn.Module):
        def forward(self, *arguments: Tensor) -> Tensor:
            return ours(*arguments)

    arguments, others = given(30, 4, torch.float32), given(30, 4, torch.float32, share=0.4)
    program = torch.export.export(Norm(), arguments).run_decompositions(decompositions())
    assert not [node for node in program.graph.nodes if "rooftop" in str(node.target)]
    torch.testing.assert_close(program.module()(*others), ours(*others))


def test_compiled_whole() -> None:
    x, sites, weight, bias = (t.nan_to_num(0) if t.is_floating_point() else t for t in given(40, 4))
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    for mine, plain in zip(
        outcome(compiled, x, sites, weight, bias), outcome(ours, x, sites, weight, bias), strict=True
    ):
        torch.testing.assert_close(mine, plain)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__, "-k", "gate or offset or moments or running or without or interpreter") > 13


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "channels"), [(100_000, 64), (30_001, 96), (3000, 7), (2, 3)])
def test_gate_on_a_gpu(rows: int, channels: int, dtype: torch.dtype) -> None:
    x, sites, weight, bias = given(rows, channels, dtype, share=0.9 if rows > 2 else 2)
    assert_gate(tuple(t.cuda() for t in (x, sites, weight, bias)))


@pytest.mark.gpu
def test_ten_runs_on_a_gpu_are_bit_identical() -> None:
    arguments = tuple(t.cuda() for t in given(200_000, 48, torch.float16))
    first = outcome(ours, *arguments)
    for _ in range(9):
        for again, once in zip(outcome(ours, *arguments), first, strict=True):
            assert torch.equal(again.nan_to_num(7), once.nan_to_num(7))
