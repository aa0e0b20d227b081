"""`rooftop scene`: virtual geometry, built from meshes."""

from __future__ import annotations

import click

from rooftop.cli.lazy_groups import LazyGroup, Verb

VERBS = {
    "build": Verb(
        "rooftop.cli.commands.scene_files:build_command",
        "Build MESH (.glb, .obj, .ply, .stl and more) into a geometry file.",
    ),
    "info": Verb(
        "rooftop.cli.commands.scene_files:info_command",
        "Show what is in a geometry file: its levels, how full its clusters are, pages, the tree.",
    ),
    "render": Verb(
        "rooftop.cli.commands.scene_render:render_command",
        "Render geometry files (FILE.rtg, which `rooftop scene build` makes) into pictures.",
    ),
    "view": Verb(
        "rooftop.cli.commands.scene_view:view_command",
        "Look at geometry files (FILE.rtg, which `rooftop scene build` makes) in a browser.",
    ),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def command() -> None:
    """Build meshes into virtual geometry, look into it and at it, and render it.

    Virtual geometry has all levels of detail of a mesh, cut into clusters of 128 triangles: a renderer draws each place
    of the mesh as finely as its pixels need, so that a picture costs what its pixels cost.
    """
