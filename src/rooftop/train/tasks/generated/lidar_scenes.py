"""Generate streets and rooms from boxes, cylinders and ellipsoids, a new scene for each seed.

`street` and `room` return the solids of a scene and the positions of its scanner. An object (a car, a tree, a chair) is
a list of solids around its own origin, and `placed` moves an object into the scene. The same seed gives the same scene
on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

from rooftop.models.point_clouds.clouds import Colour

BOX, CYLINDER, ELLIPSOID = range(3)
Place = tuple[float, float, float]


@dataclass(frozen=True)
class Material:
    """How a surface reflects light.

    Attributes:
        least, most: range of the reflectivity; each solid has a random value in this range.
        depth_m: average depth below the surface at which rays are reflected, in metres; above 0 for foliage.
    """

    least: float
    most: float
    depth_m: float = 0.0


ASPHALT, CONCRETE, GRASS = Material(0.10, 0.20), Material(0.25, 0.45), Material(0.30, 0.50, 0.02)
PLASTER, PAINT, STEEL = Material(0.30, 0.80), Material(0.10, 0.90), Material(0.30, 0.60)
LEAVES, BARK, CLOTH = Material(0.35, 0.60, 0.25), Material(0.20, 0.35), Material(0.10, 0.60)
WHITE_PAINT, DARK_PAINT = Material(0.55, 0.90), Material(0.06, 0.25)
WOOD, RUBBER, GLASS = Material(0.25, 0.60), Material(0.04, 0.08), Material(0.08, 0.15)


@dataclass(frozen=True)
class Solid:
    """A box, an upright elliptic cylinder or an ellipsoid.

    Attributes:
        kind: BOX, CYLINDER or ELLIPSOID.
        label: index of the solid's class.
        center: x, y and z, in metres.
        half: half of the length, width and height, in metres.
        material: material of the surface.
        yaw: rotation about the vertical axis, in radians.
    """

    kind: int
    label: int
    center: tuple[float, float, float]
    half: tuple[float, float, float]
    material: Material
    yaw: float = 0.0


def placed(solids: Iterable[Solid], x: float, y: float, yaw: float = 0.0, z: float = 0.0) -> list[Solid]:
    """Rotate an object, given as solids around its own origin, by `yaw`, and move it to (x, y, z)."""
    c, s = math.cos(yaw), math.sin(yaw)
    return [
        replace(
            solid,
            center=(
                x + c * solid.center[0] - s * solid.center[1],
                y + s * solid.center[0] + c * solid.center[1],
                z + solid.center[2],
            ),
            yaw=solid.yaw + yaw,
        )
        for solid in solids
    ]


# ---- streets ---------------------------------------------------------------------------------------------------

STREET: dict[str, Colour] = {
    "road": (104, 98, 128),
    "sidewalk": (214, 150, 214),
    "lawn": (158, 204, 110),
    "building": (222, 186, 128),
    "plants": (46, 150, 84),
    "vehicle": (80, 160, 255),
    "pole": (255, 226, 90),
    "person": (255, 92, 122),
}
ROAD, SIDEWALK, LAWN, BUILDING, PLANTS, VEHICLE, POLE, PERSON = range(len(STREET))
CURB_M = 0.14


def vehicle(chance: Random) -> list[Solid]:
    """A car, a van or a truck, which faces the direction +x."""
    kind = chance.choices(("car", "van", "truck"), (8, 2, 1))[0]
    length, width, height = {"car": (4.4, 1.8, 1.5), "van": (5.4, 2.0, 2.3), "truck": (8.0, 2.4, 3.2)}[kind]
    length, width, height = (size * chance.uniform(0.9, 1.1) for size in (length, width, height))
    a, b = length / 2, width / 2
    wheel = 0.32 if kind == "car" else 0.4
    parts = [
        Solid(ELLIPSOID, VEHICLE, (x * (a - 0.8), y * (b - 0.08), wheel), (wheel, 0.14, wheel), RUBBER)
        for x in (-1, 1)
        for y in (-1, 1)
    ]
    if kind == "car":
        waist = 0.55 * height
        rear = chance.uniform(-0.16, -0.04) * length
        cabin = chance.uniform(0.24, 0.32) * length
        parts += [
            Solid(BOX, VEHICLE, (0, 0, (waist + 0.22) / 2), (a, b, (waist - 0.22) / 2), PAINT),
            Solid(BOX, VEHICLE, (rear, 0, (height + waist) / 2), (cabin, 0.84 * b, (height - waist) / 2), GLASS),
            Solid(BOX, VEHICLE, (rear, 0, height), (0.82 * cabin, 0.8 * b, 0.04), PAINT),
        ]
    elif kind == "van":
        parts += [
            Solid(BOX, VEHICLE, (-0.1 * a, 0, (height + 0.3) / 2), (0.9 * a, b, (height - 0.3) / 2), PAINT),
            Solid(BOX, VEHICLE, (0.85 * a, 0, 0.75), (0.15 * a, 0.95 * b, 0.45), PAINT),
        ]
    else:
        parts += [
            Solid(BOX, VEHICLE, (-0.28 * a, 0, height / 2 + 0.4), (0.72 * a, b, height / 2 - 0.4), PAINT),
            Solid(BOX, VEHICLE, (0.76 * a, 0, 1.4), (0.24 * a, 0.95 * b, 1.1), PAINT),
            Solid(BOX, VEHICLE, (0, 0, 0.7), (0.95 * a, 0.4 * b, 0.2), STEEL),
        ]
    return parts


def person(chance: Random) -> list[Solid]:
    """A standing or walking person, who faces the direction +x."""
    tall = chance.uniform(1.5, 1.9)
    step = chance.uniform(0, 0.25)
    legs, chest = 0.47 * tall, 0.83 * tall
    parts = [
        Solid(CYLINDER, PERSON, (side * step, side * 0.09, legs / 2), (0.085, 0.085, legs / 2), CLOTH)
        for side in (-1, 1)
    ]
    parts += [
        Solid(CYLINDER, PERSON, (-side * step / 2, side * 0.25, 0.62 * tall), (0.055, 0.055, 0.17 * tall), CLOTH)
        for side in (-1, 1)
    ]
    return [
        *parts,
        Solid(CYLINDER, PERSON, (0, 0, (legs + chest) / 2), (0.14, 0.2, (chest - legs) / 2), CLOTH),
        Solid(ELLIPSOID, PERSON, (0, 0, 0.925 * tall), (0.11, 0.09, 0.075 * tall), CLOTH),
    ]


def tree(chance: Random) -> list[Solid]:
    """A tree at the origin: a trunk with two to four crowns, in metres."""
    trunk, wide = chance.uniform(1.8, 3.2), chance.uniform(1.1, 2.2)
    thick = chance.uniform(0.1, 0.24)
    parts = [Solid(CYLINDER, PLANTS, (0, 0, trunk / 2 + 0.3), (thick, thick, trunk / 2 + 0.3), BARK)]
    for _ in range(chance.randint(2, 4)):
        size = wide * chance.uniform(0.6, 1)
        x, y, z = (chance.gauss(0, 0.3 * wide) for _ in range(3))
        parts.append(
            Solid(ELLIPSOID, PLANTS, (x, y, trunk + wide + z), (size, size, size * chance.uniform(0.7, 1.3)), LEAVES)
        )
    return parts


def pole(chance: Random) -> list[Solid]:
    """A pole with a lamp whose arm points to +y, or with a sign or a traffic light that faces -x."""
    kind = chance.choices(("lamp", "sign", "light"), (3, 3, 1))[0]
    if kind == "lamp":
        tall, arm = chance.uniform(5, 8), chance.uniform(0.6, 1.6)
        return [
            Solid(CYLINDER, POLE, (0, 0, tall / 2), (0.08, 0.08, tall / 2), STEEL),
            Solid(CYLINDER, POLE, (0, 0, 0.5), (0.12, 0.12, 0.5), STEEL),
            Solid(BOX, POLE, (0, arm / 2, tall), (0.05, arm / 2, 0.04), STEEL),
            Solid(BOX, POLE, (0, arm, tall - 0.02), (0.14, 0.35, 0.07), STEEL),
        ]
    tall = chance.uniform(2.2, 3.2)
    post = Solid(CYLINDER, POLE, (0, 0, tall / 2), (0.045, 0.045, tall / 2), STEEL)
    if kind == "sign":
        return [post, Solid(BOX, POLE, (-0.06, 0, tall - 0.3), (0.015, 0.32, 0.32), Material(0.8, 1.0))]
    return [post, Solid(BOX, POLE, (-0.1, 0, tall), (0.12, 0.15, 0.45), STEEL)]


def house(chance: Random, wide: float, deep: float) -> list[Solid]:
    """A house, whose front lies on y = 0 and faces -y."""
    floors = chance.randint(1, 5)
    storey = chance.uniform(2.7, 3.3)
    tall = floors * storey + chance.uniform(0.2, 1)
    a = wide / 2
    parts = [
        Solid(BOX, BUILDING, (0, deep / 2, tall / 2), (a, deep / 2, tall / 2), PLASTER),
        Solid(BOX, BUILDING, (0, deep / 2, tall), (a + 0.3, deep / 2 + 0.3, 0.12), CONCRETE),
        Solid(BOX, BUILDING, (chance.uniform(-0.6, 0.6) * a, -0.25, 0.15), (0.9, 0.5, 0.15), CONCRETE),
    ]
    columns = max(1, round(wide / 3.2))
    balconies = chance.random() < 0.4
    for floor in range(floors):
        for column in range(columns):
            x, z = -a + (column + 0.5) * wide / columns, (floor + 0.5) * storey
            parts.append(Solid(BOX, BUILDING, (x, 0, z + 0.1), (0.55, 0.05, 0.75), GLASS))
            if balconies and floor and (floor + column) % 2 == 0:
                parts.append(Solid(BOX, BUILDING, (x, -0.6, z - 0.55), (0.9, 0.6, 0.5), CONCRETE))
    return parts


def block(chance: Random, left: float, right: float, curb: float, walk: float) -> list[Solid]:
    """One side of a stretch of street, from x = left to x = right: vehicles parked at the curb y = curb, and beyond the
    curb a sidewalk of width `walk` with people, trees and poles, then a lawn with houses."""
    front = curb + walk
    middle, half = (left + right) / 2, (right - left) / 2
    parts = [
        Solid(BOX, SIDEWALK, (middle, curb + 20, CURB_M - 0.5), (half, 20, 0.5), CONCRETE),
        Solid(BOX, LAWN, (middle, front + 20, CURB_M - 0.47), (half - walk, 20, 0.5), GRASS),
    ]
    garden = chance.choice((0.0, chance.uniform(1.5, 5)))
    x = left + walk
    while (wide := chance.uniform(7, 15)) < right - walk - x:
        parts += placed(house(chance, wide, chance.uniform(7, 11)), x + wide / 2, front + garden, z=CURB_M)
        if garden and chance.random() < 0.6:
            tall = chance.uniform(0.35, 0.8)
            center = (x + 0.35 * wide, front + 0.4, CURB_M + tall)
            parts.append(Solid(BOX, PLANTS, center, (0.33 * wide, 0.3, tall), LEAVES))
        for _ in range(chance.randint(0, 3) if garden else 0):
            size = chance.uniform(0.3, 0.8)
            at = (x + chance.uniform(0, wide), front + chance.uniform(0.9, max(1.0, garden - 0.5)), CURB_M + 0.8 * size)
            parts.append(Solid(ELLIPSOID, PLANTS, at, (size, size, size), LEAVES))
        x += wide + chance.choice((0.0, 0.0, chance.uniform(2, 6)))
    trees, x = chance.random() < 0.75, left + chance.uniform(1, 6)
    while x < right - 1:
        kind = chance.random()
        if trees and kind < 0.6:
            parts += placed(tree(chance), x, curb + chance.uniform(0.6, 0.9), z=CURB_M)
        elif kind < 0.85:
            parts += placed(pole(chance), x, curb + 0.5, math.pi, z=CURB_M)
        x += chance.uniform(4, 9)
    for _ in range(chance.randint(1, 7)):
        x, y = chance.uniform(left, right), curb + chance.uniform(0.8, walk)
        parts += placed(person(chance), x, y, chance.uniform(0, 2 * math.pi), CURB_M)
    x = left + chance.uniform(4, 8)
    while x < right - 6:
        if chance.random() < 0.65:
            parts += placed(vehicle(chance), x, curb - 1.25, chance.choice((0, math.pi)) + chance.gauss(0, 0.02))
        x += chance.uniform(6.2, 9.5)
    return parts


def street(chance: Random) -> tuple[list[Solid], list[Place]]:
    """A street along x, sometimes with a crossing, and the scanner on a car in the right lane."""
    half = chance.uniform(5.2, 7.5)
    walk = chance.uniform(2.0, 3.8)
    crossing = chance.uniform(-30, 30) if chance.random() < 0.6 else 200.0
    mouth = chance.uniform(4, 6)
    lane = -(half - 2.4) / 2
    parts = [Solid(BOX, ROAD, (0, 0, -0.5), (120, 120, 0.5), ASPHALT)]
    for turn in (0.0, math.pi):
        away = crossing if turn == 0 else -crossing
        for left, right in ((-75.0, min(75.0, away - mouth)), (max(-75.0, away + mouth), 75.0)):
            if right - left > 20:
                parts += placed(block(chance, left, right, half, walk), 0, 0, turn)
    x = chance.uniform(8, 20)
    while x < 60:  # cars ahead, behind, and oncoming
        for at, y, yaw in ((x, lane, 0.0), (-x - 2, lane, 0.0), (chance.uniform(-60, 60), -lane, math.pi)):
            if chance.random() < 0.5:
                parts += placed(vehicle(chance), at, y, yaw)
        x += chance.uniform(12, 30)
    for _ in range(chance.randint(0, 3)):
        side = chance.choice((-1, 1))
        parts += placed(person(chance), side * chance.uniform(6, 30), chance.uniform(-half, half), side * math.pi / 2)
    return parts, [(0.0, lane, chance.uniform(1.6, 2.0))]


# ---- rooms -----------------------------------------------------------------------------------------------------

ROOM: dict[str, Colour] = {
    "floor": (128, 118, 108),
    "ceiling": (196, 200, 208),
    "wall": (222, 200, 164),
    "door": (168, 102, 64),
    "table": (255, 148, 70),
    "chair": (80, 160, 255),
    "sofa": (176, 110, 230),
    "shelf": (60, 172, 138),
    "lamp": (255, 226, 90),
}
FLOOR, CEILING, WALL, DOOR, TABLE, CHAIR, SOFA, SHELF, LAMP = range(len(ROOM))


def table(chance: Random) -> list[Solid]:
    """A dining table or a low table at the origin, in metres."""
    tall = chance.uniform(0.68, 0.78) if chance.random() < 0.75 else chance.uniform(0.38, 0.5)
    a, b = chance.uniform(0.45, 1.0), chance.uniform(0.35, 0.5)
    if chance.random() < 0.35:
        return [
            Solid(CYLINDER, TABLE, (0, 0, tall - 0.02), (b + 0.1, b + 0.1, 0.02), WOOD),
            Solid(CYLINDER, TABLE, (0, 0, tall / 2), (0.05, 0.05, tall / 2), STEEL),
            Solid(CYLINDER, TABLE, (0, 0, 0.02), (0.28, 0.28, 0.02), STEEL),
        ]
    legs = [(x * (a - 0.06), y * (b - 0.06)) for x in (-1, 1) for y in (-1, 1)]
    return [
        Solid(BOX, TABLE, (0, 0, tall - 0.02), (a, b, 0.02), WOOD),
        *(Solid(BOX, TABLE, (x, y, tall / 2 - 0.02), (0.03, 0.03, tall / 2 - 0.02), WOOD) for x, y in legs),
    ]


def chair(chance: Random) -> list[Solid]:
    """A chair; a person on the chair faces the direction +x."""
    a, seat = chance.uniform(0.19, 0.24), chance.uniform(0.42, 0.48)
    back = chance.uniform(0.8, 1.0)
    parts = [
        Solid(BOX, CHAIR, (0, 0, seat - 0.02), (a, a, 0.025), WOOD),
        Solid(BOX, CHAIR, (-a, 0, (back + seat) / 2 + 0.06), (0.018, a, (back - seat) / 2 - 0.06), WOOD),
    ]
    if chance.random() < 0.3:
        return [
            *parts,
            Solid(CYLINDER, CHAIR, (0, 0, seat / 2), (0.03, 0.03, seat / 2), STEEL),
            Solid(CYLINDER, CHAIR, (0, 0, 0.03), (0.25, 0.25, 0.03), STEEL),
            Solid(BOX, CHAIR, (-a, 0, seat + 0.05), (0.018, 0.04, 0.08), STEEL),
        ]
    for x in (-1, 1):
        for y in (-1, 1):
            top = back if x < 0 else seat
            parts.append(Solid(BOX, CHAIR, (x * a, y * (a - 0.02), top / 2), (0.018, 0.018, top / 2), WOOD))
    return parts


def sofa(chance: Random) -> list[Solid]:
    """A sofa with its back at y = 0, facing the direction +y."""
    a, deep = chance.uniform(0.5, 1.1), chance.uniform(0.75, 0.95)
    back, arm = chance.uniform(0.7, 0.9), chance.uniform(0.55, 0.65)
    return [
        Solid(BOX, SOFA, (0, deep / 2, 0.25), (a, deep / 2, 0.18), CLOTH),
        Solid(BOX, SOFA, (0, 0.1, (back + 0.1) / 2), (a, 0.1, (back - 0.1) / 2), CLOTH),
        *(Solid(BOX, SOFA, (x * a, deep / 2, arm / 2 + 0.03), (0.1, deep / 2, arm / 2 - 0.03), CLOTH) for x in (-1, 1)),
    ]


def shelf(chance: Random) -> list[Solid]:
    """A closed cupboard, or shelves with objects on them; the back lies on y = 0."""
    a, deep, tall = chance.uniform(0.35, 0.9), chance.uniform(0.25, 0.55), chance.uniform(0.8, 2.1)
    b = deep / 2
    if chance.random() < 0.4:
        return [Solid(BOX, SHELF, (0, b, tall / 2), (a, b, tall / 2), WOOD)]
    parts = [Solid(BOX, SHELF, (0, 0.01, tall / 2), (a, 0.01, tall / 2), WOOD)]
    parts += [Solid(BOX, SHELF, (x * a, b, tall / 2), (0.012, b, tall / 2), WOOD) for x in (-1, 1)]
    boards = max(2, round(tall / 0.36))
    for board in range(boards + 1):
        z = 0.04 + board * (tall - 0.05) / boards
        parts.append(Solid(BOX, SHELF, (0, b, z), (a, b, 0.012), WOOD))
        if board < boards and chance.random() < 0.8:
            wide, books = chance.uniform(0.3, 0.9) * a, chance.uniform(0.1, 0.14)
            at = (chance.uniform(-1, 1) * (a - wide), 0.6 * deep, z + books)
            parts.append(Solid(BOX, SHELF, at, (wide, 0.35 * deep, books), Material(0.1, 0.7)))
    return parts


def lamp(chance: Random, ceiling: float) -> list[Solid]:
    """A lamp that stands on the floor, or hangs from the ceiling."""
    shade = chance.uniform(0.14, 0.22)
    if chance.random() < 0.5:
        tall = chance.uniform(1.4, 1.7)
        return [
            Solid(CYLINDER, LAMP, (0, 0, 0.015), (0.15, 0.15, 0.015), STEEL),
            Solid(CYLINDER, LAMP, (0, 0, tall / 2), (0.018, 0.018, tall / 2), STEEL),
            Solid(CYLINDER, LAMP, (0, 0, tall), (shade, shade, 0.14), CLOTH),
        ]
    drop = chance.uniform(0.5, 0.9)
    return [
        Solid(CYLINDER, LAMP, (0, 0, ceiling - drop / 2), (0.012, 0.012, drop / 2), STEEL),
        Solid(ELLIPSOID, LAMP, (0, 0, ceiling - drop), (shade, shade, 0.8 * shade), CLOTH),
    ]


def room(chance: Random) -> tuple[list[Solid], list[Place]]:
    """A furnished room, with the scanner on a tripod at up to three positions."""
    a, b, tall = chance.uniform(2.2, 4.2), chance.uniform(1.8, 3.2), chance.uniform(2.4, 3.1)
    parts = [
        Solid(BOX, FLOOR, (0, 0, -0.1), (a + 1, b + 1, 0.1), WOOD),
        Solid(BOX, CEILING, (0, 0, tall + 0.1), (a + 1, b + 1, 0.1), PLASTER),
    ]
    sides = (((0, -b, 0.0), a), ((a, 0, math.pi / 2), b), ((0, b, math.pi), a), ((-a, 0, -math.pi / 2), b))
    free = _Floor(a, b, chance)
    doorway = chance.randrange(4)
    # in the wall's own frame, the wall lies on y = 0 and the room at y > 0
    for number, ((x, y, yaw), half) in enumerate(sides):
        wall = [Solid(BOX, WALL, (0, -0.1, tall / 2), (half + 0.2, 0.1, tall / 2), WHITE_PAINT)]
        if number == doorway or chance.random() < 0.15:
            at = chance.uniform(-1, 1) * (half - 0.7)
            wall += [
                Solid(BOX, DOOR, (at, 0, 1.0), (0.42, 0.04, 1.0), DARK_PAINT),
                Solid(ELLIPSOID, DOOR, (at + 0.34, 0.08, 1.03), (0.06, 0.03, 0.02), STEEL),
            ]
            free.take(*_moved(at, 0.5, x, y, yaw), 0.6)
        parts += placed(wall, x, y, yaw)
        for _ in range(chance.randint(1, 3)):
            make = chance.choice((sofa, shelf, shelf))
            thing = make(chance)
            reach = max(abs(solid.center[0]) + solid.half[0] for solid in thing)
            along = chance.uniform(-1, 1) * max(0.0, half - reach - 0.05)
            if free.take(*_moved(along, 0.4, x, y, yaw), reach + 0.05):
                parts += placed(thing, *_moved(along, 0.03, x, y, yaw), yaw)
    for _ in range(chance.randint(1, 4)):
        thing = table(chance)
        reach = max(math.hypot(*solid.half[:2]) for solid in thing)
        if (spot := free.find(reach + 0.1)) is None:
            continue
        yaw = chance.choice((0, math.pi / 2)) + chance.gauss(0, 0.2)
        parts += placed(thing, *spot, yaw)
        top = thing[0]
        for side in chance.sample(range(4), chance.randint(0, 4)):
            far = (top.half[side % 2]) + chance.uniform(0.05, 0.3)
            out = yaw + side * math.pi / 2
            seat = spot[0] + far * math.cos(out), spot[1] + far * math.sin(out)
            if free.holds(*seat, 0.3):
                parts += placed(chair(chance), *seat, out + math.pi + chance.gauss(0, 0.25))
    for make in (chair, chair, lambda chance: lamp(chance, tall), lambda chance: lamp(chance, tall)):
        if (spot := free.find(0.3)) is not None and chance.random() < 0.7:
            parts += placed(make(chance), *spot, chance.uniform(0, 2 * math.pi))
    spots = [spot for _ in range(chance.randint(2, 3)) if (spot := free.find(0.3)) is not None]
    return parts, [(*spot, chance.uniform(1.2, 1.7)) for spot in spots or [(0.0, 0.0)]]


def _moved(along: float, out: float, x: float, y: float, yaw: float) -> tuple[float, float]:
    """Convert a point at a wall, `along` the wall and `out` from it, to x and y of the room. `x`, `y` and `yaw` place
    the wall's frame."""
    c, s = math.cos(yaw), math.sin(yaw)
    return x + c * along - s * out, y + s * along + c * out


class _Floor:
    """The occupied circles on a floor that extends from -a to a in x and from -b to b in y."""

    def __init__(self, a: float, b: float, chance: Random) -> None:
        self.a, self.b, self.chance = a, b, chance
        self.taken: list[tuple[float, float, float]] = []

    def holds(self, x: float, y: float, radius: float) -> bool:
        return abs(x) + radius < self.a and abs(y) + radius < self.b

    def take(self, x: float, y: float, radius: float) -> bool:
        """Occupy a circle with the centre (x, y) if it is free; returns whether it was free."""
        free = all(math.hypot(x - u, y - v) > radius + r for u, v, r in self.taken)
        if free:
            self.taken.append((x, y, radius))
        return free

    def find(self, radius: float) -> tuple[float, float] | None:
        """Find and occupy a free circle; returns its centre, or None if no free circle was found."""
        for _ in range(50):
            x, y = (self.chance.uniform(-1, 1) * max(0.0, size - radius) for size in (self.a, self.b))
            if self.take(x, y, radius):
                return x, y
        return None
