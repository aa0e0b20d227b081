"""Write files completely or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yield the path of a temporary file to write to. At the end of the block, the file is renamed to `target`; after
    an exception, the temporary file is removed.

    If `target` is a link, the file that it points to is replaced, and the link stays. If `target` is a device or a
    pipe, its own path is yielded, because renaming a file onto the device or pipe would replace it.

    Raises:
        OSError: the file cannot be written. The error names `target`, whose earlier content stays.
    """
    place = target.resolve()
    direct = place.exists() and not place.is_file()
    # The temporary name ends with the target's suffix, because libraries choose the format by it. Its number is random,
    # because threads of two containers or machines may have the same id.
    temporary = place if direct else place.with_name(f".{place.stem}.{token_hex(4)}.tmp{place.suffix}")
    try:
        yield temporary
        if not direct:
            os.replace(temporary, place)
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(target)) from error
    finally:
        if not direct:
            temporary.unlink(missing_ok=True)


def write_whole(target: Path, text: str) -> None:
    """Write a text file completely or not at all, as `whole_file` does.

    Raises:
        OSError: the file cannot be written. The error names `target`.
    """
    with whole_file(target) as path:
        path.write_text(text, encoding="utf-8")


def write_json(target: Path, value: object) -> None:
    """Write an indented JSON file completely or not at all, as `whole_file` does. Missing folders are made.

    Raises:
        OSError: the file or its folder cannot be written.
        TypeError: the value has an item that JSON has no type for.
    """
    text = json.dumps(value, indent=1) + "\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_whole(target, text)
