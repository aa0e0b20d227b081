"""Calls that are made in C++: the same bits, gradients, modes, errors and watchers as in Python."""

from __future__ import annotations

import fcntl
import gc
import inspect
import itertools
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rooftop import kernels
from rooftop.cost import CountingMode
from rooftop.inference import Engine
from rooftop.kernels.losses import losses
from rooftop.kernels.operands import launch_data
from rooftop.kernels.softmaxes import clusters, plans, tables
from rooftop.kernels.softmaxes.tables import ClusterConfig
from rooftop.launch import INTERPRETED, count_launches, cpp_extensions, cuda, known_calls, native_calls, repeated_calls
from rooftop.launch.cpp_extensions import Extension
from rooftop.launch.lessons import Lesson, lesson_of
from rooftop.launch.recorded_calls import Backward
from rooftop.models.vision.resnet import Bottleneck, ResNet
from rooftop.torch_versions import torch_at_least

pytest.importorskip("triton")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
needs_compiler = pytest.mark.skipif(cpp_extensions.compiler() is None, reason="no C++ compiler")
needs_kernels = pytest.mark.skipif(not INTERPRETED, reason="without kernels nothing is planned")


@pytest.fixture(scope="module", autouse=True)
def compiled(request: pytest.FixtureRequest) -> None:
    if INTERPRETED or torch.cuda.is_available():
        if cpp_extensions.compiler() is None:
            pytest.skip("no C++ compiler")
        request.getfixturevalue("compiled_calls")


@pytest.fixture
def made() -> Iterator[Callable[[], int]]:
    """Gives a function that returns the number of calls made in C++ since its last call."""
    known_calls.forget()
    last = repeated_calls.calls_made()

    def since() -> int:
        nonlocal last
        now = repeated_calls.calls_made()
        last, found = now, now - last
        return found

    yield since
    known_calls.forget()


def skip_without_kernels(device: str) -> None:
    if device == "cpu" and not INTERPRETED:
        pytest.skip("without kernels nothing is planned")


def several(call: Callable[[], Any], times: int = 6) -> list[Any]:
    return [call() for _ in range(times)]


def same(results: list[Any]) -> bool:
    first, *rest = [each if isinstance(each, tuple | list) else (each,) for each in results]
    return all(len(each) == len(first) and all(map(torch.equal, first, each)) for each in rest)


def test_an_attention_without_dropout_may_be_observed() -> None:
    """PyTorch passes no argument whose value is the default, such as no dropout. Random numbers are refused."""
    q = torch.randn(1, 2, 4, 8)
    for call, allowed in (
        (lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q), True),
        (lambda: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0, True), True),
        (lambda: torch.ops.aten.bernoulli(q.sigmoid()), False),
        (lambda: torch.ops.aten.native_dropout(q, 0.5, True), False),
    ):
        with lesson_of([q]) as lesson:
            assert lesson is not None
            call()
        assert (not lesson.why) == allowed, lesson.why


# ---- results ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
def test_results_and_gradients_are_those_of_python(device: str, made: Callable[[], int]) -> None:
    skip_without_kernels(device)
    x, y = (torch.randn(2, 3, 8, device=device, requires_grad=True) for _ in range(2))
    weight, bias = (torch.randn(8, device=device, requires_grad=True) for _ in range(2))
    calls: dict[str, Callable[[], Any]] = {
        "layer_norm": lambda: kernels.layer_norm(x, 8, weight, bias),
        "rms_norm": lambda: kernels.rms_norm(x, (8,), weight=weight),
        "add_rms_norm": lambda: kernels.add_rms_norm(x, y, 8, weight),
        "softmax": lambda: kernels.softmax(x, -1),
        "log_softmax": lambda: kernels.log_softmax(x, dim=-1, scale=0.5),
        "silu": lambda: kernels.silu(x),
        "mul": lambda: kernels.mul(x, y),
        "swiglu": lambda: kernels.swiglu(x, y),
        "sum": lambda: kernels.sum(x, -1),
    }
    for name, call in calls.items():

        def both(call: Callable[[], Any] = call) -> list[Tensor]:
            results = call()
            results = list(results) if isinstance(results, tuple) else [results]
            leaves = [x, y, weight, bias]
            slopes = [torch.full_like(each, 0.5) for each in results]
            found = torch.autograd.grad(results, leaves, slopes, allow_unused=True)
            return [*results, *(each for each in found if each is not None)]

        with repeated_calls.in_python():
            expected = both()
        assert made() == 0
        assert same([expected, *several(both)]), name
        least = 3 if name == "sum" else 5  # the gradient of a sum is a view, made in Python
        assert made() >= least, (name, repeated_calls.reasons)
        with torch.no_grad():
            results = [each[0] if isinstance(each, tuple) else each for each in several(call)]
            assert same([expected[0], *results])
        assert made() >= 2, (name, repeated_calls.reasons)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("device", DEVICES)
def test_strides_of_dimensions_of_size_1_do_not_matter(device: str, batch: int, made: Callable[[], int]) -> None:
    skip_without_kernels(device)
    x = torch.randn(batch, 9, 4, 16, device=device).transpose(1, 2).requires_grad_()
    cosines, sines = (torch.randn(9, 8, device=device) for _ in range(2))
    calls = {"rope": lambda: kernels.rope(x, cosines, sines)}
    if device == "cuda":
        calls["attention"] = lambda: kernels.attention(x, x.detach() * 2, x.detach() * 3)
    for name, call in calls.items():

        def both(call: Callable[[], Tensor] = call) -> list[Tensor]:
            result = call()
            return [result.detach(), *torch.autograd.grad(result, x, torch.full_like(result, 0.5))]

        with repeated_calls.in_python():
            expected = both()
        assert same([expected, *several(both)]), name
        assert made() >= 5, (name, repeated_calls.reasons)


