"""Embeddings and their gradient, both ways: the CPU implementation, and (in a separate process) the Triton kernel
interpreted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import embedding
from rooftop.kernels.lookups import tables
from rooftop.kernels.lookups.tables import FewConfig, RunsConfig
from rooftop.launch import INTERPRETED, count_launches
from rooftop.nn import Embedding
from rooftop.testing import assert_as_accurate

if INTERPRETED:  # short chunks, so that a few items already cross chunks and need two levels
    tables.RUNS = RunsConfig(chunk=8, ahead=4, columns=16, warps=1)
    tables.FEW = FewConfig(most=12, items=4, columns=16, warps=1)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def results(
    function: Callable[..., Tensor], tokens: Tensor, weight: Tensor, dy: Tensor, padding: int | None
) -> tuple[Tensor, Tensor]:
    weight = weight.detach().requires_grad_()
    y = function(tokens, weight, padding)
    return y.detach(), torch.autograd.grad(y, weight, dy)[0]


def assert_gate(
    tokens: Tensor, rows: int, width: int, dtype: torch.dtype, padding: int | None = None, device: str = "cpu"
) -> None:
    torch.manual_seed(rows + width)
    tokens, weight = tokens.to(device), torch.randn(rows, width, device=device).to(dtype)
    dy = torch.randn(*tokens.shape, width, device=device).to(dtype)
    with count_launches() as launches:
        y, dweight = results(embedding, tokens, weight, dy, padding)
    if (INTERPRETED or device == "cuda") and dy.numel():
        few = tokens.numel() <= tables.FEW.most
        assert (launches["add_equal"], launches["add_runs"] >= 1) == (int(few), not few)
        assert launches["gather_rows"] == (width * weight.element_size() % 16 == 0)
    assert torch.equal(y, F.embedding(tokens, weight))
    eager = results(F.embedding, tokens, weight, dy, padding)[1]
    exact = results(F.embedding, tokens, weight.double(), dy.double(), padding)[1]
    assert_as_accurate(dweight, eager, exact, what=f"dweight {tuple(tokens.shape)} of {rows} x {width} {dtype}")


def drawn(*shape: int, rows: int) -> Tensor:
    torch.manual_seed(sum(shape) + rows)
    return torch.randint(rows, shape)


@pytest.mark.parametrize("tokens", [torch.tensor([[3, 0], [9, 9]]), torch.tensor([4, 1, 4], dtype=torch.int32)])
def test_tables_of_any_strides(tokens: Tensor) -> None:
    """Rows with gaps, transposed, expanded, and at addresses that are not multiples of 16 bytes."""
    table = torch.randn(10, 200).half()
    for weight in (table[:, :64], table[:, 3:67], table[::2, 8:].repeat(2, 1)[:10], table.t()[:10, :8], table[:1, :64]):
        weight = weight.expand(10, -1)
        assert torch.equal(embedding(tokens, weight), F.embedding(tokens, weight))


@pytest.mark.parametrize(
    "of",
    [
        lambda tokens: tokens[::2],
        lambda tokens: tokens.view(2, 6)[:, ::2],
        lambda tokens: tokens[:1].expand(20),
        lambda tokens: tokens[:1].expand(4, 10),
        lambda tokens: tokens.view(3, 4).t(),
    ],
)
def test_tokens_of_any_strides(of: Callable[[Tensor], Tensor]) -> None:
    """Some of the tokens have the strides of a single row."""
    assert_gate(of(drawn(12, rows=7)), 7, 8, torch.float32)


@pytest.mark.gpu
def test_on_a_gpu_a_token_outside_of_the_table_stops_the_program() -> None:
    """The program runs in a separate process, because the error destroys its CUDA context."""
    program = """
