"""Find where the nodes of a glTF document place its meshes, and in which pose.

A node has a transform relative to its parent. Nodes that KHR_node_visibility hides place nothing. A skinned mesh
follows the joints of its skin, and not its own node. Animations are not applied: joints and weights of morph targets
have the values that the document states.

Source: the glTF 2.0 specification of the Khronos Group (3.5.2 to 3.7.3), and KHR_node_visibility.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Document = dict[str, Any]

_SIMPLE = {"mesh", "name", "matrix", "translation", "rotation", "scale", "extras"}


@dataclass(frozen=True)
class PlacedMesh:
    """A mesh at its place in the scene.

    Attributes:
        mesh: index of the mesh.
        matrix: (4, 4) transform to the scene. A skinned mesh has only the translation of its first joint.
        weights: the weight of each morph target; empty if no target has a weight.
        skin: index of the skin, or None.
        joints: (J, 4, 4) transforms of the skin's joints, without the translation in `matrix`; None without a skin.
    """

    mesh: int
    matrix: Floats
    weights: tuple[float, ...] = ()
    skin: int | None = None
    joints: Floats | None = None


def is_flat(document: Document) -> bool:
    """Whether each node only places a mesh (without children, a skin, weights or extensions), and no mesh has morph
    targets."""
    nodes = document.get("nodes", ())
    return all(_SIMPLE.issuperset(node) for node in nodes) and not any(
        "targets" in primitive for mesh in document.get("meshes", ()) for primitive in mesh["primitives"]
    )


def placed_meshes(document: Document) -> list[PlacedMesh]:
    """Find the visible nodes with a mesh in the document's scene, in the order of a walk through the nodes.

    Raises:
        IndexError, KeyError, TypeError, ValueError: the nodes do not form trees, or have impossible values.
    """
    nodes = document.get("nodes", [])
    world = _world_matrices(nodes)
    scenes = document.get("scenes", [])
    left = list(reversed(scenes[document.get("scene", 0)].get("nodes", []))) if scenes else []
    found = []
    while left:
        number = left.pop()
        node = nodes[number]
        if not node.get("extensions", {}).get("KHR_node_visibility", {}).get("visible", True):
            continue
        left += reversed(node.get("children", []))
        if "mesh" in node:
            found.append(_placed(document, node, world[number], world))
    return found


def _placed(document: Document, node: Document, matrix: Floats, world: Sequence[Floats]) -> PlacedMesh:
    weights = tuple(map(float, node.get("weights", document["meshes"][node["mesh"]].get("weights", ()))))
    weights = weights if any(weights) else ()
    if "skin" not in node:
        return PlacedMesh(node["mesh"], matrix, weights)
    joints = np.stack([world[joint] for joint in document["skins"][node["skin"]]["joints"]])
    at = np.eye(4)
    at[:3, 3] = joints[0, :3, 3]
    joints[:, :3, 3] -= at[:3, 3]
    return PlacedMesh(node["mesh"], at, weights, node["skin"], joints)


def _world_matrices(nodes: Sequence[Document]) -> list[Floats]:
    """The transform (4, 4) of each node to the scene."""
    parents: dict[int, int] = {}
    for number, node in enumerate(nodes):
        for child in node.get("children", ()):
            if parents.setdefault(child, number) != number:
                raise ValueError(f"node {child} has the parents {parents[child]} and {number}")
    world = [_local(node, number) for number, node in enumerate(nodes)]
    left = [number for number in range(len(nodes)) if number not in parents]
    reached = 0
    while left:
        number = left.pop()
        reached += 1
        for child in nodes[number].get("children", ()):
            world[child] = world[number] @ world[child]
            left.append(child)
    if reached != len(nodes):
        raise ValueError("some nodes are their own ancestors")
    return world


def _local(node: Document, number: int) -> Floats:
    """The transform of a node to its parent: matrix * translation * rotation * scale. A factor that the node does not
    state is the identity."""
    matrix = np.eye(4)
    if "matrix" in node:
        matrix[:3] = np.array(node["matrix"], np.float64).reshape(4, 4).T[:3]
    x, y, z, w = np.array(node.get("rotation", (0.0, 0.0, 0.0, 1.0)), np.float64)
    length = x * x + y * y + z * z + w * w
    twice = 2 / length if length else 0.0
    turn = np.eye(3) - twice * np.array(
        [
            [y * y + z * z, z * w - x * y, -x * z - y * w],
            [-x * y - z * w, x * x + z * z, x * w - y * z],
            [y * w - x * z, -y * z - x * w, x * x + y * y],
        ]
    )
    own = np.eye(4)
    own[:3, :3] = turn * np.array(node.get("scale", (1.0, 1.0, 1.0)), np.float64).reshape(3)
    own[:3, 3] = np.array(node.get("translation", (0.0, 0.0, 0.0)), np.float64).reshape(3)
    matrix = matrix @ own
    if not np.isfinite(matrix).all():
        raise ValueError(f"node {number} has numbers that are not finite")
    return matrix


def posed(
    primitive: Document,
    placed: PlacedMesh,
    inverse_bind: Floats | None,
    values: Callable[[int], Array],
    names: Sequence[str],
) -> dict[str, Array]:
    """Compute the attributes of a primitive that its morph targets and its skin change.

    Args:
        inverse_bind: (J, 4, 4), from the mesh to each joint; None if all are identities.
        values: returns the numbers (V, width) of an accessor.
        names: names of the attributes to which morph targets are applied. A skin always changes POSITION and NORMAL.

    Returns:
        Only the changed attributes, by name, float64 (V, width).

    Raises:
        IndexError, KeyError, ValueError: the primitive lacks joints or weights, or names joints that do not exist.
    """
    attributes, found = primitive["attributes"], dict[str, Array]()

    def before(name: str) -> Array:
        """Return an attribute's values after the morph targets that were applied so far."""
        return found[name] if name in found else values(attributes[name]).astype(np.float64)

    for weight, target in zip(placed.weights, primitive.get("targets", ()), strict=False):
        for name in names if weight else ():
            if name in target and name in attributes:
                found[name] = before(name) + weight * values(target[name])
    if placed.joints is None:
        return found
    matrices = placed.joints if inverse_bind is None else placed.joints @ inverse_bind[: len(placed.joints)]
    blended = _blended(attributes, matrices, values)  # (V, 3, 4)
    if "POSITION" in attributes:
        found["POSITION"] = np.einsum("vij,vj->vi", blended[:, :, :3], before("POSITION")) + blended[:, :, 3]
    if "NORMAL" in attributes:
        a, b, c = blended[:, :, :3].swapaxes(0, 1)  # the rows of each linear map
        cofactors = np.stack([np.cross(b, c), np.cross(c, a), np.cross(a, b)], 1)
        found["NORMAL"] = np.einsum("vij,vj->vi", cofactors, before("NORMAL"))
    return found


