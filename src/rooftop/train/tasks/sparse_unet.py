"""The task `sparse_unet`: a sparse convolutional U-Net labels the points of a cloud.

--data is one of

    scans, scans:street    generated streets, scanned by a simulated LiDAR
    scans:room             rooms

Points are grouped into voxels, and the network labels each voxel that has points. In each epoch, training scans are
turned, mirrored and scaled at random. One scan in five loses its intensities, so that the network can also label clouds
without intensities. Scenes of other seeds are held out for validation. "accuracy" is the fraction of correctly labelled
voxels, averaged over scans. `judge` returns the intersection over union (IoU) of each class over all points, and the
mean, "mIoU", which selects the best checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from rooftop.doctor.extras import Extra
from rooftop.errors import InputError
from rooftop.models import MinkUNet, SparseUNet, minkunet18
from rooftop.models.point_clouds.clouds import RIGHT, WRONG, Cloud, lit, of_heights, sheet
from rooftop.sparse import SparseConvTensor
from rooftop.sparse.utils import PointToVoxel, gather_features_by_pc_voxel_id
from rooftop.train.recipes import Recipe
from rooftop.train.tasks.finding import Values, count_of, over
from rooftop.train.tasks.generated.lidar_scans import SETTINGS, Setting, simulate
from rooftop.train.tasks.task import Task

SCANS = "scans"
WARP = Extra("sparse", "warp", "warp-lang", "sparse convolution")
FEATURES = 6  # per voxel: mean position of its points in the voxel (3), height, intensity, whether intensity is known
SLOTS = 8  # maximum number of points that are used per voxel
WITHOUT_INTENSITY = 0.2  # fraction of training scans whose intensities are dropped
FIRST_SEED = 1 << 20  # first seed of the training scans; the seeds of the held-out scans begin at 0
VOXEL_M = {"street": 0.3, "room": 0.1}
FINE_M = {"street": 0.1, "room": 0.04}
SHOWN = 1  # number of example scenes on the page

ON_CPU: Values = {
    "run": {"steps": 240, "batch": 2},
    "model": {"options": {"beams": 32, "turn": 768, "scans": 64, "held_out": 8, "planes": [16, 32, 64]}},
    "optimizer": {"name": "adamw", "lr": 6e-3, "weight_decay": 0.01, "norm_weight_decay": 0.01},
    "schedule": {"name": "cosine", "warmup": 0.3},
    "loading": {"how": "here"},
    "evaluation": {"every": 4},
}
ON_GPU: Values = {
    "run": {"steps": 1500, "batch": 4, "precision": "bf16"},
    "model": {"options": {"beams": 64, "turn": 2048, "scans": 400, "held_out": 32, "planes": [], "fine": True}},
    "optimizer": {"lr": 3e-3},
    "loading": {"how": "auto"},
}
"""Recipe values for a MinkUNet18 on whole scans with small voxels."""


def defaults(data: str | None, cuda: bool) -> Values:
    """Return the recipe values that this task uses by default."""
    return over(ON_CPU, ON_GPU) if cuda else ON_CPU


def needs(data: str | None) -> list[Extra]:
    """The optional packages that the task needs."""
    return [WARP]


def build(data: str | None, recipe: Recipe) -> Task:
    """Build the task; `Options` lists the names in model.options.

    Raises:
        InputError: the data or an option is unknown, an option has a wrong value, or the recipe sets model.weights.
    """
    kind, _, named = (data or SCANS).partition(":")
    name = named or "street"
    if kind != SCANS or name not in SETTINGS:
        raise InputError(f"--data {data} is not known: expected scans, or {', '.join(f'scans:{s}' for s in SETTINGS)}")
    if recipe.model.weights:
        raise InputError("this task starts from random weights: leave out model.weights")
    options = _options(recipe.model.options, name)
    setting = SETTINGS[name]
    setting = replace(setting, scanner=replace(setting.scanner, beams=options.beams, steps=options.turn))
    train = Scans(setting, FIRST_SEED * (1 + recipe.run.seed), options.scans, options.voxel_m, changing=True)
    valid = Scans(setting, 0, options.held_out, options.voxel_m)
    model = network(len(setting.classes), options.planes)
    return Task(
        model=model,
        train=train,
        valid=valid,
        loss=SiteLoss(train.class_weights()),
        metrics=accuracies,
        judge=partial(judged, valid),
        best="mIoU",
        maximize=True,
        collate=joined,
        examples=partial(_examples, valid),
        metadata={
            "model": "sparse_unet" if options.planes else "minkunet18",
            "options": {"in_channels": FEATURES, "num_classes": len(setting.classes), "planes": list(options.planes)},
            "classes": list(setting.classes),
            "voxel_m": options.voxel_m,
        },
        unit="scans",
    )


@dataclass(frozen=True)
class Options:
    """The settings in model.options.

    Attributes:
        beams, turn: number of the scanner's beams, and of its steps in a turn.
        scans, held_out: numbers of training scans and of held-out scans.
        planes: channels of a `SparseUNet`; if empty, the model is a MinkUNet18.
        voxel_m: edge of a voxel in metres; 0 means the default of the setting.
        fine: whether `voxel_m` defaults to `FINE_M[setting]` instead of `VOXEL_M[setting]`.
    """

    beams: int = 32
    turn: int = 768
    scans: int = 64
    held_out: int = 8
    planes: tuple[int, ...] = (16, 32, 64)
    voxel_m: float = 0.0
    fine: bool = False


def _options(given: dict[str, Any], setting: str) -> Options:
    known = Options.__dataclass_fields__
    if unknown := next((name for name in given if name not in known), None):
        raise InputError(f"model.options has {unknown!r}: expected {', '.join(known)}")
    planes = given.get("planes", Options.planes)
    if not isinstance(planes, list | tuple) or not all(type(each) is int and each > 0 for each in planes):
        raise InputError(
            f"model.options has planes={planes!r}: expected numbers of channels, e.g. [16, 32, 64], or [] for a "
            "MinkUNet18"
        )
    found = Options(**{**given, "planes": tuple(planes)})
    for name, least in (("beams", 1), ("turn", 1), ("scans", 1), ("held_out", 0)):
        count_of(vars(found), name, least)
    if not isinstance(found.voxel_m, int | float) or not 0 <= found.voxel_m < math.inf:
        raise InputError(f"model.options has voxel_m={found.voxel_m!r}: expected a number of 0 or more")
    return replace(found, voxel_m=found.voxel_m or (FINE_M if found.fine else VOXEL_M)[setting])


# ---- clouds as voxels ------------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """Points of B clouds, ready for `voxels_of`.

    Attributes:
        points: float32 (N, 3 + 1 + FEATURES + 1): position in units of voxels, index of the cloud, features, and the
            label + 1 (0 if unknown).
        sizes: sizes of the grid, in voxels.
        clouds: the number of clouds, B.
    """

    points: Tensor
    sizes: tuple[int, int, int]
    clouds: int


class Voxels(NamedTuple):
    """A batch of clouds, as voxels.

    Attributes:
        sites: the V voxels, with FEATURES channels.
        labels: int64 (V,), the most frequent known label of up to `SLOTS` points of the voxel; -1 if all these labels
            are unknown.
        of_point: int64 (N,), the voxel of each point, in the order of the clouds.
    """

    sites: SparseConvTensor
    labels: Tensor
    of_point: Tensor


def heights(xyz: Tensor) -> Tensor:
    """The heights of points above the ground in metres, (N,) float32.

    The ground is the height below which 1% of the points lie.
    """
    z = xyz[:, 2]
    return (z - z.kthvalue(1 + len(z) // 100).values).float()


def voxel_rows(cloud: Cloud, voxel_m: float) -> Tensor:
    """Convert a non-empty cloud to the form of `Rows.points`, with cloud number 0, on the cloud's device."""
    place = ((cloud.xyz - cloud.xyz.amin(0)) / voxel_m).float()  # (n, 3), in voxels
    blank = torch.zeros_like(place[:, 0])
    columns = [
        *place.unbind(1),
        blank,
        *(place - place.floor() - 0.5).unbind(1),
        heights(cloud.xyz),
        blank if cloud.intensity is None else cloud.intensity,
        blank + (cloud.intensity is not None),
        blank if cloud.labels is None else cloud.labels + 1.0,
    ]
    return torch.stack(columns, 1)


