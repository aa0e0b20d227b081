"""`rooftop media bench`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.commands.video_options import resize_option
from rooftop.cli.outputs import json_option

MOST_STREAMS = 256

EXAMPLES = """\b
Examples:
  rooftop media bench walk.mp4
  rooftop media bench walk.mp4 --device cuda --streams 1,4,16 --resize 224x224 --json
"""


class _Streams(click.ParamType[tuple[int, ...]]):
    """Parse numbers of streams, separated by commas; return them as a tuple."""

    name = "N,N"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(each) for each in str(value).split(","))
        except ValueError:
            numbers = ()
        if not numbers or not all(1 <= each <= MOST_STREAMS for each in numbers):
            self.fail(f"{value!r}: expected numbers from 1 to {MOST_STREAMS}, such as 1,8", param, ctx)
        return numbers


@click.command("bench", epilog=EXAMPLES)
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--device", "devices", default="cpu,cuda", show_default=True, metavar="NAME,NAME", help="Devices to decode on."
)
@click.option(
    "--streams",
    type=_Streams(),
    default="1,8",
    show_default=True,
    help="Numbers of concurrent readers to try, such as 1,8. On the CPU, each reader uses several threads.",
)
@resize_option
@click.option(
    "--seconds",
    type=NumberRange(min=0.1, max=600),
    default=3.0,
    show_default=True,
    help="Seconds to measure each device with each number of streams.",
)
@json_option("the rates")
@done_by("rooftop.cli.media_bench:run_bench")
def bench_command() -> None:
    """Measure decoding speed: frames per second of FILE as tensors, by the CPU and by the GPU's NVDEC.

    Each stream is a separate reader that loops over the file. The first frame of each stream is not counted. Frames are
    RGB uint8 tensors on the decoding device.
    """
