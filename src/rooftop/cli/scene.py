"""`rooftop scene`: the group of commands for virtual geometry."""

from __future__ import annotations

import click

from rooftop.cli.lazy_groups import LazyGroup, Verb

VERBS = {
    "build": Verb(
        "rooftop.cli.commands.scene_files:build_command",
        "Build a geometry file (.rtg) from MESH (.glb, .obj, .ply, .stl and more).",
    ),
    "info": Verb(
        "rooftop.cli.commands.scene_files:info_command",
        "Show what is in a geometry file: levels, clusters, pages and the tree.",
    ),
    "render": Verb(
        "rooftop.cli.commands.scene_render:render_command",
        "Render geometry files (.rtg, from `rooftop scene build`) into pictures.",
    ),
    "view": Verb(
        "rooftop.cli.commands.scene_view:view_command",
        "View geometry files (.rtg, from `rooftop scene build`) in a browser.",
    ),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def command() -> None:
    """Build, inspect, render and view virtual geometry: meshes with levels of detail.

    Virtual geometry stores all levels of detail of a mesh in clusters of up to 128 triangles. The renderer draws each
    part of the mesh only as finely as the pixels can show. So the cost depends on the pixels far more than on the
    triangles.
    """
