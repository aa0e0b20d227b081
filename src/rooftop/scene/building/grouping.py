"""Choose the clusters to simplify together: groups of usually 8 to 32 neighbouring clusters that share many
vertices."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rooftop.scene import layouts
from rooftop.scene.building import meshopt
from rooftop.scene.building.orders import morton_codes
from rooftop.scene.building.ragged import numbered

Ints = npt.NDArray[np.int64]

LEAST, MOST = 8, 32
USUAL = 20  # clusters per group requested from meshoptimizer, which returns at most 11/8 as many: 27
GROUP_BYTES = layouts.PAGE_BYTES - 4 * (
    layouts.PAGE_WORDS + layouts.GROUP_WORDS + 1
)  # maximum bytes of a group's clusters, so that the group fits into a page of its own


def group(places: npt.NDArray[np.uint32], triangles: Ints, spheres: npt.NDArray[np.float32], sizes: Ints) -> Ints:
    """Assign each of C clusters to a group of clusters. Return the groups' numbers (C,), which follow Morton's curve.

    Args:
        places: (T, 3) places (vertex positions) of the corners of all triangles, cluster by cluster.
        triangles: (C,) number of triangles of each cluster.
        spheres: (C, 4) sphere around each cluster.
        sizes: (C,) bytes of each cluster's head and streams.
    """
    clusters = len(triangles)
    if clusters <= USUAL:
        parts = np.zeros(clusters, np.int64)
    else:
        counts = (3 * triangles).astype(np.uint32)
        different, numbers = numbered(places, int(places.max()) + 1)
        parts = meshopt.partition(numbers.ravel(), counts, len(different), USUAL).astype(np.int64)
        parts = _small_ones_joined(parts, spheres)
    return _divided(_along_curve(parts, spheres), sizes)


def _small_ones_joined(parts: Ints, spheres: npt.NDArray[np.float32]) -> Ints:
    """Join small parts (preliminary groups of fewer than LEAST clusters) with each other along Morton's curve. These
    parts are isolated bodies, and leftovers between full parts.

    If the last joined part is still small, it joins the part before it on the curve, of any size, or the part after it
    if it is the first. Simplified alone, it would not become fewer clusters.
    """
    sizes = np.bincount(parts)
    small = np.flatnonzero((sizes > 0) & (sizes < LEAST))
    if not len(small):
        return parts
    order = _in_order(parts, spheres)
    joined = np.arange(len(sizes))
    target, held = -1, MOST
    for part in order[np.isin(order, small)].tolist():
        size = int(sizes[part])
        if held + size > USUAL:
            target, held = part, 0
        joined[part] = target
        held += size
    parts = joined[parts]
    if held >= LEAST or len(np.unique(parts)) == 1:
        return parts
    order = _in_order(parts, spheres)
    at = int(np.flatnonzero(order == target)[0])
    return np.where(parts == target, order[at - 1 if at else 1], parts)


def _in_order(parts: Ints, spheres: npt.NDArray[np.float32]) -> Ints:
    """The numbers of all parts (preliminary groups of clusters), in the order of their centres along Morton's curve."""
    present = np.unique(parts)
    order: Ints = present[np.argsort(morton_codes(_middles(parts, spheres)[present]), kind="stable")]
    return order


def _middles(parts: Ints, spheres: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """The mean centre of the spheres around the clusters of each part; 0 for a part without clusters."""
    counts = np.maximum(np.bincount(parts), 1)
    return np.column_stack([np.bincount(parts, spheres[:, axis]) / counts for axis in range(3)])


def _along_curve(parts: Ints, spheres: npt.NDArray[np.float32]) -> Ints:
    """Renumber the parts from 0, in the order of their centres along Morton's curve."""
    order = _in_order(parts, spheres)
    rank = np.empty(int(parts.max()) + 1, np.int64)
    rank[order] = np.arange(len(order))
    return rank[parts]


def _divided(parts: Ints, sizes: Ints) -> Ints:
    """Divide groups of clusters that have more than MOST clusters or would not fit into a page. `parts` is the group of
    each cluster, and `sizes` each cluster's bytes."""
    counts, totals = np.bincount(parts), np.bincount(parts, sizes)
    if not ((counts > MOST) | (totals > GROUP_BYTES)).any():
        return parts
    order = np.argsort(parts, kind="stable")
    divided = np.empty_like(parts)
    number, last, count, total = -1, -1, 0, 0
    for cluster in order.tolist():
        count, total = count + 1, total + int(sizes[cluster])
        if parts[cluster] != last or count > MOST or total > GROUP_BYTES:
            number, last, count, total = number + 1, int(parts[cluster]), 1, int(sizes[cluster])
        divided[cluster] = number
    return divided
