"""The gates of a ConvLSTM, both ways: the CPU implementation, and (in a separate process) the Triton kernels
interpreted."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rooftop.cost import CountingMode
from rooftop.kernels import conv_lstm_gates
from rooftop.kernels.recurrent.conv_lstms import ACTIVATIONS
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
BY_TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "hard_sigmoid": lambda x: F.relu6(x + 3) / 6,
    "hard_sigmoid_keras2": lambda x: torch.clip(0.2 * x + 0.5, 0, 1),
    "relu": torch.relu,
    "linear": lambda x: x,
}


def by_torch(
    gates: Tensor,
    cell: Tensor,
    activation: str = "tanh",
    recurrent_activation: str = "sigmoid",
    added: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    i, f, c, o = (gates if added is None else gates + added).chunk(4, 1)
    act, recurrent = BY_TORCH[activation], BY_TORCH[recurrent_activation]
    cell = recurrent(f) * cell + recurrent(i) * act(c)
    return recurrent(o) * act(cell), cell


def results(function: Callable[..., tuple[Tensor, Tensor]], tensors: list[Tensor], *names: str) -> list[Tensor]:
    """hidden, cell, and the gradients of gates, cell and, if given, added."""
    tensors = [t.detach().requires_grad_() for t in tensors]
    added = {"added": tensors[2]} if len(tensors) > 2 else {}
    outputs = function(*tensors[:2], *names, **added)
    weights = [torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, tensors, weights)]


def step(
    n: int, f: int, h: int, w: int, dtype: torch.dtype = torch.float32, last: bool = False, added: bool = False
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n + f + h + w)
    shapes = [(n, 4 * f, h, w), (n, f, h, w), (n, 4 * f, h, w)][: 2 + added]
    memory_format = torch.channels_last if last else torch.contiguous_format
    return [
        (2 * torch.randn(shape, generator=generator)).to(dtype).contiguous(memory_format=memory_format)
        for shape in shapes
    ]


def assert_gate(tensors: list[Tensor], *names: str, device: str = "cpu") -> None:
    given_ = [t.to(device) for t in tensors]
    with count_launches() as launches:
        ours = results(conv_lstm_gates, given_, *names)
    if (INTERPRETED or device == "cuda") and given_[1].numel():
        assert launches == {"conv_lstm_forward": 1, "conv_lstm_backward": 1}
    eager = results(by_torch, given_, *names)
    exact = results(by_torch, [t.double() for t in given_], *names)
    for what, *values in zip(("hidden", "cell", "dgates", "dcell", "dadded"), ours, eager, exact, strict=False):
        assert_as_accurate(*values, what=f"{what} {tuple(given_[0].shape)} {given_[0].dtype} {names}")


@pytest.mark.parametrize(("last", "added"), [(False, True), (True, False)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3, 5, 7), (2, 64, 4, 5), (1, 1, 13, 35), (0, 3, 2, 2)])
def test_gate(shape: tuple[int, int, int, int], dtype: torch.dtype, last: bool, added: bool) -> None:
    assert_gate(step(*shape, dtype=dtype, last=last, added=added))


@pytest.mark.parametrize(
    ("activation", "recurrent"), list(zip(ACTIVATIONS, ACTIVATIONS[2:] + ACTIVATIONS[:2], strict=True))
)
def test_gate_of_activations(activation: str, recurrent: str) -> None:
    assert_gate(step(2, 6, 9, 8), activation, recurrent)


# The gate is not used, because for few elements PyTorch's largest error can be 0 by luck.
@given(st.tuples(*[st.integers(1, 9)] * 4), st.booleans(), st.booleans(), *[st.sampled_from(ACTIVATIONS)] * 2)
@settings(max_examples=8, deadline=None)
def test_any_shape(shape: tuple[int, int, int, int], last: bool, added: bool, first: str, second: str) -> None:
    tensors = step(*shape, last=last, added=added)
    ours = results(conv_lstm_gates, tensors, first, second)
    exact = results(by_torch, [t.double() for t in tensors], first, second)
    for mine, truth in zip(ours, exact, strict=True):
        torch.testing.assert_close(mine.double(), truth, rtol=1e-5, atol=2e-5)


def test_hard_sigmoids_are_those_of_the_two_keras() -> None:
    z = torch.tensor([-3.0, -2.5, -1.0, 0.0, 1.0, 2.5, 3.0]).reshape(1, 1, 7, 1)
    gates = torch.cat((z, z, torch.zeros_like(z), z), 1)
    for name, expected in (("hard_sigmoid", z / 6 + 0.5), ("hard_sigmoid_keras2", 0.2 * z + 0.5)):
        _, cell = conv_lstm_gates(gates, torch.ones_like(z), "linear", name)
        torch.testing.assert_close(cell, expected.clamp(0, 1))


def test_the_order_of_gates() -> None:
    # input gate, forget gate, candidate, output gate closed
    gates = torch.tensor([30.0, -30.0, 0.5, -30.0]).reshape(1, 4, 1, 1)
    hidden, cell = conv_lstm_gates(gates, torch.full((1, 1, 1, 1), 7.0))
    torch.testing.assert_close(cell.item(), math.tanh(0.5))
    assert abs(hidden.item()) < 1e-12


def test_the_memory_format_is_that_of_the_gates() -> None:
    first, last = step(2, 3, 4, 5), step(2, 3, 4, 5, last=True)
    ours, theirs = results(conv_lstm_gates, first), results(conv_lstm_gates, last)
    torch.testing.assert_close(ours, theirs)
    assert all(t.is_contiguous() for t in ours)
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in theirs)


def test_a_float32_cell_beside_half_precision_gates() -> None:
    gates, cell = step(2, 3, 4, 5, dtype=torch.bfloat16)
    hidden, state = conv_lstm_gates(gates, cell.float())
    assert (hidden.dtype, state.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(state.double(), by_torch(gates.double(), cell.double())[1], rtol=1e-3, atol=1e-3)


def test_infinities_and_nan_do_what_they_do_in_pytorch() -> None:
    special = torch.tensor([math.nan, math.inf, -math.inf, 0.0, 1e4, -1e4, 88.0, -90.0])
    z, cell = torch.meshgrid(special, special, indexing="ij")
    gates = torch.cat([z.roll(i, 0)[None, None] for i in range(4)], 1)
    for activation in ("tanh", "relu"):
        for recurrent in ("sigmoid", "hard_sigmoid", "hard_sigmoid_keras2"):
            names = (activation, recurrent)
            found, expected = (
                conv_lstm_gates(gates, cell[None, None], *names),
                by_torch(gates, cell[None, None], *names),
            )
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_views_with_any_strides() -> None:
    gates, cell = torch.randn(6, 16, 5, 14)[::2, :, :, ::2], torch.randn(3, 4, 7, 5).transpose(2, 3)
    torch.testing.assert_close(conv_lstm_gates(gates, cell), by_torch(gates, cell))
    hidden, _ = conv_lstm_gates(gates.requires_grad_(), cell)
    (gradient,) = torch.autograd.grad(hidden.sum(), gates)  # an expanded gradient, and no gradient of the cell
    (expected,) = torch.autograd.grad(by_torch(gates, cell)[0].sum(), gates)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("names", [("tanh", "sigmoid"), ("linear", "hard_sigmoid"), ("sigmoid", "hard_sigmoid_keras2")])
def test_gradients_against_finite_differences(names: tuple[str, str]) -> None:
    tensors = [t.double().requires_grad_() for t in step(1, 2, 2, 3, added=True)]
    assert torch.autograd.gradcheck(lambda g, c, a: conv_lstm_gates(g, c, *names, added=a), tensors)
    assert torch.autograd.gradcheck(lambda g, c: conv_lstm_gates(g, c, *names)[0], tensors[:2])


def test_derivatives_that_it_has_not_are_refused() -> None:
    gates, cell = (t.requires_grad_() for t in step(1, 2, 3, 3))
    hidden, _ = conv_lstm_gates(gates, cell)
    (gradient,) = torch.autograd.grad(hidden.square().sum(), gates, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(gradient.sum(), gates)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(conv_lstm_gates, (gates.detach(), cell.detach()), (gates.detach(), cell.detach()))


def test_operator_checks_of_torch_library() -> None:
    operator = torch.ops.rooftop.conv_lstm_gates.default
    gates, cell, added = (t.requires_grad_() for t in step(2, 3, 2, 2, added=True))
    torch.library.opcheck(operator, (gates, cell, added, "tanh", "sigmoid"))
    last = step(2, 3, 2, 2, last=True)
    torch.library.opcheck(operator, (*last, None, "relu", "hard_sigmoid"))


def test_compiled_whole() -> None:
    gates, cell = (t.requires_grad_() for t in step(2, 3, 4, 4))
    compiled = torch.compile(lambda g, c: conv_lstm_gates(g, c)[0] * 2, fullgraph=True, backend="aot_eager")
    hidden = compiled(gates, cell)
    torch.testing.assert_close(hidden, 2 * conv_lstm_gates(gates, cell)[0])
    hidden.sum().backward()
    assert gates.grad is not None


def test_autocast_casts_nothing() -> None:
    gates, cell = step(2, 3, 4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = conv_lstm_gates(gates, cell)
        mixed = conv_lstm_gates(gates.bfloat16(), cell)
    assert [t.dtype for t in (*found, *mixed)] == [torch.float32, torch.float32, torch.bfloat16, torch.float32]


def test_bytes_are_counted_once() -> None:
    gates, cell = step(2, 3, 4, 4)
    with CountingMode() as counted:
        conv_lstm_gates(gates, cell, added=gates)  # two arguments with the same memory
    (cost,) = (r.cost for r in counted.records if r.name == "rooftop::conv_lstm_gates")
    assert cost is not None
    assert cost.read_bytes == 4 * (gates.numel() + cell.numel())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": [1.0]}, TypeError, "gates must be a tensor, got list"),
        ({"gates": torch.zeros(1, 8, 3, 3).int()}, TypeError, "gates must be bfloat16"),
        ({"gates": torch.zeros(1, 6, 3, 3)}, ValueError, r"gates must be \(N, 4 F, H, W\), got \(1, 6, 3, 3\)"),
        ({"gates": torch.zeros(8, 3, 3)}, ValueError, "gates must be"),
        ({"cell": torch.zeros(1, 3, 3, 3)}, ValueError, r"expected cell of shape \(1, 2, 3, 3\), got \(1, 3, 3, 3\)"),
        ({"cell": torch.zeros(1, 2, 3, 3).half()}, TypeError, "cell must be torch.float32 like the gates"),
        ({"cell": torch.zeros(1, 2, 3, 3, device="meta")}, ValueError, "gates is on cpu, cell on meta"),
        ({"added": torch.zeros(1, 8, 3, 1)}, ValueError, r"expected added of shape \(1, 8, 3, 3\)"),
        ({"added": torch.zeros(1, 8, 3, 3).double()}, TypeError, "convert one of them"),
        ({"activation": "gelu"}, ValueError, "activation must be one of tanh, .* got 'gelu'"),
        ({"recurrent_activation": None}, ValueError, "recurrent_activation must be one of"),
    ],
)
def test_wrong_arguments(change: dict[str, object], error: type[Exception], message: str) -> None:
    right = {"gates": torch.zeros(1, 8, 3, 3), "cell": torch.zeros(1, 2, 3, 3)}
    with pytest.raises(error, match=message):
        conv_lstm_gates(**{**right, **change})  # type: ignore[arg-type]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[[str], int]) -> None:
    assert interpreted(__file__) > 50


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 64, 64, 64), (3, 5, 17, 19), (1, 100, 33, 1)])
def test_gate_on_a_gpu(shape: tuple[int, int, int, int], dtype: torch.dtype, last: bool) -> None:
    for names in (("tanh", "sigmoid"), ("relu", "hard_sigmoid")):
        assert_gate(step(*shape, dtype=dtype, last=last, added=True), *names, device="cuda")
