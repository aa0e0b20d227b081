"""`rooftop map`: a model or your own function over many files."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.trained_model_options import seed_option
from rooftop.cli.outputs import json_option

EXAMPLES = """\b
Examples:
  rooftop map resnet50 photographs/ -o classes.parquet
  rooftop map detr_resnet50 photographs/ --weights detr.pth -o objects.parquet
  rooftop map my.py:caption photographs/ -o captions.parquet --timeout 60
  rooftop map my.py:Embedder texts/*.txt -o vectors.parquet --batch 32
  rooftop map my_pkg.steps:clean table.parquet -o cleaned.parquet --workers 4
  rooftop map my.py:motion videos/ --as clip --frames 16 --stride 8 -o motion.parquet
  rooftop map resnet50 photographs/ -o classes.parquet --scheduler tcp://10.0.0.1:8786

\b
A function gets one item and returns a dict of columns, or a value; a class is made once in each worker:
  def caption(image):                # (3, H, W) uint8
      return {"brightness": image.float().mean().item(), "width": image.shape[2]}

The same command again does what is missing. To read the results: pandas.read_parquet("classes.parquet").
"""


@click.command(epilog=EXAMPLES)
@click.argument("target")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUTS...")
@click.option(
    *("-o", "--out"),
    type=click.Path(path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Where the Parquet parts go, such as out.parquet. What is in it is not done again.",
)
@click.option(
    *("--as", "kind"),
    type=click.Choice(names.ITEM_KINDS),
    help="What an item is: a photograph, frames of a video, points of a .npy, .bin or .ply, a line of a .txt, a row of "
    "a .parquet, .csv or .jsonl, or the path of any file.  [default: as the names of the files say]",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Give a function a list of at most N items, for which it returns N results; a model, N photographs at once.",
)
@click.option("--weights", metavar="NAME|FILE", help="Of a model, as of `rooftop classify` and `rooftop detect`.")
@seed_option
@click.option(
    "--top", type=click.IntRange(min=1), default=5, show_default=True, help="Classes of each photograph, of a model."
)
@click.option(
    "--threshold",
    type=click.FloatRange(0, 1),
    default=0.7,
    show_default=True,
    help="Objects with at least this score, of a detector.",
)
@click.option("--dtype", type=click.Choice(names.FLOATS), help="In which a model computes.")
@click.option("--frames", type=click.IntRange(min=1), default=16, show_default=True, help="Of a clip.")
@click.option(
    "--step", type=click.IntRange(min=1), default=1, show_default=True, help="From one frame of a clip to the next."
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="N",
    help="Frames from one clip to the next.  [default: clips share no frames]",
)
@click.option(
    "--point-columns",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Numbers of a point in a .bin of float32: 4 of KITTI, 5 of nuScenes.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Processes on this machine.  [default: one for each GPU; on the CPU one for each four cores]",
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--scheduler", metavar="ADDRESS", help="Use the workers of this Dask scheduler instead.")
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="An item that takes longer is a row with an error.  [default: none]",
)
@click.option("--retry-errors", is_flag=True, help="Do items again whose row has an error.")
@json_option("the figures")
@done_by("rooftop.cli.map:run")
def command() -> None:
    """Call TARGET for every item of INPUTS, on all GPUs or cores, and write the results as Parquet while they come.

    TARGET is a model (resnet50, detr_resnet50, ...), my.py:function, package.module:function, or a class. INPUTS are
    files, and folders with all below. Each item has one row: input, place (line, row or first frame in the file),
    error, and the columns of the result. What cannot be read, raises, hangs (--timeout) or ends its process is a row
    with an error; the first good result says the columns.

    The exit status is 0 if some item has a result, 1 if none has.
    """