@needs_kernels
def test_other_shapes_strides_dtypes_and_values_are_other_calls(made: Callable[[], int]) -> None:
    x = torch.randn(4, 6)
    with torch.no_grad():
        several(lambda: kernels.softmax(x))
        assert made()
        for other in (torch.randn(4, 5), x.t(), torch.randn(8, 6)[::2], x.double(), x.bfloat16(), x[:, 1:], x[0]):
            assert torch.equal(kernels.softmax(other), kernels.softmax(other.clone()))
            torch.testing.assert_close(kernels.softmax(other), other.softmax(-1))
        torch.testing.assert_close(kernels.softmax(x, scale=2.0), (x * 2).softmax(-1))
        torch.testing.assert_close(kernels.softmax(x, 0), x.softmax(0))
    with pytest.raises(ValueError, match="scale"):
        kernels.softmax(x, scale=float("nan"))
    with pytest.raises(TypeError):
        kernels.softmax(x, no_such_argument=1)  # type: ignore[call-arg]


@needs_kernels
def test_the_same_tensor_twice() -> None:
    gate, up = torch.randn(3, 8), torch.randn(3, 8)
    with torch.no_grad():
        for _ in range(5):
            assert kernels.swiglu(gate, up).equal(kernels.swiglu(gate.clone(), up.clone()))
            assert kernels.swiglu(gate, gate).equal(kernels.swiglu(gate, gate.clone()))
            assert kernels.mul(up, up).equal(up * up)


@needs_kernels
def test_a_positional_string_is_no_keyword() -> None:
    x = torch.randn(3, 8)
    several(lambda: kernels.gelu(x, approximate="tanh"))
    with pytest.raises(TypeError, match="positional"):
        kernels.gelu(x, "approximate", "tanh")  # type: ignore[call-arg]


@needs_kernels
def test_an_observed_call_has_the_errors_of_other_calls() -> None:
    calls = 0

    @repeated_calls.repeated
    def refusing(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        raise TypeError("observed" if known_calls.lesson is not None else "not observed")

    for _ in range(5):
        with pytest.raises(TypeError, match="not observed"):
            refusing(torch.randn(3, 8))
    assert calls == 6  # one call was observed, and made again


@needs_kernels
def test_checks_of_values_run_at_each_call() -> None:
    table, logits = torch.randn(5, 4), torch.randn(2, 5, requires_grad=True)
    good, bad = torch.tensor([0, 4]), torch.tensor([0, 9])
    several(lambda: kernels.embedding(good, table))
    with pytest.raises(IndexError, match="out of range"):
        kernels.embedding(bad, table)
    for reduction in ("mean", "none"):
        several(lambda reduction=reduction: kernels.cross_entropy(logits, good, reduction=reduction))
        with pytest.raises(ValueError, match="target 9 at index 1"):
            kernels.cross_entropy(logits, bad, reduction=reduction)


# ---- autograd -----------------------------------------------------------------------------------------------------


@needs_kernels
def test_a_second_derivative(made: Callable[[], int]) -> None:
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    several(lambda: kernels.layer_norm(x, 8, weight).square().sum().backward())
    made()
    assert torch.autograd.gradgradcheck(lambda x, weight: kernels.layer_norm(x, 8, weight), (x, weight))
    assert torch.autograd.gradcheck(kernels.silu, (x,))


@needs_kernels
def test_gradients_share_no_memory(made: Callable[[], int]) -> None:
    for _ in range(6):
        x, y = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
        slope = torch.ones(3, 8)
        kernels.add(x, y).backward(slope)
        assert x.grad is not None
        x.grad.add_(1)
        assert torch.equal(slope, torch.ones(3, 8))
        assert y.grad is not None
        assert torch.equal(y.grad, slope)
    assert made() >= 4, repeated_calls.reasons


@needs_kernels
def test_backward_twice_and_changed_tensors(made: Callable[[], int]) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    several(lambda: kernels.softmax(x).sum().backward())
    assert made()
    y = kernels.softmax(x)
    first = torch.autograd.grad(y.square().sum(), x, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(y.square().sum(), x)[0])
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y.square().sum(), x)
    y = kernels.softmax(x)
    y.mul_(2)  # backward needs it
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@needs_kernels
def test_hooks_see_gradients_and_saved_tensors(made: Callable[[], int]) -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    several(lambda: kernels.layer_norm(x, 8, weight).sum().backward())
    assert made()
    seen: list[Tensor] = []
    y = kernels.layer_norm(x, 8, weight)
    assert y.grad_fn is not None
    assert "rooftop_layer_norm" in y.grad_fn.name()
    y.register_hook(seen.append)
    y.grad_fn.register_hook(lambda inputs, outputs: seen.extend(outputs))
    y.sum().backward()
    assert len(seen) == 2
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
        before = len(seen)
        kernels.layer_norm(x, 8, weight).sum().backward()
        assert len(seen) > before


class Enough(Exception):  # checkpointing ends a recomputation with such an exception
    pass


@needs_kernels
@pytest.mark.parametrize("calls", range(6))
def test_a_hook_that_raises_ends_the_call_and_nothing_is_called_again(calls: int, made: Callable[[], int]) -> None:
    """The hook may raise in any call of the function: one made in Python, one observed, or one known."""
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    for _ in range(calls):
        kernels.layer_norm(x, 8, weight)
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        raise Enough

    for tries in range(1, 5):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), pytest.raises(Enough):
            kernels.layer_norm(x, 8, weight)
        assert len(packed) == tries


