"""Requirements of installed packages, from their metadata, and whether the installed versions fit."""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata


def version_of(package: str) -> str:
    """The installed version of a package; "" if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def python_asked_by(package: str) -> str:
    """The Python version that an installed package requires, such as ">=3.11"; "" if it states none."""
    try:
        return metadata.metadata(package)["Requires-Python"] or ""
    except (metadata.PackageNotFoundError, KeyError):
        return ""


def asked_by(package: str, extra: str = "") -> dict[str, str]:
    """The requirements of an installed package on this system, with those of the extra if one is given: name ->
    version specifier, such as {"triton": "==3.6.0"}. Empty if the package is not installed."""
    try:
        requirements = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return {}
    asked = {}
    for requirement in requirements:
        words, _, marker = requirement.partition(";")
        match = re.match(r"\s*([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*\(?([^)]*)\)?\s*$", words)
        if match and any(_holds(each, extra) for each in marker.split(" or ")):
            asked[match[1].lower()] = match[2].replace(" ", "")
    return asked


def _holds(marker: str, extra: str) -> bool:
    """Whether the marker of a requirement (its condition after ";") is true. A marker joins terms about the extra, the
    system and the machine by "and". Unknown terms count as true."""
    here = {
        "extra": extra,
        "platform_system": platform.system(),
        "platform_machine": platform.machine(),
        "sys_platform": sys.platform,
    }
    terms = re.findall(r"""(\w+)\s*(==|!=)\s*["']([^"']*)["']""", marker)
    return all((here[name] == value) == (operator == "==") for name, operator, value in terms if name in here)


def fits(version: str, specifier: str) -> bool:
    """Whether a version satisfies a specifier, such as "==3.6.0" or ">=2.11,<4". The version "" satisfies nothing.

    Only release numbers are compared. Operators other than ==, >=, <= and < count as satisfied.
    """
    return bool(version) and all(_clause(version, clause) for clause in specifier.split(",") if clause)


def _clause(version: str, clause: str) -> bool:
    operator, wanted = clause[: -len(clause.lstrip("=<>!~ "))].strip(), clause.lstrip("=<>!~ ")
    have, need = _release(version), _release(wanted)
    width = len(need) if wanted.endswith("*") else max(len(have), len(need))
    have, need = (have + (0,) * width)[:width], (need + (0,) * width)[:width]
    return {"==": have == need, ">=": have >= need, "<=": have <= need, "<": have < need}.get(operator, True)


def _release(version: str) -> tuple[int, ...]:
    """ "2.13.0+cpu" -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
