"""Package names of FFmpeg and its libraries in each package manager, and the commands that install them."""

from __future__ import annotations

import shutil

from rooftop.doctor import mending

PACKAGES = {
    "apt-get": {
        "ffmpeg": "ffmpeg",
        "c compiler": "gcc libc6-dev",
        "make": "make",
        "pkg-config": "pkg-config",
        "nasm": "nasm",
        "clang": "clang",
        "ffnvcodec": "libffmpeg-nvenc-dev",
        "libx264": "libx264-dev",
        "libx265": "libx265-dev",
        "libvpx": "libvpx-dev",
        "libdav1d": "libdav1d-dev",
        "libaom": "libaom-dev",
        "libsvtav1": "libsvtav1enc-dev",
        "libopus": "libopus-dev",
    },
    "dnf": {
        "ffmpeg": "ffmpeg-free",
        "c compiler": "gcc glibc-devel",
        "make": "make",
        "pkg-config": "pkgconf-pkg-config",
        "nasm": "nasm",
        "clang": "clang",
        "ffnvcodec": "nv-codec-headers",  # in the RPM Fusion repository, like x264-devel and x265-devel
        "libx264": "x264-devel",
        "libx265": "x265-devel",
        "libvpx": "libvpx-devel",
        "libdav1d": "libdav1d-devel",
        "libaom": "libaom-devel",
        "libsvtav1": "svt-av1-devel",
        "libopus": "opus-devel",
    },
}
"""For each package manager: the package names of each tool or library."""


def install_command(*things: str) -> str:
    """The command that installs all these packages at once; "" for an unknown package manager."""
    for manager, names in PACKAGES.items():
        if shutil.which(manager):
            update = ("apt-get update",) if manager == "apt-get" else ()
            return mending.as_root(*update, f"{manager} install -y {' '.join(names[thing] for thing in things)}")
    return ""
