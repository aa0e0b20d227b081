"""What a mesh file says of a part's look, before the part's texture coordinates are known."""

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
        placing: 2 x 3, from the file's texture coordinates (u, v, 1), v upwards, to those that the texture is looked up
            at. It is applied to the mesh's coordinates, since each part has its own.
        see_through: what the file has of transparency, for a warning; "" if nothing.
    """

    material: Material = field(default_factory=Material)
    placing: tuple[tuple[float, float, float], tuple[float, float, float]] = AS_IT_IS
    see_through: str = ""

    def placed(self, uv: Floats) -> Floats:
        """(V, 2) of a part."""
        matrix = np.array(self.placing)
        return uv if self.placing == AS_IT_IS else uv @ matrix[:, :2].T + matrix[:, 2]
