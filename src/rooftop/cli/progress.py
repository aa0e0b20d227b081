"""Show the progress of long work on stderr: a bar in a terminal, and lines in a file or a pipe."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PATIENCE_S = 2.0
LINE_S = 30.0  # seconds until the first line in a file or a pipe; the time between lines doubles

Update = Callable[[str, float], None]


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Update]:
    """Yield a function that updates the bar: call it with (the current activity, fraction done).

    The bar appears after two seconds, even during a long call. If stderr is not a terminal, lines after 30 s, 90 s,
    210 s and so on name the current activity instead; of several ranks, only rank 0 prints them. If `shown` is False,
    nothing appears.
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        with _lines(shown and os.environ.get("RANK", "0") == "0") as update:
            yield update
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not shown)
    task = bar.add_task("", total=1.0)
    patience = threading.Timer(PATIENCE_S, bar.start)
    patience.daemon = True
    patience.start()
    try:
        yield lambda what, fraction: bar.update(task, description=what, completed=fraction)
    finally:
        patience.cancel()
        patience.join()  # wait, since the thread may just be starting the bar
        bar.stop()


@contextmanager
def _lines(shown: bool) -> Iterator[Update]:
    """Print a line with the progress from time to time, while the block runs."""
    began, ended = time.monotonic(), threading.Event()
    now = ["", 0.0]

    def update(what: str, fraction: float) -> None:
        now[:] = what, fraction

    def tell() -> None:
        wait_s = LINE_S
        while not ended.wait(wait_s):
            what, fraction = now
            seconds = f"{time.monotonic() - began:.0f} s"
            if what:
                click.echo(f"rooftop: {fraction:.0%} done after {seconds}: {what}", err=True)
            else:
                click.echo(f"rooftop: working for {seconds}", err=True)
            wait_s *= 2

    if not shown:
        yield update
        return
    teller = threading.Thread(target=tell, name="progress", daemon=True)
    teller.start()
    try:
        yield update
    finally:
        ended.set()
        teller.join()
