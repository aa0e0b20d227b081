"""Generate the Triton source of one kernel from an elementwise expression, given dtypes and a class of memory layouts.

A kernel has one of two forms. The flat form computes one index, which it uses for all tensors. The tiled form has rows
and columns; it is for broadcast or strided tensors, and for results that are summed. A class of memory layouts states
along which dimensions each tensor has a nonzero stride, and which tensors are contiguous. Sizes and strides are
arguments of the kernel.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rooftop.kernels.elementwise.expression_types import NUMBER, Kind, Types, computed_in, summand, wrapped
from rooftop.kernels.elementwise.expressions import (
    DTYPES,
    NAMES,
    OPERATIONS,
    Expression,
    arguments_of,
    text_of,
    topological,
)
from rooftop.kernels.operands.dtypes import HALVES


@dataclass(frozen=True)
class Access:
    """How a kernel steps through a tensor's memory.

    Attributes:
        outer: for each dimension except the last, whether the tensor's stride is nonzero.
        column: code of the stride along the last dimension. 0: the stride is 0; 1: the stride is 1; 2: the stride is
            larger; 3: the argument consists of `period` numbers, such as one per channel, which repeat along the
            dimension. For code 3 the kernel reads a table with one row for each of the numbers: row p repeats all
            numbers, beginning with number p. A block that starts at number p reads row p
            (`operands/repeating_numbers.py`).
    """

    outer: tuple[bool, ...]
    column: int
    period: int = 0


@dataclass(frozen=True)
class Layout:
    """The class of memory layouts that a kernel supports.

    Attributes:
        accesses: one `Access` for each argument (over the merged dimensions); None for a number or an unused argument.
        wide: whether offsets need 64 bits.
        sums: for each output, what a program adds up: "rows" (one sum for each column), "columns" (one sum for each
            row), or "" for no sum. A program that adds up rows loops over several tiles with the same columns.
        stored: layout of a result in the caller's memory (`stores.py`).
        lines: for a kernel of `stores.py`, whether each program computes elements of one row instead of a tile.
    """

    accesses: tuple[Access | None, ...]
    wide: bool
    sums: tuple[str, ...] = ()
    stored: Access | None = None
    lines: bool = False

    @property
    def outer_dims(self) -> int:
        return next(len(each.outer) for each in self.accesses if each is not None)


def source_of(
    outputs: Sequence[Expression], results: Sequence[torch.dtype], types: Types, kinds: Sequence[Kind], layout: Layout
) -> str:
    """The source of a module whose kernel is named `kernel_name(outputs)`.

    Args:
        outputs: expression trees whose values all have the same shape.
        results: the dtypes in which the outputs are stored.
        types: the types of all nodes.
        kinds: dtype and rank of each argument.
        layout: the layouts of the arguments.
    """
    body = Body(types, layout, precise=not all(dtype in HALVES for dtype in results))
    used = arguments_of(outputs)
    names = [f"a{i}" for i in used] + [f"y{i}" for i in range(len(outputs))]
    numbers = [f"a{i}" for i in used if kinds[i].rank == NUMBER]
    write = _flat if layout.outer_dims == 0 else _tiles
    return module_of(write(body, outputs, results, names, numbers, used))


def module_of(lines: Sequence[str]) -> str:
    """The source of a module: imports, followed by the given lines. The imports include the functions of
    `operands/triton_kernels/scalars.py` that the lines call.
    """
    called = set(re.findall(r"\b\w+(?=\()", "\n".join(lines)))
    helpers = ", ".join(name for name in _HELPERS if name in called)
    imported = [f"from rooftop.kernels.operands.triton_kernels.scalars import {helpers}"] if helpers else []
    return "\n".join(["import triton", "import triton.language as tl", *imported, "", "", *lines]) + "\n"


def kernel_name(outputs: Sequence[Expression]) -> str:
    """The kernel's name, which profiles show: for example, fused_mul_sigmoid_add."""
    names = dict.fromkeys(n.operation for n in topological(outputs) if n.operands)
    return "_".join(["fused", *[name for name in names if name not in ("common", "base")][-5:]])


