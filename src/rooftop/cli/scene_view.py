"""`rooftop scene view`: run the server of the viewer until Ctrl-C."""

from __future__ import annotations

import os
import socket
import sys
import threading
from pathlib import Path

import click

from rooftop.cli.device_option import pick_device
from rooftop.cli.scene_cameras import Numbers
from rooftop.cli.scene_render import world_of, wrong_call
from rooftop.cli.words import Words
from rooftop.scene.viewing.drawing import Drawing
from rooftop.scene.viewing.serving import Viewer, is_loopback


def run_view(
    files: tuple[Path, ...],
    port: int,
    host: str,
    up: Numbers | None,
    fov: float,
    instances: int | None,
    pixel_error: float,
    pool: int | None,
    shadows: bool,
    device: str,
) -> None:
    """Run the command that `rooftop.cli.commands.scene_view:view_command` describes."""
    x, y, z = up or (0.0, 0.0, 1.0)
    world = world_of(files, instances, (x, y, z))
    where = pick_device(None if device == "auto" else device)
    with wrong_call():
        drawing = Drawing(world, where, pixel_error, (x, y, z), fov, pool, shadows)
    viewer = Viewer(drawing, host, port)
    serving = threading.Thread(target=viewer.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
    serving.start()
    drawing.warm_up()
    if not is_loopback(host):
        click.echo(
            f"warning: --host {host} lets other machines connect, without encryption. Anyone who has the address or "
            "listens on the network can view the scene. An `ssh -L` tunnel to 127.0.0.1 is safer.",
            err=True,
        )
    click.echo(f"open {viewer.url}")
    if is_loopback(host):
        there = f"[{host}]" if ":" in host else host
        click.echo(
            f"to open it on another machine, first run there: ssh -L {viewer.port}:{there}:{viewer.port} "
            f"{socket.gethostname()}"
        )
    click.echo("Ctrl-C ends the viewer.")
    sys.stdout.flush()
    try:
        wait_for_interrupt()
    except KeyboardInterrupt:
        click.echo("\nended")
    finally:
        viewer.shutdown()
        viewer.server_close()
        drawing.stop()
    words = click.get_current_context().find_root().obj
    if isinstance(words, Words) and words.ends_process:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # all output is written, and a normal exit takes seconds to unload the libraries


def wait_for_interrupt() -> None:
    """Wait for Ctrl-C, which raises KeyboardInterrupt."""
    threading.Event().wait()
