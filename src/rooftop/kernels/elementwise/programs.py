"""Programs of fused elementwise expressions: trees, the kinds of their arguments, and properties derived from both.

The operator accepts a program as text, such as "tnt: a0 * a1 + a2". The letters before the colon state which arguments
are tensors (t) and which are numbers (n); the trees follow after the colon (`expression_texts.py`). The text "tt 1=01:
a0, a0 * a1" sums result 1 over the first of two dimensions, whose size becomes 1. A plan is a program together with the
dtypes of its arguments. Programs are cached by their text, plans by the program and the arguments' dtypes. Shapes and
the results' layouts are computed at each call.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rooftop.kernels.elementwise.derivatives import derivatives
from rooftop.kernels.elementwise.expression_texts import parse
from rooftop.kernels.elementwise.expression_types import (
    NUMBER,
    SINGLE,
    TENSOR,
    Kind,
    Types,
    check_limit,
    limits_of,
    number_kind,
    types_of,
)
from rooftop.kernels.elementwise.expressions import (
    DTYPES,
    NAMES,
    Expression,
    apply,
    argument,
    arguments_of,
    text_of,
    topological,
)
from rooftop.kernels.operands.checks import not_dense

Number = bool | int | float
Argument = Tensor | Number


@dataclass(frozen=True)
class Program:
    """A program: which arguments are tensors or numbers, and the expression trees of the results.

    `kinds` has a letter for each argument: t for a tensor, n for a number, - for an unused argument. `kept` has a digit
    for each dimension of a summed output: 1 if the dimension stays, 0 if its size becomes 1. For an output that is not
    summed, `kept` is "".
    """

    kinds: str
    outputs: tuple[Expression, ...]
    kept: tuple[str, ...]
    autocast: bool = False

    def arguments(self, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> tuple[Argument | None, ...]:
        """All arguments of the program in their original order: `tensors` and `numbers` at the positions that `kinds`
        states, and None for an unused argument.
        """
        rest: dict[str, Any] = {"t": iter(tensors), "n": iter(numbers), "-": iter([None] * len(self.kinds))}
        return tuple(next(rest[kind]) for kind in self.kinds)

    def places(self, kind: str) -> list[int]:
        """Indices of the arguments of one kind: "t" for tensors, "n" for numbers, "-" for unused arguments."""
        return [i for i, each in enumerate(self.kinds) if each == kind]


@functools.lru_cache(maxsize=1024)
def program_of(text: str) -> Program:
    """Parse the text of a program such as "tnt: a0 * a1 + a2". Options precede the colon: "tnt autocast: ..." computes
    as under autocast; "tnt 0=10: ..." keeps the first and sums the second dimension of output 0.
    """
    head, _, trees = text.partition(":")
    kinds, *options = head.split(" ")
    autocast = options[:1] == ["autocast"]
    outputs = parse(trees)
    kept = [""] * len(outputs)
    for option in options[autocast:]:
        number, _, marks = option.partition("=")
        if not number.isdecimal() or int(number) >= len(kept) or not marks or set(marks) - set("01"):
            raise ValueError(f"fused: {option!r} must state the kept dimensions of a result, as in '0=01'")
        kept[int(number)] = marks
    used = arguments_of(outputs)
    if set(kinds) - set("tn-"):
        raise ValueError(f"fused: expected letters t (tensor), n (number) and - (unused), got {head!r}")
    if any(number >= len(kinds) or kinds[number] == "-" for number in used):
        raise ValueError(f"fused: {trees.strip()!r} uses arguments that {head!r} does not have")
    for output in outputs:
        if not any(kinds[number] == "t" for number in arguments_of([output])):
            raise ValueError(f"fused: the result {text_of([output])} depends on no tensor")
    return Program(kinds, outputs, tuple(kept), autocast)


@dataclass(frozen=True, eq=False)
class Plan:
    """A program with the dtypes of its arguments, and properties that follow from both. The cache of launches has plan
    objects as keys, compared by identity.
    """

    outputs: tuple[Expression, ...]  # kept alive here, because the keys of `types` are the ids of these nodes
    kept: tuple[str, ...]
    kinds: tuple[Kind | None, ...]
    types: Types
    results: tuple[torch.dtype, ...]
    double: bool
    used: tuple[tuple[int, ...], ...]  # arguments of each output
    limits: tuple[tuple[int, torch.dtype], ...]  # index of an argument, and integer dtype that its value must fit


@functools.lru_cache(maxsize=4096)
def plan_of(program: Program, kinds: tuple[Kind | None, ...], default: torch.dtype) -> Plan:
    """The plan of a program for arguments with these dtypes and ranks. `default`: the dtype of a result if an operation
    turns integers into floating-point numbers.
    """
    types = types_of(program.outputs, kinds, program.autocast)
    nodes = [node for node in topological(program.outputs) if node.operands]
    double = any(types[id(node)].common == torch.float64 for node in nodes) or any(
        kind is not None and kind.rank != NUMBER and kind.dtype == torch.float64 for kind in kinds
    )
    results = tuple(types[id(node)].kind.dtype for node in program.outputs)
    used = tuple(tuple(arguments_of([each])) for each in program.outputs)
    if any(kept and not dtype.is_floating_point for kept, dtype in zip(program.kept, results, strict=True)):
        raise TypeError("fused: only floating point results are summed")
    limits = []
    for node, dtype in limits_of(program.outputs, types):
        assert node.value is not None
        if node.operation == "argument":
            limits.append((int(node.value), dtype))
        else:
            check_limit(node.value, dtype)
    return Plan(program.outputs, program.kept, kinds, types, results, double, used, tuple(limits))


def _kind(value: Argument | None) -> Kind | None:
    """Dtype and rank of an argument; None for an unused argument."""
    if isinstance(value, Tensor):
        return Kind(value.dtype, TENSOR if value.dim() else SINGLE)
    return None if value is None else number_kind(value)


def planned(tensors: Sequence[Tensor], numbers: Sequence[Number], program: Program | str) -> tuple[Plan, list[Any]]:
    """The plan of a program (or of its text), and the list of all arguments, in which an argument's number is its
    index. All tensors must be on one device.

    Raises:
        TypeError: a tensor's layout is not `torch.strided`, or its dtype is not supported.
        ValueError: the tensors are on several devices, or their shapes do not broadcast.
    """
    if isinstance(program, str):
        program = program_of(program)
    if len(tensors) != program.kinds.count("t") or len(numbers) != program.kinds.count("n"):
        text = f"{program.kinds}: {text_of(program.outputs)}"
        raise ValueError(f"fused: {text!r} does not take {len(tensors)} tensors and {len(numbers)} numbers")
    device = _device(tensors)
    arguments = list(program.arguments(tensors, numbers))
    for i, each in enumerate(arguments):
        if not isinstance(each, Tensor):
            continue
        if each.layout != torch.strided:
            raise not_dense("fused", f"argument {i}", each)
        if each.dtype not in NAMES:
            raise TypeError(f"fused: argument {i} must have one of the dtypes {', '.join(DTYPES)}, got {each.dtype}")
        if each.device != device:
            arguments[i] = each.to(device)  # a tensor without dimensions may be on the CPU
    kinds = tuple(map(_kind, arguments))
    plan = plan_of(program, kinds, torch.get_default_dtype())
    for number, dtype in plan.limits:
        check_limit(arguments[number], dtype)  # type: ignore[arg-type]
    return plan, arguments


def _device(tensors: Sequence[Tensor]) -> torch.device:
    """The tensors' device; tensors without dimensions may be on the CPU, as in PyTorch."""
    device = next((each.device for each in tensors if each.dim() or each.device.type != "cpu"), tensors[0].device)
    for each in tensors:
        if each.device != device and (each.dim() or each.device.type != "cpu"):
            raise ValueError(f"fused: tensors are on {device} and {each.device}: move them to one device")
    return device


