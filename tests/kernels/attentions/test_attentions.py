"""The CPU implementation of attention and its log-sum-exp. The choice of a back end is tested without running any."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from rooftop.cost import CountingMode
from rooftop.kernels import attention, attention_plan, merge_attention_states
from rooftop.kernels.attentions import attentions
from rooftop.kernels.attentions import plans as attention_plans
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def inputs(
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    key_heads: int | None = None,
) -> list[Tensor]:
    torch.manual_seed(batch + heads + queries + keys + width)
    sizes = ((heads, queries), (key_heads or heads, keys), (key_heads or heads, keys))
    return [torch.randn(batch, *size, width).to(dtype) for size in sizes]


def with_gradients(function: Callable[..., Any], tensors: list[Tensor], *gradients: Tensor) -> list[Tensor]:
    """All outputs of a function, then the gradients of its inputs."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    found = function(*tensors)
    found = found if isinstance(found, tuple) else (found,)
    back = torch.autograd.grad(found, tensors, [g.to(y.dtype) for g, y in zip(gradients, found, strict=True)])
    return [y.detach() for y in found] + list(back)


def lse_of(query: Tensor, key: Tensor, is_causal: bool = False) -> Tensor:
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    if is_causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -math.inf)
    return scores.logsumexp(-1)


def with_math(*tensors: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*tensors, **options)


plain = F.scaled_dot_product_attention


# ---- attention ---------------------------------------------------------------------------------------------------


