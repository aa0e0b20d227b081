"""Trees of expressions, whose nodes may have several users, walked through without recursion."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Node = TypeVar("Node")


def topological(roots: Iterable[Node], operands_of: Callable[[Node], Sequence[Node]]) -> list[Node]:
    """All nodes under these, operands before what uses them, each once. Nodes are told apart by identity."""
    order: list[Node] = []
    done: set[int] = set()
    stack = list(roots)[::-1]
    while stack:
        node = stack[-1]
        waiting = [each for each in operands_of(node) if id(each) not in done]
        if waiting:
            stack += waiting[::-1]
            continue
        stack.pop()
        if id(node) not in done:
            done.add(id(node))
            order.append(node)
    return order