@needs_kernels
@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(reentrant: bool, made: Callable[[], int]) -> None:
    x, weight = torch.randn(3, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def step(recompute: bool) -> tuple[Tensor, ...]:
        def part(x: Tensor) -> Tensor:
            return kernels.silu(kernels.rms_norm(x, 8, weight))

        y = checkpoint(part, x, use_reentrant=reentrant) if recompute else part(x)
        return torch.autograd.grad(y.square().sum(), (x, weight)) if not reentrant or not recompute else _by_backward(y)

    def _by_backward(y: Tensor) -> tuple[Tensor, ...]:
        x.grad = weight.grad = None
        y.square().sum().backward()
        return x.grad, weight.grad  # type: ignore[return-value]

    assert same([*several(lambda: step(False)), *several(lambda: step(True))])
    assert made()


HOOKED: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (lambda x, w: kernels.layer_norm(x, 8, w), ((2, 3, 8), (8,))),
    "add_rms_norm": (lambda x, r, w: kernels.add_rms_norm(x, r, 8, w), ((2, 3, 8), (2, 3, 8), (8,))),
    "softmax": (lambda x: kernels.softmax(x, -1), ((3, 8),)),
    "softmax of tokens": (lambda x: kernels.softmax(x, -1), ((2, 3, 8),)),
    "linear_act": (lambda x, w: kernels.linear_act(x, w, None, "silu"), ((2, 3, 8), (5, 8))),
    "attention": (kernels.attention, ((1, 2, 16, 8),) * 3),
    "swiglu": (kernels.swiglu, ((2, 3, 8), (2, 3, 8))),
}


@needs_kernels
@pytest.mark.parametrize("name", HOOKED)
def test_hooks_see_the_same_tensors_in_each_call(name: str, made: Callable[[], int]) -> None:
    function, shapes = HOOKED[name]
    inputs = [torch.randn(*shape, requires_grad=True) for shape in shapes]

    def call() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        packed, unpacked = list[Tensor](), list[Tensor]()

        def pack(tensor: Tensor) -> int:
            packed.append(tensor.detach().clone())
            return len(packed) - 1

        def unpack(place: int) -> Tensor:
            unpacked.append(packed[place])
            return packed[place].clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            y = function(*inputs)
        y = y[0] if isinstance(y, tuple) else y
        return list(torch.autograd.grad(y.sin().sum(), inputs)), packed, unpacked

    with repeated_calls.in_python():
        expected = call()
    several(call)  # all calls are hooked, also the observed one
    made()
    for found in several(call, 2):
        for each, other in zip(found, expected, strict=True):
            assert same([each, other])
    assert made() == 4, repeated_calls.reasons