def assert_gate(tensors: list[Tensor], device: str = "cpu", **options: Any) -> None:
    """Output, gradients and log-sum-exp pass the numerics gate; each key head may serve several query heads."""
    options["enable_gqa"] = tensors[0].shape[1] != tensors[1].shape[1]
    tensors = [t.to(device) for t in tensors]
    dy = torch.randn_like(tensors[0])
    ours = with_gradients(lambda *t: attention(*t, **options), tensors, dy)
    eager = with_gradients(lambda *t: (with_math if device == "cpu" else plain)(*t, **options), tensors, dy)
    wide = [t.double() for t in tensors]
    if options.get("attn_mask") is not None and options["attn_mask"].is_floating_point():
        options["attn_mask"] = options["attn_mask"].double()
    exact = with_gradients(lambda *t: with_math(*t, **options), wide, dy.double())
    for what, *values in zip(("out", "dquery", "dkey", "dvalue"), ours, eager, exact, strict=True):
        assert_as_accurate(*values, what=f"{what} {tuple(tensors[0].shape)} {tensors[0].dtype}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 17, 17, 8), (1, 2, 5, 33, 7), (2, 1, 20, 3, 16)])
def test_gate(shape: tuple[int, ...], is_causal: bool, dtype: torch.dtype) -> None:
    assert_gate(inputs(*shape, dtype), is_causal=is_causal)


def test_gate_of_groups_masks_and_scales() -> None:
    tensors = inputs(2, 6, 9, 11, 8, key_heads=2)
    assert_gate(tensors, scale=0.3)
    assert_gate(tensors, attn_mask=torch.randn(6, 1, 11))
    assert_gate(tensors, attn_mask=torch.rand(2, 1, 9, 11) > 0.3)


def test_the_log_sum_exp_and_its_gradient() -> None:
    query, key, value = inputs(2, 3, 6, 6, 8)
    for is_causal in (False, True):
        both = lambda q, k, v: attention(q, k, v, is_causal=is_causal, return_lse=True)  # noqa: E731, B023
        apart = lambda q, k, v: (with_math(q, k, v, is_causal=is_causal), lse_of(q, k, is_causal))  # noqa: E731, B023
        gradients = torch.randn(2, 3, 6, 8), torch.randn(2, 3, 6)
        ours, theirs = (with_gradients(f, [query, key, value], *gradients) for f in (both, apart))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_against_finite_differences() -> None:
    tensors = [t.double().requires_grad_() for t in inputs(1, 2, 3, 3, 2, key_heads=1)]
    mask = torch.randn(2, 3, 1, dtype=torch.float64, requires_grad=True)
    causal = lambda q, k, v: attention(q, k, v, is_causal=True, enable_gqa=True, return_lse=True)  # noqa: E731
    masked = lambda q, k, v, m: attention(q, k, v, attn_mask=m, enable_gqa=True, return_lse=True)  # noqa: E731
    assert torch.autograd.gradcheck(causal, tensors)
    assert torch.autograd.gradcheck(masked, (*tensors, mask))


def test_rows_that_may_see_nothing_are_zero() -> None:
    query, key, value = inputs(1, 1, 3, 4, 8)
    keep = torch.tensor([[True] * 4, [False] * 4, [True, False, False, False]])
    out, lse, *gradients = with_gradients(
        lambda q, k, v: attention(q, k, v, attn_mask=keep, return_lse=True),
        [query, key, value],
        torch.randn(1, 1, 3, 8),
        torch.randn(1, 1, 3),
    )
    assert (out[0, 0, 1] == 0).all()
    assert lse[0, 0, 1] == -math.inf
    torch.testing.assert_close(out[0, 0, 2], value[0, 0, 0])
    assert all(g.isfinite().all() for g in gradients)
    out, lse = attention(query, key[:, :, :0], value[:, :, :0], return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def test_operator_checks_of_torch_library() -> None:
    query, key, value = (t.requires_grad_() for t in inputs(1, 2, 3, 4, 8))
    operator = torch.ops.rooftop.attention.default
    torch.library.opcheck(operator, (query, key, value, torch.randn(1, 1, 1, 4, requires_grad=True), False, 0.5))


def test_compiled_whole() -> None:
    tensors = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in inputs(2, 2, 6, 6, 8)]

    def step(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        left = attention(query, key[:, :, :2], value[:, :, :2], return_lse=True)
        right = attention(query, key[:, :, 2:], value[:, :, 2:], return_lse=True)
        return merge_attention_states(*left, *right)

    gradients = torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours = with_gradients(compiled, tensors, *gradients)
    theirs = with_gradients(lambda q, k, v: (with_math(q, k, v), lse_of(q, k)), tensors, *gradients)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_autocast_computes_in_its_dtype() -> None:
    query, key, value = inputs(1, 2, 4, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(query, key.bfloat16().float(), value).dtype == torch.bfloat16


def test_cost_is_what_a_person_counts() -> None:
    query, key, value = (t.requires_grad_() for t in inputs(2, 4, 5, 5, 16, key_heads=2))
    with CountingMode() as counted:
        attention(query, key, value, is_causal=True, enable_gqa=True).backward(torch.ones(2, 4, 5, 16))
    costs = {r.name: r.cost for r in counted.records}
    forward, backward = costs["rooftop::attention"], costs["rooftop::attention_backward"]
    assert forward is not None
    assert backward is not None
    pairs, whole, half = 2 * 4 * 15, 4 * 640, 4 * 320
    assert forward.total_flops == pairs * (2 * 32 + 5)
    assert backward.total_flops == pairs * (2 * 5 * 16 + 6)
    assert (forward.read_bytes, forward.write_bytes) == (whole + 2 * half, whole + 160)
    assert (backward.read_bytes, backward.write_bytes) == (3 * whole + 2 * half + 160, whole + 2 * half)


ARGUMENTS = dict(zip(("query", "key", "value"), inputs(2, 4, 5, 6, 8), strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": [1.0]}, TypeError, "query must be a tensor, got list"),
        ({"query": torch.zeros(5, 8)}, ValueError, r"expected query of shape \(B, H, S, D\)"),
        ({"key": torch.zeros(2, 4, 6, 7)}, ValueError, "do not match"),
        ({"value": ARGUMENTS["value"].half()}, TypeError, "must have one dtype"),
        ({"key": torch.zeros(2, 2, 6, 8), "value": torch.zeros(2, 2, 6, 8)}, ValueError, "enable_gqa=True"),
        (
            {"key": torch.zeros(2, 3, 6, 8), "value": torch.zeros(2, 3, 6, 8), "enable_gqa": True},
            ValueError,
            "the 3 heads of the key do not divide the 4 heads of the query",
        ),
        ({"attn_mask": torch.zeros(5, 5)}, ValueError, r"of shape \(5, 5\) does not broadcast to \(2, 4, 5, 6\)"),
        ({"attn_mask": torch.zeros(5, 6), "is_causal": True}, ValueError, "not both"),
        ({"attn_mask": torch.zeros(5, 6, dtype=torch.int32)}, TypeError, "boolean or floating point"),
        ({"scale": math.nan}, ValueError, "scale must be finite"),
        ({"key": ARGUMENTS["key"].to("meta")}, ValueError, "query is on cpu, key on meta"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        attention(**{**ARGUMENTS, **arguments})  # type: ignore[arg-type]


def test_derivatives_that_it_has_not_are_refused() -> None:
    query, key, value = (t.requires_grad_() for t in inputs(1, 1, 3, 3, 4))
    (gradient,) = torch.autograd.grad(attention(query, key, value).square().sum(), query, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), query)


# ---- the choice of a back end ------------------------------------------------------------------------------------


@pytest.fixture
def plan_on(monkeypatch: pytest.MonkeyPatch) -> Callable[..., attention_plans.AttentionPlan]:
    """The plan for a simulated GPU."""
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)

    def plan(capability: tuple[int, int] = (9, 0), direction: Any = "forward", **changes: Any) -> Any:
        monkeypatch.setattr(attention_plans, "_capability", lambda device: capability)
        shape: dict[str, Any] = {"query": (2, 8, 4096, 128), "key_heads": 8, "keys": 4096, "value_features": 128}
        shape |= {"dtype": torch.bfloat16, "is_causal": True, "masked": False, **changes}
        return attention_plans.plan_of(attention_plans.Shape(**shape), torch.device("cuda"), direction)

    return plan


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_back_end_that_can_do_the_call_is_chosen(plan_on: Callable[..., Any], direction: str) -> None:
    plan = plan_on(direction=direction)
    assert plan.backend in ("cudnn", "flash")
    assert "fastest by the table" in plan.reason
    assert plan_on((8, 0), direction).backend == "flash"
    assert plan_on(direction=direction, dtype=torch.float32).backend == "efficient"
    assert plan_on(direction=direction, dtype=torch.float64).backend == "reference"
    assert plan_on(direction=direction, keys=0).backend == "reference"
    masked = plan_on(direction=direction, masked=True, is_causal=False)
    assert masked.backend == "efficient"
    assert masked.refused["flash"] == "it supports no mask here"
    assert plan_on(direction=direction, keys=100).refused["flash"] == "a causal mask must be square"
    assert plan_on(direction=direction, query=(2, 8, 4096, 512), value_features=512).backend == "efficient"


def test_what_is_disabled_is_not_chosen(plan_on: Callable[..., Any]) -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION]):
        plan = plan_on()
    assert plan.backend == "efficient"
    assert set(plan.refused.values()) == {"it is disabled"}
    torch.use_deterministic_algorithms(True)
    try:
        assert plan_on().backend == "flash"
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("positions", [64, 300])
def test_the_layout_of_gradients_does_not_depend_on_settings(
    positions: int, monkeypatch: pytest.MonkeyPatch, plan_on: Callable[..., Any]
) -> None:
    """A program may be traced with other settings than it runs with."""
    plan_on((9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    q = torch.empty(2, 3, positions, 64, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(
        attentions,
        "plan_of",
        lambda shape, _, *rest, **options: attention_plans.plan_of(shape, torch.device("cuda"), *rest, **options),
    )
    strides = []
    for backends in (list(BACKENDS.values()), [SDPBackend.MATH], [SDPBackend.EFFICIENT_ATTENTION]):
        with sdpa_kernel(backends):
            strides.append([each.stride() for each in attentions._gradients_of(q, q, q, None, False)])
    assert strides[0] == strides[1] == strides[2]


def test_the_plan_of_a_call_on_the_cpu() -> None:
    plan = attention_plan(*inputs(1, 1, 3, 3, 4))
    assert (plan.backend, plan.reason) == ("reference", "on cpu")
    with pytest.raises(ValueError, match="direction must be 'forward' or 'backward'"):
        attention_plan(*inputs(1, 1, 3, 3, 4), direction="both")  # type: ignore[arg-type]


# ---- on a GPU ----------------------------------------------------------------------------------------------------

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


@pytest.mark.gpu
@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("width", [64, 100, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_gate_of_each_back_end_on_a_gpu(name: str, width: int, is_causal: bool, key_heads: int) -> None:
    tensors = [t.cuda() for t in inputs(2, 4, 200, 200, width, torch.bfloat16, key_heads)]
    with sdpa_kernel([BACKENDS[name]]):
        assert attention_plan(*tensors, is_causal=is_causal, enable_gqa=True).backend == name
    assert_gate_with(BACKENDS[name], tensors, is_causal)


def assert_gate_with(backend: SDPBackend, tensors: list[Tensor], is_causal: bool) -> None:
    """Output, log-sum-exp and the gradients of both outputs, compared with the float64 reference and with PyTorch in
    the same dtype."""
    options = {"is_causal": is_causal, "enable_gqa": True, "return_lse": True}
    gradients = torch.randn_like(tensors[0]), torch.randn(tensors[0].shape[:3], device="cuda")
    with sdpa_kernel([backend]):
        ours = with_gradients(lambda *t: attention(*t, **options), tensors, *gradients)

    def both(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        out = plain(query, key, value, is_causal=is_causal, enable_gqa=True)
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return out, lse_of(query, keys, is_causal).to(torch.promote_types(query.dtype, torch.float32))

    tensors = [t.clone(memory_format=torch.contiguous_format) for t in tensors]  # PyTorch's tensors must be aligned
    eager = with_gradients(both, tensors, *gradients)
    exact = with_gradients(both, [t.double() for t in tensors], *(g.double() for g in gradients))
    for what, *values in zip(("out", "lse", "dquery", "dkey", "dvalue"), ours, eager, exact, strict=True):
        assert_as_accurate(*values, what=f"{what} of {backend}")


@pytest.mark.gpu
@pytest.mark.parametrize("forward", BACKENDS)
@pytest.mark.parametrize("backward", BACKENDS)
def test_a_forward_by_one_back_end_and_a_backward_by_another(forward: str, backward: str) -> None:
    tensors = [t.cuda().requires_grad_() for t in inputs(2, 4, 256, 256, 64, torch.bfloat16)]
    dy = torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    with sdpa_kernel([BACKENDS[forward]]):
        out = attention(*tensors, is_causal=True)
    with sdpa_kernel([BACKENDS[backward]]):
        gradients = torch.autograd.grad(out, tensors, dy)
    eager = with_gradients(lambda *t: plain(*t, is_causal=True), tensors, dy)[1:]
    exact = with_gradients(lambda *t: plain(*t, is_causal=True), [t.double() for t in tensors], dy.double())[1:]
    for values in zip(gradients, eager, exact, strict=True):
        assert_as_accurate(*values, what=f"{forward} and {backward}")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [64, 150, 300])  # a different back end in each range of the table
@pytest.mark.parametrize("is_causal", [False, True])
def test_gate_of_what_is_chosen_on_a_gpu(is_causal: bool, positions: int, dtype: torch.dtype) -> None:
    assert_gate(inputs(2, 4, positions, positions, 64, dtype), "cuda", is_causal=is_causal)


@pytest.mark.gpu
@pytest.mark.parametrize("name", BACKENDS)
def test_rows_at_any_address_on_a_gpu(name: str) -> None:
    plain = [t.cuda() for t in inputs(2, 4, 200, 200, 64, torch.bfloat16)]
    for layout in (_shifted, _rows_of_odd_distance, _positions_first):
        assert_gate_with(BACKENDS[name], [layout(t) for t in plain], True)


def _shifted(x: Tensor) -> Tensor:
    return torch.cat((x.flatten()[:1], x.flatten()))[1:].reshape(x.shape)


def _rows_of_odd_distance(x: Tensor) -> Tensor:
    return torch.cat((x, x[..., :3]), -1)[..., : x.shape[-1]]


def _positions_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_of_masks_on_a_gpu(dtype: torch.dtype) -> None:
    tensors = inputs(2, 4, 65, 77, 40, dtype)
    assert_gate(tensors, "cuda", attn_mask=torch.randn(4, 1, 77, device="cuda").to(dtype))
    assert_gate(tensors, "cuda", attn_mask=torch.rand(2, 1, 65, 77, device="cuda") > 0.3)
    assert_gate(tensors, "cuda", is_causal=True)


@pytest.mark.gpu
def test_rows_that_may_see_nothing_on_a_gpu() -> None:
    query, key, value = (t.cuda().bfloat16().requires_grad_() for t in inputs(1, 2, 40, 50, 64))
    keep = torch.rand(40, 50, device="cuda") > 0.3
    keep[7] = False
    out, lse = attention(query, key, value, attn_mask=keep, return_lse=True)
    assert (out[:, :, 7] == 0).all()
    assert (lse[:, :, 7] == -math.inf).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (query, key, value)))


@pytest.mark.gpu
def test_a_gradient_of_the_log_sum_exp_is_refused_in_float16() -> None:
    query, key, value = (t.cuda().half().requires_grad_() for t in inputs(1, 2, 64, 64, 64))
    _, lse = attention(query, key, value, return_lse=True)
    with pytest.raises(NotImplementedError, match="the range of bfloat16 or float32"):
        lse.sum().backward()


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    tensors = [t.cuda().bfloat16() for t in inputs(2, 4, 1024, 1024, 64)]
    dy = torch.randn(2, 4, 1024, 64, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(lambda q, k, v: attention(q, k, v, is_causal=True) * 2, fullgraph=True)
    ours = with_gradients(compiled, tensors, dy)
    theirs = with_gradients(lambda q, k, v: attention(q, k, v, is_causal=True) * 2, tensors, dy)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)  # gradients are summed in any order
