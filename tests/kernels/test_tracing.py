"""Traced programs of the public operators give the values and gradients of direct calls, whether gradients were enabled
during tracing or not.

torch.jit.trace does not support dicts, and torch.fx no star arguments, so each call is written out as a separate
module.
"""

from __future__ import annotations

import io
import pickle
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from rooftop import kernels
from rooftop.launch.operators import _declared, _decompositions
from rooftop.launch.symbolic import recorded_whole

TABLE = runpy.run_path(str(Path(__file__).with_name("test_robustness.py")))
PUBLIC, SIZES, WITHOUT_GRADIENT, shape_of = (
    TABLE[name] for name in ("PUBLIC", "SIZES", "WITHOUT_GRADIENT", "shape_of")
)
Public = Any  # the type of the rows of PUBLIC
Tracer = Callable[[nn.Module, tuple[Tensor, ...]], Any]
TRACERS: dict[str, Tracer] = {
    "fx": lambda module, arguments: torch.fx.symbolic_trace(module),
    "jit": lambda module, arguments: torch.jit.trace(module, arguments),
    "export": lambda module, arguments: torch.export.export(module, arguments).module(),
    "make_fx": lambda module, arguments: make_fx(module)(*arguments),
}
NO_GRADIENT = ("cos", "sin")  # arguments without a gradient
quiet = pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")


def arguments_of(public: Public, seed: int, grad: bool) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name in public.shapes:
        shape = shape_of(public, name)
        if name in public.integers:
            found[name] = torch.randint(SIZES["V"], shape, generator=generator)
        else:
            watched = grad and name not in NO_GRADIENT and public.name not in WITHOUT_GRADIENT
            found[name] = torch.rand(shape, generator=generator).requires_grad_(watched)
    return found


def module_of(public: Public, arguments: dict[str, Tensor]) -> nn.Module:
    """A module whose forward calls the operator, its other keywords being constants."""
    more = {**public._more(arguments), **public.ours_alone(arguments)}
    names = ", ".join(arguments)
    given = ", ".join(f"{name}={name}" for name in arguments)
    scope = {"operator": getattr(kernels, public.name), "more": more}
    exec(f"def forward(self, {names}):\n    return operator({given}, **more)", scope)
    return type("Call", (nn.Module,), {"forward": scope["forward"]})()


def tensors_of(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple | list) else [results]


def gradients_of(module: Any, arguments: dict[str, Tensor]) -> list[Tensor | None]:
    results = [each for each in tensors_of(module(*arguments.values())) if each.requires_grad]
    watched = [each for each in arguments.values() if each.requires_grad]
    weights = [torch.linspace(0.5, 1.5, each.numel()).reshape(each.shape) for each in results]
    return list(torch.autograd.grad(results, watched, weights, allow_unused=True)) if results else []


@quiet
@pytest.mark.parametrize("tracer", TRACERS)
@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.name)
def test_a_traced_call_gives_the_same(public: Public, tracer: str) -> None:
    for traced_with_grad in (True, False):
        arguments = arguments_of(public, 0, traced_with_grad)
        module = module_of(public, arguments)
        with torch.set_grad_enabled(traced_with_grad):
            program = TRACERS[tracer](module, tuple(arguments.values()))
        others = arguments_of(public, 1, True)
        with torch.no_grad():
            given = [each.detach() for each in others.values()]
            torch.testing.assert_close(tensors_of(program(*given)), tensors_of(module(*given)), equal_nan=True)
        torch.testing.assert_close(gradients_of(program, others), gradients_of(module, others), equal_nan=True)


def test_every_public_function_of_tensors_is_recorded_whole() -> None:
    """PUBLIC lists all operators, so this test covers all of them."""
    code = recorded_whole(lambda x: x).__code__

    def is_whole(function: Any) -> bool:  # the function itself, or the one that `repeated` wraps
        return function.__code__ is code or getattr(function, "__wrapped__", function).__code__ is code

    assert {public.name for public in PUBLIC if not is_whole(getattr(kernels, public.name))} == set()


