"""Simulated LiDAR scans of streets and rooms, with a label for each point.

A scene consists of boxes, cylinders and ellipsoids, which lidar_scenes.py generates from a seed. A scanner turns in
steps, and its vertically stacked beams measure at each step. `cast` finds the first hit of each ray, in plain PyTorch,
on any device.

The difficulties of real scans are simulated too. Ranges have noise, many rays that hit dark or slanted surfaces are
lost, and rays enter foliage. A street is scanned from only one position, by a scanner that is rarely level. The same
seed gives the same scene on every machine, and the same scan on every device of one type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

import torch
from torch import Tensor

from rooftop.models.point_clouds.clouds import Cloud, Colour
from rooftop.train.tasks.generated.lidar_scenes import BOX, CEILING, ELLIPSOID, ROOM, STREET, Place, Solid, room, street

SECTORS = 32  # number of sectors of a turn
SLACK_RAD = 1e-3  # overlap of sectors, which exceeds float32's error in an angle of a few degrees


# ---- casting rays ----------------------------------------------------------------------------------------------


class Solids(NamedTuple):
    """The solids of a scene as tensors of S rows: first boxes, then cylinders, then ellipsoids.

    Attributes:
        kinds: how many solids are boxes, cylinders and ellipsoids.
        center, half: float32 (S, 3), as in `Solid`.
        turn: float32 (S, 2), cosine and sine of the yaw.
        label: int64 (S,), as in `Solid`.
        reflectivity, depth_m: float32 (S,); `depth_m` as in `Material`.
    """

    kinds: tuple[int, int, int]
    center: Tensor
    half: Tensor
    turn: Tensor
    label: Tensor
    reflectivity: Tensor
    depth_m: Tensor


def as_tensors(solids: Sequence[Solid], chance: Random, device: torch.device) -> Solids:
    """Convert solids to tensors on the device, and draw the reflectivity of each."""
    ordered = sorted(solids, key=lambda solid: solid.kind)
    rows = [
        (
            *solid.center,
            *solid.half,
            math.cos(solid.yaw),
            math.sin(solid.yaw),
            chance.uniform(solid.material.least, solid.material.most),
            solid.material.depth_m,
        )
        for solid in ordered
    ]
    table = torch.tensor(rows, dtype=torch.float32).to(device)
    boxes, cylinders, ellipsoids = (sum(solid.kind == kind for solid in solids) for kind in range(3))
    return Solids(
        (boxes, cylinders, ellipsoids),
        table[:, :3],
        table[:, 3:6],
        table[:, 6:8],
        torch.tensor([solid.label for solid in ordered]).to(device),
        table[:, 8],
        table[:, 9],
    )


class Hits(NamedTuple):
    """The first hits of R rays.

    Attributes:
        distance: float32 (R,), in metres; infinite if a ray hits nothing.
        solid: int64 (R,), row of the solid in `Solids`; 0 if a ray hits nothing.
        cosine: float32 (R,), cosine of the angle between the ray and the surface's normal, 0..1.
    """

    distance: Tensor
    solid: Tensor
    cosine: Tensor


def cast(solids: Solids, origin: Tensor, directions: Tensor) -> Hits:
    """Find the first hits of rays, unit vectors (R, 3), from one origin, float32 (3,). Rays do not hit solids that
    contain the origin.

    A change of coordinates makes each solid a cube of -1..1, or a cylinder or ball of radius 1. In these coordinates a
    ray is still a line with the same parameter. Each solid is an intersection of slabs, discs and balls, and a ray is
    inside each of these shapes for one interval. The ray hits the solid where the last of these intervals begins, if
    none of the intervals has ended before.

    Rays are processed in `SECTORS` sectors of equally many consecutive rays, each with only the solids that reach into
    the sector. So rays should be ordered by heading. The host waits for the device once, to select the solids of all
    sectors.
    """
    parts = directions.chunk(SECTORS)
    reaching = torch.stack([_reaches(solids, origin, part) for part in parts]).cpu()
    hits = [_first(solids, those, origin, part) for those, part in zip(reaching, parts, strict=True)]
    return Hits(*(torch.cat(column) for column in zip(*hits, strict=True)))


def _reaches(solids: Solids, origin: Tensor, directions: Tensor) -> Tensor:
    """For each of S solids, whether at least one of the rays may hit it, judged from above (x and y only): (S,)
    bool."""
    flat = torch.nn.functional.normalize(directions[:, :2], dim=1)
    middle = torch.nn.functional.normalize(flat.mean(0), dim=0)
    wide = (flat @ middle).min().clamp(-1, 1).acos()
    away = (solids.center - origin)[:, :2]
    distance, radius = away.norm(dim=1), solids.half[:, :2].norm(dim=1)
    aside = (away @ middle / distance.clamp(min=1e-9)).clamp(-1, 1).acos()
    half = (radius / distance.clamp(min=1e-9)).clamp(max=1).asin()
    return (distance <= radius) | (aside <= wide + half + SLACK_RAD)


def _first(solids: Solids, those: Tensor, origin: Tensor, directions: Tensor) -> Hits:
    """Find the first solid that each ray hits. Only solids that the mask `those`, (S,) bool on the CPU, selects
    count."""
    found, rows = [torch.full_like(directions[:, :1], math.inf)], [torch.zeros(1, dtype=torch.int64)]
    start = 0
    for kind, count in enumerate(solids.kinds):
        rows.append(start + those[start : start + count].nonzero().squeeze(1))
        begin, end = _within(kind, *_unit_rays(solids, rows[-1].to(origin.device), origin, directions[:, None]))
        found.append(torch.where((begin <= end) & (begin > 0), begin, math.inf))
        start += count
    distance, which = torch.cat(found, 1).min(1)
    solid = torch.cat(rows).to(origin.device)[which]
    o, d = _unit_rays(solids, solid, origin, directions)
    at = o + torch.where(distance.isfinite(), distance, 0)[:, None] * d
    normal = _unit_normal(at, solid, solids) / solids.half[solid]
    along = d * solids.half[solid]  # the ray's direction in the solid's frame, in metres
    cosine = (normal * along).sum(1).abs() / normal.norm(dim=1).clamp(min=1e-20)
    return Hits(distance, solid, cosine.clamp(max=1))


def _unit_rays(solids: Solids, those: Tensor, origin: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
    """Transform rays to the frames of the solids `those` (indices, broadcast with the rays), in which a solid spans
    -1..1. Returns origins and directions."""
    c, s = solids.turn[those].unbind(-1)

    def turned(v: Tensor) -> Tensor:
        x, y, z = torch.broadcast_tensors(*v.unbind(-1), c)[:3]
        return torch.stack((c * x + s * y, c * y - s * x, z), -1) / solids.half[those]

    d = turned(directions)
    return turned(origin - solids.center[those]), torch.where(d.abs() < 1e-9, 1e-9, d)


def _within(kind: int, o: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Intersect rays with origins `o` and directions `d`, (R, S, 3), with unit solids of one kind. Returns the
    distances, in units of `d`, at which rays enter and leave, (R, S); enter > leave if a ray misses."""
    if kind == BOX:
        return _slabs(o, d)
    if kind == ELLIPSOID:
        return _ball(o, d)
    (rises, sinks), (enters, leaves) = _slabs(o[..., 2:], d[..., 2:]), _ball(o[..., :2], d[..., :2])
    return torch.maximum(rises, enters), torch.minimum(sinks, leaves)