@needs_kernels
@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_checkpointed_blocks_are_repeated(blocks: int, made: Callable[[], int]) -> None:
    """With more than one block, the call that is observed is one of a recomputation, which ends early."""
    x, weight = torch.randn(2, 3, 8, requires_grad=True), torch.randn(8, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        return kernels.swiglu(kernels.rms_norm(x, 8, weight), x)

    def step() -> tuple[Tensor, ...]:
        y = x
        for _ in range(blocks):
            y = checkpoint(block, y, use_reentrant=False)
        return torch.autograd.grad(y.square().sum(), (x, weight))

    with repeated_calls.in_python():
        expected = step()
    several(step)
    made()
    assert same([expected, *several(step, 3)])
    assert made() == 3 * 6 * blocks, repeated_calls.reasons  # two operators: forward, forward again, and backward


@needs_kernels
def test_nothing_is_kept_alive(made: Callable[[], int]) -> None:
    def step() -> weakref.ref[Tensor]:
        x = torch.randn(3, 8, requires_grad=True)
        y = kernels.softmax(x)
        y.sum().backward()
        return weakref.ref(y)

    last = several(step)[-1]
    gc.collect()
    assert made()
    assert last() is None


@needs_kernels
def test_dropped_plans_are_freed() -> None:
    x = torch.randn(3, 8, requires_grad=True)
    several(lambda: kernels.softmax(x).sum().backward())
    found = [weakref.ref(each) for each in gc.get_objects() if isinstance(each, Backward)]
    assert found
    known_calls.forget()
    gc.collect()
    assert not [each for each in found if each() is not None]


def test_plans_are_freed_by_the_last_graph_that_has_them() -> None:
    """Autograd frees graphs without the GIL."""
    x = torch.randn(3, 8, requires_grad=True)
    for call in (kernels.softmax, kernels.silu):
        several(lambda call=call: call(x).sum().backward())
        losses = [call(x).sum()]

        def last(_: Tensor, losses: list[Tensor] = losses) -> None:
            known_calls.forget()
            losses.clear()

        handle = x.register_hook(last)
        losses[0].backward()
        handle.remove()
        assert not losses


@pytest.fixture
def unchecked_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of targets. On a CPU, Python checks them in each call, so no call would be made in C++."""
    monkeypatch.setattr(losses, "check_targets", lambda *_: None)


def losses_of(device: str, dtype: torch.dtype) -> dict[str, tuple[Tensor, Callable[[Tensor], Tensor]]]:
    """Logits, and losses of them."""
    target, weight = torch.tensor([0, 4, -100, 2], device=device), torch.rand(5, device=device)
    images = torch.tensor([[0, 4], [-100, 2]], device=device)
    flat, maps = torch.randn(4, 5, device=device, dtype=dtype), torch.randn(2, 5, 2, device=device, dtype=dtype)
    return {
        "mean": (flat, lambda x: kernels.cross_entropy(x, target)),
        "sum": (flat, lambda x: kernels.cross_entropy(x, target, weight, reduction="sum", label_smoothing=0.1)),
        "separable": (flat, lambda x: kernels.cross_entropy(x, target, fused=False, z_loss=0.1)),
        "each": (maps, lambda x: kernels.cross_entropy(x, images, reduction="none")),
        "maps": (maps, lambda x: kernels.cross_entropy(x, images)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_losses_in_training(device: str, dtype: torch.dtype, unchecked_targets: None, made: Callable[[], int]) -> None:
    skip_without_kernels(device)
    for name, (logits, loss_of) in losses_of(device, dtype).items():
        x = logits.clone().requires_grad_()

        def both(slope: float, x: Tensor = x, loss_of: Callable[[Tensor], Tensor] = loss_of) -> list[Tensor]:
            loss = loss_of(x)
            first = torch.autograd.grad(loss, x, torch.full_like(loss, slope), retain_graph=True)[0]
            x.grad = None
            loss.backward(torch.full_like(loss, slope))
            assert x.grad is not None
            return [loss.detach(), first, x.grad]

        with repeated_calls.in_python():
            expected = both(2.0), both(1.0)
        assert made() == 0
        for _ in range(5):
            assert same([expected[0], both(2.0)]), name
            assert same([expected[1], both(1.0)]), name
        several(lambda: both(2.0), 3)
        if name not in ("maps", "each"):  # these two copy the logits
            assert made() >= 15, (name, dtype, repeated_calls.reasons)


@needs_kernels
def test_a_second_derivative_of_a_loss_needs_the_logits_unchanged(
    unchecked_targets: None, made: Callable[[], int]
) -> None:
    target = torch.tensor([0, 4, -100, 2])
    leaf = torch.randn(4, 5, requires_grad=True)

    def loss_of(x: Tensor) -> Tensor:
        return kernels.cross_entropy(x, target)

    several(lambda: loss_of(leaf).backward())
    assert made() >= 4, repeated_calls.reasons

    def second(loss: Tensor) -> Tensor:
        (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), leaf)[0]

    found = second(loss_of(leaf))
    assert made() == 1
    torch.testing.assert_close(found, second(torch.nn.functional.cross_entropy(leaf, target)))
    x = leaf * 1
    loss = loss_of(x)
    assert made() == 1
    torch.testing.assert_close(second(loss), found)
    logits = leaf * 1
    changed, freed = loss_of(logits), loss_of(leaf * 1)
    logits.mul_(2)
    assert made() == 2
    for loss in (changed, freed):
        with pytest.raises(NotImplementedError, match="freed or changed"):
            torch.autograd.grad(loss, leaf, create_graph=True)
    (slope,) = torch.autograd.grad(changed, leaf)  # needs no logits
    with repeated_calls.in_python():
        assert torch.equal(slope, torch.autograd.grad(loss_of(leaf), leaf)[0])


@needs_kernels
def test_a_gradient_from_forward_is_not_changed_while_a_graph_is_retained(
    unchecked_targets: None, made: Callable[[], int]
) -> None:
    x, target = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 4, 1, 2])
    several(lambda: kernels.cross_entropy(x, target).backward(torch.tensor(2.0)))
    several(lambda: torch.autograd.grad(kernels.cross_entropy(x, target), x, torch.tensor(2.0), retain_graph=True))
    assert made() >= 8, repeated_calls.reasons
    loss = kernels.cross_entropy(x, target)
    grads = [torch.autograd.grad(loss, x, torch.tensor(2.0), retain_graph=True)[0] for _ in range(3)]
    assert same(grads)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        several(lambda: torch.autograd.grad(loss, x, torch.tensor(2.0)), 2)
    batch = torch.autograd.grad(kernels.cross_entropy(x, target), x, torch.arange(3.0), is_grads_batched=True)[0]
    torch.testing.assert_close(batch[2], grads[0])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("width", [6, 8])
def test_the_gradient_of_an_embedding(device: str, width: int, made: Callable[[], int]) -> None:
    skip_without_kernels(device)
    tokens = torch.tensor([[0, 4, 4], [1, 0, 3]], device=device)
    table = torch.randn(5, width, device=device, requires_grad=True)

    def both() -> list[Tensor]:
        rows = kernels.embedding(tokens, table, 1)
        return [rows.detach(), *torch.autograd.grad(rows, table, torch.full_like(rows, 0.5))]

    with repeated_calls.in_python():
        expected = both()
    assert same([expected, *several(both)])
    # on a CPU, Python checks tokens whose rows a kernel copies
    assert made() >= (0 if device == "cpu" and width == 8 else 5), repeated_calls.reasons


# ---- who must see calls -------------------------------------------------------------------------------------------


@needs_kernels
def test_watchers_see_known_calls(made: Callable[[], int]) -> None:
    x = torch.randn(3, 8)
    several(lambda: kernels.softmax(x))
    assert made()
    with CountingMode() as counted:
        kernels.softmax(x)
    assert [each.name for each in counted.records if "softmax" in each.name] == ["rooftop::softmax"]
    with count_launches() as count:
        kernels.softmax(x)
    assert count == {"softmax_forward": 1}
    with torch.profiler.profile() as profile:
        kernels.softmax(x)
    assert any("rooftop::softmax" in each.key for each in profile.key_averages())
    assert torch.func.vmap(kernels.softmax)(x[None]).shape == (1, 3, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        assert torch.autograd.forward_ad.unpack_dual(kernels.softmax(dual)).tangent is not None
    with torch.device("meta"):
        assert kernels.softmax(torch.empty(3, 8)).is_meta
    assert made() == 0


@needs_kernels
def test_modes_of_the_thread(made: Callable[[], int]) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    for _ in range(6):
        with torch.inference_mode():
            assert kernels.softmax(x).is_inference()
        with torch.no_grad():
            assert not kernels.softmax(x).requires_grad
        assert kernels.softmax(x).requires_grad
        assert not kernels.softmax(x.detach()).requires_grad
    assert made() >= 6
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(kernels.softmax(x), kernels.softmax(x))
        assert made() == 0
    finally:
        torch.use_deterministic_algorithms(False)


@needs_kernels
def test_subclasses_and_parameters(made: Callable[[], int]) -> None:
    class Named(Tensor):
        pass

    x, parameter = torch.randn(3, 8), torch.nn.Parameter(torch.randn(8))
    several(lambda: kernels.rms_norm(x, 8, parameter))
    assert made()
    assert isinstance(kernels.softmax(x.as_subclass(Named)), Tensor)
    traced = torch.fx.symbolic_trace(lambda x: kernels.softmax(x))
    assert torch.equal(traced(x), kernels.softmax(x))
    exact = torch.compile(lambda x: kernels.softmax(x) + 1, fullgraph=True, backend="aot_eager")
    assert torch.equal(exact(x), kernels.softmax(x) + 1)


@kernels.fused
def bounded(x: Any, scale: Any) -> Any:
    return torch.clamp(x * scale, -1.0, 1.0)


@pytest.mark.parametrize("device", DEVICES)
def test_a_source_that_the_observed_call_generates_is_no_part_of_the_call(device: str, made: Callable[[], int]) -> None:
    """The bounds are rounded to half precision by PyTorch's operators."""
    skip_without_kernels(device)
    x = torch.randn(16, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    scale = torch.randn(16, 1, device=device, dtype=torch.bfloat16, requires_grad=True)
    y = several(lambda: bounded(x, scale))[-1]
    made()
    slope = torch.ones_like(y)
    several(lambda: torch.autograd.grad(y, x, slope, retain_graph=True))
    assert made() >= 3, repeated_calls.reasons


@pytest.mark.parametrize("device", DEVICES)
def test_operators_of_a_compiled_program(device: str, made: Callable[[], int]) -> None:
    """They are called through the dispatcher."""
    skip_without_kernels(device)
    x, residual = (torch.randn(6, 8, device=device, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, device=device, requires_grad=True)

    def program(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        y, total = kernels.add_rms_norm(x, residual, 8, weight)
        return kernels.softmax(kernels.swiglu(y, total), -1)

    def step(program: Callable[..., Tensor]) -> list[Tensor]:
        y = program(x, residual, weight)
        return [y, *torch.autograd.grad(y.square().sum(), [x, residual, weight])]

    def inference(program: Callable[..., Tensor]) -> Tensor:
        with torch.no_grad():
            return program(x, residual, weight)

    compiled = torch.compile(program, backend="aot_eager", fullgraph=True)
    for call, operators in ((step, 6), (inference, 3)):
        with repeated_calls.in_python():
            expected = call(compiled)
        several(partial(call, compiled), 5)
        made()
        assert same([expected, *several(partial(call, compiled), 4)])
        assert made() == 4 * operators, repeated_calls.reasons


@pytest.mark.parametrize("device", DEVICES)
def test_empty_tensors_are_arguments_of_operators(device: str, made: Callable[[], int]) -> None:
    """The sums of a window attention without a padding vector have a part without elements."""
    skip_without_kernels(device)
    packed, bias = (torch.randn(*s, device=device, requires_grad=True) for s in ((2, 4, 4, 72), (4, 16, 16)))

    def step() -> tuple[Tensor, ...]:
        y = kernels.window_attention(packed, bias, 4, (4, 4))
        return torch.autograd.grad(y.sin().sum(), (packed, bias))

    with repeated_calls.in_python():
        expected = step()
    several(step)
    made()
    assert same([expected, *several(step, 3)])
    assert made() == 6, repeated_calls.reasons


@pytest.mark.parametrize("device", DEVICES)
def test_float32_products_follow_the_switch_of_their_precision(device: str, made: Callable[[], int]) -> None:
    skip_without_kernels(device)
    packed, bias = torch.randn(1, 8, 8, 96, device=device), torch.randn(2, 16, 16, device=device)
    x, weight = (torch.randn(64, 64, device=device, requires_grad=True) for _ in range(2))

    def products() -> list[Tensor]:
        y = kernels.linear_act(x, weight, None, "gelu")
        with torch.no_grad():
            attended = kernels.window_attention(packed, bias, 2, (4, 4))
        return [attended, y, *torch.autograd.grad(y.sum(), [x, weight])]

    switch = torch.backends.cuda.matmul
    before, found = switch.fp32_precision, list[list[Tensor]]()
    try:
        for precision in ("tf32", "ieee", "tf32"):
            switch.fp32_precision = precision
            with repeated_calls.in_python():
                expected = products()
            several(products)
            made()
            assert same([expected, *several(products, 3)])
            assert made() >= 6, repeated_calls.reasons  # at least forward of both
            found.append(expected)
    finally:
        switch.fp32_precision = before
    assert same([found[0], found[2]])
    assert same(found[:2]) == (device == "cpu")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "switch", [torch.backends, torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.mkldnn.matmul]
)
def test_the_newer_switches_of_float32_precision(device: str, switch: Any, made: Callable[[], int]) -> None:
    """Once a program has set one of them, PyTorch raises an error if the older switches are read."""
    skip_without_kernels(device)
    x, before = torch.randn(4, 8, device=device), switch.fp32_precision
    expected, *_ = several(lambda: kernels.softmax(x, -1))
    made()
    try:
        for precision in ("tf32", "ieee"):
            switch.fp32_precision = precision
            assert same([expected, *several(lambda: kernels.softmax(x, -1))])
            assert made()
    finally:
        switch.fp32_precision = before


@pytest.mark.parametrize("device", DEVICES)
def test_a_gradient_may_be_an_expanded_result_of_an_operator(device: str, made: Callable[[], int]) -> None:
    """The gradient of a mean divides the slope, and expands the quotient."""
    skip_without_kernels(device)
    x, weight = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 5, 8), (3, 1, 1)))

    def step() -> list[Tensor]:
        x.grad = weight.grad = None
        for dims, keep in ((1, True), ((0, 2), False), (None, False)):  # three gradients are accumulated
            (kernels.mean(x, dims, keep) * weight).square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        return [x.grad, weight.grad]

    with repeated_calls.in_python():
        expected = step()
    several(step)
    made()
    assert same([expected, *several(step, 3)])
    assert made() == 18, repeated_calls.reasons


