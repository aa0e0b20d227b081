"""Run expressions and conversions on the CPU as one loop, which Numba compiles and which reads every Mat once.

A loop is generated for each form of expression (its operations and types), and reused for other numbers and for other
Mats of the same layout. Compiling takes some tenths of a second. So a form is compiled only after `row_programs.py` has
spent about that much time on evaluating the form. The total time of a form is then at most about twice the time of the
better of two choices: to compile immediately, or never to compile.

Some expressions are not compiled: expressions with transposed Mats (neighbours along a row are not adjacent in memory),
with half precision (Numba lacks it on CPUs), with more Mats than the compiler checks for overlaps, with hundreds of
operations, or with small Mats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, product
from operator import mul
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rooftop.kernels.elementwise.expression_types import NUMBER, TENSOR, Kind, Types, types_of, wrapped
from rooftop.kernels.elementwise.expressions import DTYPES, OPERATIONS, Expression, topological
from rooftop.launch.numba_loops import compiled_loop, in_threads, memory_of, numba_works, run_part
from rooftop.mat.conversions import Scaling
from rooftop.mat.element_programs import ConversionProgram, ElementProgram, conversion_program, signed
from rooftop.mat.planning import ExpressionPlan
from rooftop.mat.remembered import remember
from rooftop.mat.row_programs import in_few_dims

PATIENCE_SECONDS = 0.3
"""Approximate compile time of 20 operations. A form is compiled when its row-by-row evaluations have together taken
this long."""
LEAST_COLUMNS = 32
MOST_OPERATIONS = 200
"""Maximum number of operations in one loop, because compile time grows superlinearly with this number."""
MOST_LOOPS = 512
"""Maximum number of compiled loops in a process. Each loop takes about a megabyte of memory."""
_MOST_ARRAYS = 7
# Numbers of a row: contiguous elements are cut into rows of about this length. A row of an operand with one number per
# channel repeats these numbers.
_ROW = 1 << 14
_LEAST_PER_THREAD = 1 << 18
_KNOWN = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float32, torch.float64)

Loop = Callable[..., None]
Form = tuple[Expression, tuple[Kind, ...], tuple[int, ...]]
"""The expression whose value a loop stores, the kinds of the expression's arguments, and, for each Mat and for the
target, the index of its array among the loop's distinct arrays."""
_MOST_FORMS = 1024
_spent: dict[Form, float] = {}  # seconds spent on row-by-row evaluation of forms that have no loop yet
_loops: dict[Form, Loop] = {}  # loops are never removed, because Numba does not free them


def run(plan: ExpressionPlan, tensors: Sequence[Tensor], target: Tensor) -> None:
    """Write an expression's value into the target by a loop, or row by row if there is no loop yet or none is possible.

    Args:
        tensors: tensors of the plan's leaves, (..., channels).
        target: the output, with the plan's depth. A tensor that overlaps it must have the same elements.
    """
    _run(lambda: plan.elements, tensors, target, lambda: plan.rows.run(tensors, target))


def run_conversion(
    source: Tensor, target: Tensor, depth: int, new_depth: int, scaling: Scaling | None, otherwise: Callable[[], None]
) -> None:
    """Convert elements of one depth to another by a loop; call `otherwise` if no loop exists yet or none can."""
    _run(lambda: conversion_program(depth, new_depth, scaling, for_kernel=False), [source], target, otherwise)


