"""Traverse expression trees without recursion; nodes may have several users."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

Node = TypeVar("Node")


def topological(roots: Iterable[Node], operands_of: Callable[[Node], Sequence[Node]]) -> list[Node]:
    """The given nodes and all their operands in topological order: each node once, after its operands. Nodes are
    compared by identity.
    """
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