def compiled(source: str, name: str) -> Any:
    """The Triton kernel compiled from a source; Triton reads the source again through `linecache`."""
    file = f"<rooftop {name} {abs(hash(source)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": "rooftop.kernels.fused_kernels"}
    exec(compile(source, file, "exec"), module)
    return module[name]


# ---- the two forms -----------------------------------------------------------------------------------------------


def _flat(
    body: Body, outputs: Sequence[Expression], results: Sequence[torch.dtype], names: list[str], numbers: list[str],
    used: list[int],
) -> list[str]:  # fmt: skip
    """Source lines of the flat kernel, in which an element has the same index in all tensors, and of the function that
    this kernel calls to compute one block of elements."""
    steps = [f"a{i}_step" for i in used if (access := body.layout.accesses[i]) and access.column == 2]
    arguments = ", ".join([*names, "elements", *steps])
    for i in used:
        access = body.layout.accesses[i]
        if access is None:
            continue
        places = {0: f"a{i}", 1: f"a{i} + start + lane", 2: f"a{i} + (start + lane) * a{i}_step"}
        body.load(i, places[access.column], "inside" if access.column else "None")
    stores = body.stores(outputs, results, "start + lane", "inside")
    return flat_kernel(kernel_name(outputs), arguments, numbers, text_of(outputs), [*body.lines, *stores])


def flat_kernel(name: str, arguments: str, numbers: list[str], says: str, lines: Sequence[str]) -> list[str]:
    """The source lines of the function that computes one block, and of the kernel that calls this function with or
    without a mask.

    Args:
        arguments: the arguments of function and kernel, separated by commas, including `elements`.
        numbers: the arguments that are plain numbers.
        says: docstring of the kernel.
    """
    return [
        *block_function(arguments, lines),
        f"@triton.jit(do_not_specialize={numbers})",
        f"def {name}({arguments}, BLOCK: tl.constexpr):",
        f'    """{says}"""',
        "    start = tl.program_id(0).to(tl.int64) * BLOCK",
        *(f"    {line}" for line in calls_of_block(arguments)),
    ]


def block_function(arguments: str, lines: Sequence[str]) -> list[str]:
    """Source lines of a Triton function `block`, which computes up to BLOCK elements beginning at index `start`.
    `lines` compute these elements. The name `elements` in the source is the total number of elements.
    """
    return [
        "@triton.jit",
        f"def block({arguments}, start, BLOCK: tl.constexpr, FULL: tl.constexpr):",
        "    lane = tl.arange(0, BLOCK)",
        "    inside = lane >= 0 if FULL else start + lane < elements",
        *(f"    {line}" for line in lines),
        "",
        "",
    ]


def calls_of_block(arguments: str) -> list[str]:
    """The lines that call the block function."""
    return [
        "if start + BLOCK <= elements:  # no mask: the widest loads, whatever divides the number of elements",
        f"    block({arguments}, start, BLOCK, True)",
        "else:",
        f"    block({arguments}, start, BLOCK, False)",
    ]


