"""Convert a frame's outputs to pictures for viewing, or to points in the world.

Colours are chosen in Oklab (Ottosson 2020, "A perceptual color space for image processing"), where equal steps look
equal. Distances are shown as lightness, and numbers as hues. Background is nearly black in every picture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rooftop.scene.cameras import Camera, checked_cameras, same_size
from rooftop.scene.gbuffers import OUTPUTS, GBuffer

Bytes = NDArray[np.uint8]

NIGHT = (16, 19, 26)  # background
# step of hue between levels of detail: from red over yellow, green and blue to violet in 11 steps
LEVEL_HUE_DEGREES = 29.0
LEVELS = 12  # number of colours; coarser levels share the last colour
MOST_OVERDRAW = 32  # pixels that were covered this many times or more are lightest


@dataclass(frozen=True)
class Points:
    """Points of surfaces: one point for each pixel that shows a surface, in the order of views, rows and columns.

    Attributes:
        xyz: (N, 3), positions in the world.
        view: int32 (N,), the index of the view that shows each point.
        columns: other outputs of the frame by name, (N,) or (N, C), in their dtypes.
    """

    xyz: Tensor
    view: Tensor
    columns: dict[str, Tensor]


def picture(frame: GBuffer, name: str, view: int = 0) -> Bytes:
    """Convert an output of a frame to colours, (height, width, 3) uint8.

    Args:
        frame: result of `Renderer.render`, with this output.
        name: name of the output:
            "color", "vertex_color": unchanged. "base_color": as displayed (sRGB).
            "coverage": light where there is a surface.
            "depth": from light (the nearest point of this picture) to dark (the farthest); equal steps are equal
                distances.
            "normal": (n + 1) / 2: x is red, y green, z blue.
            "instance", "cluster", "triangle", "material", "material_depth": a colour for each number, the same in every
                picture.
            "level": red is the finest level of detail, then yellow, green, blue and violet.
            "uv": u is red, v green, both repeated with period 1.
            "velocity": a hue for each direction, and lighter for faster motion. The fastest pixel of this picture is
                lightest; pixels without motion look like background.
            "overdraw": dark where one triangle covered the pixel, light where 32 or more did.
            "shadow": lighter for more light, as the mean over all lights; nearly black without light.
        view: index of one of the frame's views.

    Raises:
        KeyError: the output was not rendered.
        IndexError: there is no such view.
    """
    output = frame[name]
    if not -len(output) <= view < len(output):
        raise IndexError(f"view {view} does not exist: the frame has {len(output)}")
    colors: Bytes = colored(name, output[view]).cpu().numpy()
    return colors


def colored(name: str, values: Tensor) -> Tensor:
    """Convert values of an output to colours, on their device.

    Args:
        name: name of the output.
        values: (H, W[, C]), one view of the output.

    Returns:
        (H, W, 3) uint8.
    """
    covered = _COVERED.get(name, _known)(values)  # (H, W)
    colors = torch.tensor(NIGHT, dtype=torch.uint8, device=values.device).repeat(*covered.shape, 1)
    colors[covered] = _COLORS[name](values[covered])
    return colors


def points(
    frame: GBuffer, cameras: Camera | Sequence[Camera], columns: Sequence[str] = (), dtype: torch.dtype = torch.float32
) -> Points:
    """Compute the points in the world that a frame's pixels show.

    Args:
        frame: result of `Renderer.render`, with "depth" and all `columns`.
        cameras: the frame's cameras.
        columns: names of outputs, such as "color", "normal" or "instance", to add to each point.
        dtype: dtype of the points, which are computed in float64. For large world coordinates, such as those of maps,
            only float64 keeps fine detail.

    Raises:
        KeyError: an output was not rendered.
        ValueError: the cameras do not match the frame, or `columns` is not a list.
    """
    cameras = checked_cameras(cameras)
    if isinstance(columns, str):
        raise ValueError(f"columns={columns!r}: expected a list of names of outputs, such as [{columns!r}]")
    depth = frame["depth"]  # (views, H, W)
    width, height = same_size(cameras)
    if depth.shape != (len(cameras), height, width):
        views, rows, across = depth.shape
        raise ValueError(
            f"{len(cameras)} cameras of {width} x {height} pixels for a frame of {views} views of {across} x {rows}: "
            "expected the cameras that the frame was rendered with"
        )
    found = [_in_world(each, camera) for each, camera in zip(depth, cameras, strict=True)]
    covered = depth.isfinite()
    of_view = torch.arange(len(cameras), dtype=torch.int32, device=depth.device)
    return Points(
        xyz=torch.cat(found).to(dtype),
        view=of_view[:, None, None].expand_as(depth)[covered],
        columns={name: frame[name][covered] for name in columns},
    )


def _in_world(depth: Tensor, camera: Camera) -> Tensor:
    """Compute positions in the world, (N, 3) float64, of the pixels of a depth picture (H, W) that are not
    background."""
    rows, across = depth.isfinite().nonzero(as_tuple=True)
    z = depth[rows, across].double()
    scale = torch.ones_like(z) if camera.orthographic else z
    x = (across.double() - camera.cx) / camera.fx * scale
    y = (rows.double() - camera.cy) / camera.fy * scale
    matrix = torch.tensor(camera.world_to_camera, device=depth.device)
    # multiplying row vectors by a rotation matrix applies the inverse rotation
    return (torch.stack((x, y, z), 1) - matrix[:3, 3]) @ matrix[:3, :3]


# ---- pixels with a surface -------------------------------------------------------------------------------------------


def _known(numbers: Tensor) -> Tensor:
    return numbers >= 0


def _any(values: Tensor) -> Tensor:
    return (values != 0).any(-1)


# For each output, the function that finds the covered pixels. In other outputs, covered pixels are >= 0.
_COVERED: dict[str, Callable[[Tensor], Tensor]] = {
    "depth": torch.isfinite,
    "normal": _any,
    "uv": lambda uv: uv.isfinite().all(-1),
    "velocity": lambda velocity: velocity.isfinite().all(-1) & _any(velocity),
    "color": _any,
    "base_color": lambda color: color.isfinite().all(-1),
    "vertex_color": lambda color: color.isfinite().all(-1),
    "coverage": lambda covered: covered,
    "material_depth": lambda depth: depth > 0,
    "overdraw": lambda times: times > 0,
    "shadow": lambda shares: shares.isfinite().any(-1),  # a scene without lights has no finite shadow value
}

# ---- colours (N, 3) of N values --------------------------------------------------------------------------------------


def _of_color(color: Tensor) -> Tensor:
    return _bytes(color)


def _of_base_color(color: Tensor) -> Tensor:
    return _bytes(_displayed(color))


def _of_coverage(covered: Tensor) -> Tensor:
    return _bytes(torch.full((len(covered), 3), 0.95, device=covered.device))


def _of_material_depth(depth: Tensor) -> Tensor:
    return _of_number((depth * 65536).int() - 1)


def _of_depth(depth: Tensor) -> Tensor:
    depth = depth.double()
    if not len(depth):
        return _ramp(depth)
    low, high = depth.aminmax()
    return _ramp(torch.where(high > low, 1 - (depth - low) / (high - low), torch.ones_like(depth)))


def _of_normal(normal: Tensor) -> Tensor:
    return _bytes((normal + 1) / 2)


def _of_uv(uv: Tensor) -> Tensor:
    return _bytes(torch.cat([uv % 1, torch.full_like(uv[:, :1], 0.3)], 1))


def _of_number(number: Tensor) -> Tensor:
    """Choose a colour for each number such that neighbouring numbers look different: hue, lightness and chroma are bits
    of a hash (Steele 2014, SplitMix)."""
    mixed = (number.long() + 1) * _signed(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        above = (mixed >> shift) & ((1 << (64 - shift)) - 1)  # a logical shift, as for an unsigned number
        mixed = (mixed ^ above) * _signed(factor)
    parts = [((mixed >> shift) & 0xFFFF).double() / 0x10000 for shift in (48, 32, 16)]
    return _oklch(0.5 + 0.38 * parts[1], 0.06 + 0.1 * parts[2], 360 * parts[0])


def _signed(word: int) -> int:
    """The int64 with the same 64 bits as `word`. (torch multiplies int64 modulo 2^64.)"""
    return word - (1 << 64) if word >> 63 else word


def _of_level(level: Tensor) -> Tensor:
    step = torch.arange(LEVELS, device=level.device)
    colors = _oklch(
        0.66 + 0.16 * (step % 2), torch.full_like(step, 0.15, dtype=torch.float32), 25 + LEVEL_HUE_DEGREES * step
    )
    return colors[level.clamp(max=LEVELS - 1).long()]


def _of_velocity(velocity: Tensor) -> Tensor:
    x, y = velocity.double().unbind(1)
    speed = torch.hypot(x, y)
    share = speed / speed.max() if len(speed) else speed
    angle = torch.rad2deg(torch.atan2(-y, x))  # angle, counterclockwise from the right
    return _oklch(0.25 + 0.55 * share, 0.02 + 0.13 * share, angle)


def _of_overdraw(times: Tensor) -> Tensor:
    colors = _ramp(torch.arange(MOST_OVERDRAW + 1, device=times.device).log2() / math.log2(MOST_OVERDRAW))
    return colors[times.clamp(max=MOST_OVERDRAW).long()]


def _of_shadow(shares: Tensor) -> Tensor:
    share = shares.double().sum(-1, keepdim=True) / max(1, shares.shape[-1])
    return _bytes((0.2 + 0.75 * share).expand(-1, 3))


_COLORS: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(OUTPUTS, _of_number),
    "color": _of_color,
    "vertex_color": _of_color,
    "base_color": _of_base_color,
    "coverage": _of_coverage,
    "material_depth": _of_material_depth,
    "depth": _of_depth,
    "normal": _of_normal,
    "uv": _of_uv,
    "level": _of_level,
    "velocity": _of_velocity,
    "overdraw": _of_overdraw,
    "shadow": _of_shadow,
}


def _ramp(share: Tensor) -> Tensor:
    """Colour ramp from dark blue (0) over red to light yellow (1), with evenly growing lightness."""
    return _oklch(0.28 + 0.67 * share, 0.10 + 0.06 * torch.sin(math.pi * share), 280 + 175 * share)


# Matrix from the cubes of Oklab's cone responses to linear red, green and blue.
TO_RGB = (
    (4.0767416621, -3.3077115913, 0.2309699292),
    (-1.2684380046, 2.6097574011, -0.3413193965),
    (-0.0041960863, -0.7034186147, 1.7076147010),
)


def _oklch(lightness: Tensor, chroma: Tensor, hue_degrees: Tensor) -> Tensor:
    """Convert Oklab in polar coordinates to sRGB, by the matrices of Ottosson's definition."""
    lightness, chroma, hue = lightness.float(), chroma.float(), torch.deg2rad(hue_degrees).float()
    a, b = chroma * torch.cos(hue), chroma * torch.sin(hue)
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3  # responses of the three kinds of cones
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = torch.stack([of[0] * long + of[1] * medium + of[2] * short for of in TO_RGB], 1).clamp(0, 1)
    return _bytes(_displayed(linear))


def _displayed(linear: Tensor) -> Tensor:
    """Convert linear light to sRGB."""
    return torch.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


def _bytes(values: Tensor) -> Tensor:
    """Convert 0..1 to uint8 0..255."""
    return (values.clamp(0, 1) * 255).round().to(torch.uint8)
