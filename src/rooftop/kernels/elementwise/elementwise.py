"""Compute an elementwise expression of broadcast tensors in one kernel: y = f(a, b, ...), element by element.

A Python function is traced once into a tree (`expressions.py`). `expression_sources.py` writes a Triton kernel for that
tree. The kernel is bound by memory: it reads every input once and writes every result once, for any function.
Intermediate values stay in float32 registers. The gradient is the tree's symbolic derivative. The derivative is again
an expression with one kernel, so the derivative can be differentiated as well. If an input was broadcast, the kernel of
the derivative also sums that input's gradient, so the gradient is never stored at the broadcast size. For large inputs
the kernel writes partial sums, which a second kernel adds. Results are deterministic, since there are no atomics.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rooftop.cost import Cost, distinct_bytes, precision_of
from rooftop.kernels.elementwise import launches
from rooftop.kernels.elementwise.expression_types import Types, computed_in, summand, wrapped
from rooftop.kernels.elementwise.expressions import (
    DTYPES,
    NAMES,
    OPERATIONS,
    Expression,
    argument,
    arguments_of,
    text_of,
    topological,
)
from rooftop.kernels.elementwise.known_programs import MOST_KNOWN, Known, facts_of
from rooftop.kernels.elementwise.programs import (
    Argument,
    Number,
    Plan,
    broadcast_shape,
    empty,
    gradients_of,
    kept_dims,
    planned,
    program_of,
    shape_of,
    strides_of,
    summed_shape,
)
from rooftop.kernels.operands.checks import not_dense
from rooftop.kernels.operands.references import without_kernels
from rooftop.launch import known_calls
from rooftop.launch.known_calls import also_forget
from rooftop.launch.operators import declare
from rooftop.launch.repeated_calls import repeated
from rooftop.launch.symbolic import recorded_whole

MOST_TENSORS = 8
Function = Callable[..., Any]

# ---- reference -------------------------------------------------------------------------------------------------


def fused_reference(
    outputs: Sequence[Expression], results: Sequence[torch.dtype], types: Types, arguments: Sequence[Argument | None]
) -> list[Tensor]:
    """Compute the values of expression trees in plain PyTorch, each node in the dtype in which a kernel computes it."""
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
        return number.to(rounded_to or dtype).to(dtype)  # PyTorch rounds a number that it compares with half precision

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


# ---- operator --------------------------------------------------------------------------------------------------


class Like(NamedTuple):
    """An argument that gets a gradient: the argument's number, and the gradient's dtype, shape and device."""

    number: int
    dtype: torch.dtype
    shape: torch.Size
    device: torch.device


class Kept(NamedTuple):
    """The values that a program's backward needs in addition to tensors.

    Attributes:
        numbers, program: the operator's arguments.
        wanted: the arguments that get a gradient.
        summed: for each summed output, the shape of its elements before the sum.
    """

    numbers: list[Number]
    program: str
    wanted: tuple[Like, ...]
    summed: dict[int, torch.Size]

    def gradients(self, tensors: Sequence[Tensor | None], given: dict[int, Tensor]) -> dict[int, Tensor]:
        """Compute the gradients of the arguments from `given`, which maps numbers of outputs to their gradients. All
        given gradients must have the same shape; the caller adds the results for several shapes. The result maps
        argument numbers to gradients, each summed to its argument's shape.
        """
        full = next(iter(given.values())).shape
        outputs = tuple([(i, g.dtype) for i, g in given.items()])
        call = _remembered(_backward_call, self.program, outputs, self.wanted, full)
        computed: Iterator[Tensor] = iter(())
        if call.program:
            slopes = [given[i] for i in call.slopes]
            used = [t for i in call.tensors if (t := tensors[i]) is not None]
            computed = iter(_fused([*used, *slopes], [self.numbers[i] for i in call.numbers], call.program))
        found = {}
        for like, passed in call.found:
            gradient = next(computed) if passed is None else given[passed].sum_to_size(like.shape)
            gradient = gradient if gradient.shape == like.shape else gradient.reshape(like.shape)
            found[like.number] = gradient if gradient.device == like.device else gradient.to(like.device)
        for like in call.zero:
            found[like.number] = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
        return found


class BackwardCall(NamedTuple):
    """The call of the fused operator that computes gradients.

    Attributes:
        program: text of the program; "" if nothing is computed.
        tensors, numbers: indices of the original call's tensors and numbers that this call takes.
        slopes: indices of the original call's outputs whose gradients this call takes.
        found: for each gradient, its `Like`, and the index of an output or None. With an index, the gradient equals the
            gradient of that output, summed to the argument's shape. With None, the call computes the gradient.
        zero: arguments whose gradient is 0 everywhere.
    """

    program: str
    tensors: tuple[int, ...]
    slopes: tuple[int, ...]
    numbers: tuple[int, ...]
    found: tuple[tuple[Like, int | None], ...]
    zero: tuple[Like, ...]


def _remembered(function: Any, *arguments: Any) -> Any:
    """Call a cached function. If an argument is a symbolic shape, which has no hash, call it without the cache."""
    try:
        return function(*arguments)
    except TypeError:
        return function.__wrapped__(*arguments)


@functools.lru_cache(maxsize=4096)
def _backward_call(
    text: str, outputs: tuple[tuple[int, torch.dtype], ...], wanted: tuple[Like, ...], full: torch.Size
) -> BackwardCall:
    """The call that computes gradients of arguments from the gradients of outputs. `outputs`: (index of the output,
    dtype of its gradient) for each given gradient. `full`: the shape of all given gradients.
    """
    plan = gradients_of(text, outputs, tuple((like.number, like.dtype) for like in wanted))
    found = tuple((like, passed) for like, passed, there in zip(wanted, plan.passed, plan.there, strict=True) if there)
    zero = tuple(itertools.compress(wanted, plan.zero))
    if not plan.program:
        return BackwardCall("", (), (), (), found, zero)
    program = program_of(text)
    kinds, _, trees = plan.program.partition(":")
    fresh = [like.shape for like, passed in found if passed is None]
    sums = "".join(f" {n}={kept}" for n, shape in enumerate(fresh) if (kept := kept_dims(shape, full)))
    places, first = program.places("t"), len(program.kinds)
    tensors = tuple(n for n, i in enumerate(places) if i in plan.used)
    slopes = tuple(i - first for i in plan.used if i >= first)
    numbers = tuple(n for n, i in enumerate(program.places("n")) if i in plan.used)
    return BackwardCall(f"{kinds}{sums}:{trees}", tensors, slopes, numbers, found, zero)


@functools.lru_cache(maxsize=4096)
def _needs(
    text: str,
    likes: tuple[tuple[torch.Size, torch.device, torch.dtype, bool], ...],
    results: tuple[torch.dtype, ...],
) -> tuple[tuple[bool, ...], tuple[Like, ...], dict[int, torch.Size]]:
    """Return three things: for each tensor, whether backward needs it; the arguments that get a gradient; and for each
    summed output, by its index, the shape of its elements before the sum. `likes`: for each tensor, its shape, device
    and dtype, and whether it requires a gradient.
    """
    program = program_of(text)
    places = program.places("t")
    like_of = dict(zip(places, likes, strict=True))
    wanted = tuple(Like(i, dtype, shape, device) for i, (shape, device, dtype, learned) in like_of.items() if learned)
    floating = tuple((i, dtype) for i, dtype in enumerate(results) if dtype.is_floating_point)
    used = gradients_of(text, floating, tuple((like.number, like.dtype) for like in wanted)).used
    summed = {
        i: broadcast_shape([like_of[n][0] for n in arguments_of([y]) if n in like_of])
        for i, (y, kept) in enumerate(zip(program.outputs, program.kept, strict=True))
        if kept
    }
    return tuple(i in used for i in places), wanted, summed


class FusedProgram(NamedTuple):
    """The fused operator: computes the results of a program, in the order of its outputs."""

    tensors: list[Tensor]
    numbers: list[bool | int | float]
    program: str

    def run(self) -> list[Tensor]:
        facts = facts_of(*self)
        known = _known.get(facts)
        if known is not None and known_calls.lesson is None:
            return known.run(self.tensors, self.numbers)
        plan, arguments = planned(*self)
        shapes = [shape_of(arguments, used) for used in plan.used]
        results = _memory(plan, arguments, shapes)
        if plan.double or without_kernels(results[0].device):
            for result, value in zip(results, _values(plan, arguments, shapes), strict=True):
                result.copy_(value)
            return results
        steps = launches.run(plan, arguments, shapes, results)
        if steps is not None and facts is not None and not plan.limits:
            if len(_known) >= MOST_KNOWN:
                _known.clear()
            _known[facts] = Known.of(program_of(self.program), shapes, plan, arguments, steps)
            known_calls.became_known()
        return results

    def fake(self) -> list[Tensor]:
        plan, arguments = planned(*self)
        return _memory(plan, arguments, [shape_of(arguments, used) for used in plan.used])

    def in_pytorch(self) -> list[Tensor]:
        plan, arguments = planned(*self)
        values = _values(plan, arguments, [shape_of(arguments, used) for used in plan.used])
        return [value.to(dtype) for value, dtype in zip(values, plan.results, strict=True)]

    def formula(self) -> list[Tensor]:
        return self.in_pytorch()

    def keep(self, made: list[Tensor]) -> tuple[Any, ...]:
        """Return the tensors to keep for backward (None for a tensor that no gradient needs), followed by a `Kept`."""
        likes = tuple([(t.shape, t.device, t.dtype, t.requires_grad) for t in self.tensors])
        needed, wanted, summed = _remembered(_needs, self.program, likes, tuple([y.dtype for y in made]))
        kept = [t if needs else None for t, needs in zip(self.tensors, needed, strict=True)]
        return *kept, Kept(self.numbers, self.program, wanted, summed)

    @staticmethod
    def gradients(
        kept: tuple[Any, ...], wanted: Sequence[Any], slopes: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[None] | None]:
        tensors, rest = kept[:-1], kept[-1]
        # one kernel per shape, because a common kernel would compute outputs of smaller shapes repeatedly
        groups: list[dict[int, Tensor]] = []
        for i, slope in enumerate(slopes):
            if slope is not None:
                slope = slope.expand(rest.summed[i]) if i in rest.summed else slope
                group = next((each for each in groups if next(iter(each.values())).shape == slope.shape), None)
                if group is None:
                    groups.append(group := {})
                group[i] = slope
        sums: dict[int, Tensor] = {}
        for group in groups:
            for i, gradient in rest.gradients(tensors, group).items():
                sums[i] = sums[i] + gradient if i in sums else gradient
        return [sums.get(i) for i in program_of(rest.program).places("t")], None if rest.numbers else []

    def cost(self, made: list[Tensor]) -> Cost:
        """Each operation counts once per element of its operands' broadcast shape. A value that is broadcast only by a
        later operation counts at its own shape. A sum costs one addition per element.
        """
        plan, arguments = planned(*self)
        flops: Counter[str] = Counter()
        for node in topological(plan.outputs):
            if node.operands and OPERATIONS[node.operation].flops:
                used = [i for i in arguments_of([node]) if isinstance(arguments[i], Tensor)]
                elements = math.prod(shape_of(arguments, used)) if used else 1
                flops[precision_of(plan.types[id(node)].common)] += OPERATIONS[node.operation].flops * elements
        for node, kept, needed in zip(plan.outputs, plan.kept, plan.used, strict=True):
            if kept:
                flops[precision_of(plan.types[id(node)].common)] += math.prod(shape_of(arguments, needed))
        read_of = {i for each in plan.used for i in each}
        read = [each for i, each in enumerate(arguments) if i in read_of and isinstance(each, Tensor)]
        return Cost(distinct_bytes(read), distinct_bytes(made), dict(flops))


_fused = declare("fused", FusedProgram, known="itself")
_known: dict[tuple[Any, ...] | None, Known] = {}
"""Recorded allocations and launches, by the properties of a call that `facts_of` lists."""
also_forget(_known.clear)


def _memory(plan: Plan, arguments: Sequence[Argument | None], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Allocate the results. `shapes`: for each result, its shape before the result is summed."""
    like = next(each for each in arguments if isinstance(each, Tensor))
    return [
        empty(summed_shape(shape, kept), None if kept else strides_of(shape, arguments, used), dtype, like)
        for shape, kept, used, dtype in zip(shapes, plan.kept, plan.used, plan.results, strict=True)
    ]


