"""Check which parts of the installation (driver, torch, compilers) work, and find a command that fixes each problem.

No table of versions is kept here. Three sources decide which versions fit: the metadata of the installed packages, the
driver through NVML, and tiny test kernels. Each part is checked separately. An error in a check becomes a finding, and
does not stop other checks. No import here needs torch, so the diagnosis can explain why torch is broken.
"""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path

from rooftop.doctor import mending
from rooftop.doctor.findings import Finding, NoTorch, Part, build_of, gpu_usable, reinstall, torch_here
from rooftop.doctor.gpu_findings import cuda_part, cudnn_part, driver_part, gpus_part, library_part, nccl_part
from rooftop.doctor.requirements import asked_by, fits, python_asked_by, version_of
from rooftop.doctor.torch_extensions import extensions_part
from rooftop.errors import MissingExtraError
from rooftop.words import in_a_line


def diagnose(parts: Sequence[Part] | None = None) -> list[Finding]:
    """Check the given parts one after another (None: all parts). The diagnosis takes seconds, runs tiny kernels on the
    GPUs, and changes nothing."""
    findings = []
    for name, check, needed in PARTS if parts is None else parts:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                finding = check(name)
        except NoTorch:
            continue  # this part needs torch, and the finding about torch reports the problem
        except Exception as error:
            finding = Finding(name, "broken", "", in_a_line(error))
        if finding is not None:
            findings.append(replace(finding, needed=needed and finding.needed))
    return findings


def install_kernel() -> str:
    """Register this Python as a Jupyter kernel of the user, named rooftop; return its folder.

    Raises:
        MissingExtraError: ipykernel is not installed.
    """
    try:
        kernelspec = import_module("ipykernel.kernelspec")
    except ImportError as error:
        raise MissingExtraError(f"a Jupyter kernel needs ipykernel: {mending.pip('ipykernel')}") from error
    return str(kernelspec.install(user=True, kernel_name="rooftop", display_name="Rooftop"))


# ---- Python and its packages -------------------------------------------------------------------------------------


def _python(part: str) -> Finding:
    found = f"{platform.python_version()}, {sys.executable}"
    wanted = python_asked_by("rooftop")
    if not fits(platform.python_version(), wanted):
        return Finding(part, "broken", found, f"Rooftop needs Python {wanted}")
    return Finding(part, "works", found)


def _packages(part: str) -> Finding | None:
    """Check the requirements in Rooftop's metadata, except torch, which has a separate line."""
    asked = {name: spec for name, spec in asked_by("rooftop").items() if name != "torch"}
    if not asked:
        return None  # Rooftop is not installed as a package, so its requirements are unknown
    versions = {name: version_of(name) for name in asked}
    wrong = [name for name, spec in asked.items() if not fits(versions[name], spec)]
    found = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    if wrong:
        problem = "; ".join(
            f"{name} is {versions[name] or 'not installed'}{f', needed: {asked[name]}' if asked[name] else ''}"
            for name in wrong
        )
        return Finding(part, "broken", found, problem, mending.pip(*(f"{name}{asked[name]}" for name in wrong)))
    return Finding(part, "works", found)


def _torch_itself(part: str) -> Finding:
    wanted = "torch" + asked_by("rooftop").get("torch", "")
    version = version_of("torch")
    try:
        torch = torch_here()
    except NoTorch as error:
        if not version:
            return Finding(part, "broken", "not installed", in_a_line(error.__cause__), mending.pip(wanted))
        reason = in_a_line(error.__cause__)
        command = mending.driver() if "libcuda." in reason else reinstall("torch")
        return Finding(part, "broken", version, reason, command)
    found = f"{torch.__version__}, {build_of(torch)}"
    if not fits(version, wanted.removeprefix("torch")):
        return Finding(part, "broken", found, f"Rooftop needs {wanted}", mending.pip(wanted, options="--upgrade"))
    return Finding(part, "works", found)