@needs_kernels
def test_each_value_of_rooftop_check_has_its_own_facts(
    monkeypatch: pytest.MonkeyPatch, made: Callable[[], int]
) -> None:
    """Operators check their arguments if the value is "1", so a plan for "10" must not be used then."""
    x = torch.randn(4, 8)
    for value in ("", "0", "1", "10"):
        monkeypatch.setenv("ROOFTOP_CHECK", value)
        several(lambda: kernels.softmax(x, -1), 3)
        assert made() == 0, value
        several(lambda: kernels.softmax(x, -1), 2)
        assert made() == 2, value


@needs_kernels
def test_calls_in_another_precision_of_products_have_other_facts(made: Callable[[], int]) -> None:
    switches: list[Any] = [torch.backends, torch.backends.cudnn, torch.backends.cuda.matmul, torch.backends.cudnn.conv]
    before = [each.fp32_precision for each in switches]
    x, found = torch.randn(4, 8), dict[bytes, tuple[str, str]]()
    try:
        for switch, precision in itertools.product((*switches, *switches), ("tf32", "ieee", "none")):
            switch.fp32_precision = precision
            known_calls.forget()
            kernels.softmax(x, -1)
            (facts,) = {each for seen in repeated_calls._seen.values() for each in seen}
            precisions = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
            assert found.setdefault(facts, precisions) == precisions
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
    assert len(set(found.values())) >= 4


