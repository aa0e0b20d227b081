"""Elementwise expressions of broadcast tensors, each in one kernel: y = f(a, b, ...), element by element.

A Python function is traced once into a tree (`expressions.py`), from which a Triton kernel is written
(`expression_sources.py`). Bound by memory: every input is read once and every result written once, whatever is computed
between; intermediate values stay in float32 registers. The gradient is the tree's symbolic derivative, again an
expression and again one kernel, so it has derivatives of its own. The gradient of a broadcast input is summed in that
kernel, so that it is not stored at full size; of much it makes partial sums, which a second kernel adds. Deterministic:
no atomics.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.elementwise.expression_types import Types, computed_in, summand, wrapped
from rooftop.kernels.elementwise.expressions import (
    DTYPES,
    NAMES,
    OPERATIONS,
    Expression,
    apply,
    argument,
    arguments_of,
    derivatives,
    text_of,
    topological,
)
from rooftop.kernels.elementwise.launches import launch_program, layout_of, merged_dims, source_for
from rooftop.kernels.elementwise.programs import (
    Argument,
    Number,
    Plan,
    Program,
    empty,
    planned,
    program_of,
    shape_of,
    strides_of,
    summed_shape,
)
from rooftop.kernels.operands.checks import not_dense
from rooftop.kernels.operands.references import without_kernels
from rooftop.launch.operators import by_formula, differentiable, in_pytorch, operator
from rooftop.launch.symbolic import recorded_whole
from rooftop.launch.triton_launch import require_triton

MOST_TENSORS = 8
Function = Callable[..., Any]

# ---- reference -------------------------------------------------------------------------------------------------


def fused_reference(
    outputs: Sequence[Expression], results: Sequence[torch.dtype], types: Types, arguments: Sequence[Argument | None]
) -> list[Tensor]:
    """The trees' values in plain PyTorch, each node in the dtype that a kernel computes it in."""
    device = next(each.device for each in arguments if isinstance(each, Tensor))
    values: dict[int, Argument] = {}

    def operand(node: Expression, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> Tensor:
        value = values[id(node)]
        if isinstance(value, Tensor):
            return value.to(dtype)
        if isinstance(value, float) or dtype.is_floating_point:
            number = torch.full((), float(value), dtype=torch.float64, device=device)
        else:
            number = torch.full((), wrapped(int(value), torch.int64), dtype=torch.int64, device=device)
        return number.to(rounded_to or dtype).to(dtype)  # half precision where it is compared

    for node in topological(outputs):
        typed = types[id(node)]
        if node.operation == "argument":
            value = arguments[int(node.value)]  # type: ignore[arg-type]
            assert value is not None
            values[id(node)] = value.to(typed.inside) if isinstance(value, Tensor) else value
        elif node.operation == "constant":
            values[id(node)] = node.value  # type: ignore[assignment]
        else:
            operation, inside = OPERATIONS[node.operation], computed_in(typed.common)
            found: Tensor
            if operation.typing == "where":
                condition, a, b = node.operands
                found = torch.where(operand(condition, torch.bool), operand(a, inside), operand(b, inside))
            elif operation.typing == "compared":
                found = operation.apply(*(operand(each, inside, typed.common) for each in node.operands))
            elif operation.typing in DTYPES:
                found = operand(node.operands[0], typed.common).to(typed.inside)
            else:
                found = operation.apply(*(operand(each, inside) for each in node.operands))
            values[id(node)] = found
    return [operand(node, dtype) for node, dtype in zip(outputs, results, strict=True)]


# ---- implementations -------------------------------------------------------------------------------------------


def _run(tensors: Sequence[Tensor], numbers: Sequence[Number], text: str) -> list[Tensor]:
    """Results, in the order of the program's outputs."""
    plan, arguments = planned(tensors, numbers, text)
    shapes = [shape_of(arguments, used) for used in plan.used]
    like = next(each for each in arguments if isinstance(each, Tensor))
    found = [
        _result(shape, kept, arguments, used, dtype, like)
        for shape, kept, used, dtype in zip(shapes, plan.kept, plan.used, plan.results, strict=True)
    ]
    if plan.double or without_kernels(like.device):
        _run_reference(plan, arguments, shapes, found)
        return found
    require_triton()
    stored = {shape: y for y, shape, kept in zip(found, shapes, plan.kept, strict=True) if not kept}
    full: list[Tensor] = []  # the results; for those that are summed, something of the shape and strides of before
    for y, shape, kept, used in zip(found, shapes, plan.kept, plan.used, strict=True):
        if kept and shape not in stored:
            stored[shape] = empty(shape, strides_of(shape, arguments, used), y.dtype, like.to("meta"))
        full.append(stored[shape] if kept else y)
    for shape, strides in dict.fromkeys((y.shape, y.stride()) for y in full):
        chosen = [i for i, y in enumerate(full) if y.shape == shape and y.stride() == strides]
        if math.prod(shape):
            y = full[chosen[0]]
            launch_program(plan, tuple(chosen), arguments, y, [found[i] for i in chosen])
        else:
            for i in chosen:
                found[i].zero_()
    return found


def _result(
    shape: torch.Size,
    kept: str,
    arguments: Sequence[Argument | None],
    used: Sequence[int],
    dtype: torch.dtype,
    like: Tensor,
) -> Tensor:
    """Memory for a result whose elements have this shape before they are summed to the dimensions `kept`."""
    return empty(summed_shape(shape, kept), None if kept else strides_of(shape, arguments, used), dtype, like)


def _run_reference(
    plan: Plan, arguments: Sequence[Argument | None], shapes: Sequence[torch.Size], results: Sequence[Tensor]
) -> None:
    for result, value in zip(results, _values(plan, arguments, shapes), strict=True):
        result.copy_(value)


def _values(plan: Plan, arguments: Sequence[Argument | None], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """The results in plain PyTorch, those that are summed perhaps wider than they are stored."""
    nodes = [summand(y, plan.types) if kept else y for y, kept in zip(plan.outputs, plan.kept, strict=True)]
    dtypes = [computed_in(dtype) if kept else dtype for dtype, kept in zip(plan.results, plan.kept, strict=True)]
    values = fused_reference(nodes, dtypes, plan.types, arguments)
    found = []
    for value, shape, kept in zip(values, shapes, plan.kept, strict=True):
        dims = [d for d, keep in enumerate(kept) if keep == "0"]
        found.append(value.expand(shape).sum(dims, keepdim=True) if dims else value.expand(shape))
    return found


# ---- registration ----------------------------------------------------------------------------------------------


@operator("fused")
def _fused(tensors: list[Tensor], numbers: list[bool | int | float], program: str) -> list[Tensor]:
    return _run(tensors, numbers, program)


@torch.library.register_fake("rooftop::fused")
def _(tensors: list[Tensor], numbers: list[bool | int | float], program: str) -> list[Tensor]:
    plan, arguments = planned(tensors, numbers, program)
    like = next(each for each in arguments if isinstance(each, Tensor))
    return [
        _result(shape_of(arguments, used), kept, arguments, used, dtype, like)
        for kept, used, dtype in zip(plan.kept, plan.used, plan.results, strict=True)
    ]


def _by_reference(tensors: list[Tensor], numbers: list[bool | int | float], program: str) -> list[Tensor]:
    """What `_run` computes, by PyTorch's operators."""
    plan, arguments = planned(tensors, numbers, program)
    values = _values(plan, arguments, [shape_of(arguments, used) for used in plan.used])
    return [value.to(dtype) for value, dtype in zip(values, plan.results, strict=True)]


in_pytorch("fused", _by_reference)


@dataclass(frozen=True)
class _Gradients:
    """How the gradients by some arguments follow from those of some outputs of one shape.

    Attributes:
        passed: for each argument the output whose gradient is its own as it is; None where it must be computed.
        there: for each argument whether it has a gradient at all.
        used: numbers of the arguments that the computation needs; the gradient of output i comes after the program's
            own arguments, plus i.
        program: computes those that are there and not passed; "" where none is.
    """

    passed: tuple[int | None, ...]
    there: tuple[bool, ...]
    used: tuple[int, ...]
    program: str


@functools.lru_cache(maxsize=1024)
def _gradients_of(
    text: str, outputs: tuple[tuple[int, torch.dtype], ...], wanted: tuple[tuple[int, torch.dtype], ...]
) -> _Gradients:
    """From the gradients of `outputs` by the arguments `wanted`, both as (number, dtype)."""
    program = program_of(text)
    first = len(program.kinds)
    given = [argument(first + i) for i, _ in outputs]
    found = derivatives([program.outputs[i] for i, _ in outputs], given, [i for i, _ in wanted])
    passed, computed = [], []
    for gradient, (_, dtype) in zip(found, wanted, strict=True):
        same = next((i for each, (i, d) in zip(given, outputs, strict=True) if each is gradient and d == dtype), None)
        passed.append(same)
        if gradient is not None and same is None:
            computed.append(apply(NAMES[dtype], gradient))
    used = arguments_of(computed)
    kinds = "".join(kind if i in used else "-" for i, kind in enumerate(program.kinds + "t" * len(program.outputs)))
    there = tuple(each is not None for each in found)
    return _Gradients(tuple(passed), there, tuple(used), f"{kinds}: {text_of(computed)}" if computed else "")


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, numbers, text = inputs
    program = program_of(text)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(y for y in output if not y.is_floating_point()))
    tensor_of = dict(zip(_places(program, "t"), tensors, strict=True))
    ctx.wanted = tuple((i, t.dtype) for i, t in tensor_of.items() if t.requires_grad)
    floating = tuple((i, y.dtype) for i, y in enumerate(output) if y.is_floating_point())
    used = _gradients_of(text, floating, ctx.wanted).used
    ctx.save_for_backward(*(t if i in used else None for i, t in tensor_of.items()))
    ctx.numbers, ctx.text, ctx.count = numbers, text, len(tensors)
    ctx.likes = {i: (t.shape, t.device) for i, t in tensor_of.items() if t.requires_grad}
    arguments = program.arguments(tensors, numbers)
    ctx.summed = {  # shapes before
        i: shape_of(arguments, arguments_of([y]))
        for i, (y, kept) in enumerate(zip(program.outputs, program.kept, strict=True))
        if kept
    }


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    program = program_of(ctx.text)
    places = _places(program, "t")
    tensors = dict(zip(places, ctx.saved_tensors, strict=True))
    groups: list[dict[int, Tensor]] = []  # of one shape each: sums must not repeat smaller outputs
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            gradient = gradient.expand(ctx.summed[i]) if i in ctx.summed else gradient
            group = next((each for each in groups if next(iter(each.values())).shape == gradient.shape), None)
            if group is None:
                groups.append(group := {})
            group[i] = gradient
    sums: dict[int, Tensor] = {}
    for outputs in groups:
        for i, gradient in _gradients(ctx, program, tensors, outputs).items():
            sums[i] = sums[i] + gradient if i in sums else gradient
    return [sums.get(i) for i in places], None if ctx.numbers else [], None


def _gradients(ctx: Any, program: Program, tensors: dict[int, Tensor], given: dict[int, Tensor]) -> dict[int, Tensor]:
    """Gradients by argument, summed to its shape, from those of outputs of one shape."""
    plan = _gradients_of(ctx.text, tuple((i, g.dtype) for i, g in given.items()), ctx.wanted)
    computed = iter(())  # type: ignore[var-annotated]
    if plan.program:
        all_tensors = tensors | {len(program.kinds) + i: g for i, g in given.items()}
        numbers = [n for i, n in zip(_places(program, "n"), ctx.numbers, strict=True) if i in plan.used]
        full = next(iter(given.values())).shape
        fresh = [i for (i, _), p, there in zip(ctx.wanted, plan.passed, plan.there, strict=True) if there and p is None]
        kinds, _, trees = plan.program.partition(":")
        sums = "".join(f" {n}={kept}" for n, i in enumerate(fresh) if (kept := _kept(ctx.likes[i][0], full)))
        text = f"{kinds}{sums}:{trees}"
        computed = iter(_fused([all_tensors[i] for i in plan.used if i in all_tensors], numbers, text))
    found = {}
    for (i, _), passed, there in zip(ctx.wanted, plan.passed, plan.there, strict=True):
        if there:
            shape, device = ctx.likes[i]
            gradient = next(computed).reshape(shape) if passed is None else given[passed].sum_to_size(shape)
            found[i] = gradient.to(device)
    return found


def _kept(shape: torch.Size, full: torch.Size) -> str:
    """The dimensions of `full` that a tensor broadcast to it has (1) and that its gradient is summed over (0); "" if
    none is."""
    missing = len(full) - len(shape)
    kept = [size == 1 for size in full[:missing]] + [a == b for a, b in zip(shape, full[missing:], strict=True)]
    return "" if all(kept) else "".join("1" if keep else "0" for keep in kept)


def _places(program: Program, kind: str) -> list[int]:
    """Numbers of the arguments of a kind."""
    return [i for i, each in enumerate(program.kinds) if each == kind]


by_formula("fused", _by_reference)
differentiable("fused", _differentiate, _save)


@cost_of("rooftop::fused")
def _cost(call: Call) -> Cost:
    """Each operation once for each element of its operands' common shape: what is broadcast later is computed once.
    Of sums an addition of each element."""
    plan, arguments = planned(call["tensors"], call["numbers"], call["program"])
    flops: dict[str, int] = {}
    for node in topological(plan.outputs):
        if node.operands and OPERATIONS[node.operation].flops:
            used = [i for i in arguments_of([node]) if isinstance(arguments[i], Tensor)]
            elements = math.prod(shape_of(arguments, used)) if used else 1
            precision = precision_of(plan.types[id(node)].common)
            flops[precision] = flops.get(precision, 0) + OPERATIONS[node.operation].flops * elements
    for node, kept, needed in zip(plan.outputs, plan.kept, plan.used, strict=True):
        if kept:
            precision = precision_of(plan.types[id(node)].common)
            flops[precision] = flops.get(precision, 0) + math.prod(shape_of(arguments, needed))
    read_of = {i for each in plan.used for i in each}
    read = [each for i, each in enumerate(arguments) if i in read_of and isinstance(each, Tensor)]
    return Cost(distinct_bytes(read), distinct_bytes(call.out), flops)


# ---- public ----------------------------------------------------------------------------------------------------


class Fused:
    """A function of tensors that runs as one kernel; made by `fused`.

    Attributes:
        names: of its arguments.
        text: its expression, with arguments a0, a1, ... in their order.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:  # torch's own
            raise TypeError(f"fused: {function!r} does not say what its arguments are: use lambda x: ...") from error
        if any(each.kind not in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters):
            raise TypeError("fused: the function must have positional arguments only, without * and **")
        self.names = tuple(each.name for each in parameters)
        self.defaults = {each.name: each.default for each in parameters if each.default is not each.empty}
        found = function(*(argument(i) for i in range(len(self.names))))
        self.single = not isinstance(found, (tuple, list))
        outputs = (found,) if self.single else tuple(found)
        for each in outputs:
            if not isinstance(each, Expression) or not arguments_of([each]):
                raise TypeError(f"fused: the function must return expressions of its arguments, got {each!r}")
        self.text = text_of(outputs)
        functools.update_wrapper(self, function)

    def __repr__(self) -> str:
        return f"fused({', '.join(self.names)}: {self.text})"

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickled by its name where it has one, as functions are; that of a decorated function is this object's."""
        found: Any = sys.modules.get(self.function.__module__)
        for name in self.function.__qualname__.split("."):
            found = getattr(found, name, None)
        return self.function.__qualname__ if found is self else (Fused, (self.function,))

    def __call__(self, *arguments: Argument, **keywords: Argument) -> Any:
        """The results for tensors and numbers in the function's arguments.

        Returns:
            A tensor, or a tuple of tensors where the function returns one. Each has the shape that the tensors it
            depends on broadcast to, PyTorch's dtype, and the memory layout of the first tensor of that shape.

        Raises:
            TypeError: wrong arguments, or dtypes for which an operation has no meaning.
            ValueError: more than 8 tensors, shapes that do not broadcast, several devices.
        """
        if keywords or len(arguments) != len(self.names):
            arguments = self._bound(arguments, keywords)
        return run_text(self.text, self.names, self.single, *arguments)

    def source(self, *arguments: Argument, **keywords: Argument) -> str:
        """The Triton source of the kernel for such arguments (tensors may be on any device, `meta` too)."""
        values = self._bound(arguments, keywords)
        kinds = "".join("t" if isinstance(each, Tensor) else "n" for each in values)
        tensors = [each for each in values if isinstance(each, Tensor)]
        numbers = [each for each in values if not isinstance(each, Tensor)]
        plan, bound = planned(tensors, numbers, f"{kinds}: {self.text}")
        shape = shape_of(bound, plan.used[0])
        y = empty(shape, strides_of(shape, bound, plan.used[0]), plan.results[0], tensors[0].to("meta"))
        of = {i: bound[i] for i in sorted(plan.used[0]) if isinstance(bound[i], Tensor)}
        layout = layout_of(merged_dims(y, list(of.values())), of, len(bound), y)
        same = tuple(i for i, used in enumerate(plan.used) if shape_of(bound, used) == shape)
        return source_for(plan, same, layout)[0]

    def _bound(self, arguments: tuple[Argument, ...], keywords: dict[str, Argument]) -> tuple[Argument, ...]:
        """All arguments in order, from positions, keywords and defaults."""
        if len(arguments) > len(self.names):
            raise TypeError(f"fused: expected {len(self.names)} arguments, got {len(arguments)}")
        rest = dict(keywords)
        found = list(arguments)
        for name in self.names[len(arguments) :]:
            if name not in rest and name not in self.defaults:
                raise TypeError(f"fused: the argument {name} is missing")
            found.append(rest.pop(name) if name in rest else self.defaults[name])
        if rest:
            raise TypeError(f"fused: unexpected arguments {', '.join(rest)}")
        return tuple(found)


@recorded_whole
def run_text(text: str, names: Sequence[str], single: bool, *arguments: Argument) -> Any:
    """What `Fused` computes, by its text: a call that torch.fx can write down.

    Args:
        text: the expression, with arguments a0, a1, ...
        names: of the arguments, for messages.
        single: whether it has one result, which is then no tuple.

    Raises:
        TypeError, ValueError: as of `Fused`.
    """
    tensors: list[Tensor] = []
    numbers: list[Number] = []
    kinds = ""
    for name, each in zip(names, arguments, strict=True):
        if isinstance(each, Tensor):
            if each.layout != torch.strided or each.dtype not in NAMES:
                raise _refusal(name, each)
            tensors.append(each)
            kinds += "t"
        elif isinstance(each, (bool, int, float)):
            numbers.append(each)
            kinds += "n"
        else:
            raise TypeError(f"fused: {name} must be a tensor or a number, got {type(each).__name__}")
    if not 0 < len(tensors) <= MOST_TENSORS:
        raise ValueError(f"fused: expected 1 to {MOST_TENSORS} tensors, got {len(tensors)}")
    autocast = " autocast" if _autocasts(tensors) else ""
    text = f"{kinds}{autocast}: {text}"
    if torch._C._get_tracing_state() is None:
        found = _fused(tensors, numbers, text)
    else:  # torch.jit.trace knows no operators that take lists of numbers
        found = _by_reference(tensors, numbers, text)
    return found[0] if single else tuple(found)


def _refusal(name: str, given: Tensor) -> TypeError:
    if given.layout != torch.strided:
        return not_dense("fused", name, given)
    return TypeError(f"fused: {name} must have one of the dtypes {', '.join(DTYPES)}, got {given.dtype}")


def fused(function: Function) -> Fused:
    """Makes one kernel of an elementwise function of tensors; also as a decorator.

        @fused
        def gated(x, gate, bias, scale=1.0):
            return x * torch.sigmoid(gate + bias) * scale

        y = gated(x, gate, bias, scale=0.5)

    Args:
        function: of up to 8 tensors that broadcast, and of numbers, which may differ at each call without anything
            being compiled again. It is called once, with expressions in place of tensors, and may use operators,
            comparisons, casts (`.to(dtype)`, `.float()`) and elementwise functions of torch and torch.nn.functional:
            abs, add, addcdiv, addcmul, ceil, clamp, cos, div, elu, erf, exp, expm1, floor, gelu, hardtanh, isnan,
            leaky_relu, lerp, log, log1p, log2, logical_*, maximum, minimum, mul, neg, pow, reciprocal, relu, round,
            rsqrt, sigmoid, sign, silu, sin, softplus, sqrt, square, sub, tanh, trunc, where. It returns one
            expression or a tuple of them.

    Returns:
        A callable with the same arguments. dtypes are promoted as PyTorch promotes them; half precision is computed in
        float32 and rounded once, at the end. It can be differentiated any number of times, compiled with
        fullgraph=True, and used under autocast.

    Raises:
        TypeError: the function uses what is not elementwise, or a tensor that is not its argument.
    """
    return Fused(function)


def _autocasts(tensors: Sequence[Tensor]) -> bool:
    """Whether PyTorch's autocast would compute some functions in float32 (a GPU's does)."""
    return tensors[0].device.type == "cuda" and torch.is_autocast_enabled("cuda")


_ADD = fused(lambda input, other: input + other)
_ADD_SCALED = fused(lambda input, other, alpha: input.add(other, alpha=alpha))
_AXPY = fused(lambda x, y, a: a * x + y)
_MUL = fused(lambda input, other: input * other)
_RELU = fused(lambda input: torch.relu(input))
_SIGMOID = fused(lambda input: torch.sigmoid(input))
_TANH = fused(lambda input: torch.tanh(input))
_SILU = fused(lambda input: torch.nn.functional.silu(input))
_GELU = fused(lambda input: torch.nn.functional.gelu(input))
_GELU_TANH = fused(lambda input: torch.nn.functional.gelu(input, approximate="tanh"))


@recorded_whole
def add(input: Tensor, other: Argument, *, alpha: Number = 1) -> Tensor:
    """input + alpha * other, broadcast; arguments, dtypes and errors as of `torch.add`."""
    if type(alpha) is int and alpha == 1:
        return _ADD(input, other)
    return _ADD_SCALED(input, other, alpha)


@recorded_whole
def axpy(a: Argument, x: Tensor, y: Argument) -> Tensor:
    """a * x + y, broadcast, rounded once; `a` a number or a tensor."""
    return _AXPY(x, y, a)


@recorded_whole
def mul(input: Tensor, other: Argument) -> Tensor:
    """input * other, broadcast, as `torch.mul`."""
    return _MUL(input, other)


@recorded_whole
def relu(input: Tensor) -> Tensor:
    """max(input, 0), as `torch.relu`."""
    return _RELU(input)


@recorded_whole
def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-input)), as `torch.sigmoid`."""
    return _SIGMOID(input)


@recorded_whole
def tanh(input: Tensor) -> Tensor:
    """As `torch.tanh`."""
    return _TANH(input)


@recorded_whole
def silu(input: Tensor) -> Tensor:
    """input * sigmoid(input), as `torch.nn.functional.silu`."""
    return _SILU(input)


@recorded_whole
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """As `torch.nn.functional.gelu`; approximate: "none" or "tanh".

    Raises:
        ValueError: another approximation.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    return _GELU(input) if approximate == "none" else _GELU_TANH(input)
