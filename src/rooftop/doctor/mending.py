"""The commands that fix problems, for this machine's installer, package manager and container.

Each function returns a command, without running it, or "" if no command is known.
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
"""For each package manager, its names for a C compiler, a C++ compiler and the headers of the system's Python."""

DRIVER_INSTALLS = {
    "ubuntu": ("apt-get update", "apt-get install -y ubuntu-drivers-common", "ubuntu-drivers install", "reboot"),
    # the package is in the component non-free
    "debian": ("apt-get update", "apt-get install -y nvidia-driver", "reboot"),
}
"""Distribution (ID of os-release) -> the steps that install NVIDIA's driver from its own packages."""


def pip(*requirements: str, options: str = "") -> str:
    """The command that installs packages into this Python, by uv if there is no pip."""
    installer = "pip" if has_pip() or shutil.which("uv") is None else "uv pip"
    quoted = (f'"{each}"' if set(each) & set("<>=[~!") else each for each in requirements)
    return " ".join(word for word in (installer, "install", options, *quoted) if word)


def has_pip() -> bool:
    """Whether this Python has pip. The function searches the path itself, without `importlib.util.find_spec("pip")`,
    because a hook of setuptools mistakes that call for a run of pip. After such a call, setuptools cannot be imported
    in this process, and torch.compile fails on a CPU."""
    return PathFinder.find_spec("pip") is not None


def system_package(kind: str) -> str:
    """The command that installs "c", "c++" or "headers" (of Python) with the package manager of the system."""
    if kind == "headers" and sys.base_prefix != "/usr":
        return ""  # if this Python is not the system's, no package has its headers
    for manager, names in SYSTEM_PACKAGES.items():
        if shutil.which(manager):
            name = names[kind].format(major=sys.version_info.major, minor=sys.version_info.minor)
            update = ("apt-get update",) if manager == "apt-get" else ()
            return as_root(*update, f"{manager} install -y {name}")
    return ""


def driver() -> str:
    """The command that installs NVIDIA's driver. In a container, the command that makes the host's driver available
    inside."""
    if engine := container():
        return f"{engine} run --gpus all ..." if engine == "docker" else f"{engine} run --device nvidia.com/gpu=all ..."
    try:
        steps = DRIVER_INSTALLS.get(platform.freedesktop_os_release().get("ID", ""), ())
    except OSError:
        steps = ()
    return as_root(*steps)


def as_root(*steps: str) -> str:
    """One command that runs the given shell commands in order, with sudo unless this process runs as root."""
    sudo = "" if not hasattr(os, "geteuid") or os.geteuid() == 0 else "sudo "
    return " && ".join(sudo + step for step in steps)


def container() -> str:
    """The container engine that runs this process ("docker", "podman"); "" outside a known container."""
    marks = {"/.dockerenv": "docker", "/run/.containerenv": "podman"}
    return next((engine for mark, engine in marks.items() if Path(mark).exists()), "")
