"""A sparse network learns from simulated LiDAR scans to label points, and is tested on scenes that it never saw.

    python examples/lidar_segmentation.py [--device cuda] [--setting street] [--steps N] [--scans N] [--seed 0]
                                          [--out lidar] [--points FILE] [--weights FILE] [--quick]

The script generates streets or rooms, scans them and puts the points into cubes. A U-Net of sparse convolutions labels
each cube that has points, and a point gets the label of its cube. On a CPU a small network learns from coarse scans.
With `--device cuda` a MinkUNet18 learns from full scans in small cubes, under autocast.

The metric is the intersection over union of each class, and their mean (mIoU), over the points of other scenes. Two
simple rules serve as baselines: the most frequent class for every point, and the most frequent class at the point's
height. The files in --out are

    labels.png       a scene that the network never saw: the true labels, the network's labels, and its errors
    labels.pth       weights for --weights, to label without training
    labelled.ply     with --points: your cloud (.ply or .npy, in metres, z up) with a label and colour for each point
    labelled.png     a picture of labelled.ply

Heights count from the ground: the height below which a hundredth of the points lie. Each training scan is rotated,
mirrored and scaled at random each time. One scan in five gets no intensities, so that the network can also label clouds
without intensities.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from rooftop.errors import InputError, MissingExtraError
from rooftop.models.point_clouds.clouds import Cloud, read, write
from rooftop.train.tasks.generated.lidar_scans import SETTINGS, Scan, Setting, simulate
from rooftop.train.tasks.sparse_unet import (
    confusion,
    drawn,
    heights,
    joined,
    labelled,
    network,
    overlaps,
    varied,
    voxel_rows,
    voxels_of,
)

BIN_M, BINS = 0.1, 256  # bins of the rule by height; the last bin includes all greater heights
FARTHEST_M = 10_000  # the largest extent of a cloud, because its coordinates are float32
FIRST_SEED = 1 << 20  # first seed of training scans; seeds of test scans count from 0


@dataclass(frozen=True)
class Recipe:
    """The network and its training.

    Attributes:
        beams, turn: beams of the scanner, and its steps per revolution.
        voxel_m: edge of a cube, by setting.
        planes: channels of a `SparseUNet`; none: a MinkUNet18.
        scans: number of training scans, each used repeatedly.
        judged: number of test scans.
        steps: steps of AdamW, each with `batch` scans.
        learning_rate: the highest value of the one-cycle schedule.
    """

    beams: int
    turn: int
    voxel_m: dict[str, float]
    planes: tuple[int, ...]
    scans: int
    judged: int
    batch: int
    steps: int
    learning_rate: float


RECIPES = {
    "cpu": Recipe(32, 768, {"street": 0.3, "room": 0.1}, (16, 32, 64), 64, 8, 2, 240, 6e-3),
    "cuda": Recipe(64, 2048, {"street": 0.1, "room": 0.04}, (), 400, 32, 4, 1500, 3e-3),
}
QUICK = Recipe(16, 160, {"street": 0.6, "room": 0.2}, (8, 16), 8, 3, 2, 40, 3e-2)  # a run that only tests the script


class Model(NamedTuple):
    """A network with its setting, as it is saved."""

    network: nn.Module
    setting: str
    voxel_m: float
    planes: tuple[int, ...]


def built(setting: str, voxel_m: float, planes: Sequence[int], device: torch.device) -> Model:
    """A network with random weights."""
    classes = len(SETTINGS[setting].classes)
    return Model(network(classes, planes).to(device), setting, voxel_m, tuple(planes))


# ---- training --------------------------------------------------------------------------------------------------


def scans(setting: Setting, first_seed: int, count: int, device: torch.device) -> list[Scan]:
    return [simulate(setting, first_seed + number, device) for number in watched(range(count), "scanning")]


def train(model: Model, seen: Sequence[Scan], recipe: Recipe, seed: int) -> None:
    """Train the network; it ends in evaluation mode."""
    device, network = seen[0].xyz.device, model.network.train()
    frequency = torch.stack([torch.bincount(scan.labels, minlength=256) for scan in seen]).sum(0)
    frequency = frequency[: len(SETTINGS[model.setting].classes)] / frequency.sum()
    weight = frequency.clamp(min=1e-4).rsqrt()  # rare classes count more, though not in full proportion
    optimizer = torch.optim.AdamW(network.parameters(), recipe.learning_rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, recipe.learning_rate, total_steps=recipe.steps)
    chance = np.random.default_rng(seed)
    for step in watched(range(recipe.steps), "training"):
        batch = [varied(seen[int(chance.integers(len(seen)))].cloud(), chance) for _ in range(recipe.batch)]
        sites, labels, _ = voxels_of(joined([voxel_rows(cloud, model.voxel_m) for cloud in batch]))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = network(sites).features
        loss = F.cross_entropy(logits.float(), labels, weight, ignore_index=-1)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % max(1, recipe.steps // 10) == 0:
            print(f"step {step + 1:,} of {recipe.steps:,}: loss {loss.item():.3f}, {len(labels):,} voxels", flush=True)
    network.eval()


def watched(steps: range, what: str) -> Iterable[int]:
    """The items, with a progress bar on stderr if that is a terminal."""
    console = Console(stderr=True)
    return track(steps, what, console=console, transient=True, disable=not console.is_terminal)


# ---- results ---------------------------------------------------------------------------------------------------


def by_height(seen: Sequence[Scan], classes: int) -> Tensor:
    """The most frequent class at each height, int64 (BINS,); a bin without points gets the most frequent class of
    all."""
    cells = torch.cat([bins(scan.xyz) * classes + scan.labels for scan in seen])
    counts = torch.bincount(cells, minlength=BINS * classes).view(BINS, classes)
    return counts.argmax(1).where(counts.any(1), counts.sum(0).argmax())


def bins(xyz: Tensor) -> Tensor:
    return ((heights(xyz) + 1) / BIN_M).long().clamp(0, BINS - 1)


def report(model: Model, seen: Sequence[Scan], others: Sequence[Scan], out: Path) -> None:
    """Print the figures and draw a scene."""
    setting, classes = SETTINGS[model.setting], len(SETTINGS[model.setting].classes)
    rule = by_height(seen, classes)
    most = torch.cat([scan.labels for scan in seen]).bincount().argmax()
    ways = {
        "network": [labelled(model.network, scan.cloud(), model.voxel_m) for scan in others],
        "by height": [rule[bins(scan.xyz)] for scan in others],
        "most frequent": [most.expand_as(scan.labels) for scan in others],
    }
    print(f"{'IoU in %':13}" + "".join(f"{name:>10}" for name in (*setting.classes, "mean")))
    for name, said in ways.items():
        pairs = zip(others, said, strict=True)
        values = overlaps(torch.stack([confusion(scan.labels, labels, classes) for scan, labels in pairs]).sum(0))
        print(f"{name:13}" + "".join(f"{100 * value:10.1f}" for value in (*values.tolist(), values.nanmean().item())))
    drawn(others[0].cloud(), ways["network"][0], setting).save(out / "labels.png")
    print(f"{out / 'labels.png'}: the truth, the network, its errors")


# ---- files -----------------------------------------------------------------------------------------------------


def save(model: Model, path: Path) -> None:
    content = {**model._asdict(), "network": model.network.state_dict()}
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(content, unfinished)
    unfinished.replace(path)
    print(f"{path}: its weights")


def load(path: Path, device: torch.device) -> Model:
    """Read what `save` wrote.

    Raises:
        InputError: the file does not exist, or is not a checkpoint of this example.
    """
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        model = built(content["setting"], content["voxel_m"], content["planes"], device)
        model.network.load_state_dict(content["network"])
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, KeyError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise InputError(f"{path} is not a checkpoint that this example wrote: {why}") from error
    model.network.eval()
    return model


def moved(cloud: Cloud, device: torch.device) -> Cloud:
    intensity, labels = (None if each is None else each.to(device) for each in cloud[1:])
    return Cloud(cloud.xyz.to(device), intensity, labels)


def own(path: Path) -> Cloud:
    """The user's own cloud.

    Raises:
        InputError: the file cannot be read, or the cloud is too large.
    """
    cloud = read(path)
    reach = float((cloud.xyz.amax(0) - cloud.xyz.amin(0)).max())
    if reach > FARTHEST_M:
        raise InputError(f"{path} spans {reach:,.0f} m, more than {FARTHEST_M:,} m: remove stray points")
    return cloud


def label_file(model: Model, cloud: Cloud, out: Path, device: torch.device) -> None:
    """Label the cloud, write it and draw it."""
    setting = SETTINGS[model.setting]
    cloud = moved(cloud._replace(labels=None), device)
    said = labelled(model.network, cloud, model.voxel_m)
    for name, count in zip(setting.classes, torch.bincount(said, minlength=len(setting.classes)).tolist(), strict=True):
        print(f"{name:10} {count:10,} points")
    write(cloud._replace(labels=said), out / "labelled.ply", list(setting.classes.values()))
    drawn(cloud, said, setting).save(out / "labelled.png")
    print(f"{out / 'labelled.ply'}, {out / 'labelled.png'}: {len(said):,} points")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(RECIPES), default="cpu")
    parser.add_argument("--setting", choices=list(SETTINGS), help="the kind of scenes to generate (default: street)")
    parser.add_argument("--steps", type=int, help="number of training steps")
    parser.add_argument("--scans", type=int, help="number of training scans, each used repeatedly")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("lidar"), metavar="DIR")
    parser.add_argument("--points", type=Path, metavar="FILE", help="your point cloud to label: .ply or .npy")
    parser.add_argument(
        "--weights", type=Path, metavar="FILE", help="label --points with these weights, without training"
    )
    parser.add_argument("--quick", action="store_true", help="a tiny run, to test the script")
    options = parser.parse_args()
    if any(number is not None and number < 1 for number in (options.steps, options.scans)):
        parser.error("expected --steps and --scans of at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs an NVIDIA GPU, and PyTorch finds none here")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out} is not a folder")
    if options.weights and not options.points:
        parser.error("--weights labels a cloud: name it with --points")
    if options.weights and options.setting:
        parser.error("--weights were trained for a setting of their own: leave out --setting")
    device = torch.device(options.device)
    try:
        cloud = own(options.points) if options.points else None
        model = load(options.weights, device) if options.weights else None
    except InputError as error:
        raise SystemExit(f"error: {error}") from error
    options.out.mkdir(parents=True, exist_ok=True)
    if model is None:
        recipe = QUICK if options.quick else RECIPES[options.device]
        recipe = replace(recipe, steps=options.steps or recipe.steps, scans=options.scans or recipe.scans)
        model = trained(recipe, options.setting or "street", options.seed, options.out, device)
    if cloud is not None:
        label_file(model, cloud, options.out, device)


def trained(recipe: Recipe, name: str, seed: int, out: Path, device: torch.device) -> Model:
    """Train, test and save the network."""
    torch.manual_seed(seed)
    setting = SETTINGS[name]
    setting = replace(setting, scanner=replace(setting.scanner, beams=recipe.beams, steps=recipe.turn))
    model = built(name, recipe.voxel_m[name], recipe.planes, device)
    parameters = sum(p.numel() for p in model.network.parameters())
    began = time.perf_counter()
    seen = scans(setting, FIRST_SEED * (1 + seed), recipe.scans, device)
    print(f"{len(seen)} scans of {len(seen[0].xyz):,} points or so, in {time.perf_counter() - began:.0f} s")
    began = time.perf_counter()
    train(model, seen, recipe, seed)
    print(f"{parameters:,} parameters trained in {time.perf_counter() - began:.0f} s")
    save(model, out / "labels.pth")
    report(model, seen, scans(setting, 0, recipe.judged, device), out)
    return model


if __name__ == "__main__":
    try:
        main()
    except MissingExtraError as error:
        sys.exit(f"error: {error}")
