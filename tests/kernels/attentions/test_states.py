"""Merged partial results of attention, both ways: the CPU implementation, and (in a separate process) the Triton
kernels interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import attention, merge_attention_states
from rooftop.kernels.attentions import attentions
from rooftop.kernels.attentions.states import merge_into
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def with_gradients(function: Callable[..., Any], tensors: list[Tensor], *gradients: Tensor) -> list[Tensor]:
    """All outputs of a function, then the gradients of its inputs."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    found = function(*tensors)
    found = found if isinstance(found, tuple) else (found,)
    back = torch.autograd.grad(found, tensors, [g.to(y.dtype) for g, y in zip(gradients, found, strict=True)])
    return [y.detach() for y in found] + list(back)


def parts(
    count: int, batch: int = 2, heads: int = 3, rows: int = 5, width: int = 8, dtype: torch.dtype = torch.float32
) -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(count + rows + width)
    states = [(torch.randn(batch, heads, rows, width), 3 * torch.randn(batch, heads, rows)) for _ in range(count)]
    return [(out.to(dtype), lse) for out, lse in states]


def merged_by_torch(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    lse = torch.logaddexp(lse_a, lse_b)
    weights = [(part - lse).exp()[..., None] for part in (lse_a, lse_b)]
    out = weights[0].to(out_a.dtype) * out_a + weights[1].to(out_b.dtype) * out_b
    return out, lse


def assert_gate(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> None:
    tensors = [t.to(device) for state in parts(2, *shape, dtype=dtype) for t in state]
    gradients = [torch.randn_like(t) for t in tensors[:2]]
    with count_launches() as launches:
        ours = with_gradients(merge_attention_states, tensors, *gradients)
    if (INTERPRETED or device == "cuda") and tensors[0].numel():
        assert launches == {"merge_forward": 1, "merge_backward": 1}
    eager = with_gradients(merged_by_torch, tensors, *gradients)
    exact = with_gradients(merged_by_torch, [t.double() for t in tensors], *(g.double() for g in gradients))
    for what, *values in zip(("out", "lse", "dout_a", "dlse_a", "dout_b", "dlse_b"), ours, eager, exact, strict=True):
        assert_as_accurate(*values, what=f"{what} {shape} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 5, 8), (1, 2, 33, 64), (1, 1, 3, 100), (0, 2, 3, 4), (2, 2, 0, 4)])
def test_gate(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    assert_gate(shape, dtype)


def test_a_merge_is_commutative_and_associative() -> None:
    a, b, c = parts(3)
    torch.testing.assert_close(merge_attention_states(*a, *b), merge_attention_states(*b, *a), rtol=0, atol=0)
    left = merge_attention_states(*merge_attention_states(*a, *b), *c)
    right = merge_attention_states(*a, *merge_attention_states(*b, *c))
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)


def test_nothing_attended_changes_nothing() -> None:
    (out, lse), _ = parts(2)
    nothing = torch.full_like(out, math.nan), torch.full_like(lse, -math.inf)
    torch.testing.assert_close(merge_attention_states(out, lse, *nothing), (out, lse), rtol=0, atol=1e-7)
    empty, minus = merge_attention_states(*nothing, *nothing)
    assert (empty == 0).all()
    assert (minus == -math.inf).all()
    gradients = with_gradients(merge_attention_states, [out, lse, *nothing], out, lse)[2:]
    torch.testing.assert_close(gradients, [out, lse, torch.zeros_like(out), torch.zeros_like(lse)])


@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=2, max_size=4), st.integers(1, 9))
@settings(max_examples=8, deadline=None)
def test_attention_over_parts_of_the_keys(queries: int, lengths: list[int], width: int) -> None:
    query = torch.randn(1, 2, queries, width)
    key, value = torch.randn(2, 1, 2, sum(lengths), width)

    def in_parts(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        chunks = zip(key.split(lengths, 2), value.split(lengths, 2), strict=True)
        first, *others = [attention(query, k, v, return_lse=True) for k, v in chunks]
        for other in others:
            first = merge_attention_states(*first, *other)
        return first

    gradients = torch.randn_like(query), torch.randn(query.shape[:3])
    whole = with_gradients(lambda q, k, v: attention(q, k, v, return_lse=True), [query, key, value], *gradients)
    merged = with_gradients(in_parts, [query, key, value], *gradients)
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=2e-5)


def test_merged_views_with_any_strides() -> None:
    (a, lse_a), (b, lse_b) = parts(2)
    swapped, strided = a.transpose(1, 2).contiguous().transpose(1, 2), torch.stack((b, b), -1)[..., 0]
    expected = merge_attention_states(a, lse_a, b, lse_b)
    out, lse = merge_attention_states(swapped, lse_a.mT.contiguous().mT, strided, lse_b)
    torch.testing.assert_close((out, lse), expected)
    assert out.stride() == swapped.stride()
    wide, _ = merge_attention_states(a, lse_a, b.bfloat16(), lse_b)
    assert wide.dtype == torch.float32


def test_merge_gradients_against_finite_differences() -> None:
    tensors = [t.double().requires_grad_() for state in parts(2, 1, 2, 3, 4) for t in state]
    assert torch.autograd.gradcheck(merge_attention_states, tensors)


def test_merge_operator_checks_of_torch_library() -> None:
    tensors = tuple(t.requires_grad_() for state in parts(2, 1, 2, 3, 4) for t in state)
    torch.library.opcheck(torch.ops.rooftop.merge_attention_states.default, tensors)


def test_cost_of_a_merge() -> None:
    (a, lse_a), (b, lse_b) = parts(2)
    with CountingMode() as counted:
        merge_attention_states(a, lse_a, b, lse_b)
    (cost,) = (r.cost for r in counted.records if r.name == "rooftop::merge_attention_states")
    assert cost is not None
    assert (cost.read_bytes, cost.write_bytes) == (8 * (240 + 30), 4 * (240 + 30))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lse_a": torch.zeros(2, 3, 4)}, ValueError, r"log-sum-exps of shape \(2, 3, 5\)"),
        ({"lse_b": torch.zeros(2, 3, 5).half()}, TypeError, "lse_b must be torch.float32"),
        ({"out_b": torch.zeros(2, 3, 5, 9)}, ValueError, "outputs of one shape"),
        ({"out_b": torch.zeros(2, 3, 5, 8, dtype=torch.int32)}, TypeError, "out_b must be bfloat16"),
        ({"out_b": None}, TypeError, "out_b must be a tensor"),
    ],
)
def test_states_that_do_not_fit(change: dict[str, object], error: type[Exception], message: str) -> None:
    (out_a, lse_a), (out_b, lse_b) = parts(2)
    with pytest.raises(error, match=message):
        merge_attention_states(**{"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b, **change})  # type: ignore[arg-type]


DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 0.0])
def test_an_output_that_carries_the_gradient_of_the_log_sum_exp(scale: float, device: str) -> None:
    """For the inputs of the back ends, rowsum(dout' out') is the original row sum minus dlse, whatever the value of
    dout."""
    out, dlse = torch.randn(2, 3, 5, 8, device=device), torch.randn(2, 3, 5, device=device)
    dout = scale * torch.randn(2, 5, 3, 8, device=device).transpose(1, 2)
    new_dout, new_out = attentions._with_lse_gradient(dout, dlse, out)
    expected = (dout * out).double().sum(-1) - dlse
    torch.testing.assert_close((new_dout.double() * new_out).sum(-1), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(new_dout, dout, rtol=0, atol=2.0**-38)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [64, 96, 128, 200])
def test_gate_of_a_merge_on_a_gpu(width: int, dtype: torch.dtype) -> None:
    assert_gate((2, 3, 67, width), dtype, "cuda")


def test_a_part_is_merged_in_place() -> None:
    made = torch.Generator().manual_seed(0)
    out_a, out_b = (torch.randn(2, 3, 10, 8, generator=made) for _ in range(2))
    lse_a, lse_b = (torch.randn(2, 3, 10, generator=made) for _ in range(2))
    expected, expected_lse = merge_attention_states(
        out_a[:, :, 2:7], lse_a[:, :, 2:7], out_b[:, :, :5], lse_b[:, :, :5]
    )
    rest = out_a[:, :, 7:].clone()
    merge_into(out_a[:, :, 2:7], lse_a[:, :, 2:7], out_b[:, :, :5], lse_b[:, :, :5])
    assert torch.equal(out_a[:, :, 2:7], expected)
    assert torch.equal(lse_a[:, :, 2:7], expected_lse)
    assert torch.equal(out_a[:, :, 7:], rest)
