"""Elementwise expressions of broadcast tensors, each in one kernel: y = f(a, b, ...), element by element.

A Python function is traced once into a tree (`expressions.py`), from which a Triton kernel is written
(`expression_sources.py`). Bound by memory: every input is read once and every result written once, whatever is computed
between; intermediate values stay in float32 registers. The gradient is the tree's symbolic derivative, again an
expression and again one kernel, so it has derivatives of its own. Deterministic: no atomics.
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
from torch.autograd import forward_ad

from rooftop.cost import Call, Cost, cost_of, distinct_bytes, precision_of
from rooftop.kernels.expression_sources import Access, Layout, compiled, kernel_name, source_of, stride_names
from rooftop.kernels.expression_texts import parse, text_of
from rooftop.kernels.expression_types import (
    NUMBER,
    SINGLE,
    TENSOR,
    Kind,
    Types,
    check_limit,
    computed_in,
    limits_of,
    number_kind,
    types_of,
    wrapped,
)
from rooftop.kernels.expressions import (
    DTYPES,
    NAMES,
    OPERATIONS,
    Expression,
    apply,
    argument,
    arguments_of,
    derivatives,
    topological,
)
from rooftop.kernels.tiles import unit
from rooftop.launch.operators import differentiable, operator
from rooftop.launch.triton_launch import INTERPRETED, launch, require_triton

MOST_TENSORS = 8
MOST_DIMS = 5  # after merging
Number = bool | int | float
Argument = Tensor | Number
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


# ---- launch parameters -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlatConfig:
    """Elements and warps of a program, for kernels that move up to `element_bytes` for each element."""

    element_bytes: int
    block: int
    warps: int


@dataclass(frozen=True)
class TileConfig:
    """Elements of a tile, its columns at most, and warps. Rows of fewer columns leave room for more rows."""

    elements: int
    columns: int
    warps: int


# Measured on an H200 with up to four inputs, and chosen for all of them: differences are small but for activations of
# one tensor in half precision, which want 16 elements a thread, and for transposed ones, which want large tiles (larger
# ones still gain little, and more tensors would spill).
FLAT = (FlatConfig(4, 2048, 4), FlatConfig(1 << 30, 1024, 4))
TILES = TileConfig(elements=4096, columns=1024, warps=8)
SQUARE = TileConfig(elements=8192, columns=64, warps=8)  # where a tensor's neighbours lie along rows: transposed


# ---- programs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Program:
    """A parsed operator argument: which arguments there are, and the trees.

    `kinds` has a letter for each argument: t a tensor, n a number, - none (not used).
    """

    kinds: str
    autocast: bool
    outputs: tuple[Expression, ...]

    def arguments(self, tensors: Sequence[Tensor], numbers: Sequence[Number]) -> tuple[Argument | None, ...]:
        """All arguments by number."""
        rest: dict[str, Any] = {"t": iter(tensors), "n": iter(numbers), "-": iter([None] * len(self.kinds))}
        return tuple(next(rest[kind]) for kind in self.kinds)


@functools.lru_cache(maxsize=1024)
def _program(text: str) -> _Program:
    """From "tnt: a0 * a1 + a2", or "tnt autocast: ..."."""
    head, _, trees = text.partition(":")
    kinds, _, autocast = head.partition(" ")
    outputs = parse(trees)
    used = arguments_of(outputs)
    if set(kinds) - set("tn-") or autocast not in ("", "autocast"):
        raise ValueError(f"fused: expected letters t, n, - for tensors, numbers and nothing, got {head!r}")
    if any(number >= len(kinds) or kinds[number] == "-" for number in used):
        raise ValueError(f"fused: {trees.strip()!r} uses arguments that {head!r} does not have")
    for output in outputs:
        if not any(kinds[number] == "t" for number in arguments_of([output])):
            raise ValueError(f"fused: the result {text_of([output])} depends on no tensor")
    return _Program(kinds, bool(autocast), outputs)


@dataclass(frozen=True)
class _Plan:
    """What follows from a program and its arguments' dtypes."""

    outputs: tuple[Expression, ...]  # kept, since types are by their identity
    kinds: tuple[Kind | None, ...]
    types: Types
    results: tuple[torch.dtype, ...]
    double: bool
    used: tuple[tuple[int, ...], ...]  # arguments of each output
    limits: tuple[tuple[int, torch.dtype], ...]  # numbers that integers of a dtype must be able to hold


