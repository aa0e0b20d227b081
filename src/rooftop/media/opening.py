"""Open sources with FFmpeg.

Only the given file or bytes are ever read: playlists and SDP files cannot make FFmpeg open the files they refer to.
"""

from __future__ import annotations

import io
import os
from fractions import Fraction
from itertools import islice
from typing import TYPE_CHECKING, Any

from rooftop.errors import InputError
from rooftop.media.pyav import load_av
from rooftop.user_paths import user_path

if TYPE_CHECKING:
    from rooftop.media.pyav import av

BUFFER_BYTES = 1 << 18
JPEG_START = b"\xff\xd8\xff"

FORMATS = (
    "mov,matroska,avi,mpegts,mpeg,mpegvideo,flv,live_flv,ogg,asf,rm,mxf,nut,ivf,obu,av1,h264,hevc,vvc,h261,h263,m4v,"
    "mjpeg,cavsvideo,dirac,dnxhd,dv,gif,apng,yuv4mpegpipe,wtv,vc1,swf,bink,smk,roq,nsv,"
    # sound formats, so that the error can say that there is no video
    "aac,ac3,eac3,aiff,amr,au,caf,dts,flac,mp3,w64,wav,wv"
)
"""FFmpeg's formats whose files contain all of their content. Formats that are left out: lists of other files (concat,
HLS, DASH), descriptions of streams (SDP, which listens on a network), single pictures and devices."""


class Source:
    """The source to read: a file, or bytes.

    Raises:
        InputError: the file does not exist, is not a regular file, or is empty.
    """

    def __init__(self, path_or_bytes: str | os.PathLike[str] | bytes | bytearray | memoryview) -> None:
        self.content: bytes | None = None
        if isinstance(path_or_bytes, (bytes, bytearray, memoryview)):
            self.content = bytes(path_or_bytes)
            self.name, size = f"video of {len(self.content):,} bytes", len(self.content)
        elif isinstance(path_or_bytes, (str, os.PathLike)):
            self.path = user_path(path_or_bytes)
            self.name = str(self.path)
            if not os.path.exists(self.path):  # also False for a name that is too long
                raise InputError(f"{self.name} does not exist: expected a video file, or its bytes")
            if not self.path.is_file():
                raise InputError(f"{self.name} is not a regular file: expected a video file, or its bytes")
            size = self.path.stat().st_size
        else:
            raise TypeError(f"expected a path or bytes of a video, got {type(path_or_bytes).__name__}")
        if size == 0:
            raise InputError(f"{self.name} is empty: expected a video")
        self.size_bytes = size
        # whether the file tells only when packets are decoded, not when frames are shown; None: not yet examined
        self.only_decoding_clock: bool | None = None

    def open(self) -> Any:
        return io.BytesIO(self.content) if self.content is not None else self.path.open("rb")


def open_input(file: Any) -> av.container.InputContainer:
    """Open a file-like object as a container of FFmpeg. PyAV's errors are raised unchanged."""
    try:
        return _opened(file)
    except load_av().ArgumentError:  # not one of FORMATS; FFmpeg may take Motion JPEG for a single picture
        if not _is_motion_jpeg(file):
            raise
        file.seek(0)
        return _opened(file, "mjpeg")


def _is_motion_jpeg(file: Any) -> bool:
    """Whether a file consists of more than one JPEG picture."""
    file.seek(0)
    if file.read(len(JPEG_START)) != JPEG_START:
        return False
    file.seek(0)
    with _opened(file, "mjpeg") as container:
        return sum(packet.size > 0 for packet in islice(container.demux(video=0), 2)) == 2


def _opened(file: Any, form: str | None = None) -> av.container.InputContainer:
    container: av.container.InputContainer = load_av().open(
        file,
        "r",
        format=form,
        container_options={"format_whitelist": FORMATS, "protocol_whitelist": "none"},
        buffer_size=BUFFER_BYTES,
        io_open=_refuse,
        metadata_errors="replace",
    )
    return container


def _refuse(url: str, flags: int, options: dict[str, str]) -> Any:
    raise PermissionError(f"a reference to another file ({url}) is not followed")


def seconds_of(duration: str | None) -> Fraction | None:
    """Parse a duration of Matroska, such as 00:01:02.500000000, to seconds. None if the text is not a duration."""
    try:
        hours, minutes, seconds = (duration or "").split(":")
        return int(hours) * 3600 + int(minutes) * 60 + Fraction(seconds)
    except (ValueError, ZeroDivisionError):
        return None


def said(error: BaseException) -> str:
    """Extract the message of FFmpeg or of the system from an error."""
    return str(getattr(error, "strerror", None) or error or type(error).__name__)
