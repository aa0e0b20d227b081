"""What installed packages ask for, from their own metadata, and whether what is there fits."""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata


def version_of(package: str) -> str:
    """The installed version, "" if none is."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def python_asked_by(package: str) -> str:
    """The Python that an installed package asks for, e.g. ">=3.11"; "" where it does not say."""
    try:
        return metadata.metadata(package)["Requires-Python"] or ""
    except (metadata.PackageNotFoundError, KeyError):
        return ""


def asked_by(package: str, extra: str = "") -> dict[str, str]:
    """What an installed package asks for on this system: name -> version specifier, e.g. {"triton": "==3.6.0"}."""
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
    """Terms joined by "and", about the extra, the system and the machine; of what it does not know, it assumes so."""
    here = {
        "extra": extra,
        "platform_system": platform.system(),
        "platform_machine": platform.machine(),
        "sys_platform": sys.platform,
    }
    terms = re.findall(r"""(\w+)\s*(==|!=)\s*["']([^"']*)["']""", marker)
    return all((here[name] == value) == (operator == "==") for name, operator, value in terms if name in here)


def fits(version: str, specifier: str) -> bool:
    """Whether a version is what "==3.6.0" or ">=2.11,<4" asks for, by release numbers; "" fits nothing.

    An operator other than ==, >=, <= and < is taken to be satisfied.
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