def _tiles(
    body: Body, outputs: Sequence[Expression], results: Sequence[torch.dtype], names: list[str], numbers: list[str],
    used: list[int],
) -> list[str]:  # fmt: skip
    """Source lines of the tiled kernel, whose programs compute tiles of rows and columns."""
    layout = body.layout
    dims = layout.outer_dims
    sizes = [f"size{d}" for d in range(1, dims)]  # sizes of the outer dimensions except the first
    accesses = {i: access for i in used if (access := layout.accesses[i])}
    strides = [name for i, access in accesses.items() for name in stride_names(i, access)]

    def stride(number: int, dim: int) -> str:
        name = f"a{number}_stride{dim}"
        return f"({name} * UNIT)" if accesses[number].column == 1 else name

    for i, access in accesses.items():
        terms = [f"a{i}"]
        rows = " + ".join(f"index{d} * {stride(i, d)}" for d in range(dims) if access.outer[d])
        terms += [f"({rows})[:, None]"] if rows else []
        terms += {0: [], 1: ["column[None, :]"], 2: [f"(column * a{i}_step)[None, :]"]}[access.column]
        mask = {(True, True): "inside", (True, False): "(row < rows)[:, None]"}.get(
            (bool(rows), access.column > 0), "(column < columns)[None, :]" if access.column else "None"
        )
        body.load(i, " + ".join(terms), mask)
    stores = body.stores(outputs, results, "row[:, None] * columns + column[None, :]", "inside")
    down = [i for i, over in enumerate(layout.sums) if over == "rows"]
    arguments = ", ".join([*names, "rows", "units", *(["steps"] if down else []), *sizes, *strides])
    wide = ".to(tl.int64)" if layout.wide else ""
    indices = index_lines(dims, [d for d in range(dims) if any(access.outer[d] for access in accesses.values())])
    return [
        f"@triton.jit(do_not_specialize={numbers})",
        f"def {kernel_name(outputs)}({arguments}, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):",
        f'    """{text_of(outputs)}"""',
        *columns_of_tile(wide),
        *_rows(
            ["inside = (row < rows)[:, None] & (column < columns)[None, :]", *indices, *body.lines, *stores], down, wide
        ),
    ]


def index_lines(dims: int, needed: Sequence[int]) -> list[str]:
    """Source lines that turn a row number into the row's index along each outer dimension in `needed`. `dims`: the
    number of outer dimensions, which are all merged dimensions except the last.
    """
    divided = {d: "".join(f" // size{later}" for later in range(dims - 1, d, -1)) for d in needed}
    return [f"index{d} = row{by}" + (f" % size{d}" if d else "") for d, by in divided.items()]


def columns_of_tile(wide: str) -> list[str]:
    """Lines of a tiled kernel that compute a program's columns."""
    return [
        "    columns = units * UNIT",
        "    blocks = tl.cdiv(columns, COLUMNS)",
        "    part, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks",
        f"    column = block{wide} * COLUMNS + tl.arange(0, COLUMNS)",
    ]


def _rows(lines: list[str], down: list[int], wide: str) -> list[str]:
    """Prepend the computation of row indices to the lines that compute a tile. If outputs are summed over rows, put all
    these lines in a loop over the program's tiles, followed by the lines that store the sums.
    """
    if not down:
        return [f"    {line}" for line in [f"row = part{wide} * ROWS + tl.arange(0, ROWS)", *lines]]
    return [
        *(f"    sum{i} = tl.zeros((ROWS, COLUMNS), tl.float32)" for i in down),
        "    parts = tl.num_programs(0) // blocks",
        "    for step in range(steps):  # all programs together walk through memory in order",
        f"        row = (step * parts + part){wide} * ROWS + tl.arange(0, ROWS)",
        *(f"        {line}" for line in lines),
        *(
            f"    tl.store(y{i} + part{wide} * columns + column, tl.sum(sum{i}, 0), mask=column < columns)"
            for i in down
        ),
    ]


def stride_names(number: int, access: Access) -> list[str]:
    """Names of the strides that the tiled kernel takes for argument `number`: first those of the outer dimensions, then
    that of the columns.
    """
    outer = [f"a{number}_stride{d}" for d, moves in enumerate(access.outer) if moves]
    return outer + ([f"a{number}_step"] if access.column == 2 else [])


# ---- one line for each node ----------------------------------------------------------------------------------------


