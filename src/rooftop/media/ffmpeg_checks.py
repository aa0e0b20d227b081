"""Test what this machine's FFmpeg really does: run test frames through its codecs, devices and filters.

FFmpeg lists what it was built with, even if there is no GPU, no driver or no such decoder on the GPU. With `-hwaccel`,
FFmpeg falls back to software without an error. So each decoder, encoder, device and filter is run, and the resulting
frames are compared with those of software (`ffmpeg_trials.py`). NVIDIA's codecs and filters whose correct result this
module does not know are not run, but reported as "not tried".
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from rooftop.doctor.gpu_findings import ask_driver
from rooftop.errors import InputError, MissingExtraError
from rooftop.media.ffmpeg_packages import install_command
from rooftop.media.ffmpeg_trials import CODECS, FILTERS, Codec, FFmpegAbility, Trials
from rooftop.user_paths import user_path
from rooftop.words import did_you_mean

DRIVER_LIBRARIES = ("libcuda.so.1", "libnvcuvid.so.1", "libnvidia-encode.so.1")
DEVICES = ("cuda", "vaapi", "vdpau", "qsv", "drm", "opencl", "vulkan")
# Devices on which decoders are tried in addition to cuda. Decoders on cuda are tried even if the cuda device does not
# open.
DECODING_DEVICES = ("vaapi", "vdpau", "qsv", "vulkan")
NVENC = (("h264_nvenc", 8), ("hevc_nvenc", 8), ("hevc_nvenc", 10), ("av1_nvenc", 8), ("av1_nvenc", 10))
PARTS = ("library", "device", "decode", "encode", "filter")
PROC_MAPS = Path("/proc/self/maps")


@dataclass(frozen=True)
class FFmpegReport:
    """The results of the trials of an FFmpeg program on this machine.

    Attributes:
        path: path of the program.
        version, configuration: as the program reports them; configuration lists the arguments of its `configure`.
        driver: version of NVIDIA's driver; "" without a driver.
        gpus: names of the GPUs, from the driver.
        abilities: results of the trials, in the order of `PARTS`.
    """

    path: str
    version: str
    configuration: tuple[str, ...]
    driver: str
    gpus: tuple[str, ...]
    abilities: tuple[FFmpegAbility, ...]


def ffmpeg_abilities(
    ffmpeg: str | os.PathLike[str] | None = None,
    *,
    codecs: Sequence[str] | None = None,
    timeout_s: float = 30.0,
    report: Callable[[str, float], None] = lambda what, fraction: None,
) -> FFmpegReport:
    """Test what an FFmpeg can do on this machine, with or without a GPU. The test takes 15 s (longer with a GPU), and
    leaves no file behind.

    Args:
        ffmpeg: the program; None for the `ffmpeg` on PATH.
        codecs: names (h264, hevc, vp8, vp9, av1, mpeg1video, mpeg2video, mpeg4, mjpeg, vc1); None for all.
        timeout_s: time limit of each trial.
        report: called with (the current trial, fraction done).

    Raises:
        MissingExtraError: there is no FFmpeg; the message has its install command.
        InputError: `ffmpeg` is not an FFmpeg program or does not run, or a codec is unknown.
    """
    path = find_ffmpeg(ffmpeg)
    version, configuration = identity(path, timeout_s)
    names = dict.fromkeys(codec.name for codec in CODECS)
    if unknown := [name for name in codecs or () if name not in names]:
        raise InputError(
            f"codec {unknown[0]!r} is not known: expected some of {', '.join(names)}{did_you_mean(unknown[0], names)}"
        )
    driver, gpus = _gpus()
    chosen = [codec for codec in CODECS if codecs is None or codec.name in codecs]
    with closing(Trials(path, version, timeout_s)) as trials:
        found = (*_libraries(configuration), *_tried(trials, chosen, len(gpus), report))
    ordered = tuple(sorted(found, key=lambda each: PARTS.index(each.part)))
    return FFmpegReport(str(path), version, configuration, driver, gpus, ordered)


def find_ffmpeg(ffmpeg: str | os.PathLike[str] | None) -> Path:
    """Find the FFmpeg program `ffmpeg`; None: the ffmpeg on PATH. Errors are as in `ffmpeg_abilities`."""
    if ffmpeg is not None:
        given = shutil.which(user_path(ffmpeg))
        if given is None:
            raise InputError(f"{ffmpeg} is not a program: expected the path of an ffmpeg")
        return Path(given).absolute()
    there = shutil.which("ffmpeg")
    if there is None:
        command = install_command("ffmpeg")
        how = f": {command}," if command else " with the package manager of this system,"
        raise MissingExtraError(f"ffmpeg was not found; install it{how} or build it with rooftop media ffmpeg-build")
    return Path(there)


def identity(path: Path, timeout_s: float = 30.0) -> tuple[str, tuple[str, ...]]:
    """Return the version and configuration of an FFmpeg program, or raise `InputError` for other programs."""
    try:
        done = subprocess.run(
            (str(path), "-version"), stdin=subprocess.DEVNULL, capture_output=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"{path} does not run: {error}") from error
    said, complaint = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace").strip()
    version = re.match(r"ffmpeg version (\S+)", said)
    if version is None:
        raise InputError(
            f"{path} is not an ffmpeg" + (f": it says {complaint.splitlines()[-1]!r}" if complaint else "")
        )
    configuration = re.search(r"^ *configuration: *(.*)$", said, re.MULTILINE)
    return version[1], tuple(configuration[1].split()) if configuration else ()


def _tried(
    trials: Trials, codecs: Sequence[Codec], gpus: int, report: Callable[[str, float], None]
) -> list[FFmpegAbility]:
    cuda = [("cuda", number) for number in range(gpus)] if gpus > 1 else [("cuda", None)]
    devices = [*cuda, *((device, None) for device in DEVICES if device != "cuda")]
    asked = {codec.name for codec in codecs}
    encoders = [each for each in NVENC if each[0].removesuffix("_nvenc") in asked]
    names = [*(device for device, _ in devices), *(codec.title for codec in codecs), *(name for name, _ in encoders)]
    names += [trial.name for trial in FILTERS]
    numbers = iter(range(len(names)))

    def begin() -> None:
        number = next(numbers)
        report(names[number], number / len(names))

    found = []
    for device, index in devices:
        begin()
        found.append(trials.open_device(device, index))
    opened = {each.what.split()[0] for each in found if each.status == "works"}
    closed = {each.what.split()[0]: each.note for each in found if each.status == "fails"}
    for codec in codecs:
        begin()
        found += _codec(trials, codec, [device for device in DECODING_DEVICES if device in opened])
    for name, bits in encoders:
        begin()
        found.append(trials.encode_by_nvenc(name, bits))
    for trial in FILTERS:
        begin()
        if trial.name in trials.filters and trial.device in closed.keys() - opened:
            found.append(FFmpegAbility("filter", trial.name, "", "fails", closed[trial.device]))
        else:
            found.append(trials.filter_on_device(trial))
    return [*found, *_untried(trials)]


def _codec(trials: Trials, codec: Codec, others: Sequence[str]) -> Iterator[FFmpegAbility]:
    """Make a clip of the codec, then try its decoders by software, CUDA and other devices."""
    clip, made = trials.make_clip(codec)
    if codec.encoders:
        yield made
    if clip is None:
        why = "no software encoder" if not codec.encoders else f"no clip in this codec could be made: {made.note}"
        yield FFmpegAbility("decode", codec.title, codec.cuvid, "not tried", why)
        return
    right, software = trials.decode_by_software(codec, clip)
    yield software
    if right is None:
        note = "there are no reference frames to compare with"
        yield FFmpegAbility("decode", codec.title, codec.cuvid, "not tried", note)
        return
    yield trials.decode_by_device(codec, clip, "cuda", right)
    yield trials.decode_by_cuvid(codec, clip, right)
    for device in others:
        yield trials.decode_by_device(codec, clip, device, right)


def _untried(trials: Trials) -> list[FFmpegAbility]:
    """List the features for NVIDIA's GPUs that are not tried, because this module has no correct result to compare
    with."""
    known = {*(trial.name for trial in FILTERS), *(name for name, _ in NVENC), *(codec.cuvid for codec in CODECS)}
    lists: tuple[tuple[Literal["decode", "encode", "filter"], tuple[str, ...]], ...] = (
        ("decode", tuple(name for name in trials.decoders if name.endswith("_cuvid"))),
        ("encode", tuple(name for name in trials.encoders if name.endswith("_nvenc"))),
        ("filter", tuple(name for name in trials.filters if name.endswith(("_cuda", "_npp")))),
    )
    return [
        FFmpegAbility(part, name, "", "not tried", "its expected output is unknown")
        for part, names in lists
        for name in names
        if name not in known
    ]


# ---- the driver ------------------------------------------------------------------------------------------------------


def _gpus() -> tuple[str, tuple[str, ...]]:
    """Version of NVIDIA's driver, and names of the GPUs. Both are empty without a driver."""
    driver = ask_driver()
    if driver.error:
        return "", ()
    nvml: Any = import_module("pynvml")
    nvml.nvmlInit()
    try:
        names = [nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(index)) for index in range(driver.gpus)]
    finally:
        nvml.nvmlShutdown()
    return driver.version, tuple(name.decode() if isinstance(name, bytes) else str(name) for name in names)


