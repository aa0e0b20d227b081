"""Point clouds: read .ply and .npy files, write .ply files, and draw clouds.

`read` supports the three encodings of the PLY format (Turk 1994). MeshLab, CloudCompare and Blender open the files of
`write`. `draw` needs no display. Each point is drawn as a disc into a depth buffer; near points are drawn larger than
far points. Surfaces behind an object are darkened at the object's outline (Boucheny 2009, "eye-dome lighting"), because
points of one colour would otherwise merge into one area.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from rooftop.errors import InputError
from rooftop.whole_files import whole_file

Colour = tuple[int, int, int]


class Cloud(NamedTuple):
    """A point cloud of N points.

    Attributes:
        xyz: float32 or float64 (N, 3), in metres, z up.
        intensity: float32 (N,), intensity of the reflected light in 0..1; None if unknown.
        labels: int64 (N,), class numbers, -1 for points without a class; None if unknown.
    """

    xyz: Tensor
    intensity: Tensor | None = None
    labels: Tensor | None = None


# ---- files -----------------------------------------------------------------------------------------------------

TYPES = {
    **dict.fromkeys(("char", "int8"), "i1"),
    **dict.fromkeys(("uchar", "uint8"), "u1"),
    **dict.fromkeys(("short", "int16"), "i2"),
    **dict.fromkeys(("ushort", "uint16"), "u2"),
    **dict.fromkeys(("int", "int32"), "i4"),
    **dict.fromkeys(("uint", "uint32"), "u4"),
    **dict.fromkeys(("float", "float32"), "f4"),
    **dict.fromkeys(("double", "float64"), "f8"),
}
ENCODINGS = {"ascii": None, "binary_little_endian": "<", "binary_big_endian": ">"}
# names that scanners and programs give to the intensity
INTENSITIES = ("intensity", "scalar_intensity", "reflectance", "remission")
LABELS = ("label", "scalar_label", "class", "classification")
LONGEST_LINE = 1 << 16  # bytes


def read(path: Path) -> Cloud:
    """Read a cloud from a .ply file, or from a .npy file: (N, 3) coordinates, or (N, 4) with an intensity.

    Coordinates are float64, because map coordinates are too large for float32. Integer intensities are divided by the
    largest value of their type. If a floating-point intensity is above 1, all intensities are divided by the largest
    intensity in the file. Some scanners write non-finite points where no light returned; these points are omitted.
    Programs that store labels as floating-point numbers write NaN for a point without a label; its label becomes -1.

    Raises:
        InputError: the file does not exist, is not a point cloud in one of these formats, or has labels that are not
            whole numbers.
    """
    readers = {".ply": _read_ply, ".npy": _read_npy}
    if path.suffix.lower() not in readers:
        raise InputError(f"{path} is neither .ply nor .npy: convert it")
    if not path.is_file():
        raise InputError(f"{path} does not exist")
    try:
        columns = readers[path.suffix.lower()](path)
    except (OSError, ValueError, OverflowError, MemoryError) as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    xyz = np.stack([columns[axis].astype(np.float64) for axis in "xyz"], 1)
    there = np.isfinite(xyz).all(1)
    if not there.any():
        raise InputError(f"{path} has no point with finite coordinates among {len(xyz)}")
    intensity = next((_unit(columns[name][there]) for name in INTENSITIES if name in columns), None)
    labels = next((_whole(columns[name][there], name, path) for name in LABELS if name in columns), None)
    return Cloud(
        torch.from_numpy(xyz[there]),
        None if intensity is None else torch.from_numpy(intensity),
        None if labels is None else torch.from_numpy(labels),
    )


def _unit(values: NDArray[np.generic]) -> NDArray[np.float32]:
    """Scale intensities to 0..1, as `read` describes. Intensities that are not finite become 0."""
    known = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    largest = max(1.0, known.max()) if values.dtype.kind == "f" else np.iinfo(values.dtype.str).max
    return (known / largest).clip(0, 1).astype(np.float32)


def _whole(values: NDArray[np.generic], name: str, path: Path) -> NDArray[np.int64]:
    """Convert labels to integers, NaN to -1."""
    if values.dtype.kind == "f":
        values = np.where(np.isnan(values), -1.0, values.astype(np.float64))
        wrong = (values != np.floor(values)) | (np.abs(values) >= 2**53)
        if wrong.any():
            raise InputError(
                f"{path}: {name} of {wrong.sum()} of {len(values)} points is not a whole number, such as "
                f"{values[wrong][0]:g}; expected class numbers, or NaN for points without a class"
            )
    return values.astype(np.int64)


def _read_npy(path: Path) -> dict[str, NDArray[np.generic]]:
    with path.open("rb") as file:
        values = np.lib.format.read_array(file, allow_pickle=False)
    if values.ndim != 2 or values.shape[1] not in (3, 4):
        raise ValueError(f"expected an array (N, 3) or (N, 4), got {values.shape}")
    if values.dtype.kind not in "fiu":
        raise ValueError(f"expected numbers, got {values.dtype}")
    return dict(zip(("x", "y", "z", "intensity"), values.T, strict=False))


class _Element(NamedTuple):
    """An element of a PLY file: its number of rows, and the name and NumPy type of each property (None for a list)."""

    name: str
    rows: int
    properties: list[tuple[str, str | None]]


def _read_ply(path: Path) -> dict[str, NDArray[np.generic]]:
    """Read the properties of the vertices; returns them by lower-case name."""
    with path.open("rb") as file:
        byte_order, elements = _ply_header(file)
        for element in elements:  # the last element holds the vertices
            if any(kind is None for _, kind in element.properties):
                raise ValueError(
                    f"element {element.name} has lists: expected only numbers in elements up to the vertices"
                )
            if element.rows > path.stat().st_size:
                raise ValueError(f"it is too short for {element.rows} rows of element {element.name}")
            layout = np.dtype([(name, f"{byte_order or '='}{kind}") for name, kind in element.properties])
            if byte_order is None:
                found = _ascii_rows(file, element, layout)
            else:
                data = file.read(element.rows * layout.itemsize)
                found = np.frombuffer(data, layout, len(data) // max(1, layout.itemsize))
            if len(found) < element.rows:
                raise ValueError(f"it ends after {len(found)} of {element.rows} rows of element {element.name}")
    return {name: found[name] for name, _ in element.properties}


def _ply_header(file: BinaryIO) -> tuple[str | None, list[_Element]]:
    """Read the header; the file position is then at the data.

    Returns the byte order (None for text), and the elements up to and including the vertices.
    """
    if file.readline(LONGEST_LINE).strip() != b"ply":
        raise ValueError("it does not begin with the line 'ply'")
    encoding, elements = "", []
    while (line := file.readline(LONGEST_LINE)).strip() != b"end_header":
        match line.decode("latin-1").split():
            case ["format", name, "1.0"] if name in ENCODINGS:
                encoding = name
            case ["element", name, rows] if rows.isdecimal():
                elements.append(_Element(name, int(rows), []))
            case ["property", "list", count, kind, name] if elements and {count, kind} <= TYPES.keys():
                elements[-1].properties.append((name.lower(), None))
            case ["property", kind, name] if elements and kind in TYPES:
                elements[-1].properties.append((name.lower(), TYPES[kind]))
            case ["comment" | "obj_info", *_]:
                pass
            case _:
                raise ValueError(f"its header has {line[:60]!r}: expected format, element, property or end_header")
    vertex = next((place for place, element in enumerate(elements) if element.name == "vertex"), None)
    if not encoding or vertex is None or not {"x", "y", "z"} <= {name for name, _ in elements[vertex].properties}:
        raise ValueError("its header lacks the format or an element vertex with properties x, y and z")
    return ENCODINGS[encoding], elements[: vertex + 1]


def _ascii_rows(file: BinaryIO, element: _Element, layout: np.dtype[np.void]) -> NDArray[np.void]:
    """Read the rows of an element in a text file, one per line; stops at the end of the file."""
    found = np.zeros(element.rows, layout)
    for row in range(element.rows):
        words = file.readline(LONGEST_LINE).split()
        if not words:
            return found[:row]
        if len(words) != len(element.properties):
            raise ValueError(
                f"row {row} of element {element.name} has {len(words)} numbers: expected {len(element.properties)}"
            )
        found[row] = tuple(words)
    return found


def write(cloud: Cloud, path: Path, palette: Sequence[Colour]) -> None:
    """Write a binary .ply file with coordinates and, if known, intensity, label and the label's colour."""
    precision = "<f8" if cloud.xyz.dtype == torch.float64 else "<f4"
    columns = {axis: cloud.xyz[:, number].cpu().numpy().astype(precision) for number, axis in enumerate("xyz")}
    if cloud.labels is not None:
        colours = torch.tensor(palette, dtype=torch.uint8)[cloud.labels.cpu()].numpy()
        columns |= {name: colours[:, number] for number, name in enumerate(("red", "green", "blue"))}
        columns["label"] = cloud.labels.cpu().numpy().astype("<i4")
    if cloud.intensity is not None:
        columns["intensity"] = cloud.intensity.cpu().numpy().astype("<f4")
    rows = np.zeros(len(cloud.xyz), [(name, column.dtype) for name, column in columns.items()])
    for name, column in columns.items():
        rows[name] = column
    names = {"f8": "double", "f4": "float", "i4": "int", "u1": "uchar"}
    properties = [f"property {names[column.dtype.str[1:]]} {name}" for name, column in columns.items()]
    header = ["ply", "format binary_little_endian 1.0", f"element vertex {len(rows)}", *properties, "end_header", ""]
    with whole_file(path) as unfinished:
        unfinished.write_bytes("\n".join(header).encode() + rows.tobytes())


