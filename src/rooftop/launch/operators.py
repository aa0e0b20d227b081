"""Declare operators in the `rooftop::` namespace of `torch.library`.

The signature of an operator is a class, a `typing.NamedTuple` of its arguments. Methods of that class implement the
operator:

    class Swiglu(NamedTuple):
        gate: Tensor
        up: Tensor | None

        def run(self) -> Tensor: ...
        def fake(self) -> Tensor: ...
        def cost(self, made: Tensor) -> Cost: ...

    swiglu = declare("swiglu", Swiglu)  # torch.ops.rooftop.swiglu; called as a function of (gate, up)

`torch.library.custom_op` does the same, but checks aliasing, mutation and versions at every call, which takes the host
longer than launching the kernel. A call through the dispatcher also takes longer than a launch, so most calls avoid the
dispatcher (fast_path.py).
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial, wraps
from operator import itemgetter
from typing import Any, Literal, NamedTuple, NoReturn, ParamSpec, Protocol, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.autograd import forward_ad

from rooftop.cost import Call, Cost, cost_of
from rooftop.launch import fast_path, known_calls, lessons
from rooftop.launch.fast_path import in_forward_mode, recording, recording_lists, requires_grad, transformed
from rooftop.launch.known_calls import remembering
from rooftop.launch.repeated_calls import repeat_overload, repeated_operator

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Result_co = TypeVar("Result_co", covariant=True)
Function = Callable[..., Any]

_library = torch.library.Library("rooftop", "FRAGMENT")
_decompositions: dict[torch._ops.OpOverload, Function] = {}


class _Declared(NamedTuple):
    """A declared operator: its signature, and the functions that run it."""

    signature: Any
    run: Function
    recorded: Function | None  # the function that autograd records directly; None without a derivative
    call: Function


_declared: dict[str, _Declared] = {}  # operators by name, except those that change arguments

# ---- declaration --------------------------------------------------------------------------------------------------


class Signature(Protocol[Result_co]):
    """A class that declares an operator. The class's fields are the operator's arguments. The class must have the
    method `run`; all other methods are optional.

    If an argument has the name of a method of the class (`keep`) or of all tuples (`count`, `index`), the field's name
    ends in an underscore (`keep_`, `count_`), which the schema omits. Default values of fields become default values in
    the schema.

    Methods:
        run(): computes the results. The results share memory neither with the arguments nor with each other. `run`
            changes only the arguments in `mutates` of `declare`. `run` returns None if the operator has no result.
        fake(): returns results with the same shapes, strides and dtypes as the results of `run`, but without values, as
            in `torch.library.register_fake`.
        cost(made): the `Cost` of a call that returned the results `made`: the bytes that it must at least move, and
            its flops.
        in_pytorch(): computes the results by PyTorch's own operators, on any device. `torch.onnx.export` and
            `ExportedProgram.run_decompositions` use this method as the operator's decomposition.
        formula(): computes the results by PyTorch's own operators, for transforms of `torch.func` and forward-mode
            differentiation. Results without a gradient may be None. If an operator has a formula but no `gradients`,
            backward runs the formula again and differentiates it with autograd. An operator that is differentiated by
            its formula is differentiable any number of times.
        keep(made): the values that backward needs, as a tuple of tensors and other values, but no lists of tensors. The
            tensor of a `WeakTensor` among the kept values is not kept alive. Without `keep`, all arguments are kept.
        gradients(kept, wanted, *slopes): a static method that computes the gradients of the arguments, in order, from
            `slopes`, the gradients of the results. With several results, some slopes may be None. The returned tuple
            may omit trailing gradients that are None. `wanted`: which arguments need a gradient. If arguments or
            results are lists of tensors, their gradients are lists of tensors.
        once(): a static method that returns True if the gradients cannot be differentiated again (an error is raised).
            If `once` returns True, autograd need not track results of `run` that only backward uses.
    """

    def run(self) -> Result_co: ...


def declare(
    name: str,
    signature: Callable[Arguments, Signature[Result]],
    *,
    mutates: Sequence[str] = (),
    slopes: int | None = None,
    derivative: Callable[..., NoReturn] | None = None,
    known: bool | Literal["itself"] | Callable[[Sequence[Any]], Any] = False,
) -> Callable[Arguments, Result]:
    """Register an operator as `torch.ops.rooftop.<name>` for all devices, and return the function that calls it.

    Args:
        name: name of the operator.
        signature: a `typing.NamedTuple` class with the methods of `Signature`. The annotations of the class, and the
            return annotation of `run`, determine the schema.
        mutates: arguments that `run` changes. An operator with `mutates` has no derivative. Python makes the decisions
            of each call, except if C++ repeats the call (repeated_calls.py). C++ repeats the call only in a backward
            that changes tensors which forward allocated and kept, but did not return.
        slopes: the number of leading results that have gradients; None: all. A list of tensors is one result.
        derivative: `no_second_derivative(...)`, which raises an error, for a backward operator that cannot be
            differentiated.
        known: whether all decisions of `run` depend only on shapes, strides, dtypes, alignment, device, and arguments
            that are not tensors. Calls can then repeat the decisions of an earlier call (known_calls.py). If
            decisions also depend on settings, pass a function that gets the arguments and returns the values of these
            settings as one hashable object. These settings must be among the modes that `put_modes` in `cpp/facts.h`
            compares. "itself": `run` caches its own decisions.
    """
    made: Any = signature
    schema = torch.library.infer_schema(_prototype(made), mutates_args=mutates)
    _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    # faster than the constructor of the NamedTuple, which runs in Python
    fields, new = len(made._fields), partial(tuple.__new__, made)

    def run(*arguments: Any) -> Any:
        return (new(arguments) if len(arguments) == fields else made(*arguments)).run()

    raw = run
    if known and known != "itself" and not mutates:
        run = remembering(run, None if known is True else known)
    overload = getattr(torch.ops.rooftop, name).default
    implementation = run
    if known:
        changes = tuple(made._fields.index(each) for each in mutates)
        operator = lessons.Operator(raw, changes)
        if not mutates:
            repeat_overload(overload)
            implementation = repeated_operator(name, run, raw)
        lessons.operators[overload] = operator
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    if hasattr(made, "fake"):
        torch.library.register_fake(overload, _by_method(made, "fake"))
    if hasattr(made, "cost"):
        cost_of(f"rooftop::{name}")(_cost_by_method(made))
    if mutates:
        return overload  # type: ignore[no-any-return]
    if hasattr(made, "in_pytorch"):
        _decompose(overload, _by_method(made, "in_pytorch"))
    formula = without_autocast(_by_method(made, "formula")) if hasattr(made, "formula") else None
    recorded = None
    if derivative is not None:
        recorded = _differentiate(overload, made, run, _keep_nothing, derivative, slopes)
    elif hasattr(made, "gradients"):
        recorded = _differentiate(overload, made, run, getattr(made, "keep", None), made.gradients, slopes)
    elif formula is not None:
        recorded = _differentiate(overload, made, run, None, _by_formula(formula), slopes)
    call = _call(run, overload, formula, recorded)
    _declared[name] = _Declared(made, run, recorded, call)
    return call


def _prototype(signature: Any) -> Function:
    """A function with the arguments of a signature class and the results of its `run`."""
    hints, defaults = get_type_hints(signature), signature._field_defaults
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    parameters = [
        inspect.Parameter(argument, kind, default=defaults.get(field, none), annotation=hints[field])
        for argument, field in zip(_arguments_of(signature), signature._fields, strict=True)
    ]
    returns = get_type_hints(signature.run)["return"]

    def prototype() -> None: ...

    prototype.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        parameters, return_annotation=None if returns is type(None) else returns
    )
    return prototype


def _arguments_of(signature: Any) -> list[str]:
    """The names of the arguments, in the order of the fields."""
    return [field.removesuffix("_") for field in signature._fields]


def _by_method(signature: Any, method: str) -> Function:
    def call(*arguments: Any) -> Any:
        return getattr(signature(*arguments), method)()

    return call


def _cost_by_method(signature: Any) -> Callable[[Call], Cost]:
    names = _arguments_of(signature)

    def cost(call: Call) -> Cost:
        return signature(*(call[name] for name in names)).cost(call.out)  # type: ignore[no-any-return]

    return cost


def _call(run: Function, overload: Any, formula: Function | None, recorded: Function | None) -> Function:
    """Make the function that calls an operator. The returned function uses the dispatcher only if a mode or transform
    must see the call.
    """
    differentiated = overload if recorded is None else recorded

    @wraps(run)
    def call(*arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return overload(*arguments)
        plain = fast_path.is_plain(arguments)
        if (not plain or in_forward_mode()) and transformed(arguments):
            if formula is not None:
                return formula(*arguments)
            _refuse_derivatives(overload._opname)
        if not plain:
            return run(*arguments) if fast_path.only_infers(arguments) else overload(*arguments)
        if not torch.is_grad_enabled() or not requires_grad(arguments):
            return run(*arguments)
        return differentiated(*arguments)

    return call


# ---- derivatives --------------------------------------------------------------------------------------------------

Kept = tuple[Any, ...]
Gradients = Callable[..., Sequence[Any]]
"""A function from (kept, wanted, *slopes) to gradients of the first arguments (see `Signature.gradients`)."""


def _differentiate(
    overload: Any,
    signature: Any,
    run: Function,
    keep: Callable[[Any, Any], Kept] | None,
    gradients: Gradients,
    slopes: int | None,
) -> Function:
    """Register an operator's derivative with the dispatcher. Return a function that runs the operator without the
    dispatcher, and whose calls autograd records.

    The inner functions do as little as possible, because they run in every call. If `keep` is None, all arguments are
    kept.
    """
    results = [str(each.type) for each in overload._schema.returns]
    lists = "List[Tensor]" in (*results, *(str(each.type) for each in overload._schema.arguments))
    alone, gives_list = results == ["Tensor"], results == ["List[Tensor]"]
    without = slopes is not None and slopes < len(results)  # trailing results have no gradient
    nothing = (None,) * len(overload._schema.arguments)
    fields, new, name = len(signature._fields), partial(tuple.__new__, signature), overload._opname

    def save(ctx: Any, inputs: Any, output: Any) -> None:
        kept = inputs if keep is None else keep(inputs, output)
        tensors, others, together = _places_of(tuple(map(type, kept)))
        ctx.save_for_backward(*tensors(kept))
        ctx.kept = type(kept), together, others(kept)
        if (lesson := known_calls.lesson_here()) is not None:
            teach(lesson, inputs, output, tensors(kept), *ctx.kept)
        if without:
            ctx.mark_non_differentiable(*output[slopes:])
        if not alone:
            ctx.set_materialize_grads(False)  # the gradient of an unused result is None instead of zeros

    def teach(
        lesson: lessons.Lesson, inputs: Any, output: Any, tensors: Any, kind: Any, together: Any, others: Any
    ) -> None:
        weak = tuple(each() for each in others if type(each) is WeakTensor)
        values = tuple(None if type(each) is WeakTensor else each for each in others)
        weak_places = [i for i, each in enumerate(others) if type(each) is WeakTensor]

        def again(
            tensors: Sequence[Tensor],
            weak: Sequence[Tensor | None],
            wanted: list[Any],
            given: Sequence[Tensor | None],
        ) -> Sequence[Any]:
            rest: list[Any] = list(values)
            for place, each in zip(weak_places, weak, strict=True):
                rest[place] = WeakTensor(each)
            kept = tuple.__new__(kind, together((*tensors, *rest)))
            return gradients(kept, wanted, list(given)) if gives_list else gradients(kept, wanted, *given)

        if not _are_values(values):
            lesson.refuse("backward needs objects of this call")
        results = [output] if alone else list(output)[:slopes]
        node = f"GeneratedBackwardFor_rooftop_{name}_defaultBackward"
        once = hasattr(signature, "once") and signature.once()
        lesson.records.append(lessons.Record(node, inputs, results, tensors, weak, again, alone, once))

    def backward(ctx: Any, wanted: Sequence[Any], *given: Any) -> tuple[Any, ...]:
        if not alone and {*map(type, given[0] if gives_list else given)} == _NONE:
            return nothing[: len(wanted)]
        kind, together, others = ctx.kept
        kept = tuple.__new__(kind, together((*ctx.saved_tensors, *others)))  # in the order of `keep`
        found = gradients(kept, wanted, *given[:slopes])
        return (*found, *nothing[len(found) : len(wanted)])

    def forward(ctx: Any, *arguments: Any) -> Any:
        inputs = new(arguments) if len(arguments) == fields else signature(*arguments)
        output = _not_views(run(*inputs))
        save(ctx, inputs, output)
        return output

    torch.library.register_autograd(
        overload,
        lambda ctx, *given: backward(ctx, ctx.needs_input_grad, *given),
        setup_context=lambda ctx, inputs, output: save(ctx, signature(*inputs), output),
    )
    if lists:
        return recording_lists(overload._opname, forward, backward, gives_list)
    return recording(overload._opname, forward, backward)


class WeakTensor:
    """A weak reference to a tensor, which backward uses if the tensor still exists and was not changed.

    Args:
        tensor: the tensor, or None for a tensor that no longer exists.
    """

    def __init__(self, tensor: Tensor | None) -> None:
        self._reference = None if tensor is None else weakref.ref(tensor)
        self._version = 0 if tensor is None else tensor._version

    def __call__(self) -> Tensor | None:
        """Return the tensor, or None if the tensor no longer exists or was changed."""
        tensor = None if self._reference is None else self._reference()
        return tensor if tensor is not None and tensor._version == self._version else None


def _not_views(output: Any) -> Any:
    """Return the results, with views detached, because autograd would refuse in-place changes of views that the
    operator made.
    """
    if isinstance(output, Tensor):
        return output.detach() if output._is_view() else output
    if any(isinstance(each, Tensor) and each._is_view() for each in output):
        return type(output)(map(_not_views, output))
    return output


def _keep_nothing(inputs: Kept, output: Any) -> Kept:
    return ()


_NONE = {type(None)}


class _Places(NamedTuple):
    """Functions that split a tuple into its tensors, which autograd saves, and its other values. `together` restores
    the original tuple from the tensors followed by the other values.
    """

    tensors: Callable[[Kept], Kept]
    others: Callable[[Kept], Kept]
    together: Callable[[Kept], Kept]


def _are_values(kept: Any) -> bool:
    """Whether an object that is kept for backward consists only of plain values, so that equal calls keep equal
    objects.
    """
    if isinstance(kept, list | tuple):
        return all(map(_are_values, kept))
    if isinstance(kept, dict):
        return all(map(_are_values, (*kept.keys(), *kept.values())))
    return isinstance(kept, bool | int | float | str | torch.dtype | torch.device | None)


@cache  # few combinations: an argument of an operator has one type, or is None
def _places_of(kinds: tuple[type, ...]) -> _Places:
    tensors = [i for i, kind in enumerate(kinds) if issubclass(kind, Tensor)]
    others = [i for i, kind in enumerate(kinds) if not issubclass(kind, Tensor)]
    order = [*tensors, *others]
    return _Places(_taking(tensors), _taking(others), _taking([order.index(i) for i in range(len(kinds))]))


def _taking(places: Sequence[int]) -> Callable[[Kept], Kept]:
    """Make a function that returns the items of a tuple at the indices `places`, as a tuple. (`itemgetter` returns a
    tuple only for two or more indices.)
    """
    if len(places) >= 2:
        return itemgetter(*places)
    if not places:
        return lambda items: ()
    place = places[0]
    return lambda items: (items[place],)


def _by_formula(formula: Callable[..., Any]) -> Gradients:
    """A `gradients` function that runs a formula on the kept arguments and differentiates it with autograd."""

    def gradients(kept: Kept, wanted: Sequence[bool], *slopes: Tensor | None) -> list[Tensor | None]:
        places = [i for i, each in enumerate(kept) if isinstance(each, Tensor) and wanted[i]]
        found = _gradients_of(formula, list(kept), places, slopes)
        return [found.get(i) for i in range(len(kept))]

    return gradients


def _gradients_of(
    formula: Callable[..., Any], arguments: list[Any], wanted: Sequence[int], gradients: Sequence[Tensor | None]
) -> dict[int, Tensor | None]:
    """Differentiate `formula` at its arguments, by autograd. `gradients`: the gradients of the formula's results.
    Return the gradients of the arguments at the indices `wanted`, by index.
    """
    again = torch.is_grad_enabled()  # create_graph
    with torch.enable_grad():
        # A separate view of each argument, so that the derivative does not include a dependence of one argument on
        # another argument.
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
    """Decorate a PyTorch formula with float32 sums, so that it runs outside autocast. Autocast would round the products
    in the formula's backward.

    The first argument is a tensor or a list of tensors.
    """

    @wraps(function)
    def exact(*arguments: Any, **options: Any) -> Result:
        first = arguments[0] if isinstance(arguments[0], Tensor) else arguments[0][0]
        device = first.device.type
        if not torch.amp.is_autocast_available(device):  # the meta device has no autocast
            return function(*arguments, **options)
        with torch.autocast(device, enabled=False):
            return function(*arguments, **options)

    return exact


def _refuse_derivatives(name: str) -> None:
    """Refuse transforms of an operator without a formula, except `vmap`, which calls the operator for each element of
    the batch.

    Raises:
        NotImplementedError: the transform is not `vmap`.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    kinds = {interpreter.key() for interpreter in stack}
    if kinds <= {torch._C._functorch.TransformType.Vmap} and not in_forward_mode():
        return
    raise NotImplementedError(
        f"rooftop::{name} cannot be differentiated by torch.func or in forward mode: use backward() or "
        "torch.autograd.grad, or use PyTorch's own functions in the transformed part"
    )


