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


def relief(picture: NDArray[np.float64]) -> Arrays:
    """A surface over -1 to 1 along x and y, as high as a picture (H, W) is bright."""
    rows, columns = picture.shape
    x, y = np.meshgrid(np.linspace(-1, 1, rows), np.linspace(-1, 1, columns), indexing="ij")
    corner = (np.arange(rows - 1)[:, None] * columns + np.arange(columns - 1)).ravel()
    right, below = corner + 1, corner + columns
    faces = np.concatenate([np.stack([corner, below, right], 1), np.stack([right, below, below + 1], 1)])
    return np.stack([x, y, 0.3 * picture], -1).reshape(-1, 3), faces


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


@pytest.fixture(scope="session")
def small_ball() -> Arrays:
    """1,280 triangles, closed."""
    return bumpy_ball(3)


@pytest.fixture(scope="session")
def photograph(built: Callable[..., Geometry]) -> Geometry:
    """The relief of a photograph, as noisy as photographs are; 33,000 triangles, open."""
    from skimage import color, data

    return built("photograph", *relief(color.rgb2gray(data.chelsea())[::2, ::4]), normals="smooth")