def joined(clouds: Sequence[Tensor]) -> Rows:
    """Join clouds from `voxel_rows` into one batch. On a GPU the host waits for the size of the batch's voxel grid."""
    points = torch.cat(list(clouds))
    numbers = torch.arange(len(clouds)).repeat_interleave(torch.tensor([len(cloud) for cloud in clouds]))
    points[:, 3] = numbers.to(points)
    high, wide, long = (int(size) + 1 for size in points[:, :3].amax(0).tolist())
    return Rows(points, (high, wide, long), len(clouds))


def voxels_of(rows: Rows) -> Voxels:
    """Group a batch's points into voxels, on the device of the points."""
    points, sizes, count = rows
    # The cloud number is a fourth coordinate, so one call finds the voxels of all clouds.
    cells = PointToVoxel([1] * 4, [0] * 4 + [*sizes, count], points.shape[1], len(points), SLOTS, points.device)
    # slots (V, SLOTS, 5 + FEATURES), indices (V, 4)
    slots, indices, counts, of_point = cells.generate_voxel_with_id(points)
    features = slots[..., 4 : 4 + FEATURES].sum(1) / counts[:, None]
    votes = F.one_hot(slots[..., -1].long()).sum(1)  # (V, 1 + classes); column 0 counts empty slots and unknown labels
    votes[:, 0] = 0
    most, label = votes.max(1)
    labels = label.where(most > 0, 0) - 1
    return Voxels(SparseConvTensor(features, indices, list(sizes[::-1]), count), labels, of_point)


