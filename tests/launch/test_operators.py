"""Calls of operators skip the dispatcher only if nothing except autograd must observe them."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode

import rooftop.sparse.site_norms  # noqa: F401 (registers operators)
from rooftop.kernels import fused, layer_norm
from rooftop.launch import fast_path, operators


class Names(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


class Watching(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Own(Tensor):
    pass


def test_a_plain_call_is_plain() -> None:
    x = torch.randn(3, requires_grad=True)
    assert fast_path.is_plain((x, torch.nn.Parameter(x), None, 1e-5, [True, False], [x, x]))
    with torch.no_grad(), torch.autocast("cpu"):
        assert fast_path.is_plain((x,))


@pytest.mark.parametrize(
    "argument",
    [
        torch.randn(3).as_subclass(Own),
        torch.empty(3, device="meta"),
        torch.randn(3, dtype=torch.complex64).conj().imag,  # a view with the negative bit
        torch._efficientzerotensor((3,)),  # has no memory
        [torch.randn(3), torch.empty(3, device="meta")],
    ],
)
def test_arguments_that_the_dispatcher_must_see(argument: object) -> None:
    assert not fast_path.is_plain((argument,))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((torch.ones(2), None, 1, 0.5, "mean", [True]), False),
        ((torch.ones(2), torch.ones(2, requires_grad=True)), True),
        ((None, torch.nn.Parameter(torch.ones(2))), True),
        ((torch.ones(2), [torch.ones(2), torch.ones(2, requires_grad=True)]), True),
        ((torch.ones(2), (1, 2), [torch.ones(2)]), False),
    ],
)
def test_autograd_is_asked_for_by_any_tensor(arguments: tuple[object, ...], expected: bool) -> None:
    assert fast_path.requires_grad(arguments) == expected


@pytest.mark.parametrize("context", [Names(), Watching(), FakeTensorMode(), torch.inference_mode(), profile()])
def test_contexts_that_must_see_the_operator(context: AbstractContextManager[object]) -> None:
    x = torch.randn(3)
    with context:
        assert not fast_path.is_plain((x,))
    assert fast_path.is_plain((x,))


@pytest.mark.parametrize("context", [Names(), Watching(), FakeTensorMode(), profile(), torch.no_grad()])
def test_only_inference_mode_needs_no_dispatcher(context: AbstractContextManager[object]) -> None:
    x = torch.randn(3)
    assert not fast_path.only_infers((x,))
    with torch.inference_mode():
        assert fast_path.only_infers((x,))
        assert not fast_path.only_infers((torch.empty(3, device="meta"),))
        with context:
            assert fast_path.only_infers((x,)) == isinstance(context, torch.no_grad)
    seen: list[bool] = []
    torch.func.vmap(lambda t: seen.append(fast_path.only_infers((t,))) or t)(x)
    assert seen == [False]


IMPORTED_WITHIN_A_MODE = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Names(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        seen.append(str(func))
        return func(*args, **(kwargs or {}))

seen = []
with Names():
    import rooftop.kernels
    from rooftop.launch import fast_path, operators
assert fast_path.is_plain((torch.ones(3),))
with Names():
    assert not fast_path.is_plain((torch.ones(3),))
    rooftop.kernels.softmax(torch.ones(3, 5))
assert "rooftop.softmax.default" in seen, seen
"""


def test_where_it_was_imported_does_not_matter() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED_WITHIN_A_MODE], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr


def test_transforms_must_see_the_operator() -> None:
    def seen(x: Tensor) -> Tensor:
        assert not fast_path.is_plain((x,))
        return x.sum()

    torch.func.grad(seen)(torch.randn(3))


def test_modes_and_the_profiler_name_the_operator() -> None:
    x = torch.randn(3, 5, requires_grad=True)
    with Names() as names:
        layer_norm(x, 5).sum().backward()
    assert {"rooftop.layer_norm.default", "rooftop.norm_backward.default"} <= set(names.seen)
    with profile() as profiled:
        layer_norm(x, 5).sum().backward()
    assert {"rooftop::layer_norm", "rooftop::norm_backward"} <= {event.name for event in profiled.events()}


