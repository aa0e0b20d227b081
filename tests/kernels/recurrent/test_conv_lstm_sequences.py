"""All steps of a ConvLSTM as one operator: results and gradients are those of the plain loop, on the CPU and (in a
separate process) with the Triton kernels interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rooftop.kernels import conv_lstm_sequence
from rooftop.kernels.recurrent.conv_lstm_sequences import conv_lstm_sequence_reference
from rooftop.launch import INTERPRETED, count_launches
from rooftop.testing import assert_as_accurate

Arguments = list[Tensor | None]
NAMES = ("outputs", "cell", "dgates", "dkernel", "dbias", "dhidden", "dcell")  # the last three exist with a state


def arguments(
    steps: int = 3,
    kernel: tuple[int, int] = (3, 3),
    last: bool = True,
    state: bool = True,
    dtype: torch.dtype = torch.float64,
    shape: tuple[int, int, int, int] = (2, 3, 5, 4),
) -> Arguments:
    """gates, kernel, hidden, cell and bias for N, F, H, W. If there is a state, there is a bias too."""
    generator = torch.Generator().manual_seed(steps + sum(kernel))
    n, f, h, w = shape
    memory_format = torch.channels_last if last else torch.contiguous_format

    def maps(count: int, channels: int) -> Tensor:
        return torch.randn(count, channels, h, w, generator=generator).to(dtype).contiguous(memory_format=memory_format)

    weight = torch.randn(4 * f, f, *kernel, generator=generator).to(dtype) / (f * kernel[0] * kernel[1]) ** 0.5
    gates = maps(steps * n, 4 * f).unflatten(0, (steps, n))
    states = (maps(n, f), maps(n, f)) if state else (None, None)
    bias = torch.randn(4 * f, generator=generator).to(dtype) if state else None
    return [gates, weight, *states, bias]


def results(function: Callable[..., Any], given: Arguments, *names: str, cell_too: bool = True) -> list[Tensor]:
    """outputs, cell, and the gradients of the given arguments."""
    leaves = [None if t is None else t.detach().requires_grad_() for t in given]
    *tensors, bias = leaves
    outputs, cell = function(*tensors, *names, bias=bias)
    found = [outputs, cell] if cell_too else [outputs]
    weights = [torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape).to(y) for y in found]
    of = [t for t in (leaves[0], leaves[1], bias, leaves[2], leaves[3]) if t is not None]
    gradients = torch.autograd.grad(found, of, weights)
    return [outputs.detach(), cell.detach(), *gradients]


@pytest.mark.parametrize("names", [("tanh", "sigmoid"), ("relu", "hard_sigmoid_keras2")])
@pytest.mark.parametrize("state", [False, True], ids=["from zeros", "from a state"])
@pytest.mark.parametrize("kernel", [(3, 3), (1, 1), (2, 4), (5, 2)])
def test_gradients_are_those_of_the_plain_loop(kernel: tuple[int, int], state: bool, names: tuple[str, str]) -> None:
    for steps, last in ((1, True), (4, True), (3, False)):
        given = arguments(steps, kernel, last, state)
        ours, plain = (results(f, given, *names) for f in (conv_lstm_sequence, conv_lstm_sequence_reference_of_all))
        for what, mine, theirs in zip(NAMES, ours, plain, strict=False):
            torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-12, msg=lambda m, w=what: f"{w}: {m}")


def conv_lstm_sequence_reference_of_all(*given: Any, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """The plain loop, in which a kernel that no step needs also has a gradient, which is zero."""
    outputs, cell = conv_lstm_sequence_reference(*given, bias=bias)
    return outputs + 0 * given[1].sum(), cell


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("last", "state"), [(True, False), (False, True)])
def test_gate(last: bool, state: bool, dtype: torch.dtype) -> None:
    assert_gate(arguments(3, (3, 3), last, state, dtype, (2, 5, 6, 7)))


def assert_gate(given: Arguments, device: str = "cpu") -> None:
    given = [None if t is None else t.to(device) for t in given]
    assert given[0] is not None
    with count_launches() as launches:
        ours = results(conv_lstm_sequence, given)
    if INTERPRETED or device == "cuda":
        assert launches["conv_lstm_forward"] == launches["conv_lstm_backward"] == len(given[0])
    eager = results(conv_lstm_sequence_reference, given)
    exact = results(conv_lstm_sequence_reference, [None if t is None else t.double() for t in given])
    for what, *values in zip(NAMES, ours, eager, exact, strict=False):
        assert_as_accurate(*values, what=f"{what} {given[0].dtype}")


def test_a_float32_cell_beside_half_precision_gates() -> None:
    gates, kernel, hidden, cell, _ = arguments(5, dtype=torch.bfloat16)
    assert cell is not None
    outputs, found = conv_lstm_sequence(gates, kernel, hidden, cell.float())
    assert (outputs.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    exact = conv_lstm_sequence_reference(*(t.double() for t in (gates, kernel, hidden, cell)))  # type: ignore[union-attr]
    torch.testing.assert_close(found.double(), exact[1], rtol=0.05, atol=0.05)


def test_without_a_gradient_the_results_are_the_same() -> None:
    given = arguments(state=False)
    with torch.no_grad():
        alone = conv_lstm_sequence(*given[:4])
    torch.testing.assert_close(list(alone), results(conv_lstm_sequence, given)[:2], rtol=0, atol=0)


def test_only_the_results_that_are_used_have_gradients() -> None:
    for cell_too in (True, False):
        given = arguments()
        ours, plain = (results(f, given, cell_too=cell_too) for f in (conv_lstm_sequence, conv_lstm_sequence_reference))
        torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)
    gates, kernel, *_ = arguments()
    leaf = kernel.requires_grad_()  # type: ignore[union-attr]
    (found,) = torch.autograd.grad(conv_lstm_sequence(gates, leaf)[1].sum(), leaf)
    (expected,) = torch.autograd.grad(conv_lstm_sequence_reference(gates, leaf)[1].sum(), leaf)  # type: ignore[arg-type]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_the_kernel_is_one_convolution_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    from rooftop.kernels.recurrent import conv_lstm_sequences as file

    calls: list[tuple[int, list[bool]]] = []
    real = file._convolution_backward

    def counted(dgates: Tensor, *rest: Any) -> Any:
        calls.append((dgates.shape[0], rest[-1]))
        return real(dgates, *rest)

    monkeypatch.setattr(file, "_convolution_backward", counted)
    results(conv_lstm_sequence, arguments(5, state=False))
    to_input, to_kernel = [True, False, False], [False, True, False]
    assert calls == [(2, to_input)] * 4 + [(8, to_kernel)]


def test_results_are_in_the_gates_memory_format() -> None:
    for last, memory_format in ((True, torch.channels_last), (False, torch.contiguous_format)):
        outputs, cell = conv_lstm_sequence(*arguments(last=last)[:4])
        assert outputs.flatten(0, 1).is_contiguous(memory_format=memory_format)
        assert cell.is_contiguous(memory_format=memory_format)


def test_any_strides() -> None:
    gates, kernel, hidden, cell, bias = arguments(3, shape=(4, 3, 5, 8))
    assert gates is not None and hidden is not None and cell is not None and bias is not None  # noqa: PT018
    states = (hidden.transpose(2, 3)[::2], cell.transpose(2, 3)[::2])
    views = [gates.transpose(3, 4)[:, ::2], kernel, *states, bias.repeat_interleave(2)[::2]]
    ours, plain = (results(f, views) for f in (conv_lstm_sequence, conv_lstm_sequence_reference))
    torch.testing.assert_close(ours, plain, rtol=1e-12, atol=1e-12)


def test_derivatives_that_it_has_not_are_refused() -> None:
    gates, kernel, *_ = arguments(2)
    leaf = gates.requires_grad_()  # type: ignore[union-attr]
    outputs, _ = conv_lstm_sequence(leaf, kernel)
    (gradient,) = torch.autograd.grad(outputs.square().sum(), leaf, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative: use the loop in PyTorch"):
        torch.autograd.grad(gradient.sum(), leaf)
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda g: conv_lstm_sequence(g, kernel), (gates.detach(),), (gates.detach(),))  # type: ignore[union-attr]


def test_operator_checks_of_torch_library() -> None:
    operator = torch.ops.rooftop.conv_lstm_sequence.default
    given = [None if t is None else t.requires_grad_() for t in arguments(2, dtype=torch.float32)]
    torch.library.opcheck(operator, (*given, "tanh", "sigmoid", True))
    torch.library.opcheck(operator, (given[0].detach(), given[1].detach(), *3 * (None,), "relu", "sigmoid", False))  # type: ignore[union-attr]


def test_compiled_whole() -> None:
    gates, kernel, *_ = (t if t is None else t.requires_grad_() for t in arguments(2))
    compiled = torch.compile(lambda g, k: conv_lstm_sequence(g, k)[0] * 2, fullgraph=True, backend="aot_eager")
    outputs = compiled(gates, kernel)
    torch.testing.assert_close(outputs, 2 * conv_lstm_sequence(gates, kernel)[0])
    outputs.sum().backward()
    assert kernel is not None
    assert kernel.grad is not None


def test_without_images_there_are_no_results() -> None:
    outputs, cell, dgates, dkernel = results(conv_lstm_sequence, arguments(shape=(0, 3, 4, 4), state=False))
    assert (outputs.shape, cell.shape, dgates.shape) == ((3, 0, 3, 4, 4), (0, 3, 4, 4), (3, 0, 12, 4, 4))
    assert not dkernel.any()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"gates": torch.zeros(0, 1, 8, 3, 3)}, ValueError, r"must be \(T, N, 4 F, H, W\) with T at least 1, got \(0,"),
        ({"gates": torch.zeros(2, 8, 3, 3)}, ValueError, "gates must be"),
        ({"kernel": torch.zeros(8, 3, 3, 3)}, ValueError, r"expected a kernel of shape \(8, 2, kh, kw\), got \(8, 3"),
        ({"kernel": torch.zeros(8, 2, 3, 3).double()}, TypeError, "kernel must be torch.float32 like the gates; got"),
        ({"hidden": torch.zeros(1, 2, 3, 2)}, ValueError, r"expected hidden of shape \(1, 2, 3, 3\), got \(1, 2, 3, 2"),
        ({"cell": torch.zeros(1, 2, 3, 3).half()}, TypeError, "cell must be torch.float32 like the gates or float32"),
        ({"cell": torch.zeros(1, 2, 3, 3, device="meta")}, ValueError, "gates is on cpu, cell on meta"),
        ({"bias": torch.zeros(8).half()}, TypeError, "bias must be torch.float32 like the gates or float32"),
        ({"bias": torch.zeros(2)}, ValueError, r"expected bias of shape \(8,\), got \(2,\)"),
        ({"activation": "gelu"}, ValueError, "activation must be one of tanh, .* got 'gelu'"),
    ],
)
def test_wrong_arguments(change: dict[str, object], error: type[Exception], message: str) -> None:
    right = {"gates": torch.zeros(2, 1, 8, 3, 3), "kernel": torch.zeros(8, 2, 3, 3)}
    with pytest.raises(error, match=message):
        conv_lstm_sequence(**{**right, **change})  # type: ignore[arg-type]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_of_the_above_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__, "-k", "gate or half or strides or interpreter") > 6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("kernel", "last"), [((5, 5), True), ((1, 1), True), ((3, 3), False), ((2, 4), True)])
def test_gate_on_a_gpu(
    kernel: tuple[int, int], last: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert_gate(arguments(4, kernel, last, True, dtype, (2, 16, 17, 20)), "cuda")