def _package(part: str, module: str, package: str, extra: str = "", gpu_only: bool = False) -> Finding | None:
    """Check that an optional package can be imported, and that its version fits Rooftop's metadata. `extra` is the
    extra of Rooftop that requires the package; "" if none does, and then any version fits. With `gpu_only`, return None
    if no GPU is usable.
    """
    if gpu_only and not gpu_usable():
        return None
    version, spec = version_of(package), asked_by("rooftop", extra).get(package, "")
    install = mending.pip(f"rooftop[{extra}]" if extra else package)
    if not version:
        return Finding(part, "absent", "not installed", command=install)
    found = f"{package} {version}"
    if not fits(version, spec):
        return Finding(part, "broken", found, f"Rooftop asks for {package}{spec}", install)
    try:
        import_module(module)
    except Exception as error:
        return Finding(part, "broken", found, in_a_line(error), reinstall(package))
    return Finding(part, "works", found)


# ---- compilers ---------------------------------------------------------------------------------------------------


def _c_compiler(part: str) -> Finding:
    """Check the C compiler with which Triton builds launchers. Like Triton, try $CC, then gcc, then clang."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang") or ""
    return _compiler(part, "c", "CC", compiler, "Triton on a GPU needs a C compiler", needed=gpu_usable())


def _cpp_compiler(part: str) -> Finding:
    """Check the C++ compiler with which torch.compile builds CPU kernels. Like torch, try $CXX, then g++."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or ""
    return _compiler(part, "c++", "CXX", compiler, "torch.compile on the CPU needs a C++ compiler", needed=False)


def _compiler(part: str, language: str, variable: str, compiler: str, use: str, needed: bool) -> Finding:
    """Compile a one-line Python extension, which needs a working compiler and Python's headers."""
    broken = partial(Finding, part, "broken", needed=needed)
    missing = broken if needed else partial(Finding, part, "absent")
    if not compiler:
        return missing("no compiler found", use, mending.system_package(language))
    scheme = sysconfig.get_default_scheme()  # Debian's scheme posix_local names a folder without headers
    include = sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "empty.c")
        source.write_text("#include <Python.h>\n")
        words = ["-x", language, "-shared", "-fPIC", f"-I{include}", str(source), "-o", f"{folder}/empty.so"]
        try:
            version = _run(compiler, "--version").stdout.partition("\n")[0].strip()
            built = _run(compiler, *words)
        except (OSError, subprocess.TimeoutExpired) as error:
            command = f"unset {variable}" if variable in os.environ else mending.system_package(language)
            return broken(compiler, in_a_line(error), command)
    if built.returncode == 0:
        return Finding(part, "works", version or compiler)
    if "Python.h" in built.stderr:
        return missing(version, f"{use}, with Python's headers in {include}", mending.system_package("headers"))
    errors = [line for line in built.stderr.splitlines() if "error" in line] or built.stderr.splitlines()[-1:]
    return broken(version, errors[0] if errors else "it fails without a message", mending.system_package(language))


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=60)


