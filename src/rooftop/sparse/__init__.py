"""Sparse convolution: point clouds and other data with a few active sites on a large grid.

    import rooftop.sparse as spconv

    x = spconv.SparseConvTensor(features, indices, spatial_shape, batch_size)

Needs Warp: `pip install "rooftop[sparse]"`. It is imported when a rulebook is built, not before.
"""

from rooftop.sparse.geometries import Geometry, geometry
from rooftop.sparse.rulebook import Rulebook, build_rulebook, get_indice_pairs
from rooftop.sparse.tensor import SparseConvTensor

__all__ = ["Geometry", "Rulebook", "SparseConvTensor", "build_rulebook", "geometry", "get_indice_pairs"]
