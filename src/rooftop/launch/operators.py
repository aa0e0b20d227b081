"""Operators of the `rooftop::` namespace of `torch.library`.

`torch.library.custom_op` does the same with more checks at every call (of aliasing, mutation, versions), which cost the
host more time than launching the kernel. So does the dispatcher where an operator is written in Python: a call that
nothing watches or transforms goes past it, straight to the implementation, under an autograd function of its own.
Whatever has to see the operator does: torch.compile, modes (FakeTensor, counting), transforms, the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import wraps
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

_library = torch.library.Library("rooftop", "FRAGMENT")

Result = TypeVar("Result")


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


def operator(name: str, mutates: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Registers the decorated function as `torch.ops.rooftop.<name>` for all devices; gives the operator in its place.

    The schema follows from the annotations. The function changes none of its arguments but those named in `mutates`,
    and its results share memory neither with them nor with each other. A fake implementation, autograd
    (`differentiable`) and a cost are registered beside it.
    """

    def register(function: Callable[..., Any]) -> Any:
        schema = torch.library.infer_schema(function, mutates_args=mutates)
        _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
        _library.impl(name, function, "CompositeExplicitAutograd")
        overload = getattr(torch.ops.rooftop, name).default
        if mutates:
            return overload
        _functions[name] = function

        @wraps(function)
        def call(*arguments: Any) -> Any:
            if torch.compiler.is_compiling():
                return overload(*arguments)
            plain = _is_plain(arguments)
            if (not plain or forward_ad._current_level >= 0) and transformed(arguments):
                formula = _formulas.get(name)
                if formula is not None:
                    return formula(*arguments)
                _refuse_derivatives(name)
            if not plain:
                return overload(*arguments)
            if not torch.is_grad_enabled() or not _require_grad(arguments):
                return function(*arguments)
            recorded = _recorded.get(name)
            return overload(*arguments) if recorded is None else recorded(*arguments)

        return call

    return register


def differentiable(
    name: str, backward: Callable[..., Any], setup_context: Callable[[Any, Any, Any], None] | None = None
) -> None:
    """Gives the operator of that name its derivative, as `torch.library.register_autograd` does.

    Lists of tensors, as arguments and as results, are differentiated too: `backward` gets a list of gradients for a
    list of results, and returns one for a list of arguments.
    """
    torch.library.register_autograd(f"rooftop::{name}", backward, setup_context=setup_context)
    function = _functions[name]

    def forward(ctx: Any, *arguments: Any) -> Any:
        output = function(*arguments)
        if setup_context is not None:
            setup_context(ctx, arguments, output)
        return output

    schema = getattr(torch.ops.rooftop, name).default._schema
    if any(str(each.type) == "List[Tensor]" for each in [*schema.arguments, *schema.returns]):
        _recorded[name] = _recording_lists(name, forward, backward)
    else:
        _recorded[name] = _recording(name, forward, backward)


def by_formula(name: str, formula: Callable[..., Any]) -> None:
    """Names the formula of an operator: it takes the same arguments, gives the same results, and is made of PyTorch's
    own operators, so that all transforms of `torch.func` and forward-mode differentiation know it.

    Results that have no gradient may be None.
    """
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


def in_pytorch(name: str, function: Callable[..., Any]) -> None:
    """Say what the operator of that name computes in PyTorch's own operators, on any device: its decomposition.

    `torch.onnx.export` finds it, and so does `ExportedProgram.run_decompositions` with `decompositions()`. The results
    have the shapes and dtypes of the operator's.
    """
    overload = getattr(torch.ops.rooftop, name).default
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


