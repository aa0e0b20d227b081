"""Options that the verbs below `rooftop media` share."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import click

from rooftop.media import VideoReader
from rooftop.media.decoding import MAX_PIXELS

CLOCK_SLACK_S = 0.0005  # as of `VideoReader.frames_at`


class SizeType(click.ParamType[tuple[int, int]]):
    """WIDTHxHEIGHT in pixels, as (height, width)."""

    name = "WxH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+)x(\d+)", str(value))
        if found is None or 0 in (size := (int(found[2]), int(found[1]))):
            self.fail(f"{value!r} is no size: expected WIDTHxHEIGHT in pixels, such as 1280x720", param, ctx)
        if size[0] * size[1] > MAX_PIXELS:
            self.fail(f"{value!r} has more than {MAX_PIXELS:,} pixels", param, ctx)
        return size


def resize_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--resize WxH, as (height, width) or None."""
    return click.option(
        "--resize", type=SizeType(), metavar="WxH", help="Width and height of the frames, upright, in pixels."
    )(function)


def device_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--device, what decodes."""
    option = click.option(
        "--device", default="cpu", show_default=True, metavar="cpu|cuda|auto", help="What decodes; cuda:1 is possible."
    )
    return option(function)


def start_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--start, in seconds, or None."""
    option = click.option("--start", type=click.FloatRange(min=0), metavar="SECONDS", help="The first frame from here.")
    return option(function)


def end_option(function: Callable[..., Any]) -> Callable[..., Any]:
    """--end, in seconds, or None."""
    option = click.option(
        "--end", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS", help="The last frame begins before."
    )
    return option(function)


def check_times(start: float | None, end: float | None) -> None:
    """
    Raises:
        click.UsageError: an end that is not after the start.
    """
    if any(time is not None and math.isnan(time) for time in (start, end)):
        raise click.UsageError("--start and --end are seconds, got nan")
    if end is not None and end <= (start or 0.0):
        raise click.UsageError(f"--end {end} is not after --start {start or 0.0}")


def end_of(reader: VideoReader) -> float:
    """When the last frame ends, in seconds on the clock of the file."""
    return float(reader.times[0]) + reader.duration if len(reader) else 0.0


def first_position(reader: VideoReader, start: float | None) -> int:
    """Of the first frame that begins at this time or later; their number if there is none.

    A frame that begins less than 0.5 ms before counts as at it: 2 / 30 is also where the file says 0.0666.
    """
    if not start:
        return 0
    return int((reader.times < start - CLOCK_SLACK_S).sum())
