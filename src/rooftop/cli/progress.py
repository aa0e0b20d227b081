"""A progress bar on stderr for work that takes longer than two seconds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

PATIENCE_S = 2.0


@contextmanager
def progress_bar(shown: bool = True) -> Iterator[Callable[[str, float], None]]:
    """Yield a function that updates the bar: call it with (the current activity, fraction done).

    The bar appears after two seconds, even during a long call. The bar never appears if `shown` is False or stderr is
    not a terminal.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True, disable=not (shown and console.is_terminal))
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
