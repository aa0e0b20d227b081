"""The tools and libraries for building FFmpeg: which are installed, which options of `configure` follow, and which
command installs the missing tools and libraries.

The required library versions are not listed here: they are read from the `configure` of the source.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rooftop.errors import InputError
from rooftop.media.ffmpeg_packages import install_command

X86 = ("x86_64", "amd64", "i386", "i686")
LIBRARIES = {  # name in FFmpeg's options -> what the build uses it for, and the licence that it requires
    "libx264": ("a software encoder of H.264", "gpl"),
    "libx265": ("a software encoder of HEVC", "gpl"),
    "libvpx": ("software encoders of VP8 and VP9", ""),
    "libdav1d": ("the fast software decoder of AV1", ""),
    "libaom": ("a software codec of AV1", ""),
    "libsvtav1": ("the fast software encoder of AV1", ""),
    "libopus": ("an encoder of Opus", ""),
}
EMPTY_C = "#include <stdio.h>\nint main(void) { return 0; }\n"
EMPTY_CUDA = 'extern "C" __attribute__((global)) void nothing(unsigned char* x) { *x = 1; }\n'
NO_HEADERS = "NVIDIA's interfaces for video: nv-codec-headers, with ffnvcodec.pc"


class Lacking(NamedTuple):
    """A missing tool or library: a description, and its name in `ffmpeg_packages` ("" if no package provides it). The
    description of an optional one is the feature that it enables."""

    what: str
    thing: str

    @property
    def line(self) -> str:
        """One line of text: what is missing, and the command that installs it."""
        mends = install_command(self.thing) if self.thing else ""
        if not mends and self.what.startswith(NO_HEADERS):
            mends = "download nv-codec-headers of the FFmpeg project and name their folder with --headers"
        return f"{self.what}: {mends or 'install it with the package manager of this system'}"


def lines(lacking: Sequence[Lacking]) -> list[str]:
    """One line for each missing tool or library, and one with the command that installs all of them at once."""
    things = [each.thing for each in lacking if each.thing]
    together = install_command(*things) if len(things) > 1 else ""
    return [*(each.line for each in lacking), *([f"all at once: {together}"] if together else [])]


@dataclass(frozen=True)
class Requirements:
    """The results of `find_requirements`.

    Attributes:
        missing: required tools and libraries that are missing.
        left_out: optional tools and libraries that are missing.
        options: options of `configure` that follow from the installed tools and libraries.
        versions: versions of the build's tools and headers; if one changes, everything is built again.
    """

    missing: tuple[Lacking, ...]
    left_out: tuple[Lacking, ...]
    options: tuple[str, ...]
    versions: tuple[str, ...]


def find_requirements(source: Path, headers: Path | None) -> Requirements:
    """Look for all tools and libraries of the build, without building or changing anything.

    Args:
        source: FFmpeg's source.
        headers: a folder with nv-codec-headers, as source or installed; None uses the system's headers.

    Raises:
        InputError: `headers` contains no nv-codec-headers.
    """
    script = (source / "configure").read_text(encoding="utf-8", errors="replace")
    missing: list[Lacking] = []
    left_out: list[Lacking] = []
    options: list[str] = []
    versions: list[str] = []

    compiler = _compiler()
    if compiler is None:
        missing.append(Lacking("a C compiler and its headers", "c compiler"))
    else:
        options.append(f"--cc={compiler}")
        versions.append(_said(compiler, "--version"))
    if "GNU Make" not in _said("make", "--version"):
        missing.append(Lacking("make", "make"))
    if platform.machine().lower() in X86:
        assembler = next((each for each in ("nasm", "yasm") if shutil.which(each) and each in script), None)
        if assembler is None:
            missing.append(Lacking("nasm, which assembles the fast parts for this processor", "nasm"))
        else:
            options.append(f"--x86asmexe={assembler}")

    with tempfile.TemporaryDirectory(prefix="rooftop-ffmpeg-") as folder:
        environment = build_environment(headers, Path(folder))
        if not _said("pkg-config", "--version"):
            missing.append(Lacking("pkg-config, which finds libraries", "pkg-config"))
            if headers is None:  # pkg-config would find the headers, so without it they count as missing
                missing.append(Lacking(NO_HEADERS, "ffnvcodec"))
        else:
            wanted = _asked("ffnvcodec", script) or ("ffnvcodec",)
            version = _said("pkg-config", "--modversion", "ffnvcodec", environment=environment)
            if any(_there(each, environment) for each in wanted):
                options += ["--enable-ffnvcodec", "--enable-cuvid", "--enable-nvdec", "--enable-nvenc"]
                versions.append(f"ffnvcodec {version}")
            else:
                but = f" (version {version} is there, this FFmpeg asks for {' or '.join(wanted)})" if version else ""
                missing.append(Lacking(NO_HEADERS + but, "" if version else "ffnvcodec"))
            for name, (what, licence) in LIBRARIES.items():
                wanted = _asked(name, script)
                if any(_there(each, environment) for each in wanted):
                    options += [f"--enable-{name}", *([f"--enable-{licence}"] if licence else [])]
                elif wanted:
                    left_out.append(Lacking(what, name))

    if "cuda_llvm" in script:
        if _clang_compiles_cuda():
            options.append("--enable-cuda-llvm")
            versions.append(_said("clang", "--version"))
        else:
            but = " (the clang here does not compile for GPUs)" if shutil.which("clang") else ""
            filters = f"filters on the GPU (scale_cuda, yadif_cuda, overlay_cuda, ...), compiled by clang{but}"
            left_out.append(Lacking(filters, "" if but else "clang"))
    return Requirements(tuple(missing), tuple(left_out), tuple(dict.fromkeys(options)), tuple(versions))


def build_environment(headers: Path | None, folder: Path) -> dict[str, str]:
    """Return this process's environment with LC_ALL=C. If `headers` is given, pkg-config finds these headers first in
    this environment, by a new .pc file that is written to `folder`.

    The headers' own .pc file names the folder where they would be installed, not the folder where they are.
    """
    environment = {**os.environ, "LC_ALL": "C"}
    if headers is None:
        return environment
    include = next((each for each in (headers / "include", headers) if (each / "ffnvcodec").is_dir()), None)
    described = [*sorted(headers.rglob("ffnvcodec.pc")), *sorted(headers.rglob("ffnvcodec.pc.in"))]
    found = [re.search(r"^Version: *(\S+)", each.read_text(errors="replace"), re.MULTILINE) for each in described]
    version = next((each[1] for each in found if each), None)
    if include is None or version is None:
        raise InputError(
            f"{headers} has no nv-codec-headers: expected ffnvcodec/nvEncodeAPI.h in it or in its include/, and "
            "ffnvcodec.pc or ffnvcodec.pc.in"
        )
    folder.mkdir(parents=True, exist_ok=True)
    text = f"Name: ffnvcodec\nDescription: nv-codec-headers\nVersion: {version}\nCflags: -I{include}\n"
    (folder / "ffnvcodec.pc").write_text(text)
    others = environment.get("PKG_CONFIG_PATH", "")
    return {**environment, "PKG_CONFIG_PATH": f"{folder}{os.pathsep}{others}" if others else str(folder)}


def _asked(name: str, script: str) -> tuple[str, ...]:
    """The requirements, such as "dav1d >= 0.5.0", that FFmpeg's `configure` passes to pkg-config for a library; any one
    of them suffices."""
    pattern = rf"(?:require|check)_pkg_config {name}(?:_\w+)? +(?:\"([^\"]+)\"|(\w+))"
    return tuple(dict.fromkeys(quoted or plain for quoted, plain in re.findall(pattern, script)))


def _there(wanted: str, environment: Mapping[str, str]) -> bool:
    command = ("pkg-config", "--exists", wanted)
    return subprocess.run(command, env=environment, capture_output=True, timeout=60).returncode == 0


def _said(*words: str, environment: Mapping[str, str] | None = None) -> str:
    """First line that a program prints; "" if the program is missing or fails."""
    if shutil.which(words[0]) is None:
        return ""
    done = subprocess.run(words, env=environment, capture_output=True, text=True, errors="replace", timeout=60)
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def _compiler() -> str | None:
    """The first compiler of $CC, gcc, clang and cc that can build a program."""
    for name in (os.environ.get("CC", ""), "gcc", "clang", "cc"):
        if name and shutil.which(name) and _compiles(name, "main.c", EMPTY_C):
            return name
    return None


def _clang_compiles_cuda() -> bool:
    """Whether clang compiles for NVIDIA's GPUs without CUDA's own files, as FFmpeg's --enable-cuda-llvm requires."""
    words = (
        "-S",
        "-nocudalib",
        "-nocudainc",
        "--cuda-device-only",
        "-Wno-unknown-cuda-version",
        "--cuda-gpu-arch=sm_60",
    )
    return shutil.which("clang") is not None and _compiles("clang", "empty.cu", EMPTY_CUDA, *words)


def _compiles(compiler: str, name: str, text: str, *words: str) -> bool:
    with tempfile.TemporaryDirectory(prefix="rooftop-ffmpeg-") as folder:
        (Path(folder) / name).write_text(text)
        command = (compiler, *words, name, "-o", "result")
        return subprocess.run(command, cwd=folder, capture_output=True, timeout=60).returncode == 0
