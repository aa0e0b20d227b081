"""Check that FFmpeg can read a video that was just written.

FFmpeg writes some codecs into formats that cannot state them, such as FFV1 in MPEG-TS, without an error.
"""

from __future__ import annotations

from pathlib import Path

from rooftop.media.opening import said
from rooftop.media.pyav import load_av

PICTURES = "image2"  # FFmpeg's format of single pictures; the suffix states the codec
UNDECODED = ("libwebp", "libwebp_anim")  # FFmpeg does not decode the animations that it writes
PICTURE_ENCODERS = {".jpg": "mjpeg", ".jpeg": "mjpeg", ".tif": "tiff"}  # otherwise the suffix is the encoder's name


def why_unreadable(path: Path, form: str, encoder: str, frames: int) -> str | None:
    """The reason why the first frame of a file cannot be decoded; None if it can.

    Args:
        path: the complete file.
        form: FFmpeg's name of the container format, such as mp4.
        encoder: the encoder that wrote the video.
        frames: number of frames in the video.
    """
    if form == "apng" and frames == 1:
        return "an animation needs two frames; use .png for one picture"
    av = load_av()
    picture = form == PICTURES
    try:
        with av.open(
            f"file:{path}",
            format=PICTURES if picture else None,
            container_options={"pattern_type": "none"} if picture else {},
        ) as container:
            if not container.streams.video or container.streams.video[0].codec_context is None:
                return "it has no video that can be decoded"
            decoded = encoder in UNDECODED or next(container.decode(container.streams.video[0]), None)
            return None if decoded else "it has no frame"
    except (av.FFmpegError, ValueError) as error:
        return said(error)


def usual_encoder(suffix: str, default: str) -> str:
    """A video encoder that suits the suffix of a file. `default` is the video codec that FFmpeg recommends for the
    file's format."""
    return PICTURE_ENCODERS.get(suffix, suffix[1:]) if default == "mjpeg" and suffix != ".mjpeg" else default
