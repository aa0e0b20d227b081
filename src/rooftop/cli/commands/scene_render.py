"""`rooftop scene render`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.scene_options import (
    device_option,
    files_argument,
    instances_option,
    pixel_error_option,
    pool_option,
    up_option,
)
from rooftop.cli.outputs import json_option
from rooftop.cli.scene_cameras import numbers, pixels

EXAMPLES = """\b
Examples:
  rooftop scene render scan.rtg -o scan.png
  rooftop scene render scan.rtg -o scan.png --orbit 30,20 --show color --show normal --show level
  rooftop scene render hall.rtg chairs.rtg -o hall.png --eye 4,1,1.7 --target 0,0,1 --fov 70
  rooftop scene render scan.rtg -o turn-{frame}.png --frames 36 --size 640x480
  rooftop scene render city/*.rtg -o city.png --pool 2GB
  rooftop scene render scan.rtg -o '{show}.png' --show color --show depth --camera photo.json
  rooftop scene render scan.rtg -o shaded.png --light -1,-0.5,2 --shadows
  rooftop scene render scan.rtg -o flight-{frame}.png --path path.json

\b
--camera reads a JSON object with these keys, or a list of such objects. Each object renders one picture:
  {"eye": [3, 0, 1], "target": [0, 0, 0], "up": [0, 0, 1], "fov_y_degrees": 60}
  {"eye": [3, 0, 1], "target": [0, 0, 0], "view_height": 2}
  {"K": [[800, 0, 320], [0, 800, 240], [0, 0, 1]], "world_to_camera": [[1, 0, 0, 0], ...]}
Each object may also have width, height and near. K and world_to_camera follow OpenCV: x right, y down, z forward, and
the centre of the first pixel at (0, 0).
"""


@click.command("render", epilog=EXAMPLES)
@files_argument
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="PNG",
    help="Picture to write. {show} in the name stands for the value of --show, {frame} for the frame number.",
)  # fmt: skip
@click.option(
    "--show", "shows", type=click.Choice(names.SURFACES), multiple=True, default=("color",), show_default=True,
    help="What to show. Repeat the option for several views: all are in one picture, unless PNG contains {show}.",
)  # fmt: skip
@click.option(
    "--orbit", callback=numbers(2, 3), metavar="AZIMUTH,ELEVATION[,DISTANCE]",
    help="Camera position around the scene: two angles in degrees, and the distance in world units. Without a "
    "distance, the whole scene is in view.  "
    "[default: -50,25]",
)  # fmt: skip
@click.option("--eye", callback=numbers(3), metavar="X,Y,Z", help="Camera position, in world units.")
@click.option(
    "--target",
    callback=numbers(3),
    metavar="X,Y,Z",
    help="Point that the camera looks at.  [default: the middle of the scene]",
)
@up_option
@click.option("--fov", type=float, metavar="DEGREES", help="Vertical field of view.  [default: 60]")
@click.option(
    "--parallel", type=float, metavar="HEIGHT", help="Orthographic view; HEIGHT of the picture in world units."
)
@click.option("--intrinsics", metavar="FX,FY,CX,CY|K.json", help="Calibrated pinhole camera, in pixels; needs --pose.")
@click.option(
    "--pose",
    type=click.Path(path_type=Path),
    metavar="JSON",
    help="With --intrinsics: JSON file with the 4 x 4 matrix world_to_camera.",
)
@click.option(
    "--camera",
    type=click.Path(path_type=Path),
    metavar="JSON",
    help="JSON file with one or several cameras (see below).",
)
@click.option(
    "--path", type=click.Path(path_type=Path), metavar="JSON",
    help="Camera path recorded by `rooftop scene view`. Renders 30 pictures for each second of the path, or --frames "
    "in total.",
)  # fmt: skip
@click.option(
    "--near",
    type=float,
    metavar="LENGTH",
    help="Distance of the near plane. Nearer surfaces are not drawn.  [default: 1e-5 of the scene's diagonal]",
)
@click.option("--size", callback=pixels, metavar="WIDTHxHEIGHT", help="Picture size in pixels.  [default: 1920x1080]")
@click.option(
    "--frames", type=click.IntRange(min=1), metavar="N",
    help="Number of pictures in one turn around the target. Each frame culls the parts that the previous frame found "
    "hidden.  [default: 1]",
)  # fmt: skip
@instances_option
@pixel_error_option
@pool_option
@click.option(
    "--light", callback=numbers(3), metavar="X,Y,Z", help="Direction towards the light.  [default: 0.4,0.3,0.85]"
)
@click.option("--shadows", is_flag=True, help="Add shadows. --show shadow shows how much light arrives at each pixel.")
@click.option("--no-occlusion", is_flag=True, help="Turn occlusion culling off. The picture stays the same.")
@device_option
@json_option("the statistics and timings of each frame")
@done_by("rooftop.cli.scene_render:run_render")
def render_command() -> None:
    """Render geometry files (.rtg, from `rooftop scene build`) into pictures.

    All FILEs form one scene in common coordinates. The first frame is rendered twice (on a GPU three times), and only
    the last rendering is reported. At the last rendering, the kernels are loaded, the hidden parts are known, and a
    CUDA graph contains the launches.
    """