def _values(plan: Plan, arguments: Sequence[Argument | None], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Compute the results in plain PyTorch. A summed result of half precision is returned in float32; the caller rounds
    it.
    """
    nodes = [summand(y, plan.types) if kept else y for y, kept in zip(plan.outputs, plan.kept, strict=True)]
    dtypes = [computed_in(dtype) if kept else dtype for dtype, kept in zip(plan.results, plan.kept, strict=True)]
    values = fused_reference(nodes, dtypes, plan.types, arguments)
    found = []
    for value, shape, kept in zip(values, shapes, plan.kept, strict=True):
        dims = [d for d, keep in enumerate(kept) if keep == "0"]
        found.append(value.expand(shape).sum(dims, keepdim=True) if dims else value.expand(shape))
    return found


# ---- public ----------------------------------------------------------------------------------------------------


class Fused:
    """A function of tensors that runs as one kernel; `fused` creates it.

    Attributes:
        names: names of the arguments.
        text: the function's expression, with arguments a0, a1, ... in their order.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError) as error:  # torch's own functions
            raise TypeError(f"fused: {function!r} has no readable signature: use lambda x: ...") from error
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
        """Pickle the object by name, as functions are pickled, if the name of the decorated function refers to this
        object.
        """
        found: Any = sys.modules.get(self.function.__module__)
        for name in self.function.__qualname__.split("."):
            found = getattr(found, name, None)
        return self.function.__qualname__ if found is self else (Fused, (self.function,))

    def __call__(self, *arguments: Argument, **keywords: Argument) -> Any:
        """Compute the function of tensors and numbers.

        Returns:
            A tensor, or a tuple of tensors if the function returns a tuple. Each result has PyTorch's dtype, and the
            broadcast shape of the tensors that it depends on. It has the memory layout of the first of these tensors
            with that shape, and is contiguous if there is none or if that tensor's elements are not dense in memory.

        Raises:
            TypeError: the arguments are wrong, or an operation is not defined for a dtype.
            ValueError: there is no tensor, there are more than 8 tensors, the shapes do not broadcast, or the devices
                differ.
        """
        if keywords or len(arguments) != len(self.names):
            arguments = self._bound(arguments, keywords)
        return run_text(self.text, self.names, self.single, *arguments)

    def source(self, *arguments: Argument, **keywords: Argument) -> str:
        """The Triton source of the kernel for these arguments (tensors may be on any device, even `meta`)."""
        values = self._bound(arguments, keywords)
        kinds = "".join("t" if isinstance(each, Tensor) else "n" for each in values)
        tensors = [each for each in values if isinstance(each, Tensor)]
        numbers = [each for each in values if not isinstance(each, Tensor)]
        plan, bound = planned(tensors, numbers, f"{kinds}: {self.text}")
        return launches.source_like(plan, bound)

    def _bound(self, arguments: tuple[Argument, ...], keywords: dict[str, Argument]) -> tuple[Argument, ...]:
        """All arguments in order, from positional and keyword arguments and defaults."""
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


@repeated
@recorded_whole
def run_text(text: str, names: Sequence[str], single: bool, *arguments: Argument) -> Any:
    """Compute what `Fused` computes, from the program's text, so that torch.fx can record the call.

    Args:
        text: the expression, with arguments a0, a1, ...
        names: the arguments' names, for messages.
        single: whether to return the first result itself, as for a function that returns one expression, instead of a
            tuple of all results.

    Raises:
        TypeError, ValueError: as in `Fused`.
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
    else:  # torch.jit.trace does not support operators that take lists of numbers
        found = FusedProgram(tensors, numbers, text).in_pytorch()
    return found[0] if single else tuple(found)


def _refusal(name: str, given: Tensor) -> TypeError:
    if given.layout != torch.strided:
        return not_dense("fused", name, given)
    return TypeError(f"fused: {name} must have one of the dtypes {', '.join(DTYPES)}, got {given.dtype}")


def fused(function: Function) -> Fused:
    """Compile an elementwise function of tensors into one kernel; also a decorator.

        @fused
        def gated(x, gate, bias, scale=1.0):
            return x * torch.sigmoid(gate + bias) * scale

        y = gated(x, gate, bias, scale=0.5)

    Args:
        function: takes up to 8 tensors that broadcast, and numbers. A new value of a number does not cause a
            recompilation. The function is called once, with expressions in place of tensors. The function may use
            operators, comparisons, casts (`.to(dtype)`, `.float()`) and elementwise functions of torch and
            torch.nn.functional: abs, add, addcdiv, addcmul, ceil, clamp, cos, div, elu, erf, exp, expm1, floor, gelu,
            hardtanh, isnan, leaky_relu, lerp, log, log1p, log2, logical_*, maximum, minimum, mul, neg, pow, reciprocal,
            relu, round, rsqrt, sigmoid, sign, silu, sin, softplus, sqrt, square, sub, tanh, trunc, where. The function
            returns one expression or a tuple of expressions.

    Returns:
        A callable with the same arguments. dtypes are promoted as in PyTorch; half precision is computed in float32 and
        rounded once, at the end. The callable can be differentiated any number of times, compiled with fullgraph=True,
        and used under autocast.

    Raises:
        TypeError: the function uses an operation that is not elementwise, or a tensor that is not its argument.
        AttributeError: the function uses a method that is not elementwise, such as `x.sum()`.
    """
    return Fused(function)


def _autocasts(tensors: Sequence[Tensor]) -> bool:
    """Whether autocast is on for the tensors' GPU. Under autocast, PyTorch computes some functions in float32."""
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


@repeated
@recorded_whole
def add(input: Tensor, other: Argument, *, alpha: Number = 1) -> Tensor:
    """input + alpha * other, broadcast, with the arguments, dtypes and errors of `torch.add`."""
    if type(alpha) is int and alpha == 1:
        return _ADD(input, other)
    return _ADD_SCALED(input, other, alpha)


@repeated
@recorded_whole
def axpy(a: Argument, x: Tensor, y: Argument) -> Tensor:
    """a * x + y, broadcast; `a` is a number or a tensor. Half precision is rounded once, at the end."""
    return _AXPY(x, y, a)


@repeated
@recorded_whole
def mul(input: Tensor, other: Argument) -> Tensor:
    """input * other, broadcast, as `torch.mul`."""
    return _MUL(input, other)


@repeated
@recorded_whole
def relu(input: Tensor) -> Tensor:
    """max(input, 0), as `torch.relu`."""
    return _RELU(input)


@repeated
@recorded_whole
def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-input)), as `torch.sigmoid`."""
    return _SIGMOID(input)


@repeated
@recorded_whole
def tanh(input: Tensor) -> Tensor:
    """Hyperbolic tangent, as `torch.tanh`."""
    return _TANH(input)


@repeated
@recorded_whole
def silu(input: Tensor) -> Tensor:
    """input * sigmoid(input), as `torch.nn.functional.silu`."""
    return _SILU(input)


@repeated
@recorded_whole
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, as `torch.nn.functional.gelu`; approximate: "none" or "tanh".

    Raises:
        ValueError: the approximation is unknown.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    return _GELU(input) if approximate == "none" else _GELU_TANH(input)