def _slabs(o: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    one, other = (-1 - o) / d, (1 - o) / d
    return torch.minimum(one, other).amax(-1), torch.maximum(one, other).amin(-1)


def _ball(o: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """Ray parameters at which each ray enters and leaves a unit ball, in any number of dimensions.

    The computation starts from the point nearest to the centre, so it is accurate even for a distant scanner.
    """
    square = (d * d).sum(-1)
    middle = -(o * d).sum(-1) / square
    nearest = o + middle[..., None] * d
    rest = 1 - (nearest * nearest).sum(-1)
    half = (rest.clamp(min=0) / square).sqrt()
    return torch.where(rest > 0, middle - half, math.inf), middle + half


def _unit_normal(at: Tensor, solid: Tensor, solids: Solids) -> Tensor:
    """Compute the normals of unit solids at surface points (R, 3); a normal may have any length."""
    boxes, cylinders, _ = solids.kinds
    size = at.abs()
    cube = torch.where(size == size.amax(1, keepdim=True), at, 0)
    on_top = size[:, 2] > at[:, :2].norm(dim=1)
    upright = torch.tensor([0.0, 0.0, 1.0], device=at.device)
    tube = torch.where(on_top[:, None], upright, at * (1 - upright))
    rest = torch.where((solid < boxes + cylinders)[:, None], tube, at)
    return torch.where((solid < boxes)[:, None], cube, rest)


# ---- the scanner -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scanner:
    """A scanner head that turns about its vertical axis.

    Attributes:
        beams: number of beams, stacked vertically at equal angles.
        steps: number of steps in a turn.
        lowest_deg, highest_deg: elevations of the beams.
        farthest_m: maximum measured distance.
        noise_m: standard deviation of a measured range.
        weakest: reflectivity at which half of the rays are lost that hit a surface at a right angle, at a distance of
            `farthest_m` / 2.
        lost: fraction of rays that are lost at random, at any distance.
    """

    beams: int
    steps: int
    lowest_deg: float
    highest_deg: float
    farthest_m: float
    noise_m: float
    weakest: float = 0.008
    lost: float = 0.01

    def directions(self, device: torch.device) -> Tensor:
        """Directions of all rays, unit vectors (steps * beams, 3), in the order of their headings."""
        up = torch.linspace(math.radians(self.lowest_deg), math.radians(self.highest_deg), self.beams, device=device)
        heading = (torch.arange(self.steps, device=device) * (2 * math.pi / self.steps))[:, None]
        x, y, z = up.cos() * heading.cos(), up.cos() * heading.sin(), up.sin().expand(self.steps, -1)
        return torch.stack((x, y, z), -1).flatten(0, 1)


class Scan(NamedTuple):
    """A cloud of N points with known labels.

    Attributes:
        xyz, intensity, labels: as in a `Cloud`; coordinates are float32.
    """

    xyz: Tensor
    intensity: Tensor
    labels: Tensor

    def cloud(self) -> Cloud:
        return Cloud(*self)


def scan(solids: Solids, scanner: Scanner, places: Tensor, seed: int) -> Scan:
    """Scan a scene from K scanner positions (K, 3), and concatenate the points, in the solids' frame and on their
    device.

    The host waits for the device, because the number of returned rays depends on the scene.
    """
    device = places.device
    chance = torch.Generator(device).manual_seed(seed)
    directions = scanner.directions(device)
    hits = [cast(solids, place, directions) for place in places]
    distance, solid, cosine = (torch.cat(column) for column in zip(*hits, strict=True))
    origins, directions = places.repeat_interleave(len(directions), 0), directions.repeat(len(places), 1)

    def drawn() -> Tensor:
        return torch.rand(len(distance), generator=chance, device=device)

    deeper = -solids.depth_m[solid] * drawn().clamp(min=1e-6).log()
    noise = scanner.noise_m * torch.randn(len(distance), generator=chance, device=device)
    distance = distance + deeper + noise
    # `signal`, the returned light, falls with the square of the distance; `intensity` does not depend on the distance.
    # Foliage has no surface, so for foliage the angle is ignored.
    cosine = torch.where(solids.depth_m[solid] > 0.1, 0.7, cosine)
    intensity = (solids.reflectivity[solid] * cosine * (0.9 + 0.2 * drawn())).clamp(0, 1)
    signal = intensity * (scanner.farthest_m / (2 * distance)) ** 2
    back = (distance < scanner.farthest_m) & (signal > scanner.weakest * 2 * drawn()) & (drawn() > scanner.lost)
    xyz = origins + distance[:, None] * directions
    return Scan(xyz[back], intensity[back], solids.label[solid[back]])


# ---- settings --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A kind of scene and its scanner.

    Attributes:
        classes: names and colours of the classes, by number.
        build: generates the solids, and the positions of the scanner.
        scanner: the scanner.
        tilt_deg: standard deviation of the scanner's pitch and roll.
        lid: the class that pictures omit because it hides the other classes, e.g. a ceiling; -1: no class.
    """

    classes: dict[str, Colour]
    build: Callable[[Random], tuple[list[Solid], list[Place]]]
    scanner: Scanner
    tilt_deg: float
    lid: int = -1


SETTINGS = {
    "street": Setting(STREET, street, Scanner(64, 2048, -25, 12, 60, 0.02), tilt_deg=0.7),
    "room": Setting(ROOM, room, Scanner(128, 1024, -62, 62, 20, 0.006), tilt_deg=0.0, lid=CEILING),
}


def simulate(setting: Setting, seed: int, device: torch.device | str = "cpu") -> Scan:
    """Generate a scene from a seed and scan it, in a frame with random heading, pitch and roll. The host waits for the
    device."""
    device, chance = torch.device(device), Random(seed)
    solids, places = setting.build(chance)
    found = scan(as_tensors(solids, chance, device), setting.scanner, torch.tensor(places).to(device), seed)
    heading = chance.uniform(-math.pi, math.pi)
    roll, pitch = (math.radians(chance.gauss(0, setting.tilt_deg)) for _ in range(2))
    turn = _about(2, heading) @ _about(1, pitch) @ _about(0, roll)
    return found._replace(xyz=found.xyz @ turn.T.to(device))


def _about(axis: int, angle: float) -> Tensor:
    """The matrix of a rotation about an axis, (3, 3)."""
    one, other = (axis + 1) % 3, (axis + 2) % 3
    turn = torch.eye(3)
    turn[one, one] = turn[other, other] = math.cos(angle)
    turn[other, one], turn[one, other] = math.sin(angle), -math.sin(angle)
    return turn
