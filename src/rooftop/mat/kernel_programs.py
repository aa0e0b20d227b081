"""Run an expression or a conversion on a GPU as one kernel of `rooftop.kernels`.

Every Mat is read once, with any strides, and the result is written once; intermediate values stay in registers. A
kernel is generated for each form of expression (its operations and types), and reused for other numbers and for other
Mats of the same layout.

Between two evaluations of one form with the same numbers, on Mats of the same layout, only addresses differ. So the
launch is cached and reused. Without the cache, the host would take several times as long as the GPU for small images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.kernels.elementwise.stores import Stored, row_of, store_fused
from rooftop.kernels.operands.strided_rows import LINE_BYTES
from rooftop.mat.conversions import Scaling
from rooftop.mat.copies import apart, end_of
from rooftop.mat.element_programs import ConversionProgram, ElementProgram, conversion_program, signed
from rooftop.mat.expressions import MatExpr
from rooftop.mat.planning import ExpressionPlan, Form, form_of
from rooftop.mat.remembered import remember
from rooftop.mat.type_codes import CV_Bool

_MOST_LAUNCHES = 4096
_launches: dict[Form, Launched] = {}
_conversions: dict[Form, Stored] = {}


class Launched(NamedTuple):
    """The cached launch for one form of expression, its numbers, and one layout of each Mat and of the target.

    Attributes:
        stored: the cached launch.
        spans: bytes from the first element to the end of the last, for the Mats and the target.
        alike: for each Mat, whether its strides and dtype equal the target's. If such a Mat begins at the target's
            address, both have exactly the same elements.
    """

    stored: Stored
    spans: tuple[int, ...]
    alike: tuple[bool, ...]

    def again(self, addresses: Sequence[int]) -> bool:
        """Launch the cached kernel for inputs and a target at these addresses, the target's last. If the target
        overlaps an input, so that writes could change unread elements, do not launch, and return False.
        """
        target = addresses[-1]
        end = target + self.spans[-1]
        for address, span, alike in zip(addresses, self.spans, self.alike, strict=False):
            if address < end and target < address + span and not (alike and address == target):
                return False
        return self.stored.again(addresses)


class Evaluation:
    """An expression to be computed into a target.

    Args:
        nodes: nodes of the expression, in topological order.
        target: the output tensor, (..., channels); it has at least one element.
        depth: depth of the target's numbers.

    Raises:
        RuntimeError: a Mat is mapped to the host.
    """

    def __init__(self, nodes: Sequence[MatExpr], target: Tensor, depth: int) -> None:
        headers = [each._value[0] for each in nodes if each._operation == "mat"]
        self.addresses = [*[each._address() for each in headers], target.data_ptr()]
        begins = tuple([address % LINE_BYTES for address in self.addresses])
        lie = (target.shape, target.stride(), target.device, tuple([each._steps for each in headers]), begins)
        self.key: Form = (form_of(nodes, depth), lie, torch.get_default_dtype())

    def again(self) -> bool:
        """Launch the cached kernel of this evaluation. Return False if none is cached, or if the target overlaps an
        input and has other elements; the caller then calls `run`.
        """
        found = _launches.get(self.key)
        return found is not None and found.again(self.addresses)

    def run(self, plan: ExpressionPlan, tensors: Sequence[Tensor], target: Tensor) -> None:
        """Compute the expression, and cache the launch.

        Args:
            plan: the plan of the expression.
            tensors: tensors of the plan's leaves, (..., channels).
            target: a tensor with the plan's depth.
        """
        read = [apart(each, target) for each in tensors]
        stored = _run(plan.elements_in_registers, read, target, plan.depth)
        if stored is not None and all(one is other for one, other in zip(read, tensors, strict=True)):
            spans = tuple(end_of(each) - each.data_ptr() for each in (*tensors, target))
            alike = tuple(each.stride() == target.stride() and each.dtype == target.dtype for each in tensors)
            remember(_launches, self.key, Launched(stored, spans, alike), _MOST_LAUNCHES)


def run_conversion(source: Tensor, target: Tensor, depth: int, new_depth: int, scaling: Scaling | None) -> None:
    """Convert elements of one depth to another. They must not overlap, unless they are the same elements."""
    addresses = [source.data_ptr(), target.data_ptr()]
    begins = (addresses[0] % LINE_BYTES, addresses[1] % LINE_BYTES)
    key = (depth, new_depth, repr(scaling), target.shape, target.stride(), source.stride(), begins, target.device)
    found = _conversions.get(key)
    if found is not None and found.again(addresses):
        return
    stored = _run(conversion_program(depth, new_depth, scaling, for_kernel=True), [source], target, new_depth)
    if stored is not None:
        remember(_conversions, key, stored, _MOST_LAUNCHES)


def _run(
    program: ElementProgram | ConversionProgram, tensors: Sequence[Tensor], target: Tensor, depth: int
) -> Stored | None:
    rows = [row_of(numbers, program.rows_dtype) for numbers in program.rows]
    into = target if depth == CV_Bool else signed(target)
    return store_fused(program.program, [signed(each) for each in tensors], program.numbers, into, rows)