# ---- data ------------------------------------------------------------------------------------------------------


class Scans:
    """A data set of simulated scans, in the form that `voxel_rows` returns.

    Args:
        setting: the kind of scene, and its scanner.
        first_seed, count: seed of scan 0, and number of scans; scan i has the seed first_seed + i.
        voxel_m: edge of a voxel in metres.
        changing: whether to vary each scan at random in training.
    """

    def __init__(self, setting: Setting, first_seed: int, count: int, voxel_m: float, changing: bool = False) -> None:
        self.setting, self.voxel_m, self.changing = setting, voxel_m, changing
        self.scans = [simulate(setting, first_seed + number) for number in range(count)]

    def __len__(self) -> int:
        return len(self.scans)

    def __getitem__(self, index: int) -> Tensor:
        return voxel_rows(self.scans[index].cloud(), self.voxel_m)

    def draw(self, index: int, generator: np.random.Generator) -> Tensor:
        cloud = self.scans[index].cloud()
        return voxel_rows(varied(cloud, generator) if self.changing else cloud, self.voxel_m)

    def class_weights(self) -> Tensor:
        """Class weights of the loss, (classes,): the inverse square root of the class's share of the points of all
        scans. Shares below 1e-4 count as 1e-4."""
        classes = len(self.setting.classes)
        counts = torch.stack([torch.bincount(scan.labels, minlength=classes) for scan in self.scans]).sum(0)
        return (counts / counts.sum()).clamp(min=1e-4).rsqrt()


def varied(cloud: Cloud, generator: np.random.Generator) -> Cloud:
    """Turn, mirror and scale a cloud at random, and sometimes drop its intensities."""
    angle, scale = generator.uniform(-math.pi, math.pi), generator.uniform(0.95, 1.05)
    mirror, without = generator.choice((-1, 1)), generator.random() < WITHOUT_INTENSITY
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    turn = torch.tensor([[c, s, 0], [-s * mirror, c * mirror, 0], [0, 0, scale]]).to(cloud.xyz)
    return Cloud(cloud.xyz @ turn, None if without else cloud.intensity, cloud.labels)


# ---- the network -----------------------------------------------------------------------------------------------


def network(classes: int, planes: Sequence[int]) -> SparseUNet | MinkUNet:
    """Build a `SparseUNet` with these channels; if `planes` is empty, build a MinkUNet18."""
    return SparseUNet(FEATURES, classes, tuple(planes)) if planes else minkunet18(FEATURES, classes)


@dataclass(frozen=True)
class SiteLoss:
    """Cross entropy of the model's predicted class of each voxel, weighted by class."""

    weights: Tensor

    def __call__(self, model: nn.Module, rows: Rows) -> Tensor:
        voxels = voxels_of(rows)
        logits = model(voxels.sites).features.float()
        return F.cross_entropy(logits, voxels.labels, self.weights.to(logits.device), ignore_index=-1)


