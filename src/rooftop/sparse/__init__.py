"""Sparse convolution for point clouds and other data with few active sites on a large grid.

    import rooftop.sparse as spconv

    x = spconv.SparseConvTensor(features, indices, spatial_shape, batch_size)
    y = spconv.SubMConv3d(4, 16, 3, indice_key="subm1")(x)

Sparse convolutions need Warp: `pip install "rooftop[sparse]"`. Building the first rulebook imports Warp.
"""

from rooftop.sparse.checkpoints import LayoutReport, convert_state_dict, load_spconv_state_dict
from rooftop.sparse.convolutions import (
    ConvAlgo,
    SparseConv1d,
    SparseConv2d,
    SparseConv3d,
    SparseConv4d,
    SparseConvolution,
    SparseConvTranspose1d,
    SparseConvTranspose2d,
    SparseConvTranspose3d,
    SparseConvTranspose4d,
    SparseInverseConv1d,
    SparseInverseConv2d,
    SparseInverseConv3d,
    SparseInverseConv4d,
    SubMConv1d,
    SubMConv2d,
    SubMConv3d,
    SubMConv4d,
)
from rooftop.sparse.geometries import Geometry, geometry
from rooftop.sparse.modules import (
    RemoveGrid,
    SparseBatchNorm,
    SparseIdentity,
    SparseModule,
    SparseReLU,
    SparseSequential,
    ToDense,
    is_spconv_module,
)
from rooftop.sparse.pooling import (
    SparseAvgPool,
    SparseAvgPool1d,
    SparseAvgPool2d,
    SparseAvgPool3d,
    SparseGlobalAvgPool,
    SparseGlobalMaxPool,
    SparseMaxPool,
    SparseMaxPool1d,
    SparseMaxPool2d,
    SparseMaxPool3d,
    SparseMaxPool4d,
    SparsePool,
)
from rooftop.sparse.rulebook import Rulebook, build_rulebook, get_indice_pairs
from rooftop.sparse.tensor import SparseConvTensor
from rooftop.sparse.voxels import PointToVoxel, gather_features_by_pc_voxel_id, voxel_grid, voxelize

__all__ = [
    "ConvAlgo",
    "Geometry",
    "LayoutReport",
    "PointToVoxel",
    "RemoveGrid",
    "Rulebook",
    "SparseAvgPool",
    "SparseAvgPool1d",
    "SparseAvgPool2d",
    "SparseAvgPool3d",
    "SparseBatchNorm",
    "SparseConv1d",
    "SparseConv2d",
    "SparseConv3d",
    "SparseConv4d",
    "SparseConvTensor",
    "SparseConvTranspose1d",
    "SparseConvTranspose2d",
    "SparseConvTranspose3d",
    "SparseConvTranspose4d",
    "SparseConvolution",
    "SparseGlobalAvgPool",
    "SparseGlobalMaxPool",
    "SparseIdentity",
    "SparseInverseConv1d",
    "SparseInverseConv2d",
    "SparseInverseConv3d",
    "SparseInverseConv4d",
    "SparseMaxPool",
    "SparseMaxPool1d",
    "SparseMaxPool2d",
    "SparseMaxPool3d",
    "SparseMaxPool4d",
    "SparseModule",
    "SparsePool",
    "SparseReLU",
    "SparseSequential",
    "SubMConv1d",
    "SubMConv2d",
    "SubMConv3d",
    "SubMConv4d",
    "ToDense",
    "build_rulebook",
    "convert_state_dict",
    "gather_features_by_pc_voxel_id",
    "geometry",
    "get_indice_pairs",
    "is_spconv_module",
    "load_spconv_state_dict",
    "voxel_grid",
    "voxelize",
]