import torch
from rooftop.kernels import embedding
weight = torch.zeros(4, 64, device="cuda")
embedding(torch.tensor([1, TOKEN], device="cuda"), weight)
torch.cuda.synchronize()
"""
    for token, stops in ((3, False), (4, True), (-1, True)):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("TOKEN", str(token))], capture_output=True, text=True, timeout=300
        )
        assert (done.returncode != 0) == stops, done.stderr
        assert ("a token is outside of the table" in done.stderr) == stops


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "rows", "width"),
    [
        ((3, 50), 20, 8),
        ((40,), 1000, 7),
        ((0,), 5, 4),
        ((5,), 5, 40),
        ((7,), 3, 0),
        ((2, 6), 4, 9),
        ((9,), 2, 8),
    ],
)
def test_gate(shape: tuple[int, ...], rows: int, width: int, dtype: torch.dtype) -> None:
    assert_gate(drawn(*shape, rows=rows), rows, width, dtype)


@pytest.mark.parametrize("padding", [0, 3, -1])
@pytest.mark.parametrize("count", [10, 30])
def test_padding_gets_no_gradient(padding: int, count: int) -> None:
    tokens = drawn(count, rows=5)
    assert_gate(tokens, 5, 8, torch.float32, padding)
    weight = torch.randn(5, 8, requires_grad=True)
    embedding(tokens, weight, padding).sum().backward()
    assert weight.grad is not None
    assert (weight.grad[padding] == 0).all()


@pytest.mark.parametrize("count", [7, 8, 9, 16, 150])
def test_a_token_that_is_everywhere(count: int) -> None:
    weight = torch.zeros(4, 3, requires_grad=True)
    dy = torch.arange(3 * count).reshape(count, 3).float()
    embedding(torch.full((count,), 2), weight).backward(dy)
    expected = torch.zeros(4, 3)
    expected[2] = dy.sum(0)
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)  # whole numbers: exact in any order


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 25)), min_size=1, max_size=5))
@settings(max_examples=8, deadline=None)
def test_runs_of_any_lengths(runs: list[tuple[int, int]]) -> None:
    """Runs of equal tokens end within a chunk or at its end, or cross several chunks. Sums of whole numbers are exact
    in any order."""
    tokens = torch.cat([torch.full((length,), token) for token, length in runs])
    dy = torch.randint(-100, 100, (len(tokens), 2)).float()
    weight = torch.zeros(10, 2, requires_grad=True)
    embedding(tokens, weight).backward(dy)
    expected = torch.zeros(10, 2).index_add_(0, tokens, dy)
    torch.testing.assert_close(weight.grad, expected, rtol=0, atol=0)


@pytest.mark.parametrize("count", [12, 60])
def test_four_runs_give_the_same_bits(count: int) -> None:
    tokens, weight, dy = drawn(count, rows=3), torch.randn(3, 5), torch.randn(count, 5)
    first, *others = [results(embedding, tokens, weight, dy, None)[1] for _ in range(4)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("count", [11, 80])
def test_nan_stays_with_its_token(count: int) -> None:
    tokens, dy = drawn(count, rows=4), torch.randn(count, 3)
    dy[5, 1] = torch.nan
    _, gradient = results(embedding, tokens, torch.randn(4, 3), dy, None)
    found = gradient.isnan().nonzero().tolist()
    assert found == [[int(tokens[5]), 1]]


def test_views_with_any_strides() -> None:
    tokens, base = drawn(12, 10, rows=9), torch.randn(9, 20)
    for seen, weight in ((tokens.t(), base[:, ::2]), (tokens[::2, 1], base.t()[:9, :9]), (tokens.int(), base)):
        dy = torch.randn(1, weight.shape[1]).expand(*seen.shape, weight.shape[1])
        ours, theirs = (results(f, seen, weight, dy, None) for f in (embedding, F.embedding))
        torch.testing.assert_close(ours, theirs)


def test_gradients_against_finite_differences() -> None:
    tokens, weight = torch.tensor([[0, 2], [2, 1]]), torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda w: embedding(tokens, w), (weight,))


def test_operator_checks_of_torch_library() -> None:
    tokens, weight = drawn(2, 3, rows=5), torch.randn(5, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.rooftop.embedding.default, (tokens, weight, 2))


def test_compiled_whole() -> None:
    tokens, weight = drawn(6, 8, rows=9), torch.randn(9, 4, requires_grad=True)
    compiled = torch.compile(lambda t, w: embedding(t, w, 0) * 2, fullgraph=True, backend="aot_eager")
    y = compiled(tokens, weight)
    torch.testing.assert_close(y, 2 * embedding(tokens, weight))
    y.sum().backward()
    expected = 2.0 * torch.bincount(tokens.flatten(), minlength=9)
    expected[0] = 0
    torch.testing.assert_close(weight.grad, expected[:, None].expand(9, 4))


def test_the_module_has_the_state_of_pytorchs() -> None:
    theirs = torch.nn.Embedding(9, 4, padding_idx=0)
    ours = Embedding(9, 4, padding_idx=0)
    ours.load_state_dict(theirs.state_dict())
    tokens = drawn(5, 3, rows=9)
    assert torch.equal(ours(tokens), theirs(tokens))
    ours(tokens).sum().backward()
    theirs(tokens).sum().backward()
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)


def test_cost_is_what_a_person_counts() -> None:
    tokens, weight = drawn(10, rows=30), torch.randn(30, 8, requires_grad=True)
    with CountingMode() as counted:
        embedding(tokens, weight).backward(torch.ones(10, 8))
    costs = {r.name: r.cost for r in counted.records}
    forward, backward = costs["rooftop::embedding"], costs["rooftop::embedding_backward"]
    assert forward is not None
    assert backward is not None
    assert (forward.total_flops, forward.read_bytes, forward.write_bytes) == (0, 4 * 80 + 80, 4 * 80)
    assert (backward.total_flops, backward.read_bytes, backward.write_bytes) == (80, 4 * 80 + 80, 4 * 240)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"input": [1]}, TypeError, "input must be a tensor, got list"),
        ({"input": torch.zeros(3)}, TypeError, "input must be int32 or int64, got torch.float32"),
        ({"weight": torch.zeros(3)}, ValueError, r"expected a weight of shape \(V, D\), got \(3,\)"),
        ({"weight": torch.zeros(5, 4, dtype=torch.int32)}, TypeError, "weight must be bfloat16"),
        ({"weight": torch.zeros(5, 4, device="meta")}, ValueError, "input is on cpu, weight on meta"),
        ({"padding_idx": 5}, ValueError, "padding_idx 5 is out of range for 5 rows"),
        ({"max_norm": 1.0}, NotImplementedError, "max_norm is not supported: use torch.nn.functional.embedding"),
        ({"scale_grad_by_freq": True}, NotImplementedError, "scale_grad_by_freq is not supported"),
        ({"sparse": True}, NotImplementedError, "sparse is not supported"),
        ({"input": torch.tensor([5])}, IndexError, "from 0 to 4, the rows of weight, got 5 to 5"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        embedding(**{"input": torch.tensor([0, 1]), "weight": torch.zeros(5, 4), **arguments})  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(50_257, 768), (3, 1000), (128_256, 64), (1, 7), (1000, 5120)])
def test_gate_on_a_gpu(rows: int, width: int, dtype: torch.dtype) -> None:
    assert_gate(drawn(5, 1003, rows=rows), rows, width, dtype, device="cuda")
    often = torch.minimum(drawn(5, 1003, rows=rows), drawn(1003, rows=4))
    assert_gate(often, rows, width, dtype, 0, device="cuda")
    for few in (often.view(-1)[:2048], often.view(-1)[:1], drawn(300, rows=rows)):
        assert_gate(few, rows, width, dtype, 0, device="cuda")


@pytest.mark.gpu
def test_the_same_bits_on_a_gpu() -> None:
    tokens = drawn(100_000, rows=30).cuda()
    weight, dy = torch.randn(30, 256, device="cuda"), torch.randn(100_000, 256, device="cuda")
    first, *others = [results(embedding, tokens, weight, dy, None)[1] for _ in range(5)]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    tokens = torch.arange(524_292, device="cuda") % 7
    dy = torch.ones(524_292, 4096, device="cuda", dtype=torch.bfloat16)  # 2^31 + 16384 elements
    weight = torch.zeros(7, 4096, device="cuda", dtype=torch.bfloat16)
    _, gradient = results(embedding, tokens, weight, dy, None)
    torch.testing.assert_close(gradient[:, 0].float().cpu(), torch.bincount(tokens.cpu()).bfloat16().float())
    assert bool((gradient == gradient[:, :1]).all())


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    tokens, weight = drawn(64, rows=90).cuda(), torch.randn(90, 32, device="cuda")
    compiled = torch.compile(lambda w: embedding(tokens, w).square(), fullgraph=True)
    torch.testing.assert_close(compiled(weight), embedding(tokens, weight).square())
