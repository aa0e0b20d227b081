"""Elementwise expressions as trees, traced from a Python function.

A function of tensors is called with `Expression`s in place of the tensors. The function returns the tree of its
computation: operators, methods and torch's own functions (through `__torch_function__`) each add a node. Equal nodes
are one object, so a value that a function computes twice is in the tree once. No traversal of a tree is recursive, so
only memory limits the tree's depth.
"""

from __future__ import annotations

import math
import numbers
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from rooftop.launch import trees

Operands = tuple["Expression", ...]
Gradients = tuple["Expression | None", ...]


# ---- operations --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """The properties of an operation.

    Attributes:
        typing: how the result's dtype follows from the operands' dtypes: "promoted", "float", "compared", "bitwise",
            "where", "scaled" (the first operand's dtype), "nearest" (int32, from a floating point dtype), "bits"
            (float64, from int64), or the name of the dtype of a cast.
        arity: number of operands.
        apply: the operation in PyTorch, on tensors of one dtype.
        gradients: a function from (gradient of the result, result, *operands) to the gradients of the operands; None:
            the operation has no gradient.
        flat: whether the gradient is 0 for all operands, so that `gradients` is None.
        flops: flops of one element.
        symbol: notation of the operation, if it is not written as a function call.
        autocast: whether the operation is computed in float32 under autocast on a GPU, as in PyTorch.
    """

    typing: str
    arity: int
    apply: Callable[..., Tensor]
    gradients: Callable[..., Gradients] | None = None
    flops: int = 1
    symbol: str = ""
    autocast: bool = False
    flat: bool = False


def _operations() -> dict[str, Operation]:
    """The table of operations, in a function because the gradients use functions that are defined later."""
    return {
        "add": Operation("promoted", 2, torch.add, lambda g, y, a, b: (g, g), symbol="+"),
        "sub": Operation("promoted", 2, torch.sub, lambda g, y, a, b: (g, -g), symbol="-"),
        "mul": Operation("promoted", 2, torch.mul, lambda g, y, a, b: (g * b, g * a), symbol="*"),
        "div": Operation("float", 2, torch.div, lambda g, y, a, b: (g / b, -g * (y / b)), symbol="/"),
        "pow": Operation("promoted", 2, torch.pow, _gradients_of_power, symbol="**", autocast=True),
        "maximum": Operation(
            "promoted", 2, torch.maximum, lambda g, y, a, b: (_unless(a < b, g, a, b), _unless(a > b, g, a, b))
        ),
        "minimum": Operation(
            "promoted", 2, torch.minimum, lambda g, y, a, b: (_unless(a > b, g, a, b), _unless(a < b, g, a, b))
        ),
        "clamp_min": Operation(
            "promoted", 2, torch.maximum, lambda g, y, a, b: (where(a >= b, g, 0), where(a < b, g, 0))
        ),
        "clamp_max": Operation(
            "promoted", 2, torch.minimum, lambda g, y, a, b: (where(a <= b, g, 0), where(a > b, g, 0))
        ),
        "where": Operation(
            "where", 3, torch.where, lambda g, y, c, a, b: (None, where(c, g, 0), where(c, 0, g)), flops=0
        ),
        "common": Operation("promoted", 2, _first, lambda g, y, a, b: (g, None), flops=0),
        "base": Operation("promoted", 2, _first, lambda g, y, a, b: (g, None), flops=0, autocast=True),
        "scale": Operation("scaled", 2, torch.mul, lambda g, y, a, n: (g * n, g * a)),
        "lt": Operation("compared", 2, torch.lt, symbol="<"),
        "le": Operation("compared", 2, torch.le, symbol="<="),
        "gt": Operation("compared", 2, torch.gt, symbol=">"),
        "ge": Operation("compared", 2, torch.ge, symbol=">="),
        "eq": Operation("compared", 2, torch.eq, symbol="=="),
        "ne": Operation("compared", 2, torch.ne, symbol="!="),
        "bitwise_and": Operation("bitwise", 2, torch.bitwise_and, symbol="&"),
        "bitwise_or": Operation("bitwise", 2, torch.bitwise_or, symbol="|"),
        "bitwise_xor": Operation("bitwise", 2, torch.bitwise_xor, symbol="^"),
        "bitwise_not": Operation("bitwise", 1, torch.bitwise_not, symbol="~"),
        "neg": Operation("promoted", 1, torch.neg, lambda g, y, a: (-g,), symbol="-"),
        "abs": Operation("promoted", 1, torch.abs, lambda g, y, a: (g * apply("sign", a),)),
        "sign": Operation("promoted", 1, torch.sign, flat=True),
        "floor": Operation("promoted", 1, torch.floor, flat=True),
        "ceil": Operation("promoted", 1, torch.ceil, flat=True),
        "trunc": Operation("promoted", 1, torch.trunc, flat=True),
        "round": Operation("promoted", 1, torch.round, flat=True),
        "nearest": Operation("nearest", 1, _nearest),
        "float64_of_bits": Operation("bits", 1, lambda a: a.view(torch.float64), flops=0),
        "relu": Operation("promoted", 1, torch.relu, lambda g, y, a: (where(y <= 0, 0, g),)),
        "exp": Operation("float", 1, torch.exp, lambda g, y, a: (g * y,), autocast=True),
        "expm1": Operation("float", 1, torch.expm1, lambda g, y, a: (g * (y + 1),), autocast=True),
        "log": Operation("float", 1, torch.log, lambda g, y, a: (g / a,), autocast=True),
        "log1p": Operation("float", 1, torch.log1p, lambda g, y, a: (g / (a + 1),), autocast=True),
        "log2": Operation("float", 1, torch.log2, lambda g, y, a: (g / (a * math.log(2)),), autocast=True),
        "sqrt": Operation("float", 1, torch.sqrt, lambda g, y, a: (g / (y * 2),)),
        "rsqrt": Operation("float", 1, torch.rsqrt, lambda g, y, a: (g * (y * y * y) * -0.5,), autocast=True),
        "reciprocal": Operation("float", 1, torch.reciprocal, lambda g, y, a: (-g * (y * y),), autocast=True),
        "sin": Operation("float", 1, torch.sin, lambda g, y, a: (g * apply("cos", a),)),
        "cos": Operation("float", 1, torch.cos, lambda g, y, a: (-g * apply("sin", a),)),
        "tanh": Operation("float", 1, torch.tanh, lambda g, y, a: (g * (1 - y * y),)),
        "sigmoid": Operation("float", 1, torch.sigmoid, lambda g, y, a: (g * (y * (1 - y)),)),
        "ndtr": Operation(
            "float", 1, torch.special.ndtr, lambda g, y, a: (g * (apply("exp", a * a * -0.5) / math.sqrt(2 * math.pi)),)
        ),
        "erf": Operation(
            "float", 1, torch.erf, lambda g, y, a: (g * (apply("exp", -(a * a)) * (2 / math.sqrt(math.pi))),)
        ),
        **{name: Operation(name, 1, lambda a: a, _gradient_of_cast(name), flops=0) for name in DTYPES},
    }


DTYPES = {
    "bool": torch.bool,
    "uint8": torch.uint8,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
"""Dtypes of tensors and casts, by their names in expression texts."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _first(a: Tensor, b: Tensor) -> Tensor:
    """Return a, which the caller has cast to the common dtype of both operands."""
    return a


def _unless(exceeded: Expression, g: Expression, a: Expression, b: Expression) -> Expression:
    """The part of the gradient g of a maximum or minimum that goes to one operand: all of g if this operand is the
    result, nothing if the other operand is (`exceeded`), and half of g if both operands are equal.
    """
    return where(equal(a, b), g * 0.5, where(exceeded, 0, g))


def _gradients_of_power(g: Expression, y: Expression, a: Expression, b: Expression) -> Gradients:
    """g b a^(b - 1) and g a^b log(a), with 0 instead of NaN where a or b is 0."""
    base = where(equal(b, 0), 0, g * (b * a ** (b - 1)))
    return base, where(equal(a, 0) & (b >= 0), 0, g * (y * apply("log", a)))


def _nearest(a: Tensor) -> Tensor:
    """The lower 32 bits of the nearest integer, with ties to even. Generated kernels compute `nearest_integer` instead,
    which returns the same bits only for |a| up to 2^22 in float32, and 2^51 in float64.
    """
    return a.round().to(torch.int64).to(torch.int32)


def _gradient_of_cast(name: str) -> Callable[..., Gradients] | None:
    return (lambda g, y, a: (g,)) if DTYPES[name].is_floating_point else None


# ---- nodes -------------------------------------------------------------------------------------------------------


class Expression:
    """A node: an argument, a constant, or an operation on other nodes. A traced function uses a node like a tensor.

    Attributes:
        operation: "argument", "constant" or a key of `OPERATIONS`.
        operands: the nodes that the operation reads.
        value: a constant's value, or an argument's number.
    """

    __slots__ = ("__weakref__", "operands", "operation", "value")
    operation: str
    operands: Operands
    value: int | float | bool | None

    def __init__(self) -> None:
        raise TypeError("expressions come from tracing a function (rooftop.kernels.fused) or from its text")

    def __repr__(self) -> str:
        return f"Expression({text_of((self,))})"

    def __bool__(self) -> bool:
        raise TypeError(
            "an elementwise expression has no truth value while it is traced: use torch.where instead of `if`, and "
            "&, |, ~ instead of and, or, not"
        )

    def __iter__(self) -> Any:
        raise TypeError("an elementwise expression cannot be indexed or iterated over: it has no elements")

    __hash__ = object.__hash__

    if TYPE_CHECKING:  # set from `_METHODS`, below

        def __add__(self, other: Any) -> Expression: ...
        def __radd__(self, other: Any) -> Expression: ...
        def __sub__(self, other: Any) -> Expression: ...
        def __rsub__(self, other: Any) -> Expression: ...
        def __mul__(self, other: Any) -> Expression: ...
        def __rmul__(self, other: Any) -> Expression: ...
        def __truediv__(self, other: Any) -> Expression: ...
        def __pow__(self, other: Any) -> Expression: ...
        def __and__(self, other: Any) -> Expression: ...
        def __lt__(self, other: Any) -> Expression: ...
        def __le__(self, other: Any) -> Expression: ...
        def __gt__(self, other: Any) -> Expression: ...
        def __ge__(self, other: Any) -> Expression: ...
        def __neg__(self) -> Expression: ...

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"elementwise expressions have no {name!r}: {_supported()}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        build = FUNCTIONS.get(function) or _METHODS.get(getattr(function, "__name__", ""))
        if build is None:
            name = getattr(function, "__name__", str(function))
            raise TypeError(f"fused: {name} is not elementwise, or not supported in a fused function")
        return build(*args, **(kwargs or {}))

    def to(self, dtype: torch.dtype) -> Expression:
        """Cast to a dtype; a cast to half precision rounds."""
        if dtype not in NAMES:
            raise TypeError(f"fused: a cast needs one of the dtypes {', '.join(DTYPES)}, got {dtype!r}")
        return apply(NAMES[dtype], self)


def _node(operation: str, operands: Operands, value: Any = None) -> Expression:
    """The only node with this operation, these operands and this value."""
    key = (operation, tuple(map(id, operands)), type(value), repr(value))
    found = _NODES.get(key)
    if found is None:
        with _lock:  # without the lock, two threads could create equal nodes, each with a part of the gradient
            found = _NODES.get(key)
            if found is None:
                found = object.__new__(Expression)
                found.operation, found.operands, found.value = operation, operands, value
                _NODES[key] = found
    return found


_NODES: WeakValueDictionary[Any, Expression] = WeakValueDictionary()
_lock = Lock()
os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def argument(number: int) -> Expression:
    """The node of argument `number`, which is a tensor or a Python number."""
    return _node("argument", (), number)


def constant(value: int | float | bool) -> Expression:
    """A number that is part of the expression.

    Raises:
        ValueError: an integer that fits neither int64 nor uint64.
    """
    if type(value) is int and not -(1 << 63) <= value < 1 << 64:
        raise ValueError(f"fused: a number of {value.bit_length()} bits is more than a tensor can hold: write a float")
    return _node("constant", (), value)


def apply(operation: str, *operands: Any) -> Expression:
    """A node of one of `OPERATIONS`.

    Raises:
        TypeError: an operand is neither an expression nor a number.
    """
    return _node(operation, tuple(_as_expression(operation, each) for each in operands))


def _as_expression(operation: str, value: Any) -> Expression:
    """An operand as a node: numbers become constants."""
    if isinstance(value, Expression):
        return value
    if isinstance(value, bool) or type(value) in (int, float):
        return constant(value)
    if isinstance(value, numbers.Real):  # NumPy's numbers
        return constant(int(value) if isinstance(value, numbers.Integral) else float(value))
    if isinstance(value, Tensor):
        raise TypeError(f"fused: {operation} uses a tensor that is not an argument of the function: add an argument")
    raise TypeError(f"fused: {operation} needs tensors and numbers, got {type(value).__name__}")


def where(condition: Any, a: Any, b: Any) -> Expression:
    """`torch.where`, element by element."""
    return apply("where", condition, a, b)


def equal(a: Any, b: Any) -> Expression:
    """`torch.eq`, element by element."""
    return apply("eq", a, b)


def topological(outputs: Iterable[Expression]) -> list[Expression]:
    """The given nodes and all their operands in topological order: each node once, after its operands."""
    return trees.topological(outputs, _OPERANDS)


_OPERANDS: Callable[[Expression], Operands] = attrgetter("operands")


def arguments_of(outputs: Iterable[Expression]) -> list[int]:
    """The numbers of the used arguments, in ascending order."""
    return sorted(int(n.value) for n in topological(outputs) if n.operation == "argument")  # type: ignore[arg-type]


# ---- as text ---------------------------------------------------------------------------------------------------------


MOST_DEPTH = 16  # levels of parentheses


def text_of(outputs: Sequence[Expression]) -> str:
    """The canonical text of expressions. The text first names the values that are used more than once, then lists the
    results, separated by commas.
    """
    nodes = topological(outputs)
    uses: dict[int, int] = {}
    for node in nodes:
        for operand in node.operands:
            uses[id(operand)] = uses.get(id(operand), 0) + 1
    written: dict[int, str] = {}
    depth: dict[int, int] = {}
    statements: list[str] = []
    for node in nodes:
        text = _text_of_node(node, [written[id(each)] for each in node.operands])
        deep = 1 + max((depth[id(each)] for each in node.operands), default=0)
        if node.operands and (uses.get(id(node), 0) > 1 or deep > MOST_DEPTH):
            statements.append(f"t{len(statements)} = {_bare(text)}")
            text, deep = f"t{len(statements) - 1}", 0
        written[id(node)], depth[id(node)] = text, deep
    return "; ".join([*statements, ", ".join(_bare(written[id(each)]) for each in outputs)])


def _text_of_node(node: Expression, operands: list[str]) -> str:
    """The text of a node, with parentheses around operations that have a symbol and around negative numbers."""
    if node.operation == "argument":
        return f"a{node.value}"
    if node.operation == "constant":
        return repr(node.value) if repr(node.value)[0] != "-" else f"({node.value!r})"
    symbol = OPERATIONS[node.operation].symbol
    if not symbol:
        return f"{node.operation}({', '.join(map(_bare, operands))})"
    return f"({symbol}{operands[0]})" if len(operands) == 1 else f"({operands[0]} {symbol} {operands[1]})"


def _bare(text: str) -> str:
    """The text without its outermost parentheses."""
    return text[1:-1] if text[0] == "(" else text


# ---- operations for traced functions ---------------------------------------------------------------------------------


def _power(a: Any, b: Any) -> Expression:
    """A power. As in PyTorch, the constant exponents 1 to 4 become products, and the float exponents 0.5, -0.5, -1.0
    and -2.0 become square roots and reciprocals.
    """
    if type(b) in (int, float) and b in (1, 2, 3, 4):
        # a boolean to an integer power is an integer, and to a float power a float
        a = apply("base", a, type(b)(1))
        square = apply("mul", a, a)
        return {1: lambda: a, 2: lambda: square, 3: lambda: square * a, 4: lambda: square * square}[int(b)]()
    if type(b) is float and b == -2.0:
        return apply("reciprocal", _power(a, 2.0))
    if type(b) is float and b in (0.5, -0.5, -1.0):
        return apply({0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}[b], a)
    return apply("pow", a, b)


def _with_alpha(operation: str) -> Callable[..., Expression]:
    """Return a function that builds input + alpha * other, or input - alpha * other. The dtype of the result does not
    depend on alpha.
    """

    def build(input: Any, other: Any, *, alpha: Any = 1) -> Expression:
        return apply(operation, input, _times(apply("common", other, input), alpha) if _not_1(alpha) else other)

    return build


def _with_value(operation: str) -> Callable[..., Expression]:
    """Return a function that builds input + value * (a * b), or input + value * (a / b). The dtype of the result does
    not depend on `value`.
    """

    def build(input: Any, a: Any, b: Any, *, value: Any = 1) -> Expression:
        return apply("add", input, _times(apply(operation, apply("common", a, input), b), value))

    return build


def _times(a: Expression, number: Any) -> Expression:
    """a * number, computed in the dtype of a."""
    return apply("scale", a, number) if _not_1(number) else a


def _not_1(number: Any) -> bool:
    """Whether a factor may differ from 1, so that a product is needed."""
    return type(number) not in (int, float) or number != 1


def _divide(input: Any, other: Any, *, rounding_mode: str | None = None) -> Expression:
    if rounding_mode is not None:
        raise TypeError(
            "fused: div with a rounding mode is not supported: use torch.floor(a / b) or torch.trunc(a / b)"
        )
    return apply("div", input, other)


def _clamp(input: Any, min: Any = None, max: Any = None) -> Expression:
    """min(max(input, min), max). A bound that is None is omitted."""
    if min is None and max is None:
        raise ValueError("fused: clamp needs min, max or both")
    bounded = input if min is None else apply("clamp_min", input, min)
    return bounded if max is None else apply("clamp_max", bounded, max)


def _gelu(input: Any, approximate: str = "none") -> Expression:
    """The Gaussian error linear unit (Hendrycks and Gimpel 2016, "Gaussian Error Linear Units")."""
    if approximate == "tanh":
        return input * 0.5 * (apply("tanh", (input + input * input * input * 0.044715) * math.sqrt(2 / math.pi)) + 1.0)
    if approximate != "none":
        raise ValueError(f"fused: gelu needs approximate='none' or 'tanh', got {approximate!r}")
    return input * apply("ndtr", input)


def _softplus(input: Any, beta: float = 1.0, threshold: float = 20.0) -> Expression:
    """log(1 + exp(beta x)) / beta, and x itself if beta x is above the threshold."""
    scaled = input if beta == 1.0 else input * beta
    # clamped, because above the threshold exp could overflow, and the gradient could become inf * 0
    soft = apply("log1p", apply("exp", apply("clamp_max", scaled, threshold)))
    return where(scaled > threshold, input, soft if beta == 1.0 else soft / beta)


def _elu(input: Any, alpha: float = 1.0) -> Expression:
    """x for x > 0, else alpha (exp(x) - 1)."""
    return where(apply("gt", input, 0), input, apply("expm1", apply("clamp_max", input, 0)) * alpha)


def _hardtanh(input: Any, min_val: float = -1.0, max_val: float = 1.0) -> Expression:
    """A clamp whose gradient is zero at its bounds, as in PyTorch."""
    above = where(apply("ge", input, max_val), max_val, input)
    return where(apply("le", input, min_val), min_val, above)


def _logical(operation: str) -> Callable[..., Expression]:
    return lambda *operands: apply(operation, *(apply("bool", each) for each in operands))


def _unary(operation: str) -> Callable[[Any], Expression]:
    return lambda input: apply(operation, input)


def _binary(operation: str) -> Callable[[Any, Any], Expression]:
    return lambda input, other: apply(operation, input, other)


def _activation(build: Callable[..., Expression]) -> Callable[..., Expression]:
    """Return `build` with an additional argument `inplace`, as in `torch.nn.functional`, which has no effect here."""

    def apply_(input: Any, *args: Any, inplace: bool = False, **kwargs: Any) -> Expression:
        return build(input, *args, **kwargs)

    return apply_


OPERATIONS = _operations()
BY_SYMBOL = {(each.symbol, each.arity): name for name, each in OPERATIONS.items() if each.symbol}

_METHODS: dict[str, Callable[..., Expression]] = {
    **{
        name: _unary(name)
        for name, each in OPERATIONS.items()
        if each.arity == 1 and name not in DTYPES and each.typing not in ("nearest", "bits")
    },
    **{name: _binary(name) for name in ("maximum", "minimum", "mul", "clamp_min", "clamp_max")},
    **{name: _binary(name) for name, each in OPERATIONS.items() if each.typing in ("compared", "bitwise")},
    **{name: _logical(f"bitwise_{name[8:]}") for name in ("logical_and", "logical_or", "logical_xor", "logical_not")},
    **{name: _unary(NAMES[getattr(torch, name)]) for name in ("half", "bfloat16", "float", "double")},
    **{name: _unary(NAMES[getattr(torch, name)]) for name in ("int", "long", "bool")},
    "add": _with_alpha("add"),
    "sub": _with_alpha("sub"),
    "div": _divide,
    "true_divide": _divide,
    "pow": _power,
    "subtract": _with_alpha("sub"),
    "multiply": _binary("mul"),
    "divide": _divide,
    "negative": _unary("neg"),
    "clamp": _clamp,
    "clip": _clamp,
    "absolute": _unary("abs"),
    "square": lambda input: _power(input, 2),
    "where": lambda input, condition, other: where(condition, input, other),
    "lerp": lambda input, end, weight: input + (end - input) * weight,
    "addcmul": _with_value("mul"),
    "addcdiv": _with_value("div"),
    "isnan": lambda input: apply("ne", input, input),
}
"""Methods of tensors, and the functions of torch that have the same names and arguments."""

FUNCTIONS: dict[Callable[..., Any], Callable[..., Expression]] = {
    **{getattr(torch, name): build for name, build in _METHODS.items() if callable(getattr(torch, name, None))},
    **{getattr(F, name): _activation(_unary(name)) for name in ("relu", "sigmoid", "tanh")},
    torch.where: where,
    torch.special.expit: _unary("sigmoid"),
    F.gelu: _gelu,
    F.silu: _activation(lambda input: input * apply("sigmoid", input)),
    F.softplus: _softplus,
    F.leaky_relu: _activation(
        lambda input, negative_slope=0.01: where(apply("gt", input, 0), input, input * negative_slope)
    ),
    F.elu: _activation(_elu),
    F.hardtanh: _activation(_hardtanh),
}
"""The supported functions of torch and torch.nn.functional, each with the function that builds its expression."""


def _define_methods() -> None:
    """Define the methods and operators of `Expression` from the tables of this module."""
    for name, build in _METHODS.items():
        setattr(Expression, name, build)
    both = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}
    both |= {"and": "bitwise_and", "or": "bitwise_or", "xor": "bitwise_xor"}
    for name, operation in both.items():
        build = _power if name == "pow" else _binary(operation)
        setattr(Expression, f"__{name}__", build)
        setattr(Expression, f"__r{name}__", lambda self, other, build=build: build(other, self))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Expression, f"__{name}__", _binary(name))
    for name, operation in {"neg": "neg", "invert": "bitwise_not", "abs": "abs"}.items():
        setattr(Expression, f"__{name}__", _unary(operation))
    absent = {"floordiv": "//", "mod": "%", "divmod": "divmod", "matmul": "@", "lshift": "<<", "rshift": ">>"}
    for name, symbol in {**absent, **{f"r{name}": symbol for name, symbol in absent.items()}, "getitem": "[ ]"}.items():
        setattr(Expression, f"__{name}__", _refusal(symbol))


def _refusal(symbol: str) -> Callable[..., Expression]:
    def refuse(*operands: Any) -> Expression:
        raise TypeError(f"elementwise expressions have no {symbol}: {_supported()}")

    return refuse


def _supported() -> str:
    """What a fused function may use, in words."""
    operators = [each.symbol for each in OPERATIONS.values() if each.symbol]
    names = sorted({function.__name__ for function in FUNCTIONS})
    return (
        f"a fused function may use {' '.join(dict.fromkeys(operators))}, casts and these functions: {', '.join(names)}"
    )


_define_methods()
