"""Small meshes of every kind, built once, and what renders them: on the CPU, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import trimesh
from numpy.typing import NDArray

from rooftop import scene
from rooftop.scene import Geometry

Arrays = tuple[NDArray[np.float64], NDArray[np.int64]]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def bumpy_ball(subdivisions: int) -> Arrays:
    """Closed, around the origin, from which all of it can be seen; radius 0.75 to 1.25."""
    ball = trimesh.creation.icosphere(subdivisions)
    x, y, z = ball.vertices.T
    return ball.vertices * (1 + 0.25 * np.sin(9 * x) * np.cos(7 * y) * np.sin(5 * z))[:, None], ball.faces


def hills(side: int) -> Arrays:
    """(side + 1)^2 vertices over -1 to 1 along x and y."""
    x, y = np.meshgrid(*[np.linspace(-1, 1, side + 1)] * 2, indexing="ij")
    z = 0.2 * np.sin(5 * x) * np.cos(4 * y) + 0.02 * np.sin(40 * x + 30 * y)
    corner = (np.arange(side)[:, None] * (side + 1) + np.arange(side)).ravel()
    faces = np.stack([corner, corner + side + 1, corner + 1, corner + 1, corner + side + 1, corner + side + 2], 1)
    return np.stack([x, y, z], -1).reshape(-1, 3), faces.reshape(-1, 3)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Geometry]:
    """`built("ball", vertices, faces, ...)`: the geometry, built at the first call of that name."""
    folder = tmp_path_factory.mktemp("scenes")

    def build(name: str, vertices: NDArray[np.float64], faces: NDArray[np.int64], **options: object) -> Geometry:
        path: Path = folder / f"{name}.rtg"
        if not path.exists():
            scene.build(vertices, faces, path, **options)  # type: ignore[arg-type]
        return Geometry.open(path)

    return build


@pytest.fixture(scope="session")
def ball(built: Callable[..., Geometry]) -> Geometry:
    """20,480 triangles, closed."""
    return built("ball", *bumpy_ball(5))


@pytest.fixture(scope="session")
def cube(built: Callable[..., Geometry]) -> Geometry:
    """12 triangles, from -1 to 1."""
    box = trimesh.creation.box((2, 2, 2))
    return built("cube", box.vertices, box.faces)


@pytest.fixture(scope="session")
def log(built: Callable[..., Geometry]) -> Geometry:
    """81,920 triangles, closed, 20 times as long as wide."""
    vertices, faces = bumpy_ball(6)
    return built("log", vertices * (20, 1, 1), faces)
