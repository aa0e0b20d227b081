"""Operators of the `rooftop::` namespace of `torch.library`, each declared once.

The signature of an operator is a class, a `typing.NamedTuple` of its arguments; what PyTorch and Rooftop want to know
of it are methods beside it:

    class Swiglu(NamedTuple):
        gate: Tensor
        up: Tensor | None

        def run(self) -> Tensor: ...
        def fake(self) -> Tensor: ...
        def cost(self, made: Tensor) -> Cost: ...

    swiglu = declare("swiglu", Swiglu)  # torch.ops.rooftop.swiglu; called as a function of (gate, up)

`torch.library.custom_op` does the same with more checks at every call (of aliasing, mutation, versions), which cost the
host more time than launching the kernel. So does the dispatcher: see fast_path.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftop.cost import Call, Cost, cost_of
from rooftop.launch import fast_path
from rooftop.launch.fast_path import in_forward_mode, recording, recording_lists, requires_grad, transformed

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)

_library = torch.library.Library("rooftop", "FRAGMENT")
_functions: dict[str, Callable[..., Any]] = {}  # what computes an operator, by name
_recorded: dict[str, Callable[..., Any]] = {}  # the same, for autograd to differentiate
_formulas: dict[str, Callable[..., Any]] = {}  # what computes the same by PyTorch's own operators, by name
_decompositions: dict[torch._ops.OpOverload, Callable[..., Any]] = {}

# ---- declaration --------------------------------------------------------------------------------------------------


class Signature(Protocol[Result_co]):
    """What a class that declares an operator has: its arguments as fields, and `run`. The others are optional.

    Methods:
        run(): computes the results. They share memory neither with the arguments nor with each other, and it changes
            no argument but those that `declare` is told.
        fake(): results of the same shapes, strides and dtypes without values, as of `torch.library.register_fake`.
        cost(made): what the call costs at least; `made` are its results.
        in_pytorch(): the results by PyTorch's own operators, on any device: the decomposition that `torch.onnx.export`
            and `ExportedProgram.run_decompositions` take.
        formula(): likewise, for transforms of `torch.func` and forward-mode differentiation. Results that have no
            gradient may be None. An operator that has a formula and no `gradients` gets its derivative from it:
            autograd computes it again. This makes the operator differentiable any number of times.
        keep(made): what backward needs, as a tuple of tensors, lists of tensors and other values; all arguments where
            there is no such method.
        gradients(kept, wanted, *slopes): a static method: gradients of the arguments, in their order, from those of the
            results (None where a result has none; not all are). Those left out at the end are None. `wanted` says which
            arguments need one. An operator with lists of tensors takes and gives lists of gradients.
    """

    def run(self) -> Result_co: ...


def declare(
    name: str, signature: Callable[Arguments, Signature[Result]], *, mutates: Sequence[str] = (), slopes: int = 1
) -> Callable[Arguments, Result]:
    """Register an operator as `torch.ops.rooftop.<name>` for all devices; gives the function that calls it.

    Args:
        name: of the operator.
        signature: a `typing.NamedTuple` class with the methods of `Signature`. The schema follows from its annotations
            and from what `run` is said to return.
        mutates: arguments that `run` changes. Such an operator has no derivative.
        slopes: how many results, from the first, have gradients. A list of tensors is one result.
    """
    made: Any = signature
    fields: tuple[str, ...] = made._fields
    schema = torch.library.infer_schema(_prototype(made), mutates_args=mutates)
    _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)

    def run(*arguments: Any) -> Any:
        return made(*arguments).run()

    _library.impl(name, run, "CompositeExplicitAutograd")
    overload = getattr(torch.ops.rooftop, name).default
    if hasattr(made, "fake"):
        torch.library.register_fake(overload, _by_method(made, "fake"))
    if hasattr(made, "cost"):
        cost_of(f"rooftop::{name}")(_cost_by_method(made, fields))
    if mutates:
        return overload  # type: ignore[no-any-return]
    _functions[name] = run
    if hasattr(made, "in_pytorch"):
        _decompose(overload, _by_method(made, "in_pytorch"))
    if hasattr(made, "formula"):
        _formulas[name] = without_autocast(_by_method(made, "formula"))
    if hasattr(made, "gradients"):
        _differentiate(name, made, run, getattr(made, "keep", None), made.gradients, slopes)
    elif name in _formulas:
        _differentiate(name, made, run, None, _by_formula(_formulas[name]), None)
    return _call(name, run, overload)  # type: ignore[no-any-return]


def _prototype(signature: Any) -> Callable[..., Any]:
    """A function with the arguments of a signature class and the results of its `run`."""
    hints = get_type_hints(signature)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(field, kind, annotation=hints[field]) for field in signature._fields]
    returns = get_type_hints(signature.run)["return"]

    def prototype() -> None: ...

    prototype.__signature__ = inspect.Signature(parameters, return_annotation=returns)  # type: ignore[attr-defined]
    return prototype


def _by_method(signature: Any, method: str) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        return getattr(signature(*arguments), method)()

    return call


def _cost_by_method(signature: Any, fields: Sequence[str]) -> Callable[[Call], Cost]:
    def cost(call: Call) -> Cost:
        return signature(*(call[field] for field in fields)).cost(call.out)  # type: ignore[no-any-return]

    return cost


def _call(name: str, function: Callable[..., Any], overload: Any) -> Callable[..., Any]:
    """The function that calls an operator: by the dispatcher where something has to see it, else past it."""

    @wraps(function)
    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload(*arguments)
        plain = fast_path.is_plain(arguments)
        if (not plain or in_forward_mode()) and transformed(arguments):
            formula = _formulas.get(name)
            if formula is not None:
                return formula(*arguments)
            _refuse_derivatives(name)
        if not plain:
            return overload(*arguments)
        if not torch.is_grad_enabled() or not requires_grad(arguments):
            return function(*arguments)
        recorded = _recorded.get(name)
        return overload(*arguments) if recorded is None else recorded(*arguments)

    return call


# ---- derivatives --------------------------------------------------------------------------------------------------

Kept = tuple[Any, ...]
Gradients = Callable[..., Sequence[Any]]
"""(kept, wanted, *slopes) to gradients of the first arguments: see `Signature.gradients`."""


class _Place(NamedTuple):
    """Where a tensor, or a list of some, lies among those that autograd keeps."""

    first: int
    size: int | None  # of a list


def _differentiate(
    name: str, signature: Any, run: Callable[..., Any], keep: Callable[[Any, Any], Kept] | None, gradients: Gradients,
    slopes: int | None,
) -> None:  # fmt: skip
    """Registers the derivative of an operator, with the dispatcher and past it; `slopes` None: all results have one."""

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        arguments = signature(*inputs)
        _save(ctx, arguments if keep is None else keep(arguments, output))
        if isinstance(output, tuple) and slopes is not None:
            ctx.mark_non_differentiable(*output[slopes:])
        ctx.set_materialize_grads(False)  # no zeros for results that nothing was computed from

    def backward(ctx: Any, wanted: Sequence[Any], *given: Any) -> tuple[Any, ...]:
        if all(each is None for each in (given[0] if isinstance(given[0], list) else given)):
            return (None,) * len(wanted)
        found = gradients(_saved(ctx), wanted, *given[:slopes])
        return (*found, *[None] * (len(wanted) - len(found)))

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = run(*arguments)
        save(ctx, arguments, output)
        return output

    overload = getattr(torch.ops.rooftop, name).default
    torch.library.register_autograd(
        overload, lambda ctx, *given: backward(ctx, ctx.needs_input_grad, *given), setup_context=save
    )
    schema = overload._schema
    if any(str(each.type) == "List[Tensor]" for each in [*schema.arguments, *schema.returns]):
        gives_list = str(schema.returns[0].type) == "List[Tensor]"
        _recorded[name] = recording_lists(name, forward, backward, gives_list)
    else:
        _recorded[name] = recording(name, forward, backward)


def _save(ctx: Any, kept: Kept) -> None:
    """Save a tuple for backward: tensors through autograd's `save_for_backward`, everything else as it is."""
    tensors: list[Tensor | None] = []
    rest: list[Any] = []
    for each in kept:
        if isinstance(each, Tensor):
            rest.append(_Place(len(tensors), None))
            tensors.append(each)
        elif isinstance(each, list) and any(isinstance(item, Tensor) for item in each):
            rest.append(_Place(len(tensors), len(each)))
            tensors += each
        else:
            rest.append(each)
    ctx.save_for_backward(*tensors)
    ctx.kept = getattr(kept, "_make", tuple), rest


