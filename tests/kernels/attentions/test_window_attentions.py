"""Window attention, both ways: the CPU implementation, and (in a separate process) the Triton kernels interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import window_attention
from rooftop.kernels.attentions.tables import WINDOW_BACKWARD, WINDOW_FORWARD, WindowConfig
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@dataclass(frozen=True)
class Case:
    batch: int = 2
    size: tuple[int, int] = (5, 7)
    heads: int = 2
    features: int = 4  # of a head
    window: tuple[int, int] = (3, 4)
    shift: tuple[int, int] = (1, 2)
    padded: bool = True  # with separate values
    cosine: bool = False

    def tensors(self, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
        """query_key_value, bias, padding, cosine_scale."""
        torch.manual_seed(self.batch + sum(self.size))
        channels, positions = self.heads * self.features, math.prod(self.window)
        found = [torch.randn(self.batch, *self.size, 3 * channels), torch.randn(self.heads, positions, positions)]
        padding = torch.randn(3 * channels) if self.padded else None
        scale = 1 + 9 * torch.rand(self.heads) if self.cosine else None
        return [None if t is None else t.to(dtype) for t in (*found, padding, scale)]

    def ours(self, qkv: Tensor, bias: Tensor, padding: Tensor | None, scale: Tensor | None) -> Tensor:
        shape = (self.heads, self.window, self.shift)
        return window_attention(qkv, bias, *shape, padding=padding, cosine_scale=scale)

    def origin(self, qkv: Tensor, bias: Tensor, padding: Tensor | None, scale: Tensor | None) -> Tensor:
        """The computation of the papers' code: pad, roll, cut, attend, join, roll, crop."""
        (high, wide), (height, width) = self.window, self.size
        tall, broad = -(-height // high) * high, -(-width // wide) * wide
        shift = [s if size > w else 0 for s, size, w in zip(self.shift, self.size, self.window, strict=True)]
        x = qkv.new_zeros(self.batch, tall, broad, qkv.shape[3]) + (0 if padding is None else padding)
        x[:, :height, :width] = qkv
        part = qkv.new_zeros(tall, broad)
        for number, ends in enumerate([(0, -high), (-high, -shift[0] or None), (-shift[0] or tall, None)]):
            part[slice(*ends)] += 10 * number
        for number, ends in enumerate([(0, -wide), (-wide, -shift[1] or None), (-shift[1] or broad, None)]):
            part[:, slice(*ends)] += number
        x, part = self._windows(x.roll((-shift[0], -shift[1]), (1, 2))), self._windows(part[None, ..., None])
        query, key, value = x.unflatten(-1, (3, self.heads, self.features)).permute(3, 0, 1, 4, 2, 5)
        if scale is None:
            scores = (query * self.features**-0.5) @ key.mT
        else:
            scores = F.normalize(query, dim=-1) @ F.normalize(key, dim=-1).mT * scale[:, None, None]
        scores = scores + bias - 100.0 * (part != part.mT)[:, :, None].to(scores.dtype)
        out = (scores.softmax(-1) @ value).transpose(2, 3).flatten(3)
        out = out.unflatten(2, self.window).unflatten(1, (tall // high, broad // wide)).transpose(2, 3)
        out = out.reshape(self.batch, tall, broad, -1).roll((shift[0], shift[1]), (1, 2))
        return out[:, :height, :width]

    def _windows(self, x: Tensor) -> Tensor:
        (high, wide), (batch, height, width, channels) = self.window, x.shape
        cut = x.reshape(batch, height // high, high, width // wide, wide, channels).transpose(2, 3)
        return cut.reshape(batch, -1, high * wide, channels)


CASES = {
    "padded, shifted": Case(),
    "zeros beyond the map": Case(padded=False),
    "whole windows": Case(size=(6, 12), padded=False),
    "not shifted": Case(shift=(0, 0)),
    "shifted down": Case(shift=(2, 0)),
    "shifted across": Case(shift=(0, 3)),
    "one window": Case(size=(3, 4)),
    "window larger than the map": Case(size=(2, 3)),
    "one window down, several across": Case(size=(2, 9)),
    "one position": Case(1, (2, 3), window=(1, 1), shift=(0, 0)),
    "cosine": Case(cosine=True),
    "cosine, whole windows": Case(size=(6, 12), padded=False, cosine=True),
    "17 features, three heads": Case(heads=3, features=17),
    "as Swin has them": Case(1, (15, 13), 2, 32, (7, 7), (3, 3)),
    "as Swin V2 has them": Case(1, (16, 9), 2, 32, (8, 8), (4, 4), cosine=True),
}
Function = Callable[..., Tensor]


def output_and_gradients(function: Function, tensors: list[Tensor | None], dout: Tensor) -> list[Tensor | None]:
    leaves = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    out = function(*leaves)
    out.backward(dout.to(out.dtype))
    return [out.detach(), *(None if leaf is None else leaf.grad for leaf in leaves)]


def on(device: str, tensors: list[Tensor | None]) -> list[Tensor | None]:
    return [None if t is None else t.to(device) for t in tensors]


KERNELS = {"window_attention_forward", "window_attention_backward"}


def assert_gate(case: Case, dtype: torch.dtype, device: str = "cpu", kernels: Set[str] = KERNELS) -> None:
    """Output and gradients pass the numerics gate, and (interpreted, or on a GPU) come from the kernels."""
    tensors = on(device, case.tensors(dtype))
    assert tensors[0] is not None
    dout = torch.randn(*tensors[0].shape[:3], case.heads * case.features).to(tensors[0])
    with count_launches() as launches:
        ours = output_and_gradients(case.ours, tensors, dout)
    if INTERPRETED or device == "cuda":
        assert launches.keys() == kernels
    eager = output_and_gradients(case.origin, tensors, dout)
    exact = output_and_gradients(case.origin, [None if t is None else t.double() for t in tensors], dout.double())
    names = ("out", "dquery_key_value", "dbias", "dpadding", "dcosine_scale")
    for name, *values in zip(names, ours, eager, exact, strict=True):
        if values[0] is None:
            assert values[1] is None
        else:
            assert_as_accurate(*values, what=f"{name} of {case} {dtype}")  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_it_is_the_origin(case: Case) -> None:
    """The numerics gate is not used here, because for few elements PyTorch's largest error can be 0 by luck."""
    tensors = case.tensors(torch.float64)
    assert tensors[0] is not None
    dout = torch.randn(*tensors[0].shape[:3], case.heads * case.features, dtype=torch.float64)
    exact = output_and_gradients(case.origin, tensors, dout)
    torch.testing.assert_close(output_and_gradients(case.ours, tensors, dout), exact)
    with count_launches() as launches:
        single = output_and_gradients(case.ours, [None if t is None else t.float() for t in tensors], dout.float())
    assert launches == (dict.fromkeys(KERNELS, 1) if INTERPRETED else {})
    for ours, truth in zip(single, exact, strict=True):
        if truth is not None:
            assert ours is not None
            torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=2e-6 * float(1 + truth.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["as Swin has them", "as Swin V2 has them", "padded, shifted"])
def test_gate(name: str, dtype: torch.dtype) -> None:
    assert_gate(CASES[name], dtype)


def test_long_windows_have_a_kernel_forward_and_are_plain_pytorch_backward() -> None:
    assert_gate(Case(1, (12, 20), 1, 8, (12, 12), (6, 6)), torch.float32, kernels={"window_attention_forward"})


def test_windows_and_heads_beyond_the_tables_are_plain_pytorch() -> None:
    for case in (Case(1, (17, 16), 1, 4, (17, 16), (0, 0)), Case(1, (4, 4), 1, 130, (2, 2), (1, 1))):
        assert_gate(case, torch.float32, kernels=set())


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.booleans(),
    st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_size_window_and_shift(
    size: tuple[int, int], window: tuple[int, int], shift: tuple[int, int], padded: bool, cosine: bool
) -> None:
    shift = (shift[0] % window[0], shift[1] % window[1])
    case = Case(1, size, 2, 3, window, shift, padded, cosine)
    tensors, dout = case.tensors(), torch.randn(1, *size, 6)
    ours, theirs = (output_and_gradients(f, tensors, dout) for f in (case.ours, case.origin))
    for a, b in zip(ours, theirs, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=2e-5 * float(1 + b.abs().max()))


def test_weights_of_equal_values_sum_to_one() -> None:
    case = Case(size=(6, 12), padded=False)
    qkv, bias, *_ = case.tensors()
    assert qkv is not None
    qkv[..., 16:] = 3.0
    torch.testing.assert_close(window_attention(qkv, bias, 2, (3, 4), (1, 2)), torch.full((2, 6, 12, 8), 3.0))


def test_a_shift_by_whole_windows_moves_the_result() -> None:
    case = Case(size=(6, 12), shift=(0, 0), padded=False)
    qkv, *rest = case.tensors()
    assert qkv is not None
    moved = case.ours(qkv.roll((3, 4), (1, 2)), *rest)
    torch.testing.assert_close(moved, case.ours(qkv, *rest).roll((3, 4), (1, 2)))


def test_windows_see_nothing_of_each_other() -> None:
    case = Case(size=(6, 12), padded=False)
    qkv, *rest = case.tensors()
    assert qkv is not None
    leaf = qkv.requires_grad_()
    case.ours(leaf, *rest)[:, 4, 5].sum().backward()
    assert leaf.grad is not None
    seen = leaf.grad.abs().sum((0, 3)) > 1e-20  # window rows 4 to 6 and columns 2 to 5 in shifted order, but cut off
    expected = torch.zeros(6, 12, dtype=torch.bool)
    expected[4:6, 2:6] = True
    assert torch.equal(seen, expected)


def test_a_large_offset_of_the_bias_changes_nothing() -> None:
    case = CASES["as Swin has them"]
    qkv, bias, padding, _ = case.tensors()
    assert bias is not None
    torch.testing.assert_close(
        case.ours(qkv, bias + 1024, padding, None), case.ours(qkv, bias, padding, None), rtol=1e-3, atol=1e-3
    )


def test_values_that_are_not_finite_stay_in_their_window() -> None:
    case = Case(size=(6, 8), shift=(0, 0), padded=False)
    qkv, *rest = case.tensors()
    assert qkv is not None
    qkv[0, 0, 0, 0], qkv[0, 4, 5, 20] = math.nan, math.inf
    out = case.ours(qkv, *rest)
    assert out[0, 0, 0, :4].isnan().all()  # the result of one query and head
    assert out[0, 3:, 4:, 4].isinf().all()
    assert (~out.isfinite()).sum() == 4 + 12


def test_vectors_of_length_zero_have_no_direction() -> None:
    case = replace(CASES["cosine"], size=(6, 8))
    qkv, *rest = case.tensors()
    assert qkv is not None
    qkv[..., :8] = 0.0  # all queries
    out = case.ours(qkv, *rest)
    torch.testing.assert_close(out, case.origin(qkv, *rest))


def test_views_with_any_strides() -> None:
    case = Case()
    qkv, bias, padding, _ = case.tensors()
    assert qkv is not None
    assert bias is not None
    assert padding is not None
    expected = case.ours(qkv, bias, padding, None)
    strided = qkv.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    repeated = torch.stack((padding, padding), 1)[:, 0]
    torch.testing.assert_close(case.ours(strided, bias.mT.contiguous().mT, repeated, None), expected)
    leaf = strided.detach().requires_grad_()
    case.ours(leaf, bias, padding, None).sum().backward()  # an expanded gradient: all strides 0
    other = qkv.clone().requires_grad_()
    case.origin(other, bias, padding, None).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 5, 6, 24), (2, 0, 6, 24), (2, 5, 0, 24), (2, 5, 6, 0)])
def test_nothing_to_do(shape: tuple[int, ...]) -> None:
    qkv, bias = torch.randn(shape, requires_grad=True), torch.randn(2, 6, 6, requires_grad=True)
    out = window_attention(qkv, bias, 2, (2, 3), (1, 1), padding=torch.randn(shape[3]))
    assert out.shape == (*shape[:3], shape[3] // 3)
    out.sum().backward()
    assert bias.grad is not None
    assert (bias.grad == 0).all()


@pytest.mark.parametrize("name", ["padded, shifted", "cosine", "window larger than the map"])
def test_gradients_against_finite_differences(name: str) -> None:
    case = replace(CASES[name], batch=1, size=(3, 2), heads=1, window=(2, 2), shift=(1, 1), features=2)
    leaves = [None if t is None else t.requires_grad_() for t in case.tensors(torch.float64)]
    assert torch.autograd.gradcheck(case.ours, leaves)


def test_derivatives_that_it_has_not_are_refused() -> None:
    qkv, bias, *_ = (None if t is None else t.requires_grad_() for t in Case().tensors())
    (gradient,) = torch.autograd.grad(window_attention(qkv, bias, 2, (3, 4)).square().sum(), qkv, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), qkv)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda x: window_attention(x, bias, 2, (3, 4)), (qkv.detach(),), (qkv.detach(),))


