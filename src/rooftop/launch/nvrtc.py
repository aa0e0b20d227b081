"""Compile CUDA C++ to machine code with NVRTC (`cuda.core`), without a GPU, and only once per source.

Binaries are stored under `$ROOFTOP_CACHE/kernels`, or in the user's cache if ROOFTOP_CACHE is not set. A binary's file
name is the SHA-256 of all inputs that the binary depends on: source, name, options, architecture, and the versions of
NVRTC and of the CUDA headers.
"""

from __future__ import annotations

import ctypes
import hashlib
import io
import json
import re
import warnings
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from rooftop.errors import CompilationError, MissingExtraError
from rooftop.launch.kernel_arguments import parameter_types
from rooftop.whole_files import whole_file

FORMAT = 1  # version of the file format

# The mangled name of this function contains the types of the kernel's parameters, even if the kernel is extern "C".
SIGNATURE = "\ntemplate <class Kernel> __global__ void rooftop_signature() {}\n"


@dataclass(frozen=True)
class Options:
    """Compiler options of a source.

    Attributes:
        arch: sm_90, sm_90a, ...
        defines: macros, as (name, value).
        fast_math: approximate division, roots and transcendental functions, and flush denormals to zero.
        fused_multiply_add: allow the compiler to fuse a product and a sum into one operation, which rounds once.
        max_registers: maximum number of registers of a thread; None lets the compiler choose.
    """

    arch: str
    defines: tuple[tuple[str, str], ...] = ()
    fast_math: bool = False
    fused_multiply_add: bool = True
    max_registers: int | None = None


@dataclass(frozen=True)
class Binary:
    """A compiled kernel.

    Attributes:
        name: the requested name, such as `scale<float>`.
        arch: sm_90, ...
        symbol: the kernel's name in the cubin.
        types: C++ types of the kernel's parameters.
        registers: registers of a thread. `registers`, `static_shared_bytes`, `stack_bytes` and `spill_bytes` are None
            if the installed NVRTC does not report them.
        static_shared_bytes: static shared memory of a block; a launch may request dynamic shared memory in addition.
        stack_bytes, spill_bytes: bytes of local memory of a thread, and bytes of that memory for spilled registers.
        log: the compiler's messages: warnings, resources.
        cubin: the machine code.
    """

    name: str
    arch: str
    symbol: str
    types: tuple[str, ...]
    registers: int | None
    static_shared_bytes: int | None
    stack_bytes: int | None
    spill_bytes: int | None
    log: str
    cubin: bytes


def binary(source: str, name: str, options: Options) -> Binary:
    """Compile one kernel to machine code, or read it from the cache on disk.

    Raises:
        CompilationError: the compiler failed; the message has the compiler's log and the line of the source.
        MissingExtraError: `cuda.core`, NVRTC or a header that the source includes is not installed.
        ValueError: this NVRTC does not know the architecture.
    """
    _check_arch(options.arch)
    path = _folder() / f"{_key(source, name, options)}.kernel"
    found = _load(path)
    if found is None:
        found = _compile(source, name, options)
        _save(found, path)
    return found