def _libraries(configuration: Sequence[str]) -> list[FFmpegAbility]:
    rows = [_driver_library(name) for name in DRIVER_LIBRARIES]
    npp = "works" if "--enable-libnpp" in configuration else "not built in"
    return [*rows, FFmpegAbility("library", "libnpp", "", npp, "linked" if npp == "works" else "")]  # type: ignore[arg-type]


def _driver_library(name: str) -> FFmpegAbility:
    """Whether the loader finds a library that FFmpeg opens at run time, and its version if it reports one."""
    try:
        library = ctypes.CDLL(name)
    except OSError as error:
        return FFmpegAbility("library", name, "", "fails", str(error).splitlines()[0].removeprefix(f"{name}: "))
    said = [text for text in (_file_version(name), _interface_version(name, library)) if text]
    return FFmpegAbility("library", name, "", "works", ", ".join(said))


def _file_version(name: str) -> str:
    """The driver's version at the end of a loaded library's file name."""
    stem = name.removesuffix("1")
    try:
        paths = [line.split()[-1] for line in PROC_MAPS.read_text().splitlines() if f"/{stem}" in line]
    except OSError:
        return ""
    versions = [Path(path).resolve().name.removeprefix(stem) for path in paths]
    return next((version for version in versions if version != "1"), "")


def _interface_version(name: str, library: ctypes.CDLL) -> str:
    """The newest CUDA or NVENC version that the driver supports; only these two libraries can be queried."""
    functions = {"libcuda.so.1": "cuDriverGetVersion", "libnvidia-encode.so.1": "NvEncodeAPIGetMaxSupportedVersion"}
    if name not in functions:
        return ""
    number = ctypes.c_uint32()
    if getattr(library, functions[name])(ctypes.byref(number)) != 0:
        return ""
    if name == "libcuda.so.1":
        return f"CUDA up to {number.value // 1000}.{number.value % 1000 // 10}"
    return f"NVENC interface up to {number.value >> 4}.{number.value & 15}"