def _saved(ctx: Any) -> Any:
    """The tuple again, of the same class."""
    make, kept = ctx.kept
    kept, tensors = list(kept), ctx.saved_tensors
    for i, each in enumerate(kept):
        if isinstance(each, _Place):
            first, size = each
            kept[i] = tensors[first] if size is None else list(tensors[first : first + size])
    return make(kept)


def _by_formula(formula: Callable[..., Any]) -> Gradients:
    """Gradients that autograd takes of a formula; the kept tuple has its arguments."""

    def gradients(kept: Kept, wanted: Sequence[bool], *slopes: Tensor | None) -> list[Tensor | None]:
        places = [i for i, each in enumerate(kept) if isinstance(each, Tensor) and wanted[i]]
        found = _gradients_of(formula, list(kept), places, slopes)
        return [found.get(i) for i in range(len(kept))]

    return gradients


def _gradients_of(
    formula: Callable[..., Any], arguments: list[Any], wanted: Sequence[int], gradients: Sequence[Tensor | None]
) -> dict[int, Tensor | None]:
    """By the number of the argument, gradients of those that are wanted from those of the results."""
    again = torch.is_grad_enabled()  # create_graph
    with torch.enable_grad():
        # Each in a place of its own: where one was computed from another, that path is not this formula's.
        places = {i: arguments[i].view_as(arguments[i]) if again else arguments[i].detach() for i in wanted}
        places = {i: t if t.requires_grad else t.requires_grad_() for i, t in places.items()}
        results = formula(*(places.get(i, argument) for i, argument in enumerate(arguments)))
        results = results if isinstance(results, tuple) else (results,)
        pairs = [
            (y, g)
            for y, g in zip(results, gradients, strict=True)
            if g is not None and y is not None and y.requires_grad
        ]
        if not pairs or not places:
            return {}
        ys, slopes = zip(*pairs, strict=True)
        found = torch.autograd.grad(ys, list(places.values()), slopes, create_graph=again, allow_unused=True)
    return dict(zip(places, found, strict=True))


