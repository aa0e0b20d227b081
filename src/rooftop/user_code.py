"""Objects of the user's own code, by name: `package.module:name`, or `package/module.py:name`.

The current folder is searched first, so a package in it needs no installation.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from rooftop.errors import ModelRunError, TargetError
from rooftop.words import did_you_mean

MOST_SHOWN = 8  # maximum number of a module's names that a message lists


def named_object(text: str, example: str) -> Any:
    """Return the object that a text names.

    Args:
        text: `package.module:name` or `package/module.py:name`.
        example: an example of such a text, for error messages.

    Raises:
        TargetError: the text has neither form, the module does not exist, or the module has no object of that name.
        ModelRunError: the module raised while it was imported.
    """
    return found_in(named_module(text, example), text)


def named_module(text: str, example: str) -> ModuleType:
    """Import the module that the text names before its colon. Arguments and errors are as in `named_object`."""
    module_name, _, attribute = text.rpartition(":")
    if not module_name or not attribute or (module_name.startswith(".") and not module_name.endswith(".py")):
        raise TargetError(f"{text!r}: expected package.module:callable, e.g. {example}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    if module_name.endswith(".py"):
        module_name = _module_of(Path(module_name))
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise TargetError(
                f"{text!r}: no module {error.name!r} here ({os.getcwd()}) or in this environment"
            ) from error
        raise ModelRunError(f"importing {module_name!r} failed: {error}") from error
    except (Exception, SystemExit) as error:
        place = place_in_user_code(error)
        raise ModelRunError(
            f"importing {module_name!r} raised {type(error).__name__}: {error}{f' ({place})' if place else ''}"
        ) from error


def found_in(module: ModuleType, text: str) -> Any:
    """The object in a module that the text names after its colon.

    Raises:
        TargetError: the object does not exist; the message lists the module's callables.
    """
    attribute = text.rpartition(":")[2]
    found = getattr(module, attribute, None)
    if found is None:
        public = [name for name in vars(module) if not name.startswith("_") and callable(getattr(module, name))]
        raise TargetError(
            f"{text!r}: {module.__name__!r} has no {attribute!r}; it has "
            f"{', '.join(public[:MOST_SHOWN]) or 'nothing callable'}{did_you_mean(attribute, public)}"
        )
    return found


def _module_of(path: Path) -> str:
    """The module name of a file: its path relative to the current directory, or the file name alone if the file is
    elsewhere, or if a folder's name contains a dot.

    Raises:
        TargetError: the file does not exist, or its name contains another dot.
    """
    if not path.is_file():
        raise TargetError(f"{os.fspath(path)}: no such file")
    whole = path.resolve()
    if "." in whole.stem:
        raise TargetError(f"{os.fspath(path)}: Python cannot import a file with several dots in its name: rename it")
    here = Path.cwd().resolve()
    if whole.is_relative_to(here):
        names = whole.relative_to(here).with_suffix("").parts
        if not any("." in name for name in names):
            return ".".join(names)
    sys.path.insert(0, str(whole.parent))
    return whole.stem


def place_in_user_code(error: BaseException) -> str | None:
    """The innermost line of the user's code in an error's traceback, "my_pkg/task.py:12"; None if there is none.

    Code of Rooftop, of installed packages and of Python is not the user's. The error's notes are also searched, because
    they may contain the traceback of another process.
    """
    frames = [(each.filename, each.lineno) for each in traceback.extract_tb(error.__traceback__)]
    frames += re.findall(r'File "(.+)", line (\d+)', "\n".join(getattr(error, "__notes__", [])))
    others = (str(Path(__file__).parent), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")))
    users = [f"{file}:{line}" for file, line in frames if not file.startswith((*others, "<"))]
    if not users:
        return None
    return users[-1].removeprefix(os.getcwd() + os.sep)