# ---- pictures --------------------------------------------------------------------------------------------------

THICKNESS = 0.005  # diameter of a drawn point in a cloud of 100,000 points, as a share of the cloud's radius
THICKEST = 0.02  # largest diameter, in clouds with few points, also as a share of the radius
SMALLEST, LARGEST = 0.9, 7.0  # smallest and largest radius of a point, in pixels of the finer picture
FINER = 2  # supersampling factor: the picture is drawn with this many times the pixels per side, then averaged
NIGHT = (16, 19, 26)
INK = (226, 230, 238)
RIGHT, WRONG = (70, 76, 88), (255, 72, 66)


PALETTE: tuple[Colour, ...] = (  # colours for labels without names
    (104, 98, 128),
    (214, 150, 214),
    (222, 186, 128),
    (46, 150, 84),
    (80, 160, 255),
    (255, 226, 90),
    (255, 92, 122),
    (255, 148, 70),
    (158, 204, 110),
    (176, 110, 230),
)


class View(NamedTuple):
    """N points projected to a picture. A point with a depth of 0 or less is not visible.

    Attributes:
        columns, rows: float32 (N,), in pixels.
        depths: float32 (N,), distance from the view's near plane along the viewing direction, in metres.
        radii: float32 (N,), the radii of the points, in pixels.
    """

    columns: Tensor
    rows: Tensor
    depths: Tensor
    radii: Tensor


