"""Convert a decoded frame to a tensor: orientation, colours, size and dtype.

Frames in the host's memory are converted in loops that Numba compiles (`plane_loops.py`). Plain PyTorch converts them
if the result is float64, if Numba does not work, or if they do not consist of integer planes of luma and chroma. One
kernel converts NVDEC's frames (`frame_kernels.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import atan2, pi
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from rooftop.errors import InputError
from rooftop.launch.numba_loops import numba_works
from rooftop.media.colours import MATRICES, Colours, usual_matrix, yuv_to_rgb
from rooftop.media.forms import Form
from rooftop.media.nvdec import surface_of
from rooftop.media.pyav import load_av
from rooftop.media.resizing import resized
from rooftop.media.surfaces import Surface, all_to_rgb, tensor_of

if TYPE_CHECKING:
    from rooftop.media.pyav import av

Turned = tuple[int, bool]
UPRIGHT: Turned = (0, False)
REPACKED = {  # pixel format: the format with the same samples in separate planes
    "nv12": "yuv420p",
    "nv21": "yuv420p",
    "nv16": "yuv422p",
    "nv24": "yuv444p",
    "nv42": "yuv444p",
    "yuyv422": "yuv422p",
    "uyvy422": "yuv422p",
    "yvyu422": "yuv422p",
    "p010le": "yuv420p10le",
    "p012le": "yuv420p12le",
    "p016le": "yuv420p16le",
    "p210le": "yuv422p10le",
    "p410le": "yuv444p10le",
}


def colours_of(frame: av.VideoFrame) -> Colours:
    """The colour encoding of a frame. Properties that the frame does not state are assumed, and `assumed` lists them.

    Luma alone ("gray") always has full range, as in FFmpeg and OpenCV. For luma alone, the range that the file states
    is ignored, because encoders write the range without regard to this format.

    Raises:
        InputError: the matrix is not supported (YCgCo, ICtCp, constant luminance).
    """
    assumed = []
    code, extent = int(frame.colorspace), int(frame.color_range)
    if code in MATRICES or code in (0, 2, 3):
        matrix = MATRICES.get(code)
    else:
        raise InputError(f"colour matrix {code} of ITU-T H.273 is not supported: convert the video to BT.709")
    if matrix is None:
        assumed.append("matrix")
        matrix = usual_matrix(frame.height, frame.width)
    full = extent == 2 or frame.format.name.startswith(("yuvj", "gray"))
    if extent not in (1, 2) and not full:
        assumed.append("range")
    return Colours(matrix, full, tuple(assumed))


def to_tensor(frame: av.VideoFrame, form: Form, device: torch.device | None = None, turned: Turned = UPRIGHT) -> Tensor:
    """Convert a frame to the requested form: RGB (3, H, W), upright; or NV12 (3 H / 2, W), the decoded samples, not
    turned.

    Resizing is bilinear, with antialiasing (`resizing.py`).

    Args:
        frame: a frame in the host's memory, or a frame of NVDEC.
        form: the form of the tensor.
        device: the GPU whose NVDEC decoded the frame; None for a frame in the host's memory.
        turned: the result of `orientation`, for a frame that does not state its rotation.

    Raises:
        InputError: the colour matrix or pixel format is not supported, or NV12 cannot represent the frame.
    """
    if device is not None:
        return _on_gpu([frame], form, device, turned, None)[0]
    if form.output == "nv12":
        return _nv12(frame)
    turns, mirrored = orientation(frame, turned)
    size = form.resize
    if size is not None and turns % 2:
        size = size[::-1]
    frame = _plain(frame)
    if numba_works() and form.dtype != torch.float64 and _has_planes(frame):
        rgb = _by_loops(frame, form, size)
    else:
        rgb = _by_torch(frame, form, size)
    if turns:
        rgb = torch.rot90(rgb, turns, (1, 2))
    if mirrored:
        rgb = rgb.flip(2)
    return rgb.contiguous()


def _by_loops(frame: av.VideoFrame, form: Form, size: tuple[int, int] | None) -> Tensor:
    from rooftop.media.plane_loops import Plane, planes_to_rgb  # this imports Numba

    bits = frame.format.components[0].bits
    y, *chroma = (
        Plane(_memory(each, bits), each.line_size // (1 + (bits > 8)), each.height, each.width)
        for each in frame.planes[:3]
    )
    if chroma:
        u, v = chroma
    else:
        height, width = -(-frame.height // 2), -(-frame.width // 2)
        u = v = Plane(np.full(width, 1 << (bits - 1), y.memory.dtype), 0, height, width)
    normalization = None if form.mean is None or form.std is None else (form.mean, form.std)
    dtype = torch.float32 if form.dtype.is_floating_point else torch.uint8
    return planes_to_rgb(y, u, v, colours_of(frame), bits, dtype, size, normalization).to(form.dtype)


def to_tensors(
    frames: Sequence[av.VideoFrame],
    form: Form,
    device: torch.device | None,
    turned: Turned = UPRIGHT,
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """Convert several frames together, each as in `to_tensor`. On a GPU this takes less host time than one call per
    frame.

    Args:
        into: contiguous tensors to write to, one for each frame; None allocates new tensors.
    """
    if device is not None:
        return _on_gpu(frames, form, device, turned, into) if frames else []
    found = [to_tensor(frame, form, None, turned) for frame in frames]
    return found if into is None else [each.copy_(one) for each, one in zip(into, found, strict=True)]


def _by_torch(frame: av.VideoFrame, form: Form, size: tuple[int, int] | None) -> Tensor:
    narrow = form.dtype in (torch.float16, torch.bfloat16)
    rgb = _rgb(frame, torch.float32 if narrow else form.dtype)
    if size is not None:
        rgb = resized(rgb, size)
    if form.mean is not None and form.std is not None:
        mean, std = (rgb.new_tensor(each)[:, None, None] for each in (form.mean, form.std))
        rgb = (rgb - mean) / std
    return rgb.to(form.dtype)


def _on_gpu(
    frames: Sequence[av.VideoFrame], form: Form, device: torch.device, turned: Turned, into: Sequence[Tensor] | None
) -> list[Tensor]:
    """Convert frames of NVDEC. The decoder works on the device's default stream, and the kernel on the current stream.
    Each stream waits for the other: a frame is not read before it is ready, and its memory is not reused before it has
    been read."""
    with torch.cuda.device(device):
        current, decoding = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        surfaces = [surface_of(frame, colours_of(frame), device) for frame in frames]
        if current != decoding:
            current.wait_stream(decoding)
        found: list[Tensor] = []
        if form.output == "nv12":
            found = [_surface_as_nv12(each) for each in surfaces]
            if into is not None:
                found = [each.copy_(one) for each, one in zip(into, found, strict=True)]
        else:
            ways = [orientation(frame, turned) for frame in frames]
            for way, places in groupby(range(len(frames)), ways.__getitem__):
                some = slice(len(found), len(found) + len(list(places)))
                found += all_to_rgb(surfaces[some], form, *way, None if into is None else into[some])
        if current != decoding:
            decoding.wait_stream(current)
    return found


def _surface_as_nv12(surface: Surface) -> Tensor:
    if surface.bits != 8 or surface.u.shape == surface.y.shape:
        raise InputError(NO_NV12.format(surface.bits, "4:4:4" if surface.u.shape == surface.y.shape else "4:2:0"))
    return _interleaved(*(tensor_of(plane) for plane in (surface.y, surface.u, surface.v)))


NO_NV12 = 'output="nv12" needs 8 bits of 4:2:0 in even sizes, and this video has {} bits of {}: use output="rgb"'


def _nv12(frame: av.VideoFrame) -> Tensor:
    name = frame.format.name
    if name == "nv12":
        frame, name = frame.reformat(format="yuv420p"), "yuv420p"
    if name not in ("yuv420p", "yuvj420p"):
        raise InputError(NO_NV12.format(frame.format.components[0].bits, name))
    return _interleaved(*(_plane(each, 8) for each in frame.planes[:3]))


def _interleaved(y: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Return (3 H / 2, W): rows of luma, then rows in which Cb and Cr alternate."""
    height, width = y.shape
    if height % 2 or width % 2:
        raise InputError(NO_NV12.format(8, f"{width} x {height}"))
    found = torch.empty(height * 3 // 2, width, dtype=torch.uint8, device=y.device)
    found[:height] = y
    found[height:, 0::2] = u
    found[height:, 1::2] = v
    return found


def displayed_size(frame: av.VideoFrame, turned: Turned = UPRIGHT) -> tuple[int, int]:
    """Return (height, width) of the upright picture. `turned` is used if the frame does not state its rotation."""
    on_side = orientation(frame, turned)[0] % 2
    return (frame.width, frame.height) if on_side else (frame.height, frame.width)


def display_matrix(frame: av.VideoFrame) -> Any:
    """The display matrix in the frame's own data; None if there is none.

    This function avoids `frame.side_data`, which forms a reference cycle with the frame. The cycle would keep the
    frame's memory, including GPU memory, until Python collects garbage.
    """
    try:
        data = load_av().sidedata.sidedata.SideDataContainer(frame)
    except ValueError:  # PyAV raises for side data of a type that it does not know, such as EXIF of JPEG
        return None
    return data.get("DISPLAYMATRIX") if len(data) else None


def orientation(frame: av.VideoFrame, otherwise: Turned = UPRIGHT) -> Turned:
    """Return the number of quarter turns counterclockwise, and whether the turned frame is then mirrored left to right.

    NVDEC frames carry no container metadata; `otherwise` supplies it.

    FFmpeg's display matrix maps (x, y) to (a x + c y, b x + d y), with y down. An angle that is not a multiple of 90
    degrees is rounded to the nearest quarter turn.
    """
    data = display_matrix(frame)
    if data is None:  # there is no matrix, or PyAV does not return it but knows the rotation
        return (round(frame.rotation / 90) % 4, False) if frame.rotation else otherwise
    numbers = np.frombuffer(memoryview(data), dtype=np.int32)  # type: ignore[arg-type]
    if len(numbers) < 9:
        return 0, False
    a, b, c, d = (float(numbers[each]) for each in (0, 1, 3, 4))
    mirrored = a * d - b * c < 0
    if mirrored:
        a = -a
    return round(-atan2(b, a) / (pi / 2)) % 4, mirrored


def _plain(frame: av.VideoFrame) -> av.VideoFrame:
    """Convert a frame to separate planes in this machine's byte order, with the same sample values."""
    name = frame.format.name
    if name in REPACKED or (name.startswith(("yuv", "gray")) and name.endswith("be")):
        return _reformatted(frame, REPACKED.get(name) or name[:-2] + "le")
    return frame


def _reformatted(frame: av.VideoFrame, name: str) -> av.VideoFrame:
    """Convert a frame with swscale.

    Raises:
        InputError: swscale cannot convert the frame, or would crash the process, as for Bayer patterns of odd sizes.
    """
    own, (height, width) = frame.format.name, (frame.height, frame.width)
    if own.startswith("yaf") or (own.startswith("bayer") and (height % 2 or width % 2 or min(height, width) < 4)):
        raise InputError(NO_FORMAT.format(own, width, height))
    try:
        return frame.reformat(format=name)
    except (OSError, ValueError) as error:
        raise InputError(NO_FORMAT.format(own, width, height)) from error


NO_FORMAT = "pixels of format {} in {} x {} are not supported: convert the video with ffmpeg -pix_fmt yuv444p"


def _has_planes(frame: av.VideoFrame) -> bool:
    """Whether the frame consists of integer planes: luma and chroma, or luma alone."""
    name = frame.format.name
    planar = (name.startswith("yuv") and len(frame.planes) >= 3) or name.startswith("gray")
    plain = "f" not in name and "msb" not in name and frame.format.components[0].bits <= 16
    return planar and plain and all(plane.line_size > 0 for plane in frame.planes)


def _rgb(frame: av.VideoFrame, dtype: torch.dtype) -> Tensor:
    if _has_planes(frame):
        bits = frame.format.components[0].bits
        y, *chroma = (_plane(each, bits) for each in frame.planes[:3])
        if not chroma:
            chroma = [
                torch.full(tuple(-(-each // 2) for each in y.shape), 1 << (bits - 1), dtype=torch.int32, device="cpu")
            ] * 2
        u, v = chroma
        return yuv_to_rgb(y, u, v, colours_of(frame), bits, dtype)
    deep = max((each.bits for each in frame.format.components), default=8) > 8
    # These frames contain red, green and blue, or a palette. Only the order and depth of the values change.
    pixels = _reformatted(frame, "rgb48le" if deep else "rgb24").to_ndarray()  # (H, W, 3); may share FFmpeg's memory
    values = torch.from_numpy(pixels.astype(np.int32 if deep else np.uint8)).permute(2, 0, 1)
    if dtype == torch.uint8:
        return values.contiguous() if not deep else (values.float() / 257).round_().to(torch.uint8)
    return (values.to(torch.float64 if dtype == torch.float64 else torch.float32) / (65535 if deep else 255)).to(dtype)


def _memory(plane: av.video.plane.VideoPlane, bits: int) -> np.ndarray:
    """The memory of one plane, uint8 or uint16, including gaps between its rows."""
    return np.frombuffer(memoryview(plane), np.uint8 if bits <= 8 else np.dtype("<u2"))  # type: ignore[arg-type]


def _plane(plane: av.video.plane.VideoPlane, bits: int) -> Tensor:
    """Return one plane as (H, W), uint8 or int32. An int32 plane (more than 8 bits) shares no memory with the frame."""
    step = plane.line_size // (1 + (bits > 8))
    rows = _memory(plane, bits)[: step * plane.height].reshape(plane.height, step)[:, : plane.width]
    return torch.from_numpy(rows if bits <= 8 else rows.astype(np.int32))
