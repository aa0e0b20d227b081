"""A pool of NVDEC decoders, reused for the next video of the same kind.

Starting a decoder takes as long as decoding many frames. Ending a decoder takes even longer. While a decoder starts or
ends, no other Python thread runs. So a decoder whose video has ended is kept. The next pass over that video, or over
another video of the same `Kind`, reuses the decoder.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from rooftop.media.nvdec import NoNvdecError, acceleration
from rooftop.media.opening import said
from rooftop.media.pyav import load_av

if TYPE_CHECKING:
    from rooftop.media.pyav import av

KEPT = ("h264", "hevc", "vp8", "vp9", "av1")
# codecs whose key frames may lack headers, because a container may state these once for the whole file
HEADED = ("h264", "hevc")
MOST = 32  # maximum number of idle decoders
MOST_PIXELS = 32 * 1920 * 1088
"""Maximum total pixels of the idle decoders. A decoder keeps about twenty frames in memory, so 32 decoders of 1920 x
1080, or 8 of 3840 x 2160, use some 2 GB.
"""

PARAMETER_SETS = {"h264": (7, 8), "hevc": (32, 33, 34)}
"""Types of NAL units that contain parameter sets. Sources: ITU-T H.264, table 7-1; H.265, table 7-1."""


class Kind(NamedTuple):
    """The settings with which a decoder was started. A video with the same settings can reuse the decoder.

    Attributes:
        headers: the codec's headers from the file.
        colours: colours stated by the file, as FFmpeg numbers them.
    """

    device: torch.device
    codec: str
    headers: bytes
    width: int
    height: int
    colours: tuple[int, int, int, int]


COLOURS = ("colorspace", "color_range", "color_primaries", "color_trc")

_idle: list[tuple[Kind, av.VideoCodecContext]] = []  # oldest first
_lock = threading.RLock()  # reentrant, because garbage collection may return a decoder while the lock is held
_inherited: list[object] = []


def kind_of(stream: av.VideoCodecContext, device: torch.device) -> Kind:
    """The settings of an NVDEC decoder for a video stream."""
    colours = tuple(int(getattr(stream, name)) for name in COLOURS)
    return Kind(device, stream.codec.canonical_name, stream.extradata or b"", stream.width, stream.height, colours)  # type: ignore[arg-type]


def taken(kind: Kind, options: dict[str, str]) -> av.VideoCodecContext:
    """Take an NVDEC decoder with the settings `kind` out of the pool, or start a new decoder.

    Args:
        options: options of FFmpeg's decoder.

    Raises:
        NoNvdecError: NVDEC does not support the codec, or FFmpeg cannot reach the GPU.
    """
    with _lock:
        for place in reversed(range(len(_idle))):
            if _idle[place][0] == kind:
                return _idle.pop(place)[1]
    library = load_av()
    try:
        decoder = library.CodecContext.create(kind.codec, "r", acceleration(kind.device))
    except (library.FFmpegError, OSError, ValueError, RuntimeError) as error:
        raise NoNvdecError(said(error)) from error
    assert isinstance(decoder, library.VideoCodecContext)
    if kind.headers:
        decoder.extradata = kind.headers
    decoder.width, decoder.height = kind.width, kind.height
    for name, value in zip(COLOURS, kind.colours, strict=True):
        setattr(decoder, name, value)
    # one CPU thread, since FFmpeg only parses headers there; NVDEC decodes the pictures' data
    decoder.thread_type, decoder.thread_count = "NONE", 1
    # A container's own decoder knows how many frames must wait for reordering, because FFmpeg has read the beginning of
    # the file. This decoder knows this number only from the H.264 header. If the header does not state the number, the
    # decoder assumes the maximum of the level.
    decoder.options = {**options, "strict": "strict"} if kind.codec == "h264" else options
    return decoder


def given_back(kind: Kind, decoder: av.VideoCodecContext, process: int) -> None:
    """Return a decoder to the pool if it can be reused. If the pool has too many decoders, end the decoder that has
    been idle longest.

    Args:
        process: the process that started the decoder.
    """
    if process != os.getpid():
        _inherited.append(decoder)
        return
    if kind.codec not in KEPT or (kind.codec in HEADED and not kind.headers):
        return
    decoder.flush_buffers()
    ended = []
    with _lock:
        _idle.append((kind, decoder))
        while len(_idle) > MOST or sum(each.width * each.height for _, each in _idle) > MOST_PIXELS:
            ended.append(_idle.pop(0))
    del ended  # end the decoders without holding the lock


def release_decoders() -> int:
    """End NVDEC's idle decoders, and free their GPU memory.

    Returns: the number of ended decoders.
    """
    with _lock:
        ended = _idle[:]
        _idle.clear()
    return len(ended)


def says_otherwise(packet: bytes, kind: Kind) -> bool:
    """Whether a packet has parameter sets that differ from its file's headers. A decoder would keep these sets when it
    is reused for another video."""
    types = PARAMETER_SETS.get(kind.codec)
    if types is None:
        return False
    units = _units(packet, kind)
    if units is None:
        return True
    for unit in units:
        name = unit[0] & 31 if kind.codec == "h264" else unit[0] >> 1 & 63
        if name in types and unit.rstrip(b"\0") not in kind.headers:
            return True
    return False


def _units(packet: bytes, kind: Kind) -> list[bytes] | None:
    """The NAL units of a packet. A unit follows a start code or, as in MP4, its length. None if the codec's headers
    (`kind.headers`) are too short to state how many bytes a length has."""
    if kind.headers[:1] != b"\1":
        return [unit for unit in packet.split(b"\0\0\1")[1:] if unit]
    place, found = 0, []
    at = 4 if kind.codec == "h264" else 21
    if len(kind.headers) <= at:
        return None
    size = 1 + (kind.headers[at] & 3)
    while place + size < len(packet):
        length = int.from_bytes(packet[place : place + size], "big")
        if length:
            found.append(packet[place + size : place + size + length])
        place += size + length
    return found


def _forget() -> None:
    """Forget all decoders in a forked process. The process cannot use its parent's decoders, and must not end them."""
    global _idle, _lock
    _inherited.append(_idle)
    _idle, _lock = [], threading.RLock()


os.register_at_fork(after_in_child=_forget)
