"""`rooftop scene build` and `info`: virtual geometry from meshes, and what its files have."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.commands.deferred import done_by
from rooftop.cli.outputs import json_option


@click.command("build", epilog="Example: rooftop scene build scan.ply -o scan.rtg --normals smooth")
@click.argument("mesh", type=click.Path(path_type=Path))
@click.option("-o", "--out", type=click.Path(path_type=Path), help="Where to write; by default MESH with .rtg.")
@click.option(
    "--normals", type=click.Choice(["file", "smooth", "flat"]), default="file", show_default=True,
    help="Of the file, if it has them; computed from the faces around each vertex; or none, so that each face has its "
    "own.",
)  # fmt: skip
@click.option(
    "--precision", type=click.FloatRange(min=0, min_open=True), metavar="LENGTH",
    help="Positions are rounded to a grid at most this coarse, in the mesh's units. By default 1/64 of the mean edge, "
    "or 1/16384 of the mesh if that is finer.",
)  # fmt: skip
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N",
    help="Processes that work side by side; by default one for each core. The file is the same whatever their number.",
)  # fmt: skip
@click.option(
    "--lock-borders", is_flag=True,
    help="Keep all vertices of open borders in all levels, so that tiles of a scan meet without cracks. Build each "
    "tile with the same --precision.",
)  # fmt: skip
@click.option(
    "--no-textures",
    is_flag=True,
    help="Leave out the images of materials (.glb, .gltf, .obj); their colours are kept.",
)
@done_by("rooftop.cli.scene_files:run_build")
def build_command() -> None:
    """Build MESH (.glb, .obj, .ply, .stl and more) into a geometry file.

    This is done once for each mesh, on the CPU. Several parts become one mesh, with a material
    number each. Base colours and textures of .glb, .gltf and .obj are kept in the file, so that it needs no other file
    beside it. What the mesh had that cannot be drawn (faces without area, faces that are there twice) is dropped,
    and said.
    """


@click.command("info", epilog="Example: rooftop scene info scan.rtg --json")
@click.argument("file", type=click.Path(path_type=Path))
@json_option("what is there")
@done_by("rooftop.cli.scene_files:run_info")
def info_command() -> None:
    """Show what is in a geometry file: its levels, how full its clusters are, pages, the tree.

    Every page is read and its checksum compared. The error of a level is how far its worst cluster is from the surface,
    in the mesh's units.
    """
