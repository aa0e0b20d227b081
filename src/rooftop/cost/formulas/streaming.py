"""The formula of most operators, which read and write their tensors once.

    read  = distinct bytes of the input tensors, except tensors whose shape alone is needed
    write = distinct bytes of the output tensors
    flops = constant × elements of the output or of a named argument + constant × elements of the output

For sparse tensors, only stored elements count, and `sparse_operands` counts the bytes.

So a family of operators is a table from operator to flops per element. By convention, addition, multiplication,
comparison and each transcendental function (also sigmoid and erf) take 1 flop. Moving, selecting (`where`) and
converting take 0 flops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from rooftop.cost.accounting import (
    Call,
    Cost,
    distinct_bytes,
    is_sparse,
    precision_of,
    stored_elements,
    tensors_in,
)
from rooftop.cost.formulas.sparse_operands import elementwise_bytes
from rooftop.cost.registry import Formula, cost_of

Flops = int | Callable[[Call], int]
"""Flops per element, or a function of the call if the flops depend on the call's arguments."""


def streaming(
    flops: Flops = 0, *, per: str | None = None, and_per_result: int = 0, unread: Iterable[str] = ()
) -> Formula:
    """A formula for an operator that reads its inputs once and writes its outputs once.

    Args:
        flops: flops for each element of `per`.
        per: the argument whose elements count (if it is a list, of all its tensors); None: the first result.
        and_per_result: additional flops for each element of the first result.
        unread: arguments whose values are not read, because only their shape is used or they are overwritten first.
    """
    unread = tuple(unread)

    def formula(call: Call) -> Cost:
        read, written = call.read_tensors_except(*unread), call.written_tensors
        sparse = [tensor for tensor in read if is_sparse(tensor)]
        count = 0
        if flops:
            # A sparse operand changes a dense result only at its stored elements.
            counted = call[per] if per is not None else call.results[0]
            counted = sparse if per is None and sparse and not is_sparse(written[0]) else counted
            count += (flops if isinstance(flops, int) else flops(call)) * elements(counted)
        if and_per_result:
            count += and_per_result * elements(call.results[0])
        if sparse or any(is_sparse(tensor) for tensor in written):
            read_bytes, write_bytes = elementwise_bytes(call, read, written)
        else:
            read_bytes, write_bytes = distinct_bytes(read), distinct_bytes(written)
        return Cost(read_bytes, write_bytes, arithmetic(count, (*read, *written)))

    return formula


def moved_once(call: Call, flops: Mapping[str, int]) -> Cost:
    """The cost of an operator that reads each of its inputs once and writes each of its outputs once."""
    return Cost(distinct_bytes(call.read_tensors), distinct_bytes(call.written_tensors), flops)


def each(names: str, flops: Flops) -> dict[str, Flops]:
    """Make a table {name: flops per element} in which all names of a text, separated by spaces, have the same flops."""
    return dict.fromkeys(names.split(), flops)


def cover(table: Mapping[str, Flops], make: Callable[[Flops], Formula] = streaming) -> None:
    """Register the aten operators of a table (name to flops per element) with the formulas that `make` returns."""
    for name, flops in table.items():
        cost_of(f"aten::{name}")(make(flops))


def aten(names: str) -> list[str]:
    """Schema names of aten operators, such as "aten::add", from a text of names separated by spaces."""
    return [f"aten::{name}" for name in names.split()]


def elements(value: Any) -> int:
    """Number of elements of a tensor (of a sparse tensor, the stored elements) or of all tensors in a list. A number
    counts as one element."""
    return 1 if isinstance(value, (bool, int, float, complex)) else sum(map(stored_elements, tensors_in(value)))


def requested(results: Sequence[Any], output_mask: Sequence[bool]) -> list[Any]:
    """The results that a mask requests. Some kernels also return tensors for other results; these are left out."""
    return [result for result, wanted in zip(results, output_mask, strict=False) if wanted]


def arithmetic(count: int, tensors: Iterable[Tensor | None]) -> dict[str, int]:
    """Flops outside matrix units: in fp64 if any tensor is fp64, and in fp32 if none is."""
    if not count:
        return {}
    precisions = {precision_of(tensor.dtype) for tensor in tensors if tensor is not None}
    return {"fp64" if "fp64" in precisions else "fp32": count}
