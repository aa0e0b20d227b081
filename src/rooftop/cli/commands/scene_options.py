"""Options that `rooftop scene render` and `rooftop scene view` share."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.byte_sizes import byte_size
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.scene_cameras import numbers

files_argument = click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
up_option = click.option(
    "--up",
    callback=numbers(3),
    metavar="X,Y,Z",
    help="Up direction; 0,1,0 for many .glb files.  [default: 0,0,1]",
)
instances_option = click.option(
    "--instances",
    type=click.IntRange(min=1),
    metavar="N",
    help="Place N instances in a square grid on the ground, taking the FILEs in turn.",
)
pixel_error_option = click.option(
    "--pixel-error",
    type=NumberRange(min=0),
    default=1.0,
    show_default=True,
    metavar="PIXELS",
    help="Largest error of a surface in the picture, in pixels. 0 draws all triangles.",
)
pool_option = click.option(
    "--pool",
    callback=byte_size,
    metavar="SIZE",
    help="Keep at most SIZE (2GB, 512MiB) of the scene's pages on the device, and load pages as frames need them.  "
    "[default: load all pages first]",
)
device_option = click.option(
    "--device",
    default="auto",
    metavar="auto|cpu|cuda[:N]",
    help="Device to render on.  [default: auto, the GPU if there is one]",
)