def _blended(attributes: Document, matrices: Floats, values: Callable[[int], Array]) -> Floats:
    """The transform (V, 3, 4) of each vertex: the mean of its joints' transforms, by weight. A vertex whose weights are
    all 0 follows the first joint, as in other readers."""
    weights = [values(attributes["WEIGHTS_0"]).astype(np.float64)]
    joints = [values(attributes["JOINTS_0"]).astype(np.int64)]
    while f"WEIGHTS_{len(weights)}" in attributes:
        joints.append(values(attributes[f"JOINTS_{len(weights)}"]).astype(np.int64))
        weights.append(values(attributes[f"WEIGHTS_{len(weights)}"]).astype(np.float64))
    share, of = np.concatenate(weights, 1), np.concatenate(joints, 1)
    total = share.sum(1)
    share[total == 0, 0] = 1.0
    share /= np.where(total == 0, 1.0, total)[:, None]
    if ((of >= len(matrices)) & (share != 0)).any():
        raise ValueError(f"a vertex names joint {int(of.max())}, but its skin has {len(matrices)} joints")
    found = np.zeros((len(of), 3, 4))
    for column in range(of.shape[1]):
        found += share[:, column, None, None] * matrices[np.minimum(of[:, column], len(matrices) - 1), :3]
    return found