def _recording(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """A function that autograd records, with these as the methods of `torch.autograd.Function`."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    recording: Any = type(f"GeneratedBackwardFor_rooftop_{name}_default", (torch.autograd.Function,), methods)
    # What Function.apply does before it calls this only concerns transforms, and those go through the dispatcher.
    return super(torch.autograd.Function, recording).apply  # type: ignore[no-any-return]


def _recording_lists(name: str, forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The same where arguments or results are lists of tensors, which autograd only sees one by one."""
    gives_list = str(getattr(torch.ops.rooftop, name).default._schema.returns[0].type) == "List[Tensor]"

    def forward_of_each(ctx: Any, counts: Sequence[int | None], *flat: Any) -> Any:
        """`counts`: for each argument how many tensors it has if it is a list of them."""
        ctx.counts, rest = counts, iter(flat)
        output = forward(ctx, *(next(rest) if n is None else list(islice(rest, n)) for n in counts))
        return tuple(output) if gives_list else output

    def backward_of_each(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        found = backward(ctx, list(gradients)) if gives_list else backward(ctx, *gradients)
        flat: list[Tensor | None] = [None]  # of `counts`
        for count, gradient in zip(ctx.counts, found, strict=True):
            flat += [gradient] if count is None else [None] * count if gradient is None else gradient
        return tuple(flat)

    record = _recording(name, forward_of_each, backward_of_each)

    def recorded(*arguments: Any) -> Any:
        counts: list[int | None] = []
        flat: list[Any] = []
        for each in arguments:
            is_list = isinstance(each, list | tuple) and all(isinstance(item, Tensor) for item in each)
            counts.append(len(each) if is_list else None)
            flat += each if is_list else [each]
        output = record(counts, *flat)
        return list(output) if gives_list else output

    return recorded


_formulas: dict[str, Callable[..., Any]] = {}  # what computes the same by PyTorch's own operators, by name
_functions: dict[str, Callable[..., Any]] = {}  # what computes an operator, by name
_decompositions: dict[torch._ops.OpOverload, Callable[..., Any]] = {}
_recorded: dict[str, Callable[..., Any]] = {}  # the same, for autograd to differentiate
_PLAIN = (Tensor, torch.nn.Parameter)
_LISTS = (list, tuple)
_NO_TENSORS = frozenset((type(None), bool, int, float, str))  # most arguments that are no tensors
# Looked up once: they are asked at every call.
_include_set = torch._C._dispatch_tls_local_include_set
_is_included = torch._C._dispatch_tls_is_dispatch_key_included
_VMAP_MODE: Any = torch._C._parse_dispatch_key("VmapMode")  # of `is_grads_batched`; `torch.func` has another
_function_modes = torch._C._len_torch_function_stack
_profiler_enabled = torch._C._autograd._profiler_enabled
with ThreadPoolExecutor(1) as _thread:  # a new one has neither modes, nor transforms, nor inference mode; this one may
    _UNWATCHED = _thread.submit(_include_set).result()


def unwatched(*arguments: Any) -> bool:
    """Whether nothing but autograd would notice by which operators something is computed with these: no compiler, mode,
    transform or profiler, and no tensor of another kind."""
    return not torch.compiler.is_compiling() and forward_ad._current_level < 0 and _is_plain(arguments)


def computed_on_cpu(*tensors: Any) -> bool:
    """Whether these are dense tensors on the CPU, nothing notices by which operators something is computed with them,
    and no gradient will be asked for: PyTorch's own functions do, and the host saves the way through an operator."""
    recorded = torch.is_grad_enabled()
    for t in tensors:
        if t is None:
            continue
        if type(t) not in _PLAIN or not t.is_cpu or t.layout != torch.strided or (recorded and t.requires_grad):
            return False
    return not torch.is_autocast_enabled("cpu") and unwatched(*tensors)


def transformed(arguments: Sequence[Any]) -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is at work on a tensor among them, or
    autograd takes a batch of gradients at once."""
    if _is_included(_VMAP_MODE):
        return True
    for argument in arguments:
        if isinstance(argument, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(argument):
                return True
            if forward_ad._current_level >= 0 and forward_ad.unpack_dual(argument).tangent is not None:
                return True
        elif isinstance(argument, _LISTS) and transformed(argument):
            return True
    return False


def _refuse_derivatives(name: str) -> None:
    """An operator without a formula: `vmap` alone calls it once for each element of the batch, and that is right.

    Raises:
        NotImplementedError: another transform.
    """
    stack = torch._C._functorch.get_interpreter_stack() or ()
    kinds = {interpreter.key() for interpreter in stack}
    if kinds <= {torch._C._functorch.TransformType.Vmap} and forward_ad._current_level < 0:
        return
    raise NotImplementedError(
        f"rooftop::{name} cannot be differentiated by torch.func or in forward mode: use backward() or "
        "torch.autograd.grad, or PyTorch's own functions in the part that is transformed"
    )


def _is_plain(arguments: Sequence[Any]) -> bool:
    """Whether nothing but autograd has to know of a call."""
    return _include_set() == _UNWATCHED and _function_modes() == 0 and not _profiler_enabled() and _are_plain(arguments)


def _are_plain(arguments: Sequence[Any]) -> bool:
    """Whether the tensors among them, and in lists among them, are PyTorch's own, with values as memory has them."""
    for argument in arguments:
        kind = type(argument)
        if kind in _PLAIN:
            if argument.is_meta or argument.is_neg() or argument._is_zerotensor():
                return False
        elif kind in _NO_TENSORS:
            continue
        elif isinstance(argument, Tensor) or (isinstance(argument, _LISTS) and not _are_plain(argument)):
            return False
    return True


def _require_grad(arguments: Sequence[Any]) -> bool:
    """Whether a tensor among them does, or one in a list among them."""
    for argument in arguments:
        kind = type(argument)
        if kind in _NO_TENSORS:
            continue
        if isinstance(argument, Tensor):
            if argument.requires_grad:
                return True
        elif isinstance(argument, _LISTS) and _require_grad(argument):
            return True
    return False


def keeps_for_backward(*tensors: Tensor | None) -> bool:
    """Whether forward is to keep what backward needs: autograd watches one of the tensors, and no tracer the call.

    A traced program (torch.jit.trace, torch.export, make_fx) runs with gradients and without, whatever was on while it
    was traced. So its forward keeps nothing, and its backward computes that again. torch.compile compiles anew.
    """
    if not torch.is_grad_enabled() or not _require_grad(tensors):
        return False
    if torch.compiler.is_compiling():
        return not torch.compiler.is_exporting()
    traced = torch._C._get_tracing_state() is not None  # by torch.jit
    return not traced and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is None


def no_second_derivative(name: str, instead: str | None = None) -> Callable[..., Any]:
    """The backward of a backward operator that has none: without it a second derivative would be wrong in silence.

    Args:
        name: of the public function.
        instead: what has one, where that is not PyTorch's function of the same name.
    """
    other = instead or f"torch.nn.functional.{name}"

    def refuse(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(
            f"{name} has no second derivative: for one, use {other} in the part that is differentiated twice"
        )

    return refuse


def no_tangents(name: str, *tensors: Tensor | None, instead: str | None = None) -> None:
    """Refuse forward-mode differentiation, for which torch would give tangents of zero; `instead` as above.

    Raises:
        NotImplementedError: a tensor carries a tangent.
    """
    if forward_ad._current_level < 0:
        return
    if any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors):
        other = instead or f"torch.nn.functional.{name}"
        raise NotImplementedError(f"{name} has no forward-mode derivative: use {other} under jvp")
