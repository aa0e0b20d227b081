"""Surfaces of active sites as scans have them, made by formula: a wavy one, a room, and the road before a car.

Each gives the sites, (N, 4) int32 (batch, z, y, x), in random order, and the grid, whose sizes are multiples of 16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

Surface = tuple[Tensor, list[int]]  # sites and grid


def wavy(sites: int, device: str) -> Surface:
    """A surface one site thick, of so many sites: where it is steep it has holes, and ever other neighbours."""
    side = math.isqrt(sites - 1) + 1
    y, x = torch.meshgrid(*(torch.arange(side, device=device),) * 2, indexing="ij")
    z = (16 * (torch.sin(x / 9.0) + torch.cos(y / 13.0)) + 34).round().long()  # 2 to 66
    surface = torch.stack((torch.zeros_like(z), z, y, x), -1).view(-1, 4)
    return shuffled(surface, sites, [80, side, side], torch.Generator(device).manual_seed(sites))


def room(sites: int, device: str) -> Surface:
    """Floor, ceiling and walls one site thick, so many in all: some nine neighbours at a site, itself among them."""
    side = math.isqrt(sites // 3)
    while len(shell := box(side // 4, side, side, device)) < sites:
        side += 1
    return shuffled(shell, sites, [side // 4, side, side], torch.Generator(device).manual_seed(sites))


def box(depth: int, height: int, width: int, device: str) -> Tensor:
    """The sites of a box's faces, (N, 4) int64."""
    faces = []
    sizes = (depth, height, width)
    for dim, size in enumerate(sizes):
        axes = [torch.arange(n, device=device) for n in sizes]
        axes[dim] = torch.tensor([0, size - 1], device=device)
        faces.append(torch.cartesian_prod(torch.zeros(1, dtype=torch.long, device=device), *axes))
    return torch.cat(faces).unique(dim=0)


def road(scans: int, device: str, beams: int = 64, azimuths: int = 1000) -> Surface:
    """Scans of a road by a LiDAR of 64 beams at 1.73 m: the ground, and things that stand on it at random distances.

    On the grid of KITTI's detectors in OpenPCDet: 40 x 1600 x 1408 voxels of 0.1 x 0.05 x 0.05 m, and one more layer.
    """
    draw = torch.Generator(device).manual_seed(scans)
    elevation = torch.linspace(math.radians(-24.8), math.radians(2.0), beams, device=device)
    azimuth = torch.linspace(-math.pi / 4, math.pi / 4, azimuths, device=device)
    ground = torch.where(elevation < 0, 1.73 / torch.tan(-elevation), torch.inf)  # (beams,), m along the ground
    wide = math.ceil(azimuths / 25)  # one thing for each 25 beams' width
    found = []
    for scan in range(scans):
        thing = 4 + 76 * torch.rand(wide, generator=draw, device=device)
        distance = torch.minimum(ground[:, None], thing.repeat_interleave(25)[:azimuths])  # (beams, azimuths)
        distance = distance + 0.02 * torch.randn(distance.shape, generator=draw, device=device)
        height = distance * torch.tan(elevation)[:, None]
        x, y, z = distance * torch.cos(azimuth), distance * torch.sin(azimuth), height.expand_as(distance)
        cell = torch.stack(((z + 3) / 0.1, (y + 40) / 0.05, x / 0.05), -1).floor().long().view(-1, 3)
        inside = ((cell >= 0) & (cell < torch.tensor([40, 1600, 1408], device=device))).all(1)
        found.append(torch.nn.functional.pad(cell[inside], (1, 0), value=scan))
    sites = torch.cat(found).unique(dim=0)
    order = torch.randperm(len(sites), generator=draw, device=device)
    return sites[order].int(), [41, 1600, 1408]


def shuffled(sites: Tensor, count: int, shape: list[int], draw: torch.Generator) -> Surface:
    """`count` of the sites, in random order, on a grid of multiples of 16."""
    order = torch.randperm(len(sites), generator=draw, device=sites.device)[:count]
    if len(order) < count:
        raise ValueError(f"expected at least {count} sites, got {len(order)}")
    return sites[order].int(), [-(-size // 16) * 16 for size in shape]
