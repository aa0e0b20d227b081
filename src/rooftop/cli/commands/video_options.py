"""Options that the commands of `rooftop media` share."""

from __future__ import annotations

import re
from typing import Any

import click

from rooftop.cli.commands.number_ranges import NumberRange


class SizeType(click.ParamType[tuple[int, int]]):
    """Parse WIDTHxHEIGHT in pixels; return (height, width)."""

    name = "WxH"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        found = re.fullmatch(r"(\d+)x(\d+)", str(value))
        if found is None or 0 in (size := (int(found[2]), int(found[1]))):
            self.fail(f"{value!r} is not a size: expected WIDTHxHEIGHT in pixels, such as 1280x720", param, ctx)
        from rooftop.media.decoding import MAX_PIXELS

        if size[0] * size[1] > MAX_PIXELS:
            self.fail(f"{value!r} has more than {MAX_PIXELS:,} pixels", param, ctx)
        return size


resize_option = click.option(
    "--resize", type=SizeType(), metavar="WxH", help="Resize the upright frames to this width and height in pixels."
)
device_option = click.option(
    "--device",
    default="cpu",
    show_default=True,
    metavar="cpu|cuda|auto",
    help="Device to decode on. cuda:1 selects a GPU.",
)
start_option = click.option(
    "--start",
    type=NumberRange(min=0),
    metavar="SECONDS",
    help="Start with the first frame at or after this time.",
)
end_option = click.option(
    "--end",
    type=NumberRange(min=0, min_open=True),
    metavar="SECONDS",
    help="End before the first frame at or after this time.",
)
