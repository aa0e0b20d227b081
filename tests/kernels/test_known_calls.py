"""Decisions are remembered for calls with known shapes, strides and dtypes. Any sequence of calls gives the same bits
as without remembered decisions.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from rooftop import kernels
from rooftop.cost import CountingMode
from rooftop.kernels.elementwise import elementwise
from rooftop.kernels.softmaxes import softmaxes
from rooftop.launch import INTERPRETED, count_launches, cpp_extensions, known_calls, repeated_calls

pytest.importorskip("triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Inputs:
    """Makes tensors with a few shapes and any strides, offsets and dtypes."""

    def __init__(self, seed: int, device: str = "cpu") -> None:
        self.rng, self.device = random.Random(seed), device
        self.generator = torch.Generator().manual_seed(seed)

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)

    def indices(self, below: int, *shape: int) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, learned: bool = True) -> Tensor:
        """A tensor that is dense, transposed, with gaps, or at an address that is not a multiple of 16 bytes."""
        kind = self.one("dense", "dense", "transposed", "gaps", "offset")
        values = self.numbers(*shape).to(dtype)
        if kind == "transposed" and len(shape) > 1:
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        elif kind == "gaps" and shape:
            wide = torch.zeros(*shape[:-1], shape[-1] + 3, dtype=dtype, device=self.device)
            wide[..., : shape[-1]] = values
            values = wide[..., : shape[-1]]
        elif kind == "offset":
            memory = torch.zeros(values.numel() + 1, dtype=dtype, device=self.device)
            memory[1:] = values.flatten()
            values = memory[1:].view(shape)
        return values.requires_grad_(learned and self.one(True, True, False))


@kernels.fused
def gated(x, gate, scale):  # type: ignore[no-untyped-def]
    return x * torch.sigmoid(gate) * scale, x + scale


class Call(NamedTuple):
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def of_elementwise(make: Inputs) -> Call:
    dtype, shape = make.one(*DTYPES[:3]), make.one((4, 6), (3, 16), (2, 3, 5), (0, 4))
    x = make.tensor(shape, dtype)
    if make.one(True, False):
        return Call(make.one(kernels.silu, kernels.gelu, kernels.tanh), (x,))
    other = make.tensor(make.one(shape, shape[-1:], ()), make.one(dtype, torch.float32))
    return Call(gated, (x, other, make.one(2, 0.5, 1.5, True)))


def of_norms(make: Inputs) -> Call:
    dtype, columns = make.one(*DTYPES), make.one(5, 8, 24)
    x = make.tensor((make.one(1, 3), columns), dtype)
    weight, bias = (make.one(None, make.tensor((columns,), make.one(dtype, torch.float32))) for _ in range(2))
    eps = make.one(1e-5, 1e-3)
    if make.one(True, False):
        residual = make.one(x, make.tensor(tuple(x.shape), dtype))
        return make.one(
            Call(kernels.add_layer_norm, (x, residual, (columns,), weight, bias, eps)),
            Call(kernels.add_rms_norm, (x, residual, (columns,), weight, eps)),
        )
    return make.one(
        Call(kernels.layer_norm, (x, (columns,), weight, bias, eps)),
        Call(kernels.rms_norm, (x, (columns,), weight, eps)),
    )


def of_softmaxes(make: Inputs) -> Call:
    x = make.tensor(make.one((3, 8), (2, 3, 7), (1, 40)), make.one(*DTYPES))
    scale, dim = make.one(1.0, 0.5, 0.0, -0.0), make.one(-1, -1, 0)
    masks = (
        None,
        torch.ones(x.shape[-1:], dtype=torch.bool, device=x.device),
        torch.zeros(x.shape[-1:], device=x.device),
    )
    mask = make.one(*masks)
    function = make.one(kernels.softmax, kernels.log_softmax)
    return Call(lambda x: function(x, dim, mask=mask, scale=scale), (x,))


def of_reductions(make: Inputs) -> Call:
    x = make.tensor(make.one((3, 8), (2, 3, 5), (90, 8)), make.one(*DTYPES))
    dim, keepdim = make.one(None, 0, -1, (0, 1)), make.one(True, False)
    function = make.one(kernels.sum, kernels.mean, kernels.amax, kernels.amin)
    if make.one(True, False, False):
        place, along = make.one(kernels.argmax, kernels.argmin), make.one(0, -1)
        return Call(lambda x: place(x, along, keepdim), (x,))
    return Call(lambda x: function(x, () if dim is None else dim, keepdim), (x,))


def of_gated(make: Inputs) -> Call:
    shape, dtype = make.one((3, 8), (2, 3, 6)), make.one(*DTYPES)
    gate = make.tensor(shape, dtype)
    return Call(kernels.swiglu, (gate, make.one(None, gate, make.tensor(shape, dtype))))


def of_rope(make: Inputs) -> Call:
    dtype = make.one(*DTYPES)
    x = make.tensor((1, 2, make.one(3, 4), 8), dtype)
    cos, sin = (make.numbers(x.shape[2], 4) for _ in range(2))
    return Call(kernels.rope, (x, cos, sin))


def of_lookups(make: Inputs) -> Call:
    tokens = make.indices(5, *make.one((3,), (2, 4)))
    return Call(kernels.embedding, (tokens, make.tensor((5, make.one(6, 16)), make.one(*DTYPES))))


def of_losses(make: Inputs) -> Call:
    rows, classes = make.one(2, 5), make.one(6, 16)
    x = make.tensor((rows, classes), make.one(*DTYPES))
    targets = make.indices(classes, rows)
    weight = make.one(None, None, make.numbers(classes).abs())
    reduction = make.one("mean", "sum", "none")
    smoothing = make.one(0.0, 0.1)
    return Call(
        lambda x: kernels.cross_entropy(x, targets, weight, reduction=reduction, label_smoothing=smoothing), (x,)
    )


def of_matmuls(make: Inputs) -> Call:
    dtype, (rows, depth, columns) = make.one(*DTYPES[:3]), make.one((3, 16, 8), (20, 32, 24), (2, 5, 7))
    x, weight = make.tensor((rows, depth), dtype), make.tensor((columns, depth), dtype)
    if make.one(True, False, False):
        return Call(kernels.matmul, (x, weight.detach().t()))
    bias, activation = make.one(None, make.tensor((columns,), dtype)), make.one("none", "gelu", "relu", "sigmoid")
    return Call(lambda x, weight: kernels.linear_act(x, weight, bias, activation), (x, weight))


def of_convolutions(make: Inputs) -> Call:
    dtype, (channels, kernel, stride) = make.one(*DTYPES[:3]), make.one((16, 1, 1), (16, 3, 1), (16, 1, 2), (3, 3, 2))
    learned = make.device == "cpu"  # cuDNN adds up gradients in any order
    x = make.tensor((2, channels, 6, 6), dtype, learned)
    if make.one(True, True, False):
        x = x.detach().contiguous(memory_format=torch.channels_last).requires_grad_(x.requires_grad)
    weight = (
        make.numbers(16, channels, kernel, kernel).to(dtype, memory_format=torch.channels_last).requires_grad_(learned)
    )
    bias, activation = make.one(None, make.tensor((16,), dtype, learned)), make.one(None, "relu", "relu", "gelu")
    size = (6 + 2 * (kernel // 2) - kernel) // stride + 1
    residual = make.one(None, make.numbers(2, 16, size, size).to(dtype))
    options = {"stride": stride, "padding": kernel // 2, "activation": activation}
    return Call(lambda x, weight: kernels.conv_act(x, weight, bias, residual, **options), (x, weight))


def of_pages(make: Inputs) -> Call:
    dtype = make.one(*DTYPES[:3])
    query, keys, values = (make.numbers(*shape).to(dtype) for shape in ((2, 4, 8), (5, 2, 4, 8), (5, 2, 4, 8)))
    pages, lengths = torch.tensor([[4, 0], [2, 3]]), torch.tensor([make.one(0, 3), 8])
    tables, window = (pages.to(make.device), lengths.to(make.device)), make.one(None, 3)
    return Call(lambda q: kernels.paged_attention(q, keys, values, *tables, window=window), (query,))


def of_sites(make: Inputs) -> Call:
    x = make.tensor((make.one(4, 6), 8), make.one(*DTYPES))
    count = x.shape[0]
    if make.one(True, False):
        table = torch.stack([torch.arange(count) - 1, torch.arange(count), torch.arange(count) + 1], 1)
        table[-1, 2] = -1
        pool, neighbours = make.one(kernels.sparse_max_pool, kernels.sparse_avg_pool), table.int().to(make.device)
        return Call(lambda x: pool(x, neighbours), (x,))
    whole, batch = make.one(kernels.sparse_global_max_pool, kernels.sparse_global_avg_pool), make.indices(3, count)
    return Call(lambda x: whole(x, batch.int(), 3), (x,))


def of_attentions(make: Inputs) -> Call:
    dtype = make.one(*DTYPES[:3])
    q, k, v = (make.tensor((1, 2, 5, 8), dtype) for _ in range(3))
    causal = make.one(True, False)
    return Call(lambda q, k, v: kernels.attention(q, k, v, is_causal=causal), (q, k, v))


CALLS = {
    "matmuls": of_matmuls,
    "attentions": of_attentions,
    "convolutions": of_convolutions,
    "pages": of_pages,
    "sites": of_sites,
    "elementwise": of_elementwise,
    "norms": of_norms,
    "softmaxes": of_softmaxes,
    "reductions": of_reductions,
    "gated": of_gated,
    "rope": of_rope,
    "lookups": of_lookups,
    "losses": of_losses,
}


def bits(made: Any) -> list[Any]:
    made = made if isinstance(made, tuple | list) else (made,)
    return [(t.dtype, t.shape, t.stride(), t.detach().contiguous().view(-1).view(torch.uint8).tolist()) for t in made]


def both_directions(call: Call) -> list[Any]:
    made = call.function(*call.arguments)
    given = [t for t in call.arguments if isinstance(t, Tensor) and t.requires_grad]
    outputs = [t for t in (made if isinstance(made, tuple) else (made,)) if t.requires_grad]
    found = bits(made)
    if given and outputs:
        slopes = [torch.full_like(t, 0.5) for t in outputs]
        found += bits([t for t in torch.autograd.grad(outputs, given, slopes, allow_unused=True) if t is not None])
    with torch.no_grad():
        return found + bits(call.function(*call.arguments))


@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_any_sequence_of_calls_gives_the_bits_of_single_calls(family: str, seed: int, device: str) -> None:
    make = Inputs(seed, device)
    calls = [CALLS[family](make) for _ in range(8 if INTERPRETED else 12)]
    with repeated_calls.in_python(), count_launches() as three_times:
        known = [[both_directions(call) for call in calls] for _ in range(3)]
    with count_launches() as once:
        for call, *made in zip(calls, *known, strict=True):
            known_calls.forget()
            assert made == [both_directions(call)] * 3
    assert three_times == {name: 3 * count for name, count in once.items()}
    if (INTERPRETED or device == "cuda") and family != "attentions":
        assert sum(once.values()) >= 2  # kernels ran, not only references


@pytest.mark.skipif(cpp_extensions.compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize("family", CALLS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_sequences_of_calls_in_cpp(
    family: str, device: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("without kernels nothing is planned")
    request.getfixturevalue("compiled_calls")
    monkeypatch.setattr(repeated_calls, "LESSON_AT", 1)
    make = Inputs(7, device)
    calls = [CALLS[family](make) for _ in range(8)]
    with repeated_calls.in_python():
        expected = [both_directions(call) for call in calls]
    before = repeated_calls.calls_made()
    for _ in range(4):
        assert [both_directions(call) for call in calls] == expected
    if family in ("losses", "sites") and device == "cpu":
        assert repeated_calls.calls_made() == before  # each call checks the values of targets and tables
        return
    assert repeated_calls.calls_made() >= before + 8, repeated_calls.reasons


@pytest.mark.gpu
def test_calls_of_several_threads() -> None:
    make = Inputs(0, "cuda")
    calls = [CALLS[family](make) for family in ("norms", "softmaxes", "gated", "reductions") for _ in range(4)]
    expected = [both_directions(call) for call in calls]
    known_calls.forget()

    def work(seed: int) -> None:
        order = random.Random(seed).choices(range(len(calls)), k=60)
        for i in order:
            assert both_directions(calls[i]) == expected[i]

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_calls_in_other_modes(device: str) -> None:
    """Decisions made in one grad mode are used in the others, but each result has the mode of its call."""
    x = torch.randn(3, 8, device=device)
    for _ in range(3):
        with torch.inference_mode():
            inferred = kernels.softmax(x)
            assert inferred.is_inference()
            with torch.enable_grad():
                leaf = x.clone().requires_grad_()
                assert kernels.softmax(leaf).requires_grad == leaf.softmax(-1).requires_grad
        plain = kernels.softmax(x)
        assert not plain.is_inference()
        learned = kernels.softmax(x.requires_grad_())
        assert learned.requires_grad
        assert torch.autograd.grad(learned.sum(), x)[0].abs().max() < 1e-5
        x = x.detach()
        assert torch.equal(inferred.clone(), plain)
        assert torch.equal(learned, plain)
        with CountingMode() as counted:
            assert torch.equal(kernels.softmax(x), plain)
        assert [record.name for record in counted.records if "softmax" in record.name] == ["rooftop::softmax"]
        assert torch.func.vmap(kernels.softmax)(x[None]).shape == (1, 3, 8)


@pytest.mark.gpu
def test_streams_and_graphs_on_a_gpu() -> None:
    x = torch.randn(64, 256, device="cuda")
    total = torch.randn(1 << 20, device="cuda")
    expected, of_total = kernels.softmax(x), kernels.sum(total)
    for _ in range(4):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            made, sums = kernels.softmax(x), kernels.sum(total)
        stream.synchronize()
        assert torch.equal(made, expected)
        assert torch.equal(sums, of_total)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made, sums = kernels.softmax(x), kernels.sum(total)
    for _ in range(3):
        made.zero_()
        sums.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(made, expected)
        assert torch.equal(sums, of_total)


@pytest.mark.skipif(not INTERPRETED, reason="without kernels there are no plans")
def test_a_second_call_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.silu(torch.ones(4, 4))

    def refuse(*_: Any) -> None:
        raise AssertionError("planned again")

    monkeypatch.setattr(elementwise, "planned", refuse)
    assert kernels.silu(torch.zeros(4, 4)).equal(torch.zeros(4, 4))


@pytest.mark.skipif(not INTERPRETED, reason="without kernels there are no launches")
def test_the_third_call_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    known_calls.forget()
    inputs = [torch.randn(3, 8) for _ in range(3)]
    for x in inputs[:2]:
        kernels.softmax(x)

    def refuse(*_: Any) -> None:
        raise AssertionError("decided again")

    monkeypatch.setattr(softmaxes.launches, "forward", refuse)
    with count_launches() as count:
        y = kernels.softmax(inputs[2])
    assert count == {"softmax_forward": 1}
    torch.testing.assert_close(y, inputs[2].softmax(-1))


@pytest.mark.skipif(not INTERPRETED, reason="without kernels there are no launches")
def test_one_tensor_as_two_arguments() -> None:
    """A known call with the same tensor twice must not use one pointer for two other tensors."""
    known_calls.forget()
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    for _ in range(4):
        assert kernels.swiglu(gate, gate).equal(kernels.swiglu(gate, gate.clone()))
    for _ in range(3):
        assert not kernels.swiglu(gate, up).equal(kernels.swiglu(gate, gate))


def test_few_enough_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elementwise, "MOST_KNOWN", 3)
    known_calls.forget()
    for size in range(1, 9):
        kernels.silu(torch.ones(size, 4))
        assert len(elementwise._known) <= 3
    known_calls.forget()


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) >= 4
