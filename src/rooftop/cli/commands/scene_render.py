"""`rooftop scene render`: pictures of virtual geometry, and what each stage of a frame took."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.byte_sizes import byte_size
from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
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
The keys of --camera (a list of such objects gives a picture of each):
  {"eye": [3, 0, 1], "target": [0, 0, 0], "up": [0, 0, 1], "fov_y_degrees": 60}
  {"eye": [3, 0, 1], "target": [0, 0, 0], "view_height": 2}
  {"K": [[800, 0, 320], [0, 800, 240], [0, 0, 1]], "world_to_camera": [[1, 0, 0, 0], ...]}
Either may have width, height and near. K and world_to_camera are OpenCV's: x to the right, y down, z forward, and the
centre of the first pixel at 0, 0.
"""


@click.command("render", epilog=EXAMPLES)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option(
    "-o", "--out", type=click.Path(path_type=Path), required=True, metavar="PNG",
    help="Where the picture is written. {show} in the name is what it shows, {frame} the number of the frame.",
)  # fmt: skip
@click.option(
    "--show", "shows", type=click.Choice(names.SURFACES), multiple=True, default=("color",), show_default=True,
    help="What to show, once or more; several stand beside each other, unless {show} is in the name.",
)  # fmt: skip
@click.option(
    "--orbit", callback=numbers(2, 3), metavar="AZIMUTH,ELEVATION[,DISTANCE]",
    help="From around the scene, in degrees; from where all of it is seen, if no distance is given.  [default: -50,25]",
)  # fmt: skip
@click.option("--eye", callback=numbers(3), metavar="X,Y,Z", help="Where the camera is, in world units.")
@click.option("--target", callback=numbers(3), metavar="X,Y,Z", help="Where it looks.  [default: the scene's middle]")
@click.option(
    "--up", callback=numbers(3), metavar="X,Y,Z", help="Which way is up; 0,1,0 for many .glb.  [default: 0,0,1]"
)
@click.option("--fov", type=float, metavar="DEGREES", help="From the lower to the upper edge.  [default: 60]")
@click.option("--parallel", type=float, metavar="HEIGHT", help="Rays are parallel; the picture is so many units high.")
@click.option("--intrinsics", metavar="FX,FY,CX,CY|K.json", help="A calibrated lens without distortion, in pixels.")
@click.option(
    "--pose", type=click.Path(path_type=Path), metavar="JSON", help="With --intrinsics: world_to_camera, 4 x 4."
)
@click.option("--camera", type=click.Path(path_type=Path), metavar="JSON", help="One camera or several; keys below.")
@click.option(
    "--path", type=click.Path(path_type=Path), metavar="JSON",
    help="Along a path that `rooftop scene view` recorded: 30 pictures for each second, or --frames in all.",
)  # fmt: skip
@click.option("--near", type=float, metavar="LENGTH", help="What is nearer is not shown.  [default: 1e-5 of the scene]")
@click.option("--size", callback=pixels, metavar="WIDTHxHEIGHT", help="In pixels.  [default: 1920x1080]")
@click.option(
    "--frames", type=click.IntRange(min=1), metavar="N",
    help="So many pictures in a turn around the target, numbered. Each leaves out what the one before has hidden.  "
    "[default: 1]",
)  # fmt: skip
@click.option(
    "--instances", type=click.IntRange(min=1), metavar="N", help="N of them in a square on the level, FILEs in turn.",
)  # fmt: skip
@click.option(
    "--pixel-error", type=click.FloatRange(min=0), default=1.0, show_default=True, metavar="PIXELS",
    help="By how much a surface may be off in the picture; 0 draws all triangles.",
)  # fmt: skip
@click.option(
    "--pool", callback=byte_size, metavar="SIZE",
    help="Of the pages, keep no more than SIZE (2GB, 512MiB) on the device; frames load what they need.  "
    "[default: all pages are loaded first]",
)  # fmt: skip
@click.option("--light", callback=numbers(3), metavar="X,Y,Z", help="From where color is lit.  [default: 0.4,0.3,0.85]")
@click.option("--shadows", is_flag=True, help="What is lit casts shadows; --show shadow is how much light arrives.")
@click.option("--no-occlusion", is_flag=True, help="Draw also what is hidden. The picture is the same.")
@click.option(
    "--device", default="auto", metavar="auto|cpu|cuda[:N]",
    help="Where to render.  [default: auto, the GPU if there is one]",
)  # fmt: skip
@json_option("the statistics and timings of each frame")
@done_by("rooftop.cli.scene_render:run_render")
def render_command() -> None:
    """Render geometry files (FILE.rtg, which `rooftop scene build` makes) into pictures.

    All FILEs are one scene, each where its coordinates put it. The first frame is drawn twice, on a GPU three times,
    and the last time counts: by then its kernels are loaded, it knows what is hidden, and its launches are in a graph.
    """
