"""Any sequence of calls has the same bits, strides, gradients, modes and errors with and without calls in C++.

A state machine makes each call twice: as users make it, and in Python alone (`in_python`), with copies of the same
inputs. The state machine keeps some graphs, whose backward runs later, after other calls.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, rule, run_state_machine_as_test
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from rooftop import kernels
from rooftop.kernels.losses import losses
from rooftop.launch import INTERPRETED, cpp_extensions, known_calls, native_calls, repeated_calls

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(cpp_extensions.compiler() is None, reason="no C++ compiler")
needs_kernels = pytest.mark.skipif(not INTERPRETED, reason="without kernels nothing is planned")
DEVICE = "cpu" if INTERPRETED else "cuda"


class Named(Tensor):
    """A tensor of another class."""


# ---- calls ----------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A function of x and y (4, 8) and of a vector (8,)."""

    function: Callable[[Tensor, Tensor, Tensor], Any]
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)


TARGETS, TOKENS = torch.tensor([0, 7, -100, 2]), torch.tensor([[0, 3], [3, 1]])
CASES = {
    "softmax": Case(lambda x, y, v: kernels.softmax(x, -1)),
    "log_softmax": Case(lambda x, y, v: kernels.log_softmax(x, dim=1, scale=0.5)),
    "rms_norm": Case(lambda x, y, v: kernels.rms_norm(x, 8, v)),
    "add_rms_norm": Case(lambda x, y, v: kernels.add_rms_norm(x, y, (8,), v)),
    "layer_norm": Case(lambda x, y, v: kernels.layer_norm(x, 8, v, y[0])),  # a part of a tensor
    "mul": Case(lambda x, y, v: kernels.mul(x, y), (torch.float32, torch.float64)),
    "silu": Case(lambda x, y, v: kernels.silu(x), (torch.float32, torch.float64)),
    "swiglu": Case(lambda x, y, v: kernels.swiglu(x, y)),
    "the same twice": Case(lambda x, y, v: kernels.swiglu(x, x)),
    "sum": Case(lambda x, y, v: kernels.sum(x, -1, keepdim=True)),
    "amax": Case(lambda x, y, v: kernels.amax(x, 0)),
    "argmax": Case(lambda x, y, v: kernels.argmax(x, -1)),
    "linear_act": Case(lambda x, y, v: kernels.linear_act(x, y, None, "gelu"), (torch.bfloat16, torch.float16)),
    "cross_entropy": Case(lambda x, y, v: kernels.cross_entropy(x, TARGETS.to(x.device))),
    "separable": Case(lambda x, y, v: kernels.cross_entropy(x, TARGETS.to(x.device), v.detach().abs(), fused=False)),
    "embedding": Case(
        lambda x, y, v: kernels.embedding(TOKENS.to(x.device), x.view(8, 4)), (torch.bfloat16, torch.float16)
    ),
    "conv_act": Case(lambda x, y, v: kernels.conv_act(x.view(1, 4, 2, 4), y.view(8, 4, 1, 1), v, activation="relu")),
    "wrong": Case(lambda x, y, v: kernels.rms_norm(x, 7, v)),
}

# cuDNN adds up gradients in any order
WITHOUT_GRADIENT = ("wrong", "argmax") if DEVICE == "cpu" else ("wrong", "argmax", "conv_act")


class Spec(NamedTuple):
    """The inputs of a call."""

    name: str
    dtype: int
    seed: int
    layout: str
    learned: bool

    def made(self, device: str = DEVICE) -> tuple[Tensor, Tensor, Tensor]:
        dtypes, generator = CASES[self.name].dtypes, torch.Generator().manual_seed(self.seed)
        dtype = dtypes[self.dtype % len(dtypes)]
        x, y, v = (torch.randn(size, generator=generator).to(device, dtype) for size in ((4, 8), (4, 8), (8,)))
        if self.layout == "transposed":
            x = x.t().contiguous().t()
        elif self.layout == "shifted":  # not aligned by 16 bytes
            memory = torch.empty(33, dtype=dtype, device=device)
            x = memory[1:].view(4, 8).copy_(x)
        elif self.layout == "gaps":
            memory = torch.zeros(4, 11, dtype=dtype, device=device)
            x = memory[:, :8].copy_(x)
        return x.requires_grad_(self.learned), y.requires_grad_(self.learned), v.requires_grad_(self.learned)


SPECS = st.builds(
    Spec,
    st.sampled_from(sorted(CASES)),
    st.integers(0, 1),
    st.integers(0, 1),
    st.sampled_from(["dense", "dense", "transposed", "shifted", "gaps"]),
    st.sampled_from([True, True, False]),
)