def shape_of(arguments: Sequence[Argument | None], used: Sequence[int]) -> torch.Size:
    """The shape to which the tensors among the arguments `used` broadcast; ValueError if they do not broadcast."""
    return broadcast_shape([each.shape for i in used if isinstance(each := arguments[i], Tensor)])


def broadcast_shape(shapes: Sequence[torch.Size]) -> torch.Size:
    """The shape to which these shapes broadcast; ValueError if they do not."""
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"fused: tensors of shapes {listed} do not broadcast to one shape") from error


def summed_shape(shape: torch.Size, kept: str) -> torch.Size:
    """The shape of a summed result, given the shape of its elements before the sum."""
    if not kept:
        return shape
    if len(kept) != len(shape):
        raise ValueError(f"fused: {kept!r} has {len(kept)} digits for the {len(shape)} dimensions of a result")
    return torch.Size(size if keep == "1" else 1 for size, keep in zip(shape, kept, strict=True))


def strides_of(shape: torch.Size, arguments: Sequence[Argument | None], used: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of a result of this shape, as PyTorch chooses them: the strides of the first argument in `used` that has
    the same shape, if that tensor is dense. Otherwise None, which means a contiguous result.
    """
    for i in used:
        tensor = arguments[i]
        if isinstance(tensor, Tensor) and tensor.shape == shape:
            if tensor.is_contiguous():
                return None
            return tensor.stride() if _is_dense(tensor) else None
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements of a tensor fill a memory range without gaps and without overlap, in any order of the
    dimensions.
    """
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def empty(shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Allocate a result, with the strides from `strides_of`."""
    if strides is None:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty_strided(shape, strides, dtype=dtype)


# ---- gradients -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramGradients:
    """How the gradients of some arguments are computed from the gradients of outputs of one shape.

    Attributes:
        passed: for each argument, the output whose gradient is also the gradient of the argument; None if the gradient
            must be computed.
        there: for each argument, whether a gradient with respect to that argument exists and is not 0 everywhere.
        zero: for each argument, whether its gradient is 0 everywhere.
        used: indices of the arguments that `program` needs. The gradient of output i has the index n + i, where n is
            the original program's number of arguments.
        program: text of the program that computes the existing gradients for which `passed` is None; "" if there are
            none.
    """

    passed: tuple[int | None, ...]
    there: tuple[bool, ...]
    zero: tuple[bool, ...]
    used: tuple[int, ...]
    program: str


@functools.lru_cache(maxsize=1024)
def gradients_of(
    text: str, outputs: tuple[tuple[int, torch.dtype], ...], wanted: tuple[tuple[int, torch.dtype], ...]
) -> ProgramGradients:
    """The gradients with respect to the arguments `wanted`, from the gradients of `outputs`. `outputs` and `wanted` are
    tuples of (index, dtype)."""
    program = program_of(text)
    first = len(program.kinds)
    given = [argument(first + i) for i, _ in outputs]
    found, zero = derivatives([program.outputs[i] for i, _ in outputs], given, [i for i, _ in wanted])
    passed, computed = [], []
    for gradient, (_, dtype) in zip(found, wanted, strict=True):
        same = next((i for each, (i, d) in zip(given, outputs, strict=True) if each is gradient and d == dtype), None)
        passed.append(same)
        if gradient is not None and same is None:
            computed.append(apply(NAMES[dtype], gradient))
    used = arguments_of(computed)
    kinds = "".join(kind if i in used else "-" for i, kind in enumerate(program.kinds + "t" * len(program.outputs)))
    there = tuple(each is not None for each in found)
    text = f"{kinds}: {text_of(computed)}" if computed else ""
    return ProgramGradients(tuple(passed), there, tuple(zero), tuple(used), text)


def kept_dims(shape: torch.Size, full: torch.Size) -> str:
    """How to sum a gradient of shape `full` to the shape of the tensor that it belongs to. Return one digit for each
    dimension of `full`: 1 if the dimension stays, 0 if it is summed. Return "" if all dimensions stay.
    """
    missing = len(full) - len(shape)
    kept = [size == 1 for size in full[:missing]] + [a == b for a, b in zip(shape, full[missing:], strict=True)]
    return "" if all(kept) else "".join("1" if keep else "0" for keep in kept)
