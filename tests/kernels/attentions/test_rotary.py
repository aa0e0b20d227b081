"""Rotary position embeddings, both ways: the CPU implementation, and (in a separate process) the Triton kernel
interpreted."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import rope, rope_pair
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tables(positions: int, pairs: int, base: float = 10_000.0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    angles = torch.outer(torch.arange(positions), base ** -(torch.arange(pairs) / pairs))
    return [angles.cos().to(dtype), angles.sin().to(dtype)]


def by_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, offset: int = 0) -> Tensor:
    """The rotation as models write it, in the dtype of x."""
    pairs, positions = cos.shape[-1], slice(offset, offset + x.shape[-2])
    cos, sin = cos[..., positions, :].to(x.dtype), sin[..., positions, :].to(x.dtype)
    turned, kept = x[..., : 2 * pairs], x[..., 2 * pairs :]
    if interleaved:
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        across = torch.stack((-turned[..., 1::2], turned[..., ::2]), -1).flatten(-2)
    else:
        cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        across = torch.cat((-turned[..., pairs:], turned[..., :pairs]), -1)
    return torch.cat((turned * cos + across * sin, kept), -1)


def assert_gate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, device: str = "cpu") -> None:
    x, cos, sin = (t.to(device) for t in (x, cos, sin))
    dy = torch.randn_like(x)
    results = []
    for value, gradient, function in ((x, dy, rope), (x, dy, by_torch), (x.double(), dy.double(), by_torch)):
        value = value.detach().requires_grad_()
        with count_launches() as launches:
            y = function(value, cos, sin, interleaved=interleaved)
            y.backward(gradient)
        assert value.grad is not None
        results.append((y.detach(), value.grad))
        if function is rope and (INTERPRETED or device == "cuda") and x.numel():
            assert launches["rotate"] == 2
    for what, *values in zip(("y", "dx"), *results, strict=True):
        assert_as_accurate(*values, what=f"{what} {tuple(x.shape)} {x.dtype}")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "pairs"), [((2, 3, 17, 64), 32), ((1, 5, 9, 10), 5), ((2, 2, 33, 13), 4), ((0, 2, 4, 8), 4)]
)
def test_gate(shape: tuple[int, ...], pairs: int, dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(0)
    assert_gate(torch.randn(shape).to(dtype), *tables(40, pairs), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
def test_queries_and_keys_in_one_kernel(interleaved: bool) -> None:
    query, key = torch.randn(2, 6, 10, 16), torch.randn(2, 10, 2, 16).transpose(1, 2)
    cos, sin = tables(20, 8)
    with count_launches() as launches:
        pair = rope_pair(query, key, cos, sin, interleaved=interleaved)
    assert not INTERPRETED or launches == {"rotate": 1}
    torch.testing.assert_close(pair, tuple(by_torch(t, cos, sin, interleaved) for t in (query, key)))
    assert [t.stride() for t in pair] == [query.stride(), key.stride()]


@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 20), st.integers(1, 12), st.booleans(), st.integers(0, 5))
@settings(max_examples=12, deadline=None)
def test_any_shape_and_offset(
    batch: int, heads: int, positions: int, pairs: int, interleaved: bool, offset: int
) -> None:
    x, (cos, sin) = torch.randn(batch, heads, positions, 2 * pairs + offset), tables(25, pairs)
    y = rope(x, cos, sin, interleaved=interleaved, offset=offset)
    torch.testing.assert_close(y, by_torch(x, cos, sin, interleaved, offset), rtol=1e-5, atol=1e-5)


def test_turning_back_gives_what_was_and_lengths_stay() -> None:
    x, (cos, sin) = torch.randn(2, 3, 11, 8), tables(11, 4)
    y = rope(x, cos, sin)
    torch.testing.assert_close(rope(y, cos, -sin), x, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_distance_of_positions_alone(interleaved: bool) -> None:
    query, key, (cos, sin) = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8), tables(64, 4)
    scores = [
        (
            rope(query, cos, sin, offset=first + 7, interleaved=interleaved)
            * rope(key, cos, sin, offset=first, interleaved=interleaved)
        ).sum()
        for first in (0, 13, 50)
    ]
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-4, atol=1e-5)


def test_offsets_and_tables_of_each_sequence() -> None:
    x, (cos, sin) = torch.randn(3, 2, 5, 8), tables(30, 4)
    starts = torch.tensor([0, 20, 7])
    y = rope(x, cos, sin, offset=starts)
    own = [torch.stack([table[start : start + 5] for start in starts.tolist()]) for table in (cos, sin)]
    torch.testing.assert_close(rope(x, *own), y)
    for row, start in enumerate(starts.tolist()):
        torch.testing.assert_close(y[row], rope(x[row], cos, sin, offset=start))


def test_in_place() -> None:
    base, (cos, sin) = torch.randn(2, 6, 3, 8), tables(6, 4)
    x = base.transpose(1, 2)
    expected = rope(x, cos, sin)
    assert rope(x, cos, sin, inplace=True) is x
    torch.testing.assert_close(x, expected)
    flat = torch.randn(6, 8)
    expected = rope(flat, cos, sin, interleaved=True)
    rope(flat, cos, sin, interleaved=True, inplace=True)
    torch.testing.assert_close(flat, expected)


def test_views_with_any_strides() -> None:
    base, (cos, sin) = torch.randn(2, 3, 8, 32), tables(8, 4)
    for x in (base[..., ::4], base[..., 8:16], base[:, :, :, :8][:1].expand(4, 3, 8, 8), base[..., :8].flip(0)):
        torch.testing.assert_close(rope(x, cos, sin), by_torch(x, cos, sin))
    torch.testing.assert_close(rope(base, cos.t().contiguous().t(), sin), by_torch(base, cos, sin))


def test_gradients_against_finite_differences() -> None:
    query, key = (torch.randn(1, h, 3, 6, dtype=torch.float64, requires_grad=True) for h in (2, 1))
    cos, sin = tables(5, 2, dtype=torch.float64)
    for interleaved in (False, True):
        turn = lambda q, k: rope_pair(q, k, cos, sin, offset=1, interleaved=interleaved)  # noqa: E731, B023
        assert torch.autograd.gradcheck(turn, (query, key))
        assert torch.autograd.gradgradcheck(turn, (query, key))
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: rope(x, cos, sin), (query.detach(),), (query.detach(),))


def test_operator_checks_of_torch_library() -> None:
    query, key = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(2, 4, 1, 8).transpose(1, 2)
    cos, sin = (t[None] for t in tables(9, 4))
    torch.library.opcheck(torch.ops.rooftop.rope.default, (query, key, cos, sin, None, 2, False, False))
    starts = torch.tensor([1, 3])
    torch.library.opcheck(torch.ops.rooftop.rope.default, (query, None, cos, sin, starts, 0, True, True))
    torch.library.opcheck(torch.ops.rooftop.rope_.default, (query.detach(), key, cos, sin, None, 0, True))


def test_compiled_whole() -> None:
    x, (cos, sin) = torch.randn(2, 4, 3, 8, requires_grad=True), tables(4, 4)
    compiled = torch.compile(
        lambda x: rope(x.transpose(1, 2), cos, sin) * 2, fullgraph=True, backend="aot_eager", dynamic=False
    )
    y = compiled(x)
    torch.testing.assert_close(y, 2 * rope(x.transpose(1, 2), cos, sin))
    y.square().sum().backward()
    torch.testing.assert_close(x.grad, 8 * x.detach(), rtol=1e-5, atol=1e-5)  # rotated there and back


def test_cost_is_what_a_person_counts() -> None:
    query, key, (cos, sin) = torch.randn(2, 4, 5, 16), torch.randn(2, 2, 5, 16), tables(9, 8)
    with CountingMode() as counted:
        rope_pair(query, key, cos, sin)
        rope(key, cos, sin, inplace=True)
    pair, in_place = (r.cost for r in counted.records if r.name.startswith("rooftop"))
    assert pair is not None
    assert in_place is not None
    elements, table_bytes = 2 * 6 * 5 * 16, 2 * 5 * 8 * 4
    assert (pair.total_flops, pair.read_bytes) == (3 * elements, 4 * elements + table_bytes)
    assert pair.write_bytes == 4 * elements
    assert (in_place.read_bytes, in_place.write_bytes) == (4 * key.numel() + table_bytes, 4 * key.numel())


X, (COS, SIN) = torch.zeros(2, 3, 4, 8), tables(6, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"x": [1.0]}, TypeError, "x must be a tensor, got list"),
        ({"x": torch.zeros(4, 8, dtype=torch.int64)}, TypeError, "x must be bfloat16"),
        ({"x": torch.zeros(8)}, ValueError, r"expected x of shape \(B, H, S, D\), \(H, S, D\) or \(S, D\), got \(8,\)"),
        ({"cos": torch.zeros(6, 8), "sin": torch.zeros(6, 8)}, ValueError, r"give cos\[..., :4\]"),
        ({"sin": torch.zeros(5, 4)}, ValueError, "cos and sin of one shape"),
        ({"cos": COS.to("meta")}, ValueError, "x is on cpu, cos on meta"),
        ({"cos": COS.clone().requires_grad_()}, NotImplementedError, "are not supported: detach them"),
        ({"offset": 3}, ValueError, "positions 3 to 6 are not all in tables of 6 positions"),
        ({"offset": torch.tensor([-1, 0])}, ValueError, "positions -1 to 3 are not"),
        ({"offset": torch.tensor([1])}, ValueError, r"expected offset \(2,\)"),
        ({"offset": 0.5}, TypeError, "offset must be an int or a tensor"),
        ({"x": X.clone().requires_grad_(), "inplace": True}, ValueError, "autograd tracks x"),
        ({"x": X[:, :1].expand(2, 3, 4, 8), "inplace": True}, ValueError, "needs x without overlapping memory"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        rope(**{"x": X, "cos": COS, "sin": SIN, **arguments})  # type: ignore[arg-type]


def test_pairs_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="must agree in all but the number of heads"):
        rope_pair(X, X[:, :, :2], COS, SIN)
    with pytest.raises(TypeError, match=r"query is torch.float32, key torch.bfloat16"):
        rope_pair(X, X.bfloat16(), COS, SIN)


@pytest.mark.skipif(not INTERPRETED, reason="on the CPU such positions are refused")
def test_positions_that_the_kernel_finds_in_no_table_are_nan() -> None:
    x, starts = torch.randn(2, 1, 4, 8), torch.tensor([0, 4])
    y, _ = torch.ops.rooftop.rope(x, None, COS[None], SIN[None], starts, 0, False, False)
    assert y[1, 0, 2:].isnan().all()
    assert not y[0].isnan().any()
    assert not y[1, 0, :2].isnan().any()


@pytest.mark.gpu
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [8, 32, 64, 80, 96, 128, 256, 1000])
def test_gate_on_a_gpu(width: int, dtype: torch.dtype, interleaved: bool) -> None:
    x = torch.randn(2, 70, 5, width, dtype=dtype).transpose(1, 2)
    assert_gate(x, *tables(100, width // 2), interleaved, "cuda")
    assert_gate(x, *tables(100, max(1, width // 8)), interleaved, "cuda")


@pytest.mark.gpu
@pytest.mark.large
def test_more_than_two_billion_elements_on_a_gpu() -> None:
    x, (cos, sin) = torch.randn(2, 33, 262_144, 128, device="cuda", dtype=torch.bfloat16), tables(262_144, 64)
    y = rope(x, cos.cuda(), sin.cuda())
    for head in ((0, 0), (1, 32)):
        for place in (0, 262_143):
            expected = rope(x[head][place : place + 1].cpu(), cos, sin, offset=place)
            torch.testing.assert_close(y[head][place : place + 1].cpu(), expected)
    assert math.isfinite(float(y[1, 32].float().sum()))


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    x, (cos, sin) = torch.randn(2, 4, 64, 32, device="cuda"), (t.cuda() for t in tables(64, 16))
    compiled = torch.compile(lambda x: rope(x, cos, sin).square(), fullgraph=True)
    torch.testing.assert_close(compiled(x), rope(x, cos, sin).square())
