"""What a frame shows, for people to look at, and as points for programs to go on with.

Colours are chosen in Oklab (Ottosson 2020, "A perceptual color space for image processing"), where equal steps look
equal: distances as lightness, numbers as hues. Background is nearly black in every picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rooftop.scene.cameras import Camera, same_size
from rooftop.scene.gbuffers import OUTPUTS, GBuffer

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float64]

NIGHT = (16, 19, 26)  # background
LEVEL_HUE_DEGREES = 29.0  # between levels of detail: from red over yellow, green and blue to violet in 11 steps
LEVELS = 12  # coarser ones have the colour of the last
MOST_OVERDRAW = 32  # times, and more: the lightest


@dataclass(frozen=True)
class Points:
    """Points of surfaces, one for each pixel that shows one, view after view, row after row.

    Attributes:
        xyz: (N, 3), in the world.
        view: int32 (N,), by which view each was seen.
        columns: further outputs of the frame by name, (N,) or (N, C), in their dtypes.
    """

    xyz: Tensor
    view: Tensor
    columns: dict[str, Tensor]


def picture(frame: GBuffer, name: str, view: int = 0) -> Bytes:
    """An output of a frame as colours, (height, width, 3) uint8.

    Args:
        frame: what `Renderer.render` returned, with this output.
        name: of the output:
            "color", "vertex_color": as it is.
            "depth": the nearest point of this picture is light, the farthest dark, equal steps are equal distances.
            "normal": (n + 1) / 2: x is red, y green, z blue.
            "instance", "cluster", "triangle", "material": a colour for each number, the same in every picture.
            "level": red is the finest level of detail, then yellow, green, blue and violet.
            "uv": u is red, v green, both repeated from whole number to whole number.
            "velocity": a hue for each direction, the lighter the faster; the fastest pixel of this picture is lightest,
                what stands still is background.
            "overdraw": dark where one triangle covered the pixel, light where 32 or more did.
            "shadow": the lighter, the more of the lights arrives, all alike; nearly black where none does.
        view: which of the frame's views.

    Raises:
        KeyError: the output was not rendered.
        IndexError: there is no such view.
    """
    output = frame[name]
    if not -len(output) <= view < len(output):
        raise IndexError(f"view {view} of a frame that has {len(output)}")
    values = output[view].cpu().numpy()  # (H, W[, C])
    covered = _COVERED.get(name, _known)(values)  # (H, W)
    colors = np.empty((*covered.shape, 3), np.uint8)
    colors[:] = NIGHT
    colors[covered] = _COLORS[name](values[covered])
    return colors


def points(
    frame: GBuffer, cameras: Camera | Sequence[Camera], columns: Sequence[str] = (), dtype: torch.dtype = torch.float32
) -> Points:
    """The points in the world that a frame's pixels show.

    Args:
        frame: what `Renderer.render` returned, with "depth" and all `columns`.
        cameras: those that it was rendered with.
        columns: names of outputs, such as "color", "normal" or "instance", to have beside each point.
        dtype: of the points. They are computed in float64: where the world's coordinates are large, such as those of
            maps, float64 also keeps what is between them.

    Raises:
        KeyError: an output was not rendered.
        ValueError: the cameras are not the frame's.
    """
    cameras = (cameras,) if isinstance(cameras, Camera) else tuple(cameras)
    depth = frame["depth"]  # (views, H, W)
    width, height = same_size(cameras)
    if depth.shape != (len(cameras), height, width):
        views, rows, across = depth.shape
        raise ValueError(
            f"{len(cameras)} cameras of {width} x {height} pixels for a frame of {views} views of {across} x {rows}: "
            "expected the cameras that it was rendered with"
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
    """(N, 3) float64 for the pixels of a picture (H, W) that are not background."""
    rows, across = depth.isfinite().nonzero(as_tuple=True)
    z = depth[rows, across].double()
    scale = torch.ones_like(z) if camera.orthographic else z
    x = (across.double() - camera.cx) / camera.fx * scale
    y = (rows.double() - camera.cy) / camera.fy * scale
    matrix = torch.tensor(camera.world_to_camera, device=depth.device)
    return (torch.stack((x, y, z), 1) - matrix[:3, 3]) @ matrix[:3, :3]  # the inverse of a rotation, by the right


# ---- which pixels show something -------------------------------------------------------------------------------------


def _known(numbers: NDArray[np.int32]) -> NDArray[np.bool_]:
    return numbers >= 0


def _any(values: NDArray[np.float32]) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = (values != 0).any(-1)
    return found


_COVERED: dict[str, Callable[..., NDArray[np.bool_]]] = {  # of the others, whether the number is not -1
    "depth": np.isfinite,
    "normal": _any,
    "uv": lambda uv: np.isfinite(uv).all(-1),
    "velocity": lambda velocity: np.isfinite(velocity).all(-1) & _any(velocity),
    "color": _any,
    "vertex_color": lambda color: np.isfinite(color).all(-1),
    "overdraw": lambda times: times > 0,
    "shadow": lambda shares: np.isfinite(shares).any(-1),  # without lights nothing
}

# ---- colours (N, 3) of N values --------------------------------------------------------------------------------------


def _of_color(color: NDArray[np.float32]) -> Bytes:
    return _bytes(color)


def _of_depth(depth: NDArray[np.float32]) -> Bytes:
    depth = depth.astype(np.float64)
    low, high = (depth.min(), depth.max()) if len(depth) else (0.0, 0.0)
    return _ramp(1 - (depth - low) / (high - low) if high > low else np.ones_like(depth))


def _of_normal(normal: NDArray[np.float32]) -> Bytes:
    return _bytes((normal + 1) / 2)


def _of_uv(uv: NDArray[np.float32]) -> Bytes:
    return _bytes(np.column_stack([uv % 1, np.full(len(uv), 0.3)]))


def _of_number(number: NDArray[np.int32]) -> Bytes:
    """Neighbouring numbers look unlike: hue, lightness and chroma are parts of a hash (Steele 2014, SplitMix)."""
    mixed = (number.astype(np.uint64) + 1) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    parts = [((mixed >> np.uint64(shift)) & np.uint64(0xFFFF)) / 0x10000 for shift in (48, 32, 16)]
    return _oklch(0.5 + 0.38 * parts[1], 0.06 + 0.1 * parts[2], 360 * parts[0])


def _of_level(level: NDArray[np.int32]) -> Bytes:
    step = np.minimum(level, LEVELS - 1)
    return _oklch(np.where(step % 2, 0.82, 0.66), np.full(len(step), 0.15), 25 + LEVEL_HUE_DEGREES * step)


def _of_velocity(velocity: NDArray[np.float32]) -> Bytes:
    velocity = velocity.astype(np.float64)
    speed = np.hypot(velocity[:, 0], velocity[:, 1])
    share = speed / speed.max() if len(speed) else speed
    angle = np.degrees(np.arctan2(-velocity[:, 1], velocity[:, 0]))  # counterclockwise, from the right
    return _oklch(0.25 + 0.55 * share, 0.02 + 0.13 * share, angle)


def _of_overdraw(times: NDArray[np.int32]) -> Bytes:
    return _ramp(np.log2(np.minimum(times, MOST_OVERDRAW)) / np.log2(MOST_OVERDRAW))


def _of_shadow(shares: NDArray[np.float32]) -> Bytes:
    share = shares.astype(np.float64).sum(-1, keepdims=True) / max(1, shares.shape[-1])
    return _bytes(np.repeat(0.2 + 0.75 * share, 3, axis=1))


_COLORS: dict[str, Callable[..., Bytes]] = {
    **dict.fromkeys(OUTPUTS, _of_number),
    "color": _of_color,
    "vertex_color": _of_color,
    "depth": _of_depth,
    "normal": _of_normal,
    "uv": _of_uv,
    "level": _of_level,
    "velocity": _of_velocity,
    "overdraw": _of_overdraw,
    "shadow": _of_shadow,
}


def _ramp(share: Floats) -> Bytes:
    """From dark blue (0) over red to light yellow (1), lightness growing evenly."""
    return _oklch(0.28 + 0.67 * share, 0.10 + 0.06 * np.sin(np.pi * share), 280 + 175 * share)


def _oklch(lightness: Floats, chroma: Floats, hue_degrees: Floats) -> Bytes:
    """sRGB of Oklab in polar coordinates, by the matrices of Ottosson's definition."""
    a, b = chroma * np.cos(np.radians(hue_degrees)), chroma * np.sin(np.radians(hue_degrees))
    cones = np.stack(
        [
            lightness + 0.3963377774 * a + 0.2158037573 * b,
            lightness - 0.1055613458 * a - 0.0638541728 * b,
            lightness - 0.0894841775 * a - 1.2914855480 * b,
        ]
    )
    to_rgb = np.array(
        [
            [4.0767416621, -3.3077115913, 0.2309699292],
            [-1.2684380046, 2.6097574011, -0.3413193965],
            [-0.0041960863, -0.7034186147, 1.7076147010],
        ]
    )
    linear = (to_rgb @ cones**3).T.clip(0, 1)
    return _bytes(np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055))


def _bytes(values: NDArray[np.floating]) -> Bytes:
    """0..1 as 0..255."""
    bytes_: Bytes = (values.clip(0, 1) * 255).round().astype(np.uint8)
    return bytes_
