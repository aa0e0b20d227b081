"""`rooftop scene build` and `info`: build geometry files from meshes, and describe them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
from rich.table import Table

from rooftop.cli.consoles import output_console
from rooftop.cli.outputs import write_json
from rooftop.cli.progress import progress_bar
from rooftop.errors import InputError
from rooftop.scene import BuildReport, Geometry, build_file
from rooftop.scene.layouts import MAX_TRIANGLES
from rooftop.scene.materials import Material
from rooftop.words import counted

MOST_SHOWN = 12  # materials


def run_build(
    mesh: Path, out: Path | None, normals: Literal["file", "smooth", "flat"], precision: float | None,
    workers: int | None, lock_borders: bool, no_textures: bool,
) -> None:  # fmt: skip
    """Run the command that `rooftop.cli.commands.scene_files:build_command` describes."""
    try:
        with progress_bar() as show:
            show("loading loops, which the first build compiles", 0.0)
            report = build_file(
                mesh, out, normals=normals, precision=precision, progress=show, workers=workers,
                lock_borders=lock_borders, textures=not no_textures,
            )  # fmt: skip
    except FileNotFoundError as error:
        raise InputError(str(error)) from None
    except ValueError as error:
        raise error if isinstance(error, InputError) else InputError(f"{mesh}: {error}") from None
    for line in _summary(report):
        click.echo(line)


def run_info(file: Path, json_path: Path | None) -> None:
    """Run the command that `rooftop.cli.commands.scene_files:info_command` describes."""
    if not file.is_file():
        raise InputError(f"there is no file {file}")
    geometry = Geometry.open(file)
    found = _info(geometry)
    if write_json(json_path, found):
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("level", "clusters", "triangles", "fill", "error"):
        table.add_column(name, justify="right")
    for number, level in enumerate(found["levels"]):
        fill = level["triangles"] / (MAX_TRIANGLES * level["clusters"])
        cells = (f"{level['clusters']:,}", f"{level['triangles']:,}", f"{fill:.0%}", f"{level['error']:.3g}")
        table.add_row(str(number), *cells)
    console = output_console()
    console.print(table)
    for line in _lines(found):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _info(geometry: Geometry) -> dict[str, Any]:
    """Return the file's header, and statistics that are computed from the whole file."""
    heads = geometry.clusters()  # reads and checks every page
    levels = geometry.meta["levels"]
    clusters, triangles = (sum(level[name] for level in levels) for name in ("clusters", "triangles"))
    if clusters != len(heads):
        raise InputError(f"{geometry.path} states {clusters:,} clusters, but contains {len(heads):,}: build it again")
    return geometry.meta | {
        "file": str(geometry.path),
        "bytes": geometry.size_bytes,
        "bytes_per_triangle": (geometry.size_bytes - geometry.image_bytes) / geometry.meta["triangles"],
        "image_bytes": geometry.image_bytes,
        "material_table": None if geometry.materials is None else [_material(each) for each in geometry.materials],
        "fill": triangles / (MAX_TRIANGLES * clusters),
        "largest_page_bytes": int(np.max(geometry.page_lengths)),
    }


def _lines(found: dict[str, Any]) -> list[str]:
    stored = [name for name in ("normals", "uv", "colors") if found[f"has_{name}"]]
    low, high = (np.array(corner) + found["origin"] for corner in found["bounds"])
    lines = [
        f"{found['triangles']:,} triangles in {found['bytes']:,} bytes, {found['bytes_per_triangle']:.1f} a triangle "
        f"with all levels; clusters {found['fill']:.0%} full",
        f"{found['groups']:,} groups in {found['pages']:,} pages of at most {found['largest_page_bytes']:,} bytes; "
        f"a tree of {found['nodes']:,} nodes, {found['depth']} deep",
        f"from {_point(low)} to {_point(high)}, on a grid of 2^{found['grid_exponent']}; "
        f"{' and '.join(stored) or 'no normals, no uv'}; materials: {found['materials']:,}",
    ]
    for number, material in enumerate((found["material_table"] or [])[:MOST_SHOWN]):
        lines.append(f"material {number}: {_words(material)}")
    if len(found["material_table"] or []) > MOST_SHOWN:
        lines.append(f"and {len(found['material_table']) - MOST_SHOWN:,} more (--json has all)")
    if found["image_bytes"]:
        lines.append(f"textures: {found['image_bytes']:,} of the bytes")
    if found["why_several_roots"]:
        lines.append(f"{found['roots']:,} clusters at the coarsest level: {found['why_several_roots']}")
    return lines


def _material(material: Material) -> dict[str, Any]:
    plain: dict[str, Any] = {"name": material.name, "color": list(material.color), "texture": None}
    if material.texture is not None:
        size = {"width": material.texture.width, "height": material.texture.height}
        plain["texture"] = size | {"wrap": list(material.wrap), "magnified": material.magnified}
    return plain


def _words(material: dict[str, Any]) -> str:
    color = "#" + "".join(f"{round(255 * part):02x}" for part in material["color"])
    texture = material["texture"]
    image = "" if texture is None else f", a texture of {texture['width']} x {texture['height']}"
    name = material["name"].encode("utf-8", "backslashreplace").decode()  # a name may be any string in JSON
    shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in name)
    return f"{shown} {color}{image}".strip()


def _summary(report: BuildReport) -> list[str]:
    clusters = sum(level.clusters for level in report.levels)
    lines = [
        f"{click.format_filename(report.path)}: {counted(report.triangles, 'triangle')}, "
        f"{counted(len(report.levels), 'level')}, {counted(clusters, 'cluster')} {report.fill:.0%} full",
        f"{report.size_bytes:,} bytes ({report.bytes_per_triangle:.1f} a triangle"
        f"{f', and {report.image_bytes:,} of textures' if report.image_bytes else ''}), positions to "
        f"{report.precision:.3g}, in {report.seconds:.1f} s",
    ]
    words = {
        "degenerate_faces": "faces without area dropped",
        "small_faces": "faces smaller than the grid's step dropped",
        "duplicate_faces": "duplicate faces dropped",
        "unused_vertices": "unused vertices dropped",
        "equal_vertices": "duplicate vertices merged",
        "non_manifold_edges": "edges kept that have more than two faces, or two with opposite orientation",
    }
    repairs = asdict(report.repairs)
    mended = [f"{repairs[name]:,} {said}" for name, said in words.items() if repairs[name]]
    if report.repairs.coarser_grid:
        mended.append("the mesh is too large for a finer grid")
    if mended:
        lines.append("; ".join(mended))
    if report.why_several:
        lines.append(f"{report.roots:,} clusters at the coarsest level: {report.why_several}")
    return lines


def _point(point: Any) -> str:
    return "(" + ", ".join(f"{each:.6g}" for each in point) + ")"
