"""Check the optional packages that a command needs. One message names all missing packages, and the command that
installs them.

    note = check_extras("rooftop train resnet", needed=[WEIGHTS, DIGITS], useful=[PAGE, TENSORBOARD])

The command installs Rooftop's optional dependencies (extras), so the installed versions fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import NamedTuple

from rooftop.doctor import mending
from rooftop.errors import MissingExtraError


class Extra(NamedTuple):
    """A package that one of Rooftop's extras (optional dependencies) installs.

    Attributes:
        name: name of the extra, not of the package.
        module: name to import.
        package: name to install.
        use: text that says what the package is for.
    """

    name: str
    module: str
    package: str
    use: str


def missing(extras: Iterable[Extra]) -> list[Extra]:
    """The optional packages that are not installed: Python cannot find their modules. This imports nothing."""
    return [each for each in extras if find_spec(each.module) is None]


def check_extras(what: str, needed: Sequence[Extra], useful: Sequence[Extra] = ()) -> str:
    """Check all packages of a command at once.

    Args:
        what: the command, for the message.
        needed: packages without which the command cannot run.
        useful: packages without which the command leaves something out.

    Returns:
        A note on missing useful packages; "" if none is missing.

    Raises:
        MissingExtraError: a needed package is missing. The message also names missing useful packages.
    """
    lacking, left_out = missing(needed), missing(useful)
    if lacking:
        rest = f"; {_named(left_out)} {_are(left_out)} useful" if left_out else ""
        raise MissingExtraError(f"{what} needs {_named(lacking)}{rest}: {_command([*lacking, *left_out])}")
    if left_out:
        return f"without {_named(left_out)}, which {_are(left_out)} not installed: {_command(left_out)}"
    return ""


def _named(extras: Sequence[Extra]) -> str:
    words = [f"{each.package} ({each.use})" for each in extras]
    return " and ".join([*([", ".join(words[:-1])] if words[1:] else []), words[-1]])


def _are(extras: Sequence[Extra]) -> str:
    return "is" if len(extras) == 1 else "are"


def _command(extras: Sequence[Extra]) -> str:
    return mending.pip(f"rooftop[{','.join(dict.fromkeys(each.name for each in extras))}]")