def _run(
    program_of: Callable[[], ElementProgram | ConversionProgram],
    tensors: Sequence[Tensor],
    target: Tensor,
    otherwise: Callable[[], None],
) -> None:
    views = in_few_dims([*(signed(each) for each in tensors), signed(target)])
    arrays, places = _distinct(views)
    narrow = views[0].dim() > 1 and views[0].shape[-1] < LEAST_COLUMNS
    if narrow or len(arrays) > _MOST_ARRAYS or any(x.dtype not in _KNOWN or x.stride(-1) != 1 for x in arrays):
        otherwise()
        return
    program = program_of()
    if program.operations > MOST_OPERATIONS:
        otherwise()
        return
    kinds = (
        *(Kind(x.dtype, TENSOR) for x in views[:-1]),
        *(Kind(program.rows_dtype, TENSOR) for _ in program.rows),
        *(Kind(torch.float64 if isinstance(n, float) else torch.int64, NUMBER) for n in program.numbers),
    )
    form = (program.result, kinds, places)
    loop = _loops.get(form)
    if loop is None:
        spent = _spent.get(form, 0.0)
        wait = spent < PATIENCE_SECONDS * max(1.0, program.operations / 20)
        if wait or len(_loops) >= MOST_LOOPS or not numba_works():
            began = perf_counter()
            otherwise()
            remember(_spent, form, spent + perf_counter() - began, _MOST_FORMS)
            return
        loop = compiled_loop(*source_of(form))
        _loops[form] = loop
    rows = [np.array(numbers, dtype=_NUMPY[program.rows_dtype]) for numbers in program.rows]
    run_loop(loop, arrays, rows, program.numbers, target.shape[-1])


def _distinct(views: Sequence[Tensor]) -> tuple[list[Tensor], tuple[int, ...]]:
    """The tensors without repetitions, and for each given tensor the index of its equal. Tensors are equal if address,
    strides and dtype are.
    """
    found: dict[Any, int] = {}
    arrays: list[Tensor] = []
    places = []
    for x in views:
        key = (x.data_ptr(), x.stride(), x.dtype)
        if key not in found:
            found[key] = len(arrays)
            arrays.append(x)
        places.append(found[key])
    return arrays, tuple(places)


