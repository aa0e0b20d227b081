"""Test whether a GPU of this machine encodes H.264 with its own engine (NVENC), by encoding a few frames once per
process for each size and pixel format.

Data centre GPUs (A100, H100, H200, B200) have NVDEC but no NVENC.
"""

from __future__ import annotations

import ctypes
from fractions import Fraction
from functools import lru_cache

from rooftop.media.opening import said
from rooftop.media.pyav import load_av

ENCODER, OTHERWISE = "h264_nvenc", "libx264"
LIBRARY = "libnvidia-encode.so.1"
TRIAL_FRAMES = 3
TRIAL_PIXELS = 256


@lru_cache(maxsize=64)
def why_no_nvenc(pixel_format: str, height: int = TRIAL_PIXELS, width: int = TRIAL_PIXELS) -> str | None:
    """Return why NVENC cannot encode frames of this size and format; None if a test encoded such frames."""
    av = load_av()
    if ENCODER not in av.codecs_available:
        return f"this FFmpeg was built without {ENCODER}"
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return (
            f"the driver's {LIBRARY} cannot be loaded: there is no NVIDIA GPU, or the container lacks the capability "
            "`video`"
        )
    if pixel_format not in [each.name for each in av.Codec(ENCODER, "w").video_formats or []]:
        return f"{ENCODER} does not encode {pixel_format}"
    try:
        context = av.CodecContext.create(ENCODER, "w")
        context.height, context.width, context.pix_fmt = height, width, pixel_format
        context.time_base, context.framerate = Fraction(1, 25), Fraction(25)
        packets = []
        for number in range(TRIAL_FRAMES):
            frame = av.VideoFrame(width, height, "rgb24").reformat(format=pixel_format)
            frame.pts = number
            packets += context.encode(frame)
        packets += context.encode(None)
    except (av.FFmpegError, ValueError, OSError) as error:
        return (
            f"NVENC did not encode a trial of {width} x {height} pixels ({said(error)}); data-centre GPUs have no NVENC"
        )
    if len(packets) != TRIAL_FRAMES:
        return f"NVENC returned {len(packets)} of {TRIAL_FRAMES} frames of a trial"
    return None
