"""A tree of many leaves, and the area that its picture covers from near and from far."""

from __future__ import annotations

import math

import numpy as np
import torch

from rooftop import scene

LEAF = 0.09  # length of a leaf in m; a leaf is half as wide as long
SIDES = 8  # sides of a branch
SPACING = 1.6  # distance between trees, as a multiple of a tree's width
BRANCHING = (14, 10, 8)  # number of branches on the trunk, on each of those branches, and so on
WIDEST, NARROWEST = 600, 2.0  # width of a tree in pixels, from near and from far
DISTANCES = 12
PIXELS_SEEN = 200_000  # pixels to count at each distance, enough for a random error below one percent


def tree(leaves: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A tree about 8 m high: vertices, faces, and the material of each face (0: wood, 1: leaves)."""
    random = np.random.default_rng(0)
    starts, ends = np.array([[0.0, 0, 0]]), np.array([[0.0, 0, 6.5]])
    radius = 0.22
    wood = [_tubes(starts, ends, radius)]
    for level, count in enumerate(BRANCHING):
        along = random.uniform(0.35 if level == 0 else 0.2, 1.0, (len(starts), count, 1))
        begin = (starts[:, None] + along * (ends - starts)[:, None]).reshape(-1, 3)
        way = np.repeat(ends - starts, count, axis=0)
        length = np.linalg.norm(way, axis=1, keepdims=True) * random.uniform(0.35, 0.55, (len(way), 1))
        way = _unit(_unit(way) * 0.6 + _unit(random.normal(size=way.shape)) + np.array([0, 0, 0.3]))
        starts, ends = begin, begin + way * length
        radius *= 0.4
        wood.append(_tubes(starts, ends, radius))
    vertices, faces = _joined(wood)
    twig = random.integers(0, len(starts), leaves)
    stem = starts[twig] + random.uniform(0.1, 1.1, (leaves, 1)) * (ends - starts)[twig]
    along = _unit(random.normal(size=(leaves, 3)) + np.array([0, 0, -0.3]))
    across = _unit(np.cross(along, random.normal(size=(leaves, 3))))
    size = LEAF * random.uniform(0.6, 1.2, (leaves, 1))
    corners = [
        stem,
        stem + size * (0.5 * along + 0.25 * across),
        stem + size * along,
        stem + size * (0.5 * along - 0.25 * across),
    ]
    of_leaves = len(vertices) + 4 * np.arange(leaves)[:, None] + np.array([0, 1, 2, 0, 2, 3])
    materials = np.repeat([0, 1], [len(faces), 2 * leaves])
    points = np.concatenate([vertices, np.stack(corners, 1).reshape(-1, 3)])
    return points, np.concatenate([faces, of_leaves.reshape(-1, 3)]), materials


def _unit(vectors: np.ndarray) -> np.ndarray:
    return vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)


def _tubes(starts: np.ndarray, ends: np.ndarray, radius: float) -> tuple[np.ndarray, np.ndarray]:
    """Open cones from starts to ends. At its end, a cone has 0.4 times its width at the start."""
    way = _unit(ends - starts)
    aside = _unit(np.cross(way, np.where(np.abs(way[:, :1]) < 0.9, [[1.0, 0, 0]], [[0, 1.0, 0]])))
    angle = 2 * np.pi * np.arange(SIDES)[:, None] / SIDES
    circle = np.cos(angle) * aside[:, None] + np.sin(angle) * np.cross(way, aside)[:, None]
    points = np.concatenate([starts[:, None] + radius * circle, ends[:, None] + 0.4 * radius * circle], 1)
    low, following = np.arange(SIDES), (np.arange(SIDES) + 1) % SIDES
    faces = np.concatenate(
        [np.stack([low, following, low + SIDES], 1), np.stack([following, following + SIDES, low + SIDES], 1)]
    )
    first = 2 * SIDES * np.arange(len(starts))[:, None, None]
    return points.reshape(-1, 3), (faces + first).reshape(-1, 3)


def _joined(parts: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    starts = np.cumsum([0, *(len(vertices) for vertices, _ in parts)])
    faces = [each + start for (_, each), start in zip(parts, starts[:-1], strict=True)]
    return np.concatenate([vertices for vertices, _ in parts]), np.concatenate(faces)


def grove(count: int, width: float) -> np.ndarray:
    """Transforms (count, 4, 4) of trees in a square grid, each rotated at random. Seen from above, no tree hides
    another."""
    random = np.random.default_rng(0)
    angle = random.uniform(0, 2 * np.pi, count)
    transforms = np.tile(np.eye(4), (count, 1, 1))
    for row, column, value in ((0, 0, np.cos), (1, 1, np.cos), (1, 0, np.sin)):
        transforms[:, row, column] = value(angle)
    transforms[:, 0, 1] = -np.sin(angle)
    side = math.isqrt(count - 1) + 1
    at = SPACING * width * (np.stack(np.divmod(np.arange(count), side), 1) - (side - 1) / 2)
    transforms[:, :2, 3] = at + random.uniform(-0.3, 0.3, (count, 2)) * width
    return transforms


def covered(
    mesh: scene.Geometry, width: float, pixels: float, count: int, device: str, error: float
) -> dict[str, float]:
    """The area that a tree covers, in units of its width squared, and the number of triangles drawn per tree. The view
    is oblique and parallel, and a tree is `pixels` wide."""
    world = scene.Scene()
    world.add_instances(world.add_mesh(mesh), grove(count, width))
    across = SPACING * width * (math.isqrt(count - 1) + 1) + width
    size = math.ceil(across / width * pixels)
    eye = across * np.array((0.0, -1.0, 1.7))  # no tree is behind the camera
    camera = scene.Camera.parallel(eye, (0, 0, 3), view_height=size * width / pixels, width=size, height=size)
    frame = scene.Renderer(world, device, pixel_error=error).render(camera, ("depth",))
    seen = float(torch.isfinite(frame["depth"]).sum())
    return {"area": seen / pixels**2 / count, "triangles": frame.stats.triangles / count}
