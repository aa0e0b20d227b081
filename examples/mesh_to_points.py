"""From meshes to a sparse network: rendered depth becomes points, and points become voxels that a network labels.

    python examples/mesh_to_points.py [--views 6] [--size 128] [--steps 40] [--out points.npy]

Rocks and rings lie on a floor, and cameras stand around them. For each pixel the renderer returns the distance of the
surface and its instance. The result is a cloud of points with labels that nobody had to draw. A small network of sparse
convolutions learns from four such scenes to tell floor, rock and ring apart, and is tested on another scene. With --out
the script writes the points of the test scene: x, y, z and the predicted label.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from pathlib import Path

import numpy as np
import torch
import trimesh
from field import rock
from torch import Tensor

import rooftop.sparse as spconv
from rooftop import scene

KINDS = ("floor", "rock", "ring")
VOXEL = 0.2  # units; a rock is about 2 across
EXTENT = (-6.0, -6.0, -0.6, 6.0, 6.0, 3.0)
THINGS = 10  # number of rocks and rings in a scene
SCENES = 4  # number of training scenes


def built(folder: Path) -> list[Path]:
    """A geometry file of each kind, in the order of KINDS."""
    ring = trimesh.creation.torus(0.7, 0.25, major_sections=256, minor_sections=96)
    floor = trimesh.creation.box((11, 11, 0.2))
    floor.apply_translation((0, 0, -0.1))
    meshes = ((floor.vertices, floor.faces), rock(6), (ring.vertices, ring.faces))
    for kind, (vertices, faces) in zip(KINDS, meshes, strict=True):
        scene.build(vertices, faces, folder / f"{kind}.rtg")
    return [folder / f"{kind}.rtg" for kind in KINDS]


def arranged(files: list[Path], seed: int) -> tuple[scene.Scene, Tensor]:
    """A floor with things on it, and the kind of each instance."""
    random = np.random.default_rng(seed)
    world = scene.Scene()
    meshes = [world.add_mesh(file) for file in files]
    kinds = [0, *random.permutation([1 + number % 2 for number in range(THINGS)])]
    world.add_instance(meshes[0])
    cells = random.permutation(16)[:THINGS]
    for kind, cell in zip(kinds[1:], cells, strict=True):
        turn, _ = np.linalg.qr(random.normal(size=(3, 3)))
        transform = np.eye(4)
        transform[:3, :3] = turn * np.linalg.det(turn) * random.uniform(0.7, 1.1)
        place = (np.array([cell % 4, cell // 4]) - 1.5) * 2.5 + random.uniform(-0.3, 0.3, 2)
        transform[:3, 3] = (*place, 0.8)
        world.add_instance(meshes[kind], transform)
    return world, torch.tensor(kinds)


def scanned(world: scene.Scene, kinds: Tensor, views: int, size: int, device: str | None) -> tuple[Tensor, Tensor]:
    """Points (N, 3) that cameras around a scene see, and the kind of each."""
    angles = [2 * math.pi * view / views for view in range(views)]
    eyes = [(8 * math.cos(angle), 8 * math.sin(angle), 4.5) for angle in angles]
    cameras = [scene.Camera.look_at(eye, (0, 0, 0.3), width=size, height=size) for eye in eyes]
    frame = scene.Renderer(world, device).render(cameras, outputs=("depth", "instance"))
    seen = scene.points(frame, cameras, columns=("instance",))
    return seen.xyz, kinds.to(seen.xyz.device)[seen.columns["instance"].long()]


def voxels(xyz: Tensor, kinds: Tensor) -> tuple[spconv.SparseConvTensor, Tensor]:
    """The cells that have points, each with its kind and the features 1, height and number of points."""
    columns = [xyz, xyz[:, 2:], torch.ones_like(xyz[:, :1]), torch.nn.functional.one_hot(kinds, len(KINDS)).float()]
    sums, indices = spconv.voxelize(torch.cat(columns, 1), [VOXEL] * 3, EXTENT, "sum")  # (V, 5 + 3), (V, 4)
    count = sums[:, 4:5]
    features = torch.cat([torch.ones_like(count), sums[:, 3:4] / count, count.log()], 1)
    grid = spconv.voxel_grid([VOXEL] * 3, EXTENT)
    sites = spconv.SparseConvTensor(features, indices, grid, batch_size=1)
    return sites, sums[:, 5:].argmax(1)


def network() -> spconv.SparseSequential:
    """A network that labels sites: two convolutions at full resolution, two at half, and back."""

    def block(convolution: torch.nn.Module, channels: int) -> list[torch.nn.Module]:
        return [convolution, torch.nn.BatchNorm1d(channels), torch.nn.ReLU()]

    return spconv.SparseSequential(
        *block(spconv.SubMConv3d(3, 16, 3, indice_key="fine"), 16),
        *block(spconv.SparseConv3d(16, 32, 3, stride=2, padding=1, indice_key="down"), 32),
        *block(spconv.SubMConv3d(32, 32, 3, indice_key="coarse"), 32),
        *block(spconv.SubMConv3d(32, 32, 3, indice_key="coarse"), 32),
        *block(spconv.SparseInverseConv3d(32, 16, 3, indice_key="down"), 16),
        spconv.SubMConv3d(16, len(KINDS), 3, indice_key="fine"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--views", type=int, default=6)
    parser.add_argument("--size", type=int, default=128, help="width and height of a view in pixels")
    parser.add_argument("--steps", type=int, default=40, help="number of training steps")
    parser.add_argument("--device", help="default: a GPU if there is one")
    parser.add_argument(
        "--out", type=Path, metavar="FILE.npy", help="write the points of the test scene and their labels to this file"
    )
    options = parser.parse_args()
    if min(options.views, options.size, options.steps) < 1:
        parser.error("expected at least 1 view, 1 pixel and 1 step")
    if options.out is not None and not options.out.parent.is_dir():
        parser.error(f"there is no folder {options.out.parent}")

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        files = built(Path(folder))
        views = (options.views, options.size, options.device)
        clouds = [scanned(*arranged(files, seed), *views) for seed in range(1 + SCENES)]
    other, truth = clouds.pop(0)
    kinds = torch.cat([labels for _, labels in clouds])
    shares = ", ".join(f"{name} {(kinds == kind).float().mean():.0%}" for kind, name in enumerate(KINDS))
    print(f"{len(kinds):,} points of {SCENES} scenes with {options.views} views: {shares}", flush=True)

    training = [voxels(*cloud) for cloud in clouds]
    model = network().to(other.device)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    weight = 1 / torch.bincount(kinds, minlength=len(KINDS)).float()  # all kinds have the same weight
    for step in range(options.steps):
        sites, target = training[step % SCENES]
        loss = torch.nn.functional.cross_entropy(model(sites).features, target, weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == options.steps - 1:
            print(f"step {step + 1}: loss {loss.item():.3f} over {len(target):,} voxels", flush=True)

    model.eval()
    sites, target = voxels(other, truth)
    with torch.no_grad():
        said = model(sites).features.argmax(1)
    for kind, name in enumerate(KINDS):
        among = torch.eq(target, kind)
        right, wrong = (said[among] == kind).sum(), (said[~among] == kind).sum()
        print(f"{name:6} {float(right / (among.sum() + wrong)):.1%} intersection over union")
    if options.out is not None:
        cell = ((other - other.new_tensor(EXTENT[:3])) / VOXEL).floor().long()  # (N, 3) x, y, z
        labels = torch.full(sites.spatial_shape, -1, device=other.device)  # z, y, x
        labels[tuple(sites.indices[:, 1:].long().T)] = said
        labels = labels[cell[:, 2], cell[:, 1], cell[:, 0]]
        np.save(options.out, torch.cat([other, labels[:, None].float()], 1).cpu().numpy())
        print(f"points: {options.out}")


if __name__ == "__main__":
    main()
