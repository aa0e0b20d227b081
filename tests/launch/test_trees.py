"""Nodes come after their operands, once each, from left to right, however deep the tree is."""

from __future__ import annotations

from rooftop.launch.trees import topological


class Node:
    def __init__(self, *operands: Node) -> None:
        self.operands = operands


def order(*roots: Node) -> list[Node]:
    return topological(roots, lambda node: node.operands)


def test_operands_come_first_and_from_left_to_right() -> None:
    c, d = Node(), Node()
    b = Node(d)
    a = Node(b, d)
    root = Node(a, b, c, a)
    assert order(root) == [d, b, a, c, root]


def test_of_several_roots_each_node_is_there_once() -> None:
    d = Node()
    b = Node(d)
    a = Node(b, d)
    assert order(b, a, b) == [d, b, a]
    assert order() == []


def test_depth_is_no_limit() -> None:
    chain = [Node()]
    while len(chain) < 100_000:
        chain.append(Node(chain[-1], chain[-1]))
    assert order(chain[-1]) == chain
    for node in reversed(chain):  # frees the tree without recursion
        node.operands = ()