@pytest.mark.parametrize("grad", [True, False])
def test_both_ways_give_the_same(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(4, 6, requires_grad=grad), torch.randn(6)
    found = []
    for way in (nullcontext(), monkeypatch.context()):
        with way as patch:
            if patch is not None:
                patch.setattr(fast_path, "is_plain", lambda arguments: False)
            y = layer_norm(x, 6, weight)
            found.append([y.detach(), *(torch.autograd.grad(y.square().sum(), x) if grad else ())])
            assert y.requires_grad == grad
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_both_ways_give_the_same_for_lists_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of the arguments need no gradient; some of the results have no gradient or get none."""
    function = fused(lambda x, y, s: (x * torch.exp(y), x > 0, y * s))
    x, y = torch.randn(4, 6, requires_grad=True), torch.randn(6)
    found = []
    for way in (nullcontext(), monkeypatch.context()):
        with way as patch:
            if patch is not None:
                patch.setattr(fast_path, "is_plain", lambda arguments: False)
            product, positive, unused = function(x, y, 0.5)
            assert [each.requires_grad for each in (product, positive, unused)] == [True, False, True]
            (first,) = torch.autograd.grad(product.square().sum(), x, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), x)
            found.append([each.detach() for each in (product, positive, unused, first, second)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_what_is_computed_on_the_cpu_alone() -> None:
    x, weight = torch.ones(3), torch.ones(3, requires_grad=True)
    computed_on_cpu = fast_path.computed_on_cpu
    assert computed_on_cpu(x, None)
    assert not computed_on_cpu(x, weight)
    with torch.no_grad():
        assert computed_on_cpu(x, weight)
    for other in (3, x.to("meta"), x.to_sparse(), FakeTensorMode().from_tensor(x), Own(x)):
        assert not computed_on_cpu(other)
    for context in (torch.autocast("cpu"), Names(), Watching(), profile()):
        with context:
            assert not computed_on_cpu(x)
    seen = list[bool]()
    torch.func.vmap(lambda row: seen.append(computed_on_cpu(row)) or row)(torch.ones(1, 2))
    assert seen == [False]
    assert computed_on_cpu(x)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("linear_act", "bool keep, bool rounded=False) -> (Tensor, Tensor)"),  # `keep` is a method of the class
        ("paged_attention", "SymInt? positions, SymInt? window=None) -> Tensor"),
        ("site_norm_backward", "Tensor count, bool by_running) -> (Tensor, Tensor, Tensor)"),  # tuples have a `count`
        ("scale_gradient_", "(Tensor(a0!) gradient, Tensor factor) -> ()"),
    ],
)
def test_schemas_follow_from_fields_and_their_defaults(name: str, expected: str) -> None:
    assert str(getattr(torch.ops.rooftop, name).default._schema).endswith(expected)


def test_an_argument_left_out_has_its_default_on_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3)
    call, found = operators._declared["linear_act"].call, []
    for plain in (fast_path.is_plain, lambda arguments: False):
        monkeypatch.setattr(fast_path, "is_plain", plain)
        y, _ = call(x, weight, None, "relu", None, False)
        found.append([y.detach(), *torch.autograd.grad(y.sum(), x)])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_refused_derivative_keeps_no_tensors() -> None:
    dout = torch.randn(2, 1, 3, 4, requires_grad=True)
    out, lse = torch.randn(2, 1, 3, 4), torch.randn(2, 1, 3)
    dout_a, *_ = operators._declared["merge_attention_states_backward"].call(dout, None, out, lse, out, lse)
    assert dout_a.grad_fn.saved_tensors == ()
    with pytest.raises(NotImplementedError, match="merge_attention_states has no second derivative"):
        dout_a.sum().backward()