def keeps_for_backward(*tensors: Tensor | None) -> bool:
    """Whether forward must keep values for backward, because autograd tracks one of the tensors, and no tracer records
    the call.

    A traced program (torch.jit.trace, torch.export, make_fx) may run with or without gradients, independent of the grad
    mode during tracing. So the forward of a traced program keeps no values, and the backward recomputes the values.
    torch.compile compiles separately for each grad mode.
    """
    if not torch.is_grad_enabled() or not requires_grad(tensors):
        return False
    if torch.compiler.is_compiling():
        return not is_exporting()
    traced = torch._C._get_tracing_state() is not None  # by torch.jit
    return not traced and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None


def is_exporting() -> bool:
    """Whether torch.export records the call. In PyTorch 2.11, `torch.compiler.is_exporting` is also True inside every
    torch.compile.
    """
    return torch.compiler._is_exporting_flag


def no_second_derivative(name: str, instead: str | None = None) -> Callable[..., NoReturn]:
    """Make the argument `derivative` of `declare` for a backward operator that cannot be differentiated. The returned
    function raises an error, since a second derivative would be silently wrong.

    Args:
        name: name of the public function.
        instead: an alternative that has a second derivative; by default, PyTorch's function with the name `name`.
    """
    other = instead or f"torch.nn.functional.{name}"

    def refuse(*_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{name} has no second derivative: use {other} in the part that is differentiated twice"
        )

    return refuse


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors carries a tangent of forward-mode differentiation."""
    if not in_forward_mode():
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def no_tangents(name: str, *tensors: Tensor | None, instead: str | None = None) -> None:
    """Raise an error in forward-mode differentiation, where PyTorch would return zero tangents. `instead` as in
    `no_second_derivative`.

    Raises:
        NotImplementedError: a tensor carries a tangent.
    """
    if has_tangent(*tensors):
        other = instead or f"torch.nn.functional.{name}"
        raise NotImplementedError(f"{name} has no forward-mode derivative: use {other} under jvp")


# ---- export -------------------------------------------------------------------------------------------------------


def _decompose(overload: torch._ops.OpOverload, function: Callable[..., Any]) -> None:
    _decompositions[overload] = function
    torch._decomp.decomposition_table[overload] = function
    torch._decomp.meta_table[overload] = function  # so that FakeTensor uses the strides of the operator's `fake`


def decompositions() -> dict[torch._ops.OpOverload, Callable[..., Any]]:
    """Decompositions of Rooftop's operators into PyTorch's operators, for `ExportedProgram.run_decompositions`.

    The resulting program runs without Rooftop and its kernels. If a program contains an operator without a
    decomposition (tables of sparse convolutions, paged attention, random numbers, backward operators),
    NotImplementedError is raised.
    """
    overloads = {name: getattr(torch.ops.rooftop, name).default for name in _declared}
    without = {each: _refuse_decomposition(name) for name, each in overloads.items() if each not in _decompositions}
    return {**_decompositions, **without}


def _refuse_decomposition(name: str) -> Callable[..., Any]:
    def refuse(*arguments: Any, **options: Any) -> Any:
        raise NotImplementedError(
            f"rooftop::{name} has no decomposition into PyTorch's operators: keep it out of the exported part, or "
            "run the exported program where Rooftop is installed"
        )

    return refuse
