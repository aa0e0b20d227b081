"""A viewer of a small scene on a free port, shared by the tests."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import trimesh

from rooftop import scene
from rooftop.scene.viewing.drawing import Drawing
from rooftop.scene.viewing.serving import Viewer


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> scene.Scene:
    """A ball of 1,280 triangles at the origin, and a box of 12 beside it at x = 3."""
    folder, world = tmp_path_factory.mktemp("viewed"), scene.Scene()
    for name, mesh in (("ball", trimesh.creation.icosphere(3)), ("box", trimesh.creation.box((1, 1, 1)))):
        scene.build(mesh.vertices + np.array([3.0 * (name == "box"), 0, 0]), mesh.faces, folder / f"{name}.rtg")
        world.add_instance(world.add_mesh(folder / f"{name}.rtg"))
    return world


@pytest.fixture(scope="session")
def viewer(world: scene.Scene) -> Iterator[Viewer]:
    drawing = Drawing(world, "cpu")
    with Viewer(drawing) as viewer:
        serving = threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.05})
        serving.start()
        drawing.warm_up()
        yield viewer
        viewer.shutdown()
        serving.join(60)
    assert drawing.stop(60)
    assert not serving.is_alive()
