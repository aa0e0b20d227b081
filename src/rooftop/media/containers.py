"""Open a source with FFmpeg to read streams other than video."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.errors import InputError
from rooftop.media.opening import Source, open_input, said
from rooftop.media.pyav import load_av

if TYPE_CHECKING:
    from rooftop.media.pyav import av


class Container:
    """A source that is open for reading.

        with Container(source) as container:
            container.streams.audio

    Attributes:
        streams: all streams that FFmpeg finds.
        format: FFmpeg's names of the format.
        start_us: the time at which the file's clock starts, in microseconds. Players show this time as 0.

    Raises:
        InputError: FFmpeg cannot read the source.
        MissingExtraError: PyAV is not installed.
    """

    def __init__(self, source: Source) -> None:
        self.av = load_av()
        self.source = source
        self._file = source.open()
        try:
            self.input = open_input(self._file)
        except (self.av.FFmpegError, OSError, ValueError, RuntimeError) as error:
            self._file.close()
            raise InputError(
                f"{source.name} is not a sound or video that FFmpeg can read ({said(error)}): expected a complete "
                "file in one of FFmpeg's formats, such as MP4, Matroska, WAV or MP3"
            ) from error
        except BaseException:
            self._file.close()
            raise
        self.streams, self.format = self.input.streams, self.input.format.name
        self.start_us = self.input.start_time or 0

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.input.close()
        self._file.close()

    def audio(self) -> tuple[av.AudioStream, ...]:
        """The sound streams.

        Raises:
            InputError: the source has no sound stream.
        """
        found: tuple[av.AudioStream, ...] = tuple(self.streams.audio)
        if not found:
            others = ", ".join(each.type for each in self.streams) or "nothing"
            raise InputError(f"{self.source.name} has no sound, only {others}: expected a file with an audio stream")
        return found