@pytest.mark.parametrize("name", ["padded, shifted", "cosine", "zeros beyond the map"])
def test_operator_checks_of_torch_library(name: str) -> None:
    case = CASES[name]
    tensors = [None if t is None else t.requires_grad_() for t in case.tensors()]
    operator = torch.ops.rooftop.window_attention.default
    torch.library.opcheck(operator, (*tensors, case.heads, list(case.window), list(case.shift), 0.5))


def test_compiled_whole() -> None:
    case = Case()
    tensors, dout = case.tensors(), torch.randn(2, 5, 7, 8)
    compiled = torch.compile(case.ours, fullgraph=True, backend="aot_eager")
    expected = output_and_gradients(case.ours, tensors, dout)
    torch.testing.assert_close(output_and_gradients(compiled, tensors, dout), expected)


def test_autocast_casts_the_map_alone() -> None:
    case = Case()
    tensors, dout = case.tensors(), torch.randn(2, 5, 7, 8)
    assert tensors[0] is not None
    with torch.autocast("cpu", torch.bfloat16):
        found = output_and_gradients(case.ours, tensors, dout)
    expected = output_and_gradients(case.ours, [tensors[0].bfloat16(), *tensors[1:]], dout)
    assert found[0].dtype == torch.bfloat16  # type: ignore[union-attr]
    assert all(each is None or each.dtype == torch.float32 for each in found[1:])
    for a, b in zip(found, expected, strict=True):
        if b is not None:
            torch.testing.assert_close(a, b.to(a.dtype))  # type: ignore[union-attr]