def accuracies(model: nn.Module, rows: Rows) -> dict[str, Tensor]:
    """The fraction of correctly labelled voxels of each cloud."""
    voxels = voxels_of(rows)
    right = (model(voxels.sites).features.argmax(1) == voxels.labels).double()
    cloud = voxels.sites.indices[:, 0].long()
    sums = torch.zeros(2, rows.clouds, dtype=torch.float64, device=right.device)
    sums.index_add_(1, cloud, torch.stack((right, torch.ones_like(right))))
    return {"accuracy": sums[0] / sums[1]}


# ---- labels and metrics ----------------------------------------------------------------------------------------


@torch.inference_mode()
def labelled(model: nn.Module, cloud: Cloud, voxel_m: float, device: torch.device | None = None) -> Tensor:
    """Label each point of a cloud with a model in evaluation mode: int64 (N,), on the given device or the cloud's."""
    rows = joined([voxel_rows(cloud, voxel_m)])
    voxels = voxels_of(rows._replace(points=rows.points.to(device or rows.points.device)))
    with torch.autocast(voxels.labels.device.type, torch.bfloat16, enabled=voxels.labels.is_cuda):
        logits = model(voxels.sites).features
    return gather_features_by_pc_voxel_id(logits.argmax(1), voxels.of_point)


def confusion(truth: Tensor, said: Tensor, classes: int) -> Tensor:
    """Confusion matrix: number of points by true class (rows) and predicted class (columns)."""
    return torch.bincount(truth * classes + said, minlength=classes * classes).view(classes, classes)


def overlaps(counts: Tensor) -> Tensor:
    """Intersection over union of each class; NaN if a class has neither true nor predicted points."""
    hit = counts.diagonal()
    return hit / (counts.sum(0) + counts.sum(1) - hit)


def judged(scans: Scans, model: nn.Module, device: torch.device) -> dict[str, float]:
    """Compute the intersection over union of each class over the points of all scans, and the mean."""
    names = list(scans.setting.classes)
    counts = torch.zeros(len(names), len(names), dtype=torch.int64)
    for scan in scans.scans:
        said = labelled(model, scan.cloud(), scans.voxel_m, device).cpu()
        counts += confusion(scan.labels, said, len(names))
    values = overlaps(counts)
    of_classes = zip(names, values.tolist(), strict=True)
    return {"mIoU": values.nanmean().item(), **{f"IoU {name}": value for name, value in of_classes if value == value}}


def _examples(scans: Scans, model: nn.Module, device: torch.device) -> list[tuple[str, Image.Image]]:
    """Draw held-out scenes: true labels, predicted labels, and errors."""
    shown = []
    for scan in scans.scans[:SHOWN]:
        said = labelled(model, scan.cloud(), scans.voxel_m, device)
        right = (said.cpu() == scan.labels).double().mean().item()
        shown.append((f"{right:.1%} of the points are labelled correctly", drawn(scan.cloud(), said, scans.setting)))
    return shown


def drawn(cloud: Cloud, said: Tensor, setting: Setting) -> Image.Image:
    """Draw the true labels of a cloud, the predicted labels, and the errors. If the true labels are unknown, draw the
    heights of the points and the predicted labels."""
    xyz, said = cloud.xyz.cpu(), said.cpu()
    intensity, truth = (None if each is None else each.cpu() for each in cloud[1:])
    palette = torch.tensor(list(setting.classes.values()), dtype=torch.uint8)
    panels = [("network", lit(palette[said], intensity))]
    shown, legend = said != setting.lid, list(setting.classes.items())
    if truth is None:
        panels.insert(0, ("heights", lit(of_heights(xyz[:, 2]), intensity)))
    else:
        wrong = said != truth
        shown &= truth != setting.lid
        panels.insert(0, ("truth", lit(palette[truth], intensity)))
        share = wrong.double().mean().item()
        errors = torch.tensor([RIGHT, WRONG], dtype=torch.uint8)[wrong.long()]
        panels.append((f"errors: {100 * share:.1f}% of points", lit(errors, None)))
    shown |= ~shown.any()  # if all points of a scan belong to the omitted class (`lid`), show all points
    return sheet(xyz[shown], [(name, colours[shown]) for name, colours in panels], legend)
