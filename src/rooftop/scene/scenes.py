"""The contents of a scene: meshes, their instances with transforms, and lights."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rooftop.scene.arguments import real_numbers, short, whole_number
from rooftop.scene.cameras import affine
from rooftop.scene.geometry import Geometry
from rooftop.scene.instances import REMOVED, Instances, first_flat
from rooftop.scene.lights import DirectionalLight, Light, PointLight, SpotLight
from rooftop.scene.materials import Material, checked_materials
from rooftop.scene.world_bounds import WorldBounds

MAX_INSTANCES = 2**27
MOST_SCALE = 1e15
MOST_LIGHTS = 32


class Scene:
    """Meshes and their instances.

    Example:
        >>> scene = Scene()
        >>> rock = scene.add_mesh("rock.rtg")
        >>> scene.add_instance(rock, transform)
    """

    def __init__(self) -> None:
        self.placed = Instances()  # renderers use this; users call `instances`
        self._meshes: list[Geometry] = []
        self._materials: list[tuple[Material, ...] | None] = []  # for each mesh, those given to `add_mesh`, or None
        self._lights: list[Light] = []
        self._bounds = WorldBounds()

    def __len__(self) -> int:
        """The number of instances."""
        return self.placed.live

    @property
    def meshes(self) -> tuple[Geometry, ...]:
        """The meshes, in the order in which they were added."""
        return tuple(self._meshes)

    @property
    def materials(self) -> tuple[tuple[Material, ...] | None, ...]:
        """For each mesh, the materials by their numbers, or None if neither the file nor the caller provides
        materials."""
        both = zip(self._materials, self._meshes, strict=True)
        return tuple(mesh.materials if given is None else given for given, mesh in both)

    def add_mesh(self, mesh: str | PathLike[str] | Geometry, *, materials: Sequence[Material] | None = None) -> int:
        """Add a mesh: a geometry file (from `scene.build`) or an open `Geometry`. Return the number by which instances
        refer to the mesh.

        Args:
            materials: one material for each material number, to replace the file's materials. The same file may be
                added again with other materials.

        Raises:
            GeometryFileError: the file is not a geometry file, or is incomplete.
            TypeError, ValueError: an entry is not a material, there are fewer materials than material numbers in the
                file, or a material has a texture but the mesh has no texture coordinates.
        """
        opened = mesh if isinstance(mesh, Geometry) else Geometry.open(Path(mesh))
        chosen = None
        if materials is not None:
            chosen = checked_materials(materials, int(opened.meta.get("materials", 1)), str(opened.path))
            if not opened.meta["has_uv"] and any(each.texture is not None for each in chosen):
                raise ValueError(
                    f"{opened.path} has no texture coordinates: build it with uv=, or leave the texture out"
                )
        self._meshes.append(opened)
        self._materials.append(chosen)
        return len(self._meshes) - 1

    def add_instance(self, mesh: int, transform: ArrayLike | None = None) -> int:
        """Add an instance of a mesh; return its number, which the output "instance" shows.

        Args:
            transform: (4, 4) or (3, 4), object to world; points are columns. By default the mesh keeps its own
                position.

        Raises:
            ValueError: there is no such mesh, or the transform is not affine and invertible.
        """
        matrix = np.eye(4) if transform is None else affine(transform, "transform")
        return self.add_instances(mesh, matrix[None])[0]

    def add_instances(self, mesh: int, transforms: ArrayLike) -> range:
        """Add one instance for each transform, (N, 4, 4); return their numbers.

        Raises:
            ValueError: as in `add_instance`, or the scene would have more than MAX_INSTANCES instances. In both cases
                no instance is added.
        """
        mesh = _given_by("add_mesh", "mesh", mesh, len(self.meshes))
        matrices = _checked(transforms)
        if self.placed.count + len(matrices) > MAX_INSTANCES:
            raise ValueError(
                f"{self.placed.count + len(matrices):,} instances: a scene has at most {MAX_INSTANCES:,}, including "
                "removed ones; begin a new scene"
            )
        return self.placed.add(mesh, matrices)

    def move(self, instance: int, transform: ArrayLike) -> None:
        """Move an instance; the output "velocity" of the next frame includes this motion.

        Raises:
            ValueError: there is no such instance, or the transform is not affine and invertible.
        """
        self.move_all([instance], affine(transform, "transform")[None])

    def move_all(self, instances: Sequence[int], transforms: ArrayLike) -> None:
        """Move many instances at once, given N numbers without duplicates, and N transforms (N, 4, 4).

        Raises:
            ValueError: as in `move`. If any argument is invalid, no instance is moved.
        """
        matrices = _checked(transforms)
        self.placed.move(self._numbers(instances, len(matrices)), matrices)

    def remove(self, instance: int) -> None:
        """Remove an instance from the scene. The other instances keep their numbers, and the removed number is not used
        again.

        Raises:
            ValueError: there is no such instance.
        """
        self.remove_all([instance])

    def remove_all(self, instances: Sequence[int]) -> None:
        """Remove many instances at once, given their numbers, without duplicates.

        Raises:
            ValueError: as in `remove`. If any number is invalid, no instance is removed.
        """
        self.placed.remove(self._numbers(instances))

    def _numbers(self, instances: Sequence[int], expected: int | None = None) -> NDArray[np.int64]:
        """Check that `instances` are numbers of existing instances without duplicates, and return them as an array.

        Raises:
            ValueError: a number does not exist or is repeated.
        """
        given = np.asarray(instances)
        whole = given.ndim == 1 and (given.dtype.kind in "iu" or not len(given))
        if not whole or (expected is not None and len(given) != expected):
            many = "integers" if expected is None else f"{expected} integers, one for each transform"
            raise ValueError(f"instances={short(instances)}: expected {many}")
        wrong = given[(given < 0) | (given >= self.placed.count)]
        if len(wrong):
            raise ValueError(f"instance={wrong[0]}: expected {_up_to(self.placed.count)}")
        numbers = given.astype(np.int64)
        gone = numbers[self.placed.mesh_of[numbers] == REMOVED]
        if len(gone):
            raise ValueError(f"instance={gone[0]} was removed from the scene: add_instance returns a new number")
        if (np.diff(numbers) <= 0).any():
            found, times = np.unique(numbers, return_counts=True)
            if len(found) < len(numbers):
                raise ValueError(
                    f"instance={found[times.argmax()]} is given {times.max()} times: expected each number once"
                )
        return numbers

    @property
    def lights(self) -> tuple[Light, ...]:
        """The lights, in the order in which they were added."""
        return tuple(self._lights)

    def add_light(self, light: Light) -> int:
        """Add a light, which casts shadows; return its number. A scene without lights is shaded by a default light,
        without shadows.

        Raises:
            ValueError: `light` is not a light, or the scene has `MOST_LIGHTS` lights already.
        """
        if len(self._lights) == MOST_LIGHTS:
            raise ValueError(f"a scene has at most {MOST_LIGHTS} lights")
        self._lights.append(_light(light))
        return len(self._lights) - 1

    def set_light(self, number: int, light: Light) -> None:
        """Replace a light by another light, possibly of another class.

        Raises:
            ValueError: there is no light of this number, or `light` is not a light.
        """
        number = _given_by("add_light", "light", number, len(self._lights))
        self._lights[number] = _light(light)

    def instances(self) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The mesh of each instance, (N,), and its transform, (N, 4, 4), in the order of their numbers. The mesh of a
        removed instance is -1. The arrays are copies."""
        return self.placed.mesh_of.copy(), self.placed.transforms.copy()

    @property
    def triangles(self) -> int:
        """Number of triangles of all instances, at their meshes' finest level."""
        mesh_of = self.placed.mesh_of
        times = np.bincount(mesh_of[mesh_of != REMOVED], minlength=len(self.meshes))
        return sum(int(count) * int(mesh.meta["triangles"]) for count, mesh in zip(times, self.meshes, strict=True))

    def bounds(self) -> NDArray[np.float64]:
        """The box around all instances in the world: lowest and highest corner, (2, 3).

        Raises:
            ValueError: there are no instances.
        """
        if not len(self):
            raise ValueError("the scene has no instances: add one by add_instance(add_mesh(file))")
        return self._bounds.of(self.placed, self.meshes)


