"""What benchmarks of scenes share: sizes of pictures as options, the time of a call, and rows written one by one."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rooftop.whole_files import write_json

Row = dict[str, Any]


def picture_size(text: str) -> tuple[int, int]:
    """Width and height from an option such as 1920x1080."""
    width, height = map(int, text.split("x"))
    return width, height


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result of a call, and the milliseconds until it is available."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return result, 1e3 * (time.perf_counter() - start)


def waited(call: Callable[[], object]) -> float:
    """The milliseconds until the result of a call is available."""
    return timed(call)[1]


def writer(found: dict[str, Any], out: Path | None) -> Callable[[Row], None]:
    """Return a function that adds a row to `found["rows"]`, prints it, and writes `found` to the file `out`."""

    def add(row: Row) -> None:
        found["rows"].append(row)
        print(json.dumps(row), flush=True)
        if out:
            write_json(out, found)

    return add