def from_the_side(xyz: Tensor, width: int, height: int) -> View:
    """Project the cloud in perspective, for a viewer outside and above one end of the cloud (either end). The viewer
    looks along the cloud's longer side, down at its middle."""
    centre, along, reach = _extent(xyz)
    forward = torch.cat((along * 0.83, torch.tensor([-0.55])))
    forward = forward / forward.norm()
    right = torch.linalg.cross(forward, torch.tensor([0.0, 0.0, 1.0]))
    right = right / right.norm()
    below = torch.linalg.cross(forward, right)
    seen = (xyz - centre + 1.25 * reach * forward) @ torch.stack((right, below, forward), 1)  # (N, 3)
    focal = 0.95 * width
    depths = seen[:, 2]
    scale = focal / depths.clamp(min=1e-3)
    columns, rows = width / 2 + seen[:, 0] * scale, height / 2 + seen[:, 1] * scale
    return View(columns, rows, depths - 0.05 * reach, scale * reach * _radius(len(xyz)))


def from_above(xyz: Tensor, width: int, height: int) -> View:
    """Project the cloud to a map, with the cloud's longer side along the picture's width."""
    centre, along, reach = _extent(xyz)
    across = torch.stack((-along[1], along[0]))
    flat = (xyz - centre)[:, :2] @ torch.stack((along, across), 1)  # (N, 2)
    pixels = width / (2.2 * reach)
    columns, rows = width / 2 + flat[:, 0] * pixels, height / 2 - flat[:, 1] * pixels
    depths = xyz[:, 2].max() - xyz[:, 2] + reach
    return View(columns, rows, depths, (pixels * reach * _radius(len(xyz))).expand_as(depths))