@functools.lru_cache(maxsize=4096)
def _plan(text: str, kinds: tuple[Kind | None, ...], default: torch.dtype) -> _Plan:
    program = _program(text)
    types = types_of(program.outputs, kinds, program.autocast)
    nodes = [node for node in topological(program.outputs) if node.operands]
    double = any(types[id(node)].common == torch.float64 for node in nodes) or any(
        kind is not None and kind.rank != NUMBER and kind.dtype == torch.float64 for kind in kinds
    )
    results = tuple(types[id(node)].kind.dtype for node in program.outputs)
    used = tuple(tuple(arguments_of([each])) for each in program.outputs)
    limits = []
    for node, dtype in limits_of(program.outputs, types):
        assert node.value is not None
        if node.operation == "argument":
            limits.append((int(node.value), dtype))
        else:
            check_limit(node.value, dtype)
    return _Plan(program.outputs, kinds, types, results, double, used, tuple(limits))


def _kind(value: Argument | None) -> Kind | None:
    if isinstance(value, Tensor):
        return Kind(value.dtype, TENSOR if value.dim() else SINGLE)
    return None if value is None else number_kind(value)


def _planned(tensors: Sequence[Tensor], numbers: Sequence[Number], text: str) -> tuple[_Plan, list[Any]]:
    """The plan of a program and its arguments by number, on one device.

    Raises:
        TypeError: tensors that are not dense, or of a dtype that is not supported.
        ValueError: tensors on several devices, or shapes that do not broadcast.
    """
    program = _program(text)
    if len(tensors) != program.kinds.count("t") or len(numbers) != program.kinds.count("n"):
        raise ValueError(f"fused: {text!r} takes other arguments than {len(tensors)} tensors, {len(numbers)} numbers")
    device = _device(tensors)
    arguments = list(program.arguments(tensors, numbers))
    for i, each in enumerate(arguments):
        if not isinstance(each, Tensor):
            continue
        if each.layout != torch.strided:
            raise TypeError(f"fused: argument {i} must be dense, got layout {each.layout}: use .to_dense()")
        if each.dtype not in NAMES:
            raise TypeError(f"fused: argument {i} must have one of the dtypes {', '.join(DTYPES)}, got {each.dtype}")
        if each.device != device:
            arguments[i] = each.to(device)  # one number, from the CPU
    kinds = tuple(map(_kind, arguments))
    plan = _plan(text, kinds, torch.get_default_dtype())
    for number, dtype in plan.limits:
        check_limit(arguments[number], dtype)  # type: ignore[arg-type]
    return plan, arguments


def _device(tensors: Sequence[Tensor]) -> torch.device:
    """Where the tensors are; those without dimensions may be on the CPU, as in PyTorch."""
    device = next((each.device for each in tensors if each.dim() or each.device.type != "cpu"), tensors[0].device)
    for each in tensors:
        if each.device != device and (each.dim() or each.device.type != "cpu"):
            raise ValueError(f"fused: tensors are on {device} and {each.device}: move them to one device")
    return device


def _shape(arguments: Sequence[Argument | None], used: Sequence[int]) -> torch.Size:
    shapes = [arguments[i].shape for i in used if isinstance(arguments[i], Tensor)]  # type: ignore[union-attr]
    if all(shape == shapes[0] for shape in shapes):
        return shapes[0]
    try:
        return torch.broadcast_shapes(*shapes)
    except RuntimeError as error:
        listed = ", ".join(str(tuple(shape)) for shape in shapes)
        raise ValueError(f"fused: tensors of shapes {listed} do not broadcast to one shape") from error