@pytest.mark.parametrize("device", DEVICES)
def test_operators_that_are_called_by_name(device: str, made: Callable[[], int]) -> None:
    skip_without_kernels(device)
    x, weight = (torch.randn(*shape, device=device, requires_grad=True) for shape in ((3, 8), (8,)))

    def both() -> list[Tensor]:
        y, rstd = torch.ops.rooftop.rms_norm(x, weight, 1e-5, torch.float32)
        assert not rstd.requires_grad
        return [y, *torch.autograd.grad(y.square().sum(), [x, weight])]

    with repeated_calls.in_python():
        expected = both()
    several(both)
    made()
    assert same([expected, *several(both, 4)])
    assert made() == 4  # backward does not pass the dispatcher


@needs_kernels
@pytest.mark.skipif(not torch_at_least(2, 13), reason="compiled autograd then refuses nodes made in C++")
def test_compiled_autograd(made: Callable[[], int], unchecked_targets: None) -> None:
    from torch._dynamo.compiled_autograd import _enable

    x, y = torch.randn(3, 8, requires_grad=True), torch.randn(2, 8, requires_grad=True)
    target = torch.tensor([0, 7, 2])

    def step() -> list[Tensor]:
        x.grad = y.grad = None
        loss = kernels.cross_entropy(kernels.softmax(x), target) * 3 + kernels.softmax(y).square().sum()
        loss.backward()
        assert x.grad is not None
        assert y.grad is not None
        return [x.grad, y.grad]

    with repeated_calls.in_python():
        expected = step()
    several(step)
    made()
    with _enable(lambda graph: torch.compile(graph, backend="eager")):
        assert same([expected, *several(step, 3)])
        known_calls.forget()  # new plans are compiled again
        assert same([expected, *several(step)])
    assert made() >= 12  # forward


@needs_kernels
def test_threads(made: Callable[[], int]) -> None:
    inputs = [torch.randn(n, 8, requires_grad=True) for n in range(1, 6)]
    expected = [torch.autograd.grad(kernels.softmax(x).square().sum(), x)[0] for x in inputs]

    def work(start: int) -> bool:
        order = [(start + 3 * i) % len(inputs) for i in range(40)]
        made = [torch.autograd.grad(kernels.softmax(inputs[i]).square().sum(), inputs[i])[0] for i in order]
        return all(torch.equal(each, expected[i]) for each, i in zip(made, order, strict=True))

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(work, range(4)))
    assert made()


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [64, 50_257])
def test_a_new_thread_has_no_context_yet(columns: int, made: Callable[[], int]) -> None:
    """Triton launches the kernel for 64 columns; that for 50,257 columns is in CUDA C++. If memory comes from PyTorch's
    cache, nothing before the launch has made a CUDA context current in the thread."""
    x = torch.randn(8, columns, device="cuda", dtype=torch.bfloat16)
    expected, *_ = several(lambda: kernels.softmax(x, -1))
    torch.cuda.synchronize()
    made()

    def work() -> Tensor:
        return kernels.softmax(x, -1)

    for in_python in (False, True):
        with repeated_calls.in_python() if in_python else nullcontext(), ThreadPoolExecutor(1) as thread:
            found = thread.submit(work).result()
        assert torch.equal(found, expected)
        assert made() == (not in_python)