def without_autocast(function: Callable[..., Result]) -> Callable[..., Result]:
    """For formulas in PyTorch whose sums are float32: a backward that runs within autocast would round their products.

    The first argument is a tensor, or a list of some.
    """

    @wraps(function)
    def exact(*arguments: Any, **options: Any) -> Result:
        first = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
        device = first.device.type
        if not torch.amp.is_autocast_available(device):  # meta
            return function(*arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return exact


def _refuse_derivatives(name: str) -> None:
    """An operator without a formula: `vmap` alone calls it once for each element of the batch, and that is right.

    Raises:
        NotImplementedError: another transform.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    kinds = {interpreter.key() for interpreter in stack}
    if kinds <= {torch._C._functorch.TransformType.Vmap} and not in_forward_mode():
        return
    raise NotImplementedError(
        f"rooftop::{name} cannot be differentiated by torch.func or in forward mode: use backward() or "
        "torch.autograd.grad, or PyTorch's own functions in the part that is transformed"
    )


def keeps_for_backward(*tensors: Tensor | None) -> bool:
    """Whether forward is to keep what backward needs: autograd watches one of the tensors, and no tracer the call.

    A traced program (torch.jit.trace, torch.export, make_fx) runs with gradients and without, whatever was on while it
    was traced. So its forward keeps nothing, and its backward computes that again. torch.compile compiles anew.
    """
    if not torch.is_grad_enabled() or not requires_grad(tensors):
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    traced = torch._C._get_tracing_state() is not None  # by torch.jit
    return not traced and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None


def no_second_derivative(name: str, instead: str | None = None) -> Callable[..., Any]:
    """The `gradients` of a backward operator that has none: without it a second derivative would be wrong in silence.

    Args:
        name: of the public function.
        instead: what has one, where that is not PyTorch's function of the same name.
    """
    other = instead or f"torch.nn.functional.{name}"

    def refuse(*_: Any) -> Any:
        raise NotImplementedError(
            f"{name} has no second derivative: for one, use {other} in the part that is differentiated twice"
        )

    return refuse


def no_tangents(name: str, *tensors: Tensor | None, instead: str | None = None) -> None:
    """Refuse forward-mode differentiation, for which torch would give tangents of zero; `instead` as above.

    Raises:
        NotImplementedError: a tensor carries a tangent.
    """
    if not in_forward_mode():
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        other = instead or f"torch.nn.functional.{name}"
        raise NotImplementedError(f"{name} has no forward-mode derivative: use {other} under jvp")


# ---- export -------------------------------------------------------------------------------------------------------


def _decompose(overload: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    _decompositions[overload] = function
    torch._decomp.decomposition_table[overload] = function
    torch._decomp.meta_table[overload] = function  # FakeTensor then takes the operator's fake, which has its strides


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """What operators of Rooftop compute in PyTorch's own operators, for `ExportedProgram.run_decompositions`.

    The program that comes of it runs without Rooftop, and by none of its kernels. An operator that has none (tables of
    sparse convolutions, pages, random numbers, backward) raises NotImplementedError where a program holds it.
    """
    overloads = {name: getattr(torch.ops.rooftop, name).default for name in _functions}
    without = {each: _refuse_decomposition(name) for name, each in overloads.items() if each not in _decompositions}
    return {**_decompositions, **without}


def _refuse_decomposition(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"rooftop::{name} has no decomposition into PyTorch's operators: keep it out of what is exported, or leave "
            "it in and run the program where Rooftop is installed"
        )

    return refuse


# ---- the way before, until all operators are declared ---------------------------------------------------------------


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as `torch.ops.rooftop.<name>`, with the schema of its annotations; gives what calls it.

    Args:
        mutates: arguments that the function changes.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, function, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.rooftop, name).default
        if mutates:
            return overload
        _functions[name] = function
        return _call(name, function, overload)

    return register


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None] | None = None
) -> None:
    """Give an operator its derivative; arguments as of `torch.library.register_autograd`."""
    torch.library.register_autograd(f"rooftop::{name}", backward, setup_context=setup_context)
    function = _functions[name]

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = function(*arguments)
        if setup_context is not None:
            setup_context(ctx, arguments, output)
        return output

    def without_wanted(ctx: Any, wanted: Any, *given: Any) -> Any:
        return backward(ctx, *given)

    schema = getattr(torch.ops.rooftop, name).default._schema
    if any(str(each.type) == "List[Tensor]" for each in [*schema.arguments, *schema.returns]):
        gives_list = str(schema.returns[0].type) == "List[Tensor]"
        _recorded[name] = recording_lists(name, forward, without_wanted, gives_list)
    else:
        _recorded[name] = recording(name, forward, without_wanted)


def by_formula(name: str, formula: Callable[..., Any]) -> None:
    """Give an operator a formula in PyTorch's operators, which `torch.func` and forward mode differentiate."""
    _formulas[name] = without_autocast(formula)


def differentiable_by_formula(name: str, formula: Callable[..., Any]) -> None:
    """Gives a backward operator its derivative, which makes the operator twice differentiable, and more often.

    Args:
        name: of the backward operator, none of whose arguments is a list of tensors.
        formula: as of `by_formula`; it is computed again, by autograd, where a second derivative is asked for.
    """
    by_formula(name, formula)

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.others = [None if isinstance(each, Tensor) else each for each in inputs]
        ctx.places = [i for i, each in enumerate(inputs) if isinstance(each, Tensor)]
        ctx.save_for_backward(*(inputs[i] for i in ctx.places))
        ctx.set_materialize_grads(False)

    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = list(ctx.others)
        for place, tensor in zip(ctx.places, ctx.saved_tensors, strict=True):
            arguments[place] = tensor
        wanted = [i for i in ctx.places if ctx.needs_input_grad[i]]
        found = _gradients_of(_formulas[name], arguments, wanted, gradients)
        return tuple(found.get(i) for i in range(len(arguments)))

    differentiable(name, backward, save)


def in_pytorch(name: str, function: Callable[..., Any]) -> None:
    """Give an operator its decomposition into PyTorch's operators, which export takes."""
    _decompose(getattr(torch.ops.rooftop, name).default, function)
