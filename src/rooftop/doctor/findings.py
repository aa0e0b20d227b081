"""The finding about one part of the installation, and functions that the checks of all parts share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

from rooftop.doctor import mending
from rooftop.doctor.requirements import version_of

Status = Literal["works", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """The result of checking one part of the installation (the driver, a compiler, a package).

    Attributes:
        status: "absent" means that the part is optional, and not installed or not usable here; "broken" that it needs
            to be fixed.
        found: text with the versions and properties that were found.
        problem: a description of the problem; "" if there is none.
        command: the command that fixes or installs the part; "" if there is nothing to do or no command is known.
        needed: whether Rooftop needs the part on this machine.
    """

    part: str
    status: Status
    found: str
    problem: str = ""
    command: str = ""
    needed: bool = True


class Part(NamedTuple):
    """A part of the installation and the function that checks it. `check` takes the part's name, and returns None if
    this machine does not need the part."""

    name: str
    check: Callable[[str], Finding | None]
    needed: bool = True


class NoTorch(Exception):
    """torch cannot be imported; `__cause__` is the reason."""


def torch_here() -> Any:
    """The module torch.

    Raises:
        NoTorch: torch cannot be imported; `__cause__` is the reason.
    """
    try:
        return import_module("torch")
    except Exception as error:
        raise NoTorch from error


def gpu_usable() -> bool:
    """Whether torch is installed and can use a GPU."""
    try:
        return bool(torch_here().cuda.is_available())
    except NoTorch:
        return False


def torch_cuda() -> str:
    """The CUDA version that torch is built for; "" for another build or without torch."""
    try:
        return torch_here().version.cuda or ""
    except NoTorch:
        return ""


def build_of(torch: Any) -> str:
    """The kind of torch build: "CUDA 13.0 build", "ROCm 6.4 build" or "CPU build"."""
    hip = getattr(torch.version, "hip", None)
    return f"CUDA {torch.version.cuda} build" if torch.version.cuda else f"ROCm {hip} build" if hip else "CPU build"


def reinstall(package: str) -> str:
    """The command that reinstalls a package in its installed version, and also all of its requirements."""
    version = version_of(package)
    options = "--force-reinstall" + (" --index-url <the index it came from>" if "+" in version else "")
    return mending.pip(f"{package}=={version}", options=options)
