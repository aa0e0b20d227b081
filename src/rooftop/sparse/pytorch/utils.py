"""The names of `spconv.pytorch.utils`: points to voxels, and back to points."""

from rooftop.sparse.utils import PointToVoxel, gather_features_by_pc_voxel_id

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]
