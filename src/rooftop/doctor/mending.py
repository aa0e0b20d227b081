"""The commands that mend a machine, spelled for this one: its installer, its package manager, its container.

Each returns "" where no command is known to be right here; nothing is run.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.machinery import PathFinder
from pathlib import Path

SYSTEM_PACKAGES = {
    "apt-get": {"c": "gcc", "c++": "g++", "headers": "python{major}.{minor}-dev"},
    "dnf": {"c": "gcc", "c++": "gcc-c++", "headers": "python3-devel"},
    "yum": {"c": "gcc", "c++": "gcc-c++", "headers": "python3-devel"},
    "zypper": {"c": "gcc", "c++": "gcc-c++", "headers": "python3-devel"},
}
"""Package manager -> what it calls a C compiler, a C++ compiler and the headers of the system's Python."""

DRIVER_INSTALLS = {
    "ubuntu": ("apt-get update", "apt-get install -y ubuntu-drivers-common", "ubuntu-drivers install", "reboot"),
    "debian": ("apt-get update", "apt-get install -y nvidia-driver", "reboot"),  # from the component non-free
}
"""Distribution (ID of os-release) -> the steps that install NVIDIA's driver from its own packages."""


def pip(*requirements: str, options: str = "") -> str:
    """Installs packages into this Python; uv where there is no pip."""
    installer = "pip" if has_pip() or shutil.which("uv") is None else "uv pip"
    quoted = (f'"{each}"' if set(each) & set("<>=[~!") else each for each in requirements)
    return " ".join(word for word in (installer, "install", options, *quoted) if word)


def has_pip() -> bool:
    """Whether this Python has pip. Looked up by its path: setuptools hooks `importlib.util.find_spec("pip")`, takes it
    for a run of pip, and then cannot be imported any more in this process, nor torch.compile used on a CPU."""
    return PathFinder.find_spec("pip") is not None


def system_package(kind: str) -> str:
    """Installs "c", "c++" or "headers" (of Python) with the system's package manager."""
    if kind == "headers" and sys.base_prefix != "/usr":
        return ""  # this Python is not the system's: no package holds its headers
    for manager, names in SYSTEM_PACKAGES.items():
        if shutil.which(manager):
            name = names[kind].format(major=sys.version_info.major, minor=sys.version_info.minor)
            update = ("apt-get update",) if manager == "apt-get" else ()
            return as_root(*update, f"{manager} install -y {name}")
    return ""


def driver() -> str:
    """Installs NVIDIA's driver; in a container, it is the host's that is handed in."""
    if engine := container():
        return f"{engine} run --gpus all ..." if engine == "docker" else f"{engine} run --device nvidia.com/gpu=all ..."
    try:
        steps = DRIVER_INSTALLS.get(platform.freedesktop_os_release().get("ID", ""), ())
    except OSError:
        steps = ()
    return as_root(*steps)


def as_root(*steps: str) -> str:
    """The steps one after another, with sudo unless this process is root's."""
    sudo = "" if not hasattr(os, "geteuid") or os.geteuid() == 0 else "sudo "
    return " && ".join(sudo + step for step in steps)


def container() -> str:
    """The engine that runs this process in a container ("docker", "podman"), "" outside of one that is known."""
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
    return next((engine for mark, engine in marks.items() if Path(mark).exists()), "")
