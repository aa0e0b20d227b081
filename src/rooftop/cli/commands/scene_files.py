"""`rooftop scene build` and `info`: arguments, options and help."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.commands.number_ranges import NumberRange
from rooftop.cli.outputs import json_option


@click.command("build", epilog="Example: rooftop scene build scan.ply -o scan.rtg --normals smooth")
@click.argument("mesh", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    help="File to write.  [default: MESH with its suffix replaced by .rtg]",
)
@click.option(
    "--normals", type=click.Choice(["file", "smooth", "flat"]), default="file", show_default=True,
    help="Source of the normals. file: the file's normals, if it has any. smooth: computed from the faces around each "
    "vertex. flat: one normal per face.",
)  # fmt: skip
@click.option(
    "--precision", type=NumberRange(min=0, min_open=True), metavar="LENGTH",
    help="Round positions to a grid of at most this spacing, in the mesh's units.  [default: 1/64 of the mean edge, or "
    "1/16384 of the mesh's extent if that is finer; even finer if faces would have no area on that grid]",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N",
    help="Number of parallel processes. The file is the same for any number.  [default: one per core, but at most one "
    "per 20,000 faces]",
)  # fmt: skip
@click.option(
    "--lock-borders", is_flag=True,
    help="Keep all vertices of open borders in all levels, so that tiles of a scan meet without cracks. Use the same "
    "--precision for all tiles.",
)  # fmt: skip
@click.option(
    "--no-textures",
    is_flag=True,
    help="Drop the texture images of materials (.glb, .gltf, .obj), but keep their base colours.",
)
@done_by("rooftop.cli.scene_files:run_build")
def build_command() -> None:
    """Build a geometry file (.rtg) from MESH (.glb, .obj, .ply, .stl and more).

    Build each mesh once. The build runs on the CPU. Several parts of MESH become one mesh, in which each part has a
    material number. The file includes the base colours and textures of .glb, .gltf and .obj, and needs no other file.
    Faces that cannot be drawn (without area, or duplicates) are dropped and reported.
    """


@click.command("info", epilog="Example: rooftop scene info scan.rtg --json")
@click.argument("file", type=click.Path(path_type=Path))
@json_option("the description")
@done_by("rooftop.cli.scene_files:run_info")
def info_command() -> None:
    """Show what is in a geometry file: levels, clusters, pages and the tree.

    Reads every page and compares its checksum with the stored one. The error of a level is the largest error of its
    clusters: an estimate of a cluster's distance from the surface of the mesh, in the mesh's units.
    """