def _strides(shape: torch.Size, arguments: Sequence[Argument | None], used: Sequence[int]) -> tuple[int, ...] | None:
    """Strides of the results, as PyTorch chooses them: those of the first tensor of the full shape, where it is dense;
    None: contiguous."""
    for i in used:
        tensor = arguments[i]
        if isinstance(tensor, Tensor) and tensor.shape == shape:
            if tensor.is_contiguous():
                return None
            return tensor.stride() if _is_dense(tensor) else None
    return None


def _is_dense(tensor: Tensor) -> bool:
    """Whether its elements are a piece of memory, in some order of the dimensions, without gaps or repetition."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _empty(shape: torch.Size, strides: tuple[int, ...] | None, dtype: torch.dtype, like: Tensor) -> Tensor:
    if strides is None:
        return like.new_empty(shape, dtype=dtype)
    return like.new_empty_strided(shape, strides, dtype=dtype)


# ---- implementations -------------------------------------------------------------------------------------------


def _run(tensors: Sequence[Tensor], numbers: Sequence[Number], text: str) -> list[Tensor]:
    """Results, in the order of the program's outputs."""
    plan, arguments = _planned(tensors, numbers, text)
    shapes = [_shape(arguments, used) for used in plan.used]
    like = next(each for each in arguments if isinstance(each, Tensor))
    found = [
        _empty(shape, _strides(shape, arguments, used), dtype, like)
        for shape, used, dtype in zip(shapes, plan.used, plan.results, strict=True)
    ]
    if plan.double or (like.device.type == "cpu" and not INTERPRETED):
        values = fused_reference(plan.outputs, plan.results, plan.types, arguments)
        for result, value in zip(found, values, strict=True):
            result.copy_(value)
        return found
    require_triton()
    for shape in dict.fromkeys(shapes):
        for strides in dict.fromkeys(y.stride() for y, of in zip(found, shapes, strict=True) if of == shape):
            chosen = [i for i, of in enumerate(shapes) if of == shape and found[i].stride() == strides]
            if math.prod(shape):
                _launch(text, plan, tuple(chosen), arguments, [found[i] for i in chosen])
    return found


