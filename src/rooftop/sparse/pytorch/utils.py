"""The counterpart of `spconv.pytorch.utils`. A program only has to replace `spconv` by `rooftop.sparse` in its
imports."""

from rooftop.sparse.utils import PointToVoxel, gather_features_by_pc_voxel_id

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]