def _given_by(method: str, name: str, number: object, count: int) -> int:
    """Check that a number is one that `method` has returned, from 0 to `count` - 1; return it.

    Raises:
        ValueError: there is no such number.
    """
    if not count:
        raise ValueError(
            f"{name}={short(number)}: the scene has no {name} yet: {method} adds one and returns its number"
        )
    return whole_number(name, number, 0, count - 1, f"a number that {method} returned,")


def _light(light: object) -> Light:
    if not isinstance(light, DirectionalLight | SpotLight | PointLight):
        raise ValueError(f"light={short(light)}: expected a scene.DirectionalLight, SpotLight or PointLight")
    return light


def _checked(transforms: ArrayLike) -> NDArray[np.float64]:
    """Check that transforms (N, 4, 4) can be rendered, and return a copy."""
    matrices = real_numbers(transforms, "transforms", "(N, 4, 4) numbers")
    if matrices.ndim != 3 or matrices.shape[1:] != (4, 4):
        raise ValueError(f"transforms have shape {matrices.shape}: expected (N, 4, 4)")
    if not np.isfinite(matrices).all():
        raise ValueError(f"transform {int(np.argwhere(~np.isfinite(matrices))[0, 0])} has entries that are not finite")
    wrong = np.flatnonzero((matrices[:, 3] != (0, 0, 0, 1)).any(1))
    if len(wrong):
        raise ValueError(
            f"transform {wrong[0]} has the last row {matrices[wrong[0], 3].tolist()}: expected 0 0 0 1 (points are "
            "columns)"
        )
    if abs(matrices).max(initial=0) > MOST_SCALE:
        at = int(np.argwhere(abs(matrices) > MOST_SCALE)[0, 0])
        raise ValueError(
            f"transform {at} has entries beyond -{MOST_SCALE:g}..{MOST_SCALE:g}, whose products can overflow in "
            "float32: use larger units of length"
        )
    flat = first_flat(matrices[:, :3, :3], 1e-7, 1 / MOST_SCALE)
    if flat is not None:
        raise ValueError(
            f"transform {flat} makes the mesh flat, or smaller than {1 / MOST_SCALE:g} of its size: its 3 x 3 part "
            "must be invertible"
        )
    return matrices


def _up_to(count: int) -> str:
    return f"0 to {count - 1}" if count else "none: the scene has no instances"