# ---- who must see calls, and modes ----------------------------------------------------------------------------------


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "plain": nullcontext,
    "again": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast(DEVICE, torch.bfloat16),
    "saved tensors": lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t + 0),
    "profiler": lambda: torch.autograd.profiler.profile(use_kineto=False),
    "deterministic": deterministic,
    "forward mode": torch.autograd.forward_ad.dual_level,
}
WAYS: dict[str, Callable[..., Any]] = {
    "call": lambda f, x, y, v: f(x, y, v),
    "vmap": lambda f, x, y, v: torch.func.vmap(f, (None, None, 0))(x, y, torch.stack([v, v])),
    "subclass": lambda f, x, y, v: f(x.as_subclass(Named), y, v),
    "parameters": lambda f, *inputs: f(*(torch.nn.Parameter(each.detach()) for each in inputs)),
    "thread": lambda f, x, y, v: ThreadPoolExecutor(1).submit(f, x, y, v).result(),
    "checkpoint": lambda f, x, y, v: checkpoint(f, x, y, v, use_reentrant=False),
    "copied": lambda f, x, y, v: copy.deepcopy(f(x, y, v)),
    "dual": lambda f, x, y, v: f(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), y, v),
}


def facts(value: Any) -> Any:
    """Everything about a result that the caller can see."""
    if isinstance(value, tuple | list):
        return type(value), [facts(each) for each in value]
    if not isinstance(value, Tensor):
        return value
    seen = type(value), value.dtype, value.shape, value.stride(), value.device, value.requires_grad
    seen += value.is_inference(), value.is_leaf, value.storage_offset()
    if value.is_meta or type(value) is not Tensor:
        return seen
    tangent = (
        torch.autograd.forward_ad.unpack_dual(value).tangent if torch.autograd.forward_ad._current_level >= 0 else None
    )
    return seen, bits(value), None if tangent is None else bits(tangent)


def bits(value: Tensor) -> list[int]:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()  # type: ignore[no-any-return]


def outcome(work: Callable[[], Any]) -> Any:
    """The facts of what is returned, or the error."""
    try:
        return facts(work())
    except Exception as error:
        return type(error), str(error).split("\n")[0]


def called(spec: Spec, mode: str, way: str, *inputs: Tensor) -> Any:
    with MODES[mode]():
        return WAYS[way](CASES[spec.name].function, *inputs)


class Graph(NamedTuple):
    """A call whose backward runs later. Results and leaves: [0] as users make the call, [1] in Python."""

    spec: Spec
    results: list[Any]
    leaves: list[tuple[Tensor, ...]]


def both(work: Callable[[int], Any]) -> tuple[Any, Any]:
    """Outcomes of `work(0)`, for a call as users make it, and of `work(1)`, in Python."""
    first = outcome(lambda: work(0))
    with repeated_calls.in_python():
        return first, outcome(lambda: work(1))


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result  # type: ignore[no-any-return]


class Calls(RuleBasedStateMachine):
    """Calls and backwards in any order."""

    graphs = Bundle("graphs")

    @initialize()
    def begin(self) -> None:
        known_calls.forget()

    @rule(spec=SPECS, mode=st.sampled_from(sorted(MODES)), way=st.sampled_from(sorted(WAYS)))
    def call(self, spec: Spec, mode: str, way: str) -> None:
        inputs = [spec.made() for _ in range(2)]
        first, second = both(lambda i: called(spec, mode, way, *inputs[i]))
        assert first == second

    @rule(spec=SPECS, times=st.integers(2, 4))
    def call_often(self, spec: Spec, times: int) -> None:
        for _ in range(times):
            self.call(spec, "plain", "call")

    @rule(spec=SPECS, kind=st.sampled_from(["meta", "fake"]))
    def call_without_values(self, spec: Spec, kind: str) -> None:
        def work(_: int) -> Any:
            with FakeTensorMode() if kind == "fake" else nullcontext():
                return CASES[spec.name].function(*spec.made("meta" if kind == "meta" else DEVICE))

        first, second = both(work)
        assert first == second

    @rule(target=graphs, spec=SPECS, mode=st.sampled_from(["plain", "plain", "autocast", "saved tensors"]))
    def record(self, spec: Spec, mode: str) -> Graph:
        spec = spec._replace(learned=True, name="softmax" if spec.name in WITHOUT_GRADIENT else spec.name)
        inputs = [spec.made() for _ in range(2)]
        results: list[Any] = [None, None]

        def work(i: int) -> Any:
            results[i] = called(spec, mode, "call", *inputs[i])
            return results[i]

        first, second = both(work)
        assert first == second
        return Graph(spec, results, inputs)

    @rule(graph=graphs, slope=st.sampled_from([1.0, 0.5]), retain=st.booleans(), again=st.booleans())
    def backward(self, graph: Graph, slope: float, retain: bool, again: bool) -> None:
        def work(i: int) -> Any:
            result = first_of(graph.results[i])
            slopes = torch.full_like(result, slope)
            options = {"retain_graph": retain or again, "create_graph": again, "allow_unused": True}
            found = torch.autograd.grad(result, graph.leaves[i], slopes, **options)
            if not again:
                return list(found)
            with_graph = [each for each in found if each is not None and each.requires_grad]
            total = sum(each.float().square().sum() for each in with_graph)
            second = torch.autograd.grad(total, graph.leaves[i], allow_unused=True) if with_graph else ()
            return [each.detach() for each in (*found, *second) if each is not None]

        first, second = both(work)
        assert first == second

    @rule(graph=graphs, hook=st.sampled_from(["none", "tensor", "node", "batched", "one"]))
    def accumulate(self, graph: Graph, hook: str) -> None:
        def work(i: int) -> Any:
            result, (x, *others) = first_of(graph.results[i]), graph.leaves[i]
            seen: list[Tensor] = []
            handles = []
            if hook == "tensor":
                handles.append(x.register_hook(lambda slope: slope * 2))
                handles.append(result.register_hook(lambda slope: seen.append(slope)))
            elif hook == "node" and result.grad_fn is not None:
                handles.append(result.grad_fn.register_prehook(lambda slopes: tuple(2 * each for each in slopes)))
                handles.append(x.register_post_accumulate_grad_hook(lambda x: seen.append(x.grad.clone())))
            elif hook == "batched":
                slopes = torch.stack([torch.ones_like(result), 3 * torch.ones_like(result)])
                return list(torch.autograd.grad(result, [x], slopes, retain_graph=True, is_grads_batched=True))
            try:
                result.backward(
                    torch.ones_like(result), retain_graph=hook != "none", inputs=[x] if hook == "one" else None
                )
            finally:
                for handle in handles:
                    handle.remove()
            return [x.grad, *(each.grad for each in others), *seen]

        first, second = both(work)
        assert first == second

    @rule(graph=graphs, what=st.sampled_from(["input", "result"]))
    def change(self, graph: Graph, what: str) -> None:
        """Change a tensor in place, so that a backward pass that needs it raises, as does a second derivative of a
        loss."""

        def work(i: int) -> Any:
            with torch.no_grad():
                return (graph.leaves[i][0] if what == "input" else first_of(graph.results[i])).mul_(2)

        first, second = both(work)
        assert first == second

    @rule(graph=consumes(graphs))
    def drop(self, graph: Graph) -> None:
        graph.results.clear()

    @rule()
    def forget(self) -> None:
        known_calls.forget()


