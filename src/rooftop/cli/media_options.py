"""Check and convert times that options give, in seconds on the clock of a video."""

from __future__ import annotations

import click

from rooftop.media import DamagedVideoError, VideoReader, reading

CLOCK_SLACK_S = float(reading.CLOCK_SLACK_S)


def check_times(start: float | None, end: float | None) -> None:
    """Check that the end is after the start.

    Raises:
        click.UsageError: the end is not after the start.
    """
    if end is not None and end <= (start or 0.0):
        raise click.UsageError(f"--end {end} is not after --start {start or 0.0}")


def check_last(reader: VideoReader, position: int) -> None:
    """Check that a loop over all frames did not end before the last frame of the index.

    Args:
        position: position of the loop's last frame.

    Raises:
        DamagedVideoError: frames are missing, although the decoder reported no error.
    """
    if position + 1 < len(reader):
        raise DamagedVideoError(
            f"{reader.source.name}: the file lists {len(reader)} frames, but decoding ended after {position + 1} "
            "without an error. The last frames are probably damaged: use --end to leave them out",
            float(reader.times[position]) if position >= 0 else None,
        )


def end_of(reader: VideoReader) -> float:
    """The end of the last frame, in seconds after the first stream of the file begins; 0 without frames."""
    return float(reader.times[0]) + reader.duration if len(reader) else 0.0


def first_position(reader: VideoReader, start: float | None) -> int:
    """Position of the first frame that begins at or after `start`, or of the first frame of all if `start` is None.

    If no frame begins so late, the result is the number of frames.

    A frame that begins up to 0.5 ms before `start` also counts, so that 2 / 30 s matches 0.0666 s in a file.
    """
    if start is None:
        return 0
    return int((reader.times < start - CLOCK_SLACK_S).sum())
