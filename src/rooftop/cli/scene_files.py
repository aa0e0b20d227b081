"""`rooftop scene build` and `info`: virtual geometry from meshes, and what its files have."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from rooftop.analysis.text import WIDTH
from rooftop.cli.progress import progress_bar
from rooftop.errors import InputError
from rooftop.scene import BuildReport, Geometry, build_file
from rooftop.scene.layouts import MAX_TRIANGLES


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
def build_command(
    mesh: Path, out: Path | None, normals: Literal["file", "smooth", "flat"], precision: float | None
) -> None:
    """Build MESH (.glb, .obj, .ply, .stl and more) into a geometry file.

    This is done once for each mesh, on the CPU, on all of its cores. Several parts become one mesh, with a material
    number each. What the mesh had that cannot be drawn (faces without area, faces that are there twice) is dropped,
    and said.
    """
    try:
        with progress_bar() as show:
            report = build_file(mesh, out, normals=normals, precision=precision, progress=show)
    except FileNotFoundError as error:
        raise InputError(str(error)) from None
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"{mesh}: {error}") from None
    for line in _summary(report):
        click.echo(line)


@click.command("info", epilog="Example: rooftop scene info scan.rtg --json")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info_command(file: Path, as_json: bool) -> None:
    """Show what is in a geometry file: its levels, how full its clusters are, pages, the tree.

    Every page is read and its checksum compared. The error of a level is how far its worst cluster is from the surface,
    in the mesh's units.
    """
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    geometry = Geometry.open(file)
    found = _info(geometry)
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("level", "clusters", "triangles", "fill", "error"):
        table.add_column(name, justify="right")
    for number, level in enumerate(found["levels"]):
        fill = level["triangles"] / (MAX_TRIANGLES * level["clusters"])
        cells = (f"{level['clusters']:,}", f"{level['triangles']:,}", f"{fill:.0%}", f"{level['error']:.3g}")
        table.add_row(str(number), *cells)
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    console.print(table)
    for line in _lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _info(geometry: Geometry) -> dict[str, Any]:
    """What the file says of itself, and what is found when all of it is read."""
    heads = geometry.clusters()  # reads and checks every page
    levels = geometry.meta["levels"]
    clusters, triangles = (sum(level[name] for level in levels) for name in ("clusters", "triangles"))
    if clusters != len(heads):
        raise InputError(f"{geometry.path} says that it has {clusters:,} clusters, and has {len(heads):,}")
    return geometry.meta | {
        "file": str(geometry.path),
        "bytes": geometry.size_bytes,
        "bytes_per_triangle": geometry.size_bytes / geometry.meta["triangles"],
        "fill": triangles / (MAX_TRIANGLES * clusters),
        "largest_page_bytes": int(np.max(geometry.page_lengths)),
    }


def _lines(found: dict[str, Any]) -> list[str]:
    stored = [name for name, has in (("normals", found["has_normals"]), ("uv", found["has_uv"])) if has]
    low, high = (np.array(corner) + found["origin"] for corner in found["bounds"])
    lines = [
        f"{found['triangles']:,} triangles in {found['bytes']:,} bytes, {found['bytes_per_triangle']:.1f} a triangle "
        f"with all levels; clusters {found['fill']:.0%} full",
        f"{found['groups']:,} groups in {found['pages']:,} pages of at most {found['largest_page_bytes']:,} bytes; "
        f"a tree of {found['nodes']:,} nodes, {found['depth']} deep",
        f"from {_point(low)} to {_point(high)}, on a grid of 2^{found['grid_exponent']}; "
        f"{' and '.join(stored) or 'no normals, no uv'}; materials: {found['materials']:,}",
    ]
    if found["why_several_roots"]:
        lines.append(f"{found['roots']:,} clusters at the coarsest: {found['why_several_roots']}")
    return lines


def _summary(report: BuildReport) -> list[str]:
    clusters = sum(level.clusters for level in report.levels)
    lines = [
        f"{click.format_filename(report.path)}: {report.triangles:,} triangles, {len(report.levels)} levels, "
        f"{clusters:,} clusters {report.fill:.0%} full",
        f"{report.size_bytes:,} bytes ({report.bytes_per_triangle:.1f} a triangle), positions to "
        f"{report.precision:.3g}, in {report.seconds:.1f} s",
    ]
    words = {
        "degenerate_faces": "faces without area dropped",
        "duplicate_faces": "faces dropped that were there twice",
        "unused_vertices": "unused vertices dropped",
        "equal_vertices": "vertices made one with others",
        "non_manifold_edges": "edges with more than two faces, or two that disagree, kept",
    }
    repairs = asdict(report.repairs)
    mended = [f"{repairs[name]:,} {said}" for name, said in words.items() if repairs[name]]
    if report.repairs.coarser_grid:
        mended.append("the mesh is too large for a finer grid")
    if mended:
        lines.append("; ".join(mended))
    if report.why_several:
        lines.append(f"{report.roots:,} clusters at the coarsest: {report.why_several}")
    return lines


def _point(point: Any) -> str:
    return "(" + ", ".join(f"{each:.6g}" for each in point) + ")"
