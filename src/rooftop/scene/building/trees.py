"""Build the tree over the groups: eight children per node, the root first.

The groups of a level of detail are packed along Morton's curve, eight to a node; these nodes are packed in the same
way, and so on. So each level of detail has its own tree, as in Nanite. The roots of these trees are packed in the same
way, up to a single root. A node's error is the largest error of its groups, and culling visits the children of a node
whose error is too large. If nodes mixed groups of all levels, the coarse groups would make nearly every error too
large, so culling would visit nearly all nodes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building.orders import morton_codes
from rooftop.scene.building.ragged import starts_of
from rooftop.scene.building.spheres import around_spheres

Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint32]

_AT = layouts.CHILD_AT


def tree(leaves: Words, levels: Ints) -> tuple[Words, int]:
    """Build the tree; return its nodes (N, NODE_CHILDREN, CHILD_WORDS), and the number of nodes on the longest path
    from the root to a leaf.

    Args:
        leaves: (G, CHILD_WORDS), the child entry of each group.
        levels: (G,) level of detail of each group.
    """
    nodes: list[Words] = []  # nodes in order of creation: children before their parents
    roots = []
    for level in np.unique(levels)[::-1]:
        items = leaves[levels == level]
        items = items[np.argsort(morton_codes(_centers(items)), kind="stable")]
        while len(items) > 1:
            items = _packed(items, nodes)
        roots.append(items)
    items = np.concatenate(roots)  # from the coarsest level to the finest
    while len(items) > 1:
        items = _packed(items, nodes)
    if items.view(np.int32)[0, layouts.CHILD_KIND] != layouts.INNER:
        _packed(items, nodes)  # the mesh has a single group, which needs a node above it
    return _from_root(np.concatenate(nodes))


def _centers(items: Words) -> npt.NDArray[np.float32]:
    return items.view(np.float32)[:, layouts.CHILD_CENTER : layouts.CHILD_CENTER + 3]


def _packed(items: Words, nodes: list[Words]) -> Words:
    """Create tree nodes over consecutive items, and append the nodes to `nodes`. Return an entry for each new node, as
    the items of the next higher tree level."""
    many = -(-len(items) // layouts.NODE_CHILDREN)
    made = np.zeros((many * layouts.NODE_CHILDREN, layouts.CHILD_WORDS), np.uint32)
    made[: len(items)] = items
    number = sum(len(each) for each in nodes)
    nodes.append(made.reshape(many, layouts.NODE_CHILDREN, layouts.CHILD_WORDS))

    counts = np.full(many, layouts.NODE_CHILDREN)
    counts[-1] = len(items) - layouts.NODE_CHILDREN * (many - 1)
    starts = starts_of(counts)[:-1]
    reals = items.view(np.float32)
    center, half = _centers(items).astype(np.float64), reals[:, layouts.CHILD_HALF : layouts.CHILD_HALF + 3]
    low = np.minimum.reduceat(center - half, starts)
    high = np.maximum.reduceat(center + half, starts)
    above = np.zeros((many, layouts.CHILD_WORDS), np.uint32)
    above_reals = above.view(np.float32)
    set_box(above, low, high)
    sphere = slice(layouts.CHILD_SPHERE, layouts.CHILD_SPHERE + 4)
    above_reals[:, sphere] = around_spheres(reals[:, sphere], counts)
    above_reals[:, layouts.CHILD_ERROR] = np.maximum.reduceat(reals[:, layouts.CHILD_ERROR], starts)
    above.view(np.int32)[:, layouts.CHILD_KIND] = layouts.INNER
    above[:, _AT] = np.arange(many) + number
    return above


def set_box(children: Words, low: npt.NDArray[np.float64], high: npt.NDArray[np.float64]) -> None:
    """Write boxes into child entries, as centre and half size in float32, rounded such that they still enclose
    everything.

    Args:
        children: (N, CHILD_WORDS) the entries.
        low, high: (N, 3) lowest and highest corner of each box.
    """
    reals = children.view(np.float32)
    center = ((low + high) / 2).astype(np.float32)
    half = np.maximum(high - center, center - low).astype(np.float32)
    reals[:, layouts.CHILD_CENTER : layouts.CHILD_CENTER + 3] = center
    reals[:, layouts.CHILD_HALF : layouts.CHILD_HALF + 3] = np.nextafter(half, np.float32(np.inf))


def _from_root(nodes: Words) -> tuple[Words, int]:
    """Renumber the nodes breadth-first from the root, which was created last; also return the depth."""
    order: list[Ints] = []
    level = np.array([len(nodes) - 1])
    while len(level):
        order.append(level)
        children = nodes[level].reshape(-1, layouts.CHILD_WORDS)
        level = children[children.view(np.int32)[:, layouts.CHILD_KIND] == layouts.INNER, _AT].astype(np.int64)
    chosen = np.concatenate(order)
    renumbered = np.empty(len(nodes), np.uint32)
    renumbered[chosen] = np.arange(len(chosen))
    nodes = nodes[chosen]
    inner = nodes.view(np.int32)[:, :, layouts.CHILD_KIND] == layouts.INNER
    nodes[inner, _AT] = renumbered[nodes[inner, _AT]]
    return nodes, len(order)
