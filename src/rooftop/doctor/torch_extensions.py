"""Check that installed packages with shared libraries that use torch can be loaded with the installed torch.

A package that was built for another torch, or for CUDA while torch is a CPU build, installs silently but fails at
import. The files of each package show whether the package is linked against torch. Each package is imported in a
separate process, because a wrong ABI may crash the process.
"""

from __future__ import annotations

import json
import mmap
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rooftop.doctor import mending
from rooftop.doctor.findings import Finding, torch_here
from rooftop.doctor.requirements import asked_by, fits, version_of

LINKED = (b"libc10.so", b"libtorch.so", b"libtorch_cpu.so", b"libtorch_python.so")
"""Names that occur in a shared library if it is linked against torch."""

OF_TORCH_OR_CUDA = re.compile(r"undefined symbol|lib(torch|c10|cuda|cudart|cudnn|cu[a-z]+|nccl|nv[a-z]+)[\w.-]*\.so")
"""Matches the error message of a shared library that cannot be loaded because of torch or CUDA. A message about FFmpeg,
for example, does not match."""

PATIENCE_S = 120
"""Time limit of one import. An import that compiles or downloads something can exceed it."""

CHILD = """
import ctypes, importlib, json, os, signal, sys, warnings
warnings.simplefilter("ignore")
import torch

def loaded(module, paths):
    found = {"import": "", "parts": {}}
    try:
        if module:
            importlib.import_module(module)
    except BaseException as error:
        found["import"] = f"{type(error).__name__}: {error}"
    for path in paths:
        try:
            ctypes.CDLL(path)
        except OSError as error:
            found["parts"][path] = str(error)
    return found

patience_s, extensions = json.loads(sys.argv[1])
for module, *paths in extensions:
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        signal.alarm(patience_s)
        os.write(writer, json.dumps(loaded(module, paths)).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        found = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    print("\\n" + json.dumps({"code": code, **json.loads(found or "{}")}), flush=True)
"""
"""Source of a program that imports torch, then each package in a forked process."""

ON_PYTORCHS_INDEX = ("torchvision", "torchaudio", "torchtext", "xformers")
"""Packages of which PyTorch's package indexes have a build for each build of torch."""


@dataclass(frozen=True)
class Extension:
    """An installed package with shared libraries that are linked against torch.

    Attributes:
        package: the package's name, in lower case.
        module: name of the module to import; "" if there is no module with the package's name.
        parts: paths of these shared libraries.
    """

    package: str
    module: str
    parts: tuple[str, ...]


def extensions_part(part: str) -> Finding | None:
    """Check each package that is linked against torch: whether it accepts the version of the installed torch, and
    whether it can be imported. None if there are no such packages. `part` is the name of this check in the doctor's
    report."""
    torch = torch_here()
    extensions = torch_extensions()
    if not extensions:
        return None
    problems, commands = [], []
    for extension, problem in zip(extensions, why_not_loaded(extensions), strict=True):
        if problem:
            problems.append(f"{extension.package} {problem}")
            commands.append(_mending(extension.package, torch.__version__))
    found = ", ".join(f"{extension.package} {version_of(extension.package)}" for extension in extensions)
    if not problems:
        return Finding(part, "works", found)
    return Finding(part, "broken", found, "; ".join(problems), " && ".join(dict.fromkeys(filter(None, commands))))


def torch_extensions() -> list[Extension]:
    """The installed packages with shared libraries that are linked against torch, sorted by name."""
    found = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        if name in ("", "torch") or "torch" not in asked_by(name):
            continue
        files = [str(distribution.locate_file(file)) for file in distribution.files or () if ".so" in file.suffixes]
        linked = tuple(sorted(path for path in files if _is_linked(Path(path))))
        if linked:
            module = name.replace("-", "_")
            found[name] = Extension(name, module if find_spec(module) else "", linked)
    return [found[name] for name in sorted(found)]


def why_not_loaded(extensions: Sequence[Extension]) -> list[str]:
    """Each package's problem with the installed torch, as one line of text; "" if the package has none. Each package is
    imported in a separate process. A package that requires another version of torch is not imported."""
    torch = version_of("torch")
    asked = {each: asked_by(each.package)["torch"] for each in extensions}
    why = {each: f"asks for torch{spec}, and torch is {torch}" for each, spec in asked.items() if not fits(torch, spec)}
    fitting = [each for each in extensions if each not in why]
    words = json.dumps([PATIENCE_S, [[each.module, *each.parts] for each in fitting]])
    if fitting:
        ran = subprocess.run([sys.executable, "-c", CHILD, words], capture_output=True, text=True, errors="replace")
        lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"code": ')]
        if len(lines) != len(fitting):
            raise RuntimeError((ran.stderr.strip().splitlines() or [f"exit status {ran.returncode}"])[-1])
        why |= {each: _problem(found, torch) for each, found in zip(fitting, lines, strict=True)}
    return [why[each] for each in extensions]


def _problem(found: dict[str, Any], torch: str) -> str:
    if found["code"] == -signal.SIGALRM:
        return f"was not imported within {PATIENCE_S} s"
    if found["code"] < 0:
        return f"ends the process that imports it ({signal.Signals(-found['code']).name})"
    if found["code"] or "parts" not in found:
        return f"ends the process that imports it (exit status {found['code']})"
    for path, reason in found["parts"].items():
        if found["import"] or OF_TORCH_OR_CUDA.search(reason):
            return f"does not fit torch {torch}: {Path(path).name} does not load ({_short(reason)})"
    return f"cannot be imported ({_short(found['import'])})" if found["import"] else ""


def _is_linked(path: Path) -> bool:
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return any(content.find(name) >= 0 for name in LINKED)
    except (OSError, ValueError):  # the file is missing or empty
        return False


def _short(reason: str) -> str:
    line = reason.strip().splitlines()[0]
    return line if len(line) <= 200 else f"{line[:200]}..."


def _mending(package: str, torch: str) -> str:
    """The command that installs the right build of a package. It downloads the build that PyTorch's package index has
    for the installed torch, whose version is `torch`. A package that this index lacks is built from source instead."""
    release, _, build = torch.partition("+")
    if package not in ON_PYTORCHS_INDEX:
        return mending.pip(package, options=f"--force-reinstall --no-deps --no-build-isolation --no-binary {package}")
    index = " --index-url INDEX_OF_THIS_TORCH" if build else ""
    if fits(torch, asked_by(package)["torch"]):
        version = version_of(package).partition("+")[0]
        return mending.pip(f"{package}=={version}", options=f"--force-reinstall --no-deps{index}")
    return mending.pip(package, f"torch=={release}", options=f"--upgrade{index}")