@needs_kernels
def test_a_lesson_is_not_disturbed_by_calls_of_other_threads(
    made: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight, other = (torch.randn(*shape, requires_grad=True) for shape in ((3, 8), (8,), (5, 8)))

    def in_another_thread(lesson: Lesson) -> list[Any]:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(lambda: kernels.softmax(other).sum().backward()).result()
            thread.submit(known_calls.depends, "this thread only").result()
        return memory(lesson)

    memory = Lesson.memory
    monkeypatch.setattr(Lesson, "memory", in_another_thread)
    repeated_calls.reasons.clear()
    several(lambda: kernels.rms_norm(x, 8, weight).sum().backward())
    assert made() >= 4, repeated_calls.reasons


@needs_kernels
def test_in_python_holds_until_the_last_block_ends(made: Callable[[], int]) -> None:
    x = torch.randn(3, 8, requires_grad=True)
    several(lambda: kernels.softmax(x).sum().backward())
    y = kernels.softmax(x)
    assert made()
    opened, close = threading.Event(), threading.Event()

    def block() -> None:
        with repeated_calls.in_python():
            opened.set()
            close.wait(60)

    with ThreadPoolExecutor(1) as thread:
        other = thread.submit(block)
        opened.wait(60)
        with repeated_calls.in_python():
            close.set()
            other.result()
            kernels.softmax(x)
            y.sum().backward()
            assert made() == 0
    kernels.softmax(x)
    assert made() == 1
    with repeated_calls.in_python():
        known_calls.forget()
    kernels.softmax(x)
    assert made() == 0


def test_signatures_stay() -> None:
    assert list(inspect.signature(kernels.softmax).parameters)[:2] == ["input", "dim"]
    assert kernels.layer_norm.__module__ == "rooftop.kernels.norms.norms"


@needs_kernels
def test_an_engine_without_graphs_computes_all_convolutions_in_cpp(made: Callable[[], int]) -> None:
    model = ResNet(Bottleneck, (1, 1, 1, 1), 10, channels=8).eval()
    engine = Engine(model, dtype=torch.bfloat16, channels_last=True, graphs=False, fuse=True, replace=True)
    x = torch.randn(1, 3, 16, 16)
    assert same(several(lambda: engine(x), 4))
    made()
    engine(x)
    assert len(engine.report.fused) == 17
    assert made() == 18, repeated_calls.reasons  # 17 fused operations and the max pool


# ---- building -----------------------------------------------------------------------------------------------------


@needs_compiler
def test_a_broken_source_is_reported_and_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    source = tmp_path / "broken.cpp"
    source.write_text("this is no C++\n")
    extension = Extension("broken", source)
    assert extension.state()[0]
    with pytest.raises(RuntimeError, match=r"broken\.cpp was not compiled: .*error"):
        extension.build()
    usable, why = extension.state()
    assert not usable
    assert str(extension.failed) in why
    started: list[Any] = []
    extension.ask(started.append, "Python")
    assert not started
    assert not list(tmp_path.rglob("*.partial"))
    assert not list(tmp_path.rglob("*.building"))


def test_without_a_compiler_python_makes_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    monkeypatch.setattr(cpp_extensions, "compiler", lambda: None)
    source = tmp_path / "part.cpp"
    source.write_text("")
    extension = Extension("part", source)
    assert extension.state() == (False, "no C++ compiler")
    with pytest.raises(RuntimeError, match="install g\\+\\+"):
        extension.build()


def test_a_compiler_that_is_no_program_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path / "cache"))
    nonsense, source = tmp_path / "nonsense", tmp_path / "part.cpp"
    nonsense.write_bytes(b"\0\1")
    nonsense.chmod(0o755)
    source.write_text("")
    monkeypatch.setattr(cpp_extensions, "compiler", lambda: (str(nonsense),))
    extension = Extension("part", source)
    with pytest.raises(RuntimeError, match=r"was not compiled: error: .*nonsense"):
        extension.build()
    assert not extension.state()[0]
    assert not list(tmp_path.rglob("*.building"))
    monkeypatch.setenv("ROOFTOP_CACHE", str(nonsense))  # a file
    with pytest.raises(RuntimeError, match=r"was not compiled: .*nonsense"):
        Extension("part", source).build()


def test_waiting_without_a_compiler_warns_once_and_calls_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_COMPILED_CALLS", "wait")
    monkeypatch.setattr(cpp_extensions, "compiler", lambda: None)
    monkeypatch.setattr(native_calls, "_extension", Extension("no_such_part", Path(__file__)))
    monkeypatch.setattr(native_calls, "has_asked", False)
    monkeypatch.setattr(known_calls, "after_known", [native_calls.ask])
    with pytest.warns(UserWarning, match=r"=wait: Python makes all calls, because .* needs a C\+\+ compiler") as warned:
        known_calls.became_known()
    known_calls.became_known()
    assert len(warned) == 1


@needs_compiler
def test_a_compiler_with_a_prefix_and_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path / "cache"))
    prefix, found = tmp_path / "a prefix", cpp_extensions.compiler()
    assert found is not None
    prefix.write_text(f'#!/bin/sh\necho "$@" > "{tmp_path}/said"\nexec "$@"\n')
    prefix.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{prefix}' {found[0]} -O1")
    command = cpp_extensions.compiler.__wrapped__()
    assert command == (str(prefix), found[0], "-O1")
    monkeypatch.setattr(cpp_extensions, "compiler", lambda: command)
    extension = Extension("part", _tiny(tmp_path))
    assert extension.state()[1].endswith(f"by '{prefix}' {found[0]} -O1")
    assert extension.build().__name__ == "part"
    assert f"{found[0]} -O1 -shared" in (tmp_path / "said").read_text()


@needs_compiler
@pytest.mark.parametrize("name", ["no-such-compiler -O2", "'open"])
def test_another_compiler_is_used_if_there_is_none_of_that_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    expected = cpp_extensions.compiler.__wrapped__()
    monkeypatch.setenv("CXX", name)
    assert cpp_extensions.compiler.__wrapped__() == expected


@needs_compiler
def test_a_damaged_file_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    extension = Extension("part", _tiny(tmp_path))
    for load in (lambda: [extension.build()], lambda: _in_background(extension)):
        extension.path.parent.mkdir(exist_ok=True)
        extension.path.unlink(missing_ok=True)  # a new file, because this process has mapped the old one
        extension.path.write_bytes(b"\x7fELF")
        assert [each.__name__ for each in load()] == ["part"]