def _triton(part: str) -> Finding:
    """Check that Triton has the version that torch's metadata requires or, if torch requires no Triton, Rooftop's. On a
    GPU, also run a tiny kernel."""
    asked = [(name, spec) for name, spec in asked_by("torch").items() if "triton" in name]
    name, spec = asked[0] if asked else ("triton", asked_by("rooftop", extra="triton").get("triton", ""))
    asker = "torch" if asked else "Rooftop"
    version = version_of(name)
    if not version:
        if not asked and not gpu_usable():
            return Finding(part, "absent", "not installed", command=mending.pip("rooftop[triton]"))
        return Finding(part, "broken", "not installed", f"{asker} asks for {name}{spec}", mending.pip(name + spec))
    found = f"{name} {version}"
    if not fits(version, spec):
        command = mending.pip(name + spec, options="--force-reinstall")
        return Finding(part, "broken", found, f"{asker} asks for {name}{spec}", command)
    ended = _ended_by_importing("triton")
    if ended:
        return Finding(part, "broken", found, ended, reinstall(name))
    try:
        import_module("triton")
    except Exception as error:
        return Finding(part, "broken", found, in_a_line(error), reinstall(name))
    found += ", as torch asks" if asked else ""
    if not gpu_usable():
        return Finding(part, "works", f"{found}; TRITON_INTERPRET=1 runs its kernels on the CPU")
    try:
        total = _triton_kernel()
    except Exception as error:
        command = mending.as_root("ldconfig") if "libcuda" in str(error) else ""
        return Finding(part, "broken", found, in_a_line(error), command)
    if total != 192:
        return Finding(part, "broken", found, f"a kernel wrote {total}, not 192", reinstall(name))
    interpreted = " in its interpreter" if os.environ.get("TRITON_INTERPRET") == "1" else ""
    return Finding(part, "works", f"{found}; a kernel ran{interpreted}")


def _ended_by_importing(module: str) -> str:
    """Import a module in another process. If the import crashes that process, return a text that names the signal;
    otherwise return ""."""
    code = subprocess.run([sys.executable, "-c", f"import {module}"], capture_output=True).returncode
    return f"importing it ends the process ({signal.Signals(-code).name})" if code < 0 else ""


def _triton_kernel() -> float:
    """Run a kernel that sets 64 elements to 3, and return their sum."""
    kernels = import_module("rooftop.hardware.bandwidth_kernels")
    target = torch_here().zeros(64, device="cuda")
    kernels.write(target, 3.0)
    return float(target.sum())


def _compile(part: str) -> Finding:
    """Check torch.compile, which needs Triton on the GPU and a C++ compiler on the CPU."""
    on_gpu, cpp = torch_here().cuda.is_available(), _cpp_compiler(part)
    triton = _triton(part) if on_gpu else None
    if triton is not None and triton.status != "works":
        return triton
    builders = [f"{triton.found} for the GPU"] if triton is not None else []
    if cpp.status == "works":
        builders.append(f"{cpp.found} for the CPU")
    return Finding(part, "works", "; ".join(builders)) if builders else cpp


def _compiled_calls(part: str) -> Finding | None:
    """If a GPU is usable, check the C++ extension of `launch.repeated_calls`. Once Python has made a few calls of a
    function with the same shapes, dtypes and so on, the extension makes further such calls without Python."""
    if not gpu_usable():
        return None
    usable, found = import_module("rooftop.launch.repeated_calls").state()
    if usable:
        return Finding(part, "works", found)
    return Finding(part, "absent", f"{found}, so Python makes each call, which takes some 3 times as long")


def _page_reader(part: str) -> Finding | None:
    """Check the C++ extension that reads the pages of streamed scenes, if scenes can be rendered here."""
    if not version_of("warp-lang"):
        return None
    usable, found = import_module("rooftop.scene.streaming.page_reader").extension.state()
    if usable:
        return Finding(part, "works", found)
    return Finding(part, "absent", f"{found}, so Python reads the pages of streamed scenes, which delays frames")


# ---- optional parts ----------------------------------------------------------------------------------------------


def _jupyter(part: str) -> Finding:
    install = "rooftop doctor --install-kernel"
    version = version_of("ipykernel")
    if not version:
        return Finding(part, "absent", "ipykernel is not installed", "", f"{mending.pip('ipykernel')} && {install}")
    try:
        import_module("ipykernel.kernelspec")
        specs = import_module("jupyter_client.kernelspec")
    except Exception as error:
        return Finding(part, "broken", f"ipykernel {version}", in_a_line(error), reinstall("ipykernel"))
    try:
        spec = specs.KernelSpecManager().get_kernel_spec("rooftop")
    except specs.NoSuchKernel:
        return Finding(part, "absent", f"ipykernel {version}, no kernel named rooftop", "", install)
    if spec.argv[0] != sys.executable:
        return Finding(part, "absent", f"the kernel named rooftop runs {spec.argv[0]}, not this Python", "", install)
    return Finding(part, "works", f"ipykernel {version}, kernel rooftop in {spec.resource_dir}")