def run_loop(
    loop: Loop, views: Sequence[Tensor], rows: Sequence[np.ndarray], numbers: Sequence[float], channels: int
) -> None:
    """Run a compiled loop over all elements of the views, in several threads if there are many.

    Args:
        views: a tensor for each array of the loop, all of one shape, contiguous along the last dimension.
        rows: the constant operands that have a number for each channel, (channels,) each.
        numbers: the constant operands that have one number for all channels.
        channels: the number of channels, which are interleaved along the last dimension.
    """
    flat = [memory_of(each) for each in views]
    threads = views[0].numel() // _LEAST_PER_THREAD

    def part(first: int, last: int) -> None:  # processes these elements as one row
        given = chain.from_iterable((x[first * channels :], 0) for x in flat)
        loop(0, 1, (last - first) * channels, *given, *numbers)

    if views[0].dim() == 1 and not rows:
        in_threads(part, views[0].numel() // channels, threads)
        return
    for offsets, count, columns, steps in _rectangles(views, channels):
        arrays = [x[offset:] for x, offset in zip(flat, offsets, strict=True)]
        repeated = [np.tile(row, columns // channels) for row in rows]
        given = [columns, *chain.from_iterable(zip(arrays, steps, strict=True)), *repeated, *numbers]
        in_threads(run_part(loop, given), count, threads)


def _rectangles(views: Sequence[Tensor], channels: int) -> Iterator[tuple[list[int], int, int, list[int]]]:
    """Divide the views into rectangles. Yield (offset of each view, number of rows, number of columns, row step of each
    view). A column is one number, so an element with 3 channels takes 3 columns; offsets and steps count numbers, too.
    """
    *outer, columns = views[0].shape
    if not outer:
        width = max(_ROW // channels, 1) * channels
        count = columns // width
        if count:
            yield [0] * len(views), count, width, [width] * len(views)
        if columns % width:
            yield [count * width] * len(views), 1, columns % width, [0] * len(views)
        return
    steps = [x.stride(-2) for x in views]
    for index in product(*map(range, outer[:-1])):
        offsets = [sum(map(mul, index, x.stride())) for x in views]
        yield offsets, outer[-1], columns, steps


# ---- source ----------------------------------------------------------------------------------------------------------


def source_of(form: Form) -> tuple[str, str, dict[str, Any]]:
    """Generate the source of the loop over rows and columns: (text, function name, values of its global names).

    The function takes the first row, the row after the last, the number of columns (the numbers in a row, channels
    interleaved), and the memory and row step of each array. Then it takes the constant operands. An operand with one
    number per channel is a row that repeats these numbers over all columns; any other operand is one number.
    """
    result, kinds, places = form
    types = types_of([result], kinds, autocast=False)
    count = len(places) - 1
    arrays = range(max(places) + 1)
    names = [f"row_{place}[j]" for place in places[:-1]]
    for n, kind in enumerate(kinds[count:]):
        names.append(f"numbers{n}[j]" if kind.rank == TENSOR else f"number{n}")
    constants: dict[str, Any] = {dtype.__name__: dtype for dtype in _NUMPY.values()} | {"rint": np.rint}
    lines = []
    written: dict[int, str] = {}
    for n, node in enumerate(topological([result])):
        if node.operation == "argument":
            written[id(node)] = names[int(node.value)]  # type: ignore[arg-type]
        elif node.operation != "constant":
            lines.append(f"            v{n} = {_text_of(node, written, types, constants)}")
            written[id(node)] = f"v{n}"
    given = [f"x{n}, step{n}" for n in arrays] + [name.removesuffix("[j]") for name in names[count:]]
    stored = written[id(result)]
    text = [
        f"def loop(first, last, columns, {', '.join(given)}):",
        "    for i in range(first, last):",
        *(f"        row_{n} = x{n}[i * step{n} : i * step{n} + columns]" for n in arrays),
        "        for j in range(columns):",
        *lines,
        f"            row_{places[-1]}[j] = {stored}",
    ]
    return "\n".join(text) + "\n", "loop", constants


def _text_of(node: Expression, written: dict[int, str], types: Types, constants: dict[str, Any]) -> str:
    """Generate the source of one operation. The source converts the operands to their common dtype, and the result to
    the dtype of the node."""
    common, dtype = types[id(node)].common, types[id(node)].kind.dtype
    if node.operation == "where":
        condition, *rest = node.operands
        a, b = (_operand(each, common, written, types, constants) for each in rest)
        return f"{a} if {written[id(condition)]} else {b}"
    if node.operation in DTYPES:
        (operand,) = node.operands
        return _operand(operand, dtype, written, types, constants)
    operands = [_operand(each, common, written, types, constants) for each in node.operands]
    symbol = OPERATIONS[node.operation].symbol
    if not symbol:
        text = _CALLS[node.operation].format(*operands)
    else:
        text = f"{symbol}{operands[0]}" if len(operands) == 1 else f"{operands[0]} {symbol} {operands[1]}"
    return text if dtype == torch.bool else f"{_NUMPY[dtype].__name__}({text})"


def _operand(
    node: Expression, dtype: torch.dtype, written: dict[int, str], types: Types, constants: dict[str, Any]
) -> str:
    if node.operation == "constant":
        assert node.value is not None
        value = float(node.value) if dtype.is_floating_point else wrapped(int(node.value), dtype)
        name = f"constant{len(constants)}"
        constants[name] = _NUMPY[dtype](value)
        return name
    text = written[id(node)]
    if types[id(node)].kind.dtype == dtype and node.operation != "argument":
        return text
    return f"({text} != 0)" if dtype == torch.bool else f"{_NUMPY[dtype].__name__}({text})"


_NUMPY: dict[torch.dtype, Any] = {dtype: getattr(np, str(dtype).removeprefix("torch.")) for dtype in _KNOWN}
_CALLS = {
    "round": "rint({})",
    "abs": "abs({})",
    "minimum": "{0} if {0} < {1} else {1}",
    "maximum": "{0} if {0} > {1} else {1}",
}
