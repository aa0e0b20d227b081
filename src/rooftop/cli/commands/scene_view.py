"""`rooftop scene view`: virtual geometry in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.byte_sizes import byte_size
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.scene_cameras import numbers

EXAMPLES = """\b
Examples:
  rooftop scene view scan.rtg
  rooftop scene view hall.rtg chairs.rtg --up 0,1,0 --fov 70
  rooftop scene view rock.rtg --instances 10000 --shadows
  rooftop scene view city/*.rtg --pool 2GB

\b
On another machine, through a tunnel, with the same port at both ends:
  ssh -L 8000:127.0.0.1:8000 gpu-machine rooftop scene view scan.rtg --port 8000
and open the printed address here.

\b
A path that the page has recorded can be rendered:
  rooftop scene render scan.rtg -o flight-{frame}.png --path path.json
"""


@click.command("view", epilog=EXAMPLES)
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Where to listen.  [default: a free port]")
@click.option(
    "--host", default="127.0.0.1", show_default=True, metavar="ADDRESS",
    help="0.0.0.0 lets other machines ask, without encryption; a tunnel is safer.",
)  # fmt: skip
@click.option(
    "--up", callback=numbers(3), metavar="X,Y,Z", help="Which way is up; 0,1,0 for many .glb.  [default: 0,0,1]"
)
@click.option(
    "--fov", type=float, default=50.0, show_default=True, metavar="DEGREES", help="From the lower to the upper edge."
)
@click.option(
    "--instances", type=click.IntRange(min=1), metavar="N", help="N of them in a square on the level, FILEs in turn.",
)  # fmt: skip
@click.option(
    "--pixel-error", type=click.FloatRange(min=0), default=1.0, show_default=True, metavar="PIXELS",
    help="By how much a surface may be off in the picture; 0 draws all triangles. The page can change it.",
)  # fmt: skip
@click.option(
    "--pool", callback=byte_size, metavar="SIZE",
    help="Of the pages, keep no more than SIZE (2GB, 512MiB) on the device; pictures are drawn from what is there.  "
    "[default: all pages are loaded first]",
)  # fmt: skip
@click.option("--shadows", is_flag=True, help="What the light shines on casts shadows.")
@click.option(
    "--device", default="auto", metavar="auto|cpu|cuda[:N]",
    help="Where to render.  [default: auto, the GPU if there is one]",
)  # fmt: skip
@done_by("rooftop.cli.scene_view:run_view")
def view_command() -> None:
    """Look at geometry files (FILE.rtg, which `rooftop scene build` makes) in a browser.

    Prints the address of a page that orbits and flies through the scene. The page shows it shaded, by a light that you
    move, or in false colours of what the renderer does: clusters, levels of detail, overdraw, pages. It has the time of
    each stage, takes screenshots, and records the camera's path. Pictures are drawn here and sent to the page.

    The address has a secret token: who knows it can look. Ctrl-C ends the viewer.
    """