def _extent(xyz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find the cloud's middle (3,), its longest horizontal direction (2,), and its radius.

    The radius is the horizontal distance from the middle, in metres, within which 90% of the points lie.
    """
    low, high = (xyz.kthvalue(_rank(len(xyz), share), 0).values for share in (0.1, 0.9))
    centre = (low + high) / 2
    flat = (xyz - centre)[:, :2]
    distances = flat.norm(dim=1)
    reach = distances.kthvalue(_rank(len(xyz), 0.9)).values.clamp(min=1e-3)
    cells = (flat / reach * 20).round().unique(dim=0)  # each cell counts once, even with many points
    return centre, torch.linalg.eigh(cells.T @ cells).eigenvectors[:, 1], reach


def _radius(count: int) -> float:
    """The radius at which a point is drawn, as a fraction of the cloud's radius. Points are larger in clouds with fewer
    points."""
    return min(THICKEST, THICKNESS * (1e5 / count) ** 0.5) / 2


def _rank(count: int, share: float) -> int:
    """The rank, counted from 1, of a quantile among `count` values in ascending order: the fraction `share` of the
    values has a lower rank."""
    return min(count, 1 + int(share * count))


def draw(view: View, colours: Tensor, width: int, height: int) -> Image.Image:
    """Draw the points of a view, with colours (N, 3) uint8. Nearer points hide farther points."""
    width, height = FINER * width, FINER * height
    radii, order = (FINER * view.radii).clamp(SMALLEST, LARGEST).where(view.depths > 0, -1.0).sort(descending=True)
    columns, rows, depths = FINER * view.columns[order], FINER * view.rows[order], view.depths[order]
    # An integer combines depth (in tenths of a millimetre) and index; its minimum in a pixel is the nearest point.
    keys = ((depths.double() * 1e4).long().clamp(max=(1 << 30) - 1) << 32) | order
    nearest = torch.full((height * width,), 1 << 62)
    reach = math.ceil(LARGEST)
    for down in range(-reach, reach + 1):
        for aside in range(-reach, reach + 1):
            count = int((radii >= math.hypot(down, aside)).sum())  # points are sorted by descending radius
            row, column = (rows[:count] + down).floor().long(), (columns[:count] + aside).floor().long()
            seen = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            nearest.scatter_reduce_(0, (row * width + column)[seen], keys[:count][seen], "amin")
    there = nearest < 1 << 62
    found = torch.where(there, nearest & 0xFFFFFFFF, 0)
    picture = torch.where(there[:, None], colours[found].float(), torch.tensor(NIGHT, dtype=torch.float32))
    logs = torch.where(there, (nearest >> 32).double().clamp(min=1).log2(), math.inf).float().view(height, width)
    picture = picture.view(height, width, 3) * _light(logs)[..., None]
    image = Image.fromarray(picture.round().byte().numpy())
    return image.resize((width // FINER, height // FINER), Image.Resampling.LANCZOS)


def _light(depths: Tensor) -> Tensor:
    """The brightness of each pixel, 0..1. `depths` (H, W) are logarithms of depths.

    A pixel is darker the further its neighbours lie in front of it.
    """
    shade = torch.zeros_like(depths)
    for distance in (1, 3):
        around = torch.nn.functional.pad(depths[None], (distance,) * 4, value=math.inf)[0]
        for down, aside in ((0, 1), (1, 0), (1, 2), (2, 1)):
            window = around[down * distance :, aside * distance :][: depths.shape[0], : depths.shape[1]]
            shade += torch.where(depths.isfinite(), (depths - window).clamp(min=0), 0).clamp(max=0.02)
    return (-12 * shade).exp()


def of_heights(z: Tensor) -> Tensor:
    """Colour points by height, from blue over green to yellow: uint8 (N, 3)."""
    low, high = (z.kthvalue(_rank(len(z), share)).values for share in (0.02, 0.98))
    ladder = torch.tensor([(58, 76, 160), (44, 140, 168), (72, 184, 126), (188, 214, 78), (250, 226, 120)]).float()
    place = ((z - low) / (high - low).clamp(min=1e-6)).float().clamp(0, 1) * (len(ladder) - 1)
    step = place.long().clamp(max=len(ladder) - 2)
    return torch.lerp(ladder[step], ladder[step + 1], (place - step)[:, None]).round().byte()


def lit(colours: Tensor, intensity: Tensor | None) -> Tensor:
    """Slightly darken the colours, uint8 (N, 3), of points with a low intensity."""
    if intensity is None:
        return colours
    return (colours * (0.72 + 0.28 * intensity.clamp(0, 1).sqrt())[:, None]).round().byte()


def sheet(
    xyz: Tensor, panels: Sequence[tuple[str, Tensor]], legend: Sequence[tuple[str, Colour]], width: int = 640
) -> Image.Image:
    """Draw a cloud in several colourings side by side, with a legend.

    The upper row shows the cloud from the side, the lower row from above.

    Args:
        xyz: (N, 3), in metres.
        panels: title and uint8 colours (N, 3) of each panel.
        legend: the meaning of each colour.
        width: width of a panel, in pixels.
    """
    xyz = (xyz.double() - xyz.double().mean(0)).float().cpu()
    high, gap, title, small = 5 * width // 8, 6, width // 16, width // 24
    key = _key(legend, len(panels) * (width + gap), small)
    whole = Image.new("RGB", (len(panels) * (width + gap) + gap, title + 2 * (high + gap) + key.height), NIGHT)
    pen = ImageDraw.Draw(whole)
    views = from_the_side(xyz, width, high), from_above(xyz, width, high)
    for number, (name, colours) in enumerate(panels):
        left = gap + number * (width + gap)
        pen.text((left + width // 2, title // 2), name, INK, ImageFont.load_default(0.55 * title), "mm")
        for row, view in enumerate(views):
            whole.paste(draw(view, colours.cpu(), width, high), (left, title + row * (high + gap)))
    whole.paste(key, (gap, title + 2 * (high + gap)))
    return whole


def _key(legend: Sequence[tuple[str, Colour]], width: int, line: int) -> Image.Image:
    """Draw the legend; each of its lines is `line` pixels high."""
    font = ImageFont.load_default(0.6 * line)
    columns = max(
        1, min(len(legend), int(width / (1.6 * line + max((font.getlength(n) for n, _ in legend), default=1))))
    )
    key = Image.new("RGB", (width, math.ceil(len(legend) / columns) * line), NIGHT)
    pen = ImageDraw.Draw(key)
    for number, (name, colour) in enumerate(legend):
        left = (number % columns) * width // columns + line // 2
        middle = (number // columns) * line + line // 2
        pen.rounded_rectangle((left, middle - line // 4, left + line // 2, middle + line // 4), 3, colour)
        pen.text((left + 0.75 * line, middle), name, INK, font, "lm")
    return key