def _launch(text: str, plan: _Plan, chosen: tuple[int, ...], arguments: list[Any], results: list[Tensor]) -> None:
    """One kernel for outputs of the same shape and strides."""
    used = sorted({number for i in chosen for number in plan.used[i]})
    tensors = {i: arguments[i] for i in used if isinstance(arguments[i], Tensor)}
    y = results[0]
    dims = _merged(y, list(tensors.values()))
    if len(dims) > MOST_DIMS:  # copies in the results' order, which then merge to one dimension
        tensors = {
            i: t if t.dim() == 0 else torch.empty_like(y, dtype=t.dtype).copy_(t.expand(y.shape))
            for i, t in tensors.items()
        }
        arguments = [tensors.get(i, each) for i, each in enumerate(arguments)]
        dims = _merged(y, list(tensors.values()))
    layout = _layout(dims, tensors, len(arguments), results)
    kernel = _kernel(text, plan.kinds, torch.get_default_dtype(), chosen, layout)
    pointers = [*(int(a) if isinstance(a := arguments[i], bool) else a for i in used), *results]
    if layout.outer_dims == 0:
        config = flat_config([*tensors.values(), *results])
        steps = [dims[-1][1][n] for n, i in enumerate(tensors) if layout.accesses[i].column == 2]  # type: ignore[union-attr]
        grid = (-(-y.numel() // config.block),)
        launch(kernel, grid, y.device, *pointers, y.numel(), *steps, BLOCK=config.block, num_warps=config.warps)
    else:
        _launch_tiles(kernel, pointers, tensors, layout, dims, y.device)


Dims = list[tuple[int, tuple[int, ...]]]  # (size, a stride for each tensor), the outermost dimension first


def _launch_tiles(
    kernel: Any, pointers: list[Any], tensors: dict[int, Tensor], layout: Layout, dims: Dims, device: torch.device
) -> None:
    *outer, (columns, steps) = dims
    group, values = columns, []
    accesses = [layout.accesses[i] for i in tensors]
    for n, access in enumerate(accesses):
        if access is not None and access.column == 1:
            group = unit(group, *(strides[n] for _, strides in outer))
    group = unit(group)
    for n, (i, access) in enumerate(zip(tensors, accesses, strict=True)):
        assert access is not None
        divisor = group if access.column == 1 else 1
        values += [strides[n] // divisor for moves, (_, strides) in zip(access.outer, outer, strict=True) if moves]
        values += [steps[n]] if access.column == 2 else []
        assert len(stride_names(i, access)) == sum(access.outer) + (access.column == 2)
    rows = math.prod(size for size, _ in outer)
    turned = any(steps[n] > 1 and outer[-1][1][n] == 1 for n in range(len(accesses)))
    config = SQUARE if turned else TILES
    width = min(config.columns, 1 << (columns - 1).bit_length())
    height = min(config.elements // width, 1 << (rows - 1).bit_length())
    grid = (-(-rows // height) * -(-columns // width),)
    sizes = [size for size, _ in outer[1:]]
    constants = {"UNIT": group, "ROWS": height, "COLUMNS": width, "num_warps": config.warps}
    launch(kernel, grid, device, *pointers, rows, columns // group, *sizes, *values, **constants)


def flat_config(tensors: Sequence[Tensor]) -> FlatConfig:
    """The parameters for a kernel that moves these."""
    element_bytes = sum(each.element_size() for each in tensors if each.dim())
    return next(config for config in FLAT if element_bytes <= config.element_bytes)


def _merged(y: Tensor, tensors: Sequence[Tensor]) -> Dims:
    """The dimensions in the order of y's memory, those merged that all tensors walk through as if they were one."""
    if all((t.shape == y.shape and t.is_contiguous()) or t.dim() == 0 for t in tensors) and y.is_contiguous():
        return [(y.numel(), tuple(int(t.dim() > 0) for t in tensors))]
    strides = [
        (0,) * (y.dim() - t.dim()) + tuple(s if n > 1 else 0 for n, s in zip(t.shape, t.stride(), strict=True))
        for t in tensors
    ]
    dims: Dims = []
    for d in sorted(range(y.dim()), key=y.stride, reverse=True):
        size, moves = y.shape[d], tuple(each[d] for each in strides)
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1], moves, strict=True)):
            dims[-1] = (dims[-1][0] * size, moves)
        else:
            dims.append((size, moves))
    return dims or [(1, (0,) * len(tensors))]


def _layout(dims: Dims, tensors: dict[int, Tensor], arguments: int, results: Sequence[Tensor]) -> Layout:
    accesses: list[Access | None] = [None] * arguments
    for n, i in enumerate(tensors):
        outer = tuple(strides[n] != 0 for _, strides in dims[:-1])
        accesses[i] = Access(outer, min(dims[-1][1][n], 2))
    spans = [sum((size - 1) * strides[n] for size, strides in dims) for n in range(len(tensors))]
    return Layout(tuple(accesses), wide=len(dims) > 1 and max(*spans, results[0].numel()) >= 2**31)


@functools.lru_cache(maxsize=4096)
def _source(
    text: str, kinds: tuple[Kind | None, ...], default: torch.dtype, chosen: tuple[int, ...], layout: Layout
) -> tuple[str, str]:
    """(source, name) of the kernel for some of a program's outputs."""
    plan = _plan(text, kinds, default)
    outputs = [plan.outputs[i] for i in chosen]
    source = source_of(outputs, [plan.results[i] for i in chosen], plan.types, kinds, layout)  # type: ignore[arg-type]
    return source, kernel_name(outputs)


@functools.lru_cache(maxsize=4096)
def _kernel(
    text: str, kinds: tuple[Kind | None, ...], default: torch.dtype, chosen: tuple[int, ...], layout: Layout
) -> Any:
    return compiled(*_source(text, kinds, default, chosen, layout))


# ---- registration ----------------------------------------------------------------------------------------------


@operator("fused")
def _fused(tensors: list[Tensor], numbers: list[bool | int | float], program: str) -> list[Tensor]:
    return _run(tensors, numbers, program)


@torch.library.register_fake("rooftop::fused")
def _(tensors: list[Tensor], numbers: list[bool | int | float], program: str) -> list[Tensor]:
    plan, arguments = _planned(tensors, numbers, program)
    like = next(each for each in arguments if isinstance(each, Tensor))
    shapes = [_shape(arguments, used) for used in plan.used]
    return [
        _empty(shape, _strides(shape, arguments, used), dtype, like)
        for shape, used, dtype in zip(shapes, plan.used, plan.results, strict=True)
    ]


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
    program = _program(text)
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
    program = _program(text)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(y for y in output if not y.is_floating_point()))
    tensor_of = dict(zip(_places(program, "t"), tensors, strict=True))
    ctx.wanted = tuple((i, t.dtype) for i, t in tensor_of.items() if t.requires_grad)
    floating = tuple((i, y.dtype) for i, y in enumerate(output) if y.is_floating_point())
    used = _gradients_of(text, floating, ctx.wanted).used
    ctx.save_for_backward(*(t if i in used else None for i, t in tensor_of.items()))
    ctx.numbers, ctx.text, ctx.count = numbers, text, len(tensors)
    ctx.likes = {i: (t.shape, t.device) for i, t in tensor_of.items() if t.requires_grad}


def _differentiate(ctx: Any, gradients: list[Tensor | None]) -> tuple[Any, ...]:
    program = _program(ctx.text)
    places = _places(program, "t")
    tensors = dict(zip(places, ctx.saved_tensors, strict=True))
    groups: list[dict[int, Tensor]] = []  # of one shape each: sums must not repeat smaller outputs
    for i, gradient in enumerate(gradients):
        if gradient is not None:
            group = next((each for each in groups if next(iter(each.values())).shape == gradient.shape), None)
            if group is None:
                groups.append(group := {})
            group[i] = gradient
    sums: dict[int, Tensor] = {}
    for outputs in groups:
        for i, gradient in _gradients(ctx, program, tensors, outputs).items():
            sums[i] = sums[i] + gradient if i in sums else gradient
    return [sums.get(i) for i in places], None if ctx.numbers else [], None


def _gradients(ctx: Any, program: _Program, tensors: dict[int, Tensor], given: dict[int, Tensor]) -> dict[int, Tensor]:
    """Gradients by argument, summed to its shape, from those of outputs of one shape."""
    plan = _gradients_of(ctx.text, tuple((i, g.dtype) for i, g in given.items()), ctx.wanted)
    computed = iter(())  # type: ignore[var-annotated]
    if plan.program:
        all_tensors = tensors | {len(program.kinds) + i: g for i, g in given.items()}
        numbers = [n for i, n in zip(_places(program, "n"), ctx.numbers, strict=True) if i in plan.used]
        computed = iter(_fused([all_tensors[i] for i in plan.used if i in all_tensors], numbers, plan.program))
    found = {}
    for (i, _), passed, there in zip(ctx.wanted, plan.passed, plan.there, strict=True):
        if there:
            shape, device = ctx.likes[i]
            found[i] = (next(computed) if passed is None else given[passed]).sum_to_size(shape).to(device)
    return found


def _places(program: _Program, kind: str) -> list[int]:
    """Numbers of the arguments of a kind."""
    return [i for i, each in enumerate(program.kinds) if each == kind]


differentiable("fused", _differentiate, _save)


@cost_of("rooftop::fused")
def _cost(call: Call) -> Cost:
    """Each operation once for each element of its operands' common shape: what is broadcast later is computed once."""
    plan, arguments = _planned(call["tensors"], call["numbers"], call["program"])
    flops: dict[str, int] = {}
    for node in topological(plan.outputs):
        if node.operands and OPERATIONS[node.operation].flops:
            used = [i for i in arguments_of([node]) if isinstance(arguments[i], Tensor)]
            elements = math.prod(_shape(arguments, used)) if used else 1
            precision = precision_of(plan.types[id(node)].common)
            flops[precision] = flops.get(precision, 0) + OPERATIONS[node.operation].flops * elements
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
        tensors: list[Tensor] = []
        numbers: list[Number] = []
        kinds = ""
        for i, each in enumerate(arguments):
            if isinstance(each, Tensor):
                if each.layout != torch.strided or each.dtype not in NAMES:
                    raise self._refusal(i, each)
                tensors.append(each)
                kinds += "t"
            elif isinstance(each, (bool, int, float)):
                numbers.append(each)
                kinds += "n"
            else:
                raise TypeError(f"fused: {self.names[i]} must be a tensor or a number, got {type(each).__name__}")
        if not 0 < len(tensors) <= MOST_TENSORS:
            raise ValueError(f"fused: expected 1 to {MOST_TENSORS} tensors, got {len(tensors)}")
        if _has_tangents(tensors):  # PyTorch's own operators have forward-mode derivatives
            return self.function(*arguments)
        autocast = " autocast" if _autocasts(tensors) else ""
        found = _fused(tensors, numbers, f"{kinds}{autocast}: {self.text}")
        return found[0] if self.single else tuple(found)

    def _refusal(self, i: int, given: Tensor) -> TypeError:
        if given.layout != torch.strided:
            return TypeError(f"fused: {self.names[i]} must be dense, got layout {given.layout}: use .to_dense()")
        return TypeError(f"fused: {self.names[i]} must have one of the dtypes {', '.join(DTYPES)}, got {given.dtype}")

    def source(self, *arguments: Argument, **keywords: Argument) -> str:
        """The Triton source of the kernel for such arguments (tensors may be on any device, `meta` too)."""
        values = self._bound(arguments, keywords)
        kinds = "".join("t" if isinstance(each, Tensor) else "n" for each in values)
        tensors = [each for each in values if isinstance(each, Tensor)]
        text = f"{kinds}: {self.text}"
        plan, bound = _planned(tensors, [each for each in values if not isinstance(each, Tensor)], text)
        shape = _shape(bound, plan.used[0])
        y = _empty(shape, _strides(shape, bound, plan.used[0]), plan.results[0], tensors[0].to("meta"))
        of = {i: bound[i] for i in sorted(plan.used[0]) if isinstance(bound[i], Tensor)}
        layout = _layout(_merged(y, list(of.values())), of, len(bound), [y])
        same = tuple(i for i, used in enumerate(plan.used) if _shape(bound, used) == shape)
        return _source(text, plan.kinds, torch.get_default_dtype(), same, layout)[0]

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


def _has_tangents(tensors: Sequence[Tensor]) -> bool:
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


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


def add(input: Tensor, other: Argument, *, alpha: Number = 1) -> Tensor:
    """input + alpha * other, broadcast; arguments, dtypes and errors as of `torch.add`."""
    if type(alpha) is int and alpha == 1:
        return _ADD(input, other)
    return _ADD_SCALED(input, other, alpha)


def axpy(a: Argument, x: Tensor, y: Argument) -> Tensor:
    """a * x + y, broadcast, rounded once; `a` a number or a tensor."""
    return _AXPY(x, y, a)


def mul(input: Tensor, other: Argument) -> Tensor:
    """input * other, broadcast, as `torch.mul`."""
    return _MUL(input, other)


def relu(input: Tensor) -> Tensor:
    """max(input, 0), as `torch.relu`."""
    return _RELU(input)


def sigmoid(input: Tensor) -> Tensor:
    """1 / (1 + exp(-input)), as `torch.sigmoid`."""
    return _SIGMOID(input)


def tanh(input: Tensor) -> Tensor:
    """As `torch.tanh`."""
    return _TANH(input)


def silu(input: Tensor) -> Tensor:
    """input * sigmoid(input), as `torch.nn.functional.silu`."""
    return _SILU(input)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """As `torch.nn.functional.gelu`; approximate: "none" or "tanh".

    Raises:
        ValueError: another approximation.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"gelu: approximate must be 'none' or 'tanh', got {approximate!r}")
    return _GELU(input) if approximate == "none" else _GELU_TANH(input)