@pytest.fixture
def planned_at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if DEVICE == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    repeated_calls.build()
    monkeypatch.setattr(repeated_calls, "LESSON_AT", 1)
    monkeypatch.setattr(losses, "check_targets", lambda *_: None)  # without this, Python checks each call on a CPU
    yield
    known_calls.forget()


def sequences(examples: int, steps: int) -> None:
    before = repeated_calls.calls_made()
    options = settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    run_state_machine_as_test(Calls, settings=options)
    assert repeated_calls.calls_made() > before + examples, repeated_calls.reasons


@needs_kernels
def test_sequences(planned_at_once: None) -> None:
    sequences(30, 30)


@pytest.mark.gpu
def test_sequences_on_a_gpu(planned_at_once: None) -> None:
    sequences(5, 12)  # each call may compile kernels


@needs_kernels
def test_all_cases_are_made_in_cpp(planned_at_once: None) -> None:
    """The sequences compare C++ with Python only if each case is made in C++."""
    known_calls.forget()
    for name in sorted(CASES.keys() - {"wrong", "the same twice", "layer_norm"}):
        inputs = Spec(name, 0, 0, "dense", True).made()
        before = repeated_calls.calls_made()
        for _ in range(3):
            result = first_of(CASES[name].function(*inputs))
            if result.requires_grad:
                result.backward(torch.ones_like(result))
        assert repeated_calls.calls_made() > before, (name, repeated_calls.reasons)


@needs_kernels
def test_a_result_that_is_a_view_inside_can_be_changed_in_place(planned_at_once: None) -> None:
    """Autograd refuses in-place changes of views that a custom function returns."""
    x = torch.randn(1, 16, 4, 4).to(torch.bfloat16, memory_format=torch.channels_last).requires_grad_()
    weight = torch.randn(32, 16, 1, 1, dtype=torch.bfloat16)

    def tripled() -> Tensor:
        y = kernels.conv_act(x, weight)
        assert y.requires_grad
        return torch.autograd.grad(y.mul_(3).sum(), x)[0]

    with repeated_calls.in_python():
        expected = tripled()
    assert all(torch.equal(tripled(), expected) for _ in range(4))


@needs_kernels
@pytest.mark.parametrize("during_a_lesson", [False, True])
def test_a_fork_goes_on(planned_at_once: None, during_a_lesson: bool) -> None:
    x, y, v = Spec("rms_norm", 0, 0, "dense", True).made()

    def gradients() -> Any:
        return facts(torch.autograd.grad(CASES["rms_norm"].function(x, y, v).sum(), (x, v)))

    expected = [gradients() for _ in range(3)]
    begun, end = threading.Event(), threading.Event()

    def learn() -> None:
        with native_calls.teaching([x]):
            begun.set()
            end.wait(60)

    if during_a_lesson:
        thread = threading.Thread(target=learn)
        thread.start()
        begun.wait(60)
    child = os.fork()
    if child == 0:
        before = repeated_calls.calls_made()
        os._exit(0 if gradients() == expected[-1] and repeated_calls.calls_made() > before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert expected[0] == expected[-1]
    end.set()


@pytest.mark.skipif(INTERPRETED, reason="starts the interpreted run")
def test_all_through_the_interpreter(interpreted: Callable[..., int]) -> None:
    assert interpreted(__file__) >= 3
