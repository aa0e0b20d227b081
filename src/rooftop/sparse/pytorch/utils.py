"""The path of `spconv.pytorch.utils`: a program replaces `spconv` by `rooftop.sparse` in its imports."""

from rooftop.sparse.utils import PointToVoxel, gather_features_by_pc_voxel_id

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]
