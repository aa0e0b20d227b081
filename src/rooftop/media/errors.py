"""The errors of `rooftop.media`. A file that is missing, or is not a video, raises an `InputError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftop.errors import RooftopError, reduced

if TYPE_CHECKING:
    from rooftop.media.sounds import Sound


class DamagedVideoError(RooftopError, RuntimeError):
    """A video ends early, or cannot be decoded at some position; the frames before that position stay readable.

    Attributes:
        last_good_time: time in seconds of the last frame before the damage that is known to be intact. None if no frame
            is known to be intact.
    """

    def __init__(self, message: str, last_good_time: float | None = None) -> None:
        super().__init__(message)
        self.last_good_time = last_good_time


class DamagedSoundError(DamagedVideoError):
    """Sound ends early, or cannot be decoded at some position.

    Attributes:
        last_good_time: time in seconds at which the decodable sound ends; None if no sound can be decoded.
        sound: the requested sound before that position.
    """

    def __init__(self, message: str, last_good_time: float | None, sound: Sound) -> None:
        super().__init__(message, last_good_time)
        self.sound = sound

    __reduce__ = reduced


class NoVideoDecoderError(RooftopError, NotImplementedError):
    """The requested device cannot decode video here. The message says which devices can decode video."""


class VideoWriteError(RooftopError, RuntimeError):
    """The encoder refuses its settings or the frames, the file cannot be written, or the writer is closed already. No
    incomplete file is left."""


class FFmpegBuildError(RooftopError, RuntimeError):
    """FFmpeg cannot be built on this machine, or a required tool or library is missing. Installed files are unchanged.

    Attributes:
        details: lines to print: all missing tools and libraries with their install commands, or the end of the log.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)
        for line in self.details:
            self.add_note(line)
