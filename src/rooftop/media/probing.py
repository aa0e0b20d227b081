"""Find the contents of a video file (streams, frames, clock) from its header and its packets."""

from __future__ import annotations

import os
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from rooftop.errors import InputError
from rooftop.media.colours import Colours
from rooftop.media.decoding import Broken, Decoder
from rooftop.media.errors import DamagedVideoError
from rooftop.media.frame_tensors import colours_of, displayed_size, orientation
from rooftop.media.indexing import build_index
from rooftop.media.opening import Source

if TYPE_CHECKING:
    from rooftop.media.pyav import av

H273_TRANSFERS = {16: "PQ (SMPTE ST 2084)", 18: "HLG (ARIB STD-B67)"}


@dataclass(frozen=True)
class AudioInfo:
    """A stream of sound: codec, samples per second, number of channels."""

    codec: str
    rate_hz: int
    channels: int


@dataclass(frozen=True)
class VideoInfo:
    """The properties of a video file.

    Attributes:
        source: the path; or "video of N bytes", if bytes were given.
        size_bytes: size of the file.
        container: FFmpeg's names of the format.
        codec, profile, pixel_format: FFmpeg's names for these properties of the video; profile may be None.
        bits: bits per sample.
        height, width: size of the upright picture in pixels.
        coded_height, coded_width: size of the stored picture in pixels.
        rotation_degrees: the counterclockwise rotation that `VideoReader` applies.
        mirrored: whether `VideoReader` mirrors frames left to right after the rotation.
        pixel_aspect: width of a pixel over its height; 1.0 if square or unknown. `VideoReader` does not stretch
            frames to square pixels.
        interlaced: whether the first frame is interlaced; `VideoReader` does not separate fields.
        colours: matrix and range, and whether each is assumed; None for RGB, palettes and unsupported formats.
        hdr: "PQ" or "HLG", the transfer function of a video with high dynamic range; None for other videos.
            `VideoReader` does not tone-map.
        fps: mean frames per second, as the file states them; 0.0 if it states none.
        variable_frame_rate: True if no rate exists at which each frame k is shown at k / rate.
        frames, key_frames: the numbers of frames and of key frames.
        longest_gop: largest number of frames from one key frame to the next; one random access may have to decode that
            many frames.
        start_s, duration_s: time of the first frame, and time from its start to the end of the last frame.
        bit_rate_bps: bit rate of the whole file.
        seekable: whether decoding can start at key frames; if not, decoding always starts at the beginning.
        audio: the file's streams of sound.
        damage: a problem with the packets, or None. Frames may be damaged even if `damage` is None, because not all
            frames were decoded.
        discontinuity: a description of where the file's clock goes back, or of where packets of a transport stream are
            not consecutive, as in joined files. None if there is nothing to describe.
    """

    source: str
    size_bytes: int
    container: str
    codec: str
    profile: str | None
    pixel_format: str
    bits: int
    height: int
    width: int
    coded_height: int
    coded_width: int
    rotation_degrees: int
    mirrored: bool
    pixel_aspect: float
    interlaced: bool
    colours: Colours | None
    hdr: str | None
    fps: float
    variable_frame_rate: bool
    frames: int
    key_frames: int
    longest_gop: int
    start_s: float
    duration_s: float
    bit_rate_bps: float
    seekable: bool
    audio: tuple[AudioInfo, ...]
    damage: str | None
    discontinuity: str | None


def probe(path_or_bytes: str | os.PathLike[str] | bytes) -> VideoInfo:
    """Describe a video, by decoding one frame and reading all packets. If packets do not suffice to find the times of
    all frames (`indexing.py`), all frames are decoded.

    Raises:
        InputError: there is no such file, or no video in it.
        DamagedVideoError: no frame can be decoded.
        MissingExtraError: PyAV is not installed.
    """
    source = Source(path_or_bytes)
    with closing(Decoder(source)) as decoder:
        try:
            _, frame = next(decoder.frames())
        except (Broken, StopIteration) as broken:
            raise DamagedVideoError(
                f"no frame of {source.name} can be decoded: {str(broken) or 'it has none'}"
            ) from broken
        return _describe(source, decoder, frame)


def _describe(source: Source, decoder: Decoder, frame: av.VideoFrame) -> VideoInfo:
    index, base = build_index(source), decoder.time_base
    stream, context = decoder.stream, decoder.stream.codec_context
    keys = [*index.keys, len(index)]
    duration = float((index.end - index.pts[0]) * base) if len(index) else 0.0
    turns, mirrored = orientation(frame)
    height, width = displayed_size(frame)
    colours: Colours | None = None
    if not frame.format.is_rgb and not frame.format.has_palette:
        with suppress(InputError):
            colours = colours_of(frame)
    aspect = stream.sample_aspect_ratio
    return VideoInfo(
        source=source.name,
        size_bytes=source.size_bytes,
        container=decoder.container.format.name,
        codec=context.codec.canonical_name,
        profile=context.profile,
        pixel_format=frame.format.name,
        bits=frame.format.components[0].bits,
        height=height,
        width=width,
        coded_height=frame.height,
        coded_width=frame.width,
        rotation_degrees=turns * 90,
        mirrored=mirrored,
        pixel_aspect=float(aspect) if aspect else 1.0,
        interlaced=frame.interlaced_frame,
        colours=colours,
        hdr=H273_TRANSFERS.get(int(frame.color_trc)),
        fps=float(decoder.rate() or 0),
        variable_frame_rate=len(index) > 1 and index.constant_rate(base, decoder.rate()) is None,
        frames=len(index),
        key_frames=len(index.keys),
        longest_gop=max((b - a for a, b in pairwise(keys)), default=len(index)),
        start_s=decoder.seconds(index.pts[0]) if len(index) else 0.0,
        duration_s=duration,
        bit_rate_bps=8 * source.size_bytes / duration if duration else 0.0,
        seekable=index.seekable,
        audio=tuple(
            AudioInfo(each.codec_context.codec.canonical_name, each.rate, each.channels)
            for each in decoder.container.streams.audio
            if each.codec_context is not None
        ),
        damage=index.damage,
        discontinuity=index.discontinuity,
    )
