"""Differentiate elementwise expressions. The derivative is again an expression, which runs as one kernel."""

from __future__ import annotations

from collections.abc import Sequence

from rooftop.kernels.elementwise.expressions import OPERATIONS, Expression, argument, topological


def derivatives(
    outputs: Sequence[Expression], gradients: Sequence[Expression], wanted: Sequence[int]
) -> tuple[list[Expression | None], list[bool]]:
    """Return the gradients of sum(outputs * gradients) with respect to the arguments `wanted`, and whether each
    gradient is 0 everywhere. An argument that has no gradient, or a gradient of 0 everywhere, gets None.

    The gradients have the shape of the outputs: the caller must sum the gradient of a broadcast argument. The function
    traverses the tree from the outputs, and visits only nodes that depend on the wanted arguments.
    """
    nodes = topological(outputs)
    depends: set[int] = set()
    for node in nodes:
        is_wanted = node.operation == "argument" and node.value in wanted
        if is_wanted or any(id(each) in depends for each in node.operands):
            depends.add(id(node))
    found: dict[int, Expression] = {}
    flat: set[int] = set()  # nodes with a gradient of 0

    def add(node: Expression, gradient: Expression) -> None:
        found[id(node)] = found[id(node)] + gradient if id(node) in found else gradient

    for output, gradient in zip(outputs, gradients, strict=True):
        add(output, gradient)
    for node in reversed(nodes):
        operation = OPERATIONS[node.operation] if node.operands else None
        if operation is None or id(node) not in depends or not (id(node) in found or id(node) in flat):
            continue
        if operation.flat:
            flat.update(map(id, node.operands))
        elif operation.gradients is not None:
            slope = found.get(id(node))
            parts = operation.gradients(node if slope is None else slope, node, *node.operands)
            for operand, part in zip(node.operands, parts, strict=True):
                if part is None or id(operand) not in depends:
                    continue
                if slope is None:
                    flat.add(id(operand))
                else:
                    add(operand, part)
    places = [id(argument(number)) for number in wanted]
    return [found.get(place) for place in places], [place in flat and place not in found for place in places]