# ---- folders -----------------------------------------------------------------------------------------------------

SMALL_SHARED_MEMORY_BYTES = 256 << 20
"""Less shared memory than this is reported. One DataLoader worker keeps two batches in shared memory. Two batches of
128 float32 images (3, 224, 224) take 147 MiB.
"""

SHARED_MEMORY = Path("/dev/shm")


def _cache(part: str) -> Finding:
    """Check that the folder of the cached ceilings is writable. If the folder does not exist, check its nearest parent
    that exists.
    """
    torch_here()  # the cache's module imports torch
    folder: Path = import_module("rooftop.hardware.measuring").cache_path(("",)).parent
    nearest = next(each for each in (folder, *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        problem = f"cannot be written ({error.strerror}), so ceilings are measured again each time"
        return Finding(part, "broken", str(folder), problem, 'export ROOFTOP_CACHE="$(mktemp -d)"')
    return Finding(part, "works", str(folder))


def _shared_memory(part: str) -> Finding | None:
    """Check the shared memory through which DataLoader workers pass batches."""
    if not SHARED_MEMORY.exists():
        return None
    total = shutil.disk_usage(SHARED_MEMORY).total
    found = f"{total / (1 << 20):,.0f} MiB in {SHARED_MEMORY}"
    if total >= SMALL_SHARED_MEMORY_BYTES:
        return Finding(part, "works", found)
    engine = mending.container()
    command = (
        f"{engine} run --shm-size=8g ..." if engine else mending.as_root(f"mount -o remount,size=8G {SHARED_MEMORY}")
    )
    return Finding(part, "broken", found, "too small for the batches of DataLoader workers", command)


PARTS: tuple[Part, ...] = (
    Part("Python", _python),
    Part("Packages", _packages),
    Part("torch", _torch_itself),
    Part("NVIDIA driver", driver_part),
    Part("CUDA", cuda_part),
    Part("GPUs", gpus_part),
    Part("cuDNN", cudnn_part),
    Part("NCCL", nccl_part),
    Part("C compiler", _c_compiler),
    Part("Triton", _triton),
    Part("torch.compile", _compile, needed=False),
    Part("Compiled calls", _compiled_calls, needed=False),
    Part("Compiled reads", _page_reader, needed=False),
    Part("Built on torch", extensions_part, needed=False),
    Part("Ceilings cache", _cache, needed=False),
    Part("Shared memory", _shared_memory, needed=False),
    Part("cuda.core", partial(_package, module="cuda.core", package="cuda-core", extra="cuda"), needed=False),
    Part("Charts", partial(_package, module="plotly", package="plotly", extra="report"), needed=False),
    Part("Jupyter kernel", _jupyter, needed=False),
    Part("Warp", partial(_package, module="warp", package="warp-lang", extra="sparse"), needed=False),
    *(
        Part(name, partial(_package, module=name, package=name, extra="scene"), needed=False)
        for name in ("trimesh", "meshoptimizer", "numba")
    ),
    Part("NVDEC", partial(library_part, name="libnvcuvid.so.1"), needed=False),
    Part("NVENC", partial(library_part, name="libnvidia-encode.so.1"), needed=False),
    Part(
        "PyNvVideoCodec",
        partial(_package, module="PyNvVideoCodec", package="PyNvVideoCodec", gpu_only=True),
        needed=False,
    ),
    Part("PyAV", partial(_package, module="av", package="av", extra="media"), needed=False),
    Part("simplejpeg", partial(_package, module="simplejpeg", package="simplejpeg", extra="media"), needed=False),
    Part("pyarrow", partial(_package, module="pyarrow", package="pyarrow", extra="cluster"), needed=False),
)
