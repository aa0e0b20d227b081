"""Meshes of many small pages, so that even in small scenes a pool can hold only a few percent."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trimesh
from numpy.typing import NDArray

from rooftop import scene
from rooftop.launch import cpp_extensions
from rooftop.scene import Geometry, layouts
from rooftop.scene.building import grouping
from rooftop.scene.streaming import page_reader


@pytest.fixture(scope="session")
def compiled_reader() -> Any:
    """The module of `page_reader.cpp`; None without a compiler."""
    return None if cpp_extensions.compiler() is None else page_reader.extension.build()


@pytest.fixture(autouse=True)
def reader(request: pytest.FixtureRequest, compiled_reader: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who reads pages: "compiled", or "in Python" if a test says so, or if there is no compiler."""
    chosen = getattr(request, "param", "compiled")
    if chosen == "compiled" and compiled_reader is None:
        if hasattr(request, "param"):
            pytest.skip("no C++ compiler")
        chosen = "in Python"
    monkeypatch.setattr(page_reader, "compiled", lambda: compiled_reader if chosen == "compiled" else None)
    return chosen


@pytest.fixture(scope="session")
def paged(made_once: Callable[[str, Callable[[Path], None]], Path]) -> Callable[..., Geometry]:
    """`paged("ball", vertices, faces)`: a geometry with a page for each group, built at the first call of that name in
    any worker."""

    def build(name: str, vertices: NDArray[np.float64], faces: NDArray[np.int64], **options: object) -> Geometry:
        def make(folder: Path) -> None:
            assert grouping.GROUP_BYTES > 4  # already loaded, so groups have their usual size
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(layouts, "PAGE_BYTES", 4)
                scene.build(vertices, faces, folder / f"{name}.rtg", **options)  # type: ignore[arg-type]

        return Geometry.open(made_once(f"paged-{name}", make) / f"{name}.rtg")

    return build


def bumpy_ball() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """A closed surface around the origin, all visible from there; 327,680 triangles."""
    ball = trimesh.creation.icosphere(7)
    x, y, z = ball.vertices.T
    return ball.vertices * (1 + 0.25 * np.sin(9 * x) * np.cos(7 * y) * np.sin(5 * z))[:, None], ball.faces


@pytest.fixture(scope="session")
def paged_ball(paged: Callable[..., Geometry]) -> Geometry:
    """About 250 pages, one root page."""
    geometry = paged("ball", *bumpy_ball(), normals="smooth")
    assert geometry.pages > 200
    return geometry


@pytest.fixture(scope="session")
def paged_tunnel(paged: Callable[..., Geometry]) -> Geometry:
    """A tunnel of about 250 pages, 20 times as long as wide."""
    vertices, faces = bumpy_ball()
    geometry = paged("tunnel", vertices * (20, 1, 1), faces)
    assert geometry.pages > 200
    return geometry


@pytest.fixture(scope="session")
def paged_knot(paged: Callable[..., Geometry]) -> Geometry:
    """Another closed mesh, 40,000 triangles."""
    turn = np.linspace(0, 2 * np.pi, 400, endpoint=False)
    around = np.linspace(0, 2 * np.pi, 50, endpoint=False)
    u, v = np.meshgrid(turn, around, indexing="ij")
    radius = 1 + 0.35 * np.cos(v) + 0.03 * np.sin(31 * u + 5 * v)
    points = np.stack([radius * np.cos(u), radius * np.sin(u), 0.35 * np.sin(v) + 0.2 * np.sin(3 * u)], -1)
    i, j = np.meshgrid(np.arange(400), np.arange(50), indexing="ij")
    a, b = (i * 50 + j).ravel(), ((i + 1) % 400 * 50 + j).ravel()
    c, d = ((i + 1) % 400 * 50 + (j + 1) % 50).ravel(), (i * 50 + (j + 1) % 50).ravel()
    faces = np.concatenate([np.stack([a, b, c], 1), np.stack([a, c, d], 1)])
    return paged("knot", points.reshape(-1, 3), faces)
