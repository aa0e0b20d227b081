"""Check the verbs' output files before the work begins, and write JSON."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

import click

STANDARD_OUTPUT = Path("-")

KINDS = {
    "HTML": ((".html", ".htm"), (b"<!doctype html", b"<html")),
    "JSON": ((".json", ".json.gz"), (b"{", b"[")),
}
"""For each kind of output: the suffixes of its file names, and the first bytes of its files in lower case."""


def check_writable(path: Path, inputs: Sequence[Path] = (), kind: str | None = None) -> None:
    """Check, before the work begins, that a file can be written.

    Args:
        kind: the kind of the output, one of `KINDS`; None: not checked. An existing file may be overwritten only if
            its name has a suffix of this kind, its content begins like a file of this kind, or it is empty.
        inputs: files that the verb reads, and folders of such files. None of these files may be overwritten.

    Raises:
        click.BadParameter: the file's folder is missing or not writable, or the path is a folder, "-", an input, or a
            file of another kind.
    """
    folder = path.parent
    if path == STANDARD_OUTPUT:
        problem = "is not a file name: expected a path, because the table already uses standard output"
    elif path.is_dir():
        problem = "is a folder"
    elif path.exists() and not path.is_file() and os.access(path, os.W_OK):  # /dev/null, a pipe
        return
    elif not folder.is_dir():
        problem = f"cannot be written: there is no folder {folder}"
    elif not os.access(folder, os.W_OK) or (path.exists() and not os.access(path, os.W_OK)):
        problem = "cannot be written: permission denied"
    elif path.exists() and any(_is_in(path, each) for each in inputs):
        problem = "is an input: give another name"
    elif kind is not None and path.exists() and not _is_of(path, kind):
        problem = f"is not {kind}, and is not overwritten: give another name"
    else:
        return
    raise click.BadParameter(f"{path} {problem}", param_hint="output")


def check_outputs(outputs: Mapping[str, Sequence[Path | None]], json_path: Path | None = None) -> None:
    """Refuse files that cannot be written, and one file for two outputs.

    Args:
        outputs: the paths for each kind of output (see `KINDS`). A path of None is skipped.
        json_path: the value of --json, which may also be standard output.

    Raises:
        click.BadParameter: a path cannot be written, is of another kind, or is given twice. Only --json may be "-".
    """
    files = []
    named = [(kind, path) for kind, paths in outputs.items() for path in paths]
    for kind, path in [*named, ("JSON", None if json_path == STANDARD_OUTPUT else json_path)]:
        if path is not None:
            check_writable(path, kind=kind)
            files += [path.resolve()] if path.is_file() or not path.exists() else []
    twice = next((path for path in files if files.count(path) > 1), None)
    if twice is not None:
        raise click.BadParameter(f"{twice} is given for two outputs: give each its own file", param_hint="output")


def _is_of(path: Path, kind: str) -> bool:
    """Whether a file's name has an ending of this kind or, if not, its content begins like this kind. An empty file
    counts as any kind."""
    names, beginnings = KINDS[kind]
    if path.name.lower().endswith(names):
        return True
    with path.open("rb") as file:
        begin = file.read(64).lstrip().lower()
    return begin.startswith(beginnings) or path.stat().st_size == 0


def _is_in(path: Path, source: Path) -> bool:
    """Whether a file is the input `source`, or is inside it if `source` is a folder."""
    if source.is_dir():
        return path.resolve().is_relative_to(source.resolve())
    return source.exists() and path.samefile(source)


def json_option(what: str) -> Any:
    """Make the option --json [FILE], with which a verb writes `what` as JSON.

    The value `json_path` is None, a writable file, or STANDARD_OUTPUT.
    """
    return click.option(
        "--json",
        "json_path",
        type=click.Path(path_type=Path, allow_dash=True),
        is_flag=False,
        flag_value=str(STANDARD_OUTPUT),
        callback=_json_file,
        metavar="[FILE]",
        help=f"Also write {what} to FILE as JSON. Without FILE, or with -, print only JSON.",
    )


def _json_file(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    """Check that the file can be written, and is not a photograph or video that happens to follow --json.

    Raises:
        click.BadParameter: the file cannot be written, or exists and is not JSON.
    """
    if path is None or path == STANDARD_OUTPUT:
        return path
    check_writable(path)
    if path.is_file() and not _is_of(path, "JSON"):
        raise click.BadParameter(
            f"{path} is not JSON, and is not overwritten: give another name. --json took this argument as its file: if "
            "it is an input, put --json last"
        )
    return path


def prints_aside(json_path: Path | None) -> AbstractContextManager[object]:
    """Within the block, what the user's model prints goes to standard error, if standard output gets the JSON."""
    return redirect_stdout(sys.stderr) if json_path == STANDARD_OUTPUT else nullcontext()


def check_json(path: Path | None, inputs: Sequence[Path]) -> None:
    """Check that the file of --json, if there is one, is not an input. `inputs` as in `check_writable`.

    Raises:
        click.BadParameter: the file is an input, or cannot be written.
    """
    if path is not None and path != STANDARD_OUTPUT:
        check_writable(path, inputs)


def write_json(path: Path | None, value: Any) -> bool:
    """Write a value as JSON to the path of --json, if there is one.

    Returns:
        Whether the value was written to standard output, where it replaces the verb's other output.
    """
    if path is None:
        return False
    text = json.dumps(value, indent=1) + "\n"
    if path == STANDARD_OUTPUT:
        click.echo(text, nl=False)
        return True
    from rooftop.whole_files import write_whole

    write_whole(path, text)
    return False
