"""Decode with a GPU's video engines (NVDEC): check whether they are available, and access decoded frames.

FFmpeg, which PyAV includes, reads the file and drives the engines. So the order of frames, damage and colours are
handled by the same code as on the CPU. FFmpeg works in torch's CUDA context, on the default stream.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from rooftop.errors import InputError
from rooftop.hardware.streams import ensure_context
from rooftop.media.colours import Colours
from rooftop.media.pyav import load_av
from rooftop.media.surfaces import Plane, Surface
from rooftop.words import counted

if TYPE_CHECKING:
    from rooftop.media.pyav import av

DRIVER = ("libcuda.so.1", "libnvcuvid.so.1")
IN_TORCHS_CONTEXT = {"primary_ctx": "0", "current_ctx": "1"}
"""Without these options, FFmpeg would set flags of CUDA's primary context that torch does not set."""

WORTH_PIXELS = 320 * 240
"""Minimum number of pixels of a frame for which an H200's NVDEC is faster than 16 CPU cores (`benchmarks/media.py`).
Fewer cores were not measured."""

BITS = {"nv12": 8, "p010le": 10, "p016le": 12, "yuv444p": 8, "yuv444p16le": 12}
"""The significant bits per sample in each output format of NVDEC, by FFmpeg's name for the format. Samples of 10 and 12
bits are in the upper bits of 16-bit words."""


class NoNvdecError(Exception):
    """Internal error: NVDEC is not available, or cannot decode this video."""


def gpu_of(device: str | torch.device) -> tuple[torch.device | None, bool]:
    """The GPU on which a reader should decode (None for the CPU), and whether it may fall back to the CPU.

    Raises:
        InputError: `device` is not the name of a CPU or a CUDA GPU.
    """
    name = str(device)
    if name == "cpu":
        return None, True
    if name == "auto":
        return _numbered(torch.device("cuda")), True
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError):
        asked = torch.device("meta")
    if asked.type != "cuda":
        raise InputError(f'device {name!r} is not known: expected "cpu", "auto", "cuda" or "cuda:1"')
    return _numbered(asked), False


def _numbered(device: torch.device) -> torch.device:
    if device.index is not None or not torch.cuda.is_available():
        return device
    return torch.device("cuda", torch.cuda.current_device())


def missing(device: torch.device) -> str | None:
    """Return why NVDEC is not available on this machine; None if nothing seems to be missing."""
    if not torch.cuda.is_available():
        return "there is no NVDEC, because torch finds no CUDA GPU here"
    if (device.index or 0) >= torch.cuda.device_count():
        return f"there is no {device}, only {counted(torch.cuda.device_count(), 'GPU')}"
    for name in DRIVER:
        try:
            ctypes.CDLL(name)
        except OSError:
            return f"the driver's {name} cannot be loaded (a container needs the capability `video`)"
    if "cuda" not in load_av().codec.hwaccel.hwdevices_available():
        return "this FFmpeg was built without CUDA: install PyAV from its wheel"
    try:
        import triton  # noqa: F401
    except ImportError:
        return 'frames are converted by a Triton kernel: pip install "rooftop[triton]"'
    return None


def too_small(height: int, width: int) -> str | None:
    """Return why the CPU, not NVDEC, should decode a video of this size; None if there is no reason."""
    if height * width >= WORTH_PIXELS:
        return None
    return f"{width} x {height} pixels are few: NVDEC is known to be faster from {WORTH_PIXELS:,} pixels on"


def odd(height: int, width: int) -> str | None:
    """Return why the CPU, not NVDEC, should decode a video of an odd size; None if the size is even."""
    if height % 2 == width % 2 == 0:
        return None
    return f"NVDEC stretches pictures of odd size to even size, and this video has {width} x {height} pixels"


def acceleration(device: torch.device) -> Any:
    """The `hwaccel` argument of PyAV's decoders. The device must be torch's current device during the call."""
    ensure_context(device)
    hwaccel: Any = load_av().codec.hwaccel.HWAccel(
        "cuda", str(device.index), allow_software_fallback=False, options=IN_TORCHS_CONTEXT, is_hw_owned=True
    )
    return hwaccel


def surface_of(frame: av.VideoFrame, colours: Colours, device: torch.device) -> Surface:
    """Return a frame decoded by NVDEC as a surface, without a copy. The frame owns the memory, and tensors that share
    this memory keep the frame alive.

    Raises:
        NoNvdecError: the format is unknown.
    """
    form = frame.sw_format.name if frame.sw_format is not None else frame.format.name
    if form not in BITS:
        raise NoNvdecError(f"NVDEC returns frames in the format {form}, which is not supported")
    height, width = frame.height, frame.width
    dtype = torch.uint8 if BITS[form] == 8 else torch.uint16
    size = dtype.itemsize
    y, *chroma = [(plane.buffer_ptr, plane.line_size // size) for plane in frame.planes]
    luma = Plane(y[0], (height, width), (y[1], 1), dtype, device, frame)
    if form.startswith("yuv444"):
        u, v = (Plane(pointer, (height, width), (row, 1), dtype, device, frame) for pointer, row in chroma[:2])
    else:
        pairs, row = chroma[0]
        half = (height // 2, width // 2)
        u, v = (Plane(pointer, half, (row, 2), dtype, device, frame) for pointer in (pairs, pairs + size))
    return Surface(luma, u, v, BITS[form], colours)