@quiet
@pytest.mark.parametrize("public", PUBLIC, ids=lambda public: public.name)
def test_a_compiled_program_calls_each_operator_as_often_as_direct_calls_do(public: Public) -> None:
    """torch.compile knows whether a program needs gradients. So its forward keeps what backward needs, and backward
    does not compute it again."""
    compiled_calls: Counter[str] = Counter()
    direct_calls: Counter[str] = Counter()

    def counted(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiled_calls.update(name for node in graph.graph.nodes if (name := str(node.target)).startswith("rooftop."))
        return make_boxed_func(graph.forward)

    class Direct(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if str(func).startswith("rooftop."):
                direct_calls[str(func).replace("_.default", ".default")] += 1  # also operators in place
            return func(*args, **(kwargs or {}))

    arguments = arguments_of(public, 0, True)
    module = module_of(public, arguments)
    torch._dynamo.reset()
    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=counted), fullgraph=True, dynamic=False)
    gradients_of(compiled, arguments)
    with Direct():
        gradients_of(module, arguments)
    assert compiled_calls == direct_calls != Counter()


@pytest.mark.parametrize("tracer", ["jit", "export"])
@quiet
def test_a_traced_activation_keeps_nothing_for_backward(tracer: str) -> None:
    """A program traced for inference does not store the activation's input, but can still be trained (see the test
    above)."""
    x, weight = torch.rand(3, 4), nn.Parameter(torch.rand(5, 4))

    class Gelu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: Tensor) -> Tensor:
            return kernels.linear_act(x, self.weight, None, "gelu")

    program = TRACERS[tracer](Gelu(), (x,))
    kept: list[Tensor] = []
    original = torch.ops.rooftop.linear_act.default

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results = func(*args, **(kwargs or {}))
            if func is original:
                kept.append(results[1])
            return results

    with Watching():
        program(x)
    assert [each.numel() for each in kept] == [0]


def test_backward_of_a_traced_activation_ignores_autocast() -> None:
    """Backward computes the activation's input again in the operands' dtype, as forward did."""
    x, weight = torch.rand(3, 4, requires_grad=True), torch.rand(5, 4, requires_grad=True)
    operator = torch.ops.rooftop.linear_act.default
    again = operator(x, weight, None, "gelu", None, False)[0].sum()
    kept = operator(x, weight, None, "gelu", None, True)[0].sum()
    with torch.autocast("cpu"):
        torch.testing.assert_close(torch.autograd.grad(again, [x, weight]), torch.autograd.grad(kept, [x, weight]))


@pytest.mark.parametrize("tensor", ["hidden", "weight", "bias"])
def test_a_linear_cross_entropy_that_made_no_gradient_makes_it_in_backward(tensor: str) -> None:
    generator = torch.Generator().manual_seed(0)
    made = {"hidden": (4, 3), "weight": (6, 3), "bias": (6,)}
    given = {name: torch.rand(shape, generator=generator, dtype=torch.float64) for name, shape in made.items()}
    given[tensor].requires_grad_()
    target = torch.tensor([0, 5, 2, 2])
    rest = (target, None, -100, 0.1, 0.01, True, 2, [0, 0, 0])
    loss = torch.ops.rooftop.linear_cross_entropy.default(*given.values(), *rest)[0]
    logits = nn.functional.linear(given["hidden"], given["weight"], given["bias"])
    expected = (
        nn.functional.cross_entropy(logits, target, label_smoothing=0.1) + 0.01 * logits.logsumexp(1).square().mean()
    )
    torch.testing.assert_close(torch.autograd.grad(loss, given[tensor]), torch.autograd.grad(expected, given[tensor]))


