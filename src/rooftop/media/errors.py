"""The errors of `rooftop.media`; a file that is missing or no video is an `InputError`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rooftop.errors import RooftopError

if TYPE_CHECKING:
    from rooftop.media.sounds import Sound


class DamagedVideoError(RooftopError, RuntimeError):
    """A video that ends early or cannot be decoded at some place; the frames before it stay readable.

    Attributes:
        last_good_time: seconds, of the last frame known to be good before the damage; None if there is none.
    """

    def __init__(self, message: str, last_good_time: float | None = None) -> None:
        super().__init__(message)
        self.last_good_time = last_good_time


class DamagedSoundError(DamagedVideoError):
    """Sound that ends early or cannot be decoded at some place.

    Attributes:
        last_good_time: seconds, where what could be decoded ends; None if nothing could.
        sound: what was asked for and is before that.
    """

    def __init__(self, message: str, last_good_time: float | None, sound: Sound) -> None:
        super().__init__(message, last_good_time)
        self.sound = sound


class NoVideoDecoderError(RooftopError, NotImplementedError):
    """The device asked for cannot decode video here; the message says which can."""


class VideoWriteError(RooftopError, RuntimeError):
    """The encoder refuses its settings or the frames, or the file cannot be written. No file is left behind."""


class FFmpegBuildError(RooftopError, RuntimeError):
    """FFmpeg cannot be built here, or not yet; the folder of installed files is as it was.

    Attributes:
        details: lines to show: all that is missing, each with what installs it, or the end of the log.
    """

    def __init__(self, message: str, details: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.details = tuple(details)
        for line in self.details:
            self.add_note(line)
