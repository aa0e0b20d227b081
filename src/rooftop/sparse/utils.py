"""The names of `spconv.pytorch.utils`, in a file with spconv's name, so that a program only changes the imported
package.
"""

from rooftop.sparse.voxels import PointToVoxel, gather_features_by_pc_voxel_id

__all__ = ["PointToVoxel", "gather_features_by_pc_voxel_id"]