class Body:
    """Generates the source lines of a kernel that load its arguments and compute the nodes of its expression trees."""

    def __init__(self, types: Types, layout: Layout, precise: bool) -> None:
        self.types, self.layout, self.precise = types, layout, precise
        self.lines: list[str] = []
        self.names: dict[int, str] = {}

    def load(self, number: int, place: str, mask: str) -> None:
        masked = "" if mask == "None" else f", mask={mask}"
        self.lines.append(f"x{number} = tl.load({place}{masked})")

    def stores(self, outputs: Sequence[Expression], results: Sequence[torch.dtype], place: str, mask: str) -> list[str]:
        sums = self.layout.sums or ("",) * len(outputs)
        outputs = [summand(each, self.types) if over else each for each, over in zip(outputs, sums, strict=True)]
        for node in topological(outputs):
            if node.operands:
                value = self._value_of(node)
                self.names[id(node)] = f"v{len(self.names)}"
                self.lines.append(f"{self.names[id(node)]} = {value}")
        return [
            self._store(i, self._operand(output, torch.float32 if over else dtype), over, place, mask)
            for i, (output, dtype, over) in enumerate(zip(outputs, results, sums, strict=True))
        ]

    @staticmethod
    def _store(number: int, value: str, over: str, place: str, mask: str) -> str:
        if not over:
            return f"tl.store(y{number} + {place}, {value}, mask={mask})"
        if over == "rows":
            return f"sum{number} += tl.where({mask}, {value}, 0.0)"
        return f"tl.store(y{number} + row * blocks + block, tl.sum(tl.where({mask}, {value}, 0.0), 1), mask=row < rows)"

    def _value_of(self, node: Expression) -> str:
        """The source text that computes a node from its operands."""
        typed = self.types[id(node)]
        typing, common = OPERATIONS[node.operation].typing, typed.common
        if typing in DTYPES:
            rounded = self._operand(node.operands[0], common)
            return rounded if computed_in(common) == common else f"({rounded}).to({_tl(computed_in(common))})"
        compute = computed_in(common)
        if typing == "where":
            condition, *rest = node.operands
            operands = [self._operand(condition, torch.bool), *(self._operand(each, compute) for each in rest)]
        elif typing == "compared":
            compute = torch.int8 if compute == torch.bool else compute
            operands = [self._operand(each, compute, rounded_to=common) for each in node.operands]
        else:
            operands = [self._operand(each, compute) for each in node.operands]
        # Triton itself converts a plain number to float32 if another operand is a tensor, so tl.full is not needed.
        if compute == torch.float32 and node.operation != "pow":
            plain = [_plain(each, text) for each, text in zip(node.operands, operands, strict=True)]
            if sum(a != b for a, b in zip(plain, operands, strict=True)) < min(2, len(operands)):
                operands = plain
        if common == torch.bool and node.operation in _OF_BOOLS:
            template = _OF_BOOLS[node.operation]
        elif not common.is_floating_point and node.operation in ("floor", "ceil", "trunc", "round"):
            template = "{0}"
        elif node.operation == "neg" and common.is_floating_point:
            template = "{0} * -1.0"  # Triton computes -x as 0 - x, which gives 0.0 instead of -0.0 for 0.0
        elif node.operation == "div" and common == torch.float64:
            template = "{0} / {1}"  # in float64, `/` rounds correctly
        else:
            template = _TEMPLATES[node.operation]
        ones = _literal(255 if common == torch.uint8 else -1, common) if "{ones}" in template else ""
        return template.format(*operands, precise=self.precise, ones=ones)

    def _operand(self, node: Expression, dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> str:
        """The source text of a node's value, cast to `dtype`. If `rounded_to` is a half-precision dtype, scalars are
        first rounded to it, as PyTorch does before a comparison. Tensors are not rounded.
        """
        half = rounded_to if rounded_to in HALVES else None
        if node.operation == "constant":
            value = node.value
            assert value is not None
            if half is not None:
                value = torch.tensor(float(value), dtype=half, device="cpu").item()
            return _literal(value, dtype)
        if node.operation == "argument":
            kind = self.types[id(node)].kind
            if kind.rank == NUMBER:
                if kind.dtype == torch.bool:  # the kernel gets a bool as an integer
                    text = f"(a{node.value} != 0)"
                else:
                    text = f"tl.cast(a{node.value}, {_tl(kind.dtype)})"
                if half is not None:
                    return f"{text}.to({_tl(half)}).to({_tl(dtype)})"
                return text if kind.dtype == dtype else _cast(text, kind.dtype, dtype)
            return f"x{node.value}" if kind.dtype == dtype else _cast(f"x{node.value}", kind.dtype, dtype)
        has = self.types[id(node)].inside
        return self.names[id(node)] if has == dtype else _cast(self.names[id(node)], has, dtype)


def _plain(node: Expression, text: str) -> str:
    """The number in a text such as `tl.full((), number, dtype)` of a constant; the text itself for all other nodes."""
    return text.split(", ")[1] if node.operation == "constant" and text.startswith("tl.full") else text


def _cast(text: str, has: torch.dtype, dtype: torch.dtype) -> str:
    """The text that casts a value to a dtype; the cast to bool compares with 0."""
    if dtype == torch.float64 and has in _UP_TO_32_BITS:
        return f"double_of({text})"
    return f"({text} != 0)" if dtype == torch.bool else f"{text}.to({_tl(dtype)})"


_UP_TO_32_BITS = (torch.uint8, torch.int8, torch.int16, torch.int32)


def _literal(value: int | float | bool, dtype: torch.dtype) -> str:
    """The source text of a number in a dtype. An integer out of the dtype's range wraps around."""
    if not dtype.is_floating_point:
        number = int(value) if dtype == torch.bool else wrapped(int(value), dtype)
        return f"tl.full((), {number}, {_tl(dtype)})"
    text = repr(float(value))
    return f"tl.full((), {text if text[-1].isdigit() else f'float({text!r})'}, {_tl(dtype)})"


def _tl(dtype: torch.dtype) -> str:
    """Triton's name for a dtype."""
    return "tl.int1" if dtype == torch.bool else f"tl.{NAMES[dtype]}"


_OF_BOOLS = {
    "add": "{0} | {1}",
    "mul": "{0} & {1}",
    "maximum": "{0} | {1}",
    "minimum": "{0} & {1}",
    "clamp_min": "{0} | {1}",
    "clamp_max": "{0} & {1}",
    "scale": "{0} & {1}",
    "sign": "{0}",
    "bitwise_not": "({0} == 0)",
}
_TEMPLATES = {
    **{name: f"{{0}} {each.symbol} {{1}}" for name, each in OPERATIONS.items() if each.symbol and each.arity == 2},
    "common": "{0}",
    "base": "{0}",
    "scale": "{0} * {1}",
    "neg": "-{0}",
    "bitwise_not": "{0} ^ {ones}",
    "abs": "tl.abs({0})",
    "where": "tl.where({0}, {1}, {2})",
    "div": "quotient({0}, {1}, {precise})",
    "pow": "power({0}, {1}, {precise})",
    "sign": "sign({0})",
    "maximum": "largest({0}, {1})",
    "minimum": "smallest({0}, {1})",
    "clamp_min": "largest({0}, {1})",
    "clamp_max": "smallest({0}, {1})",
    "floor": "tl.floor({0})",
    "ceil": "tl.ceil({0})",
    "trunc": "truncated({0})",
    "round": "round_half_even({0})",
    "nearest": "nearest_integer({0})",
    "float64_of_bits": "({0}).to(tl.float64, bitcast=True)",
    "relu": "rectified({0})",
    "log": "tl.log({0})",
    "log2": "tl.log2({0})",
    "exp": "exponential({0}, {precise})",
    "expm1": "exponential_minus_1({0}, {precise})",
    "log1p": "logarithm_of_1_plus({0})",
    "sqrt": "square_root({0}, {precise})",
    "rsqrt": "tl.rsqrt({0})",
    "reciprocal": "quotient(1.0, {0}, {precise})",
    "sin": "tl.sin({0})",
    "cos": "tl.cos({0})",
    "tanh": "hyperbolic_tangent({0}, {precise})",
    "sigmoid": "logistic({0}, {precise})",
    "erf": "tl.erf({0})",
    "ndtr": "normal_distribution({0}, {precise})",
}
_HELPERS = (
    *("double_of", "nearest_integer"),
    *("exponential", "exponential_minus_1", "hyperbolic_tangent", "largest", "logarithm_of_1_plus", "logistic"),
    "normal_distribution",
    *("power", "quotient", "rectified", "round_half_even", "sign", "smallest", "square_root", "truncated"),
)