def ptx(source: str, name: str, options: Options) -> str:
    """Compile a kernel to PTX, for a reader of the PTX. The PTX is never cached.

    Raises:
        CompilationError, MissingExtraError, ValueError: as in `binary`.
    """
    _check_arch(options.arch)
    from cuda.bindings import nvrtc

    # NVRTC is called directly: `cuda.core` would warn if the driver could not load the PTX, but nothing here loads it.
    settings = _settings(name, replace(options, arch=options.arch.replace("sm_", "compute_")))
    arguments = settings.as_bytes("nvrtc")
    (program,) = _nvrtc("nvrtcCreateProgram", source.encode(), b"%s.cu" % _function(name).encode(), 0, [], [])
    try:
        _nvrtc("nvrtcAddNameExpression", program, name.encode())
        (status,) = nvrtc.nvrtcCompileProgram(program, len(arguments), arguments)
        if int(status) != 0:
            raise _failure(source, name, _filled("nvrtcGetProgramLog", program))
        return _filled("nvrtcGetPTX", program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _filled(function: str, program: Any) -> str:
    """Return the text that the NVRTC function `function` writes to a buffer. The size of the buffer comes from a second
    NVRTC function.
    """
    (size,) = _nvrtc(f"{function}Size", program)
    text = b" " * size
    _nvrtc(function, program, text)
    return text.decode().rstrip("\0")


def version() -> tuple[int, int]:
    """NVRTC's version.

    Raises:
        MissingExtraError: NVRTC is not installed.
    """
    major, minor = _nvrtc("nvrtcVersion")
    return int(major), int(minor)


# ---- the compiler ------------------------------------------------------------------------------------------------


def _compile(source: str, name: str, options: Options) -> Binary:
    of_signature = f"rooftop_signature<decltype(&{name})>"
    compiled, log = _run(source + SIGNATURE, name, options, (name, of_signature))
    # compile times are removed, so that compiling the same source again returns the same log
    log = re.sub(r"ptxas info *: Compile time.*\n", "", log)
    symbols = {key: _text(symbol) for key, symbol in compiled.symbol_mapping.items()}
    types = parameter_types(_demangled(symbols[of_signature]))
    resources = _resources(log, symbols[name])
    return Binary(name, options.arch, symbols[name], types, **resources, log=log, cubin=bytes(compiled.code))


def _run(source: str, name: str, options: Options, names: tuple[str, ...]) -> tuple[Any, str]:
    """Run the compiler, and return (object code of `cuda.core`, the compiler's log)."""
    core, log = require_cuda_core(), io.StringIO()
    settings = _settings(name, options, ptxas_options=["-v"])
    try:
        compiled = core.Program(source, "c++", settings).compile("cubin", name_expressions=names, logs=log)
    except Exception as error:
        if type(error).__name__ != "NVRTCError":  # cuda.core does not export its error class
            raise
        raise _failure(source, name, str(error)) from None
    return compiled, log.getvalue()


def _settings(name: str, options: Options, **more: Any) -> Any:
    return require_cuda_core().ProgramOptions(
        name=f"{_function(name)}.cu",
        arch=options.arch,
        std="c++17",
        define_macro=list(options.defines) or None,
        use_fast_math=options.fast_math or None,
        fma=options.fused_multiply_add,
        max_register_count=options.max_registers,
        include_path=list(header_folders()) or None,
        **more,
    )


def _failure(source: str, name: str, message: str) -> Exception:
    """The most helpful error: a missing package, a missing kernel, or the first line that does not compile."""
    log = message.partition("compilation log:")[2].strip("\n\0 ") or message
    header = re.search(r'(?:could not|cannot) open source file "([^"]+)"', log)
    if header:
        return _missing_header(name, header[1])
    first = re.search(r"^\w+\.cu\((\d+)\): (?:catastrophic )?error: (.*)", log, re.MULTILINE)
    if first and int(first[1]) <= source.count("\n") + 1:
        return CompilationError(f"kernel {name} does not compile: line {first[1]}: {first[2]}\n{log}")
    there = re.findall(r"__global__[\w\s()]*?\b(\w+)\s*\(", source.removesuffix(SIGNATURE))
    if _function(name) not in there:
        return CompilationError(f"kernel {name} is not in the source, whose kernels are {', '.join(there) or 'none'}")
    of_name = re.search(r"^__nv_name_map\(\d+\): error: (.*)", log, re.MULTILINE)
    return CompilationError(f"kernel {name} does not compile{f': {of_name[1]}' if of_name else ''}\n{log}")


def _resources(log: str, symbol: str) -> dict[str, int | None]:
    """The registers and the bytes of shared memory, stack and spills of one kernel, from the compiler log `log` of
    ptxas. A number is None if the log does not report the kernel.
    """
    report = log.partition(f"entry function '{symbol}'")[2].partition("entry function")[0]

    def found(pattern: str, default: int | None) -> int | None:
        numbers = re.search(pattern, report)
        return int(numbers[1]) if numbers else default

    registers = found(r"Used (\d+) registers", None)
    none = None if registers is None else 0  # ptxas omits unused resources
    spilled = found(r"(\d+) bytes spill stores", none)
    stack = found(r"(\d+) bytes stack frame", none)
    shared = found(r"(\d+) bytes smem", none)
    return {"registers": registers, "static_shared_bytes": shared, "stack_bytes": stack, "spill_bytes": spilled}


def _demangled(symbol: str) -> str:
    """Demangle a name with the C++ library that PyTorch loads."""
    demangle = ctypes.CDLL("libstdc++.so.6").__cxa_demangle
    demangle.restype = ctypes.c_void_p
    demangle.argtypes = [ctypes.c_char_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    address = demangle(symbol.encode(), None, None, None)
    text = ctypes.string_at(address).decode()
    free = ctypes.CDLL(None).free
    free.argtypes = [ctypes.c_void_p]
    free(address)
    return text


def _function(name: str) -> str:
    """The plain name of a function, such as `scale` for `filters::scale<float>`."""
    return re.sub(r"\W", "", name.partition("<")[0].rpartition("::")[2])


def _text(symbol: str | bytes) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else symbol


def _check_arch(arch: str) -> None:
    known = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if known is None or int(known[1]) not in _architectures():
        listed = ", ".join(f"sm_{each}" for each in _architectures())
        raise ValueError(f"NVRTC {'.'.join(map(str, version()))} compiles for {listed}; got {arch!r}")


@cache
def _architectures() -> tuple[int, ...]:
    return tuple(_nvrtc("nvrtcGetSupportedArchs")[0])


# ---- required packages --------------------------------------------------------------------------------------


def require_cuda_core() -> Any:
    """Import and return the package `cuda.core`.

    Raises:
        MissingExtraError: `cuda.core` cannot be imported, or is older than 0.5.
    """
    try:
        import cuda.core as core

        core.Program, core.LaunchConfig, core.launch  # noqa: B018 (before 0.5 they were elsewhere)
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            f'CUDA C++ kernels need cuda.core 0.5 or newer: pip install "rooftop[cuda]" ({error})'
        ) from error
    return core


def _nvrtc(function: str, *arguments: Any) -> list[Any]:
    """Call a function of NVRTC, and return its results."""
    require_cuda_core()
    from cuda.bindings import nvrtc
    from cuda.pathfinder import DynamicLibNotFoundError

    try:
        status, *results = getattr(nvrtc, function)(*arguments)
    except DynamicLibNotFoundError as error:
        raise MissingExtraError(f"NVRTC is not installed: pip install {_package('nvidia-cuda-nvrtc')}") from error
    if int(status) != 0:
        raise CompilationError(f"{function} failed: {status}")
    return results


def _package(name: str) -> str:
    """The name of a wheel for the CUDA version of the Python bindings. Since CUDA 13, wheels' names have no version
    suffix.
    """
    from importlib.metadata import version as installed

    major = int(installed("cuda-bindings").partition(".")[0])
    return f'"{name}=={major}.*"' if major >= 13 else f"{name}-cu{major}"


HEADER_PACKAGES = (  # header, its library's name in `cuda.pathfinder`, wheel
    (r"cuda/|cub/|thrust/|nv/", "cccl", "nvidia-cuda-cccl"),
    (r"curand", "curand", "nvidia-curand"),
    (r"cuda|cooperative_groups|mma\.h|vector_|crt/|sm_", "cudart", "nvidia-cuda-runtime"),
)


def _missing_header(name: str, header: str) -> Exception:
    for pattern, library, package in HEADER_PACKAGES:
        if re.match(pattern, header):
            folder = _header_folder(library)
            if folder is None:
                return MissingExtraError(f"kernel {name} includes {header}: pip install {_package(package)}")
            return CompilationError(f"kernel {name} includes {header}, which is not in {folder}")
    return CompilationError(
        f"kernel {name} includes {header}, which is neither a CUDA header nor in NVRTC: mathematical functions need "
        "no include; types and limits of the C++ library are in <cuda/std/...>"
    )


@cache
def header_folders() -> tuple[str, ...]:
    """The existing folders of the CUDA headers, from wheels, conda, or a toolkit."""
    found = (_header_folder(library) for _, library, _ in reversed(HEADER_PACKAGES))
    return tuple(dict.fromkeys(folder for folder in found if folder is not None))


def _header_folder(library: str) -> str | None:
    require_cuda_core()
    from cuda.pathfinder import find_nvidia_header_directory

    folder: str | None = find_nvidia_header_directory(library)
    return folder


@cache
def _headers_version() -> tuple[str, ...]:
    versions: list[str] = []
    for folder in header_folders():
        header = Path(folder) / "cuda.h"
        text = header.read_text(encoding="utf-8", errors="replace") if header.is_file() else ""
        versions += [folder, *re.findall(r"#define CUDA_VERSION (\d+)", text)]
    return tuple(versions)


# ---- the cache on disk -------------------------------------------------------------------------------------------


def _folder() -> Path:
    from rooftop.hardware.measuring import cache_folder

    return cache_folder() / "kernels"


def _key(source: str, name: str, options: Options) -> str:
    parts = (FORMAT, source, name, asdict(options), version(), _headers_version())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _save(binary: Binary, path: Path) -> None:
    """Write a file: one line of JSON with all attributes except the machine code, followed by the machine code."""
    about = asdict(binary)
    cubin = about.pop("cubin")
    about["sha256"] = hashlib.sha256(cubin).hexdigest()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:  # two processes may compile the same kernel
            partial.write_bytes(json.dumps(about).encode() + b"\n" + cubin)
    except OSError as error:
        warnings.warn(
            f"kernel {binary.name} could not be stored in {path.parent} ({error.strerror or error}) and will be "
            "compiled again next time: set ROOFTOP_CACHE to a writable folder",
            stacklevel=2,
        )


def _load(path: Path) -> Binary | None:
    """Read a stored binary; None if the file is missing or damaged."""
    try:
        about, _, cubin = path.read_bytes().partition(b"\n")
        fields = json.loads(about)
        if hashlib.sha256(cubin).hexdigest() != fields.pop("sha256"):
            return None
        return Binary(**fields | {"types": tuple(fields["types"]), "cubin": cubin})
    except (OSError, ValueError, KeyError, TypeError):
        return None