@needs_compiler
def test_it_is_compiled_in_the_background(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    extension = Extension("part", _tiny(tmp_path))
    assert [each.__name__ for each in _in_background(extension)] == ["part"]
    assert extension.state() == (True, f"compiled, {extension.path}")


@needs_compiler
def test_a_build_waits_for_another_process_that_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    extension = Extension("part", _tiny(tmp_path))
    other = extension.path.with_name(f"{extension.path.name}.1.building")
    other.parent.mkdir(parents=True)
    with other.open("w") as lock, ThreadPoolExecutor(1) as pool:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built = pool.submit(extension.build)
        time.sleep(1.0)
        assert not built.done()
        monkeypatch.setattr(extension, "_compile", lambda: pytest.fail("a second thread compiled, too"))
        subprocess.run(extension._command(other), check=True)
        other.rename(extension.path)  # at once: a file of this name is loaded as soon as it exists
        lock.close()
        assert built.result(timeout=60).__name__ == "part"


@needs_compiler
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_compilation_that_was_killed_is_not_awaited(
    when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    never = tmp_path / "never"
    never.write_text("#!/bin/sh\nsleep 150\n")
    never.chmod(0o755)
    other = Extension("part", _tiny(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(cpp_extensions, "compiler", lambda: (str(never),))
        killed = other._compile()
    extension = Extension("part", other.source)
    assert extension._compiles_elsewhere()
    if when == "before":
        killed.kill()
        killed.wait()
    else:
        threading.Timer(1.0, killed.kill).start()
    began = time.monotonic()
    assert extension.build().__name__ == "part"
    assert time.monotonic() - began < 60
    killed.wait()
    assert not list(tmp_path.rglob("*.building"))


def test_waiting_without_a_compiler_warns_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    monkeypatch.setenv("ROOFTOP_COMPILED_CALLS", "wait")
    monkeypatch.setattr(cpp_extensions, "compiler", lambda: None)
    with pytest.warns(UserWarning, match=r"=wait: Python reads, because part\.cpp needs a C\+\+ compiler"):
        Extension("part", _tiny(tmp_path)).ask(pytest.fail, "Python reads")


def test_a_part_that_is_left_out_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFTOP_CACHE", str(tmp_path))
    monkeypatch.setenv("ROOFTOP_COMPILED_CALLS", "0")
    extension = Extension("part", _tiny(tmp_path))
    extension.ask(pytest.fail, "Python reads")
    assert extension.state() == (False, "left out by ROOFTOP_COMPILED_CALLS=0")
    assert not list(tmp_path.rglob("*.building"))


def _tiny(folder: Path) -> Path:
    source = folder / "part.cpp"
    source.write_text(
        "#include <Python.h>\n#define NAME(name) PyInit_##name\n#define INIT(name) NAME(name)\n"
        'static PyModuleDef def = {PyModuleDef_HEAD_INIT, "part", nullptr, -1};\n'
        "PyMODINIT_FUNC INIT(ROOFTOP_MODULE)() { return PyModule_Create(&def); }\n"
    )
    return source


def _in_background(extension: Extension) -> list[Any]:
    loaded: list[Any] = []
    extension.ask(loaded.append, "Python")
    for thread in threading.enumerate():
        if thread.name == "rooftop-part":
            thread.join(120)
    return loaded


# ---- kernels in CUDA C++ -------------------------------------------------------------------------------------------


@pytest.fixture
def in_clusters(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Gives a function that lets kernels in CUDA C++ compute softmax and cross entropy of a device's tensors."""

    def turn_on(device: str) -> None:
        if device == "cuda":
            if not clusters.is_installed() or torch.cuda.get_device_capability() < (9, 0):
                pytest.skip("needs cuda.core and a GPU with clusters")
            return
        request.getfixturevalue("cuda_on_cpu")
        hopper = launch_data.Device(triton=True, processors=2, shared_bytes=1 << 20, cuda=9)
        for each in (clusters, plans):
            monkeypatch.setattr(each, "device_facts", lambda device: hopper)
        monkeypatch.setattr(clusters, "is_installed", lambda: True)
        table = tuple(ClusterConfig(0, 1 << 30, 2, 64, 4, 1, odd=odd) for odd in (False, True))
        for name in ("CLUSTER_FORWARD", "CLUSTER_BACKWARD", "CLUSTER_FUSED"):
            monkeypatch.setattr(tables, name, table)
        plans.forget()

    yield turn_on
    plans.forget()


@pytest.mark.parametrize(("rows", "columns"), [(3, 50), (9, 64)])
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_in_cuda_are_launched_without_python(
    device: str, rows: int, columns: int, made: Callable[[], int], in_clusters: Callable[[str], None]
) -> None:
    """Clusters that finish their rows take further rows from a counter, which PyTorch fills with 0 in each call."""
    skip_without_kernels(device)
    in_clusters(device)
    if device == "cuda":  # the tables of a GPU list longer rows
        rows, columns = 300 * rows, 1000 * columns + columns % 4
    x = torch.randn(rows, columns, device=device, dtype=torch.bfloat16, requires_grad=True)
    slope = torch.randn_like(x)
    target = torch.randint(columns, (rows,), device=device)

    def softmax() -> list[Tensor]:
        y = kernels.softmax(x, -1)
        return [y.detach(), *torch.autograd.grad(y, x, slope)]

    def cross_entropy() -> list[Tensor]:
        loss = kernels.cross_entropy(x, target)
        return [loss.detach(), *torch.autograd.grad(loss, x)]

    calls = (softmax, cross_entropy) if device == "cuda" else (softmax,)  # on a CPU, cross entropy checks its targets
    for call in calls:
        with repeated_calls.in_python(), count_launches() as launches:
            expected = call()
        assert any("_cluster<" in name for name in launches), launches
        assert made() == 0
        assert same([expected, *several(call)])
        assert made() >= 5, repeated_calls.reasons
        with torch.no_grad():  # other addresses
            x.copy_(torch.randn_like(x))
            moved = x.detach().clone().requires_grad_()
        with repeated_calls.in_python():
            expected = call()
        made()
        x, kept = moved, x
        assert same([expected, call()])
        assert made() == 2
        x = kept


@needs_kernels
def test_kernels_in_cuda_on_memory_of_unknown_origin_are_launched_by_python(
    made: Callable[[], int], cuda_on_cpu: Any
) -> None:
    """The call of a function that also reads a tensor which is no argument."""
    source = 'extern "C" __global__ void add(const float* x, const float* y, float* z) { *z = *x + *y; }'
    hidden = [torch.ones(1)]

    @repeated_calls.repeated
    def add_hidden(x: Tensor) -> Tensor:
        z = torch.empty_like(x)
        cuda.compile(source, "add", arch="sm_90").launch(1, 1, x, hidden[0], z)
        return z

    for i in range(6):
        hidden[0] = torch.full((1,), float(i))
        assert add_hidden(torch.ones(1)).item() == 1 + i
    assert made() == 0
    assert "neither an argument nor an allocation" in repeated_calls.reasons["add_hidden"]


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
@needs_compiler
def test_all_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    compilers = "a_compiler_with or damaged_file or in_the_background or build_waits or was_killed"
    assert interpreted(__file__, "-k", f"not ({compilers})") >= 12
