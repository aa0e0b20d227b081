"""`rooftop map`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands import names
from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
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
A function gets one item and returns a dict of columns, or one value. A class is instantiated once per worker:
  def caption(image):                # (3, H, W) uint8
      return {"brightness": image.float().mean().item(), "width": image.shape[2]}

If you repeat the command, it computes only the missing items. To read the results:
pandas.read_parquet("classes.parquet").
"""


@click.command(epilog=EXAMPLES)
@click.argument("target")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUTS...")
@click.option(
    *("-o", "--out"),
    type=click.Path(path_type=Path),
    required=True,
    metavar="FOLDER",
    help="Folder for the Parquet files, such as out.parquet. Items that already have a row there are skipped.",
)
@click.option(
    *("--as", "kind"),
    type=click.Choice(names.ITEM_KINDS),
    help="Kind of item. image: a photograph. clip: frames of a video. cloud: points of a .npy, .bin or .ply file. "
    "text: a line of a .txt file. row: a row of a .parquet, .csv or .jsonl file. path: the path of any file.  "
    "[default: by file suffix]",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum batch size. A function of your own then gets a list of items and returns a list of the same length.",
)
@click.option(
    "--weights", metavar="NAME|FILE", help="Weights of a model, as for `rooftop classify` and `rooftop detect`."
)
@seed_option
@click.option(
    "--top",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="For a classifier: number of classes per photograph.",
)
@click.option(
    "--threshold",
    type=NumberRange(0, 1),
    default=0.7,
    show_default=True,
    help="For a detector: minimum score of an object.",
)
@click.option("--dtype", type=click.Choice(names.FLOATS), help="Compute dtype of a model.")
@click.option("--frames", type=click.IntRange(min=1), default=16, show_default=True, help="Frames per clip.")
@click.option(
    "--step",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Take every n-th frame of the video into a clip.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="N",
    help="Distance between the first frames of consecutive clips, in frames of the video.  [default: clips share no "
    "frames]",
)
@click.option(
    "--point-columns",
    type=click.IntRange(min=1),
    default=4,
    show_default=True,
    help="Values per point in a .bin file of float32: 4 for KITTI, 5 for nuScenes.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of processes on this machine.  [default: one per GPU; on the CPU one per four cores, at least two if "
    "there are two cores]",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="Device of the workers.",
)
@click.option(
    "--decoders",
    type=click.IntRange(min=0),
    metavar="N",
    help="Number of processes per worker that decode photographs, clips and clouds. 0: the worker's own threads "
    "decode.  [default: on a GPU one per core of the worker's share, at most 32, or 0 if the share is one core; on the "
    "CPU 0]",
)
@click.option(
    "--scheduler", metavar="ADDRESS", help="Use the workers of this Dask scheduler instead of local processes."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Time limit per item; a slower item becomes a row with an error.  [default: none]",
)
@click.option("--retry-errors", is_flag=True, help="Recompute items whose row has an error.")
@json_option("the numbers of rows and errors, the times and the rates")
@done_by("rooftop.cli.map:run")
def command() -> None:
    """Call TARGET for every item of INPUTS, on all GPUs or cores, and write each result to Parquet when it is ready.

    TARGET is a model (resnet50, detr_resnet50, ...), or a function or class, given as my.py:NAME or
    package.module:NAME. INPUTS are files, or folders, which are searched recursively. Each item has one row: input,
    place (line, row or first frame in the file), error, and the columns of the result. The first good result, in the
    order of the items, sets the columns. An item becomes a row with an error if it cannot be read, raises, hangs
    (--timeout) or kills its process.

    The exit status is 1 if every item has an error or a file cannot be read to its end, and otherwise 0.
    """