def test_ten_runs_give_the_same_bits() -> None:
    case = CASES["as Swin has them"]
    tensors, dout = case.tensors(), torch.randn(1, 15, 13, 64)
    first, *others = [output_and_gradients(case.ours, tensors, dout) for _ in range(10)]
    assert all(torch.equal(a, b) for o in others for a, b in zip(first, o, strict=True) if a is not None)  # type: ignore[arg-type]


def test_cost_is_what_a_person_counts() -> None:
    case = Case(batch=1, size=(5, 8), window=(3, 4), padded=True)  # 4 windows of 12 positions, 2 heads of 4
    with CountingMode() as counted:
        output_and_gradients(case.ours, case.tensors(), torch.ones(1, 5, 8, 8))
    costs = {r.name: r.cost for r in counted.records}
    forward, backward = costs["rooftop::window_attention"], costs["rooftop::window_attention_backward"]
    assert forward is not None
    assert backward is not None
    pairs, map_bytes, bias_bytes, padding_bytes = 4 * 2 * 144, 4 * 40 * 24, 4 * 288, 4 * 24
    assert forward.total_flops == pairs * (2 * 2 * 4 + 5 + 1 + 1)
    assert forward.read_bytes == map_bytes + bias_bytes + padding_bytes
    assert forward.write_bytes == map_bytes // 3
    assert backward.total_flops == pairs * (5 * 2 * 4 + 6 + 1 + 1 + 1)
    assert backward.read_bytes == forward.read_bytes + map_bytes // 3
    assert backward.write_bytes == forward.read_bytes


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query_key_value": [1.0]}, TypeError, "query_key_value must be a tensor, got list"),
        (
            {"query_key_value": torch.ones(2, 5, 6, 24, dtype=torch.int64)},
            TypeError,
            "must be bfloat16, .* got torch.int",
        ),
        ({"query_key_value": torch.ones(5, 6, 24)}, ValueError, r"expected query_key_value of shape \(B, H, W, 3 C\)"),
        ({"query_key_value": torch.ones(2, 5, 6, 27)}, ValueError, "C divisible by 2 heads"),
        ({"bias": None}, TypeError, "bias must be a tensor, got NoneType"),
        ({"bias": torch.eye(6).to_sparse()}, TypeError, "bias must be dense"),
        ({"bias": torch.ones(2, 6, 5)}, ValueError, r"expected bias of shape \(2, 6, 6\), got \(2, 6, 5\)"),
        ({"bias": torch.ones(2, 6, 6, device="meta")}, ValueError, "query_key_value is on cpu, bias on meta"),
        ({"padding": torch.ones(8)}, ValueError, r"expected padding of shape \(24,\)"),
        ({"cosine_scale": torch.ones(2, 1, 1)}, ValueError, r"expected cosine_scale of shape \(2,\)"),
        ({"cosine_scale": torch.ones(2), "scale": 1.0}, ValueError, "scale or cosine_scale, not both"),
        ({"scale": math.nan}, ValueError, "scale must be finite, got nan"),
        ({"scale": "1"}, TypeError, "scale must be a number or None, got str"),
        ({"heads": 0}, ValueError, "heads must be a positive int, got 0"),
        ({"window": 7}, ValueError, "window must be two ints of at least 1, got 7"),
        ({"window": (2, 0)}, ValueError, r"window must be two ints of at least 1, got \(2, 0\)"),
        ({"shift": (1,)}, ValueError, "shift must be two ints of at least 0"),
        ({"shift": (1, -1)}, ValueError, "shift must be two ints of at least 0"),
        ({"shift": (1, 3)}, ValueError, r"shift must be below the window's size \(2, 3\), got \(1, 3\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    right = {"query_key_value": torch.randn(2, 5, 6, 24), "bias": torch.ones(2, 6, 6), "heads": 2, "window": (2, 3)}
    with pytest.raises(error, match=message):
        window_attention(**{**right, **arguments})  # type: ignore[arg-type]


def test_dropout_drops_the_share_of_weights_it_says_and_keeps_the_mean() -> None:
    torch.manual_seed(0)
    place = torch.arange(16).reshape(4, 4).repeat(4, 4)  # the number of a key in its window, which is its value
    packed = torch.zeros(3, 16, 16, 3 * 64)
    packed[..., 128:] = F.one_hot(place, 16).repeat(1, 1, 4).float()
    with count_launches() as launches:
        out = window_attention(packed, torch.zeros(4, 16, 16), 4, (4, 4), dropout=0.25)  # each weight is 1 / 16
    assert not launches
    kept = out[:, :, :, :16].sum(-1)
    assert out.unique().tolist() == pytest.approx([0, 1 / 16 / 0.75])
    assert abs((out == 0).float().mean() - 0.25) < 0.01
    assert abs(kept.mean() - 1) < 0.01
    with pytest.raises(TypeError, match="window_attention: dropout must be a number, got str"):
        window_attention(packed, torch.zeros(4, 16, 16), 4, (4, 4), dropout="0.1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dropout must be between 0 and 1, got -1"):
        window_attention(packed, torch.zeros(4, 16, 16), 4, (4, 4), dropout=-1)


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_the_kernels_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    """Every case passes the gate, forward and backward."""
    chosen = "origin or long_windows or (gate and V2) or any_strides or through_the_interpreter"
    assert interpreted(__file__, "-k", chosen) >= 20


@pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted")
def test_half_precision_compiles_for_sm_90_without_spills(spilled_bytes: Callable[[str], int]) -> None:
    """The heads have 32 features, like Swin's."""
    pytest.importorskip("triton")
    from rooftop.kernels.attentions.triton_kernels import window_attentions as kernels

    for config in WINDOW_FORWARD:
        assert spilled_bytes(ptx_of(kernels.window_attention_forward, config, 32, cosine=True)) == 0, config
    for config in WINDOW_BACKWARD:
        assert spilled_bytes(ptx_of(kernels.window_attention_backward, config, 32, cosine=False)) == 0, config


def ptx_of(kernel: Any, config: WindowConfig, features: int, cosine: bool) -> str:
    """The PTX of a bfloat16 kernel for a shifted and padded map."""
    import triton

    side = math.isqrt(config.positions)
    constants = {"WINDOW_H": side, "WINDOW_W": side, "KEYS": config.positions, "D": features, "BLOCK_D": features}
    constants |= {"PADDING": True, "COSINE": cosine, "SHIFTED": True, "PRECISION": "ieee", "WIDEN": False}
    if "QUERIES" in kernel.arg_names:
        constants["QUERIES"] = config.queries
    names, single = kernel.arg_names, {"bias", "padding", "cosine_scale", "dbias", "dpadding", "dscale"}
    tensors = dict.fromkeys(("dout", "packed", "out", "dpacked"), "*bf16") | dict.fromkeys(single, "*fp32")
    types = {n: "constexpr" if n in constants else tensors.get(n, "fp32" if n == "scale" else "i32") for n in names}
    aligned = {(names.index(name),): [["tt.divisibility", 16]] for name in tensors.keys() & set(names)}
    source = triton.compiler.ASTSource(kernel, types, constants, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    options = {"num_warps": config.warps, "num_stages": 1}
    return str(triton.compile(source, target=target, options=options).asm["ptx"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_gate_on_a_gpu(case: Case, dtype: torch.dtype) -> None:
    assert_gate(replace(case, batch=8), dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("features", [16, 24, 32, 48, 64])
def test_gate_of_a_stage_of_swin_on_a_gpu(features: int) -> None:
    for size, heads in (((56, 56), 3), ((14, 14), 12), ((7, 7), 24), ((50, 67), 3)):
        assert_gate(Case(16, size, heads, features, (7, 7), (3, 3)), torch.bfloat16, "cuda")


@pytest.mark.gpu
def test_compiled_by_inductor_on_a_gpu() -> None:
    case = CASES["as Swin has them"]
    tensors = on("cuda", case.tensors())
    compiled = torch.compile(lambda *given: case.ours(*given).square(), fullgraph=True)
    torch.testing.assert_close(compiled(*tensors), case.ours(*tensors).square())
