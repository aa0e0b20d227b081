"""`rooftop scene view`: arguments, options and help."""

from __future__ import annotations

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.scene_options import (
    device_option,
    files_argument,
    instances_option,
    pixel_error_option,
    pool_option,
    up_option,
)

EXAMPLES = """\b
Examples:
  rooftop scene view scan.rtg
  rooftop scene view hall.rtg chairs.rtg --up 0,1,0 --fov 70
  rooftop scene view rock.rtg --instances 10000 --shadows
  rooftop scene view city/*.rtg --pool 2GB

\b
To view a scene on another machine, use a tunnel with the same port at both ends:
  ssh -L 8000:127.0.0.1:8000 gpu-machine rooftop scene view scan.rtg --port 8000
Then open the printed address here.

\b
To render a camera path that the page recorded:
  rooftop scene render scan.rtg -o flight-{frame}.png --path path.json
"""


@click.command("view", epilog=EXAMPLES)
@files_argument
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the server.  [default: a free port]")
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
    help="Address of the server. 0.0.0.0 lets other machines connect, without encryption; a tunnel is safer.",
)  # fmt: skip
@up_option
@click.option("--fov", type=float, default=50.0, show_default=True, metavar="DEGREES", help="Vertical field of view.")
@instances_option
@pixel_error_option
@pool_option
@click.option("--shadows", is_flag=True, help="Add shadows.")
@device_option
@done_by("rooftop.cli.scene_view:run_view")
def view_command() -> None:
    """View geometry files (.rtg, from `rooftop scene build`) in a browser.

    Prints the address of a page in which you orbit and fly through the scene. The page shows the scene shaded, by a
    light that you move, or in false colours: clusters, levels of detail, overdraw, pages. The page shows the time of
    each stage, changes --pixel-error, takes screenshots and records the camera path. This machine renders the pictures.

    The address contains a secret token: whoever has it can view the scene. Ctrl-C ends the viewer.
    """
