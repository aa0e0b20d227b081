"""A material of a mesh file. It is read before the texture coordinates of the parts that use it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rooftop.scene.materials import Material

Floats = npt.NDArray[np.float64]

AS_IT_IS = ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0))


@dataclass(frozen=True)
class PartMaterial:
    """A material of a mesh file.

    Attributes:
        material: colour and texture.
        placing: 2 x 3 matrix from the file's texture coordinates (u, v, 1), with v upwards, to the coordinates of the
            texture look-up. The matrix is applied to the mesh's coordinates, since each part has its own placing.
        see_through: the file's transparency settings, for a warning; "" without any.
    """

    material: Material = field(default_factory=Material)
    placing: tuple[tuple[float, float, float], tuple[float, float, float]] = AS_IT_IS
    see_through: str = ""

    def placed(self, uv: Floats) -> Floats:
        """Apply the material's texture transform `placing` to texture coordinates (V, 2)."""
        matrix = np.array(self.placing)
        return uv if self.placing == AS_IT_IS else uv @ matrix[:, :2].T + matrix[:, 2]