@quiet
def test_a_shift_is_that_of_the_map_a_traced_program_is_given() -> None:
    """If one window covers the whole map, there is no shift. The model is traced with either kind of map, and run with
    the other kind."""
    packed, bias = torch.rand(1, 2, 2, 12), torch.rand(2, 4, 4)
    large = torch.rand(1, 4, 6, 12)

    class Windows(nn.Module):
        def forward(self, packed: Tensor, bias: Tensor) -> Tensor:
            return kernels.window_attention(packed, bias, 2, (2, 2), (1, 1))

    for traced, run in ((packed, large), (large, packed)):
        for tracer in ("fx", "jit"):
            program = TRACERS[tracer](Windows(), (traced, bias))
            torch.testing.assert_close(program(run, bias), Windows()(run, bias))


@kernels.fused
def gated(x: Any, gate: Any, scale: Any = 0.5) -> Any:
    return x * torch.sigmoid(gate) * scale, x + gate


@quiet
@pytest.mark.parametrize("tracer", TRACERS)
def test_an_expression_of_the_user_is_traced(tracer: str) -> None:
    class Gated(nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Any:
            first, second = gated(x, gate)
            return first - second

    x, gate = torch.rand(4, 3), torch.rand(3)
    program = TRACERS[tracer](Gated(), (x, gate))
    torch.testing.assert_close(program(x + 1, gate), Gated()(x + 1, gate))


def test_a_program_of_fx_is_saved_and_loaded() -> None:
    class Two(nn.Module):
        def forward(self, x):  # type: ignore[no-untyped-def]  # torch.fx does not pickle annotations that are strings
            return gated(kernels.softmax(x, 1), x)[0], kernels.sum(x, 1)

    x = torch.rand(4, 3)
    loaded = pickle.loads(pickle.dumps(torch.fx.symbolic_trace(Two())))
    torch.testing.assert_close(loaded(x), Two()(x))


def test_an_argument_is_checked_when_a_program_of_fx_runs() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return kernels.layer_norm(x, 4)

    program = torch.fx.symbolic_trace(Norm())
    with pytest.raises(ValueError, match=r"layer_norm: expected input of shape \(..., 4\), got \(2, 3\)"):
        program(torch.rand(2, 3))


# ---- decompositions ------------------------------------------------------------------------------------------------


def test_an_operator_has_a_decomposition_unless_it_is_for_training_tables_pages_or_random_numbers() -> None:
    without = {name for name in _declared if getattr(torch.ops.rooftop, name).default not in _decompositions}
    kinds = ("backward", "scale_gradient", "sparse_r", "random")
    others = {name for name in without if not any(kind in name for kind in kinds)}
    assert others == {"paged_attention", "counter_dropout"}


UNDECOMPOSED = ("paged_attention", "counter_dropout")
DECOMPOSED = [public for public in PUBLIC if public.name not in UNDECOMPOSED]


@pytest.mark.parametrize("public", [p for p in PUBLIC if p.name in UNDECOMPOSED], ids=lambda public: public.name)
def test_an_operator_without_a_decomposition_says_so_in_one_line(public: Public) -> None:
    arguments = arguments_of(public, 0, False)
    exported = torch.export.export(module_of(public, arguments), tuple(arguments.values()))
    with pytest.raises(NotImplementedError, match=f"^rooftop::{public.name} has no decomposition .*: keep"):
        exported.run_decompositions(kernels.decompositions())


def test_losses_with_gradients_decompose_as_they_are() -> None:
    """A trace with gradients enabled contains these operators, because their forward already computes the gradient."""
    generator = torch.Generator().manual_seed(0)
    x, hidden = torch.randn(6, 5, generator=generator), torch.randn(6, 3, generator=generator)
    weight, bias = torch.randn(5, 3, generator=generator), torch.randn(5, generator=generator)
    target, classes = torch.tensor([0, 4, -100, 2, 2, 1]), torch.rand(5, generator=generator)
    for mean in (True, False):
        numbers = (-100, 0.1, 0.01, mean)
        calls = [(torch.ops.rooftop.cross_entropy_with_gradient.default, (x, target, classes, *numbers))]
        for dtype in (torch.float32, torch.float16):
            given = [t.to(dtype) for t in (hidden, weight, bias)]
            operator = torch.ops.rooftop.linear_cross_entropy.default
            calls += [(operator, (*given, target, classes, *numbers, 2, wanted)) for wanted in ([1, 1, 1], [0, 1, 0])]
        for operator, arguments in calls:
            found, expected = _decompositions[operator](*arguments), operator(*arguments)
            assert [t.dtype for t in found] == [t.dtype for t in expected]
            tolerance = 1e-2 if arguments[0].dtype == torch.float16 else 1e-5
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore::FutureWarning:torch.*", "ignore:.isinstance.treespec:FutureWarning")
def test_a_decomposed_program_gives_the_same_without_rooftop() -> None:
    """One program calls all operators, because a decomposition takes 0.2 s, however small the program."""
    first, others = ([arguments_of(public, seed, False) for public in DECOMPOSED] for seed in (0, 1))
    modules = nn.ModuleList(map(module_of, DECOMPOSED, first))

    class All(nn.Module):
        def forward(self, given: list[list[Tensor]]) -> list[list[Tensor]]:
            return [tensors_of(module(*tensors)) for module, tensors in zip(modules, given, strict=True)]

    exported = torch.export.export(All(), ([list(each.values()) for each in first],))
    decomposed = exported.run_decompositions(kernels.decompositions())
    assert not [node for node in decomposed.graph.nodes if "rooftop" in str(node.target)]
    found = decomposed.module()([list(each.values()) for each in others])
    for public, module, arguments, ours in zip(DECOMPOSED, modules, others, found, strict=True):
        expected = tensors_of(module(*arguments.values()))
        torch.testing.assert_close(
            ours, expected, equal_nan=True, msg=lambda words, name=public.name: f"{name}: {words}"
        )


def test_shapes_that_change_have_the_strides_of_the_operator() -> None:
    """FakeTensor uses the operator's fake implementation, not its decomposition, whose result has other strides."""
    packed, bias = torch.rand(2, 12, 4, 3).permute(0, 2, 3, 1), torch.rand(2, 4, 4)

    def attended(packed: Tensor, bias: Tensor) -> Tensor:
        y = kernels.layer_norm(packed.transpose(1, 2), 12)
        return kernels.window_attention(y, bias, 2, (2, 2)).view(-1)

    compiled = torch.compile(attended, dynamic=True, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(packed, bias), attended(packed, bias))


@quiet
def test_torchscript_is_saved_and_loaded() -> None:
    class Norm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return kernels.layer_norm(x, 4)

    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(Norm(), torch.rand(2, 4)), file)
    file.seek(0)
    x = torch.rand(5, 4)
    torch.testing.assert_close(torch.jit.load(file)(x), Norm()(x))


class Masked(nn.Module):
    """Calls with a constant mask, whose sizes are compared with those of an input of any size."""

    def __init__(self, call: Callable[[Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.call = call
        self.register_buffer("mask", torch.ones(shape).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, self.mask)


@pytest.mark.parametrize(
    ("call", "shape"),
    [
        pytest.param(lambda x, mask: kernels.softmax(x, mask=mask), (4, 16, 16), id="softmax"),
        pytest.param(lambda x, mask: kernels.attention(x, x, x, attn_mask=mask), (2, 3, 16, 16), id="attention"),
        pytest.param(
            lambda x, mask: kernels.rope(
                x, mask.float().expand(4, 16, 16)[..., :8], mask.float().expand(4, 16, 16)[..., :8]
            ),
            (4, 2, 16, 16),
            id="rope",
        ),
    ],
)
def test_constants_in_programs_of_any_size(call: Callable[[Tensor, Tensor], Tensor], shape: tuple[int, ...]) -> None:
    module, x = Masked(call, 16, 16), torch.randn(shape)
    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), module(x))
